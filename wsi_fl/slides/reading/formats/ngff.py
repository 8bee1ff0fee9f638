"""OME-Zarr (NGFF 0.4 to 0.6), read by zarr."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wsi_fl.slides.reading.formats.ome import find_unit_um
from wsi_fl.slides.reading.formats.source import (
    Mpp,
    PixelSource,
    Rgb,
    build_array_levels,
    import_extra,
    is_red_green_blue,
)
from wsi_fl.types import WsiFlError

_MAX_CHUNKS, _HEAD_BYTES = 16, 1 << 16
"""Chunks in the digest of a slide, and bytes of each."""
_READABLE_VERSIONS = "OME-Zarr 0.4 to 0.6 are read"


class _MultiscaleImage(NamedTuple):
    """One multiscale image: its arrays, the largest first, the letters of their axes, and NGFF's metadata of it and of
    its group.
    """

    arrays: Sequence[Any]
    axes: str
    multiscale: Mapping[str, Any]
    group: Mapping[str, Any]

    @property
    def n_pixels(self) -> int:
        """The number of pixels of its largest array."""
        sides = zip(self.axes, self.arrays[0].shape, strict=False)
        return int(np.prod([side for axis, side in sides if axis in "xy"], dtype=np.int64))


def open_zarr(path: Path) -> PixelSource:
    """Open the largest multiscale image of an OME-Zarr, which may have several (bioformats2raw)."""
    root = import_extra("zarr", "formats", path).open(str(path), mode="r")
    if not hasattr(root, "group_keys"):
        raise WsiFlError(f"{path.name}: a Zarr array alone; {_READABLE_VERSIONS}, which are groups with multiscales")
    images = list(_iterate_images(path, root)) or [
        image for name in _list_series(root) for image in _iterate_images(path, root[name])
    ]
    if not images:
        raise WsiFlError(f"{path.name}: a Zarr without multiscales; {_READABLE_VERSIONS}")
    image = max(images, key=lambda candidate: candidate.n_pixels)
    _require_rgb(path, image)
    return build_array_levels(
        image.arrays,
        image.axes,
        vendor="ome-zarr",
        mpp=_read_mpp(image),
        quickhash=_digest_zarr(path, image),
        fill=_fill_color(image.arrays[0]),
    )


def _digest_zarr(path: Path, image: _MultiscaleImage) -> str:
    """Return the SHA-256 of the Zarr's metadata and of the first bytes of some chunks of the coarsest level."""
    digest = hashlib.sha256()
    metadata_files = {entry for name in (".z*", "zarr.json") for entry in path.rglob(name) if entry.is_file()}
    coarsest = path / str(image.arrays[-1].path)
    chunks = sorted(entry for entry in coarsest.rglob("*") if entry.is_file() and entry not in metadata_files)
    samples = {chunks[k] for k in np.linspace(0, len(chunks) - 1, _MAX_CHUNKS).astype(int)} if chunks else set()
    for file in sorted(metadata_files | samples):
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES if file in samples else -1)
        digest.update(file.relative_to(path).as_posix().encode() + head)
    return digest.hexdigest()


def _read_metadata(group: Any) -> Mapping[str, Any]:
    """Return the NGFF metadata of a group; since NGFF 0.5 they are under the key `ome`."""
    attributes = dict(group.attrs)
    metadata: Mapping[str, Any] = attributes.get("ome", attributes)
    return metadata


def _iterate_images(path: Path, group: Any) -> Iterator[_MultiscaleImage]:
    """Yield the multiscale images of a group, without labels."""
    metadata = _read_metadata(group)
    if "image-label" in metadata:
        return
    for multiscale in metadata.get("multiscales") or ():
        axis_list = _read_axes(path, multiscale, metadata)
        axes = "".join(map(_axis_letter, axis_list))
        pairs = [(group[dataset["path"]], dataset) for dataset in multiscale["datasets"]]
        pairs.sort(key=lambda pair: -int(np.prod(pair[0].shape, dtype=np.int64)))
        ordered = {**multiscale, "axes": axis_list, "datasets": [dataset for _, dataset in pairs]}
        yield _MultiscaleImage([array for array, _ in pairs], axes, ordered, metadata)


def _read_axes(path: Path, multiscale: Mapping[str, Any], group: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the axes of a multiscale image; since NGFF 0.6 they are those of its datasets' coordinate system."""
    axes = multiscale.get("axes")
    if systems := multiscale.get("coordinateSystems"):
        output = multiscale["datasets"][0]["coordinateTransformations"][0].get("output")
        name = output.get("name") if isinstance(output, Mapping) else output
        axes = next((system for system in systems if system["name"] == name), systems[0])["axes"]
    if not axes or not all(isinstance(axis, Mapping) for axis in axes):
        version = multiscale.get("version") or group.get("version") or "0.3 or older"
        raise WsiFlError(
            f"{path.name}: this is OME-Zarr {version}; {_READABLE_VERSIONS}, so write it anew by a later version"
        )
    return list(axes)


def _axis_letter(axis: Mapping[str, Any]) -> str:
    """Return the letter of an axis: c of channels, whose name is free (large_image calls them s), else its name."""
    if axis.get("type") == "channel":
        return "c"
    return axis["name"] if len(axis["name"]) == 1 else "?"


def _list_series(root: Any) -> list[str]:
    """Return the names of the groups of images: those in the list of the OME group, else all numbers."""
    series = _read_metadata(root["OME"]).get("series") if "OME" in root else None
    names = series or sorted((name for name in root.group_keys() if name.isdecimal()), key=int)
    return [str(name) for name in names if str(name) in root]


def _require_rgb(path: Path, image: _MultiscaleImage) -> None:
    """Refuse other pixels than three channels of 8 bits, and channels labelled as other colours."""
    axes, shape = image.axes, image.arrays[0].shape
    channels = shape[axes.index("c")] if {"x", "y", "c"} <= set(axes) and len(axes) == len(shape) else 0
    if channels != 3 or any(str(array.dtype) != "uint8" for array in image.arrays):
        raise WsiFlError(
            f"{path.name}: a slide has three channels of 8-bit colours; this Zarr has axes {axes}, shape {shape} "
            f"and {image.arrays[0].dtype}"
        )
    channel_list = (image.group.get("omero") or {}).get("channels") or []
    colors = [str(channel.get("color") or "").lstrip("#").upper() for channel in channel_list]
    names = [str(channel.get("label") or "") for channel in channel_list]
    if not is_red_green_blue(names, colors):
        channel_names = ", ".join(" ".join(filter(None, pair)) for pair in zip(names, colors, strict=True))
        raise WsiFlError(f"{path.name}: a slide has red, green and blue; the channels of this Zarr are {channel_names}")


def _fill_color(array: Any) -> Rgb | None:
    """Return the colour of unwritten chunks."""
    return None if array.fill_value is None else (int(array.fill_value),) * 3


def _read_mpp(image: _MultiscaleImage) -> Mpp:
    """Return the µm per pixel of the largest dataset: its scale times that of all datasets."""
    first, common = image.multiscale["datasets"][0], image.multiscale.get("coordinateTransformations") or ()
    # since 0.6 these lead into other coordinate systems
    shared = () if "coordinateSystems" in image.multiscale else common
    scales = list(_iterate_scales((*(first.get("coordinateTransformations") or ()), *shared)))
    units = {axis["name"]: find_unit_um(axis.get("unit")) for axis in image.multiscale["axes"]}

    def axis_mpp(axis: str) -> float | None:
        unit = units[axis]
        if unit is None or not scales:
            return None
        return unit * float(np.prod([scale[image.axes.index(axis)] for scale in scales]))

    return axis_mpp("x"), axis_mpp("y")


def _iterate_scales(transformations: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[float]]:
    """Yield the scales among transformations and their sequences."""
    for transformation in transformations:
        if transformation["type"] == "sequence":
            yield from _iterate_scales(transformation["transformations"])
        elif transformation["type"] == "scale":
            yield transformation["scale"]
