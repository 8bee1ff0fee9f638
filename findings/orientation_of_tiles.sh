#!/bin/sh
# OpenSlide turns every tile of a TIFF with an Orientation by itself.
#
# Versions: OpenSlide 4.0.1 (openslide-bin 4.0.1.2), tifffile 2026.3.3, NumPy 2.4.6.
# Input: a tiled RGB TIFF of 512 x 512 px in tiles of 256, whose tag Orientation (274) is 2: the first column is on the right.
# Expected from: TIFF 6.0, "Orientation": the tag speaks of the whole picture. So a reader mirrors the picture, or leaves
#   it as stored, as tifffile does.
# Guess: the picture as stored; a reader of slides ignores the tag.
# Seen: each tile is mirrored in its place, so that left and right halves stay and what is in them is turned. With 4 it is
#   turned upside down within tiles, with 3 both. No error, and no property that says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 tifffile==2026.3.3
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import openslide
import tifffile

stored = np.zeros((512, 512, 3), np.uint8)
stored[:, :, 0], stored[:, :, 1] = np.arange(512) // 2, (np.arange(512) // 2)[:, None]
turns = {1: lambda t: t, 2: lambda t: t[:, ::-1], 3: lambda t: t[::-1, ::-1], 4: lambda t: t[::-1]}
for orientation, turn in turns.items():
    tag = (274, "H", 1, orientation, True)
    tifffile.imwrite("slide.tif", stored, tile=(256, 256), photometric="rgb", extratags=[tag])
    with openslide.OpenSlide("slide.tif") as slide:
        read = np.array(slide.read_region((0, 0), 0, (512, 512)).convert("RGB"))
    tiles = stored.copy()
    for y in (0, 256):
        for x in (0, 256):
            tiles[y : y + 256, x : x + 256] = turn(stored[y : y + 256, x : x + 256])
    print(orientation, "tiles turned:", np.array_equal(read, tiles), "picture turned:", np.array_equal(read, turn(stored)))
    assert np.array_equal(read, tiles)
    assert orientation == 1 or not np.array_equal(read, turn(stored))
    assert np.array_equal(tifffile.imread("slide.tif"), stored)
PYTHON
