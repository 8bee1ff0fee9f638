"""Synthetic images as patch stores, whatever generator they are from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.shards import ShardMeta, write_columns, write_shard
from wsi_fl.types import GridSpec, PatchTable

_SLIDE = "synthetic"


def write_synthetic(
    path: Path,
    meta: StoreMeta,
    labels: NDArray[np.int64],
    pixels: Iterable[NDArray[np.uint8]],
    channels: int,
) -> PatchTable:
    """Write a patch store of synthetic images, all of split train; return its table.

    Args:
        pixels: batches uint8[b, h, h, channels], one image per label in order.
    """
    patients = [f"synthetic_{k}" for k in range(len(labels))]
    table = PatchTable.of_images(labels, _SLIDE, patients, "train")
    shard = path.parent / "slides" / f"{_SLIDE}.h5"
    shard_meta = ShardMeta(_SLIDE, _SLIDE, "train", meta.spec, "", source=meta.generator or "")
    write_shard(shard, shard_meta, table, pixels, channels=channels)
    return write_columns(path, meta, [shard])


def as_pixels(batches: Iterable[torch.Tensor]) -> Iterator[NDArray[np.uint8]]:
    """Return batches uint8[b, c, h, h] as uint8[b, h, h, c]."""
    for batch in batches:
        yield batch.permute(0, 2, 3, 1).numpy()


def synthetic_meta(
    site: str, classes: Sequence[str], grid: tuple[int, float], resolution: int, provenance: Mapping[str, Any]
) -> StoreMeta:
    """Return what a store of images says that are like a real store's, reduced: as many µm on fewer pixels.

    Args:
        grid: size in pixels and µm per pixel of the real patches.
    """
    size_px, mpp = grid
    spec = GridSpec(resolution, mpp * size_px / resolution, resolution)
    return StoreMeta(site, tuple(classes), spec, json.dumps(provenance, sort_keys=True))
