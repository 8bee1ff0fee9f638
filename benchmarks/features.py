"""Reading and encoding patches of a slide, as `mosaic` does, against the encoder alone on patches that are in memory.

python benchmarks/features.py [--weights FILE] [--encoder tf_efficientnet_lite0] [--size-px 512] [--patches 96]

Both take turns in one process, three times each; the ratio is that of their best. Without --weights they are random.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast, get_args

import numpy as np
import timm
import torch
from big_slide import write_big_slide
from numpy.typing import NDArray
from safetensors.torch import save_file

from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide
from wsi_fl.models.encoder import Encoder, encode_batches
from wsi_fl.slides.patching.grid import grid_positions
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.types import GridSpec, SlideRecord

MPP, ROUNDS = 0.5, 3


def encoder_of(name: str, weights: Path | None, folder: Path, batch_size: int) -> Encoder:
    """On the GPU where there is one; random weights unless a file is given."""
    if weights is None:
        weights = folder / "random.safetensors"
        save_file(timm.create_model(name, pretrained=False, num_classes=0).state_dict(), weights)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Encoder(name, weights, batch_size=batch_size, device=device)


def patches_read(
    record: SlideRecord, xy: NDArray[np.int64], spec: GridSpec, reader: Reader
) -> Iterator[NDArray[np.uint8]]:
    for _, pixels in read_patches(record, xy, spec, threads=torch.get_num_threads(), reader=reader):
        yield pixels


def seconds(batches: Iterable[NDArray[np.uint8]], encoder: Encoder) -> float:
    began = time.perf_counter()
    encode_batches(batches, encoder)
    return time.perf_counter() - began


def bare_seconds(batches: list[NDArray[np.uint8]], encoder: Encoder) -> float:
    """Without any threads of ours."""
    began = time.perf_counter()
    for batch in batches:
        encoder(batch)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--encoder", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--size-px", type=int, default=512)
    parser.add_argument("--patches", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--reader", choices=get_args(Reader), default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder = encoder_of(args.encoder, args.weights, folder, args.batch_size)
        path = folder / "slide.tif"
        block = simulate_slide(plan_slides(1, 1, 2048, 0)[1])
        side = args.size_px * (int(args.patches**0.5) + 1)
        write_big_slide(path, block, MPP, size_px=-(-side // 2048) * 2048, tile_px=256, quality=87)
        record = SlideRecord(path, path.stem, "p", "A", "negative", False)
        spec = GridSpec(args.size_px, MPP, args.size_px)
        with Slide(path) as slide:
            xy = grid_positions(slide.size_l0, spec, slide.mpp)[: args.patches]
        reader = cast(Reader, args.reader)
        loaded = np.concatenate(list(patches_read(record, xy, spec, reader)))
        size = encoder.batch_size_for(args.size_px)
        batches = [loaded[k : k + size] for k in range(0, len(loaded), size)]
        bare_seconds(batches[:1], encoder)
        alone, together = [], []
        for _ in range(ROUNDS):
            alone.append(bare_seconds(batches, encoder))
            together.append(seconds(patches_read(record, xy, spec, reader), encoder))
        began = time.perf_counter()
        for _ in patches_read(record, xy, spec, reader):
            pass
        reading = time.perf_counter() - began
    n = len(loaded)
    print(f"{encoder.label} on {encoder.device}, {n} patches of {args.size_px} px in batches of {size}")
    print(f"{'reading alone':<24}{n / reading:9.1f} patches/s")
    print(f"{'encoder alone':<24}{n / min(alone):9.1f} patches/s")
    print(f"{'reading and encoding':<24}{n / min(together):9.1f} patches/s")
    print(f"ratio {min(alone) / min(together):.3f}")


if __name__ == "__main__":
    main()
