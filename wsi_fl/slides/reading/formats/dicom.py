"""Headers of DICOM files: which files are one slide, and whether OpenSlide reads it.

OpenSlide reads the pixels. It takes all files of a series in the folder for levels of one slide.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from wsi_fl.slides.reading.formats.frames import contradiction
from wsi_fl.slides.reading.formats.levels import own_levels, padding_ratios
from wsi_fl.system.files import ordinary
from wsi_fl.system.names import drop_companions
from wsi_fl.types import WsiFlError

_PREAMBLE = 128
_SLIDES = "1.2.840.10008.5.1.4.1.1.77.1.6"
"""The SOP class of whole-slide images."""
_IMPLICIT, _EXPLICIT, _DEFLATED = (f"1.2.840.10008.1.2{tail}" for tail in ("", ".1", ".1.99"))
_READ = {
    _EXPLICIT,
    *(f"1.2.840.10008.1.2.4.{number}" for number in ("50", "90", "91")),
}
"""Transfer syntaxes that OpenSlide reads: uncompressed, JPEG baseline, JPEG 2000."""
_CODECS = {
    _IMPLICIT: "implicit VR",
    _DEFLATED: "a deflated file",
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
_LONG = {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
"""Value representations with a length of four bytes."""
_UNDEFINED = 0xFFFFFFFF
_ITEM, _END_OF_ITEM, _END_OF_SEQUENCE = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_AFTER = 0x52000000
"""First tag about single frames."""
_SPACING, _SHARED = 0x00280030, 1 << 16
"""Tag of the pixel spacing, and bytes in which it is sought among the attributes of all frames."""
_INFLATED = 1 << 22
_MOST_LOOKED_AT = 256
"""Files of a folder that are checked; some folders hold a hundred thousand pictures."""
_TEXT = {
    "syntax": 0x00020010,
    "kind": 0x00080008,
    "sop_class": 0x00080016,
    "pyramid": 0x00080019,
    "series": 0x0020000E,
    "concatenation": 0x00209161,
    "colours": 0x00280004,
}
_NUMBERS = {
    "samples": (0x00280002, "<H", 3),
    "planar": (0x00280006, "<H", 0),
    "tile_height": (0x00280010, "<H", 0),
    "tile_width": (0x00280011, "<H", 0),
    "bits": (0x00280100, "<H", 8),
    "width": (0x00480006, "<I", 0),
    "height": (0x00480007, "<I", 0),
    "paths": (0x00480302, "<I", 1),
    "planes": (0x00480303, "<I", 1),
}


@dataclass(frozen=True)
class Header:
    """The header of one file.

    Attributes:
        syntax: UID of the transfer syntax.
        kind: third value of the image type: VOLUME, LABEL, OVERVIEW or THUMBNAIL.
        series, pyramid: UIDs; "" where the file gives none.
        concatenation: UID of the concatenation of which the file is a part, or "".
        colours: the photometric interpretation of `samples` samples of `bits` bits.
        planar: whether each colour is a plane.
        spacing: millimetres between rows; 0 where the file gives none.
        tile_width, tile_height: of each frame, in pixels.
        width, height: of the whole picture, in pixels.
        paths, planes: numbers of optical paths and focal planes.
    """

    path: Path
    syntax: str
    kind: str
    series: str
    pyramid: str
    concatenation: str
    colours: str
    samples: int
    planar: int
    spacing: float
    tile_height: int
    tile_width: int
    bits: int
    width: int
    height: int
    paths: int
    planes: int


def is_dicom(path: Path) -> bool:
    """Return whether a file begins as a DICOM file."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(_PREAMBLE + 4)[_PREAMBLE:] == b"DICM"
    except OSError:
        return False


def is_dicom_folder(path: Path) -> bool:
    """Return whether a folder has DICOM files among its first by name."""
    return path.is_dir() and any(map(is_dicom, _files(path)[:_MOST_LOOKED_AT]))


def place_of(path: Path) -> Path:
    """Return the path of the slide of a file, links followed: for a DICOM file its folder."""
    file = path.resolve()
    return file.parent if is_dicom(file) else file


def member_of(folder: Path) -> Path:
    """Return one file of the only DICOM slide in a folder.

    Raises:
        WsiFlError: when there is none, or several.
    """
    headers = _headers(_files(folder))
    series: dict[str, str] = {}
    for header in headers:
        series.setdefault(header.series, header.path.name)
    if len(series) > 1:
        named = ", ".join(f"{uid} ({name})" for uid, name in sorted(series.items())[:4])
        raise WsiFlError(
            f"{folder.name}: the folder holds {len(series)} DICOM slides, the series {named}; put the files of each "
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
    header = header_of(path)
    if header is None:
        return
    series = [member for member in _headers(_files(path.parent)) if member.series == header.series]
    volumes = [member for member in series if member.kind == "VOLUME"]
    for volume in volumes:
        _require_read(volume)
    if pair := _strangers(volumes):
        names = " and ".join(f"{volume.path.name} ({volume.width} × {volume.height})" for volume in pair)
        raise WsiFlError(
            f"{path.name}: its series holds several pyramids: {names} are no levels of one slide; put the files of "
            "each pyramid into a folder of its own"
        )


def _strangers(volumes: Sequence[Header]) -> list[Header]:
    """Return two pictures of a series that are not levels of one slide; [] if all are."""
    sizes = [(volume.width, volume.height) for volume in volumes]
    levels = own_levels(sizes)
    fitting = {sizes[k] for k in levels}
    for volume, size in zip(volumes, sizes, strict=True):
        if size not in fitting and not _is_padded(volume, volumes[levels[0]]):
            return [volumes[levels[0]], volume]
    pyramids = {volume.pyramid: volume for volume in volumes if volume.pyramid}
    return _of_one_size(volumes) or (list(pyramids.values())[:2] if len(pyramids) > 1 else [])


def _is_padded(level: Header, whole: Header) -> bool:
    """Return whether a picture is a reduced copy of another with padded tiles, also by its spacing."""
    sizes = (whole.width, whole.height), (level.width, level.height)
    ratios = padding_ratios(*sizes, (level.tile_width, level.tile_height))
    return whole.spacing > 0 and any(isclose(level.spacing / whole.spacing, n, rel_tol=0.02) for n in ratios)


def _of_one_size(volumes: Sequence[Header]) -> list[Header]:
    """Return two pictures of one size that are not parts of one concatenation; [] if there are none."""
    first: dict[tuple[int, int], Header] = {}
    for header in volumes:
        before = first.setdefault((header.width, header.height), header)
        if before is not header and not (
            header.concatenation and header.concatenation == before.concatenation
        ):
            return [before, header]
    return []


def _require_read(header: Header) -> None:
    name = header.path.name
    if header.syntax not in _READ:
        codec = _CODECS.get(header.syntax, "transfer syntax")
        raise WsiFlError(
            f"{name}: its pixels are packed by an unsupported codec, {codec} ({header.syntax}); rewrite its files "
            "uncompressed (explicit VR little endian), in JPEG or in JPEG 2000"
        )
    for n, what in ((header.paths, "optical paths"), (header.planes, "focal planes")):
        if n > 1:
            raise WsiFlError(
                f"{name}: a slide is one picture; this DICOM has {n} {what}; write the one that is meant into "
                "a file of its own"
            )
    encoded = header.syntax == _EXPLICIT and header.colours != "RGB"
    if header.samples != 3 or header.bits != 8 or header.planar or encoded:
        planes = " in planes" if header.planar else ""
        raise WsiFlError(
            f"{name}: a slide has 8-bit colours; this DICOM is {header.bits}-bit {header.colours}{planes}; save it as "
            "red, green and blue of 8 bits"
        )
    if header.syntax != _EXPLICIT and (held := contradiction(header.path, header.colours)):
        raise WsiFlError(
            f"{name}: its header states {header.colours}, but its first frame holds {held}; its colours would "
            "be wrong, so convert the slide to DICOM anew, by a later version of the converter"
        )


def header_of(path: Path) -> Header | None:
    """Return the header of a whole-slide image; None for other and for damaged files."""
    if not is_dicom(path):
        return None
    try:
        with ordinary(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            values = _values(data)
    except (OSError, ValueError, struct.error, IndexError, RecursionError, zlib.error):
        return None
    text = {name: _text(values.get(tag, b"")) for name, tag in _TEXT.items()}
    if text.pop("sop_class") != _SLIDES:
        return None
    kind = f"{text.pop('kind')}\\\\\\".split("\\")[2]
    numbers = {name: _number(values.get(tag), form, usual) for name, (tag, form, usual) in _NUMBERS.items()}
    spacing = _spacing(values.get(_SPACING, b""))
    return Header(path, kind=kind, spacing=spacing, **text, **numbers)  # type: ignore[arg-type]


def _files(folder: Path) -> list[Path]:
    try:
        return drop_companions(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []


def _headers(paths: Iterable[Path]) -> list[Header]:
    return [header for header in map(header_of, paths) if header is not None]


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip("\0 ")


def _spacing(value: bytes) -> float:
    try:
        return float(_text(value).split("\\")[0])
    except ValueError:
        return 0.0


def _number(value: bytes | None, form: str, usual: int) -> int:
    if value is None or len(value) != struct.calcsize(form):
        return usual
    return int(struct.unpack(form, value)[0])


def _values(data: mmap.mmap) -> dict[int, bytes]:
    """Return the values of the tags of `Header`: from the file's head, which is explicit, and from the data set."""
    wanted = {*_TEXT.values(), *(tag for tag, _, _ in _NUMBERS.values())}
    start = _PREAMBLE + 4
    values, at = {}, start
    for tag, value, after in _elements(data, start, explicit=True, until=0x00030000):
        at = after
        if tag in wanted:
            values[tag] = bytes(value)
    syntax = _text(values.get(_TEXT["syntax"], b""))
    rest: bytes | mmap.mmap = data
    if syntax == _DEFLATED:
        rest, at = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data[at:], _INFLATED), 0
    for tag, value, after in _elements(rest, at, explicit=syntax != _IMPLICIT, until=_AFTER):
        at = after
        if tag in wanted:
            values[tag] = bytes(value)
    shared = rest[at : at + _SHARED]
    if (begin := shared.find(struct.pack("<HH2s", _SPACING >> 16, _SPACING & 0xFFFF, b"DS"))) >= 0:
        length = int.from_bytes(shared[begin + 6 : begin + 8], "little")
        values[_SPACING] = bytes(shared[begin + 8 : begin + 8 + length])
    return values


def _elements(
    data: bytes | mmap.mmap, at: int, *, explicit: bool, until: int
) -> Iterator[tuple[int, Sequence[int], int]]:
    """Yield (tag, value, start of the next) of the elements before the tag `until`; sequences have no value.

    Raises:
        ValueError: when the data end earlier.
    """
    while at + 8 <= len(data):
        tag, length, begin = _element(data, at, explicit=explicit)
        if tag >= until:
            return
        if length == _UNDEFINED:
            at = _after_sequence(data, begin, explicit=explicit)
            yield tag, b"", at
        else:
            at = begin + length
            yield tag, data[begin:at] if length <= 1 << 10 else b"", at
    raise ValueError("the file ends within its header")


def _element(data: bytes | mmap.mmap, at: int, *, explicit: bool) -> tuple[int, int, int]:
    """Return (tag, length of the value, its start)."""
    group, number = struct.unpack_from("<HH", data, at)
    tag = group << 16 | number
    if not explicit or group == 0xFFFE:
        return tag, struct.unpack_from("<I", data, at + 4)[0], at + 8
    if bytes(data[at + 4 : at + 6]) in _LONG:
        return tag, struct.unpack_from("<I", data, at + 8)[0], at + 12
    return tag, struct.unpack_from("<H", data, at + 6)[0], at + 8


def _after_sequence(data: bytes | mmap.mmap, at: int, *, explicit: bool) -> int:
    """Return the end of a sequence of undefined length."""
    while True:
        tag, length, at = _element(data, at, explicit=explicit)
        if tag == _END_OF_SEQUENCE:
            return at
        if tag != _ITEM:
            raise ValueError("no item")
        if length != _UNDEFINED:
            at += length
            continue
        while True:
            tag, length, at = _element(data, at, explicit=explicit)
            if tag == _END_OF_ITEM:
                break
            at = _after_sequence(data, at, explicit=explicit) if length == _UNDEFINED else at + length
