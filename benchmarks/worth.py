"""Does joining pay, for whom, and how much? Hospitals drawn from one pool of features, and all measured alike.

    wsi-fl init pool && cd pool
    wsi-fl partition IMAGES.npz --sites 1
    wsi-fl features --all --set features.encoder=tf_efficientnet_lite0 --set features.input_px=128
    wsi-fl projection --from PUBLIC_SLIDES --out projection.safetensors --set features.encoder=…
    python ../benchmarks/worth.py . --directions projection.safetensors --seeds 5 --out worth.jsonl
    python ../benchmarks/worth.py --show worth.jsonl

Every seed draws other rows, for the hospitals and for a test set that none of them has. All variants of a seed learn
from the same rows and answer for the same test set. studies/WORTH.md holds the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wsi_fl.data.metrics import SCORES
from wsi_fl.evidence.verdict import estimate_ratio
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_predictions import read_example_scores
from wsi_fl.stages.training.train import train
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore, group_bags, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.types import PatchTable

Rows = NDArray[np.int64]
Row = Mapping[str, Any]

TEST_ROWS = 500
"""Of each class, where the hospitals leave so many."""
ROWS_OF_A_PATIENT = 5
PIPELINE = """
[model]
private = "linear_head"
proxy = "linear_head"
[train]
data = "features"
rounds = 60
eval_every = 60
lr = 0.03
[evaluate]
bootstrap = 0
"""


@dataclass(frozen=True)
class Setting:
    """What the hospitals are like.

    Attributes:
        rows: of each site, for training; where there are several sites take turns.
        shares: of class 1, by site; sites take turns.
        receives: how many rows a further hospital without labels has, on which all are tested.
    """

    name: str
    sites: int
    rows: int | tuple[int, ...]
    shares: tuple[float, ...] = (0.5,)
    receives: int = 0


SETTINGS = (
    Setting("8 × 200, each one class", 8, 200, (0.0, 1.0)),
    Setting("4 × 150, 95 %", 4, 150, (0.05, 0.95)),
    Setting("4 × 250, 90 %", 4, 250, (0.1, 0.9)),
    Setting("16 × 50, 90 %", 16, 50, (0.1, 0.9)),
    Setting("16 × 150, 90 %", 16, 150, (0.1, 0.9)),
    Setting("4 × 250, one lacks a class", 4, 250, (0.0, 0.5, 0.5, 0.5)),
    Setting("4 × 300, class 1 is 5 %", 4, 300, (0.05,)),
    Setting("50 × 50, alike", 50, 50),
    Setting("16 × 50, alike", 16, 50),
    Setting("4 × 500, alike", 4, 500),
    Setting("4 × 50, each one class", 4, 50, (0.0, 1.0)),
    Setting("4 × 50, 90 %", 4, 50, (0.1, 0.9)),
    Setting("4 × 50, alike", 4, 50),
    Setting("569, 604 and 150, and a receiver", 3, (569, 604, 150), (0.11, 0.57, 0.3), receives=1174),
)


@dataclass(frozen=True)
class Variant:
    """One way to come by a model.

    Attributes:
        unit: what counts as one: a row, or a patient of five rows.
    """

    name: str
    method: str
    overrides: tuple[str, ...]
    unit: str = "row"


SHARED_NOISE = "privacy.noise=shared"


def private(name: str, method: str, epsilon: float, *overrides: str, unit: str = "row") -> Variant:
    """A variant under differential privacy."""
    where = (", shared noise" if SHARED_NOISE in overrides else "") + (", per patient" if unit == "patient" else "")
    terms = (f"privacy.target_epsilon={epsilon}", f"privacy.unit={unit}")
    return Variant(f"{name}, ε = {epsilon:g}{where}", method, (*terms, *overrides), unit)


ALONE = ("privacy.enabled=false", "train.tune=true", "train.rounds=1")
STACKED = ("train.tune=true", "predict.model=ensemble")
"""What answers contains the head that the site has alone."""
VARIANTS = (
    Variant("lone", "regular", ALONE),
    Variant("pooled", "joint", ALONE),
    *(private("one-shot", "oneshot", epsilon) for epsilon in (0.5, 1, 3)),
    *(private("one-shot", "oneshot", epsilon, SHARED_NOISE) for epsilon in (0.5, 1, 3)),
    *(private("one-shot", "oneshot", epsilon, unit="patient") for epsilon in (0.5, 1, 3)),
    *(private("one-shot", "oneshot", epsilon, SHARED_NOISE, unit="patient") for epsilon in (0.5, 1, 3)),
    *(private("ProxyFL", "proxyfl", epsilon, *STACKED) for epsilon in (1, 3)),
    *(private("FedAvg", "fedavg", epsilon, *STACKED) for epsilon in (1, 3)),
    *(private("ProxyFL", "proxyfl", epsilon, *STACKED, unit="patient") for epsilon in (1, 3)),
    *(private("FedAvg", "fedavg", epsilon, *STACKED, unit="patient") for epsilon in (1, 3)),
    Variant("lone, per patient", "regular", ALONE, "patient"),
    private("one-shot", "oneshot", 0.01),
)


@dataclass(frozen=True)
class Pool:
    """All rows that there are: features float32[n, d], labels, and what is known of the store they come from.

    Attributes:
        patches: of a patient; rows that stand together are one patient's, as `stained.py` makes them.
    """

    x: NDArray[np.float32]
    label: Rows
    meta: BagMeta
    patches: int = 1


def pool_of(study: Study, patches: int = 1) -> Pool:
    """The rows of a study's only site, in the order of the images: those for training, and those for tests.

    Where patients have several patches the rows for tests are left out.
    """
    (site,) = study.site_names()
    with BagStore(study.features_path(site)) as store:
        split, names = store.patch_table.split, store.patch_table.patient.tolist()
        order = np.array([int(name.rpartition("_")[2]) for name in names]) + len(names) * (split == "test")
        rows = np.argsort(order)
        if patches > 1:
            rows = rows[: (split == "train").sum()]
        return Pool(store.read(rows), store.patch_table.label[rows], store.meta, patches)


def drawn(setting: Setting, label: Rows, seed: int, patches: int = 1) -> tuple[list[Rows], Rows]:
    """(rows of each site, rows of the test set), no row or patient twice; of the test set half are of each class.

    Of patients with several patches a site has whole ones, as many as come nearest.
    """
    rng, within, first = np.random.default_rng(seed), np.arange(patches), label[::patches]
    left = [(patches * rng.permutation(np.flatnonzero(first == one))[:, None] + within).ravel() for one in (0, 1)]
    parts = []
    for site in range(setting.sites):
        n = setting.rows if isinstance(setting.rows, int) else setting.rows[site % len(setting.rows)]
        n -= n % patches
        ones = patches * round(n * setting.shares[site % len(setting.shares)] / patches)
        taken = (n - ones, ones)
        parts.append(np.concatenate([left[c][:n] for c, n in enumerate(taken)]))
        left = [left[c][n:] for c, n in enumerate(taken)]
        if len(parts[-1]) < n:
            raise ValueError(f"{setting.name}: the pool has too few rows")
    n_test = min(setting.receives // 2 or TEST_ROWS, *map(len, left))
    return parts, np.concatenate([one[:n_test] for one in left])


def study_of(
    pool: Pool, parts: Sequence[Rows], test: Rows, folder: Path, unit: str, *, receives: bool = False
) -> Study:
    """A study of a site for each part; the first site keeps the test set for all, one that `receives` has it too."""
    for name in ("pipelines", "sites"):
        (folder / name).mkdir(parents=True)
    (folder / "pipelines" / "worth.toml").write_text(PIPELINE, encoding="utf-8")
    study = Study(folder)
    for k, part in enumerate([*parts, test] if receives else parts):
        site, role = f"S{k + 1:02}", "receiver" if k == len(parts) else "member"
        file = f'name = "{site}"\nreal = false\nlayout = "generic"\nrole = "{role}"\n'
        (folder / "sites" / f"{site}.toml").write_text(file, encoding="utf-8")
        rows = np.concatenate([part, test if k == 0 else test[:0]])
        split = np.where(np.arange(len(rows)) < len(part), "train", "test")
        if pool.patches > 1:
            names = [f"{row // pool.patches}" for row in part.tolist()]
        else:
            names = patients(pool.label[part], unit)
        table = PatchTable(
            np.stack([rows, np.zeros_like(rows)], 1),
            pool.label[rows],
            pool.label[rows].astype(np.float32),
            split,
            np.concatenate([names, [f"test {row}" for row in rows[len(part) :]]]),
            split,
        )
        path = study.features_path(site)
        slides, _ = group_bags(table)
        bags = [Bag(pool.x[rows[split == name]], table.xy_l0[split == name]) for name in slides.slide]
        write_bags(path, replace(pool.meta, site=site), slides, bags, patches=table)
    return study


def patients(label: Rows, unit: str) -> list[str]:
    """A name for every row, or for every five rows of one class."""
    size = ROWS_OF_A_PATIENT if unit == "patient" else 1
    seen = [0, 0]
    names = []
    for one in label.tolist():
        names.append(f"{one}-{seen[one] // size}")
        seen[one] += 1
    return names


def measured(study: Study, variant: Variant, seed: int, directions: Path | None = None) -> dict[str, Any]:
    """One run: scores on the test set, what it cost, and how many sites' models were right about each row."""
    began = time.perf_counter()
    overrides = [*variant.overrides, f"train.seed={seed}"]
    if variant.method == "oneshot" and directions:
        overrides.append(f"model.projection={directions.resolve()}")
    summary = train(study, method=variant.method, pipeline_name="worth", overrides=overrides, backend="local")
    seconds = time.perf_counter() - began
    document = evaluate(study, summary["run"])
    run = RunFolder(study.find_run(summary["run"]))
    answers = [read_example_scores(run.site_folder(site["site"]), "merged") or {} for site in document["sites"]]
    right = [[value for value, _ in one.values()] for one in answers]
    merged, shared = (
        document["merged"] or {},
        (document["models"].get("proxy") or document["models"].get("shared", {})).get("merged"),
    )
    found = {
        **{score: merged[score]["mean"] for score in SCORES},
        "sites": [site["accuracy"] for site in document["sites"]],
        "shared": shared["accuracy"]["mean"] if shared else None,
        "receiver": document["inference_sites"] and document["inference_sites"]["expected"]["auroc"]["mean"],
        "right": [sum(one) for one in zip(*right, strict=True)],
        "epsilon": max((site["epsilon"] for site in summary["sites"] if site["epsilon"]), default=None),
        "seconds": seconds,
        "messages": summary["communication"]["messages"],
        "bytes": summary["communication"]["bytes"],
    }
    shutil.rmtree(run.path)
    return found


def run_grid(pool: Pool, args: argparse.Namespace, done: set[tuple[str, str, int]]) -> Iterator[Row]:
    """A row for each setting, seed and variant that is asked for and not done yet."""
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for setting in (s for s in SETTINGS if not args.settings or s.name in args.settings):
            parts, test = drawn(setting, pool.label, seed, pool.patches)
            for variant in (v for v in VARIANTS if not args.variants or v.name in args.variants):
                if (setting.name, variant.name, seed) in done:
                    continue
                # every site would fit the same pooled model, so one does
                rows = [np.concatenate(parts)] if variant.method == "joint" else parts
                with tempfile.TemporaryDirectory() as folder:
                    study = study_of(pool, rows, test, Path(folder), variant.unit, receives=setting.receives > 0)
                    found = measured(study, variant, seed, args.directions)
                names = {"setting": setting.name, "variant": variant.name, "seed": seed}
                yield {**names, **found, "asked": test.tolist()}


# ---- tables


def of_seeds(rows: Sequence[Row], setting: str, variant: str) -> dict[int, Row]:
    """Seed → the row of a setting and a variant."""
    return {row["seed"]: row for row in rows if (row["setting"], row["variant"]) == (setting, variant)}


def gain(
    a: Mapping[int, Row], b: Mapping[int, Row]
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64], NDArray[np.str_]]:
    """(seeds of both, a − b float64[seeds, rows of the pool], whether a row was asked for, its name).

    What is right is a share of the sites' models; rows that a seed did not ask for are 0.
    """
    seeds = sorted(a.keys() & b.keys())
    n = 1 + max((max(a[seed]["asked"]) for seed in seeds), default=0)
    differences, asked = np.zeros((len(seeds), n)), np.zeros((len(seeds), n))
    for k, seed in enumerate(seeds):
        if a[seed]["asked"] != b[seed]["asked"]:
            raise ValueError(f"seed {seed}: other test rows, so there are no pairs")
        mine, theirs = (np.array(one["right"]) / len(one["sites"]) for one in (a[seed], b[seed]))
        differences[k, a[seed]["asked"]] = mine - theirs
        asked[k, a[seed]["asked"]] = 1
    return seeds, differences, asked, np.arange(n).astype(np.str_)


def with_interval(part: NDArray[np.float64], whole: NDArray[np.float64], names: NDArray[np.str_]) -> Any:
    """(Σ part / Σ whole, (low, high) over seeds and test patients or None)."""
    found = estimate_ratio(part, whole, names)
    return found.mean, None if found.low is None else (found.low, found.high)


def gain_words(a: Mapping[int, Row], b: Mapping[int, Row]) -> str:
    """What a has more than b, with its interval."""
    seeds, difference, asked, names = gain(a, b)
    if not seeds:
        return ""
    value, interval = with_interval(difference, asked, names)
    return f"{value:+.3f}" + (f" ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval else "")


def headroom_words(joined: Mapping[int, Row], lone: Mapping[int, Row], pooled: Mapping[int, Row]) -> str:
    """How much of what pooling would bring joining brings, in per cent, with its interval."""
    common = joined.keys() & lone.keys() & pooled.keys()
    if not common:
        return ""
    joined = {seed: joined[seed] for seed in common}
    _, part, _, names = gain(joined, lone)
    _, whole, _, _ = gain({seed: pooled[seed] for seed in common}, lone)
    value, interval = with_interval(part, whole, names)
    return f"{value:.0%}" + (f" ({interval[0]:.0%} to {interval[1]:.0%})" if interval else " (room not sure)")


def ends(joined: Mapping[int, Row], lone: Mapping[int, Row]) -> tuple[float, float] | None:
    """(least, most) that a site gains, by its mean over the seeds."""
    seeds = sorted(joined.keys() & lone.keys())
    if not seeds:
        return None
    gained = np.mean([np.subtract(joined[s]["sites"], lone[s]["sites"]) for s in seeds], axis=0)
    return float(gained.min()), float(gained.max())


def mean_of(rows: Mapping[int, Row], key: str, form: str = ".3f") -> str:
    """The mean over seeds, where it is known."""
    known = [row[key] for row in rows.values() if row.get(key) is not None]
    return format(float(np.mean(known)), form) if known else ""


def tables(rows: Sequence[Row]) -> str:
    """Markdown: the headroom of every setting and variant, then all about each setting."""
    settings = [s.name for s in SETTINGS if any(row["setting"] == s.name for row in rows)]
    variants = [v.name for v in VARIANTS if any(row["variant"] == v.name for row in rows)]
    joining = [name for name in variants if name not in ("lone", "pooled", "lone, per patient")]
    lines = [line(["setting", "lone", "pooled", *joining]), "|---" * (len(joining) + 3) + "|"]
    for setting in settings:
        lone, pooled = (of_seeds(rows, setting, one) for one in ("lone", "pooled"))
        cells = [headroom_words(of_seeds(rows, setting, one), lone, pooled) for one in joining]
        lines.append(line([setting, mean_of(lone, "accuracy"), mean_of(pooled, "accuracy"), *cells]))
    titles = ["", "accuracy", "balanced", "AUROC", "shared head", "receiver's AUROC", "gain over lone", "gap_closed"]
    titles += ["worst site", "best site", "ε", "s", "messages", "kB", "seeds"]
    for setting in settings:
        lone, pooled = (of_seeds(rows, setting, one) for one in ("lone", "pooled"))
        lines += ["", f"### {setting}", "", line(titles), "|---" * len(titles) + "|"]
        for variant in variants:
            mine = of_seeds(rows, setting, variant)
            if not mine:
                continue
            cells = [variant, *(mean_of(mine, score) for score in (*SCORES, "shared", "receiver"))]
            cells.append("" if variant == "lone" else gain_words(mine, lone))
            cells.append(headroom_words(mine, lone, pooled) if variant in joining else "")
            both = ends(mine, lone) if variant not in ("lone", "pooled") else None
            cells += [f"{end:+.3f}" for end in both] if both else ["", ""]
            cells += [mean_of(mine, "epsilon", ".2f"), mean_of(mine, "seconds", ".1f")]
            cells += [mean_of(mine, "messages", ".0f")]
            cells += [f"{np.mean([row['bytes'] for row in mine.values()]) / 1000:.0f}", str(len(mine))]
            lines.append(line(cells))
    return "\n".join(lines) + "\n"


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def read_rows(path: Path) -> list[Row]:
    """All rows of a file of JSON lines."""
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path, nargs="?", help="a study of one site with features")
    parser.add_argument("--settings", nargs="+", choices=[s.name for s in SETTINGS], help="default: all")
    parser.add_argument("--variants", nargs="+", choices=[v.name for v in VARIANTS], help="default: all")
    parser.add_argument("--directions", type=Path, help="of public tissue, for one-shot; default: random ones")
    parser.add_argument("--patches", type=int, default=1, help="of a patient, in a pool of stained.py")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="rows as JSON lines; those that are there are not made again")
    parser.add_argument("--show", type=Path, help="only print the tables of rows that are there")
    args = parser.parse_args()
    if args.show:
        print(tables(read_rows(args.show)))
        return
    if args.pool is None:
        parser.error("which pool?")
    rows = read_rows(args.out) if args.out and args.out.exists() else []
    done = {(row["setting"], row["variant"], row["seed"]) for row in rows}
    for row in run_grid(pool_of(Study(args.pool.resolve()), args.patches), args, done):
        rows.append(row)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(tables(rows))


if __name__ == "__main__":
    main()
