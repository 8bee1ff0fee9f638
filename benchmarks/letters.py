"""What one letter brings where a number or the time of an event is asked: hospitals of simulated patients.

    python benchmarks/letters.py --question number --seeds 5 --out number.jsonl
    python benchmarks/letters.py --question survival --seeds 5 --out survival.jsonl
    python benchmarks/letters.py --show number.jsonl survival.jsonl

A patient is one vector of 256 features that vary along fewer and fewer directions. A signal in forty of these says the
answer, with chance as strong as itself: a number, or how soon an event comes, where half of the patients leave before.
Every hospital has its fair lone head, and all have the letters of all at ε = 1. "Directions" is what a hospital has
from public directions and its own patients, without any letter. studies/LETTERS.md holds the table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student

from wsi_fl.data.tasks import NumberTask, SurvivalTask, Task, selection_score, target_columns
from wsi_fl.learning.ensemble import is_worse_than_local, single_local_ensemble, weight_by_sample_size
from wsi_fl.learning.tuning import fit_linear_head
from wsi_fl.oneshot.projection import fit_projection, normalize_rows
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import find_sigma

Array = NDArray[Any]
TASKS: dict[str, Task] = {"number": NumberTask(0.0, 1.0), "survival": SurvivalTask((6.0, 12.0, 24.0, 36.0))}
EPSILON, DELTA = 1.0, 1e-5
D, SIGNAL, TEST, PUBLIC, ASKED = 256, 40, 800, 800, 4
"""Features, directions with a signal, patients that are asked about, public ones; hospitals that are measured."""


@dataclass(frozen=True)
class Setting:
    """Hospitals of so many patients, of whom a share has the lower half of answers; at every other one the upper."""

    sites: int
    rows: int
    share: float = 0.5

    @property
    def name(self) -> str:
        return f"{self.sites} × {self.rows}, " + ("alike" if self.share == 0.5 else f"{self.share:.0%} of a half")


SETTINGS = (
    Setting(16, 50),
    Setting(16, 50, 0.9),
    Setting(4, 150, 0.95),
    Setting(8, 200),
    Setting(4, 50),
    Setting(4, 500),
)


class World:
    """Where patients come from."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.rng = task, np.random.default_rng(seed)
        self.mixing = self.rng.normal(size=(D, D)) * np.arange(1, D + 1) ** -0.6
        signal = self.rng.normal(size=SIGNAL) * np.arange(1, SIGNAL + 1) ** -0.4
        self.signal = signal / np.linalg.norm(signal)

    def drawn(self, n: int) -> tuple[Array, Array]:
        """(features float32[n, D], truth) of n patients."""
        hidden = self.rng.normal(size=(n, D))
        x, signal = (hidden @ self.mixing.T + 3).astype(np.float32), hidden[:, :SIGNAL] @ self.signal
        if self.task.kind == "number":
            said = np.clip(0.5 + 0.15 * (signal + self.rng.normal(size=n)), 0, 1)
        else:
            time, left = 30 * np.exp(-signal) * self.rng.exponential(size=n), self.rng.uniform(5, 60, n)
            said = np.stack([np.minimum(time, left), time < left], axis=1)
        return x, said.astype(np.float32)

    def hospital(self, setting: Setting, index: int) -> tuple[Array, Array]:
        """The patients of one hospital."""
        x, truth = self.drawn(6 * setting.rows)
        order = np.argsort(truth if truth.ndim == 1 else truth[:, 0], kind="stable")
        halves = np.array_split(order, 2)[:: 1 if index % 2 else -1]
        n = round(setting.rows * setting.share)
        rows = [self.rng.permutation(half)[:k] for half, k in zip(halves, (n, setting.rows - n), strict=True)]
        chosen = np.concatenate(rows)
        return x[chosen], truth[chosen]


def measured(setting: Setting, task: Task, seed: int, spoil: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield what every variant reaches at each hospital, with own and with shared noise.

    Args:
        spoil: what the second hospital's letter is multiplied by.
    """
    world, k = World(task, seed), 1 if task.kind == "number" else 4
    along = fit_projection(world.drawn(PUBLIC)[0])
    parts = [world.hospital(setting, index) for index in range(setting.sites)]
    test, wanted = world.drawn(TEST)
    lone = [fit_linear_head(normalize_rows(x), truth, np.full(len(x), ""), k, task) for x, truth in parts]
    x, truth = (np.concatenate(each) for each in zip(*parts, strict=True))
    pooled = fit_linear_head(normalize_rows(x), truth, np.full(len(x), ""), k, task)

    def said(outputs: Array) -> Array:
        return task.predict(torch.from_numpy(np.asarray(outputs, np.float64))).numpy()

    def by(head: Any, rows: Array) -> Array:
        return said(normalize_rows(rows) @ head.weight.T + head.bias)

    for shared in (False, True):
        sigma = find_sigma(EPSILON, 1.0, 1, DELTA) / (np.sqrt(setting.sites - 1) if shared else 1)
        heads = []
        for index, (part, answer) in enumerate(parts):
            head = SharedHead(k, D, projection=along, kind=task.kind)
            z, columns = (head.embed_rows(torch.from_numpy(part)), target_columns(task, torch.from_numpy(answer)))
            head.set_local_statistics(z, columns)
            exact = head.pack_statistics(z, columns)
            noise = torch.from_numpy(world.rng.normal(size=len(exact)))
            head.set_noisy_statistics(exact, (exact + sigma * noise) * (spoil if index == 1 else 1.0), sigma**2)
            heads.append(head)
        directions = [said(head(torch.from_numpy(test)).detach().numpy()) for head in heads[:ASKED]]
        SharedHead.combine(heads)
        for index, head in enumerate(heads[:ASKED]):
            (own_x, own), mine = parts[index], lone[index]
            alone, joined = by(mine, test), said(head(torch.from_numpy(test)).detach().numpy())
            theirs = said(head(torch.from_numpy(own_x)).detach().numpy())
            stack = weight_by_sample_size(alone, joined, own, head.effective_sample_sizes(), task)
            seen = mine.held_out
            if seen is not None and stack.weight and is_worse_than_local(stack, seen, theirs, own, task):
                stack = single_local_ensemble(k)
            answers = {
                "lone": alone,
                "directions": directions[index],
                "joined": joined,
                "mixture": stack(alone, joined) if stack.weight else alone,
                "pooled": by(pooled, test),
            }
            reached = {name: selection_score(one, wanted, task) for name, one in answers.items()}
            yield {
                "question": task.kind,
                "setting": setting.name,
                "shared": shared,
                "seed": seed,
                "site": index,
                "weight": stack.weight,
                **reached,
            }


def table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: means over hospitals, and intervals over seeds of the mixture's gain."""
    columns = "question, hospitals, noise, alone, directions, joined head, mixture, gain, worst hospital, pooled"
    yield f"| {columns.replace(', ', ' | ')} |"
    yield "|---" * (columns.count(",") + 1) + "|"
    keys = list(dict.fromkeys((row["question"], row["setting"], row["shared"]) for row in rows))
    for key in keys:
        mine = [row for row in rows if (row["question"], row["setting"], row["shared"]) == key]
        seeds = sorted({row["seed"] for row in mine})
        gains = np.array([[row["mixture"] - row["lone"] for row in mine if row["seed"] == seed] for seed in seeds])
        half = student.ppf(0.975, max(1, len(seeds) - 1)) * gains.mean(1).std(ddof=1) / np.sqrt(len(seeds))
        mean = {
            name: np.mean([row[name] for row in mine]) for name in ("lone", "directions", "joined", "mixture", "pooled")
        }
        yield (
            f"| {key[0]} | {key[1]} | {'shared' if key[2] else 'own'} | {mean['lone']:.3f} | {mean['directions']:.3f} "
            f"| {mean['joined']:.3f} | {mean['mixture']:.3f} | {gains.mean():+.3f} ± {half:.3f} "
            f"| {gains.mean(0).min():+.3f} | {mean['pooled']:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", choices=TASKS, default="number")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--spoil", type=float, default=1.0, help="multiplies the second hospital's letter")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, nargs="+")
    args = parser.parse_args()
    if args.show:
        rows = [json.loads(line) for path in args.show for line in path.read_text().splitlines()]
        print("\n".join(table(rows)))
        return
    for setting in SETTINGS:
        for seed in range(args.seeds):
            for row in measured(setting, TASKS[args.question], seed, args.spoil):
                line = json.dumps({key: float(v) if isinstance(v, np.floating) else v for key, v in row.items()})
                if args.out is None:
                    print(line)
                else:
                    with args.out.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
