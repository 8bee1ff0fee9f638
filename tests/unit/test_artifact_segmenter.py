"""A custom artifact segmenter replaces the classical measures for the artifacts among its classes."""

import json

import h5py
import numpy as np
import pytest
import torch
from conftest import refused
from safetensors.torch import save_file

from wsi_fl.demo import simulated_slides
from wsi_fl.models.segmenter import load_segmenter
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stores.fields import read_marked
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

ARCHITECTURE = "lraspp_mobilenet_v3_large"
FACTS = {"architecture": ARCHITECTURE, "classes": ["tissue", "fold", "pen"], "mpp": 2.0}
SETTINGS = ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmenter")
    archive = simulated_slides.simulate_archive(folder / "archive", n_sites=1, patients_per_site=1, size_px=768)
    init_study(folder / "study", archive=archive)
    return Study(folder / "study")


@pytest.fixture(scope="module")
def model(study):
    """Return a network with random weights whose classes are about equally frequent on the slides."""
    from torchvision.models import get_model

    torch.manual_seed(0)
    net = get_model(ARCHITECTURE, weights=None, weights_backbone=None, num_classes=3).eval()
    with torch.inference_mode():
        logits = net(normalize_patches(pixels(study)))["out"]
        net.classifier.high_classifier.bias -= logits.mean((0, 2, 3))
    return net


def pixels(study, corners=((256, 256), (384, 512), (512, 384))):
    with Slide(sorted(study.root.parent.rglob("*.tif"))[0]) as slide:
        return np.stack([slide.read(xy, 32, 2.0) for xy in corners])


def normalize_patches(patches):
    mean, std = (torch.tensor(of)[:, None, None] for of in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return (torch.from_numpy(patches).permute(0, 3, 1, 2) / 255 - mean) / std


def save_segmenter(folder, model, said=FACTS):
    path = folder / "faults.safetensors"
    save_file(model.state_dict(), path, None if said is None else {"segmenter": json.dumps(said)})
    return path


def test_artifact_shares_are_those_of_the_plain_network(study, model, tmp_path):
    segmenter = load_segmenter(save_segmenter(tmp_path, model))
    patches = pixels(study)
    with torch.inference_mode():
        wanted = model(normalize_patches(patches))["out"].argmax(1).numpy()
    found = segmenter.shares(patches)
    assert found == pytest.approx(np.stack([(wanted == k).mean((1, 2)) for k in range(3)], 1), abs=0.01)
    assert (found > 0.02).sum() > 3, "a network of one answer would prove nothing"


def test_tile_excludes_segmented_artifacts_and_measures_the_rest(study, model, tmp_path):
    path = save_segmenter(tmp_path, model)
    qc = [*SETTINGS, "tile.qc={fold=0.3,blur=0.4}", f"tile.segmenter={str(path)!r}"]
    tile_slides(study, site="C1", overrides=qc)
    segmenter = load_segmenter(path)
    with Slide(sorted(study.root.parent.rglob("*.tif"))[0]) as slide:
        name = slide.path.stem
        with h5py.File(study.root / f"stores/C1/slides/{name}.h5") as file:
            aside = {(x, y): why for x, y, why in read_marked(file, "aside")}
            kept = [(int(x), int(y)) for x, y in file["xy_l0"][:]]
        fold = {xy: float(segmenter.shares(slide.read(xy, 32, 2.0)[None])[0, 1]) for xy in (*aside, *kept)}
    assert set(aside.values()) <= {"fold", "blur"} and "fold" in aside.values()
    assert all(fold[xy] > 0.3 for xy, why in aside.items() if why == "fold")
    assert kept and all(fold[xy] <= 0.3 for xy in kept)
    with torch.no_grad():  # another network: kept plans of the first are not believed
        model.classifier.high_classifier.bias[1] -= 1000
    save_segmenter(tmp_path, model)
    tile_slides(study, site="C1", overrides=qc)
    with h5py.File(study.root / f"stores/C1/slides/{name}.h5") as file:
        assert "fold" not in {why for _, _, why in read_marked(file, "aside")}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, ("has no entry `segmenter`", "docs/how-to/prepare-data.md")),
        ({**FACTS, "architecture": "unet"}, ("'unet'", ARCHITECTURE)),
        ({**FACTS, "classes": ["tissue", "pen"]}, ("not those of", "2 classes")),
        ({**FACTS, "std": [0.5, 0.0, 0.5]}, ("std",)),
    ],
)
def test_a_segmenter_file_without_metadata_is_refused(model, tmp_path, said, words):
    path = save_segmenter(tmp_path, model, said)
    refused(lambda: load_segmenter(path), "faults.safetensors", *words, error=WsiFlError)
