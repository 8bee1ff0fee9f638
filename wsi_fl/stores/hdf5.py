"""The one door to HDF5: files are created, and checked for format, version and checksums before they are opened."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import ClassVar, Self

import h5py

from wsi_fl.stores.checksums import DAMAGE, check_seal
from wsi_fl.stores.fields import check_format, first_line, too_large
from wsi_fl.system.bulk import ALIGNMENT
from wsi_fl.system.files import ordinary, reserve
from wsi_fl.types import WsiFlError

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


class StoreFile:
    """What readers of all stores have in common; a context manager.

    Attributes:
        path: of the file.
        format: that it must say.
        command: which makes such files.
        rows: the datasets whose rows have checksums of their own.

    Raises:
        WsiFlError: when the file is missing, damaged, of another format or version, or says that it holds
            more than fits into memory.
    """

    format: ClassVar[str]
    command: str = ""
    rows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not path.exists():
            raise WsiFlError(f"{path}: no such store; make it with `wsi-fl {self.command}`")
        try:
            self._file = opened(path)
        except OSError as error:
            raise WsiFlError(f"{path}: not a readable HDF5 file ({first_line(error)}); {self.mend}") from None
        try:
            check_format(self._file, self.format, path)
            self._load(self._file)
            check_seal(self._file, self.rows)
        except DAMAGE as error:
            self._file.close()
            raise WsiFlError(f"{path}: damaged ({first_line(error)}); {self.mend}") from None
        except MemoryError as error:
            self._file.close()
            raise WsiFlError(f"{path}: {too_large(error)}; {self.mend}") from None
        except BaseException:
            self._file.close()
            raise

    @property
    def site(self) -> str:
        """Return the name of the store's folder, which is that of its site."""
        return self.path.absolute().parent.name

    @property
    def mend(self) -> str:
        """Return what to do about damage."""
        return f"run `wsi-fl {self.command} --site {self.site}` again"

    def _load(self, file: h5py.File) -> None:
        """Read what is held in memory; an error of `DAMAGE` means that the file is damaged."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._file.close()
