"""Reading batches for training from a store of one painted slide, raw, native, encoded anew and without pixels.

python benchmarks/reading.py [--size-px 512] [--slide-px 8192] [--batch-size 32]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from big_slide import write_big_slide
from numpy.typing import NDArray

from wsi_fl.data.batches import load_batches
from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.site.site_data import load_patches, open_store
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study

MPP = 0.5


def shuffled(n: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
    """One epoch's rows."""
    order = np.random.default_rng(0).permutation(n)
    yield from np.array_split(order, range(batch_size, n, batch_size))


def arrays_per_second(store: PatchStore, batch_size: int) -> float:
    """Patches a second as uint8 arrays."""
    began = time.perf_counter()
    for rows in shuffled(len(store), batch_size):
        store.read(rows)
    return len(store) / (time.perf_counter() - began)


def tensors_per_second(store: PatchStore, batch_size: int) -> float:
    """Patches a second as training takes them: float32, normalised; in the second epoch."""
    examples = load_patches(store, "train", None, in_memory_bytes=0)
    for _ in range(2):  # the first epoch touches memory that the others find
        began = time.perf_counter()
        for _ in load_batches(examples, shuffled(len(examples), batch_size), augment=None, device=torch.device("cpu")):
            pass
    return len(examples) / (time.perf_counter() - began)


def make_study(root: Path, size_px: int, slide_px: int) -> Study:
    """A site with one big slide of whole tiles, all of it tissue."""
    (root / "slides").mkdir(parents=True)
    block = simulate_slide(plan_slides(1, 1, 2048, 0)[1])
    write_big_slide(root / "slides" / "slide.tif", block, MPP, size_px=slide_px, tile_px=size_px, quality=87)
    (root / "slides.csv").write_text("slide,patient,site,label,split\nslide.tif,p,A,normal,train\n")
    init_study(root / "study", archive=root)
    return Study(root / "study")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-px", type=int, default=512)
    parser.add_argument("--slide-px", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = make_study(Path(folder), args.size_px, args.slide_px)
        print(f"{'pixels':<10}{'patches':>8}{'MB':>8}{'tile s':>9}{'arrays/s':>10}{'tensors/s':>11}")
        for content in ("raw", "native", "jpeg:90", "none"):
            settings = [f"tile.size_px={args.size_px}", f"tile.mpp={MPP}", "tile.balance=false"]
            settings += ["tile.min_tissue=0.0", f"store.pixels={content}"]
            (row,) = tile_slides(study, site="A", overrides=settings)["sites"]
            shards = (study.store_path("A").parent / "slides").glob("*.h5")
            megabytes = sum(path.stat().st_size for path in shards) / 1e6
            with open_store(study, "A") as store:
                arrays = arrays_per_second(store, args.batch_size)
                tensors = tensors_per_second(store, args.batch_size)
            told = f"{content:<10}{row['patches']:>8}{megabytes:>8.0f}{row['seconds']:>9.2f}"
            print(f"{told}{arrays:>10.0f}{tensors:>11.0f}", flush=True)


if __name__ == "__main__":
    main()
