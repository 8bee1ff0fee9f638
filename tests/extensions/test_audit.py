"""Tests of the privacy audit: membership attacks, false alarms, lower bounds of ε and its report."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from math import comb, exp, sqrt

import numpy as np
import pytest
import torch
from conftest import REAL, make_study, nightly, refused, write_features, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm, t
from sklearn.metrics import roc_auc_score
from training_runs import trained

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import concatenate_examples
from wsi_fl.data.privacy_units import build_canaries, toss_coins
from wsi_fl.evidence import audit_run as stage
from wsi_fl.evidence.attacks import (
    _GUESS_SHARES,
    CanaryBound,
    _lower_epsilon,
    _p_value,
    auroc_interval,
    bonferroni_level,
    canary_bound,
    compute_auroc,
    roc_points,
    threshold_accuracy,
    tpr_at_fpr,
)
from wsi_fl.evidence.audit_run import _load_audited_models, audit_run, render_audit_lines
from wsi_fl.learning.local_training import example_losses, predict_examples
from wsi_fl.models import create_model
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger_file import digest_values
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.build_sites import load_canaries
from wsi_fl.stages.training.checks import check_run
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines
from wsi_fl.system.tensors import save_tensors
from wsi_fl.types import Bags, Images, UsageError, Vectors, WsiFlError

CPU = torch.device("cpu")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.integers(0, 999))
def test_auroc_and_roc_are_those_of_sklearn_and_of_counting(n, m, n_values, seed):
    rng = np.random.default_rng(seed)
    members, others = (rng.integers(n_values, size=k).astype(float) for k in (n, m))
    truth = np.repeat([1, 0], [n, m])
    assert compute_auroc(members, others) == pytest.approx(roc_auc_score(truth, np.concatenate([members, others])))
    for rate, found in roc_points(members, others):
        thresholds = [t for t in [*np.unique(others), np.inf] if (others >= t).mean() <= rate + 1e-9]
        low = min(thresholds)
        best = max((members > v).mean() for v in [*others, -np.inf] if (others > v).mean() <= rate + 1e-9)
        assert found == pytest.approx(best) and found >= (members >= low).mean()


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 30), st.integers(2, 30), st.integers(1, 6), st.integers(0, 999))
def test_the_accuracy_of_a_threshold_is_judged_on_the_halves_that_did_not_choose_it(n, m, n_values, seed):
    rng = np.random.default_rng(seed)
    patients = [[f"{k % (size - 1 or 1)}" for k in range(size)] for size in (n + 1, m + 1)]  # the first has two rows
    members, others = rng.integers(n_values, size=n + 1) + 0.5, rng.integers(n_values, size=m + 1) * 1.0
    draw, right, halves = np.random.default_rng(0), [], []
    for x, names in zip((members, others), patients, strict=True):
        order = draw.permutation(len(set(names)))
        first = {sorted(set(names))[k] for k in range(len(order)) if order[k] < (len(order) + 1) // 2}
        is_first = np.array([name in first for name in names])
        halves.append((x[is_first], x[~is_first]))
    (a, b), (c, d) = halves

    def share(threshold, members, others):
        return (np.mean(members >= threshold) + np.mean(others < threshold)) / 2

    for x, y, z, w in ((a, c, b, d), (b, d, a, c)):
        values = sorted({*x, *y})
        between = [-np.inf, *((low + high) / 2 for low, high in pairwise(values)), np.inf]
        best = max(between, key=lambda t, x=x, y=y: round(share(t, x, y), 9))
        right.append(share(best, z, w))
    assert threshold_accuracy(members, others, *map(np.array, patients)) == pytest.approx(np.mean(right))


def test_the_accuracy_of_a_threshold_has_one_half_as_chance_however_many_members_there_are():
    rng = np.random.default_rng(1)

    def of_patients(members, others):
        return threshold_accuracy(members, others, *(np.arange(len(x)).astype(str) for x in (members, others)))

    assert of_patients(rng.normal(size=4000), rng.normal(size=400)) == pytest.approx(0.5, abs=0.05)
    assert of_patients(np.arange(50, 54.0), np.arange(4.0)) == 1.0
    assert of_patients(np.ones(9), np.ones(3)) == 0.5
    assert of_patients(np.ones(1), np.ones(3)) is None


def test_the_accuracy_of_a_threshold_does_not_recognise_patients():
    """Losses differ between patients alone: who knew a patient's other rows would be right too often."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        levels = [np.repeat(rng.normal(size=n), 50) for n in (8, 4)]
        names = [np.repeat(np.arange(n).astype(str), 50) for n in (8, 4)]
        found.append(threshold_accuracy(*levels, *names))
    assert np.mean(found) < 0.52


def test_true_positives_at_few_false_alarms_need_a_thousand_non_members():
    members, others = np.array([5.0, 0.5, 2.0, 990.5]), np.arange(1000.0)
    assert tpr_at_fpr(members, others[:999], 0.01) is None
    assert tpr_at_fpr(members, others, 0.01) == 0.25  # ten others lie above 989
    assert tpr_at_fpr(members, others, 0.001) == 0.0  # 990.5 lies below nine of them
    assert tpr_at_fpr(members[:0], others, 0.01) is None
    assert compute_auroc(members, others[:0]) is None and roc_points(members[:0], others) == []


def test_the_interval_redraws_whole_patients():
    rng = np.random.default_rng(0)
    members, others = rng.normal(0.5, 1, 30), rng.normal(0, 1, 24)
    mine, theirs = np.repeat([f"m{k}" for k in range(6)], 5), np.repeat([f"o{k}" for k in range(8)], 3)
    found = auroc_interval(members, others, mine, theirs, repeats=200, seed=4)
    again, drawn = np.random.default_rng(4), []
    for _ in range(200):
        some = [np.flatnonzero(mine == f"m{k}") for k in again.integers(6, size=6)]
        more = [np.flatnonzero(theirs == f"o{k}") for k in again.integers(8, size=8)]
        drawn.append(compute_auroc(members[np.concatenate(some)], others[np.concatenate(more)]))
    tail = norm.cdf(t(5).ppf(0.025) * sqrt(6 / 5))  # of six patients, which vary more than draws of them
    assert found == pytest.approx(np.quantile(drawn, [tail, 1 - tail]).tolist())
    few = np.repeat(["a", "b", "c"], 8)
    assert auroc_interval(members, others, mine, few, repeats=200) is None
    names = np.array([*"aabbccdd"]), np.array([*"efghef"])
    parted = auroc_interval(np.arange(8.0) + 9, np.arange(6.0), *names, repeats=50)
    assert parted == pytest.approx([*binomtest(4, 4).proportion_ci(method="exact")])
    nameless = auroc_interval(members, others, np.full(30, ""), np.full(24, ""), repeats=200)
    assert nameless is not None and nameless[0] < nameless[1]


def test_the_interval_of_few_patients_is_seldom_above_chance():
    """Four patients and twelve others of the same distribution, whose four rows are nearly alike."""
    rng, n_alarms = np.random.default_rng(0), 0
    names = [np.repeat([f"{side}{k}" for k in range(n)], 4) for side, n in (("m", 4), ("o", 12))]
    for _ in range(300):
        sides = [np.repeat(rng.normal(size=n), 4) + rng.normal(size=4 * n) / 3 for n in (4, 12)]
        n_alarms += auroc_interval(*sides, *names, repeats=80)[0] > 0.5
    assert n_alarms <= binom.ppf(0.99, 300, 0.025)


def slow_p_value(m, r, v, epsilon, delta):
    """Compute the p-value of theorem 5.2 of Steinke, Nasr and Jagielski (2023) term by term."""
    q = exp(epsilon) / (exp(epsilon) + 1)

    def f(at):
        return sum(comb(r, w) * q**w * (1 - q) ** (r - w) for w in range(max(0, at), r + 1))

    worst = max((f(v - i) - f(v)) / i for i in range(1, m + 1))
    return min(1.0, f(v) + 2 * m * delta * worst)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_p_values_are_those_of_the_theorem(data):
    m = data.draw(st.integers(2, 40))
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(0, r))
    epsilon, delta = data.draw(st.floats(0, 4)), data.draw(st.sampled_from([0.0, 1e-5, 1e-2]))
    found = _p_value(m, r, v, epsilon, delta)
    assert found == pytest.approx(slow_p_value(m, r, v, epsilon, delta), abs=1e-12)
    assert found <= _p_value(m, r, v, epsilon + 0.1, delta) + 1e-12
    assert found <= _p_value(m, r, v, epsilon, delta + 1e-3) + 1e-12


@pytest.mark.parametrize("epsilon", [1.0, *nightly(0.0, 3.0)])
def test_randomised_response_is_bounded_below_its_epsilon_and_not_far(epsilon):
    """The scores are the coins, each flipped with probability 1 / (1 + e^ε): the worst (ε, 0) mechanism."""
    rng = np.random.default_rng(1)
    bounds = []
    for _ in range(60):
        coins = rng.random(500) < 0.5
        told = coins ^ (rng.random(500) < 1 / (1 + exp(epsilon)))
        bounds.append(canary_bound(told + 1e-9 * rng.random(500), coins, 1e-5).epsilon)
    assert np.mean(np.array(bounds) > epsilon) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 60)
    if epsilon:
        assert epsilon - 0.8 < np.median(bounds)


def chance_of_refuting(m, epsilon, confidence):
    """Bound the chance of a false alarm for randomised response: the sum over the four shares of guessed canaries.

    A guess about it is right with probability e^ε / (1 + e^ε), whatever the other guesses.
    """
    right = exp(epsilon) / (1 + exp(epsilon))
    error, chance = (1 - confidence) / len(_GUESS_SHARES), 0.0
    for guesses in (int(m * share) // 2 * 2 for share in _GUESS_SHARES):
        found = [_lower_epsilon(m, guesses, v, 0.0, error) > epsilon for v in range(guesses + 1)]
        chance += binom.sf(found.index(True) - 1, guesses, right) if True in found else 0.0
    return chance


@pytest.mark.parametrize(
    ("models", "epsilon"), [(1, 2.0), (40, 0.5), *nightly((1, 0.5), (8, 0.5), (8, 2.0), (40, 2.0))]
)
def test_the_chance_that_any_of_many_models_is_called_broken_stays_below_five_percent(models, epsilon):
    each = chance_of_refuting(120, epsilon, bonferroni_level(0.95, models))
    assert 0 < 1 - (1 - each) ** models < 0.05
    alone = chance_of_refuting(120, epsilon, 0.95)
    assert models == 1 or 1 - (1 - alone) ** models > 0.05, "95 % for each would not do"


def test_perfect_scores_are_limited_by_the_number_of_canaries():
    coins = np.arange(400) % 2 == 0
    perfect = canary_bound(coins.astype(float), coins, 1e-5)
    assert (perfect.guesses, perfect.n_correct, perfect.accuracy) == (400, 400, 1.0)
    assert perfect.epsilon == _lower_epsilon(400, 400, 400, 1e-5, 0.0125)
    assert 4.0 < perfect.epsilon < canary_bound(np.tile(coins, 4).astype(float), np.tile(coins, 4), 0).epsilon
    assert canary_bound(-coins.astype(float), coins, 1e-5).epsilon == 0
    assert canary_bound(coins.astype(float), coins, 0.01).epsilon < perfect.epsilon  # δ explains some of it
    assert canary_bound(np.zeros(0), coins[:0], 1e-5).epsilon == 0
    assert canary_bound(np.full(400, np.nan), coins, 1e-5).guesses > 0


def test_coins_are_fair_and_never_the_same():
    _, coins = toss_coins(20_000)
    assert abs(coins.mean() - 0.5) < 5 * 0.5 / np.sqrt(20_000)
    assert toss_coins(64)[0] != toss_coins(64)[0]
    assert (toss_coins(64)[1] != toss_coins(64)[1]).any()


@pytest.mark.parametrize("shape", [Images(3, 8), Vectors(20), Bags(5)])
def test_canaries_are_reproduced_from_their_seed_and_fit_any_training_set(shape):
    included = np.arange(10) % 3 == 0
    one, same, other = (build_canaries(seed, included, shape, 3) for seed in (5, 5, 6))
    rows = np.arange(10)
    assert np.array_equal(one.examples.read(rows), same.examples.read(rows))
    assert not np.array_equal(one.examples.read(rows), other.examples.read(rows))
    assert set(one.examples.label) <= {0, 1, 2} and len(one.select_planted()) == 4
    first = one.examples.read(rows)
    train = replace(one.examples, read=lambda chosen: first[chosen], show=lambda chosen, draws: first[chosen])
    both = concatenate_examples([train, one.select_planted()])
    assert both.show is not None
    some = iter([np.array([1, 11, 13])])
    x, y = next(load_batches(both, some, augment=None, device=CPU, draws=CipherStream.from_seed(1)))
    assert len(x) == 3 and y.tolist() == one.examples.label[[1, 3, 9]].tolist()
    name = {Images: "mlp", Vectors: "linear_head", Bags: "deepset"}[type(shape)]
    model = create_model(name, n_classes=3, shape=shape, seed=0)
    with torch.no_grad():
        p = predict_examples(model, one.examples, CPU)
    losses = example_losses(model, one.examples, CPU, batch_size=4)
    assert losses == pytest.approx(-np.log(p[rows, one.examples.label]), abs=1e-5)
    assert len(example_losses(model, concatenate_examples([one.select_planted()]), CPU)) == 4


SHORT = ["audit.canaries=400", "model.private=mlp", "train.eval_every=100", "train.batch_size=64"]
PLAN = [*SHORT, "train.rounds=20", "train.lr=0.002", "privacy.clip=1.0"]


def models(document, name):
    return [model for site in document["sites"] for model in site["models"] if model["model"] == name]


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory):
    """Two sites in strict mode with noise, 400 canaries each: the study, its summary and its audit."""
    study = make_study(tmp_path_factory.mktemp("audit") / "study", n_sites=2)
    summary = trained(study, "proxyfl", *PLAN, "privacy.sigma=8.0")
    return study, summary, audit_run(study, summary["run"])


def test_with_noise_the_bound_stays_below_epsilon_and_without_it_canaries_are_revealed(noisy_run):
    study, summary, document = noisy_run
    for row, site in zip(summary["sites"], document["sites"], strict=True):
        said = [row[key] for key in ("guarantee", "canaries", "n_train", "n_units")]
        assert said == ["guaranteed", 400, 36, 436]
        private, proxy = site["models"]
        assert [(one["model"], one["dp"]) for one in site["models"]] == [("private", False), ("proxy", True)]
        found = proxy["canaries"]
        assert found["epsilon_upper"] == site["epsilon"] == row["epsilon"]
        assert found["epsilon_lower"] < row["epsilon"] and found["broken"] is False
        assert private["canaries"]["epsilon_upper"] is private["canaries"]["broken"] is None
        assert private["canaries"]["epsilon_lower"] > 1 and private["canaries"]["accuracy"] > 0.6
        lines = read_lines(study.ledger_path(row["site"]))
        rates = {line["mechanism"]["sample_rate"] for line in lines if line.get("mechanism")}
        assert rates == {1 / -(-436 // 64)}  # of rows and canaries, whatever the coins


def test_a_bound_is_called_broken_at_the_level_of_all_models_of_the_run(noisy_run, monkeypatch):
    study, summary, document = noisy_run
    assert (document["confidence"], document["tests"], document["level"]) == (0.95, 2, 0.975)
    assert "2 models" in document["tested"] and "97.5 %" in document["tested"]
    assert "replaced by nothing" in document["adjacency"] and "group of two" in document["adjacency"]
    for found in (model["canaries"] for model in models(document, "proxy")):
        assert found["epsilon_lower_corrected"] <= found["epsilon_lower"]

    def far_above_up_to(level):
        def bound(scores, included, delta, *, confidence):
            return CanaryBound(len(scores), 2, 2, 99.0 if confidence <= level else 0.0, 0.5)

        return bound

    for level, broken in ((0.95, False), (0.975, True)):
        monkeypatch.setattr(stage.attacks, "canary_bound", far_above_up_to(level))
        proxies = models(audit_run(study, summary["run"]), "proxy")
        assert [model["canaries"]["broken"] for model in proxies] == [broken] * 2
        assert all(model["canaries"]["epsilon_lower"] == 99 for model in proxies)
    page = write_report(study, summary["run"]).read_text()
    assert "ε is at least 99.00, though" in page
    monkeypatch.undo()
    audit_run(study, summary["run"])  # for the tests that follow


def test_the_audited_proxy_is_the_last_one_released(noisy_run):
    study, summary, _ = noisy_run
    run = RunFolder(study.root / summary["run"])
    party = RunContext.restore(study, run)
    for index, site in enumerate(party.sites):
        proxy = _load_audited_models(party, index)[1]
        lines = [line for line in read_lines(study.ledger_path(site.name)) if line["run"].startswith(run.name)]
        released = [line["released"] for line in lines if "released" in line]
        vector = torch.nn.utils.parameters_to_vector(proxy.network.parameters()).detach().cpu().numpy()
        assert released[-1] == f"model {digest_values(vector)}"


def test_canaries_stay_at_the_site_and_are_planted_again_after_a_restart(noisy_run):
    study, summary, document = noisy_run
    run = RunFolder(study.root / summary["run"])
    kept = run.site_folder("S0").read_document("canaries")
    assert kept["n"] == len(kept["coins"]) == 400 and set(kept["coins"]) == {"0", "1"}
    assert kept["coins"] != run.site_folder("S1").read_document("canaries")["coins"]
    told = [json.dumps(summary), json.dumps(document), (run.path / "audit" / "audit.json").read_text()]
    told += [path.read_text() for path in run.path.glob("sites/*/metrics.jsonl")]
    assert not any(kept["coins"] in text or kept["seed"] in text for text in told)
    with RunContext.restore(study, run) as party:
        again = load_canaries(party.open_data("S0"), run.site_folder("S0"))
    assert "".join("01"[int(coin)] for coin in again.included) == kept["coins"]
    assert str(again.seed) == kept["seed"]


def test_the_report_shows_both_bounds_and_the_planted_canaries(noisy_run, capsys):
    study, summary, document = noisy_run
    page = write_report(study, summary["run"]).read_text()
    assert 'id="audit"' in page and "ε between its bounds" in page and "400 at S0" in page
    proxy = models(document, "proxy")[0]["canaries"]
    assert f"at most {proxy['epsilon_upper']:.2f}" in page
    assert document["tested"] in page and document["adjacency"] in page
    print_lines(render_audit_lines(document))
    table = capsys.readouterr().err
    assert f"{proxy['epsilon_upper']:.2f}" in table and "AUROC" in table
    words = " ".join(table.split())
    assert document["tested"] in words and document["adjacency"] in words


def test_the_command_prints_one_document(noisy_run, wsi_fl):
    study, summary, document = noisy_run
    done = wsi_fl("audit", summary["run"], "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == document
    refused(lambda: audit_run(study, "99"), "no run '99'")


LEARNED = ["train.data=features", "model.private=mlp_head", "train.eval_every=100", "train.batch_size=64"]


@pytest.fixture(scope="module")
def random_labels(tmp_path_factory):
    """Random labels, one patient per row."""
    study, rng = make_study(tmp_path_factory.mktemp("leak") / "study", n_sites=1), np.random.default_rng(0)
    patients, splits = [f"p{k}" for k in range(120)], ["train"] * 80 + ["test"] * 40
    write_features(study, "S0", rng.normal(size=(120, 300)), rng.integers(2, size=120), patients, splits)
    return study


def test_a_planted_leak_is_caught(random_labels):
    """Without noise, random labels are overfitted."""
    bare = ["privacy.enabled=false", "train.rounds=30", "audit.canaries=60"]
    run = trained(random_labels, "regular", *LEARNED, *bare)["run"]
    (model,) = models(audit_run(random_labels, run), "private")
    own = model["membership"]["own"]
    assert (own["members"], own["non_members"]) == (80, 40)
    assert own["auroc"] > 0.8 and own["accuracy"] > 0.7 and own["interval"][0] > 0.5 and own["alarm"] is True
    assert own["tpr_at_fpr"] == {"0.01": None, "0.001": None}
    assert model["canaries"]["epsilon_lower"] > 1
    assert "its losses reveal members of the training data" in write_report(random_labels, run).read_text()


def test_a_barely_trained_model_raises_no_alarm(random_labels):
    noise = ["privacy.sigma=100.0", "train.rounds=1", "privacy.insecure_seed=1", "train.lr=1e-6"]
    run = trained(random_labels, "regular", *LEARNED, *noise, "audit.canaries=400")["run"]
    document = audit_run(random_labels, run)
    (model,) = models(document, "private")
    assert model["membership"]["own"]["alarm"] is False
    assert model["canaries"]["epsilon_lower"] < 0.5
    assert model["canaries"]["epsilon_upper"] is None  # noise that others know promises nothing
    assert (document["tests"], document["tested"]) == (0, None)


@pytest.mark.parametrize(
    ("method", "names"),
    [("fedavg", ["central", "released"]), *nightly(("joint", ["central"]), ("regular", ["private"]))],
)
def test_every_kind_of_model_is_attacked(pair, method, names):
    overrides = ["train.rounds=1", "privacy.unit=patient", "train.batch_size=2", "audit.canaries=9"]
    summary = trained(pair, method, *overrides)
    document = audit_run(pair, summary["run"])
    for site, row in zip(document["sites"], summary["sites"], strict=True):
        assert [model["model"] for model in site["models"]] == names
        assert document["tests"] == 2 * len(names)
        assert (site["unit"], row["n_units"]) == ("patient", (6 if method == "joint" else 3) + 9)
        for model in site["models"]:
            assert model["canaries"]["n"] == 9 and model["dp"]
            assert model["membership"]["own"]["members"] == (72 if method == "joint" else 36)
            assert model["membership"]["merged"]["non_members"] == 24


def test_a_run_that_cannot_be_audited_is_refused_in_one_line(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    run = trained(study, "regular", "train.rounds=1")["run"]
    assert audit_run(study, run)["sites"][0]["models"][0]["canaries"] is None
    assert write_report(study, run).read_text().count('id="audit"') == 1
    planted = trained(study, "regular", "train.rounds=1", "audit.canaries=4")
    (study.root / planted["run"] / "sites" / "S0" / "canaries.json").unlink()
    refused(lambda: audit_run(study, planted["run"]), "the only record of the canaries", error=WsiFlError)
    write_store(study, "S0", n_per_slide=8)
    refused(lambda: audit_run(study, run), "made anew", error=UsageError)
    (study.root / run / "summary.json").unlink()
    refused(lambda: audit_run(study, run), "has not finished", error=WsiFlError)


def write(place, content):
    """Return a function that replaces the bytes of a site's file."""
    return lambda site: (site / place).write_bytes(content)


def replace_release(site):
    """Replace the tensors of the last release."""
    folder = RunFolder(site.parents[1]).site_folder(site.name)
    number = folder.list_checkpoints()[-1]
    tensors, document = folder.load_checkpoint(number)
    others = {key: value for key, value in tensors.items() if not key.startswith("proxy/model/")}
    save_tensors(folder.checkpoint_path(number), others | {"proxy/model/x": torch.ones(3)}, document)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *((write("ledger.json", text), ["damaged; put its backup back"]) for text in (b"{}", b"[]", b"null")),
        (write("ledger.json", b'{"epsilon": 1}'), ["damaged; put its backup back"]),
        (lambda site: (site / "ledger.json").unlink(), ["no such file; put its backup back"]),
        (write("ledger.json", b"\xff"), ["not valid JSON"]),
        (
            lambda site: save_tensors(site / "private.safetensors", {"x": torch.ones(3)}, {}),
            ["the private model of S0 differs from this run's", "put its backup back"],
        ),
        (replace_release, ["the proxy model of S0 differs from this run's"]),
    ],
)
def test_files_of_a_run_are_checked_before_they_are_audited(noisy_run, tmp_path, damage, words):
    study, run = Study(shutil.copytree(noisy_run[0].root, tmp_path / "study")), noisy_run[1]["run"]
    damage(study.find_run(run) / "sites" / "S0")
    refused(lambda: audit_run(study, run), *words, error=WsiFlError)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"run": 1, "sites": [], "digest": "x"}'])
def test_an_edited_audit_is_not_reported(noisy_run, content):
    study, run = noisy_run[0], noisy_run[1]["run"]
    path = study.root / run / "audit" / "audit.json"
    kept = path.read_bytes()
    path.write_text(content)
    refused(lambda: write_report(study, run), "audit.json: damaged; run `wsi-fl audit ", error=WsiFlError)
    path.write_bytes(kept)


@pytest.mark.parametrize(
    ("method", "overrides", "accepted"),
    [
        ("regular", [], True),
        ("proxyfl", [], True),
        ("oneshot", ["train.from_released=true", "train.data=mosaics"], False),
        ("replay", ["privacy.enabled=false"], False),
    ],
)
def test_canaries_are_advised_exactly_where_a_run_allows_them(pair, method, overrides, accepted):
    def party(*more):
        return RunContext.create(pair, pair.load_pipeline("small", [*overrides, *more]), method)

    assert stage._can_plant_canaries(party()) is accepted
    if accepted:
        check_run(party("audit.canaries=400"), "local")
    else:
        refused(lambda: check_run(party("audit.canaries=400"), "local"), "audit.canaries", error=WsiFlError)


def test_a_hospital_audits_its_local_part_of_a_run(pair):
    run = trained(pair, "regular", "train.rounds=1", "audit.canaries=4")["run"]
    for name in ("S0", "S1"):
        file = pair.root / "sites" / f"{name}.toml"
        file.write_text(file.read_text().replace("real = false", REAL))
    pair.store_path("S1").unlink()
    document = audit_run(pair, run)
    assert [site["site"] for site in document["sites"]] == ["S0"]
    assert document["tests"] == 2, "what is audited elsewhere counts too"
    assert set(document["sites"][0]["models"][0]["membership"]) == {"own"}
