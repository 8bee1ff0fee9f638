"""The coordinator's patience: which jobs it asks for while hospitals come, go and fail."""

from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

from wsi_fl.hospitals.flare.jobs import JobFailed, SiteBack
from wsi_fl.hospitals.work.patience import Absences, until_done
from wsi_fl.types import WsiFlError

SITES = ["A", "B", "C"]


class World:
    """Hospitals that are there at some times, and what becomes of each job in turn.

    Args:
        there: time in seconds → who is connected from then on; None where the server is gone.
        jobs: what becomes of each job: an exception, or None for its end; the last one is repeated.
    """

    def __init__(self, there, jobs, at_least=2, until=None):
        self.now, self.there, self.jobs = 0.0, there, list(jobs)
        self.asked, self.said = [], []
        train = SimpleNamespace(at_least=at_least, until=until)
        settings = SimpleNamespace(train=train, comm=SimpleNamespace(timeout_s=60.0))
        self.plan = SimpleNamespace(sites=SITES, digest="d" * 64, pipeline=lambda: settings)

    def connected(self):
        here = self.there[max(at for at in self.there if at <= self.now)]
        if here is None:
            raise WsiFlError("the server is gone")
        return list(here)

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 10_000, "it waits for ever"

    def ask(self, there, job):
        self.asked.append((self.now, "".join(there), job["resume"], "".join(job["without"])))
        self.now += 30
        end = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        if end is not None:
            raise end
        return {name: {} for name in there}

    def done(self, resume=None, without=()):
        watcher = SimpleNamespace(say=lambda text, public: self.said.append(text))
        return until_done(
            self.plan,
            self.ask,
            self.connected,
            resume=resume,
            without=without,
            watcher=watcher,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def failed(*blamed):
    return JobFailed(f"site {blamed[0] if blamed else '?'} was lost", blamed, again=True)


def test_all_who_are_there_begin_at_once():
    world = World({0: "ABC"}, [None])
    assert list(world.done()) == SITES
    assert world.asked == [(0.0, "ABC", None, "")]


def test_who_is_missing_is_waited_for_as_long_as_the_plan_says_and_then_left_out():
    world = World({0: "AB"}, [None])
    assert list(world.done()) == ["A", "B"]
    assert world.asked == [(60.0, "AB", None, "C")]
    world = World({0: "AB", 40: "ABC"}, [None])
    world.done()
    assert world.asked == [(40.0, "ABC", None, "")]


def test_a_lost_hospital_costs_a_job_and_comes_back_to_the_run():
    world = World({0: "ABC", 20: "AB", 100: "ABC"}, [failed("C"), SiteBack(["C"]), None])
    assert list(world.done()) == SITES
    assert [(names, resume, without) for _, names, resume, without in world.asked] == [
        ("ABC", None, ""),
        ("AB", "last", "C"),
        ("ABC", "last", ""),
    ]
    assert any("C is back" in said for said in world.said)


def test_below_the_number_all_wait():
    world = World({0: "A", 5000: "AC"}, [None])
    world.done()
    assert world.asked == [(5000.0, "AC", None, "B")]


def test_a_hospital_that_fails_again_and_again_is_left_out_for_a_while_and_tried_again():
    world = World({0: "ABC"}, [failed("C")] * 3 + [failed("B"), None])
    assert list(world.done()) == ["A", "B"]
    assert [names for _, names, *_ in world.asked] == ["ABC", "ABC", "ABC", "AB", "AB"]
    one = Absences(SITES, 60.0)
    for _ in range(3):
        one.blame(["C"], 100.0)
    one.see(SITES, 101.0)
    assert one.there() == ["A", "B"]
    one.see(SITES, 160.0)
    assert one.there() == SITES
    for _ in range(3):
        one.blame(["C"], 200.0)
    one.see(["A", "B"], 201.0)
    one.see(SITES, 202.0)
    assert one.there() == SITES  # somebody looked after it


def test_a_server_that_is_gone_is_waited_for():
    world = World({0: "ABC", 20: None, 300: "ABC"}, [JobFailed("the server was lost", again=True), None])
    assert list(world.done()) == SITES
    assert world.asked[1][0] >= 300


def test_what_no_other_job_mends_ends_it():
    with pytest.raises(JobFailed, match="another plan"):
        World({0: "ABC"}, [JobFailed("C has approved another plan")]).done()
    with pytest.raises(JobFailed, match="no hospital said why"):
        World({0: "ABC"}, [JobFailed("no hospital said why", again=True)]).done()
    with pytest.raises(WsiFlError, match="good until 2020-01-01"):
        World({0: "ABC"}, [None], until="2020-01-01").done()


def test_people_may_leave_one_out_and_name_a_run():
    world = World({0: "ABC"}, [None])
    assert list(world.done(resume="00003-x", without=["C"])) == ["A", "B"]
    assert world.asked == [(0.0, "AB", "00003-x", "C")]
