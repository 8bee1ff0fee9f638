"""Create HDF5 files, and check them before the library opens them; no other module does."""

from __future__ import annotations

import struct
from pathlib import Path

import h5py

from wsi_fl.system.bulk import ALIGNMENT
from wsi_fl.system.files import ordinary, reserve

SLIDE_BYTES = 1 << 14
"""Room for a slide's attributes, link and group."""
_ALIGNED_BYTES = 1 << 14
"""Datasets of this size or more are aligned, so that they can be written directly."""
_LAYOUT = ("v110", "v110")
"""The first version of HDF5 that keeps a checksum of every header."""
_HEAP, _HEAP_HEAD, _OBJECT_HEAD = b"GCOL\x01\0\0\0", 16, 16
_LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file, where our own files have their heap."""


def created(path: Path, n_bytes: int) -> h5py.File:
    """Return a new HDF5 file on a disk that can hold it."""
    reserve(path, n_bytes + SLIDE_BYTES)
    return h5py.File(
        path, "w", libver=_LAYOUT, alignment_threshold=_ALIGNED_BYTES, alignment_interval=ALIGNMENT
    )


def opened(path: Path) -> h5py.File:
    """Return an HDF5 file to read.

    Raises:
        WsiFlError: when it is no file but a pipe, a socket or a device.
        OSError: when it is no HDF5 file, or the heap that holds the text of its attributes is damaged.
    """
    with ordinary(path).open("rb") as handle:
        _check_heaps(handle.read(_LOOKED_AT))
    return h5py.File(path, "r")


def _check_heaps(data: bytes) -> None:
    """Refuse a global heap whose objects do not follow one another: HDF5 would read it for ever.

    HDF5 keeps no checksum of a heap (HDF5 File Format Specification 3.0, section III.E).

    Raises:
        OSError: when a heap is damaged.
    """
    start = data.find(_HEAP)
    while start >= 0:
        end = start + struct.unpack_from("<Q", data.ljust(start + _HEAP_HEAD, b"\0"), start + 8)[0]
        at = start + _HEAP_HEAD
        while at + _OBJECT_HEAD <= min(end, len(data)):
            index, size = struct.unpack_from("<H6xQ", data, at)
            step = _OBJECT_HEAD + -(-size // 8) * 8 if index else size
            if not 0 < step <= end - at:
                raise OSError("the heap of its text is damaged")
            at += step
        start = data.find(_HEAP, start + 1)
