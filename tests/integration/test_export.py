"""Tests of exported models: files for WSInfer and onnxruntime, model cards and permissions."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REAL, make_study, nightly, refused, write_features
from PIL import Image
from training_runs import of_site, trained

from wsi_fl.data.cohort import downsample_pixels, pack_bags
from wsi_fl.data.tasks import NumberTask
from wsi_fl.evidence import benefit_figure
from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.evidence.compare import compare_methods
from wsi_fl.models import create_model
from wsi_fl.models.encoder import Encoder
from wsi_fl.models.export_formats import write_onnx, write_torchscript
from wsi_fl.models.monai_bundle import BUNDLE_FILES, BundleFacts, write_bundle
from wsi_fl.oneshot.shared_head import SharedHead, SolvedHead
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.stages.prepare.build_bags import make_features
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.types import Bags, Images, Vectors, WsiFlError

SIZE = 16
pytestmark = pytest.mark.filterwarnings("ignore:parsing config_file")


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory):
    """A study of patches, an evaluated, audited run of ProxyFL, and the document of its exported proxy."""
    study = make_study(tmp_path_factory.mktemp("export") / "study", n_sites=2)
    run = trained(study, "proxyfl", "audit.canaries=20", "train.rounds=2")["run"]
    evaluate(study, run)
    audit_run(study, run)
    return study, run, export_model(study, run, model_name="proxy", form="wsinfer")


def predict_probabilities(run, site, role, name, shape, x):
    """Return the probabilities of a model of the run."""
    model = create_model(name, n_classes=2, shape=shape, seed=0)
    model.load_state_dict(RunFolder(run).site_folder(site).load_model(role))
    with torch.no_grad():
        return torch.softmax(model.eval()(x), 1).numpy()


def prepare_patches(pixels):
    """Return patches as models receive them."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1


def read_card(study, document):
    folder = study.root / document["out"]
    return json.loads((folder / "model_card.json").read_text()), (folder / "MODEL_CARD.md").read_text()


def read_pixels(study, site="S0"):
    with PatchStore(study.store_path(site)) as store:
        return store.read(np.arange(8))


def predict_as_wsinfer(folder, pixels):
    """Predict as WSInfer does: the transforms of config.json on PIL images, `torch.jit.load`, softmax over the logits.

    Source: SBU-BMI/wsinfer 0.6.1, modellib/transforms.py, models.py and run_inference.py.
    """
    from torchvision import transforms

    config = json.loads((folder / "config.json").read_text())
    known = {name: getattr(transforms, name) for name in ("Resize", "ToTensor", "Normalize")}
    steps = [known[one["name"]](**(one.get("arguments") or {})) for one in config["transform"]]
    images = torch.stack([transforms.Compose(steps)(Image.fromarray(patch)) for patch in pixels])
    model = torch.jit.load(str(folder / "torchscript_model.pt"), map_location="cpu").eval()
    with torch.no_grad():
        return torch.nn.functional.softmax(model(images), dim=1).numpy()


REQUIRED = {
    **{"spec_version": str, "architecture": str, "num_classes": int, "patch_size_pixels": int},
    **{"spacing_um_px": float, "class_names": list, "transform": list},
}
"""Keys of a model's configuration (SBU-BMI/wsinfer-zoo 0.6.3, schemas/model-config.schema.json)."""


def check_config(config):
    """Check config.json against the schema of the zoo and `ModelConfiguration`."""
    assert {key: type(config[key]) for key in REQUIRED} == REQUIRED and config["spec_version"] == "1.0"
    assert len(set(config["class_names"])) == config["num_classes"] == len(config["class_names"])
    for step in config["transform"]:
        assert set(step) <= {"name", "arguments"} and step["name"] in {"Resize", "ToTensor", "Normalize"}


def load_onnx(folder):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))

    def run(x):
        (only,) = session.get_inputs()
        logits = session.run(["logits"], {only.name: np.asarray(x, np.float32)})[0]
        return torch.softmax(torch.from_numpy(logits), 1).numpy()

    return run


def test_an_exported_proxy_predicts_the_same_in_wsinfer(evaluated_run):
    study, run, document = evaluated_run
    folder, pixels = study.root / document["out"], read_pixels(study)
    config = json.loads((folder / "config.json").read_text())
    check_config(config)
    assert (config["patch_size_pixels"], config["spacing_um_px"]) == (SIZE, 1.0)
    ours = predict_probabilities(study.root / run, "S0", "proxy", "mlp", Images(3, SIZE), prepare_patches(pixels))
    assert np.abs(predict_as_wsinfer(folder, pixels) - ours).max() < 1e-5
    assert ours.std(0).max() > 1e-3  # answers differ, so that agreeing says something


def predict_as_monai(monai_bundle, folder, pixels, scratch):
    """Predict PNG files by MONAI's `run` of the bundle, after its check of the network against the metadata."""
    patches, results = scratch / "patches", scratch / "eval"
    patches.mkdir()
    for k, patch in enumerate(pixels):
        Image.fromarray(patch).save(patches / f"{k:03}.png")
    config = {key: str(folder / "configs" / f"{key}.json") for key in ("inference", "metadata")}
    files = {"config_file": config["inference"], "meta_file": config["metadata"], "bundle_root": str(folder)}
    monai_bundle.verify_net_in_out("network_def", device="cpu", **files)
    monai_bundle.run(**files, dataset_dir=str(patches), output_dir=str(results), device="cpu")
    lines = [line.split(",") for line in (results / "predictions.csv").read_text().splitlines()]
    assert [Path(line[0]).name for line in lines] == [f"{k:03}.png" for k in range(len(pixels))]
    return np.array([line[1:] for line in lines], float)


SCHEMA = [
    *("schema", "version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version", "task"),
    *("description", "authors", "copyright", "network_data_format"),
]
"""Keys that a bundle's metadata need (MONAI's meta_schema_20240725.json)."""
TENSOR = {"type", "format", "num_channels", "spatial_shape", "dtype", "value_range", "is_patch_data", "channel_def"}


def test_monais_own_commands_run_a_bundle_and_predict_the_same(evaluated_run, monai_bundle, tmp_path):
    study, run, _ = evaluated_run
    folder, pixels = tmp_path / "bundle", read_pixels(study)
    document = export_model(study, run, model_name="proxy", form="monai-bundle", out=folder)
    ours = predict_probabilities(study.root / run, "S0", "proxy", "mlp", Images(3, SIZE), prepare_patches(pixels))
    assert np.abs(predict_as_monai(monai_bundle, folder, pixels, tmp_path) - ours).max() < 1e-5
    metadata = json.loads((folder / "configs" / "metadata.json").read_text())
    assert {*SCHEMA} <= {*metadata} and all(metadata[key] for key in SCHEMA)
    formats = metadata["network_data_format"]
    assert {*formats["inputs"]["image"]} - {"modality"} == {*formats["outputs"]["pred"]} == TENSOR
    assert formats["outputs"]["pred"]["channel_def"] == {"0": "healthy", "1": "tumor"}
    from monai.data import load_net_with_metadata

    embedded = load_net_with_metadata(str(folder / "models" / "model.ts"), more_extra_files=("inference.json",))[1:]
    config = json.loads((folder / "configs" / "inference.json").read_text())
    assert embedded[0] == metadata and json.loads(embedded[1]["inference.json"]) == config
    card, text = read_card(study, document)
    assert {*card["files"]} == {*BUNDLE_FILES} and "probabilities of healthy, tumor" in text


def test_a_bundle_of_grey_pictures_gives_a_number_in_its_range_or_is_not_there(monai_bundle, tmp_path):
    model, task = create_model("lenet5", n_classes=1, shape=Images(1, 20), seed=0).eval(), NumberTask(20, 90)
    facts = BundleFacts("age", "Age.", "A network.", "nobody", "values", (20, 90), ("$1/0",), 0.0)
    assert write_bundle(tmp_path / "bundle", model, task.predict, Images(1, 20), facts) < 1e-5
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20), np.uint8)
    with torch.no_grad():
        ours = task.predict(model(prepare_patches(pixels[..., None]))).numpy()
    assert np.abs(predict_as_monai(monai_bundle, tmp_path / "bundle", pixels, tmp_path) - ours).max() < 1e-3
    config_file = str(tmp_path / "bundle" / "configs" / "inference.json")
    workflow = monai_bundle.ConfigWorkflow(config_file, workflow_type="infer")
    workflow.initialize()
    assert workflow.channel_def == {"0": "'$1/0'"} and workflow.spatial_shape == [20, 20]  # no text of ours is run
    with pytest.raises(WsiFlError, match="other numbers"):
        write_bundle(tmp_path / "bundle", Noisy(1.0, of_file=True), task.predict, Images(1, 20), facts)
    assert not (tmp_path / "bundle" / "configs" / "inference.json").exists()
    refused(lambda: write_bundle(tmp_path, model, task.predict, Images(4, 20), facts), "1 or 3 channels, not 4")


def test_the_card_has_the_verdict_of_comparisons(evaluated_run, tmp_path):
    study, run, _ = evaluated_run
    copy = type(study)(tmp_path / "study")
    shutil.copytree(study.root, copy.root)
    card, text = read_card(copy, export_model(copy, run, model_name="proxy", form="wsinfer"))
    assert card["benefit"] is None and "Benefit of federation" not in text
    document = compare_methods(copy, [run])
    card, text = read_card(copy, export_model(copy, run, model_name="proxy", form="wsinfer"))
    assert card["benefit"]["verdict"] == document["benefit"]["all"]["verdict"]
    assert benefit_figure.verdict_words(document["benefit"]["all"], benefit_figure.ALL_SITES) in text


def test_the_card_has_the_results_of_the_run(evaluated_run):
    study, run, document = evaluated_run
    folder = study.root / run
    card, text = read_card(study, document)
    proxies = json.loads((folder / "evaluation.json").read_text())["sites"][0]["models"]["proxy"]
    assert card["metrics"]["parts"][0]["accuracy"] == proxies["accuracy"]
    assert card["metrics"]["parts"][1]["accuracy"] == proxies["own"]["accuracy"]
    audited = json.loads((folder / "audit" / "audit.json").read_text())["sites"]
    for site, found in zip(card["privacy"]["sites"], audited, strict=True):
        assert site["epsilon"] == of_site(folder, site["site"], "ledger")["epsilon"] > 0
        assert site["guarantee"] == "guaranteed" and len(site["ledger"]) == 64
        sent = next(one for one in found["models"] if one["model"] == "proxy")
        assert site["epsilon_lower"] == sent["canaries"]["epsilon_lower"]
    assert card["privacy"]["covered"] and card["license"] is None and card["inputs"]["mpp"] == 1.0
    assert "Licence" in text and "differential privacy" in text.splitlines()[2]
    assert "memorised" not in text
    most = max(site["max_tpr_at_fpr_1pct"] for site in card["privacy"]["sites"])
    assert 0.01 < most < 1 and f"all other data identifies at most {100 * most:.1f}" in text


def test_models_that_may_not_leave_the_site_are_not_exported(evaluated_run, tmp_path):
    study, run, _ = evaluated_run
    for how, *words in (
        ({"model_name": "private", "private": True}, "--site"),
        ({"model_name": "private", "site": "S0"}, "--private", "memorised"),
        ({"model_name": "shared"}, "private and proxy"),
        ({"model_name": "proxy", "form": "x"}, "wsinfer, monai-bundle, onnx"),
        ({"model_name": "proxy", "site": "S9"}, "S9", "S0, S1"),
    ):
        refused(lambda how=how: export_model(study, run, **{"form": "onnx", **how}), *words)
    real = make_study(tmp_path / "real", n_sites=2, site_extra=f'{REAL}\nallow = ["patches"]')
    run = trained(real, "proxyfl", "train.rounds=1")["run"]
    evaluate(real, run)

    def private(run, site="S0"):
        return export_model(real, run, model_name="private", form="wsinfer", site=site, private=True)

    refused(lambda: private(run), "sites/S0.toml", 'allow = ["private_model"]')
    card, text = read_card(real, export_model(real, run, model_name="proxy", form="wsinfer"))
    assert card["metrics"] is None and 'allow = ["scores"]' in text
    site = real.root / "sites" / "S0.toml"
    site.write_text(site.read_text().replace('"patches"', '"patches", "private_model"'))
    refused(lambda: private(run), "private_model")  # a run keeps the promises that it began with
    again = trained(real, "proxyfl", "train.rounds=1")["run"]
    assert "memorised" in private(again)["warning"]
    refused(lambda: private(again, "S1"), "S1")


def test_the_card_of_a_shared_model_without_privacy_names_the_lack(pair):
    quick = ["privacy.enabled=false", "train.rounds=1"]
    run = trained(pair, "fedavg", *quick)["run"]
    document = export_model(pair, run, model_name="shared", form="wsinfer")
    card, text = read_card(pair, document)
    assert "memorised" in document["warning"] and not card["privacy"]["covered"]
    assert "None are exported with this model: the run was not evaluated." in text
    refused(lambda: export_model(pair, run, model_name="private", form="wsinfer"), "has shared")


def test_patches_are_reduced_as_in_training_and_an_onnx_file_describes_its_input(tmp_path, monai_bundle):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    study = make_study(tmp_path / "study", n_sites=2, size_px=32)
    sets = ["train.input_px=16", "privacy.enabled=false", "train.rounds=1"]
    run = trained(study, "regular", *sets)["run"]
    document = export_model(study, run, model_name="private", form="wsinfer", site="S1", private=True)
    pixels = read_pixels(study)
    ours = predict_probabilities(
        study.root / run, "S1", "private", "cnn1", Images(3, 16), prepare_patches(downsample_pixels(pixels, 16))
    )
    assert np.abs(predict_as_wsinfer(study.root / document["out"], pixels) - ours).max() < 1e-5
    bundle = export_model(study, run, model_name="private", form="monai-bundle", site="S1", private=True)
    assert np.abs(predict_as_monai(monai_bundle, study.root / bundle["out"], pixels, tmp_path) - ours).max() < 1e-5
    document = export_model(study, run, model_name="private", form="onnx", site="S1", private=True)
    whole = prepare_patches(pixels)  # as WSInfer's transform makes it: one contract for both files
    for n in (1, 8):
        assert np.abs(load_onnx(study.root / document["out"])(whole[:n]) - ours[:n]).max() < 1e-5
    takes = "`images` float32[batch, 3, 32, 32], pixels / 127.5 − 1; reduced inside to 16 px by area, as in training"
    card, text = read_card(study, document)
    assert card["model"]["input"] == takes and takes in text
    session = onnxruntime.InferenceSession(str(study.root / document["out"] / "model.onnx"))
    assert session.get_modelmeta().custom_metadata_map["input"] == takes
    assert session.get_inputs()[0].shape == ["batch", 3, 32, 32]


@pytest.mark.slow
def test_a_head_is_exported_with_its_encoder_for_wsinfer_and_without_it_for_onnx(tmp_path, tiny_weights, monai_bundle):
    weights = Path(shutil.copy(tiny_weights, tmp_path / "weights.safetensors"))
    study = make_study(tmp_path / "study", n_sites=1, size_px=32)
    sets = ["features.encoder=test_efficientnet", f"features.weights={weights}", "features.input_px=48"]
    make_features(study, site="S0", overrides=sets)
    heads = ["train.data=features", "model.private=linear_head", "model.proxy=linear_head", "train.rounds=1"]
    run = trained(study, "proxyfl", *sets, *heads)["run"]
    pixels = read_pixels(study)
    seen = Encoder("test_efficientnet", weights, input_px=48)(pixels)
    x = torch.from_numpy(seen)
    ours = predict_probabilities(study.root / run, "S0", "proxy", "linear_head", Vectors(x.shape[1]), x)
    document = export_model(study, run, model_name="proxy", form="wsinfer")
    assert np.abs(predict_as_wsinfer(study.root / document["out"], pixels) - ours).max() < 1e-5
    bundle = export_model(study, run, model_name="proxy", form="monai-bundle")
    assert np.abs(predict_as_monai(monai_bundle, study.root / bundle["out"], pixels, tmp_path) - ours).max() < 1e-5
    card = read_card(study, document)[0]
    assert card["model"]["architecture"] == "test_efficientnet+linear_head"
    assert "sha256:" in card["inputs"]["encoder"]
    document = export_model(study, run, model_name="proxy", form="onnx")
    assert np.abs(load_onnx(study.root / document["out"])(seen) - ours).max() < 1e-5
    weights.unlink()
    refused(lambda: export_model(study, run, model_name="proxy", form="wsinfer"), "use --format onnx")


@pytest.mark.end_to_end
def test_a_shared_head_is_exported_without_local_statistics(pair):
    """The exported head follows from the released statistics; the exact local statistics do not enter it."""
    rng = np.random.default_rng(0)
    for site in ("S0", "S1"):
        y = rng.integers(0, 2, 60)
        x = rng.normal(size=(60, 12)) + y[:, None]
        patients = [f"p{k}" for k in range(60)]
        write_features(pair, site, x, y, patients, ["train"] * 50 + ["test"] * 10)
    run = trained(pair, "oneshot", "train.data=features", "model.projection=4")["run"]
    evaluate(pair, run)
    compare_methods(pair, [run])
    document = export_model(pair, run, model_name="shared", form="onnx")
    card, text = read_card(pair, document)
    assert "one-shot global head as released" in text and "None are exported" not in text
    assert "In the run federation (ensembles with local models) reached" in text
    head = SharedHead(2, 12, projection=4)
    head.load_state_dict(RunFolder(pair.root / run).site_folder("S0").load_model("shared"))
    x = torch.randn(20, 12)
    say = load_onnx(pair.root / document["out"])
    public = head.solve_released_head()
    buffers = {name for name, _ in public.named_buffers()}
    assert isinstance(public, SolvedHead) and buffers == {"mean", "components", "weights", "bias"}
    with torch.no_grad():
        assert np.abs(say(x) - torch.softmax(public(x), 1).numpy()).max() < 1e-5
        for part, site in zip(card["metrics"]["parts"], ("S0", "S1"), strict=True):  # of this head, not of the mixture
            with BagStore(pair.features_path(site)) as store:
                seen, rows = torch.from_numpy(store.read_bag(0).features), store.patch_table.split == "test"
                right = public(seen)[rows].argmax(1).numpy() == store.patch_table.label[rows]
            assert (part["on"], part["n"]) == (f"the test part of {site}", 10)
            assert part["accuracy"] == pytest.approx(right.mean())
        head.local_sums.copy_(head.local_sums * 5 + 1)
        assert torch.equal(head.solve_released_head()(x), public(x)) and not torch.allclose(head(x), public(x))


@pytest.mark.slow
def test_models_that_onnx_cannot_express_are_refused_in_one_line(tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    model = create_model("transmil", n_classes=3, shape=Bags(6), seed=0).eval()
    refused(lambda: write_onnx(tmp_path / "model.onnx", model, Bags(6)), "works bag by bag")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*nightly("abmil"), "deepset_attention"])
def test_bag_models_are_exported_to_onnx_for_any_number_of_patches(name, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    model = create_model(name, n_classes=3, shape=Bags(6), seed=0).eval()
    assert write_onnx(tmp_path / "model.onnx", model, Bags(6)) < 1e-5
    rng = np.random.default_rng(0)
    x = pack_bags([rng.normal(size=(m, 6)).astype(np.float32) for m in (1, 9, 30)])
    with torch.no_grad():
        ours = torch.softmax(model(torch.from_numpy(x)), 1).numpy()
    assert np.abs(load_onnx(tmp_path)(x) - ours).max() < 1e-5


class Noisy(torch.nn.Module):
    """A model whose logits differ between a batch and single examples, or between the model and its file."""

    def __init__(self, by, *, of_file=False, scale=1.0):
        super().__init__()
        self.by, self.of_file, self.scale = by, of_file, scale

    def forward(self, x):
        noise = torch.jit.is_tracing() if self.of_file else len(x) > 1
        return x.mean((2, 3))[:, :2] * self.scale + (self.by if noise else 0)


@pytest.mark.parametrize(
    ("model", "written"),
    [
        (Noisy(4e-5), True),  # no further from its file than from itself
        (Noisy(4e-5, of_file=True), False),
        (Noisy(5e-3), False),  # what ties rows together is no noise
        (Noisy(1e-3, of_file=True, scale=1e4), True),  # of logits of thousands, the seventh digit
        (Noisy(1.0, of_file=True, scale=1e4), False),
        (Noisy(float("nan")), False),
    ],
)
def test_an_export_is_compared_as_finely_as_the_model_reproduces_itself(tmp_path, model, written):
    if written:
        assert write_torchscript(tmp_path / "model.pt", model, Images(3, 8)) < 1e-4
    else:
        with pytest.raises(WsiFlError, match="other numbers"):
            write_torchscript(tmp_path / "model.pt", model, Images(3, 8))
    assert (tmp_path / "model.pt").exists() == written


def test_the_export_command_prints_one_document(evaluated_run, wsi_fl):
    study, run, _ = evaluated_run
    told = wsi_fl("export", "--run", run, "--model", "proxy", "--format", "wsinfer", "--json", cwd=study.root)
    assert told.returncode in (0, None) and json.loads(told.stdout)["model"] == "proxy"
    for words in ((), ("--run", run), ("--site", "S0", "--private")):
        told = wsi_fl("export", *words, cwd=study.root)
        assert told.returncode == 2 and told.stderr.count("wsi-fl: error") == 1
