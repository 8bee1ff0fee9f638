"""Tests of the local baseline and of the ensemble of local and federated model."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from conftest import LARGER, interrupted_after, make_study, metrics, nightly, same, write_features
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from test_oneshot import HEADS, rows_of
from training_runs import assert_resumes, of_site, run_of

from wsi_fl.data.tasks import CLASSES
from wsi_fl.learning.ensemble import (
    Ensemble,
    build_ensemble,
    gate_ensemble,
    roles_of_choice,
    single_federated_ensemble,
    weight_by_sample_size,
)
from wsi_fl.learning.tuning import (
    HyperParameters,
    _split_folds,
    fit_linear_head,
    selection_loss,
    softmax,
    tune_hyperparameters,
)
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.system.files import read_lines

ALONE = [*HEADS, "privacy.enabled=false", "train.tune=true", "train.rounds=1"]


def normalise_rows(x):
    return torch.nn.functional.layer_norm(torch.from_numpy(x), x.shape[-1:]).numpy()


@pytest.fixture
def skewed_study(pair):
    """Two hospitals of 100 rows, nine of ten of one class, and balanced tests."""
    for k, share in enumerate((0.1, 0.9)):
        parts = [rows_of(100, k, share, d=200), rows_of(200, 10 + k, d=200)]
        x, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        patients = [f"p{i}" for i in range(100)] + [f"t{i}" for i in range(200)]
        write_features(pair, f"S{k}", x, labels, patients, ["train"] * 100 + ["test"] * 200)
    return pair


def test_a_fitted_head_is_scikit_learns_balanced_logistic_regression():
    x, labels = rows_of(120, 0, 0.2, d=300)
    x = normalise_rows(x)
    found = fit_linear_head(x, labels, np.array([f"p{i}" for i in range(120)]), 2)
    theirs = LogisticRegression(C=found.strength, class_weight="balanced", tol=1e-9, max_iter=5000)
    theirs.fit(x, labels)
    ours = x @ found.weight.T + found.bias
    apart = ours[:, 1] - ours[:, 0] - theirs.decision_function(x)
    np.testing.assert_allclose(apart, apart.mean(), atol=0.1)  # but for its bias
    assert apart.mean() > 0  # the rare class was learned by heart


def test_the_bias_is_midway_between_classes_of_rows_that_were_held_out():
    x, labels = rows_of(200, 0, 0.06, d=300)
    x = normalise_rows(x)
    found = fit_linear_head(x, labels, np.full(200, ""), 2)
    logs = np.log(found.held_out)
    apart = logs[:, 1] - logs[:, 0]
    assert apart[labels == 0].mean() + apart[labels == 1].mean() == pytest.approx(0, abs=1e-6)
    more, theirs = rows_of(1000, 1, d=300)
    more = normalise_rows(more)
    plain = LogisticRegression(C=found.strength, class_weight="balanced", max_iter=2000).fit(x, labels)
    right = ((more @ found.weight.T + found.bias).argmax(1) == theirs).mean()
    assert right > (plain.predict(more) == theirs).mean() + 0.03
    assert found.loss == selection_loss(found.held_out, labels, CLASSES)


def test_strength_is_chosen_on_patients_that_were_held_out():
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1], 60)
    patients = np.repeat([f"p{i}" for i in range(20)], 6)
    own = rng.normal(size=(20, 400))[np.repeat(np.arange(20), 6)]  # what tells patients apart, and no class
    x = own * 3 + rng.normal(size=(120, 400))
    found = fit_linear_head(x, labels, patients, 2)
    assert found.strength < 1 / 400  # there is nothing to learn


def test_rows_that_no_fold_holds_out_leave_the_head_without_a_choice():
    labels, patients = np.array([1] * 4 + [0] * 8), np.repeat(["a", "b", "c"], [3, 2, 7])
    x = np.random.default_rng(0).normal(size=(12, 4))
    (fold,) = _split_folds(labels, patients)  # without the others no row of class 0 is left to train on
    assert fold.sum() == 3
    found = fit_linear_head(x, labels, patients, 2)
    assert (found.loss, found.held_out, found.strength) == (None, None, 1 / 4)


@pytest.mark.slow
def test_balance_makes_rare_classes_count_as_much(skewed_study):
    settings = [*HEADS, "privacy.enabled=false", "train.rounds=20", "train.lr=0.003"]

    def reached(seed, balance):
        more = [f"train.seed={seed}", f"train.balance={balance}", "train.eval_every=20"]
        run = run_of(skewed_study, "regular", *settings, *more)
        return evaluate(skewed_study, run.name)["merged"]["macro_accuracy"]["mean"]

    gains = [reached(seed, "true") - reached(seed, "false") for seed in range(2)]
    assert min(gains) > 0 and np.mean(gains) > 0.02


def test_a_model_under_privacy_is_not_weighted_by_private_counts(skewed_study):
    released = []
    for balance in ("false", "true"):
        overrides = [*HEADS, "train.rounds=1", "privacy.insecure_seed=3", f"train.balance={balance}"]
        run = run_of(skewed_study, "proxyfl", *overrides)
        lines = [
            line for line in read_lines(skewed_study.ledger_path("S0")) if line.get("run", "").startswith(run.name)
        ]
        released.append([line["released"] for line in lines if "released" in line])
    assert released[0] == released[1] != []


def test_network_models_choose_their_settings_one_at_a_time():
    labels, patient = np.tile([0, 1], 20), np.array([f"p{i // 2}" for i in range(40)])
    asked = []

    def way_of(way, seen):
        asked.append(way)
        good = 0.6 + 0.1 * way.balance + 0.1 * (way.weight_decay == 1e-2) + 0.1 * (way.lr < 1)
        said = np.full((int((~seen).sum()), 2), 1 - good)
        said[np.arange(len(said)), labels[~seen]] = good
        return said

    for folds in (5, 1):
        asked.clear()
        best, held_out = tune_hyperparameters(labels, patient, HyperParameters(1.0, 0.0, False), way_of, folds=folds)
        assert best == HyperParameters(0.3, 1e-2, True)
        assert held_out.shape == (40, 2)
        assert selection_loss(held_out, labels, CLASSES) == pytest.approx(-np.log(0.9))
        # nothing is trained twice, and of the best there are always all folds
        assert len(asked) == (len(set(asked)) * 5 if folds == 5 else len(set(asked)) + 4)


def draw_predictions(labels, skill, seed):
    margin = (2 * labels - 1) * skill + np.random.default_rng(seed).normal(size=len(labels))
    return np.stack([1 / (1 + np.exp(margin)), 1 / (1 + np.exp(-margin))], axis=1)


ROWS = np.tile([0, 1], 200)
EACH = np.array([f"p{k}" for k in range(400)])


def measure_accuracy(answers, labels):
    return np.mean([(answers.argmax(1) == labels)[labels == one].mean() for one in (0, 1)])


def test_a_useless_federated_model_gets_no_weight_in_the_ensemble():
    own = draw_predictions(ROWS, 1.0, 0)
    for other in (draw_predictions(ROWS, 0.0, 1), draw_predictions(ROWS, -1.0, 1), np.full((400, 2), 0.5), own):
        stack = gate_ensemble(own, other, ROWS, EACH)
        assert stack.weight == 0
        np.testing.assert_allclose(stack(own, other), own, atol=1e-9)


def test_a_useful_federated_model_enters_the_ensemble_beside_the_local_one():
    own, other = draw_predictions(ROWS, 1.0, 0), draw_predictions(ROWS, 1.0, 2)
    both = gate_ensemble(own, other, ROWS, EACH)
    assert 1 / 3 <= both.weight <= 2 / 3
    assert measure_accuracy(both(own, other), ROWS) > measure_accuracy(own, ROWS) + 0.03
    fools = draw_predictions(ROWS, 0.0, 1)
    assert gate_ensemble(fools, other, ROWS, EACH).weight == 2 / 3  # never the joined one alone


def test_few_rows_or_patients_leave_the_ensemble_local():
    rare = np.repeat([0, 1], [60, 3])
    kept, lost = [], []
    for seed in range(40):
        stack = gate_ensemble(
            draw_predictions(rare, 1.0, seed), draw_predictions(rare, 0.3, 100 + seed), rare, EACH[:63]
        )
        kept.append(stack.weight == 0)
        own, other = draw_predictions(ROWS, 1.0, 200 + seed), draw_predictions(ROWS, 0.3, 300 + seed)
        lost.append(measure_accuracy(own, ROWS) - measure_accuracy(stack(own, other), ROWS))
    assert np.mean(kept) > 0.8 and np.mean(lost) < 0.01


@pytest.mark.parametrize(("n", "most"), [(1, 0.0), (2, 1 / 3), (5, 1 / 3), (8, 1 / 2), (40, 2 / 3)])
def test_the_ensemble_weight_falls_with_the_number_of_patients_of_a_class(n, most):
    labels = np.repeat([0, 1], [60, n])
    stack = gate_ensemble(draw_predictions(labels, 0.0, 1), draw_predictions(labels, 3.0, 2), labels, EACH[: 60 + n])
    assert stack.weight == most


def test_an_uninformative_model_gets_no_weight_beside_an_overconfident_local_one():
    opened, kept = [], []
    for seed in range(40):
        own = softmax(5 * np.log(draw_predictions(ROWS, 1.0, seed)))
        opened.append(gate_ensemble(own, draw_predictions(ROWS, 0.0, 100 + seed), ROWS, EACH).weight > 0)
        kept.append(gate_ensemble(own, draw_predictions(ROWS, 1.0, 200 + seed), ROWS, EACH).weight > 0)
    assert np.mean(opened) < 0.1 and np.mean(kept) > 0.9


def test_a_site_with_at_most_one_row_of_a_class_uses_the_federated_model():
    labels = np.tile([0, 1], 30)
    three = np.full((60, 3), 1 / 3)
    assert build_ensemble(three, three, labels, EACH[:60]) == single_federated_ensemble(3)
    labels[0] = 2
    assert build_ensemble(three, three, labels, EACH[:60]) == single_federated_ensemble(3)
    labels[1] = 2
    assert build_ensemble(three, three, labels, EACH[:60]) != single_federated_ensemble(3)


def test_the_threshold_moves_where_a_class_has_one_patient_with_many_rows():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [60, 5])
    x = rng.normal(size=(65, 200)) + 0.35 * labels[:, None]
    whose = np.array([*(f"p{k // 5}" for k in range(60)), *["q"] * 5])
    alone = fit_linear_head(x, labels, whose, 2)
    assert alone.loss is not None and alone.held_out is not None
    single = fit_linear_head(x[:61], labels[:61], EACH[:61], 2)
    assert single.loss is None  # nothing can be held out
    others = rng.normal(size=(400, 200)) + 0.35 * ROWS[:, None]
    moved = (others @ alone.weight.T + alone.bias).argmax(1)
    assert 0.3 < moved.mean() < 0.7


@pytest.mark.parametrize(
    ("rare", "patients", "most"), [(5, 1, 1 / 3), (5, 5, 2 / 3), (1, 1, 2 / 3)], ids=["one", "five", "row"]
)
def test_the_only_patient_of_a_class_counts_for_at_most_a_third_of_its_statistics(rare, patients, most):
    labels = np.repeat([0, 1], (40, rare))
    whose = np.array([f"a{i}" for i in range(40)] + [f"b{i % patients}" for i in range(rare)])
    said = softmax(np.random.default_rng(0).normal(size=(len(labels), 2)) + 2.0 * np.eye(2)[labels])
    assert weight_by_sample_size(said, said, labels, (2.0, 200.0), patient=whose).weight == pytest.approx(most)


def test_rows_of_a_patient_count_as_one():
    eight = np.tile([0, 1], 4)
    pairs = [[np.tile(draw_predictions(eight, 0.5, seed + k), (50, 1)) for k in (0, 1000)] for seed in range(60)]
    alike = np.tile(np.arange(8).astype(str), 50)
    often = [np.mean([gate_ensemble(*two, ROWS, names).weight > 0 for two in pairs]) for names in (EACH, alike)]
    assert often[0] > often[1] + 0.3


def test_a_federated_model_that_prefers_a_class_is_centred():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [380, 20])
    margin = (np.where(labels == 1, 1.0, -1.0) + rng.normal(size=400)) * 2 - 6  # an answer shifted by a prior
    other = np.stack([1 / (1 + np.exp(margin)), 1 / (1 + np.exp(-margin))], 1)
    own = draw_predictions(labels, 1.0, 4)
    stack = gate_ensemble(own, other, labels, EACH)
    assert measure_accuracy(other, labels) < 0.6 and stack.weight > 0
    assert measure_accuracy(stack(own, other), labels) > measure_accuracy(own, labels) + 0.02


def test_an_ensemble_loads_back_from_its_document_and_keeps_impossible_classes_at_zero():
    found = gate_ensemble(draw_predictions(ROWS, 1.0, 0), draw_predictions(ROWS, 1.0, 2), ROWS, EACH)
    stack = replace(found, own="local", shared="mean")
    document = json.loads(json.dumps(asdict(stack)))
    assert Ensemble.parse_document(document) == stack
    assert roles_of_choice("ensemble", stack) == ("local", "private", "proxy")
    earlier = {key: value for key, value in document.items() if key not in ("own", "shared")}
    assert roles_of_choice("ensemble", Ensemble.parse_document(earlier)) == ("private", "proxy")
    never = np.array([[0.0, 1.0]])
    assert stack(never, never)[0, 0] == 0
    other = draw_predictions(ROWS, 0.0, 3)
    np.testing.assert_allclose(
        single_federated_ensemble(2)(other, own := draw_predictions(ROWS, 1.0, 4)), own, atol=1e-9
    )


def test_a_tuned_hospital_sets_the_slide_threshold_on_held_out_patients(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    tumour = np.zeros((20, 10), int)  # every second slide has three tumour patches among ten; all look a little ill
    tumour[1::2, :3] = 1
    labels, of = tumour.flatten(), np.arange(20).repeat(10)
    x = np.random.default_rng(0).normal(size=(200, 24)) + 3 * np.outer(labels, np.arange(24) < 3)
    splits, (patients, slides) = ["train"] * 150 + ["test"] * 50, ([f"{c}{k}" for k in of] for c in "ps")
    write_features(study, "S0", x, labels, patients, splits, slides)
    run = run_of(study, "regular", *ALONE)
    row = evaluate(study, run.name)["sites"][0]["slides"]
    kept = of_site(run, "S0", "prediction_model")
    assert row["threshold"] == kept["slide_threshold"] and kept["by"] == "cross-validation"
    assert row["accuracy"] >= 0.8 and row["auroc"] >= 0.8


TALKING = ["proxyfl", "fedavg", *nightly("fml", "avgpush", "cwt")]
SEEDED = ("privacy.insecure_seed=1", "train.rounds=2")
KINDS = {"heads": HEADS, "networks": ["train.val_fraction=0.34", "train.seed=2"]}


_RUNS = {}


def train_seeded(study, method, *overrides):
    """Return the folder of such a run, trained once."""
    key = (study.root, method, *overrides)
    if key not in _RUNS:
        _RUNS[key] = run_of(study, method, *SEEDED, *overrides)
    return _RUNS[key]


def assert_same_models(one, role, other, other_role=None):
    """The models of a role, of all sites, are those of another run."""
    models = [
        {file.parent.name: load_file(file) for file in path.glob(f"sites/*/{name}.safetensors")}
        for path, name in ((one, role), (other, other_role or role))
    ]
    assert models[0].keys() == models[1].keys() == {"S0", "S1"}
    assert all(same(tensors, models[1][site]) for site, tensors in models[0].items())


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Two studies of two sites: one with features of 60 training patients, one with tiny patches."""
    found = {kind: make_study(tmp_path_factory.mktemp(kind) / "study", n_sites=2, text=LARGER) for kind in KINDS}
    for k, share in enumerate((0.2, 0.5)):
        x, labels = rows_of(60, k, share, d=40)
        more, theirs = rows_of(60, 10 + k, d=40)
        patients, splits = [f"p{i}" for i in range(120)], ["train"] * 60 + ["test"] * 60
        rows, of = np.concatenate([x, more]), np.concatenate([labels, theirs])
        write_features(found["heads"], f"S{k}", rows, of, patients, splits)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", TALKING)
def test_the_local_model_trains_beside_the_others_changes_none_of_them_and_is_not_sent(studies, kind, method):
    study, settings = studies[kind], KINDS[kind]
    with_it, without = (train_seeded(study, method, *settings, *more) for more in ([], ["train.local_baseline=false"]))
    for role in ("private", *["proxy"] * (method in ("proxyfl", "fml"))):
        assert_same_models(with_it, role, without)
    assert not list(without.glob("sites/*/local.safetensors"))
    sent = [[line["bytes"] for line in metrics(path, "S0")] for path in (with_it, without)]
    assert sent[0] == sent[1]
    document = evaluate(study, str(with_it))
    for row in document["sites"]:
        choice = of_site(with_it, row["site"], "prediction_model")
        assert choice["ensemble"]["own"] == "local" and choice["ensemble"]["weight"] <= 2 / 3
        assert row["model"] == choice["model"] == ("ensemble" if choice["ensemble"]["weight"] else "local")
        assert row["accuracy"] == row["models"][row["model"]]["accuracy"]
        assert choice["n"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_local_model_equals_the_one_of_local_training(studies, kind):
    study, tune = studies[kind], f"train.tune={str(kind == 'heads').lower()}"
    held = [one for one in KINDS[kind] if "val_fraction" not in one]
    alone = train_seeded(study, "regular", *held, "privacy.enabled=false", tune)
    assert_same_models(train_seeded(study, "fedavg", *held), "local", alone, "private")


def test_models_that_stay_at_the_site_have_a_separate_learning_rate(studies):
    study, slow, bare = studies["networks"], "train.private_lr=0.0005", "privacy.enabled=false"
    joined, proxies = (train_seeded(study, "proxyfl", "train.lr=0.03", *more) for more in ([slow], []))
    alone = train_seeded(study, "regular", "train.lr=0.0005", bare)
    assert_same_models(joined, "local", alone, "private")
    assert_same_models(train_seeded(study, "regular", slow, bare), "private", alone)
    assert_same_models(joined, "proxy", proxies)  # in strict mode it sees no private model
    assert_same_models(train_seeded(study, "regular", slow), "private", train_seeded(study, "regular"))  # with noise


def test_a_tuned_network_weighs_its_ensemble_on_all_training_rows(studies):
    study = studies["networks"]
    path = train_seeded(study, "proxyfl", "train.tune=true")
    alone = train_seeded(study, "regular", "train.tune=true", "privacy.enabled=false")
    assert_same_models(path, "local", alone, "private")
    for row in evaluate(study, str(path))["sites"]:
        choice = of_site(path, row["site"], "prediction_model")
        with PatchStore(study.store_path(row["site"])) as store:
            assert choice["n"] == (store.table.split == "train").sum()
        assert choice["ensemble"]["own"] == "local" and choice["ensemble"]["shared"] == "proxy"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_keeps_its_local_model_and_predictions(studies, kind):
    study, settings = studies[kind], KINDS[kind]
    whole = train_seeded(study, "proxyfl", *settings)
    assert (whole / "sites" / "S1" / "prediction_model.json").exists()
    assert_resumes(study, "proxyfl", *SEEDED, *settings, interruption=interrupted_after(3), whole=whole)
