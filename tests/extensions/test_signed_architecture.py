"""The signed model is the trained model: plain names, parameters by their digest, and digests compared in full."""

from dataclasses import replace

import pytest
import torch
from conftest import REAL, make_study, refused
from hospitals import one_installation  # noqa: F401
from torch import nn

from wsi_fl.federation import preflight
from wsi_fl.hospitals.plans import disclosures
from wsi_fl.hospitals.plans.build_plan import make_plan, parse_plan_document
from wsi_fl.hospitals.plans.review import review_plan
from wsi_fl.models import IMAGE_BUILDERS, create_model, parameters_digest, weights
from wsi_fl.models.encoder import Encoder
from wsi_fl.oneshot.released_statistics import StatisticsHeader, refuse_mismatch
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.build_sites import build_site
from wsi_fl.stages.training.resume import RunRequest, describe_run
from wsi_fl.stages.training.site_preflight import build_preflight, require_signed_model
from wsi_fl.stages.training.train import train
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import validate_model
from wsi_fl.types import Images, NoCommonPlan, encoder_differences

ELSEWHERE = ["hf-hub:somebody/net", "hf_hub:somebody/net", "local-dir:/tmp/net", "../net", "net:a", "a b", ""]


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study", n_sites=2, site_extra=REAL)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_is_looked_up_elsewhere_is_refused_by_every_entry_point(study, name, monkeypatch):
    asked = []
    monkeypatch.setattr("timm.create_model", lambda *given, **_: asked.append(given))
    words = "is no plain name of an architecture"
    for role in ("private", "proxy"):
        for library in ("timm", "monai"):
            setting = f"model.{role}='{library}:{name}'"
            refused(lambda setting=setting: study.load_pipeline("small", [setting]), f"model.{role}", words)
    site = {"name": "S0", "private_model": f"timm:{name}"}
    refused(lambda: validate_model(SiteFile, site, "S0"), "private_model", words)
    refused(lambda: create_model(f"timm:{name}", n_classes=2, shape=Images(3, 32), seed=0), words)
    refused(lambda: weights.create_timm_model(name, "features", num_classes=0), words)
    refused(lambda: Encoder(name, None), "encoder = ")
    given = [f"model.proxy='timm:{name}'"]
    plan = {"method": "proxyfl", "overrides": given, "out": study.root / "plan.json"}
    refused(lambda: make_plan(study, **plan), words)
    refused(lambda: train(study, method="proxyfl", overrides=given, backend="local"), words)
    for key in ("features.encoder", "mosaic.encoder") if ":" in name else ():
        refused(lambda key=key: study.load_pipeline("small", [f"{key}='{name}'"]), key, words)
    assert not asked


def test_plain_names_are_accepted(study):
    for name in ("resnet10t", "vit_tiny_patch16_224.augreg_in21k", "efficientnet_b0"):
        assert study.load_pipeline("small", [f"model.proxy='timm:{name}'"]).model.proxy == f"timm:{name}"
    assert study.load_pipeline("small", ["model.proxy='monai:efficientnet-b0'"]).model.proxy == "monai:efficientnet-b0"


MLP = IMAGE_BUILDERS["mlp"]


def planned(study):
    return make_plan(study, method="proxyfl", overrides=["privacy.sigma=4"], out=study.root / "plan.json")


def _wider(n_classes, channels, size_px):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size_px**2, 7), nn.Linear(7, n_classes))


def _renamed(n_classes, channels, size_px):
    return nn.Sequential(MLP(n_classes, channels, size_px))


def _frozen(n_classes, channels, size_px):
    model = MLP(n_classes, channels, size_px)
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("other", "words"), [(_wider, "(leaves)"), (_renamed, "whose parameters have the SHA-256"), (_frozen, "(leaves)")]
)
def test_a_model_that_changed_after_the_signature_is_not_trained(study, other, words, monkeypatch):
    plan = planned(study)
    learns = parse_plan_document(plan)["learns"]
    with torch.random.fork_rng():
        usual = create_model("mlp", n_classes=2, shape=Images(3, 16), seed=3)
    assert learns["parameters"] == parameters_digest(usual) and len(learns["parameters"]) == 64
    review_plan(study, plan, "S0")
    party = RunContext.create(study, plan.pipeline(), "proxyfl")
    run = RunFolder.create(study.runs_path, "proxyfl", "small")
    describe_run(party, RunRequest("small", agreement=plan.digest, parameters=plan.parameters), "0" * 32, run)
    with replace(party, run=run) as party:
        require_signed_model(build_site(party, 0), party)
        site = build_site(party, 0)
        site.learners["proxy"].model = other(2, 3, 16)
        refused(lambda: require_signed_model(site, party), "another model than the plan's", error=NoCommonPlan)
    monkeypatch.setitem(IMAGE_BUILDERS, "mlp", other)
    monkeypatch.setattr(disclosures, "_measure_model", disclosures._measure_model.__wrapped__)  # as in another process
    refused(lambda: review_plan(study, plan, "S0"), words)


TAIL = {"weights": "", "projection": None, "statistics": {}}


@pytest.mark.parametrize("digits", [8, 16, 63])
def test_digests_are_compared_in_full_and_shown_by_their_first_digits(digits):
    one, other = "a" * 64, "a" * digits + "b" * (64 - digits)
    for key, (first, second) in {
        "weights": (one, other),
        "projection": (one, other),
        "schema": (one, other),
        "statistics": ({"A": one}, {"A": other}),
    }.items():
        documents = [{"site": "A", **TAIL, key: first}, {"site": "B", **TAIL, key: second}]
        with pytest.raises(NoCommonPlan) as told:
            preflight.compare_sites(documents)
        assert "a" * 17 not in str(told.value), str(told.value)
        preflight.compare_sites([documents[0], {**documents[0], "site": "B"}])


def test_preflight_replies_hold_full_digests(study):
    with RunContext.create(study, study.load_pipeline("small", ["privacy.sigma=4"]), "proxyfl") as party:
        assert len(build_preflight(build_site(party, 0), party)["schema"]) == 64


def test_encoder_digests_are_compared_in_full_and_with_an_earlier_store_by_prefix():
    long, other = f"net sha256:{'a' * 64}; mean 0", f"net sha256:{'a' * 32}{'b' * 32}; mean 0"
    assert all(encoder_differences([long, other])) and not any(encoder_differences([long, long]))
    short = f"net sha256:{'a' * 16}; mean 0"
    assert not any(encoder_differences([long, short])) and not any(encoder_differences([short, long, long]))
    assert all(encoder_differences([f"net sha256:{'c' * 16}; mean 0", long]))
    numbers = {"n_features": 4, "dimensions": 2, "n": 3, "sigma": 1.0, "epsilon": 1.0, "delta": 1e-5}
    words = {"site": "S", "data": "features", "example": "patch", "projection": "", "unit": "row", "digest": "0" * 64}
    facts = StatisticsHeader(**numbers, **words, encoder=short, classes=["a", "b"], guarantee="guaranteed")
    refuse_mismatch(facts, {"encoder": long}, "S")
    refused(lambda: refuse_mismatch(facts, {"encoder": long.replace("a", "d", 1)}, "S"), "statistics with encoder")
