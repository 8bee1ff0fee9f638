"""What checksums cost: an epoch over the same store with and without them in turns (CPU seconds), and verifying it.

python benchmarks/checksums.py [--patches 2000] [--size-px 64 256] [--features 1024] [--turns 5]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.models import build
from wsi_fl.stores.checksums import HEAD, ROWS
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patch_features import FeaturesMeta, PatchFeatures, write_patch_features
from wsi_fl.stores.patch_features import write_shard as write_features
from wsi_fl.stores.patches import PatchStore
from wsi_fl.stores.shards import ShardMeta, write_columns, write_shard
from wsi_fl.types import CLASSES, GridSpec, Images, PatchTable

SLIDES, BATCH = 10, 32


def table_of(slide: str, n: int) -> PatchTable:
    """Columns of a slide's patches."""
    corners = np.stack([np.arange(n), np.zeros(n, np.int64)], 1).astype(np.int64)
    text = [np.full(n, said) for said in (slide, slide, "train")]
    return PatchTable(corners, np.arange(n) % 2, np.zeros(n, np.float32), *text)


def patches(folder: Path, n: int, size_px: int) -> Path:
    """Write a raw store of noise."""
    rng, spec, shards = np.random.default_rng(0), GridSpec(size_px, 0.5, size_px), []
    for k in range(SLIDES):
        shards.append(folder / "slides" / f"s{k}.h5")
        pixels = rng.integers(0, 256, (n // SLIDES, size_px, size_px, 3), np.uint8)
        meta = ShardMeta(f"s{k}", f"s{k}", "train", spec, "")
        write_shard(shards[-1], meta, table_of(f"s{k}", n // SLIDES), [pixels])
    write_columns(folder / "patches.h5", StoreMeta("A", CLASSES, spec), shards)
    return folder / "patches.h5"


def features(folder: Path, n: int, d: int) -> Path:
    """Write features of noise."""
    shard, path = folder / "features" / "s.h5", folder / "features.h5"
    write_features(shard, "x", np.random.default_rng(0).normal(size=(n, d)).astype(np.float32), {})
    meta = FeaturesMeta(StoreMeta("A", CLASSES, GridSpec(64, 0.5, 64)), "noise", {})
    write_patch_features(path, meta, table_of("s", n), [shard])
    return path


def forgetful(path: Path) -> Path:
    """Copy a store without its checksums."""
    folder = path.parent.with_name(path.parent.name + " without")
    shutil.copytree(path.parent, folder)
    for file in folder.rglob("*.h5"):
        with h5py.File(file, "r+") as opened:
            del opened.attrs[HEAD]
            if ROWS in opened:
                del opened[ROWS]
    return folder / path.name


def shuffled(n: int) -> Iterator[NDArray[np.int64]]:
    """One epoch's rows."""
    yield from np.array_split(np.random.default_rng(0).permutation(n), range(BATCH, n, BATCH))


def epoch(store: PatchStore | PatchFeatures, model: nn.Module) -> float:
    """Train one epoch without privacy, which costs least; return its seconds of CPU."""
    table = store.table
    examples = Examples(store.read, table.label, table.slide, table.patient)
    optimizer, began = torch.optim.SGD(model.parameters(), 0.01), time.process_time()
    for x, y in batches(examples, shuffled(len(store)), augment=None, device=torch.device("cpu")):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.process_time() - began


def first_epoch(kind: type[PatchStore] | type[PatchFeatures], path: Path, model: nn.Module) -> float:
    """Train an epoch on a store that was just opened, which compares every row."""
    with kind(path) as store:
        return epoch(store, model)


def in_turns(turns: int, runs: Sequence[Callable[[], float]]) -> list[float]:
    """The median seconds of each run, after one that does not count."""
    told = [[run() for run in runs] for _ in range(turns + 1)][1:]
    return [median(times) for times in zip(*told, strict=True)]


def compare(name: str, path: Path, model: nn.Module, turns: int) -> None:
    """Print what an epoch takes without and with checksums."""
    kind = PatchStore if path.name == "patches.h5" else PatchFeatures
    bare = forgetful(path)
    before, after = in_turns(turns, [partial(first_epoch, kind, one, model) for one in (bare, path)])
    print(
        f"{name}, first epoch: {before:.3f} s without, {after:.3f} s with checksums, {after / before - 1:+.1%}"
    )
    with kind(bare) as without, kind(path) as store:
        before, after = in_turns(turns, [partial(epoch, one, model) for one in (without, store)])
        print(f"{name}, later epochs: {before:.3f} s without, {after:.3f} s with, {after / before - 1:+.1%}")
        if isinstance(store, PatchStore):
            began = time.process_time()
            assert not any(store.verify(slide)[0] for slide in store.slides)
            seconds, n_bytes = time.process_time() - began, len(store) * store.meta.spec.size_px**2 * 3
            print(f"  verified at {n_bytes / seconds / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patches", type=int, default=2000)
    parser.add_argument("--size-px", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for size_px in args.size_px:
            model = build("cnn1", n_classes=len(CLASSES), shape=Images(3, size_px), seed=0)
            compare(
                f"{size_px} px, cnn1",
                patches(Path(folder) / str(size_px), args.patches, size_px),
                model,
                args.turns,
            )
        linear = nn.Linear(args.features, len(CLASSES))
        path = features(Path(folder) / "features", 10 * args.patches, args.features)
        compare(f"{args.features} features, linear head, read from disk", path, linear, args.turns)


if __name__ == "__main__":
    main()
