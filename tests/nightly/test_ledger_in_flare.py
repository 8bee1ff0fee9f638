"""Jobs of NVIDIA FLARE, unchanged, at three sites with the ledger's filter: a server and clients as real processes."""

import os
import random
import signal
import time

import pytest
from flare_poc import HELLO, SIGMA, SITES, Poc, exact_epsilon, write_account

from wsi_fl.stages.site.ledger_report import summarize_ledger

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]
pytest.importorskip("nvflare")


@pytest.fixture
def make_poc(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()

    def make(budget, sigma=SIGMA):
        return Poc(tmp_path, {site: write_account(site, budget, sigma) for site in SITES})

    return make


def test_a_second_job_weeks_later_ends_in_the_round_that_would_cross_the_budget(make_poc):
    poc = make_poc(exact_epsilon(5) + 1e-6)  # three rounds of the first job, and two of the second
    with poc.running():
        first = poc.submit(poc.write_job(3))
        assert poc.wait(first) == "FINISHED:COMPLETED"
    rows = poc.round_metrics(first)
    assert [row["round"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert {site["name"] for site in row["sites"]} == set(SITES)
        for site in row["sites"]:
            (metric,) = site["metrics"]  # no mean of weights
            assert metric["name"] == "epsilon"
            assert metric["value"] == pytest.approx(exact_epsilon(row["round"] + 1), abs=1e-6)
    assert "weight_mean" not in poc.log("server")
    poc.shift_days = 40
    with poc.running():
        second = poc.submit(poc.write_job(9))
        assert poc.wait(second) == "FINISHED:EXECUTION_EXCEPTION"
    for site in SITES:
        lines = poc.charges(site)
        assert [(entry.run, entry.round) for entry in lines] == [
            *((first, k) for k in (1, 2, 3)),
            *((second, k) for k in (1, 2)),
        ]
        days = {entry.run: entry.time[:10] for entry in lines}
        assert days[first] < days[second]
        assert "release 2 of this job: ε = " in poc.log(site) and "not sent: events fed.analytix" in poc.log(site)
        assert summarize_ledger(poc.ledger(site))["epsilon"] == pytest.approx(exact_epsilon(5), abs=1e-6)
    # the first site that refuses ends the job at the others
    assert any(f"nothing leaves this site: site {k}: round 3 would raise epsilon" in poc.log(k) for k in SITES)
    told = poc.round_metrics(second)
    assert [row["round"] for row in told] == [0, 1]


def test_killed_jobs_and_clients_are_charged_for_what_they_released_and_no_more(make_poc):
    sigma, jobs = 40.0, []
    poc, lottery = make_poc(8.0, sigma), random.Random(7)
    slow = HELLO.replace("    weights =", "    import time; time.sleep(1)\n    weights =")
    with poc.running():
        for at, victim in enumerate(("site-1", "site-2", "site-3")):
            jobs.append(poc.submit(poc.write_job(20, slow, name=f"slow{at}")))
            while not any(entry.run == jobs[-1] for entry in poc.charges(victim)):
                time.sleep(0.05)
            time.sleep(lottery.uniform(0, 3))
            if at == 2:  # the client too, which is started again
                poc.stop(victim)
                poc.start(victim)
            else:
                for pid in poc.job_processes(victim):
                    os.kill(pid, signal.SIGKILL)
            with poc.session() as session:
                session.abort_job(jobs[-1])
            poc.wait(jobs[-1], 180)
        jobs.append(poc.submit(poc.write_job(2)))
        assert poc.wait(jobs[-1]) == "FINISHED:COMPLETED"
    for site in SITES:
        lines = poc.charges(site)
        assert len({entry.task for entry in lines}) == len(lines)
        assert {entry.run for entry in lines} == set(jobs)
        document = summarize_ledger(poc.account(site))
        assert document["epsilon"] == pytest.approx(exact_epsilon(len(lines), sigma), abs=1e-6)
