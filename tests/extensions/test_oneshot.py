"""Tests of one-shot class statistics: their privacy, the head solved from them, audits and secure aggregation."""

import csv
import json
import random
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import interrupted_after, make_study, model, nightly, refused, write_features
from file_changes import edit, make_real, site_file
from scipy.stats import chisquare, kstest
from training_runs import dying

from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.federation.comm import LocalComm
from wsi_fl.oneshot import discrete_noise, secure_aggregation
from wsi_fl.oneshot.class_statistics import NoisyStatistics
from wsi_fl.oneshot.payload import StatisticsPayload, find_range_problem
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import Mechanism, _gaussian_epsilon, epsilon
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.types import WsiFlError

D = 24
HEADS = ["train.data=features", "model.private=linear_head", "model.proxy=linear_head"]


def rows_of(n, seed, share=0.5, d=D):
    """Return features of which a few depend on the label, and labels with a given share of ones."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(n) < round(n * share)).astype(int)
    x = rng.normal(size=(n, d)) + 1.5 * np.outer(2 * labels - 1, np.arange(d) < 3)
    return x.astype(np.float32), labels


def make_hospitals(root):
    """Make three hospitals of 60 training rows; the first two have a single class."""
    made = make_study(root, n_sites=3)
    patients = [f"p{i // 3}" for i in range(60)] + [f"t{i}" for i in range(40)]
    for k, share in enumerate((0.0, 1.0, 0.5)):
        x, labels = map(np.concatenate, zip(rows_of(60, k, share), rows_of(40, 10 + k), strict=True))
        write_features(made, f"S{k}", x, labels, patients, ["train"] * 60 + ["test"] * 40)
    return made


@pytest.fixture
def study(tmp_path):
    return make_hospitals(tmp_path / "study")


def oneshot(study, *overrides, **more):
    return train(study, method="oneshot", overrides=[*HEADS, *overrides], **({"backend": "local"} | more))


def compute_statistics(head, x, labels):
    return head.pack_statistics(head.embed_rows(torch.from_numpy(x)), torch.from_numpy(labels))


def make_head(x, labels, noise=0.0, **how):
    """Make a head of a site with these rows."""
    head = SharedHead(2, D, **how)
    head.set_local_statistics(head.embed_rows(torch.from_numpy(x)), torch.from_numpy(labels))
    exact = compute_statistics(head, x, labels)
    head.set_noisy_statistics(exact, exact + noise * torch.randn(len(exact), dtype=torch.float64), noise**2)
    return head


def test_a_class_without_rows_is_never_predicted():
    head, (x, _) = SharedHead(3, D), rows_of(50, 0)
    labels = np.arange(50) % 2
    exact = compute_statistics(head, x, labels)
    noisy = exact.clone()
    noisy.view(head.shape)[2] = torch.linspace(1, -1, head.shape[1])  # noise alone, and a count below 0
    for one in (head, other := SharedHead(3, D)):
        one.set_noisy_statistics(exact, noisy, 1.0)
    SharedHead.combine([head, other])
    answers = head(torch.from_numpy(rows_of(200, 1)[0])).softmax(1)
    assert float(answers[:, 2].max()) < 1e-6 < float(answers[:, :2].min())


def test_noise_has_the_variance_of_the_account_and_comes_from_no_predictable_generator(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *_, **__: pytest.fail("a generator's numbers"))
    exact, found = torch.linspace(-3, 3, 6000, dtype=torch.float64), []
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            random.seed(0)
            found.append(NoisyStatistics(3.0, 0.5, 10).add_noise(exact, CipherStream.from_entropy()))
    assert not torch.equal(*found)
    assert kstest((found[0] - exact).numpy() / 1.5, "norm").pvalue > 1e-4
    steps = found[0] * discrete_noise.STEPS_PER_UNIT
    assert torch.equal(steps, steps.round())


@pytest.mark.parametrize("sigma", [0.5, 3.731, 20.0])
def test_epsilon_of_releases_is_exact_and_composes_with_sampled_steps(sigma):
    accounting = pytest.importorskip("dp_accounting")
    once, steps = Mechanism(sigma, 1.0, 1.0, 1), Mechanism(1.5, 1.0, 0.05, 100)
    assert epsilon([once], 1e-5) == pytest.approx(accounting.get_epsilon_gaussian(sigma, 1e-5), abs=1e-6)
    # three of them are one with less noise
    assert epsilon([once] * 3, 1e-5) == pytest.approx(_gaussian_epsilon(sqrt(3) / sigma, 1e-5))
    assert epsilon([once, steps], 1e-5) > max(epsilon([once], 1e-5), epsilon([steps], 1e-5))


def test_without_noise_every_site_knows_the_pooled_means():
    (xa, ya), (xb, yb) = rows_of(80, 0, 0.3), rows_of(120, 1, 0.6)
    heads = [make_head(xa, ya), make_head(xb, yb)]
    SharedHead.combine(heads)
    x, y = torch.from_numpy(np.concatenate([xa, xb])), np.concatenate([ya, yb])
    z = heads[0].embed_rows(x)
    wanted = torch.stack([z[y == c].mean(0) for c in (0, 1)])
    for head in heads:
        means, worth, _ = head.class_means()
        torch.testing.assert_close(means, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(worth, torch.from_numpy(np.bincount(y)).double(), rtol=1e-4, atol=1e-3)
        assert (head(x).argmax(1).numpy() == y).mean() > 0.9


def test_the_one_shot_head_is_discriminant_analysis_with_a_shrunk_covariance():
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, labels = rows_of(400, 0, 0.3)
    head = make_head(x, labels)
    z = head.embed_rows(torch.from_numpy(x)).numpy()
    _, rows, within = head.class_means()
    d = len(within)
    shrunk = within.numpy() + 0.5 * np.trace(within.numpy()) / d * np.eye(d)
    estimator = SimpleNamespace(fit=lambda _: None, covariance_=shrunk)
    known = LinearDiscriminantAnalysis(solver="lsqr", priors=[0.5, 0.5], covariance_estimator=estimator)
    wanted = known.fit(z, labels).decision_function(z)
    # the squares of means of few rows are too large by their variance
    longer = np.trace(np.linalg.inv(shrunk)) * np.trace(within.numpy()) / d / rows.detach().numpy()
    wanted += (longer[1] - longer[0]) / 2
    said = head(torch.from_numpy(x))
    np.testing.assert_allclose((said[:, 1] - said[:, 0]).numpy(), wanted, rtol=1e-3, atol=1e-3)


def test_a_class_of_few_rows_counts_for_less_in_noisy_statistics():
    head, (x, labels) = SharedHead(2, D), rows_of(400, 0, 0.1)
    exact = compute_statistics(head, x, labels)
    same, none = head.weight_by_precision(exact, 0.0)
    assert torch.equal(same, exact) and none.tolist() == [0, 0]
    letter, variances = head.weight_by_precision(exact, 16.0)
    often, rare = (letter.view(2, -1) / exact.view(2, -1))[:, -1].tolist()
    assert often == pytest.approx(1) and 0.1 < rare < 0.2  # 40 rows beside 360, of which noise hides little
    torch.testing.assert_close(variances, 16.0 * torch.tensor([often, rare], dtype=torch.float64) ** 2)
    unsure, _ = head.weight_by_precision(exact, 16.0 * 40**2)
    torch.testing.assert_close(unsure, exact)  # noise alone could part such counts
    assert torch.equal(make_head(x, labels).weight_by_precision(exact, 16.0)[0], letter)  # what the site knows stays


def test_means_of_other_sites_are_weighted_by_their_noise():
    torch.manual_seed(0)
    (xa, ya), (xb, yb) = rows_of(60, 0, 0.5), rows_of(600, 1, 0.5)
    alone = make_head(xa, ya)
    worth = []
    for noise in (0.0, 1.0, 30.0, 1000.0):
        heads = [make_head(xa, ya), make_head(xb, yb, noise)]
        SharedHead.combine(heads)
        worth.append(heads[0].effective_sample_sizes()[1])
    assert worth[0] == pytest.approx(330, abs=1) and worth == sorted(worth, reverse=True)
    assert worth[-1] == pytest.approx(30, abs=1)  # nothing but its own
    torch.testing.assert_close(heads[0].class_means()[0], alone.class_means()[0], atol=0.03, rtol=0.0)


def test_the_effective_sample_size_of_a_patients_rows_follows_from_their_variance():
    """The mean of ten patients of 30 rows each varies as the simulation says, and not as that of 300 patients."""
    rng = np.random.default_rng(0)
    patient, labels = np.repeat(np.arange(20), 30), np.repeat([0, 1], 300)

    def drawn(likeness):
        own, rest = rng.normal(size=(20, D)), rng.normal(size=(600, D))
        x = likeness**0.5 * own[patient] + (1 - likeness) ** 0.5 * rest + labels[:, None] * np.eye(D)[0]
        return x.astype(np.float32)

    def known(x, whose, **how):
        head = SharedHead(2, D, **how)
        who = None if whose is None else torch.from_numpy(whose)
        head.set_local_statistics(head.embed_rows(torch.from_numpy(x)), torch.from_numpy(labels), who)
        return head

    for likeness in (0.0, 0.6):
        heads = [known(drawn(likeness), patient) for _ in range(40)]
        means = torch.stack([head.class_means()[0] for head in heads]).detach()
        v = torch.stack([head.scatter.trace() for head in heads]).mean() / 598
        measured = float(300 * means.var(0).sum(1).mean() / v)
        assert float(torch.stack([head.design_effect for head in heads]).mean()) == pytest.approx(measured, rel=0.25)
    x = drawn(0.5)
    assert float(known(x, patient).rows_per_unit) == 1 and float(known(x, patient, patients=True).rows_per_unit) == 30
    apart = known(x, np.arange(600))  # a row each
    assert float(apart.design_effect) == pytest.approx(1) and float(apart.rows_per_unit) == 1
    sizes = [head.effective_sample_sizes()[0] for head in (apart, known(x, None))]
    assert sizes == pytest.approx([300, 300])
    assert float(known(x, labels).design_effect) == 300  # a patient of each class says nothing of others


@pytest.mark.parametrize("noise", [0.0, 0.5, 4.0, 16.0])
def test_a_head_without_local_rows_is_as_confident_as_its_statistics_allow(noise, monkeypatch):
    """Noise does not raise the confidence in a class; the most probable class stays the same."""
    torch.manual_seed(0)
    held, (x, y) = [], map(torch.from_numpy, rows_of(4000, 9))
    for seed in range(10):
        heads = [make_head(*rows_of(100, 2 * seed + k), noise) for k in range(2)]
        SharedHead.combine(heads)
        heads[0].clear_local_statistics()
        tempered = heads[0](x)
        with monkeypatch.context() as patch:
            patch.setattr("wsi_fl.oneshot.shared_head._signal_fraction", lambda *_: 1.0)
            bare = heads[0](x)
        assert torch.equal(tempered.argmax(1), bare.argmax(1))
        held.append([float(torch.nn.functional.cross_entropy(one, y)) for one in (tempered, bare)])
    ours, theirs = np.mean(held, axis=0)
    assert ours <= theirs and (noise > 4 or ours < 0.69)  # as who knows nothing


def test_bags_count_by_their_mean_and_padding_is_ignored():
    from wsi_fl.data.cohort import pack_bags

    rng = np.random.default_rng(0)
    bags = [rng.normal(size=(m, D)).astype(np.float32) for m in (3, 7)]
    found = SharedHead(2, D, bags=True).embed_rows(torch.from_numpy(pack_bags(bags)))
    means = np.stack([bag.mean(0) for bag in bags])
    torch.testing.assert_close(found, SharedHead(2, D).embed_rows(torch.from_numpy(means)))


def test_hospitals_with_a_single_class_learn_the_other_from_one_message(study):
    summary = oneshot(study, "privacy.target_epsilon=8")
    assert summary["communication"]["messages"] == 4 and charges(study) == [1, 1, 1]  # to the hub and back
    for row in summary["sites"]:
        assert row["epsilon"] == pytest.approx(8, abs=0.02) and row["epsilon"] <= 8
        assert (row["rounds"], row["guarantee"]) == (1, "guaranteed")
    document = evaluate(study, summary["run"])
    assert {row["model"] for row in document["sites"]} == {"ensemble"}
    private, stack = (document["models"][name]["merged"]["accuracy"]["mean"] for name in ("private", "ensemble"))
    assert stack > 0.8 > private
    assert write_report(study, summary["run"]).exists()


def test_sent_statistics_are_noisy_and_local_ones_are_exact(study):
    run = study.root / oneshot(study, "privacy.sigma=2.0")["run"]
    kept = model(run, "S0", "shared")
    exact, variances = kept["noiseless_statistics"].view(2, -1), kept["released"][-2:]
    weights = (variances / 4.0).sqrt()[:, None]
    noise = (kept["released"][:-2].view(2, -1) / weights - exact).numpy().ravel()
    assert kstest(noise / 2.0, "norm").pvalue > 1e-4
    assert int(kept["n_sites"]) == 3 and float(variances.max()) == 4.0
    mean = sum(model(run, f"S{k}", "shared")["released"] for k in range(3)) / 3
    torch.testing.assert_close(kept["sums"].double(), mean, rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A study, a run of it without privacy, and the audit of this run."""
    study = make_hospitals(tmp_path_factory.mktemp("plain") / "study")
    with pytest.MonkeyPatch.context() as patch:
        return study, *train_and_audit(study, patch, "privacy.enabled=false")


def test_without_privacy_the_statistics_are_exact(plain):
    _, run, _ = plain
    kept = model(run, "S0", "shared")
    torch.testing.assert_close(kept["released"][:-2], kept["noiseless_statistics"], rtol=1e-6, atol=1e-5)
    assert json.loads((run / "summary.json").read_text())["sites"][0]["epsilon"] is None
    _, counts = SharedHead(2, D).unpack_statistics(kept["noiseless_statistics"])
    assert float(counts.sum()) == pytest.approx(60)  # every row, whatever the size of batches


def test_a_resumed_run_sends_the_same_statistics_again(study):
    with interrupted_after(2):
        oneshot(study, "privacy.sigma=2.0")
    before = lines_of(study, "S0")
    summary = resume_run(study, "1", backend="local")
    assert lines_of(study, "S0") == before != []
    assert summary["sites"][0]["epsilon"] == pytest.approx(epsilon([Mechanism(2.0, 1.0, 1.0, 1)], 1e-5))


def test_refused_statistics_do_not_enter_the_head(study, monkeypatch):
    real = StatisticsPayload.find_problem

    def judged(payload, message, *how, **more):
        return "spoilt" if message.sender == 1 else real(payload, message, *how, **more)

    monkeypatch.setattr(StatisticsPayload, "find_problem", judged)
    run = study.root / oneshot(study, "privacy.sigma=2.0")["run"]
    one, other = (head_of(run, name) for name in ("S0", "S2"))
    torch.testing.assert_close(one.sum_of_other_sites(), other.released, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other.sum_of_other_sites(), one.released, rtol=1e-4, atol=1e-4)
    assert "site 1: spoilt" in (run / "sites/S0/log.txt").read_text()


@pytest.mark.parametrize(("variance", "noisy"), [(-1.0, False), (-1.0, True), (0.0, True)])
def test_class_statistics_must_state_their_noise(variance, noisy):
    vector = np.array([3.0, 1.0, variance, 4.0], np.float32)
    assert f"variance of {variance:.3g}" in find_range_problem(vector, 2, is_noisy=noisy)
    vector[-2] = 0.1
    assert find_range_problem(vector, 2, is_noisy=noisy) == ""


@pytest.mark.usefixtures("lone_exchange")
def test_a_real_hospital_is_charged_for_life_and_a_dry_run_is_free(study):
    make_real(study)
    only = ["sites=['S0']", "privacy.target_epsilon=1"]
    (planned,) = dry_run(study, method="oneshot", overrides=[*HEADS, *only])["sites"]
    assert planned["epsilon"] == pytest.approx(1, abs=1e-3)
    assert planned["expected"].startswith(
        "0.2 or more above local where others have its missing class, by oneshot"
    )  # it has one class
    first, second = (oneshot(study, *only)["sites"][0]["lifetime_epsilon"] for _ in range(2))
    assert first == pytest.approx(1, abs=1e-3)
    assert second == pytest.approx(_gaussian_epsilon(sqrt(2) / 3.731, 1e-5), abs=1e-3)


def test_statistics_of_a_much_larger_site_are_accepted(study):
    x, labels = rows_of(1000, 5)
    write_features(study, "S2", x, labels, [f"p{i}" for i in range(1000)], ["train"] * 990 + ["test"] * 10)
    run = study.root / oneshot(study, "privacy.target_epsilon=8")["run"]
    assert "rejected" not in (run / "sites/S0/metrics.jsonl").read_text()
    assert torch.equal(*(model(run, name, "shared")["sums"] for name in ("S0", "S1")))


def train_and_audit(study, monkeypatch, *overrides):
    monkeypatch.setattr("wsi_fl.evidence.attacks._NOISE_DRAWS", 60)
    run = oneshot(study, *overrides)["run"]
    return study.root / run, audit_run(study, run)


@pytest.mark.parametrize("unit", ["patient", "row"])
def test_an_audit_attacks_every_patient_of_the_statistics_and_keeps_names_at_the_site(request, monkeypatch, unit):
    if unit == "row":
        study, run, document = request.getfixturevalue("plain")
    else:
        study = request.getfixturevalue("study")
        run, document = train_and_audit(study, monkeypatch, "privacy.unit=patient", "privacy.sigma=1.5")
    for site in document["sites"]:
        tail = site["tail"]
        assert not tail["beyond"] and tail["n"] == (20 if unit == "patient" else 60)
        assert tail["unit"] == site["unit"] or not tail["sigma"]
        sizes = {group["group"]: group["n"] for group in tail["attackers"]["others"]["groups"]}
        assert sizes["all"] == tail["n"] == sum(n for name, n in sizes.items() if name.startswith("class"))
        with (run / "sites" / site["site"] / "exposure.csv").open() as file:
            rows = list(csv.DictReader(file))
        mu = [float(row["mu"]) for row in rows]
        assert len(rows) == tail["n"] and mu == sorted(mu, reverse=True)
        assert max(mu) <= (1 / 1.5 if tail["sigma"] else np.inf)
        assert sum(int(row["rows"]) for row in rows) == 60 and {row["patient"] for row in rows} == PATIENTS
    page = write_report(study, run.name).read_text()
    assert "Exposure at S1" in page and "exposure.csv" not in page
    text = (run / "audit" / "audit.json").read_text()
    assert not any(f'"{name}"' in text or f">{name}<" in page for name in PATIENTS)


PATIENTS = {f"p{k}" for k in range(20)}


def test_an_audit_reports_the_effect_of_each_sites_statistics(plain):
    _, run, document = plain
    assert [row["site"] for row in document["influence"]] == ["S0", "S1", "S2"]
    for row in document["influence"]:
        assert row["length"] <= row["n"] == 60 and row["moved"] > 0.01 and 0 <= row["answers_changed"] <= 1
    whole, *others = (head_of(run, f"S{k}") for k in range(3))
    SharedHead.combine(others)
    whole.clear_local_statistics(), others[0].clear_local_statistics()
    weights = whole.solve_head()[0]
    moved = float((others[0].solve_head()[0] - weights).norm() / weights.norm())
    assert document["influence"][0]["moved"] == pytest.approx(moved, rel=1e-3)


def test_an_audit_of_statistics_dominated_by_noise_is_written(plain, monkeypatch):
    study, run, _ = plain
    head = SharedHead.solve_head
    monkeypatch.setattr(SharedHead, "solve_head", lambda self: (torch.zeros_like(head(self)[0]), head(self)[1]))
    document = audit_run(study, run.name)
    assert [row["moved"] for row in document["influence"]] == [None] * 3
    assert "Influence of class statistics" in write_report(study, run.name).read_text()


@pytest.mark.parametrize("forged", [1000, *nightly(-1)])
def test_forged_statistics_are_refused_where_they_arrive(study, monkeypatch, forged):
    real = SharedHead.set_noisy_statistics

    def hold(head, exact, noisy, variance):
        real(head, exact, forged * noisy if float(head.local_sums[0, -1]) == 0 else noisy, variance)  # S1's

    monkeypatch.setattr(SharedHead, "set_noisy_statistics", hold)
    run, document = train_and_audit(study, monkeypatch, "privacy.sigma=2.0")
    assert [bool(row["refused"]) for row in document["influence"]] == [False, True, False]
    assert [row["moved"] > 0 for row in document["influence"]] == [True, False, True]
    assert "rejected the model from site 1" in (run / "sites/S0/log.txt").read_text()
    assert float(model(run, "S0", "shared")["sums"].abs().max()) < 60


SHARED = ["privacy.noise=shared", "privacy.sigma=3.0"]


def exact_sums(run, n=3):
    return [model(run, f"S{k}", "shared")["noiseless_statistics"] for k in range(n)]


def lines_of(study, site):
    lines = map(json.loads, study.ledger_path(site).read_text().splitlines())
    return [line for line in lines if "mechanism" in line]


def charges(study, n=3):
    """Count the charges of each site."""
    return [len(lines_of(study, f"S{k}")) for k in range(n)]


def head_of(run, site):
    head = SharedHead(2, D)
    head.load_state_dict(model(run, site, "shared"))
    return head


def read_sum_noise(run):
    """Return the noise in the sum of three sites and the head of S0."""
    held = model(run, "S0", "shared")
    return (held["sums"][:-2].double() * 3 - sum(exact_sums(run))).numpy(), held


def test_distributed_noise_is_in_the_sum_once_and_its_epsilon_names_the_trusted_sites(study):
    summary = oneshot(study, *SHARED)
    run = study.root / summary["run"]
    for row in summary["sites"]:
        assert row["guarantee"] == "shared"
        assert row["epsilon"] == pytest.approx(_gaussian_epsilon(1 / 3, 1e-5), rel=1e-4)
    noise, held = read_sum_noise(run)
    # two honest sites of three carry all of it, so three carry half as much again
    assert kstest(noise / (3 * sqrt(1.5)), "norm").pvalue > 1e-4
    assert held["sums"][-2:].tolist() == pytest.approx([9 / 2] * 2, rel=1e-4)
    assert all(torch.equal(model(run, f"S{k}", "shared")["sums"], held["sums"]) for k in (1, 2))


def test_without_noise_the_masked_sum_is_exact_and_no_message_reveals_a_sites_statistics(study, monkeypatch):
    sent, real = [], LocalComm.exchange

    def listened(self, outgoing, *args, **kwargs):
        sent.extend(item.release for item in outgoing)
        return real(self, outgoing, *args, **kwargs)

    monkeypatch.setattr(LocalComm, "exchange", listened)
    run = study.root / oneshot(study, "privacy.noise=shared", "privacy.enabled=false")["run"]
    exact = exact_sums(run)
    sums = model(run, "S1", "shared")["sums"][:-2].double() * 3
    torch.testing.assert_close(sums, sum(exact), rtol=1e-6, atol=1e-5)
    messages = {release.site: release for release in sent}
    assert len(messages) == len({release.digest for release in sent}) == 3
    counts = np.bincount(np.concatenate([one.vector for one in messages.values()]), minlength=256)
    assert chisquare(counts).pvalue > 1e-6  # bytes at random, though every other sum is 0 or small
    plain = (np.concatenate(exact) * 2**24).astype("<i8").view(np.uint8)
    assert np.bincount(plain, minlength=256).max() > 4 * counts.max()


def test_a_completed_secure_aggregation_is_not_repeated(study):
    with interrupted_after(1):
        oneshot(study, *SHARED)
    summary = resume_run(study, "1", backend="local")
    assert charges(study) == [1, 1, 1]
    assert summary["sites"][0]["epsilon"] == pytest.approx(_gaussian_epsilon(1 / 3, 1e-5), rel=1e-4)


@pytest.fixture
def four_hospitals(tmp_path):
    """Four hospitals of forty rows."""
    study = make_study(tmp_path / "study", n_sites=4)
    for k in range(4):
        patients, splits = [f"p{i}" for i in range(40)], ["train"] * 30 + ["test"] * 10
        write_features(study, f"S{k}", *rows_of(40, k), patients, splits)
    return study


def test_the_other_sites_continue_without_a_site_that_dropped_out(four_hospitals):
    with dying(LocalComm, "exchange", 1):
        oneshot(four_hospitals, *SHARED)
    summary = resume_run(four_hospitals, "1", without=["S3"], backend="local")
    noise, held = read_sum_noise(four_hospitals.root / summary["run"])
    assert summary["lost"] == ["S3"] and int(held["n_sites"]) == 3
    assert kstest(noise / (3 * sqrt(1.5)), "norm").pvalue > 1e-4
    assert charges(four_hospitals, 4) == [2, 2, 2, 1]


def test_a_sum_that_tolerates_a_dropout_has_the_noise_of_the_required_sites(four_hospitals):
    summary = oneshot(four_hospitals, *SHARED, "privacy.dropouts=1")
    head = model(four_hospitals.root / summary["run"], "S0", "shared")
    assert {row["guarantee"] for row in summary["sites"]} == {"shared"}
    assert float(head["sums"][-1]) == pytest.approx(9 / 2, rel=1e-4)  # of four, one may collude and one go
    assert charges(four_hospitals, 4) == [1, 1, 1, 1]
    words = "privacy.colluding = 1 and privacy.dropouts = 2 needs 6 sites or more, not 4"
    refused(lambda: oneshot(four_hospitals, *SHARED, "privacy.dropouts=2"), words)


def test_simulated_sites_release_in_one_process_and_real_ones_in_processes_of_their_own(study, monkeypatch):
    started = []

    def start_ranks(sites, *_, **__):
        started.append(sites)
        raise WsiFlError("ranks")

    monkeypatch.setattr(launch, "run_ranks", start_ranks)
    summary = oneshot(study, backend="mpi")
    assert [row["rounds"] for row in summary["sites"]] == [1] * len(summary["sites"])
    assert not started
    make_real(study)
    refused(lambda: oneshot(study, "privacy.sigma=4.0", backend="mpi"), "ranks", error=WsiFlError)
    assert len(started[0]) == len(summary["sites"])


def test_distributed_noise_needs_explicit_permission(study):
    make_real(study)
    refused(lambda: oneshot(study, *SHARED, backend="mpi"), 'allow = ["shared"]', "other sites")
    refused(lambda: oneshot(study, *SHARED, "sites=['S0', 'S1']"), "needs 3 sites")
    other = {"method": "proxyfl", "overrides": [*HEADS, *SHARED], "backend": "local"}
    refused(lambda: train(study, **other), "use oneshot")


def test_void_sums_do_not_end_a_run_and_each_is_charged_with_fresh_noise(study):
    with dying(LocalComm, "exchange", 1):
        oneshot(study, *SHARED)
    for _ in range(2):
        with dying(LocalComm, "exchange", 1):
            resume_run(study, "1", backend="local")
    summary = resume_run(study, "1", backend="local")
    assert charges(study) == [4, 4, 4] and len({line["released"] for line in lines_of(study, "S0")}) == 4
    assert summary["sites"][0]["epsilon"] == pytest.approx(_gaussian_epsilon(sqrt(4) / 3, 1e-5), rel=1e-4)


def test_a_site_that_has_opened_the_sum_starts_no_second_one(study):
    """A site has opened the sum when the job ends, so a second sum would charge every site again."""
    with dying(secure_aggregation, "_open_sum", 2):
        oneshot(study, *SHARED)
    refused(lambda: resume_run(study, "1", backend="local"), "site 0: it has the sum", "nothing was sent")
    assert charges(study) == [1, 1, 1]


def test_a_second_attempt_checks_all_budgets_first(study):
    edit(site_file(study, "S2"), more="max_epsilon = 1.5\n")
    with dying(LocalComm, "exchange", 1):
        oneshot(study, *SHARED)
    refused(lambda: resume_run(study, "1", backend="local"), "does not allow another attempt")
    assert charges(study) == [1, 1, 1]


def test_a_sum_with_a_spoilt_message_is_void(study, monkeypatch):
    real = secure_aggregation.mask_values

    def spoilt(values, own, *args):
        found = real(values, own, *args)
        return found ^ np.uint64(0x5A5A5A5A5A5A5A5A) if own == 1 else found

    monkeypatch.setattr(secure_aggregation, "mask_values", spoilt)
    refused(lambda: oneshot(study, *SHARED), "the sum is void", error=WsiFlError)
