"""Writers of OME-Zarr pictures."""

import numpy as np
import pytest
from builders import halves


def ome_zarr(version, axes="cyx", mpp=0.5, **attributes):
    """Return a writer of a picture into a folder as a.zarr, with a pyramid of three levels.

    Args:
        attributes: the NGFF metadata beside its multiscales.
    """

    def write(folder, picture):
        zarr = pytest.importorskip("zarr")
        path, datasets = folder / "a.zarr", []
        group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
        for k, level in enumerate(halves(picture)):
            data = np.moveaxis(level, [0, 1, 2], [axes.index(axis) for axis in "yxc"])
            chunks = tuple(3 if axis == "c" else 256 for axis in axes)
            array = group.create_array(str(k), shape=data.shape, chunks=chunks, dtype="uint8")
            array[...] = data
            scale = {"type": "scale", "scale": [1.0 if axis == "c" else mpp * 2**k for axis in axes]}
            datasets.append({"path": str(k), "coordinateTransformations": [scale]})
        space = {"type": "space", "unit": "micrometer"}
        units = [{"name": axis} | ({"type": "channel"} if axis == "c" else space) for axis in axes]
        said = {"multiscales": [{"version": version, "axes": units, "datasets": datasets}], **attributes}
        group.attrs.update(said if version == "0.4" else {"ome": {"version": version, **said}})
        return path

    return write
