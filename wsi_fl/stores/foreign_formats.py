"""Features of slides in other tools' layouts; an invalid file is refused in one line. `foreign_tensors` has those that
are no HDF5.

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

AtlasPatch (AtlasAnalyticsLab/AtlasPatch, `atlaspatch process`): `patches/<slide>.h5`. `features/<encoder>` float32[m,
d] for each encoder, and `coords` int32[m, 5] in level-0 pixels, the corner first; root attributes are those of
TRIDENT's `coords`.

AnnData of one slide (scverse, `write_h5ad`), as LazySlide makes it of its tiles: `<slide>.h5ad`. `X` float[m, d];
`obsm/spatial` [m, 2], the corners of tiles in level-0 pixels; `uns/tile_spec` with `width`, `stride_width` and `mpp` of
a tile; `uns/slide_properties` with `mpp` of the slide. All but `X` may be missing or empty, as None is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.fields import first_line, memory_message, refuse_too_large
from wsi_fl.stores.foreign_slides import (
    MAGNIFICATION_UM,
    FeatureLayout,
    FileFacts,
    ForeignSlide,
    check_features,
    check_places,
    find_files,
    index_by_slide,
    list_files,
    read_number,
    several_folders_message,
)
from wsi_fl.stores.foreign_tensors import find_slide2vec, read_slide2vec, read_slideflow, read_tensor
from wsi_fl.stores.foreign_writers import EXTRA_COLUMNS, TRIDENT_PREFIX, write_clam, write_stamp, write_trident
from wsi_fl.stores.hdf5 import find_entry, has_entry, open_hdf5, read_dataset, read_group
from wsi_fl.system.file_names import slide_of
from wsi_fl.system.files import refuse_unavailable
from wsi_fl.types import UsageError, WsiFlError


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


def _read_extra_columns(file: h5py.File, n: int) -> dict[str, Any]:
    columns = {name: read_dataset(file, name)[:] for name in EXTRA_COLUMNS if has_entry(file, name)}
    if any(values.shape != (n,) for values in columns.values()):
        raise WsiFlError(f"{Path(file.filename).name}: not one group and weight for every patch")
    return columns


def _read_text(attrs: Mapping[str, Any], name: str) -> str | None:
    """Return a text among attributes; None if missing, empty or "None"."""
    value = attrs.get(name)
    if isinstance(value, h5py.Empty):
        return None
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return None if value is None or text in {"", "None"} else text


def _find_trident(folder: Path) -> dict[str, Path]:
    # in `features_<encoder>`, or in the one such folder below; else in the one of vectors of whole slides; else, as
    # public archives are laid, in a folder per cohort
    if files := list_files(folder, ".h5"):
        return index_by_slide(folder, files)
    subfolders = [path for path in folder.rglob(f"*{TRIDENT_PREFIX}*") if path.is_dir() and list_files(path, ".h5")]
    folders = [path for path in subfolders if path.name.startswith(TRIDENT_PREFIX)] or subfolders
    if (
        not folders
        and (files := list_files(folder, ".h5", is_deep=True))
        and len(files) == len({*map(slide_of, files)})
    ):
        return index_by_slide(folder, files)
    if len(folders) != 1:
        listing = several_folders_message(sorted(path.name for path in folders))
        raise UsageError(f"{folder}: {listing if folders else f'no {TRIDENT_PREFIX}<encoder>/*.h5 in it'}")
    return index_by_slide(folders[0], list_files(folders[0], ".h5"))


def _find_clam(folder: Path) -> dict[str, Path]:
    # `.h5` goes before `.pt`, which holds no places
    slide_files: dict[str, Path] = {}
    for suffix in (".pt", ".h5"):
        for subfolder in (folder, folder / f"{suffix[1:]}_files"):
            slide_files |= index_by_slide(subfolder, list_files(subfolder, suffix))
    if not slide_files:
        raise UsageError(f"{folder}: neither h5_files/*.h5 nor pt_files/*.pt in it")
    return dict(sorted(slide_files.items()))


def _read_trident(path: Path) -> ForeignSlide:
    with _open_foreign(path) as file:
        dataset = read_dataset(file, "features")
        features = check_features(dataset[:], path.name)
        is_slide_vector = dataset.ndim == 1  # one vector of the whole slide, beside the places of its patches
        coords = None if is_slide_vector and not _has_values(file, "coords") else read_dataset(file, "coords")
        places = None if is_slide_vector or coords is None else check_places(coords[:], len(features), path.name)
        _, prefix, encoder_name = path.parent.name.partition(TRIDENT_PREFIX)
        encoder = _read_text(dataset.attrs, "encoder") or (encoder_name if prefix else None)
        facts = _parse_facts({} if coords is None else coords.attrs, encoder)
        return ForeignSlide(features, places, facts, **_read_extra_columns(file, len(features)))


def _parse_facts(attrs: Mapping[str, Any], encoder: str | None) -> FileFacts:
    """Return the facts in attributes of TRIDENT's `coords`; `mpp` and `mpp_level0` are our own, and exact."""
    size, size_l0 = read_number(attrs, "patch_size"), read_number(attrs, "patch_size_level0")
    magnification, stated_mpp = read_number(attrs, "target_magnification"), read_number(attrs, "mpp")
    mpp = stated_mpp or (MAGNIFICATION_UM / magnification if magnification else None)
    mpp_l0 = read_number(attrs, "mpp_level0")
    if mpp_l0 is None and mpp and size and size_l0:
        mpp_l0 = mpp * size / size_l0
    return FileFacts(
        encoder=encoder,
        size_px=round(size) if size else None,
        overlap_px=round(read_number(attrs, "overlap") or 0) if "overlap" in attrs else None,
        mpp=mpp,
        nominal=stated_mpp is None and mpp is not None,
        mpp_l0=mpp_l0,
    )


def _read_atlaspatch(path: Path, encoder: str | None = None) -> ForeignSlide:
    with _open_foreign(path) as file:
        names = sorted(read_group(file, "features"))
        encoder = encoder or (names[0] if len(names) == 1 else "")
        if encoder not in names:
            listing = ", ".join(names) or "no encoder"
            raise WsiFlError(f"{path.name}: has features of {listing}; choose one of them with --encoder")
        features = check_features(read_dataset(read_group(file, "features"), encoder)[:], path.name)
        places = check_places(read_dataset(file, "coords")[:, :2], len(features), path.name)
        return ForeignSlide(features, places, _parse_facts(file.attrs, encoder))


def _read_clam(path: Path) -> ForeignSlide:
    return _read_trident(path) if path.suffix.lower() == ".h5" else read_tensor(path)


def _read_stamp(path: Path) -> ForeignSlide:
    with _open_foreign(path) as file:
        attrs, dataset = file.attrs, read_dataset(file, "feats")
        features, encoder = check_features(dataset[:], path.name), _read_text(attrs, "encoder")
        kind, encoder = _read_text(attrs, "feat_type"), encoder or _read_text(attrs, "extractor")
        if dataset.ndim == 1 or kind in {"slide", "patient"}:
            return ForeignSlide(features, None, FileFacts(encoder=encoder, names_patients=kind == "patient"))
        former_size_um = read_number(attrs, "tile_size") if _read_text(attrs, "unit") == "um" else None
        size_um, size = (read_number(attrs, "tile_size_um") or former_size_um, read_number(attrs, "tile_size_px"))
        if size_um is None:
            raise WsiFlError(f"{path.name}: does not say its tile size in µm; extract it again with STAMP 2 or newer")
        places = check_places(read_dataset(file, "coords")[:], len(features), path.name)
        facts = FileFacts(
            encoder=_read_text(attrs, "extractor"),
            size_px=round(size) if size else None,
            overlap_px=round(read_number(attrs, "overlap_px") or 0),
            mpp=read_number(attrs, "mpp") or (size_um / size if size else None),
            mpp_l0=read_number(attrs, "mpp_level0"),
        )
        return ForeignSlide(features, places, facts, is_in_um=True, **_read_extra_columns(file, len(features)))


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


def _read_anndata(path: Path) -> ForeignSlide:
    with _open_foreign(path) as file:
        features, xy = check_features(_read_matrix(file, "X"), path.name), None
        if _has_values(file, "obsm") and _has_values(places := read_group(file, "obsm"), "spatial"):
            xy = check_places(read_dataset(places, "spatial")[:], len(features), path.name)
        tile = _read_stated(file, "tile_spec", ("width", "stride_width", "mpp"))
        size, stride = read_number(tile, "width"), read_number(tile, "stride_width")
        facts = FileFacts(
            size_px=round(size) if size else None,
            overlap_px=round(size - stride) if size and stride else None,
            mpp=read_number(tile, "mpp"),
            mpp_l0=read_number(_read_stated(file, "slide_properties", ("mpp",)), "mpp"),
        )
        return ForeignSlide(features, xy, facts)


def _read_stated(file: h5py.File, name: str, keys: Sequence[str]) -> dict[str, float]:
    """Return the existing numbers of these keys in a group of `uns`."""
    if not _has_values(file, "uns") or not _has_values(uns := read_group(file, "uns"), name):
        return {}
    group = read_group(uns, name)
    stated = {key: read_dataset(group, key)[()] for key in keys if _has_values(group, key)}
    return {key: float(value.item()) for key, value in stated.items() if value.size == 1}


_LAZYSLIDE = 'LazySlide writes one with wsi.fetch.features_anndata("uni").write_h5ad("SLIDE.h5ad")'


def _find(suffix: str, missing: str) -> Callable[[Path], dict[str, Path]]:
    return partial(find_files, suffix=suffix, missing=missing)


LAYOUTS = {
    "clam": FeatureLayout(_find_clam, _read_clam, write_clam),
    "trident": FeatureLayout(_find_trident, _read_trident, write_trident),
    "stamp": FeatureLayout(_find(".h5", ".h5 file"), _read_stamp, write_stamp),
    "anndata": FeatureLayout(_find(".h5ad", f".h5ad file ({_LAZYSLIDE})"), _read_anndata),
    "atlaspatch": FeatureLayout(_find(".h5", "patches/<slide>.h5"), _read_atlaspatch, takes_encoder=True),
    "slide2vec": FeatureLayout(find_slide2vec, read_slide2vec),
    "slideflow": FeatureLayout(_find(".pt", "<slide>.pt with bags_config.json"), read_slideflow),
    "eva": FeatureLayout(_find(".pt", "manifest.csv with .pt files"), read_tensor),
}
