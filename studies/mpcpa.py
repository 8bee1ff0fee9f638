"""MPCPA over several seeds: hospitals that are alike and hospitals that differ, own images against own and generated.

    python studies/mpcpa.py run chest_xray --seeds 0 1 2     # appends to studies/rows/mpcpa.csv, and goes on where it was
    python studies/mpcpa.py show --page studies/MPCPA.md     # puts the tables of all rows into the page

The test images are the same throughout; every seed divides the others anew among three hospitals, trains other
denoisers and other classifiers. In `differ` the hospitals have different scanners (contrast, gamma), which also took
their part of the test images, and learn from other shares of the disease. Every row scores the model of its name,
never what would answer in its place. Differences are paired by seed and test image (not by patient, whom such data
often do not name); their intervals draw both anew. A setting and seed that the rows have is not made again; what a
folder holds already is not either.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wsi_fl.evidence.verdict import estimate_mean
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.runtime.console import ProgressBars
from wsi_fl.stores.images import read_data_set
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.synthesis.stages.baselines import run_baselines

SITES = ("A", "B", "C")
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Setting:
    """What the hospitals are like.

    Attributes:
        share: of the second class among each one's training images; None for what is left of all, divided evenly.
        per_site: how many training images each has; None for all.
        scanners: (contrast around mid-grey, gamma) of each.
    """

    name: str
    share: tuple[float, ...] | None = None
    per_site: int | None = None
    scanners: tuple[tuple[float, float], ...] = ((1.0, 1.0),) * 3


SETTINGS = (Setting("alike"), Setting("differ", (0.9, 0.1, 0.5), 120, ((1.0, 1.0), (0.5, 1.0), (1.0, 2.0))))


def scanned(x: NDArray[np.uint8], contrast: float, gamma: float) -> NDArray[np.uint8]:
    """The images as another scanner would show them."""
    value = (x / 255.0) ** gamma
    return np.asarray(np.clip((value - 0.5) * contrast + 0.5, 0, 1) * 255, np.uint8)


def divided(labels: NDArray[np.int64], setting: Setting, seed: int) -> list[NDArray[np.int64]]:
    """Which training images each hospital has."""
    order = np.random.default_rng(seed).permutation(len(labels))
    if setting.share is None or setting.per_site is None:
        return [np.sort(part) for part in np.array_split(order, len(SITES))]
    left = {k: list(order[labels[order] == k]) for k in (0, 1)}
    parts = []
    for share in setting.share:
        n_second = round(share * setting.per_site)
        taken = [left[1].pop() for _ in range(n_second)]
        taken += [left[0].pop() for _ in range(setting.per_site - n_second)]
        parts.append(np.sort(taken))
    return parts


def made_study(root: Path, data: Path, setting: Setting, seed: int, args: argparse.Namespace) -> Study:
    """Three hospitals of one image data set with two classes."""
    said = {"data": str(data.resolve()), "size_px": args.size_px, "setting": repr(setting), "seed": seed}
    if root.exists():
        if json.loads((root / "made.json").read_text()) != said:
            raise SystemExit(f"{root} was made of other data or settings; use another --folder")
        return Study(root)
    final, root = root, root.with_name(f".{root.name}.partial")
    shutil.rmtree(root, ignore_errors=True)
    study = Study(root)
    for part in ("pipelines", "sites"):
        (root / part).mkdir(parents=True)
    pipeline = find_shipped_folder("pipelines") / f"{args.pipeline}.toml"
    (root / "pipelines" / pipeline.name).write_bytes(pipeline.read_bytes())
    images = read_data_set(data, args.size_px).train
    order = np.random.default_rng(0).permutation(len(images))
    n_test = round(TEST_SHARE * len(order))
    test, rest = np.sort(order[:n_test]), np.sort(order[n_test:])
    parts = divided(images.y[rest], setting, seed)
    for name, mine, asked, scanner in zip(
        SITES, parts, np.array_split(test, len(SITES)), setting.scanners, strict=True
    ):
        file = root / f"{name}.npz"
        np.savez(
            file,
            x_train=scanned(images.x[rest[mine]], *scanner),
            y_train=images.y[rest[mine]],
            x_test=scanned(images.x[asked], *scanner),
            y_test=images.y[asked],
        )
        partition_images(study, file, n_sites=1, prefix=name)
        file.unlink()
    (root / "made.json").write_text(json.dumps(said))
    root.rename(final)
    return Study(final)


def right(run: Path) -> NDArray[np.float64]:
    """[sites + 1, n]: whether each site's model, and last the mean of their probabilities, is right for each image."""
    truth: list[str] = []
    models = []
    for path in sorted(run.glob("sites/*/predictions.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            said = [line for line in csv.DictReader(file) if line["selected"] == "True"]
        lines = sorted(said, key=lambda line: (line["part"], line["patient"]))
        names = [key for key in lines[0] if key.startswith("p_")]
        truth = [f"p_{line['truth']}" for line in lines]
        models.append([[float(line[name]) for name in names] for line in lines])
    p = np.array(models)
    asked = np.array([names.index(name) for name in truth])
    return np.asarray(np.concatenate([p, p.mean(0, keepdims=True)]).argmax(-1) == asked, np.float64)


def measured(study: Study, setting: Setting, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One seed of one setting."""
    began = time.perf_counter()
    overrides = ["mpcpa.unchecked=true", "evaluate.bootstrap=0", f"ddpm.seed={seed}", f"train.seed={seed}"]
    overrides += args.set
    with ProgressBars(f"{setting.name}, seed {seed}") as watcher:
        document = run_baselines(
            study, pipeline_name=args.pipeline, overrides=overrides, backend="local", watcher=watcher
        )
    runs = {method: right(study.root / run).tolist() for method, run in document["runs"].items()}
    seconds = time.perf_counter() - began
    return {"setting": setting.name, "seed": seed, "seconds": seconds, "right": runs, "table": document}


Answers = Callable[[Mapping[str, Any]], NDArray[np.float64]]


def _mean_site(method: str) -> Answers:
    return lambda row: np.array(row["right"][method])[:-1].mean(0)


def _aggregated(method: str) -> Answers:
    return lambda row: np.array(row["right"][method])[-1]


ANSWERS: dict[str, Answers] = {
    "mean A": _mean_site("regular"),
    "mean B": _mean_site("mpcpa"),
    "aggregated A": _aggregated("regular"),
    "aggregated B": _aggregated("mpcpa"),
    "all original": _mean_site("joint"),
    "all generated": _mean_site("generated"),
    "FedAvg": _mean_site("fedavg"),
}
DIFFERENCES = (
    ("mean B", "mean A"),
    ("aggregated A", "mean A"),
    ("aggregated B", "mean B"),
    ("aggregated B", "mean A"),
    ("aggregated B", "FedAvg"),
)


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: accuracies of every seed, then paired differences with their intervals."""
    lines = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        passed = [one["passed"] for row in mine for one in row["table"]["memorization"]]
        lines += [f"**{name}**, seeds {', '.join(str(row['seed']) for row in mine)}; denoisers that pass their check: "]
        lines[-1] += f"{sum(passed)} of {len(passed)}"
        lines += ["", "| | every seed | mean |", "|---|---|---|"]
        for label, of in ANSWERS.items():
            every = [float(of(row).mean()) for row in mine]
            lines.append(f"| {label} | {', '.join(f'{v:.3f}' for v in every)} | {np.mean(every):.3f} |")
        lines += ["", "| difference | mean | 95 % interval |", "|---|---|---|"]
        for a, b in DIFFERENCES:
            values = np.array([ANSWERS[a](row) - ANSWERS[b](row) for row in mine])
            found = estimate_mean(values, np.ones_like(values), np.arange(values.shape[1]).astype(str))
            low, high = found.low or np.nan, found.high or np.nan
            lines.append(f"| {a} − {b} | {found.mean:+.3f} | {low:+.3f} to {high:+.3f} |")
        lines.append("")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of two classes of images")
    parser.add_argument("--folder", type=Path, default=Path("mpcpa_studies"), help="for the studies")
    parser.add_argument("--pipeline", default="mpcpa_small")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--size-px", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=[s.name for s in SETTINGS])
    parser.add_argument("--out", type=Path, default=Path("mpcpa.json"))
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of earlier runs")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.show:
        print(shown([row for path in args.show for row in json.loads(path.read_text())]))
        return
    rows = []
    for seed in args.seeds:
        for setting in SETTINGS:
            if setting.name in args.settings:
                root = args.folder / f"{setting.name}-{seed}"
                study = made_study(root, args.data, setting, seed, args)
                rows.append(measured(study, setting, seed, args))
                args.out.write_text(json.dumps(rows))
    print(shown(rows))


if __name__ == "__main__":
    main()
