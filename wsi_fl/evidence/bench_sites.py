"""Benchmark of a table's own hospitals: each is tested on its own, on all hospitals' and on external patients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.tasks import PredictionArray
from wsi_fl.evidence.feature_table import FeatureTable
from wsi_fl.evidence.verdict import Estimate, decide_verdict, estimate_mean
from wsi_fl.federation.methods import LOCAL_METHOD, POOLED_METHOD
from wsi_fl.report.formatting import Json
from wsi_fl.types import UsageError, natural_key

OWN, ALL, EXTERNAL = "own", "all", "external"
"""Test sets: a hospital's own patients, those of all hospitals, and those of another table."""
_TUNING_SHARE = 0.2
_ExampleScores = Mapping[str, NDArray[np.float64]]


def merge_external(table: FeatureTable, external: FeatureTable | None) -> FeatureTable:
    """Return the table with a row for each patient, the mean of the slides, and with the external patients.

    External rows of a class that the table lacks are dropped.

    Raises:
        UsageError: without the columns site and split, or the patient of a row; for patients in two splits.
    """
    rows = table.rows
    if missing := {"site", "split"} - {*rows.obs}:
        raise UsageError(f"--hospitals site: --labels has no column {min(missing)}, as the table of `wsi-fl init` has")
    if (rows.patient == "").any():
        raise UsageError("--hospitals site: --labels must name the patient of every slide")
    if (rows.obs.groupby("patient")[["site", "split"]].nunique() > 1).any(axis=None):
        raise UsageError("--hospitals site: a patient of --labels is at two sites, or in two splits")
    parts = [_average_patients(rows)]
    if external is not None:
        places = {name: place for place, name in enumerate(table.classes)}
        cohort = external.rows
        if table.classes:
            classes = np.array([places.get(name, -1) for name in external.classes])[cohort.label]
            cohort = cohort.set_truth(classes, cohort.task)[classes >= 0]
        if not len(cohort):
            raise UsageError(f"--external: has no patient of the classes {', '.join(table.classes)}")
        parts.append(_average_patients(cohort.assign_columns(site=EXTERNAL, split=EXTERNAL)))
    return table._replace(rows=concatenate_examples(parts))


def _average_patients(rows: Cohort) -> Cohort:
    """Return a row for each patient, in memory: the mean of the slides."""
    means, first = rows.group("patient", means=True), rows.obs.drop_duplicates("patient")
    x = means.read(np.arange(len(means)))
    return replace(means, read=x.__getitem__).assign_columns(**{name: first[name].to_numpy() for name in _PLACES})


_PLACES = ("site", "split")


def list_hospitals(rows: Cohort) -> list[str]:
    """Return the hospitals with training patients, in order; UsageError for fewer than two."""
    names = sorted(set(rows.obs.loc[~_is_test(rows), "site"]), key=natural_key)
    if len(names) < 2:
        raise UsageError("--hospitals site: --labels has training patients of fewer than two sites")
    return names


def _is_test(rows: Cohort) -> NDArray[np.bool_]:
    return np.asarray(rows.obs["split"].isin(["test", EXTERNAL]), bool)


def split_hospitals(rows: Cohort, *, is_tuning: bool) -> tuple[list[Cohort], Cohort]:
    """Return the training patients of each hospital, and the test patients of all.

    Args:
        is_tuning: whether a fifth of the training patients is tested instead, for the choice of settings.
    """
    names, is_test = list_hospitals(rows), _is_test(rows)
    if is_tuning:
        rows = rows[~is_test]
        is_test = np.random.default_rng(0).random(len(rows)) < _TUNING_SHARE
        is_test[rows.obs.drop_duplicates("site").index] = False  # every hospital trains
    site = rows.obs["site"].to_numpy()
    return [rows[(site == name) & ~is_test] for name in names], rows[is_test]


def score_examples(predictions: PredictionArray, test: Cohort, site: str) -> dict[str, NDArray[np.float64]]:
    """Return the contribution of each test patient to the score, by test set; 0 where it is not in the set."""
    scores = {}
    for name, mask in _mask_tests(test, site).items():
        values = test.task.example_scores(predictions[mask], test.label[mask]) if mask.any() else None
        if values is not None:
            scores[name] = values
    return scores


def _mask_tests(test: Cohort, site: str) -> dict[str, NDArray[np.bool_]]:
    external = (test.obs["split"] == EXTERNAL).to_numpy()
    return {OWN: (test.obs["site"] == site).to_numpy(), ALL: ~external, EXTERNAL: external}


def estimate_hospitals(
    results: pd.DataFrame, examples: Sequence[_ExampleScores], test: Cohort, n_patients: Mapping[str, int]
) -> list[Json]:
    """Return the scores of each hospital's models with intervals over test patients and seeds, by test set.

    Args:
        results: a row for each method, ε, seed and hospital.
        examples: the scores of test patients of each row, by test set.
        n_patients: training patients by hospital.
    """
    documents: list[Json] = []
    for (site, n), test_set in ((pair, name) for name in (OWN, ALL, EXTERNAL) for pair in n_patients.items()):
        mask = _mask_tests(test, site)[test_set]
        at_site = results[results["site"] == site].sort_values("seed", kind="stable")
        scores = {
            key: np.stack([examples[row][test_set] for row in group.index])
            for key, group in at_site.groupby(["method", "epsilon"], sort=False)
            if all(test_set in examples[row] for row in group.index)
        }
        if (LOCAL_METHOD, 0.0) in scores:
            document = _estimate_gains(scores, test[mask])
            documents.append({"test": test_set, "site": site, "patients": n, "tested": int(mask.sum()), **document})
    return documents


def _estimate_gains(scores: Mapping[tuple[str, float], NDArray[np.float64]], test: Cohort) -> Json:
    """Return the estimates of a hospital: the local, the pooled and each federated model, and the gain of each."""
    counts = np.ones(len(test))
    if test.task.kind == "classes":
        counts = np.bincount(test.label)[test.label].astype(float)

    def estimate(values: NDArray[np.float64], minimum: float) -> Estimate:
        weights = np.broadcast_to(1 / counts, values.shape)
        return estimate_mean(values, weights, test.patient).clip_interval(minimum, 1.0)

    local, pooled = scores[LOCAL_METHOD, 0.0], scores[POOLED_METHOD, 0.0]
    pooled_gain = estimate(pooled - local, -1.0)
    document: dict[str, Any] = {
        "local": estimate(local, 0.0).build_document(),
        "pooled": estimate(pooled, 0.0).build_document(),
    }
    document["methods"] = []
    for (method, epsilon), values in scores.items():
        if method not in (LOCAL_METHOD, POOLED_METHOD):
            gain = estimate(values - local, -1.0)
            document["methods"].append(
                {
                    "method": method,
                    "epsilon": epsilon,
                    "federated": estimate(values, 0.0).build_document(),
                    "gain": gain.build_document(),
                    "verdict": decide_verdict(gain, pooled_gain),
                }
            )
    return document
