"""Intervals over patients: seconds by weights over scores that are sorted once, and by sorting every resample anew.

python benchmarks/scores.py --patches 250000 --patients 200

Both ways are run in turns on equal draws, the slow one for a few of them only, and must give equal intervals.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.tasks import CLASSES, SurvivalTask, Task, score_intervals

_REPEATS, _SLOW = 1000, 10


@dataclass(frozen=True)
class Case:
    """What a model says of n examples, and whose they are."""

    name: str
    said: NDArray[np.float64]
    truth: NDArray[Any]
    patient: NDArray[np.str_]
    task: Task = CLASSES


def of_classes(name: str, n: int, classes: int, patients: int) -> Case:
    """Return examples of which one in three or so is told rightly, with scores that tie."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)).round(2)
    logits[np.arange(n), truth] += 1
    said = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return Case(name, said, truth, np.array([f"patient {k % patients}" for k in range(n)]))


def of_survival(n: int) -> Case:
    """Return patients whose risk says a little of their time."""
    rng = np.random.default_rng(0)
    time_, seen = rng.exponential(24, n).round(1) + 0.1, rng.random(n) < 0.6
    hazard = np.clip(rng.normal(0.3, 0.1, (n, 4)) - 0.002 * time_[:, None], 0.05, 0.9)
    truth, patient = np.stack([time_, seen], 1), np.arange(n).astype(str)
    surviving: NDArray[np.float64] = np.cumprod(1 - hazard, 1, dtype=np.float64)
    return Case(f"{n} lives", surviving, truth, patient, SurvivalTask((6, 12, 24, 36)))


def by_sorting(case: Case, repeats: int) -> dict[str, list[float] | None]:
    """Return intervals whose every resample is put together and scored as if it were data."""
    names, which = np.unique(case.patient, return_inverse=True)
    members = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(repeats):
        rows = np.concatenate([members[k] for k in rng.integers(len(names), size=len(names))])
        drawn.append(case.task.compute_scores(case.said[rows], case.truth[rows]))
    tails = [(1 - 0.95) / 2, (1 + 0.95) / 2]
    return {name: np.quantile([one[name] for one in drawn], tails).tolist() for name in case.task.scores}


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a piece of work takes, and what it returns."""
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def compared(case: Case, turns: int) -> str:
    """Return a row of a table in Markdown: the best of some turns each, both for `_REPEATS` resamples."""
    fast, slow = [], []
    for _ in range(turns):
        fast.append(seconds(lambda: score_intervals(*_columns(case), repeats=_REPEATS))[0])
        mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        took, expected = seconds(lambda: by_sorting(case, _SLOW))
        slow.append(took * _REPEATS / _SLOW)
        found = score_intervals(*_columns(case), repeats=_SLOW)
        assert all(np.allclose(found[name] or [], expected[name] or [], rtol=1e-9) for name in expected)
    best, worst = min(fast), min(slow)
    return f"| {case.name} | {best:.1f} | {worst:.0f} | {worst / best:.0f} | {mb:.0f} |"


def _columns(case: Case) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.str_], Task]:
    return case.said, case.truth, case.patient, case.task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", type=int, default=250_000)
    parser.add_argument("--patients", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    cases = [
        of_survival(500),
        of_classes("10000 images, 10 classes", 10_000, 10, 10_000),
        of_classes(f"{args.patches} patches, {args.patients} patients", args.patches, 2, args.patients),
    ]
    print("| 1000 resamples of | s by weights | s by sorting anew | times | MB so far |\n|---|---|---|---|---|")
    for case in cases:
        print(compared(case, args.turns), flush=True)


if __name__ == "__main__":
    main()
