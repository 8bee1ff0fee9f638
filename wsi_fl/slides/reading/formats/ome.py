"""Slides of the Open Microscopy Environment: OME-TIFF by tifffile, OME-Zarr by zarr."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.formats.source import Levels, Mpp, Source, digest, needed
from wsi_fl.types import WsiFlError

_UM = {
    "m": 1e6,
    "meter": 1e6,
    "cm": 1e4,
    "mm": 1e3,
    "millimeter": 1e3,
    "µm": 1.0,
    "um": 1.0,
    "micrometer": 1.0,
    "nm": 1e-3,
    "nanometer": 1e-3,
}


def of_ome_tiff(path: Path) -> Source:
    """OME-TIFF: the first series, with its pyramid in SubIFDs."""
    needed("imagecodecs", "formats", path)
    zarr = needed("zarr", "formats", path)
    from tifffile import TiffFile

    with ExitStack() as stack:
        tif = stack.enter_context(TiffFile(path))
        series = tif.series[0]
        arrays = [zarr.open(series.aszarr(level=k), mode="r") for k in range(len(series.levels))]
        close = stack.pop_all().close
    axes = series.axes.lower().replace("s", "c")
    return _of_arrays(
        arrays,
        axes,
        vendor="ome-tiff",
        mpp=_mpp_of_ome(tif.ome_metadata),
        quickhash=digest(path),
        close=close,
    )


def _mpp_of_ome(xml: str | None) -> Mpp:
    """µm per pixel, as the first image of OME-XML states it."""
    try:
        root = ElementTree.fromstring(xml or "")
    except ElementTree.ParseError:
        return None, None
    pixels = next((one for one in root.iter() if one.tag.endswith("}Pixels") or one.tag == "Pixels"), None)
    if pixels is None:
        return None, None

    def stated(axis: str) -> float | None:
        value, unit = pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm")
        return float(value) * _UM[unit] if value and unit in _UM else None

    return stated("X"), stated("Y")


def of_zarr(path: Path) -> Source:
    """OME-Zarr (NGFF 0.4 and 0.5): the first of its multiscale images."""
    zarr = needed("zarr", "formats", path)
    group = zarr.open_group(str(path), mode="r")
    attributes = dict(group.attrs)
    scales = attributes.get("ome", attributes).get("multiscales")
    if not scales:
        raise WsiFlError(f"{path.name}: a Zarr without multiscales; OME-Zarr 0.4 and 0.5 are read")
    image = scales[0]
    axes = "".join(axis["name"] for axis in image["axes"])
    arrays = [group[one["path"]] for one in image["datasets"]]
    steps = image["datasets"][0]["coordinateTransformations"][0]["scale"]
    units = {axis["name"]: _UM.get(axis.get("unit", "")) for axis in image["axes"]}

    def stated(axis: str) -> float | None:
        unit = units[axis]
        return float(steps[axes.index(axis)]) * unit if unit else None

    known = hashlib.sha256()
    for file in sorted(one for name in (".z*", "zarr.json") for one in path.rglob(name) if one.is_file()):
        known.update(file.relative_to(path).as_posix().encode() + file.read_bytes())
    return _of_arrays(
        arrays, axes, vendor="ome-zarr", mpp=(stated("x"), stated("y")), quickhash=known.hexdigest()
    )


def _of_arrays(
    arrays: Sequence[Any],
    axes: str,
    *,
    vendor: str,
    mpp: Mpp,
    quickhash: str,
    close: Callable[[], None] = lambda: None,
) -> Source:
    """A source of arrays that are sliced, as Zarr's: of their axes x, y and c all are read, of others the first."""
    if any(str(array.dtype) != "uint8" for array in arrays) or not {"x", "y", "c"} <= set(axes):
        raise WsiFlError(f"a slide has 8-bit colours; this has axes {axes} of {arrays[0].dtype}")
    if arrays[0].shape[axes.index("c")] < 3:
        raise WsiFlError(
            f"a slide has red, green and blue; this has {arrays[0].shape[axes.index('c')]} channels"
        )

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        cut = {"x": slice(at[0], at[0] + size[0]), "y": slice(at[1], at[1] + size[1]), "c": slice(0, 3)}
        found = np.asarray(arrays[level][tuple(cut.get(axis, 0) for axis in axes)])
        order = [axis for axis in axes if axis in cut]
        return np.moveaxis(found, [order.index(axis) for axis in "yxc"], [0, 1, 2])

    sizes = [(array.shape[axes.index("x")], array.shape[axes.index("y")]) for array in arrays]
    return Levels(sizes, read, vendor=vendor, mpp=mpp, quickhash=quickhash, close=close)
