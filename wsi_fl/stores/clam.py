"""Bags as CLAM and TRIDENT read them: one HDF5 file per slide with `features` and `coords`, and a table of labels."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from wsi_fl.stores.columns import created
from wsi_fl.stores.features import Bag, FeatureStore
from wsi_fl.system.files import atomic, write_text
from wsi_fl.types import WsiFlError


def write_clam(store: FeatureStore, folder: Path) -> list[Path]:
    """Writes `h5_files/<slide>.h5` for every bag, then `<site>.csv` (case_id, slide_id, label); returns their paths.

    `features` is float32[m, d], `coords` int64[m, 2] in level-0 pixels with the attributes that TRIDENT's readers want.
    CLAM's own `.pt` files are pickles and are not written; its loaders read `h5_files` too.
    """
    if store.mpp_l0 is None:
        raise WsiFlError(f"{store.path}: does not say how large its patches are on the slides; make it again")
    files, lines = [], io.StringIO(newline="")
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(("case_id", "slide_id", "label"))
    for k in range(len(store)):
        slide = str(store.table.slide[k])
        path = folder / "h5_files" / f"{slide}.h5"
        _write_bag(path, slide, store.bag(k), store, float(store.mpp_l0[k]))
        label = store.meta.classes[int(store.table.label[k])]
        table.writerow((str(store.table.patient[k]), slide, label))
        files.append(path)
    listing = folder / f"{store.meta.site}.csv"
    write_text(listing, lines.getvalue())
    return [*files, listing]


def _write_bag(path: Path, slide: str, bag: Bag, store: FeatureStore, mpp_l0: float) -> None:
    spec = store.meta.spec
    with atomic(path) as temporary, created(temporary, bag.features.nbytes + bag.xy_l0.nbytes) as file:
        file["features"] = bag.features
        file["features"].attrs["encoder"] = store.meta.encoder
        file["coords"] = bag.xy_l0
        file["coords"].attrs.update(
            {
                "name": slide,
                "patch_size": spec.size_px,
                "patch_size_level0": round(spec.size_px * spec.mpp / mpp_l0),
                "patch_level": 0,
                "overlap": spec.size_px - spec.stride_px,
                "mpp": spec.mpp,
                "mpp_level0": mpp_l0,
            }
        )
