"""Source inference: which site a record comes from, by what sites released, and what ε allows."""

from itertools import product
from math import exp, log

import numpy as np
import pytest
import torch
from conftest import REAL, make_study, write_features
from scipy.stats import binom, binomtest, multivariate_normal
from training_runs import trained

from wsi_fl.evidence.audit_run import audit_run, render_audit_lines
from wsi_fl.evidence.source_inference import (
    bound_accuracy,
    bound_whole_sites,
    calibrate_losses,
    measure_accuracy,
    read_class_means,
    score_class_means,
)
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.runtime.console import print_lines


def best_accuracy(epsilon, delta, n_sites):
    """Return the accuracy of the best guess for the worst (ε, δ) releases, over all combinations of their answers.

    An answer is "yes" or "no", and with probability δ it is certain.
    """
    p = exp(epsilon) / (1 + exp(epsilon))
    here = {"yes": (1 - delta) * p, "no": (1 - delta) * (1 - p), "surely": delta, "never": 0.0}
    elsewhere = {"yes": here["no"], "no": here["yes"], "surely": 0.0, "never": delta}
    total = 0.0
    for answers in product(here, repeat=n_sites):
        likelihoods = [
            np.prod([(here if site == source else elsewhere)[answer] for site, answer in enumerate(answers)])
            for source in range(n_sites)
        ]
        total += max(likelihoods) / n_sites
    return total


@pytest.mark.parametrize("n_sites", [2, 3, 5])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 4.0])
def test_the_bound_is_the_accuracy_of_the_best_guess_for_the_worst_releases(epsilon, n_sites):
    assert bound_accuracy(epsilon, 0.0, n_sites) == pytest.approx(best_accuracy(epsilon, 0.0, n_sites))
    best = best_accuracy(epsilon, 0.02, n_sites)
    assert best - 1e-12 <= bound_accuracy(epsilon, 0.02, n_sites) <= best + n_sites * 0.02


def test_the_bound_has_known_values():
    assert bound_accuracy(0.0, 0.0, 4) == pytest.approx(1 / 4)
    assert bound_accuracy(log(3), 0.0, 2) == pytest.approx(3 / 4)
    assert bound_accuracy(log(3), 0.0, 3) == pytest.approx((3 / 4 + 2 * 9 / 16) / 3)
    assert bound_accuracy(100.0, 1e-5, 3) == 1.0
    # two releases change where a record moves from a site to another: more than e^ε / (e^ε + K - 1), less than at 2ε
    assert exp(1) / (exp(1) + 2) < bound_accuracy(1.0, 0.0, 3) < exp(2) / (exp(2) + 2)
    assert bound_whole_sites(1.0, 1e-5, 3) == bound_accuracy(2.0, 1e-5 * (1 + exp(1)), 3)


def names(*sizes):
    return [np.array([f"p{k}" for k in range(n)]) for n in sizes]


def guess(scores, patients, by_patient=False, repeats=300):
    return measure_accuracy(scores, patients, by_patient=by_patient, repeats=repeats)


def test_sites_count_alike_and_perfect_guesses_prove_as_much_as_there_are_patients():
    right = [np.eye(3)[np.full(n, k)] for k, n in enumerate((4, 40, 7))]
    found = guess(right, names(4, 40, 7))
    assert found["accuracy"] == 1 and found["confusion"] == [[4, 0, 0], [0, 40, 0], [0, 0, 7]] and found["n"] == 51
    assert found["interval"] == pytest.approx([*binomtest(4, 4).proportion_ci(method="exact")])
    always_first = guess([np.eye(3)[np.zeros(n, int)] for n in (4, 40, 7)], names(4, 40, 7))
    assert always_first["accuracy"] == pytest.approx(1 / 3)
    assert guess(right, [np.array([*"aabb"]), *names(40, 7)])["interval"] is None
    assert guess(right, names(4, 40, 7), repeats=0)["interval"] is None


def test_a_patient_is_scored_by_the_mean_of_its_rows():
    scores = [np.array([[0.0, 1.0], [0.0, 1.0], [5.0, 0.0], [3.0, 2.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])]
    patients = [np.array(["a", "a", "a", "b"]), np.array(["c", "d"])]
    assert guess(scores, patients)["confusion"] == [[2, 2], [0, 2]]
    assert guess(scores, patients, by_patient=True)["confusion"] == [[2, 0], [0, 2]]


def test_the_interval_covers_the_accuracy_of_guesses_at_patients_whose_rows_are_alike():
    """Two sites of 40 patients with three equal rows each; a guess is right with probability 0.7."""
    rng, covered, patients = np.random.default_rng(0), 0, [np.repeat(np.arange(40).astype(str), 3)] * 2
    for _ in range(200):
        is_right = rng.random((2, 40)) < 0.7
        scores = [np.eye(2)[np.where(is_right[k], k, 1 - k).repeat(3)] for k in range(2)]
        low, high = guess(scores, patients, repeats=200)["interval"]
        covered += low <= 0.7 <= high
    assert covered >= binom.ppf(1e-4, 200, 0.93)  # a little less than 95 %, as the percentiles of a bootstrap have


def test_the_interval_of_few_patients_covers_the_accuracy_of_guesses():
    """Three sites of five patients with eight rows, in which the guess is right with a probability of 0.2 or 0.8."""
    rng, covered, patients = np.random.default_rng(0), 0, [np.repeat(np.arange(5).astype(str), 8)] * 3
    for _ in range(200):
        is_right = rng.random((3, 40)) < rng.choice([0.2, 0.8], (3, 5)).repeat(8, axis=1)
        scores = [np.eye(3)[np.where(hits, k, (k + 1) % 3)] for k, hits in enumerate(is_right)]
        low, high = guess(scores, patients, repeats=100)["interval"]
        covered += low <= 0.5 <= high
    assert covered >= 185


def test_a_model_that_is_better_or_varies_more_everywhere_is_not_guessed_everywhere():
    rng = np.random.default_rng(0)
    losses = [
        np.abs(rng.normal(size=(400, 1))) + rng.normal(size=(400, 3)) * (0.1, 0.1, 2.0) + (0, 5, 0) for _ in "abc"
    ]
    for k, rows in enumerate(losses):
        rows[:, k] -= (0.5, 0.5, 10.0)[k]
    assert guess(losses, names(400, 400, 400))["accuracy"] < 0.4
    found = guess(calibrate_losses(losses), names(400, 400, 400))
    assert min(row[k] for k, row in enumerate(found["confusion"])) > 240
    same = guess(calibrate_losses([np.ones((5, 2))] * 2), names(5, 5))
    assert same["accuracy"] == 0.5  # models that are equal tell nothing


def test_scores_by_class_statistics_are_the_likelihoods_of_noisy_means():
    rng, head = np.random.default_rng(0), SharedHead(2, 12, projection=4)
    z, y = torch.from_numpy(rng.normal(size=(30, 4)) * 0.2), torch.from_numpy(np.arange(30) % 2)
    exact = head.pack_statistics(z, y)
    head.set_noisy_statistics(exact, exact, 9.0)
    means, noise, counts = read_class_means(head, head.sums.detach())
    assert counts == pytest.approx([15, 15], rel=1e-5)
    assert means == pytest.approx(np.stack([z[y == k].mean(0) for k in range(2)]), abs=1e-5)
    one = head.pack_statistics(torch.eye(4, dtype=torch.float64)[:1], y[:1])  # a mean is of packed sums over counts
    assert noise == pytest.approx(9.0 / float(one[0]) ** 2 / 15**2, rel=1e-4)
    sites = [(means, noise, counts), (means + 0.5, noise * 4, np.array([10.0, 30.0]))]
    records, labels = [z[:10].numpy(), z[10:].numpy()], [y[:10].numpy(), y[10:].numpy()]
    found = score_class_means(records, labels, sites, np.eye(4) * 0.1)
    within = z - torch.stack([z[y == k].mean(0) for k in range(2)])[y]
    covariance = (within.T @ within).numpy() / 34 + np.eye(4) * 0.4 / 34
    for k, (mean, variance, n) in enumerate(sites):
        for row, label, score in zip(records[1], labels[1], found[1][:, k], strict=True):
            normal = multivariate_normal(mean[label], covariance + np.eye(4) * variance[label])
            assert score == pytest.approx(normal.logpdf(row) + 2 * log(2 * np.pi) + log(n[label] / n.sum()))
    weights = torch.tensor([0.1, 1.0], dtype=torch.float64)  # of the precision of a release: the shares stay
    head.set_noisy_statistics(exact, (exact.view(2, -1) * weights[:, None]).flatten(), 9.0 * weights**2)
    for mine, usual in zip(read_class_means(head, head.sums.detach()), (means, noise, counts), strict=True):
        assert mine == pytest.approx(usual, rel=1e-4, abs=1e-5)
    head.set_noisy_statistics(exact, head.pack_statistics(z[y == 0], y[y == 0]), 0.0)
    assert read_class_means(head, head.sums.detach())[1].tolist() == [0.0, 1.0]  # the second class may lie anywhere


def make_sites(root, shift, n=60, n_sites=3):
    """Make sites whose features differ by a shift of one feature each; three rows are a patient."""
    study, rng = make_study(root, n_sites=n_sites), np.random.default_rng(0)
    for k in range(n_sites):
        labels = np.arange(2 * n) % 2
        x = rng.normal(size=(2 * n, 24)) + 1.5 * np.outer(2 * labels - 1, np.arange(24) < 3)
        x[:, 10 + k] += shift
        patients = [f"p{i // 3}" for i in range(2 * n)]
        write_features(study, f"S{k}", x, labels, patients, ["train"] * n + ["test"] * n)
    return study


FEATURES = ["train.data=features", "model.private=linear_head", "model.proxy=linear_head", "train.lr=0.05"]


@pytest.mark.parametrize("method", ["oneshot", "fedavg"])
def test_records_of_sites_that_differ_are_told_apart_and_of_like_sites_are_not(tmp_path, method, capsys, monkeypatch):
    monkeypatch.setattr("wsi_fl.evidence.attacks._NOISE_DRAWS", 60)
    like, apart = (make_sites(tmp_path / name, shift) for name, shift in (("like", 0.0), ("apart", 6.0)))
    for study in (like, apart):
        run = trained(study, method, *FEATURES, "train.rounds=4", "privacy.enabled=false")["run"]
        document = audit_run(study, run)
        sources = document["sources"]
        assert sources["attack"] == ("statistics" if method == "oneshot" else "models")
        assert sources["epsilon"] is sources["bound"] is sources["bound_whole_sites"] is None
        records = sources["records"]
        for row in records.values():
            assert row["n"] == 180 == sum(map(sum, row["confusion"])) and row["by_label"] == pytest.approx(1 / 3)
        low, high = records["unseen"]["interval"]
        assert low <= 1 / 3 <= high if study is like else low > (0.8 if method == "oneshot" else 1 / 3)
    print_lines(render_audit_lines(document))
    page, told = write_report(apart, run).read_text(), capsys.readouterr().err
    assert "Source inference" in page and "true site" in page and "no ε per row bounds that" in page
    assert "source inference" in told and "tell the site of" in " ".join(told.split())


NOISY = [*FEATURES, "privacy.unit=patient", "privacy.sigma=2.0"]


@pytest.fixture
def study_of_patients(tmp_path, monkeypatch):
    monkeypatch.setattr("wsi_fl.evidence.attacks._NOISE_DRAWS", 60)
    return make_sites(tmp_path / "study", 6.0, n=18)


def test_the_document_has_what_epsilon_allows_and_nothing_of_real_hospitals_patches(study_of_patients):
    study = study_of_patients
    summary = trained(study, "oneshot", *NOISY)
    sources = audit_run(study, summary["run"])["sources"]
    assert (sources["unit"], sources["records"]["training"]["n"]) == ("patient", 18)
    epsilon = max(row["epsilon"] for row in summary["sites"])
    assert sources["bound"] == bound_accuracy(epsilon, 1e-5, 3) < sources["bound_whole_sites"]
    for name in ("S0", "S1", "S2"):  # each hospital's patches stay there
        file = study.root / "sites" / f"{name}.toml"
        file.write_text(file.read_text().replace("real = false", REAL))
    assert audit_run(study, summary["run"])["sources"] is None


def test_the_document_says_nothing_where_no_release_can_be_read(study_of_patients):
    study = study_of_patients
    for name in ("S0", "S2"):  # whose files are here
        release_statistics(study, site=name, overrides=NOISY)
    from_files = ("oneshot", "train.from_released=true", "train.min_sites=1")
    for (method, *overrides), sites in (
        (from_files, ["S0", "S2"]),
        (("regular",), None),
        (("oneshot", "privacy.noise=shared"), None),
    ):
        sources_found = audit_run(study, trained(study, method, *NOISY, *overrides)["run"])["sources"]
        assert (sources_found and sources_found["sites"]) == sites
