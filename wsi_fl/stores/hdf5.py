"""Create HDF5 files; open them after checks of format, version and checksums.

Foreign files are read safely: links, virtual datasets and external storage can name any other file of the machine, and
gzip makes 8 GB of 8 MB.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from math import ceil, prod
from pathlib import Path
from typing import Any, ClassVar, Self
from zlib import decompressobj
from zlib import error as ZlibError

import h5py

from wsi_fl.stores.fields import DAMAGE, check_format, check_seal, first_line, refuse_too_large, too_large
from wsi_fl.system.bulk import ALIGNMENT
from wsi_fl.system.files import ordinary, refuse_unavailable, reserve
from wsi_fl.types import WsiFlError

SLIDE_BYTES = 1 << 14
"""Room for a slide's attributes, link and group."""
_ALIGNED_BYTES = 1 << 14
"""Least size of aligned datasets, for direct writes."""
_LAYOUT = ("v110", "v110")
"""The first version of HDF5 with checksums of all headers."""
_HEAP, _HEAP_HEAD, _OBJECT_HEAD = b"GCOL\x01\0\0\0", 16, 16
_LOOKED_AT = 1 << 16
"""Bytes at the start of a file, with the heap of our own files."""
_HARMLESS_BYTES = 1 << 28
"""Bytes that any file may unpack to."""
_MOST_PACKED = 100
"""Largest ratio of unpacked to stored bytes; data of slides stay far below."""
_GZIP, _SHUFFLE, _FLETCHER, _LZF = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, 3, h5py.h5z.FILTER_LZF
_GROWTH = {_GZIP: 1032, _LZF: 88}
"""Largest growth of a byte by filter (zlib's technical details; three bytes of LZF stand for 264)."""
_PIECE_BYTES = 1 << 20


def created(path: Path, n_bytes: int) -> h5py.File:
    """Create an HDF5 file after reserving its disk space."""
    reserve(path, n_bytes + SLIDE_BYTES)
    return h5py.File(
        path, "w", libver=_LAYOUT, alignment_threshold=_ALIGNED_BYTES, alignment_interval=ALIGNMENT
    )


def opened(path: Path) -> h5py.File:
    """Open an HDF5 file to read.

    Raises:
        WsiFlError: when it is a pipe, a socket or a device.
        OSError: when it is no HDF5 file, or the heap of its attributes' texts is damaged.
    """
    with ordinary(path).open("rb") as handle:
        _check_heaps(handle.read(_LOOKED_AT))
    return h5py.File(path, "r")


def _check_heaps(data: bytes) -> None:
    # HDF5 reads a global heap with inconsistent sizes for ever, and has no checksum of it (HDF5 File Format
    # Specification 3.0, section III.E).
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
    """Base class of readers of stores; a context manager.

    Attributes:
        path: of the file.
        format: its required format.
        command: the command that makes such files.
        rows: the datasets with row checksums.

    Raises:
        WsiFlError: when the file is missing, damaged, of another format or version, or claims more than fits into
            memory.
    """

    format: ClassVar[str]
    command: str = ""
    rows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not path.exists():
            raise WsiFlError(f"{path}: no such store; {self.making}")
        try:
            self._file = opened(path)
        except OSError as error:
            refuse_unavailable(error, path)
            raise WsiFlError(f"{path}: not a readable HDF5 file ({first_line(error)}); {self.mend}") from None
        with ExitStack() as stack:
            stack.callback(self._file.close)
            try:
                check_format(self._file, self.format, path)
                self._load(self._file)
                check_seal(self._file, self.rows)
            except DAMAGE as error:
                refuse_unavailable(error, path)
                raise WsiFlError(f"{path}: damaged ({first_line(error)}); {self.mend}") from None
            except MemoryError as error:
                raise WsiFlError(f"{path}: {too_large(error)}; {self.mend}") from None
            stack.pop_all()

    @property
    def site(self) -> str:
        """Return the name of the site, that of the store's folder."""
        return self.path.absolute().parent.name

    @property
    def making(self) -> str:
        """Return a hint at the command for a missing store."""
        return f"make it with `wsi-fl {self.command}`"

    @property
    def mend(self) -> str:
        """Return the remedy for damage."""
        return f"run `wsi-fl {self.command} --site {self.site}` again"

    def _load(self, file: h5py.File) -> None:
        """Read the columns into memory; an error of `DAMAGE` means a damaged file."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def own_group(file: h5py.Group, name: str) -> h5py.Group:
    """Return a group of a file or group, without following links.

    Raises:
        WsiFlError: when there is none, or it is behind a link.
    """
    found = entry_of(file, name)
    if not isinstance(found, h5py.Group):
        raise WsiFlError(f"{Path(file.file.filename).name}: its {name!r} is no group")
    return found


def own_dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    """Return a dataset of numbers, safe to read in full; no other file is opened.

    Raises:
        WsiFlError: when there is none (lists existing names), it is in another file or behind a link, or it claims more
            than the file can hold.
        UsageError: when it does not fit into memory.
    """
    where, found = Path(file.file.filename).name, entry_of(file, name)
    if not isinstance(found, h5py.Dataset):
        raise WsiFlError(f"{where}: its {name!r} is no dataset")
    if found.external or found.is_virtual:
        raise WsiFlError(f"{where}: its {name!r} lies in other files; they are not read")
    if found.shape is None or found.dtype.kind not in "biuf":
        raise WsiFlError(f"{where}: its {name!r} holds no numbers")
    refuse_too_large(where, int(found.size) * found.dtype.itemsize)
    if reason := _bomb(found, Path(file.file.filename).stat().st_size):
        raise WsiFlError(f"{where}: its {name!r} {reason}; it is damaged, or made to fill the memory")
    return found


def entry_of(file: h5py.Group, name: str) -> Any:
    """Return the entry of a file or group by name, without following links.

    Raises:
        WsiFlError: when there is none, or it is a link.
    """
    where, links = Path(file.file.filename).name, file.id.links
    if not links.exists(name.encode()):
        raise WsiFlError(f"{where}: has no {name!r}; it has {', '.join(file) or 'nothing'}")
    if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise WsiFlError(f"{where}: its {name!r} is a link, perhaps into another file; it is not followed")
    return file[name]


def is_own(file: h5py.Group, name: str) -> bool:
    """Return whether a file has an entry of a name, without following links."""
    return bool(file.id.links.exists(name.encode()))


def packs_too_much(n_bytes: int, held: int) -> bool:
    """Return whether unpacked and stored bytes indicate a decompression bomb."""
    return n_bytes > max(_HARMLESS_BYTES, _MOST_PACKED * held)


def _bomb(found: h5py.Dataset, file_bytes: int) -> str:
    """Return why a dataset is unsafe to read; "" when it is safe."""
    stated, held = int(found.size) * found.dtype.itemsize, min(found.id.get_storage_size(), file_bytes)
    layout = found.id.get_create_plist()
    filters = [layout.get_filter(k)[0] for k in range(layout.get_nfilters())]
    packers = [one for one in filters if one != _FLETCHER]
    if not packers:
        return f"states {stated} bytes, of which the file holds {held}" if stated > held else ""
    if packers[0] == _SHUFFLE:
        packers = packers[1:]
    if len(packers) > 1 or any(one not in _GROWTH for one in packers):
        return "is packed by other filters than one gzip or lzf"
    chunk = prod(found.chunks) * found.dtype.itemsize
    n_chunks = prod(ceil(size / step) for size, step in zip(found.shape, found.chunks, strict=True))
    if found.id.get_num_chunks() != n_chunks or packs_too_much(n_chunks * chunk, held):
        return f"states {stated} bytes, of which the file holds {held} packed"
    return _chunk_bomb(found, packers, chunk, file_bytes)


def _chunk_bomb(found: h5py.Dataset, packers: list[int], chunk_bytes: int, file_bytes: int) -> str:
    """Return a line on a chunk larger than its shape when unpacked, since HDF5 unpacks without a check; "" for none."""
    chunks: list[tuple[tuple[int, ...], int]] = []
    found.id.chunk_iter(lambda one: chunks.append((one.chunk_offset, one.size)))
    growth = max((_GROWTH[one] for one in packers), default=1)
    for corner, size in chunks:
        if size * growth <= _HARMLESS_BYTES:
            continue
        if size > file_bytes or packers != [_GZIP]:
            return f"has a chunk of {size} bytes, which is too large"
        if _unpacks_to_more(found.id.read_direct_chunk(corner)[1], chunk_bytes):
            return f"has a chunk that unpacks to more than its {chunk_bytes} bytes"
    return ""


def _unpacks_to_more(packed: bytes, most: int) -> bool:
    """Return whether gzip data unpack to more bytes, piece by piece; False for other data, refused by HDF5."""
    packer, total, rest = decompressobj(), 0, packed
    try:
        while rest and not packer.eof and total <= most:
            total += len(packer.decompress(rest, _PIECE_BYTES))
            rest = packer.unconsumed_tail
        return total > most
    except ZlibError:
        return False
