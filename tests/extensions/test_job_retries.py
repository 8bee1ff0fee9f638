"""The coordinator's retries: which jobs it submits while hospitals come, drop out and fail."""

from types import SimpleNamespace

import pytest

from wsi_fl.hospitals.flare.jobs import JobFailed, SiteReconnected
from wsi_fl.hospitals.work import submit as submitting
from wsi_fl.hospitals.work.repeat import repeat_until_done
from wsi_fl.types import WsiFlError

SITES = ["A", "B", "C"]


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Hospitals that are there at some times, and what becomes of each job in turn; return the jobs asked for.

    Args:
        there: time in seconds → who is connected from then on; None where the server is gone.
        ends: what becomes of each job: an exception, or None for its end; the last one is repeated.
    """
    clock = SimpleNamespace(now=0.0, said=[], awaited=[])
    identity = SimpleNamespace(root="")
    kit = SimpleNamespace(path=tmp_path, load_identity=lambda: identity)

    def done(there, ends, *, until=None, resume=None, sites=SITES, gone=()):
        ends, asked, clock.now = list(ends), [], 0.0
        train = SimpleNamespace(min_sites=2, deadline=until)
        settings = SimpleNamespace(train=train, comm=SimpleNamespace(timeout_s=60.0))
        keys = {name: f"key of {name}" for name in SITES}
        plan = SimpleNamespace(sites=SITES, keys=keys, digest="d" * 64, pipeline=lambda: settings)

        def sleep(seconds):
            clock.now += seconds
            assert clock.now < 10_000, "it waits for ever"

        def connected(_):
            here = there[max(at for at in there if at <= clock.now)]
            if here is None:
                raise WsiFlError("the server is gone")
            return list(here)

        def run(_kit, _plan, here, job, _watcher, *, awaited):
            clock.awaited.append(awaited)
            asked.append((clock.now, "".join(here), job["resume"], "".join(job["without"])))
            clock.now += 30
            if end := ends.pop(0) if len(ends) > 1 else ends[0]:
                raise end
            return dict.fromkeys(here)

        def refuse(*_):
            if gone:
                raise WsiFlError(f"the {gone[0]} was withdrawn")

        time = SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
        for where, name, stand_in in (
            (submitting, "time", time),
            (submitting, "run_plan_job", run),
            (submitting, "parse_revocation_list", lambda _: SimpleNamespace(keys=gone)),
            (submitting, "check_revoked", refuse),
            (submitting.jobs, "list_connected", connected),
        ):
            monkeypatch.setattr(where, name, stand_in)
        watcher = SimpleNamespace(print_message=lambda text, public: clock.said.append(text))
        series = submitting._PlanJobs(kit, plan, list(sites), resume, watcher)
        found = repeat_until_done(series.submit_jobs, series.record_failure)
        assert list(found) == list(asked[-1][1])
        return asked

    done.said, done.awaited = clock.said, clock.awaited
    return done


def failed(*blamed):
    return JobFailed("somebody was away", blamed, code="lost", can_retry=True)


def test_a_missing_hospital_is_awaited_as_long_as_planned_and_then_left_out(world):
    """People may leave a hospital out at once, and name a run; below the plan's minimum all wait."""
    assert world({0: "ABC"}, [None]) == [(0.0, "ABC", None, "")]
    assert world({0: "AB"}, [None]) == [(60.0, "AB", None, "C")]
    assert world({0: "AB", 40: "ABC"}, [None]) == [(40.0, "ABC", None, "")]
    assert world({0: "A", 5000: "AC"}, [None]) == [(5000.0, "AC", None, "B")]
    assert world({0: "ABC"}, [None], resume="00003-x", sites=["A", "B"]) == [(0.0, "AB", "00003-x", "C")]


def test_a_dropout_costs_one_job_and_rejoins_the_run_and_a_lost_server_is_awaited(world):
    back = SiteReconnected("C is there again; the job was ended")
    asked = world({0: "ABC", 20: "AB", 100: "ABC"}, [failed("C"), back, None])
    assert [one[1:] for one in asked] == [("ABC", None, ""), ("AB", "last", "C"), ("ABC", "last", "")]
    assert world.awaited == [{}, {"C": 0.0}, {}]
    assert any("C is there again" in said for said in world.said)
    lost = JobFailed("the server was lost", can_retry=True)
    assert world({0: "ABC", 20: None, 300: "ABC"}, [lost, None])[1][0] >= 300


def test_a_repeatedly_failing_hospital_is_left_out_for_a_while_and_tried_again(world):
    thrice = [failed("C")] * 3
    assert [one[1] for one in world({0: "ABC"}, [*thrice, failed("B"), None])] == ["ABC"] * 3 + ["AB"] * 2
    assert world.awaited == [{}] * 3 + [{"C": 60.0}] * 2  # it is there, and no job ends for that
    # forgiven after the plan's patience, or when it was away meanwhile: somebody looked after it
    names = [one[1] for one in world({0: "ABC"}, [*thrice, failed("A"), failed("A"), None])]
    assert names == ["ABC"] * 3 + ["AB"] * 2 + ["ABC"]
    away = {0: "ABC", 102: "AB", 130: "ABC"}
    assert world(away, [*thrice, None])[-1] == (130.0, "ABC", "last", "")


def test_a_withdrawn_hospital_gets_no_jobs_and_below_the_minimum_no_hospital_does(world):
    gone = JobFailed("C will not go on", ["C"], code="withdrew", can_retry=True)
    assert [one[1] for one in world({0: "ABC"}, [gone, failed("A"), None])] == ["ABC", "AB", "AB"]
    assert world.awaited == [{}] * 3
    with pytest.raises(JobFailed, match="C will not go on"):
        world({0: "ABC"}, [gone], sites=["A", "C"])


def test_a_connected_hospital_with_a_withdrawn_certificate_is_not_awaited(world):
    assert world({0: "ABC"}, [None], gone=["key of C"]) == [(0.0, "AB", None, "C")]
    assert world.awaited == [{}]
    with pytest.raises(WsiFlError, match="the key of C was withdrawn"):
        world({0: "ABC"}, [None], gone=["key of C", "key of B"])


def test_a_failure_that_no_retry_repairs_ends_the_submission(world):
    for end in (JobFailed("C has approved another plan"), JobFailed("no hospital said why", can_retry=True)):
        with pytest.raises(JobFailed, match=str(end)):
            world({0: "ABC"}, [end])
    with pytest.raises(WsiFlError, match="good until 2020-01-01"):
        world({0: "ABC"}, [None], until="2020-01-01")
