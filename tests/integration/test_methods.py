"""Tests of every method in the training loop and of its agreement with its paper."""

import numpy as np
import pytest
from conftest import REAL, interrupted_after, make_study, nightly
from safetensors.numpy import load_file
from training_runs import assert_resumes, trained

from wsi_fl.federation.methods import METHODS
from wsi_fl.federation.topology import list_receivers, ring, star
from wsi_fl.privacy.accounting import epsilon, plan_mechanism
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.system.files import read_lines
from wsi_fl.types import UsageError

ROUNDS = ("train.rounds=2", "train.batch_size=8")
ACCOUNTED = [
    name for name, method in METHODS.items() if not (method.bare_disclosures or method.payload.is_single_release)
]


def run(study, method, *overrides):
    return trained(study, method, *ROUNDS, *overrides)


def flat(study, summary, site, role="private"):
    """Return all numbers of a model of a run as a vector."""
    tensors = load_file(study.root / summary["run"] / "sites" / site / f"{role}.safetensors")
    return np.concatenate([value.ravel() for value in tensors.values()])


@pytest.mark.parametrize("method", ACCOUNTED)
def test_every_method_trains_accounts_and_is_evaluated(pair, method):
    summary = run(pair, method)
    n = 2 * 36 if METHODS[method].learns_from == "everybody" else 36
    expected = epsilon([plan_mechanism(n, 8, 2, 1.4, 0.7)], 1e-5)
    for row in summary["sites"]:
        assert row["epsilon"] == pytest.approx(expected, abs=1e-6)
        assert row["guarantee"] == "guaranteed"  # strict mode
    accuracy = evaluate(pair, summary["run"])["merged"]["accuracy"]
    assert 0 <= accuracy["mean"] <= 1
    hops = METHODS[method].build_graph(0)(2, 0, 0.0)
    messages = sum(len(list_receivers(matrix, site)) for matrix in hops for site in range(2))
    assert summary["communication"]["messages"] == 2 * messages


@pytest.mark.parametrize(
    "method", [one if one == "cwt" else pytest.param(one, marks=pytest.mark.slow) for one in ACCOUNTED]
)
def test_every_method_resumes_to_the_same_models_after_a_kill(pair, method):
    assert_resumes(pair, method, *ROUNDS, "privacy.insecure_seed=1", interruption=interrupted_after(4))


def test_pooling_is_refused_where_one_hospital_keeps_its_patches(study):
    file = study.root / "sites" / "S2.toml"
    file.write_text(file.read_text().replace("real = false", REAL))
    with pytest.raises(UsageError, match=r"sites/S2\.toml: joint needs every site's patches"):
        run(study, "joint")


@pytest.mark.parametrize("method", [*nightly("fedavg", "avgpush"), "cwt"])
def test_methods_with_a_shared_model_start_alike_whatever_a_site_file_sets(tmp_path, method):
    study = make_study(tmp_path / "study", n_sites=2, site_extra='real = false\nprivate_model = "lenet5"')
    summary = run(study, method)
    assert len({flat(study, summary, site).size for site in study.site_names()}) == 1
    evaluate(study, summary["run"])


@pytest.mark.parametrize(("method", "role"), [("fedavg", "private"), ("fml", "proxy")])
def test_after_a_star_every_site_holds_the_central_model(study, method, role):
    summary = run(study, method)
    models = [flat(study, summary, site, role) for site in study.site_names()]
    for other in models[1:]:
        np.testing.assert_allclose(other, models[0], rtol=1e-6, atol=1e-7)


def test_a_single_site_trains_the_same_model_by_either_method_that_averages(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    alone, again = (flat(study, run(study, m, "privacy.enabled=false"), "S0") for m in ("fedavg", "avgpush"))
    assert np.array_equal(alone, again)


def test_models_relayed_by_the_hub_are_recorded_and_cost_no_budget(study):
    run(study, "fedavg")
    relayed = [sum("relayed" in line for line in read_lines(study.ledger_path(site))) for site in ("S0", "S1")]
    assert relayed == [2, 0]  # one broadcast a round


@pytest.mark.parametrize("n", [1, 2, 3, 5, 49])
def test_a_star_averages_exactly_and_a_ring_only_passes_on(n):
    whole = np.eye(n)
    for matrix in star(n, 0):
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
        whole = matrix @ whole
    np.testing.assert_allclose(whole / whole.sum(axis=1, keepdims=True), np.full((n, n), 1 / n))
    for matrix in ring(n, 4):
        assert sorted(matrix.argmax(axis=0).tolist()) == list(range(n))
        assert matrix[(np.arange(n) + 1) % n, np.arange(n)].all()
