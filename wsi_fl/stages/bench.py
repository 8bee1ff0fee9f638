"""`bench`: what methods bring hospitals drawn from one table of features, beside staying alone and pooling all.

Every method trains linear heads in memory, by the loop of every study. No store, no run and no ledger is made.
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

from wsi_fl.federation.in_memory import Learned, federate
from wsi_fl.federation.methods import ALONE, METHODS, POOLED
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.metrics import Probabilities, choose_classes
from wsi_fl.learning.stacking import stacked
from wsi_fl.learning.tuning import FittedHead, fitted_head, softmax
from wsi_fl.models.directions import N_RANDOM, Directions, normalised, public_directions, read_directions
from wsi_fl.models.mil import linear_head
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.accounting import sigma_for
from wsi_fl.privacy.plan import Unit, planned
from wsi_fl.report.fill import fill
from wsi_fl.slides.layouts.common import TableRow, decimal_point, group_pairs, rows_of, slide_named
from wsi_fl.slides.layouts.spreadsheets import number_of
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.exchange import LAYOUTS
from wsi_fl.system.files import ordinary, read_object, refuse_unavailable, write_json, write_text
from wsi_fl.system.names import compose_text, describe_mismatch, is_missing
from wsi_fl.types import SetAside, UsageError, WsiFlError, one_line

DELTA = 1e-5
_TEST = 500
"""Of each class, where so many are left."""
_TUNING = -1
"""The seed of the draw on which the rounds and the learning rate of a method are chosen."""
_WAYS = tuple(itertools.product((20, 60), (1e-2, 3e-2, 1e-1)))
"""(rounds, learning rate) that are tried."""
_NAMED_SKEWS = ("alike", "missing-class")
_NAMES = ("label", "patient")
"""Columns of a table that are no features."""
_NUMBER = re.compile(r"[+-]?(inf|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
_NAMED = 5
"""Slides that give no row and are named to people; the others are counted."""
_COLUMNS = (
    *("method", "epsilon", "sites", "n", "skew", "seed", "site", "score", "auroc", "own_score"),
    *("rounds", "lr", "spent", "guarantee", "seconds"),
)


class Cell(NamedTuple):
    """How hospitals are drawn: so many, of so many patients each, and how unlike they are.

    `skew` is the share of one class at a hospital, by turns: "0.9"; "alike" draws at random; with
    "missing-class" the last one has never seen the first class.
    """

    sites: int
    n: int
    skew: str


def cells_of(hospitals: str, skews: str) -> list[Cell]:
    """Return the cells of "4x150,16x50" and "alike,0.9"; a size may have a skew of its own, as in "8x200:1".

    Example:
        >>> cells_of("4x150,8x200:1", "alike,0.9")[1:]
        [Cell(sites=4, n=150, skew='0.9'), Cell(sites=8, n=200, skew='1')]
    """
    found = []
    for named in hospitals.split(","):
        size, _, own = named.partition(":")
        sites, _, n = size.partition("x")
        if not (sites.isdecimal() and n.isdecimal() and int(sites) > 1 and int(n) > 1):
            raise UsageError(f"--hospitals {named!r}: write 4x150 for four hospitals of 150 patients each")
        for skew in (own or skews).split(","):
            if skew == "lacks":
                raise UsageError("--skew lacks was renamed: use --skew missing-class")
            if skew not in _NAMED_SKEWS and not 0 < numbers_of(skew, "--skew")[0] <= 1:
                raise UsageError(f"--skew {skew!r}: known are {', '.join(_NAMED_SKEWS)} and shares up to 1")
            found.append(Cell(int(sites), int(n), skew))
    return found


def numbers_of(text: str, option: str = "--epsilon") -> list[float]:
    """Return the numbers above 0 that are written with commas between; UsageError for anything else."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < 1e6 for one in found):
        raise UsageError(f"{option} {text!r}: write numbers above 0 with commas between")
    return found


def drawn(table: FeatureTable, cell: Cell, seed: int) -> tuple[list[FeatureTable], FeatureTable]:
    """Draw hospitals and a test that none of them has; whole patients, who count as of the class of their first row.

    Raises:
        UsageError: where there are too few.
    """
    rng = np.random.default_rng(seed + 1000)
    names = np.array([name or f"row {row}" for row, name in enumerate(table.patient.tolist())])
    _, first, whose = np.unique(names, return_index=True, return_inverse=True)
    label = table.y[first]
    left = {one: list(rng.permutation(np.flatnonzero(label == one))) for one in range(len(table.classes))}
    shares = np.bincount(label) / len(label)

    def some(one: int, count: int) -> list[int]:
        if count > len(left[one]):
            raise UsageError(
                f"{cell.sites}x{cell.n} {cell.skew}: too few patients (or rows) of {table.classes[one]}: the next "
                f"hospital needs {count}, {len(left[one])} are left; what no hospital takes is the test"
            )
        found, left[one] = left[one][:count], left[one][count:]
        return found

    def rows_of(entities: Iterable[int]) -> FeatureTable:
        return table.taken(np.flatnonzero(np.isin(whose, list(entities))))

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
        sites.append(rows_of([entity for one, count in enumerate(counts) for entity in some(one, count)]))
    return sites, rows_of([entity for rest in left.values() for entity in rest[:_TEST]])


@dataclass(frozen=True)
class _Work:
    """One training of all hospitals: a line of the result for each of them."""

    method: str
    epsilon: float
    cell: Cell
    seed: int
    way: tuple[int, float] = (1, 1e-3)

    @property
    def key(self) -> tuple[str, ...]:
        ways = [str(one) for one in self.way] if self.seed == _TUNING else []
        return (self.method, f"{self.epsilon:g}", *map(str, self.cell), str(self.seed), *ways)


def _key(row: Mapping[str, str | None]) -> tuple[str, ...]:
    ways = ("rounds", "lr") if row["seed"] == str(_TUNING) else ()
    return tuple(row[name] or "" for name in ("method", "epsilon", "sites", "n", "skew", "seed", *ways))


_Results = dict[tuple[str, ...], list[dict[str, str]]]
"""The lines of each training, by what it was."""
_shared: dict[str, Any] = {}
"""In each process, what all works have in common."""


def _begin(table: FeatureTable, along: Directions | int, unit: Unit) -> None:
    torch.set_num_threads(1)
    _shared.update(table=table, along=along, unit=unit)


def _done(work: _Work) -> list[dict[str, object]]:
    began = time.monotonic()
    parts, test = drawn(_shared["table"], work.cell, work.seed)
    own: list[Probabilities] = []
    spent: list[tuple[float | None, str]] = [(None, "none")] * len(parts)
    if work.method == POOLED:
        answers = [_said(_fitted(together(parts)), test)] * len(parts)
    elif work.method == ALONE:
        answers = [_said(head, test) for head in _alone(work.cell, work.seed)]
    else:
        learned = _learned(parts, work)
        private = [site.models.get("private") or next(iter(site.models.values())) for site in learned]
        own = [_asked(model, test) for model in private]
        answers = _mixed(learned, parts, test, work)
        spent = [(site.epsilon, site.guarantee) for site in learned]
    seconds = f"{time.monotonic() - began:.1f}"
    rows = []
    for index, (said, (epsilon, guarantee)) in enumerate(zip(answers, spent, strict=True)):
        before = (work.method, f"{work.epsilon:g}", *work.cell, work.seed, f"S{index + 1}")
        scores = (*_scores(said, test.y), _scores(own[index], test.y)[0] if own else "")
        after = (*work.way, "" if epsilon is None else f"{epsilon:.4f}", guarantee, seconds)
        rows.append(dict(zip(_COLUMNS, (*before, *scores, *after), strict=True)))
    return rows


def _scores(said: Probabilities, y: NDArray[np.int64]) -> tuple[str, str]:
    """Return balanced accuracy, and AUROC averaged over classes."""
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    areas = [roc_auc_score(y == one, said[:, one]) for one in np.unique(y)]
    return f"{balanced_accuracy_score(y, choose_classes(said)):.5f}", f"{np.mean(areas):.5f}"


def _fitted(part: FeatureTable) -> FittedHead:
    return fitted_head(normalised(part.x), part.y, part.patient, len(part.classes))


@lru_cache(maxsize=2)
def _alone(cell: Cell, seed: int) -> list[FittedHead]:
    """Return the head that each hospital has alone, tuned on its own held-out patients."""
    return [_fitted(part) for part in drawn(_shared["table"], cell, seed)[0]]


def _said(head: FittedHead, rows: FeatureTable) -> Probabilities:
    return softmax(normalised(rows.x) @ head.weight.T + head.bias)


def _asked(model: nn.Module, rows: FeatureTable) -> Probabilities:
    with torch.inference_mode():
        return softmax(model.eval()(torch.from_numpy(rows.x)).double().numpy())


def _learned(parts: Sequence[FeatureTable], work: _Work) -> list[Learned]:
    """Return what hospitals have after training together."""
    row, unit = METHODS[work.method], _shared["unit"]
    fewest = min(len(np.unique(part.patient)) if unit == "patient" else len(part.y) for part in parts)
    rounds, lr = work.way
    if row.once:
        batch_size, sigma = fewest, sigma_for(work.epsilon, 1.0, 1, DELTA)
    else:
        plan = planned(fewest, rounds, work.epsilon, DELTA)
        batch_size, sigma = plan.batch_size, plan.mechanism.sigma
    shape = len(parts[0].classes), parts[0].x.shape[1]
    learned = federate(
        {f"S{k + 1}": Examples.of(part.x, part.y, part.patient.tolist()) for k, part in enumerate(parts)},
        row,
        private=lambda: linear_head(*shape),
        rounds=rounds,
        batch_size=batch_size,
        lr=lr,
        sigma=sigma,
        delta=DELTA,
        unit=unit,
        directions=_shared["along"],
        seed=max(work.seed, 0),
    )
    return list(learned.values())


def _mixed(
    learned: Sequence[Learned], parts: Sequence[FeatureTable], test: FeatureTable, work: _Work
) -> list[Probabilities]:
    """Return what each hospital answers with: a mixture with the head that it has alone, as a study does."""
    answers = []
    for site, part, lone in zip(learned, parts, _alone(work.cell, work.seed), strict=True):
        model = site.models.get("proxy") or site.models.get("shared") or next(iter(site.models.values()))
        worth = model.worth() if isinstance(model, SharedHead) else None
        stack = stacked(lone.held_out, _asked(model, part), part.y, part.patient, worth)
        answers.append(stack(_said(lone, test), _asked(model, test)))
    return answers


def bench(
    path: Path,
    *,
    out: Path,
    methods: Sequence[str] = ("oneshot", "proxyfl", "fedavg"),
    epsilons: Sequence[float] = (1.0,),
    cells: Sequence[Cell],
    unit: str = "row",
    seeds: int = 5,
    along: Path | None = None,
    labels: Path | None = None,
    jobs: int = 1,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Measure methods on hospitals drawn from a table; return the `--json` document.

    A hospital alone and all data pooled are heads without noise, tuned by cross-validation. Rounds and learning rate of
    a method that has rounds are the best of six on a draw of its own, for each cell, at the middle ε. What a hospital
    answers with is measured (`score`), which contains its lone head as in a study, and what the method's model says by
    itself (`own_score`).

    Args:
        path, labels: see `read_table`.
        out: CSV with a line for each method, ε, cell, seed and hospital. What is there already is not computed again.
        methods: names in METHODS, those of other packages included.
        cells: how hospitals are drawn.
        along: directions of public tissue for `oneshot`, or a table of its features; random ones without.
        jobs: processes.

    Raises:
        UsageError: for a table, methods or cells that do not go, or a CSV of another table.
    """
    table, told = read_table(path, labels), watcher or Silent()
    if table.aside:
        told.say(_told(table.aside))
    if (unnamed := int((table.patient == "").sum())) and any(table.patient):
        told.say(f"{unnamed} rows name no patient; each counts by itself")
    if unit not in get_args(Unit):
        raise UsageError(f"--unit {unit!r}: use {' or '.join(get_args(Unit))}")
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if method in (ALONE, POOLED):
            raise UsageError(f"{method} is measured beside every method anyway; leave it out of --method")
        if METHODS[method].without_dp or METHODS[method].learns_from != "own":
            raise UsageError(f"{method} needs more than features; train it in a study")
    for cell in cells:
        drawn(table, cell, 0)
    if unit == "patient" and not all(table.patient):
        raise UsageError(f"{path}: --unit patient needs the patient of every row")
    towards: Directions | int = N_RANDOM
    if along is not None:
        made = along.suffix == ".safetensors"
        towards = read_directions(along, str(along)) if made else public_directions(read_table(along).x)
    facts = {"rows": len(table.y), "width": table.x.shape[1], "unit": unit, "classes": [*table.classes]}
    there = _still_good(out, facts, methods, told)
    middle = sorted(epsilons)[len(epsilons) // 2]
    in_rounds = [name for name in methods if not METHODS[name].once]
    tuning = [_Work(m, middle, c, _TUNING, way) for m in in_rounds for c in cells for way in _WAYS]
    tested = [
        (c, m, e)
        for c in cells
        for m in (ALONE, POOLED, *methods)
        for e in ([0.0] if m in (ALONE, POOLED) else epsilons)
    ]
    n = len(tuning) + seeds * len(tested)

    def work_off(works: Sequence[_Work], before: int) -> None:
        """Do what is not there; after each training the CSV holds it. Earlier works were so many."""
        asked = [work for work in works if work.key not in there]
        done = before + len(works) - len(asked)
        told.update("trainings", done, n)
        for number, (work, rows) in enumerate(_results(asked, jobs, (table, towards, unit)), done + 1):
            there[work.key] = [{key: str(value) for key, value in row.items()} for row in rows]
            lines = (",".join(row[name] for name in _COLUMNS) for key in sorted(there) for row in there[key])
            write_text(out, "\n".join((",".join(_COLUMNS), *lines)) + "\n")
            told.update("trainings", number, n, work.method)

    work_off(tuning, 0)
    best = {(m, c): _best(there, m, c, middle) for m in in_rounds for c in cells}
    for seed in range(seeds):
        works = [_Work(m, e, c, seed, best.get((m, c), (1, 1e-3))) for c, m, e in tested]
        work_off(works, len(tuning) + seed * len(tested))
    gains = [[_gain(there, m, epsilon, c, seeds) for m in methods for epsilon in epsilons] for c in cells]
    document = {"table": str(path), "rows": str(out), "unit": unit, "delta": DELTA, "seeds": seeds}
    document["excluded"] = [asdict(one) for one in table.aside]
    page = {
        "document": document,
        "columns": [f"{one['method']}, ε = {one['epsilon']:g}" for one in gains[0]],
        "rows": gains,
        "most": max(abs(one["gain"]) for row in gains for one in row),
    }
    write_text(out.with_suffix(".html"), fill("bench", page))
    return document | {"page": str(out.with_suffix(".html")), "cells": [one for row in gains for one in row]}


def _still_good(out: Path, facts: Mapping[str, Any], methods: Sequence[str], told: Watcher) -> _Results:
    """Return the lines that are there by training, without those of methods whose code or tuning has changed since."""
    beside = out.with_suffix(".json")
    before = read_object(beside, "choose another --out") if beside.exists() else {}
    if before and {key: before.get(key) for key in facts} != facts:
        raise UsageError(f"{out}: holds results of another table or unit; choose another --out")
    code = {name: _code_of(name) for name in methods}
    known = before.get("code")
    known = known if isinstance(known, dict) else {}
    changed = [name for name in methods if known.get(name, code[name]) != code[name]]
    for name in changed:
        told.say(f"{name} has changed since {out}; its lines are made anew")
    write_json(beside, {**facts, "code": known | code})
    found: _Results = {}
    for key, rows in _lines_of(out).items() if out.exists() else ():
        if rows[0]["method"] in changed:
            continue
        if _whole(rows):
            found[key] = rows
        else:
            told.say(
                f"{out}: lines of {' '.join(key)} are damaged, missing or there twice; they are made anew"
            )
    return found


def _lines_of(out: Path) -> _Results:
    """Return the lines of an earlier result by training.

    Raises:
        UsageError: when it is no such result.
    """
    try:
        with ordinary(out).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != _COLUMNS:
                raise UsageError(
                    f"{out}: is not what bench writes (its first line differs); choose another --out"
                )
            rows: list[dict[str, str]] = [row for row in reader if row["method"]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{out}: not a readable CSV ({error}); choose another --out") from None
    return group_pairs((_key(row), row) for row in rows)


def _whole(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a training has one line for each of its hospitals, and every score is a share."""

    def is_share(text: str) -> bool:
        try:
            return 0 <= float(text) <= 1
        except ValueError:
            return False

    alone = rows[0]["method"] in (ALONE, POOLED)
    complete = all(len(row) == len(_COLUMNS) and None not in row.values() for row in rows)
    if not complete or not str(rows[0]["sites"]).isdecimal():
        return False
    hospitals = sorted(f"S{k + 1}" for k in range(int(rows[0]["sites"])))
    scored = all(
        is_share(row["score"])
        and is_share(row["auroc"])
        and (is_share(row["own_score"]) if not alone else not row["own_score"])
        for row in rows
    )
    return scored and sorted(str(row["site"]) for row in rows) == hospitals


def _code_of(method: str) -> str:
    """Return a digest of what the lines of a method depend on: the file of its step, and the ways that are tried."""
    step = METHODS[method].step
    module = inspect.getmodule(step) or inspect.getmodule(type(step))
    file = getattr(module, "__file__", None)
    source = Path(file).read_bytes() if file else b""
    return sha256(source + repr(_WAYS).encode()).hexdigest()[:16]


def _results(
    works: Sequence[_Work], jobs: int, common: tuple[Any, ...]
) -> Iterator[tuple[_Work, list[dict[str, object]]]]:
    if jobs == 1:
        _begin(*common)
        yield from ((work, _done(work)) for work in works)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=common) as pool:
        pending = {pool.submit(_done, work): work for work in works}
        try:
            for future in as_completed(pending):
                yield pending[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _best(there: _Results, method: str, cell: Cell, epsilon: float) -> tuple[int, float]:
    """Return the way whose answers were best; where joining changes no answer, whose models were."""

    def reached(way: tuple[int, float]) -> tuple[float, float]:
        rows = there[_Work(method, epsilon, cell, _TUNING, way).key]
        score, own = (float(np.mean([float(row[name]) for row in rows])) for name in ("score", "own_score"))
        return score, own

    return max(_WAYS, key=reached)


def _gain(there: _Results, method: str, epsilon: float, cell: Cell, seeds: int) -> dict[str, Any]:
    """Return what a method brings in a cell: balanced accuracy less that of staying alone, in pairs."""
    from scipy.stats import t

    def scores(name: str, at: float) -> NDArray[np.float64]:
        rows = [there[_Work(name, at, cell, seed).key] for seed in range(seeds)]
        return np.array([[float(row["score"]) for row in hospitals] for hospitals in rows])

    alone, pooled, joined = scores(ALONE, 0.0), scores(POOLED, 0.0), scores(method, epsilon)
    gains = (joined - alone).mean(1)
    half = float(t.ppf(0.975, seeds - 1) * gains.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else None
    return {
        "method": method,
        "epsilon": epsilon,
        **cell._asdict(),
        "local": float(alone.mean()),
        "federated": float(joined.mean()),
        "pooled": float(pooled.mean()),
        "gain": float(gains.mean()),
        "half_width": half,
        "worst_site": float((joined - alone).mean(0).min()),
    }


def bench_lines(document: dict[str, Any]) -> Lines:
    """Yield a row for each cell, method and ε."""
    rows = []
    for one in document["cells"]:
        half = "" if one["half_width"] is None else f" ± {one['half_width']:.3f}"
        numbers = [f"{one[name]:.3f}" for name in ("local", "federated", "pooled")]
        cell = f"{one['sites']} × {one['n']}, {one['skew']}"
        what = f"{one['method']}, ε = {one['epsilon']:g}"
        rows.append([cell, what, *numbers, f"{one['gain']:+.3f}{half}", f"{one['worst_site']:+.3f}"])
    headings = ["hospitals", "method", "local", "federated", "pooled", "gain", "worst site"]
    yield Table("balanced accuracy", headings, rows)
    yield Line(
        f"{document['seeds']} seeds; a gain is paired with staying alone, ± its 95 % interval over seeds"
    )
    yield Line(f"{document['rows']}: a line for every seed and hospital; {document['page']}: the map")


@dataclass(frozen=True)
class FeatureTable:
    """Rows of features with labels.

    Attributes:
        x: float32[n, d].
        y: int64[n], numbers of `classes`.
        patient: str[n]; "" where it is not known.
        aside: slides of a folder that give no row.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    patient: NDArray[np.str_]
    classes: tuple[str, ...]
    aside: tuple[SetAside, ...] = ()

    def taken(self, rows: NDArray[np.int64]) -> FeatureTable:
        """Return some rows."""
        return FeatureTable(self.x[rows], self.y[rows], self.patient[rows], self.classes)


def together(parts: Sequence[FeatureTable]) -> FeatureTable:
    """Return the rows of several tables of the same classes."""
    x, y, patient = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "patient")
    )
    return FeatureTable(x, y, patient, parts[0].classes)


def read_table(path: Path, labels: Path | None = None) -> FeatureTable:
    """Read features with labels.

    Args:
        path: `.npz` with x [n, d], y [n] and perhaps patient [n]; `.csv` with the columns label, perhaps patient, and
            numbers; a store of features (`.h5`) of this program, with a row for each patch where patches have labels of
            their own and else for each slide, the mean; or a folder as TRIDENT writes it, whose slides count with
            their mean.
        labels: CSV with the columns slide, label and perhaps patient, for such a folder.

    Raises:
        UsageError: for anything else, fewer than two classes, classes alike but for case, or numbers that are none.
    """
    readers = {".npz": _of_arrays, ".csv": _of_csv, ".h5": _of_store}
    aside: list[SetAside] = []
    if path.is_dir():
        x, y, patient = _of_folder(path, labels, aside)
    elif path.suffix in readers:
        x, y, patient = readers[path.suffix](path)
    else:
        raise UsageError(f"{path}: features are read from .npz, .csv, .h5, or a folder of TRIDENT's")
    _require_columns(path, x, y, patient)
    unknown = np.array([is_missing(str(name)) for name in y.tolist()], bool)
    if unknown.any():
        aside += [SetAside(f"row {row}", "has no label") for row in np.flatnonzero(unknown).tolist()]
        x, y, patient = (values[~unknown] for values in (x, y, patient))
    patient = np.array(
        ["" if is_missing(name) else compose_text(name) for name in map(str, patient.tolist())]
    )
    classes, numbers = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{path}: needs two classes at least; its labels are {', '.join(map(str, classes))}")
    names = tuple(str(name) for name in classes)
    if broken := _not_whole(names):
        raise UsageError(
            f"{labels or path}: a label is {broken}; labels are classes, so write names or whole numbers"
        )
    often = Counter(name.casefold() for name in names)
    if alike := [name for name in names if often[name.casefold()] > 1]:
        raise UsageError(f"{labels or path}: labels {', '.join(alike)} differ in case only; write them alike")
    rows = x.astype(np.float32), numbers.astype(np.int64), patient.astype(np.str_)
    return FeatureTable(*rows, names, tuple(aside))


_Columns = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _require_columns(path: Path, x: NDArray[Any], y: NDArray[Any], patient: NDArray[Any]) -> None:
    """Refuse features that are no numbers, and labels and patients that are not one for each row.

    Raises:
        UsageError: naming the array and the first row that is at fault.
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


def _not_whole(names: Sequence[str]) -> str:
    """Return the first of the labels that is no whole number, where all are numbers; "" elsewhere."""
    numbers = [name.replace(",", ".") for name in names]
    if not all(map(_NUMBER.fullmatch, numbers)):
        return ""
    return next((name for name, number in zip(names, numbers, strict=True) if float(number) % 1), "")


def _of_arrays(path: Path) -> _Columns:
    try:
        loaded = np.load(ordinary(path), allow_pickle=False)
        arrays = {name: loaded[name] for name in ("x", "y", "patient") if name in loaded.files}
    except (AttributeError, EOFError, KeyError, OSError, ValueError, BadZipFile, ZlibError) as error:
        refuse_unavailable(error, path)
        objects = "it holds objects of Python; save numbers and texts as arrays"
        why = objects if "pickle" in str(error) else one_line(error)
        raise UsageError(f"{path}: not a file of NumPy with x and y ({why})") from None
    if missing := [name for name in ("x", "y") if not isinstance(arrays.get(name), np.ndarray)]:
        raise UsageError(
            f"{path}: not a file of NumPy with x and y (its {missing[0]} is no array, or missing)"
        )
    y = arrays["y"]
    patient = arrays.get("patient", np.full(y.shape, ""))
    if not isinstance(patient, np.ndarray):
        raise UsageError(f"{path}: its patient is no array of NumPy")
    y, patient = (
        np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values
        for values in (y, patient)
    )
    return arrays["x"], y, patient


def _of_csv(path: Path) -> _Columns:
    def number(row: TableRow, name: str) -> float:
        try:
            return number_of(row[name])
        except ValueError:
            remedy = decimal_point(row[name]) or "; leave that column out, or the row"
            raise UsageError(
                f"{row.where}: {name} is {row[name]!r}, and all columns but label and patient are numbers{remedy}"
            ) from None

    rows = rows_of(path, ["label"])
    x = np.array([[number(row, name) for name in row if name not in _NAMES] for row in rows])
    return x, np.array([row["label"] for row in rows]), np.array([row.value("patient") for row in rows])


def _of_store(path: Path) -> _Columns:
    with BagStore(path) as store:
        classes = np.array(store.meta.classes)
        if store.own_labels:
            patches = store.patches
            return store.read(np.arange(len(patches))), classes[patches.label], np.array(patches.patient)
        means = [store.bag(k).features.mean(0) for k in range(len(store))]
        return np.stack(means), classes[store.table.label], np.array(store.table.patient)


def _of_folder(path: Path, labels: Path | None, aside: list[SetAside]) -> _Columns:
    """Return a row for each slide with a label and whole features; the others are put aside."""
    if labels is None:
        raise UsageError(f"{path}: --labels names a CSV with the columns slide, label and perhaps patient")
    layout, rows = LAYOUTS["trident"], rows_of(labels, ["slide"])
    named = next((one for one in ("label", "diagnosis") if rows and one in rows[0]), None)
    if named is None:
        raise UsageError(f"{labels}: column 'label' or 'diagnosis' is missing")
    files, known, seen = layout.find(path), [], set()
    for row in rows:
        slide = slide_named(row["slide"], files)
        if slide in seen:
            raise UsageError(f"{row.where}: slide {slide} has a row already")
        seen.add(slide)
        try:
            if not row.value(named):
                raise WsiFlError(f"has no label ({row.where})")
            if slide not in files:
                raise WsiFlError(f"has a label ({row.where}) and no features")
            known.append((layout.read(files[slide]).features.mean(0), row[named], row.value("patient")))
        except WsiFlError as error:
            aside.append(SetAside(slide, str(error)))
    aside += [SetAside(name, f"has no label in {labels.name}") for name in files if name not in seen]
    if not known:
        why = "" if seen & set(files) else f"{describe_mismatch(seen, files)}; "
        raise UsageError(
            f"{labels}: none of its slides has a label and features in {path}; {why}{_told(aside)}"
        )
    means, label, patient = zip(*known, strict=True)
    if len({len(mean) for mean in means}) > 1:
        raise UsageError(f"{path}: features of its slides are not equally wide; keep those of one encoder")
    return np.stack(means), np.array(label), np.array(patient)


def _told(aside: Sequence[SetAside]) -> str:
    """Say which slides give no row, the first by name."""
    more = "; --json names all" if len(aside) > _NAMED else ""
    named = "; ".join(f"{one.slide}: {one.reason}" for one in aside[:_NAMED])
    return f"slides set aside: {len(aside)} ({named}{more})"
