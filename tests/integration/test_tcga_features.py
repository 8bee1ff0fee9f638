"""Tests of `wsi-fl init` from public features of TCGA: institutions, targets, splits, and the import of a site."""

from __future__ import annotations

import csv
import re
import sys
from functools import partial
from pathlib import Path

import conftest
import pytest

from wsi_fl.slides.layouts.tcga import name_site
from wsi_fl.slides.layouts.tcga_targets import list_institutions, read_clinical, read_target
from wsi_fl.stages.prepare.import_export import import_features
from wsi_fl.stages.prepare.init_features import ArchiveTables
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from tcga_map import write_federation

refused = partial(conftest.refused, error=WsiFlError)
MSI = "MSI_SCORE_MANTIS:0.4:0.6"
PATIENTS = (8, 12, 5)
"""Of A6, of Indivumed (AA), and of AD; no table names the institutions of A6 and AD."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return write_federation(tmp_path_factory.mktemp("tcga"), PATIENTS, n_patches=4, width=16)


def make_study(archive, folder, *targets, tables=("patient", "sample"), **options):
    clinical = [archive / f"data_clinical_{name}.txt" for name in tables]
    options = {"min_patients": 5, "targets": targets or (MSI, "survival", "SUBTYPE"), "clinical": clinical} | options
    return init_study(folder, archive=archive / "TCGA", layout="tcga", tables=ArchiveTables(**options))


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path, *lines):
    path.write_text("\n".join("\t".join(line) for line in lines) + "\n")
    return path


def test_each_institution_is_a_site_with_labels_and_patient_wise_splits(archive, tmp_path):
    document = make_study(archive, tmp_path / "study")
    sites = {row["site"]: (row["patients"], row["slides"]) for row in document["sites"]}
    assert sites == {"tcga-a6": (8, 9), "tcga-ad": (5, 6), "tcga-indivumed": (12, 14)}  # each tenth has two slides
    assert document["pipelines"] == ["msi_score_mantis", "survival", "subtype"]
    rows = read_csv(tmp_path / "study" / "labels.csv")
    assert all(
        "-DX" in row["slide"] and "-11A-" not in row["slide"] for row in rows
    )  # frozen and healthy ones are there
    assert {row["MSI_SCORE_MANTIS"] for row in rows} == {"below 0.4", "over 0.6"}
    splits = {}
    for row in rows:
        assert splits.setdefault(row["patient"], row["split"]) == row["split"]
        assert row["slide"].startswith(row["patient"]) and float(row["months"]) >= 0 and row["dead"] in "01"
    by_site = [[splits[p] for p in {r["patient"] for r in rows if r["site"] == site}] for site in sites]
    assert [part.count("test") for part in by_site] == [2, 1, 2]
    target = Study(tmp_path / "study").load_pipeline("survival").target
    assert (target.time, target.event, target.intervals) == ("months", "dead", [12, 24, 36, 60])


def test_small_institutions_and_patients_without_a_target_are_left_out_and_told(archive, tmp_path):
    lines = (archive / "data_clinical_sample.txt").read_text().splitlines()
    (tmp_path / "some.txt").write_text("\n".join(line for line in lines if "TCGA-A6-0003" not in line))
    document = make_study(archive, tmp_path / "study", MSI, clinical=[tmp_path / "some.txt"], min_patients=7)
    assert [(row["site"], row["patients"]) for row in document["sites"]] == [("tcga-a6", 7), ("tcga-indivumed", 12)]
    assert document["notes"][1:] == [
        "slides left out, as --clinical has no target of their patient or several: 1",
        "institutions with fewer than 7 patients, left out: 1 with 5 patients (tcga-ad)",
    ]
    refused(lambda: make_study(archive, tmp_path / "other", min_patients=9), "1 of 3 institutions", "--min-patients")


def test_a_site_is_imported_and_trained_on_a_target_of_its_table(archive, tmp_path):
    make_study(archive, tmp_path / "study")
    study = Study(tmp_path / "study")
    for site in ("tcga-a6", "tcga-indivumed"):
        asked = {"source": archive / "TCGA", "labels": study.root / "labels.csv", "pipeline_name": "survival"}
        (row,) = import_features(study, site=site, form="trident", **asked)["sites"]
        assert row["bags"] == {"tcga-a6": 9, "tcga-indivumed": 14}[site]
        assert {one["slide"][:15] for one in row["failed"]} == {"TCGA-A6-0000-01", "TCGA-A6-0000-11"}  # not of others
    keys = ['sites=["tcga-a6","tcga-indivumed"]', "train.rounds=1", "privacy.enabled=false"]
    summary = train(study, method="oneshot", pipeline_name="survival", overrides=keys, backend="local")
    assert [row["site"] for row in summary["sites"]] == ["tcga-a6", "tcga-indivumed"]


def test_the_sites_that_the_page_imports_have_the_names_that_init_gives():
    page = (Path(__file__).parents[2] / "docs/how-to/map-tcga.md").read_text("utf-8")
    (names,) = re.findall(r"for site in (.+?);", page)
    assert names.split() == [name_site(name) for name in ("Christiana Healthcare", "Indivumed")]
    assert all(page.count(name) == 2 for name in names.split())


def test_targets_come_from_tables_of_the_gdc_and_of_cbioportal(tmp_path):
    remarks = [
        ["#Patient Identifier", "MSI"],
        ["#Identifier to uniquely specify a patient.", "m"],
        ["#STRING", "NUMBER"],
    ]
    sample = write(
        tmp_path / "data_clinical_sample.txt",
        *remarks,
        ("PATIENT_ID", "SAMPLE_ID", "MSI_SCORE_MANTIS", "TISSUE_SOURCE_SITE_CODE", "TISSUE_SOURCE_SITE"),
        ("TCGA-A6-2671", "TCGA-A6-2671-01", "0.61", "A6", "Christiana Healthcare"),
        ("TCGA-A6-2672", "TCGA-A6-2672-01", "0.5", "A6", "Christiana Healthcare"),
        ("TCGA-A6-2674", "TCGA-A6-2674-01", "0.2", "A6", "Christiana Healthcare"),
        ("TCGA-A6-2675", "TCGA-A6-2675-01", "NA", "A6", "Christiana Healthcare"),
        ("TCGA-A6-2676", "TCGA-A6-2676-01", "0.3", "A6", "Christiana Healthcare"),
        ("TCGA-A6-2676", "TCGA-A6-2676-06", "0.9", "A6", "Christiana Healthcare"),
    )
    rows = read_clinical([sample])
    columns, values = read_target(rows, MSI)
    assert values == {"TCGA-A6-2671": ("over 0.6",), "TCGA-A6-2674": ("below 0.4",)}
    assert columns == ("MSI_SCORE_MANTIS",)
    assert list_institutions(rows) == {"A6": "Christiana Healthcare"}
    case = "5c2fc6a4-0000-4000-8000-000000000000"  # case_id is no barcode
    old = write(
        tmp_path / "old.tsv",
        ("case_id", "case_submitter_id", "project_id", "vital_status", "days_to_death", "days_to_last_follow_up"),
        (case, "TCGA-A6-2671", "TCGA-COAD", "Dead", "730.5", "'--"),
        (case, "TCGA-A6-2672", "TCGA-READ", "Alive", "'--", "365.25"),
        (case, "TCGA-A6-2672", "TCGA-READ", "Alive", "'--", "1461"),
        (case, "TCGA-A6-2674", "TCGA-READ", "Not Reported", "'--", "5"),
        (case, "TCGA-A6-2675", "TCGA-READ", "Alive", "'--", "-3"),
    )
    assert read_target(read_clinical([old]), "project_id")[1]["TCGA-A6-2671"] == ("TCGA-COAD",)
    months = {"TCGA-A6-2671": ("24", "1"), "TCGA-A6-2672": ("48", "0")}
    assert read_target(read_clinical([old]), "survival")[1] == months
    new = write(
        tmp_path / "new.tsv",
        (
            "cases.submitter_id",
            "demographic.vital_status",
            "demographic.days_to_death",
            "diagnoses.days_to_last_follow_up",
        ),
        ("TCGA-A6-2671", "Dead", "730.5", "9"),
        ("TCGA-A6-2672", "Alive", "'--", "1461"),
    )
    assert read_target(read_clinical([new]), "survival")[1] == months
    portal = write(
        tmp_path / "portal.txt",
        ("PATIENT_ID", "OS_STATUS", "OS_MONTHS"),
        ("TCGA-A6-2671", "1:DECEASED", "24"),
        ("TCGA-A6-2672", "0:LIVING", "48"),
    )
    assert read_target(read_clinical([portal]), "survival")[1] == months


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": ()}, ("has features", "--clinical FILE", "--target COLUMN")),
        ({"targets": ("NOTHING",)}, ("--target NOTHING", "they have", "SUBTYPE")),
        ({"targets": ("SUBTYPE:1:2",)}, ("SUBTYPE = ", "is no number")),
        ({"targets": ("MSI_SCORE_MANTIS:0.4",)}, ("COLUMN:LOW:HIGH",)),
        ({"targets": ("CANCER_TYPE",)}, ("needs two classes", "Cancer")),
        ({"targets": ("survival",), "tables": ("sample",)}, ("times and a status", "OS_MONTHS", "days_to_death")),
        ({"targets": (MSI,), "group_by": "hospital"}, ("unknown grouping 'hospital'",)),
        ({"targets": (MSI,), "columns": ("patient=x",)}, ("--column",)),
    ],
)
def test_invalid_targets_are_refused_in_one_line(archive, tmp_path, options, words):
    refused(lambda: make_study(archive, tmp_path / "study", **{"targets": ()} | options), *words)
    assert not (tmp_path / "study").exists()


def test_options_of_features_are_refused_for_slides(tmp_path):
    (tmp_path / "slides.csv").write_text("slide,patient,site,label\n")
    tables = ArchiveTables(targets=("survival",))
    refused(lambda: init_study(tmp_path / "s", archive=tmp_path, tables=tables), "--target", "are for features")
