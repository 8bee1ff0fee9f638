"""predictions.csv: what a site's models say of every test example; `evaluate` writes it, comparisons and pages read it.

A row is an example as one model sees it: whose model (site), which (model), whether it answers for the site (answers),
whose example (part), slide, patient, what else is known of it, what is true, and what the model says.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from wsi_fl.learning.predictions import Predictions
from wsi_fl.learning.tasks import CLASSES, Task
from wsi_fl.runs.site import SiteFolder
from wsi_fl.system.files import atomic, ordinary
from wsi_fl.types import WsiFlError

Key = tuple[str, ...]
"""A test example: its site, its patient, and what else names it."""
Answers = dict[Key, tuple[float, str]]
"""Test example → what it adds to the mean that is compared, and its true class; "" where classes are not asked."""
COLUMNS = {
    "classes": (("truth",), "p_{}"),
    "number": (("truth",), "said_{}"),
    "survival": (("time", "event"), "without_event_{}"),
}
"""The columns of what is true, and of what a model says, by kind of task. Of survival that is the chance of no event up
to the end of each interval; the risk by which patients are ranked follows from all of them (`survival.risk`)."""
_WHO = ("site", "model", "answers", "part", "slide", "patient")
_MODEL, _ANSWERS = 1, 2


def write_predictions(folder: SiteFolder, table: Predictions, *, known: bool = True) -> None:
    """Write a row per model and test example of every part.

    Args:
        known: whether anybody knows what is true of the examples; its columns are empty else.
    """
    truth, said = COLUMNS[table.task.kind]
    names = (*_WHO, *table.about, *truth, *(said.format(name) for name in table.outputs))
    if table.task.kind == "classes":
        true = [(table.outputs[label] if known else "" for label in table.truth)]
    else:
        true = [
            (f"{v:.9g}" if known else "" for v in column)
            for column in np.reshape(table.truth, (-1, len(truth))).T
        ]
    examples = zip(table.part, table.slide, table.patient, *table.about.values(), *true, strict=True)
    heads = {model: f"{table.site},{model},{model == table.answer}," for model in table.said}
    # nine digits tell all numbers of single precision apart
    probabilities = ",%.9g" * len(table.outputs) + "\n"
    written: list[str] = []
    example = csv.writer(SimpleNamespace(write=written.append), lineterminator="")
    with atomic(_path(folder)) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(names)
        for k, told in enumerate(examples):
            example.writerow(told)
            text = written.pop()
            for model, values in table.said.items():
                file.write(heads[model] + text + probabilities % tuple(values[k].tolist()))


def read_predictions(
    folder: SiteFolder, task: Task = CLASSES, model: str | None = None
) -> Predictions | None:
    """Return what a model of a site said of its test examples; None where none is there of such a task or model.

    Args:
        model: such as "alone"; the one that answers for the site, if none is named.

    Raises:
        WsiFlError: when another version wrote the file.
    """
    if not _path(folder).exists():
        return None
    truth, said = COLUMNS[task.kind]
    with ordinary(_path(folder)).open(newline="", encoding="utf-8") as file:
        table = csv.reader(file)
        header = next(table)
        if tuple(header[: len(_WHO)]) != _WHO:
            raise WsiFlError(f"{_path(folder)}: another version wrote it; evaluate the run again")
        rows = [row for row in table if (row[_MODEL] == model if model else row[_ANSWERS] == "True")]
    prefix = said.removesuffix("{}")
    outputs = tuple(name.removeprefix(prefix) for name in header if name.startswith(prefix))
    if not outputs or (model and not rows):
        return None
    columns = dict(zip(header, np.array(rows, str).reshape(len(rows), len(header)).T, strict=True))
    answer = rows[0][_MODEL] if rows else "private"
    true = np.stack([columns[name] for name in truth], axis=1)
    number = {name: k for k, name in enumerate(outputs)}
    return Predictions(
        site=folder.path.name,
        answer=answer,
        **{name: columns[name] for name in ("part", "slide", "patient")},
        truth=np.array([number[name] for name in true[:, 0]], np.int64)
        if task.kind == "classes"
        else true.astype(np.float64).reshape(-1, *([2] if task.kind == "survival" else [])),
        said={answer: np.stack([columns[said.format(name)] for name in outputs], axis=1).astype(np.float64)},
        outputs=outputs,
        task=task,
        about={name: columns[name] for name in header[len(_WHO) : header.index(truth[0])]},
    )


def read_answers(folder: SiteFolder, on: str, task: Task = CLASSES) -> Answers | None:
    """Return what each test example adds to the first score of a site's answer (`Task.each`), and its true class.

    None where the site has no predictions of such a task, or they have no score.

    Args:
        on: "merged", or "own" for the site's own part alone.
    """
    table = read_predictions(folder, task)
    if table is None:
        return None
    table = table.own if on == "own" else table
    values = task.each(table.answers, table.truth)
    if values is None:
        return None
    which = zip(table.part, table.patient, table.slide, table.patient, *table.about.values(), strict=True)
    keys, seen = [], Counter[Key]()  # folds of another seed have the same examples on other rows
    for names in which:
        name = tuple(map(str, names))
        keys.append((*name, str(seen[name])))
        seen[name] += 1
    classes = task.kind == "classes"
    labels = [table.outputs[label] if classes else "" for label in table.truth]
    return dict(zip(keys, zip(values.tolist(), labels, strict=True), strict=True))


def _path(folder: SiteFolder) -> Path:
    return folder.path / "predictions.csv"
