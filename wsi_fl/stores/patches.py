"""Patch stores: the columns of every patch of a site, and per slide a shard with its pixels.

`patches.h5` links to `slides/<slide>.h5`; see FORMAT.md. Shards are written to a temporary name and renamed,
so a crash loses at most the slide in hand, and a missing shard raises instead of reading as black.
"""

from __future__ import annotations

import hashlib
import json
import resource
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.files import atomic, reserve
from wsi_fl.types import SPLITS, GridSpec, PatchTable, WsiFlError

STORE_FORMAT = "wsi-fl patch store"
SHARD_FORMAT = "wsi-fl patch shard"
VERSION = 1
_OPEN_SHARDS = 128
"""Shards one reader keeps open, fewer where the system allows few files: joint training reads many stores."""


@dataclass(frozen=True)
class StoreMeta:
    """What holds for a whole store."""

    site: str
    classes: tuple[str, ...]
    spec: GridSpec


@dataclass(frozen=True)
class ShardMeta:
    """What holds for one slide of a store."""

    slide: str
    patient: str
    split: str
    spec: GridSpec
    quickhash: str
    """OpenSlide's quickhash of the slide, or "" where the format has none."""
    source: str = ""
    """What else decides the pixels; only its digest is stored."""


def fingerprint(meta: ShardMeta, table: PatchTable) -> str:
    """SHA-256 over all that decides a shard's content: format, slide, grid, split, positions and labels."""
    said = [VERSION, meta.slide, meta.patient, meta.split, meta.quickhash, meta.source]
    said += [meta.spec.size_px, meta.spec.mpp, meta.spec.stride_px]
    digest = hashlib.sha256(json.dumps(said).encode())
    for column in (table.xy_l0, table.label, table.tumor_fraction):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def shard_is_current(path: Path, wanted: str) -> bool | None:
    """Whether the shard has this fingerprint; None when there is no shard."""
    if not path.exists():
        return None
    try:
        with h5py.File(path, "r") as file:
            return bool(file.attrs.get("fingerprint") == wanted)
    except OSError:
        return False


def write_shard(
    path: Path, meta: ShardMeta, table: PatchTable, pixels: Iterable[NDArray[np.uint8]], *, channels: int = 3
) -> None:
    """Writes one slide's patches atomically.

    Args:
        pixels: batches uint8[b, size_px, size_px, channels] in the table's order, n rows in all.
        channels: 3 for RGB, 1 for grey images.

    Raises:
        WsiFlError: when the pixels are not n ≥ 1 patches of the right shape, or the disk is full.
    """
    n, size = len(table), meta.spec.size_px
    if n == 0:
        raise WsiFlError(f"{path}: a shard holds at least one patch")
    with atomic(path) as temporary, _created(temporary, n * (size * size * channels + _ROW_BYTES)) as file:
        file.attrs.update(
            _spec_attrs(meta.spec)
            | {
                "format": SHARD_FORMAT,
                "version": VERSION,
                "tool_version": __version__,
                "slide": meta.slide,
                "patient": meta.patient,
                "split": meta.split,
                "quickhash": meta.quickhash,
                "fingerprint": fingerprint(meta, table),
            }
        )
        for name in ("xy_l0", "label", "tumor_fraction"):
            file[name] = getattr(table, name)
        if (table.patient != meta.patient).any():  # images of many patients in one shard
            file["patient"] = _encoded(table.patient)
        dataset = file.create_dataset(
            "pixels", (n, size, size, channels), np.uint8, chunks=(1, size, size, channels), fillvalue=0
        )
        file.flush()  # from here on only whole patches are written, which fail cleanly
        row = 0
        for batch in pixels:
            if batch.shape[1:] != (size, size, channels) or batch.dtype != np.uint8:
                raise WsiFlError(
                    f"{path}: got patches {batch.dtype}{batch.shape}, expected uint8 of {size} px"
                )
            if row + len(batch) > n:
                raise WsiFlError(f"{path}: got more than the {n} patches expected")
            for patch in batch:
                dataset.id.write_direct_chunk((row, 0, 0, 0), np.ascontiguousarray(patch).tobytes())
                row += 1
        if row != n:
            raise WsiFlError(f"{path}: got {row} patches, expected {n}")


def write_columns(path: Path, meta: StoreMeta, shards: list[Path]) -> PatchTable:
    """Writes `patches.h5`: the columns of all shards, in the order given, and a link to each of them.

    Shards lie below the folder of `path`. Returns the columns written.
    """
    tables = [_shard_table(shard, meta.spec) for shard in shards]
    table = PatchTable.concat(tables) if tables else _empty_table()
    with atomic(path) as temporary, _created(temporary, _columns_bytes(table)) as file:
        _write_root(file, meta, table)
        links = file.create_group("slides", track_order=True)
        for shard, part in zip(shards, tables, strict=True):
            links[str(part.slide[0])] = h5py.ExternalLink(shard.relative_to(path.parent).as_posix(), "/")
    return table


def pack(source: Path, target: Path) -> None:
    """Copies a linked store into one self-contained file that reads the same."""
    with PatchStore(source) as store, atomic(target) as temporary:
        needed = len(store) * (store.meta.spec.size_px**2 * 3 + _ROW_BYTES) + _columns_bytes(store.table)
        with _created(temporary, needed) as file:
            _copy_into(file, store)


def _copy_into(file: h5py.File, store: PatchStore) -> None:
    _write_root(file, store.meta, store.table)
    slides = file.create_group("slides", track_order=True)
    for name in store.slides:
        group = slides.create_group(name)
        shard = store.shard(name)
        group.attrs.update(shard.attrs)
        for key in shard:
            shard.copy(key, group)


class PatchStore:
    """A patch store, read-only; linked and packed stores read the same.

    Attributes:
        meta: site, classes and grid.
        table: the columns of all n patches.
        slides: slide names in row order.

    Raises:
        WsiFlError: when the file is missing, damaged, of another format or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise WsiFlError(f"{path}: no such store; make it with `wsi-fl tile`")
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise WsiFlError(f"{path}: not a readable HDF5 file ({_first_line(error)})") from None
        try:
            _check_format(self._file, STORE_FORMAT, path)
            self.meta = _read_meta(self._file)
            self.table = _read_table(self._file)
        except (KeyError, OSError, TypeError, ValueError) as error:
            self._file.close()
            raise WsiFlError(f"{path}: damaged ({_first_line(error)}); run `wsi-fl tile` again") from None
        except BaseException:
            self._file.close()
            raise
        names, first, counts = np.unique(self.table.slide, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.slides = [str(name) for name in names[order]]
        self._rows = {str(names[k]): slice(int(first[k]), int(first[k] + counts[k])) for k in order}
        self._shards: OrderedDict[str, h5py.Group] = OrderedDict()
        self._most_open = _most_open()

    def __enter__(self) -> PatchStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.table)

    def close(self) -> None:
        self._shards.clear()
        self._file.close()

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for grey; every shard of a store has as many as the first."""
        return int(self.shard(self.slides[0])["pixels"].shape[-1]) if self.slides else 3

    def shard(self, slide: str) -> Any:
        """The HDF5 group of one slide; a shard that is missing, damaged or of other patches raises WsiFlError."""
        if slide not in self._shards:
            if len(self._shards) >= self._most_open:
                self._shards.popitem(last=False)
            try:
                group = self._open_shard(slide)
                _check_format(group, SHARD_FORMAT, self.path.parent / "slides" / f"{slide}.h5")
                self._check_columns(slide, group)
            except (KeyError, OSError, TypeError, ValueError) as error:
                raise WsiFlError(
                    f"{self.path}: the shard of slide {slide} is missing or damaged ({_first_line(error)}); "
                    "run `wsi-fl tile` again"
                ) from None
            self._shards[slide] = group
        self._shards.move_to_end(slide)
        return self._shards[slide]

    def _open_shard(self, slide: str) -> h5py.Group:
        """By the link's own path: HDF5 would go on to look in the current folder, where another site's may lie."""
        link = self._file["slides"].get(slide, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return h5py.File(self.path.parent / link.filename, "r")["/"]
        return self._file["slides"][slide]

    def _check_columns(self, slide: str, group: h5py.Group) -> None:
        """A `tile` that was killed leaves new shards under old columns: their labels would not be the pixels'."""
        rows = self._rows[slide]
        size, n = self.meta.spec.size_px, rows.stop - rows.start
        same = (
            bool(np.all(self.table.slide[rows] == slide))
            and {key: group.attrs[key] for key in _spec_attrs(self.meta.spec)} == _spec_attrs(self.meta.spec)
            and group["pixels"].shape in {(n, size, size, 1), (n, size, size, 3)}
            and np.array_equal(group["xy_l0"], self.table.xy_l0[rows])
            and np.array_equal(group["label"], self.table.label[rows])
            and np.array_equal(group["tumor_fraction"], self.table.tumor_fraction[rows], equal_nan=True)
        )
        if not same:
            raise WsiFlError(
                f"{self.path}: the shard of slide {slide} holds other patches; run `wsi-fl tile` again"
            )

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Pixels uint8[b, size_px, size_px, channels] of the rows, in the order asked for."""
        size = self.meta.spec.size_px
        channels = int(self.shard(str(self.table.slide[rows[0]]))["pixels"].shape[-1]) if len(rows) else 3
        out = np.empty((len(rows), size, size, channels), np.uint8)
        for position, row in enumerate(rows):
            slide = str(self.table.slide[row])
            pixels = self.shard(slide)["pixels"]
            try:
                _, chunk = pixels.id.read_direct_chunk((int(row) - self._rows[slide].start, 0, 0, 0))
                out[position] = np.frombuffer(chunk, np.uint8).reshape(out.shape[1:])
            except (OSError, RuntimeError, ValueError) as error:
                raise WsiFlError(
                    f"{self.path}: patch {row} in the shard of slide {slide} is damaged "
                    f"({_first_line(error)}); run `wsi-fl tile` again"
                ) from None
        return out


def _most_open() -> int:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _OPEN_SHARDS if allowed < 0 else max(1, min(_OPEN_SHARDS, allowed // 8))


_ROW_BYTES = 256
"""Room for a patch's columns and its place in the index of chunks."""
_SLIDE_BYTES = 1 << 14
"""Room for a slide's attributes, link and group."""


def _columns_bytes(table: PatchTable) -> int:
    text = sum(column.dtype.itemsize for column in (table.slide, table.patient, table.split))
    return len(table) * (text + _ROW_BYTES) + len(np.unique(table.slide)) * _SLIDE_BYTES


def _created(path: Path, n_bytes: int) -> h5py.File:
    """A new HDF5 file on a disk that can hold it."""
    reserve(path, n_bytes + _SLIDE_BYTES)
    return h5py.File(path, "w")


def _spec_attrs(spec: GridSpec) -> dict[str, Any]:
    return {"size_px": spec.size_px, "mpp": spec.mpp, "stride_px": spec.stride_px}


def _write_root(file: h5py.File, meta: StoreMeta, table: PatchTable) -> None:
    file.attrs.update(
        _spec_attrs(meta.spec)
        | {
            "format": STORE_FORMAT,
            "version": VERSION,
            "tool_version": __version__,
            "site": meta.site,
            "classes": json.dumps(meta.classes),
        }
    )
    for name in ("xy_l0", "label", "tumor_fraction"):
        file[name] = getattr(table, name)
    for name in ("slide", "patient", "split"):
        file[name] = _encoded(getattr(table, name))


def _encoded(texts: NDArray[np.str_]) -> NDArray[Any]:
    """As fixed-length UTF-8."""
    encoded = [str(text).encode() for text in texts]
    width = max((len(text) for text in encoded), default=0) or 1
    return np.array(encoded, h5py.string_dtype("utf-8", width))


def _check_format(node: Any, expected: str, path: Path) -> None:
    found, version = node.attrs.get("format"), node.attrs.get("version")
    if found != expected:
        raise WsiFlError(f"{path}: not a {expected} (format {found!r})")
    if version not in range(1, VERSION + 1):
        raise WsiFlError(
            f"{path}: {expected} version {version}, this wsi-fl reads up to {VERSION}; "
            "update wsi-fl or tile again"
        )


def _read_meta(file: h5py.File) -> StoreMeta:
    attrs = file.attrs
    spec = GridSpec(int(attrs["size_px"]), float(attrs["mpp"]), int(attrs["stride_px"]))
    return StoreMeta(str(attrs["site"]), tuple(json.loads(attrs["classes"])), spec)


def _read_table(file: h5py.File) -> PatchTable:
    text = {name: np.asarray(file[name].asstr()[:], dtype=np.str_) for name in ("slide", "patient", "split")}
    unknown = set(text["split"].tolist()) - set(SPLITS)
    if unknown:
        raise WsiFlError(
            f"{file.filename}: unknown split {sorted(unknown)[0]!r}; allowed: {', '.join(SPLITS)}"
        )
    return PatchTable(file["xy_l0"][:], file["label"][:], file["tumor_fraction"][:], **text)


def _shard_table(path: Path, spec: GridSpec) -> PatchTable:
    with h5py.File(path, "r") as file:
        _check_format(file, SHARD_FORMAT, path)
        if _spec_attrs(spec) != {key: file.attrs[key] for key in _spec_attrs(spec)}:
            raise WsiFlError(f"{path}: tiled on another grid than its store; run `wsi-fl tile` again")
        n = len(file["label"])
        slide, patient, split = (np.full(n, str(file.attrs[key])) for key in ("slide", "patient", "split"))
        if "patient" in file:
            patient = np.asarray(file["patient"].asstr()[:], np.str_)
        return PatchTable(
            file["xy_l0"][:], file["label"][:], file["tumor_fraction"][:], slide, patient, split
        )


def _empty_table() -> PatchTable:
    text = np.empty(0, np.str_)
    return PatchTable(
        np.empty((0, 2), np.int64), np.empty(0, np.int64), np.empty(0, np.float32), text, text, text
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
