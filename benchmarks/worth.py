"""Does joining pay, and from what? A grid of smaller or more special hospitals drawn from one study with features.

    wsi-fl init study --from ARCHIVE --pipeline worth_joining && cd study
    wsi-fl tile --all && wsi-fl stain --all && wsi-fl features --all
    python ../benchmarks/worth.py . --seeds 5 --out worth.json
    python ../benchmarks/worth.py . --show worth.json

Every seed draws other patches of each hospital and is the seed of training too. All variants of a seed learn from the
same patches and answer for the same merged test set, so differences are paired; their intervals draw seeds and test
patients anew. docs/WORTH.md holds the tables.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wsi_fl.learning.significance import clustered_interval
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.training.train import train
from wsi_fl.stores.patch_features import FeaturesMeta, PatchFeatures, write_patch_features, write_shard
from wsi_fl.study.folder import Study

OFF, SHARED, OWN = "privacy.enabled=false", "stain.exchange=true", "stain.exchange=false"
TUNED = "train.weight_decay=0.03"
"""Of those tried (0.01 to 0.1, and lower learning rates) what serves a hospital alone best: what joining must beat."""


@dataclass(frozen=True)
class Variant:
    """One way to come by a model."""

    label: str
    method: str
    overrides: tuple[str, ...]


VARIANTS = (
    Variant("alone", "regular", (OFF, OWN)),
    Variant("alone, tuned", "regular", (OFF, OWN, TUNED)),
    Variant("alone + exchange", "regular", (OFF, SHARED)),
    Variant("alone + exchange, tuned", "regular", (OFF, SHARED, TUNED)),
    Variant("ProxyFL", "proxyfl", (OWN,)),
    Variant("ProxyFL + exchange", "proxyfl", (SHARED,)),
    Variant("FedAvg + exchange", "fedavg", (SHARED,)),
    Variant("pooled", "joint", (OFF, OWN)),
    Variant("pooled + exchange", "joint", (OFF, SHARED)),
)
ABLATIONS = (Variant("paper mode", "proxyfl", (SHARED, "privacy.mode=paper")),)
ANSWERS = ("private", "proxy", "mean")


@dataclass(frozen=True)
class Setting:
    """What the hospitals are like.

    Attributes:
        patches: training patches of each site, in order; a site that has fewer gives all it has.
        share: of the class that a site specialises in; sites take turns in which that is. None for all alike.
        missing: a class that the first site has never seen.
        overrides: of every variant.
    """

    name: str
    patches: tuple[int, ...]
    share: float | None = None
    missing: int | None = None
    overrides: tuple[str, ...] = ()


FULL = 100_000
SETTINGS = [
    Setting("all patches", (FULL,) * 4),
    Setting("all patches, ε = 1", (FULL,) * 4, overrides=("privacy.target_epsilon=1",)),
    Setting("all patches, ε = 8", (FULL,) * 4, overrides=("privacy.target_epsilon=8",)),
    Setting("300 patches", (300,) * 4),
    Setting("150 patches", (150,) * 4),
    Setting("50 patches", (50,) * 4),
    Setting("one of 500, three of 100", (500, 100, 100, 100)),
    Setting("250 patches, 90 % one class", (250,) * 4, share=0.9),
    Setting("250 patches, 90 % one class, ε = 1", (250,) * 4, 0.9, overrides=("privacy.target_epsilon=1",)),
    Setting("250 patches, 90 % one class, ε = 8", (250,) * 4, 0.9, overrides=("privacy.target_epsilon=8",)),
    Setting("300 patches, 90 % one class", (300,) * 4, share=0.9),
    Setting("150 patches, 95 % one class", (150,) * 4, share=0.95),
    Setting("250 patches, a class missing at one site", (250,) * 4, missing=1),
]


def drawn_rows(setting: Setting, site: int, labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Which of a site's training patches it has in this setting."""
    rng = np.random.default_rng([seed, site])
    n = min(setting.patches[site], len(labels))
    order = rng.permutation(len(labels))
    if setting.missing is not None and site == 0:
        return np.sort(order[labels[order] != setting.missing][:n])
    if setting.share is None:
        return np.sort(order[:n])
    special = site % 2
    n_special = round(n * setting.share)
    mine, others = order[labels[order] == special], order[labels[order] != special]
    return np.sort(np.concatenate([mine[:n_special], others[: n - n_special]]))


def drawn_study(base: Study, setting: Setting, seed: int, folder: Path) -> Study:
    """A study of the drawn hospitals. Their stains, and what these cost, are those of all their patches."""
    for part in ("pipelines", "sites", "stains", "ledgers"):
        if (base.root / part).is_dir():
            shutil.copytree(base.root / part, folder / part)
    study = Study(folder)
    for position, site in enumerate(base.site_names()):
        with PatchFeatures(base.features(site)) as store:
            train_rows = np.flatnonzero(store.table.split == "train")
            chosen = drawn_rows(setting, position, store.table.label[train_rows], seed)
            _write(study.features(site), store, train_rows, chosen)
    return study


def _write(
    path: Path, store: PatchFeatures, train_rows: NDArray[np.int64], chosen: NDArray[np.int64]
) -> None:
    """A store of these training patches and all test patches."""
    place = np.full(len(store), -1)
    place[train_rows] = np.arange(len(train_rows))
    rows = np.sort(np.concatenate([train_rows[chosen], np.flatnonzero(store.table.split == "test")]))
    shards = []
    slides = store.table.slide[rows]
    for slide in dict.fromkeys(slides.tolist()):
        mine = rows[slides == slide]
        learned = place[mine[0]] >= 0
        variants = {one: store.variant(one, place[mine]) for one in store.others} if learned else {}
        shards.append(path.parent / f"{slide}.h5")
        write_shard(shards[-1], "drawn", store.read(mine), variants)
    meta = FeaturesMeta(store.meta, store.encoder, store.stains)
    write_patch_features(path, meta, store.table.take(rows), shards)


def measured(study: Study, pipeline: str, setting: Setting, variant: Variant, seed: int) -> dict[str, Any]:
    """One run: accuracies on the merged test set by answer, what was spent, and what was right."""
    began = time.perf_counter()
    overrides = [*setting.overrides, *variant.overrides, f"train.seed={seed}", "evaluate.bootstrap=0"]
    summary = train(
        study, method=variant.method, pipeline_name=pipeline, overrides=overrides, backend="local"
    )
    document = evaluate(study, summary["run"])
    seconds = time.perf_counter() - began
    spent = [site["epsilon"] for site in summary["sites"] if site["epsilon"] is not None]
    found: dict[str, Any] = {
        "setting": setting.name,
        "variant": variant.label,
        "seed": seed,
        "seconds": seconds,
        "epsilon": max(spent, default=None),
        "guarantee": sorted({site["guarantee"] for site in summary["sites"]}),
        "merged": document["merged"]["accuracy"]["mean"],
        "sites": {site["site"]: site["accuracy"] for site in document["sites"]},
        "models": {name: one["merged"]["accuracy"]["mean"] for name, one in document["models"].items()},
        "right": right_by_patient(study.run(summary["run"])),
    }
    shutil.rmtree(study.run(summary["run"]))
    return found


def right_by_patient(run: Path) -> dict[str, list[float]]:
    """Test patient → [right answers of all sites' models, how many were asked for]."""
    found: dict[str, list[float]] = {}
    for path in sorted(run.glob("sites/*/predictions.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                best = max((k for k in line if k.startswith("p_")), key=lambda k: float(line[k]))
                entry = found.setdefault(f"{line['site']}/{line['patient']}", [0.0, 0.0])
                entry[0] += best == f"p_{line['label']}"
                entry[1] += 1
    return found


def paired_interval(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> tuple[float, float, float] | None:
    """(difference a − b, low, high) over the seeds of both."""
    ours, theirs = ({row["seed"]: row for row in rows} for rows in (a, b))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    patients = sorted(ours[common[0]]["right"])
    asked = np.array([ours[common[0]]["right"][p][1] for p in patients], int)
    names = np.repeat(patients, asked)
    rows = []
    for seed in common:
        gained = [ours[seed]["right"][p][0] - theirs[seed]["right"][p][0] for p in patients]
        rows.append(np.repeat(np.array(gained) / asked, asked))
    values = np.array(rows)
    low, high = clustered_interval(values, names) or (np.nan, np.nan)
    return float(values.mean()), low, high


def run_grid(base: Study, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per setting, seed and variant."""
    settings = [s for s in SETTINGS if not args.settings or any(word == s.name for word in args.settings)]
    everything: tuple[Variant, ...] = (*VARIANTS, *ABLATIONS) if args.ablations else VARIANTS
    variants = tuple(v for v in everything if not args.variants or v.label in args.variants)
    for setting in settings:
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                study = drawn_study(base, setting, seed, Path(folder))
                for variant in variants:
                    yield measured(study, args.pipeline, setting, variant, seed)


OVERVIEW = ("alone", "alone, tuned", "ProxyFL + exchange", "FedAvg + exchange", "pooled + exchange")


def overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line per setting; the gain is that of ProxyFL + exchange over a hospital alone at its best."""
    lines = [
        "| setting | "
        + " | ".join(OVERVIEW)
        + " | proxies alone | gain over *alone* | over *alone, tuned* | seeds |",
        "|---|" + "---|" * (len(OVERVIEW) + 4),
    ]
    for name in dict.fromkeys(row["setting"] for row in rows):
        by_variant: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["setting"] == name:
                by_variant.setdefault(row["variant"], []).append(row)
        joined = by_variant.get("ProxyFL + exchange", [])
        cells = [_mean([row["merged"] for row in by_variant.get(variant, [])]) for variant in OVERVIEW]
        cells.append(_mean([row["models"].get("proxy") for row in joined]))
        cells += [_gain(joined, by_variant.get(alone, [])) for alone in OVERVIEW[:2]]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(joined)} |")
    return "\n".join(lines) + "\n"


def _gain(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> str:
    gain = paired_interval(a, b)
    return "" if gain is None else f"{gain[0]:+.3f} ({gain[1]:+.3f} to {gain[2]:+.3f})"


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line per setting and variant; paired differences to alone as it is and at its best."""
    lines = [overview(rows)]
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        by_variant = {
            v: [r for r in mine if r["variant"] == v] for v in dict.fromkeys(r["variant"] for r in mine)
        }
        lines += [
            f"### {name}\n",
            "| | accuracy | private | proxy | mean | over *alone* | over *alone, tuned* | ε |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for variant, some in by_variant.items():
            cells = [
                f"{np.mean([r['merged'] for r in some]):.3f} ± {np.std([r['merged'] for r in some]):.3f}"
            ]
            cells += [_mean([r["models"].get(answer) for r in some]) for answer in ANSWERS]
            for reference in ("alone", "alone, tuned"):
                cells.append("" if reference == variant else _gain(some, by_variant.get(reference, [])))
            spent = [r["epsilon"] for r in some if r["epsilon"] is not None]
            cells.append(f"{max(spent):.2f} {'/'.join(some[0]['guarantee'])}" if spent else "–")
            lines.append(f"| {variant} | " + " | ".join(cells) + " |")
        seeds = len({r["seed"] for r in mine})
        lines.append(f"\n{seeds} seeds; {sum(r['seconds'] for r in mine) / seeds:.0f} s a seed.\n")
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3f}" if known else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--pipeline", default="worth_joining")
    parser.add_argument("--settings", nargs="+", choices=[s.name for s in SETTINGS], help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    labels = [variant.label for variant in (*VARIANTS, *ABLATIONS)]
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=labels,
        help="default: all; where sites share a stain, those without exchange",
    )
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--out", type=Path, help="rows as JSON lines, added to what is there")
    parser.add_argument("--show", type=Path, help="only print the tables of rows that are there")
    args = parser.parse_args()
    if args.show:
        print(tables([json.loads(line) for line in args.show.read_text(encoding="utf-8").splitlines()]))
        return
    rows = []
    for row in run_grid(Study(args.study.resolve()), args):
        rows.append(row)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(tables(rows))


if __name__ == "__main__":
    main()
