"""Patches that were cut elsewhere: folders of classes as of BACH and NCT-CRC-HE-100K, and PCam's files."""

import csv
import json
from unicodedata import normalize

import h5py
import numpy as np
import pytest
from conftest import refused
from PIL import Image

from wsi_fl.stages.prepare.import_patches import import_patches, render_patches_lines
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study


@pytest.fixture
def study(tmp_path):
    root = tmp_path / "study"
    for folder in ("pipelines", "sites"):
        (root / folder).mkdir(parents=True)
    (root / "pipelines" / "small.toml").write_text("[train]\nrounds = 1\n")
    (root / "sites" / "C1.toml").write_text('name = "C1"\n')
    return Study(root)


def draw_images(n, side=96):
    return np.random.default_rng(0).integers(0, 256, (n, side, side, 3)).astype(np.uint8)


def class_folders(folder, classes=("ADI", "TUM"), n=10):
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(draw_images(n, 24) // (k + 1)):
            Image.fromarray(image).save(folder / name / f"{name}-{number:02}.tif")
    return folder


def pcam(folder, slides=(("a", "b", "a", "c"), ("d", "d")), meta=True):
    folder.mkdir()
    for part, names in zip(("train", "test"), slides, strict=True):
        stem, n = f"camelyonpatch_level_2_split_{part}", len(names)
        with h5py.File(folder / f"{stem}_x.h5", "w") as file:
            file["x"] = draw_images(n)
        with h5py.File(folder / f"{stem}_y.h5", "w") as file:
            file["y"] = (np.arange(n) % 2).astype(np.uint8).reshape(n, 1, 1, 1)
        if meta:
            with (folder / f"{stem}_meta.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["", "coord_y", "coord_x", "tumor_patch", "center_tumor_patch", "wsi"])
                rows.writerows([k, 0, 0, True, True, f"camelyon16_{part}_{name}"] for k, name in enumerate(names))
    return folder


def brought(study, source, **said):
    return import_patches(study, source, site="C1", pipeline_name=None, overrides=[], **said)


def patients_of(study, split):
    with PatchStore(study.store_path("C1")) as store:
        return store.table.patient[store.table.split == split].tolist()


def test_folders_of_classes_become_a_patch_store_with_a_patient_for_each_image(study, tmp_path):
    document = brought(study, class_folders(tmp_path / "NCT"), mpp=0.5)
    (row,) = document["sites"]
    assert row["train"] + row["test"] == 20 == document["patients"] and row["test"] == 4
    with PatchStore(study.store_path("C1")) as store:
        assert store.meta.classes == ("ADI", "TUM") and store.meta.spec.mpp == 0.5 and store.meta.spec.size_px == 24
        assert len(set(store.table.patient.tolist())) == 20


def test_images_of_one_patient_are_in_one_split(study, tmp_path):
    names = [f"{name}-{number:02}" for name in ("ADI", "TUM") for number in range(10)]
    table = tmp_path / "t.csv"
    table.write_text("slide,patient\n" + "".join(f"{name},p{k % 5}\n" for k, name in enumerate(names)))
    document = brought(study, class_folders(tmp_path / "BACH"), labels=table)
    assert document["patients"] == 5 and document["sites"][0]["test"] == 4
    assert set(patients_of(study, "train")) | set(patients_of(study, "test")) == {f"p{k}" for k in range(5)}
    assert not set(patients_of(study, "train")) & set(patients_of(study, "test"))
    table.write_text("slide,patient\nADI-00,p0\n")
    refused(
        lambda: brought(study, tmp_path / "BACH", labels=table), "t.csv: no row of image ADI/ADI-01; add its patient"
    )


def test_a_table_of_patients_that_is_unclear_is_refused_and_rows_of_other_sites_are_ignored(study, tmp_path):
    folder, table = class_folders(tmp_path / "NCT"), tmp_path / "t.csv"
    names = [f"{name}-{number:02}" for name in ("ADI", "TUM") for number in range(10)]
    rows = [f"{name},p{k % 5},C1" for k, name in enumerate(names)]
    for other, words in ((f"{names[0]},p1,C1", "and of p0 in a line above"), ("x,NA,C1", "'NA' means unknown")):
        table.write_text("\n".join(["slide,patient,site", *rows, other]))
        refused(lambda: brought(study, folder, labels=table), "t.csv line 22", words)
    table.write_text("\n".join(["slide,patient,site", *rows, *(f"{name},q,C2" for name in names)]))
    assert brought(study, folder, labels=table)["patients"] == 5
    table.write_text("slide,patient,site\nADI-00,q,C2\n")
    refused(lambda: brought(study, folder, labels=table), "t.csv: has no row of site C1")


@pytest.mark.parametrize(("n_patients", "fraction", "n_test"), [(2, 0.2, 1), (3, 0.9, 2), (1, 0.2, 0), (2, 0, 0)])
def test_a_few_patients_are_divided_between_training_and_test(study, tmp_path, n_patients, fraction, n_test):
    folder, table = class_folders(tmp_path / "BACH", n=3), tmp_path / "t.csv"
    images = [f"{name}-{number:02}" for name in ("ADI", "TUM") for number in range(3)]
    table.write_text("\n".join(["slide,patient", *(f"{image},p{k % n_patients}" for k, image in enumerate(images))]))
    overrides = [f"slides.test_fraction={fraction}"]
    import_patches(study, folder, labels=table, site="C1", pipeline_name=None, overrides=overrides)
    assert len(set(patients_of(study, "test"))) == n_test
    assert len(set(patients_of(study, "train"))) == n_patients - n_test


def test_copies_of_test_images_in_training_are_reported(study, tmp_path):
    folder = class_folders(tmp_path / "NCT", n=4)
    assert brought(study, folder)["copies"] == []
    for path in folder.rglob("*.tif"):
        path.write_bytes((folder / "ADI" / "ADI-00.tif").read_bytes())
    assert brought(study, folder)["copies"] == ["2 test images are in training too, so scores are too good"]


def test_a_hospital_that_lacks_a_class_has_an_empty_folder_of_it(study, tmp_path):
    folder = class_folders(tmp_path / "NCT", ("TUM",))
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("no class")
    alone = brought(study, folder)
    assert list(alone["sites"][0]["classes"]) == ["TUM"]
    assert any("its only class is TUM: " in line.text for line in render_patches_lines(alone))
    (folder / "ADI").mkdir()
    document = brought(study, folder)
    (row,) = document["sites"]
    assert row["classes"] == {"ADI": 0, "TUM": row["train"]} and row["train"] + row["test"] == 10
    assert not any("make an empty folder" in line.text for line in render_patches_lines(document))
    with PatchStore(study.store_path("C1")) as store:
        assert store.meta.classes == ("ADI", "TUM") and set(store.table.label) == {1}


def test_equal_names_in_two_classes_are_two_patients_and_two_rows(study, tmp_path):
    folder = tmp_path / "BACH"
    for name in ("Benign", "InSitu"):
        class_folders(folder, (name,), 5)
        for path in (folder / name).iterdir():
            path.rename(path.with_name(path.name.removeprefix(f"{name}-")))
    assert brought(study, folder)["patients"] == 10
    table = tmp_path / "t.csv"
    rows = [f"{name}/{number:02},{name}" for name in ("Benign", "InSitu") for number in range(5)]
    table.write_text("\n".join(["slide,patient", *rows]))
    assert brought(study, folder, labels=table)["patients"] == 2


@pytest.mark.parametrize("form", ["{0}/{1}.tif", "{0}\\{1}.tif", "/data/NCT/{0}/{1}.tif", "{1}.tif"])
def test_a_table_names_images_with_their_suffix_or_by_a_path(study, tmp_path, form):
    folder, table = class_folders(tmp_path / "NCT", n=3), tmp_path / "t.csv"
    rows = [(name, f"{name}-{number:02}") for name in ("ADI", "TUM") for number in range(3)]
    table.write_text("\n".join(["slide,patient", *(f"{form.format(*row)},p{k}" for k, row in enumerate(rows))]))
    brought(study, folder, labels=table)
    assert set(patients_of(study, "train") + patients_of(study, "test")) == {f"p{k}" for k in range(6)}


def test_images_match_their_table_and_classes_in_any_unicode_form(study, tmp_path):
    folder, table = tmp_path / "data", tmp_path / "t.csv"
    class_folders(folder / "train", [normalize("NFD", "Drüse"), "TUM"], 3)
    class_folders(folder / "test", ["Drüse", "TUM"], 2)
    names = [f"{name}/{name}-{number:02}" for name in ("Drüse", "TUM") for number in range(3)]
    table.write_text("slide,patient\n" + "".join(f"{name},p{k}\n" for k, name in enumerate(names)), encoding="utf-8")
    for path in (folder / "test").glob("*/*"):
        path.rename(path.with_name(f"test-{path.name}"))
    with table.open("a", encoding="utf-8") as file:
        file.writelines(f"{path.parent.name}/{path.stem},q\n" for path in (folder / "test").glob("*/*"))
    (row,) = brought(study, folder, labels=table)["sites"]
    assert row["classes"] == {"Drüse": 3, "TUM": 3} and row["test"] == 4


def test_pcams_files_keep_their_test_set_and_their_slides(study, tmp_path):
    document = brought(study, pcam(tmp_path / "pcam"))
    (row,) = document["sites"]
    assert (row["train"], row["test"], row["classes"], document["patients"]) == (4, 2, {"0": 2, "1": 2}, 4)
    assert patients_of(study, "train") == [f"camelyon16_train_{name}" for name in "abac"]
    with PatchStore(study.store_path("C1")) as store:
        assert np.array_equal(store.read(np.arange(4)), draw_images(4))


def test_pcam_without_its_table_has_a_patient_for_each_image_and_a_shared_one_is_refused(study, tmp_path):
    assert brought(study, pcam(tmp_path / "bare", meta=False))["patients"] == 6
    folder = pcam(tmp_path / "pcam")
    table = tmp_path / "t.csv"
    table.write_text(
        "slide,patient\n"
        + "".join(
            f"camelyon16_{part}_{name},p\n"
            for part, name in (("train", "a"), ("train", "b"), ("train", "c"), ("test", "d"))
        )
    )
    refused(lambda: brought(study, folder, labels=table), "p has training and test images")
    (folder / "camelyonpatch_level_2_split_train_meta.csv").write_text("wsi\na\n")
    refused(lambda: brought(study, folder), "its table has 1 rows for the 4 images in x_train")


def test_scaled_images_have_the_resolution_that_follows_from_that_of_their_files(study, tmp_path):
    folder = class_folders(tmp_path / "NCT")
    brought(study, folder, mpp=0.5, size_px=12)
    with PatchStore(study.store_path("C1")) as store:
        assert (store.meta.spec.mpp, store.meta.spec.size_px) == (1.0, 12)
    images = tmp_path / "images.npz"
    np.savez(images, x=draw_images(8, 48), y=np.arange(8) % 2)
    brought(study, images, mpp=0.25, size_px=96)
    with PatchStore(study.store_path("C1")) as store:
        assert (store.meta.spec.mpp, store.meta.spec.size_px) == (0.125, 96)
    Image.fromarray(draw_images(1, 20)[0]).save(folder / "ADI" / "small.tif")
    refused(lambda: brought(study, folder, mpp=0.5), "several sizes", "--patch-px")
    refused(lambda: brought(study, folder, mpp=0.5, size_px=12), "several sizes", "leave --mpp out")
    brought(study, folder, size_px=12)
    with PatchStore(study.store_path("C1")) as store:
        assert store.meta.spec.mpp == 0


@pytest.mark.parametrize(
    ("real", "sites", "data", "expected"),
    [
        (False, 2, "patches", ["wsi-fl train --method proxyfl --pipeline small --set train.rounds=3"]),
        (True, 1, "patches", ["wsi-fl federation approve PLAN --kit KIT"]),
        (
            False,
            1,
            "features",
            [
                f"wsi-fl {command} --pipeline small --set train.rounds=3"
                for command in ("features --site C1", "train --method regular")
            ],
        ),
    ],
)
def test_it_proposes_the_commands_of_its_pipeline(study, tmp_path, real, sites, data, expected):
    (study.root / "pipelines" / "small.toml").write_text(f'[train]\nrounds = 1\ndata = "{data}"\n')
    (study.root / "pipelines" / "other.toml").write_text("[train]\nrounds = 1\n")
    for name in ("C1", "C2")[:sites]:
        (study.root / "sites" / f"{name}.toml").write_text(f'name = "{name}"\nreal = {json.dumps(real)}\n')
    folder = class_folders(tmp_path / "NCT", n=3)
    overrides = ["train.rounds=3"]
    assert import_patches(study, folder, site="C1", pipeline_name="small", overrides=overrides)["next"] == expected


def test_the_command_says_what_it_wrote(study, tmp_path, wsi_fl):
    folder = class_folders(tmp_path / "NCT")
    command = ("import", "--site", "C1", "--format", "patches", "--from", folder)
    said = wsi_fl(*command, cwd=study.root).stderr
    assert "16 training images (ADI" in said and "stores ready; next: wsi-fl " in said
    assert json.loads(wsi_fl(*command, "--patch-px", "12", "--json", cwd=study.root).stdout)["patients"] == 20
