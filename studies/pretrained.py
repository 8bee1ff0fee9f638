"""Which part of a pretrained network to train, with and without differential privacy, at one site.

    python studies/pretrained.py patches.npz encoder.safetensors     # from the repository, with PYTHONPATH=.

The npz holds `x` uint8[n, h, w, 3] and `y` int[n]; the weights are of timm's tf_efficientnet_lite0. Every row is one
run of `regular`, and is printed as it ends. Minutes each on one core. docs/training.md has the figures.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np

from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.prepare.partition import partition
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study

ARCHITECTURE = "tf_efficientnet_lite0"
N_TEST = 800
ROWS = (
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


def made_study(root: Path, data: Path, weights: Path, n_train: int) -> Study:
    """Return a study of one site, with some rows for training and others for testing."""
    for folder in ("pipelines", "sites", "weights"):
        (root / folder).mkdir()
    (root / "pipelines" / "one.toml").write_text("")
    shutil.copy(weights, root / "weights" / "w.safetensors")
    table = np.load(data)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(table["x"]))
    rows = {"train": order[:n_train], "test": order[n_train : n_train + N_TEST]}
    named = {f"{k}_{part}": table[k][chosen] for part, chosen in rows.items() for k in ("x", "y")}
    np.savez(root / "data.npz", **named)
    study = Study(root)
    partition(study, root / "data.npz", n_sites=1)
    return study


def scored(study: Study, epsilon: str, part: str, lr: float, rounds: int) -> dict[str, float]:
    """Train one row; return what it scores on the test part."""
    said = {"train.rounds": rounds, "train.eval_every": rounds, "train.lr": lr, "train.augment": "'flips'"}
    said |= {"model.private": f"'timm:{ARCHITECTURE}'" if part else "'gn_cnn_small'"}
    if part:
        said |= {"model.weights": "'weights/w.safetensors'", "model.train": f"'{part}'"}
    said |= {"privacy.enabled": "false"} if epsilon == "no" else {"privacy.target_epsilon": epsilon}
    sets = [f"{key}={value}" for key, value in said.items()]
    run = train(study, method="regular", overrides=sets, backend="local")["run"]
    row = evaluate(study, run)["sites"][0]
    return {key: row[key] for key in ("accuracy", "auroc") if row.get(key) is not None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--train", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = made_study(Path(folder), given.data, given.weights, given.train)
        for epsilon, part, lr in ROWS:
            found = scored(study, epsilon, part, lr, given.rounds)
            said = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
            print(f"ε = {epsilon:2}  {part or 'random start':12}  lr {lr:g}: {said}", flush=True)


if __name__ == "__main__":
    main()
