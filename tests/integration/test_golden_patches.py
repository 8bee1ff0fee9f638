"""Golden patches: the vectors of an encoder tell preprocessings under one name apart, and two tools' alike."""

import hashlib
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import timm
import torch
from conftest import refused
from PIL import Image
from test_import import brought, labels, store_of
from test_import import study as study  # noqa: PLC0414 the fixture
from torchvision import transforms

from wsi_fl.federation.preflight import compare_sites
from wsi_fl.models.encoder import Network
from wsi_fl.models.golden import cut_patches, paint_picture, project_features, select_golden, write_picture
from wsi_fl.models.presets import Transform
from wsi_fl.models.weights import random_weights
from wsi_fl.stages.prepare.check_stores import check_sites
from wsi_fl.types import MAX_GOLDEN_DISTANCE, GridSpec, NoCommonPlan, golden_distance

SPEC = GridSpec(256, 0.5, 256)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OWN = ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))
NAMED = Transform(*IMAGENET, 64, "bicubic")
"""What the name of the encoder promises; small, for speed."""


@pytest.fixture(scope="module")
def model():
    """Return a network whose filters tell textures apart, as trained ones do."""
    network = timm.create_model("test_efficientnet", num_classes=0).eval()
    weights = random_weights("test_efficientnet", cut_patches(GridSpec(64, 0.5, 64)))
    network.load_state_dict({name: value for name, value in weights.items() if "classifier" not in name})
    return network


def vectors(model, transform=NAMED, spec=SPEC, dtype=torch.float32, change=lambda features: features):
    network = Network(model, transform).eval()

    def encode(patches):
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return change(network(torch.from_numpy(patches)).float().numpy())

    return project_features(encode(cut_patches(spec)))


def by_torchvision(model):
    """Encode as other tools do: Pillow resizes bytes."""
    steps = [transforms.Resize(64, transforms.InterpolationMode.BICUBIC), transforms.ToTensor()]
    made = transforms.Compose([*steps, transforms.Normalize(*IMAGENET)])
    with torch.inference_mode():
        features = model(torch.stack([made(Image.fromarray(patch)) for patch in cut_patches(SPEC)])).numpy()
    return project_features(features.astype(np.float16).astype(np.float32))


def preflight(*golden, specs=(SPEC, SPEC), names=("uni", "uni")):
    documents = [
        {"site": site, "encoder": name, "n_features": 256, "size_px": spec.size_px, "mpp": spec.mpp, "golden": numbers}
        for site, numbers, spec, name in zip("AB", golden, specs, names, strict=True)
    ]
    compare_sites([{**document, "settings": {"train.any_patch_size": True}} for document in documents])


PAIRS = {  # same name, other preprocessing
    "crop of 73 instead of 64 px": {"transform": replace(NAMED, resize_px=73)},
    "crop of 71 instead of 64 px": {"transform": replace(NAMED, resize_px=71)},
    "no resizing (256 px)": {"transform": replace(NAMED, px=None)},
    "bilinear for bicubic": {"transform": replace(NAMED, interpolation="bilinear")},
    "mean 0.5": {"transform": replace(NAMED, mean=(0.5,) * 3)},
    "mean and sd 0.5": {"transform": replace(NAMED, mean=(0.5,) * 3, sd=(0.5,) * 3)},
    "own normalisation for ImageNet's": {"transform": Transform(*OWN, 64, "bicubic")},
    "no normalisation": {"transform": Transform((0.0,) * 3, (1.0,) * 3, 64, "bicubic")},
    "vectors of length 1": {"change": lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)},
}
ACCEPTED = {"bfloat16": {"dtype": torch.bfloat16}, "float16 in files": {"change": lambda x: x.astype(np.float16)}}
OTHER_PATCHES = {"224 px": GridSpec(224, 0.5, 224), "0.25 µm/px": GridSpec(256, 0.25, 256)}


def test_the_picture_is_the_same_on_every_machine(tmp_path):
    assert hashlib.sha256(paint_picture().tobytes()).hexdigest().startswith("98fedfaa8900503d")
    refused(lambda: write_picture(tmp_path / "a.png"), "wsi-fl-golden.png")
    write_picture(tmp_path / "wsi-fl-golden.png")
    assert Image.open(tmp_path / "wsi-fl-golden.png").size == (2048, 1024)


@pytest.mark.parametrize("pair", PAIRS)
def test_another_preprocessing_under_one_name_is_refused(model, pair):
    words = r"B has features \d+% apart as those of the golden patches \(other weights or preprocessing\)"
    with pytest.raises(NoCommonPlan, match=words):
        preflight(vectors(model), vectors(model, **PAIRS[pair]))


@pytest.mark.parametrize("precision", ACCEPTED)
def test_half_precision_is_accepted(model, precision):
    distance = golden_distance(vectors(model), vectors(model, **ACCEPTED[precision]))
    assert 0 < distance < MAX_GOLDEN_DISTANCE / 1.5
    preflight(vectors(model), vectors(model, **ACCEPTED[precision]))


def test_the_same_vectors_by_two_tools_are_accepted_whatever_they_call_the_encoder(model):
    preflight(vectors(model), by_torchvision(model), names=("uni", "an encoder of somebody's"))
    with pytest.raises(NoCommonPlan, match="B has virchow as the encoder of its features, A uni"):
        preflight(vectors(model), (), names=("uni", "virchow"))


@pytest.mark.parametrize("patches", OTHER_PATCHES)
def test_vectors_of_patches_of_another_size_are_compared_by_name(model, patches):
    other, specs = vectors(model, spec=OTHER_PATCHES[patches]), (SPEC, OTHER_PATCHES[patches])
    preflight(vectors(model), other, specs=specs)
    with pytest.raises(NoCommonPlan, match="B has virchow"):
        preflight(vectors(model), other, specs=specs, names=("uni", "virchow"))


def test_the_site_that_differs_from_most_is_named():
    rng, one, two = np.random.default_rng(0), *np.random.default_rng(1).normal(size=(2, 256))
    documents = [
        {"site": site, "encoder": "uni", "n_features": 5, "size_px": 256, "mpp": 0.5, "golden": numbers.tolist()}
        for site, numbers in (("A", two), ("B", one), ("C", one + rng.normal(size=256) / 100), ("D", one[:0]))
    ]
    with pytest.raises(NoCommonPlan, match=r"^sites disagree: A has features 1.* the others the same$"):
        compare_sites(documents)


def document_of(site, numbers, name="uni"):
    return {"site": site, "encoder": name, "n_features": 5, "size_px": 256, "mpp": 0.5, "golden": list(numbers)}


def result_of(documents):
    try:
        compare_sites(documents)
    except NoCommonPlan as error:
        return {site for site in "ABC" if f"{site} has features" in str(error)}
    return set()


def test_a_site_with_too_few_common_patches_joins_no_others_vectors_in_any_order():
    one, two = np.random.default_rng(1).normal(size=(2, 256))
    few = [*one[:8], *[None] * 248]
    trio = [document_of("A", few), document_of("B", one), document_of("C", two)]
    for order in permutations(trio):
        assert result_of(order) == {"C"}, [document["site"] for document in order]


@pytest.mark.parametrize("n_common", [0, 1, 7, 8])
def test_vectors_stand_for_the_encoders_name_where_eight_patches_are_common(n_common):
    whole = np.random.default_rng(1).normal(size=256)
    part = np.where(np.arange(256) < 8 * n_common, whole, None).tolist()
    pair = [document_of("A", whole), document_of("B", part, "virchow")]
    if n_common == 8:
        compare_sites(pair)
    else:
        with pytest.raises(NoCommonPlan, match="B has virchow as the encoder"):
            compare_sites(pair)


def test_vectors_that_are_alike_for_all_patches_do_not_stand_for_the_encoders_name():
    same = np.tile(np.linspace(0.1, 0.9, 8), 32)
    with pytest.raises(NoCommonPlan, match="B has virchow as the encoder"):
        compare_sites([document_of("A", same), document_of("B", same, "virchow")])
    compare_sites([document_of("A", same), document_of("B", same)])


def test_patches_of_the_picture_are_found_by_their_corners(model):
    whole = np.arange(32 * 4, dtype=np.float32).reshape(32, 4)
    corners = np.array([(x, y) for y in range(0, 1024, 256) for x in range(0, 2048, 256)])
    order = np.random.default_rng(0).permutation(32)[:20]
    found = select_golden(
        np.r_[whole[order], whole[:1]], np.r_[corners[order], [[128, 0]]].astype(np.int64), replace(SPEC, stride_px=128)
    )
    assert golden_distance(found, project_features(whole)) == 0 and found.count(None) == 12 * 8
    assert select_golden(whole[:1], np.array([[128, 0]]), SPEC) == ()
    assert np.isnan(golden_distance(found[:8], project_features(whole)))
    assert len(cut_patches(GridSpec(3000, 0.5, 3000))) == 0


def trident(folder, vectors_of_golden, names="abcd", size=256):
    place = folder / "features_uni_v1"
    place.mkdir(parents=True)
    corners = np.array([(x, y) for y in range(0, 1024 - size + 1, size) for x in range(0, 2048 - size + 1, size)])
    rng = np.random.default_rng(0)
    for name, x, xy in [
        *((name, rng.normal(size=(4, 1024)).astype(np.float32), np.arange(8).reshape(4, 2)) for name in names),
        ("wsi-fl-golden", vectors_of_golden, corners[: len(vectors_of_golden)]),
    ]:
        with h5py.File(place / f"{name}.h5", "w") as file:
            file["features"], file["coords"] = x, xy
            file["features"].attrs["encoder"] = "uni_v1"
            said = {"patch_size": size, "patch_size_level0": size, "level0_magnification": 20, "overlap": 0}
            file["coords"].attrs.update(said | {"target_magnification": 20})
    return place


@pytest.fixture
def uni(monkeypatch, tmp_path):
    """Let this machine have weights of UNI, and an encoder of its width in its place."""
    numbers = np.random.default_rng(7).normal(size=(3, 1024)).astype(np.float32)

    def encode(patches):
        return patches.reshape(len(patches), -1, 3).astype(np.float32).mean(1) @ numbers

    module = "wsi_fl.stages.site.encoders"
    monkeypatch.setattr(f"{module}.find_cached_weights", lambda *_: tmp_path / "w")
    monkeypatch.setattr(f"{module}.Encoder", lambda *_, **__: SimpleNamespace(parts=("mean 0.5",), encode=encode))
    monkeypatch.setattr(f"{module}.encode_golden", lambda one, spec: project_features(one.encode(cut_patches(spec))))
    return encode(cut_patches(SPEC))


def test_the_picture_among_the_slides_gives_the_store_its_vectors_and_is_no_slide(study, tmp_path, uni, capsys):
    folder = trident(tmp_path / "job", uni)
    row = brought(study, "trident", folder, labels(tmp_path / "t.csv"))
    assert row["bags"] == row["slides"] == 4 and not row["failed"]
    assert "have the features of this encoder here" in capsys.readouterr().err
    with store_of(study) as store:
        assert store.meta.golden == project_features(uni)


def test_vectors_of_an_encoder_that_is_no_preset_stay_out_of_the_store(study, tmp_path, uni, capsys):
    row = brought(study, "trident", trident(tmp_path / "job", uni), new_name="ours")
    assert row["bags"] == 4 and "ours is no preset, so others may not know it: features are compared by name" in (
        capsys.readouterr().err
    )
    with store_of(study) as store:
        assert store.meta.golden == () and store.meta.encoder.startswith("ours")


def test_features_that_differ_from_the_encoder_here_are_refused_on_import(study, tmp_path, uni):
    wrong = uni + np.random.default_rng(1).normal(size=uni.shape).astype(np.float32) * uni.std()
    folder = trident(tmp_path / "job", wrong)
    words = ("features_uni_v1/wsi-fl-golden.h5", "% apart from those of uni here (mean 0.5)", "extract them anew")
    refused(lambda: brought(study, "trident", folder), *words, error=Exception)


def test_check_compares_the_vectors_of_a_store_with_the_encoder_here(study, tmp_path, uni, monkeypatch):
    brought(study, "trident", trident(tmp_path / "job", uni))
    assert check_sites(study, site="S0", pipeline_name=None)["ok"]
    monkeypatch.setattr("wsi_fl.stages.site.encoders.encode_golden", lambda *_: project_features(uni[::-1]))
    document = check_sites(study, site="S0", pipeline_name=None)
    assert (
        not document["ok"] and "mosaic.h5: its features of the golden patches are" in document["sites"][0]["damaged"][0]
    )


def test_features_of_other_patches_than_the_pictures_are_compared_by_name(study, tmp_path, uni, capsys):
    folder = trident(tmp_path / "job", uni)
    row = brought(study, "trident", folder, mpp=0.45)
    assert row["bags"] == 4 and "features are compared by name" in capsys.readouterr().err
    with store_of(study) as store:
        assert store.meta.golden == ()
