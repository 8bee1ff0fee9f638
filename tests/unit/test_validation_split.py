"""A site's prediction model is chosen by a validation split or is an ensemble of both models."""

import json

import numpy as np
import pytest
from conftest import edited, interrupted_after, metrics, refused
from conftest import larger_study as make_study

from wsi_fl.data.validation import HoldoutDraw, draw_held_out
from wsi_fl.learning.ensemble import select_model
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.load_models import choose_ensemble, load_run_settings
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train

SEEDED = "privacy.insecure_seed=1"


SPLIT = ("train.val_fraction=0.34", "train.seed=2", SEEDED)  # of three training patients: one at each site


def run(study, *overrides, method="proxyfl"):
    return study.root / train(study, method=method, overrides=overrides, backend="local")["run"]


def evaluate_rows(study, path, *overrides):
    """Return the rows of an evaluation."""
    return evaluate(study, str(path), overrides=overrides)["sites"]


def choice_of(path, site):
    return json.loads((path / "sites" / site / "prediction_model.json").read_text())


def predict_classes(classes, n_classes=2):
    """Return probabilities of a model that predicts these classes."""
    return np.eye(n_classes)[np.asarray(classes)] * 0.8 + 0.2 / n_classes


@pytest.mark.parametrize("fraction", [0.1, 0.34, 0.9])
def test_whole_patients_are_held_out_reproducibly(fraction):
    everyone = np.array([f"p{k // 4}" for k in range(1600)])

    def drawn(seed=3, **given):
        return set(everyone[draw_held_out(everyone, fraction, seed, **given)])

    held = draw_held_out(everyone, fraction, 3)
    spread = 4 * np.sqrt(400 * fraction * (1 - fraction))
    assert len(drawn()) == pytest.approx(400 * fraction, abs=spread)
    assert not set(everyone[held]) & set(everyone[~held]) and drawn() == drawn()
    assert len({tuple(sorted(drawn(seed))) for seed in range(9)}) > 1
    assert drawn(holdout=HoldoutDraw(b"a")) == drawn(holdout=HoldoutDraw(b"a")) != drawn(holdout=HoldoutDraw(b"b"))
    assert len(drawn(holdout=HoldoutDraw(b"a"))) == pytest.approx(400 * fraction, abs=spread)


def test_the_validation_split_of_a_patient_is_independent_of_other_patients():
    names = np.array([f"p{k}" for k in range(24)])
    for lots in (HoldoutDraw(), HoldoutDraw(b"secret")):
        held = set(names[draw_held_out(names, 0.34, 0, lots)])
        assert held
        for gone in names:
            rest = names[names != gone]
            assert set(rest[draw_held_out(rest, 0.34, 0, lots)]) == held - {gone}


def test_rows_without_a_patient_are_held_out_only_without_a_privacy_guarantee(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    with edited(study.store_path("S0")) as file:
        file["patient"][:5] = b""
    words = ("site S0: 5 training rows have no patient", "name the patients", "train.val_fraction")
    refused(lambda: run(study, SPLIT[0], "privacy.sigma=1.0"), *words)
    assert not study.ledger_path("S0").exists()
    run(study, "privacy.sigma=1.0", "train.rounds=1")
    run(study, SPLIT[0], "privacy.enabled=false", "train.rounds=1")


def test_a_site_that_would_hold_out_all_its_patients_is_refused(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    refused(lambda: run(study, "train.val_fraction=0.999"), "train.val_fraction", "lower it")


def test_the_best_model_weighs_classes_alike_and_ties_go_to_the_private_model():
    labels = np.repeat([0, 1], [18, 2])
    always = predict_classes(np.zeros(20, int))
    knows = 0.1 + 0.8 * predict_classes([*[0] * 12, *[1] * 6, 1, 1])  # less sure, so that their mean is no tie
    assert select_model({"private": always, "proxy": knows}, labels) == "proxy"
    assert select_model({"private": knows, "proxy": always}, labels) == "private"
    assert select_model({"private": knows, "proxy": knows}, labels) == "private"
    assert select_model({"private": always}, labels) == "private"
    assert select_model({"private": always, "proxy": knows}, np.zeros(20, int)) == "private"


@pytest.fixture(scope="module")
def validated_run(tmp_path_factory):
    """Return a study, a run with a validation split, and its evaluation."""
    study = make_study(tmp_path_factory.mktemp("listening") / "study", n_sites=3)
    path = run(study, *SPLIT, "train.rounds=2")
    return study, path, evaluate(study, str(path))


def test_the_chosen_model_is_saved_logged_and_evaluated(validated_run):
    study, path, document = validated_run
    pipeline = load_run_settings(study, RunFolder(path), ())
    for row in document["sites"]:
        choice, models = choice_of(path, row["site"]), row["models"]
        reached, stack = choice["macro_accuracy"], choice["ensemble"]
        assert set(reached) == {"local", "private", "proxy", "mean"} and choice["n"] == 12
        joined = {one: reached[one] for one in ("private", "proxy", "mean")}
        assert stack["own"] == "local" and reached[stack["shared"]] == max(joined.values())
        assert choice["model"] == ("ensemble" if stack["weight"] else "local")
        assert row["model"] == choice["model"] == choose_ensemble(RunFolder(path), pipeline, row["site"])
        last = metrics(path, row["site"])[-1]
        assert last["model"] == row["model"]
        assert last["merged"]["accuracy"] == row["accuracy"] == models[row["model"]]["accuracy"]
        assert last["proxy"]["accuracy"] == models["proxy"]["accuracy"]
        assert row["own"]["auroc"] == models[row["model"]]["own"]["auroc"]
        assert set(models) == {"private", "proxy", "mean", "local", "ensemble"}
    spread = document["models"]["mean"]
    assert set(spread) == {"merged", "internal"}
    every = [row["models"]["mean"]["accuracy"] for row in document["sites"]]
    assert spread["merged"]["accuracy"]["mean"] == pytest.approx(np.mean(every))


@pytest.mark.parametrize("answer", ["private", "proxy", "mean", "local", "ensemble"])
def test_evaluate_uses_the_configured_prediction_model(validated_run, answer):
    study, path, chosen = validated_run
    for row, before in zip(evaluate_rows(study, path, f"predict.model={answer}"), chosen["sites"], strict=True):
        assert row["model"] == answer and row["accuracy"] == before["models"][answer]["accuracy"]
    evaluate(study, str(path))


def test_every_round_predicts_with_the_configured_model(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    path = run(study, SEEDED, "predict.model=mean", "train.rounds=1", "train.local_baseline=false")
    (line,), row = metrics(path, "S0"), evaluate_rows(study, path)[0]
    assert (line["model"], row["model"]) == ("mean", "mean")
    assert line["merged"] == {key: row["models"]["mean"][key] for key in line["merged"]}
    refused(lambda: evaluate_rows(study, path, "predict.model=local"), "train.local_baseline = false")
    refused(lambda: evaluate_rows(study, path, "predict.model=ensemble"), "trained without")
    row = evaluate_rows(study, run(study, "predict.model=proxy", "train.rounds=1", method="regular"))[0]
    assert row["model"] == "private" and set(row["models"]) == {"private"}


@pytest.mark.parametrize(("alone", "answer"), [("true", "local"), ("false", "private")])
def test_a_site_without_validation_rows_uses_its_default_prediction_model(tmp_path, alone, answer):
    study = make_study(tmp_path / "study", n_sites=2)
    path = run(study, SEEDED, "train.rounds=1", f"train.local_baseline={alone}")
    assert [row["model"] for row in evaluate_rows(study, path)] == [answer] * 2
    for method, n in (("proxyfl", (24, 12)), ("regular", (36, 0))):  # nothing to choose
        row = dry_run(study, method=method, overrides=SPLIT[:2])["sites"][0]
        assert (row["n_train"], row["n_validation"]) == n


def test_an_ensemble_needs_held_out_rows(study):
    stack = ("predict.model=ensemble", "train.local_baseline=false")
    refused(lambda: run(study, *stack), "predict.model = 'ensemble'", "val_fraction=0.15")
    open_hearts = (*stack, "privacy.enabled=false", "train.tune=true")
    refused(lambda: run(study, *open_hearts), "predict.model = 'ensemble'")


@pytest.mark.slow
def test_a_resumed_run_predicts_with_the_same_ensemble(tmp_path):
    study = make_study(tmp_path / "study", n_sites=3, n_per_slide=20)
    settings = [*SPLIT, "predict.model=ensemble", "train.rounds=3", "privacy.sigma=0.05"]
    whole = run(study, *settings)
    with interrupted_after(5):
        run(study, *settings)
    broken = sorted(study.runs_path.glob("0*"))[-1]
    resume_run(study, broken.name, backend="local")
    for site in study.site_names():
        assert choice_of(whole, site) == choice_of(broken, site)
        assert [one["model"] for one in metrics(whole, site)] == [one["model"] for one in metrics(broken, site)]
