#!/bin/sh
# The same JPEG tiles are one picture in OpenSlide and libvips, another in fastslide, and a third in SlideIO.
#
# Versions: openslide-python 1.4.7 with openslide-bin 4.0.1.2, pyvips 3.2.0 with pyvips-binary 8.18.3, fastslide 0.8.1,
#   slideio 2.10.0; tifffile 2026.3.3 and imagecodecs 2026.3.6 write the slide, simplejpeg 1.9.0 tells decoders apart.
# Input: an SVS of 512 x 512 px with JPEG tiles of 256 px, quality 90, colour subsampled 2 x 2, as scanners write them.
# Expected from: libjpeg-turbo's defaults (exact transform, interpolated colour); T.81 leaves only rounding and the
#   interpolation of colour to a decoder.
# Guess: all four within 2 of 255.
# Seen: OpenSlide and libvips are equal in every pixel: colour is interpolated between its samples. fastslide repeats each
#   sample instead, with the fast transform: up to 23 of 255 off. SlideIO is up to 20 off, and its picture is neither of
#   libjpeg-turbo's four (transform and colour, each exact or fast). Where patches of one hospital are read by one and
#   those of another by the other, colour edges differ, and so do features under one encoder's name.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 \
    pyvips==3.2.0 pyvips-binary==8.18.3 fastslide==0.8.1 slideio==2.10.0 tifffile==2026.3.3 imagecodecs==2026.3.6 simplejpeg==1.9.0
venv/bin/python -W ignore - <<'PYTHON'
from itertools import product

import fastslide
import numpy as np
import openslide
import pyvips
import simplejpeg
import slideio
import tifffile

SIDE = 512
y, x = np.mgrid[:SIDE, :SIDE]
waves = [200 + 40 * np.sin(x / 3), 120 + 60 * np.sin(y / 4), 180 + 50 * np.cos((x + y) / 5)]
tifffile.imwrite(
    "slide.svs", np.stack(waves, -1).astype(np.uint8), tile=(256, 256), photometric="rgb", compression="jpeg",
    compressionargs={"level": 90}, subsampling=(2, 2), metadata=None,
    description=f"Aperio Image Library\r\n{SIDE}x{SIDE}|AppMag = 40|MPP = 0.25",
)  # fmt: skip
vips = pyvips.Image.tiffload("slide.svs")
pictures = {
    "OpenSlide": openslide.OpenSlide("slide.svs").read_region((0, 0), 0, (SIDE, SIDE)).convert("RGB"),
    "libvips": np.frombuffer(vips.write_to_memory(), np.uint8).reshape(SIDE, SIDE, -1)[..., :3],
    "fastslide": fastslide.FastSlide.from_file_path("slide.svs").read_region((0, 0), 0, (SIDE, SIDE)).numpy()[..., :3],
    "SlideIO": slideio.open_slide("slide.svs", "SVS").get_scene(0).read_block((0, 0, SIDE, SIDE)),
}
pictures = {name: np.asarray(picture).astype(int) for name, picture in pictures.items()}
far = {name: int(abs(picture - pictures["OpenSlide"]).max()) for name, picture in pictures.items()}
print("off OpenSlide, of 255:", far)

with tifffile.TiffFile("slide.svs") as file:
    page = file.pages[0]
    file.filehandle.seek(page.dataoffsets[0])
    stream = file.filehandle.read(page.databytecounts[0])
made = {name: [] for name in pictures}
for fast_transform, repeats_colour in product((False, True), repeat=2):
    tile = simplejpeg.decode_jpeg(stream, fastdct=fast_transform, fastupsample=repeats_colour)
    for name, picture in pictures.items():
        if np.array_equal(tile, picture[:256, :256]):
            made[name].append((fast_transform, repeats_colour))
print("made by (fast transform, repeated colour):", made)
assert far["libvips"] == 0 and far["fastslide"] > 15 and far["SlideIO"] > 15
assert made["OpenSlide"] == [(False, False)] and made["fastslide"] == [(True, True)] and made["SlideIO"] == []
PYTHON
