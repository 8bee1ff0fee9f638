"""Slides as large as real ones, made of a small picture."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.demo.simulated_slides.tiff_writer import TILE_PX, Level, encode_tiles, write_levels
from wsi_fl.system import jpeg

sys.path.append(str(Path(__file__).parents[1] / "tests" / "unit"))


def write_big_slide(
    path: Path,
    block: NDArray[np.uint8],
    mpp: float,
    *,
    size_px: int,
    tile_px: int = TILE_PX,
    quality: int = 87,
    shared: bool = False,
) -> None:
    """Write a square slide of `size_px` that repeats a picture [h, w, 3], in seconds whatever its size, atomically.

    Args:
        path: where to.
        block: of which the largest square of whole tiles is repeated.
        mpp: µm per pixel of level 0.
        size_px: of the slide; levels halve down to one tile.
        tile_px: the side of its tiles.
        quality: of their JPEG.
        shared: let equal tiles share their bytes, for slides too big for the disk; timings want bytes of their own.
    """

    def levels() -> Iterator[Level]:
        side, extent = min(block.shape[:2]) // tile_px * tile_px, size_px
        level = block[:side, :side]
        while True:
            repeats = tile_px // math.gcd(level.shape[0], tile_px)
            level = np.tile(level, (repeats, repeats, 1))
            tiles = list(encode_tiles(level, quality, tile_px))
            period, n = level.shape[0] // tile_px, range(-(-extent // tile_px))
            yield (extent, extent, (tiles[row % period * period + column % period] for row in n for column in n))
            if extent <= tile_px:
                break
            level, extent = np.asarray(Image.fromarray(level).reduce(2)), extent // 2

    write_levels(path, levels(), mpp, tile_px, shared)


CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "deflate": {"compression": "zlib", "predictor": True},
    "lzw": {"compression": "lzw", "predictor": True},
    "zstd": {"compression": "zstd", "predictor": True},
    "jpeg2000": {"compression": "APERIO_JP2000_RGB", "compressionargs": {"level": 70}},
    "jpeg2000-ycbcr": {"compression": "APERIO_JP2000_YCBC", "compressionargs": {"level": 70}},
    "ome-jpeg": {"compression": "jpeg", "compressionargs": {"level": 87}, "subsampling": (2, 2)},
    "ome-deflate": {"compression": "zlib", "predictor": True},
}
"""How tifffile writes the tiles of each codec; predictors as converters write them. `ome-`: an OME-TIFF with its
pyramid in SubIFDs."""


def write_coded_slide(
    path: Path, block: NDArray[np.uint8], mpp: float, codec: str, *, size_px: int, tile_px: int = TILE_PX
) -> None:
    """Write a slide as `write_big_slide` does, with the tiles of another codec; JPEG 2000 as Aperio's scanners."""
    options, is_ome = CODECS[codec], codec.startswith("ome-")
    axes: dict[str, Any] = {"axes": "YXS", "PhysicalSizeX": mpp, "PhysicalSizeY": mpp}  # µm by default
    n_coarser = math.ceil(math.log2(max(1, size_px / tile_px)))
    description = f"Aperio Image Library\r\n{size_px}x{size_px}|AppMag = 40|MPP = {mpp}"
    side, extent = min(block.shape[:2]) // tile_px * tile_px, size_px
    level, scale = block[:side, :side], 1
    with tifffile.TiffWriter(path, bigtiff=True, ome=is_ome) as file:
        while True:
            repeats = tile_px // math.gcd(level.shape[0], tile_px)
            level = np.tile(level, (repeats, repeats, 1))
            period, n = level.shape[0] // tile_px, range(-(-extent // tile_px))
            corners = [(row * tile_px, column * tile_px) for row in range(period) for column in range(period)]
            tiles = [_encode_tile(level[y : y + tile_px, x : x + tile_px], options) for y, x in corners]
            file.write(
                (tiles[row % period * period + column % period] for row in n for column in n),
                shape=(extent, extent, 3),
                dtype=np.uint8,
                tile=(tile_px, tile_px),
                photometric="rgb",
                subfiletype=int(scale > 1),
                metadata=axes if is_ome and scale == 1 else None,
                subifds=n_coarser if is_ome and scale == 1 else None,
                description=description if codec.startswith("jpeg2000") else None,
                resolution=(1e4 / (mpp * scale),) * 2,
                resolutionunit="CENTIMETER",
                **options,
            )
            if extent <= tile_px:
                break
            level, extent, scale = np.asarray(Image.fromarray(level).reduce(2)), extent // 2, scale * 2


def _encode_tile(tile: NDArray[np.uint8], options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, tile, tile=tile.shape[:2], photometric="rgb", metadata=None, **options)
    with tifffile.TiffFile(io.BytesIO(buffer.getvalue())) as file:
        (start,), (n_bytes,) = file.pages[0].dataoffsets, file.pages[0].databytecounts
    return buffer.getvalue()[start : start + n_bytes]


def write_dicom_slide(
    folder: Path, block: NDArray[np.uint8], mpp: float, *, size_px: int, tile_px: int, n_levels: int | None = None
) -> None:
    """Write a slide as `write_big_slide` does, as a folder of DICOM files with JPEG frames and offset tables.

    Args:
        n_levels: how many levels; default: down to one tile.
    """
    write_dicom = import_module("dicom_files").write_dicom

    @cache
    def encode(pixels: bytes) -> bytes:
        return jpeg.encode(np.frombuffer(pixels, np.uint8).reshape(tile_px, tile_px, 3), 87)

    side = min(block.shape[:2]) // tile_px * tile_px
    repeats = -(-size_px // side)
    level, k = np.tile(block[:side, :side], (repeats, repeats, 1))[:size_px, :size_px], 0
    while True:
        write_dicom(
            folder / f"{k}.dcm",
            level,
            mpp=mpp * 2**k,
            tile_px=tile_px,
            syntax="1.2.840.10008.1.2.4.50",
            colours="YBR_FULL_422",
            pack=lambda tile: encode(tile.tobytes()),
            packing={"table": "basic"},
        )
        k += 1
        if k == n_levels or max(level.shape) <= tile_px:
            break
        level = np.asarray(Image.fromarray(level).reduce(2))
