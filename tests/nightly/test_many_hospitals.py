"""Twenty hospitals over a folder, with three missing or a tenth absent in each round; sixty-four in one process."""

import random
from functools import partial

import pytest
from conftest import make_study
from hospitals import BASE, Bed, charged, one_installation, start  # noqa: F401
from test_folder_faults import left_by
from test_folder_transport import note, owner_at

from wsi_fl.stages.training.train import train

pytestmark = pytest.mark.slow
ROUNDS = 6


@pytest.fixture
def group(tmp_path):
    return Bed(tmp_path, 20, folder=str(tmp_path / "share"))


def sign(group, timeout_s):
    group.sign("proxyfl", f"train.rounds={ROUNDS}", BASE[1], f"comm.timeout_s={timeout_s}", "train.min_sites=10")


def test_a_run_of_twenty_finishes_without_three_and_with_others_that_come_and_go(group):
    sign(group, 90)
    group.jobs = group.jobs[:17]
    for k, job in enumerate(group.jobs):
        job["begins_s"] = k % 5
        if k in (4, 11):  # their machines are started anew
            job |= {"kill": {"where": "_exchange_round", "round": 2 + k % 2}, "back_s": 5}
    start(group.root, [group.jobs])
    for site in group.sites[:17]:
        summary = group.result(site)
        assert summary["lost"] == group.sites[17:]
        reasons = [loss["reason"] for loss in summary["losses"]]
        assert all("did not answer for 90 s" in one or one == "gone, as other sites say" for one in reasons)
        assert [round_ for round_, _ in charged(group.study(site), site)] == list(range(1, ROUNDS + 1))
        assert [row["rounds_completed"] for row in summary["sites"]] == [[[1, ROUNDS]]] * 17


def test_a_run_of_twenty_finishes_with_a_tenth_absent_in_each_round(group):
    """Absent sites return soon, or after the others continued without them."""
    dice, seen = random.Random(1), {}
    sign(group, 20)
    for job in group.jobs:
        away = next((round_ for round_ in range(1, ROUNDS + 1) if dice.random() < 0.1), None)
        if away is not None:
            where = dice.choice(("_train_round", "_exchange_round"))
            job |= {"kill": {"where": where, "round": away}, "back_s": dice.uniform(2, 60)}
    with owner_at(group.share, partial(note, seen)):
        group.work()
    went = [site for site in group.sites if (group.root / site / "killed").exists()]
    left, everywhere = left_by(seen), []
    for site in group.sites:
        summary = group.result(site)
        assert summary["lost"] == []
        paid = [round_ for round_, _ in charged(group.study(site), site)]
        assert paid == sorted(set(paid)), "a round was charged twice"
        assert {round_ for name, round_ in left if name == site} <= set(paid)
        assert site in went or paid == list(range(1, ROUNDS + 1))
        (row,) = [row for row in summary["sites"] if row["site"] == site]
        attended = [round_ for first, last in row["rounds_completed"] for round_ in range(first, last + 1)]
        assert set(attended) <= set(paid) and attended[-1] == ROUNDS
        everywhere += attended
    present = {round_: everywhere.count(round_) for round_ in range(1, ROUNDS + 1)}
    assert len(went) >= 2 and min(present.values()) >= 11


def test_a_run_of_sixty_four_finishes_in_one_process(tmp_path):
    study = make_study(tmp_path, 64)
    summary = train(study, method="proxyfl", overrides=["train.rounds=3", "privacy.sigma=4"], backend="local")
    assert len(summary["sites"]) == 64 and summary["lost"] == []
    assert summary["communication"]["messages"] == 3 * 64
