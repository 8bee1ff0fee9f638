"""The part of `tile` that writes: shards and pictures of the slides of one site, under a lock."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.files import remove_leftovers, write_bytes
from wsi_fl.slides.overview import draw_overview
from wsi_fl.slides.planning import SlidePlan, read_patches
from wsi_fl.slides.reader import Reader
from wsi_fl.stages.console import Watcher, say
from wsi_fl.stores.shards import ShardMeta, fingerprint, shard_is_current, write_shard
from wsi_fl.types import (
    DiskFull,
    GridSpec,
    PatchTable,
    SetAside,
    WsiFlError,
)

_SPARE_BYTES = 64 << 20


def write_all(
    folder: Path,
    chosen: Sequence[tuple[SlidePlan, NDArray[np.bool_]]],
    spec: GridSpec,
    failed: list[SetAside],
    site: str,
    watcher: Watcher,
    *,
    reader: Reader = "auto",
) -> list[Path]:
    """Shards of all slides that could be read, in order."""
    _check_space(folder, chosen, spec)
    shards: list[Path] = []
    for number, (plan, keep) in enumerate(chosen, 1):
        slide = plan.record.slide
        shard = folder / "slides" / f"{slide}.h5"
        if not keep.any():
            failed.append(SetAside(slide, "none of its patches was drawn into the sample"))
        else:
            try:
                _write_slide(shard, plan, keep, spec, reader)
                shards.append(shard)
            except DiskFull:
                raise
            except WsiFlError as error:
                failed.append(SetAside(slide, str(error)))
            except Exception as error:  # as above
                failed.append(SetAside(slide, one_line(error)))
        watcher.update(site, (len(chosen) + number) / 2, len(chosen), slide)
    return shards


def _write_slide(
    shard: Path, plan: SlidePlan, keep: NDArray[np.bool_], spec: GridSpec, reader: Reader
) -> None:
    """One shard and its picture, unless both are there and current."""
    record = plan.record
    meta = ShardMeta(
        record.slide, record.patient, record.split or "train", spec, plan.quickhash, _source(plan)
    )
    n = int(keep.sum())
    table = PatchTable(
        plan.xy_l0[keep],
        plan.label[keep],
        plan.tumor_fraction[keep],
        np.full(n, record.slide),
        np.full(n, record.patient),
        np.full(n, meta.split),
    )
    current = shard_is_current(shard, fingerprint(meta, table))
    picture = shard.parent.parent / "overview" / f"{record.slide}.png"
    if current and picture.exists():
        return
    if current is False:
        say(f"  {record.slide}: parameters or slide changed, tiled again")
    if not current:
        picture.unlink(missing_ok=True)  # it would outlive a kill between the two
        read = read_patches(record, table.xy_l0, spec, threads=n_threads(), reader=reader)
        write_shard(shard, meta, table, (batch for _, batch in read))
    write_bytes(picture, draw_overview(plan, keep))


def _source(plan: SlidePlan) -> str:
    """What else decides a slide's pixels: its size on disk where it has no quickhash, and the µm per pixel used."""
    path = plan.record.path
    size = path.stat().st_size if path.is_file() else 0
    return f"{size} {plan.mpp!r}"


def _check_space(folder: Path, chosen: Sequence[tuple[SlidePlan, NDArray[np.bool_]]], spec: GridSpec) -> None:
    """Refuses to begin what the disk cannot hold; shards that are there already count as free."""
    needed = sum(int(keep.sum()) for _, keep in chosen) * spec.size_px**2 * 3
    present = sum(path.stat().st_size for path in (folder / "slides").glob("*.h5"))
    free = shutil.disk_usage(folder).free
    if needed - present + _SPARE_BYTES > free:
        raise DiskFull(
            f"{folder}: the disk is full: {needed / 1e9:.2f} GB of patches, {free / 1e9:.2f} GB free; "
            "set tile.max_per_slide, or free some space"
        )


@contextmanager
def locked(folder: Path, site: str) -> Iterator[None]:
    """One `tile` at a time per store; what a killed one left behind is removed."""
    (folder / "slides").mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WsiFlError(f"site {site}: another wsi-fl tile is writing {folder}; wait for it") from None
        for place in (folder, folder / "slides", folder / "overview"):
            remove_leftovers(place)
        yield


def remove_strays(folder: Path, kept: set[str]) -> None:
    """Shards of slides that no longer belong to the store would only mislead."""
    for path in [*(folder / "slides").glob("*.h5"), *(folder / "overview").glob("*.png")]:
        if path.stem not in kept:
            path.unlink()


def one_line(error: BaseException) -> str:
    """Any exception as a reason."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def n_threads() -> int:
    return max(1, len(os.sched_getaffinity(0)))
