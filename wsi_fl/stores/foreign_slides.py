"""Features of one slide in another tool's file, and what the readers of all layouts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.bag_store import UNKNOWN_PLACE, Bag, BagStore
from wsi_fl.system.file_names import drop_companions, slide_of
from wsi_fl.types import UsageError, WsiFlError

MAGNIFICATION_UM = 10.0
"""µm per pixel times magnification: 40× is 0.25 µm, as TRIDENT, CLAM and most scanners round it."""


@dataclass(frozen=True)
class FileFacts:
    """The facts in a file on its patches; None if missing.

    Attributes:
        encoder: name of the encoder.
        size_px, overlap_px: of a patch as the encoder's input was cut, at `mpp`.
        mpp: µm per pixel of the patches.
        nominal: whether `mpp` only follows from a magnification.
        mpp_l0: µm per level-0 pixel of the slide.
        input_px: side of the images that the network saw.
        transform: how they were made of patches, as slide2vec states it.
        names_patients: whether files are of patients, and named by them.
    """

    encoder: str | None = None
    size_px: int | None = None
    overlap_px: int | None = None
    mpp: float | None = None
    nominal: bool = False
    mpp_l0: float | None = None
    input_px: int | None = None
    transform: Mapping[str, Any] | None = None
    names_patients: bool = False


@dataclass(frozen=True)
class ForeignSlide:
    """The features of one slide in another tool's file, and top-left corners in level-0 pixels or in µm.

    Attributes:
        half_um: half of a patch's side in µm, where `xy` are level-0 pixels of centres; 0 for corners.
    """

    features: NDArray[np.float32]
    xy: NDArray[Any] | None
    facts: FileFacts
    is_in_um: bool = False
    half_um: float = 0.0
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None

    def build_bag(self, mpp_l0: float | None) -> Bag:
        """Return the bag with places in level-0 pixels, or unknown places; those in µm need `mpp_l0`."""
        unit = mpp_l0 if self.is_in_um or self.half_um else 1.0
        if self.xy is None or unit is None:
            xy = np.full((len(self.features), 2), UNKNOWN_PLACE, np.int64)
        else:
            pixels = self.xy / unit if self.is_in_um else self.xy - self.half_um / unit
            xy = np.rint(pixels).astype(np.int64)
        return Bag(self.features, xy, self.cluster, self.weight)


@dataclass(frozen=True)
class FeatureLayout:
    """The functions for one tool's layout of features.

    Attributes:
        find: folder → the file of every slide by name; UsageError without any.
        read: file → its features; WsiFlError of one line for an invalid file.
        write: store, folder → the files of its slides; None if not supported.
        takes_encoder: whether a file may have features of several encoders, and `read` takes the name of one.
    """

    find: Callable[[Path], dict[str, Path]]
    read: Callable[..., ForeignSlide]
    write: Callable[[BagStore, Path], list[Path]] | None = None
    takes_encoder: bool = False


def check_features(values: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return features as float32[m, d]; [1, m, d] is one bag too, and [d] one vector of a whole slide.

    Raises:
        WsiFlError: for another shape or type, or numbers that are not finite.
    """
    if values.ndim == 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or values.dtype.kind != "f":
        raise WsiFlError(f"{name}: features are {values.dtype}{list(values.shape)}, not float[patches, width]")
    if not values.size:
        raise WsiFlError(f"{name}: the bag is empty")
    with np.errstate(over="ignore"):
        features = values.astype(np.float32, copy=False)
    if not np.isfinite(features).all():
        raise WsiFlError(f"{name}: features are not finite")
    return features


def check_places(values: NDArray[Any], n: int, name: str) -> NDArray[Any]:
    """Return places as [n, 2].

    Raises:
        WsiFlError: for another shape, or numbers that are not finite.
    """
    if values.shape == (1, n, 2):
        values = values[0]
    if values.shape != (n, 2) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise WsiFlError(
            f"{name}: coords are {values.dtype}{list(values.shape)}, not two numbers for each of {n} patches"
        )
    return values


def list_files(folder: Path, suffix: str, *, is_deep: bool = False) -> list[Path]:
    """Return the files of a folder, or below it, with a suffix in any case, without companions."""
    paths = folder.rglob("*") if is_deep else folder.glob("*")
    return drop_companions((path for path in paths if path.suffix.lower() == suffix and not path.is_dir()), folder)


def find_files(folder: Path, suffix: str, missing: str) -> dict[str, Path]:
    """Return the file of each slide in or below a folder by name.

    Raises:
        UsageError: without any, or when a slide has two.
    """
    if not (files := list_files(folder, suffix, is_deep=True)):
        raise UsageError(f"{folder}: no {missing} in it")
    return index_by_slide(folder, files)


def index_by_slide(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return the file of each slide by name.

    Raises:
        UsageError: when a slide has two; names them.
    """
    slide_files: dict[str, Path] = {}
    for path in sorted(files):
        if (other := slide_files.setdefault(slide_of(path), path)) != path:
            folder_names = sorted({slide_path.relative_to(folder).parts[0] for slide_path in (other, path)})
            if len(folder_names) > 1 and len(path.relative_to(folder).parts) > 1:
                raise UsageError(f"{folder}: {several_folders_message(folder_names)}")
            raise UsageError(
                f"slide {slide_of(path)} has two files, {other} and {path}; name the folder of one kind with --from, "
                "or rename one"
            )
    return dict(sorted(slide_files.items()))


def several_folders_message(folders: Sequence[str]) -> str:
    """Return the refusal of several folders of features, with their names."""
    return f"several folders of features ({', '.join(folders)}); name one of them with --from"


def read_number(attrs: Mapping[str, Any], name: str) -> float | None:
    """Return a positive number among attributes, or None."""
    try:
        value = float(attrs[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if 0 < value < float("inf") else None
