#!/bin/sh
# A narrow strip's pyramid: three readers show a place of a coarse level that is up to 448 px beside the one asked for.
#
# Versions: openslide-python 1.4.7 with openslide-bin 4.0.1.2, TiffSlide 3.0.1, fastslide 0.8.1, pyvips 3.2.0 with
#   pyvips-binary 8.18.7.
# Input: a core of 40000 x 1900 px (10 mm x 0.5 mm at 0.25 µm), white with a black band from x = 36864 on; as a tiled TIFF
#   with the pyramid that libvips makes.
# Expected from: OpenSlide's documentation of read_region, where the place is a pixel of level 0; and libvips's, where each
#   level halves the one above, so that a pixel of level 6 is 64 px wide along both axes.
# Guess: each reader shows the band at its place, within one pixel of the level.
# Seen: at level 6 it is 7 px (448 px of level 0) further to the right than asked for. libvips drops what is left over when
#   it halves: 1900 becomes 29, which is 1900 / 65.5, while 40000 becomes 625, which is 40000 / 64. All three have one
#   factor for a level, the mean of both (64.76), and divide both x and y by it. Tissue that is found on the level and
#   multiplied by that factor is 437 px off, two patches of 224 px, and nothing tells.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 \
    tiffslide==3.0.1 fastslide==0.8.1 pyvips==3.2.0 pyvips-binary==8.18.7
venv/bin/python -W ignore - <<'PYTHON'
import fastslide
import numpy as np
import openslide
import pyvips
import tiffslide

WIDTH, HEIGHT, BAND = 40000, 1900, 36864
white, black = (pyvips.Image.black(width, HEIGHT, bands=3) + grey for width, grey in ((WIDTH, 255), (512, 0)))
strip = white.insert(black, BAND, 0).cast("uchar").copy(interpretation="srgb")
strip.tiffsave("slide.tif", tile=True, tile_width=256, tile_height=256, pyramid=True, compression="deflate")


def first_black(pixels):
    return int(np.argmax(np.asarray(pixels)[0, :, 0] < 128))


off = {}
for level in (0, 3, 5, 6):
    picture = pyvips.Image.new_from_file("slide.tif", page=level).numpy()
    column = first_black(picture)
    assert column == BAND >> level
    regions = {}
    for reader in (openslide.OpenSlide, tiffslide.TiffSlide):
        with reader("slide.tif") as slide:
            regions[reader.__name__] = slide.read_region((BAND, 0), level, (20, 1))
            factor = slide.level_downsamples[level]
            assert slide.level_dimensions[level] == picture.shape[1::-1]
    slide = fastslide.FastSlide.from_file_path("slide.tif")
    place = slide.convert_level0_to_level_native(BAND, 0, level)
    regions["fastslide"] = slide.read_region(tuple(int(v) for v in place), level, (20, 1)).numpy()
    off[level] = {name: first_black(region) << level for name, region in regions.items()}
    off[level]["by the factor"] = round(column * factor) - BAND
    print("level", level, picture.shape[1::-1], "factor", factor, "px of level 0 off:", off[level])
assert not any(off[0].values())
assert all(value > 64 for value in off[5].values()) and all(value > 400 for value in off[6].values())
assert off[6]["OpenSlide"] == 448
PYTHON
