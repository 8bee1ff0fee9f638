"""predictions.csv: what a site's models say of every test example; `evaluate` writes it, comparisons and pages read it.

A row is an example as one model sees it: whose model (site), which (model), whether it answers for the site (selected),
whose example (part), slide, patient, what else is known of it, what is true, and what the model says.
"""

from __future__ import annotations

import csv
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from wsi_fl.learning.predictions import Predictions
from wsi_fl.learning.tasks import CLASSES, Task, Truth
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import SiteFolder
from wsi_fl.system.files import atomic, ordinary, sha256_of
from wsi_fl.types import WsiFlError

Key = tuple[str, ...]
"""A test example: its site, its patient, and what else names it."""
Answers = dict[Key, tuple[float, str]]
"""Test example → what it adds to the mean that is compared, and its true class; "" where classes are not asked."""
COLUMNS = {
    "classes": (("truth",), "p_{}"),
    "number": (("truth",), "pred_{}"),
    "survival": (("time", "event"), "without_event_{}"),
}
"""The columns of what is true, and of what a model says, by kind of task. Of survival that is the chance of no event up
to the end of each interval; the risk by which patients are ranked follows from all of them (`survival.risk`)."""
_WHO = ("site", "model", "selected", "part", "slide", "patient")
_MODEL, _ANSWERS = 1, 2
_ROUNDED = 1e-5
"""By which probabilities may miss their bounds, which tables of earlier versions have with nine digits."""


class Seal(TypedDict):
    """The length and the SHA-256 of a table, as `evaluation.json` keeps them: nobody is to count what was changed."""

    bytes: int
    sha256: str


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
        columns = np.reshape(table.truth, (-1, len(truth))).astype(np.float64).T
        true = [(repr(value) if known else "" for value in column.tolist()) for column in columns]
    examples = zip(table.part, table.slide, table.patient, *table.about.values(), *true, strict=True)
    heads = {model: f"{table.site},{model},{model == table.answer}," for model in table.said}
    # with all their digits, for they are computed with: thresholds lie between them
    numbers = ",%r" * len(table.outputs) + "\n"
    written: list[str] = []
    example = csv.writer(SimpleNamespace(write=written.append), lineterminator="")
    with atomic(_path(folder)) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(names)
        for k, told in enumerate(examples):
            example.writerow(told)
            text = written.pop()
            for model, values in table.said.items():
                file.write(heads[model] + text + numbers % tuple(values[k].tolist()))


def seal_of(folder: SiteFolder) -> Seal:
    """Return what `evaluate` keeps of a table that it has written."""
    path = ordinary(_path(folder))
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_predictions(
    folder: SiteFolder, task: Task = CLASSES, model: str | None = None
) -> Predictions | None:
    """Return what a model of a site said of its test examples; None where none is there of such a task or model.

    Args:
        model: such as "local"; the one that answers for the site, if none is named.

    Raises:
        WsiFlError: when another version wrote the file, or it is not as `evaluate` left it: cut off, changed, doubled,
            or with a number in it that no model says.
    """
    if not _path(folder).exists():
        return None
    row_of_evaluation = _row_of_evaluation(folder)
    if (seal := row_of_evaluation.get("predictions")) and seal != seal_of(folder):
        raise _damaged(folder, "changed since the run was evaluated")
    header, rows = _lines(folder, model)
    truth, said = COLUMNS[task.kind]
    prefix = said.removesuffix("{}")
    outputs = tuple(name.removeprefix(prefix) for name in header if name.startswith(prefix))
    if not outputs or (model and not rows):
        return None
    columns = dict(zip(header, np.array(rows, str).reshape(len(rows), len(header)).T, strict=True))
    answer = rows[0][_MODEL] if rows else "private"
    try:
        true = _truth(np.stack([columns[name] for name in truth], axis=1), outputs, task)
        values = np.stack([columns[said.format(name)] for name in outputs], axis=1).astype(np.float64)
    except (KeyError, ValueError) as error:
        raise _damaged(folder, f"holds what is no answer ({error})") from None
    table = Predictions(
        site=folder.path.name,
        answer=answer,
        **{name: columns[name] for name in ("part", "slide", "patient")},
        truth=true,
        said={answer: values},
        outputs=outputs,
        task=task,
        about={name: columns[name] for name in header[len(_WHO) : header.index(truth[0])]},
    )
    if wrong := _wrong(table, row_of_evaluation.get("n")):
        raise _damaged(folder, wrong)
    return table


def _lines(folder: SiteFolder, model: str | None) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of a model, or of the one that answers; each has a cell for every heading."""
    rows = []
    with ordinary(_path(folder)).open(newline="", encoding="utf-8") as file:
        try:
            table = csv.reader(file)
            header = next(table, [])
            if header and tuple(header[: len(_WHO)]) != _WHO:
                raise WsiFlError(f"{_path(folder)}: another version wrote it; evaluate the run again")
            for row in table:
                if len(row) != len(header):
                    what = f"line {table.line_num} is cut off: {len(row)} of {len(header)} cells"
                    raise _damaged(folder, what)
                if row[_MODEL] == model if model else row[_ANSWERS] == "True":
                    rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise _damaged(folder, f"is no table ({error})") from None
    if not header:
        raise _damaged(folder, "is empty")
    return header, rows


def _truth(cells: NDArray[np.str_], outputs: tuple[str, ...], task: Task) -> Truth:
    """Return what is true of each example by the cells [n, columns of the truth]; ValueError for what cannot be."""
    if task.kind == "classes":
        if strange := set(cells[:, 0].tolist()) - set(outputs):
            raise ValueError(f"class {min(strange)!r}")
        number = {name: k for k, name in enumerate(outputs)}
        return np.array([number[name] for name in cells[:, 0]], np.int64)
    return cells.astype(np.float64).reshape(-1, *([2] if task.kind == "survival" else []))


def _wrong(table: Predictions, n: int | None) -> str:
    """Return what is wrong with a table: numbers that no model says, examples too many or too few; "" for nothing.

    Args:
        n: how many examples were evaluated; None where that is not known.
    """
    values, kind = table.answers, table.task.kind
    if not (np.isfinite(values).all() and (kind == "classes" or np.isfinite(table.truth).all())):
        return "holds numbers that are not finite"
    if kind != "number" and len(values) and not (values.min() >= -_ROUNDED and values.max() <= 1 + _ROUNDED):
        return f"holds probabilities from {values.min():g} to {values.max():g}"
    if kind == "classes" and (np.abs(values.sum(1) - 1) > _ROUNDED).any():
        return "holds probabilities that do not add up to 1"
    if n is not None and n != len(table):
        return f"has {len(table)} examples where {n} were evaluated"
    keys = zip(table.part, table.slide, table.patient, *table.about.values(), *values.T, strict=True)
    often = min(Counter(keys).values(), default=1)
    return f"has every example {often} times" if often > 1 and len(table) > often else ""


def _damaged(folder: SiteFolder, what: str) -> WsiFlError:
    run = folder.path.parent.parent.name
    return WsiFlError(f"{_path(folder)}: {what}; run `wsi-fl evaluate {run}` again, which writes it anew")


def _row_of_evaluation(folder: SiteFolder) -> dict[str, Any]:
    """Return the row of a site in the run's evaluation; {} where there is none."""
    run = RunFolder(folder.path.parent.parent)
    return _rows_by_site(run.path, _modified(run.path / "evaluation.json")).get(folder.path.name, {})


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


@lru_cache(maxsize=4)
def _rows_by_site(run: Path, modified: int | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a run's evaluation by site, read once as long as the file is not `modified`."""
    document = None if modified is None else RunFolder(run).evaluation()
    if document is None:
        return {}
    known = ("n", "predictions")
    return {row["site"]: {name: row.get(name) for name in known} for row in document["sites"]}


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
