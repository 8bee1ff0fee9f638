"""A method of another package, whose payload is neither a model nor class statistics, trains, scores and reports."""

import json

import numpy as np
import prototype_package
import pytest
from conftest import make_study, model, refused
from test_plugins import found_in, installed

from wsi_fl.federation.message import Message
from wsi_fl.federation.methods import METHODS
from wsi_fl.types import WsiFlError

OPTIONS = [word for setting in prototype_package.SETTINGS for word in ("--set", setting)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger")
    made = make_study(folder / "study", n_sites=3)
    for k in range(3):
        prototype_package.furnish(made, f"S{k}", k)
    with prototype_package.package_installed(folder / "site-packages"):
        yield made


@pytest.mark.parametrize("backend", ["local", "mpi"])
def test_its_payload_is_sent_added_up_scored_and_reported(study, wsi_fl, backend):
    trained = wsi_fl("train", "--method", "prototypes", "--backend", backend, *OPTIONS, "--json", cwd=study.root)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads(trained.stdout)
    assert summary["communication"]["messages"] == 2 * 2  # to the first site, and back
    run = study.root / summary["run"]
    for site in ("S0", "S1", "S2"):
        sums = model(run, site, "shared")["sums"]
        np.testing.assert_allclose(sums.numpy(), prototype_package.expected_sums(range(3)), rtol=1e-5)
    evaluated = wsi_fl("evaluate", run.name, "--json", cwd=study.root)
    assert evaluated.returncode == 0, evaluated.stderr
    document = json.loads(evaluated.stdout)
    assert [row["accuracy"] > 0.9 for row in document["global_head"]] == [True] * 3
    assert document["models"]["shared"]["internal"]["accuracy"]["mean"] > 0.9
    assert document["sites"][0]["models"]["private"]["accuracy"] < 0.8  # alone it knows one class
    reported = wsi_fl("report", run.name, cwd=study.root)
    assert reported.returncode == 0, reported.stderr
    page = (run / "report" / "index.html").read_text()
    assert "Prototypes" in page and "Differential privacy was off" in page


def test_a_message_that_its_payload_refuses_counts_as_nothing(study, monkeypatch):
    method = METHODS["prototypes"]
    negative = Message(1, 0, 1, "", np.full(2 * (prototype_package.D + 1), -1.0, np.float32), 1.0)
    learner = type("Learner", (), {"model": type("Model", (), {"sums": np.zeros((2, prototype_package.D + 1))})})
    assert "fewer rows than none" in method.payload.find_problem(negative, None, learner, (), is_single=True)
    assert method.payload.replace_rejected(negative.vector, 0.5).x.tolist() == [0.0] * len(negative.vector)


def test_differential_privacy_is_not_claimed_for_a_payload_without_a_mechanism(study, wsi_fl):
    refusal = wsi_fl("train", "--method", "prototypes", "--set", "train.data=features", cwd=study.root)
    assert refusal.returncode == 2 and "without differential privacy" in refusal.stderr
    with pytest.raises(WsiFlError, match="no differential privacy of its own"):
        METHODS["prototypes"].payload.build_trainer(None, None)


def test_hooks_that_are_none_are_refused_in_one_line(tmp_path, study):
    broken = prototype_package.PYTHON.replace("class PrototypeHooks(StudyHooks)", "class PrototypeHooks")
    assert broken != prototype_package.PYTHON
    installed(tmp_path, name="broken", text=broken, groups={})
    with found_in(tmp_path):
        from broken import method

        from wsi_fl.stages.site.study_hooks import find_hooks

        refused(lambda: find_hooks(method), "Prototypes", "no StudyHooks", error=WsiFlError)
