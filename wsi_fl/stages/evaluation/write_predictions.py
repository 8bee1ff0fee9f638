"""predictions.csv: a site's predictions of every test example, written by `evaluate`.

A row is the prediction of a model for an example: the model's site (site) and name (model), whether it is the site's
prediction model (selected), the example's site (part), slide, patient and further columns, truth, and predictions.
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

from wsi_fl.data.prediction_table import PredictionTable
from wsi_fl.data.tasks import CLASSES, Task, Truth
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.system.files import atomic_path, file_sha256, require_regular_file
from wsi_fl.types import WsiFlError

Key = tuple[str, ...]
"""The key of a test example: its site, its patient, and further names."""
ExampleScores = dict[Key, tuple[float, str]]
"""Test example → its term in the compared mean, and its true class; "" in tasks without classes."""
COLUMNS = {
    "classes": (("truth",), "p_{}"),
    "number": (("truth",), "pred_{}"),
    "survival": (("time", "event"), "without_event_{}"),
}
"""The columns of the truth and of predictions by kind of task. Of survival the predictions are probabilities of no
event up to the end of each interval; the risk of a patient follows from all of them (`survival.risk`)."""
_KEY_COLUMNS = ("site", "model", "selected", "part", "slide", "patient")
_MODEL_COLUMN, _CHOSEN_COLUMN = 1, 2
_ROUNDING_TOLERANCE = 1e-5
"""Tolerance of probabilities, which tables of earlier versions have with nine digits."""


class TableSeal(TypedDict):
    """The length and the SHA-256 of a table in `evaluation.json`, which detect changes."""

    bytes: int
    sha256: str


def write_predictions(folder: SiteFolder, table: PredictionTable, *, has_truth: bool = True) -> None:
    """Write a row per model and test example of every part.

    Args:
        has_truth: whether the truth is known; its columns are empty else.
    """
    truth, output_column = COLUMNS[table.task.kind]
    names = (*_KEY_COLUMNS, *table.extra_columns, *truth, *(output_column.format(name) for name in table.outputs))
    if table.task.kind == "classes":
        true = [(table.outputs[label] if has_truth else "" for label in table.truth)]
    else:
        columns = np.reshape(table.truth, (-1, len(truth))).astype(np.float64).T
        true = [(repr(value) if has_truth else "" for value in column.tolist()) for column in columns]
    examples = zip(table.part, table.slide, table.patient, *table.extra_columns.values(), *true, strict=True)
    heads = {model: f"{table.site},{model},{model == table.model}," for model in table.predictions}
    # with all digits, for thresholds between them
    numbers = ",%r" * len(table.outputs) + "\n"
    lines: list[str] = []
    example = csv.writer(SimpleNamespace(write=lines.append), lineterminator="")
    with atomic_path(_table_path(folder)) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(names)
        for k, cells in enumerate(examples):
            example.writerow(cells)
            text = lines.pop()
            for model, values in table.predictions.items():
                file.write(heads[model] + text + numbers % tuple(values[k].tolist()))


def compute_seal(folder: SiteFolder) -> TableSeal:
    """Return the length and SHA-256 of a site's table."""
    path = require_regular_file(_table_path(folder))
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def read_predictions(folder: SiteFolder, task: Task = CLASSES, model: str | None = None) -> PredictionTable | None:
    """Return the predictions of a site's model for its test examples; None without any of this task or model.

    Args:
        model: such as "local"; by default the site's prediction model.

    Raises:
        WsiFlError: when another version wrote the file, or it was cut off, changed or duplicated, or holds impossible
            numbers.
    """
    if not _table_path(folder).exists():
        return None
    row_of_evaluation = _load_evaluation_row(folder)
    if (seal := row_of_evaluation.get("predictions")) and seal != compute_seal(folder):
        raise _table_error(folder, "changed since the run was evaluated")
    header, rows = _read_rows(folder, model)
    truth, output_column = COLUMNS[task.kind]
    prefix = output_column.removesuffix("{}")
    outputs = tuple(name.removeprefix(prefix) for name in header if name.startswith(prefix))
    if not outputs or (model and not rows):
        return None
    columns = dict(zip(header, np.array(rows, str).reshape(len(rows), len(header)).T, strict=True))
    model_name = rows[0][_MODEL_COLUMN] if rows else "private"
    try:
        truth_values = _parse_truth(np.stack([columns[name] for name in truth], axis=1), outputs, task)
        values = np.stack([columns[output_column.format(name)] for name in outputs], axis=1).astype(np.float64)
    except (KeyError, ValueError) as error:
        raise _table_error(folder, f"holds an invalid prediction ({error})") from None
    table = PredictionTable(
        site=folder.path.name,
        model=model_name,
        **{name: columns[name] for name in ("part", "slide", "patient")},
        truth=truth_values,
        predictions={model_name: values},
        outputs=outputs,
        task=task,
        extra_columns={name: columns[name] for name in header[len(_KEY_COLUMNS) : header.index(truth[0])]},
    )
    if problem := _find_problem(table, row_of_evaluation.get("n")):
        raise _table_error(folder, problem)
    return table


def _read_rows(folder: SiteFolder, model: str | None) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the complete lines of a model, by default of the prediction model."""
    rows = []
    with require_regular_file(_table_path(folder)).open(newline="", encoding="utf-8") as file:
        try:
            table = csv.reader(file)
            header = next(table, [])
            if header and tuple(header[: len(_KEY_COLUMNS)]) != _KEY_COLUMNS:
                raise WsiFlError(f"{_table_path(folder)}: another version wrote it; evaluate the run again")
            for row in table:
                if len(row) != len(header):
                    problem = f"line {table.line_num} is cut off: {len(row)} of {len(header)} cells"
                    raise _table_error(folder, problem)
                if row[_MODEL_COLUMN] == model if model else row[_CHOSEN_COLUMN] == "True":
                    rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise _table_error(folder, f"is no table ({error})") from None
    if not header:
        raise _table_error(folder, "is empty")
    return header, rows


def _parse_truth(cells: NDArray[np.str_], outputs: tuple[str, ...], task: Task) -> Truth:
    """Return the truth of each example from its cells [n, columns]; ValueError for an impossible value."""
    if task.kind == "classes":
        if strange := set(cells[:, 0].tolist()) - set(outputs):
            raise ValueError(f"class {min(strange)!r}")
        number = {name: k for k, name in enumerate(outputs)}
        return np.array([number[name] for name in cells[:, 0]], np.int64)
    return cells.astype(np.float64).reshape(-1, *([2] if task.kind == "survival" else []))


def _find_problem(table: PredictionTable, n: int | None) -> str:
    """Return the problem of a table, impossible numbers or a wrong number of examples; "" without any.

    Args:
        n: number of evaluated examples; None where unknown.
    """
    values, kind = table.model_predictions, table.task.kind
    if not (np.isfinite(values).all() and (kind == "classes" or np.isfinite(table.truth).all())):
        return "holds numbers that are not finite"
    if (
        kind != "number"
        and len(values)
        and not (values.min() >= -_ROUNDING_TOLERANCE and values.max() <= 1 + _ROUNDING_TOLERANCE)
    ):
        return f"holds probabilities from {values.min():g} to {values.max():g}"
    if kind == "classes" and (np.abs(values.sum(1) - 1) > _ROUNDING_TOLERANCE).any():
        return "holds probabilities that do not add up to 1"
    if n is not None and n != len(table):
        return f"has {len(table)} examples where {n} were evaluated"
    keys = zip(table.part, table.slide, table.patient, *table.extra_columns.values(), *values.T, strict=True)
    repeats = min(Counter(keys).values(), default=1)
    return f"has every example {repeats} times" if repeats > 1 and len(table) > repeats else ""


def _table_error(folder: SiteFolder, problem: str) -> WsiFlError:
    run = folder.path.parent.parent.name
    return WsiFlError(f"{_table_path(folder)}: {problem}; run `wsi-fl evaluate {run}` again to rewrite it")


def _load_evaluation_row(folder: SiteFolder) -> dict[str, Any]:
    """Return the row of a site in the run's evaluation; {} without one."""
    run = RunFolder(folder.path.parent.parent)
    return _load_evaluation_rows(run.path, _modification_time(run.path / "evaluation.json")).get(folder.path.name, {})


def _modification_time(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


@lru_cache(maxsize=4)
def _load_evaluation_rows(run: Path, modified: int | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a run's evaluation by site, cached until the file is modified."""
    document = None if modified is None else RunFolder(run).read_evaluation()
    if document is None:
        return {}
    field_names = ("n", "predictions")
    return {row["site"]: {name: row.get(name) for name in field_names} for row in document["sites"]}


def read_example_scores(folder: SiteFolder, on: str, task: Task = CLASSES) -> ExampleScores | None:
    """Return each test example's term in the first score of a site's prediction model, and its true class.

    None where the site has no predictions of this task, or they have no score.

    Args:
        on: "merged", or "own" for the local test part.
    """
    table = read_predictions(folder, task)
    if table is None:
        return None
    table = table.local_rows if on == "own" else table
    values = task.example_scores(table.model_predictions, table.truth)
    if values is None:
        return None
    name_rows = zip(table.part, table.patient, table.slide, table.patient, *table.extra_columns.values(), strict=True)
    keys, occurrences = [], Counter[Key]()  # folds of another seed have the same examples on other rows
    for names in name_rows:
        name = tuple(map(str, names))
        keys.append((*name, str(occurrences[name])))
        occurrences[name] += 1
    classes = task.kind == "classes"
    labels = [table.outputs[label] if classes else "" for label in table.truth]
    return dict(zip(keys, zip(values.tolist(), labels, strict=True), strict=True))


def _table_path(folder: SiteFolder) -> Path:
    return folder.path / "predictions.csv"
