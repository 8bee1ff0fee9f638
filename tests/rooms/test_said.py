"""What a hospital says to the coordinator is an agreed document, and nothing else comes through."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from conftest import REAL, make_study, refused

from wsi_fl.federation.documents import NotAgreed
from wsi_fl.hospitals.work.said import agreed, answered, failed
from wsi_fl.hospitals.work.taking_part import known_to_all
from wsi_fl.stages.training import checks
from wsi_fl.stages.training.train import train
from wsi_fl.types import WsiFlError

SITES = ["S0", "S1"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What a hospital says of a run of two, scores and all."""
    root = tmp_path_factory.mktemp("said")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setattr(checks, "_check_stores_stay_apart", lambda *_: None)
        study = make_study(root / "study", 2, site_extra=REAL + '\nallow = ["scores"]')
        overrides = ["train.rounds=1", "privacy.sigma=4"]
        summary = train(study, method="proxyfl", overrides=overrides, backend="local")
        return json.loads(json.dumps(known_to_all(study, "S0", summary)))


def test_a_run_a_visit_and_a_failure_come_through_as_they_are(done):
    assert done["scores"]["hospitals"] == SITES
    assert answered(json.dumps(done), "S0", "work") == done
    visit = {"site": "S0", "peers": ["S1"], "seconds": 0.2}
    assert answered(json.dumps(visit), "S0", "check") == visit
    assert answered("{}", "S0", "ready") == {}
    both = {"S0": done, "S1": done}
    assert agreed(both, SITES, "work") == both
    assert agreed({"S0": done}, SITES, "work") == {"S0": done}
    assert agreed({"S0": {}, "S1": failed("no way")}, SITES, "work") == {"S1": {"error": "no way"}}


def test_whatever_else_a_hospital_says_is_refused_by_name(done):
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
            lambda other=other: answered(json.dumps(other), "S1", "work"),
            lambda other=other: agreed({"S1": other or [other]}, SITES, "work"),
        ):
            refused(say, "S1 told what was not agreed on", error=NotAgreed)
    for text in ("[" * 100_000, '{"a":' * 50_000, "no JSON", '{"seconds": NaN}', "\ud800"):
        refused(lambda text=text: answered(text, "S1", "work"), "site S1 told", error=NotAgreed)


def test_a_reason_is_one_line_that_can_be_shown():
    assert failed("a\nb\x1b[2J" + "c" * 2000)["error"].startswith("a b\ufffd[2Jccc")
    assert len(failed("c" * 2000)["error"]) == 1000
    for evil in ({"error": "\x1b[2J"}, {"error": "x", "and": 1}, {"error": 5}, {"error": "a\nb"}):
        refused(
            lambda evil=evil: agreed({"S1": evil}, SITES, "work"), "S1 told what was not", error=NotAgreed
        )


def test_a_server_that_hands_on_something_else_is_refused():
    for told in ({"S7": {}}, [], "x", None, {"\x1b": {"error": "x"}}):
        refused(lambda told=told: agreed(told, SITES, "check"), "the server handed on", error=NotAgreed)


@pytest.mark.parametrize(
    "evil", [{"error": "\x1b[2Jhello"}, {"site": "S1", "peers": [], "seconds": 0, "x": 1}]
)
def test_a_job_hands_nothing_else_to_the_coordinator(monkeypatch, tmp_path, evil):
    pytest.importorskip("nvflare", reason="the extra flare is not installed")
    from wsi_fl.hospitals.flare import jobs

    def result(_, place):
        (tmp_path / "said.json").write_text(json.dumps({"S1": evil}))
        return str(tmp_path)

    session = SimpleNamespace(
        submit_job=lambda _: "1", get_job_status=lambda _: "FINISHED:COMPLETED", download_job_result=result
    )
    monkeypatch.setattr(jobs, "_session", lambda _: nullcontext(session))
    job = {"what": "check", "plan": "0" * 64}
    with pytest.raises(WsiFlError, match="site S1 told what was not agreed on"):
        jobs.run_job(None, ["S1"], job, told=lambda _: None, waiting=lambda _: None)
    evil.clear()
    evil.update({"site": "S1", "peers": [], "seconds": 0.5})
    assert jobs.run_job(None, ["S1"], job, told=lambda _: None, waiting=lambda _: None) == {"S1": evil}
