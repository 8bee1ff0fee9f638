"""Hospitals that resume by themselves over a folder: one was killed, comes late, never comes, or is slow."""

import pytest
from conftest import metrics
from hospitals import BASE, SITES, Bed, charged, digests, heads, one_installation, start  # noqa: F401
from test_oneshot import HEADS

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]
PATIENT = (*BASE[:2], "comm.timeout_s=8", "train.min_sites=2")


@pytest.fixture
def group_of(tmp_path):
    def make(*settings, method="proxyfl", **given):
        group = Bed(tmp_path, 3, folder=str(tmp_path / "share"), **given)
        group.sign(method, *PATIENT, *settings)
        return group

    return make


def rounds_charged(group, site):
    return [round_ for round_, _ in charged(group.study(site), site)]


def test_a_hospital_that_was_killed_for_good_is_left_out_without_a_prompt(group_of, tmp_path):
    group = group_of()
    group.jobs[2] |= {"kill": {"where": "_exchange_round", "round": 2}, "gone": True}
    start(tmp_path, [group.jobs])
    for site in SITES[:2]:
        summary = group.result(site)
        assert summary["lost"] == ["S2"]
        reason = summary["losses"][0]["reason"]
        assert "for 8 s" in reason or reason == "gone, as other sites say"
        assert rounds_charged(group, site) == [1, 2, 3]


def test_a_hospital_that_never_comes_is_awaited_no_longer_than_planned(group_of, tmp_path):
    group = group_of()
    gone = group.jobs.pop()
    start(tmp_path, [group.jobs])
    for site in SITES[:2]:
        assert group.result(site)["lost"] == ["S2"] and rounds_charged(group, site) == [1, 2, 3]
    # it comes when all is over: the others help it, at no cost of theirs
    for job in group.jobs:
        job["until"] = f"{group.root}/S2/result.json"
    group.jobs.append(gone)
    start(tmp_path, [group.jobs])
    assert group.result("S2")["lost"] == []
    assert [rounds_charged(group, site) for site in SITES[:2]] == [[1, 2, 3]] * 2
    assert rounds_charged(group, "S2") == [3]


def test_a_hospital_that_returns_during_the_run_takes_part_again(group_of, tmp_path):
    group = group_of("train.rounds=12")
    for job in group.jobs:
        job |= {"slow_s": 3, "until": f"{group.root}/S2/result.json"}
    del group.jobs[2]["until"]
    group.jobs[2] |= {"kill": {"where": "_exchange_round", "round": 2}, "back_s": 28}
    start(tmp_path, [group.jobs])
    for site in SITES:
        assert group.result(site)["lost"] == []
    for site in SITES[:2]:
        attended = [line["round"] for line in metrics(group.run(site), site)]
        assert rounds_charged(group, site) == list(range(1, 13)) == attended
    missed = sorted(set(range(1, 13)) - set(rounds_charged(group, "S2")))
    assert missed and missed[0] == 3 and missed == list(range(3, missed[-1] + 1)) and missed[-1] < 12


@pytest.mark.parametrize(("least", "late"), [(2, {"slow_s": 12}), (3, {"begins_s": 25})])
def test_a_slow_hospital_is_awaited_and_so_are_all_below_the_plans_minimum(group_of, tmp_path, least, late):
    group = group_of(f"train.min_sites={least}")
    group.jobs[2] |= late
    start(tmp_path, [group.jobs])
    for site in SITES:
        assert group.result(site)["lost"] == [] and rounds_charged(group, site) == [1, 2, 3]
        assert least == 3 or not (group.run(site) / "roster.jsonl").exists()


def test_late_class_statistics_enter_the_head_of_every_hospital(group_of, tmp_path):
    """Two hospitals already have their head; it is built again from three class statistics at no charge."""
    group = group_of(*HEADS, method="oneshot", furnish=heads)
    late = group.jobs.pop()
    start(tmp_path, [group.jobs])
    before = [digests(group.run(site), site) for site in SITES[:2]]
    assert [group.result(site)["lost"] for site in SITES[:2]] == [["S2"]] * 2
    for job in group.jobs:
        job["until"] = f"{group.root}/S2/result.json"
    group.jobs.append(late)
    start(tmp_path, [group.jobs])
    assert before != [digests(group.run(site), site) for site in SITES[:2]]
    group.require_the_same("oneshot", *PATIENT, *HEADS)
