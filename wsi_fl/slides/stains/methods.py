"""The ways to put a laboratory's stain into a few numbers that a mean over patches gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.stains import macenko
from wsi_fl.slides.stains import reinhard as stain
from wsi_fl.slides.stains.macenko import Dyes
from wsi_fl.slides.stains.reinhard import Stain

AnyStain = Stain | Dyes


@dataclass(frozen=True)
class StainMethod:
    """One way.

    Attributes:
        space: what the numbers are about.
        n_numbers: how many a stain has.
        measured: patches uint8[n, h, w, 3] → float64[n, n_numbers], each row of one patch alone, zeros without tissue.
        stain_of: their mean → the stain, whose fields are what people read.
    """

    space: str
    n_numbers: int
    measured: Callable[[NDArray[np.uint8]], NDArray[np.float64]]
    stain_of: Callable[[NDArray[np.float64]], Any]


STAIN_METHODS = {
    "reinhard": StainMethod("CIELAB (D65)", stain.N_MOMENTS, stain.tissue_moments, stain.stain_of),
    "macenko": StainMethod("optical density", macenko.N_NUMBERS, macenko.patch_dyes, macenko.dyes_of),
}


def restained(pixels: NDArray[np.uint8], own: AnyStain, other: AnyStain) -> NDArray[np.uint8]:
    """Patches uint8[..., 3] as the laboratory of the other stain would show them; both stains are of one method."""
    if isinstance(own, Dyes):
        assert isinstance(other, Dyes)
        return macenko.redyed(pixels, own, other)
    assert isinstance(other, Stain)
    return stain.restained(pixels, own, other)
