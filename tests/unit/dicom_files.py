"""DICOM slides of a few kB, written element by element."""

import struct
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

_VOLUME = "ORIGINAL\\PRIMARY\\VOLUME\\NONE"
EXPLICIT, DEFLATED = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1.99"
_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"
_FORM = {"US": "<H", "UL": "<I"}
_LONG = {"OB", "SQ"}


def element(tag, kind, value):
    """One element of explicit VR little endian."""
    if isinstance(value, str):
        value = value.encode()
        value += (b"\0" if kind == "UI" else b" ") * (len(value) % 2)
    elif kind in _FORM:
        value = struct.pack(_FORM[kind], value)
    size = struct.pack("<HI", 0, len(value)) if kind in _LONG else struct.pack("<H", len(value))
    return struct.pack("<HH", tag >> 16, tag & 0xFFFF) + kind.encode() + size + value


def sequence(tag, *items):
    """Return a sequence of items, each a series of elements; items have undefined lengths, as in some files."""
    whole = b"".join(
        struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF) + item + struct.pack("<HHI", 0xFFFE, 0xE00D, 0)
        for item in items
    )
    head = struct.pack("<HH2sHI", tag >> 16, tag & 0xFFFF, b"SQ", 0, 0xFFFFFFFF)
    return head + whole + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)


def encapsulate(frames, table="none", n_fragments=1):
    """The pixel data of packed frames, with a basic or an extended table of offsets or none, in fragments."""
    even = [frame + b"\0" * (len(frame) % 2) for frame in frames]
    cuts = [[len(frame) * k // n_fragments // 2 * 2 for k in range(n_fragments + 1)] for frame in even]
    packed = [
        b"".join(struct.pack("<HHI", 0xFFFE, 0xE000, end - start) + frame[start:end] for start, end in pairwise(at))
        for frame, at in zip(even, cuts, strict=True)
    ]
    starts = [sum(map(len, packed[:k])) for k in range(len(packed))]
    basic = struct.pack(f"<{len(starts)}I", *starts) if table == "basic" else b""
    head = struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF)
    if table == "extended":
        tables = [(1, starts), (2, [len(frame) for frame in even])]
        contents = [(number, struct.pack(f"<{len(values)}Q", *values)) for number, values in tables]
        elements = [struct.pack("<HH2sHI", 0x7FE0, n, b"OV", 0, len(content)) + content for n, content in contents]
        head = b"".join(elements) + head
    items = [struct.pack("<HHI", 0xFFFE, 0xE000, len(basic)) + basic, *packed]
    return head + b"".join(items) + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)


def write_dicom(
    path,
    picture,
    *,
    mpp=0.5,
    series="1.2.3.2",
    lacking=(),
    part=slice(None),
    syntax=EXPLICIT,
    pack=None,
    packing=None,
    tile_px=64,
    **more,
):
    """Write a picture uint8[h, w, 3] as one file of a slide, in square tiles.

    Args:
        lacking: numbers of tiles, row by row, that are left out: the file is sparse then.
        part: tiles that the file holds of a concatenation; its attributes are among `more`.
        pack: what makes the bytes of a frame of a tile, where it is not stored as it is.
        packing: arguments of `encapsulate`.
        more: values of attributes by their name below.
    """
    height, width = picture.shape[:2]
    tiles = [
        (
            x,
            y,
            np.pad(t := picture[y : y + tile_px, x : x + tile_px], [*((0, tile_px - n) for n in t.shape[:2]), (0, 0)]),
        )
        for y in range(0, height, tile_px)
        for x in range(0, width, tile_px)
    ]
    tiles = [tile for k, tile in enumerate(tiles) if k not in lacking][part]
    uid = "1.2.3." + ".".join(str(ord(letter)) for letter in f"{series[-3:]}{Path(path).stem[:8]}")
    spacing = f"{mpp / 1000:.6f}\\{mpp / 1000:.6f}"
    places = [
        sequence(
            0x0048021A,
            element(0x0048021E, "SL", struct.pack("<i", x + 1)) + element(0x0048021F, "SL", struct.pack("<i", y + 1)),
        )
        for x, y, _ in tiles
    ]
    given = {
        "kind": (0x00080008, "CS", _VOLUME),
        "sop_class": (0x00080016, "UI", _CLASS),
        "instance": (0x00080018, "UI", uid),
        "pyramid": (0x00080019, "UI", ""),
        "modality": (0x00080060, "CS", "SM"),
        "patient": (0x00100020, "LO", ""),
        "study": (0x0020000D, "UI", "1.2.3.1"),
        "series": (0x0020000E, "UI", series),
        "frame": (0x00200052, "UI", "1.2.3.3"),
        "concatenation": (0x00209161, "UI", ""),
        "number": (0x00209162, "US", ""),
        "parts": (0x00209163, "US", ""),
        "offset": (0x00209228, "UL", ""),
        "organization": (0x00209311, "CS", "TILED_SPARSE" if lacking else "TILED_FULL"),
        "samples": (0x00280002, "US", 3),
        "colours": (0x00280004, "CS", "RGB"),
        "planar": (0x00280006, "US", 0),
        "frames": (0x00280008, "IS", str(len(tiles))),
        "rows": (0x00280010, "US", tile_px),
        "columns": (0x00280011, "US", tile_px),
        "bits": (0x00280100, "US", 8),
        "stored": (0x00280101, "US", 8),
        "high": (0x00280102, "US", 7),
        "signed": (0x00280103, "US", 0),
        "container": (0x00400512, "LO", ""),
        "width": (0x00480006, "UL", width),
        "height": (0x00480007, "UL", height),
        "paths": (0x00480302, "UL", 1),
        "planes": (0x00480303, "UL", 1),
    }
    values = [(tag, kind, more.get(name, value)) for name, (tag, kind, value) in given.items()]
    elements = [element(*one) for one in values if one[2] != ""]
    measures = sequence(0x00289110, element(0x00280030, "DS", spacing) + element(0x00180050, "DS", "0.001"))
    elements.append(sequence(0x52009229, measures))
    if lacking:
        elements.append(sequence(0x52009230, *places))
    pixels = [tile.tobytes() if pack is None else pack(tile) for _, _, tile in tiles]
    elements.append(
        element(0x7FE00010, "OB", b"".join(pixels)) if pack is None else encapsulate(pixels, **(packing or {}))
    )
    data = b"".join(elements)
    if syntax == DEFLATED:
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        data = packer.compress(data) + packer.flush()
    head = [
        (0x00020001, "OB", b"\0\1"),
        (0x00020002, "UI", _CLASS),
        (0x00020003, "UI", uid),
        (0x00020010, "UI", syntax),
    ]
    meta = b"".join(element(*one) for one in head)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(bytes(128) + b"DICM" + element(0x00020000, "UL", len(meta)) + meta + data)
    return Path(path)


def write_concatenation(folder, picture, bounds, *, missing=(), **more):
    """Write a picture as a concatenation of files, 0.dcm and so on, of the tiles between bounds; some are missing."""
    for k, (first, end) in enumerate(pairwise(bounds)):
        if k not in missing:
            places = {"concatenation": "1.2.3.77", "number": k + 1, "offset": first}
            write_dicom(folder / f"{k}.dcm", picture, part=slice(first, end), **places, **more)
    return folder
