"""Four hospitals with published weights: ProxyFL at ε = 3 guaranteed, beside each alone and beside one letter at the same ε.

    python studies/pretrained_sites.py patches.npz encoder.safetensors --out DIR     # with PYTHONPATH=.; hours on one core

The npz holds `x` uint8[n, h, w, 3] and `y` int[n]; the weights are of timm's tf_efficientnet_lite0. The split is fixed before
anything is trained: 1000 rows are the test, 400 are public tissue for the directions of the letter, and every seed draws four
hospitals of 150 rows from the rest, alike or with 90 % of one class by turns. ProxyFL is `camelyon17_pretrained` with these
weights. `alone` is the network that a hospital has without joining, trained beside it without noise; `lone head` the tuned
head on frozen features, without noise. What a hospital answers with is `auto`. Runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.prepare.directions import directions
from wsi_fl.stages.prepare.features import features
from wsi_fl.stages.prepare.partition import partition
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study

ENCODER = "tf_efficientnet_lite0"
N_TEST, N_PUBLIC, SITES, ROWS = 1000, 400, 4, 150
SKEWS = ("iid", "major:0.9")
SEEDS = range(5)
Table = Mapping[str, NDArray[Any]]
_FEATURES = (f"features.encoder={ENCODER}", "features.weights=weights/w.safetensors")
_NETWORKS = (
    "model.weights=weights/w.safetensors",
    "train.augment=flips",
    "train.eval_every=12",
    "train.rounds=12",
)
_LETTERS = (
    "train.data=features",
    "model.private=linear_head",
    "model.proxy=linear_head",
    "model.weights=",
    "model.train=all",
    "model.directions=directions.safetensors",
)


def made_study(
    root: Path, table: Table, rows: Mapping[str, NDArray[np.int64]], weights: Path
) -> tuple[Study, Path]:
    """Return a study without sites, and a file of images with these rows for "train" and "test"."""
    for folder in ("pipelines", "sites", "weights"):
        (root / folder).mkdir(parents=True)
    (root / "pipelines" / "one.toml").write_text('extends = "camelyon17_pretrained"\n')
    shutil.copy(weights, root / "weights" / "w.safetensors")
    np.savez(
        root / "data.npz", **{f"{k}_{part}": table[k][chosen] for part, chosen in rows.items() for k in "xy"}
    )
    return Study(root), root / "data.npz"


def write_public(root: Path, table: Table, public: NDArray[np.int64], weights: Path) -> Path:
    """Write the directions of public rows, and return the file."""
    study, data = made_study(root, table, {"train": public[:-10], "test": public[-10:]}, weights)
    partition(study, data, n_sites=1)
    features(study, site=None, overrides=_FEATURES)
    out = root / "directions.safetensors"
    directions(study, sorted(root.glob("stores/*/features.h5")), out=out, overrides=_FEATURES)
    return out


def show(folder: Path) -> None:
    """Print balanced accuracies on the common test, mean over sites, of all that is there."""
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        said = {
            name: row["merged"]["macro_accuracy"]["mean"]
            for name, row in document["evaluate"]["models"].items()
        }
        spent = max(site["epsilon"] for site in document["train"]["sites"])
        words = ", ".join(f"{name} {one:.3f}" for name, one in said.items())
        print(f"{path.stem:24} ε {spent:.2f}  {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("pretrained_sites"), help="a folder of JSON documents"
    )
    given = parser.parse_args()
    with np.load(given.data) as file:
        table = {k: file[k] for k in "xy"}
    test, public, rest = np.split(
        np.random.default_rng(0).permutation(len(table["y"])), [N_TEST, N_TEST + N_PUBLIC]
    )
    with tempfile.TemporaryDirectory() as folder:
        given.out.mkdir(exist_ok=True)
        along = write_public(Path(folder) / "public", table, public, given.weights)
        for seed, skew in itertools.product(SEEDS, SKEWS):
            study, data = made_study(
                Path(folder) / f"{seed}{skew}", table, {"train": rest, "test": test}, given.weights
            )
            shutil.copy(along, study.root / along.name)
            partition(study, data, n_sites=SITES, per_site=ROWS, skew=skew, seed=seed)
            features(study, site=None, overrides=_FEATURES)
            for method, sets in (("oneshot", _LETTERS), ("proxyfl", _NETWORKS)):
                out = given.out / f"{skew.replace(':', '')}-{seed}-{method}.json"
                if not out.exists():
                    run = train(
                        study, method=method, overrides=(*sets, f"train.seed={seed}"), backend="local"
                    )
                    out.write_text(json.dumps({"train": run, "evaluate": evaluate(study, run["run"])}))
                    show(given.out)


if __name__ == "__main__":
    main()
