"""Tests of sites that start from published weights: the trained part, its transfer, resumption and agreement."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import REAL, interrupted_after, make_study, metrics, model, published, refused
from training_runs import assert_resumes

from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.federation import preflight
from wsi_fl.hospitals.plans.build_plan import make_plan, parse_plan_document
from wsi_fl.hospitals.plans.review import review_lines, review_plan
from wsi_fl.models import StartWeights, create_model, schema_digest
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.build_sites import build_site
from wsi_fl.stages.training.run_cost import dry_run, plan_lines
from wsi_fl.stages.training.site_preflight import build_preflight
from wsi_fl.stages.training.train import train
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.types import Images, UsageError, WsiFlError

SIZE, NAME = 32, "test_resnet"


def settings(part="norm", weights=f"weights/{NAME}.safetensors", **more):
    named = {"private": f"timm:{NAME}", "proxy": f"timm:{NAME}", "weights": weights, "train": part} | more
    return [f"model.{key}={json.dumps(value)}" for key, value in named.items()]


def make_warm_study(root, n_sites=2, seed=0, site_extra="real = false"):
    """Make a study whose models start from given weights."""
    study = make_study(root, n_sites=n_sites, size_px=SIZE, site_extra=site_extra)
    (root / "weights").mkdir()
    published(root / "weights", NAME, seed)
    return study


def n_trained(study, part):
    return sum(p.numel() for p in make_starting_network(study, part).parameters() if p.requires_grad)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make_warm_study(tmp_path_factory.mktemp("pretrained") / "study")


@pytest.fixture(scope="module")
def resumed_run(study):
    """A run of ProxyFL and an identical one, interrupted and resumed."""
    sets = [*settings(), "train.local_baseline=true", "privacy.insecure_seed=1"]
    return assert_resumes(study, "proxyfl", *sets, interruption=interrupted_after(3))


def make_starting_network(study, part="norm", seed=0):
    """Make a network in its state at the start of a run."""
    start = StartWeights(part, study.root / f"weights/{NAME}.safetensors")
    return create_model(f"timm:{NAME}", n_classes=2, shape=Images(3, SIZE), seed=seed, start=start)


def test_only_the_trained_part_has_changed(resumed_run, study):
    whole, _ = resumed_run
    fresh = make_starting_network(study)
    moving = {name for name, p in fresh.named_parameters() if p.requires_grad}
    for role in ("private", "proxy", "local"):
        for site in ("S0", "S1"):
            found = model(whole, site, role)
            moved = {name for name, one in fresh.state_dict().items() if not torch.equal(one, found[name])}
            assert moved and moved <= moving, role


def test_the_bytes_sent_are_those_of_the_plan(resumed_run, study, tmp_path):
    plan = make_plan(study, method="proxyfl", overrides=settings(), out=tmp_path / "plan.json")
    proxy = parse_plan_document(plan)["leaves"][0]
    assert proxy["what"] == f"proxy model (timm:{NAME}, model.train = norm)"
    assert proxy["bytes"] == 4 * n_trained(study, "norm") < 4 * 3000
    for line in metrics(resumed_run[0], "S0"):
        assert proxy["bytes"] <= line["bytes"] <= proxy["bytes"] + 256


def test_a_saved_model_predicts_without_the_file_of_weights(resumed_run, study):
    whole, _ = resumed_run
    weights = study.root / "weights"
    hidden = weights.rename(study.root / "elsewhere")
    try:
        assert [row["n"] > 0 for row in evaluate(study, whole.name)["sites"]]
        audit_run(study, whole.name)
        document = export_model(study, whole.name, model_name="proxy", form="wsinfer")
    finally:
        hidden.rename(weights)
    exported = torch.jit.load(str(study.root / document["out"] / "torchscript_model.pt"), map_location="cpu")
    ours = make_starting_network(study, seed=7)
    ours.load_state_dict(RunFolder(whole).site_folder("S0").load_model("proxy"))
    with PatchStore(study.store_path("S0")) as store:
        x = torch.from_numpy(store.read(np.arange(8))).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        torch.testing.assert_close(exported(x), ours.eval()(x), rtol=1e-4, atol=1e-5)


def test_the_dry_run_reports_the_trained_share(study, capsys):
    document = dry_run(study, method="fedavg", overrides=settings("head"), backend="local")
    row, trained = document["sites"][0], n_trained(study, "head")
    assert row["trained_parameters"] == trained < row["parameters"]
    print_lines(plan_lines(document))
    assert f"0.37 M parameters ({trained} trained)" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fedavg", "regular"])
def test_other_methods_train_only_the_selected_part_too(study, method):
    run = train(study, method=method, overrides=[*settings("lora"), "train.rounds=1"], backend="local")["run"]
    found = model(study.root / run, "S0")
    assert float(found["model.conv1.0.up.weight"].abs().max()) > 0


def test_sites_that_start_from_other_weights_do_not_begin(study, tmp_path):
    other = make_warm_study(tmp_path / "other", seed=1)

    def of(study, index):
        with RunContext.create(study, study.load_pipeline("small", settings()), "proxyfl") as party:
            site = build_site(party, index)
            return build_preflight(site, party) | {"run": ""}, schema_digest(site.learners["proxy"].model)

    (first, agreed), (second, same_agreed), (odd, other_agreed) = of(study, 0), of(study, 1), of(other, 1)
    preflight.compare_sites([first, second])
    assert len(first["weights"]) == 64
    assert agreed == same_agreed != other_agreed  # and so no message of the one is taken by the other
    with pytest.raises(WsiFlError, match=r"S1 has \w{16} as the initial weights .*\(model.weights\)"):
        preflight.compare_sites([first, odd])


def test_a_hospital_signs_the_weights(tmp_path, capsys):
    coordinator = make_warm_study(tmp_path / "c", n_sites=3, site_extra=REAL)
    plan = make_plan(coordinator, method="proxyfl", overrides=settings(), out=tmp_path / "plan.json")
    digest = parse_plan_document(plan)["learns"]["weights"]
    own = make_warm_study(tmp_path / "own", n_sites=3, site_extra=REAL)
    print_lines(review_lines(review_plan(own, plan, "S0")))
    assert digest in capsys.readouterr().err
    shutil.copy(published(tmp_path, NAME, seed=1), own.root / "weights")
    refused(lambda: review_plan(own, plan, "S0"), "weights (model.weights) with the SHA-256", digest)


def test_impossible_warm_starts_are_refused_before_training(study):
    def tried(words, *sets, error=UsageError):
        refused(lambda: train(study, method="proxyfl", overrides=sets, backend="local"), *words, error=error)

    before = len(list(study.runs_path.glob("0*")))
    tried(("model.train", "needs model.weights"), 'model.train="norm"')
    tried(("model.train", "'all', 'head', 'last', 'norm' or 'lora'"), *settings("tail"))
    tried(("model.weights", "no such file or folder"), *settings(weights="none.safetensors"))
    tried(("'mlp' starts from no weights", "timm:NAME"), *settings(proxy="mlp"))
    heads = ("train.data='features'", "model.proxy='linear_head'", "model.private='linear_head'")
    tried(("needs train.data = patches",), *settings()[2:], *heads)
    assert len(list(study.runs_path.glob("0*"))) == before
    named = "timm:mobilenetv4_conv_small_035"  # timm publishes none of it
    words = ("timm publishes no weights of this name", "model.weights = 'FILE.safetensors'")
    tried(words, *settings(weights="hub", proxy=named, private=named), error=WsiFlError)
