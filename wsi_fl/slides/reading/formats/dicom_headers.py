"""Headers of DICOM files: which files are one slide, and whether OpenSlide reads it.

OpenSlide reads the pixels. It takes all files of a series in the folder for levels of one slide.
"""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import ceil, isclose, isfinite
from pathlib import Path
from typing import Any

from wsi_fl.slides.reading.formats.dicom_frames import find_contradiction
from wsi_fl.slides.reading.formats.level_selection import padding_ratios, select_levels
from wsi_fl.system.file_names import drop_companions, is_missing
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import WsiFlError

_PREAMBLE_BYTES = 128
_SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"
"""The SOP class of whole-slide images."""
_IMPLICIT_SYNTAX, _EXPLICIT_SYNTAX, _DEFLATED_SYNTAX = (f"1.2.840.10008.1.2{tail}" for tail in ("", ".1", ".1.99"))
_READABLE_COLOURS = {
    _EXPLICIT_SYNTAX: {"RGB"},
    "1.2.840.10008.1.2.4.50": {"RGB", "YBR_FULL_422"},
    "1.2.840.10008.1.2.4.90": {"RGB", "YBR_RCT"},
    "1.2.840.10008.1.2.4.91": {"RGB", "YBR_RCT", "YBR_ICT"},
}
"""Photometric interpretations that OpenSlide reads, by transfer syntax: uncompressed, JPEG baseline, JPEG 2000."""
_CODECS = {
    _IMPLICIT_SYNTAX: "implicit VR",
    _DEFLATED_SYNTAX: "a deflated file",
    "1.2.840.10008.1.2.2": "big endian",
    "1.2.840.10008.1.2.5": "RLE",
    "1.2.840.10008.1.2.4.51": "JPEG of 12 bits",
    "1.2.840.10008.1.2.4.57": "lossless JPEG",
    "1.2.840.10008.1.2.4.70": "lossless JPEG",
    "1.2.840.10008.1.2.4.80": "JPEG-LS",
    "1.2.840.10008.1.2.4.81": "JPEG-LS",
    "1.2.840.10008.1.2.4.110": "JPEG XL",
    "1.2.840.10008.1.2.4.111": "JPEG XL",
    "1.2.840.10008.1.2.4.112": "JPEG XL",
    "1.2.840.10008.1.2.4.201": "HTJ2K",
    "1.2.840.10008.1.2.4.202": "HTJ2K",
    "1.2.840.10008.1.2.4.203": "HTJ2K",
}
_LONG_VRS = {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
"""Value representations with a length of four bytes."""
_UNDEFINED_LENGTH = 0xFFFFFFFF
_ITEM, _END_OF_ITEM, _END_OF_SEQUENCE = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_FRAMES_TAG = 0x52000000
"""First tag about single frames."""
_SYNTAX_TAG, _CLASS_TAG = 0x00020010, 0x00080016
_SPACING_TAG, _SHARED_BYTES = 0x00280030, 1 << 16
"""Tag of the pixel spacing, and bytes in which it is sought among the attributes of all frames."""
SERIES_FOLDER = re.compile(r"SM_[0-9.]+")
"""Name of a folder with a series of slide microscopy, as the Imaging Data Commons' client lays it."""
_CONTAINER = re.compile(r"[^\W_][\w .+()-]*", re.ASCII)
_MAX_INFLATED_BYTES = 1 << 22
_MAX_FILES = 256
"""Files of a folder that are checked; some folders hold a hundred thousand pictures."""


def _decode_text(value: bytes) -> str:
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    return text.strip("\0 ")


def _decode_decimal(value: bytes) -> float:
    """Return the first of the numbers in a text; 0 if it is none."""
    try:
        number = float(_decode_text(value).split("\\")[0])
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0


def _decode_count(value: bytes) -> int:
    return int(_decode_decimal(value))


def _decode_kind(value: bytes) -> str:
    return f"{_decode_text(value)}\\\\\\".split("\\")[2]


def _decode_number(value: bytes, form: str, default: int) -> int:
    return int(struct.unpack(form, value)[0]) if len(value) == struct.calcsize(form) else default


def _declare_element(tag: int, decode: Callable[[bytes], object] = _decode_text) -> Any:
    """Return a field of a header: the tag of its element, and the function from the element's value."""
    return field(metadata={"tag": tag, "decode": decode})


def _declare_number(tag: int, form: str, default: int = 0) -> Any:
    return _declare_element(tag, partial(_decode_number, form=form, default=default))


@dataclass(frozen=True)
class _Header:
    """The header of one file.

    Attributes:
        syntax: UID of the transfer syntax.
        kind: third value of the image type: VOLUME, LABEL, OVERVIEW or THUMBNAIL.
        patient, container: identifiers of the patient and of the glass slide.
        instance, series, pyramid: UIDs; "" where the file gives none.
        concatenation: UID of the concatenation of which the file is a part, or "".
        n_parts, first_frame: files of the concatenation, 0 if unknown, and its frames before those of this file.
        organization: TILED_FULL or TILED_SPARSE.
        frames: their number.
        colours: the photometric interpretation of `samples` samples of `bits` bits.
        planar: whether each colour is a plane.
        spacing: millimetres between rows; 0 where the file gives none.
        tile_width, tile_height: of each frame, in pixels.
        width, height: of the whole picture, in pixels.
        paths, planes: numbers of optical paths and focal planes.
    """

    path: Path
    syntax: str = _declare_element(_SYNTAX_TAG)
    kind: str = _declare_element(0x00080008, _decode_kind)
    instance: str = _declare_element(0x00080018)
    pyramid: str = _declare_element(0x00080019)
    patient: str = _declare_element(0x00100020)
    series: str = _declare_element(0x0020000E)
    concatenation: str = _declare_element(0x00209161)
    n_parts: int = _declare_number(0x00209163, "<H")
    first_frame: int = _declare_number(0x00209228, "<I")
    organization: str = _declare_element(0x00209311)
    samples: int = _declare_number(0x00280002, "<H", 3)
    colours: str = _declare_element(0x00280004)
    planar: int = _declare_number(0x00280006, "<H")
    frames: int = _declare_element(0x00280008, _decode_count)
    tile_height: int = _declare_number(0x00280010, "<H")
    tile_width: int = _declare_number(0x00280011, "<H")
    spacing: float = _declare_element(_SPACING_TAG, _decode_decimal)
    bits: int = _declare_number(0x00280100, "<H", 8)
    container: str = _declare_element(0x00400512)
    width: int = _declare_number(0x00480006, "<I")
    height: int = _declare_number(0x00480007, "<I")
    paths: int = _declare_number(0x00480302, "<I", 1)
    planes: int = _declare_number(0x00480303, "<I", 1)


_ELEMENTS = fields(_Header)[1:]


def is_dicom(path: Path) -> bool:
    """Return whether a file begins as a DICOM file."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(_PREAMBLE_BYTES + 4)[_PREAMBLE_BYTES:] == b"DICM"
    except OSError:
        return False


def is_dicom_folder(path: Path) -> bool:
    """Return whether a folder has DICOM files among its first by name."""
    return path.is_dir() and any(map(is_dicom, _list_files(path)[:_MAX_FILES]))


def resolve_slide_path(path: Path) -> Path:
    """Return the path of the slide of a file, links followed: for a DICOM file its folder."""
    file = path.resolve()
    return file.parent if is_dicom(file) else file


def read_container(folder: Path) -> str:
    """Return the glass slide's identifier of a series folder of the Imaging Data Commons, SM_UID; "" for other folders.

    It is also "" where it is missing, or could not name a file.
    """
    if not SERIES_FOLDER.fullmatch(folder.name):
        return ""
    header = read_volume(folder)
    container = "" if header is None or is_missing(header.container) else header.container
    return container if _CONTAINER.fullmatch(container) else ""


def read_volume(folder: Path) -> _Header | None:
    """Return the header of a slide's picture in a folder; None where there is none."""
    headers = filter(None, map(read_header, _list_files(folder)))
    return next((header for header in headers if header.kind == "VOLUME"), None)


def find_member(folder: Path) -> Path:
    """Return one file of the only DICOM slide in a folder.

    Raises:
        WsiFlError: when there is none, or several.
    """
    headers = _read_headers(_list_files(folder))
    series: dict[str, str] = {}
    for header in headers:
        series.setdefault(header.series, header.path.name)
    if len(series) > 1:
        listing = ", ".join(f"{uid} ({name})" for uid, name in sorted(series.items())[:4])
        raise WsiFlError(
            f"{folder.name}: the folder holds {len(series)} DICOM slides, the series {listing}; put the files of each "
            "into a folder of its own, or name one of its files"
        )
    if not headers:
        raise WsiFlError(f"{folder}: a folder without DICOM slide files")
    return next((header.path for header in headers if header.kind == "VOLUME"), headers[0].path)


def require_one_slide(path: Path) -> None:
    """Refuse a DICOM file of a series that OpenSlide does not read, or misreads.

    Raises:
        WsiFlError: for an unsupported codec, several optical paths, focal planes or pyramids, or other pixels than
            8-bit colours.
    """
    volumes = list_volumes(path)
    for volume in volumes:
        _require_readable(volume)
        if missing := _find_missing_part([part for part in volumes if part.concatenation == volume.concatenation]):
            raise WsiFlError(
                f"{volume.path.name}: a DICOM concatenation that lacks {missing}; put all its files into one "
                "folder, or download the series again"
            )
    if pair := _find_foreign_pair(volumes):
        names = " and ".join(f"{volume.path.name} ({volume.width} × {volume.height})" for volume in pair)
        if pair[0].instance == pair[1].instance:
            raise WsiFlError(f"{path.name}: {names} are two copies of one DICOM file; delete one of them")
        raise WsiFlError(
            f"{path.name}: its series holds several pyramids: {names} are no levels of one slide; put the files of "
            "each pyramid into a folder of its own"
        )


def list_volumes(path: Path) -> list[_Header]:
    """Return the headers of all files with pixels of the slide to which a DICOM file belongs; [] for other files."""
    header = read_header(path)
    if header is None:
        return []
    headers = _read_headers(_list_files(path.parent))
    return [member for member in headers if member.series == header.series and member.kind == "VOLUME"]


def _find_missing_part(parts: Sequence[_Header]) -> str:
    """Return the missing part of a concatenation; "" if none is known to be missing.

    OpenSlide shows background in place of the last part.
    """
    if not parts[0].concatenation:
        return ""
    n_frames = 0
    for part in sorted(parts, key=lambda part: part.first_frame):
        if part.first_frame > n_frames:
            return f"its frames {n_frames + 1} to {part.first_frame}"
        n_frames = part.first_frame + part.frames
    first = parts[0]
    n_tiles = ceil(first.width / max(1, first.tile_width)) * ceil(first.height / max(1, first.tile_height))
    if first.organization == "TILED_FULL" and n_frames < n_tiles:
        return f"its frames {n_frames + 1} to {n_tiles}"
    return f"{first.n_parts - len(parts)} of its {first.n_parts} files" if len(parts) < first.n_parts else ""


def _find_foreign_pair(volumes: Sequence[_Header]) -> list[_Header]:
    """Return two pictures of a series that are not levels of one slide; [] if all are."""
    sizes = [(volume.width, volume.height) for volume in volumes]
    levels = select_levels(sizes)
    fitting = {sizes[k] for k in levels}
    for volume, size in zip(volumes, sizes, strict=True):
        if size not in fitting and not _is_padded(volume, volumes[levels[0]]):
            return [volumes[levels[0]], volume]
    pyramids = {volume.pyramid: volume for volume in volumes if volume.pyramid}
    return _find_same_size(volumes) or (list(pyramids.values())[:2] if len(pyramids) > 1 else [])


def _is_padded(level: _Header, slide: _Header) -> bool:
    """Return whether a picture is a reduced copy of another with padded tiles, also by its spacing."""
    sizes = (slide.width, slide.height), (level.width, level.height)
    ratios = padding_ratios(*sizes, (level.tile_width, level.tile_height))
    return slide.spacing > 0 and any(isclose(level.spacing / slide.spacing, n, rel_tol=0.02) for n in ratios)


def _find_same_size(volumes: Sequence[_Header]) -> list[_Header]:
    """Return two pictures of one size that are not parts of one concatenation; [] if there are none."""
    first: dict[tuple[int, int], _Header] = {}
    for header in volumes:
        earlier = first.setdefault((header.width, header.height), header)
        if earlier is not header and not (header.concatenation and header.concatenation == earlier.concatenation):
            return [earlier, header]
    return []


def _require_readable(header: _Header) -> None:
    name = header.path.name
    if header.syntax not in _READABLE_COLOURS:
        codec = _CODECS.get(header.syntax, "transfer syntax")
        raise WsiFlError(
            f"{name}: its pixels are packed by an unsupported codec, {codec} ({header.syntax}); rewrite its files "
            "uncompressed (explicit VR little endian), in JPEG or in JPEG 2000"
        )
    for count, feature in ((header.paths, "optical paths"), (header.planes, "focal planes")):
        if count > 1:
            raise WsiFlError(
                f"{name}: a slide is one picture; this DICOM has {count} {feature}; write the one that is meant into "
                "a file of its own"
            )
    has_colours = header.samples == 3 and header.colours in _READABLE_COLOURS[header.syntax]
    if not has_colours or header.bits != 8 or header.planar:
        planes = " in planes" if header.planar else ""
        raise WsiFlError(
            f"{name}: a slide has 8-bit colours; this DICOM is {header.bits}-bit {header.colours}{planes}; save it as "
            "red, green and blue of 8 bits"
        )
    if header.syntax != _EXPLICIT_SYNTAX and (encoding := find_contradiction(header.path, header.colours)):
        raise WsiFlError(
            f"{name}: its header states {header.colours}, but its first frame holds {encoding}; its colours would "
            "be wrong, so convert the slide to DICOM anew, by a later version of the converter"
        )


def read_header(path: Path) -> _Header | None:
    """Return the header of a whole-slide image; None for other and for damaged files."""
    if not is_dicom(path):
        return None
    try:
        with (
            require_regular_file(path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            values = _read_values(data)
    except (OSError, ValueError, struct.error, IndexError, RecursionError, zlib.error):
        return None
    if _decode_text(values.get(_CLASS_TAG, b"")) != _SLIDE_CLASS:
        return None
    elements = {e.name: e.metadata["decode"](values.get(e.metadata["tag"], b"")) for e in _ELEMENTS}
    return _Header(path, **elements)


def _list_files(folder: Path) -> list[Path]:
    try:
        return drop_companions(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []


def _read_headers(paths: Iterable[Path]) -> list[_Header]:
    return [header for header in map(read_header, paths) if header is not None]


def _read_values(data: mmap.mmap) -> dict[int, bytes]:
    """Return the values of the tags of `_Header`: from the file's head, which is explicit, and from the data set."""
    tags = {_CLASS_TAG, *(element.metadata["tag"] for element in _ELEMENTS)}
    start = _PREAMBLE_BYTES + 4
    values, position = {}, start
    for tag, value, next_start in _iterate_elements(data, start, explicit=True, until=0x00030000):
        position = next_start
        if tag in tags:
            values[tag] = bytes(value)
    syntax = _decode_text(values.get(_SYNTAX_TAG, b""))
    dataset: bytes | mmap.mmap = data
    if syntax == _DEFLATED_SYNTAX:
        dataset, position = (zlib.decompressobj(-zlib.MAX_WBITS).decompress(data[position:], _MAX_INFLATED_BYTES), 0)
    for tag, value, next_start in _iterate_elements(
        dataset, position, explicit=syntax != _IMPLICIT_SYNTAX, until=_FRAMES_TAG
    ):
        position = next_start
        if tag in tags:
            values[tag] = bytes(value)
    shared = dataset[position : position + _SHARED_BYTES]
    if (begin := shared.find(struct.pack("<HH2s", _SPACING_TAG >> 16, _SPACING_TAG & 0xFFFF, b"DS"))) >= 0:
        length = int.from_bytes(shared[begin + 6 : begin + 8], "little")
        values[_SPACING_TAG] = bytes(shared[begin + 8 : begin + 8 + length])
    return values


def _iterate_elements(
    data: bytes | mmap.mmap, position: int, *, explicit: bool, until: int
) -> Iterator[tuple[int, Sequence[int], int]]:
    """Yield (tag, value, start of the next) of the elements before the tag `until`; sequences have no value."""
    while position + 8 <= len(data):
        tag, length, begin = _read_element(data, position, explicit=explicit)
        if tag >= until:
            return
        if length == _UNDEFINED_LENGTH:
            position = _skip_sequence(data, begin, explicit=explicit)
            yield tag, b"", position
        else:
            position = begin + length
            yield tag, data[begin:position] if length <= 1 << 10 else b"", position
    raise ValueError("the file ends within its header")


def _read_element(data: bytes | mmap.mmap, position: int, *, explicit: bool) -> tuple[int, int, int]:
    """Return (tag, length of the value, its start)."""
    group, number = struct.unpack_from("<HH", data, position)
    tag = group << 16 | number
    if not explicit or group == 0xFFFE:
        return tag, struct.unpack_from("<I", data, position + 4)[0], position + 8
    if bytes(data[position + 4 : position + 6]) in _LONG_VRS:
        return tag, struct.unpack_from("<I", data, position + 8)[0], position + 12
    return tag, struct.unpack_from("<H", data, position + 6)[0], position + 8


def _skip_sequence(data: bytes | mmap.mmap, position: int, *, explicit: bool) -> int:
    """Return the end of a sequence of undefined length."""
    while True:
        tag, length, position = _read_element(data, position, explicit=explicit)
        if tag == _END_OF_SEQUENCE:
            return position
        if tag != _ITEM:
            raise ValueError("no item")
        if length != _UNDEFINED_LENGTH:
            position += length
            continue
        while True:
            tag, length, position = _read_element(data, position, explicit=explicit)
            if tag == _END_OF_ITEM:
                break
            position = (
                _skip_sequence(data, position, explicit=explicit) if length == _UNDEFINED_LENGTH else position + length
            )
