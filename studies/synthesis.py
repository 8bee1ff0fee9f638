"""Replay and its variants over partitions, generators and seeds: the table of SYNTHESIS.md.

    python studies/synthesis.py run pcam_3000_balanced.npz      # appends to studies/rows/synthesis.csv, resumes
    python studies/synthesis.py show --page studies/SYNTHESIS.md

Every partition divides the patches anew among three hospitals, nine tenths of one class at each, and trains a generator
at each on its patches. Every seed draws other buffers and trains other classifiers. Every row scores the models of its
name (`predict.model=private`), never another one that would answer in their place. A row that is there is not made
again, nor is what the folder of its study holds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
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

from wsi_fl.stages.evaluation.evaluate import Evaluation, evaluate
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.synthesis.stages.gan import KIND as GAN
from wsi_fl.synthesis.stages.generator_training import train_generator

SITES = ("S1", "S2", "S3")
ROWS = Path(__file__).parent / "rows" / "synthesis.csv"
KEY = ("partition", "variant", "seed")
PIPELINE = "synthesis_small"
GENERATORS = ("gan.iterations=700", "gan.privacy_iterations=0")
TRAINING = (
    *("train.rounds=10", "train.eval_every=10", "train.epochs_per_round=5", "train.batch_size=16"),
    *("train.optimizer_after_exchange=reset", "train.local_baseline=false", "predict.model=private"),
    *("replay.unchecked=true", "evaluate.bootstrap=0"),
)
VARIANTS = {
    "replay": "`replay`",
    "no_buffer": "`no_buffer`",
    "buffer_only": "`buffer_only`",
    "synthetic_only": "`synthetic_only`",
    "central": "`central`: all buffers, no real patch",
    "regular": "`regular`: every site alone",
}
"""Variant → its name in the page; the last is another method."""


def make_study(root: Path, data: Path, partition: int, arguments: argparse.Namespace) -> Study:
    """Divide the patches among three hospitals and train a generator at each, unless they are there."""
    study = Study(root)
    for part in ("pipelines", "sites"):
        (root / part).mkdir(parents=True, exist_ok=True)
    pipeline = find_shipped_folder("pipelines") / f"{PIPELINE}.toml"
    (root / "pipelines" / pipeline.name).write_bytes(pipeline.read_bytes())
    if not all(study.site_path(site).exists() for site in SITES):
        division = {"n_sites": len(SITES), "per_site": arguments.per_site, "skew": "major:0.9"}
        partition_images(study, data, **division, size_px=32, test_fraction=0.2, seed=partition)
    settings = study.load_pipeline(PIPELINE, [*GENERATORS, *arguments.set, f"gan.seed={partition}"])
    for site in SITES:
        train_generator(study, settings, GAN, site)  # goes on where it was
        print(f"partition {partition}: the generator of {site} is trained", flush=True)
    return study


def measure_variant(study: Study, variant: str, seed: int, overrides: Sequence[str]) -> dict[str, str]:
    """Train a variant and return the scores of its models: their means, and mean and deviation on each site's part."""
    chosen = ("regular", []) if variant == "regular" else ("replay", [f"replay.variant={variant}"])
    settings = [*TRAINING, *overrides, *chosen[1], f"train.seed={seed}"]
    run = train(study, method=chosen[0], pipeline_name=PIPELINE, overrides=settings, backend="local")["run"]
    return select_scores(evaluate(study, run))


def select_scores(evaluation: Evaluation) -> dict[str, str]:
    """Return the columns of a row; SystemExit where other models than those of the name answer."""
    if {row["model"] for row in evaluation["sites"]} != {"private"}:
        raise SystemExit(f"{evaluation['run']}: other models answer than those of its method")
    merged, parts = evaluation["models"]["private"]["merged"], evaluation["parts"]
    assert merged is not None and parts is not None  # simulated sites share their patches
    scores = {name: f"{merged[name]['mean']:.4f}" for name in ("accuracy", "auroc")}
    for site, part in parts.items():
        scores |= {site: f"{part['accuracy']['mean']:.4f}", f"{site}_sd": f"{part['accuracy']['sd']:.4f}"}
    return scores


def run_study(arguments: argparse.Namespace) -> None:
    """Append a row for every partition, variant and seed that has none."""
    present = {tuple(row[name] for name in KEY) for row in read_rows(arguments.rows)}
    for partition in arguments.partitions:
        keys = [(str(partition), variant, str(seed)) for seed in arguments.seeds for variant in VARIANTS]
        if present.issuperset(keys):
            continue
        study = make_study(arguments.folder / f"partition-{partition}", arguments.data, partition, arguments)
        for key in keys:
            if key in present:
                continue
            start_time = time.perf_counter()
            scores = measure_variant(study, key[1], int(key[2]), arguments.set)
            minutes = {"minutes": f"{(time.perf_counter() - start_time) / 60:.1f}"}
            row = dict(zip(KEY, key, strict=True)) | scores | minutes | describe_origin(arguments.commit)
            append_rows(arguments.rows, [row], KEY)
            print(*row.values(), flush=True)


# ---- the table of the page


def render_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the table of the page by the name of its marker: a part for each partition."""
    if not rows:
        return {"replay": NO_ROWS}
    partitions = list(dict.fromkeys(row["partition"] for row in rows))
    tables = [render_partition([row for row in rows if row["partition"] == name], name) for name in partitions]
    return {"replay": "\n\n".join([*tables, describe_rows(rows)])}


def render_partition(rows: Sequence[Row], partition: str) -> str:
    """Return a table with a line for each variant: every seed, means, and accuracies on each site's part."""
    lines = []
    for variant, name in VARIANTS.items():
        values = sorted((row for row in rows if row["variant"] == variant), key=lambda row: int(row["seed"]))
        if not values:
            continue
        accuracies = ", ".join(f"{float(row['accuracy']):.3f}" for row in values)
        parts = ", ".join(f"{average(values, site)} ± {average(values, f'{site}_sd')}" for site in SITES)
        lines.append([name, accuracies, average(values, "accuracy"), average(values, "auroc"), parts])
    seeds = sorted({int(row["seed"]) for row in rows})
    heads = [f"partition and generators {partition}", f"accuracy, seeds {', '.join(map(str, seeds))}", "mean", "AUROC"]
    return render_table([*heads, f"{', '.join(SITES)}: accuracy ± sd over models"], lines)


def average(rows: Sequence[Row], column: str) -> str:
    """Return the mean of a column."""
    return f"{np.mean([float(row[column]) for row in rows]):.3f}"


def show_study(arguments: argparse.Namespace) -> None:
    """Print the tables of the rows, or put them into a page."""
    tables = render_tables(read_rows(arguments.rows))
    if arguments.page:
        arguments.page.write_text(fill_page(arguments.page.read_text("utf-8"), tables), "utf-8")
    else:
        print("\n\n".join(tables.values()))


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser, run = build_parser(__doc__, ROWS, run_study, show_study)
    run.add_argument("data", type=Path, help="a npz of patches with two classes")
    run.add_argument("--folder", type=Path, default=Path("synthesis_studies"), help="for the studies")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    run.add_argument("--per-site", type=int, default=200)
    run.add_argument("--partitions", type=int, nargs="+", default=[0, 1])
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser.parse_args(given)


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    arguments.work(arguments)


if __name__ == "__main__":
    main()
