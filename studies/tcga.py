"""FIG. 8 of ProxyFL's patent: diagnoses of TCGA's slides by FedAvg, FML and ProxyFL, under strong and weak noise.

    wsi-fl init study --from ARCHIVE --layout tcga --group-by institution && cd study && wsi-fl mosaic --all
    python ../studies/tcga.py . --seeds 5            # trains, evaluates, and prints the table
    python ../studies/tcga.py . --show               # prints it again

Every run is an ordinary one of the study; `tcga.csv` in it has a row per run and site. The same command goes on where
it was interrupted. `--set KEY=VALUE` is that of `wsi-fl train`, such as train.rounds=5 for a trial.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from wsi_fl.federation.methods import METHODS
from wsi_fl.report.formatting import format_size
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study

TRIALS = [(method, sigma) for sigma in (1.4, 0.7) for method in ("proxyfl", "fml", "fedavg")]
"""Method and σ, in the order of the table; C is that of the pipeline."""


@dataclass(frozen=True)
class Row:
    """What a run measured at one site; internal and external are accuracies, bytes are sent per round."""

    method: str
    sigma: float
    seed: int
    site: str
    n_internal: int
    internal: float
    n_external: int
    external: float
    epsilon: float
    bytes: float
    run: str


def train_run(study: Study, trial: tuple[str, float, int], overrides: Sequence[str], backend: str) -> list[Row]:
    """Train and evaluate a run; return its rows. Bytes are the mean of the sites and the server, as in `compare`."""
    method, sigma, seed = trial
    keys = [f"privacy.sigma={sigma}", f"train.seed={seed}", *overrides]
    summary = train(study, method=method, overrides=keys, backend=backend)
    document, sites = evaluate(study, summary["run"]), summary["sites"]
    n_rounds = max(int(site["rounds"]) for site in sites)
    sent = summary["communication"]["bytes"] / n_rounds / len(sites)
    epsilon = {site["site"]: site["epsilon"] for site in sites}
    return [
        Row(
            *(method, sigma, seed, row["site"]),
            *(row["own"]["n"], _number(row["own"]["accuracy"])),
            *(row["external"]["n"], _number(row["external"]["accuracy"])),
            *(epsilon[row["site"]], sent, summary["run"]),
        )
        for row in document["sites"]
    ]


def _number(score: float | None) -> float:
    """Return a score; NaN for none, as of a site without scored slides."""
    return np.nan if score is None else score


def read_rows(path: Path) -> list[Row]:
    """Return the rows of all runs that are complete."""
    if not path.exists():
        return []
    kinds = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in fields(Row)}
    with path.open(newline="") as file:
        return [Row(**{name: kinds[name](value) for name, value in row.items()}) for row in csv.DictReader(file)]


def add_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append the rows of a run, in one write."""
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if not file.tell():
            table.writeheader()
        table.writerows(map(asdict, rows))


def render_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield FIG. 8 as Markdown, mean ± sd over sites and seeds: internal (8A), external (8B), ε (8C), bytes (8D)."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.method, row.sigma].append(row)
    yield "| method | σ | internal accuracy | external accuracy | ε | sent per site and round |"
    yield "|---|---|---|---|---|---|"
    for method, sigma in TRIALS:
        if not (group := groups[method, sigma]):
            continue
        cells = [[getattr(row, key) for row in group] for key in ("internal", "external", "epsilon", "bytes")]
        internal, external = (f"{np.nanmean(values):.3f} ± {np.nanstd(values):.3f}" for values in cells[:2])
        epsilon = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(cells[2]), max(cells[2]))))
        sent = format_size(float(np.mean(cells[3])))
        yield f"| {METHODS[method].name} | {sigma:g} | {internal} | {external} | {epsilon} | {sent} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder with mosaics of every site")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--backend", choices=("mpi", "local"), default="mpi", help="a process per site, or one for all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--show", action="store_true", help="only print the table of the runs that are there")
    arguments = parser.parse_args()
    study, path = Study(arguments.study.resolve()), arguments.study / "tcga.csv"
    finished = {(row.method, row.sigma, row.seed) for row in read_rows(path)}
    for seed in range(0 if arguments.show else arguments.seeds):
        for trial in [(method, sigma, seed) for method, sigma in TRIALS]:
            if trial not in finished:
                add_rows(path, train_run(study, trial, arguments.overrides, arguments.backend))
    print("\n".join(render_table(read_rows(path))))


if __name__ == "__main__":
    main()
