"""What a slide says of itself, in OpenSlide's properties: µm per pixel and background."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from wsi_fl.types import WsiFlError

_PLAUSIBLE_MPP = (0.05, 20.0)
_MAX_ANISOTROPY = 0.05
_UNIT_UM = {"centimeter": 1e4, "inch": 25_400.0}


def stated_mpp(properties: Mapping[str, str], name: str) -> float:
    """Return the µm per level-0 pixel of the slide with a name: OpenSlide's, else that of the TIFF resolution tags.

    Values outside 0.05 to 20 count as missing (a default of 72 dpi reads as 353 µm).

    Raises:
        WsiFlError: when it is missing, or differs between x and y by more than 5 %.
    """
    x, y = (_plausible_mpp(properties, axis) for axis in "xy")
    x, y = x or y, y or x
    if x is None or y is None:
        value = _number(properties, "openslide.mpp-x")
        low, high = _PLAUSIBLE_MPP
        said = "" if value is None else f" plausibly ({value:g}, not within {low:g} to {high:g})"
        raise WsiFlError(
            f"{name}: the slide does not say its µm per pixel{said}; "
            f"give it in the column mpp of the site's table, or for all its slides with mpp_override = 0.5 in "
            f"sites/<site>.toml"
        )
    if abs(x - y) > _MAX_ANISOTROPY * max(x, y):
        raise WsiFlError(
            f"{name}: pixels are not square ({x:g} by {y:g} µm); "
            f"if that is wrong, give mpp_override = {x:g} in sites/<site>.toml"
        )
    return (x + y) / 2


def background(properties: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the slide's background colour, white where it names none."""
    try:
        red, green, blue = bytes.fromhex(properties.get("openslide.background-color", "FFFFFF"))
    except ValueError:
        return 255, 255, 255
    return red, green, blue


def _plausible_mpp(properties: Mapping[str, str], axis: str) -> float | None:
    per_unit = _number(properties, f"tiff.{axis.upper()}Resolution")
    unit_um = _UNIT_UM.get(properties.get("tiff.ResolutionUnit", "").lower())
    from_tags = unit_um / per_unit if unit_um and per_unit else None
    low, high = _PLAUSIBLE_MPP
    candidates = (_number(properties, f"openslide.mpp-{axis}"), from_tags)
    return next((v for v in candidates if v is not None and low <= v <= high), None)


def _number(properties: Mapping[str, str], key: str) -> float | None:
    """A property as a finite number; None when it is absent or something else."""
    try:
        value = float(properties[key])
    except (KeyError, ValueError):
        return None
    return value if isfinite(value) else None
