#!/bin/sh
# BioIO answers "channel, row, column" of an RGB picture with its red alone.
#
# Versions: bioio 3.6.0, bioio-ome-tiff 1.4.0, tifffile 2026.3.3.
# Input: an RGB OME-TIFF as tifffile writes it: red 10, green 20, blue 30.
# Expected from: BioIO's documentation of get_image_data: dimensions that are not asked for have to have one place, or a
#   place is named.
# Guess: an error, or an array of three channels.
# Seen: uint8[1, 64, 80], all of it 10, without an error. The colours are a dimension of their own, S, and without a word its
#   place 0 is taken; there is one channel, "Channel:0:0". Asked for YXS all three are there. Stain separation, tissue
#   by saturation and the like see a grey slide.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check bioio==3.6.0 bioio-ome-tiff==1.4.0 tifffile==2026.3.3
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import tifffile
from bioio import BioImage

pixels = np.zeros((64, 80, 3), np.uint8) + np.array([10, 20, 30], np.uint8)
tifffile.imwrite("rgb.ome.tif", pixels, photometric="rgb", ome=True, metadata={"axes": "YXS"})
image = BioImage("rgb.ome.tif")
channels, colours = image.get_image_data("CYX"), image.get_image_data("YXS")
print(image.dims, channels.shape, np.unique(channels), colours.shape, np.unique(colours))
assert channels.shape == (1, 64, 80) and np.unique(channels).tolist() == [10]
assert np.array_equal(colours, pixels)
PYTHON
