"""Heads on bags of real patch features, with and without differential privacy: AUROC of slides, or survival.

    wsi-fl init pool && cd pool
    wsi-fl partition IMAGES.npz --sites 1
    wsi-fl features --all --set features.encoder=tf_efficientnet_lite0 --set features.input_px=128
    python ../benchmarks/mil.py . --seeds 3 --out mil.jsonl
    python ../benchmarks/mil.py . --seeds 3 --question survival --out survival.jsonl
    python ../benchmarks/mil.py --show mil.jsonl

A slide is simulated: a bag of patches drawn from the pool, with a share of tumour where it has any. Every site has its
own patches, and those of its test slides are in no training slide. A patient has one slide. All heads of a seed learn
from the same slides. Intervals draw seeds and test patients anew.

Where survival is asked, every patient has tumour, and the time to the event shrinks with its share, by a factor of
`SHORTER` from none to the largest. Times are of a Weibull distribution of shape 3, and patients leave between 10 and 60
months. The last column is the concordance of who knows the share itself.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wsi_fl.data.metrics import compute_auroc
from wsi_fl.data.survival import compute_concordances, compute_risk
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.training.train import train
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.types import BagTable

Features = NDArray[np.float32]
Row = Mapping[str, Any]

HEADS = ("mean_head", "deepset", "deepset_attention", "abmil", "clam_sb", "transmil")
PRIVACY = {
    "without DP": ["privacy.enabled=false"],
    "ε = 3 per patient": ["privacy.unit=patient", "privacy.target_epsilon=3"],
}
TEST_SHARE = 0.3
"""Of a site's patches, which are in its test slides alone."""
REPEATS = 1000
SHORTER = 30.0
SURVIVAL = ['target.time="months"', 'target.event="dead"', "target.intervals=[3, 6, 12, 18, 24, 36, 48]"]
PIPELINE = """
[train]
data = "mosaics"
eval_every = 1000
batch_size = 8
[evaluate]
bootstrap = 0
"""


def pool_of(study: Study) -> tuple[Features, NDArray[np.int64], BagMeta]:
    """Features and labels of all patches of a study's only site, and what is known of them."""
    (site,) = study.site_names()
    with BagStore(study.features_path(site)) as store:
        label = store.patch_table.label
        return store.read(np.arange(len(label))), label, replace(store.meta, made_by="mosaic")


def slide_of(x: Features, label: NDArray[np.int64], share: float, size: int, rng: np.random.Generator) -> Bag:
    """A bag of `size` patches, a share of them with tumour."""
    n = max(1, round(share * size)) if share else 0
    rows = [rng.choice(np.flatnonzero(label == c), k) for c, k in ((0, size - n), (1, n))]
    chosen = rng.permutation(np.concatenate(rows))
    return Bag(x[chosen], np.stack([np.arange(size), np.zeros(size, np.int64)], 1))


def study_of(pool: tuple[Features, NDArray[np.int64], BagMeta], args: Any, seed: int, folder: Path) -> Study:
    """A study of sites with as many patients for training, and half as many for testing."""
    x, label, meta = pool
    for name in ("pipelines", "sites"):
        (folder / name).mkdir(parents=True)
    (folder / "pipelines" / "mil.toml").write_text(PIPELINE, encoding="utf-8")
    study, rng = Study(folder), np.random.default_rng(seed)
    for k, rows in enumerate(np.array_split(rng.permutation(len(x)), args.sites)):
        site, n_test = f"S{k + 1}", round(TEST_SHARE * len(rows))
        file = f'name = "{site}"\nreal = false\nlayout = "generic"\nclinical = "{site}.csv"\n'
        (folder / "sites" / f"{site}.toml").write_text(file, encoding="utf-8")
        bags, labels, splits = [], [], []
        lives: list[str] = []
        for split, mine, n in (("train", rows[n_test:], args.patients), ("test", rows[:n_test], args.patients // 2)):
            for one in range(n):
                asked = args.question == "survival"
                low, high = (0.0, args.tumor[1]) if asked else args.tumor
                share = rng.uniform(low, high) if asked or one % 2 else 0.0
                size = int(rng.integers(args.patches // 2, args.patches + 1))
                bags.append(slide_of(x[mine], label[mine], share, size, rng))
                labels.append(one % 2)
                splits.append(split)
                event, left = 60 * rng.weibull(3) / SHORTER ** (share / high), rng.uniform(10, 60)
                lives.append(f"{site}-{len(lives)},{min(event, left):.3f},{int(event < left)},{share:.4f}")
        names = np.array([f"{site}-{number}" for number in range(len(bags))])
        table = BagTable(np.array(labels), np.full(len(bags), ""), names, names, np.array(splits))
        table_of_lives = "\n".join(["patient,months,dead,share", *lives])
        (folder / f"{site}.csv").write_text(table_of_lives + "\n", encoding="utf-8")
        path = study.mosaic_path(site)
        path.parent.mkdir(parents=True)
        write_bags(path, meta, table, bags)
    return study


def said(study: Study, run: str, answer: str) -> tuple[list[list[float]], list[Any]]:
    """(score by each site's model, truth) of all test slides: the probability of tumour and the label, or the risk and
    (time, event).
    """
    document = evaluate(study, run, overrides=[f"predict.model={answer}"])
    scores: list[list[float]] = []
    truth: list[Any] = []
    for site in document["sites"]:
        with (study.root / run / "sites" / site["site"] / "predictions.csv").open(encoding="utf-8") as file:
            lines = [line for line in csv.DictReader(file) if line["selected"] == "True"]
        columns = [name for name in lines[0] if name.startswith(("p_", "without_event_"))]
        if document["task"] == "survival":
            ends = [float(name.rsplit("_", 1)[1]) for name in columns]
            stated = np.array([[float(line[name]) for name in columns] for line in lines])
            scores.append(compute_risk(stated, ends).tolist())
            truth = [(float(line["time"]), float(line["event"])) for line in lines]
        else:
            scores.append([float(line[columns[-1]]) for line in lines])
            truth = [int(line["truth"] == columns[-1].removeprefix("p_")) for line in lines]
    return scores, truth


def known_by(study: Study) -> float | None:
    """Concordance of who knows the share of tumour of every test patient."""
    lives = []
    for site in study.site_names():
        with BagStore(study.mosaic_path(site)) as store:
            tested = set(store.table.patient[store.table.split == "test"].tolist())
        with (study.root / f"{site}.csv").open(encoding="utf-8") as file:
            lives += [line for line in csv.DictReader(file) if line["patient"] in tested]
    truth = np.array([(float(one["months"]), float(one["dead"])) for one in lives])
    return concordance(np.array([float(one["share"]) for one in lives]), truth)


def concordance(stated: NDArray[np.float64], truth: NDArray[Any]) -> float | None:
    """Return Harrell's concordance of patients; None where no pair's order is known."""
    found = float(compute_concordances(stated, truth, np.ones((1, len(truth)), np.int32))[0])
    return None if np.isnan(found) else found


def rows_of(pool: Any, args: argparse.Namespace, done: set[tuple[str, str, int]]) -> Iterator[Row]:
    """A row per seed, head and promise that is not done yet."""
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            study = study_of(pool, args, seed, Path(folder))
            for head in args.heads:
                for promise, overrides in PRIVACY.items():
                    if (head, promise, seed) in done:
                        continue
                    began = time.perf_counter()
                    keys = [f"model.private={head}", f"model.proxy={head}", f"train.seed={seed}"]
                    keys += [f"train.rounds={args.rounds}", f"train.lr={args.lr}", *overrides]
                    keys += SURVIVAL if args.question == "survival" else []
                    run = train(study, method="proxyfl", overrides=keys, backend="local")["run"]
                    seconds = time.perf_counter() - began
                    private, labels = said(study, run, "private")
                    yield {
                        "head": head,
                        "promise": promise,
                        "seed": seed,
                        "private": private,
                        "proxy": said(study, run, "proxy")[0],
                        "labels": labels,
                        "known": known_by(study) if args.question == "survival" else None,
                        "seconds": seconds,
                    }


def measured(scores: NDArray[np.float64], truth: NDArray[Any]) -> float:
    """AUROC, or concordance where the truth is (time, event); mean over the sites' models."""
    survives = truth.ndim == 2
    found = [
        concordance(one, truth) if survives else compute_auroc(np.stack([1 - one, one], 1), truth) for one in scores
    ]
    return float(np.mean([value for value in found if value is not None]))


def with_interval(rows: Sequence[Row], role: str) -> str:
    """The score, mean over seeds and sites, with the 95 % interval of drawing seeds and test patients anew."""
    made = [(np.array(row[role]), np.array(row["labels"])) for row in rows]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(REPEATS):
        values = []
        for k in rng.integers(len(made), size=len(made)):
            scores, labels = made[k]
            some = rng.integers(len(labels), size=len(labels))
            values.append(measured(scores[:, some], labels[some]))
        drawn.append(np.mean(values))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{np.mean([measured(*one) for one in made]):.3f} ({low:.3f} to {high:.3f})"


def table(rows: Sequence[Row]) -> str:
    """Markdown: AUROC or concordance of private models and proxies by head and promise."""
    lines = ["| head | promise | private models | proxies | seconds | seeds | known share |", "|---" * 7 + "|"]
    for head in HEADS:
        for promise in PRIVACY:
            mine = [row for row in rows if (row["head"], row["promise"]) == (head, promise)]
            if mine:
                seconds = np.mean([row["seconds"] for row in mine])
                cells = [with_interval(mine, role) for role in ("private", "proxy")]
                known = [row["known"] for row in mine if row.get("known") is not None]
                cells += [f"{seconds:.0f}", str(len(mine)), f"{np.mean(known):.3f}" if known else "–"]
                lines.append(f"| {' | '.join([head, promise, *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path, nargs="?", help="a study of one site with features of patches")
    parser.add_argument("--question", choices=["tumour", "survival"], default="tumour")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--patients", type=int, default=40, help="for training, of each site")
    parser.add_argument("--patches", type=int, default=60, help="of the largest slide; the smallest has half")
    parser.add_argument("--tumor", type=float, nargs=2, default=(0.05, 0.2), help="share in a positive slide")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help="rows as JSON lines; those that are there are not made again")
    parser.add_argument("--show", type=Path, help="only print the table of rows that are there")
    args = parser.parse_args()
    path = args.show or args.out
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path and path.exists() else []
    if args.show is None:
        if args.pool is None:
            parser.error("which pool?")
        done = {(row["head"], row["promise"], row["seed"]) for row in rows}
        for row in rows_of(pool_of(Study(args.pool.resolve())), args, done):
            rows.append(row)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
