"""Features of slides in other tools' layouts; an invalid file is refused in one line.

TRIDENT (mahmoodlab/TRIDENT, `WSI.extract_patch_features`): `features_<encoder>/<slide>.h5`. `features` float[m, d] has
the attribute `encoder`; `coords` int64[m, 2] in level-0 pixels has those of the patching: `patch_size` at the target
magnification, `patch_size_level0`, `level0_magnification`, `target_magnification` and `overlap`. Of encoders of whole
slides, `slide_features_<encoder>/<slide>.h5` has `features` float[d].

CLAM (mahmoodlab/CLAM, `extract_features_fp.py`): `h5_files/<slide>.h5` with `features` float32[m, d] and `coords`
int32[m, 2] in level-0 pixels, which says neither encoder nor patch size; `pt_files/<slide>.pt` is the features alone as
a tensor, which is what CLAM's training reads.

STAMP (KatherLab/STAMP, `stamp preprocess`): `<extractor>-<hash>/…/<slide>.h5`. `feats` float[m, d] and `coords`
float32[m, 2] in µm from the slide's corner; root attributes `extractor`, `unit`, `tile_size_um` (`tile_size` before
2.1), `tile_size_px`. How large a pixel of the slide is, the file does not say. Vectors of whole slides and patients are
`feats` float[d] with the attributes `encoder` and `feat_type`, without places; the latter lie in `<patient>.h5`.

AnnData of one slide (scverse, `write_h5ad`), as LazySlide makes it of its tiles: `<slide>.h5ad`. `X` float[m, d];
`obsm/spatial` [m, 2], the corners of tiles in level-0 pixels; `uns/tile_spec` with `width`, `stride_width` and `mpp` of
a tile; `uns/slide_properties` with `mpp` of the slide. All but `X` may be missing or empty, as None is written.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.bag_store import UNKNOWN_PLACE, Bag, BagStore
from wsi_fl.stores.fields import first_line, memory_message, refuse_too_large
from wsi_fl.stores.foreign_writers import (
    EXTRA_COLUMNS,
    MAGNIFICATION_UM,
    TRIDENT_PREFIX,
    write_clam,
    write_stamp,
    write_trident,
)
from wsi_fl.stores.hdf5 import find_entry, has_entry, open_hdf5, read_dataset, read_group
from wsi_fl.system.file_names import is_companion, slide_of
from wsi_fl.system.files import refuse_unavailable, require_regular_file
from wsi_fl.types import UsageError, WsiFlError, single_line


@dataclass(frozen=True)
class FileFacts:
    """The facts in a file on its patches; None if missing.

    Attributes:
        encoder: name of the encoder.
        size_px, overlap_px: of a patch as the encoder's input was cut, at `mpp`.
        mpp: µm per pixel of the patches.
        nominal: whether `mpp` only follows from a magnification.
        mpp_l0: µm per level-0 pixel of the slide.
        names_patients: whether files are of patients, and named by them.
    """

    encoder: str | None = None
    size_px: int | None = None
    overlap_px: int | None = None
    mpp: float | None = None
    nominal: bool = False
    mpp_l0: float | None = None
    names_patients: bool = False


@dataclass(frozen=True)
class _ForeignSlide:
    """The features of one slide in another tool's file, and top-left corners in level-0 pixels or in µm."""

    features: NDArray[np.float32]
    xy: NDArray[Any] | None
    facts: FileFacts
    is_in_um: bool = False
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None

    def build_bag(self, mpp_l0: float | None) -> Bag:
        """Return the bag with places in level-0 pixels, or unknown places; those in µm need `mpp_l0`."""
        unit = mpp_l0 if self.is_in_um else 1.0
        if self.xy is None or unit is None:
            xy = np.full((len(self.features), 2), UNKNOWN_PLACE, np.int64)
        else:
            xy = np.rint(self.xy / unit).astype(np.int64)
        return Bag(self.features, xy, self.cluster, self.weight)


@dataclass(frozen=True)
class FeatureLayout:
    """The functions for one tool's layout of features.

    Attributes:
        find: folder → the file of every slide by name; UsageError without any.
        read: file → its features; WsiFlError of one line for an invalid file.
        write: store, folder → the files of its slides; None if not supported.
    """

    find: Callable[[Path], dict[str, Path]]
    read: Callable[[Path], _ForeignSlide]
    write: Callable[[BagStore, Path], list[Path]] | None = None


@contextmanager
def _open_foreign(path: Path) -> Iterator[h5py.File]:
    try:
        with open_hdf5(path) as file:
            yield file
    except WsiFlError:
        raise
    except KeyError as error:
        raise WsiFlError(f"{path.name}: damaged, or not of this format ({first_line(error)})") from None
    except (OSError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        refuse_unavailable(error, path.name)
        raise WsiFlError(f"{path.name}: not a readable HDF5 file ({first_line(error)})") from None
    except MemoryError as error:
        raise WsiFlError(f"{path.name}: {memory_message(error)}") from None


def _check_features(values: NDArray[Any], name: str) -> NDArray[np.float32]:
    # as float32[m, d]; [1, m, d] is one bag too, and [d] one vector of a whole slide
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


def _check_places(values: NDArray[Any], n: int, name: str) -> NDArray[Any]:
    if values.shape == (1, n, 2):
        values = values[0]
    if values.shape != (n, 2) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise WsiFlError(
            f"{name}: coords are {values.dtype}{list(values.shape)}, not two numbers for each of {n} patches"
        )
    return values


def _read_extra_columns(file: h5py.File, n: int) -> dict[str, Any]:
    columns = {name: read_dataset(file, name)[:] for name in EXTRA_COLUMNS if has_entry(file, name)}
    if any(values.shape != (n,) for values in columns.values()):
        raise WsiFlError(f"{Path(file.filename).name}: not one group and weight for every patch")
    return columns


def _read_number(attrs: Mapping[str, Any], name: str) -> float | None:
    """Return a positive number among attributes, or None."""
    try:
        value = float(attrs[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if 0 < value < float("inf") else None


def _read_text(attrs: Mapping[str, Any], name: str) -> str | None:
    """Return a text among attributes; None if missing, empty or "None"."""
    value = attrs.get(name)
    if isinstance(value, h5py.Empty):
        return None
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return None if value is None or text in {"", "None"} else text


def _list_files(folder: Path, suffix: str, *, is_deep: bool = False) -> list[Path]:
    """Return the files of a folder, or below it, with a suffix in any case, without companions."""
    paths = folder.rglob("*") if is_deep else folder.glob("*")
    candidates = (path for path in paths if path.suffix.lower() == suffix and not path.is_dir())
    return sorted(path for path in candidates if not any(map(is_companion, _relative_parts(path, folder))))


def _relative_parts(path: Path, folder: Path) -> list[Path]:
    return [Path(part) for part in path.relative_to(folder).parts]


def _index_by_slide(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    slide_files: dict[str, Path] = {}
    for path in sorted(files):
        if (other := slide_files.setdefault(slide_of(path), path)) != path:
            folder_names = sorted({str(_relative_parts(slide_path, folder)[0]) for slide_path in (other, path)})
            if len(folder_names) > 1 and len(path.relative_to(folder).parts) > 1:
                raise UsageError(f"{folder}: {_several_folders_message(folder_names)}")
            raise UsageError(
                f"slide {slide_of(path)} has two files, {other} and {path}; name the folder of one kind with --from, "
                "or rename one"
            )
    return dict(sorted(slide_files.items()))


def _several_folders_message(folders: Sequence[str]) -> str:
    return f"several folders of features ({', '.join(folders)}); name one of them with --from"


def _find_trident(folder: Path) -> dict[str, Path]:
    # in `features_<encoder>`, or in the one such folder below; else in the one of vectors of whole slides
    if files := _list_files(folder, ".h5"):
        return _index_by_slide(folder, files)
    subfolders = [path for path in folder.rglob(f"*{TRIDENT_PREFIX}*") if path.is_dir() and _list_files(path, ".h5")]
    folders = [path for path in subfolders if path.name.startswith(TRIDENT_PREFIX)] or subfolders
    if len(folders) != 1:
        listing = _several_folders_message(sorted(path.name for path in folders))
        raise UsageError(f"{folder}: {listing if folders else f'no {TRIDENT_PREFIX}<encoder>/*.h5 in it'}")
    return _index_by_slide(folders[0], _list_files(folders[0], ".h5"))


def _find_clam(folder: Path) -> dict[str, Path]:
    # `.h5` goes before `.pt`, which holds no places
    slide_files: dict[str, Path] = {}
    for suffix in (".pt", ".h5"):
        for subfolder in (folder, folder / f"{suffix[1:]}_files"):
            slide_files |= _index_by_slide(subfolder, _list_files(subfolder, suffix))
    if not slide_files:
        raise UsageError(f"{folder}: neither h5_files/*.h5 nor pt_files/*.pt in it")
    return dict(sorted(slide_files.items()))


def _find_stamp(folder: Path) -> dict[str, Path]:
    if not (files := _list_files(folder, ".h5", is_deep=True)):
        raise UsageError(f"{folder}: no .h5 file in it")
    return _index_by_slide(folder, files)


def _find_anndata(folder: Path) -> dict[str, Path]:
    if not (files := _list_files(folder, ".h5ad")):
        raise UsageError(f"{folder}: {_NO_H5AD}")
    return _index_by_slide(folder, files)


def _read_trident(path: Path) -> _ForeignSlide:
    with _open_foreign(path) as file:
        dataset = read_dataset(file, "features")
        features = _check_features(dataset[:], path.name)
        is_slide_vector = dataset.ndim == 1  # one vector of the whole slide, beside the places of its patches
        coords = None if is_slide_vector and not _has_values(file, "coords") else read_dataset(file, "coords")
        places = None if is_slide_vector or coords is None else _check_places(coords[:], len(features), path.name)
        _, prefix, encoder_name = path.parent.name.partition(TRIDENT_PREFIX)
        encoder = _read_text(dataset.attrs, "encoder") or (encoder_name if prefix else None)
        facts = _parse_facts({} if coords is None else coords.attrs, encoder)
        return _ForeignSlide(features, places, facts, **_read_extra_columns(file, len(features)))


def _parse_facts(attrs: Mapping[str, Any], encoder: str | None) -> FileFacts:
    """Return the facts in attributes of `coords`; `mpp` and `mpp_level0` are our own, and exact."""
    size, size_l0 = _read_number(attrs, "patch_size"), _read_number(attrs, "patch_size_level0")
    magnification, stated_mpp = _read_number(attrs, "target_magnification"), _read_number(attrs, "mpp")
    mpp = stated_mpp or (MAGNIFICATION_UM / magnification if magnification else None)
    mpp_l0 = _read_number(attrs, "mpp_level0")
    if mpp_l0 is None and mpp and size and size_l0:
        mpp_l0 = mpp * size / size_l0
    return FileFacts(
        encoder=encoder,
        size_px=round(size) if size else None,
        overlap_px=round(_read_number(attrs, "overlap") or 0) if "overlap" in attrs else None,
        mpp=mpp,
        nominal=stated_mpp is None and mpp is not None,
        mpp_l0=mpp_l0,
    )


def _read_clam(path: Path) -> _ForeignSlide:
    # Of a `.pt`, a pickle, `weights_only` loads only tensors and runs no code. A zip with compressed entries is
    # refused: PyTorch writes none, but unpacks one of any size.
    if path.suffix.lower() == ".h5":
        return _read_trident(path)
    import torch

    if is_zipfile(require_regular_file(path)):  # else of PyTorch before 1.6
        try:
            with ZipFile(path) as archive:
                is_packed = any(entry.compress_type != ZIP_STORED for entry in archive.infolist())
        except BadZipFile:
            is_packed = False  # reported by PyTorch below
        if is_packed:
            raise WsiFlError(
                f"{path.name}: its tensor is compressed, which PyTorch never does; save it anew by torch.save"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on refused pickles
            tensor = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise WsiFlError(
            f"{path.name}: damaged, or it holds more than a tensor; it could run code, so it is not opened"
        ) from None
    except Exception as error:  # torch raises errors of many types
        raise WsiFlError(f"{path.name}: damaged ({single_line(error)[:120]})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.is_floating_point():
        raise WsiFlError(f"{path.name}: holds a {type(tensor).__name__}, not one tensor of features")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise WsiFlError(f"{path.name}: damaged, it claims more numbers than it holds")
    return _ForeignSlide(_check_features(tensor.detach().float().numpy(), path.name), None, FileFacts())


def _read_stamp(path: Path) -> _ForeignSlide:
    with _open_foreign(path) as file:
        attrs, dataset = file.attrs, read_dataset(file, "feats")
        features, encoder = _check_features(dataset[:], path.name), _read_text(attrs, "encoder")
        kind, encoder = _read_text(attrs, "feat_type"), encoder or _read_text(attrs, "extractor")
        if dataset.ndim == 1 or kind in {"slide", "patient"}:
            return _ForeignSlide(features, None, FileFacts(encoder=encoder, names_patients=kind == "patient"))
        former_size_um = _read_number(attrs, "tile_size") if _read_text(attrs, "unit") == "um" else None
        size_um, size = (_read_number(attrs, "tile_size_um") or former_size_um, _read_number(attrs, "tile_size_px"))
        if size_um is None:
            raise WsiFlError(f"{path.name}: does not say its tile size in µm; extract it again with STAMP 2 or newer")
        places = _check_places(read_dataset(file, "coords")[:], len(features), path.name)
        facts = FileFacts(
            encoder=_read_text(attrs, "extractor"),
            size_px=round(size) if size else None,
            overlap_px=round(_read_number(attrs, "overlap_px") or 0),
            mpp=_read_number(attrs, "mpp") or (size_um / size if size else None),
            mpp_l0=_read_number(attrs, "mpp_level0"),
        )
        return _ForeignSlide(features, places, facts, is_in_um=True, **_read_extra_columns(file, len(features)))


def _has_values(group: h5py.Group, name: str) -> bool:
    """Return whether a group has a non-empty entry: AnnData writes None as a null, and empty groups."""
    if not has_entry(group, name):
        return False
    entry = find_entry(group, name)
    return bool(len(entry) if isinstance(entry, h5py.Group) else entry.size)


def _read_matrix(file: h5py.File, name: str) -> NDArray[Any]:
    # return a dense or sparse (CSR, CSC) matrix of AnnData as a dense array
    if not isinstance(group := find_entry(file, name), h5py.Group):
        return np.asarray(read_dataset(file, name)[:])
    where, kind = Path(file.filename).name, _read_text(group.attrs, "encoding-type")
    if kind not in {"csr_matrix", "csc_matrix"}:
        raise WsiFlError(f"{where}: its {name!r} is no dataset, nor a sparse matrix")
    shape = tuple(int(size) for size in group.attrs["shape"])
    values, indices, ends = (read_dataset(group, part)[:] for part in ("data", "indices", "indptr"))
    rows, columns = shape if kind == "csr_matrix" else shape[::-1]
    is_whole = ends.shape == (rows + 1,) and not ends[0] and ends[-1] == len(values) == len(indices)
    if (
        not is_whole
        or (np.diff(ends) < 0).any()
        or (len(indices) and not 0 <= indices.min() <= indices.max() < columns)
    ):
        raise WsiFlError(f"{where}: damaged, its sparse {name!r} does not fit together")
    refuse_too_large(where, rows * columns * values.dtype.itemsize)
    dense = np.zeros((rows, columns), values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(ends)), indices] = values
    return dense if kind == "csr_matrix" else dense.T


def _read_anndata(path: Path) -> _ForeignSlide:
    with _open_foreign(path) as file:
        features, xy = _check_features(_read_matrix(file, "X"), path.name), None
        if _has_values(file, "obsm") and _has_values(places := read_group(file, "obsm"), "spatial"):
            xy = _check_places(read_dataset(places, "spatial")[:], len(features), path.name)
        tile = _read_stated(file, "tile_spec", ("width", "stride_width", "mpp"))
        size, stride = _read_number(tile, "width"), _read_number(tile, "stride_width")
        facts = FileFacts(
            size_px=round(size) if size else None,
            overlap_px=round(size - stride) if size and stride else None,
            mpp=_read_number(tile, "mpp"),
            mpp_l0=_read_number(_read_stated(file, "slide_properties", ("mpp",)), "mpp"),
        )
        return _ForeignSlide(features, xy, facts)


def _read_stated(file: h5py.File, name: str, keys: Sequence[str]) -> dict[str, float]:
    """Return the existing numbers of these keys in a group of `uns`."""
    if not _has_values(file, "uns") or not _has_values(uns := read_group(file, "uns"), name):
        return {}
    group = read_group(uns, name)
    stated = {key: read_dataset(group, key)[()] for key in keys if _has_values(group, key)}
    return {key: float(value.item()) for key, value in stated.items() if value.size == 1}


_NO_H5AD = 'no .h5ad file in it; LazySlide writes one with wsi.fetch.features_anndata("uni").write_h5ad("SLIDE.h5ad")'
LAYOUTS = {
    "clam": FeatureLayout(_find_clam, _read_clam, write_clam),
    "trident": FeatureLayout(_find_trident, _read_trident, write_trident),
    "stamp": FeatureLayout(_find_stamp, _read_stamp, write_stamp),
    "anndata": FeatureLayout(_find_anndata, _read_anndata),
}
