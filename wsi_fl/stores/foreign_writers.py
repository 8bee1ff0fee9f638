"""Bag stores written in the layouts of TRIDENT, CLAM and STAMP (`foreign_formats`), with a table of labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from wsi_fl.stores.bag_store import Bag, BagStore
from wsi_fl.stores.foreign_slides import MAGNIFICATION_UM
from wsi_fl.stores.hdf5 import create_hdf5
from wsi_fl.system.files import atomic_path, write_csv
from wsi_fl.types import WsiFlError

TRIDENT_PREFIX = "features_"
"""Start of the names of TRIDENT's folders of features, before the encoder's."""
EXTRA_COLUMNS = ("cluster", "weight")
"""Columns of our own exports, ignored by other tools."""


def _require_mpp(store: BagStore) -> list[float]:
    if store.mpp_l0 is None:
        raise WsiFlError(f"{store.path}: does not say how large its patches are on the slides; make it again")
    values: list[float] = store.mpp_l0.tolist()
    return values


def _write_slides(store: BagStore, folder: Path, fill: Callable[[h5py.File, str, Bag, float], None]) -> list[Path]:
    """Write `<slide>.h5` for every bag, atomically; return their paths."""
    files = []
    for k, mpp_l0 in enumerate(_require_mpp(store)):
        slide, bag = str(store.table.slide[k]), store.read_bag(k)
        files.append(folder / f"{slide}.h5")
        room = bag.features.nbytes + bag.xy_l0.nbytes
        with atomic_path(files[-1]) as temporary, create_hdf5(temporary, room) as file:
            fill(file, slide, bag, mpp_l0)
            for name in EXTRA_COLUMNS:
                if (values := getattr(bag, name)) is not None:
                    file[name] = values
    return files


def _format_encoder_folder(store: BagStore) -> str:
    return store.meta.encoder.split()[0].replace("/", "_")


def _fill_trident(store: BagStore, file: h5py.File, slide: str, bag: Bag, mpp_l0: float) -> None:
    """Write a bag into a file in the layout of TRIDENT and CLAM.

    TRIDENT's magnifications are rounded; the added `mpp` and `mpp_level0` are exact.
    """
    spec = store.meta.spec
    file["features"] = bag.features
    file["features"].attrs.update({"name": slide, "encoder": store.meta.encoder})
    file["coords"] = bag.xy_l0
    file["coords"].attrs.update(
        {
            "name": slide,
            "patch_size": spec.size_px,
            "patch_size_level0": round(spec.size_px * spec.mpp / mpp_l0),
            "overlap": spec.size_px - spec.stride_px,
            "level0_magnification": max(1, round(MAGNIFICATION_UM / mpp_l0)),
            "target_magnification": max(1, round(MAGNIFICATION_UM / spec.mpp)),
            "mpp": spec.mpp,
            "mpp_level0": mpp_l0,
        }
    )


def write_trident(store: BagStore, folder: Path) -> list[Path]:
    """Write `features_<encoder>/<slide>.h5` for every bag; return their paths."""
    folder = folder / f"{TRIDENT_PREFIX}{_format_encoder_folder(store)}"
    return _write_slides(store, folder, lambda *values: _fill_trident(store, *values))


def write_clam(store: BagStore, folder: Path, *, tensors: bool = False) -> list[Path]:
    """Write `h5_files/<slide>.h5` for every bag, with TRIDENT's attributes; return their paths.

    Args:
        tensors: whether to write `pt_files/<slide>.pt` too, float32[m, d], for CLAM's training.
    """

    def fill_file(file: h5py.File, slide: str, bag: Bag, mpp_l0: float) -> None:
        _fill_trident(store, file, slide, bag, mpp_l0)
        if tensors:
            import torch

            with atomic_path(folder / "pt_files" / f"{slide}.pt") as temporary:
                torch.save(torch.from_numpy(bag.features), temporary)

    return _write_slides(store, folder / "h5_files", fill_file)


def write_stamp(store: BagStore, folder: Path) -> list[Path]:
    """Write `<slide>.h5` for every bag in STAMP's layout; return their paths.

    Features stay float32 (STAMP: float16); added attributes hold the slide's resolution and overlap.
    """
    spec, encoder = store.meta.spec, store.meta.encoder

    def fill_file(file: h5py.File, slide: str, bag: Bag, mpp_l0: float) -> None:
        del slide
        file["coords"] = (bag.xy_l0 * mpp_l0).astype(np.float32)
        file["feats"] = bag.features
        file.attrs.update(
            {
                "extractor": encoder,
                "unit": "um",
                "tile_size_um": spec.size_px * spec.mpp,
                "tile_size_px": spec.size_px,
                "feat_type": "tile",
                "overlap_px": spec.size_px - spec.stride_px,
                "mpp": spec.mpp,
                "mpp_level0": mpp_l0,
            }
        )

    return _write_slides(store, folder / _format_encoder_folder(store), fill_file)


def write_labels(store: BagStore, path: Path, *, is_stamp: bool = False) -> None:
    """Write the table of a store's slides: case_id, slide_id and label as in CLAM, and other columns.

    Args:
        is_stamp: whether it is STAMP's slide table, with PATIENT and FILENAME instead.
    """
    columns, suffix = store.table, ".h5" if is_stamp else ""
    heading = ("PATIENT", "FILENAME") if is_stamp else ("case_id", "slide_id")
    slides = [f"{slide}{suffix}" for slide in columns.slide]
    values = (columns.patient, slides, _list_labels(store), columns.tumor_type, columns.split)
    rows = zip(*values, map(repr, _require_mpp(store)), strict=True)
    write_csv(path, [(*heading, "label", "tumor_type", "split", "mpp"), *rows])


def write_clini(store: BagStore, path: Path) -> int:
    """Write STAMP's clini table, PATIENT and label; return the number of patients without a label there.

    STAMP has one label for a patient; it leaves out patients without, as those whose slides have several.
    """
    labels: dict[str, set[str]] = {}
    for patient, label in zip(store.table.patient, _list_labels(store), strict=True):
        labels.setdefault(str(patient), set()).add(label)
    rows = [(patient, *(names if len(names) == 1 else [""])) for patient, names in labels.items()]
    write_csv(path, [("PATIENT", "label"), *rows])
    return sum(len(names) > 1 for names in labels.values())


def _list_labels(store: BagStore) -> list[str]:
    return [store.meta.classes[label] for label in store.table.label]
