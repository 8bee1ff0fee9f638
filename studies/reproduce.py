"""The studies of ProxyFL (Kalra et al., 2023) at the paper's size, and the page of their tables.

    python studies/reproduce.py plan all                                  # what is left, and its hours
    python studies/reproduce.py run all --mnist mnist_70k.npz --fashion-mnist /usr/share/datasets/fashion-mnist \\
        --camelyon17 ARCHIVE --jobs 2
    python studies/reproduce.py page                                      # writes the tables of REPRODUCE.md

A run is a method on one division of the images, with the division's seed as its own. Each is a line of
`studies/rows/proxyfl.csv`; what has a line is not trained again, so the same command goes on after any interruption.
Joint is one model of all hospitals' images, trained once, with differential privacy for each image. Slides have one
division, so there a seed is that of the training alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from pages import fill_page

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.training.summary import load_summary
from wsi_fl.stages.training.train import train
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.system.machine import keep_freed_memory

ROOT = Path(__file__).resolve().parents[1]
ROWS, PAGE = ROOT / "studies/rows/proxyfl.csv", ROOT / "studies/REPRODUCE.md"
N_SITES, PER_SITE, SEEDS = 8, 1000, range(5)
SLIDES = "camelyon17"
NO_DP, MLP = "privacy.enabled=false", "model.private=mlp"
FEDERATED = ("fedavg", "avgpush", "cwt", "fml", "proxyfl")
METHODS = ("regular", "joint", *FEDERATED)
NAMES = {"regular": "Regular", "joint": "Joint", "fedavg": "FedAvg", "avgpush": "AvgPush", "cwt": "CWT", "fml": "FML"}
NAMES["proxyfl"] = "ProxyFL"


@dataclass(frozen=True)
class Trial:
    """One line of a table: a method with its settings on one kind of division."""

    method: str
    settings: tuple[str, ...] = ()
    data: str = "mnist"
    skew: str = "random-major:0.8"
    pipeline: str = "mnist"

    @property
    def rounds(self) -> int:
        """Return the number of rounds in the paper: 300 of images, 30 of slides."""
        return 30 if self.data == SLIDES else 300

    @property
    def label(self) -> str:
        """Return how a table names it."""
        return NAMES[self.method] + (", without DP" if NO_DP in self.settings else "")


@dataclass(frozen=True)
class Row:
    """What one run reached: scores of each site's private model in the last round, separated by spaces.

    The private model of a method with a single model is that one. `curve` has round:mean accuracy. `cpu_minutes` counts
    the rounds before an interruption by the clock.
    """

    data: str
    skew: str
    pipeline: str
    method: str
    settings: str
    seed: int
    rounds: int
    accuracy: str
    macro_accuracy: str
    proxy_accuracy: str
    epsilon: str
    guarantee: str
    curve: str
    cpu_minutes: str
    date: str
    commit: str

    def shows(self, trial: Trial) -> bool:
        """Return whether it is a run of the trial at the paper's size."""
        mine = (self.method, self.settings, self.data, self.skew, self.pipeline, self.rounds)
        return mine == (trial.method, " ".join(trial.settings), trial.data, trial.skew, trial.pipeline, trial.rounds)

    def values(self, column: str = "accuracy") -> list[float]:
        """Return the values of its sites."""
        return [float(value) for value in str(getattr(self, column)).split()]


def with_mlp(*settings: str, **options: str) -> list[Trial]:
    """Return all methods where every model is the proxy's MLP, as in the paper's ablations."""
    return [Trial(method, (MLP, *settings), **options) for method in METHODS]


def weighted(alpha: float) -> tuple[str, ...]:
    """Return the settings of one weight of mutual learning; the paper's own is no setting."""
    return (MLP,) if alpha == 0.5 else (MLP, f"train.alpha={alpha}", f"train.beta={alpha}")


def batched(size: int) -> tuple[str, ...]:
    """Return the settings of one batch size; the paper's own is no setting."""
    return (MLP,) if size == 250 else (MLP, f"train.batch_size={size}")


def with_all_methods(*settings: str, **options: str) -> list[Trial]:
    """Return all methods with DP, after hospitals that train alone without it."""
    return [Trial("regular", (*settings, NO_DP), **options), *(Trial(m, settings, **options) for m in METHODS)]


SKEWS, ALPHAS, BATCHES = (0.1, 0.5, 0.8), (0.1, 0.5, 0.9), (100, 250, 500)
MIXED = "mnist_heterogeneous"
STUDIES: dict[str, list[Trial]] = {
    "mnist": with_all_methods(),
    "fashion_mnist": with_all_methods(data="fashion_mnist", pipeline="fashion_mnist"),
    SLIDES: with_all_methods("privacy.mode=paper", data=SLIDES, skew="", pipeline="camelyon17_small"),
    "mlp": with_all_methods(MLP),
    "without_dp": with_mlp(NO_DP),
    "alpha": [Trial(method, weighted(alpha)) for method in ("fml", "proxyfl") for alpha in ALPHAS],
    "batch": [Trial("proxyfl", batched(size)) for size in BATCHES],
    "architectures": [Trial(method, pipeline=MIXED) for method in ("regular", "fml", "proxyfl")],
    "skew": [trial for share in SKEWS for trial in with_mlp(skew=f"random-major:{share}")],
}
ARCHITECTURES = ("mlp", "mlp", "lenet5", "lenet5", "cnn1", "cnn1", "cnn2", "cnn2")
"""Private models of the sites in the study of architectures, one for every two."""


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return the lines of a file of rows; none where it is missing."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(**{**line, "seed": int(line["seed"]), "rounds": int(line["rounds"])}) for line in csv.DictReader(file)
        ]


def append_row(row: Row, path: Path = ROWS) -> None:
    """Add a line; the first brings the header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if is_new:
            table.writeheader()
        table.writerow(asdict(row))
        file.flush()
        os.fsync(file.fileno())


def list_left(names: Iterable[str], rows: Sequence[Row]) -> list[tuple[Trial, int]]:
    """Return the runs that have no line yet, each once, by table and seed."""
    wanted = dict.fromkeys((trial, seed) for name in names for seed in SEEDS for trial in STUDIES[name])
    return [(trial, seed) for trial, seed in wanted if not any(row.shows(trial) and row.seed == seed for row in rows)]


def estimate_minutes(trial: Trial, rows: Sequence[Row]) -> float:
    """Return the CPU minutes of a run: of its like, else of any of its method, else of any."""
    like: tuple[Callable[[Row], bool], ...] = (
        lambda row: row.shows(trial),
        lambda row: (row.method, MLP in row.settings) == (trial.method, MLP in trial.settings),
        lambda row: row.method == trial.method,
        lambda row: True,
    )
    found: list[float] = []
    for is_like in like:
        found = found or [float(row.cpu_minutes) for row in rows if is_like(row) and row.rounds == trial.rounds]
    return float(np.mean(found)) if found else 10.0


def make_study(folder: Path, source: Path, trial: Trial, seed: int) -> Study:
    """Divide images among sites of a new study, or tile an archive; for Joint, a single site then holds them all.

    A study that was left by the same code is used as it is.
    """
    note, commit = folder / "made", find_commit()
    if note.exists() and note.read_text() == commit:
        return Study(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if trial.data == SLIDES:
        init_study(folder, archive=source, pipeline=trial.pipeline)
        tile_slides(Study(folder), site=None, pipeline_name=trial.pipeline)
    else:
        init_study(folder)
        partition_images(Study(folder), source, n_sites=N_SITES, per_site=PER_SITE, skew=trial.skew, seed=seed)
    study = Study(folder)
    if trial.method == "joint":
        pool_stores(study, study.site_names())
    if trial.pipeline == MIXED:
        for name, model in zip(study.site_names(), ARCHITECTURES, strict=True):
            path = study.site_path(name)
            path.write_text(path.read_text() + f'private_model = "{model}"\n')
    note.write_text(commit)
    return study


def pool_stores(study: Study, sites: Sequence[str]) -> None:
    """Make a site J1 of all sites' images, for training and for the test."""
    parts: dict[str, tuple[list[Any], list[Any]]] = {"train": ([], []), "test": ([], [])}
    for site in sites:
        with PatchStore(study.store_path(site)) as store:
            for split, (x, y) in parts.items():
                rows = np.flatnonzero(store.table.split == split)
                x.append(store.read(rows))
                y.append(store.table.label[rows])
    arrays = {
        f"{name}_{split}": np.concatenate(values)
        for split, pair in parts.items()
        for name, values in zip("xy", pair, strict=True)
    }
    path = study.root / "all.npz"
    np.savez(path, **arrays)
    partition_images(study, path, n_sites=1, prefix="J")
    path.unlink()


def run_trial(folder: Path, source: Path, trial: Trial, seed: int, rounds: int | None = None) -> Row:
    """Train one run in a study of its own, or finish the one that is there, and return its line."""
    torch.set_num_threads(1)
    keep_freed_memory()
    began, rounds = time.process_time(), rounds or trial.rounds
    study = make_study(folder, source, trial, seed)
    is_joint = trial.method == "joint"
    sites = ["J1"] if is_joint else [name for name in study.site_names() if name != "J1"]
    overrides = [
        f"train.rounds={rounds}",
        f"train.eval_every={max(rounds // 6, 1)}",
        f"train.seed={seed}",
        f"sites={json.dumps(sites)}",
        *trial.settings,
    ]
    method = "regular" if is_joint else trial.method
    earlier_s = sum(line["seconds"] for line in read_metrics(study, sites))
    done = [summary for path in study.runs_path.glob("*/") if (summary := load_summary(RunFolder(path)))]
    summary = (
        done[0]
        if done
        else train(study, method=method, pipeline_name=trial.pipeline, overrides=overrides, backend="local")
    )
    files = [study.root / summary["run"] / f"sites/{site}/metrics.jsonl" for site in sites]
    return Row(
        **{name: getattr(trial, name) for name in ("data", "skew", "pipeline", "method")},
        settings=" ".join(trial.settings),
        seed=seed,
        rounds=rounds,
        **read_scores([[json.loads(line) for line in path.read_text().splitlines()] for path in files]),
        epsilon=f"{max(site['epsilon'] or 0.0 for site in summary['sites']):.4g}",
        guarantee=summary["sites"][0]["guarantee"],
        cpu_minutes=f"{(earlier_s + time.process_time() - began) / 60:.2f}",
        date=date.today().isoformat(),
        commit=find_commit(),
    )


def read_metrics(study: Study, sites: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of metrics of all rounds and sites that an earlier process has trained."""
    files = [path for site in sites for path in study.runs_path.glob(f"*/sites/{site}/metrics.jsonl")]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def read_scores(metrics: Sequence[Sequence[dict[str, Any]]]) -> dict[str, str]:
    """Return the columns of scores, given each site's lines of metrics.

    Raises:
        SystemExit: when a site was scored by another model than its private one, or the only one.
    """
    last = [lines[-1] for lines in metrics]
    if other := {line.get("model", "private") for line in last} - {"private"}:
        raise SystemExit(f"the model scored is {other.pop()}, not the one that the paper compares")
    evaluated = [[line for line in lines if "own" in line] for lines in metrics]
    means = {
        lines[0]["round"]: np.mean([merged(line)["accuracy"] for line in lines])
        for lines in zip(*evaluated, strict=True)
    }
    return {
        "accuracy": join(merged(line)["accuracy"] for line in last),
        "macro_accuracy": join(merged(line)["macro_accuracy"] for line in last),
        "proxy_accuracy": join(line["proxy"]["accuracy"] for line in last if "proxy" in line),
        "curve": " ".join(f"{round_}:{mean:.4f}" for round_, mean in means.items()),
    }


def merged(line: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the scores on the merged test set; a single site's own is the whole."""
    return line.get("merged", line["own"])


def join(values: Iterable[float]) -> str:
    """Return values with four digits, separated by spaces."""
    return " ".join(f"{value:.4f}" for value in values)


def find_commit() -> str:
    """Return the commit of this checkout, with + where files differ from it; or the environment's `COMMIT`."""
    if given := os.environ.get("COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def end_with_parent(parent: int) -> None:
    """End this process when its parent was killed, so that the same command can start anew."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(arguments: argparse.Namespace) -> None:
    """Train what is left, some runs at a time, and add each line as it ends; a run that fails stops no other."""
    sources = {name: getattr(arguments, name) for name in ("mnist", "fashion_mnist", SLIDES)}
    left = list_left(arguments.studies, read_rows(arguments.rows))
    if missing := {trial.data for trial, _ in left if sources[trial.data] is None}:
        raise SystemExit(f"--{min(missing).replace('_', '-')} is needed for its tables")
    with ProcessPoolExecutor(
        arguments.jobs,
        mp_context=get_context("spawn"),
        initializer=end_with_parent,
        initargs=(os.getpid(),),
        max_tasks_per_child=1,
    ) as pool:
        jobs, n_failed = {}, 0
        for trial, seed in left:
            words = [trial.data, trial.skew, trial.pipeline, trial.method, *trial.settings, str(seed)]
            folder = arguments.folder / "_".join(words).replace(":", "")
            jobs[pool.submit(run_trial, folder, sources[trial.data], trial, seed)] = folder
        for n, job in enumerate(as_completed(jobs), 1):
            place, folder = f"{n} of {len(jobs)}: {jobs[job].name}", jobs[job]
            try:
                row = job.result()
            except (Exception, SystemExit) as error:
                n_failed += 1
                print(f"{place}: failed: {error}", flush=True)
                continue
            append_row(row, arguments.rows)
            shutil.rmtree(folder)
            print(f"{place}: {np.mean(row.values()):.3f}, {row.cpu_minutes} CPU minutes", flush=True)
    if n_failed:
        raise SystemExit(f"{n_failed} runs failed; the same command tries them again")


def plan(arguments: argparse.Namespace) -> None:
    """Print how many runs are left, and how long they take."""
    rows = read_rows(arguments.rows)
    for name in arguments.studies:
        left = list_left([name], rows)
        hours = sum(estimate_minutes(trial, rows) for trial, _ in left) / 60
        print(f"{name}: {len(left)} of {len(STUDIES[name]) * len(SEEDS)} runs left, about {hours:.1f} CPU hours")
    left = list_left(arguments.studies, rows)
    hours = sum(estimate_minutes(trial, rows) for trial, _ in left) / 60
    print(f"all, runs in several tables once: {len(left)} runs, about {hours:.1f} CPU hours")


def show(arguments: argparse.Namespace) -> None:
    """Put the tables of the rows into the page."""
    from reproduce_tables import render_tables

    PAGE.write_text(fill_page(PAGE.read_text("utf-8"), render_tables(read_rows(arguments.rows))), "utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "run", "page"))
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, "all"], default="all")
    parser.add_argument("--mnist", type=Path, help="npz file or folder of MNIST")
    parser.add_argument("--fashion-mnist", type=Path, help="folder of Fashion-MNIST, as Debian's dataset-fashion-mnist")
    parser.add_argument("--camelyon17", type=Path, help="an archive with the layout of Camelyon17")
    parser.add_argument("--folder", type=Path, default=Path("reproduce"), help="for the studies while they train")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if "all" in arguments.studies:
        arguments.studies = list(STUDIES)
    {"plan": plan, "run": run, "page": show}[arguments.command](arguments)


if __name__ == "__main__":
    main()
