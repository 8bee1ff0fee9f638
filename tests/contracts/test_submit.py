"""What the coordinator keeps of a run: its summary, the counts that all hospitals hold, and a page of both."""

import json
from types import SimpleNamespace

import pytest
from conftest import REAL, make_study, refused

from wsi_fl.hospitals.work import submit as submitting
from wsi_fl.hospitals.work.submit import submit
from wsi_fl.hospitals.work.taking_part import known_to_all
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.training import checks
from wsi_fl.stages.training.train import train
from wsi_fl.types import WsiFlError

SITES = ["S0", "S1"]
SETTINGS = SimpleNamespace(train=SimpleNamespace(at_least=None))
PLAN = SimpleNamespace(sites=SITES, digest="0" * 64, text="{}", pipeline=lambda: SETTINGS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A study of two real hospitals that were trained together, in one process for once, and the summary."""
    root = tmp_path_factory.mktemp("submit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setattr(checks, "_check_stores_stay_apart", lambda *_: None)
        study = make_study(root / "study", 2, site_extra=REAL + '\nallow = ["scores"]')
        overrides = ["train.rounds=1", "privacy.sigma=4"]
        return study, train(study, method="proxyfl", overrides=overrides, backend="local")


@pytest.fixture
def said(trained, monkeypatch):
    """What the hospitals answer."""
    study, summary = trained
    answers = {site: known_to_all(study, site, dict(summary)) for site in SITES}
    monkeypatch.setattr(submitting, "_run", lambda *_: answers)
    return answers


def test_the_result_has_the_scores_and_a_page_of_releases_alone(trained, said, tmp_path):
    study, summary = trained
    document = submit(None, PLAN, out=tmp_path / "result")
    kept = RunFolder(study.run(summary["run"])).site("S1").kept("scores")
    assert json.loads((tmp_path / "result" / "scores.json").read_text()) == kept
    assert "scores" not in json.loads((tmp_path / "result" / "summary.json").read_text())
    page = (tmp_path / "result" / "report.html").read_text()
    assert document["report"] == str(tmp_path / "result" / "report.html")
    assert all(f">{site}<" in page for site in SITES) and "outlined cells are models" in page
    assert str(study.root) not in page and "_patient_" not in page and "_slide_" not in page


def test_hospitals_that_hold_different_scores_are_named(said, tmp_path):
    said["S1"]["scores"] = said["S1"]["scores"] | {"round": 99}
    refused(lambda: submit(None, PLAN, out=tmp_path), "S0 and S1 hold different scores", error=WsiFlError)
    assert not list(tmp_path.iterdir())


def test_where_no_counts_left_the_page_says_so(said, tmp_path):
    for answer in said.values():
        answer["scores"] = None
    submit(None, PLAN, out=tmp_path)
    assert not (tmp_path / "scores.json").exists()
    assert "No hospital let counts" in (tmp_path / "report.html").read_text()


def test_no_result_takes_the_place_of_another(said, tmp_path):
    first = submit(None, PLAN, beside=tmp_path)
    name = f"result-{first['run'].removeprefix('runs/')}"
    assert first["out"] == str(tmp_path / name)
    for answer in said.values():
        answer["run"] = "runs/00007-other"
    assert submit(None, PLAN, beside=tmp_path)["out"] == str(tmp_path / "result-00007-other")
    said["S0"]["seconds"] += 1
    again = submit(None, PLAN, beside=tmp_path)
    assert again["out"] == str(tmp_path / "result-00007-other-2")
    assert json.loads((tmp_path / name / "summary.json").read_text())["run"] == first["run"]


def test_a_folder_with_a_result_is_refused_before_anything_runs(said, tmp_path, monkeypatch):
    submit(None, PLAN, out=tmp_path)
    monkeypatch.setattr(submitting, "_run", lambda *_: pytest.fail("it ran"))
    refused(lambda: submit(None, PLAN, out=tmp_path), "holds the result of runs/")


@pytest.mark.parametrize("run", ["../../elsewhere", "runs/..", "/etc", "runs/a b"])
def test_a_run_by_any_name_is_kept_beside_the_plan(said, tmp_path, run):
    for answer in said.values():
        answer["run"] = run
    kept = submit(None, PLAN, beside=tmp_path / "plan")["out"]
    assert [str(path) for path in tmp_path.glob("plan/*")] == [kept]
