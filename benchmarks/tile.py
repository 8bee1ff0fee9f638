"""Tiling against a plain OpenSlide loop, in one run on one painted slide; prints patches/s and the ratio.

python benchmarks/tile.py [--size-px 512] [--repeats 3]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import openslide

from wsi_fl.slides.phantom import paint_slide, plan_slides, write_pyramid
from wsi_fl.slides.planning import plan_slide, read_patches
from wsi_fl.stores.shards import ShardMeta, write_shard
from wsi_fl.types import GridSpec, PatchTable, SlideRecord

MPP = 0.5


def plain_loop(path: Path, positions: list[tuple[int, int]], size_px: int) -> None:
    """What most scripts do: read_region, convert, keep."""
    with openslide.OpenSlide(str(path)) as slide:
        np.stack(
            [np.asarray(slide.read_region(xy, 0, (size_px, size_px)).convert("RGB")) for xy in positions]
        )


def timed(work: Callable[[], None], repeats: int) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-px", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.tif"
        write_pyramid(path, paint_slide(plan_slides(1, 1, 4096, 0)[0]), MPP)
        spec = GridSpec(args.size_px, MPP, args.size_px)
        record = SlideRecord(path, "slide", "p", "s", "negative", positive=False)
        plan = plan_slide(record, spec)
        n = len(plan.label)
        positions = [(int(x), int(y)) for x, y in plan.xy_l0]
        text = np.full(n, "slide")
        table = PatchTable(plan.xy_l0, plan.label, plan.tumor_fraction, text, text, text)

        def read(threads: int) -> None:
            for _ in read_patches(record, plan.xy_l0, spec, threads=threads):
                pass

        def end_to_end() -> None:
            plan_slide(record, spec)
            batches = (batch for _, batch in read_patches(record, plan.xy_l0, spec, threads=2))
            write_shard(Path(folder) / "s.h5", ShardMeta("slide", "p", "train", spec, ""), table, batches)

        base = timed(lambda: plain_loop(path, positions, args.size_px), args.repeats)
        rows = {
            "openslide + PIL loop": base,
            "read_patches, 1 thread": timed(lambda: read(1), args.repeats),
            "read_patches, 2 threads": timed(lambda: read(2), args.repeats),
            "plan + read + HDF5": timed(end_to_end, args.repeats),
        }
        print(f"{n} patches of {args.size_px} px")
        for name, seconds in rows.items():
            print(f"{name:<26}{n / seconds:8.0f} patches/s   {base / seconds:5.2f} ×")


if __name__ == "__main__":
    main()
