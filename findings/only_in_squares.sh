#!/bin/sh
# The Hausdorff distance of two points 5 px apart is 36.7 px, unless the picture is square.
#
# Versions: torchmetrics 1.9.0, PyTorch 2.13.0, SciPy 1.17.1.
# Input: masks of two single pixels, (10, 10) and (13, 14), and of two rectangles, in pictures of 60 x 80 and 80 x 80 px.
# Expected from: torchmetrics' documentation of `HausdorffDistance`, and SciPy's `directed_hausdorff` of the same pixels.
# Guess: SciPy's numbers, as MONAI gives them.
# Seen: SciPy's numbers where height and width are equal; else 36.67 for 5 and 48 for 36.06, without a word. The distance
#   transform writes each pixel's distance to the place row · height + column, where row · width + column is meant; the
#   distances of a wide picture land in other rows. (A tall one ends in an IndexError.) All examples of its pages are square,
#   and so are most patches; regions and thumbnails of slides are not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 scipy==1.17.1
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import torch
from scipy.spatial.distance import directed_hausdorff
from torchmetrics.segmentation import HausdorffDistance

PAIRS = {
    "pixels": (np.s_[10:11, 10:11], np.s_[13:14, 14:15]),
    "rectangles": (np.s_[10:20, 10:30], np.s_[12:40, 25:60]),
}
seen = []
for name, areas in PAIRS.items():
    for shape in ((80, 80), (60, 80)):
        masks = np.zeros((2, 1, *shape), np.int64)
        for mask, area in zip(masks, areas):
            mask[0][area] = 1
        points = [np.argwhere(mask[0]) for mask in masks]
        expected = max(directed_hausdorff(*points)[0], directed_hausdorff(*points[::-1])[0])
        metric = HausdorffDistance(num_classes=2, include_background=False, input_format="index")
        distance = float(metric(*map(torch.from_numpy, masks)))
        print(f"{name} in {shape[0]} x {shape[1]} px: {distance:.2f}, by SciPy {expected:.2f}")
        seen.append((round(distance, 2), round(expected, 2)))
assert seen == [(5.0, 5.0), (36.67, 5.0), (36.06, 36.06), (48.0, 36.06)]
PYTHON
