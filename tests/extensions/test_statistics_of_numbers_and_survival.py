"""Tests of one-shot statistics for every task: privacy, the head solved from them, and runs of numbers and survival."""

import json

import numpy as np
import pytest
import torch
from conftest import refused
from scipy.stats import binom, kstest
from sklearn.linear_model import LinearRegression, Ridge
from test_prediction_targets import NUMBER, OPEN, SURVIVAL, make
from training_runs import answers, of_site, trained

from wsi_fl.data.tasks import CLASSES, NumberTask, SurvivalTask, target_columns
from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.hospitals.plans.disclosures import list_disclosures
from wsi_fl.learning.ensemble import Ensemble, is_worse_than_local
from wsi_fl.learning.tuning import fit_linear_head
from wsi_fl.oneshot.class_statistics import NoisyStatistics, explain_invalid_statistics
from wsi_fl.oneshot.newton_step import hazard_baseline, number_baseline
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.site_preflight import _list_settings
from wsi_fl.types import Bags, WsiFlError

D, ENDS = 24, (6.0, 12.0, 24.0)
TASKS = [NumberTask(0.0, 10.0), SurvivalTask(ENDS)]
EACH = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
EVERY = pytest.mark.parametrize("task", [CLASSES, *TASKS], ids=lambda task: task.kind)
N_OUTPUTS = {"classes": 2, "number": 1, "survival": len(ENDS)}
TARGETS = pytest.mark.parametrize("target", [NUMBER, SURVIVAL], ids=["number", "survival"])
HOW = ("privacy.target_epsilon=20", "model.projection=8")


def oneshot(study, *overrides):
    return trained(study, "oneshot", *overrides)["run"]


def rows_of(task, n, seed, share=(0.0, 10.0)):
    """Return features of which the first three determine the target up to noise; numbers fill a share of the range."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D)).astype(np.float32)
    signal = x[:, :3].sum(1)
    if task.kind == "classes":
        return x, (signal > 0).astype(int)
    if task.kind == "number":
        truth = np.clip(5 + signal + rng.normal(size=n), *share)
    else:
        time, left = rng.exponential(20 * np.exp(-signal)), rng.uniform(2, 40, n)
        truth = np.stack([np.minimum(time, left), time < left], axis=1)
    return x, truth.astype(np.float32)


def empty(task, **how):
    return SharedHead(N_OUTPUTS[task.kind], D, kind=task.kind, projection=8, **how)


def make_head(task, x, truth, noise=0.0):
    """Make a head of a site with these rows and its noisy statistics."""
    head, columns = empty(task), target_columns(task, torch.from_numpy(truth))
    z = head.embed_rows(torch.from_numpy(x))
    head.set_local_statistics(z, columns)
    exact = head.pack_statistics(z, columns)
    drawn = torch.randn(len(exact), dtype=torch.float64)
    head.set_noisy_statistics(exact, *head.weight_by_precision(exact + noise * drawn, noise**2))
    return head


def predict_values(head, task, x):
    return task.predict(head(torch.from_numpy(x))).double().numpy()


def test_survival_columns_are_sufficient_for_the_likelihood_of_a_patient():
    task, outputs = SurvivalTask(ENDS), torch.tensor([0.4, -1.0, 0.2], dtype=torch.float64)
    times = torch.tensor([0.0, 2.0, 3.0, 6.0, 8.0, 9.5, 12.0, 20.0, 24.0, 30.0])
    truth = torch.stack([times.repeat(2), torch.ones(20)], dim=1)
    truth[10:, 1] = 0
    losses = task.compute_losses(outputs.expand(20, 3), truth)
    at_end = torch.cat([torch.ones(1), task.predict(outputs[None])[0]])
    likely = torch.cat([at_end[:-1] - at_end[1:], at_end])  # of an event in each interval, of passing it
    torch.testing.assert_close(losses, -likely[target_columns(task, truth)].log())


def test_the_sum_of_residuals_times_features_is_the_gradient_of_the_likelihood_where_no_feature_counts():
    task, (x, truth) = SurvivalTask(ENDS), rows_of(SurvivalTask(ENDS), 80, 0)
    columns, z = target_columns(task, torch.from_numpy(truth)), torch.from_numpy(x).double()
    model = hazard_baseline(torch.bincount(columns, minlength=7).double())
    slope = torch.zeros(D, dtype=torch.float64, requires_grad=True)

    def loss(at):
        return task.compute_losses(model.offsets + (z @ at)[:, None], torch.from_numpy(truth).double()).sum()

    (gradient,) = torch.autograd.grad(loss(slope), slope)
    torch.testing.assert_close(model.residuals[columns] @ z, -gradient)
    curvature = torch.autograd.functional.hessian(loss, slope.detach())
    torch.testing.assert_close((model.information[columns][:, None] * z).mT @ z, curvature)


def test_numbers_are_scaled_to_their_range_and_clipped():
    columns = target_columns(NumberTask(10, 30), torch.tensor([10.0, 15.0, 30.0, 99.0]))
    assert columns.tolist() == [0, 0.25, 1, 1]
    assert number_baseline(torch.zeros(2, dtype=torch.float64)).offsets.tolist() == [0.5]


def test_class_statistics_are_the_sum_and_count_of_the_rows_of_each_class_bit_for_bit():
    rng = np.random.default_rng(0)
    z, y = torch.from_numpy(rng.normal(size=(500, D))), torch.from_numpy(rng.integers(0, 3, 500))
    sums = torch.zeros(3, D + 1, dtype=torch.float64)
    sums.index_add_(0, y, torch.cat([z, torch.ones(500, 1, dtype=torch.float64)], dim=1))
    was = torch.cat([sums[:, :-1], 0.3 * sums[:, -1:]], dim=1).flatten() * (1 / np.sqrt(1 + 0.3**2))
    assert torch.equal(SharedHead(3, D).pack_statistics(z, target_columns(CLASSES, y)), was)


def extremes(task, n, seed):
    """Return rows whose targets reach every column and whose features are tiny, huge, constant or broken."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, D)) * rng.choice([1e-3, 1, 1e3], n)[:, None]).astype(np.float32)
    x[0], x[1, 0] = 0, np.inf
    if task.kind == "classes":
        return x, rng.integers(0, 2, n)
    if task.kind == "number":
        return x, rng.choice([-50, 0, 3, 5, 10, 1e6], n).astype(np.float32)
    return x, np.stack([rng.uniform(0, 40, n), rng.random(n) < 0.5], axis=1).astype(np.float32)


def letter_of(dp, head, task, rows, *whose):
    x, truth = rows
    return dp.clip_statistics(
        head, head.embed_rows(torch.from_numpy(x)), target_columns(task, torch.from_numpy(truth)), *whose
    )


@EVERY
def test_a_row_changes_the_statistics_by_at_most_one(task):
    (x, truth), how = extremes(task, 60, 0), (NoisyStatistics(1.0, 1.0, 60), empty(task), task)
    whole = letter_of(*how, (x, truth))
    without = (letter_of(*how, (np.delete(x, k, 0), np.delete(truth, k, 0))) for k in range(60))
    changes = [float((whole - one).norm()) for one in without]
    assert 0.9 < max(changes) <= 1  # the bound is used, and kept


@EVERY
def test_a_patient_changes_the_statistics_by_at_most_one_for_any_number_of_rows(task):
    (x, truth), head, dp = extremes(task, 90, 1), empty(task, patients=True), NoisyStatistics(1.0, 1.0, 4, "patient")
    x[2:40] = x[2]  # many rows alike, in several columns
    patient = np.repeat([0, 1, 2, 3], [70, 15, 4, 1])

    def letter(rows):
        return letter_of(dp, head, task, (x[rows], truth[rows]), torch.from_numpy(patient[rows]))

    whole = letter(np.arange(90))
    changes = [float((whole - letter(np.flatnonzero(patient != one))).norm()) for one in range(4)]
    assert max(changes) <= 1
    if task.kind == "number":  # a patient each, not a row each; rows in several columns are clipped as one
        assert float(head.unpack_statistics(whole)[1].sum()) == pytest.approx(4)
    z, columns = head.embed_rows(torch.from_numpy(x)), target_columns(task, torch.from_numpy(truth))
    assert float((head.pack_statistics(z, columns) - head.pack_statistics(z[70:], columns[70:])).norm()) > 5


@EACH
def test_released_statistics_have_noise_in_every_number(task):
    (x, truth), head = rows_of(task, 40, 0), empty(task)
    dp, columns, drawn = NoisyStatistics(50.0, 1.0, 40), target_columns(task, torch.from_numpy(truth)), []
    for _ in range(40):
        dp.fill(head, torch.from_numpy(x), columns, CipherStream.from_entropy())
        left, variance = head.released.split([len(head.noiseless_statistics), head.shape[0]])
        drawn.append(left - head.noiseless_statistics)
        assert variance.tolist() == [2500.0] * head.shape[0]  # no column is weighed by what noise shows
    assert kstest(torch.stack(drawn).flatten().numpy() / 50, "norm").pvalue > 1e-4


@EACH
def test_honest_statistics_of_numbers_and_times_are_accepted_and_forged_ones_refused(task):
    head = make_head(task, *extremes(task, 60, 0), noise=2.0)
    refusals = 0
    for _ in range(250):
        noisy = head.noiseless_statistics + 2 * torch.randn(len(head.noiseless_statistics))
        sums, variances = head.weight_by_precision(noisy, 4.0)
        letter = torch.cat([sums, variances])
        refusals += bool(explain_invalid_statistics(head.layout, letter, 60, 2.0, rate=0.02))
        assert not explain_invalid_statistics(head.layout, letter, 60, 2.0)
    assert refusals <= binom.ppf(0.9999, 250, 0.02)
    assert explain_invalid_statistics(head.layout, torch.cat([1000 * sums, variances]), 60, 2.0)
    exact = torch.cat([head.noiseless_statistics, torch.zeros(len(letter) - len(head.noiseless_statistics))])
    assert "announced" in explain_invalid_statistics(head.layout, exact, 50, 0.0) and not explain_invalid_statistics(
        head.layout, exact, 60, 0.0
    )
    assert "its count" in explain_invalid_statistics(head.layout, -exact, 60, 0.0)
    assert not explain_invalid_statistics(head.layout, letter, 70, 2.0)  # ten rows are held out of those that n counts


def test_with_many_rows_a_number_is_predicted_as_by_linear_regression():
    task = TASKS[0]
    (x, truth), (more, _) = rows_of(task, 8000, 0), rows_of(task, 200, 1)
    head = make_head(task, x, truth)
    z, asked = (head.embed_rows(torch.from_numpy(rows)).numpy() for rows in (x, more))
    wanted = LinearRegression().fit(z, truth).predict(asked)
    assert np.abs(predict_values(head, task, more)[:, 0] - wanted).max() < 0.15 * wanted.std()


@EACH
def test_statistics_without_noise_are_as_good_as_pooled_rows(task):
    (xa, ya), (xb, yb) = rows_of(task, 150, 0), rows_of(task, 250, 1)
    heads = [make_head(task, xa, ya), make_head(task, xb, yb)]
    SharedHead.combine(heads)
    together = make_head(task, np.concatenate([xa, xb]), np.concatenate([ya, yb]))
    asked = rows_of(task, 100, 2)[0]
    wanted, (_, middle, model, worth) = predict_values(together, task, asked)[:, 0], together.newton_step()
    for head in heads:  # all but the covariance, which is of the own rows
        _, own_middle, own_model, own_worth = head.newton_step()
        torch.testing.assert_close(own_middle, middle, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own_model.offsets, model.offsets, rtol=1e-4, atol=1e-5)
        assert float(own_worth[1]) == pytest.approx(float(worth[1]), rel=1e-4)
        assert np.corrcoef(predict_values(head, task, asked)[:, 0], wanted)[0, 1] > 0.95


@EACH
def test_statistics_of_other_sites_are_weighted_by_their_noise(task):
    torch.manual_seed(0)
    (xa, ya), (xb, yb), asked = rows_of(task, 60, 0), rows_of(task, 600, 1), rows_of(task, 50, 2)[0]
    alone, worth = make_head(task, xa, ya), []
    for noise in (0.0, 3.0, 30.0, 1e5):
        head, other = make_head(task, xa, ya), make_head(task, xb, yb, noise)
        SharedHead.combine([head, other])
        worth.append(head.effective_sample_sizes()[1])
    assert worth == sorted(worth, reverse=True) and worth[0] > 8 * worth[-1]
    np.testing.assert_allclose(predict_values(head, task, asked), predict_values(alone, task, asked), rtol=0.1)


def test_a_hospital_with_low_numbers_only_learns_the_line_from_the_others():
    task, errors = TASKS[0], {}
    (xa, ya), (xb, yb) = rows_of(task, 400, 0), rows_of(task, 400, 1)
    low, high = (xa[ya < 5], ya[ya < 5]), (xb[yb > 5], yb[yb > 5])
    asked, truth = rows_of(task, 400, 2)
    for name, others in (("alone", []), ("joined", [make_head(task, *high, 1.0)])):
        torch.manual_seed(0)
        head = make_head(task, *low)
        SharedHead.combine([head, *others])
        errors[name] = np.square(predict_values(head, task, asked)[:, 0] - truth).mean()
    assert errors["joined"] < 0.7 * errors["alone"]


@EVERY
def test_a_head_of_released_statistics_is_the_same_everywhere_and_uninformative_without_any(task):
    (xa, ya), (xb, yb) = rows_of(task, 80, 0), rows_of(task, 80, 1)
    heads = [make_head(task, xa, ya, 0.5), make_head(task, xb, yb, 0.5)]
    SharedHead.combine(heads)
    first, second = (head.solve_released_head()(torch.from_numpy(xa)) for head in heads)
    torch.testing.assert_close(first, second)
    guess = task.predict(empty(task)(torch.from_numpy(xa))).double().numpy()
    np.testing.assert_allclose(guess, np.tile(task.baseline_prediction(len(guess[0])), (80, 1)), rtol=1e-6)


def test_the_local_head_of_a_number_is_a_ridge_tuned_on_held_out_patients():
    task, (x, truth) = TASKS[0], rows_of(TASKS[0], 300, 0)
    names = np.array([f"p{k // 2}" for k in range(300)])
    found = fit_linear_head(x, truth, names, 1, task)
    wanted = Ridge(alpha=1 / found.strength).fit(x, truth)
    np.testing.assert_allclose(5 * (x @ found.weight.T + found.bias + 1)[:, 0], wanted.predict(x), rtol=1e-4)
    assert task.compute_scores(found.held_out, truth)["r2"] == pytest.approx(0.7, abs=0.1)
    few = np.random.default_rng(0).normal(size=(40, 300))  # it knows these by heart; held-out ones tell it
    luck = fit_linear_head(few, truth[:40], names[:40], 1, task)
    assert task.compute_scores(luck.held_out, truth[:40])["r2"] < 0.2


def test_the_local_head_of_survival_finds_the_slope_and_the_event_free_share():
    task = SurvivalTask(ENDS)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3))
    hazard = 1 / (1 + np.exp(1 - x[:, :1] + np.zeros(3)))
    event = rng.random((4000, 3)) < hazard
    first = np.where(event.any(1), event.argmax(1), 3)
    truth = np.stack([np.array([3.0, 9.0, 18.0, 30.0])[first], first < 3], axis=1).astype(np.float32)
    found = fit_linear_head(x, truth, np.full(4000, ""), 3, task)
    np.testing.assert_allclose(found.weight, np.tile([1, 0, 0], (3, 1)), atol=0.1)
    np.testing.assert_allclose(found.bias, -1, atol=0.1)
    assert task.compute_scores(found.held_out, truth)["concordance"] > 0.65
    none = truth * [1, 0]
    nobody = fit_linear_head(x, none, np.full(4000, ""), 3, task)  # no event at all
    assert not nobody.weight.any() and nobody.bias.max() < -10


@EACH
def test_an_ensemble_worse_than_the_local_head_is_noticed(task):
    x, truth = rows_of(task, 200, 0)
    k = 1 if task.kind == "number" else 3
    own = fit_linear_head(x, truth, np.full(200, ""), k, task).held_out
    stack = Ensemble(2 / 3, (1.0, 1.0), 1.0, (0.0,) * k, of_logits=False)
    assert not is_worse_than_local(stack, own, own, truth, task)
    assert is_worse_than_local(stack, own, own[::-1].copy(), truth, task)
    if task.kind == "survival":  # in the same order, but far too sure of the event
        assert is_worse_than_local(stack, own, own**4, truth, task)
    assert np.array_equal(Ensemble.parse_document(json.loads(json.dumps(vars(stack))))(own, own), stack(own, own))


@pytest.fixture
def study(tmp_path):
    return make(tmp_path / "study", n_sites=3)


@TARGETS
def test_a_study_trains_and_evaluates_from_files_as_in_one_process(tmp_path, target):
    study = make(tmp_path / "study", n_sites=2)
    exact = [*target, OPEN, "model.projection=8"]
    together = oneshot(study, *exact)
    document = evaluate(study, together)
    assert document["task"] == ("number" if target == NUMBER else "survival")
    for row in document["sites"]:
        assert row["model"] == "ensemble" and {"private", "shared"} <= set(row["models"])
    assert write_report(study, together).exists()
    release_statistics(study, site=None, overrides=exact)
    by_files = oneshot(study, *exact, "train.from_released=true")
    evaluate(study, by_files)
    audited = audit_run(study, by_files)
    assert [row["refused"] for row in audited["influence"]] == ["", ""]
    unseen = audited["sources"]["records"]["unseen"]
    assert unseen["by_label"] is None and unseen["interval"][0] <= 0.5 <= unseen["interval"][1]  # sites are alike
    assert all(row["moved"] > 0 and row["answers_changed"] is None for row in audited["influence"])
    for site in study.site_names():
        mine, files = (answers(study.root / run, site) for run in (together, by_files))
        for row, theirs in zip(mine, files, strict=True):
            names = [name for name in row if name.startswith(("pred_", "without_event_"))]
            said, known = ([float(one[name]) for name in names] for one in (row, theirs))
            assert said == pytest.approx(known, abs=1e-4) and said
        kept = of_site(study.root / together, site, "prediction_model")["ensemble"]
        assert kept["of_logits"] is False and kept["weight"] < 1
        assert of_site(study.root / together, site, "tuning")["strength"] > 0


@TARGETS
def test_a_release_is_small_and_fits_no_other_target(tmp_path, target):
    study = make(tmp_path / "study", n_sites=1)
    row, *_ = release_statistics(study, site="S0", overrides=[*target, *HOW])["sites"]
    assert (study.root / row["file"]).stat().st_size < 4096
    changed = {NUMBER: "target.range=[0, 2]", SURVIVAL: "target.intervals=[6, 12, 20, 36]"}[target]
    other = (*target[:-1], changed)
    refused(lambda: release_statistics(study, site="S0", overrides=[*other, *HOW]), "put the settings back")


def test_a_plan_states_the_size_of_the_statistics(study):
    for target, kind, columns, outputs in ((NUMBER, "number", 2, 1), (SURVIVAL, "survival", 9, 4)):
        pipeline = study.load_pipeline("q", [*target, *HOW])
        with RunContext.create(study, pipeline, "oneshot") as party:
            row = list_disclosures(party, Bags(8), outputs)[0]
        assert row["what"] == f"class statistics (shared_head:8:{kind})"
        assert row["bytes"] == 4 * columns * (8 + 2)  # a sum along each direction, a count, a variance
        wrong = "target.range=[0, 2]" if kind == "number" else "target.intervals=[6, 12]"
        other = study.load_pipeline("q", [*target, *HOW, wrong])
        assert _list_settings(pipeline) != _list_settings(other)  # what the preflight compares


def test_distributed_noise_works_for_a_number_and_the_sites_agree_on_its_statistics(study):
    shared = [*NUMBER, *HOW, "privacy.noise=shared", "privacy.unit=patient"]
    assert {row["model"] for row in evaluate(study, oneshot(study, *shared))["sites"]} == {"ensemble"}
    wrong = study.release_path("S0")
    release_statistics(study, site="S0", overrides=[*NUMBER, *HOW])
    raw = wrong.read_bytes()
    wrong.write_bytes(raw.replace(b"burden", b"burdeN"))
    by_files = [*NUMBER, *HOW, "train.from_released=true", "train.min_sites=1"]
    refused(lambda: oneshot(study, *by_files), "S0", error=WsiFlError)


def test_an_inference_only_site_receives_numbers_and_times_and_contributes_none(study):
    file = study.root / "sites/S2.toml"
    for target, truth in ((NUMBER, ["truth"]), (SURVIVAL, ["time", "event"])):
        for site in ("S0", "S1"):
            release_statistics(study, site=site, overrides=[*target, *HOW], repeat=True)
        file.write_text('name = "S2"\nreal = false\nrole = "receiver"\n')
        run = oneshot(study, *target, *HOW, "train.from_released=true")
        document = evaluate(study, run)
        assert document["inference_sites"]["reference_sites"] == ["S0", "S1"]
        rows = answers(study.root / run, "S2")
        assert rows and all(row[name] == "" for row in rows for name in truth)
        assert write_report(study, run).exists()
