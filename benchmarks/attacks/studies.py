"""The study that is tortured: two painted hospitals with everything that wsi-fl makes, in miniature."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from safetensors import SafetensorError

from attacks.running import Ended, run
from wsi_fl.stores.hdf5 import open_hdf5

PIPELINE = """
[slides]
test_fraction = 0.3
[tile]
size_px = 32
mpp = 2.0
balance = false
[features]
encoder = "test_efficientnet"
weights = "weights/tiny.safetensors"
input_px = 32
[mosaic]
encoder = "test_efficientnet"
weights = "weights/tiny.safetensors"
size_px = 64
mpp = 2.0
clusters = 2
fraction = 0.5
[train]
rounds = 3
batch_size = 8
augment = "none"
[model]
private = "cnn1"
proxy = "mlp"
[evaluate]
bootstrap = 20
[gan]
resolution = 32
iterations = 4
privacy_iterations = 2
batch_size = 4
z_dim = 8
w_dim = 8
mapping_layers = 2
channel_base = 128
channel_max = 16
checkpoint_every = 2
check_images = 20
check_samples = 20
projections = 4
projection_steps = 2
[ddpm]
resolution = 32
channels = [8, 8]
steps = 6
batch_size = 4
chain = 10
sampling_steps = 5
checkpoint_every = 2
[lpips]
weights = "random:0"
"""
LOCAL = ("--backend", "local")
OPEN = ("--set", "privacy.enabled=false")
"""Noise is drawn anew by every process; without it a run that was killed must end with the very same models."""
TRAIN = ("train", "--method", "proxyfl", *LOCAL)
STAGES: dict[str, tuple[str, ...]] = {
    "tile": ("tile", "--all"),
    "tile native": ("tile", "--all", "--set", "store.pixels=jpeg:90"),
    "features": ("features", "--all"),
    "mosaic": ("mosaic", "--all"),
    "ddpm": ("synthesize", "train", "--site", "C1", "--generator", "ddpm"),
    "gan": ("synthesize", "train", "--site", "C1", "--generator", "gan"),
    "train": TRAIN,
    "train openly": (*TRAIN, *OPEN),
    "train mosaics": (
        *TRAIN,
        *OPEN,
        "--set",
        "train.data=mosaics",
        "--set",
        "model.private=deepset",
        "--set",
        "model.proxy=deepset",
    ),
    "train mpi": ("train", "--method", "fedavg", *OPEN),
    "evaluate": ("evaluate", "1"),
    "report": ("report", "1"),
}
"""Name → command."""
_BASE = ("tile", "features", "mosaic")
EVERYTHING = (*_BASE, "ddpm", "gan", "train", "evaluate", "report")
ORDER: dict[str, tuple[str, ...]] = {
    "tile": (),
    "tile native": (),
    "features": ("tile",),
    "mosaic": (),
    "ddpm": ("tile",),
    "gan": ("tile",),
    "train": ("tile",),
    "train openly": ("tile",),
    "train mosaics": ("mosaic",),
    "train mpi": ("tile",),
    "evaluate": ("tile", "train"),
    "report": ("tile", "train", "evaluate"),
}
"""Name → the stages that make what it needs."""


def make(folder: Path) -> None:
    """Paint the slides and write the study, without running anything.

    Args:
        folder: gets `archive` and `bare`.
    """
    import timm
    import torch
    from safetensors.torch import save_file

    from wsi_fl.demo import simulated_slides
    from wsi_fl.stages.prepare.init_study import init_study

    archive = simulated_slides.simulate_archive(folder / "archive", n_sites=2, patients_per_site=3, size_px=768)
    root = folder / "bare"
    init_study(root, archive=archive)
    for path in (root / "pipelines").glob("*.toml"):
        path.unlink()
    (root / "pipelines" / "p.toml").write_text(PIPELINE)
    (root / "weights").mkdir()
    torch.manual_seed(0)
    weights = timm.create_model("test_efficientnet", num_classes=7).state_dict()
    save_file(weights, root / "weights" / "tiny.safetensors")
    for site in sorted((root / "sites").glob("*.toml")):  # slides of its own, so that they can be hurt
        text = site.read_text().replace(str(archive), "archive")
        site.write_text(text)
    shutil.copytree(archive, root / "archive")


def prepared(folder: Path, stages: tuple[str, ...]) -> Path:
    """Return a study in which some stages were run, undisturbed; made once per folder.

    Raises:
        RuntimeError: when a stage fails without being disturbed.
    """
    root = folder / ("after " + " ".join(stages).replace(" ", "-") if stages else "bare")
    if not root.exists():
        before = prepared(folder, stages[:-1])
        made = copied(before, root.with_name(root.name + ".partial"))
        ended = run(STAGES[stages[-1]], made, limit_s=600)
        if ended.code:
            raise RuntimeError(f"{stages[-1]} failed undisturbed: {ended.told}")
        made.rename(root)
    return root


def copied(study: Path, to: Path) -> Path:
    """Copy a study, with the times of its files: slides count as unchanged by them."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(study, to, symlinks=True)
    return to


def outcome(study: Path) -> dict[str, str]:
    """Return what a study holds, as digests by name: all that must not depend on disturbances.

    Times, durations and what is drawn from the system's randomness are left out.
    """
    found = {}
    for path in sorted(study.rglob("*")):
        name = path.relative_to(study).as_posix()
        if not path.is_file() or name.startswith(("archive/", "stores/C1/.plans", "stores/C2/.plans")):
            continue
        reader = next((read for fits, read in _READERS if fits(name)), None)
        if reader is not None:
            try:
                found[name] = reader(path)
            except (OSError, KeyError, RuntimeError, ValueError, SafetensorError):
                found[name] = "damaged"
    return found


def _digest_h5(path: Path) -> str:
    digest = hashlib.sha256()

    def take(name: str, node: h5py.Dataset | h5py.Group) -> None:
        digest.update(name.encode())
        for key in sorted(node.attrs):
            digest.update(f"{key}={node.attrs[key]!r}".encode())
        if isinstance(node, h5py.Dataset):
            digest.update(np.ascontiguousarray(node[()]).tobytes() if node.dtype != object else b"")

    with open_hdf5(path) as file:  # HDF5 alone would read some damage for ever
        take("/", file)
        file.visititems(take)
    return digest.hexdigest()


def _digest_tensors(path: Path) -> str:
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _steps(path: Path) -> str:
    """Rounds with their scores, or the steps of a generator, whose loss is the mean since its process began."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = ("round", "iteration", "epsilon", "takes_part", "own", "merged", "messages", "bytes")
    return json.dumps([{key: line[key] for key in kept if key in line} for line in lines])


def _ledger(path: Path) -> str:
    """What was spent, by whom and in which round, once each: a round that is redone stands there twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    spent = {json.dumps([line.get("round"), line.get("mechanism")], sort_keys=True) for line in lines}
    return json.dumps(sorted(spent))


def _scores(path: Path) -> str:
    document = json.loads(path.read_text())
    return json.dumps([document.get(key) for key in ("merged", "internal", "external", "sites")], sort_keys=True)


_READERS: tuple[tuple[Callable[[str], bool], Callable[[Path], str]], ...] = (
    (lambda name: name.endswith((".partial", ".tmp")), lambda _: "left behind"),
    (lambda name: name.endswith(".h5"), _digest_h5),
    (lambda name: name.endswith(".safetensors") and "/state/" not in name, _digest_tensors),
    (lambda name: name.startswith("ledgers/"), _ledger),
    (lambda name: name.endswith("metrics.jsonl"), _steps),
    (lambda name: name.endswith("evaluation.json"), _scores),
)
"""Which file is read how."""


def explained(ended: Ended) -> str:
    """Return a few words on how a command ended."""
    return ended.error or (ended.told.strip().splitlines() or ["nothing was said"])[-1]
