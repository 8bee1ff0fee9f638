"""Hospitals over a folder suffer random faults and resume without help; and withdrawals during a run."""

import json
import os
import re
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from conftest import metrics, refused
from federation_fixtures import Federation
from hospitals import Earlier
from test_folder_transport import BASE, SITES, Group, charged, meddling, note, plan_of, require_the_same, start

from wsi_fl.hospitals.plans.preapproval import FORMAT, revoke_preapproval, write_preapproval
from wsi_fl.hospitals.plans.signed_plan import record_approval
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.certificates import (
    build_request,
    extend_revocation_list,
    issue_certificate,
    key_fingerprint,
    verify_certificate,
)
from wsi_fl.hospitals.trust.kit import REVOCATIONS_FILE, Kit
from wsi_fl.hospitals.work.start import take_part_by_folder

pytestmark = pytest.mark.slow
SECONDS, ROUNDS = float(os.environ.get("WSI_FL_FAULT_SECONDS", "100")), 25
SETTINGS = [f"train.rounds={ROUNDS}", *BASE[1:3], "comm.timeout_s=10"]
LETTER = re.compile(r"(\w+)~x(\d+)\.\d+~")


@contextmanager
def watched(share, do):
    """Act on every sealed message in a share within the context; it may vanish meanwhile."""
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            with suppress(OSError):  # the share is away
                meddling(share, do, stop)

    owner = threading.Thread(target=watch, daemon=True)
    owner.start()
    yield
    stop.set()
    owner.join()


def left_by(seen):
    """(site, round) of each release that was visible in a share."""
    return {(found[1], int(found[2])) for name in seen if (found := LETTER.match(name))}


@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("what", ["frame", "certificate"])
def test_a_withdrawal_during_a_run_ends_it_at_the_next_round(tmp_path, federation, what, least):
    """The hospital sends nothing more; the others continue if the plan allows it, or end in one line."""
    rounds = 8
    settings = [f"train.rounds={rounds}", *BASE[1:3], "comm.timeout_s=20"]
    settings += [f"train.min_sites={least}"] * bool(least)
    group = Group(tmp_path / "group", "proxyfl", settings, federation)
    study, kit = group.study("S1"), Kit.open(group.root / "kit-S1")
    limits = {
        "epsilon": 5000.0,
        "runs": 1,
        "until": "2099-01-31",
        "allows": {"delta": [1e-5], "code": []},
        "settings": {},
    }
    frame = {"format": FORMAT, "id": "f" * 32, "site": "S1", **limits}
    write_preapproval(study, frame, kit.load_identity())
    record_approval(study, plan_of(study, "proxyfl", settings), kit.load_identity(), frame)
    for job in group.jobs:
        job["slow_s"] = 1.0
    seen, ended = {}, []

    def do(path):
        found = LETTER.match(path.name)
        if not ended and found and found[1] == "S1" and int(found[2]) >= 2:
            ended.append(int(found[2]))
            if what == "frame":
                revoke_preapproval(study, kit.load_identity())
            else:
                key = kit.load_identity().certificate
                more = {verify_certificate(key, federation.root).number: key_fingerprint(key)}
                (group.share / REVOCATIONS_FILE).write_text(
                    extend_revocation_list(federation.root, federation.key, more)
                )
        return note(seen, path)

    with watched(group.share, do):
        start(tmp_path, [group])
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
def test_after_random_faults_the_run_ends_with_all_sites_and_ledgers_hold_every_release(
    tmp_path, monkeypatch, seed, least
):
    """Where all sites are needed none is left out, and the models are those of an undisturbed run."""
    settings = [*SETTINGS, f"train.min_sites={least}"]
    with monkeypatch.context() as patch:  # certificates that a clock that is days behind knows too
        patch.setattr(certificates, "datetime", Earlier)
        federation = Federation()
        group = Group(tmp_path / "group", "proxyfl", settings, federation)
        for job, site in zip(group.jobs, SITES, strict=True):
            job["slow_s"] = 1.0
            startup = group.root / f"kit-{site}" / "startup"
            asked, ends = build_request((startup / "client.key").read_text(), site, "org"), {"days": 99}
            ended = issue_certificate(asked, federation.key, federation.root, role="hospital", **ends)
            (startup / "ended.crt").write_text(ended)
    faults, seen = {"seed": seed, "seconds": SECONDS, "share": str(group.share)}, {}
    group.jobs = {"jobs": group.jobs, "faults": faults}
    with watched(group.share, partial(note, seen)):
        suffered = start(tmp_path, [group])
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
        require_the_same(group)
