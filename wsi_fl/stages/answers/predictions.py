"""predictions.csv: what answers for a site, on every test example; `evaluate` writes it and `compare` reads it."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wsi_fl.learning.metrics import Probabilities
from wsi_fl.learning.tasks import CLASSES, Said, Task, Truth
from wsi_fl.runs.site import SiteFolder
from wsi_fl.stages.site.data import Table
from wsi_fl.system.files import ordinary, write_text
from wsi_fl.types import BagTable

Right = dict[tuple[str, ...], tuple[float, float]]
"""Test example (site, patient, and what else names it) → whether the model was right, 1 or 0, and the weight of its
class."""
Answers = dict[tuple[str, ...], tuple[float, str]]
"""Test example → whether the model was right, 1 or 0, and its true class."""
COLUMNS = {
    "classes": (("label",), "p_{}"),
    "number": (("label",), "said_{}"),
    "survival": (("time", "event"), "without_event_{}"),
}
"""The columns of what is true, and of what a model says, by kind of task."""
_SKEWED = 0.5
"""Part of an equal share below which the rarest class makes accuracy say little."""


def write_predictions(
    folder: SiteFolder,
    predicted: Mapping[str, Probabilities],
    tables: Mapping[str, Table],
    classes: tuple[str, ...],
    task: Task = CLASSES,
) -> None:
    """Write a row per test patch, or per test slide, of every site in `predicted`.

    Args:
        classes: what the outputs of models are called.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    of_bags = any(isinstance(table, BagTable) for table in tables.values())
    extra = ["tumor_type"] if of_bags else ["x_l0", "y_l0"]
    truth, said = COLUMNS[task.kind]
    writer.writerow(["site", "slide", "patient", *extra, *truth, *(said.format(name) for name in classes)])
    for site, values in predicted.items():
        table = tables[site]
        for row, p in enumerate(values):
            known = [table.tumor_type[row]] if isinstance(table, BagTable) else table.xy_l0[row].tolist()
            label = table.label[row]
            true = [classes[label]] if task.kind == "classes" else [f"{v:g}" for v in np.atleast_1d(label)]
            who = [site, table.slide[row], table.patient[row]]
            writer.writerow([*who, *known, *true, *(f"{v:.6f}" for v in p)])
    write_text(_path(folder), text.getvalue())


def read_right(folder: SiteFolder, on: str) -> Right | None:
    """Return on which examples a site's answer was right; None where the site has no predictions of classes."""
    found = read_answers(folder, on)
    return None if found is None else weighed(found)


def weighed(answers: Answers) -> Right:
    """Return answers with the weight of each.

    Where one class is much rarer than others, examples are weighed so that all classes count alike, and the weighted
    mean is balanced accuracy; see `is_skewed`.
    """
    counts = Counter(label for _, label in answers.values())
    n, skewed = len(answers), is_skewed(counts)
    return {
        key: (right, n / len(counts) / counts[label] if skewed else 1.0)
        for key, (right, label) in answers.items()
    }


def read_answers(folder: SiteFolder, on: str) -> Answers | None:
    """Return whether a site's answer was right on each example, and its true class; None where there are none.

    Args:
        on: "merged", or "own" for the site's own part alone.
    """
    if not _path(folder).exists():
        return None
    with ordinary(_path(folder)).open(newline="", encoding="utf-8") as file:
        table = csv.reader(file)
        header = next(table)
        if not any(name.startswith("p_") for name in header):
            return None
        label, first = (
            header.index("label"),
            next(k for k, name in enumerate(header) if name.startswith("p_")),
        )
        classes = [name.removeprefix("p_") for name in header[first:]]
        found: Answers = {}
        for line in table:
            if on == "merged" or line[0] == folder.path.name:
                best = int(np.argmax([float(p) for p in line[first:]]))
                key = (line[0], line[header.index("patient")], *line[1:label], str(len(found)))
                found[key] = float(classes[best] == line[label]), line[label]
    return found


def read_said(folder: SiteFolder, kind: str) -> tuple[Truth, Said] | None:
    """Return (truth, what the model says) of a site's own test examples; None where it has no predictions.

    Args:
        kind: of the task.
    """
    if not _path(folder).exists():
        return None
    truth, said = COLUMNS[kind]
    with ordinary(_path(folder)).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == folder.path.name]
    if not rows:
        return None
    columns = [name for name in rows[0] if name.startswith(said.removesuffix("{}"))]
    found = [np.array([[float(row[name]) for name in some] for row in rows]) for some in (truth, columns)]
    return found[0], found[1]


def is_skewed(counts: Mapping[str, int]) -> bool:
    """Return whether the rarest of several classes has less than half of an equal share.

    Example:
        >>> is_skewed({"healthy": 90, "tumor": 30}), is_skewed({"healthy": 90, "tumor": 20})
        (False, True)
    """
    if len(counts) < 2:
        return False
    return min(counts.values()) < _SKEWED * sum(counts.values()) / len(counts)


def measure_of(right: Right) -> str:
    """Return what the weighted mean is: "accuracy" or "balanced accuracy"."""
    return "balanced accuracy" if len({weight for _, weight in right.values()}) > 1 else "accuracy"


def _path(folder: SiteFolder) -> Path:
    return folder.path / "predictions.csv"
