#!/bin/sh
# OpenSlide opens slides with uncompressed tiles, and reads them only where a tile's bytes are a multiple of 1024.
#
# Versions: OpenSlide 4.0.1 (openslide-python 1.4.7, openslide-bin 4.0.1.2), tifffile 2026.3.3, pyvips 3.1.1 with
#   pyvips-binary 8.18.7.
# Source: TIFF 6.0, section 15: a tile's sides are multiples of 16. Input: tiled TIFFs of 8-bit RGB without compression,
#   as tifffile writes them, with tiles of 64, 112, 240 and 256 px; and the same of 240 px with deflate.
# Guess: all readers read all of them; tiles of 240 px are those of one scanner.
# Seen: OpenSlide opens them all, with levels and sizes, and fails at the first region of 112 and 240 px without
#   compression: "Invalid tile byte count for tile 0. Expected 172800, got 173056", where the first is what the file
#   states, and right (240 * 240 * 3), and the second the next multiple of 1024. libvips and tifffile read all. So a
#   check that only opens slides lets such files through.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 tifffile==2026.3.3 pyvips==3.1.1 pyvips-binary==8.18.7
venv/bin/python -W ignore - <<'PYTHON'
import re

import numpy as np
import openslide
import pyvips
import tifffile

picture = np.random.default_rng(0).integers(0, 256, (500, 700, 3), np.uint8)
outcomes = {}
for tile_px, codec in ((64, None), (112, None), (240, None), (256, None), (240, "zlib")):
    path = f"slide_{tile_px}_{codec}.tif"
    tifffile.imwrite(path, picture, tile=(tile_px, tile_px), photometric="rgb", metadata=None, compression=codec)
    with tifffile.TiffFile(path) as file:
        counts = set(file.pages[0].tags["TileByteCounts"].value)
        assert codec or counts == {tile_px * tile_px * 3}
    assert np.array_equal(tifffile.imread(path), picture)
    assert np.array_equal(pyvips.Image.new_from_file(path).numpy(), picture)
    slide = openslide.OpenSlide(path)
    assert slide.dimensions == (700, 500)
    try:
        region = np.asarray(slide.read_region((0, 0), 0, (100, 100)))[..., :3]
        outcomes[tile_px, codec] = np.array_equal(region, picture[:100, :100])
    except openslide.OpenSlideError as error:
        outcomes[tile_px, codec] = re.search(r"Invalid tile byte count.*", str(error))[0]
    print(tile_px, codec, outcomes[tile_px, codec])
reason = "Invalid tile byte count for tile 0. Expected {}, got {}"
assert outcomes == {
    (64, None): True,
    (112, None): reason.format(37632, 37888),
    (240, None): reason.format(172800, 173056),
    (256, None): True,
    (240, "zlib"): True,
}
PYTHON
