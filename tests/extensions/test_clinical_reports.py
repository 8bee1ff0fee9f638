"""Tests of `clinical` by patient and by group: document, console and report."""

import html
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import make_study, refused, write_features
from sklearn.metrics import recall_score, roc_auc_score
from test_local_baseline import ALONE, HEADS
from training_runs import csv_rows, trained

from wsi_fl.data.prediction_table import PredictionTable
from wsi_fl.data.tasks import CLASSES
from wsi_fl.evidence import clinical
from wsi_fl.evidence.clinical import describe_clinically, render_clinical_lines
from wsi_fl.evidence.clinical_section import _decision_curves
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.site.target_labels import read_column
from wsi_fl.stages.training.train import train_series
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

ONE_OF_MORE = "The predicted class is the most probable one"


@pytest.fixture(scope="module")
def clinical_study(tmp_path_factory):
    """(study, run): two hospitals of 40 + 30 patients with two patches each and a table of scanners."""
    study = make_study(tmp_path_factory.mktemp("clinical") / "study", n_sites=2)
    rng = np.random.default_rng(5)
    for k in range(2):
        labels = rng.integers(0, 2, 70).repeat(2)
        x = rng.normal(size=(140, 24)) + 0.8 * np.outer(labels, np.arange(24) < 4)
        patients = [f"h{k}p{i // 2}" for i in range(140)]
        write_features(study, f"S{k}", x, labels, patients, ["train"] * 80 + ["test"] * 60)
        rows = [f"h{k}p{i},{'old' if i < 66 else 'new'}" for i in range(40, 70)]
        table = study.root / f"S{k}.csv"
        table.write_text("patient,scanner,shelf\n" + "\n".join(f"{row}," for row in rows))
        site = study.root / "sites" / f"S{k}.toml"
        site.write_text(f'{site.read_text()}clinical = "{table}"\n')
    run = trained(study, "regular", *ALONE)["run"]
    evaluate(study, run)
    return study, run


def read_scores(study, run, site, model=None):
    """Return truth and score of each patient from predictions.csv, by a model or the selected one."""
    found = {}
    rows = csv_rows(study.root / run / "sites" / site / "predictions.csv")
    for row in (row for row in rows if (row["model"] == model if model else row["selected"] == "True")):
        found.setdefault(row["patient"], []).append((row["truth"] == "tumor", float(row["p_tumor"])))
    return np.array([np.mean(values, axis=0) for values in found.values()]).T


def test_patients_are_counted_and_not_their_patches(clinical_study):
    study, run = clinical_study
    document = describe_clinically(study, [run], prevalence=0.1)
    kept = json.loads((study.root / run / "clinical.json").read_text())
    assert kept.pop("digest") and kept == document
    for row in document["sites"]:
        one, (truth, score) = row["classes"]["tumor"], read_scores(study, run, row["site"])
        assert (row["on"], row["unit"], one["n"], one["cases"]) == ("merged", "patient", 60, truth.sum())
        assert one["auroc"]["value"] == pytest.approx(roc_auc_score(truth, score))
        sensitivity, specificity = (recall_score(truth, score >= 0.5, pos_label=label) for label in (1, 0))
        assert one["sensitivity"]["value"] == pytest.approx(sensitivity)
        ppv = 0.1 * sensitivity / (0.1 * sensitivity + 0.9 * (1 - specificity))
        assert one["at_prevalence"]["ppv"]["value"] == pytest.approx(ppv)


def test_the_gain_over_the_local_model_is_of_patients(clinical_study, tmp_path):
    study = Study(shutil.copytree(clinical_study[0].root, tmp_path / "study"))
    overrides = [*HEADS, "privacy.enabled=false", "train.local_baseline=true", "predict.model=private"]
    run = trained(study, "fedavg", *overrides)["run"]
    evaluate(study, run)
    for row in describe_clinically(study, [run])["sites"]:
        truth, score = read_scores(study, run, row["site"])
        _, local_score = read_scores(study, run, row["site"], model="local")
        gain = row["classes"]["tumor"]["over_local"]
        assert gain["value"] == pytest.approx(roc_auc_score(truth, score) - roc_auc_score(truth, local_score))
    assert "that of its local model" in html.unescape(write_report(study, run).read_text(encoding="utf-8"))


def test_small_groups_are_not_reported(clinical_study, wsi_fl):
    study, run = clinical_study
    document = describe_clinically(study, [run], by="scanner", least=10)
    groups = document["sites"][0]["classes"]["tumor"]["subgroups"]
    assert groups["old"]["n"] == 52 and groups["new"] is None
    done = wsi_fl("clinical", run, "--by", "scanner", cwd=study.root)
    assert "scanner new: fewer than 10 patients, not reported" in done.stderr
    assert "scanner old: 52 patients" in done.stderr
    done = wsi_fl("report", run, cwd=study.root)
    page = (study.root / done.stdout.strip()).read_text(encoding="utf-8")
    for words in ("For the clinic", "of fewer than 10 patients: not reported", "Net benefit", "TRIPOD+AI"):
        assert words in page
    assert "or from 0.50" in page and ONE_OF_MORE not in page
    refused(lambda: describe_clinically(study, [run], by="shoe_size"), "shoe_size")
    refused(lambda: describe_clinically(study, [run], by="shelf"), "no table of the sites has a slide or patient")
    refused(lambda: describe_clinically(study, [run], prevalence=1.0), "a share between 0 and 1")


def test_groups_are_matched_by_patient_where_a_table_names_the_slides_too(clinical_study):
    study, run = clinical_study
    for k in range(2):  # two slides of each patient, who agree but for the last patient
        rows = [f"s{k}.{i}.{n}.svs,h{k}p{i},{'mf'[i % 2 or (i == 68 and n)]}" for i in range(40, 70) for n in (0, 1)]
        (study.root / f"S{k}.csv").write_text("\n".join(["slide,patient,sex", *rows]) + "\n")
    for row in describe_clinically(study, [run], by="sex")["sites"]:
        groups = row["classes"]["tumor"]["subgroups"]
        assert groups["f"]["n"] == 30 and groups["m"]["n"] == 28 and groups[""] is None
    (study.root / "S0.csv").write_text("slide,patient,sex\na.svs,,m\nb.svs,,m\n")  # whose, nobody knows
    said = read_column(study, study.load_site("S0"), "sex")
    assert said["slide", "a"] == said["slide", "a.svs"] == "m" and ("patient", "") not in said


def test_the_page_of_three_classes_has_no_threshold(tmp_path, monkeypatch):
    study, rng = make_study(tmp_path / "study", n_sites=1), np.random.default_rng(0)
    monkeypatch.setattr("conftest.CLASSES", ("a", "b", "c"))
    labels = np.arange(90) % 3
    x = rng.normal(size=(90, 8)) + 2 * np.eye(8)[labels]
    write_features(study, "S0", x, labels, [f"p{k}" for k in range(90)], ["train"] * 45 + ["test"] * 45)
    run = trained(study, "regular", *ALONE)["run"]
    evaluate(study, run)
    describe_clinically(study, [run])
    page = write_report(study, run).read_text(encoding="utf-8")
    assert ONE_OF_MORE in page and "or from 0.50" not in page


def test_patients_of_all_folds_are_scored_by_one_rule(monkeypatch):
    rng = np.random.default_rng(0)
    score, tumor = rng.random((12, 20)), np.zeros((12, 20), int)
    tumor[::4, :5] = 1  # none of the second fold's patients has both classes

    def read(fold, *_, model=None):
        rows = np.arange(6) * 2 + fold
        names = [f"p{k}" for k in rows.repeat(20)]
        obs = pd.DataFrame({"part": "S0", "slide": names, "patient": names, "label": tumor[rows].ravel()})
        said = np.stack([1 - score[rows].ravel(), score[rows].ravel()], 1)
        return None if model else PredictionTable("S0", "private", obs, {"private": said}, ("healthy", "tumor"))

    class Fold(int):
        def read_document(self, name):
            return None

    def context(fold):
        run = SimpleNamespace(path=None, site_folder=lambda _: Fold(fold))
        study = SimpleNamespace(relative_path=str)
        return SimpleNamespace(run=run, study=study, members=[SimpleNamespace(name="S0")], task=CLASSES)

    monkeypatch.setattr(clinical, "read_predictions", read)
    (site,) = clinical._describe_runs([context(0), context(1)])["sites"]
    highest = np.sort(score, axis=1)[:, -2:].mean(1)
    assert site["any_counts"] and site["classes"]["tumor"]["n"] == 12
    assert site["classes"]["tumor"]["auroc"]["value"] == pytest.approx(roc_auc_score(tumor.any(1), highest))


def test_every_diagnosis_has_a_decision_curve_of_the_sites_that_have_it():
    curves = {"net_benefit": {"model": [0.2, 0.1], "everybody": [0.2, 0.0]}}
    classes = {"S0": ("LUAD",), "S1": ("LUAD", "GBM")}
    sites = [{"site": name, "classes": dict.fromkeys(names, curves)} for name, names in classes.items()]
    charts = _decision_curves({"thresholds": [0.1, 0.5], "sites": sites}, {})
    alts = {title: chart.alt for title, chart in charts}
    assert {*alts} == {"Net benefit, LUAD", "Net benefit, GBM"}
    assert "S0" in alts["Net benefit, LUAD"] and "S0" not in alts["Net benefit, GBM"]


def test_lesions_are_shown_by_console_and_page(clinical_study, monkeypatch):
    study, run = clinical_study
    name = run.split("/")[-1]
    refused(
        lambda: describe_clinically(study, [run], lesions=True), f"{name} has no predicted slides", error=WsiFlError
    )
    counts = {"slides": 9, "normal_slides": 5, "lesions": 4, "isolated": 1, "left_out": {"not of this site": 2}}
    values = [0.0, 0.25, 0.25, 0.5, 0.75, 1.0]
    scores = {"site": "S0", "models": ["private"], **counts, "per_slide": values, "per_normal_slide": None}
    monkeypatch.setattr(clinical, "score_lesions", lambda contexts: [scores])
    document = describe_clinically(study, [run], lesions=True)
    assert document["lesions"] == [scores]
    table = next(line for line in render_clinical_lines(document) if "Lesions" in getattr(line, "title", ""))
    shown = ["S0", "9 (5)", "4 (1)", "per slide", "0.46", "0.00", "0.25", "0.25", "0.50", "0.75", "1.00"]
    assert [*table.rows] == [shown, [*shown[:3], "per normal slide", *["–"] * 7]]
    page = html.unescape(write_report(study, run).read_text(encoding="utf-8"))
    assert "<td>per slide</td><td>0.46</td>" in page and "S0: left out 2 not of this site." in page


def test_folds_are_reported_together(clinical_study, wsi_fl):
    study, run = clinical_study
    train_series(study, method="regular", overrides=[*ALONE, "train.folds=3"], backend="local")
    runs = sorted(path.name for path in study.runs_path.iterdir())[-3:]
    for name in runs:
        evaluate(study, name)
    document = describe_clinically(study, ["2-4"])
    for row in document["sites"]:
        one = row["classes"]["tumor"]
        parts = [read_scores(study, f"runs/{name}", row["site"]) for name in runs]
        truth, score = (np.concatenate(column) for column in zip(*parts, strict=True))
        assert (one["n"], document["folds"]) == (140, 3)  # each patient of both hospitals once
        assert one["auroc"]["value"] == pytest.approx(roc_auc_score(truth, score))
    done = wsi_fl("clinical", "2-4", cwd=study.root)
    assert "of 3 folds" in done.stderr and not (study.runs_path / runs[0] / "clinical.json").exists()
    refused(lambda: describe_clinically(study, [run, "2"]), "folds")
