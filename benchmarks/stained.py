"""Images in patients, each of whom has a stain of its own.

    python benchmarks/stained.py IMAGES.npz STAINED.npz --patches 5

`x` and `y` of the file become `x_train` and `y_train`: every `--patches` images in a row are one patient of one class.
Haematoxylin and eosin are multiplied by a factor of the patient, 0.75 to 1.3, and by one of the patch, 0.95 to 1.05
(Tellez et al., 2018: "Whole-slide mitosis detection in H&E breast histology"). `x_test` is one patient more of each
class. `worth.py --patches 5` draws whole patients of such a pool.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skimage.color import hed2rgb, rgb2hed

OF_PATIENTS, OF_PATCHES = (0.75, 1.3), (0.95, 1.05)


def stained(x: NDArray[np.uint8], factors: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Images uint8[n, h, w, 3] with haematoxylin and eosin multiplied by factors float64[n, 2]."""
    found = np.empty_like(x)
    for image, factor, out in zip(x, factors, found, strict=True):
        hed = rgb2hed(image)
        hed[..., :2] *= factor
        out[:] = np.clip(np.rint(hed2rgb(hed) * 255), 0, 255)
    return found


def patients(label: NDArray[np.integer], patches: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rows int64[patients, patches] of one class each, no row twice."""
    blocks = []
    for one in np.unique(label):
        rows = rng.permutation(np.flatnonzero(label == one))
        blocks.append(rows[: len(rows) // patches * patches].reshape(-1, patches))
    return np.concatenate(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--patches", type=int, default=5, help="of a patient")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    with np.load(args.images) as file:
        x, y = file["x"], file["y"]
    rows = patients(y, args.patches, rng)
    factors = rng.uniform(*OF_PATIENTS, (len(rows), 1, 2)) * rng.uniform(*OF_PATCHES, (*rows.shape, 2))
    held_out = np.unique(y[rows[:, 0]], return_index=True)[1]
    kept = np.setdiff1d(np.arange(len(rows)), held_out)
    parts: dict[str, Any] = {}
    for name, part in (("train", kept), ("test", held_out)):
        flat = rows[part].ravel()
        parts |= {f"x_{name}": stained(x[flat], factors[part].reshape(-1, 2)), f"y_{name}": y[flat]}
    np.savez(args.out, **parts)


if __name__ == "__main__":
    main()
