"""Heads for multiple-instance learning in FedAvg, cyclic and swarm jobs, with the ledger's filter at three sites."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from flare_poc import SITES, Poc, exact_epsilon, write_account
from mil_head import AttentionHead
from mil_training import LEAK

from wsi_fl.stages.site.ledger_report import summarize_ledger

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]
pytest.importorskip("nvflare")
SCRIPT = str(Path(__file__).with_name("mil_training.py"))


@pytest.fixture
def make_poc(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return lambda budget: Poc(tmp_path, {site: write_account(site, budget) for site in SITES})


def export(poc, recipe):
    recipe.export(str(poc.root / "jobs"))
    return poc.root / "jobs" / recipe.name


def job_settings(name, rounds, pause_s):
    args = {"train_script": SCRIPT, "train_args": f"{pause_s}", "model": AttentionHead(), "min_clients": len(SITES)}
    return {"name": name, "num_rounds": rounds, **args}


def swarm_job(poc, rounds, name="swarm", pause_s=0.0, **given):
    from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe

    settings = job_settings(name, rounds, pause_s) | {"train_args": {"script_args": f"{pause_s}"}}
    return export(poc, SwarmLearningRecipe(**settings, **given))


def client_cyclic_job(poc, rounds):
    from nvflare.app_common.ccwf.ccwf_job import CCWFJob, CyclicClientConfig, CyclicServerConfig
    from nvflare.app_common.ccwf.comps.simple_model_shareable_generator import SimpleModelShareableGenerator
    from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
    from nvflare.job_config.script_runner import ScriptRunner

    job = CCWFJob(name="client_cyclic", min_clients=len(SITES))
    executor, persistor = ScriptRunner(script=SCRIPT, script_args="0"), PTFileModelPersistor(model=AttentionHead())
    client = CyclicClientConfig(executor, persistor, SimpleModelShareableGenerator())
    job.add_cyclic(CyclicServerConfig(num_rounds=rounds), client)
    job.export_job(str(poc.root / "jobs"))
    return poc.root / "jobs" / job.name


def require_clipped_models(poc, job, n_models):
    """Check that the job's models at the sites are one model, and that no site's update is in it unclipped."""
    paths = sorted(poc.kits.glob(f"*/{job}/app_*/FL_global_model.pt"))
    models = [torch.load(path, weights_only=False)["model"] for path in paths]
    assert len(models) == n_models
    for model in models:
        for name, value in model.items():
            assert torch.equal(value, models[0][name])
            assert 0 < value.abs().max() < LEAK / 1000


def test_fedavg_and_cyclic_jobs_charge_each_site_once_in_each_round(make_poc):
    from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

    poc = make_poc(exact_epsilon(5) + 1e-6)
    with poc.running():
        jobs = [
            export(poc, FedAvgRecipe(**job_settings("fedavg", 2, 0))),
            export(poc, CyclicRecipe(**job_settings("cyclic", 1, 0))),
            client_cyclic_job(poc, 1),
        ]
        done = [poc.submit(job) for job in jobs]
        assert [poc.wait(job) for job in done] == ["FINISHED:COMPLETED"] * 3
        halted = poc.submit(export(poc, FedAvgRecipe(**job_settings("halted", 3, 0))))
        assert poc.wait(halted) == "FINISHED:EXECUTION_EXCEPTION"
    for site in SITES:
        runs = [(entry.run, entry.round) for entry in poc.charges(site)]
        assert sorted(runs[:4]) == sorted([(done[0], 1), (done[0], 2), (done[1], 1), (done[2], 1)])  # side by side
        assert runs[4:] == [(halted, 1)]
        assert summarize_ledger(poc.account(site))["epsilon"] == pytest.approx(exact_epsilon(5), abs=1e-6)
    for row in poc.round_metrics(done[0]):
        values = {site["name"]: {m["name"]: m["value"] for m in site["metrics"]} for site in row["sites"]}
        assert values == {site: {"epsilon": pytest.approx(exact_epsilon(row["round"] + 1), abs=1e-6)} for site in SITES}
    require_clipped_models(poc, done[2], len(SITES))


@pytest.mark.parametrize("external", [False, True], ids=["in process", "process of its own"])
def test_a_swarm_job_charges_each_site_once_in_each_round_and_halts_at_the_budget(make_poc, external):
    from nvflare.client.config import ExchangeFormat

    tensors = {"aggregation_format": ExchangeFormat.PYTORCH}  # FLARE streams them past the client's job
    given = {"launch_external_process": True, "command": f"{sys.executable} -u", **tensors} if external else {}
    poc = make_poc(exact_epsilon(3) + 1e-6)
    with poc.running():
        first = poc.submit(swarm_job(poc, 2, **given))
        assert poc.wait(first) == "FINISHED:COMPLETED"
        second = poc.submit(swarm_job(poc, 3, **given))
        assert poc.wait(second) == "FINISHED:EXECUTION_EXCEPTION"
    for site in SITES:
        charges = poc.charges(site)
        assert [(entry.run, entry.round) for entry in charges] == [(first, 1), (first, 2), (second, 1)]
        assert [entry.task for entry in charges] == [f"controller, round {k}" for k in (0, 1, 0)]
        assert summarize_ledger(poc.ledger(site))["epsilon"] == pytest.approx(exact_epsilon(3), abs=1e-6)
        assert f"release 2 of this job: ε = {exact_epsilon(2):.4g} for this job" in poc.log(site)
    refused = [f"nothing leaves this site: site {site}: round 2 would raise epsilon" in poc.log(site) for site in SITES]
    assert any(refused)  # one site that refuses ends the job for all
    require_clipped_models(poc, first, len(SITES))


def test_a_killed_swarm_job_is_charged_for_what_it_released_and_no_more(make_poc):
    poc, jobs = make_poc(50.0), []
    with poc.running():
        jobs.append(poc.submit(swarm_job(poc, 9, "slow", pause_s=1.0)))
        while not poc.charges("site-2"):
            time.sleep(0.05)
        for pid in poc.job_processes("site-2"):
            os.kill(pid, signal.SIGKILL)
        with poc.session() as session:
            session.abort_job(jobs[0])
        poc.wait(jobs[0], 180)
        jobs.append(poc.submit(swarm_job(poc, 1)))
        assert poc.wait(jobs[1]) == "FINISHED:COMPLETED"
    for site in SITES:
        charges = poc.charges(site)
        assert len({(entry.run, entry.task) for entry in charges}) == len(charges)
        assert {entry.run for entry in charges} == set(jobs) and charges[-1].run == jobs[1]
        assert summarize_ledger(poc.account(site))["epsilon"] == pytest.approx(exact_epsilon(len(charges)), abs=1e-6)
