"""The table of all models' predictions for test examples, its metrics by group, and the ensemble of many sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl.data.cohort import TRUTH_COLUMNS, Cohort, read_names, read_truth
from wsi_fl.data.metrics import (
    Labels,
    Probabilities,
    aggregate_slides,
    build_class_measure,
    choose_classes,
    compute_calibration,
    confusion_matrix,
    score_unweighted,
)
from wsi_fl.data.tasks import CLASSES, PredictionArray, Task, Truth, score_intervals, score_predictions

Names = NDArray[np.str_]
_KEYS = ("part", "slide", "patient")
_MEAN_RULES = ("mean", "weighted_mean")
_VOTING_RULES = (*_MEAN_RULES, "absolute", "relative", "weighted")
_REJECTED_CLASS = -1
"""The decision of an absolute majority vote where no class has more than half of the votes."""


@dataclass(frozen=True)
class PredictionTable:
    """Predictions of a site's models for n test examples; `table[mask]` selects.

    Attributes:
        site: of the models.
        model: the site's prediction model, one of those of `predictions`.
        obs: a row for each example: part (its site), slide, patient, label (or time and event) and further columns.
            Sites may use the same names for different slides and patients.
        predictions: predictions float64[n, k] by model.
        outputs: names of the k outputs.
    """

    site: str
    model: str
    obs: pd.DataFrame
    predictions: Mapping[str, PredictionArray]
    outputs: tuple[str, ...]
    task: Task = CLASSES

    def __len__(self) -> int:
        return len(self.obs)

    def __getitem__(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> PredictionTable:
        """Return the examples of a mask bool[n], or at rows int64[m] in this order."""
        chosen = np.arange(len(self))[np.asarray(rows)]
        predictions = {model: values[chosen] for model, values in self.predictions.items()}
        return replace(self, obs=self.obs.iloc[chosen].reset_index(drop=True), predictions=predictions)

    @property
    def patient(self) -> Names:
        """str[n]."""
        return read_names(self.obs["patient"])

    @property
    def truth(self) -> Truth:
        """The truth of each example, as the task has it."""
        return read_truth(self.obs)

    @property
    def extra_columns(self) -> list[str]:
        """The further columns."""
        return [name for name in self.obs if name not in (*_KEYS, *TRUTH_COLUMNS)]

    @property
    def model_predictions(self) -> PredictionArray:
        """The predictions float64[n, k] of the site's prediction model."""
        return self.predictions[self.model]

    @property
    def local_rows(self) -> PredictionTable:
        """The rows of this site's test part."""
        return self[self.obs["part"] == self.site]

    def group_by(self, column: str) -> dict[str, PredictionTable]:
        """Return the rows by value of a column, in order of first appearance."""
        groups = self.obs.groupby(column, sort=False, observed=True)
        return {str(name): self[rows.index] for name, rows in groups}

    def compute_scores(self, model: str | None = None) -> dict[str, float | None]:
        """Return n and every score of a model, by default of the site's prediction model."""
        return score_predictions(self.predictions[model or self.model], self.truth, self.task)

    def qualify_names(self, column: str) -> Names:
        """Return the names of slides or patients, str[n], made unique across sites."""
        part, names = read_names(self.obs["part"]), read_names(self.obs[column])
        return names if (part == part[:1]).all() else np.char.add(np.char.add(part, "/"), names)


def tabulate_examples(parts: Mapping[str, Cohort]) -> pd.DataFrame:
    """Return the rows of a prediction table: the test examples of several sites by name, in order.

    Patches have their corners (x_l0, y_l0) as further columns, slides and patients the kind of tumour.
    """
    rows = pd.concat([part.obs.assign(part=name) for name, part in parts.items()], ignore_index=True)
    extra = ("x_l0", "y_l0") if "x_l0" in rows else ("tumor_type",)
    return rows[[name for name in (*_KEYS, *extra, *TRUTH_COLUMNS) if name in rows]]


def measure_predictions(
    table: PredictionTable, *, repeats: int, with_slides: bool, threshold: float | None
) -> dict[str, object]:
    """Return scores, intervals, confusion and calibration of a site's prediction model, for examples and for slides.

    Args:
        repeats: of the bootstrap.
        with_slides: whether examples are patches of slides, which are measured too.
        threshold: the least score of a positive slide, from the site's training slides.
    """
    if not len(table):
        return {**table.compute_scores(), "tumor_types": {}}

    def summarize_scores(predictions: PredictionArray, truth: Truth, patient: Names) -> dict[str, object]:
        """Return scores and intervals clustered by patient; for classes also confusion and calibration."""
        summary: dict[str, object] = {**score_predictions(predictions, truth, table.task)}
        summary["intervals"] = score_intervals(predictions, truth, patient, table.task, repeats=repeats)
        if table.task.kind == "classes":
            summary |= {
                "confusion": confusion_matrix(predictions, truth),
                "calibration": compute_calibration(predictions, truth),
            }
        return summary

    patient, slide_scores = table.qualify_names("patient"), None
    if with_slides and table.task.kind == "classes":
        slides = aggregate_slides(
            table.model_predictions, table.truth, table.qualify_names("slide"), threshold=threshold
        )
        if slides:
            slide_scores = summarize_scores(slides[0], slides[1], patient[slides[2]]) | {"threshold": threshold}
    return {
        **summarize_scores(table.model_predictions, table.truth, patient),
        "slides": slide_scores,
        "tumor_types": score_tumor_types(table),
    }


def score_tumor_types(table: PredictionTable) -> dict[str, dict[str, float | None]]:
    """Return n, accuracy and macro-accuracy by tumour type; empty without tumour types."""
    groups = table.group_by("tumor_type") if "tumor_type" in table.obs else {}
    names = ("n", "accuracy", "macro_accuracy")
    scores = {kind: groups[kind].compute_scores() for kind in sorted(groups) if kind}
    return {kind: {name: values[name] for name in names} for kind, values in scores.items()}


# ---- many sites' predictions as one (MPCPA, section 3.2)


def _decide_classes(
    site_probabilities: Sequence[Probabilities], rule: str, weights: Sequence[float] | None = None
) -> tuple[NDArray[np.int64], Probabilities]:
    """Return (the class int64[n] of each example under a rule, and its shares or means [n, classes]).

    Absolute majority: the class with more than half of the votes, else rejected. Relative: the class with most votes.
    Weighted: the class with most weight. The mean of the probabilities breaks ties, since random choice is not
    reproducible. A site votes for its most probable class.
    """
    site_weights = weights if rule.startswith("weighted") else None
    mean = np.average(site_probabilities, axis=0, weights=site_weights)
    if rule in _MEAN_RULES:
        return choose_classes(mean), mean
    shares = np.average(
        [np.eye(probabilities.shape[1])[choose_classes(probabilities)] for probabilities in site_probabilities],
        axis=0,
        weights=site_weights,
    )
    if rule == "absolute":
        return np.where(shares.max(1) > 0.5, shares.argmax(1), _REJECTED_CLASS), shares
    has_most = shares >= shares.max(1, keepdims=True) - 1e-12
    tied_scores = np.where(has_most, mean, -1.0)
    return np.where(has_most.all(1), choose_classes(mean), tied_scores.argmax(1)), shares


def score_voting_rules(
    site_probabilities: Sequence[Probabilities],
    labels: Labels,
    weights: Sequence[float],
    possible: NDArray[np.bool_] | None = None,
) -> dict[str, dict[str, float | None]]:
    """Return by rule: n, accuracy, macro-accuracy, AUROC of shares or means, n rejected, all counted as errors.

    Args:
        possible: bool[n, classes], the classes that each example may have; None for all.
    """
    scores = {}
    for rule in _VOTING_RULES:
        decision, score = _decide_classes(site_probabilities, rule, weights)
        scores[rule] = {
            "n": len(labels),
            **score_unweighted(build_class_measure(decision == labels, score, labels, possible), len(labels)),
            "rejected": int((decision == _REJECTED_CLASS).sum()),
        }
    return scores
