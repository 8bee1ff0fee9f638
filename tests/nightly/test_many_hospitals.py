"""Twenty hospitals over a folder, of which three never come and others come and go; sixty-four in one process."""

import json
import time

import pytest
from conftest import make_study
from test_folder_line import BASE, Group, charged, start

from wsi_fl.stages.training.train import train

pytestmark = pytest.mark.slow
MANY = tuple(f"H{k:02d}" for k in range(20))
ROUNDS = 6
SETTINGS = [f"train.rounds={ROUNDS}", *BASE[1:3], "comm.timeout_s=90", "train.at_least=10"]


def test_three_of_twenty_never_come_and_others_come_and_go(tmp_path, federation):
    share = tmp_path / "share"
    share.mkdir()
    group = Group(tmp_path / "group", "proxyfl", SETTINGS, federation, share, sites=MANY)
    group.jobs = group.jobs[:17]
    for k, job in enumerate(group.jobs):
        job["begins_s"] = k % 5
        if k in (4, 11):  # their machines are started anew
            job |= {"kill": {"where": "_communicate", "round": 2 + k % 2}, "back_s": 5}
    began = time.monotonic()
    start(tmp_path, [group])
    print(f"{time.monotonic() - began:.0f} s")
    for site in MANY[:17]:
        summary = group.result(site)
        assert summary["lost"] == list(MANY[17:])
        reasons = [loss["reason"] for loss in summary["losses"]]
        assert all("did not answer for 90 s" in one or one == "gone, as other sites say" for one in reasons)
        assert [round_ for round_, _ in charged(group.study(site), site)] == list(range(1, ROUNDS + 1))
        assert [row["attended"] for row in summary["sites"]] == [[[1, ROUNDS]]] * 17
    print(json.dumps(summary["communication"]), sum(f.stat().st_size for f in share.rglob("*.letter")))


@pytest.mark.parametrize("n", [8, 64])
def test_sixty_four_in_one_process(tmp_path, n):
    study = make_study(tmp_path, n)
    began = time.monotonic()
    summary = train(study, method="proxyfl", overrides=["train.rounds=3", "privacy.sigma=4"], backend="local")
    seconds = time.monotonic() - began
    assert len(summary["sites"]) == n and summary["lost"] == []
    assert summary["communication"]["messages"] == 3 * n
    print(f"{n} sites: {seconds:.1f} s, {summary['communication']}")
