"""Slides of the Open Microscopy Environment: OME-TIFF by tifffile, OME-Zarr by zarr."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.formats.source import Levels, Mpp, Source, digest, needed
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

_UM = {
    **dict.fromkeys(("m", "meter"), 1e6),
    "cm": 1e4,
    **dict.fromkeys(("mm", "millimeter"), 1e3),
    **dict.fromkeys(("µm", "um", "micrometer"), 1.0),
    **dict.fromkeys(("nm", "nanometer"), 1e-3),
}
_PRIMARIES = ("FF0000", "00FF00", "0000FF")


def of_ome_tiff(path: Path) -> Source:
    """OME-TIFF: the largest series, with its pyramid in SubIFDs."""
    from tifffile import COMPRESSION, PHOTOMETRIC, TiffFile

    with ExitStack() as stack:
        tif = stack.enter_context(TiffFile(path))
        series = _largest(tif)
        page = series.keyframe
        encoded = page.photometric == PHOTOMETRIC.YCBCR and page.compression != COMPRESSION.JPEG
        if encoded or not all(_is_rgb(level.keyframe) for level in series.levels):
            raise WsiFlError(
                f"{path.name}: a slide has red, green and blue of 8 bits in each pixel; this OME-TIFF has "
                f"{page.samplesperpixel} × {page.dtype} ({PHOTOMETRIC(page.photometric).name}), axes {series.axes}"
            )
        zarr = _zarr(path)
        arrays = [zarr.open(series.aszarr(level=k), mode="r") for k in range(len(series.levels))]
        return _of_arrays(
            arrays,
            series.axes.lower().replace("s", "c"),
            vendor="ome-tiff",
            mpp=mpp_of_ome(tif),
            quickhash=digest(path),
            close=stack.pop_all().close,
        )


def is_misread(path: Path, tif: TiffFile) -> bool:
    """Return whether a reader of the first directories alone, as OpenSlide, misreads an OME-TIFF.

    That is so where its slide is not the first picture or has no 8-bit colours, and where its pyramid is in SubIFDs.
    The latter is borne with where the extra that reads them is not installed.
    """
    series = _largest(tif)
    if series.keyframe.index != 0 or not _is_rgb(series.keyframe):
        return True
    try:
        return len(series.levels) > 1 and _zarr(path) is not None
    except UsageError:
        return False


def mpp_of_ome(tif: TiffFile) -> Mpp:
    """Return the µm per pixel that OME-XML states of the largest series."""
    page = _largest(tif).keyframe
    size = str(page.imagewidth), str(page.imagelength)
    try:
        root = ElementTree.fromstring(tif.ome_metadata or "")
    except ElementTree.ParseError:
        return None, None
    all_pixels = (one for one in root.iter() if one.tag.rpartition("}")[2] == "Pixels")
    pixels = next((one for one in all_pixels if (one.get("SizeX"), one.get("SizeY")) == size), None)
    if pixels is None:
        return None, None

    def stated(axis: str) -> float | None:
        value, unit = pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm")
        return float(value) * _UM[unit] if value and unit in _UM else None

    return stated("X"), stated("Y")


def _largest(tif: TiffFile) -> TiffPageSeries:
    """The series with the largest picture: others are macros and labels."""
    return max(tif.series, key=lambda one: one.keyframe.imagewidth * one.keyframe.imagelength)


def _is_rgb(page: TiffPage) -> bool:
    from tifffile import PHOTOMETRIC

    colours = page.photometric in {PHOTOMETRIC.RGB, PHOTOMETRIC.YCBCR}
    return colours and page.samplesperpixel == 3 and page.dtype == np.uint8


def _zarr(path: Path) -> Any:
    """Import Zarr, through which tiles are read, once the codecs of tiles are found too."""
    needed("imagecodecs", "formats", path)
    return needed("zarr", "formats", path)


def of_zarr(path: Path) -> Source:
    """OME-Zarr (NGFF 0.4 and 0.5): the first of its multiscale images, also where bioformats2raw put it."""
    group = needed("zarr", "formats", path).open_group(str(path), mode="r")
    said = _said(group)
    if "multiscales" not in said and "0" in group:
        group = group["0"]
        said = _said(group)
    if not said.get("multiscales"):
        raise WsiFlError(f"{path.name}: a Zarr without multiscales; OME-Zarr 0.4 and 0.5 are read")
    image = said["multiscales"][0]
    axes = "".join(axis["name"] for axis in image["axes"])
    arrays = [group[one["path"]] for one in image["datasets"]]
    _require_rgb(path, arrays, axes, said)
    known = hashlib.sha256()
    for file in sorted(one for name in (".z*", "zarr.json") for one in path.rglob(name) if one.is_file()):
        known.update(file.relative_to(path).as_posix().encode() + file.read_bytes())
    mpp = _mpp_of_ngff(image, axes)
    return _of_arrays(arrays, axes, vendor="ome-zarr", mpp=mpp, quickhash=known.hexdigest())


def _said(group: Any) -> Mapping[str, Any]:
    """What NGFF says of a group: NGFF 0.5 says it under a name of its own."""
    attributes = dict(group.attrs)
    found: Mapping[str, Any] = attributes.get("ome", attributes)
    return found


def _require_rgb(path: Path, arrays: Sequence[Any], axes: str, said: Mapping[str, Any]) -> None:
    """Refuse what is not three channels of 8 bits, or has channels that are said to be other colours."""
    shape = arrays[0].shape
    channels = shape[axes.index("c")] if {"x", "y", "c"} <= set(axes) and len(axes) == len(shape) else 0
    if channels != 3 or any(str(array.dtype) != "uint8" for array in arrays):
        raise WsiFlError(
            f"{path.name}: a slide has three channels of 8-bit colours; this Zarr has axes {axes}, shape {shape} "
            f"and {arrays[0].dtype}"
        )
    channels_said = said.get("omero", {}).get("channels", [])
    colours = [str(one.get("color") or "").lstrip("#").upper() for one in channels_said]
    if any(colour and colour != own for colour, own in zip(colours, _PRIMARIES, strict=False)):
        raise WsiFlError(
            f"{path.name}: a slide has red, green and blue; the channels of this Zarr are {', '.join(colours)}"
        )


def _mpp_of_ngff(image: Mapping[str, Any], axes: str) -> Mpp:
    """µm per pixel of the first dataset: its own scale times that of all datasets."""
    own, of_all = image["datasets"][0], image.get("coordinateTransformations", [])
    every = (*own["coordinateTransformations"], *of_all)
    scales = [one["scale"] for one in every if one["type"] == "scale"]
    units = {axis["name"]: _UM.get(axis.get("unit", "")) for axis in image["axes"]}

    def stated(axis: str) -> float | None:
        unit = units[axis]
        return unit * float(np.prod([scale[axes.index(axis)] for scale in scales])) if unit else None

    return stated("x"), stated("y")


def _of_arrays(arrays: Sequence[Any], axes: str, **said: Any) -> Source:
    """A source of arrays that are sliced, as Zarr's: of their axes x, y and c all are read, of others the first."""

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        cut = {"x": slice(at[0], at[0] + size[0]), "y": slice(at[1], at[1] + size[1]), "c": slice(0, 3)}
        found = np.asarray(arrays[level][tuple(cut.get(axis, 0) for axis in axes)])
        order = [axis for axis in axes if axis in cut]
        return np.moveaxis(found, [order.index(axis) for axis in "yxc"], [0, 1, 2])

    sizes = [(array.shape[axes.index("x")], array.shape[axes.index("y")]) for array in arrays]
    return Levels(sizes, read, **said)
