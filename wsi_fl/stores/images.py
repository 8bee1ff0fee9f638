"""Image data sets as arrays: npz, HDF5 and folders of classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from wsi_fl.types import UsageError, WsiFlError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"}
_HDF5 = {".h5", ".hdf5"}


@dataclass(frozen=True)
class Images:
    """n labelled images of one size: uint8[n, h, w, c] with c = 1 (grey) or 3 (RGB), labels int64[n]."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class DataSet:
    """Training images, the test images the data set brings (or None), and the class names."""

    train: Images
    test: Images | None
    classes: tuple[str, ...]


def read_data_set(path: Path, size_px: int | None = None) -> DataSet:
    """Reads an npz or HDF5 file (`x`, `y`, or `x_train`, `y_train`, `x_test`, `y_test`) or a folder of classes.

    A folder holds one subfolder per class, or `train/` and `test/` with one each. Pixels are uint8, or floats
    in [0, 1]. With `size_px` images are scaled to squares of that size; without it they must be squares.

    Raises:
        UsageError: when the data are missing, of another form, or not squares of one size.
    """
    if path.is_dir():
        return _from_folder(path, size_px)
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
    arrays = _from_hdf5(path) if path.suffix.lower() in _HDF5 else _from_npz(path)
    pairs = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
    if "x_train" not in arrays:
        pairs = {"train": ("x", "y")}
    sets = {name: _images(path, arrays, x, y, size_px) for name, (x, y) in pairs.items() if x in arrays}
    if "train" not in sets:
        raise UsageError(
            f"{path}: has {', '.join(sorted(arrays)) or 'nothing'}; needs x and y, or x_train and y_train"
        )
    n_classes = max(int(images.y.max()) for images in sets.values() if len(images)) + 1
    return DataSet(sets["train"], sets.get("test"), tuple(str(k) for k in range(n_classes)))


def _from_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name[0] in "xy"}
    except (ValueError, OSError, BadZipFile) as error:
        raise UsageError(f"{path}: not a readable npz file ({str(error).splitlines()[0]})") from None


def _from_hdf5(path: Path) -> dict[str, Any]:
    try:
        with h5py.File(path, "r") as file:
            return {name: file[name][:] for name in file if name[0] in "xy"}
    except (OSError, AttributeError) as error:
        raise UsageError(f"{path}: not a readable HDF5 file ({str(error).splitlines()[0]})") from None


def _images(path: Path, arrays: Mapping[str, Any], x: str, y: str, size_px: int | None) -> Images:
    if y not in arrays:
        raise UsageError(f"{path}: has {x} but no {y}")
    pixels, labels = np.asarray(arrays[x]), np.asarray(arrays[y]).squeeze()
    if len(pixels) != len(labels) or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UsageError(f"{path}: {y} must be one whole number for each of the {len(pixels)} images in {x}")
    if len(labels) and labels.min() < 0:
        raise UsageError(f"{path}: {y} holds negative labels")
    return Images(_square(_uint8(pixels, f"{path}: {x}"), size_px, f"{path}: {x}"), labels.astype(np.int64))


def _uint8(pixels: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """[n, h, w], [n, h, w, c] or [n, c, h, w] of bytes or of floats in [0, 1] → uint8[n, h, w, c]."""
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4:
        raise UsageError(f"{where} has shape {pixels.shape}, not [n, h, w] or [n, h, w, c]")
    if pixels.shape[-1] not in (1, 3) and pixels.shape[1] in (1, 3):
        pixels = np.moveaxis(pixels, 1, -1)
    if pixels.shape[-1] not in (1, 3):
        raise UsageError(f"{where} has {pixels.shape[-1]} channels, not 1 (grey) or 3 (RGB)")
    if pixels.dtype == np.uint8:
        return pixels
    if np.issubdtype(pixels.dtype, np.floating) and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
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
        out[k] = _resized(Image.fromarray(image.squeeze()), size_px, channels)
    return out


def _resized(image: Image.Image, size_px: int, channels: int) -> NDArray[np.uint8]:
    scaled = image.resize((size_px, size_px), Image.Resampling.BOX)
    return np.asarray(scaled, np.uint8).reshape(size_px, size_px, channels)


def _from_folder(folder: Path, size_px: int | None) -> DataSet:
    split = (folder / "train").is_dir()
    root = folder / "train" if split else folder
    classes = tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and _files(p)))
    if not classes:
        raise UsageError(f"{root}: no folder of images in it; make one per class")
    train = _class_folders(root, classes, size_px)
    test = _class_folders(folder / "test", classes, size_px) if split and (folder / "test").is_dir() else None
    return DataSet(train, test, classes)


def _class_folders(root: Path, classes: Iterable[str], size_px: int | None) -> Images:
    files = [(path, k) for k, name in enumerate(classes) for path in _files(root / name)]
    pictures = [_open(path) for path, _ in files]
    grey = all(picture.mode in ("L", "1", "I;16") for picture in pictures)
    mode, channels = ("L", 1) if grey else ("RGB", 3)
    sizes = {picture.size for picture in pictures}
    if size_px is None and (len(sizes) > 1 or any(w != h for w, h in sizes)):
        raise UsageError(
            f"{root}: images of {len(sizes)} sizes; make them squares of one size with --size-px"
        )
    side = size_px or (next(iter(sizes))[0] if sizes else 1)
    x = np.empty((len(files), side, side, channels), np.uint8)
    for k, picture in enumerate(pictures):
        x[k] = _resized(picture.convert(mode), side, channels)
    return Images(x, np.array([label for _, label in files], np.int64))


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in _SUFFIXES) if folder.is_dir() else []


def _open(path: Path) -> Image.Image:
    try:
        picture = Image.open(path)
        picture.load()
    except (UnidentifiedImageError, OSError) as error:
        raise WsiFlError(f"{path}: not a readable image ({str(error).splitlines()[0]})") from None
    return picture
