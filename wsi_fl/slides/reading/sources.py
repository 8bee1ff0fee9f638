"""Slides that OpenSlide does not read: plain pictures, OME-TIFF, OME-Zarr, CZI and iSyntax, each by a library.

What a file is, its content says and not its name. A source looks like an OpenSlide handle, so `Slide` reads all alike.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.types import UsageError, WsiFlError, one_line

MOST_PLAIN_PX = 1 << 27
"""Pixels of a plain picture, which is held in memory whole: 0.5 GB with its sub-resolutions."""
_LEAST_PX = 512
_HEAD = 1 << 16
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_UM = {
    "m": 1e6,
    "meter": 1e6,
    "cm": 1e4,
    "mm": 1e3,
    "millimeter": 1e3,
    "µm": 1.0,
    "um": 1.0,
    "micrometer": 1.0,
}
_UM_OF_UNIT = {2: 25_400.0, 3: 10_000.0}
"""TIFF's inches and centimetres."""
_CZI = b"ZISRAWFILE"
_PLAIN = {1, 8, 32946}
"""Compressions of TIFF that need no codec of their own: none and deflate."""
_UM |= {"nm": 1e-3, "nanometer": 1e-3}

ReadLevel = Callable[[int, tuple[int, int], tuple[int, int]], NDArray[np.uint8]]
"""(level, (x, y) in its pixels, (width, height)) → uint8[height, width, 3], all within the level."""


class SourceError(WsiFlError):
    """A region that a source cannot read."""


class Source(Protocol):
    """What `Slide` needs of whatever reads a slide; OpenSlide's own handle is one."""

    dimensions: tuple[int, int]
    level_dimensions: tuple[tuple[int, int], ...]
    level_downsamples: tuple[float, ...]
    properties: Mapping[str, str]

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """Return RGBA pixels from a level-0 corner on; what lies beyond the slide is transparent."""
        ...

    def close(self) -> None: ...


class Levels:
    """A source of levels that are read by a function.

    Args:
        sizes: (width, height) of each level, the largest first.
        read: reads a box of a level; several threads may call it.
        vendor: name of the format.
        mpp: µm per level-0 pixel (x, y), as far as it is known.
        quickhash: of the content.
        close: lets go of the file.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        read: ReadLevel,
        *,
        vendor: str,
        mpp: tuple[float | None, float | None],
        quickhash: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.level_dimensions = tuple((int(w), int(h)) for w, h in sizes)
        self.dimensions = self.level_dimensions[0]
        width, height = self.dimensions
        self.level_downsamples = tuple((width / w + height / h) / 2 for w, h in self.level_dimensions)
        self.properties: Mapping[str, str] = {
            "openslide.vendor": vendor,
            "openslide.quickhash-1": quickhash,
        } | {f"openslide.mpp-{axis}": repr(value) for axis, value in zip("xy", mpp, strict=True) if value}
        self._read, self.close = read, close

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """See `Source`.

        Raises:
            SourceError: when the file is damaged there.
        """
        corner = [round(v / self.level_downsamples[level]) for v in location]
        first = [max(0, v) for v in corner]
        last = [
            min(v + s, most) for v, s, most in zip(corner, size, self.level_dimensions[level], strict=True)
        ]
        out = np.zeros((size[1], size[0], 4), np.uint8)
        if all(a < b for a, b in zip(first, last, strict=True)):
            box = (last[0] - first[0], last[1] - first[1])
            try:
                pixels = self._read(level, (first[0], first[1]), box)
            except Exception as error:  # each library has its own
                raise SourceError(one_line(error)) from None
            left, top = first[0] - corner[0], first[1] - corner[1]
            out[top : top + box[1], left : left + box[0], :3] = pixels
            out[top : top + box[1], left : left + box[0], 3] = 255
        return Image.fromarray(out, "RGBA")


def open_source(path: Path) -> Source | None:
    """Open a slide that OpenSlide does not know; None where nobody knows it.

    Raises:
        WsiFlError: when it is known and damaged, too large, or needs an extra that is not installed.
    """
    if is_zarr(path):
        return _guarded(path, _of_zarr)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[128:132] == b"DICM" and b"\x20\x00\x62\x91" in head:
        raise WsiFlError(
            f"{path.name}: a part of a DICOM concatenation, which OpenSlide does not read; join its parts into one file"
        )
    kinds: tuple[tuple[bool, Callable[[Path], Source]], ...] = (
        (head.startswith(_CZI), _of_czi),
        (b'<DataObject ObjectType="DPUfsImport"' in head, _of_isyntax),
        (is_ome(path, head), _of_ome_tiff),
        (head.startswith(_TIFF), _of_tiff),
        (head.startswith((b"\x89PNG", b"\xff\xd8\xff")), _of_picture),
    )
    return next((_guarded(path, opened) for fits, opened in kinds if fits), None)


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a Zarr group or array."""
    return path.is_dir() and any((path / name).is_file() for name in (".zattrs", ".zgroup", "zarr.json"))


def is_ome(path: Path, head: bytes | None = None) -> bool:
    """Return whether a TIFF says by OME-XML what it is."""
    if head is None:
        with path.open("rb") as file:
            head = file.read(4)
    if not head.startswith(_TIFF):
        return False
    from tifffile import TiffFile

    try:
        with TiffFile(path) as tif:
            return bool(tif.is_ome)
    except Exception:  # whatever a parser stumbles over in a damaged file
        return False


def is_czi(path: Path) -> bool:
    """Return whether a file is a CZI."""
    with path.open("rb") as file:
        return file.read(len(_CZI)) == _CZI


def _guarded(path: Path, opened: Callable[[Path], Source]) -> Source:
    """Open a source; what its library raises becomes one line."""
    try:
        return opened(path)
    except WsiFlError:
        raise
    except Exception as error:
        raise WsiFlError(f"{path.name}: cannot be opened: {one_line(error)}") from None


def _needed(module: str, extra: str, path: Path) -> Any:
    """Import a library that an extra brings."""
    try:
        return import_module(module)
    except ImportError:
        raise UsageError(
            f"{path.name}: reading it needs {module.partition('.')[0]}; pip install 'wsi-fl[{extra}]'"
        ) from None


def _of_picture(path: Path) -> Source:
    """PNG or JPEG."""
    with Image.open(path) as picture:
        _require_fitting(path, *picture.size)
        x, y = (float(v) for v in picture.info.get("dpi", (0, 0)))
        mpp = (25_400 / x if x > 0 else None, 25_400 / y if y > 0 else None)
        return _in_memory(np.asarray(picture.convert("RGB")), mpp, _digest(path))


def _of_tiff(path: Path) -> Source:
    """The first picture of a TIFF that is no slide: in strips, or without a pyramid."""
    from tifffile import COMPRESSION, TiffFile

    with TiffFile(path) as tif:
        page = tif.pages.first
        _require_fitting(path, page.imagewidth, page.imagelength)
        if page.compression not in _PLAIN:
            _needed("imagecodecs", "formats", path)
        pixels = page.asarray()
        unit = _UM_OF_UNIT.get(int(page.resolutionunit or 0))
        mpp = tuple(unit / per_unit if unit and per_unit else None for per_unit in page.resolution)
        said = f"{COMPRESSION(page.compression).name}, {pixels.dtype}{pixels.shape}"
    if (
        pixels.dtype != np.uint8
        or pixels.ndim not in {2, 3}
        or (pixels.ndim == 3 and pixels.shape[2] not in {3, 4})
    ):
        raise WsiFlError(f"{path.name}: a slide has 8-bit colours; this TIFF is {said}")
    rgb = pixels[..., None].repeat(3, 2) if pixels.ndim == 2 else pixels[..., :3]
    return _in_memory(np.ascontiguousarray(rgb), (mpp[0], mpp[1]), _digest(path))


def _require_fitting(path: Path, width: int, height: int) -> None:
    if width * height > MOST_PLAIN_PX:
        raise WsiFlError(
            f"{path.name}: a plain picture of {width} × {height} pixels; up to {MOST_PLAIN_PX >> 20} million are read, "
            "so make it a tiled pyramid (vips tiffsave --tile --pyramid)"
        )


def _in_memory(pixels: NDArray[np.uint8], mpp: tuple[float | None, float | None], quickhash: str) -> Source:
    """A plain picture, with sub-resolutions by halves."""
    levels = [pixels]
    while max(levels[-1].shape) > _LEAST_PX:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        return levels[level][at[1] : at[1] + size[1], at[0] : at[0] + size[0]]

    sizes = [(one.shape[1], one.shape[0]) for one in levels]
    return Levels(sizes, read, vendor="plain picture", mpp=mpp, quickhash=quickhash)


def _of_ome_tiff(path: Path) -> Source:
    """OME-TIFF: the first series, with its pyramid in SubIFDs."""
    _needed("imagecodecs", "formats", path)
    zarr = _needed("zarr", "formats", path)
    from tifffile import TiffFile

    with ExitStack() as stack:
        tif = stack.enter_context(TiffFile(path))
        series = tif.series[0]
        arrays = [zarr.open(series.aszarr(level=k), mode="r") for k in range(len(series.levels))]
        close = stack.pop_all().close
    axes = series.axes.lower().replace("s", "c")
    return _of_arrays(
        arrays,
        axes,
        vendor="ome-tiff",
        mpp=_mpp_of_ome(tif.ome_metadata),
        quickhash=_digest(path),
        close=close,
    )


def _mpp_of_ome(xml: str | None) -> tuple[float | None, float | None]:
    """µm per pixel, as the first image of OME-XML states it."""
    try:
        root = ElementTree.fromstring(xml or "")
    except ElementTree.ParseError:
        return None, None
    pixels = next((one for one in root.iter() if one.tag.endswith("}Pixels") or one.tag == "Pixels"), None)
    if pixels is None:
        return None, None

    def stated(axis: str) -> float | None:
        value, unit = pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm")
        return float(value) * _UM[unit] if value and unit in _UM else None

    return stated("X"), stated("Y")


def _of_zarr(path: Path) -> Source:
    """OME-Zarr (NGFF 0.4 and 0.5): the first of its multiscale images."""
    zarr = _needed("zarr", "formats", path)
    group = zarr.open_group(str(path), mode="r")
    attributes = dict(group.attrs)
    scales = attributes.get("ome", attributes).get("multiscales")
    if not scales:
        raise WsiFlError(f"{path.name}: a Zarr without multiscales; OME-Zarr 0.4 and 0.5 are read")
    image = scales[0]
    axes = "".join(axis["name"] for axis in image["axes"])
    arrays = [group[one["path"]] for one in image["datasets"]]
    steps = image["datasets"][0]["coordinateTransformations"][0]["scale"]
    units = {axis["name"]: _UM.get(axis.get("unit", ""), None) for axis in image["axes"]}

    def stated(axis: str) -> float | None:
        unit = units[axis]
        return float(steps[axes.index(axis)]) * unit if unit else None

    digest = hashlib.sha256()
    for file in sorted(one for name in (".z*", "zarr.json") for one in path.rglob(name) if one.is_file()):
        digest.update(file.relative_to(path).as_posix().encode() + file.read_bytes())
    return _of_arrays(
        arrays, axes, vendor="ome-zarr", mpp=(stated("x"), stated("y")), quickhash=digest.hexdigest()
    )


def _of_arrays(
    arrays: Sequence[Any],
    axes: str,
    *,
    vendor: str,
    mpp: tuple[float | None, float | None],
    quickhash: str,
    close: Callable[[], None] = lambda: None,
) -> Source:
    """A source of arrays that are sliced, as Zarr's: of their axes x, y and c all are read, of others the first."""
    if any(str(array.dtype) != "uint8" for array in arrays) or not {"x", "y", "c"} <= set(axes):
        raise WsiFlError(f"a slide has 8-bit colours; this has axes {axes} of {arrays[0].dtype}")
    if arrays[0].shape[axes.index("c")] < 3:
        raise WsiFlError(
            f"a slide has red, green and blue; this has {arrays[0].shape[axes.index('c')]} channels"
        )

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        cut = {"x": slice(at[0], at[0] + size[0]), "y": slice(at[1], at[1] + size[1]), "c": slice(0, 3)}
        found = np.asarray(arrays[level][tuple(cut.get(axis, 0) for axis in axes)])
        order = [axis for axis in axes if axis in cut]
        return np.moveaxis(found, [order.index(axis) for axis in "yxc"], [0, 1, 2])

    sizes = [(array.shape[axes.index("x")], array.shape[axes.index("y")]) for array in arrays]
    return Levels(sizes, read, vendor=vendor, mpp=mpp, quickhash=quickhash, close=close)


def _of_czi(path: Path) -> Source:
    """Zeiss CZI: halves of the whole as far as the file has a pyramid; beyond it libCZI would leave pixels out."""
    czi = _needed("pylibCZIrw.czi", "czi", path)
    with ExitStack() as stack:
        reader = stack.enter_context(czi.open_czi(str(path)))
        bounds = reader.total_bounding_rectangle_no_pyramid
        xml = reader.raw_metadata
        zooms = [1.0]

        def noted(_: int, block: Any) -> bool:
            zooms.append(block.get_zoom())
            return True

        reader.enumerate_subblocks(noted)
        close = stack.pop_all().close
    sizes, lock = [(bounds.w, bounds.h)], threading.Lock()
    while 0.5 ** len(sizes) >= 0.99 * min(zooms):
        sizes.append((max(1, sizes[-1][0] // 2), max(1, sizes[-1][1] // 2)))

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        step = 2**level
        roi = (bounds.x + at[0] * step, bounds.y + at[1] * step, size[0] * step, size[1] * step)
        with lock:
            found = reader.read(roi=roi, zoom=1 / step, pixel_type="Bgr24", background_pixel=(1.0, 1.0, 1.0))
        return np.asarray(found[: size[1], : size[0], ::-1], np.uint8)

    return Levels(sizes, read, vendor="zeiss czi", mpp=_mpp_of_czi(xml), quickhash=_digest(path), close=close)


def _mpp_of_czi(xml: str) -> tuple[float | None, float | None]:
    """µm per pixel; CZI says it in metres."""
    found: dict[str, float] = {}
    for distance in ElementTree.fromstring(xml).iter("Distance"):
        value = distance.findtext("Value")
        if value:
            found.setdefault(str(distance.get("Id")), float(value) * 1e6)
    return found.get("X"), found.get("Y")


def _of_isyntax(path: Path) -> Source:
    """Philips iSyntax."""
    slide = _needed("isyntax", "isyntax", path).ISyntax.open(path)
    lock = threading.Lock()

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        with lock:
            return np.asarray(slide.read_region(*at, *size, level))[..., :3]

    return Levels(
        slide.level_dimensions,
        read,
        vendor="philips isyntax",
        mpp=(slide.mpp_x, slide.mpp_y),
        quickhash=_digest(path),
        close=slide.close,
    )


def _digest(path: Path) -> str:
    """SHA-256 over a file's size, its first and its last bytes: enough to tell slides apart, at once."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(_HEAD)
        file.seek(max(0, size - _HEAD))
        return hashlib.sha256(str(size).encode() + head + file.read(_HEAD)).hexdigest()
