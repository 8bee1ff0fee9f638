"""What the files of a store hold, and how it is checked; FORMAT.md in code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.system.machine import free_bytes
from wsi_fl.types import SPLITS, GridSpec, PatchTable, UsageError, WsiFlError

T = TypeVar("T")
STORE_FORMAT = "wsi-fl patch store"


SHARD_FORMAT = "wsi-fl patch shard"


VERSION = 1
"""The version of all formats here; a file of another version is refused."""


@dataclass(frozen=True)
class StoreMeta:
    """What holds for a whole store."""

    site: str
    classes: tuple[str, ...]
    spec: GridSpec
    generator: str | None = None
    """Of synthetic patches: where they come from, a JSON object; None for patches of slides and images."""
    min_tissue: float | None = None
    """Of slides: the least share of tissue in a patch; None where the store does not say."""


def spec_attrs(spec: GridSpec) -> dict[str, Any]:
    """Return a grid as HDF5 attributes."""
    return {"size_px": spec.size_px, "mpp": spec.mpp, "stride_px": spec.stride_px}


def write_root(file: h5py.File, meta: StoreMeta) -> None:
    """Write the root attributes of `patches.h5`."""
    file.attrs.update(
        spec_attrs(meta.spec)
        | {
            "format": STORE_FORMAT,
            "version": VERSION,
            "tool_version": __version__,
            "site": meta.site,
            "classes": json.dumps(meta.classes),
        }
        | _origin_attrs(meta)
    )


def _origin_attrs(meta: StoreMeta) -> dict[str, Any]:
    """Return the optional root attributes that say where patches come from."""
    synthetic = {} if meta.generator is None else {"synthetic": True, "generator": meta.generator}
    return synthetic | ({} if meta.min_tissue is None else {"min_tissue": meta.min_tissue})


def encoded_text(texts: Iterable[str]) -> NDArray[Any]:
    """Return texts as fixed-length UTF-8."""
    encoded = [str(text).encode() for text in texts]
    width = max((len(text) for text in encoded), default=0) or 1
    return np.array(encoded, h5py.string_dtype("utf-8", width))


def read_spec(attrs: Any) -> GridSpec:
    """Return the grid that `spec_attrs` wrote."""
    return GridSpec(int(attrs["size_px"]), float(attrs["mpp"]), int(attrs["stride_px"]))


Marked = tuple[tuple[int, int, str], ...]
"""(x, y) of patches in level-0 pixels, and the reason why they are no rows."""


def read_marked(node: Any, what: Literal["unread", "aside"]) -> Marked:
    """Return the patches of a shard that could not be read, or that were set aside for their quality."""
    if f"{what}_xy_l0" not in node:
        return ()
    corners, reasons = node[f"{what}_xy_l0"][:].tolist(), node[f"{what}_reason"].asstr()[:]
    return tuple((x, y, str(why)) for (x, y), why in zip(corners, reasons, strict=True))


def marked_columns(what: Literal["unread", "aside"], marked: Marked) -> dict[str, NDArray[Any]]:
    """Return the datasets that `read_marked` reads; none where nothing is marked."""
    if not marked:
        return {}
    corners = np.array([(x, y) for x, y, _ in marked], np.int64)
    return {f"{what}_xy_l0": corners, f"{what}_reason": encoded_text(why for _, _, why in marked)}


def check_format(node: Any, expected: str, path: Path) -> None:
    """Refuse a file of another format or version.

    Raises:
        WsiFlError: when it is one.
    """
    found, version = node.attrs.get("format"), node.attrs.get("version")
    if found != expected:
        raise WsiFlError(f"{path}: not a {expected} (format {found!r})")
    if version != VERSION:
        raise WsiFlError(
            f"{path}: {expected} version {version}, this wsi-fl reads version {VERSION}; "
            "update wsi-fl, or make it again"
        )


def json_attribute(attrs: Any, name: str, kind: type[T]) -> T:
    """Return the JSON document of an attribute.

    Raises:
        KeyError: when there is no such attribute.
        ValueError: when it is no JSON, or not of that kind.
    """
    try:
        value = json.loads(attrs[name])
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"attribute {name} is not JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"attribute {name} is no JSON {'object' if kind is dict else 'list'}")
    return value


def read_meta(file: h5py.File) -> StoreMeta:
    """Return what the root attributes say of a whole store."""
    attrs = file.attrs
    spec = read_spec(attrs)
    generator = str(attrs["generator"]) if "generator" in attrs else None
    min_tissue = float(attrs["min_tissue"]) if "min_tissue" in attrs else None
    return StoreMeta(
        str(attrs["site"]), tuple(json_attribute(attrs, "classes", list)), spec, generator, min_tissue
    )


def read_table(file: h5py.File, n_classes: int) -> PatchTable:
    """Return the columns of all patches; they are checked by `require_sound`."""
    text = {name: np.asarray(file[name].asstr()[:], dtype=np.str_) for name in ("slide", "patient", "split")}
    table = PatchTable(file["xy_l0"][:], file["label"][:], file["tumor_fraction"][:], **text)
    require_sound(table.label, table.patient, table.split, n_classes)
    return table


def patients_of(shard: Any, n: int) -> NDArray[np.str_]:
    """Return the patient of each row of a shard, from the column where there is one, else from the attribute."""
    if "patient" in shard:
        return np.asarray(shard["patient"].asstr()[:], np.str_)
    return np.full(n, str(shard.attrs["patient"]))


def require_sound(
    label: NDArray[Any], patient: NDArray[np.str_], split: NDArray[np.str_], n_classes: int
) -> None:
    """Refuse columns, each [n], that no model may be trained on.

    Raises:
        ValueError: when labels are not one column or lie beyond the classes, a split is unknown, or a patient is in two
            splits.

    Example:
        >>> patients, splits = np.array(["p", "q", "p"]), np.array(["train", "train", "test"])
        >>> require_sound(np.array([0, 1, 0]), patients, splits, 2)
        Traceback (most recent call last):
        ValueError: patient p is in two splits (train and test)
    """
    if unknown := set(split.tolist()) - set(SPLITS):
        raise ValueError(f"unknown split {min(unknown)!r}, allowed: {', '.join(SPLITS)}")
    if label.ndim != 1:
        raise ValueError(f"column label has {label.ndim} dimensions instead of one")
    if len(label) and not 0 <= label.min() <= label.max() < n_classes:
        wrong = label.min() if label.min() < 0 else label.max()
        raise ValueError(f"label {wrong} of {n_classes} classes, which are numbered from 0")
    of_split = {one: set(patient[split == one].tolist()) for one in SPLITS}
    for one, other in combinations(SPLITS, 2):
        if both := of_split[one] & of_split[other]:
            raise ValueError(f"patient {min(both)} is in two splits ({one} and {other})")


def too_large(error: MemoryError) -> str:
    """Return the message for a file that claims more than fits into memory, which damage may do too."""
    return f"damaged, or it holds more than fits into memory ({first_line(error) or 'out of memory'})"


def refuse_too_large(where: object, n_bytes: int) -> None:
    """Refuse what does not fit into memory before any is taken.

    Raises:
        UsageError: when more bytes are wanted than are free.
    """
    if n_bytes > (room := free_bytes()):
        raise UsageError(
            f"{where}: damaged, or it holds more than fits into memory ({n_bytes / 1e9:.3g} GB; {room / 1e9:.3g} GB "
            "are free)"
        )


def first_line(error: BaseException) -> str:
    """Return an error's message in one line; that of a system call without errno and path."""
    if isinstance(error, ArithmeticError | AttributeError | TypeError):
        return "a group, dataset or attribute is not what it should be"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0]
