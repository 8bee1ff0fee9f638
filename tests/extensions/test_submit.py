"""Job replies of hospitals, their agreed document, and the coordinator's record of a run: summary, counts, page."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import REAL, make_study, refused

from wsi_fl.federation.documents import ProtocolError
from wsi_fl.hospitals.faults import Fault, find_fault, mark_fault
from wsi_fl.hospitals.work import submit as submitting
from wsi_fl.hospitals.work.client import public_summary
from wsi_fl.hospitals.work.job_replies import failure_reply, parse_reply, validate_replies
from wsi_fl.hospitals.work.submit import submit_plan
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.training import checks
from wsi_fl.stages.training.train import train
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError

SITES = ["S0", "S1"]
SETTINGS = SimpleNamespace(train=SimpleNamespace(min_sites=None))
PLAN = SimpleNamespace(digest="0" * 64, text="{}", pipeline=lambda: SETTINGS, remaining_sites=lambda _: SITES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A study of two real hospitals that were trained together in one process, and the summary."""
    root = tmp_path_factory.mktemp("submit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setattr(checks, "_check_stores_stay_apart", lambda *_: None)  # in one process for once
        study = make_study(root / "study", 2, site_extra=REAL + '\nallow = ["scores"]')
        overrides = ["train.rounds=1", "privacy.sigma=4"]
        return study, train(study, method="proxyfl", overrides=overrides, backend="local")


@pytest.fixture
def job_replies(trained, monkeypatch):
    """The job replies of the hospitals."""
    study, summary = trained
    answers = {site: public_summary(study, site, dict(summary)) for site in SITES}
    monkeypatch.setattr(submitting, "run_plan_job", lambda *_: answers)
    return answers


def test_the_result_has_the_scores_and_a_page_of_releases_only(trained, job_replies, tmp_path):
    study, summary = trained
    document = submit_plan(None, PLAN, out=tmp_path / "result")
    kept = RunFolder(study.find_run(summary["run"])).site_folder("S1").read_document("scores")
    assert json.loads((tmp_path / "result" / "scores.json").read_text()) == kept
    assert "scores" not in json.loads((tmp_path / "result" / "summary.json").read_text())
    page = (tmp_path / "result" / "report.html").read_text()
    assert document["report"] == str(tmp_path / "result" / "report.html")
    assert all(f">{site}<" in page for site in SITES) and "outlined cells are models" in page
    assert str(study.root) not in page and "_patient_" not in page and "_slide_" not in page
    for answer in job_replies.values():
        answer["scores"] = None
    submit_plan(None, PLAN, out=tmp_path / "bare")
    assert not (tmp_path / "bare" / "scores.json").exists()
    assert "No hospital released counts" in (tmp_path / "bare" / "report.html").read_text()


def test_hospitals_that_hold_different_scores_are_named(job_replies, tmp_path):
    job_replies["S1"]["scores"] = job_replies["S1"]["scores"] | {"round": 99}
    refused(lambda: submit_plan(None, PLAN, out=tmp_path), "S0 and S1 hold different scores", error=WsiFlError)
    assert not list(tmp_path.iterdir())


def test_no_result_replaces_another(job_replies, tmp_path, monkeypatch):
    kept = lambda: submit_plan(None, PLAN, parent_folder=tmp_path)["out"]  # noqa: E731
    name = f"result-{job_replies['S0']['run'].removeprefix('runs/')}"
    assert kept() == str(tmp_path / name)
    first = (tmp_path / name / "summary.json").read_text()
    for answer in job_replies.values():
        answer["run"] = "runs/00007-other"
    assert kept() == str(tmp_path / "result-00007-other")
    job_replies["S0"]["seconds"] += 1
    assert kept() == str(tmp_path / "result-00007-other-2")
    assert (tmp_path / name / "summary.json").read_text() == first
    for run in ("../../elsewhere", "runs/..", "/etc", "runs/a b"):
        for answer in job_replies.values():
            answer["run"], answer["scores"] = run, None
        assert Path(kept()).parent == tmp_path and Path(kept()).is_dir()
    monkeypatch.setattr(submitting, "run_plan_job", lambda *_: pytest.fail("it ran"))
    refused(lambda: submit_plan(None, PLAN, out=tmp_path / name), "holds the result of runs/")


@pytest.fixture(scope="module")
def done(trained):
    """A hospital's job reply of a run of two, with scores."""
    study, summary = trained
    return json.loads(json.dumps(public_summary(study, "S0", dict(summary))))


def test_replies_of_a_run_a_visit_and_a_failure_are_accepted_unchanged(done):
    assert done["scores"]["hospitals"] == SITES and parse_reply(json.dumps(done), "S0", "work") == done
    visit = {"site": "S0", "peers": ["S1"], "seconds": 0.2}
    assert parse_reply(json.dumps(visit), "S0", "check") == visit
    assert parse_reply("{}", "S0", "ready") == {}
    both = {"S0": done, "S1": done}
    assert validate_replies(both, SITES, "work") == both
    assert validate_replies({"S0": done}, SITES, "work") == {"S0": done}
    assert validate_replies({"S0": {}, "S1": failure_reply("no way")}, SITES, "work") == {"S1": failure_reply("no way")}


def test_any_other_reply_of_a_hospital_is_refused_by_name(done):
    row, scores = done["sites"][0], done["scores"]
    counts = scores["counts"]["S0"]["S0"]
    for other in (
        {**done, "more": 1},
        {**done, "run": "runs/1\x1b[2J"},
        {**done, "seconds": "2"},
        {**done, "sites": [{**row, "site": "S0\u202e"}]},
        {**done, "sites": [{**row, "seconds": 1.0}]},
        {**done, "sites": [{**row, "epsilon": -1.0}]},
        {key: value for key, value in done.items() if key != "communication"},
        {**done, "scores": {**scores, "hospitals": ["S0"]}},
        {**done, "scores": {**scores, "counts": {"S0": {"S0": {**counts, "n": -1}}}}},
        {**done, "scores": {**scores, "classes": ["a", "b", "c"]}},
        [],
        "done",
        {},
    ):
        for say in (
            partial(parse_reply, json.dumps(other), "S1", "work"),
            partial(validate_replies, {"S1": other or [other]}, SITES, "work"),
        ):
            refused(say, "S1 told what was not agreed on", error=ProtocolError)
    for text in ("[" * 100_000, '{"a":' * 50_000, "no JSON", '{"seconds": NaN}', "\ud800"):
        refused(partial(parse_reply, text, "S1", "work"), "site S1 told", error=ProtocolError)
    for told in ({"S7": {}}, [], "x", None, {"\x1b": {"error": "x"}}):
        refused(partial(validate_replies, told, SITES, "check"), "the server handed on", error=ProtocolError)


def test_a_failure_reason_is_one_printable_line():
    assert failure_reply("a\nb\x1b[2J" + "c" * 2000)["error"].startswith("a b\ufffd[2Jccc")
    assert len(failure_reply("c" * 2000)["error"]) == 1000
    good = failure_reply("x", Fault("lost", "S0"))
    assert validate_replies({"S1": good}, SITES, "work") == {"S1": good}
    for wrong in (
        {"error": "\x1b[2J"},
        {"and": 1},
        {"error": 5},
        {"error": "a\nb"},
        {"code": "evil"},
        {"site": "../x"},
    ):
        evil = {**good, **wrong}
        refused(partial(validate_replies, {"S1": evil}, SITES, "work"), "S1 told what was not", error=ProtocolError)


def test_the_kind_of_a_failure_survives_that_it_is_raised_as_another_error():
    with pytest.raises(NoCommonPlan) as told:
        try:
            raise mark_fault(UsageError("x"), "unsigned", "S1")
        except UsageError as error:
            raise NoCommonPlan(str(error)) from None
    assert find_fault(told.value) == ("unsigned", "S1") and find_fault(WsiFlError("y")) == ("", "")
