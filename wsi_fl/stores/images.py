"""Image data sets as arrays: npz, HDF5 and folders of classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.stores.fields import DAMAGE, refuse_too_large, too_large
from wsi_fl.stores.hdf5 import opened, own_dataset, packs_too_much
from wsi_fl.system.files import refuse_unavailable
from wsi_fl.system.names import drop_companions
from wsi_fl.types import UsageError, WsiFlError, one_line

_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"}
_HDF5 = {".h5", ".hdf5"}
_GREY = {"L", "1", "I;16", "I;16B", "I;16L", "I", "F"}
_MOST_PX = 4096
_NAMES = {"x", "y", "x_train", "y_train", "x_test", "y_test"}
_UNREADABLE = (*DAMAGE, EOFError, BadZipFile, ZlibError)
_MOST_CLASSES = 10_000
"""Larger labels are no classes."""


@dataclass(frozen=True)
class Images:
    """n labelled images of one size: uint8[n, h, w, c] with c = 1 (grey) or 3 (RGB), labels int64[n]."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class DataSet:
    """Training images, test images of the data set (or None), and class names."""

    train: Images
    test: Images | None
    classes: tuple[str, ...]


def read_data_set(path: Path, size_px: int | None = None) -> DataSet:
    """Read an npz or HDF5 file (`x`, `y`, or `x_train`, `y_train`, `x_test`, `y_test`) or a folder of classes.

    A folder has one subfolder per class, or `train/` and `test/` with these; if no picture has any colour (radiographs
    saved as RGB), images are grey. Pixels are uint8, or floats in [0, 1]. With `size_px` images are
    scaled to squares of that size; without it they must be squares.

    Raises:
        UsageError: when the data are missing, of another form, not squares of one size, or more than fits into memory.
    """
    if size_px is not None and not 1 <= size_px <= _MOST_PX:
        raise UsageError(f"--size-px must be at least 1, and at most {_MOST_PX}")
    if path.is_dir():
        return _from_folder(path, size_px)
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
    arrays = _arrays(path)
    pairs = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
    if "x_train" not in arrays:
        pairs = {"train": ("x", "y")}
    sets = {name: _images(path, arrays, x, y, size_px) for name, (x, y) in pairs.items() if x in arrays}
    if "train" not in sets:
        raise UsageError(
            f"{path}: has {', '.join(sorted(arrays)) or 'nothing'}; needs x and y, or x_train and y_train"
        )
    n_classes = max(int(images.y.max()) for images in sets.values()) + 1
    shapes = {part.x.shape[1:] for part in sets.values()}
    if len(shapes) > 1:
        told = " and ".join("×".join(map(str, shape)) for shape in sorted(shapes))
        raise UsageError(f"{path}: training and test images are of two shapes, {told}")
    return DataSet(sets["train"], sets.get("test"), tuple(str(k) for k in range(n_classes)))


def _from_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        wanted = [name for name in file.files if name in _NAMES]
        stated = sum(_n_bytes(file.zip, name) for name in wanted)
        refuse_too_large(path, stated)
        if packs_too_much(stated, path.stat().st_size):
            raise UsageError(
                f"{path}: claims {stated} bytes, more than a file of its size can hold; it is damaged"
            )
        return {name: file[name] for name in wanted}


def _n_bytes(archive: Any, name: str) -> int:
    """Return the claimed bytes of an array in a zip file; 0 for an entry refused by numpy."""
    with archive.open(name if name in archive.namelist() else f"{name}.npy") as member:
        versions = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        read = versions.get(np.lib.format.read_magic(member))
        shape, _, dtype = read(member) if read else ((0,), False, np.dtype(np.uint8))
    return prod(shape) * dtype.itemsize


def _from_hdf5(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        wanted = {name: own_dataset(file, name) for name in file if name in _NAMES}
        refuse_too_large(path, sum(int(node.size) * node.dtype.itemsize for node in wanted.values()))
        return {name: node[()] for name, node in wanted.items()}


def _arrays(path: Path) -> dict[str, Any]:
    kind, read = ("HDF5", _from_hdf5) if path.suffix.lower() in _HDF5 else ("npz", _from_npz)
    try:
        return read(path)
    except _UNREADABLE as error:
        refuse_unavailable(error, path)
        raise UsageError(f"{path}: not a readable {kind} file ({one_line(error)})") from None
    except MemoryError as error:
        raise UsageError(f"{path}: {too_large(error)}") from None


def _images(path: Path, arrays: Mapping[str, Any], x: str, y: str, size_px: int | None) -> Images:
    if y not in arrays:
        raise UsageError(f"{path}: has {x} but no {y}")
    pixels, labels = _uint8(np.asarray(arrays[x]), f"{path}: {x}"), np.asarray(arrays[y])
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (len(pixels),) or not np.issubdtype(labels.dtype, np.integer):
        raise UsageError(f"{path}: {y} must be one whole number for each of the {len(pixels)} images in {x}")
    if labels.min() < 0:
        raise UsageError(f"{path}: {y} holds negative labels")
    if labels.max() >= _MOST_CLASSES:
        raise UsageError(f"{path}: {y} holds {labels.max()}; number the classes from 0")
    return Images(_square(pixels, size_px, f"{path}: {x}"), labels.astype(np.int64))


def _uint8(pixels: NDArray[Any], where: str) -> NDArray[np.uint8]:
    # uint8[n, h, w, c] of bytes or floats in [0, 1], [n, h, w], [n, h, w, c] or [n, c, h, w]
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4:
        raise UsageError(f"{where} has shape {pixels.shape}, not [n, h, w] or [n, h, w, c]")
    if not pixels.size:
        raise UsageError(f"{where} holds no images")
    if pixels.shape[-1] not in (1, 3) and pixels.shape[1] in (1, 3):
        pixels = np.moveaxis(pixels, 1, -1)
    if pixels.shape[-1] not in (1, 3):
        raise UsageError(f"{where} has {pixels.shape[-1]} channels, not 1 (grey) or 3 (RGB)")
    if pixels.dtype == np.uint8:
        return pixels
    if np.issubdtype(pixels.dtype, np.floating) and pixels.min() >= 0 and pixels.max() <= 1:
        return np.asarray((pixels * 255).round(), np.uint8)
    raise UsageError(f"{where} is {pixels.dtype}; needs uint8, or floats between 0 and 1")


def _square(pixels: NDArray[np.uint8], size_px: int | None, where: str) -> NDArray[np.uint8]:
    height, width, channels = pixels.shape[1:]
    if size_px is None:
        if height != width:
            raise UsageError(f"{where}: images are {width} × {height}; make them squares with --size-px")
        return pixels
    if (height, width) == (size_px, size_px):
        return pixels
    out = np.empty((len(pixels), size_px, size_px, channels), np.uint8)
    for k, image in enumerate(pixels):
        out[k] = _resized(Image.fromarray(image[..., 0] if channels == 1 else image), size_px, channels)
    return out


def _resized(image: Image.Image, size_px: int, channels: int) -> NDArray[np.uint8]:
    scaled = image.resize((size_px, size_px), Image.Resampling.BOX)
    return np.asarray(scaled, np.uint8).reshape(size_px, size_px, channels)


def _from_folder(folder: Path, size_px: int | None) -> DataSet:
    split = (folder / "train").is_dir()
    root = folder / "train" if split else folder
    classes = _classes(root)
    if not classes:
        raise UsageError(f"{root}: no folder of images in it; make one per class")
    roots = [root]
    if split and (folder / "test").is_dir():
        roots.append(folder / "test")
        unknown = sorted(set(_classes(roots[1])) - set(classes))
        if unknown or not _classes(roots[1]):
            what = f"{unknown[0]} is no class of {root}" if unknown else "no folder of images in it"
            raise UsageError(f"{roots[1]}: {what}")
    headers = []
    for path in (path for root in roots for name in classes for path in _files(root / name)):
        with _opened(path) as picture:
            headers.append((picture.mode, picture.size))
    mode = "L" if all(mode in _GREY for mode, _ in headers) else "RGB"
    sizes = {size for _, size in headers}
    if size_px is None and (len(sizes) > 1 or any(w != h for w, h in sizes)):
        what = f"images of {len(sizes)} sizes" if len(sizes) > 1 else "the images are no squares"
        raise UsageError(f"{folder}: {what}; make them squares of one size with --size-px")
    side = size_px or headers[0][1][0]
    parts = [_class_folders(root, classes, mode, side) for root in roots]
    if all((part.x == part.x[..., :1]).all() for part in parts):  # no colour
        parts = [Images(part.x[..., :1].copy(), part.y) for part in parts]
    return DataSet(parts[0], parts[1] if len(parts) > 1 else None, classes)


def _classes(root: Path) -> tuple[str, ...]:
    return tuple(path.name for path in drop_companions(root.iterdir()) if path.is_dir() and _files(path))


def _class_folders(root: Path, classes: Iterable[str], mode: str, side: int) -> Images:
    """Return all images of a folder, resized one by one: at full size they may not fit into memory."""
    files = [(path, k) for k, name in enumerate(classes) for path in _files(root / name)]
    channels = len(mode)
    refuse_too_large(root, len(files) * side**2 * channels)
    x = np.empty((len(files), side, side, channels), np.uint8)
    for k, (path, _) in enumerate(files):
        x[k] = _resized(_picture(path, mode), side, channels)
    return Images(x, np.array([label for _, label in files], np.int64))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    named = (path for path in drop_companions(folder.iterdir()) if path.suffix.lower() in _SUFFIXES)
    return [path for path in named if path.is_file()]  # a pipe would be waited for


def _picture(path: Path, mode: str) -> Image.Image:
    with _opened(path) as picture:
        if picture.mode in ("I", "F"):
            raise WsiFlError(f"{path}: has {picture.mode} pixels; save it with 8 or 16 bits a channel")
        if picture.mode.startswith("I;16"):  # converting would cut off at 255
            return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert(mode)
        return picture.convert(mode)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as picture:
            yield picture
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        refuse_unavailable(error, path)
        raise WsiFlError(f"{path}: not a readable image ({one_line(error)})") from None
