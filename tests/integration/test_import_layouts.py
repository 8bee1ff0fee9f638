"""Tests of imported features without optional fields and of tables that match no file."""

import json
import re
from unicodedata import normalize

import h5py
import numpy as np
import pytest
from conftest import refused
from test_import import brought, labels, of_clam, of_lazyslide, of_stamp, of_trident, store_of
from test_import import study as study  # noqa: PLC0414 the fixture

from wsi_fl.stores.foreign_formats import LAYOUTS

SIDE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        ".ljust(4096, b"\0")
SAID = {"encoder": "uni2", "patch_px": 256, "mpp": 0.5}


def null(group, name):
    """Write None as AnnData does."""
    group.create_dataset(name, data=h5py.Empty("f4")).attrs.update({"encoding-type": "null"})


def h5ad(path, x, change=lambda file: None):
    with h5py.File(path, "w") as file:
        file["X"] = x
        for name in ("layers", "obs", "obsm", "obsp", "uns", "var", "varm", "varp"):
            file.create_group(name)
        change(file)
    return path


def sparse(kind, x):
    """Write a sparse X of rows or columns as AnnData does."""

    def write(file):
        del file["X"]
        lines = x if kind == "csr_matrix" else x.T
        at = [np.flatnonzero(line) for line in lines]
        group = file.create_group("X")
        group.attrs.update({"encoding-type": kind, "shape": x.shape})
        group["data"] = np.concatenate([line[k] for line, k in zip(lines, at, strict=True)])
        group["indices"], group["indptr"] = np.concatenate(at), np.cumsum([0, *map(len, at)])

    return write


def nulls(file):
    for name in ("tile_spec", "slide_properties"):
        null(file["uns"].create_group(name), "mpp")
    file["uns/tile_spec/width"] = 100


def null_groups(file):
    for name in ("tile_spec", "slide_properties"):
        null(file["uns"], name)


def other_columns(file):
    file["obsm/X_pca"] = np.zeros((6, 2))
    null(file["obsm"], "spatial")
    null(file["obs"], "tissue")
    file["uns/slide_properties/mpp"] = np.array([0.5])


X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32) * np.array([0, 1, 1, 0, 1], np.float32)


@pytest.mark.parametrize(
    "change", [lambda file: None, nulls, null_groups, other_columns, sparse("csr_matrix", X), sparse("csc_matrix", X)]
)
def test_empty_fields_of_anndata_are_ignored(tmp_path, change):
    read = LAYOUTS["anndata"].read(h5ad(tmp_path / "a.h5ad", X, change))
    assert np.array_equal(read.features, X) and read.xy is None
    assert read.facts.mpp is None and read.facts.mpp_l0 == (0.5 if change is other_columns else None)
    assert read.facts.size_px == (100 if change is nulls else None)


@pytest.mark.parametrize("part", ["data", "indices", "indptr"])
def test_a_sparse_matrix_that_does_not_fit_together_is_refused(tmp_path, part):
    path = h5ad(tmp_path / "a.h5ad", X, sparse("csr_matrix", X))
    with h5py.File(path, "a") as file:
        values = file[f"X/{part}"][:]
        values[-1] = 99
        del file[f"X/{part}"]
        file[f"X/{part}"] = values[:-1] if part == "data" else values
    with pytest.raises(Exception, match="damaged, its sparse 'X' does not fit together"):
        LAYOUTS["anndata"].read(path)


def test_a_slide_of_lazyslide_without_a_resolution_is_imported_with_the_given_one(study, tmp_path):
    folder, made = of_lazyslide(tmp_path / "h5ad")
    for path in folder.glob("*.h5ad"):
        with h5py.File(path, "a") as file:
            for name in ("tile_spec", "slide_properties"):
                del file[f"uns/{name}/mpp"]
                null(file[f"uns/{name}"], "mpp")
    refused(lambda: brought(study, "anndata", folder, encoder="uni2"), "do not say their resolution; add --mpp")
    row = brought(study, "anndata", folder, encoder="uni2", mpp=0.5)
    assert row["bags"] == 4 and not row["failed"]
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(0).features, made["a"]) and store.read_bag(0).has_places


def stamp_vectors(folder, names, kind, encoder="titan"):
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["feats"] = np.random.default_rng(number).normal(size=7).astype(np.float32)
            file.attrs.update(version="2.4.0", encoder=encoder, precision="torch.float32", feat_type=kind)
    return folder


@pytest.mark.parametrize("kind", ["slide", "patient"])
def test_stamps_vectors_are_bags_of_one(study, tmp_path, kind):
    folder = stamp_vectors(tmp_path / f"titan-{kind}-0a1b", "abcd", kind)
    table = labels(tmp_path / "labels.csv")
    if kind == "patient":  # files bear the names of patients, and a patient has two slides
        text = "slide,patient,label\n" + "".join(f"{p}{k},{p},KIR{'CP'[p in 'bd']}\n" for p in "abcd" for k in "12")
        table.write_text(text)
    refused(lambda: brought(study, "stamp", folder, table), "patch size, resolution; add --patch-px, --mpp")
    row = brought(study, "stamp", folder, table, patch_px=512, mpp=0.5)
    assert row["bags"] == row["patches"] == 4 and row["encoder"] == "titan" and not row["failed"]
    if kind == "patient":
        table.write_text(text.replace("a2,a,KIRC", "a2,a,KIRP"))
        words = ("line 3", "patient a has another label than in labels.csv line 2")
        refused(lambda: brought(study, "stamp", folder, table, patch_px=512, mpp=0.5), *words)
        sites = text.replace("\n", ",S0\n").replace("label,S0", "label,site").replace("d,KIRP,S0", "d,KIRP,S1")
        table.write_text(sites)
        row = brought(study, "stamp", folder, table, patch_px=512, mpp=0.5)
        assert row["bags"] == 3 and not row["failed"]  # d is of another site


def test_a_table_of_patients_fits_vectors_of_patients(study, tmp_path):
    folder = stamp_vectors(tmp_path / "cobra-patient", "abcd", "patient")
    (tmp_path / "t.csv").write_text("PATIENT,label\na,KIRC\nb,KIRP\nc,KIRC\nd,KIRP\n")
    row = brought(study, "stamp", folder, tmp_path / "t.csv", patch_px=512, mpp=0.5)
    assert row["bags"] == row["patients"] == 4


def test_a_folder_of_several_encoders_is_refused_with_their_names_and_each_can_be_chosen(study, tmp_path):
    of_stamp(tmp_path / "out")
    stamp_vectors(tmp_path / "out" / "titan-slide-1c2d", "abcd", "slide")
    table = tmp_path / "t.csv"
    table.write_text("FILENAME,PATIENT,label\na.h5,a,KIRC\nb.h5,b,KIRP\nc.h5,c,KIRC\nd.h5,d,KIRP\n")
    words = ("several folders of features (titan-slide-1c2d, uni-0a1b2c3d); name one of them with --from",)
    refused(lambda: brought(study, "stamp", tmp_path / "out", table), *words)
    assert brought(study, "stamp", tmp_path / "out" / "uni-0a1b2c3d", table)["bags"] == 4
    table.write_text("FILENAME,PATIENT\na.h5,a\n")
    refused(lambda: brought(study, "stamp", tmp_path / "out" / "uni-0a1b2c3d", table), "join STAMP's two tables")


@pytest.mark.parametrize(
    ("form", "made"), [("trident", of_trident), ("clam", of_clam), ("stamp", of_stamp), ("anndata", of_lazyslide)]
)
def test_macos_companion_files_are_not_slides(study, tmp_path, form, made):
    folder, _ = made(tmp_path / "job")
    for path in [path for path in folder.rglob("*") if path.suffix in {".h5", ".pt", ".h5ad"}]:
        path.with_name("._" + path.name).write_bytes(SIDE)
    (folder / ".DS_Store").write_bytes(SIDE)
    said = {"trident": {}, "stamp": {}, "clam": {**SAID, "encoder": "resnet50"}, "anndata": {"encoder": "uni2"}}
    row = brought(study, form, folder, **said[form])
    assert row["slides"] == row["bags"] == 4 and not row["failed"]


@pytest.mark.parametrize(
    ("names", "difference"),
    [
        ("ABCD", "a and A differ in upper and lower case"),
        (["a.ome", "b.ome", "c.ome", "d.ome"], "a and a.ome differ in suffixes"),
        (["w", "x", "y", "z"], "the table has a, b, c and 1 more, the site w, x, y and 1 more"),
    ],
)
def test_a_table_that_matches_no_file_is_refused_with_names_of_both(study, tmp_path, names, difference):
    folder, _ = of_trident(tmp_path / "job", names)
    refused(lambda: brought(study, "trident", folder), "none of its slides has a label and features", difference)


def test_slides_that_all_lack_a_class_are_refused_with_the_first_reason(study, tmp_path):
    folder, _ = of_trident(tmp_path / "job")
    table = tmp_path / "t.csv"
    table.write_text("slide,patient,label\n" + "".join(f"{name},{name},kirc\n" for name in "abcd"))
    refused(lambda: brought(study, "trident", folder, table), "a: its diagnosis kirc", "did you mean KIRC?")
    table.write_text("slide,patient,label\n" + "".join(f"{name},{name},NA\n" for name in "abcd"))
    refused(lambda: brought(study, "trident", folder, table), "has no label (t.csv line 2)")


def test_labels_match_files_and_classes_in_any_unicode_form(study, tmp_path):
    pipeline = study.root / "pipelines" / "kidney.toml"
    pipeline.write_text(pipeline.read_text().replace("KIRC", normalize("NFD", "Größe")))
    folder, _ = of_trident(tmp_path / "job", [normalize("NFD", f"Nr.{k} ä") for k in range(4)])
    rows = [f"{normalize('NFC', f'Nr.{k} ä')},p{k},{normalize('NFC', ('Größe', 'KIRP')[k % 2])}\n" for k in range(4)]
    (tmp_path / "t.csv").write_text("slide,patient,label\n" + "".join(rows), encoding="utf-8")
    row = brought(study, "trident", folder, tmp_path / "t.csv")
    assert row["bags"] == 4 and set(row["classes"].values()) == {2}


@pytest.mark.parametrize("words", [("MSI-H", "MSS"), ("Grade 1", 'say "high"'), ("0.5", "2"), ("groß", "klein")])
def test_the_classes_that_a_refusal_proposes_are_accepted(study, tmp_path, words):
    pipeline = study.root / "pipelines" / "kidney.toml"
    text = pipeline.read_text()
    pipeline.write_text(text.replace("[subtypes]\n", "").replace('kidney = ["KIRC", "KIRP"]\n', ""))
    folder, _ = of_trident(tmp_path / "job")
    table = tmp_path / "t.csv"
    quoted = ['"' + word.replace('"', '""') + '"' for word in words]
    table.write_text("slide,patient,label\n" + "".join(f"{n},{n},{quoted[k % 2]}\n" for k, n in enumerate("abcd")))
    with pytest.raises(Exception, match="unknown label") as error:
        brought(study, "trident", folder, table)
    hint = re.search(r"any = \[.*\]$", str(error.value))[0]
    pipeline.write_text(f"[subtypes]\n{hint}\n{pipeline.read_text()}")
    row = brought(study, "trident", folder, table)
    assert row["bags"] == 4 and row["classes"] == dict.fromkeys(sorted(words), 2)


def test_whole_numbers_with_a_decimal_point_are_read_as_healthy_and_tumour(study, tmp_path):
    pipeline = study.root / "pipelines" / "kidney.toml"
    pipeline.write_text("[train]\ndata = 'mosaics'\n")
    folder, _ = of_trident(tmp_path / "job")
    (tmp_path / "t.csv").write_text("slide,patient,label\na,a,1.0\nb,b,0.0\nc,c,1.0\nd,d,\n")
    row = brought(study, "trident", folder, tmp_path / "t.csv")
    assert row["classes"] == {"healthy": 1, "tumor": 2} and json.dumps(row["failed"]).count("has no label") == 1
