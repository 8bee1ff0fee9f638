#!/bin/sh
# Of a DICOM slide with two optical paths OpenSlide shows the first, or the last, or a patchwork of both.
#
# Versions: OpenSlide 4.0.1 (openslide-bin 4.0.1.2), wsidicom 0.36.1, pydicom 3.0.2, NumPy 2.4.6.
# Input: a slide of 512 x 512 px in four tiles, taken under two lights (grey 100 and grey 200): as TILED_FULL, as
#   TILED_SPARSE with the same frames in the same order, and as TILED_SPARSE whose second light was used for one tile.
# Expected from: DICOM PS3.3, C.7.6.17.3: of sparse tiles a reader assumes neither path nor order, and goes by what each
#   frame says of itself; wsidicom.
# Guess: refused or right. For TILED_SPARSE, after TILED_FULL had been seen: the first path, as with TILED_FULL. For the single
#   tile, after both: the first path everywhere, or a patchwork.
# Seen: the first path if tiles are full, the last if they are sparse, and with a single tile of the second path three tiles
#   of 100 beside one of 200. Nothing but the property dicom.NumberOfOpticalPaths tells. wsidicom: 100 everywhere.
set -eu
scripts=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cp "$scripts/dicom_slide.py" .
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 wsidicom==0.36.1 pydicom==3.0.2 numpy==2.4.6
venv/bin/python -W ignore - <<'PYTHON'
import os

import openslide
from dicom_slide import write
from wsidicom import WsiDicom

first, second = ([(x, y, path, 100 * path) for y in (0, 256) for x in (0, 256)] for path in (1, 2))
inputs = {
    "full": ("TILED_FULL", first + second, [100] * 4),
    "sparse": ("TILED_SPARSE", first + second, [200] * 4),
    "one tile": ("TILED_SPARSE", first + second[3:], [100, 100, 100, 200]),
}
centres = [(128, 128), (384, 128), (128, 384), (384, 384)]
for name, (organization, tiles, outcome) in inputs.items():
    os.mkdir(name)
    path = name + "/slide.dcm"
    write(path, organization, 512, 512, tiles, paths=2)
    with openslide.OpenSlide(path) as slide:
        greys = [slide.read_region(centre, 0, (1, 1)).getpixel((0, 0))[0] for centre in centres]
        paths = slide.properties["dicom.NumberOfOpticalPaths"]
    with WsiDicom.open(path) as slide:
        reference = [slide.read_region(centre, 0, (1, 1)).getpixel((0, 0))[0] for centre in centres]
    print(name, "OpenSlide", greys, "of", paths, "paths; wsidicom", reference)
    assert greys == outcome and reference == [100] * 4
PYTHON
