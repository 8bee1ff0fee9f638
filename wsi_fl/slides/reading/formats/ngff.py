"""OME-Zarr (NGFF 0.4 to 0.6), read by zarr."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wsi_fl.slides.reading.formats.ome import um_of
from wsi_fl.slides.reading.formats.source import (
    Mpp,
    Rgb,
    Source,
    are_red_green_blue,
    levels_of_arrays,
    needed,
)
from wsi_fl.types import WsiFlError

_CHUNKS, _HEAD = 16, 1 << 16
"""Chunks in the digest of a slide, and bytes of each."""
_READ = "OME-Zarr 0.4 to 0.6 are read"


class _Image(NamedTuple):
    """One multiscale image: its arrays, the largest first, the letters of their axes, and NGFF's metadata of it and of
    its group.
    """

    arrays: Sequence[Any]
    axes: str
    multiscale: Mapping[str, Any]
    group: Mapping[str, Any]

    @property
    def area(self) -> int:
        """The number of pixels of its largest array."""
        sides = zip(self.axes, self.arrays[0].shape, strict=False)
        return int(np.prod([side for axis, side in sides if axis in "xy"], dtype=np.int64))


def of_zarr(path: Path) -> Source:
    """Open the largest multiscale image of an OME-Zarr, which may have several (bioformats2raw)."""
    root = needed("zarr", "formats", path).open(str(path), mode="r")
    if not hasattr(root, "group_keys"):
        raise WsiFlError(f"{path.name}: a Zarr array alone; {_READ}, which are groups with multiscales")
    images = list(_images(path, root)) or [
        image for name in _series(root) for image in _images(path, root[name])
    ]
    if not images:
        raise WsiFlError(f"{path.name}: a Zarr without multiscales; {_READ}")
    image = max(images, key=lambda each: each.area)
    _require_rgb(path, image)
    return levels_of_arrays(
        image.arrays,
        image.axes,
        vendor="ome-zarr",
        mpp=_mpp(image),
        quickhash=_digest(path, image),
        fill=_fill(image.arrays[0]),
    )


def _digest(path: Path, image: _Image) -> str:
    """Return the SHA-256 of the Zarr's metadata and of the first bytes of some chunks of the coarsest level."""
    digest = hashlib.sha256()
    stated = {each for name in (".z*", "zarr.json") for each in path.rglob(name) if each.is_file()}
    coarsest = path / str(image.arrays[-1].path)
    chunks = sorted(each for each in coarsest.rglob("*") if each.is_file() and each not in stated)
    samples = {chunks[k] for k in np.linspace(0, len(chunks) - 1, _CHUNKS).astype(int)} if chunks else set()
    for file in sorted(stated | samples):
        with file.open("rb") as opened:
            head = opened.read(_HEAD if file in samples else -1)
        digest.update(file.relative_to(path).as_posix().encode() + head)
    return digest.hexdigest()


def _ngff(group: Any) -> Mapping[str, Any]:
    """Return the NGFF metadata of a group; since NGFF 0.5 they are under the key `ome`."""
    attributes = dict(group.attrs)
    stated: Mapping[str, Any] = attributes.get("ome", attributes)
    return stated


def _images(path: Path, group: Any) -> Iterator[_Image]:
    """Yield the multiscale images of a group, without labels."""
    stated = _ngff(group)
    if "image-label" in stated:
        return
    for multiscale in stated.get("multiscales") or ():
        axes_stated = _axes(path, multiscale, stated)
        axes = "".join(axis["name"] for axis in axes_stated)
        pairs = [(group[dataset["path"]], dataset) for dataset in multiscale["datasets"]]
        pairs.sort(key=lambda pair: -int(np.prod(pair[0].shape, dtype=np.int64)))
        ordered = {**multiscale, "axes": axes_stated, "datasets": [dataset for _, dataset in pairs]}
        yield _Image([array for array, _ in pairs], axes, ordered, stated)


def _axes(path: Path, multiscale: Mapping[str, Any], group: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the axes of a multiscale image; since NGFF 0.6 they are those of its datasets' coordinate system.

    Raises:
        WsiFlError: for versions with other axes.
    """
    axes = multiscale.get("axes")
    if systems := multiscale.get("coordinateSystems"):
        output = multiscale["datasets"][0]["coordinateTransformations"][0].get("output")
        name = output.get("name") if isinstance(output, Mapping) else output
        axes = next((each for each in systems if each["name"] == name), systems[0])["axes"]
    if not axes or not all(isinstance(axis, Mapping) for axis in axes):
        version = multiscale.get("version") or group.get("version") or "0.3 or older"
        raise WsiFlError(
            f"{path.name}: this is OME-Zarr {version}; {_READ}, so write it anew by a later version"
        )
    return list(axes)


def _series(root: Any) -> list[str]:
    """Return the names of the groups of images: those in the list of the OME group, else all numbers."""
    listed = _ngff(root["OME"]).get("series") if "OME" in root else None
    names = listed or sorted((name for name in root.group_keys() if name.isdecimal()), key=int)
    return [str(name) for name in names if str(name) in root]


def _require_rgb(path: Path, image: _Image) -> None:
    """Refuse other pixels than three channels of 8 bits, and channels labelled as other colours."""
    axes, shape = image.axes, image.arrays[0].shape
    channels = shape[axes.index("c")] if {"x", "y", "c"} <= set(axes) and len(axes) == len(shape) else 0
    if channels != 3 or any(str(array.dtype) != "uint8" for array in image.arrays):
        raise WsiFlError(
            f"{path.name}: a slide has three channels of 8-bit colours; this Zarr has axes {axes}, shape {shape} "
            f"and {image.arrays[0].dtype}"
        )
    channels_stated = (image.group.get("omero") or {}).get("channels") or []
    colours = [str(each.get("color") or "").lstrip("#").upper() for each in channels_stated]
    names = [str(each.get("label") or "") for each in channels_stated]
    if not are_red_green_blue(names, colours):
        stated = ", ".join(" ".join(filter(None, pair)) for pair in zip(names, colours, strict=True))
        raise WsiFlError(
            f"{path.name}: a slide has red, green and blue; the channels of this Zarr are {stated}"
        )


def _fill(array: Any) -> Rgb | None:
    """Return the colour of unwritten chunks."""
    return None if array.fill_value is None else (int(array.fill_value),) * 3


def _mpp(image: _Image) -> Mpp:
    """Return the µm per pixel of the largest dataset: its scale times that of all datasets."""
    first, of_all = image.multiscale["datasets"][0], image.multiscale.get("coordinateTransformations") or ()
    # since 0.6 these lead into other coordinate systems
    later = () if "coordinateSystems" in image.multiscale else of_all
    scales = list(_scales((*(first.get("coordinateTransformations") or ()), *later)))
    units = {axis["name"]: um_of(axis.get("unit")) for axis in image.multiscale["axes"]}

    def stated(axis: str) -> float | None:
        unit = units[axis]
        if unit is None or not scales:
            return None
        return unit * float(np.prod([scale[image.axes.index(axis)] for scale in scales]))

    return stated("x"), stated("y")


def _scales(transformations: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[float]]:
    """Yield the scales among transformations and their sequences."""
    for each in transformations:
        if each["type"] == "sequence":
            yield from _scales(each["transformations"])
        elif each["type"] == "scale":
            yield each["scale"]
