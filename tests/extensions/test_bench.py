"""Tests of `wsi-fl bench`: methods on hospitals drawn from a table of features."""

import pickle
import re
import sys
import tomllib
import zipfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import refused
from test_plugins import installed
from training_runs import csv_rows

from wsi_fl import plugins
from wsi_fl.data.cohort import Cohort
from wsi_fl.evidence import bench as module
from wsi_fl.evidence.bench import SamplingCell, parse_cells, run_benchmark, sample_sites
from wsi_fl.evidence.feature_table import FeatureTable, read_table
from wsi_fl.stores.bag_store import Bag, BagMeta, group_bags, write_bags
from wsi_fl.types import GridSpec, PatchTable


def table(n=240, d=8):
    """Return features, labels and patients, whose four rows are of one class."""
    y = np.arange(n) * 2 // n
    x = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    x[:, 0] += 2.0 * y
    return x, y, np.array([f"p{k // 4}" for k in range(n)])


@pytest.fixture
def npz(tmp_path):
    np.savez(tmp_path / "features.npz", **arrays(240))
    return tmp_path / "features.npz"


def test_every_hospital_has_a_row_and_no_result_is_overwritten(npz, tmp_path, monkeypatch):
    out = tmp_path / "bench.csv"
    asked = {"out": out, "methods": ["oneshot", "fedavg"], "cells": parse_cells("2x8", "1"), "seeds": 2}
    monkeypatch.setattr(module, "_HYPERPARAMETERS", ((1, 1e-2), (2, 1e-2)))
    document = run_benchmark(npz, **asked)
    rows = csv_rows(out)
    named = {(row["method"], row["skew"], row["seed"], row["site"]) for row in rows}
    assert {*product(("regular", "joint", "oneshot", "fedavg"), "1", "01", ("S1", "S2"))} <= named
    assert all(float(row["spent"]) <= 1.0 for row in rows if row["method"] == "oneshot")
    assert {row["guarantee"] for row in rows if row["method"] in ("oneshot", "fedavg")} == {"guaranteed"}
    means = {}
    for row in (row for row in rows if row["seed"] != "-1"):
        means.setdefault(row["method"], []).append(float(row["score"]))
    for cell in document["cells"]:  # the document says what the lines say
        gain = np.mean(means[cell["method"]]) - np.mean(means["regular"])
        assert cell["gain"] == pytest.approx(gain, abs=1e-9)
    refused(lambda: run_benchmark(npz, **asked), "bench.csv: exists already", "choose another --out")


def test_hospitals_with_a_single_class_gain_and_pooled_training_is_best(npz, tmp_path):
    asked = {"methods": ["oneshot"], "cells": parse_cells("2x12", "1"), "epsilons": [8.0], "seeds": 2}
    (one,) = run_benchmark(npz, out=tmp_path / "b.csv", **asked)["cells"]
    assert one["local"] == pytest.approx(0.5) and one["pooled"] > 0.7 and one["gain"] > 0.1


@pytest.mark.parametrize("skew", ["alike", "missing-class", "0.75"])
def test_hospitals_and_the_test_set_share_no_patient(skew):
    x, y, patient = table()
    sites, test = sample_sites(
        FeatureTable(Cohort.from_arrays(x, y, patient), ("a", "b")), SamplingCell(3, 8, skew), seed=0
    )
    parts = [set(part.patient) for part in (*sites, test)]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert [len(one) for one in parts[:3]] == [8, 8, 8]
    shares = [np.mean(site.label == 0) for site in sites]
    assert shares == {"alike": [0.5] * 3, "missing-class": [0.5, 0.5, 0.0], "0.75": [0.75, 0.25, 0.75]}[skew]


def test_tables_of_all_file_formats_give_the_same_result(tmp_path, npz):
    x, y, patient = table()
    lines = ["label,patient," + ",".join(f"f{k}" for k in range(x.shape[1]))]
    lines += [",".join([str(b), c, *map(repr, map(float, a))]) for a, b, c in zip(x, y, patient, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert_rows(read_table(tmp_path / "t.csv"), x, y, patient)
    slides = read_table(*write_trident_folder(tmp_path / "trident", [f"s{k},{'ab'[k % 2]}" for k in range(6)]))
    assert_rows(slides, x[:6] + 1, [0, 1] * 3, [""] * 6)
    assert slides.classes == ("a", "b")


def assert_rows(found, x, y, patient):
    """Compare a table with the features, labels and patients of its file."""
    np.testing.assert_allclose(found.rows.read(np.arange(len(x))), x, rtol=1e-6)
    assert list(found.rows.label) == list(y) and list(found.rows.patient) == list(patient)


def write_trident_folder(folder, labels, n=6):
    """Write a TRIDENT folder of n slides and its table."""
    (folder / "features_uni").mkdir(parents=True)
    for k, row in enumerate(table()[0][:n]):
        with h5py.File(folder / "features_uni" / f"s{k}.h5", "w") as file:
            file["features"], file["coords"] = np.stack([row, row + 2]), np.zeros((2, 2), np.int64)
    (folder / "labels.csv").write_text("slide,label\n" + "".join(f"{line}\n" for line in labels))
    return folder, folder / "labels.csv"


def test_slides_without_a_row_are_excluded_by_name(tmp_path, monkeypatch, capsys):
    named = [f"s{k}.svs,{'ab'[k % 2]}" for k in range(40)]
    folder, labels = write_trident_folder(tmp_path / "job", [*named, "s40,", "z.svs,a"], n=42)
    with h5py.File(folder / "features_uni" / "s1.h5", "a") as file:
        file["features"][0, 0] = np.nan
    monkeypatch.setattr(module, "_HYPERPARAMETERS", ((1, 1e-2),))
    asked = {"methods": ["oneshot"], "cells": parse_cells("2x8", "alike"), "seeds": 1}
    document = run_benchmark(folder, labels=labels, out=tmp_path / "b.csv", **asked)
    reasons = {one["slide"]: one["reason"] for one in document["excluded"]}
    words = {"s1": "s1.h5: features are not finite", "s40": "has no label (labels.csv line 42)"}
    words |= {"z.svs": "has a label (labels.csv line 43) and no features", "s41": "has no label in labels.csv"}
    assert reasons == words and len(read_table(folder, labels).rows) == 39
    said = " ".join(capsys.readouterr().err.split())
    assert "slides excluded: 4 (s1: s1.h5: features are not finite; s40: has no label" in said
    with h5py.File(folder / "features_uni" / "narrow.h5", "w") as file:
        file["features"], file["coords"] = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int64)
    kept = [*named, "s40,", "z.svs,a"]
    for lines, *words in (
        ([*kept, "s2,a"], "labels.csv line 44", "slide s2 has a row already"),
        ([*kept, "s41,A"], "labels.csv: labels A, a differ in case only"),
        (["s1,a"], "none of its slides", "s1.h5: features are not finite"),
        (["s2,a", "narrow,b"], "not equally wide"),
    ):
        labels.write_text("slide,label\n" + "\n".join(lines))
        refused(lambda words=words: read_table(folder, labels), *words)


def test_a_store_gives_a_row_per_labelled_patch_and_otherwise_per_slide(tmp_path):
    x, y, patient = table(12)
    bags = [Bag(x[:8], np.zeros((8, 2), np.int64)), Bag(x[8:], np.zeros((4, 2), np.int64))]
    slide = np.repeat(["a", "b"], [8, 4])
    places, split = np.zeros((12, 2), np.int64), np.full(12, "train")
    patches = PatchTable(places, y, y.astype(np.float32), slide, patient, split)
    slides = replace(group_bags(patches)[0], label=np.array([0, 1]))
    meta = BagMeta("S1", ("a", "b"), "e", GridSpec(8, 1.0, 8))
    for own in (patches, None):
        write_bags(tmp_path / "s.h5", meta, slides, bags, patches=own)
        found = read_table(tmp_path / "s.h5")
        if own:
            assert_rows(found, x, y, patient)
        else:
            assert_rows(found, [x[:8].mean(0), x[8:].mean(0)], [0, 1], slides.patient)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        *(({"methods": [name]}, f"{name} is always measured as a baseline") for name in ("regular", "joint")),
        ({"cells": [SamplingCell(4, 500, "alike")]}, "too few patients"),
        ({"methods": ["mpcpa"]}, "needs more than features"),
        ({"methods": ["nosuch"]}, "unknown method"),
        ({"unit": "slide"}, "--unit"),
    ],
)
def test_impossible_options_are_refused_in_one_line(npz, tmp_path, ask, words):
    asked = {"cells": parse_cells("2x8", "alike"), "out": tmp_path / "b.csv", **ask}
    refused(lambda: run_benchmark(npz, **asked), words)
    assert not (tmp_path / "b.csv").exists()


def test_meaningless_cells_of_a_table_are_refused():
    for sizes, skew in (("4", "alike"), ("1x50", "alike"), ("4x50", "2"), ("4x50", "some")):
        refused(lambda sizes=sizes, skew=skew: parse_cells(sizes, skew), "--")


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("(bench)=")[2]


def forget_plugins():
    for known in (plugins._find_points, plugins._load_point):
        known.cache_clear()


def test_the_example_method_of_the_documentation_is_a_row_of_the_same_table(npz, tmp_path, monkeypatch):
    toml, python = (re.search(rf"```{kind}\n(.+?)```", PAGE, re.DOTALL)[1] for kind in ("toml", "python"))
    groups = tomllib.loads(toml)["project"]["entry-points"]
    monkeypatch.setattr(module, "_HYPERPARAMETERS", ((2, 1e-2),))
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site", name="careful", groups=groups, text=python)))
    asked = {"methods": ["careful", "oneshot"], "cells": parse_cells("2x8", "1"), "seeds": 1}
    try:
        forget_plugins()
        document = run_benchmark(npz, out=tmp_path / "b.csv", **asked)
    finally:
        monkeypatch.undo()
        sys.modules.pop("careful", None)
        forget_plugins()
    assert [one["method"] for one in document["cells"]] == ["careful", "oneshot"]
    rows = csv_rows(tmp_path / "b.csv")
    mine = [row for row in rows if row["method"] == "careful" and row["seed"] == "0"]
    assert mine and all(0 < float(row["spent"]) <= 1 and row["guarantee"] == "guaranteed" for row in mine)
    assert len([line for line in python.splitlines() if line.strip()]) <= 60


def arrays(n=40, **changes):
    return dict(zip(("x", "y", "patient"), table(n), strict=True)) | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.full((40, 8), "a")}, "x is <U1[40, 8], not features that are numbers"),
        ({"x": np.zeros((40, 8), complex)}, "x is complex128"),
        ({"patient": np.full((40, 2), "a")}, "patient [40, 2]; wanted are [n, d], [n] and [n]"),
        ({"y": np.zeros((40, 1), int)}, "y [40, 1]"),
        ({"y": np.array(1)}, "y []"),
        ({"y": np.array(["tumor", "Tumor"] * 20)}, "t.npz: labels Tumor, tumor differ in case only"),
        ({"y": np.arange(40) % 2 / 2}, "a label is 0.5; labels are classes"),
        ({"y": np.array(["0,25", "1"] * 20)}, "a label is 0,25; labels are classes"),
        ({"y": np.array([np.inf, 1.0] * 20)}, "a label is inf; labels are classes"),
        ({"y": np.full(40, np.nan)}, "needs two classes at least"),
        ({"y": np.zeros(40, "datetime64[D]")}, "y is datetime64[D], not numbers or texts"),
        ({"x": np.where(np.arange(40)[:, None] == 7, np.inf, 0.0) + np.ones(8)}, "of 1 rows are not finite numbers"),
        ({"x": np.zeros((40, 0))}, "not features that are numbers"),
        ({"y": np.array([None] * 40)}, "it holds objects of Python; save numbers and texts as arrays"),
    ],
    ids=str,
)
def test_arrays_that_are_no_table_are_refused_in_one_line(tmp_path, changes, words):
    np.savez(tmp_path / "t.npz", **arrays(**changes))
    refused(lambda: read_table(tmp_path / "t.npz"), "t.npz", words)


def test_a_pickled_or_foreign_file_is_refused_and_its_code_never_runs(tmp_path):
    pickled = pickle.dumps([1, 2])
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        archive.writestr("x", pickled)
        archive.writestr("y", pickled)
    (tmp_path / "pickle.npz").write_bytes(pickled)
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(tmp_path / "cut.npz", **arrays())
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-900])
    np.savez(tmp_path / "only.npz", y=np.arange(4))
    for path in tmp_path.glob("*.npz"):
        refused(lambda path=path: read_table(path), "not a file of NumPy with x and y")


def test_rows_without_a_label_are_excluded_and_no_class_is_called_nan(tmp_path):
    y = np.array(["a", "b"] * 20, "<U2")
    y[:3] = ["NA", "-", "n"]
    np.savez(tmp_path / "t.npz", **arrays(y=y, patient=np.array(["nan", "p"] * 20)))
    found = read_table(tmp_path / "t.npz")
    assert [one.slide for one in found.excluded] == ["row 0", "row 1"] and found.classes == ("a", "b", "n")
    assert set(found.rows.patient) == {"", "p"}
    (tmp_path / "t.csv").write_text("label;patient;f\na;null;1\nb;p;2\nNaN;q;3\n")
    found = read_table(tmp_path / "t.csv")
    assert found.rows.patient.tolist() == ["", "p"] and len(found.excluded) == 1


@pytest.mark.parametrize(
    ("text", "words", "mended"),
    [
        ("label;f\na;0,5\nb;1", ("line 2", "f = '0,5'", "write 0.5"), "label;f\na;0.5\nb;1"),
        ("label,f,slide\na,1,s\nb,2,t", ("slide = 's' is no number", "leave that column out"), "label,f\na,1\nb,2"),
        ("label,f\na,\nb,1\nc,2", ("line 2", "f = ''", "or the row"), "label,f\nb,1\nc,2"),
    ],
)
def test_a_csv_with_text_cells_is_refused_with_advice_that_works(tmp_path, text, words, mended):
    (tmp_path / "t.csv").write_text(text)
    refused(lambda: read_table(tmp_path / "t.csv"), *words)
    (tmp_path / "t.csv").write_text(mended)
    assert len(read_table(tmp_path / "t.csv").rows) == 2
