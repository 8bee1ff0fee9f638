"""Read datasets of foreign HDF5 files safely: no links to other files, and no decompression bombs.

Links, virtual datasets and external storage can name any other file of the machine; gzip makes 8 GB of 8 MB.
"""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any
from zlib import decompressobj
from zlib import error as ZlibError

import h5py

from wsi_fl.stores.fields import refuse_too_large
from wsi_fl.types import WsiFlError

_HARMLESS_BYTES = 1 << 28
"""What may be taken whatever a file holds."""
_MOST_PACKED = 100
"""Numbers of slides never take less than a hundredth of their bytes."""
_GZIP, _SHUFFLE, _FLETCHER, _LZF = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, 3, h5py.h5z.FILTER_LZF
_GROWTH = {_GZIP: 1032, _LZF: 88}
"""Bytes that a byte can become (zlib's technical details; three bytes of LZF stand for 264)."""
_PIECE_BYTES = 1 << 20


def own_group(file: h5py.Group, name: str) -> h5py.Group:
    """Return a group of a file or group, without following links.

    Raises:
        WsiFlError: when there is none, or it lies behind a link.
    """
    found = _own(file, name)
    if not isinstance(found, h5py.Group):
        raise WsiFlError(f"{Path(file.file.filename).name}: its {name!r} is no group")
    return found


def own_dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    """Return a dataset of numbers that may be read whole; nothing but the file itself is opened on the way.

    Raises:
        WsiFlError: when there is none, naming what there is; when it lies in another file or behind a link; when it
            states more than the file can hold.
        UsageError: when it is more than fits into memory.
    """
    where, found = Path(file.file.filename).name, _own(file, name)
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


def _own(file: h5py.Group, name: str) -> Any:
    """Return what a file or group has of a name, which has no slash.

    Raises:
        WsiFlError: when there is none, or it lies behind a link.
    """
    where, links = Path(file.file.filename).name, file.id.links
    if not links.exists(name.encode()):
        raise WsiFlError(f"{where}: has no {name!r}; it has {', '.join(file) or 'nothing'}")
    if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise WsiFlError(f"{where}: its {name!r} is a link, perhaps into another file; it is not followed")
    return file[name]


def is_own(file: h5py.Group, name: str) -> bool:
    """Tell whether a file has anything of a name, without following links."""
    return bool(file.id.links.exists(name.encode()))


def packs_too_much(n_bytes: int, held: int) -> bool:
    """Return whether so many bytes in so few on disk are a decompression bomb."""
    return n_bytes > max(_HARMLESS_BYTES, _MOST_PACKED * held)


def _bomb(found: h5py.Dataset, file_bytes: int) -> str:
    """Say why a dataset may not be read; "" where it may."""
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
    """Say which chunk unpacks to more than the chunks' shape allows, since HDF5 unpacks all of it without a check."""
    large: list[tuple[tuple[int, ...], int]] = []
    growth = max((_GROWTH[one] for one in packers), default=1)
    found.id.chunk_iter(
        lambda one: (
            large.append((one.chunk_offset, one.size)) if one.size * growth > _HARMLESS_BYTES else None
        )
    )
    for corner, size in large:
        if size > file_bytes or packers != [_GZIP]:
            return f"has a chunk of {size} bytes, which is too large"
        if _unpacks_to_more(found.id.read_direct_chunk(corner)[1], chunk_bytes):
            return f"has a chunk that unpacks to more than its {chunk_bytes} bytes"
    return ""


def _unpacks_to_more(packed: bytes, most: int) -> bool:
    """Return whether gzip data unpack to more bytes, piece by piece; False for what is no gzip, which HDF5 refuses."""
    packer, total, rest = decompressobj(), 0, packed
    try:
        while rest and not packer.eof and total <= most:
            total += len(packer.decompress(rest, _PIECE_BYTES))
            rest = packer.unconsumed_tail
        return total > most
    except ZlibError:
        return False
