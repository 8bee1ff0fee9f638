"""Benchmark of a table's own hospitals, each tested on its own patients, on those of all, and on external ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.tasks import PredictionArray
from wsi_fl.evidence.benefit import build_score_table, estimate_benefit
from wsi_fl.federation.methods import LOCAL_METHOD, POOLED_METHOD
from wsi_fl.report.formatting import Json
from wsi_fl.types import UsageError, natural_key

EXTERNAL, MERGED, INTERNAL = "external", "merged", "own"
"""Test sets: patients of sites that train nothing, of all hospitals, and a hospital's own."""
_TUNING_SHARE = 0.2
_PLACES = ["site", "split"]
ExampleScores = Mapping[str, pd.DataFrame]
"""Test set → value and weight of each patient."""


def average_patients(rows: Cohort) -> Cohort:
    """Return a row for each patient, in memory: the mean of the slides.

    Raises:
        UsageError: without the columns site and split, or the patient of a row; for a patient in two splits; for fewer
            than two hospitals.
    """
    if missing := [name for name in _PLACES if name not in rows.obs]:
        raise UsageError(f"--hospitals site: --labels has no column {missing[0]}, as the table of `wsi-fl init` has")
    if (rows.patient == "").any():
        raise UsageError("--hospitals site: --labels must name the patient of every slide")
    if (rows.obs.groupby("patient")[_PLACES].nunique() > 1).any(axis=None):
        raise UsageError("--hospitals site: a patient of --labels is at two sites, or in two splits")
    means, first = rows.group("patient", means=True), rows.obs.drop_duplicates("patient")
    x, places = means.read(np.arange(len(means))), {name: first[name].to_numpy() for name in _PLACES}
    if len(np.unique(places["site"][places["split"] != "test"])) < 2:
        raise UsageError("--hospitals site: --labels has training patients of fewer than two sites")
    return replace(means, read=x.__getitem__).assign_columns(**places)


def split_hospitals(rows: Cohort, *, is_tuning: bool) -> tuple[list[Cohort], Cohort]:
    """Return the training patients of each hospital, and the test patients of all.

    Args:
        is_tuning: whether a fifth of the training patients is tested instead, for the choice of settings.
    """
    is_test = np.asarray(rows.obs["split"] == "test")
    if is_tuning:
        rows = rows[~is_test]
        is_test = np.random.default_rng(0).random(len(rows)) < _TUNING_SHARE
        is_test[rows.obs.drop_duplicates("site").index] = False  # every hospital trains
    site = rows.obs["site"].to_numpy()
    names = sorted(set(site[~is_test]), key=natural_key)
    return [rows[(site == name) & ~is_test] for name in names], rows[is_test]


def score_examples(predictions: PredictionArray, test: Cohort, site: str, hospitals: Sequence[str]) -> ExampleScores:
    """Return the contribution of each test patient to the score, by test set; classes have equal weight."""
    sites = test.obs["site"].to_numpy()
    masks: dict[str, NDArray[np.bool_]] = {EXTERNAL: ~np.isin(sites, hospitals), INTERNAL: sites == site}
    scores = {}
    for name, mask in (masks | {MERGED: ~masks[EXTERNAL]}).items():
        label = test.label[mask]
        values = test.task.example_scores(predictions[mask], label) if mask.any() else None
        if values is not None:
            counts = np.bincount(label)[label] if label.ndim == 1 else np.ones(len(label))
            patients = "\n" + pd.Index(test.patient[mask])  # a patient is at one site
            scores[name] = pd.DataFrame({"value": values, "weight": 1 / counts}, patients)
    return scores


def estimate_hospitals(results: pd.DataFrame, n_patients: Mapping[str, int], score: str) -> list[Json]:
    """Return the benefit of each method for each hospital, by test set, with intervals over test patients and seeds.

    Args:
        results: a row for each method, ε, seed and hospital, with the scores of test patients in `examples`.
        n_patients: training patients by hospital.
        score: name of the score.
    """
    documents = list[Json]()
    for (site, n), test_set in ((pair, name) for name in (EXTERNAL, MERGED, INTERNAL) for pair in n_patients.items()):
        at_site = results[results["site"] == site]
        tables = {
            key: build_score_table(
                {
                    int(seed): examples[test_set]
                    for seed, examples in zip(group["seed"], group["examples"], strict=True)
                },
                score,
                {},
            )
            for key, group in at_site.groupby(["method", "epsilon"], sort=False)
            if all(test_set in examples for examples in group["examples"])
        }
        local, pooled = (tables.pop((method, 0.0), None) for method in (LOCAL_METHOD, POOLED_METHOD))
        if local is None or pooled is None:  # too few patients for a score
            continue
        for (method, epsilon), table in tables.items():
            row = {"test": test_set, "site": site, "method": method, "epsilon": epsilon, "patients": n}
            benefit = estimate_benefit({"local": local, "pooled": pooled, "federated": table})
            documents.append(row | {"tested": len(table.values)} | benefit)
    return documents
