"""`run_benchmark`: methods on hospitals sampled from one table of features, with local and pooled baselines.

Every method trains linear heads in memory, by the same loop as studies, without stores, runs and ledgers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.metrics import Probabilities, fill_patient_names
from wsi_fl.evidence.bench_heads import (
    fit_local_head,
    predict_at_site,
    predict_with_head,
    read_features,
    score_predictions,
)
from wsi_fl.evidence.bench_page import write_page
from wsi_fl.evidence.bench_sites import average_patients, estimate_hospitals, score_examples, split_hospitals
from wsi_fl.evidence.feature_table import FeatureTable, describe_skipped_slides, read_table
from wsi_fl.federation.federate import SiteResult, federate
from wsi_fl.federation.methods import LOCAL_METHOD, METHODS, POOLED_METHOD
from wsi_fl.models.mil import build_linear_head
from wsi_fl.oneshot.projection import N_RANDOM, Projection, fit_projection, read_projection
from wsi_fl.oneshot.public_features import read_public_features
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.privacy.privacy_plan import Unit, propose_plan
from wsi_fl.report.formatting import Json
from wsi_fl.slides.layouts.tcga_targets import SURVIVAL
from wsi_fl.stages.prepare.import_export import ImportFacts
from wsi_fl.stages.runtime.console import SilentProgress, Watcher
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError

_DELTA = 1e-5
_MAX_TEST_PATIENTS = 500
"""Largest number of test patients of each class."""
_TUNING_SEED = -1
"""Seed of the sample for choosing the rounds and the learning rate of a method."""
_HYPERPARAMETERS = tuple(itertools.product((20, 60), (1e-2, 3e-2, 1e-1)))
"""Candidates of (rounds, learning rate)."""
_NAMED_SKEWS = ("alike", "missing-class")
TABLE_SITES = "site"
"""Hospitals, and skew, of the table's column of sites."""
_BASELINES = (LOCAL_METHOD, POOLED_METHOD)
_RESULT_COLUMNS = (
    *("method", "epsilon", "sites", "n", "skew", "seed", "site", "score", "auroc", "own_score"),
    *("rounds", "lr", "spent", "guarantee", "seconds"),
)
_CELL_COLUMNS = ["sites", "n", "skew"]


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

    "site" is for the hospitals of the table's column.

    Example:
        >>> parse_cells("4x150,8x200:1", "alike,0.9")[1:]
        [SamplingCell(sites=4, n=150, skew='0.9'), SamplingCell(sites=8, n=200, skew='1')]
    """
    if hospitals == TABLE_SITES:
        return [SamplingCell(0, 0, TABLE_SITES)]
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


def sample_sites(table: FeatureTable, cell: SamplingCell, seed: int) -> tuple[list[Cohort], Cohort]:
    """Sample hospitals and a disjoint test set by patient; a patient's class is that of the first row.

    Raises:
        UsageError: for too few patients.
    """
    if cell.skew == TABLE_SITES:
        return split_hospitals(table.rows, is_tuning=seed == _TUNING_SEED)
    rng = np.random.default_rng(seed + 1000)
    patient = fill_patient_names(table.rows.patient)
    _, first_row, patient_of_row = np.unique(patient, return_index=True, return_inverse=True)
    label = table.rows.label[first_row]
    remaining = [list(rng.permutation(np.flatnonzero(label == k))) for k in range(len(table.classes))]

    def take_patients(k: int, count: int) -> list[int]:
        if count > len(remaining[k]):
            raise UsageError(
                f"{cell.sites}x{cell.n} {cell.skew}: too few patients (or rows) of {table.classes[k]}: "
                f"the next hospital needs {count}, {len(remaining[k])} are left; "
                "patients of no hospital are the test set"
            )
        patients, remaining[k] = remaining[k][:count], remaining[k][count:]
        return patients

    def rows_of(patients: Iterable[int]) -> Cohort:
        return table.rows[np.isin(patient_of_row, list(patients))]

    sites = []
    for index in range(cell.sites):
        counts = _count_by_class(cell, index, np.bincount(label) / len(label))
        part = rows_of(itertools.chain.from_iterable(itertools.starmap(take_patients, enumerate(counts))))
        sites.append(part.assign_columns(site=f"S{index + 1}"))
    return sites, rows_of(itertools.chain.from_iterable(patients[:_MAX_TEST_PATIENTS] for patients in remaining))


def _count_by_class(cell: SamplingCell, index: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many patients of each class a hospital has, given the shares of the classes in the table."""
    shares = shares.copy()
    if cell.skew == "missing-class" and index == cell.sites - 1:
        shares[0] = 0
    elif cell.skew not in _NAMED_SKEWS:
        major, share = index % len(shares), float(cell.skew)
        shares[np.arange(len(shares)) != major] *= (1 - share) / (shares.sum() - shares[major])
        shares[major] = share
    counts: NDArray[np.int64] = np.floor(cell.n * shares / shares.sum()).astype(np.int64)
    counts[np.argmax(shares)] += cell.n - counts.sum()
    return counts


class _Training(NamedTuple):
    """A method with its settings."""

    method: str
    epsilon: float = 0.0
    rounds: int = 1
    lr: float = 1e-3


@dataclass(frozen=True)
class _Sample:
    """A sample of hospitals, and the trainings that share its local heads."""

    cell: SamplingCell
    seed: int
    trainings: tuple[_Training, ...]


@dataclass(frozen=True)
class _Benchmark:
    """What all trainings have in common."""

    table: FeatureTable
    unit: Unit
    projection: Projection | int

    def measure_sample(self, sample: _Sample) -> list[dict[str, object]]:
        """Return a row of the result for each training and hospital of a sample."""
        torch.set_num_threads(1)
        (parts, test), n_outputs = sample_sites(self.table, sample.cell, sample.seed), self.n_outputs
        heads, names = [fit_local_head(part, n_outputs) for part in parts], [part.obs["site"].iloc[0] for part in parts]
        rows = list[dict[str, Any]]()
        for training in sample.trainings:
            start_time = time.monotonic()
            hospitals: list[tuple[Probabilities, dict[str, object]]]
            if training.method == LOCAL_METHOD:
                hospitals = [(predict_with_head(head, test), {}) for head in heads]
            elif training.method == POOLED_METHOD:
                pooled = fit_local_head(concatenate_examples(parts), n_outputs)
                hospitals = [(predict_with_head(pooled, test), {})] * len(parts)
            else:
                results = self._train_sites(training, dict(zip(names, parts, strict=True)), max(sample.seed, 0))
                hospitals = [predict_at_site(*site, test=test) for site in zip(results, parts, heads, strict=True)]
            common = training._asdict() | sample.cell._asdict() | {"seed": sample.seed}
            common["seconds"] = round(time.monotonic() - start_time, 1)
            for name, (predictions, facts) in zip(names, hospitals, strict=True):
                row = common | {"site": name} | score_predictions(predictions, test) | facts
                if sample.cell.skew == TABLE_SITES:
                    row["examples"] = score_examples(predictions, test, name, names)
                rows.append(row)
        return rows

    @property
    def n_outputs(self) -> int:
        """Number of outputs of a head: classes, or intervals of survival."""
        return len(self.table.classes or getattr(self.table.rows.task, "ends", ()))

    def _train_sites(self, training: _Training, parts: Mapping[str, Cohort], seed: int) -> list[SiteResult]:
        """Return the hospitals' models after federated training."""
        sizes = {
            name: len(np.unique(part.patient)) if self.unit == "patient" else len(part) for name, part in parts.items()
        }
        n_units = min(sizes.values())
        if METHODS[training.method].payload.is_single_release:
            batch_size, sigma = n_units, find_sigma(training.epsilon, 1.0, 1, _DELTA)
        else:
            plan = propose_plan(n_units, training.rounds, training.epsilon, _DELTA)
            batch_size, sigma = plan.batch_size, plan.mechanism.sigma
        # a larger hospital has larger batches, at most of the same share of its units, so its ε is no larger
        batches = {name: max(batch_size, n // ceil(n_units / batch_size)) for name, n in sizes.items()}
        n_outputs, n_features = self.n_outputs, read_features(next(iter(parts.values()))).shape[1]
        results = federate(
            parts,
            training.method,
            private=lambda: build_linear_head(n_outputs, n_features),
            rounds=training.rounds,
            batch_size=batches,
            lr=training.lr,
            sigma=sigma,
            delta=_DELTA,
            unit=self.unit,
            projection=self.projection,
            seed=seed,
        )
        return list(results.values())


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
    target: str | None = None,
    jobs: int = 1,
    watcher: Watcher | None = None,
) -> Json:
    """Measure methods on hospitals sampled from a table; return the `--json` document.

    The local and the pooled baseline are heads without noise, tuned by cross-validation. Rounds and learning rate of a
    method in rounds are the best of six on a separate sample, for each cell, at the middle ε. Scores are of a
    hospital's ensemble with its local head, as in a study (`score`), and of the federated model (`own_score`).

    Args:
        path, labels, target: see `read_table`.
        out: a new CSV with a line for each method, ε, cell, seed and hospital.
        methods: names in METHODS, including those of plug-ins.
        cells: sampling of hospitals, or the hospitals of the table, of which a patient is a row.
        projection: from public reference slides for `oneshot`, or their features without labels, as a table, a store or
            TRIDENT's folder; by default random.
        jobs: number of processes.

    Raises:
        UsageError: for an invalid table, method or cell, or an existing `out`.
    """
    if out.exists():
        raise UsageError(f"{out}: exists already; remove it, or choose another --out")
    methods, cells, epsilons = [*dict.fromkeys(methods)], [*dict.fromkeys(cells)], [*dict.fromkeys(epsilons)]
    _require_options(methods, unit)
    progress = watcher or SilentProgress()
    is_by_site = any(cell.skew == TABLE_SITES for cell in cells)
    if is_by_site and not path.is_dir():
        raise UsageError(f"--hospitals site: needs a folder of TRIDENT's features and --labels, and {path} is one file")
    table = read_table(path, labels, target, progress)
    _report_omissions(table, path, unit, progress)
    n_patients: dict[str, int] = {}
    if is_by_site:
        table, unit = table._replace(rows=average_patients(table.rows)), "row"
        n_patients = {part.obs["site"].iloc[0]: len(part) for part in sample_sites(table, cells[0], 0)[0]}
        cells = [SamplingCell(len(n_patients), sum(n_patients.values()), TABLE_SITES)]
    elif target == SURVIVAL:
        raise UsageError("--target survival goes with --hospitals site")
    for cell in cells:
        sample_sites(table, cell, 0)
    benchmark = _Benchmark(table, cast(Unit, unit), _read_projection(projection))
    rows = _measure_all(benchmark, methods, epsilons, cells, seeds, out=out, jobs=jobs, progress=progress)
    results = pd.DataFrame(rows, columns=[*_RESULT_COLUMNS, "examples"])
    results, trials = results[results["seed"] != _TUNING_SEED], itertools.product(cells, methods, epsilons)
    document: dict[str, Any] = {"table": str(path), "rows": str(out), "unit": "patient" if n_patients else unit}
    document |= {"delta": _DELTA, "seeds": seeds, "excluded": [asdict(slide) for slide in table.excluded]}
    document |= {"target": target} if target else {}
    document["score"] = "balanced accuracy" if table.classes else "concordance"
    if n_patients:
        score = "accuracy" if table.classes else "concordance"
        document["hospitals"] = estimate_hospitals(results, n_patients, score)
    document["cells"] = [_measure_gain(results, method, epsilon, cell) for cell, method, epsilon in trials]
    write_page(out.with_suffix(".html"), document)
    return document | {"page": str(out.with_suffix(".html"))}


def _report_omissions(table: FeatureTable, path: Path, unit: str, progress: Watcher) -> None:
    """Report excluded slides and rows without a patient; refuse the latter where ε is per patient."""
    if table.excluded:
        progress.print_message(describe_skipped_slides(table.excluded))
    if 0 < (unnamed := int((table.rows.patient == "").sum())) < len(table.rows):
        progress.print_message(f"{unnamed} rows name no patient; each counts by itself")
    if unit == "patient" and unnamed:
        raise UsageError(f"{path}: --unit patient needs the patient of every row")


def _require_options(methods: Sequence[str], unit: str) -> None:
    """Refuse methods that are unknown, baselines, or of more than features, and an unknown unit."""
    if unit not in get_args(Unit):
        raise UsageError(f"--unit {unit!r}: use {' or '.join(get_args(Unit))}")
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if method in _BASELINES:
            raise UsageError(f"{method} is always measured as a baseline; leave it out of --method")
        if METHODS[method].bare_disclosures or METHODS[method].learns_from != "own":
            raise UsageError(f"{method} needs more than features; train it in a study")


def _read_projection(path: Path | None) -> Projection | int:
    if path is None:
        return N_RANDOM
    if path.suffix == ".safetensors":
        return read_projection(path, str(path))
    facts = ImportFacts(new_name="any")  # a benchmark is of one encoder, and no release
    return fit_projection(read_public_features(path, "trident" if path.is_dir() else None, facts).features)


def _measure_all(
    benchmark: _Benchmark,
    methods: Sequence[str],
    epsilons: Sequence[float],
    cells: Sequence[SamplingCell],
    seeds: int,
    *,
    out: Path,
    jobs: int,
    progress: Watcher,
) -> list[dict[str, Any]]:
    """Return the rows of all trainings, and write them to the CSV after each sample."""
    from joblib import Parallel, delayed  # hands over the table as a memory map

    rows: list[dict[str, Any]] = []
    in_rounds = [name for name in methods if not METHODS[name].payload.is_single_release]
    middle = sorted(epsilons)[len(epsilons) // 2]
    tuning = [
        _Sample(cell, _TUNING_SEED, tuple(_Training(method, middle, *values) for values in _list_candidates(cell)))
        for cell, method in itertools.product(cells, in_rounds)
    ]
    n = len(tuning) + seeds * len(cells)

    def measure_samples(samples: Sequence[_Sample], n_earlier: int) -> None:
        progress.update("samples", n_earlier, n)
        tasks = (delayed(benchmark.measure_sample)(sample) for sample in samples)
        for n_done, sample_rows in enumerate(Parallel(jobs, return_as="generator")(tasks), n_earlier + 1):
            rows.extend(sample_rows)
            write_text(out, pd.DataFrame(rows, columns=_RESULT_COLUMNS).to_csv(index=False, float_format="%g"))
            progress.update("samples", n_done, n)

    measure_samples(tuning, 0)
    best = _select_hyperparameters(pd.DataFrame(rows, columns=_RESULT_COLUMNS))
    samples = []
    for seed, cell in itertools.product(range(seeds), cells):
        private = (_Training(m, epsilon, *best.get((m, *cell), ())) for m in methods for epsilon in epsilons)
        samples.append(_Sample(cell, seed, (*map(_Training, _BASELINES), *private)))
    measure_samples(samples, len(tuning))
    return rows


def _list_candidates(cell: SamplingCell) -> tuple[tuple[int, float], ...]:
    """Return the candidates of (rounds, learning rate); only the short ones for a table's hospitals, often many."""
    rounds = min(n for n, _ in _HYPERPARAMETERS)
    return tuple(pair for pair in _HYPERPARAMETERS if cell.skew != TABLE_SITES or pair[0] == rounds)


def _select_hyperparameters(tuning: pd.DataFrame) -> dict[tuple[object, ...], tuple[int, float]]:
    """Return (rounds, lr) by method and cell with the best ensembles; at a tie, with the best federated models."""
    key = ["method", *_CELL_COLUMNS]
    means = tuning.groupby([*key, "rounds", "lr"], sort=False)[["score", "own_score"]].mean().reset_index()
    best = means.sort_values(["score", "own_score"], ascending=False, kind="stable").drop_duplicates(key)
    return {tuple(row[:-2]): (int(row[-2]), float(row[-1])) for row in best[[*key, "rounds", "lr"]].to_numpy()}


def _measure_gain(results: pd.DataFrame, method: str, epsilon: float, cell: SamplingCell) -> Json:
    """Return the paired gain in balanced accuracy of a method over local heads in a cell."""
    from scipy.stats import t

    is_cell = (results[_CELL_COLUMNS] == list(cell)).all(axis=1)
    scores = results[is_cell].set_index(["method", "epsilon", "seed", "site"])["score"].sort_index()
    local, pooled, federated = scores[LOCAL_METHOD, 0.0], scores[POOLED_METHOD, 0.0], scores[method, epsilon]
    gain = federated - local
    by_seed = gain.groupby("seed").mean()
    half_width = float(t.ppf(0.975, len(by_seed) - 1) * by_seed.sem()) if len(by_seed) > 1 else None
    return {
        "method": method,
        "epsilon": epsilon,
        **cell._asdict(),
        "local": float(local.mean()),
        "federated": float(federated.mean()),
        "pooled": float(pooled.mean()),
        "gain": float(by_seed.mean()),
        "half_width": half_width,
        "worst_site": float(gain.groupby("site").mean().min()),
    }
