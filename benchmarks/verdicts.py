"""Are the verdicts right? Hospitals are drawn many times from a population of which the truth is known.

    python benchmarks/verdicts.py --jobs 2 --out verdicts.json

A row has 32 features, on which patients of two classes differ a little; the rows of a patient are alike. In every
repetition hospitals draw training rows, learn together, and measure on 60 test patients of four rows each what joining
brings over all of them, as `wsi-fl compare` does: by one run, and by three with other seeds. What it truly brings is
measured on 10 000 further patients. Of one run it is the mean over what fresh noise gives where a head is made of
letters, and this run's own models elsewhere. Of three runs it is the mean over the chance of training: three more are
made, and the means of both are weighed so that the truth is as far from the first as an exact one would be.
A verdict is wrong where it says *join* and the truth is no gain, or *local* and the truth is no loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort
from wsi_fl.evidence.verdict import Estimate, decide_verdict, estimate_mean
from wsi_fl.federation.federate import federate
from wsi_fl.federation.methods import METHODS
from wsi_fl.learning.ensemble import Ensemble, build_ensemble, single_federated_ensemble
from wsi_fl.learning.tuning import FittedHead, fit_linear_head, softmax
from wsi_fl.models.mil import build_linear_head
from wsi_fl.oneshot.projection import normalize_rows
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.privacy_plan import BudgetProposal, list_proposals, propose_plan

Floats = NDArray[np.float64]
FEATURES, TEST_PATIENTS, ROWS_EACH, POOL, RUNS, REDRAWS = 32, 60, 4, 10_000, 3, 32
DELTA, ROUNDS, LR = 1e-5, 6, 5e-2


@dataclass(frozen=True)
class Setting:
    """What hospitals are like; `apart` turns the direction in which the classes differ from hospital to hospital.

    Where answers are not `mixed` with the lone model's, the shared model answers alone, so that joining can harm.
    """

    name: str
    n: int
    share: float = 0.5
    apart: float = 0.0
    mixed: bool = True
    sites: int = 4
    epsilon: float = 3.0


SETTINGS = (
    Setting("100 rows each, mixed", 100),
    Setting("8 hospitals of 16 rows, ε = 20", 16, mixed=False, sites=8, epsilon=20.0),
    Setting("150 rows each, 10 % of one class", 150, share=0.1, mixed=False),
    Setting("unlike hospitals of 150 rows", 150, apart=1.2, mixed=False),
)


@dataclass(frozen=True)
class Rows:
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    patient: NDArray[np.str_]


def drawn(rng: np.random.Generator, patients: int, each: int, share: float, site: int = 0, apart: float = 0.0) -> Rows:
    """Draw patients with so many rows each; at least two of each class."""
    y = rng.random(patients) < share
    y[:4] = [0, 1, 0, 1]
    direction = np.eye(FEATURES)[0] * np.cos(apart * site) + np.eye(FEATURES)[1] * np.sin(apart * site)
    centre = np.outer(2.0 * y - 1, direction) * 1.1 + 0.7 * rng.normal(size=(patients, FEATURES))
    x = np.repeat(centre, each, axis=0) + 0.7 * rng.normal(size=(patients * each, FEATURES))
    names = np.repeat(np.arange(patients), each).astype(str)
    return Rows(x.astype(np.float32), np.repeat(y, each).astype(np.int64), names)


def said(model: torch.nn.Module, rows: Rows) -> Floats:
    """Return a model's probabilities float64[n, 2]."""
    with torch.inference_mode():
        return softmax(model.eval()(torch.from_numpy(rows.x)).double().numpy())


def said_alone(head: FittedHead, rows: Rows) -> Floats:
    """Return the probabilities of the head that a hospital has alone."""
    return softmax(normalize_rows(rows.x) @ head.weight.T + head.bias)


@lru_cache
def plan_of(method: str, n: int, epsilon: float) -> BudgetProposal:
    """Return the noise for so many rows."""
    if METHODS[method].payload.is_single_release:
        return list_proposals(n, 1, epsilon, DELTA)[0]
    return propose_plan(n, ROUNDS, epsilon, DELTA)


def learned(parts: Sequence[Rows], method: str, epsilon: float, shared: bool, seed: int) -> list[Any]:
    """Return each hospital's model after training together; shared noise is a part of it from each."""
    row, plan = METHODS[method], plan_of(method, len(parts[0].y), epsilon)
    found = federate(
        {f"S{k}": Cohort.from_arrays(part.x, part.y, part.patient.tolist()) for k, part in enumerate(parts)},
        row,
        private=lambda: build_linear_head(2, FEATURES),
        rounds=ROUNDS,
        batch_size=plan.batch_size,
        lr=LR,
        sigma=plan.mechanism.sigma / (sqrt(len(parts)) if shared else 1),
        delta=DELTA,
        seed=seed,
    )
    return [
        one.models.get("proxy") or one.models.get("shared") or next(iter(one.models.values())) for one in found.values()
    ]


def stack_of(model: torch.nn.Module, lone: FittedHead, part: Rows, mixed: bool) -> Ensemble:
    """Return how a hospital mixes what it has by joining with what it has alone, as a study does."""
    if not mixed:
        return single_federated_ensemble(2)
    worth = model.effective_sample_sizes() if isinstance(model, SharedHead) else None
    return build_ensemble(lone.held_out, said(model, part), part.y, part.patient, worth)


def gains(models: Sequence[Any], stacks: Sequence[Ensemble], lone: Sequence[FittedHead], rows: Rows) -> Floats:
    """Return how much more often joined answers are right than lone ones, float64[n], the mean over hospitals."""
    found = []
    for model, stack, head in zip(models, stacks, lone, strict=True):
        own = said_alone(head, rows)
        joined = stack(own, said(model, rows)).argmax(1) == rows.y
        found.append(joined.astype(float) - (own.argmax(1) == rows.y))
    mean: Floats = np.mean(found, axis=0)
    return mean


def weights_of(rows: Rows, balanced: bool) -> Floats:
    """Return how much each row counts: all alike, or all classes."""
    if not balanced:
        return np.ones(len(rows.y))
    return len(rows.y) / 2 / np.bincount(rows.y, minlength=2)[rows.y]


def repetition(setting: Setting, method: str, shared: bool, number: int) -> list[dict[str, Any]]:
    """Return, of one run and of several, the estimate, the truth and the verdict."""
    torch.set_num_threads(1)
    rng = np.random.default_rng([number, setting.n])
    parts = [drawn(rng, setting.n, 1, setting.share, k, setting.apart) for k in range(setting.sites)]
    test = drawn(rng, TEST_PATIENTS, ROWS_EACH, setting.share, apart=setting.apart)
    pool = drawn(rng, POOL, 1, setting.share, apart=setting.apart)
    lone = [fit_linear_head(normalize_rows(part.x), part.y, part.patient, 2) for part in parts]
    balanced = setting.share < 0.25
    w, w_pool = weights_of(test, balanced), weights_of(pool, balanced)
    seen, true, noise = [], [], []
    for seed in range(2 * RUNS):
        models = learned(parts, method, setting.epsilon, shared, seed)
        stacks = [
            stack_of(model, head, part, setting.mixed) for model, head, part in zip(models, lone, parts, strict=True)
        ]
        true.append(float(np.average(gains(models, stacks, lone, pool), weights=w_pool)))
        if seed >= RUNS:
            continue
        seen.append(gains(models, stacks, lone, test))
        if isinstance(models[0], SharedHead):
            noise.append(moved(models, stacks, lone, test, w, rng))
    values, told = np.array(seen), np.array(noise) if noise else None
    ones = np.tile(w, (RUNS, 1))
    near = 1 - sqrt((1 / RUNS) / (2 / RUNS))  # of the first, so that the truth is not nearer to them than an exact one
    mean = near * np.mean(true[:RUNS]) + (1 - near) * np.mean(true[RUNS:])
    alone = float(np.mean(true[1:])) if noise else true[0]
    single = estimate_mean(values[:1], ones[:1], test.patient, None if told is None else told[:1])
    several = estimate_mean(values, ones, test.patient, told)
    return [judged(single, alone) | {"runs": 1}, judged(several, float(mean)) | {"runs": RUNS}]


@torch.inference_mode()
def moved(
    models: Sequence[Any],
    stacks: Sequence[Ensemble],
    lone: Sequence[FittedHead],
    rows: Rows,
    w: Floats,
    rng: np.random.Generator,
) -> float:
    """Return how much noise moves the gain, the mean over hospitals of each one's standard deviation."""
    spreads = []
    for model, stack, head in zip(models, stacks, lone, strict=True):
        own, z = said_alone(head, rows), model.embed_rows(torch.from_numpy(rows.x))
        means = []
        for _ in range(REDRAWS):
            weights, bias = model.redraw_noise(rng).solve_head()
            answers = stack(own, softmax((z @ weights + bias).numpy())).argmax(1)
            means.append(np.average(answers == rows.y, weights=w))
        spreads.append(np.std(means, ddof=1))
    return float(np.mean(spreads))


def judged(found: Estimate, truth: float) -> dict[str, Any]:
    """Return whether the interval holds the truth, and what was said."""
    assert found.low is not None and found.high is not None
    said_ = decide_verdict(found, None)
    return {
        "covered": bool(found.low <= truth <= found.high),
        "verdict": said_,
        "wrong": bool((said_ == "join" and truth <= 0) or (said_ == "local" and truth >= 0)),
        "truth": truth,
        "mean": found.mean,
        "width": found.high - found.low,
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line of Markdown for each setting, method, noise and number of runs."""
    lines = [
        "| setting | method | noise | runs | true gain | width | coverage | *join* | wrong | *stay* | wrong |",
        "|---" * 11 + "|",
    ]
    for key, rows in found.items():
        setting, method, noise = key.split(" · ")
        for runs in (1, RUNS):
            mine = [row for row in rows if row["runs"] == runs]
            cells = [setting, method, noise, str(runs), f"{_mean(mine, 'truth'):+.3f}", f"{_mean(mine, 'width'):.3f}"]
            cells.append(f"{100 * _mean(mine, 'covered'):.1f} %")
            for word in ("join", "local"):
                told = [row for row in mine if row["verdict"] == word]
                cells += [f"{100 * len(one) / len(mine):.1f} %" for one in (told, [r for r in told if r["wrong"]])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--methods", nargs="*", default=["oneshot", "fedavg", "proxyfl"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("verdicts.json"))
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as workers:
        for method in args.methods:
            for shared in (False, True)[: 1 if method == "proxyfl" else 2]:
                for setting in SETTINGS:
                    key = f"{setting.name} · {method} · {'shared' if shared else 'separate'}"
                    if key in found:
                        continue
                    waiting = [
                        workers.submit(repetition, setting, method, shared, number)
                        for number in range(args.repetitions)
                    ]
                    found[key] = [row for one in waiting for row in one.result()]
                    args.out.write_text(json.dumps(found))
                    print(table({key: found[key]}).splitlines()[-2:], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
