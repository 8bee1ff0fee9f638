"""Malformed bytes, text and numbers, drawn from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

ODD = (
    "", "0", "-1", "1e309", "-1e-309", "nan", "inf", "99999999999999999999", "1" * 5000, "0x10", "true", "null", "[]",
    "{}", '"', "'", "\\", "\n", "\r", "\t", "\x00", "\x1b[2J", "\u202e", "\ud7ff", "ü", "名", "../..", "/etc/passwd",
    "a" * 300,
    "%s", "--help", "*", "[", "]" * 3000, "[" * 3000, ";", ",", ",,,,", '""', "=", "#", "nan,nan", "1_000", "1,5", "٣",
)  # fmt: skip
"""What people and programs write where something else is wanted."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def text(given: bytes, rng: random.Random) -> bytes:
    """Return text with one to three faults: of encoding, of lines, of numbers, of what stands where."""
    said = given.decode("utf-8", errors="replace")
    for _ in range(rng.randint(1, 3)):
        said = rng.choice((_put, _number, _lines, _drop, _swap))(said, rng)
    encoding = rng.choices(["utf-8", "utf-8-sig", "utf-16", "latin-1"], [12, 1, 1, 1])[0]
    data = said.encode(encoding, errors="replace")
    return blob(data, rng) if rng.random() < 0.1 else data


def tiff(given: bytes, rng: random.Random) -> bytes:
    """Return a TIFF in whose directories one to three numbers are others: tags, types, counts, values, offsets."""
    data = bytearray(given)
    entries = _entries(given)
    if not entries:
        return blob(given, rng)
    for _ in range(rng.randint(1, 3)):
        at, wide = rng.choice(entries)
        field, width = rng.choice([(0, 2), (2, 2), (4, 8 if wide else 4), *[(12 if wide else 8, 8 if wide else 4)] * 3])
        known = int.from_bytes(data[at + field : at + field + width], "little")
        odd = rng.choice(
            [0, 1, known + 1, known * 2, known // 2, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 40, (1 << 64) - 1]
        )
        data[at + field : at + field + width] = (odd % (1 << 8 * width)).to_bytes(width, "little")
        if rng.random() < 0.3 and known + 8 < len(data):  # what the entry points to: offsets and lengths of tiles
            data[known : known + 8] = rng.choice([0, 1 << 40, 1 << 31, len(data), 17]).to_bytes(8, "little")
    return bytes(data)


def _entries(data: bytes) -> list[tuple[int, bool]]:
    """Return where the entries of a little-endian TIFF's directories lie, and whether it is a BigTIFF."""
    wide = data[2:4] == b"+\x00"
    size, head, count = (20, 8, 8) if wide else (12, 4, 2)
    at = int.from_bytes(data[8:16] if wide else data[4:8], "little")
    found: list[tuple[int, bool]] = []
    for _ in range(16):
        if not 0 < at < len(data) - count:
            break
        n = int.from_bytes(data[at : at + count], "little")
        found += [(at + count + k * size, wide) for k in range(min(n, 64))]
        after = at + count + n * size
        at = int.from_bytes(data[after : after + head], "little")
    return [one for one in found if one[0] + size <= len(data)]


def _put(said: str, rng: random.Random) -> str:
    at = rng.randint(0, len(said))
    return said[:at] + rng.choice(ODD) + said[at:]


def _number(said: str, rng: random.Random) -> str:
    found = list(_NUMBER.finditer(said))
    if not found:
        return _put(said, rng)
    one = rng.choice(found)
    return said[: one.start()] + rng.choice(ODD) + said[one.end() :]


def _lines(said: str, rng: random.Random) -> str:
    lines = said.splitlines(keepends=True) or [""]
    at = rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(at, lines[at])
    elif how == 2:
        lines[at] = lines[at][: rng.randint(0, len(lines[at]))]
    else:
        rng.shuffle(lines)
    return "".join(lines)


def _drop(said: str, rng: random.Random) -> str:
    first = rng.randint(0, len(said))
    return said[:first] + said[first + rng.randint(1, 40) :]


def _swap(said: str, rng: random.Random) -> str:
    marks = [k for k, mark in enumerate(said) if mark in ",;=[]{}<>\"':\n"]
    if not marks:
        return said
    at = rng.choice(marks)
    return said[:at] + rng.choice(",;=[]{}<>\"':\n\t ") + said[at + 1 :]


def blob(given: bytes, rng: random.Random) -> bytes:
    """Return bytes with one fault: flipped, cut, zeroed, doubled, emptied, or of another kind altogether."""
    data = bytearray(given)
    at = rng.randrange(len(data) or 1)
    how = rng.randrange(8)
    if how < 3:
        for _ in range(rng.randint(1, 16)):
            if data:
                data[rng.randrange(min(len(data), 4096 if how else len(data)))] = rng.randrange(256)
    elif how == 3:
        del data[at:]
    elif how == 4:
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    elif how == 5:
        data[at:at] = rng.randbytes(rng.randint(1, 100))
    elif how == 6:
        data[at : at + 8] = b"\xff" * 8
    else:
        return rng.choice((b"", rng.randbytes(3000), b"\x89PNG\r\n\x1a\n" + rng.randbytes(50), b"PK\x03\x04", b"{}"))
    return bytes(data)


def hdf5(path: Path, rng: random.Random) -> None:
    """Change what an HDF5 file says, so that it stays one: datasets lost, of other shapes and types, groups in their
    place, odd attributes."""
    with h5py.File(path, "r+") as file:
        names = _datasets(file)
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.4 and len(file.attrs):
                _attribute(file, rng)
            elif names:
                _dataset(file, names.pop(rng.randrange(len(names))), rng)


def _datasets(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(lambda name, node: found.append(name) if isinstance(node, h5py.Dataset) else None)
    return sorted(found)


def _attribute(file: h5py.File, rng: random.Random) -> None:
    name = rng.choice(sorted(file.attrs))
    del file.attrs[name]
    odd = (None, "", "[]", '["x"]', "{", -1, 0, 1e300, float("nan"), 2**40, np.zeros(3), "\u202e", "x" * 3000)
    if (value := rng.choice(odd)) is not None:
        file.attrs[name] = value


def _dataset(file: h5py.File, name: str, rng: random.Random) -> None:
    data = file[name][()]
    del file[name]
    if rng.random() < 0.1:
        file.create_group(name)
        return
    changes: dict[str, Callable[[], Any]] = {
        "lost": lambda: None,
        "empty": lambda: data[:0],
        "short": lambda: data[:-1],
        "doubled": lambda: np.concatenate([data, data]),
        "flat": lambda: data.reshape(-1),
        "scalar": lambda: np.float64(3),
        "text": lambda: np.array([b"x"] * len(data)),
        "nan": lambda: np.full(data.shape, np.nan),
        "huge": lambda: np.full(data.shape, 2**62, np.int64),
        "negative": lambda: np.full(data.shape, -7, np.int64),
    }
    changed = changes[rng.choice(sorted(changes))]()
    if changed is not None:
        file[name] = changed
