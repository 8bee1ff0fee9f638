"""The table of all models' predictions for test examples, its metrics by group, and the ensemble of many sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort
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
_MEAN_RULES = ("mean", "weighted_mean")
_VOTING_RULES = (*_MEAN_RULES, "absolute", "relative", "weighted")
_REJECTED_CLASS = -1
"""The decision of an absolute majority vote where no class has more than half of the votes."""


@dataclass(frozen=True)
class PredictionTable:
    """Predictions of a site's models for n test examples.

    Attributes:
        site: of the models.
        model: the site's prediction model, one of those of `predictions`.
        part: str[n], the site of each test example.
        slide, patient: str[n]; sites may use the same names for different ones.
        truth: of each example, as the task has it.
        predictions: predictions float64[n, k] by model.
        outputs: names of the k outputs.
        extra_columns: further columns by name.
    """

    site: str
    model: str
    part: Names
    slide: Names
    patient: Names
    truth: Truth
    predictions: Mapping[str, PredictionArray]
    outputs: tuple[str, ...]
    task: Task = CLASSES
    extra_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def from_examples(
        cls,
        parts: Mapping[str, Cohort],
        *,
        site: str,
        model: str,
        predictions: Mapping[str, PredictionArray],
        outputs: tuple[str, ...],
        extra_columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> Self:
        """Return the table of several sites' test examples, in order, by site."""
        examples = [*parts.values()]
        truth, slide, patient = (
            np.concatenate([getattr(part_examples, name) for part_examples in examples])
            for name in ("label", "slide", "patient")
        )
        part = np.repeat([*parts], [len(part_examples) for part_examples in examples])
        return cls(
            site, model, part, slide, patient, truth, predictions, outputs, examples[0].task, extra_columns or {}
        )

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def model_predictions(self) -> PredictionArray:
        """Return the predictions float64[n, k] of the site's prediction model."""
        return self.predictions[self.model]

    def select_rows(self, rows: NDArray[np.bool_]) -> PredictionTable:
        """Return the rows of a mask bool[n]."""
        if rows.all():
            return self
        part, slide, patient, truth = self.part[rows], self.slide[rows], self.patient[rows], self.truth[rows]
        predictions = {model: values[rows] for model, values in self.predictions.items()}
        extra_columns = {name: values[rows] for name, values in self.extra_columns.items()}
        return PredictionTable(
            self.site, self.model, part, slide, patient, truth, predictions, self.outputs, self.task, extra_columns
        )

    @property
    def local_rows(self) -> PredictionTable:
        """Return the rows of this site's test part."""
        return self.select_rows(self.part == self.site)

    @property
    def other_rows(self) -> PredictionTable:
        """Return the rows of all other sites."""
        return self.select_rows(self.part != self.site)

    def group_by(self, column: str) -> dict[str, PredictionTable]:
        """Return the groups of equal values in a column of names, in order of first appearance."""
        values = getattr(self, column) if column in ("part", "slide", "patient") else self.extra_columns[column]
        names, first = np.unique(values, return_index=True)
        return {str(name): self.select_rows(values == name) for name in names[np.argsort(first)]}

    def compute_scores(self, model: str | None = None) -> dict[str, float | None]:
        """Return n and every score of a model, by default of the site's prediction model."""
        return score_predictions(self.predictions[model or self.model], self.truth, self.task)

    def qualify_names(self, names: Names) -> Names:
        """Return names of slides or patients, str[n], made unique across sites."""
        if (self.part == self.part[:1]).all():
            return names
        return np.char.add(np.char.add(self.part, "/"), names)


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

    patient, slide_scores = table.qualify_names(table.patient), None
    if with_slides and table.task.kind == "classes":
        slides = aggregate_slides(
            table.model_predictions, table.truth, table.qualify_names(table.slide), threshold=threshold
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
    if "tumor_type" not in table.extra_columns:
        return {}
    groups = table.group_by("tumor_type")
    scores = {
        kind: score_predictions(groups[kind].model_predictions, groups[kind].truth)
        for kind in sorted(set(groups) - {""})
    }
    return {
        kind: {name: values[name] for name in ("n", "accuracy", "macro_accuracy")} for kind, values in scores.items()
    }


# ---- many sites' predictions as one (MPCPA, section 3.2)


def _decide_classes(
    site_probabilities: Sequence[Probabilities], rule: str, weights: Sequence[float] | None = None
) -> tuple[NDArray[np.int64], Probabilities]:
    """Return (the class int64[n] of each example under a rule, and its shares or means [n, classes]).

    Absolute majority: the class with more than half of the votes, else rejected. Relative: the class with most votes.
    Weighted: the class with most weight. The mean of the probabilities breaks ties, since random choice is not
    reproducible. A site votes for its most probable class.

    Args:
        weights: of the sites, for "weighted_mean" and "weighted"; the other rules ignore them.
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
    site_probabilities: Sequence[Probabilities], labels: Labels, weights: Sequence[float]
) -> dict[str, dict[str, float | None]]:
    """Return by rule: n, accuracy, macro-accuracy, AUROC of shares or means, n rejected, all counted as errors."""
    scores = {}
    for rule in _VOTING_RULES:
        decision, score = _decide_classes(site_probabilities, rule, weights)
        scores[rule] = {
            "n": len(labels),
            **score_unweighted(build_class_measure(decision == labels, score, labels), len(labels)),
            "rejected": int((decision == _REJECTED_CLASS).sum()),
        }
    return scores
