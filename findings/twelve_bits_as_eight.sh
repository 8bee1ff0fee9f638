#!/bin/sh
# pylibCZIrw turns a bright slide of 12 bits into an almost black one of 8 bits.
#
# Versions: pylibCZIrw 6.1.0, NumPy 2.4.6.
# Input: a CZI of Bgr48 with the value 3000, whose metadata say ComponentBitCount 12: 4095 is white, and 3000 is 73 % of it.
#   pylibCZIrw writes no such element, so the script puts it in the place of some letters of the title.
# Expected from: ZEISS's CZI metadata, where ComponentBitCount is the number of bits in use; and the argument pixel_type of
#   read(), "the pixel type of the returned data".
# Guess: scaled by used bits (187 for 12).
# Seen: 11 for 12, 14 and 16 bits alike: the upper eight of sixteen. Tissue, white glass and ink are all below 16, and the
#   count of bits stands unused in the metadata that the reader shows.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check pylibCZIrw==6.1.0 numpy==2.4.6
venv/bin/python -W ignore - <<'PYTHON'
from pathlib import Path

import numpy as np
from pylibCZIrw import czi

title, end = b"t" * 100, b"</PixelType></Image>"
for bits in (12, 14, 16):
    path = Path(f"slide-{bits}.czi")
    with czi.create_czi(str(path)) as file:
        file.write(np.full((256, 256, 3), 3000, np.uint16))
        file.write_metadata(title.decode())
    count = b"<ComponentBitCount>%d</ComponentBitCount>" % bits
    content = path.read_bytes()
    assert content.count(end) == content.count(title) == 1
    content = content.replace(end, b"</PixelType>" + count + b"</Image>").replace(title, title[len(count) :])
    path.write_bytes(content)
    with czi.open_czi(str(path)) as slide:
        depth = slide.metadata["ImageDocument"]["Metadata"]["Information"]["Image"]["ComponentBitCount"]
        pixels, conversion = slide.read(), slide.read(pixel_type="Bgr24")
    print(depth, "bits:", np.unique(pixels), pixels.dtype, "->", np.unique(conversion), conversion.dtype)
    assert depth == str(bits) and np.unique(pixels).tolist() == [3000] and pixels.dtype == np.uint16
    assert conversion.dtype == np.uint8 and np.unique(conversion).tolist() == [11]
PYTHON
