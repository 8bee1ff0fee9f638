"""The table of all models' predictions for test examples, its metrics by group, and the ensemble of many sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples
from wsi_fl.learning.metrics import (
    Labels,
    Probabilities,
    calibration,
    choose_classes,
    confusion,
    counted_once,
    measure_of_classes,
    slide_level,
)
from wsi_fl.learning.tasks import CLASSES, Predicted, Task, Truth, intervals, scored

Names = NDArray[np.str_]
_MEANS = ("mean", "weighted_mean")
_RULES = (*_MEANS, "absolute", "relative", "weighted")
_REJECTED = -1
"""The decision of an absolute majority vote where no class has more than half of the votes."""


@dataclass(frozen=True)
class Predictions:
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
    answer: str
    part: Names
    slide: Names
    patient: Names
    truth: Truth
    said: Mapping[str, Predicted]
    outputs: tuple[str, ...]
    task: Task = CLASSES
    about: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        parts: Mapping[str, Examples],
        *,
        site: str,
        answer: str,
        said: Mapping[str, Predicted],
        outputs: tuple[str, ...],
        about: Mapping[str, NDArray[Any]] | None = None,
    ) -> Self:
        """Return the table of several sites' test examples, in order, by site."""
        told = [*parts.values()]
        truth, slide, patient = (
            np.concatenate([getattr(one, name) for one in told]) for name in ("label", "slide", "patient")
        )
        part = np.repeat([*parts], [len(one) for one in told])
        return cls(site, answer, part, slide, patient, truth, said, outputs, told[0].task, about or {})

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def answers(self) -> Predicted:
        """Return the predictions float64[n, k] of the site's prediction model."""
        return self.said[self.answer]

    def where(self, rows: NDArray[np.bool_]) -> Predictions:
        """Return the rows of a mask bool[n]."""
        if rows.all():
            return self
        part, slide, patient, truth = self.part[rows], self.slide[rows], self.patient[rows], self.truth[rows]
        said = {model: one[rows] for model, one in self.said.items()}
        about = {name: one[rows] for name, one in self.about.items()}
        return Predictions(
            self.site, self.answer, part, slide, patient, truth, said, self.outputs, self.task, about
        )

    @property
    def own(self) -> Predictions:
        """Return the rows of this site's test part."""
        return self.where(self.part == self.site)

    @property
    def others(self) -> Predictions:
        """Return the rows of all other sites."""
        return self.where(self.part != self.site)

    def by(self, column: str) -> dict[str, Predictions]:
        """Return the groups of equal values in a column of names, in order of first appearance."""
        values = getattr(self, column) if column in ("part", "slide", "patient") else self.about[column]
        known, first = np.unique(values, return_index=True)
        return {str(name): self.where(values == name) for name in known[np.argsort(first)]}

    def scores(self, model: str | None = None) -> dict[str, float | None]:
        """Return n and every score of a model, by default of the site's prediction model."""
        return scored(self.said[model or self.answer], self.truth, self.task)

    def whose(self, names: Names) -> Names:
        """Return names of slides or patients, str[n], made unique across sites."""
        if (self.part == self.part[:1]).all():
            return names
        return np.char.add(np.char.add(self.part, "/"), names)


def measured(table: Predictions, *, repeats: int, slides: bool, point: float | None) -> dict[str, object]:
    """Return scores, intervals, confusion and calibration of a site's prediction model, for examples and for slides.

    Args:
        repeats: of the bootstrap.
        with_slides: whether examples are patches of slides, which are measured too.
        threshold: the least score of a positive slide, from the site's training slides.
    """
    if not len(table):
        return {**table.scores(), "tumor_types": {}}

    def of(said: Predicted, truth: Truth, patient: Names) -> dict[str, object]:
        """Return scores and intervals clustered by patient; for classes also confusion and calibration."""
        found: dict[str, object] = {**scored(said, truth, table.task)}
        found["intervals"] = intervals(said, truth, patient, table.task, repeats=repeats)
        if table.task.kind == "classes":
            found |= {"confusion": confusion(said, truth), "calibration": calibration(said, truth)}
        return found

    patient, of_slides = table.whose(table.patient), None
    if slides and table.task.kind == "classes":
        by_slide = slide_level(table.answers, table.truth, table.whose(table.slide), threshold=point)
        if by_slide:
            of_slides = of(by_slide[0], by_slide[1], patient[by_slide[2]]) | {"threshold": point}
    return {
        **of(table.answers, table.truth, patient),
        "slides": of_slides,
        "tumor_types": of_tumor_types(table),
    }


def of_tumor_types(table: Predictions) -> dict[str, dict[str, float | None]]:
    """Return n, accuracy and macro-accuracy by tumour type; empty without tumour types."""
    if "tumor_type" not in table.about:
        return {}
    groups = table.by("tumor_type")
    known = {kind: scored(groups[kind].answers, groups[kind].truth) for kind in sorted(set(groups) - {""})}
    return {
        kind: {name: one[name] for name in ("n", "accuracy", "macro_accuracy")} for kind, one in known.items()
    }


# ---- many sites' predictions as one (MPCPA, section 3.2)


def _decided(
    said: Sequence[Probabilities], rule: str, weights: Sequence[float] | None = None
) -> tuple[NDArray[np.int64], Probabilities]:
    """Return (the class int64[n] of each example under a rule, and its shares or means [n, classes]).

    Absolute majority: the class with more than half of the votes, else rejected. Relative: the class with most votes.
    Weighted: the class with most weight. The mean of the probabilities breaks ties, since random choice is not
    reproducible. A site votes for its most probable class.

    Args:
        weights: of the sites, for "weighted_mean" and "weighted"; the other rules ignore them.
    """
    own = weights if rule.startswith("weighted") else None
    mean = np.average(said, axis=0, weights=own)
    if rule in _MEANS:
        return choose_classes(mean), mean
    shares = np.average([np.eye(p.shape[1])[choose_classes(p)] for p in said], axis=0, weights=own)
    if rule == "absolute":
        return np.where(shares.max(1) > 0.5, shares.argmax(1), _REJECTED), shares
    most = shares >= shares.max(1, keepdims=True) - 1e-12
    settled = np.where(most, mean, -1.0)
    return np.where(most.all(1), choose_classes(mean), settled.argmax(1)), shares


def aggregated_scores(
    said: Sequence[Probabilities], labels: Labels, weights: Sequence[float]
) -> dict[str, dict[str, float | None]]:
    """Return by rule: n, accuracy, macro-accuracy, AUROC of shares or means, n rejected, all counted as errors."""
    found = {}
    for rule in _RULES:
        decision, score = _decided(said, rule, weights)
        found[rule] = {
            "n": len(labels),
            **counted_once(measure_of_classes(decision == labels, score, labels), len(labels)),
            "rejected": int((decision == _REJECTED).sum()),
        }
    return found
