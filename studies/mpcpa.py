"""MPCPA over several seeds: hospitals that are alike and hospitals that differ, own images against own and generated.

    python studies/mpcpa.py run chest_xray --seeds 0 1 2      # appends to studies/rows/mpcpa.csv, resumes
    python studies/mpcpa.py show --page studies/MPCPA.md      # puts the tables of all rows into the page

The test images are the same throughout; every seed divides the others anew among three hospitals, trains other
denoisers and other classifiers. In `differ` the hospitals have different scanners (contrast, gamma), which also took
their part of the test images, and learn from other shares of the disease. Every row scores the model of its name,
never another one that would answer in its place. Differences are paired by seed and test image (not by patient, whom
such data often do not name); their intervals draw both anew. A seed of a setting that is among the rows is not made
again, nor is what the folder of its study holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pages import (
    NO_ROWS,
    Row,
    append_rows,
    build_parser,
    describe_origin,
    describe_rows,
    fill_page,
    read_rows,
    render_table,
)

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.evidence.verdict import estimate_mean
from wsi_fl.federation.methods import METHODS
from wsi_fl.report.formatting import Json
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.load_models import available_models
from wsi_fl.stages.evaluation.write_predictions import read_predictions
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.runtime.console import ProgressBars
from wsi_fl.stores.images import read_data_set
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.synthesis.stages.baselines import run_baselines

SITES = ("A", "B", "C")
TEST_SHARE = 0.2
ROWS = Path(__file__).parent / "rows" / "mpcpa.csv"
"""Rows of the models; those of the denoisers are beside it, in mpcpa_denoisers.csv."""


KEY = ("setting", "seed")


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


def simulate_scanner(x: NDArray[np.uint8], contrast: float, gamma: float) -> NDArray[np.uint8]:
    """Return the images as another scanner would show them."""
    value = (x / 255.0) ** gamma
    return np.asarray(np.clip((value - 0.5) * contrast + 0.5, 0, 1) * 255, np.uint8)


def divide_test(n: int) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return the indices of each hospital's test images, a random share of all, and those of all other images."""
    order = np.random.default_rng(0).permutation(n)
    n_test = round(TEST_SHARE * n)
    return [np.sort(part) for part in np.array_split(order[:n_test], len(SITES))], np.sort(order[n_test:])


def divide_images(labels: NDArray[np.int64], setting: Setting, seed: int) -> list[NDArray[np.int64]]:
    """Return the indices of each hospital's training images."""
    order = np.random.default_rng(seed).permutation(len(labels))
    if setting.share is None or setting.per_site is None:
        return [np.sort(part) for part in np.array_split(order, len(SITES))]
    pools = {k: list(order[labels[order] == k]) for k in (0, 1)}
    parts = []
    for share in setting.share:
        n_second = round(share * setting.per_site)
        indices = [pools[1].pop() for _ in range(n_second)]
        indices += [pools[0].pop() for _ in range(setting.per_site - n_second)]
        parts.append(np.sort(indices))
    return parts


def make_study(root: Path, data: Path, setting: Setting, seed: int, arguments: argparse.Namespace) -> Study:
    """Make three hospitals of an image data set with two classes, unless they are there."""
    origin = {"data": data.name, "size_px": arguments.size_px, "setting": repr(setting), "seed": seed}
    if root.exists():
        if json.loads((root / "made.json").read_text()) != origin:
            raise SystemExit(f"{root} was made of other data or settings; use another --folder")
        return Study(root)
    final, root = root, root.with_name(f".{root.name}.partial")
    shutil.rmtree(root, ignore_errors=True)
    study = Study(root)
    for part in ("pipelines", "sites"):
        (root / part).mkdir(parents=True)
    pipeline = find_shipped_folder("pipelines") / f"{arguments.pipeline}.toml"
    (root / "pipelines" / pipeline.name).write_bytes(pipeline.read_bytes())
    images = read_data_set(data, arguments.size_px).train
    tests, rest = divide_test(len(images))
    parts = divide_images(images.y[rest], setting, seed)
    for name, train_rows, test_rows, scanner in zip(SITES, parts, tests, setting.scanners, strict=True):
        file = root / f"{name}.npz"
        np.savez(
            file,
            x_train=simulate_scanner(images.x[rest[train_rows]], *scanner),
            y_train=images.y[rest[train_rows]],
            x_test=simulate_scanner(images.x[test_rows], *scanner),
            y_test=images.y[test_rows],
        )
        partition_images(study, file, n_sites=1, prefix=name)
        file.unlink()
    (root / "made.json").write_text(json.dumps(origin))
    root.rename(final)
    return Study(final)


# ---- one seed of one setting

TABLE = {
    "mean A": ("regular", "A: own images", "0.866, 0.814, 0.843 (three clients)"),
    "mean B": ("mpcpa", "B: own and others' generated", "0.919, 0.890, 0.907"),
    "aggregated A": ("regular", "A aggregated", "0.843"),
    "aggregated B": ("mpcpa", "B aggregated", "0.907"),
    "all generated": ("generated", "all generated, no real image", "0.907"),
    "all original": ("joint", "all original, pooled", "0.913"),
    "FedAvg": ("fedavg", "FedAvg", "0.884"),
}
"""Row → its method, its name in the page, and the paper's figure for chest X-rays (Tables 1 and 7, test)."""


def list_hits(run: Path, method: str, *, aggregated: bool) -> NDArray[np.int64]:
    """Return int[models, n]: whether each site's own model, or the mean of their probabilities, is right."""
    ((_, role),) = available_models(METHODS[method]).items()
    folder, probabilities, truth = RunFolder(run), [], np.zeros(0, np.int64)
    for site in sorted(path.name for path in (run / "sites").iterdir()):
        table = read_predictions(folder.site_folder(site), model=role)
        if table is None:
            raise SystemExit(f"{run}: no predictions of the {role} model of {site}")
        order = table.obs.sort_values(["part", "patient"]).index.to_numpy()
        probabilities.append(table.model_predictions[order])
        truth = np.asarray(table.truth)[order]
    values = np.array(probabilities)
    return np.asarray((values.mean(0, keepdims=True) if aggregated else values).argmax(-1) == truth, np.int64)


def measure_membership(study: Study, run: str) -> float:
    """Return the mean accuracy of a loss threshold over the sites' own models, against all test images."""
    sites = audit_run(study, run)["sites"]
    return float(np.mean([site["models"][0]["membership"]["merged"]["accuracy"] for site in sites]))


def measure_seed(
    study: Study, setting: Setting, seed: int, arguments: argparse.Namespace
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Train everything of one seed; return the rows of its models and those of its denoisers."""
    start_time = time.perf_counter()
    overrides = ["mpcpa.unchecked=true", "evaluate.bootstrap=0", f"ddpm.seed={seed}", f"train.seed={seed}"]
    overrides += arguments.set
    with ProgressBars(f"{setting.name}, seed {seed}") as watcher:
        document = run_baselines(
            study, pipeline_name=arguments.pipeline, overrides=overrides, backend="local", watcher=watcher
        )
    membership = {}
    if setting.share is None:  # else members and test images differ by class and scanner, not by membership alone
        membership = {method: f"{measure_membership(study, run):.4f}" for method, run in document["runs"].items()}
    minutes = f"{(time.perf_counter() - start_time) / 60:.0f}"
    common = {"setting": setting.name, "seed": seed}
    origin = {"minutes": minutes, **describe_origin(arguments.commit)}
    rows = []
    for label, (method, _, _) in TABLE.items():
        aggregated = label.startswith("aggregated")
        hits = list_hits(study.root / document["runs"][method], method, aggregated=aggregated)
        values = {
            "row": label,
            "accuracy": f"{hits.mean():.4f}",
            "membership": "" if aggregated else membership.get(method, ""),
            "models": len(hits),
            "hits": "".join(map(str, hits.sum(0))),
        }
        rows.append(common | values | origin)
    return rows, [common | select_check(check) | origin for check in document["memorization"]]


def select_check(check: Json) -> dict[str, object]:
    """Return the columns of a denoiser's row."""
    distances = {
        key: f"{check[key]:.4f}" for key in ("least", "median", "held_out_least", "held_out_median") if key in check
    }
    counts = {key: check[key] for key in ("n_generated", "below_paper", "copies", "passed")}
    return {"site": check["site"], **distances, **counts}


def run_study(arguments: argparse.Namespace) -> None:
    """Append the rows of every seed and setting that has none."""
    present = {(row["setting"], int(row["seed"])) for row in read_rows(arguments.rows)}
    for seed in arguments.seeds:
        for setting in SETTINGS:
            if setting.name not in arguments.settings or (setting.name, seed) in present:
                continue
            study = make_study(arguments.folder / f"{setting.name}-{seed}", arguments.data, setting, seed, arguments)
            rows, denoisers = measure_seed(study, setting, seed, arguments)
            append_rows(denoisers_path(arguments.rows), denoisers, KEY)
            append_rows(arguments.rows, rows, KEY)  # last: without these, both are made again
            print(setting.name, seed, {row["row"]: row["accuracy"] for row in rows}, flush=True)


def denoisers_path(rows: Path) -> Path:
    """Return the file of the denoisers' rows beside that of the models."""
    return rows.with_name(f"{rows.stem}_denoisers.csv")


# ---- the tables of the page

DIFFERENCES = (
    ("mean B", "mean A"),
    ("aggregated A", "mean A"),
    ("aggregated B", "mean B"),
    ("aggregated B", "mean A"),
    ("aggregated B", "FedAvg"),
)


def render_tables(rows: Sequence[Row], denoisers: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the page by the name of their markers."""
    if not rows:
        return dict.fromkeys(("mpcpa", "mpcpa_denoisers"), NO_ROWS)
    tables = [render_accuracies(rows), render_differences(rows), describe_rows(rows)]
    return {"mpcpa": "\n\n".join(tables), "mpcpa_denoisers": render_denoisers(denoisers)}


def render_accuracies(rows: Sequence[Row]) -> str:
    """Return the table of accuracies, by seed and on average, and of the accuracy of a membership attack."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    columns = [head for name in settings for head in (f"{name}: seeds {', '.join(list_seeds(rows, name))}", "mean")]
    heads = [f"accuracy on {len(rows[0]['hits'])} real films", *columns, "paper", "membership, alike"]
    lines = []
    for label, (_, name, published) in TABLE.items():
        line = [name]
        for setting in settings:
            accuracies = list_values(rows, setting, label, "accuracy")
            line += [", ".join(f"{value:.3f}" for value in accuracies), f"{np.mean(accuracies):.3f}"]
        attacks = list_values(rows, "alike", label, "membership")
        lines.append([*line, published, f"{np.mean(attacks):.2f}" if attacks else ""])
    return render_table(heads, lines)


def list_values(rows: Sequence[Row], setting: str, label: str, column: str) -> list[float]:
    """Return the values of a column by seed, where there are any."""
    return [float(row[column]) for row in rows if (row["setting"], row["row"]) == (setting, label) and row[column]]


def list_seeds(rows: Sequence[Row], setting: str) -> list[str]:
    """Return the seeds of a setting."""
    return list(dict.fromkeys(row["seed"] for row in rows if row["setting"] == setting))


def read_shares(rows: Sequence[Row], setting: str, label: str) -> NDArray[np.float64]:
    """Return float64[seeds, n], the share of right models for each film."""
    values = [row for row in rows if (row["setting"], row["row"]) == (setting, label)]
    return np.array([np.array([int(digit) for digit in row["hits"]]) / int(row["models"]) for row in values])


def render_differences(rows: Sequence[Row]) -> str:
    """Return the table of differences, paired by seed and film, with 95 % intervals over both."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    lines = []
    for first, second in DIFFERENCES:
        line = [f"{first} − {second}"]
        for setting in settings:
            values = read_shares(rows, setting, first) - read_shares(rows, setting, second)
            estimate = estimate_mean(values, np.ones_like(values), np.arange(values.shape[1]).astype(str))
            ends = (np.nan if end is None else end for end in (estimate.low, estimate.high))
            line.append("{:+.3f} ({:+.3f} to {:+.3f})".format(estimate.mean, *ends).replace("-", "−"))
        lines.append(line)
    return render_table(["difference, paired by seed and film", *settings], lines)


def group_denoisers(denoisers: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the denoisers of hospitals that are alike together, and of those that differ by scanner."""
    names = {"A1": "full contrast", "B1": "half contrast", "C1": "gamma 2"}
    groups: dict[str, list[Row]] = {}
    for row in denoisers:
        name = row["setting"] if row["setting"] == "alike" else f"{row['setting']}, {names[row['site']]}"
        groups.setdefault(name, []).append(row)
    yield from groups.items()


def render_denoisers(denoisers: Sequence[Row]) -> str:
    """Return the table of distances between generated and training images."""
    heads = ["denoisers", "least distance", "median", "held-out films: least", "median"]
    heads += ["below 0.1", "copies", "check passed"]
    lines = []
    for name, group in group_denoisers(denoisers):
        spans = [format_span(group, key, 3) for key in ("least", "median", "held_out_least", "held_out_median")]
        passed = sum(row["passed"] == "True" for row in group)
        n_generated = group[0]["n_generated"]
        counts = [f"{format_span(group, 'below_paper', 0)} of {n_generated}", format_span(group, "copies", 0)]
        lines.append([name, *spans, *counts, f"{passed} of {len(group)}"])
    return render_table(heads, lines)


def format_span(rows: Sequence[Row], key: str, digits: int) -> str:
    """Return the smallest and the largest value of a column."""
    values = [float(row[key]) for row in rows if row[key]]
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else "–".join(ends)


def show_study(arguments: argparse.Namespace) -> None:
    """Print the tables of the rows, or put them into a page."""
    tables = render_tables(read_rows(arguments.rows), read_rows(denoisers_path(arguments.rows)))
    if arguments.page:
        arguments.page.write_text(fill_page(arguments.page.read_text("utf-8"), tables), "utf-8")
    else:
        print("\n\n".join(tables.values()))


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser, run = build_parser(__doc__, ROWS, run_study, show_study)
    run.add_argument("data", type=Path, help="folder of two classes of images")
    run.add_argument("--folder", type=Path, default=Path("mpcpa_studies"), help="for the studies")
    run.add_argument("--pipeline", default="mpcpa_small")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    run.add_argument("--size-px", type=int, default=32)
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--settings", nargs="+", default=[setting.name for setting in SETTINGS])
    return parser.parse_args(given)


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    arguments.work(arguments)


if __name__ == "__main__":
    main()
