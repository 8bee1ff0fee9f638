"""Tests of the training loop in one process: limiting cases, privacy cost, messages and resumption."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import larger, larger_pair, metrics, model, nightly, same
from conftest import larger_study as make_study
from file_changes import edit, site_file
from safetensors.torch import load_file
from torch.nn import functional
from training_runs import assert_resumes, dying, of_site, run_of

from wsi_fl.data.augmentation import build_augmentation
from wsi_fl.data.batches import build_tensor
from wsi_fl.federation import loop
from wsi_fl.federation.topology import TOPOLOGIES
from wsi_fl.models import create_model
from wsi_fl.privacy.accounting import epsilon, plan_mechanism
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stages.training import build_sites
from wsi_fl.stages.training.train import resume_run
from wsi_fl.types import Images, UsageError, WsiFlError

study = larger
pair = larger_pair

OPEN = "privacy.enabled=false"
SEEDED = "privacy.insecure_seed=1"
N_TRAIN, BATCH = 36, 8  # of conftest's stores


def run(study, method="proxyfl", *overrides):
    return run_of(study, method, *overrides)


def test_without_alpha_the_private_model_trains_as_a_local_model(pair):
    alone = run(pair, "regular", OPEN)
    deaf = run(pair, "proxyfl", OPEN, "train.alpha=0.0")
    listening = run(pair, "proxyfl", OPEN, "train.alpha=0.3")
    for site in pair.site_names():
        assert same(model(alone, site), model(deaf, site))
        assert not same(model(alone, site), model(listening, site))


@pytest.mark.parametrize("augment", ["flips", *nightly("none")])
def test_a_single_site_trains_as_a_hand_written_loop(tmp_path, augment):
    study = make_study(tmp_path / "one", n_sites=1)
    path = run(study, "regular", OPEN, f"train.augment={augment}", "train.epochs_per_round=2")
    store = open_store(study, "S0")
    rows = np.flatnonzero(store.table.split == "train")
    pixels, label = build_tensor(store.read(rows)), torch.from_numpy(store.table.label[rows])
    net = create_model("cnn1", n_classes=2, shape=Images(3, 16), seed=1000)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    for round_ in (1, 2, 3):
        order, views = (CipherStream.from_seed(0, 0, round_, purpose) for purpose in ("batches", "views"))
        views.randbelow(2**63)
        change = build_augmentation(augment, views)
        losses = []
        for _ in range(2):
            for chosen in torch.from_numpy(order.permutation(len(rows))).split(BATCH):
                x = pixels[chosen] if change is None else torch.stack([change(i) for i in pixels[chosen]])
                loss = functional.cross_entropy(net(x), label[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        told = metrics(path, "S0")[round_ - 1]["loss"]["private"]
        assert told == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-8)
    for name, value in model(path, "S0").items():
        torch.testing.assert_close(value, net.state_dict()[name])


def test_private_models_may_differ_and_proxies_travel(study):
    file = study.root / "sites" / "S2.toml"
    file.write_text(file.read_text() + 'private_model = "mlp"\n')
    path = run(study, "proxyfl", SEEDED, "train.rounds=2")
    assert model(path, "S2").keys() != model(path, "S1").keys()
    assert model(path, "S2").keys() == model(path, "S2", "proxy").keys()
    proxies = [model(path, f"S{k}", "proxy")["1.weight"] for k in range(4)]
    assert not any(torch.equal(a, b) for a, b in pairwise(proxies))  # a permutation: nothing is averaged
    # Round 2 sends two places on what local training of that round left in the checkpoint.
    for k in range(4):
        kept = load_file(path / "sites" / f"S{k}" / "state" / "round_00002.safetensors")
        assert torch.equal(kept["proxy/model/1.weight"], proxies[(k + 2) % 4])


def test_epsilon_messages_and_bytes_of_every_round(pair):
    path = run(pair)
    size = sum(value.numel() for value in model(path, "S0", "proxy").values())
    for site in pair.site_names():
        lines = metrics(path, site)
        assert [line["round"] for line in lines] == [1, 2, 3]
        for line in lines:
            cost = plan_mechanism(N_TRAIN, BATCH, line["round"], 1.4, 0.7)
            assert line["epsilon"] == pytest.approx(epsilon([cost], 1e-5))
            assert line["messages"] == 1
            assert 4 * size <= line["bytes"] <= 4 * size + 256
            assert line["own"]["n"] == 12
            assert line["merged"]["n"] == 24
    alone = run(pair, "regular", "train.rounds=1")
    assert {(line["messages"], line["bytes"]) for line in metrics(alone, "S1")} == {(0, 0)}


def test_noise_never_repeats_unless_a_test_fixes_its_seed(pair):
    def twice(*overrides):
        return [model(run(pair, "proxyfl", "train.rounds=1", *overrides), "S0", "proxy") for _ in range(2)]

    assert not same(*twice())
    assert same(*twice(SEEDED))


def test_a_self_weight_of_one_half_gives_the_mean_of_two_neighbours(study):
    path = run(study, "proxyfl", OPEN, "topology.self_weight=0.5", "train.rounds=2")
    states = [path / "sites" / f"S{k}" / "state" / "round_00002.safetensors" for k in range(4)]
    sent = [load_file(state)["push/x"] for state in states]
    names = [name for name, _ in create_model("mlp", n_classes=2, shape=Images(3, 16), seed=0).named_parameters()]
    for k in range(4):
        proxy = model(path, f"S{k}", "proxy")
        got = torch.cat([proxy[name].flatten() for name in names])
        torch.testing.assert_close(got, (sent[k] + sent[(k + 2) % 4]) / 2)


def test_training_computes_without_denormal_numbers_and_leaves_them_to_others(pair, monkeypatch):
    products, run_loop = [], loop.run

    def run_and_multiply(*arguments):
        products.append(multiply_small_numbers())
        run_loop(*arguments)

    monkeypatch.setattr(loop, "run", run_and_multiply)
    run(pair, "regular", OPEN, "train.rounds=1")
    assert products == [0.0]
    assert multiply_small_numbers() > 0


def multiply_small_numbers():
    return float(torch.full((64,), 1e-30).mul(1e-10).sum())


@pytest.mark.parametrize("method", ["regular", "proxyfl"])
def test_a_diverging_model_is_reported(pair, method, monkeypatch):
    class Wild(torch.optim.Adam):
        """An optimiser with a learning rate above the allowed range."""

        def __init__(self, parameters, lr, **given):
            super().__init__(parameters, lr=1e30, **given)

    monkeypatch.setattr("wsi_fl.learning.local_training.Adam", Wild)
    words = r"site S0: its (private|proxy) model is not finite.*train\.lr"
    with pytest.raises(WsiFlError, match=words):
        run(pair, method, OPEN)


def test_an_interrupted_run_resumes_to_the_same_models_and_account(pair):
    """Before and after the checkpoint of S1 in round 2."""
    whole = run(pair, "proxyfl", SEEDED)
    for interruption in (dying(loop, "write_checkpoint", 4), dying(PrivacyLedger, "record_transmission", 4)):
        assert_resumes(pair, "proxyfl", SEEDED, interruption=interruption, whole=whole)
    assert of_site(whole, "S1", "ledger")["steps"] == 15


def test_rounds_that_were_sent_are_not_sent_again_with_new_noise(pair, tmp_path):
    path = run(pair)
    (path / "summary.json").unlink()
    before = [pair.ledger_path(site).read_text() for site in pair.site_names()]
    kept = shutil.copytree(path / "sites", tmp_path / "kept")
    later = "ledger has later rounds than the checkpoints; start a new run"
    for lost, words in (
        ("S*/state/*", later),
        ("S*/state/round_00003.safetensors", later),
        ("S1/state/*", "no checkpoint of round 1, from which the others resume"),
    ):
        for file in (path / "sites").glob(lost):
            file.unlink()
        with pytest.raises(WsiFlError, match=words):
            resume_run(pair, path.name, backend="local")
        assert [pair.ledger_path(site).read_text() for site in pair.site_names()] == before
        shutil.copytree(kept, path / "sites", dirs_exist_ok=True)


def test_a_real_site_is_not_trained_beside_others_and_sends_nothing_unprotected_unless_its_file_allows_it(tmp_path):
    study = make_study(tmp_path / "real", n_sites=2, site_extra="real = true\ndelta = 1e-5\nmax_epsilon = 50.0")
    words = r"sites/S0\.toml: a model without differential privacy.*\[\"model\"\]"
    for override, refusal in (
        ("train.rounds=3", "real hospital"),
        (OPEN, words),
        ("privacy.sigma=0", words),
        (SEEDED, words),
    ):
        with pytest.raises(WsiFlError, match=refusal):
            run(study, "proxyfl", override)
    for name in study.site_names():
        edit(site_file(study, name), more='allow = ["model", "patches"]\n')
    assert model(run(study, "proxyfl", OPEN), "S0")


@pytest.mark.parametrize(("override", "secret"), [("privacy.enabled=true", True), (OPEN, False), (SEEDED, False)])
def test_augmentation_is_secret_wherever_epsilon_is_guaranteed(pair, monkeypatch, override, secret):
    seeds = []
    monkeypatch.setattr(build_sites, "build_augmentation", lambda name, views: seeds.append(views.randbelow(2**62)))
    for _ in range(2):
        run(pair, "regular", override, "train.rounds=2")
    assert len(set(seeds[:4])) == 4
    assert (seeds[:4] == seeds[4:]) is not secret


def test_an_unknown_augmentation_is_refused_before_training(study):
    with pytest.raises(UsageError, match="unknown augmentation 'flip'"):
        run(study, "proxyfl", 'train.augment=["mirror", "flip"]')
    assert not study.runs_path.exists()


def test_a_graph_of_too_many_hops_is_refused_before_training(study, monkeypatch):
    six = TOPOLOGIES["ring"](0)
    monkeypatch.setitem(TOPOLOGIES, "six", lambda seed: lambda *arguments: six(*arguments) * 6)
    with pytest.raises(UsageError, match="the graph of round 1 has 6 hops; at most 5"):
        run(study, "proxyfl", "topology.graph=six")
    assert not study.runs_path.exists()
