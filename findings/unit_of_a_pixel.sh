#!/bin/sh
# fastslide leaves out the unit of a pixel's size: 250 nm become 250 µm, and 0.00025 mm become a quarter of a nanometre.
#
# Versions: fastslide 0.8.1, ome-types 0.7.0, tifffile 2026.3.3.
# Input: one tiled OME-TIFF of 512 x 512 px thrice, whose pixels are 0.25 µm, 250 nm and 0.00025 mm wide.
# Expected from: the OME schema: PhysicalSizeX is in the unit of PhysicalSizeXUnit, which has any unit of length and is µm
#   where it is left out; and fastslide's documentation of `mpp`: microns per pixel.
# Guess: (0.25, 0.25) of all three, as of TIFFs whose resolution is per inch or per centimetre, which it converts.
# Seen: (0.25, 0.25), (250, 250) and (0.00025, 0.00025), each the number as written, without a warning. A reader that looks
#   for the level nearest to 0.5 µm takes the wrong one, and a size in µm is a thousand times off. ome-types, which holds
#   number and unit, has all three right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check fastslide==0.8.1 ome-types==0.7.0 tifffile==2026.3.3
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import ome_types
import tifffile
from fastslide import FastSlide
from ome_types.model import UnitsLength

MICRONS = {UnitsLength.MICROMETER: 1, UnitsLength.NANOMETER: 1e-3, UnitsLength.MILLIMETER: 1e3}
pixels = np.full((512, 512, 3), 200, np.uint8)
seen = {}
for unit, size in (("µm", 0.25), ("nm", 250.0), ("mm", 0.00025)):
    sizes = {f"PhysicalSize{axis}": size for axis in "XY"} | {f"PhysicalSize{axis}Unit": unit for axis in "XY"}
    path = f"slide_{size}.ome.tif"
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", ome=True, metadata={"axes": "YXS"} | sizes)
    stated = ome_types.from_tiff(path).images[0].pixels
    seen[unit] = FastSlide.from_file_path(path).mpp
    microns = stated.physical_size_x * MICRONS[stated.physical_size_x_unit]
    print(unit, "fastslide", seen[unit], "ome-types", microns)
    assert abs(microns - 0.25) < 1e-9
for resolution, unit in ((101600, "INCH"), (40000, "CENTIMETER")):
    shared = {"tile": (256, 256), "photometric": "rgb", "metadata": None}
    tifffile.imwrite("plain.tif", pixels, resolution=(resolution,) * 2, resolutionunit=unit, **shared)
    mpp = FastSlide.from_file_path("plain.tif").mpp
    print(unit, "fastslide", mpp)
    assert abs(mpp[0] - 0.25) < 1e-6
assert seen == {"µm": (0.25, 0.25), "nm": (250, 250), "mm": (0.00025, 0.00025)}
PYTHON
