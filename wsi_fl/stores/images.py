"""Image data sets as arrays: npz, HDF5 and folders of classes."""

from __future__ import annotations

import csv
import gzip
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.stores.fields import DAMAGE, memory_message, refuse_too_large
from wsi_fl.stores.hdf5 import is_overpacked, open_hdf5, read_dataset
from wsi_fl.system.file_names import compose_text, drop_companions, find_file
from wsi_fl.system.files import refuse_unavailable
from wsi_fl.types import UsageError, WsiFlError, single_line

_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".jp2", ".webp", ".ppm", ".pgm"}
_HDF5 = {".h5", ".hdf5"}
_MAX_SIDE_PX = 4096
_SCALING = "--size-px (of import: --patch-px)"
_MEDMNIST_NAMES = {
    "train_images": "x_train",
    "train_labels": "y_train",
    "test_images": "x_test",
    "test_labels": "y_test",
}
_ARRAY_NAMES = {"x", "y", *_MEDMNIST_NAMES, *_MEDMNIST_NAMES.values()}
_IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_IDX_UINT8 = 8
UNREADABLE = (*DAMAGE, AssertionError, EOFError, BadZipFile, struct.error, ZlibError)
"""Errors of reading a damaged file of arrays."""
_Arrays = dict[str, NDArray[Any]]
_MAX_CLASSES = 10_000
"""Larger labels are no classes."""


@dataclass(frozen=True)
class ImageSet:
    """n labelled images of one size: uint8[n, h, w, c] with c = 1 (grey) or 3 (RGB), labels int64[n].

    Attributes:
        names: of each image's file, after its folder's, or of its slide in PCam; empty if unknown.
        source_px: side of the images before they were scaled; None where they were no squares of one size.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    names: tuple[str, ...] = ()
    source_px: int | None = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ImageDataSet:
    """Training images, test images of the data set (or None), and class names."""

    train: ImageSet
    test: ImageSet | None
    classes: tuple[str, ...]


def read_data_set(path: Path, size_px: int | None = None, *, empty_classes: bool = False) -> ImageDataSet:
    """Read an npz or HDF5 file (`x`, `y`, or `x_train`, `y_train`, `x_test`, `y_test`) or a folder.

    MedMNIST's names of arrays are known too; its validation images are not read. A folder holds the files of MNIST or
    of a data set in its format, as they are or as `.gz`, or one subfolder of images per class, or `train/` and `test/`
    with these, or PCam's files: `*_train_x.h5` and `*_train_y.h5`, the same of `test`, and `*_meta.csv`. Pixels are
    uint8, or floats in [0, 1]. With `size_px` images are scaled to squares of that size; without it they must be
    squares. With `empty_classes` an empty subfolder is a class without images, which other hospitals have.

    Raises:
        UsageError: when the data are missing, of another form, not squares of one size, or more than fits into memory.
    """
    if size_px is not None and not 1 <= size_px <= _MAX_SIDE_PX:
        raise UsageError(f"{_SCALING} must be at least 1, and at most {_MAX_SIDE_PX}")
    is_pcam = path.is_dir() and _find_pcam(path, "train_x.h5") is not None
    if path.is_dir() and not is_pcam and _find_idx(path, _IDX_NAMES["x_train"]) is None:
        return _read_class_folders(path, size_px, empty_classes)
    if not path.is_dir() and not path.is_file():  # or a pipe, which would be waited for
        raise UsageError(f"{path}: no such file or folder")
    arrays = _read_arrays(path)
    slides = {part: _read_pcam_slides(path, part) if path.is_dir() else () for part in ("train", "test")}
    pairs = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
    if "x_train" not in arrays:
        pairs = {"train": ("x", "y")}
    sets = {
        name: _build_images(path, arrays, x, y, size_px, slides[name]) for name, (x, y) in pairs.items() if x in arrays
    }
    if "train" not in sets:
        raise UsageError(f"{path}: has {', '.join(sorted(arrays)) or 'nothing'}; needs x and y, or x_train and y_train")
    n_classes = max(int(images.y.max()) for images in sets.values()) + 1
    shapes = {part.x.shape[1:] for part in sets.values()}
    if len(shapes) > 1:
        shapes_text = " and ".join("×".join(map(str, shape)) for shape in sorted(shapes))
        raise UsageError(f"{path}: training and test images are of two shapes, {shapes_text}")
    return ImageDataSet(sets["train"], sets.get("test"), tuple(str(k) for k in range(n_classes)))


def read_npz(path: Path, names: Collection[str]) -> _Arrays:
    """Return those of the named arrays that an npz file has; no more than fits into memory, and no objects.

    Raises:
        UsageError: when the file claims more than its size can hold.
    """
    with np.load(path, allow_pickle=False) as file:
        names = [name for name in file.files if name in names]
        stated = sum(_n_bytes(file.zip, name) for name in names)
        refuse_too_large(path, stated)
        if is_overpacked(stated, path.stat().st_size):
            raise UsageError(f"{path}: claims {stated} bytes, more than a file of its size can hold; it is damaged")
        return {name: file[name] for name in names}


def _n_bytes(archive: Any, name: str) -> int:
    """Return the claimed bytes of an array in a zip file; 0 for an entry refused by numpy."""
    with archive.open(name if name in archive.namelist() else f"{name}.npy") as member:
        versions = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        read = versions.get(np.lib.format.read_magic(member))
        shape, _, dtype = read(member) if read else ((0,), False, np.dtype(np.uint8))
    return prod(shape) * dtype.itemsize


def _read_hdf5(path: Path) -> _Arrays:
    with open_hdf5(path) as file:
        nodes = {name: read_dataset(file, name) for name in file if name in _ARRAY_NAMES}
        refuse_too_large(path, sum(int(node.size) * node.dtype.itemsize for node in nodes.values()))
        return {name: node[()] for name, node in nodes.items()}


def _find_pcam(folder: Path, ending: str) -> Path | None:
    """Return PCam's file of this ending in the folder, or None."""
    return next(iter(drop_companions(folder.glob(f"*_{ending}"))), None)


def _read_pcam(folder: Path) -> _Arrays:
    files = {f"{kind}_{part}": _find_pcam(folder, f"{part}_{kind}.h5") for part in ("train", "test") for kind in "xy"}
    return {name: next(iter(_read_hdf5(file).values())) for name, file in files.items() if file is not None}


def _read_pcam_slides(folder: Path, part: str) -> tuple[str, ...]:
    """Return the slide of each image of PCam's training or test images; () where its table is missing."""
    if (table := _find_pcam(folder, f"{part}_meta.csv")) is None:
        return ()
    with table.open(newline="", encoding="utf-8") as file:
        return tuple(row.get("wsi") or "" for row in csv.DictReader(file))


def _find_idx(folder: Path, name: str) -> Path | None:
    """Return the file of this name in the folder, or its gzip-compressed one, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_idx(path: Path) -> _Arrays:
    files = {name: _find_idx(path, file) for name, file in _IDX_NAMES.items()}
    if missing := [_IDX_NAMES[name] for name, file in files.items() if file is None]:
        raise OSError(f"{missing[0]} is missing")
    return {name: _read_idx_file(file) for name, file in files.items() if file is not None}


def _read_idx_file(path: Path) -> NDArray[np.uint8]:
    """Read an array of bytes in the format of MNIST's files (http://yann.lecun.com/exdb/mnist).

    Raises:
        ValueError: when it holds other numbers than bytes, or not as many as it states.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        kind, n_axes = struct.unpack(">HBB", file.read(4))[1:]
        if kind != _IDX_UINT8:
            raise ValueError(f"{path.name} holds no bytes")
        shape = struct.unpack(f">{n_axes}I", file.read(4 * n_axes))
        refuse_too_large(path, prod(shape))
        values = file.read(prod(shape) + 1)
    if len(values) != prod(shape):
        raise ValueError(f"{path.name} holds {len(values)} values or more where {prod(shape)} are stated")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _read_arrays(path: Path) -> _Arrays:
    read: Callable[[Path], _Arrays]
    kind, read = "npz file", partial(read_npz, names=_ARRAY_NAMES)
    if path.is_dir():
        is_pcam = _find_pcam(path, "train_x.h5") is not None
        kind, read = ("copy of PCam's files", _read_pcam) if is_pcam else ("copy of MNIST's four files", _read_idx)
    elif path.suffix.lower() in _HDF5:
        kind, read = "HDF5 file", _read_hdf5
    try:
        arrays = read(path)
    except UNREADABLE as error:
        refuse_unavailable(error, path)
        raise UsageError(f"{path}: not a readable {kind} ({single_line(error)})") from None
    except MemoryError as error:
        raise UsageError(f"{path}: {memory_message(error)}") from None
    return {_MEDMNIST_NAMES.get(name, name): array for name, array in arrays.items()}


def _build_images(
    path: Path, arrays: Mapping[str, Any], x: str, y: str, size_px: int | None, names: tuple[str, ...] = ()
) -> ImageSet:
    if y not in arrays:
        raise UsageError(f"{path}: has {x} but no {y}")
    pixels, labels = _convert_pixels(np.asarray(arrays[x]), f"{path}: {x}"), np.asarray(arrays[y])
    if labels.size == len(labels):  # [n, 1], and [n, 1, 1, 1] of PCam
        labels = labels.reshape(-1)
    if labels.shape != (len(pixels),) or not np.issubdtype(labels.dtype, np.integer):
        raise UsageError(f"{path}: {y} must be one whole number for each of the {len(pixels)} images in {x}")
    if labels.min() < 0:
        raise UsageError(f"{path}: {y} holds negative labels")
    if labels.max() >= _MAX_CLASSES:
        raise UsageError(f"{path}: {y} holds {labels.max()}; number the classes from 0")
    if names and len(names) != len(labels):
        raise UsageError(f"{path}: its table has {len(names)} rows for the {len(labels)} images in {x}")
    height, width = pixels.shape[1:3]
    squares = _make_square(pixels, size_px, f"{path}: {x}")
    return ImageSet(squares, labels.astype(np.int64), names, height if height == width else None)


def _convert_pixels(pixels: NDArray[Any], where: str) -> NDArray[np.uint8]:
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


def _make_square(pixels: NDArray[np.uint8], size_px: int | None, where: str) -> NDArray[np.uint8]:
    height, width, channels = pixels.shape[1:]
    if size_px is None:
        if height != width:
            raise UsageError(f"{where}: images are {width} × {height}; make them squares with {_SCALING}")
        return pixels
    if (height, width) == (size_px, size_px):
        return pixels
    out = np.empty((len(pixels), size_px, size_px, channels), np.uint8)
    for k, image in enumerate(pixels):
        picture = Image.fromarray(image[..., 0] if channels == 1 else image)
        out[k] = np.asarray(picture.resize((size_px, size_px), Image.Resampling.BOX)).reshape(out[k].shape)
    return out


def _read_class_folders(folder: Path, size_px: int | None, empty_classes: bool) -> ImageDataSet:
    is_split = (folder / "train").is_dir()
    roots = [folder / "train", folder / "test"] if is_split else [folder]
    roots = [root for root in roots if root.is_dir()]
    classes = _list_classes(roots[0], empty_classes)
    if unknown := sorted(set(_list_classes(roots[-1], False)) - set(classes)):
        raise UsageError(f"{roots[-1]}: {unknown[0]} is no class of {roots[0]}")
    files = [
        [(path, k) for k, name in enumerate(classes) for path in _list_files(find_file(root / name))] for root in roots
    ]
    labels = [np.array([k for _, k in part], np.int64) for part in files]
    x, source_px = _read_pictures(folder, [path for part in files for path, _ in part], size_px)
    names = [tuple(compose_text(f"{path.parent.name}/{path.stem}") for path, _ in part) for part in files]
    pixels = np.split(x, [len(labels[0])])
    parts = [ImageSet(*part, source_px) for part in zip(pixels, labels, names, strict=False)]
    return ImageDataSet(parts[0], parts[1] if len(parts) > 1 else None, classes)


def _list_classes(root: Path, empty_classes: bool) -> tuple[str, ...]:
    # return the names of folders with images, and of empty ones where these are classes
    folders = [path for path in drop_companions(root.iterdir()) if path.is_dir()]
    filled = {path for path in folders if _list_files(path)}
    is_class = [path in filled or (empty_classes and not any(path.iterdir())) for path in folders]
    classes = tuple(compose_text(path.name) for path in compress(folders, is_class))
    if not filled:
        raise UsageError(f"{root}: no folder of images in it; make one per class")
    for folder in folders:
        inner_paths = (
            path for path in drop_companions(folder.glob("*/**/*"), folder) if path.suffix.lower() in _SUFFIXES
        )
        if inner := next(inner_paths, None):
            raise UsageError(
                f"{folder}: {inner.relative_to(folder)} lies in a folder of its own; move such images up, beside the "
                "others of their class, or out of the data"
            )
    return classes


def _list_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    paths = (path for path in drop_companions(folder.iterdir()) if path.suffix.lower() in _SUFFIXES)
    return [path for path in paths if path.is_file()]  # a pipe would be waited for


def _read_pictures(folder: Path, paths: Sequence[Path], size_px: int | None) -> tuple[NDArray[np.uint8], int | None]:
    # return pictures as uint8[n, side, side, c], resized when they are read, and their side before, or None where they
    # were no squares of one size; c is 1 where none has any colour
    x, sides = np.empty((0, 0, 0, 1), np.uint8), set[int]()
    for k, path in enumerate(paths):
        picture = _read_picture(path)
        sides.update(picture.size)
        side = size_px or (len(x[0]) if k else picture.width)
        if size_px is None and picture.size != (side, side):
            raise UsageError(f"{folder}: images of several sizes, or no squares; make them squares with {_SCALING}")
        if not k:
            refuse_too_large(folder, len(paths) * side**2)
            x = np.empty((len(paths), side, side, 1), np.uint8)
        image = np.asarray(picture.resize((side, side), Image.Resampling.BOX))
        if x.shape[3] == 1 and (image != image[..., :1]).any():
            refuse_too_large(folder, 3 * x.size)
            x = np.repeat(x, 3, axis=3)
        x[k] = image[..., : x.shape[3]]
    return x, sides.pop() if len(sides) == 1 else None


def _read_picture(path: Path) -> Image.Image:
    # return a picture as RGB, transparent pixels on white, as glass is
    try:
        with Image.open(path) as picture:
            if picture.mode in ("I", "F"):
                raise WsiFlError(f"{path}: has {picture.mode} pixels; save it with 8 or 16 bits a channel")
            if picture.mode.startswith("I;16"):  # converting would cut off at 255
                return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
            if picture.has_transparency_data:
                white = Image.new("RGBA", picture.size, "white")
                return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
            return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        refuse_unavailable(error, path)
        raise WsiFlError(f"{path}: not a readable image ({single_line(error)})") from None
