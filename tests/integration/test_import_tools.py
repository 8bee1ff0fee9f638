"""Features of AtlasPatch, slide2vec, Slideflow and eva in made-up files with their names, types and attributes."""

import csv
import json

import h5py
import numpy as np
import pytest
import torch
from conftest import refused
from test_import import brought, draw_features, labels, reasons_of, store_of
from test_import import study as study  # noqa: PLC0414 the fixture
from training_runs import trained

from wsi_fl.federation.preflight import compare_sites
from wsi_fl.models.presets import PRESETS
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.types import NoCommonPlan

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
LUNIT = {"mean": list(PRESETS["lunit-vits8"].transform.mean), "std": list(PRESETS["lunit-vits8"].transform.sd)}
CROP = {"resize": {"size": [248], "interpolation": "bicubic"}, "center_crop": {"size": [224, 224]}}
ALONE = {"resize": None, "center_crop": None}


def of_atlaspatch(folder, names="abcd", encoders=("uni_v1",)):
    place = folder / "patches"
    place.mkdir(parents=True)
    made, places = draw_features(names)
    for name, x in made.items():
        with h5py.File(place / f"{name}.h5", "w") as file:
            coords = np.c_[places * 512, np.tile([512, 512, 0], (4, 1))].astype(np.int32)
            file.create_dataset("coords", data=coords, maxshape=(None, 5), chunks=(8192, 5))
            file["passports"] = np.array([f"{name}__x0_y0".encode()] * 4, "S160")
            for encoder in encoders:
                file[f"features/{encoder}"] = x
            said = {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40, "overlap": 0}
            file.attrs.update(said | {"target_magnification": 20, "level0_width": 9000, "num_patches": 4})
    return folder, made


def of_slide2vec(folder, names="abcd", kind="pt", encoder="uni", d=5, size=224, **meta):
    (folder / "tile_embeddings").mkdir(parents=True)
    (folder / "tiles").mkdir()
    made, places = draw_features(names, d, np.float16)
    for name, x in made.items():
        path = folder / "tile_embeddings" / f"{name}.{kind}"
        if kind == "pt":
            torch.save(torch.from_numpy(x), path)
        else:
            np.savez_compressed(path, features=x, tile_index=np.arange(4))
        said = {"sample_id": name, "artifact_type": "tile_embeddings", "format": kind, "feature_dim": d, "num_tiles": 4}
        said |= {"encoder_name": encoder, "encoder_level": "tile", "requested_tile_size_px": size}
        said |= {"requested_spacing_um": 0.5, "tile_size_lv0": 2 * size, "encoder_input_size_px": 224} | meta
        path.with_name(f"{name}.meta.json").write_text(json.dumps(said))
        xy = (places * 2 * size).T.astype(np.int64)
        columns = {
            "x": xy[0],
            "y": xy[1],
            "tile_index": np.arange(4, dtype=np.int32),
            "tissue_fractions": np.ones(4, np.float32),
        }
        np.savez(folder / "tiles" / f"{name}.coordinates.npz", **columns)
    return folder, made


def of_slideflow(folder, names="abcd", normalizer=None, tile_um=128):
    folder.mkdir(parents=True)
    made, places = draw_features(names)
    for name, x in made.items():
        torch.save(torch.from_numpy(x), folder / f"{name}.pt")
        np.savez(folder / f"{name}.index.npz", arr_0=places * 512 + 256)
    extractor = {"class": "slideflow_noncommercial.uni.UNIFeatures", "kwargs": {"tile_px": 256}}
    config = {"extractor": extractor, "normalizer": normalizer, "num_features": 5, "tile_px": 256, "tile_um": tile_um}
    (folder / "bags_config.json").write_text(json.dumps(config))
    return folder, made


def of_eva(folder, names="abcd"):
    (folder / "train").mkdir(parents=True)
    made, _ = draw_features(names)
    with (folder / "manifest.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["origin", "embeddings", "target", "split", "wsi_id"])
        for name, x in made.items():
            torch.save([torch.from_numpy(row).clone() for row in x], folder / "train" / f"{name}.pt")
            rows.writerow([f"train/{name}.tif", f"train/{name}.pt", 0, "train", name])
    return folder, made


def places_of(study):
    with store_of(study) as store:
        return store.read_bag(0).xy_l0


def test_features_of_atlaspatch_are_imported_with_places_and_attributes(study, tmp_path):
    folder, made = of_atlaspatch(tmp_path / "out")
    row = brought(study, "atlaspatch", folder)
    assert row["bags"] == 4 and not row["failed"]
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(0).features, made["a"])
        assert (store.meta.encoder, store.meta.spec.size_px, store.meta.spec.mpp) == ("uni_v1", 256, 0.5)
    assert places_of(study).tolist() == [[0, 512], [1024, 1536], [2048, 2560], [3072, 3584]]


def test_one_of_several_encoders_of_atlaspatch_is_chosen_by_name(study, tmp_path):
    folder, _ = of_atlaspatch(tmp_path / "out", encoders=("resnet50", "uni_v1"))
    words = ("a: a.h5: has features of resnet50, uni_v1; choose one of them with --encoder",)
    refused(lambda: brought(study, "atlaspatch", folder), *words, error=Exception)
    assert brought(study, "atlaspatch", folder, encoder="resnet50")["encoder"] == "resnet50"


@pytest.mark.parametrize("kind", ["pt", "npz"])
def test_features_of_slide2vec_are_imported_with_what_their_metadata_say(study, tmp_path, kind):
    folder, made = of_slide2vec(tmp_path / "run", kind=kind)
    assert brought(study, "slide2vec", folder)["bags"] == 4
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(0).features, made["a"].astype(np.float32))
        assert (store.meta.spec.size_px, store.meta.spec.mpp, store.mpp_l0[0]) == (224, 0.5, 0.25)
    assert places_of(study).tolist() == (np.arange(8).reshape(4, 2) * 448).tolist()


def test_a_slide_is_predicted_by_the_name_of_its_file_of_features(study, tmp_path):
    folder, _ = of_slide2vec(tmp_path / "run", kind="npz")
    brought(study, "slide2vec", folder, labels(tmp_path / "labels.csv", split=["train", "train", "test", "test"]))
    run = trained(study, "regular", "privacy.enabled=false", "train.rounds=1", 'sites=["S0"]')["run"]
    document = predict(study, run, site="S0", slides=[folder / "tile_embeddings" / "a.npz"])
    assert [row["slide"] for row in document["slides"]] == ["a"] and not document["failed"]


def test_vectors_of_slides_of_slide2vec_are_bags_of_one(study, tmp_path):
    place = tmp_path / "run" / "slide_embeddings"
    place.mkdir(parents=True)
    for name in "abcd":
        torch.save(torch.arange(7.0), place / f"{name}.pt")
        said = {"sample_id": name, "artifact_type": "slide_embeddings", "encoder_name": "prism", "feature_dim": 7}
        (place / f"{name}.meta.json").write_text(json.dumps(said))
    row = brought(study, "slide2vec", tmp_path / "run", patch_px=224, mpp=0.5)
    assert row["bags"] == row["patches"] == 4 and row["encoder"] == "prism"


@pytest.mark.parametrize(
    ("encoder", "size", "stated", "expected"),
    [
        ("lunit", 224, LUNIT | {"steps": CROP}, "lunit-vits8"),
        ("lunit", 248, LUNIT | {"steps": CROP}, "lunit-vits8"),
        ("lunit", 224, LUNIT | {"steps": ALONE}, "lunit-vits8-uncropped"),
        ("lunit", 224, IMAGENET | {"steps": CROP}, "lunit-vits8 with other preprocessing, at 224 px"),
        ("lunit", 248, None, "lunit-vits8"),
        ("mstar", 248, None, "mstar-cropped"),
        ("gigapath", 256, None, "gigapath"),
        ("gigapath", 224, None, None),
        ("uni", 256, None, "uni"),
        ("lunit", 224, None, None),
        ("mstar", 224, None, None),
    ],
)
def test_the_crop_of_a_file_of_slide2vec_is_read_or_asked(study, tmp_path, encoder, size, stated, expected):
    d = {"lunit": 384, "gigapath": 1536}.get(encoder, 1024)
    said = {}
    if stated is not None:
        colours = {key: stated[key] for key in ("mean", "std")}
        said["compatibility"] = {"encoder_name": encoder, "transform": {"normalize": colours} | stated["steps"]}
    folder, _ = of_slide2vec(tmp_path / "run", encoder=encoder, d=d, size=size, **said)
    if expected is None:
        name = {"lunit": "lunit-vits8"}.get(encoder, encoder)
        words = "a.pt does not say whether its patches were cropped"
        refused(lambda: brought(study, "slide2vec", folder), words, f"--encoder-name {name} or {name}-")
        assert brought(study, "slide2vec", folder, new_name=name)["encoder"].split(";")[0] == name
    else:
        assert brought(study, "slide2vec", folder)["encoder"].split(";")[0] == expected


def test_an_image_of_another_size_is_another_encoder_and_two_crops_do_not_mix(study, tmp_path):
    folder, _ = of_slide2vec(tmp_path / "run", encoder="gpfm", d=1024, encoder_input_size_px=518)
    assert brought(study, "slide2vec", folder)["encoder"].startswith("gpfm with other preprocessing, at 518 px")
    documents = [
        {"site": site, "encoder": encoder, "n_features": 384, "size_px": 224, "mpp": 0.5}
        for site, encoder in (("A", "lunit-vits8; written as lunit"), ("B", "lunit-vits8-uncropped; written as lunit"))
    ]
    with pytest.raises(NoCommonPlan, match="B has lunit-vits8-uncropped as the encoder of its features"):
        compare_sites(documents)


@pytest.mark.parametrize(("tile_um", "mpp"), [(128, 0.5), ("20x", 0.5)])
def test_bags_of_slideflow_are_imported_with_corners_from_centres(study, tmp_path, tile_um, mpp):
    folder, made = of_slideflow(tmp_path / "bags", tile_um=tile_um)
    table = labels(tmp_path / "t.csv")
    lines = table.read_text().splitlines()
    table.write_text("\n".join([f"{lines[0]},mpp", *(f"{line},0.25" for line in lines[1:])]) + "\n")
    assert brought(study, "slideflow", folder, table)["bags"] == 4
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(0).features, made["a"]) and store.meta.spec.mpp == mpp
        assert store.meta.encoder == "UNI"
    assert places_of(study).tolist() == (np.arange(8).reshape(4, 2) * 512).tolist()


def test_stain_normalisation_of_slideflow_makes_another_encoder(study, tmp_path):
    folder, _ = of_slideflow(tmp_path / "bags", normalizer={"method": "macenko", "fit": {}})
    assert brought(study, "slideflow", folder)["encoder"] == "UNI after stain normalisation by macenko"


def test_lists_of_vectors_of_eva_are_bags(study, tmp_path):
    folder, made = of_eva(tmp_path / "embeddings")
    refused(lambda: brought(study, "eva", folder), "do not say their encoder, patch size, resolution")
    row = brought(study, "eva", folder, encoder="dino_vits16", patch_px=256, mpp=0.5)
    assert row["bags"] == 4 and row["patches"] == 16
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(0).features, made["a"])


@pytest.mark.parametrize(
    ("made", "form", "damage", "words"),
    [
        (of_slide2vec, "slide2vec", "tile_embeddings/a.meta.json", "a.meta.json: not a readable JSON file"),
        (of_slide2vec, "slide2vec", "tiles/a.coordinates.npz", "a.coordinates.npz: not a readable npz file"),
        (of_slideflow, "slideflow", "a.index.npz", "a.index.npz: not a readable npz file with arr_0"),
        (of_eva, "eva", "train/a.pt", "a.pt: damaged"),
        (of_atlaspatch, "atlaspatch", "patches/a.h5", "a.h5: not a readable HDF5 file"),
    ],
)
def test_a_damaged_file_excludes_its_slide_in_one_line(study, tmp_path, made, form, damage, words):
    folder, _ = made(tmp_path / "out")
    (folder / damage).write_bytes(b"{no")
    said = {"encoder": "dino", "patch_px": 256, "mpp": 0.5} if form == "eva" else {}
    row = brought(study, form, folder, **said)
    assert row["bags"] == 3 and words in reasons_of(row)["a"]


@pytest.mark.parametrize("form", ["atlaspatch", "slide2vec", "slideflow", "eva"])
def test_a_folder_without_such_files_is_refused(study, tmp_path, form):
    (tmp_path / "empty").mkdir()
    refused(lambda: brought(study, form, tmp_path / "empty"), "empty: no ", " in it")
