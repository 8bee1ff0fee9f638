"""Reports on sites that may drop out: in the plan that hospitals sign, in summaries, and before a run begins."""

from functools import partial

import pytest
from conftest import REAL, make_study, refused

from wsi_fl.hospitals.plans.build_plan import make_plan, parse_plan_document
from wsi_fl.hospitals.plans.review import review_lines, review_plan
from wsi_fl.hospitals.work.client import _list_running
from wsi_fl.report.formatting import describe_absences
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.resume import RunRequest
from wsi_fl.stages.training.train import summary_lines, train
from wsi_fl.types import ReportableError, WsiFlError


def planned(tmp_path, *overrides):
    study = make_study(tmp_path / "study", n_sites=3, site_extra=REAL)
    return study, make_plan(study, method="proxyfl", overrides=overrides, out=tmp_path / "plan.json")


def test_a_plan_states_the_needed_sites_the_waiting_time_and_the_deadline(tmp_path, capsys):
    study, plan = planned(tmp_path, "train.min_sites=2", "comm.timeout_s=600", 'train.deadline="2027-01-31"')
    said = parse_plan_document(plan)["waits"]
    assert "silent for 10 min 0 s is left out" in said and "at least 2 of 3" in said and "2027-01-31" in said
    print_lines(review_lines(review_plan(study, plan, "S0")))
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_plan_without_the_key_states_that_all_sites_are_needed(tmp_path):
    said = parse_plan_document(planned(tmp_path)[1])["waits"]
    assert said == "All 3 hospitals are needed; when one is silent for 30 min 0 s, training stops."


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.min_sites=1"], "train.min_sites = 1"),
        (["train.min_sites=4"], "train.min_sites = 4"),
        (["train.min_sites=2", "privacy.noise='shared'"], "privacy.dropouts"),
    ],
)
def test_min_sites_below_two_or_above_all_is_refused_and_secure_aggregation_has_its_own_key(tmp_path, settings, words):
    refused(lambda: planned(tmp_path, *settings), words)


def test_over_mpi_too_few_sites_do_not_continue(tmp_path, monkeypatch):
    study, asked = make_study(tmp_path, n_sites=3), []

    def loses(running, *_, **__):
        asked.append(list(running))
        raise launch.SitesLost({running[-1]: "killed"})

    monkeypatch.setattr(launch, "run_ranks", loses)
    training = partial(train, study, method="proxyfl", overrides=["train.min_sites=2"], backend="mpi")
    refused(training, "1 of at least 2 sites are left", error=WsiFlError)
    assert asked == [["S0", "S1", "S2"], ["S0", "S1"]]


def test_a_hospital_refuses_a_job_for_fewer_sites_than_its_plan_needs(tmp_path):
    study, plan = planned(tmp_path, "train.min_sites=2")
    context = RunContext.create(study, plan.pipeline(), plan.method)
    assert _list_running(context, RunRequest(plan.name, without=["S2"])) == (0, 1)
    few = partial(_list_running, context, RunRequest(plan.name, without=["S1", "S2"]))
    refused(few, "at least 2 hospitals, and this job for 1", error=ReportableError)


def test_a_returned_site_is_reported_with_its_completed_rounds():
    rows = [
        {"site": site, "rounds_completed": rounds} for site, rounds in (("A", [[1, 6]]), ("B", [[3, 6]]), ("C", []))
    ]
    assert list(describe_absences(rows)) == ["B dropped out for a while; it took part in rounds 3 to 6."]


def test_the_advice_for_a_dropped_out_site_depends_on_the_transport():
    summary = {"run": "runs/1-x", "sites": [], "losses": [{"site": "B", "round": 2, "reason": "killed"}]}
    summary |= {"communication": {"messages": 0, "bytes": 0, "seconds": 0.0}, "seconds": 1.0}
    for again in ("", "wsi-fl federation start"):
        said = again or "wsi-fl train --resume runs/1-x"
        assert any(f"it can come back: {said}" in line.text for line in summary_lines(summary, again))
