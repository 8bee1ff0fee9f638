"""What a slide's properties say, as OpenSlide names them: resolution, scanned area, background."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from wsi_fl.types import WsiFlError

_PLAUSIBLE_MPP = (0.05, 20.0)
"""Values outside count as missing: a default of 72 dpi reads as 353 µm."""
_MAX_ANISOTROPY = 0.05
_UNIT_UM = {"centimeter": 1e4, "inch": 25_400.0}


def read_mpp(properties: Mapping[str, str], name: str) -> float:
    """Return the µm per level-0 pixel of a slide: OpenSlide's, else that of the TIFF resolution tags."""
    low, high = _PLAUSIBLE_MPP

    def axis_mpp(axis: str) -> float | None:
        per_unit = _read_number(properties, f"tiff.{axis.upper()}Resolution")
        unit_um = _UNIT_UM.get(properties.get("tiff.ResolutionUnit", "").lower())
        from_tags = unit_um / per_unit if unit_um and per_unit else None
        candidates = (_read_number(properties, f"openslide.mpp-{axis}"), from_tags)
        return next((v for v in candidates if v is not None and low <= v <= high), None)

    x, y = axis_mpp("x"), axis_mpp("y")
    x, y = x or y, y or x
    if x is None or y is None:
        value = _read_number(properties, "openslide.mpp-x")
        hint = "" if value is None else f" plausibly ({value:g}, not within {low:g} to {high:g})"
        raise WsiFlError(
            f"{name}: the slide does not state its µm per pixel{hint}; give it in the column mpp of the site's table, "
            "or for all its slides with mpp_override = 0.5 in sites/<site>.toml"
        )
    if abs(x - y) > _MAX_ANISOTROPY * max(x, y):
        raise WsiFlError(
            f"{name}: pixels are not square ({x:g} by {y:g} µm); "
            f"if that is wrong, give mpp_override = {x:g} in sites/<site>.toml"
        )
    return (x + y) / 2


def read_bounds(properties: Mapping[str, str], size_l0: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the scanned area in level-0 pixels: the whole slide where none is stated."""
    keys = (f"openslide.bounds-{key}" for key in ("x", "y", "width", "height"))
    values = [_read_number(properties, key) for key in keys]
    x_min, y_min, width, height = (-1 if value is None else int(value) for value in values)
    x_max, y_max = min(x_min + width, size_l0[0]), min(y_min + height, size_l0[1])
    is_valid = 0 <= x_min < x_max and 0 <= y_min < y_max and min(width, height) > 0
    return (x_min, y_min, x_max, y_max) if is_valid else (0, 0, *size_l0)


def _read_number(properties: Mapping[str, str], key: str) -> float | None:
    try:
        value = float(properties[key])
    except (KeyError, ValueError):
        return None
    return value if isfinite(value) else None


def read_background(properties: Mapping[str, str]) -> tuple[int, int, int]:
    try:
        red, green, blue = bytes.fromhex(properties.get("openslide.background-color", "FFFFFF"))
    except ValueError:
        return 255, 255, 255
    return red, green, blue
