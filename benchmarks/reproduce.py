"""The MNIST study of ProxyFL and its ablations at laptop scale, as Markdown tables; studies/REPRODUCE.md holds them.

    wsi-fl init study && cd study
    wsi-fl partition mnist_70k.npz --sites 4 --per-site 1000 --skew major:0.8 --seed 0
    python ../benchmarks/reproduce.py methods --seeds 5

Every run is an ordinary run of the study, all sites in one process, two runs at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

ALONE = "privacy.enabled=false"


@dataclass(frozen=True)
class Trial:
    """One line of a table."""

    label: str
    method: str = "proxyfl"
    overrides: tuple[str, ...] = ()


def _vary(key: str, *values: object, name: str | None = None) -> list[Trial]:
    return [Trial(f"{name or key} = {value}", overrides=(f"{key}={value}",)) for value in values]


STUDIES: dict[str, list[Trial]] = {
    "methods": [
        Trial("regular, without DP", "regular", (ALONE,)),
        *[Trial(m, m) for m in ("regular", "joint", "fedavg", "avgpush", "cwt", "fml", "proxyfl")],
    ],
    "without_dp": [Trial(m, m, (ALONE,)) for m in ("joint", "fedavg", "avgpush", "cwt", "fml", "proxyfl")],
    "alpha_beta": [
        Trial(f"α = {a}, β = {b}", overrides=(f"train.alpha={a}", f"train.beta={b}"))
        for a, b in (
            (0.0, 0.0),
            (0.1, 0.1),
            (0.3, 0.3),
            (0.5, 0.5),
            (0.7, 0.7),
            (0.9, 0.9),
            (0.1, 0.5),
            (0.5, 0.1),
            (0.5, 0.0),
        )
    ],
    "proxy": _vary("model.proxy", "mlp", "lenet5", "cnn1"),
    "batch": _vary("train.batch_size", 50, 100, 250, 500),
    "clip": _vary("privacy.clip", 0.1, 0.3, 1.0, 3.0),
    "noise": _vary("privacy.sigma", 0.5, 1.0, 2.0, 4.0),
    "optimizer": _vary("train.optimizer_after_exchange", "keep", "reset"),
    "self_weight": _vary("topology.self_weight", 0.0, 0.5),
    "graph": _vary("topology.graph", "exponential", "ring", "random", "star"),
    "mlp_everywhere": [
        Trial(m, m, ("model.private=mlp",)) for m in ("regular", "joint", "fedavg", "avgpush", "cwt", "fml", "proxyfl")
    ],
}


def _run(study: str, trial: Trial, seed: int, rounds: int) -> dict[str, Any]:
    """One run; what its last round says of every site."""
    import torch

    from wsi_fl.stages.training.train import train
    from wsi_fl.study.folder import Study

    torch.set_num_threads(1)
    overrides = [f"train.rounds={rounds}", f"train.eval_every={rounds}", f"train.seed={seed}", *trial.overrides]
    root = Path(study)
    summary = train(Study(root), method=trial.method, pipeline_name="mnist", overrides=overrides, backend="local")
    lines = [
        json.loads((root / summary["run"] / "sites" / row["site"] / "metrics.jsonl").read_text().splitlines()[-1])
        for row in summary["sites"]
    ]
    return {
        "trial": trial.label,
        "seed": seed,
        "private": [line["merged"]["accuracy"] for line in lines],
        "macro": [line["merged"]["macro_accuracy"] for line in lines],
        "proxy": [line["proxy"]["accuracy"] for line in lines if "proxy" in line],
        "epsilon": max((row["epsilon"] or 0.0 for row in summary["sites"]), default=0.0),
        "guarantee": summary["sites"][0]["guarantee"],
    }


def _table(trials: Sequence[Trial], runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: mean ± sd over sites and seeds of the private model, of the proxy, and ε."""
    rows = ["| | private model | macro | proxy | ε |", "|---|---|---|---|---|"]
    for trial in trials:
        mine = [run for run in runs if run["trial"] == trial.label]
        cells = []
        for key in ("private", "macro", "proxy"):
            values = np.array([value for run in mine for value in run[key]])
            cells.append(f"{values.mean():.3f} ± {values.std():.3f}" if len(values) else "–")
        epsilon = max(run["epsilon"] for run in mine)
        cells.append(f"{epsilon:.1f} ({mine[0]['guarantee']})" if epsilon else "–")
        rows.append(f"| {trial.label} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, "all"])
    parser.add_argument("--study", default=".", help="folder with the stores")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON lines of all runs")
    arguments = parser.parse_args()
    wanted = list(STUDIES) if "all" in arguments.studies else arguments.studies
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for name in wanted:
            jobs = [
                pool.submit(_run, arguments.study, trial, seed, arguments.rounds)
                for seed in range(arguments.seeds)
                for trial in STUDIES[name]
            ]
            runs = [job.result() for job in jobs]
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.writelines(json.dumps({"study": name, **run}) + "\n" for run in runs)
            print(
                f"\n## {name} ({arguments.rounds} rounds, {arguments.seeds} seeds)\n\n{_table(STUDIES[name], runs)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
