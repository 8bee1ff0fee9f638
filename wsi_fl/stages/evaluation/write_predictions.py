"""predictions.csv: a site's predictions of every test example, written by `evaluate`.

A row is the prediction of a model for an example: the model's site (site) and name (model), whether it is the site's
prediction model (selected), the example's site (part), slide, patient and further columns, truth, and predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from typing_extensions import TypedDict

from wsi_fl.data.cohort import TRUTH_COLUMNS, tabulate_truth
from wsi_fl.data.prediction_table import PredictionTable
from wsi_fl.data.tasks import CLASSES, Task, Truth
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.system.files import atomic_path, file_sha256, require_regular_file
from wsi_fl.types import WsiFlError, single_line

ExampleScores = dict[tuple[str, ...], tuple[float, str]]
"""Key of a test example (site, patient, further names) → its term in the compared mean, and its true class or ""."""
COLUMNS = {
    "classes": (("truth",), "p_{}"),
    "number": (("truth",), "pred_{}"),
    "survival": (("time", "event"), "without_event_{}"),
}
"""The columns of the truth and of predictions by kind of task. Of survival the predictions are probabilities of no
event up to the end of each interval; the risk of a patient follows from all of them (`survival.risk`)."""
_KEY_COLUMNS = ("site", "model", "selected", "part", "slide", "patient")
_CHUNK_ROWS = 1 << 16
"""Examples written and lines read at a time."""
_ROUNDING_TOLERANCE = 1e-5
"""Tolerance of probabilities, which tables of earlier versions have with nine digits."""


class _TableSeal(TypedDict):
    """The length and the SHA-256 of a table in `evaluation.json`, which detect changes."""

    bytes: int
    sha256: str


def write_predictions(folder: SiteFolder, table: PredictionTable, *, has_truth: bool = True) -> None:
    """Write a row per model and test example of every part, with all digits, for thresholds between them.

    Args:
        has_truth: whether the truth is known; its columns are empty else.
    """
    truth, output_column = COLUMNS[table.task.kind]
    values = np.array(table.outputs)[table.truth] if table.task.kind == "classes" else table.truth
    rows = table.obs[["part", "slide", "patient", *table.extra_columns]].assign(
        **{name: column if has_truth else "" for name, column in zip(truth, np.atleast_2d(values.T), strict=True)}
    )
    models = np.array([*table.predictions])
    with atomic_path(_table_path(folder)) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        for start in range(0, max(1, len(table)), _CHUNK_ROWS):
            chunk = rows.iloc[start : start + _CHUNK_ROWS]
            lines = chunk.loc[chunk.index.repeat(len(models))]
            names = np.tile(models, len(chunk))
            lines.insert(0, "site", table.site)
            lines.insert(1, "model", names)
            lines.insert(2, "selected", names == table.model)
            predictions = np.stack(
                [values[start : start + _CHUNK_ROWS] for values in table.predictions.values()], axis=1
            )
            for k, output in enumerate(table.outputs):
                lines[output_column.format(output)] = predictions[:, :, k].ravel()
            lines.to_csv(file, header=start == 0, index=False, lineterminator="\n")


def compute_seal(folder: SiteFolder) -> _TableSeal:
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
    rows = _read_rows(folder, model)
    truth, output_column = COLUMNS[task.kind]
    prefix = output_column.removesuffix("{}")
    outputs = tuple(name.removeprefix(prefix) for name in rows if name.startswith(prefix))
    if not outputs or (model and not len(rows)):
        return None
    model_name = rows["model"].iloc[0] if len(rows) else "private"
    try:
        truth_values = _parse_truth(rows[[*truth]].to_numpy(str), outputs, task)
        values = rows[[output_column.format(name) for name in outputs]].to_numpy(np.float64)
    except (KeyError, ValueError) as error:
        raise _table_error(folder, f"holds an invalid prediction ({error})") from None
    columns = [*rows][_KEY_COLUMNS.index("part") : [*rows].index(truth[0])]
    obs = rows[columns].assign(**tabulate_truth(truth_values))
    table = PredictionTable(folder.path.name, model_name, obs, {model_name: values}, outputs, task)
    if problem := _find_problem(table, row_of_evaluation.get("n")):
        raise _table_error(folder, problem)
    return table


def _read_rows(folder: SiteFolder, model: str | None) -> pd.DataFrame:
    """Return the complete lines of a model, by default of the prediction model, as texts."""
    chunks, n = [], 0
    try:
        with require_regular_file(_table_path(folder)).open(newline="", encoding="utf-8") as file:
            for chunk in pd.read_csv(file, dtype=str, keep_default_na=False, chunksize=_CHUNK_ROWS):
                if tuple(chunk.columns[: len(_KEY_COLUMNS)]) != _KEY_COLUMNS:
                    raise WsiFlError(f"{_table_path(folder)}: another version wrote it; evaluate the run again")
                for row in np.flatnonzero(chunk.isna().any(axis=1))[:1]:
                    raise _table_error(folder, f"example line {n + row + 1} is cut off")
                n += len(chunk)
                chunks.append(chunk[chunk["model"] == model if model else chunk["selected"] == "True"])
    except pd.errors.EmptyDataError:
        raise _table_error(folder, "is empty") from None
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise _table_error(folder, f"is no table ({single_line(error)})") from None
    return pd.concat(chunks, ignore_index=True)


def _parse_truth(cells: NDArray[np.str_], outputs: tuple[str, ...], task: Task) -> Truth:
    """Return the truth of each example from its cells [n, columns]; ValueError for an impossible value."""
    if task.kind == "classes":
        if strange := set(cells[:, 0].tolist()) - set(outputs):
            raise ValueError(f"class {min(strange)!r}")
        return np.asarray(pd.Index(outputs).get_indexer(cells[:, 0]), np.int64)
    return cells.astype(np.float64).reshape(-1, *([2] if task.kind == "survival" else []))


def _find_problem(table: PredictionTable, n: int | None) -> str:
    """Return the problem of a table, impossible numbers or not the n examples that were evaluated; "" without any."""
    values, kind = table.model_predictions, table.task.kind
    if not (np.isfinite(values).all() and (kind == "classes" or np.isfinite(table.truth).all())):
        return "holds numbers that are not finite"
    low, high = values.min(initial=0.0), values.max(initial=0.0)
    if kind != "number" and not -_ROUNDING_TOLERANCE <= low <= high <= 1 + _ROUNDING_TOLERANCE:
        return f"holds probabilities from {low:g} to {high:g}"
    if kind == "classes" and (np.abs(values.sum(1) - 1) > _ROUNDING_TOLERANCE).any():
        return "holds probabilities that do not add up to 1"
    if n is not None and n != len(table):
        return f"has {len(table)} examples where {n} were evaluated"
    columns = table.obs.drop(columns=[*TRUTH_COLUMNS], errors="ignore").join(pd.DataFrame(values))
    repeats = columns.value_counts(sort=False).min() if len(columns) else 1
    return f"has every example {repeats} times" if repeats > 1 and len(table) > repeats else ""


def _table_error(folder: SiteFolder, problem: str) -> WsiFlError:
    run = folder.path.parent.parent.name
    return WsiFlError(f"{_table_path(folder)}: {problem}; run `wsi-fl evaluate {run}` again to rewrite it")


def _load_evaluation_row(folder: SiteFolder) -> Mapping[str, Any]:
    """Return the row of a site in the run's evaluation; {} without one."""
    path = folder.path.parent.parent / "evaluation.json"
    rows = _load_evaluation_rows(path.parent, path.stat().st_mtime_ns) if path.exists() else {}
    return rows.get(folder.path.name, {})


@lru_cache(maxsize=4)
def _load_evaluation_rows(run: Path, _modified: int) -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of a run's evaluation by site, cached until the file is modified."""
    document = RunFolder(run).read("evaluation") or {"sites": []}
    return {row["site"]: {name: row.get(name) for name in ("n", "predictions")} for row in document["sites"]}


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
    keys = table.obs[["part", "patient", "slide", *table.extra_columns]]
    occurrence = keys.groupby([*keys], sort=False).cumcount()  # folds of another seed have the examples on other rows
    rows = keys.assign(occurrence=occurrence).astype(str).itertuples(index=False, name=None)
    labels = np.array(table.outputs)[table.truth].tolist() if task.kind == "classes" else [""] * len(table)
    return dict(zip(rows, zip(values.tolist(), labels, strict=True), strict=True))


def _table_path(folder: SiteFolder) -> Path:
    return folder.path / "predictions.csv"
