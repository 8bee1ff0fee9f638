#!/bin/sh
# TiffSlide paints black where OpenSlide is transparent, and returns no alpha that would tell.
#
# Versions: TiffSlide 3.0.1, OpenSlide 4.0.1 (openslide-python 1.4.7), tifffile 2026.3.3.
# Input: a tiled TIFF of one light grey, and a region that reaches beyond its lower right corner.
# Expected from: TiffSlide's own description, "a drop-in replacement for openslide-python".
# Guess: RGBA with alpha 0 beyond the edge from both.
# Seen: OpenSlide gives RGBA (0, 0, 0, 0) there. TiffSlide gives three channels, (0, 0, 0): a mask of tissue by darkness
#   takes what is beyond the edge for tissue.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 tifffile==2026.3.3 tiffslide==3.0.1
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import openslide
import tifffile
import tiffslide

tifffile.imwrite("slide.tif", np.full((512, 512, 3), 200, np.uint8), tile=(256, 256), photometric="rgb")
regions = {}
for reader in (openslide.OpenSlide, tiffslide.TiffSlide):
    with reader("slide.tif") as slide:
        region = slide.read_region((400, 400), 0, (200, 200))
    regions[reader.__name__] = region.mode, region.getpixel((0, 0)), region.getpixel((199, 199))
print(regions)
assert regions["OpenSlide"] == ("RGBA", (200, 200, 200, 255), (0, 0, 0, 0))
assert regions["TiffSlide"] == ("RGB", (200, 200, 200), (0, 0, 0))
PYTHON
