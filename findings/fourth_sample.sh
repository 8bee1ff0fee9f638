#!/bin/sh
# OpenSlide takes a fourth sample that TIFF calls "unspecified" for transparency, and darkens or brightens the slide by it.
#
# Versions: OpenSlide 4.0.1 (openslide-bin 4.0.1.2), tifffile 2026.3.3, Pillow 13.0.0, NumPy 2.4.6.
# Input: a tiled RGB TIFF of grey 199 with a fourth sample (a marker, near infrared) of 100 or 220, ExtraSamples 0.
# Expected from: TIFF 6.0, "ExtraSamples": 0 is unspecified data, 1 alone is premultiplied alpha; and libtiff's manual of
#   TIFFReadRGBAImage: without associated alpha the alpha is 255.
# Guess: refused, or the colours as stored.
# Seen: the same as with ExtraSamples 1. Where the marker is 220 the colour is 230 with alpha 220; where it is 100, 251 with
#   alpha 100. On black, as masks and networks often take it, 199 becomes 198 and 98. Pillow and tifffile say 199.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 tifffile==2026.3.3 pillow==13.0.0 numpy==2.4.6
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import openslide
import tifffile
from PIL import Image

pixels = np.full((256, 512, 4), 199, np.uint8)
pixels[:, :256, 3], pixels[:, 256:, 3] = 100, 220
regions = {}
for meaning in ("unspecified", "assocalpha"):
    tifffile.imwrite("slide.tif", pixels, tile=(256, 256), photometric="rgb", extrasamples=[meaning])
    with openslide.OpenSlide("slide.tif") as slide:
        region = slide.read_region((0, 0), 0, (512, 256))
    regions[meaning] = region.getpixel((10, 10)), region.getpixel((500, 10))
    background = Image.new("RGBA", region.size, "black")
    print(meaning, regions[meaning], "on black", [Image.alpha_composite(background, region).getpixel((x, 10)) for x in (10, 500)])
    if meaning == "unspecified":
        with Image.open("slide.tif") as picture:
            print("Pillow", picture.mode, picture.getpixel((10, 10)))
            assert picture.mode == "RGB" and picture.getpixel((10, 10)) == (199, 199, 199)
        assert np.array_equal(tifffile.imread("slide.tif"), pixels)
assert regions["unspecified"] == regions["assocalpha"]
assert [alpha for *_, alpha in regions["unspecified"]] == [100, 220]
assert regions["unspecified"][0][0] != 199
PYTHON
