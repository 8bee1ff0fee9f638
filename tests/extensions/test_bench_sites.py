"""Tests of `wsi-fl bench --hospitals site`: the hospitals of a table, with intervals for each."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import refused
from training_runs import csv_rows

from wsi_fl.evidence import bench as module
from wsi_fl.evidence.bench import parse_cells, run_benchmark, sample_sites
from wsi_fl.evidence.bench_page import render_bench_lines
from wsi_fl.evidence.bench_sites import average_patients
from wsi_fl.evidence.feature_table import read_table
from wsi_fl.stages.prepare.init_features import ArchiveTables
from wsi_fl.stages.prepare.init_study import init_study

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from tcga_map import write_federation

CELLS = parse_cells("site", "alike")
MSI = "MSI_SCORE_MANTIS"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A study of three institutions of 10 to 50 patients; return the folder of features and the table of labels."""
    folder = write_federation(tmp_path_factory.mktemp("tcga"), (10, 50, 24), n_patches=4, width=12)
    clinical = [folder / f"data_clinical_{name}.txt" for name in ("patient", "sample")]
    tables = ArchiveTables(clinical=clinical, targets=(f"{MSI}:0.4:0.6", "survival"), min_patients=5)
    init_study(folder / "study", archive=folder / "TCGA", tables=tables)
    return folder / "TCGA", folder / "study" / "labels.csv"


def compare(federation, out, target=MSI, methods=("oneshot", "fedavg"), **options):
    features, labels = federation
    asked = {"labels": labels, "target": target, "methods": methods, "cells": CELLS, "out": out} | options
    return run_benchmark(features, **({"seeds": 2} | asked))


@pytest.fixture(autouse=True)
def _few_settings(monkeypatch):
    monkeypatch.setattr(module, "_HYPERPARAMETERS", ((1, 1e-1), (2, 1e-1)))


@pytest.mark.parametrize(("target", "score"), [(MSI, "balanced accuracy"), ("survival", "concordance")])
def test_every_hospital_has_an_interval_around_the_score_of_the_table(federation, tmp_path, target, score):
    document = compare(federation, tmp_path / "map.csv", target)
    assert document["score"] == score and document["unit"] == "patient"
    rows = [row for row in csv_rows(tmp_path / "map.csv") if row["seed"] != "-1"]
    names = {"tcga-a6": 8, "tcga-ad": 19, "tcga-indivumed": 40}
    for test_set, tested in (
        ("own", {"tcga-a6": 2, "tcga-ad": 5, "tcga-indivumed": 10}),
        ("merged", dict.fromkeys(names, 17)),
    ):
        hospitals = {row["site"]: [] for row in document["hospitals"] if row["test"] == test_set}
        for row in document["hospitals"]:
            hospitals.get(row["site"], []).extend([row] if row["test"] == test_set else [])
        if target == MSI or test_set == "merged":  # two patients may have no comparable times
            assert {name: one["patients"] for name, (one, _) in hospitals.items()} == names
            assert {name: one["tested"] for name, (one, _) in hospitals.items()} == tested
    for name, both in hospitals.items():
        for method, estimate in (
            ("regular", both[0]["local"]),
            ("joint", both[0]["pooled"]),
            *((one["method"], one["federated"]) for one in both),
        ):
            scores = [float(line["score"]) for line in rows if line["site"] == name and line["method"] == method]
            assert len(scores) == 2 and estimate["mean"] == pytest.approx(np.mean(scores), abs=2e-5)
            assert estimate["low"] < estimate["mean"] < estimate["high"] and estimate["n_patients"] == 17
        assert [one["method"] for one in both] == ["oneshot", "fedavg"]
        for one in both:
            difference = one["federated"]["mean"] - one["local"]["mean"]
            assert one["gain"]["mean"] == pytest.approx(difference, abs=1e-9)
    page = Path(document["page"]).read_text()
    assert all(f'<th scope="row">{name}</th>' in page for name in names)
    table = next(iter(render_bench_lines(document)))
    assert [row[0] for row in table.rows] == ["tcga-indivumed", "tcga-ad", "tcga-a6"]  # the largest first


def test_no_hospital_exceeds_its_budget_and_large_ones_have_larger_batches(federation, tmp_path, monkeypatch):
    asked = []
    federate = module.federate
    monkeypatch.setattr(module, "federate", lambda *a, **options: asked.append(options) or federate(*a, **options))
    compare(federation, tmp_path / "map.csv", seeds=1)
    rows = [row for row in csv_rows(tmp_path / "map.csv") if row["method"] in ("oneshot", "fedavg")]
    assert all(0.5 < float(row["spent"]) <= 1.0 and row["guarantee"] == "guaranteed" for row in rows)
    sizes = [options["batch_size"] for options in asked if options["rounds"] == 1 and options["lr"] == 0.1]
    assert sizes[0]["tcga-indivumed"] > sizes[0]["tcga-ad"] > sizes[0]["tcga-a6"]


def test_a_patient_is_one_row_and_is_never_trained_on_and_tested(federation):
    features, labels = federation
    table = read_table(features, labels, MSI)
    slides, table = table.rows, table._replace(rows=average_patients(table.rows))
    assert len(table.rows) == len(set(table.rows.patient)) == 84
    patient = "TCGA-A6-0000"  # of two slides
    mine = slides.read(np.flatnonzero(slides.patient == patient))
    assert len(mine) == 2
    row = table.rows.read(np.flatnonzero(table.rows.patient == patient))[0]
    np.testing.assert_allclose(row, mine.mean(0), rtol=1e-6)
    for seed in (0, -1):
        parts, test = sample_sites(table, CELLS[0], seed)
        sets = [set(part.patient) for part in (*parts, test)]
        assert sum(map(len, sets)) == len(set().union(*sets)) == (84 if seed == 0 else 67)
    tested = set(sample_sites(table, CELLS[0], 0)[1].patient)
    assert not tested & set().union(*({*part.patient} for part in (*parts, test)))  # settings are chosen without them


def test_patients_of_a_site_without_training_are_external(federation, tmp_path):
    features, labels = federation
    text = labels.read_text().replace("tcga-ad,TCGA", "cptac,TCGA")
    lines = [line.replace(",train,", ",test,") if line.startswith("cptac") else line for line in text.splitlines()]
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    document = compare((features, tmp_path / "labels.csv"), tmp_path / "map.csv", methods=["oneshot"])
    tested = {row["test"]: row["tested"] for row in document["hospitals"] if row["site"] == "tcga-a6"}
    assert tested == {"own": 2, "merged": 12, "external": 24}
    assert {row["site"] for row in document["hospitals"]} == {"tcga-a6", "tcga-indivumed"}
    assert "external patients" in next(iter(render_bench_lines(document))).title


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("site,", "where,"), ("--labels has no column site", "`wsi-fl init`")),
        (("split", "part"), ("no column split",)),
        (("TCGA-A6-0001,train", "NA,train"), ("must name the patient",)),
        (("TCGA-A6-0000,", "TCGA-AD-0001,"), ("at two sites, or in two splits",)),
        (("train", "test"), ("fewer than two sites",)),
        ((",below 0.4", ",over 0.6"), ("needs two classes", "--target NAME")),
    ],
)
def test_unfit_tables_are_refused_in_one_line(federation, tmp_path, change, words):
    text = federation[1].read_text()
    assert change[0] in text
    (tmp_path / "labels.csv").write_text(text.replace(*change))
    refused(lambda: compare((federation[0], tmp_path / "labels.csv"), tmp_path / "m.csv"), *words)
    assert not (tmp_path / "m.csv").exists()


def test_options_of_a_tables_hospitals_are_refused_elsewhere(federation, tmp_path):
    cells = parse_cells("2x8", "alike")
    refused(lambda: compare(federation, tmp_path / "m.csv", "survival", cells=cells), "--hospitals site")
    refused(lambda: compare(federation, tmp_path / "m.csv", "NOTHING"), "column 'NOTHING' is missing")
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    table = (tmp_path / "t.npz", federation[1])
    refused(lambda: compare(table, tmp_path / "m.csv", cells=cells), "--target", "for a folder of features")
    refused(lambda: compare(table, tmp_path / "m.csv", None), "--hospitals site: needs a folder", "t.npz is one file")
