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

from wsi_fl.stores.fields import DAMAGE, check_format, check_seal, first_line, memory_message, refuse_too_large
from wsi_fl.system.direct_io import ALIGNMENT
from wsi_fl.system.files import refuse_unavailable, require_regular_file, reserve_space
from wsi_fl.types import WsiFlError

SLIDE_BYTES = 1 << 14
"""Room for a slide's attributes, link and group."""
_ALIGNED_BYTES = 1 << 14
"""Least size of aligned datasets, for direct writes."""
_LAYOUT = ("v110", "v110")
"""The first version of HDF5 with checksums of all headers."""
_HEAP, _HEAP_HEAD, _OBJECT_HEAD = b"GCOL\x01\0\0\0", 16, 16
_HEAP_SEARCH_BYTES = 1 << 16
"""Bytes at the start of a file, with the heap of our own files."""
_HARMLESS_BYTES = 1 << 28
"""Bytes that any file may unpack to."""
_MAX_COMPRESSION = 100
"""Largest ratio of unpacked to stored bytes; data of slides stay far below."""
_GZIP, _SHUFFLE, _FLETCHER, _LZF = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, 3, h5py.h5z.FILTER_LZF
_GROWTH = {_GZIP: 1032, _LZF: 88}
"""Largest growth of a byte by filter (zlib's technical details; three bytes of LZF stand for 264)."""
_PIECE_BYTES = 1 << 20


def create_hdf5(path: Path, n_bytes: int) -> h5py.File:
    """Create an HDF5 file after reserving its disk space."""
    reserve_space(path, n_bytes + SLIDE_BYTES)
    path.unlink()  # of a file that it truncates, HDF5 may read the old size from the cache of a network disk
    return h5py.File(path, "w", libver=_LAYOUT, alignment_threshold=_ALIGNED_BYTES, alignment_interval=ALIGNMENT)


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file to read.

    Raises:
        WsiFlError: when it is a pipe, a socket or a device.
        OSError: when it is no HDF5 file, or the heap of its attributes' texts is damaged.
    """
    with require_regular_file(path).open("rb") as handle:
        _check_heaps(handle.read(_HEAP_SEARCH_BYTES))
    return h5py.File(path, "r")


def _check_heaps(data: bytes) -> None:
    # HDF5 reads a global heap with inconsistent sizes for ever, and has no checksum of it (HDF5 File Format
    # Specification 3.0, section III.E).
    start = data.find(_HEAP)
    while start >= 0:
        end = start + struct.unpack_from("<Q", data.ljust(start + _HEAP_HEAD, b"\0"), start + 8)[0]
        offset = start + _HEAP_HEAD
        while offset + _OBJECT_HEAD <= min(end, len(data)):
            index, size = struct.unpack_from("<H6xQ", data, offset)
            step = _OBJECT_HEAD + -(-size // 8) * 8 if index else size
            if not 0 < step <= end - offset:
                raise OSError("the heap of its text is damaged")
            offset += step
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
            raise WsiFlError(f"{path}: no such store; {self.make_advice}")
        try:
            self._file = open_hdf5(path)
        except OSError as error:
            refuse_unavailable(error, path)
            raise WsiFlError(f"{path}: not a readable HDF5 file ({first_line(error)}); {self.repair_advice}") from None
        with ExitStack() as stack:
            stack.callback(self._file.close)
            try:
                check_format(self._file, self.format, path)
                self._load(self._file)
                check_seal(self._file, self.rows)
            except DAMAGE as error:
                refuse_unavailable(error, path)
                raise WsiFlError(f"{path}: damaged ({first_line(error)}); {self.repair_advice}") from None
            except MemoryError as error:
                raise WsiFlError(f"{path}: {memory_message(error)}; {self.repair_advice}") from None
            stack.pop_all()

    @property
    def site(self) -> str:
        """Return the name of the site, that of the store's folder."""
        return self.path.absolute().parent.name

    @property
    def make_advice(self) -> str:
        """Return a hint at the command for a missing store."""
        return f"make it with `wsi-fl {self.command}`"

    @property
    def repair_advice(self) -> str:
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


def read_group(file: h5py.Group, name: str) -> h5py.Group:
    """Return a group of a file or group, without following links.

    Raises:
        WsiFlError: when there is none, or it is behind a link.
    """
    node = find_entry(file, name)
    if not isinstance(node, h5py.Group):
        raise WsiFlError(f"{Path(file.file.filename).name}: its {name!r} is no group")
    return node


def read_dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    """Return a dataset of numbers, safe to read in full; no other file is opened.

    Raises:
        WsiFlError: when there is none (lists existing names), it is in another file or behind a link, or it claims more
            than the file can hold.
        UsageError: when it does not fit into memory.
    """
    where, dataset = Path(file.file.filename).name, find_entry(file, name)
    if not isinstance(dataset, h5py.Dataset):
        raise WsiFlError(f"{where}: its {name!r} is no dataset")
    if dataset.external or dataset.is_virtual:
        raise WsiFlError(f"{where}: its {name!r} lies in other files; they are not read")
    if dataset.shape is None or dataset.dtype.kind not in "biuf":
        raise WsiFlError(f"{where}: its {name!r} holds no numbers")
    refuse_too_large(where, int(dataset.size) * dataset.dtype.itemsize)
    if reason := _describe_bomb(dataset, Path(file.file.filename).stat().st_size):
        raise WsiFlError(f"{where}: its {name!r} {reason}; it is damaged, or made to fill the memory")
    return dataset


def find_entry(file: h5py.Group, name: str) -> Any:
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


def has_entry(file: h5py.Group, name: str) -> bool:
    """Return whether a file has an entry of a name, without following links."""
    return bool(file.id.links.exists(name.encode()))


def is_overpacked(n_bytes: int, n_stored: int) -> bool:
    """Return whether unpacked and stored bytes indicate a decompression bomb."""
    return n_bytes > max(_HARMLESS_BYTES, _MAX_COMPRESSION * n_stored)


def _describe_bomb(dataset: h5py.Dataset, file_bytes: int) -> str:
    """Return why a dataset is unsafe to read; "" when it is safe."""
    n_stated, n_stored = (int(dataset.size) * dataset.dtype.itemsize, min(dataset.id.get_storage_size(), file_bytes))
    layout = dataset.id.get_create_plist()
    filters = [layout.get_filter(k)[0] for k in range(layout.get_nfilters())]
    packers = [code for code in filters if code != _FLETCHER]
    if not packers:
        return f"states {n_stated} bytes, of which the file holds {n_stored}" if n_stated > n_stored else ""
    if packers[0] == _SHUFFLE:
        packers = packers[1:]
    if len(packers) > 1 or any(code not in _GROWTH for code in packers):
        return "is packed by other filters than one gzip or lzf"
    chunk = prod(dataset.chunks) * dataset.dtype.itemsize
    n_chunks = prod(ceil(size / step) for size, step in zip(dataset.shape, dataset.chunks, strict=True))
    if dataset.id.get_num_chunks() != n_chunks or is_overpacked(n_chunks * chunk, n_stored):
        return f"states {n_stated} bytes, of which the file holds {n_stored} packed"
    return _describe_chunk_bomb(dataset, packers, chunk, file_bytes)


def _describe_chunk_bomb(dataset: h5py.Dataset, packers: list[int], chunk_bytes: int, file_bytes: int) -> str:
    """Return a line on a chunk larger than its shape when unpacked, since HDF5 unpacks without a check; "" for none."""
    chunks: list[tuple[tuple[int, ...], int]] = []
    dataset.id.chunk_iter(lambda chunk: chunks.append((chunk.chunk_offset, chunk.size)))
    growth = max((_GROWTH[code] for code in packers), default=1)
    for corner, size in chunks:
        if size * growth <= _HARMLESS_BYTES:
            continue
        if size > file_bytes or packers != [_GZIP]:
            return f"has a chunk of {size} bytes, which is too large"
        if _is_unpacked_larger(dataset.id.read_direct_chunk(corner)[1], chunk_bytes):
            return f"has a chunk that unpacks to more than its {chunk_bytes} bytes"
    return ""


def _is_unpacked_larger(packed: bytes, max_bytes: int) -> bool:
    """Return whether gzip data unpack to more bytes, piece by piece; False for other data, refused by HDF5."""
    packer, total, remainder = decompressobj(), 0, packed
    try:
        while remainder and not packer.eof and total <= max_bytes:
            total += len(packer.decompress(remainder, _PIECE_BYTES))
            remainder = packer.unconsumed_tail
        return total > max_bytes
    except ZlibError:
        return False
