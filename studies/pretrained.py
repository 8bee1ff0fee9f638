"""Networks from published weights: which part to train at one hospital, and what ProxyFL brings between four.

    export PYTHONPATH=.:benchmarks                                       # in the repository
    python studies/pretrained.py parts patches.npz encoder.safetensors
    python studies/pretrained.py join POOL encoder.safetensors --directions projection.safetensors --out rows.csv
    python studies/pretrained.py show studies/rows/pretrained.csv

The weights are of timm's tf_efficientnet_lite0. The npz holds `x` uint8[n, h, w, 3] and `y` int[n]; POOL is a study of
one site with these patches and their features, made as benchmarks/worth.py says. Every row of `join` is one run, and
the file keeps those that are there. Minutes each on one core. studies/ROUNDS.md and docs/how-to/train.md
have the figures.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t
from worth import ALONE, Setting, Variant, drawn, measured, pool_of, private, study_of

from wsi_fl.learning import tuning
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.training import build_sites
from wsi_fl.stages.training.train import train
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study

NETWORK = "timm:tf_efficientnet_lite0"


def made(root: Path, weights: Path) -> Study:
    """Return a study without sites, with the weights."""
    for folder in ("pipelines", "sites", "weights"):
        (root / folder).mkdir(parents=True)
    (root / "pipelines" / "one.toml").write_text("")
    shutil.copy(weights, root / "weights" / "w.safetensors")
    return Study(root)


def run_of(study: Study, method: str, said: Mapping[str, str]) -> dict[str, Any]:
    """Train with these settings; return what `evaluate` says."""
    sets = [f"{key}={value}" for key, value in said.items()]
    return evaluate(study, train(study, method=method, overrides=sets, backend="local")["run"])


# ---- one hospital: which part to train

N_TEST = 800
PARTS = (
    ("no", "head", 2e-3),
    ("3", "head", 2e-3),
    ("3", "norm", 2e-3),
    ("3", "last", 2e-3),
    ("3", "", 2e-3),
    ("no", "norm", 1e-3),
    ("3", "lora", 2e-3),
    ("no", "all", 3e-4),
)
"""ε, the part that is trained ("" for a small network from random weights), and the learning rate."""


def parts(given: argparse.Namespace) -> None:
    """Print a row for each part, as it ends."""
    with tempfile.TemporaryDirectory() as folder:
        study = made(Path(folder) / "study", given.weights)
        table = np.load(given.data)
        order = np.random.default_rng(0).permutation(len(table["x"]))
        rows = {"train": order[: given.train], "test": order[given.train : given.train + N_TEST]}
        named = {f"{k}_{part}": table[k][chosen] for part, chosen in rows.items() for k in ("x", "y")}
        np.savez(study.root / "data.npz", **named)
        partition_images(study, study.root / "data.npz", n_sites=1)
        for epsilon, part, lr in PARTS:
            said = {"train.rounds": given.rounds, "train.eval_every": given.rounds, "train.lr": lr}
            said |= {"train.augment": "flips", "model.private": NETWORK if part else "gn_cnn_small"}
            if part:
                said |= {"model.weights": "weights/w.safetensors", "model.train": part}
            said |= {"privacy.enabled": "false"} if epsilon == "no" else {"privacy.target_epsilon": epsilon}
            row = run_of(study, "regular", said)["sites"][0]
            found = ", ".join(f"{key} {row[key]:.3f}" for key in ("accuracy", "auroc") if row.get(key))
            print(f"ε = {epsilon:2}  {part or 'random start':12}  lr {lr:g}: {found}", flush=True)


# ---- four hospitals: what joining brings

SETTINGS = (Setting("90 %", 4, 250, (0.1, 0.9)), Setting("alike", 4, 250))
HELD_OUT_FROM = 10
"""Draws from this seed on are tested on the half of the patches that hospitals never have."""
OF_CLASS = 250
"""Test patches of each class there."""
ROUNDS = ("train.lr=0.03", "train.rounds=60")
HEADS = (
    Variant("lone head", "regular", ALONE),
    private("one letter", "oneshot", 3),
    private("ProxyFL, heads", "proxyfl", 3, *ROUNDS, "train.tune=true", "predict.model=ensemble"),
    Variant("pooled head", "joint", ALONE),
)
_ANY = {
    "train.input_px": "64",
    "train.augment": "flips",
    "train.balance": "true",
    "train.eval_every": "100",  # the last round is evaluated in any case
    "model.private": NETWORK,
    "model.proxy": NETWORK,
    "model.weights": "weights/w.safetensors",
    "model.train": "norm",
    "evaluate.bootstrap": "0",
}
_JOINED = {"train.tune": "true", "privacy.target_epsilon": "3", "privacy.mode": "strict"}
_RATES = {"train.lr": "0.005", "train.private_lr": "0.002", "train.rounds": "6"}
NETWORKS = {
    "lone network": ("regular", {"train.lr": "0.002", "train.rounds": "6", "privacy.enabled": "false"}),
    "ProxyFL, networks, ε = 3": ("proxyfl", _RATES | _JOINED),
}
"""Method and settings, the best on the draws of seed 0."""
COLUMNS = ("setting", "method", "seed", "accuracy", "auroc", "sites")


def rows_of(setting: Setting, label: NDArray[np.int64], seed: int) -> tuple[list[Any], NDArray[np.int64]]:
    """Return (rows of each hospital, rows of the test set); hospitals never have any of the held-out half."""
    by_class = [np.random.default_rng(2026).permutation(np.flatnonzero(label == one)) for one in (0, 1)]
    known = np.concatenate([rows[: len(rows) // 2] for rows in by_class])
    hospitals, test = drawn(setting, label[known], seed)
    if seed < HELD_OUT_FROM:
        return [known[rows] for rows in hospitals], known[test]
    rng = np.random.default_rng(seed)
    kept = [rng.permutation(rows[len(rows) // 2 :])[:OF_CLASS] for rows in by_class]
    return [known[rows] for rows in hospitals], np.concatenate(kept)


def in_order(store: PatchStore) -> NDArray[np.int64]:
    """Return the rows of a store in the order of a pool: those for training, then those for tests."""
    number = [int(name.rpartition("_")[2]) for name in store.table.patient.tolist()]
    return np.lexsort((number, store.table.split == "test"))


def networks_of(root: Path, given: argparse.Namespace, store: PatchStore, hospitals: Sequence[Any], test: Any) -> Study:
    """Return a study of patches with these hospitals, A1, B1, …, each with a share of the test set."""
    study = made(root, given.weights)
    for k, mine in enumerate(hospitals):
        named, name = {}, "ABCD"[k]
        for part, chosen in (("train", mine), ("test", test[k :: len(hospitals)])):
            rows = in_order(store)[np.sort(chosen)]
            named |= {f"x_{part}": store.read(rows), f"y_{part}": store.table.label[rows]}
        np.savez(root / f"{name}.npz", **named)
        partition_images(study, root / f"{name}.npz", n_sites=1, prefix=name)
    return study


def join(given: argparse.Namespace) -> None:
    """Write a row for each setting, seed and method that the file lacks, as it ends."""
    rows = read(given.out) if given.out.exists() else []
    there = {(row["setting"], row["method"], int(row["seed"])) for row in rows}
    known = Study(given.pool.resolve())
    pool, (site,) = pool_of(known), known.site_names()
    with PatchStore(known.store_path(site)) as store, given.out.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if not rows:
            table.writerow(COLUMNS)
        for setting in (one for one in SETTINGS if one.name in given.settings):
            for seed in range(given.first_seed, given.first_seed + given.seeds):
                hospitals, test = rows_of(setting, pool.label, seed)
                for method in given.methods:
                    if (setting.name, method, seed) in there:
                        continue
                    way = next((one for one in HEADS if one.name == method), None)
                    alone = (way.method if way else NETWORKS[method][0]) != "joint"
                    mine = hospitals if alone else [np.concatenate(hospitals)]
                    with tempfile.TemporaryDirectory() as folder:
                        root = Path(folder) / "study"
                        if way:
                            study = study_of(pool, mine, test, root, "row")
                            found = of_heads(study, way, seed, given.directions)
                        else:
                            study = networks_of(root, given, store, mine, test)
                            found = of_networks(study, method, seed)
                    for name, accuracy, auroc, sites in found:
                        each = " ".join(f"{one:.4f}" for one in sites)
                        table.writerow((setting.name, name, seed, f"{accuracy:.4f}", f"{auroc:.4f}", each))
                        file.flush()


Found = list[tuple[str, float, float, list[float]]]
"""(method, mean accuracy and AUROC over hospitals, each hospital's accuracy)."""


def held_out(
    labels: Any, patient: Any, usual: Any, trained: Any, *, folds: int, task: Any
) -> tuple[Any, NDArray[np.float64]]:
    """Return settings as they are, and what models say of patients that they have not seen.

    It stands for `tuning.tuned`. What that would choose was chosen on other draws, and takes twice the time.
    """
    del folds, task
    found = np.empty((len(labels), 2))
    for fold in tuning._split_folds(labels, patient):
        found[fold] = trained(usual, ~fold)
    return usual, found


def of_networks(study: Study, method: str, seed: int) -> Found:
    """Return what a way with networks reaches, and what its models reach by themselves."""
    name, said = NETWORKS[method]
    with patch.object(build_sites, "tuned", held_out):
        document = run_of(study, name, _ANY | said | {"train.seed": str(seed)})
    sites = [row["accuracy"] for row in document["sites"]]
    found = [(method, document["merged"]["accuracy"]["mean"], document["merged"]["auroc"]["mean"], sites)]
    both = document["sites"][0]["models"] if len(document["models"]) > 1 else ()
    for role in (one for one in ("proxy", "private", "local") if one in both):
        each = [row["models"][role] for row in document["sites"]]
        means = [float(np.mean([one[score] for one in each])) for score in ("accuracy", "auroc")]
        found.append((f"{method}: {role}", means[0], means[1], [one["accuracy"] for one in each]))
    return found


def of_heads(study: Study, way: Variant, seed: int, directions: Path | None) -> Found:
    """Return what a way with linear heads on frozen features reaches."""
    one = measured(study, way, seed, directions)
    return [(way.name, one["accuracy"], one["auroc"], one["sites"])]


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def show(given: argparse.Namespace) -> None:
    """Print the table of each setting: means over seeds, and gains in pairs over both lone models."""
    rows = read(given.rows)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        print(f"\n{setting}\n\n| | accuracy | AUROC | over the lone network | over the lone head | seeds |")
        print("|---|---|---|---|---|---|")
        of = {(row["method"], row["seed"]): row for row in rows if row["setting"] == setting}
        for method in dict.fromkeys(name for name, _ in of):
            seeds = [seed for name, seed in of if name == method]
            mean = [np.mean([float(of[method, one][key]) for one in seeds]) for key in ("accuracy", "auroc")]
            cells = [f"{mean[0]:.3f}", f"{mean[1]:.3f}"]
            for lone in ("lone network", "lone head"):
                both = [seed for seed in seeds if (lone, seed) in of and method != lone]
                cells.append(gain([sites(of[method, one]) - sites(of[lone, one]) for one in both]))
            print(f"| {method} | {' | '.join(cells)} | {len(seeds)} |")


def sites(row: Mapping[str, str]) -> NDArray[np.float64]:
    """Return each hospital's accuracy; of a pooled model, the one that all have."""
    return np.array([float(one) for one in row["sites"].split()])


def gain(gains: Sequence[NDArray[np.float64]]) -> str:
    """Return the mean gain, half of its 95 % interval over seeds, and that of the hospital with the least."""
    means = np.array([one.mean() for one in gains])
    if not len(means):
        return ""
    half = t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
    return f"{means.mean():+.3f} ± {half:.3f} (worst {np.mean(gains, axis=0).min():+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True)
    one = ways.add_parser("parts")
    one.set_defaults(work=parts)
    one.add_argument("data", type=Path)
    one.add_argument("weights", type=Path)
    one.add_argument("--train", type=int, default=800)
    one.add_argument("--rounds", type=int, default=15)
    four = ways.add_parser("join")
    four.set_defaults(work=join)
    four.add_argument("pool", type=Path)
    four.add_argument("weights", type=Path)
    four.add_argument("--directions", type=Path)
    four.add_argument("--out", type=Path, required=True)
    four.add_argument("--first-seed", type=int, default=10)
    four.add_argument("--seeds", type=int, default=5)
    four.add_argument("--settings", nargs="+", default=[one.name for one in SETTINGS])
    four.add_argument("--methods", nargs="+", default=[*(one.name for one in HEADS), *NETWORKS])
    table = ways.add_parser("show")
    table.set_defaults(work=show)
    table.add_argument("rows", type=Path)
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()
