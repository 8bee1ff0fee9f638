"""Hospitals over a folder suffer random faults and resume without help; and withdrawals during a run."""

import json
import os
import re
from collections import Counter
from functools import partial

import pytest
from conftest import metrics, refused
from hospitals import BASE, SITES, Bed, Earlier, charged, one_installation, start  # noqa: F401
from test_folder_transport import note, owner_at

from wsi_fl.hospitals.plans.preapproval import revoke_preapproval
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.root_ca import revoke_site
from wsi_fl.hospitals.work.start import take_part_by_folder

pytestmark = pytest.mark.slow
SECONDS, ROUNDS = float(os.environ.get("WSI_FL_FAULT_SECONDS", "100")), 25
LETTER = re.compile(r"(\w+)~x(\d+)\.\d+~")


def left_by(seen):
    """(site, round) of each release that was visible in a share."""
    return {(found[1], int(found[2])) for name in seen if (found := LETTER.match(name))}


@pytest.fixture
def group(tmp_path):
    """Hospitals whose certificates a clock that is days behind knows too, and whose rounds take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "datetime", Earlier)
        group = Bed(tmp_path, 3, folder=str(tmp_path / "share"))
    for job in group.jobs:
        job["slow_s"] = 1.0
    return group


@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("what", ["frame", "certificate"])
def test_a_withdrawal_during_a_run_ends_it_at_the_next_round(group, what, least):
    """The hospital sends nothing more; the others continue if the plan allows it, or end in one line."""
    rounds = 8
    settings = [f"train.rounds={rounds}", BASE[1], "comm.timeout_s=20"] + [f"train.min_sites={least}"] * bool(least)
    plan = group.sign("proxyfl", *settings, by=["S0", "S2"])
    (group.share / "plan.json").write_text(plan.text)
    group.preapprove("S1", plan)
    study, kit, seen, ended = group.study("S1"), group.kit("S1"), {}, []

    def do(path):
        found = LETTER.match(path.name)
        if not ended and found and found[1] == "S1" and int(found[2]) >= 2:
            ended.append(int(found[2]))
            if what == "frame":
                revoke_preapproval(study, kit.load_identity())
            else:
                revoke_site("S1", group.root / "kits")
        return note(seen, path)

    with owner_at(group.share, do):
        start(group.root, [group.jobs])
    said = {site: json.loads((group.root / site / "result.json").read_text()) for site in SITES}
    lost = "site S1 has a certificate that was withdrawn on"
    withdrew = (
        "site S1 withdrew the standing approval of this plan; the run ends here",
        "site S1 withdrew its approval",
    )
    mine, theirs = withdrew if what == "frame" else (lost, lost)
    assert mine in said["S1"]["error"]
    # charged before it is sent; the list is read every few seconds
    paid = [round_ for round_, _ in charged(study, "S1")]
    assert paid == list(range(1, len(paid) + 1))
    assert {round_ for site, round_ in left_by(seen) if site == "S1"} <= set(paid)
    assert len(paid) <= {"frame": ended[0] + 1, "certificate": rounds - 1}[what]
    if least is None:
        assert all(theirs in said[site]["error"] for site in ("S0", "S2"))
    else:
        for site in ("S0", "S2"):
            assert said[site]["summary"]["lost"] == ["S1"]
            assert [round_ for round_, _ in charged(group.study(site), site)] == list(range(1, rounds + 1))
        reasons = [loss["reason"] for site in ("S0", "S2") for loss in said[site]["summary"]["losses"]]
        assert any(theirs in reason for reason in reasons), reasons
    refused(lambda: take_part_by_folder(study, kit), "withdr")


@pytest.mark.parametrize(("seed", "least"), [(1, 2), (2, 2), (3, 3), (4, 3)])
def test_after_random_faults_the_run_ends_with_all_sites_and_ledgers_hold_every_release(group, seed, least):
    """Where all sites are needed none is left out, and the models are those of an undisturbed run."""
    settings = (f"train.rounds={ROUNDS}", BASE[1], "comm.timeout_s=10", f"train.min_sites={least}")
    group.sign("proxyfl", *settings)
    group.write_ended_certificates()
    faults, seen = {"seed": seed, "seconds": SECONDS, "share": str(group.share)}, {}
    with owner_at(group.share, partial(note, seen)):
        suffered = start(group.root, [{"jobs": group.jobs, "faults": faults}])
    print(f"{len(suffered)} faults: {Counter(suffered)}")
    assert len(suffered) > SECONDS / 12
    left = left_by(seen)
    for site in SITES:
        assert group.result(site)["lost"] == []
        paid = [round_ for round_, _ in charged(group.study(site), site)]
        assert paid == sorted(set(paid)), "a round was charged twice"
        assert {round_ for name, round_ in left if name == site} <= set(paid)
        assert metrics(group.run(site), site)[-1]["round"] == ROUNDS
    assert sum(len(charged(group.study(site), site)) == ROUNDS for site in SITES) >= 1
    if least == len(SITES):
        group.require_the_same("proxyfl", *settings)
