#!/bin/sh
# wsidicom moves a tile that does not lie on the grid of tiles, and leaves white where its last pixels belong.
#
# Versions: wsidicom 0.36.1, OpenSlide 4.0.1 (openslide-bin 4.0.1.2), pydicom 3.0.2, NumPy 2.4.6.
# Input: a TILED_SPARSE slide of 556 x 256 px with two tiles of 256 px that begin at 0 (grey 100) and at 300 (grey 200).
# Expected from: DICOM PS3.3, C.7.6.17.3: where a sparse tile lies is written with each frame, and a reader assumes nothing
#   else about it.
# Guess: refused or right.
# Seen: the second tile is shown from 256 to 511, that is 44 px too far left, and the slide ends in white. Its outlines lie
#   11 um beside what they outline. OpenSlide refuses: "unsupported frame alignment".
set -eu
scripts=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cp "$scripts/dicom_slide.py" .
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openslide-python==1.4.7 openslide-bin==4.0.1.2 wsidicom==0.36.1 pydicom==3.0.2 numpy==2.4.6
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import openslide
from dicom_slide import write
from wsidicom import WsiDicom

write("slide.dcm", "TILED_SPARSE", 556, 256, [(0, 0, 1, 100), (300, 0, 1, 200)])
with WsiDicom.open("slide.dcm") as slide:
    row = np.array(slide.read_region((0, 0), 0, (556, 1)))[0, :, 0]
edges = np.flatnonzero(np.diff(row.astype(int))) + 1
print("wsidicom", [(int(x), int(row[x])) for x in (0, *edges)])
try:
    openslide.OpenSlide("slide.dcm")
    raise SystemExit("changed: OpenSlide opens it")
except openslide.OpenSlideError as error:
    print("OpenSlide", error)
assert edges.tolist() == [256, 512] and row[[0, 256, 555]].tolist() == [100, 200, 255]
PYTHON
