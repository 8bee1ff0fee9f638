"""Writers of OME-Zarr pictures."""

import numpy as np
import pytest
from builders import halves


def write_zarr(path, levels, version="0.5", axes="yxc", *, mpp=0.5, chunk=256, fill=0, **attributes):
    """Write a pyramid of pictures [h, w, c] as an OME-Zarr, with NGFF metadata beside its multiscales."""
    zarr, datasets = pytest.importorskip("zarr"), []
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    for k, level in enumerate(levels):
        data = np.moveaxis(level, [0, 1, 2], [axes.index(axis) for axis in "yxc"])
        chunks = tuple(3 if axis == "c" else chunk for axis in axes)
        how = {"chunks": chunks, "dtype": "uint8", "fill_value": fill}
        group.create_array(str(k), shape=data.shape, **how)[...] = data
        scale = [1.0 if axis == "c" else mpp * levels[0].shape[0] / level.shape[0] for axis in axes]
        datasets.append({"path": str(k), "coordinateTransformations": [{"type": "scale", "scale": scale}]})
    space = {"type": "space", "unit": "micrometer"}
    units = [{"name": axis} | ({"type": "channel"} if axis == "c" else space) for axis in axes]
    said = {"multiscales": [{"version": version, "axes": units, "datasets": datasets}], **attributes}
    group.attrs.update(said if version == "0.4" else {"ome": {"version": version, **said}})
    return path


def ome_zarr(version, axes="cyx", **more):
    """Return a writer of a picture into a folder as a.zarr, with a pyramid of three levels."""
    return lambda folder, picture: write_zarr(folder / "a.zarr", halves(picture), version, axes, **more)
