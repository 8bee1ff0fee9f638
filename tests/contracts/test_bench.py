"""`wsi-fl bench`: methods on hospitals drawn from a table of features."""

import pickle
import re
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from conftest import refused
from test_plugins import installed
from trained import csv_rows

import wsi_fl.stages.bench as module
from wsi_fl import plugins
from wsi_fl.stages.bench import Cell, FeatureTable, bench, cells_of, drawn, read_table
from wsi_fl.stores.bags import Bag, BagMeta, bags_of, write_bags
from wsi_fl.types import GridSpec, PatchTable


def table(n=240, d=8):
    rng = np.random.default_rng(0)
    y = np.arange(n) % 2
    x = rng.normal(size=(n, d)).astype(np.float32)
    x[:, 0] += 2.0 * y
    return (
        x,
        np.sort(y),
        np.array([f"p{k // 4}" for k in range(n)]),
    )  # four rows of a patient are of one class


@pytest.fixture
def npz(tmp_path):
    x, y, patient = table()
    x[:, 0] = np.random.default_rng(1).normal(size=len(y)) + 2.0 * y
    np.savez(tmp_path / "features.npz", x=x, y=y, patient=patient)
    return tmp_path / "features.npz"


def test_every_hospital_has_a_line_and_what_is_there_is_computed_again_only_where_its_method_has_changed(
    npz, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "bench.csv"
    asked = {"out": out, "methods": ["oneshot", "fedavg"], "cells": cells_of("2x8", "1"), "seeds": 2}
    monkeypatch.setattr(module, "_WAYS", ((1, 1e-2), (2, 1e-2)))
    document = bench(npz, **asked)
    rows = csv_rows(out)
    named = {(row["method"], row["skew"], row["seed"], row["site"]) for row in rows}
    for method in ("regular", "joint", "oneshot", "fedavg"):
        assert {(method, "1", seed, site) for seed in "01" for site in ("S1", "S2")} <= named
    assert all(float(row["spent"]) <= 1.0 for row in rows if row["method"] == "oneshot")
    assert {row["guarantee"] for row in rows if row["method"] in ("oneshot", "fedavg")} == {"guaranteed"}
    means = {}
    for row in (row for row in rows if row["seed"] != "-1"):
        means.setdefault(row["method"], []).append(float(row["score"]))
    for cell in document["cells"]:  # the document says what the lines say
        gain = np.mean(means[cell["method"]]) - np.mean(means["regular"])
        assert cell["gain"] == pytest.approx(gain, abs=1e-9)
    whole = out.read_text()
    out.write_text("\n".join(line for line in whole.splitlines() if ",1,S" not in line) + "\n")
    trained = []
    done = module._done
    monkeypatch.setattr(module, "_done", lambda work: trained.append(work.seed) or done(work))
    bench(npz, **asked)
    assert set(trained) == {1} and len(trained) == 4  # methods
    trained.clear()
    code = module._code_of
    monkeypatch.setattr(module, "_code_of", lambda name: code(name) + "2" * (name == "fedavg"))
    monkeypatch.setattr(module, "_done", lambda work: trained.append(work.method) or done(work))
    bench(npz, **asked)
    assert set(trained) == {"fedavg"} and "fedavg has changed since" in capsys.readouterr().err
    refused(lambda: bench(npz, **asked, unit="patient"), "another table or unit")


def test_who_has_one_class_alone_gains_and_pooled_is_best(npz, tmp_path):
    asked = {"methods": ["oneshot"], "cells": cells_of("2x12", "1"), "epsilons": [8.0], "seeds": 2}
    (one,) = bench(npz, out=tmp_path / "b.csv", **asked)["cells"]
    assert one["alone"] == pytest.approx(0.5) and one["pooled"] > 0.7 and one["gain"] > 0.1


@pytest.mark.parametrize("skew", ["alike", "lacks", "0.75"])
def test_hospitals_and_test_share_no_patient(skew):
    x, y, patient = table()
    sites, test = drawn(FeatureTable(x, y, patient, ("a", "b")), Cell(3, 8, skew), seed=0)
    parts = [set(part.patient) for part in (*sites, test)]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert [len(one) for one in parts[:3]] == [8, 8, 8]
    shares = [np.mean(site.y == 0) for site in sites]
    assert shares == {"alike": [0.5] * 3, "lacks": [0.5, 0.5, 0.0], "0.75": [0.75, 0.25, 0.75]}[skew]


def test_tables_of_all_forms_say_the_same(tmp_path, npz):
    x, y, patient = table()
    lines = ["label,patient," + ",".join(f"f{k}" for k in range(x.shape[1]))]
    lines += [",".join([str(b), c, *map(repr, map(float, a))]) for a, b, c in zip(x, y, patient, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    found = read_table(tmp_path / "t.csv")
    assert np.array_equal(found.x, x) and np.array_equal(found.y, y) and list(found.patient) == list(patient)
    slides = read_table(*of_tridents(tmp_path / "trident", [f"s{k},{'ab'[k % 2]}" for k in range(6)]))
    assert np.allclose(slides.x, x[:6] + 1) and slides.classes == ("a", "b") and list(slides.y) == [0, 1] * 3


def of_tridents(folder, labels, n=6):
    """A folder of TRIDENT's with n slides, and its table."""
    (folder / "features_uni").mkdir(parents=True)
    for k, row in enumerate(table()[0][:n]):
        with h5py.File(folder / "features_uni" / f"s{k}.h5", "w") as file:
            file["features"], file["coords"] = np.stack([row, row + 2]), np.zeros((2, 2), np.int64)
    (folder / "labels.csv").write_text("slide,label\n" + "".join(f"{line}\n" for line in labels))
    return folder, folder / "labels.csv"


def test_slides_that_give_no_row_are_set_aside_by_name(tmp_path, monkeypatch, capsys):
    named = [f"s{k}.svs,{'ab'[k % 2]}" for k in range(40)]
    folder, labels = of_tridents(tmp_path / "job", [*named, "s40,", "z.svs,a"], n=42)
    with h5py.File(folder / "features_uni" / "s1.h5", "a") as file:
        file["features"][0, 0] = np.nan
    monkeypatch.setattr(module, "_WAYS", ((1, 1e-2),))
    asked = {"methods": ["oneshot"], "cells": cells_of("2x8", "alike"), "seeds": 1}
    document = bench(folder, labels=labels, out=tmp_path / "b.csv", **asked)
    reasons = {one["slide"]: one["reason"] for one in document["aside"]}
    words = {"s1": "s1.h5: features are not finite", "s40": "has no label (labels.csv line 42)"}
    words |= {
        "z.svs": "has a label (labels.csv line 43) and no features",
        "s41": "has no label in labels.csv",
    }
    assert reasons == words and len(read_table(folder, labels).y) == 39
    said = " ".join(capsys.readouterr().err.split())
    assert "slides set aside: 4 (s1: s1.h5: features are not finite; s40: has no label" in said
    for line, *what in (("s2,a", "line 44", "slide s2 has a row already"), ("s41,A", "labels A, a differ")):
        labels.write_text("slide,label\n" + "\n".join([*named, "s40,", "z.svs,a", line]))
        refused(lambda: read_table(folder, labels), "labels.csv", *what)
    labels.write_text("slide,label\ns1,a\n")
    refused(lambda: read_table(folder, labels), "none of its slides", "s1.h5: features are not finite")
    labels.write_text("slide,label\ns2,a\ns3,b\n")
    with h5py.File(folder / "features_uni" / "s2.h5", "a") as file:
        del file["features"]
        file["features"] = np.zeros((2, 3), np.float32)
    refused(lambda: read_table(folder, labels), "not equally wide")
    (tmp_path / "t.csv").write_text("label,f\nCarcinoma,1\ncarcinoma,2\nhealthy,3\n")
    refused(lambda: read_table(tmp_path / "t.csv"), "t.csv: labels Carcinoma, carcinoma differ in case only")


def test_a_store_gives_a_row_for_each_patch_that_has_a_label_of_its_own_and_else_for_each_slide(tmp_path):
    x, y, patient = table(12)
    bags = [Bag(x[:8], np.zeros((8, 2), np.int64)), Bag(x[8:], np.zeros((4, 2), np.int64))]
    slide = np.repeat(["a", "b"], [8, 4])
    places, split = np.zeros((12, 2), np.int64), np.full(12, "train")
    patches = PatchTable(places, y, y.astype(np.float32), slide, patient, split)
    slides = replace(bags_of(patches)[0], label=np.array([0, 1]))
    meta = BagMeta("S1", ("a", "b"), "e", GridSpec(8, 1.0, 8))
    for own in (patches, None):
        write_bags(tmp_path / "s.h5", meta, slides, bags, patches=own)
        found = read_table(tmp_path / "s.h5")
        if own:
            assert np.array_equal(found.x, x) and np.array_equal(found.y, y)
            assert list(found.patient) == list(patient)
        else:
            assert np.allclose(found.x, [x[:8].mean(0), x[8:].mean(0)]) and list(found.y) == [0, 1]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ({"cells": [Cell(4, 500, "alike")]}, "too few patients"),
        ({"methods": ["mpcpa"]}, "needs more than features"),
        ({"methods": ["nosuch"]}, "unknown method"),
        ({"unit": "slide"}, "--unit"),
        ({"methods": ["regular"]}, "regular: hospitals share nothing in it"),
    ],
)
def test_what_does_not_go_is_refused_in_one_line(npz, tmp_path, ask, words):
    asked = {"cells": cells_of("2x8", "alike"), "out": tmp_path / "b.csv", **ask}
    refused(lambda: bench(npz, **asked), words)
    assert not (tmp_path / "b.csv").exists()


LINE = "oneshot,1,2,8,alike,0,S{},0.5,0.5,0.5,1,0.001,1.0,guaranteed,0.1"
X, Y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.array([["a", "b"]] * 4), "y": Y}, "which is no number"),
        ({"x": X.astype("M8[s]"), "y": Y}, "which is no number"),
        ({"x": X, "y": Y, "patient": np.full((4, 2), "p")}, "patient [4, 2]; wanted"),
        ({"x": X, "y": np.array(1)}, "y []"),
        ({"x": X[0], "y": Y[:3]}, "x is [3]"),
        ({"x": X, "labels": Y}, "no array y"),
        ({"y": Y}, "no array x"),
    ],
)
def test_arrays_of_another_form_are_refused_by_what_they_are(tmp_path, arrays, words):
    np.savez(tmp_path / "t.npz", **arrays)
    refused(lambda: read_table(tmp_path / "t.npz"), "t.npz", words)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY", pickle.dumps([1]), b"x,y\n1,2\n"])
def test_what_is_no_archive_of_arrays_is_refused(tmp_path, content):
    (tmp_path / "t.npz").write_bytes(content)
    refused(lambda: read_table(tmp_path / "t.npz"), "not a file of NumPy with x and y")
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:  # a member that is no array
        archive.writestr("x.npy", content)
    refused(lambda: read_table(tmp_path / "t.npz"), "t.npz")


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (lambda lines: ["a,b", *lines[1:]], "has other columns"),
        (lambda _: [], "has other columns"),
        (lambda lines: [*lines[:-1], lines[-1].replace("S2", "S2,7")], "line 17 is damaged"),
        (lambda lines: [lines[0], lines[1].replace(",S1,", ",S1,x")], "line 2 is damaged"),
        (lambda lines: [*lines, '"'], "line 18 is damaged"),
        (lambda lines: [*lines[:2], "\0", *lines[2:]], "line 3 is damaged"),
    ],
)
def test_bench_goes_on_from_its_own_lines_alone(npz, tmp_path, hurt, words):
    out = tmp_path / "b.csv"
    ask = {"cells": cells_of("2x8", "alike"), "out": out, "methods": ["oneshot"], "seeds": 1}
    out.write_text(
        "\n".join([",".join(module._COLUMNS), *[LINE.format(1 + k % 2) for k in range(16)]]) + "\n"
    )
    out.write_text("\n".join(hurt(out.read_text().splitlines())) + "\n")
    refused(lambda: bench(npz, **ask), words, "choose another --out")


@pytest.mark.parametrize("there", [["S1"], ["S1", "S1"], ["S1", "S2", "S2"], ["S1", "S3"]])
def test_a_training_that_lacks_a_hospital_or_has_one_twice_is_made_anew(npz, tmp_path, there):
    out, said = tmp_path / "b.csv", []
    header = ",".join(module._COLUMNS)
    out.write_text("\n".join([header, *[LINE.format(site[1:]) for site in there]]) + "\n")
    told = SimpleNamespace(say=said.append)
    assert module._still_good(out, {}, ["oneshot"], told) == {}
    assert "1 trainings lack lines, or have some twice" in said[0]
    out.write_text("\n".join([header, LINE.format(2), LINE.format(1)]) + "\n")
    (rows,) = module._still_good(out, {}, ["oneshot"], told).values()
    assert [row["site"] for row in rows] == ["S2", "S1"]


def test_cells_that_mean_nothing_are_refused():
    for sizes, skew in (("4", "alike"), ("1x50", "alike"), ("4x50", "2"), ("4x50", "some")):
        refused(lambda sizes=sizes, skew=skew: cells_of(sizes, skew), "--")


PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")


def forget_plugins():
    for known in (plugins._found, plugins._loaded):
        known.cache_clear()


def test_the_method_of_the_page_stands_in_the_same_table(npz, tmp_path, monkeypatch):
    toml, python = (re.search(rf"```{kind}\n(.+?)```", PAGE, re.DOTALL)[1] for kind in ("toml", "python"))
    groups = tomllib.loads(toml)["project"]["entry-points"]
    monkeypatch.setattr(module, "_WAYS", ((2, 1e-2),))
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site", name="careful", groups=groups, text=python)))
    asked = {"methods": ["careful", "oneshot"], "cells": cells_of("2x8", "1"), "seeds": 1}
    try:
        forget_plugins()
        document = bench(npz, out=tmp_path / "b.csv", **asked)
    finally:
        monkeypatch.undo()
        sys.modules.pop("careful", None)
        forget_plugins()
    assert [one["method"] for one in document["cells"]] == ["careful", "oneshot"]
    rows = csv_rows(tmp_path / "b.csv")
    mine = [row for row in rows if row["method"] == "careful" and row["seed"] == "0"]
    assert mine and all(0 < float(row["spent"]) <= 1 and row["guarantee"] == "guaranteed" for row in mine)
    assert len([line for line in python.splitlines() if line.strip()]) <= 60
