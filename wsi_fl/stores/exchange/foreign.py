"""Bags of features that other tools wrote: a file is read whole, or refused in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores import hdf5
from wsi_fl.stores.bags import UNPLACED, Bag, BagStore
from wsi_fl.stores.fields import first_line, too_large
from wsi_fl.stores.own import is_own, own_dataset
from wsi_fl.types import UsageError, WsiFlError

MAGNIFIED = 10.0
"""µm per pixel times magnification: 40× is 0.25 µm, as TRIDENT, CLAM and most scanners round it."""


@dataclass(frozen=True)
class Facts:
    """What a file says of its patches; None where it says nothing.

    Attributes:
        encoder: name of what made the features.
        size_px, overlap_px: of a patch as the encoder's input was cut, at `mpp`.
        mpp: µm per pixel of the patches.
        nominal: whether `mpp` only follows from a magnification.
        mpp_l0: µm per level-0 pixel of the slide.
    """

    encoder: str | None = None
    size_px: int | None = None
    overlap_px: int | None = None
    mpp: float | None = None
    nominal: bool = False
    mpp_l0: float | None = None


@dataclass(frozen=True)
class Places:
    """Where m patches lie: top-left corners [m, 2], in level-0 pixels or in µm."""

    xy: NDArray[Any]
    in_um: bool = False


@dataclass(frozen=True)
class Foreign:
    """The features of one slide in another tool's file.

    Attributes:
        features: float32[m, d].
        places: None where the file has none.
        cluster, weight: as in `Bag`, which only our own exports have.
    """

    features: NDArray[np.float32]
    places: Places | None
    facts: Facts
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None

    def bag(self, mpp_l0: float | None) -> Bag:
        """Return the bag with its places in level-0 pixels, or unplaced where they cannot be known.

        Args:
            mpp_l0: µm per level-0 pixel of the slide, which places in µm need.
        """
        places = self.places
        unit = mpp_l0 if places is not None and places.in_um else 1.0
        if places is None or unit is None:
            xy = np.full((len(self.features), 2), UNPLACED, np.int64)
        else:
            xy = np.rint(places.xy / unit).astype(np.int64)
        return Bag(self.features, xy, self.cluster, self.weight)


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file of another tool.

    Raises:
        WsiFlError: in one line, whatever is wrong with it.
    """
    try:
        with hdf5.opened(path) as file:
            yield file
    except WsiFlError:
        raise
    except KeyError as error:
        raise WsiFlError(f"{path.name}: damaged, or not of this format ({first_line(error)})") from None
    except (OSError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise WsiFlError(f"{path.name}: not a readable HDF5 file ({first_line(error)})") from None
    except MemoryError as error:
        raise WsiFlError(f"{path.name}: {too_large(error)}") from None


def checked_features(values: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return features as float32[m, d]; [1, m, d] is one bag too, and [d] one vector of a whole slide.

    Raises:
        WsiFlError: when they have another shape, are no numbers, or there are none.
    """
    if values.ndim == 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or values.dtype.kind != "f":
        raise WsiFlError(
            f"{name}: features are {values.dtype}{list(values.shape)}, not float[patches, width]"
        )
    if not values.size:
        raise WsiFlError(f"{name}: the bag is empty")
    with np.errstate(over="ignore"):
        features = values.astype(np.float32, copy=False)
    if not np.isfinite(features).all():
        raise WsiFlError(f"{name}: features are not finite")
    return features


def checked_places(values: NDArray[Any], n: int, name: str, *, in_um: bool = False) -> Places:
    """Return the places of n patches.

    Raises:
        WsiFlError: when they are not two numbers for every patch.
    """
    if values.shape == (1, n, 2):
        values = values[0]
    if values.shape != (n, 2) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise WsiFlError(
            f"{name}: coords are {values.dtype}{list(values.shape)}, not two numbers for each of {n} patches"
        )
    return Places(values, in_um)


def kept_besides(file: h5py.File, n: int) -> dict[str, Any]:
    """Return groups and weights of n patches, as our own exports hold them.

    Raises:
        WsiFlError: when there is not one of each for every patch.
    """
    found = {name: own_dataset(file, name)[:] for name in ("cluster", "weight") if is_own(file, name)}
    if any(values.shape != (n,) for values in found.values()):
        raise WsiFlError(f"{Path(file.filename).name}: not one group and weight for every patch")
    return found


def write_besides(file: h5py.File, bag: Bag) -> None:
    """Write what `kept_besides` reads; other tools pass over it."""
    for name in ("cluster", "weight"):
        if (values := getattr(bag, name)) is not None:
            file[name] = values


def number_of(attrs: Mapping[str, Any], name: str) -> float | None:
    """Return a positive number among attributes; None where there is none."""
    try:
        value = float(attrs[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if 0 < value < float("inf") else None


def text_of(attrs: Mapping[str, Any], name: str) -> str | None:
    """Return a text among attributes; None where there is none, or where a tool wrote "None"."""
    value = attrs.get(name)
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return None if value is None or text in {"", "None"} else text


def by_slide(files: Iterable[Path]) -> dict[str, Path]:
    """Return the file of every slide by name, in order.

    Raises:
        UsageError: when two files are of one slide.
    """
    found: dict[str, Path] = {}
    for path in sorted(files):
        if path.stem in found:
            raise UsageError(f"slide {path.stem} has two files, {found[path.stem]} and {path}; remove one")
        found[path.stem] = path
    return found


def mpp_of_each(store: BagStore) -> NDArray[np.float64]:
    """Return [s] µm per level-0 pixel of each slide.

    Raises:
        WsiFlError: when the store does not say.
    """
    if store.mpp_l0 is None:
        raise WsiFlError(f"{store.path}: does not say how large its patches are on the slides; make it again")
    return store.mpp_l0
