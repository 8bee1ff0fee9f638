"""The table of all models' predictions for test examples; scores, pages and comparisons use groups of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples
from wsi_fl.learning.metrics import calibration, confusion, slide_level
from wsi_fl.learning.tasks import CLASSES, Predicted, Task, Truth, intervals, scored

Names = NDArray[np.str_]


@dataclass(frozen=True)
class Predictions:
    """What a site's models say of n test examples.

    Attributes:
        site: whose models.
        answer: which of them answers for the site.
        part: str[n], the site whose test example it is.
        slide, patient: str[n]; sites may use the same names for different ones.
        truth: what is true of each, as the task has it.
        said: by model, float64[n, k].
        outputs: what each of the k outputs is called.
        about: what else is known of each example, by name of the column.
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
    def of(cls, parts: Mapping[str, Examples], **columns: Any) -> Self:
        """Return the table of several sites' test examples, in order, by site.

        Args:
            columns: what else a table has: site, answer, said, outputs, about.
        """
        told = [*parts.values()]
        truth, slide, patient = (
            np.concatenate([getattr(one, name) for one in told]) for name in ("label", "slide", "patient")
        )
        part = np.repeat([*parts], [len(one) for one in told])
        return cls(part=part, slide=slide, patient=patient, truth=truth, task=told[0].task, **columns)

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def answers(self) -> Predicted:
        """Return float64[n, k], the predictions of the model that answers for the site."""
        return self.said[self.answer]

    def where(self, rows: NDArray[np.bool_]) -> Predictions:
        """Return a group of the examples, by mask bool[n]."""
        if rows.all():
            return self
        who = {name: getattr(self, name)[rows] for name in ("part", "slide", "patient", "truth")}
        said = {model: one[rows] for model, one in self.said.items()}
        return replace(self, **who, said=said, about={name: one[rows] for name, one in self.about.items()})

    @property
    def own(self) -> Predictions:
        """Return the examples of the site's own part."""
        return self.where(self.part == self.site)

    @property
    def others(self) -> Predictions:
        """Return the examples of all other sites."""
        return self.where(self.part != self.site)

    def by(self, column: str) -> dict[str, Predictions]:
        """Return the groups of equal values in a column of names, in the order in which they first appear."""
        values = getattr(self, column) if column in ("part", "slide", "patient") else self.about[column]
        known, first = np.unique(values, return_index=True)
        return {str(name): self.where(values == name) for name in known[np.argsort(first)]}

    def scores(self, model: str | None = None) -> dict[str, Any]:
        """Return n and every score of a model, or of the one that answers."""
        return scored(self.said[model or self.answer], self.truth, self.task)

    def whose(self, names: Names) -> Names:
        """Return names of slides or patients, str[n], made unique across sites."""
        if (self.part == self.part[:1]).all():
            return names
        return np.char.add(np.char.add(self.part, "/"), names)


@dataclass(frozen=True)
class Level:
    """The measurements of one site's answering model on one set.

    Attributes:
        repeats: of the bootstrap.
        slides: whether patches are of slides, so that these are measured too.
        point: score from which on a slide is called positive, as the run found on the site's own slides.
    """

    repeats: int
    slides: bool
    point: float | None

    def of(self, table: Predictions) -> dict[str, Any]:
        """Return what is known of the answering model by what it says of examples; of patches, of slides too."""
        if not len(table):
            return table.scores() | {"tumor_types": {}}
        patient, by_slide = table.whose(table.patient), None
        if self.slides and table.task.kind == "classes":
            slide = table.whose(table.slide)
            by_slide = slide_level(table.answers, table.truth, slide, threshold=self.point)
        return {
            **self._of(table.answers, table.truth, patient, table.task),
            "slides": self._of(by_slide[0], by_slide[1], patient[by_slide[2]], table.task)
            | {"threshold": self.point}
            if by_slide
            else None,
            "tumor_types": of_tumor_types(table),
        }

    def _of(self, said: Predicted, truth: Truth, patient: Names, task: Task) -> dict[str, Any]:
        """Return scores and intervals clustered by patient; of classes confusion and calibration too."""
        found = scored(said, truth, task) | {
            "intervals": intervals(said, truth, patient, task, repeats=self.repeats)
        }
        if task.kind != "classes":
            return found
        return found | {"confusion": confusion(said, truth), "calibration": calibration(said, truth)}


def of_tumor_types(table: Predictions) -> dict[str, Any]:
    """Return n, accuracy and macro-accuracy of the slides of each tumour type; empty where none is known."""
    if "tumor_type" not in table.about:
        return {}
    groups = table.by("tumor_type")
    known = {kind: scored(groups[kind].answers, groups[kind].truth) for kind in sorted(set(groups) - {""})}
    return {
        kind: {name: one[name] for name in ("n", "accuracy", "macro_accuracy")} for kind, one in known.items()
    }
