"""Tests of slides as bags of features: models, gradients, methods, restricted classes and predictions."""

import importlib.util
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from builders import compare_with_loop
from conftest import metrics, nightly, refused
from PIL import Image
from torch.nn import functional
from training_runs import answers, csv_rows, trained

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort, concatenate_examples, find_allowed_classes, pack_bags, sample_patches
from wsi_fl.demo import simulated_slides
from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.evidence.clinical import describe_clinically
from wsi_fl.federation.methods import METHODS
from wsi_fl.learning.local_training import predict_examples
from wsi_fl.models import BAG_BUILDERS, create_model, mil
from wsi_fl.privacy.accounting import Mechanism, epsilon, plan_mechanism
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import _sum_unit_gradients
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.privacy.row_independence import model_origin
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.evaluation_lines import render_evaluation_lines
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.types import Bags, BagTable, GridSpec, WsiFlError

CPU = torch.device("cpu")
CLASSES = ("LUAD", "LUSC", "GBM", "LGG")
TYPES = {"lung": ("LUAD", "LUSC"), "brain": ("GBM", "LGG")}
D = 6
LENGTHS = (1, 3, 7, 2)

PIPELINE = """
[model]
private = "deepset_attention"
proxy = "deepset"
[train]
data = "mosaics"
rounds = 2
batch_size = 4
lr = 0.003
[evaluate]
bootstrap = 20
[mosaic]
size_px = 64
mpp = 1.0
"""


def write_mosaic(study, site, seed=0, *, classes=CLASSES, n_slides=12, d=D, encoder="densenet121 abc", only=None):
    """Write a feature store whose features depend on the class; every third slide is held out."""
    rng = np.random.default_rng(seed)
    label = np.arange(n_slides) % (len(classes) if only is None else only)
    kinds = [next((kind for kind, names in TYPES.items() if classes[c] in names), "") for c in label]
    bags = []
    for c in label:
        m = int(rng.integers(1, 6))
        features = rng.normal(0, 0.3, (m, d)).astype(np.float32)
        features[:, c] += 3
        bags.append(Bag(features, np.stack([np.arange(m) * 64, np.full(m, 128)], 1)))
    names = [f"{site}_slide_{k}" for k in range(n_slides)]
    table = BagTable(
        label.astype(np.int64),
        np.array(kinds),
        np.array(names),
        np.array([f"{name}_patient" for name in names]),
        np.where(np.arange(n_slides) // 4 == 2, "test", "train"),
    )
    path = study.mosaic_path(site)
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = BagMeta(site, classes, encoder, GridSpec(64, 1.0, 64), tumor_types=TYPES)
    write_bags(path, meta, table, bags)
    return table, bags


def make_bag_study(root, n_sites=2, real=False, **store):
    (root / "pipelines").mkdir(parents=True)
    (root / "sites").mkdir()
    (root / "pipelines" / "subtypes.toml").write_text(PIPELINE)
    study = Study(root)
    for k in range(n_sites):
        text = f'name = "S{k}"\nreal = {str(real).lower()}\nslides = "slides/*.tif"\n'
        (root / "sites" / f"S{k}.toml").write_text(text)
        write_mosaic(study, f"S{k}", seed=k, **store)
    return study


@pytest.fixture
def bags(tmp_path):
    return make_bag_study(tmp_path / "study")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study and an evaluated run."""
    study = make_bag_study(tmp_path_factory.mktemp("bags") / "study")
    run = trained(study, "proxyfl", "train.rounds=12", OPEN)["run"]
    return study, run, evaluate(study, run)


OPEN = "privacy.enabled=false"


def model_of(name, n_features=D, seed=0):
    return create_model(name, n_classes=3, shape=Bags(n_features), seed=seed)


def make_unequal_bags(d=D, lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(m, d)).astype(np.float32) for m in lengths]


def as_tensor(bags):
    return torch.from_numpy(pack_bags(bags))


@pytest.mark.parametrize("name", BAG_BUILDERS)
def test_predictions_do_not_depend_on_patch_order_or_other_bags(name):
    model, bags = model_of(name), make_unequal_bags()
    whole = model(as_tensor(bags))
    shuffled = [np.random.default_rng(3).permutation(bag) for bag in bags]
    assert (model(as_tensor(shuffled)) - whole).abs().max() < 1e-5
    for k, bag in enumerate(bags):
        assert (model(as_tensor([bag]))[0] - whole[k]).abs().max() < 1e-5


@pytest.mark.parametrize("garbage", [7.5, float("nan"), *nightly(float("inf"), -float("inf"))])
@pytest.mark.parametrize("name", BAG_BUILDERS)
def test_masked_values_change_no_prediction(name, garbage):
    model, x = model_of(name), as_tensor(make_unequal_bags())
    dirty = x.clone()
    dirty[..., :-1][x[..., -1] == 0] = garbage
    padded = torch.cat([dirty, torch.full((4, 5, D + 1), garbage)], dim=1)
    padded[:, -5:, -1] = 0
    y = torch.tensor([0, 1, 2, 0])
    found = []
    for one in (x, dirty, padded):
        loss = functional.cross_entropy(logits := model(one), y)
        found.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("name", BAG_BUILDERS)
def test_a_bag_of_padding_and_a_bag_of_one_patch_have_predictions(name):
    model, x = model_of(name), torch.full((2, 3, D + 1), torch.nan)
    x[..., -1] = 0
    x[1, 1] = torch.tensor([1.0] * D + [1.0])
    logits = model(x)
    assert logits.isfinite().all()
    gradients = torch.autograd.grad(logits.sum(), list(model.parameters()))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("mode", ENGINES)
@pytest.mark.parametrize("name", BAG_BUILDERS)
@pytest.mark.parametrize("lengths", [LENGTHS, (9, 2, 17), (1, 1), (40, 3, 90)])
def test_per_example_gradients_of_unequal_bags_are_those_of_a_loop(mode, name, lengths, monkeypatch):
    """Covers inner products, explicit gradients, and TransMIL with landmarks."""
    if lengths == (9, 2, 17):
        monkeypatch.setattr(mil, "_N_LANDMARKS", 4)
    torch.manual_seed(0)
    model, x = model_of(name), as_tensor(make_unequal_bags(lengths=lengths))
    assert model_origin(model) == "built-in"
    with torch.no_grad():
        for p in model.parameters():  # gains of 1 and biases of 0 hide the rest
            p.add_(0.1 * torch.randn(p.shape))
    x[..., :-1][x[..., -1] == 0] = torch.nan
    compare_with_loop(ENGINES[mode], model, x, torch.arange(len(x)) % 3)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_bags_of_slides_and_patients_are_those_of_their_patches_in_memory_or_not(limit):
    bags = make_unequal_bags()
    slide, features = np.repeat(list("abcd"), LENGTHS), np.concatenate(bags)
    patches = Cohort.from_columns(features.__getitem__, np.arange(13) % 3, slide, np.repeat(["P", "Q"], [4, 9]))
    slides, patients = (
        patches.group("slide").load_inputs(limit),
        patches.group("slide").group("patient").load_inputs(limit),
    )
    for rows in ([2, 0], [1], []):
        chosen = np.array(rows, np.int64)
        np.testing.assert_array_equal(slides.read(chosen), pack_bags([bags[k] for k in rows], D))
    np.testing.assert_array_equal(patients.read(np.array([0])), pack_bags([np.concatenate(bags[:2])]))
    np.testing.assert_array_equal(patches.group("patient").read(np.arange(2)), patients.read(np.arange(2)))
    means = [np.concatenate(bags[:2]).mean(0), np.concatenate(bags[2:]).mean(0)]
    np.testing.assert_allclose(patches.group("patient", means=True).read(np.arange(2)), means, rtol=1e-5)
    assert (slides.label.tolist(), patients.slide.tolist()) == ([0, 2, 2, 2], ["P", "Q"])
    both = concatenate_examples([slides, slides[np.array([3])]])
    np.testing.assert_array_equal(both.read(np.array([4, 0])), pack_bags([bags[3], bags[0]]))


def test_a_class_that_the_tumour_type_excludes_has_probability_zero():
    model = create_model("deepset", n_classes=4, shape=Bags(D), seed=0).eval()
    bags = make_unequal_bags()
    kinds = np.array(["lung", "brain", "", "unheard of"])
    allowed = find_allowed_classes(kinds, CLASSES, TYPES)
    with torch.no_grad():
        free = predict_examples(model, Cohort.from_arrays(bags), CPU)
        for k, bag in enumerate(bags):
            p = predict_examples(model, replace(Cohort.from_arrays([bag]), allowed=allowed[k : k + 1]), CPU)[0]
            np.testing.assert_allclose(p, free[k] * allowed[k] / (free[k] * allowed[k]).sum(), rtol=1e-5)
    assert allowed[0].tolist() == [True, True, False, False]
    assert allowed[2].all() and allowed[3].all()


@pytest.mark.parametrize("method", [*nightly("joint"), "oneshot", "proxyfl"])
def test_methods_train_on_slides(bags, method):
    summary = trained(bags, method)
    n = 2 * 8 if METHODS[method].learns_from == "everybody" else 8
    spent = (
        Mechanism(1.4, 1.0, 1.0, 1) if METHODS[method].payload.is_single_release else plan_mechanism(n, 4, 2, 1.4, 0.7)
    )
    for row in summary["sites"]:
        assert row["n_train"] == n
        assert row["epsilon"] == pytest.approx(epsilon([spent], 1e-5), abs=1e-6)
    document = evaluate(bags, summary["run"])
    assert [row["n"] for row in document["sites"]] == [8, 8]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"encoder": "kimianet fff"}, ("S1 has kimianet fff as the encoder of its features",)),
        ({"d": 9}, ("S1 has 9 as the number of features per patch, S0 6",)),
        ({"classes": (*CLASSES, "MORE")}, ("S1 has", "MORE", "as the classes of its store")),
    ],
)
def test_sites_with_differing_stores_are_named_in_one_line(bags, changed, words):
    write_mosaic(bags, "S1", seed=1, **changed)
    refused(lambda: trained(bags, "proxyfl"), "sites disagree", *words)
    refused(lambda: dry_run(bags, method="joint"), "sites disagree", *words)
    assert not list(bags.runs_path.glob("0*"))


def test_a_dry_run_expects_no_accuracy_for_more_than_two_classes(bags):
    assert all(row["expected"] is None for row in dry_run(bags, method="proxyfl")["sites"])


def test_missing_and_impossible_mosaics_are_refused_with_advice(bags):
    table, content = write_mosaic(bags, "S1", seed=1)
    with BagStore(bags.mosaic_path("S1")) as store:
        meta = store.meta
    table.tumor_type[3] = "lung"  # it is LGG
    write_bags(bags.mosaic_path("S1"), meta, table, content)
    refused(lambda: trained(bags, "regular"), "S1_slide_3 is labelled LGG, which lung", error=WsiFlError)
    shutil.rmtree(bags.mosaic_path("S1").parent)
    refused(lambda: trained(bags, "regular"), "no store of site S1", "wsi-fl mosaic --site S1", error=WsiFlError)


def test_internal_external_and_tumour_type_scores_follow_from_the_predictions(done):
    study, name, document = done
    assert document["merged"]["accuracy"]["mean"] > 0.9  # classes are easily told apart
    for row in document["sites"]:
        lines = answers(study.root / name, row["site"])
        assert len(lines) == row["n"] == 8 and set(row["tumor_types"]) == set(TYPES)
        for line in lines:
            p = {c: float(line[f"p_{c}"]) for c in CLASSES}
            assert sum(p[c] for c in TYPES[line["tumor_type"]]) == pytest.approx(1, abs=1e-5)
            line["right"] = max(CLASSES, key=p.get) == line["truth"]
        for key in ("own", "external"):
            part = [line for line in lines if (line["part"] == row["site"]) == (key == "own")]
            for kind, of in row[key]["tumor_types"].items():
                right = [line["right"] for line in part if line["tumor_type"] == kind]
                assert (of["n"], of["accuracy"]) == (len(right), pytest.approx(np.mean(right)))
        assert metrics(study.root / name, row["site"])[-1]["merged"]["accuracy"] == pytest.approx(row["accuracy"])
    for which, key in (("internal", "own"), ("external", "external")):
        for metric in ("accuracy", "macro_accuracy", "auroc"):
            values = [row[key][metric] for row in document["sites"]]
            assert document[which][metric] == pytest.approx({"mean": np.mean(values), "sd": np.std(values)})


def test_slides_without_a_choice_of_diagnosis_are_trained_on_and_not_scored(tmp_path, monkeypatch):
    monkeypatch.setitem(TYPES, "brain", ("GBM",))
    monkeypatch.setitem(TYPES, "other", ("LGG",))
    study = make_bag_study(tmp_path / "study")
    name = trained(study, "fml", OPEN, "train.lr=1e-9", "train.rounds=1")["run"]
    document = evaluate(study, name)
    assert document["unscored"] == {"brain": 2, "other": 2}
    for row in document["sites"]:
        assert (row["n"], row["own"]["n"], set(row["tumor_types"])) == (4, 2, {"lung"})
        assert row["accuracy"] < 1  # of random weights
    for entry in audit_run(study, name)["sites"]:
        members = entry["models"][0]["membership"]["own"]["members"]
        assert members == 4, "of the eight slides that train, those without a choice have a loss of 0"
    clinical = describe_clinically(study, [name])["sites"][0]
    assert clinical["classes"]["LUAD"]["n"] == 4, "others cannot have it"
    assert "which have one diagnosis in this study" in " ".join(str(line) for line in render_evaluation_lines(document))
    monkeypatch.setitem(TYPES, "lung", ("LUAD",))
    monkeypatch.setitem(TYPES, "more", ("LUSC",))
    study = make_bag_study(tmp_path / "none")
    name = trained(study, "regular", OPEN, "train.rounds=1")["run"]
    refused(lambda: evaluate(study, name), "nothing to score. Not scored: 8 slides of", error=WsiFlError)


def test_the_table_of_figure_8_has_what_its_runs_measured(bags):
    spec = importlib.util.spec_from_file_location("tcga_study", Path(__file__).parents[2] / "studies" / "tcga.py")
    study = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {"tcga_study": study}):
        spec.loader.exec_module(study)
        rows, table = [], bags.root / "tcga.csv"
        for method in ("proxyfl", "fedavg"):
            models = ["model.private=deepset", "model.proxy=deepset_small", "train.rounds=1"]
            rows += study.train_run(bags, (method, 0.7, 0), models, "local")
            study.add_rows(table, rows[-2:])
    sizes = [sum(p.numel() for p in model_of(name).parameters()) * 4 for name in ("deepset_small", "deepset")]
    assert [row.bytes for row in rows[::2]] == pytest.approx(sizes, rel=0.05)
    document = json.loads((bags.root / rows[-1].run / "evaluation.json").read_text())
    assert [row.internal for row in rows[2:]] == [row["own"]["accuracy"] for row in document["sites"]]
    assert [row.external for row in rows[2:]] == [row["external"]["accuracy"] for row in document["sites"]]
    assert study.read_rows(table) == rows
    lines = [*study.render_table(rows)]
    assert len(lines) == 4 and lines[2].startswith("| ProxyFL | 0.7 |") and "| FedAvg | 0.7 |" in lines[3]


@pytest.mark.slow
def test_a_diagnosis_of_a_single_site_is_trained_and_evaluated(tmp_path):
    study = make_bag_study(tmp_path / "study", only=3)
    write_mosaic(study, "S1", seed=1)
    document = evaluate(study, trained(study, "fedavg", OPEN)["run"])
    assert all(0 <= row["own"]["macro_accuracy"] <= 1 for row in document["sites"])
    assert [row["own"]["tumor_types"]["brain"]["n"] for row in document["sites"]] == [2, 2]
    write_mosaic(study, "S0", seed=0, only=1)
    name = trained(study, "fedavg", OPEN)["run"]
    document = evaluate(study, name)
    assert document["sites"][0]["own"]["auroc"] is None
    assert document["internal"]["auroc"]["mean"] is None
    assert document["external"]["accuracy"]["mean"] is not None
    page = write_report(study, name).read_text()
    assert "At one site only: " in page
    assert re.search(r"LGG at <span[^>]*>S1</span>", page)


@pytest.mark.parametrize("private", ["deepset_attention", "deepset_max"])
def test_predict_takes_the_bag_from_the_store_and_draws_over_the_slide(tmp_path, private):
    study = make_bag_study(tmp_path / "study")
    run_name = trained(study, "regular", OPEN, f"model.private={private}", "train.rounds=6")["run"]
    evaluate(study, run_name)
    slide, white = tmp_path / "S0_slide_9.tif", np.full((512, 512, 3), 240, np.uint8)
    simulated_slides.write_pyramid(slide, white, 1.0)
    (row,) = predict(study, run_name, site="S0", slides=[slide])["slides"]
    (line,) = [one for one in answers(study.root / run_name, "S0") if one["slide"] == "S0_slide_9"]
    for c in CLASSES:
        assert row["probabilities"][c] == pytest.approx(float(line[f"p_{c}"]), abs=1e-5)
    assert row["class"] == max(CLASSES, key=row["probabilities"].get)
    assert row["tumor_type"] == "lung"
    assert Image.open(study.root / row["heatmap"]).format == "PNG"
    kept = json.loads((study.root / row["json"]).read_text())
    assert kept["probabilities"] == row["probabilities"] and kept["encoder"] == "densenet121 abc"
    patches = csv_rows(study.root / row["csv"])
    with BagStore(study.mosaic_path("S0")) as store:
        assert len(patches) == row["patches"] == len(store.read_bag(9).features)
    assert {patch["size_l0"] for patch in patches} == {"64"}
    if private == "deepset_attention":
        assert sum(float(patch["attention"]) for patch in patches) == pytest.approx(1, abs=1e-5)
    else:
        assert "attention" not in patches[0]


def test_predict_takes_slide_names_with_another_tumour_type_and_reports_unknown_ones(done, tmp_path, wsi_fl):
    study, name, _ = done
    arguments = ["predict", name, "--site", "S1", "--json", "--out", tmp_path]
    arguments += ["--slide", "S1_slide_0", "--tumor-type", "brain", "--slide", "X"]
    told = wsi_fl(*arguments, cwd=study.root)
    document = json.loads(told.stdout)
    (row,) = document["slides"]
    assert told.returncode == 0 and row["tumor_type"] == "brain" and row["class"] in TYPES["brain"]
    assert row["probabilities"]["LUAD"] == 0 and row["heatmap"] is None
    (failed,) = document["failed"]
    assert "X: no such slide, and none of that name among S1's mosaics" in failed["reason"]
    liver = {"site": "S1", "slides": [tmp_path / "x.tif"], "tumor_type": "liver"}
    refused(lambda: predict(study, name, **liver), "unknown tumour type 'liver'; known: ", "lung, brain")
    copy = Study(shutil.copytree(study.root, tmp_path / "copy"))
    write_mosaic(copy, "S1", encoder="kimianet fff")
    known = {"site": "S1", "slides": [Path("S1_slide_0")]}
    refused(lambda: predict(copy, name, **known), "are of kimianet fff now", "densenet121 abc")
    shutil.rmtree(copy.root / "stores")
    document = predict(copy, name, **known)
    assert "none of that name among S1's mosaics" in document["failed"][0]["reason"]


def test_patients_are_privacy_units_and_canaries_are_bags(bags):
    summary = trained(bags, "proxyfl", "privacy.unit=patient", "audit.canaries=10")
    for row, site in zip(summary["sites"], audit_run(bags, summary["run"])["sites"], strict=True):
        assert (row["n_train"], row["n_units"], row["unit"]) == (8, 18, "patient")
        planted = {model["model"]: model["canaries"]["n"] for model in site["models"]}
        assert planted == {"private": 10, "proxy": 10}
        assert site["models"][0]["membership"]["own"]["non_members"] == 4


HEADS = ("abmil", "clam_sb", "transmil")


@pytest.mark.parametrize("name", [*HEADS, "deepset_attention"])
def test_attention_sums_to_one_over_the_patches_and_padding_has_none(name):
    x = as_tensor([*make_unequal_bags(), np.zeros((1, D), np.float32)])
    x[4, :, -1] = 0  # a bag without a patch
    x[..., :-1][x[..., -1] == 0] = torch.nan
    weights = model_of(name).patch_attention(x)
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 1, 1, 1, 0]))
    assert (weights[x[..., -1] == 0] == 0).all() and (weights[x[..., -1] == 1] > 0).all()
    assert model_of("deepset").patch_attention(x) is None


def test_a_prediction_rests_on_the_attention_weighted_patches():
    """ABMIL's prediction is its last layer on the attention-weighted mean of the projected patches."""
    model, x = model_of("abmil"), as_tensor(make_unequal_bags())
    weighted = (model.patch_attention(x).unsqueeze(2) * model.phi(x[..., :-1])).sum(1)
    torch.testing.assert_close(model(x), model.rho(weighted))


def test_transmil_with_as_many_landmarks_as_patches_is_exact(monkeypatch):
    model, x = model_of("transmil"), as_tensor(make_unequal_bags(lengths=(9, 12)))
    exact = model(x)
    monkeypatch.setattr(mil, "_N_LANDMARKS", 12)
    torch.testing.assert_close(model(x), exact)
    monkeypatch.setattr(mil, "_N_LANDMARKS", 8)
    assert (model(x) - exact).abs().max() > 1e-6


def test_transmil_never_sees_padding_where_it_has_landmarks(monkeypatch):
    monkeypatch.setattr(mil, "_N_LANDMARKS", 4)
    model, bags = model_of("transmil"), make_unequal_bags(lengths=(9, 2, 17))
    x = functional.pad(as_tensor(bags), (0, 0, 0, 11), value=torch.nan)
    x[:, 17:, -1] = 0
    x[..., :-1][x[..., -1] == 0] = torch.nan
    whole = model(x)
    for k, bag in enumerate(bags):
        torch.testing.assert_close(model(as_tensor([bag]))[0], whole[k])


@pytest.mark.parametrize("name", HEADS)
def test_gradients_of_patients_are_means_over_their_slides(name):
    model, x, y = model_of(name), as_tensor(make_unequal_bags()), torch.arange(4) % 3
    parameters, patient = list(model.parameters()), torch.tensor([5, 2, 5, 5])
    means = []
    for one in (2, 5):
        rows = patient == one
        loss = functional.cross_entropy(model(x[rows]), y[rows])
        means.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    norms = []

    def weigh(norm):
        norms.append(float(norm))
        return torch.tensor([0.5])

    sums, _ = _sum_unit_gradients(model, x, patient, lambda logits: functional.cross_entropy(logits, y), weigh)
    assert norms == pytest.approx([float(mean.norm()) for mean in means], rel=1e-4)
    torch.testing.assert_close(torch.cat([g.flatten() for g in sums]), 0.5 * sum(means), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "unit"), [("abmil", "row"), ("transmil", "patient")])
def test_heads_train_as_private_models_and_proxies_under_privacy(tmp_path, name, unit):
    study = make_bag_study(tmp_path / "study")
    models = [f"model.private={name}", f"model.proxy={name}"]
    overrides = [*models, "train.max_patches=3", f"privacy.unit={unit}"]
    summary = trained(study, "proxyfl", *overrides)
    assert all(row["epsilon"] > 0 and row["guarantee"] == "guaranteed" for row in summary["sites"])


def make_numbered_bags(lengths=(3, 50, 20)):
    """Make bags whose k-th patch is numbered k."""
    return Cohort.from_arrays([np.stack([np.arange(m), np.full(m, m)], 1).astype(np.float32) for m in lengths])


def list_drawn_patches(examples, seed, rows=(0, 1, 2)):
    """Return the numbers of the patches in a training step, by bag."""
    draws = CipherStream.from_seed(seed)
    ((x, _),) = load_batches(examples, iter([np.array(rows)]), augment=None, device=CPU, draws=draws)
    return [bag[bag[:, -1] > 0][:, 0].int().tolist() for bag in x]


def test_a_training_step_samples_patches_afresh_and_predictions_use_all():
    examples = sample_patches(make_numbered_bags(), 10)
    first, second = list_drawn_patches(examples, 1), list_drawn_patches(examples, 2)
    assert [len(bag) for bag in first] == [3, 10, 10] and first[0] == [0, 1, 2]
    assert all(bag == sorted(set(bag)) for bag in first)
    assert first == list_drawn_patches(examples, 1) and first[1:] != second[1:]
    assert examples.read(np.arange(3)).shape == (3, 50, 3)


def test_every_patch_is_equally_likely_to_be_drawn():
    examples, counts = sample_patches(make_numbered_bags((40,)), 10), np.zeros(40)
    for seed in range(400):
        counts[list_drawn_patches(examples, seed, [0])[0]] += 1
    assert counts.sum() == 4000 and counts.min() > 60 and counts.max() < 145  # 100 each, ± 4.6 sd


def test_the_patches_drawn_from_a_bag_do_not_depend_on_other_bags():
    """ε requires that one record changes one gradient."""
    one, other = (
        sample_patches(make_numbered_bags((30, 50, 20)), 10),
        sample_patches(make_numbered_bags((30, 7, 20)), 10),
    )
    for seed in range(5):
        a, b = list_drawn_patches(one, seed), list_drawn_patches(other, seed)
        assert (a[0], a[2]) == (b[0], b[2])
