"""`run_benchmark`: benefit of methods for hospitals sampled from one table of features, with local and pooled
baselines.

Every method trains linear heads in memory, by the same loop as studies, without stores, runs and ledgers.
"""

from __future__ import annotations

import csv
import inspect
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.metrics import Probabilities, choose_classes
from wsi_fl.federation.federate import SiteResult, federate
from wsi_fl.federation.methods import LOCAL_METHOD, METHODS, POOLED_METHOD
from wsi_fl.learning.ensemble import build_ensemble
from wsi_fl.learning.tuning import FittedHead, fit_linear_head, softmax
from wsi_fl.models.mil import build_linear_head
from wsi_fl.oneshot.projection import N_RANDOM, Projection, fit_projection, normalize_rows, read_projection
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.privacy.privacy_plan import Unit, propose_plan
from wsi_fl.report.templates import fill_template
from wsi_fl.slides.layouts.common import TableRow, group_pairs, match_slide_name, read_rows, suggest_decimal_point
from wsi_fl.slides.layouts.spreadsheets import parse_cell_number
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.system.file_names import compose_text, describe_mismatch, is_missing
from wsi_fl.system.files import read_object, refuse_unavailable, require_regular_file, write_json, write_text
from wsi_fl.types import ExcludedSlide, UsageError, WsiFlError, single_line

DELTA = 1e-5
_MAX_TEST_PATIENTS = 500
"""Largest number of test patients of each class."""
_TUNING_SEED = -1
"""Seed of the sample for choosing the rounds and the learning rate of a method."""
_HYPERPARAMETERS = tuple(itertools.product((20, 60), (1e-2, 3e-2, 1e-1)))
"""Candidates of (rounds, learning rate)."""
_NAMED_SKEWS = ("alike", "missing-class")
_NON_FEATURE_COLUMNS = ("label", "patient")
"""Columns of a table without features."""
_NUMBER_PATTERN = re.compile(r"[+-]?(inf|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
_MAX_NAMED_SLIDES = 5
"""Largest number of excluded slides named in a message; the others are counted."""
_RESULT_COLUMNS = (
    *("method", "epsilon", "sites", "n", "skew", "seed", "site", "score", "auroc", "own_score"),
    *("rounds", "lr", "spent", "guarantee", "seconds"),
)


class SamplingCell(NamedTuple):
    """Sampling of hospitals: their number, patients of each, and class skew.

    `skew` is the share of one class at a hospital, by turns: "0.9"; "alike" samples at random; with "missing-class" the
    last hospital has no patient of the first class.
    """

    sites: int
    n: int
    skew: str


def parse_cells(hospitals: str, skews: str) -> list[SamplingCell]:
    """Return the cells of "4x150,16x50" and "alike,0.9"; a size may have a skew of its own, as in "8x200:1".

    Example:
        >>> parse_cells("4x150,8x200:1", "alike,0.9")[1:]
        [SamplingCell(sites=4, n=150, skew='0.9'), SamplingCell(sites=8, n=200, skew='1')]
    """
    cells = []
    for cell_text in hospitals.split(","):
        size, _, own_skew = cell_text.partition(":")
        sites, _, n = size.partition("x")
        if not (sites.isdecimal() and n.isdecimal() and int(sites) > 1 and int(n) > 1):
            raise UsageError(f"--hospitals {cell_text!r}: write 4x150 for four hospitals of 150 patients each")
        for skew in (own_skew or skews).split(","):
            if skew == "lacks":
                raise UsageError("--skew lacks was renamed: use --skew missing-class")
            if skew not in _NAMED_SKEWS and not 0 < parse_numbers(skew, "--skew")[0] <= 1:
                raise UsageError(f"--skew {skew!r}: known are {', '.join(_NAMED_SKEWS)} and shares up to 1")
            cells.append(SamplingCell(int(sites), int(n), skew))
    return cells


def parse_numbers(text: str, option: str = "--epsilon") -> list[float]:
    """Return positive numbers from a comma-separated text; UsageError for anything else."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < value < 1e6 for value in numbers):
        raise UsageError(f"{option} {text!r}: write numbers above 0 with commas between")
    return numbers


def sample_sites(table: FeatureTable, cell: SamplingCell, seed: int) -> tuple[list[FeatureTable], FeatureTable]:
    """Sample hospitals and a disjoint test set by patient; a patient's class is that of the first row.

    Raises:
        UsageError: for too few patients.
    """
    rng = np.random.default_rng(seed + 1000)
    names = np.array([name or f"row {row}" for row, name in enumerate(table.patient.tolist())])
    _, first_row, patient_of_row = np.unique(names, return_index=True, return_inverse=True)
    label = table.y[first_row]
    remaining = {
        label_index: list(rng.permutation(np.flatnonzero(label == label_index)))
        for label_index in range(len(table.classes))
    }
    shares = np.bincount(label) / len(label)

    def take_patients(label_index: int, count: int) -> list[int]:
        if count > len(remaining[label_index]):
            raise UsageError(
                f"{cell.sites}x{cell.n} {cell.skew}: too few patients (or rows) of {table.classes[label_index]}: "
                f"the next hospital needs {count}, {len(remaining[label_index])} are left; "
                "patients of no hospital are the test set"
            )
        patients, remaining[label_index] = remaining[label_index][:count], remaining[label_index][count:]
        return patients

    def rows_of(patients: Iterable[int]) -> FeatureTable:
        return table.select_rows(np.flatnonzero(np.isin(patient_of_row, list(patients))))

    sites = []
    for index in range(cell.sites):
        part = shares.copy()
        if cell.skew == "missing-class" and index == cell.sites - 1:
            part[0] = 0
        elif cell.skew not in _NAMED_SKEWS:
            major, share = index % len(part), float(cell.skew)
            part[np.arange(len(part)) != major] *= (1 - share) / (part.sum() - part[major])
            part[major] = share
        counts = np.floor(cell.n * part / part.sum()).astype(int)
        counts[np.argmax(part)] += cell.n - counts.sum()
        sites.append(
            rows_of(
                [entity for label_index, count in enumerate(counts) for entity in take_patients(label_index, count)]
            )
        )
    return sites, rows_of([entity for patients in remaining.values() for entity in patients[:_MAX_TEST_PATIENTS]])


@dataclass(frozen=True)
class _TrainingJob:
    """A training of all hospitals, with a line of the result for each."""

    method: str
    epsilon: float
    cell: SamplingCell
    seed: int
    hyperparameters: tuple[int, float] = (1, 1e-3)

    @property
    def sort_key(self) -> tuple[str, ...]:
        values = [str(value) for value in self.hyperparameters] if self.seed == _TUNING_SEED else []
        return (self.method, f"{self.epsilon:g}", *map(str, self.cell), str(self.seed), *values)


def _job_key(row: Mapping[str, str | None]) -> tuple[str, ...]:
    columns = ("rounds", "lr") if row["seed"] == str(_TUNING_SEED) else ()
    return tuple(row[name] or "" for name in ("method", "epsilon", "sites", "n", "skew", "seed", *columns))


_ResultRows = dict[tuple[str, ...], list[dict[str, str]]]
"""The lines of each training by its key."""
_process_state: dict[str, Any] = {}
"""Common values of all trainings in a process."""


def _start_process(table: FeatureTable, projection: Projection | int, unit: Unit) -> None:
    torch.set_num_threads(1)
    _process_state.update(table=table, along=projection, unit=unit)


def _run_job(job: _TrainingJob) -> list[dict[str, object]]:
    start_time = time.monotonic()
    parts, test = sample_sites(_process_state["table"], job.cell, job.seed)
    network_predictions: list[Probabilities] = []
    spendings: list[tuple[float | None, str]] = [(None, "none")] * len(parts)
    if job.method == POOLED_METHOD:
        ensembles = [_predict_with_head(_fit_local_head(join_tables(parts)), test)] * len(parts)
    elif job.method == LOCAL_METHOD:
        ensembles = [_predict_with_head(head, test) for head in _fit_local_heads(job.cell, job.seed)]
    else:
        learners = _train_federated(parts, job)
        private = [site.models.get("private") or next(iter(site.models.values())) for site in learners]
        network_predictions = [_predict_with_network(model, test) for model in private]
        ensembles = _predict_with_ensembles(learners, parts, test, job)
        spendings = [(site.epsilon, site.guarantee) for site in learners]
    seconds = f"{time.monotonic() - start_time:.1f}"
    rows = []
    for index, (predictions, (epsilon, guarantee)) in enumerate(zip(ensembles, spendings, strict=True)):
        leading_cells = (job.method, f"{job.epsilon:g}", *job.cell, job.seed, f"S{index + 1}")
        scores = (
            *_score_predictions(predictions, test.y),
            _score_predictions(network_predictions[index], test.y)[0] if network_predictions else "",
        )
        trailing_cells = (*job.hyperparameters, "" if epsilon is None else f"{epsilon:.4f}", guarantee, seconds)
        rows.append(dict(zip(_RESULT_COLUMNS, (*leading_cells, *scores, *trailing_cells), strict=True)))
    return rows


def _score_predictions(predictions: Probabilities, y: NDArray[np.int64]) -> tuple[str, str]:
    """Return balanced accuracy, and AUROC averaged over classes."""
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    areas = [roc_auc_score(y == label, predictions[:, label]) for label in np.unique(y)]
    return f"{balanced_accuracy_score(y, choose_classes(predictions)):.5f}", f"{np.mean(areas):.5f}"


def _fit_local_head(part: FeatureTable) -> FittedHead:
    return fit_linear_head(normalize_rows(part.x), part.y, part.patient, len(part.classes))


@lru_cache(maxsize=2)
def _fit_local_heads(cell: SamplingCell, seed: int) -> list[FittedHead]:
    """Return the local head of each hospital, tuned by cross-validation over its patients."""
    return [_fit_local_head(part) for part in sample_sites(_process_state["table"], cell, seed)[0]]


def _predict_with_head(head: FittedHead, rows: FeatureTable) -> Probabilities:
    return softmax(normalize_rows(rows.x) @ head.weight.T + head.bias)


def _predict_with_network(model: nn.Module, rows: FeatureTable) -> Probabilities:
    with torch.inference_mode():
        return softmax(model.eval()(torch.from_numpy(rows.x)).double().numpy())


def _train_federated(parts: Sequence[FeatureTable], job: _TrainingJob) -> list[SiteResult]:
    """Return the hospitals' models after federated training."""
    method, unit = METHODS[job.method], _process_state["unit"]
    n_units = min(len(np.unique(part.patient)) if unit == "patient" else len(part.y) for part in parts)
    rounds, lr = job.hyperparameters
    if method.payload.is_single_release:
        batch_size, sigma = n_units, find_sigma(job.epsilon, 1.0, 1, DELTA)
    else:
        plan = propose_plan(n_units, rounds, job.epsilon, DELTA)
        batch_size, sigma = plan.batch_size, plan.mechanism.sigma
    shape = len(parts[0].classes), parts[0].x.shape[1]
    learners = federate(
        {f"S{k + 1}": Cohort.from_arrays(part.x, part.y, part.patient.tolist()) for k, part in enumerate(parts)},
        method,
        private=lambda: build_linear_head(*shape),
        rounds=rounds,
        batch_size=batch_size,
        lr=lr,
        sigma=sigma,
        delta=DELTA,
        unit=unit,
        projection=_process_state["along"],
        seed=max(job.seed, 0),
    )
    return list(learners.values())


def _predict_with_ensembles(
    learners: Sequence[SiteResult], parts: Sequence[FeatureTable], test: FeatureTable, job: _TrainingJob
) -> list[Probabilities]:
    """Return the predictions of each hospital's ensemble of local and federated head, as in a study."""
    predictions = []
    for site, part, local_head in zip(learners, parts, _fit_local_heads(job.cell, job.seed), strict=True):
        model = site.models.get("proxy") or site.models.get("shared") or next(iter(site.models.values()))
        sample_sizes = model.effective_sample_sizes() if isinstance(model, SharedHead) else None
        ensemble = build_ensemble(
            local_head.held_out, _predict_with_network(model, part), part.y, part.patient, sample_sizes
        )
        predictions.append(ensemble(_predict_with_head(local_head, test), _predict_with_network(model, test)))
    return predictions


def run_benchmark(
    path: Path,
    *,
    out: Path,
    methods: Sequence[str] = ("oneshot", "proxyfl", "fedavg"),
    epsilons: Sequence[float] = (1.0,),
    cells: Sequence[SamplingCell],
    unit: str = "row",
    seeds: int = 5,
    projection: Path | None = None,
    labels: Path | None = None,
    jobs: int = 1,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Measure methods on hospitals sampled from a table; return the `--json` document.

    The local and the pooled baseline are heads without noise, tuned by cross-validation. Rounds and learning rate of a
    method in rounds are the best of six on a separate sample, for each cell, at the middle ε. Scores are of a
    hospital's ensemble with its local head, as in a study (`score`), and of the federated model (`own_score`).

    Args:
        path, labels: see `read_table`.
        out: CSV with a line for each method, ε, cell, seed and hospital; existing lines are not computed again.
        methods: names in METHODS, including those of plug-ins.
        cells: sampling of hospitals.
        projection: from public reference slides for `oneshot`, or a table of their features; by default random.
        jobs: number of processes.

    Raises:
        UsageError: for an invalid table, method or cell, or a CSV of another table.
    """
    table, progress = read_table(path, labels), watcher or SilentProgress()
    if table.excluded:
        progress.print_message(_describe_skipped_slides(table.excluded))
    if (unnamed := int((table.patient == "").sum())) and any(table.patient):
        progress.print_message(f"{unnamed} rows name no patient; each counts by itself")
    if unit not in get_args(Unit):
        raise UsageError(f"--unit {unit!r}: use {' or '.join(get_args(Unit))}")
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if method in (LOCAL_METHOD, POOLED_METHOD):
            raise UsageError(f"{method} is always measured as a baseline; leave it out of --method")
        if METHODS[method].bare_disclosures or METHODS[method].learns_from != "own":
            raise UsageError(f"{method} needs more than features; train it in a study")
    for cell in cells:
        sample_sites(table, cell, 0)
    if unit == "patient" and not all(table.patient):
        raise UsageError(f"{path}: --unit patient needs the patient of every row")
    resolved_projection: Projection | int = N_RANDOM
    if projection is not None:
        is_projection_file = projection.suffix == ".safetensors"
        resolved_projection = (
            read_projection(projection, str(projection))
            if is_projection_file
            else fit_projection(read_table(projection).x)
        )
    facts = {"rows": len(table.y), "width": table.x.shape[1], "unit": unit, "classes": [*table.classes]}
    results = _load_valid_results(out, facts, methods, progress)
    middle = sorted(epsilons)[len(epsilons) // 2]
    in_rounds = [name for name in methods if not METHODS[name].payload.is_single_release]
    tuning = [
        _TrainingJob(m, middle, c, _TUNING_SEED, hyperparameters)
        for m in in_rounds
        for c in cells
        for hyperparameters in _HYPERPARAMETERS
    ]
    test_cells = [
        (c, m, e)
        for c in cells
        for m in (LOCAL_METHOD, POOLED_METHOD, *methods)
        for e in ([0.0] if m in (LOCAL_METHOD, POOLED_METHOD) else epsilons)
    ]
    n = len(tuning) + seeds * len(test_cells)

    def run_missing(group_jobs: Sequence[_TrainingJob], n_earlier: int) -> None:
        """Run missing trainings, and write the CSV after each; `n_earlier` is the number of earlier ones."""
        missing = [job for job in group_jobs if job.sort_key not in results]
        n_done = n_earlier + len(group_jobs) - len(missing)
        progress.update("trainings", n_done, n)
        for n_done_now, (job, rows) in enumerate(
            _run_jobs(missing, jobs, (table, resolved_projection, unit)), n_done + 1
        ):
            results[job.sort_key] = [{key: str(value) for key, value in row.items()} for row in rows]
            lines = (",".join(row[name] for name in _RESULT_COLUMNS) for key in sorted(results) for row in results[key])
            write_text(out, "\n".join((",".join(_RESULT_COLUMNS), *lines)) + "\n")
            progress.update("trainings", n_done_now, n, job.method)

    run_missing(tuning, 0)
    best = {(m, c): _select_hyperparameters(results, m, c, middle) for m in in_rounds for c in cells}
    for seed in range(seeds):
        works = [_TrainingJob(m, e, c, seed, best.get((m, c), (1, 1e-3))) for c, m, e in test_cells]
        run_missing(works, len(tuning) + seed * len(test_cells))
    gains = [[_measure_gain(results, m, epsilon, c, seeds) for m in methods for epsilon in epsilons] for c in cells]
    document = {"table": str(path), "rows": str(out), "unit": unit, "delta": DELTA, "seeds": seeds}
    document["excluded"] = [asdict(slide) for slide in table.excluded]
    page = {
        "document": document,
        "columns": [f"{gain['method']}, ε = {gain['epsilon']:g}" for gain in gains[0]],
        "rows": gains,
        "most": max(abs(gain["gain"]) for row in gains for gain in row),
    }
    write_text(out.with_suffix(".html"), fill_template("bench", page))
    return document | {"page": str(out.with_suffix(".html")), "cells": [gain for row in gains for gain in row]}


def _load_valid_results(out: Path, facts: Mapping[str, Any], methods: Sequence[str], progress: Watcher) -> _ResultRows:
    """Return existing lines by training, without those of methods whose code or tuning has changed."""
    info_path = out.with_suffix(".json")
    info = read_object(info_path, "choose another --out") if info_path.exists() else {}
    if info and {key: info.get(key) for key in facts} != facts:
        raise UsageError(f"{out}: holds results of another table or unit; choose another --out")
    code = {name: _method_digest(name) for name in methods}
    known_code = info.get("code")
    known_code = known_code if isinstance(known_code, dict) else {}
    changed = [name for name in methods if known_code.get(name, code[name]) != code[name]]
    for name in changed:
        progress.print_message(f"{name} has changed since {out}; its lines are computed again")
    write_json(info_path, {**facts, "code": known_code | code})
    results: _ResultRows = {}
    for key, rows in _read_results(out).items() if out.exists() else ():
        if rows[0]["method"] in changed:
            continue
        if _is_complete(rows):
            results[key] = rows
        else:
            progress.print_message(
                f"{out}: lines of {' '.join(key)} are damaged, missing or duplicated; they are computed again"
            )
    return results


def _read_results(out: Path) -> _ResultRows:
    """Return the lines of an existing CSV by training.

    Raises:
        UsageError: when it is not a result of bench.
    """
    try:
        with require_regular_file(out).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != _RESULT_COLUMNS:
                raise UsageError(f"{out}: is not what bench writes (its first line differs); choose another --out")
            rows: list[dict[str, str]] = [row for row in reader if row["method"]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{out}: not a readable CSV ({error}); choose another --out") from None
    return group_pairs((_job_key(row), row) for row in rows)


def _is_complete(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a training has one line for each of its hospitals, and every score is a share."""

    def is_share(text: str) -> bool:
        try:
            return 0 <= float(text) <= 1
        except ValueError:
            return False

    is_baseline = rows[0]["method"] in (LOCAL_METHOD, POOLED_METHOD)
    is_rectangular = all(len(row) == len(_RESULT_COLUMNS) and None not in row.values() for row in rows)
    if not is_rectangular or not str(rows[0]["sites"]).isdecimal():
        return False
    hospitals = sorted(f"S{k + 1}" for k in range(int(rows[0]["sites"])))
    is_scored = all(
        is_share(row["score"])
        and is_share(row["auroc"])
        and (is_share(row["own_score"]) if not is_baseline else not row["own_score"])
        for row in rows
    )
    return is_scored and sorted(str(row["site"]) for row in rows) == hospitals


def _method_digest(method: str) -> str:
    """Return a digest of the file of a method's step and of the candidates of hyperparameters."""
    step = METHODS[method].step
    module = inspect.getmodule(step) or inspect.getmodule(type(step))
    file = getattr(module, "__file__", None)
    source = Path(file).read_bytes() if file else b""
    return sha256(source + repr(_HYPERPARAMETERS).encode()).hexdigest()[:16]


def _run_jobs(
    pending_jobs: Sequence[_TrainingJob], jobs: int, common: tuple[Any, ...]
) -> Iterator[tuple[_TrainingJob, list[dict[str, object]]]]:
    if jobs == 1:
        _start_process(*common)
        yield from ((job, _run_job(job)) for job in pending_jobs)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_start_process, initargs=common) as pool:
        pending = {pool.submit(_run_job, job): job for job in pending_jobs}
        try:
            for future in as_completed(pending):
                yield pending[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _select_hyperparameters(results: _ResultRows, method: str, cell: SamplingCell, epsilon: float) -> tuple[int, float]:
    """Return the hyperparameters with the best ensembles; at a tie, with the best federated models."""

    def mean_scores(hyperparameters: tuple[int, float]) -> tuple[float, float]:
        rows = results[_TrainingJob(method, epsilon, cell, _TUNING_SEED, hyperparameters).sort_key]
        score, network_score = (float(np.mean([float(row[name]) for row in rows])) for name in ("score", "own_score"))
        return score, network_score

    return max(_HYPERPARAMETERS, key=mean_scores)


def _measure_gain(results: _ResultRows, method: str, epsilon: float, cell: SamplingCell, seeds: int) -> dict[str, Any]:
    """Return the paired gain in balanced accuracy of a method over local heads in a cell."""
    from scipy.stats import t

    def score_matrix(name: str, epsilon_of_method: float) -> NDArray[np.float64]:
        rows = [results[_TrainingJob(name, epsilon_of_method, cell, seed).sort_key] for seed in range(seeds)]
        return np.array([[float(row["score"]) for row in hospitals] for hospitals in rows])

    local_scores, pooled_scores, federated_scores = (
        score_matrix(LOCAL_METHOD, 0.0),
        score_matrix(POOLED_METHOD, 0.0),
        score_matrix(method, epsilon),
    )
    gains = (federated_scores - local_scores).mean(1)
    half_width = float(t.ppf(0.975, seeds - 1) * gains.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else None
    return {
        "method": method,
        "epsilon": epsilon,
        **cell._asdict(),
        "local": float(local_scores.mean()),
        "federated": float(federated_scores.mean()),
        "pooled": float(pooled_scores.mean()),
        "gain": float(gains.mean()),
        "half_width": half_width,
        "worst_site": float((federated_scores - local_scores).mean(0).min()),
    }


def render_bench_lines(document: dict[str, Any]) -> Lines:
    """Yield a row for each cell, method and ε."""
    rows = []
    for cell_gain in document["cells"]:
        half_width = "" if cell_gain["half_width"] is None else f" ± {cell_gain['half_width']:.3f}"
        numbers = [f"{cell_gain[name]:.3f}" for name in ("local", "federated", "pooled")]
        cell_text = f"{cell_gain['sites']} × {cell_gain['n']}, {cell_gain['skew']}"
        method_text = f"{cell_gain['method']}, ε = {cell_gain['epsilon']:g}"
        rows.append(
            [
                cell_text,
                method_text,
                *numbers,
                f"{cell_gain['gain']:+.3f}{half_width}",
                f"{cell_gain['worst_site']:+.3f}",
            ]
        )
    headings = ["hospitals", "method", "local", "federated", "pooled", "gain", "worst site"]
    yield TextTable("balanced accuracy", headings, rows)
    yield TextLine(f"{document['seeds']} seeds; a gain is paired with the local head, ± its 95 % interval over seeds")
    yield TextLine(f"{document['rows']}: a line for every seed and hospital; {document['page']}: the map")


@dataclass(frozen=True)
class FeatureTable:
    """Rows of features with labels.

    Attributes:
        x: float32[n, d].
        y: int64[n], indices of `classes`.
        patient: str[n]; "" where unknown.
        excluded: excluded slides of a folder.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    patient: NDArray[np.str_]
    classes: tuple[str, ...]
    excluded: tuple[ExcludedSlide, ...] = ()

    def select_rows(self, rows: NDArray[np.int64]) -> FeatureTable:
        """Return a table of some rows."""
        return FeatureTable(self.x[rows], self.y[rows], self.patient[rows], self.classes)


def join_tables(parts: Sequence[FeatureTable]) -> FeatureTable:
    """Return the concatenated rows of tables of the same classes."""
    x, y, patient = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "patient"))
    return FeatureTable(x, y, patient, parts[0].classes)


def read_table(path: Path, labels: Path | None = None) -> FeatureTable:
    """Read features with labels.

    Args:
        path: `.npz` with x [n, d], y [n] and perhaps patient [n]; `.csv` with the columns label, perhaps patient, and
            numbers; a feature store (`.h5`), with a row for each labelled patch, else for the mean of each slide; or
            TRIDENT's folder, with a row for the mean of each slide.
        labels: CSV with the columns slide, label and perhaps patient, for such a folder.

    Raises:
        UsageError: for anything else, fewer than two classes, classes that differ in case only, or invalid numbers.
    """
    readers = {".npz": _read_arrays, ".csv": _read_csv, ".h5": _read_store}
    excluded: list[ExcludedSlide] = []
    if path.is_dir():
        x, y, patient = _read_folder(path, labels, excluded)
    elif path.suffix in readers:
        x, y, patient = readers[path.suffix](path)
    else:
        raise UsageError(f"{path}: features are read from .npz, .csv, .h5, or a folder of TRIDENT's")
    _require_columns(path, x, y, patient)
    unknown = np.array([is_missing(str(name)) for name in y.tolist()], bool)
    if unknown.any():
        excluded += [ExcludedSlide(f"row {row}", "has no label") for row in np.flatnonzero(unknown).tolist()]
        x, y, patient = (values[~unknown] for values in (x, y, patient))
    patient = np.array(["" if is_missing(name) else compose_text(name) for name in map(str, patient.tolist())])
    classes, numbers = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{path}: needs two classes at least; its labels are {', '.join(map(str, classes))}")
    names = tuple(str(name) for name in classes)
    if broken := _find_fraction(names):
        raise UsageError(f"{labels or path}: a label is {broken}; labels are classes, so write names or whole numbers")
    counts = Counter(name.casefold() for name in names)
    if duplicates := [name for name in names if counts[name.casefold()] > 1]:
        raise UsageError(f"{labels or path}: labels {', '.join(duplicates)} differ in case only; write them alike")
    rows = x.astype(np.float32), numbers.astype(np.int64), patient.astype(np.str_)
    return FeatureTable(*rows, names, tuple(excluded))


_TableColumns = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _require_columns(path: Path, x: NDArray[Any], y: NDArray[Any], patient: NDArray[Any]) -> None:
    """Refuse features that are no finite numbers, and labels and patients of another length.

    Raises:
        UsageError: with the array and the first wrong row.
    """
    if x.ndim != 2 or x.shape[:1] != y.shape or patient.shape != y.shape:
        raise UsageError(
            f"{path}: x is {list(x.shape)}, y {list(y.shape)}, patient {list(patient.shape)}; wanted are [n, d], [n] "
            "and [n]"
        )
    if x.dtype.kind not in "biuf" or not x.size:
        raise UsageError(f"{path}: x is {x.dtype}{list(x.shape)}, not features that are numbers")
    if not (finite := np.isfinite(x).all(1)).all():
        rows = np.flatnonzero(~finite)
        raise UsageError(
            f"{path}: features of {len(rows)} rows are not finite numbers, of row {rows[0]} first; leave them out"
        )
    for name, values in (("y", y), ("patient", patient)):
        if values.dtype.kind not in "biufUS":
            raise UsageError(f"{path}: {name} is {values.dtype}, not numbers or texts")


def _find_fraction(names: Sequence[str]) -> str:
    """Return the first fractional label where all labels are numbers; "" else."""
    numbers = [name.replace(",", ".") for name in names]
    if not all(map(_NUMBER_PATTERN.fullmatch, numbers)):
        return ""
    return next((name for name, number in zip(names, numbers, strict=True) if float(number) % 1), "")


def _read_arrays(path: Path) -> _TableColumns:
    try:
        loaded = np.load(require_regular_file(path), allow_pickle=False)
        arrays = {name: loaded[name] for name in ("x", "y", "patient") if name in loaded.files}
    except (AttributeError, EOFError, KeyError, OSError, ValueError, BadZipFile, ZlibError) as error:
        refuse_unavailable(error, path)
        objects = "it holds objects of Python; save numbers and texts as arrays"
        why = objects if "pickle" in str(error) else single_line(error)
        raise UsageError(f"{path}: not a file of NumPy with x and y ({why})") from None
    if missing := [name for name in ("x", "y") if not isinstance(arrays.get(name), np.ndarray)]:
        raise UsageError(f"{path}: not a file of NumPy with x and y (its {missing[0]} is no array, or missing)")
    y = arrays["y"]
    patient = arrays.get("patient", np.full(y.shape, ""))
    if not isinstance(patient, np.ndarray):
        raise UsageError(f"{path}: its patient is no array of NumPy")
    y, patient = (
        np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values for values in (y, patient)
    )
    return arrays["x"], y, patient


def _read_csv(path: Path) -> _TableColumns:
    def parse_number(row: TableRow, name: str) -> float:
        try:
            return parse_cell_number(row[name])
        except ValueError:
            remedy = suggest_decimal_point(row[name]) or "; leave that column out, or the row"
            raise UsageError(
                f"{row.where}: {name} is {row[name]!r}, and all columns but label and patient are numbers{remedy}"
            ) from None

    rows = read_rows(path, ["label"])
    x = np.array([[parse_number(row, name) for name in row if name not in _NON_FEATURE_COLUMNS] for row in rows])
    return x, np.array([row["label"] for row in rows]), np.array([row.read_value("patient") for row in rows])


def _read_store(path: Path) -> _TableColumns:
    with BagStore(path) as store:
        classes = np.array(store.meta.classes)
        if store.has_patch_labels:
            patches = store.patch_table
            return store.read(np.arange(len(patches))), classes[patches.label], np.array(patches.patient)
        means = [store.read_bag(k).features.mean(0) for k in range(len(store))]
        return np.stack(means), classes[store.table.label], np.array(store.table.patient)


def _read_folder(path: Path, labels: Path | None, excluded: list[ExcludedSlide]) -> _TableColumns:
    """Return a row for each slide with a label and complete features; the others are excluded."""
    if labels is None:
        raise UsageError(f"{path}: --labels names a CSV with the columns slide, label and perhaps patient")
    layout, rows = LAYOUTS["trident"], read_rows(labels, ["slide"])
    label_column = next((column for column in ("label", "diagnosis") if rows and column in rows[0]), None)
    if label_column is None:
        raise UsageError(f"{labels}: column 'label' or 'diagnosis' is missing")
    files, entries, slides = layout.find(path), [], set()
    for row in rows:
        slide = match_slide_name(row["slide"], files)
        if slide in slides:
            raise UsageError(f"{row.where}: slide {slide} has a row already")
        slides.add(slide)
        try:
            if not row.read_value(label_column):
                raise WsiFlError(f"has no label ({row.where})")
            if slide not in files:
                raise WsiFlError(f"has a label ({row.where}) and no features")
            entries.append((layout.read(files[slide]).features.mean(0), row[label_column], row.read_value("patient")))
        except WsiFlError as error:
            excluded.append(ExcludedSlide(slide, str(error)))
    excluded += [ExcludedSlide(name, f"has no label in {labels.name}") for name in files if name not in slides]
    if not entries:
        why = "" if slides & set(files) else f"{describe_mismatch(slides, files)}; "
        raise UsageError(
            f"{labels}: none of its slides has a label and features in {path}; "
            f"{why}{_describe_skipped_slides(excluded)}"
        )
    means, label, patient = zip(*entries, strict=True)
    if len({len(mean) for mean in means}) > 1:
        raise UsageError(f"{path}: features of its slides are not equally wide; keep those of one encoder")
    return np.stack(means), np.array(label), np.array(patient)


def _describe_skipped_slides(excluded: Sequence[ExcludedSlide]) -> str:
    """Return a message on excluded slides, the first by name."""
    hint = "; --json names all" if len(excluded) > _MAX_NAMED_SLIDES else ""
    reasons = "; ".join(f"{slide.slide}: {slide.reason}" for slide in excluded[:_MAX_NAMED_SLIDES])
    return f"slides excluded: {len(excluded)} ({reasons}{hint})"
