"""Tests of every method in the training loop and of its agreement with its paper."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REAL, interrupted_after, make_study, nightly, refused, write_store
from opacus.accountants import RDPAccountant
from safetensors.numpy import load_file
from training_runs import assert_resumes, trained

from wsi_fl.federation import loop
from wsi_fl.federation.methods import METHODS
from wsi_fl.federation.topology import list_receivers, ring, star
from wsi_fl.privacy.accounting import epsilon, plan_mechanism
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.site.privacy_account import plan_round
from wsi_fl.stages.training.finished_runs import FinishedRun, effective_site_settings, find_finished_run
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run
from wsi_fl.study.site_file import SiteFile
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


def test_a_site_file_sets_its_batch_size_and_so_its_epsilon(study):
    """Against Opacus' accountant: S2 has 36 rows in 4 batches of 9 each round, the others in 5 of the pipeline's 8."""
    file = study.root / "sites" / "S2.toml"
    began = file.read_text()
    file.write_text(f"{began}batch_size = 9\n")
    summary = run(study, "fedavg")
    for row, steps, batch_size in zip(summary["sites"], (5, 5, 4), (8, 8, 9), strict=True):
        accountant = RDPAccountant()
        accountant.history = [(1.4, 1 / steps, 2 * steps)]
        assert row["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-6)
        assert row["batch_size"] == batch_size
    planned = dry_run(study, method="fedavg", overrides=ROUNDS)["sites"]
    assert [row["epsilon"] for row in planned] == pytest.approx([row["epsilon"] for row in summary["sites"]])
    finished = FinishedRun.load(study.root / summary["run"])
    find = partial(find_finished_run, study, "fedavg", finished.pipeline, finished.inputs)
    assert find() is not None
    file.write_text(f"{began}batch_size = 12\n")
    assert find() is None, "another batch size is another run"
    file.write_text(f'{began}batch_size = 9\nprivate_model = "cnn1"\n')
    assert find() is not None, "the models of this method are alike at all sites"
    settings = effective_site_settings("proxyfl", finished.pipeline, {"S2": SiteFile(name="S2", private_model="cnn1")})
    assert settings == {"sites.S2.batch_size": None, "sites.S2.private_model": "cnn1"}
    (study.root / summary["run"] / "summary.json").unlink()
    resumed = resume_run(study, summary["run"], backend="local")  # as the run began
    assert [row["batch_size"] for row in resumed["sites"]] == [8, 8, 9]
    real, pipeline = SiteFile(name="S2", batch_size=37, delta=1e-5), study.load_pipeline("small")
    refused(lambda: plan_round(real, pipeline, 36), "site S2: batch_size = 37 exceeds this site's 36")


def test_without_differential_privacy_too_a_site_takes_the_steps_of_its_batch_size(study, monkeypatch):
    file, sizes, regular = study.root / "sites" / "S2.toml", Counter(), METHODS["regular"]
    file.write_text(file.read_text() + "batch_size = 36\n")

    def step(learners, batch, *rest):
        sizes[len(batch[0])] += 1
        return regular.step(learners, batch, *rest)

    monkeypatch.setitem(METHODS.builtin, "regular", replace(regular, step=step))
    run(study, "regular", "privacy.enabled=false")
    assert sizes == {8: 2 * 2 * 4, 4: 2 * 2, 36: 2}


@pytest.mark.parametrize("method", [*nightly("fedavg", "avgpush"), "cwt"])
def test_methods_with_a_shared_model_start_alike_whatever_a_site_file_sets(tmp_path, method):
    study = make_study(tmp_path / "study", n_sites=2, site_extra='real = false\nprivate_model = "lenet5"')
    summary = run(study, method)
    assert len({flat(study, summary, site).size for site in study.site_names()}) == 1
    evaluate(study, summary["run"])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Three sites of 12, 36 and 84 training rows."""
    study = make_study(tmp_path_factory.mktemp("uneven") / "study")
    for k, n_patients in enumerate((2, 4, 8)):
        write_store(study, f"S{k}", n_patients=n_patients, seed=k)
    return study


def averaged(study, summary, role, n_rows):
    """Return the mean of the sites' last trained models, weighted by their rows, by name."""
    mean = {}
    for site, n in zip(study.site_names(), n_rows, strict=True):
        tensors, _ = SiteFolder(study.root / summary["run"] / "sites" / site).load_checkpoint(2)
        for key in (key for key in tensors if key.startswith(f"{role}/model/")):
            part = tensors[key].numpy().astype(np.float64) * n / sum(n_rows)
            mean[key.removeprefix(f"{role}/model/")] = mean.get(key.removeprefix(f"{role}/model/"), 0) + part
    return mean


@pytest.mark.parametrize(("method", "role"), [("fedavg", "private"), ("fml", "proxy")])
@pytest.mark.parametrize(("weights", "n_rows"), [("rows", (12, 36, 84)), ("equal", (1, 1, 1))])
def test_the_mean_of_a_star_is_weighted_by_rows_or_equal(uneven, method, role, weights, n_rows):
    summary = run(uneven, method, f"topology.weights={weights}", "privacy.enabled=false")
    expected = averaged(uneven, summary, role, n_rows)
    for site in uneven.site_names():
        found = load_file(uneven.root / summary["run"] / "sites" / site / f"{role}.safetensors")
        assert found.keys() == expected.keys()
        assert all(np.allclose(found[name], expected[name], rtol=1e-5, atol=1e-7) for name in found)


@pytest.mark.slow
def test_rows_weigh_alike_over_mpi_under_dp_and_after_a_kill(uneven, wsi_fl):
    settings = (*ROUNDS, "topology.weights=rows", "privacy.insecure_seed=1")
    whole, _ = assert_resumes(uneven, "fedavg", *settings, interruption=interrupted_after(4))
    options = [option for setting in settings for option in ("--set", setting)]
    ended = wsi_fl("train", "--method", "fedavg", "--json", *options, cwd=uneven.root)
    assert ended.returncode == 0, ended.stderr
    for site in uneven.site_names():
        runs = (whole, uneven.root / json.loads(ended.stdout)["run"])
        a, b = (load_file(run / "sites" / site / "private.safetensors") for run in runs)
        assert all(np.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_with_rows_as_weights_sites_leave_with_their_budgets_to_the_last(tmp_path):
    """ε is 2.5 after a round and 3.2 after two, so both leave before the second."""
    study = make_study(tmp_path / "study", n_sites=2, site_extra="real = false\nmax_epsilon = 3.0")
    summary = run(study, "fedavg", "topology.weights=rows")
    assert [row["rounds"] for row in summary["sites"]] == [1, 1]
    assert np.array_equal(flat(study, summary, "S0"), flat(study, summary, "S1"))


def test_with_sites_of_one_size_both_weights_give_the_same_model(pair):
    runs = [run(pair, "fedavg", f"topology.weights={name}", "privacy.enabled=false") for name in ("rows", "equal")]
    np.testing.assert_allclose(*(flat(pair, summary, "S1") for summary in runs), rtol=1e-4, atol=1e-6)


def test_a_weight_by_rows_is_the_same_whoever_is_present():
    """A release that is sent again after a restart keeps its weight, while others may be missing then."""
    sites = [SimpleNamespace(index=k, announced_units={k: (n,)}) for k, n in enumerate((100, 100, 800))]
    alone, together = (
        [loop._weigh_site(site, SimpleNamespace(present=present)) for site, present in pairs]
        for pairs in ([(site, (site.index,)) for site in sites], [(site, (0, 1, 2)) for site in sites])
    )
    assert alone == together and together[2] == 8 * together[0] > 0
    assert loop._weigh_site(sites[2], SimpleNamespace(present=(0, 1))) == 0


@pytest.mark.parametrize(("method", "graph"), [("proxyfl", ()), ("fedavg", ("topology.graph=ring",)), ("cwt", ())])
def test_weights_are_refused_where_no_hub_takes_a_mean_of_models(pair, method, graph):
    refused(lambda: run(pair, method, "topology.weights=rows", *graph), "takes no mean of models at a hub")


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
