"""STAMP's layout (KatherLab/STAMP, `stamp preprocess`): `<extractor>-<hash>/…/<slide>.h5`.

`feats` float[m, d] and `coords` float32[m, 2] in µm from the slide's corner; root attributes `extractor`, `unit`,
`tile_size_um` (`tile_size` before 2.1), `tile_size_px`. How large a pixel of the slide is, the file does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.exchange.foreign import (
    Facts,
    Foreign,
    by_slide,
    checked_features,
    checked_places,
    kept_besides,
    mpp_of_each,
    number_of,
    opened,
    text_of,
    write_besides,
)
from wsi_fl.stores.hdf5 import created
from wsi_fl.stores.own import own_dataset
from wsi_fl.system.files import atomic
from wsi_fl.types import UsageError, WsiFlError


def find_stamp(folder: Path) -> dict[str, Path]:
    """Return the files of all slides, at any depth as STAMP writes them.

    Raises:
        UsageError: when there is none.
    """
    found = by_slide(folder.rglob("*.h5"))
    if not found:
        raise UsageError(f"{folder}: no .h5 file in it")
    return found


def read_stamp(path: Path) -> Foreign:
    """Return the features of one slide.

    Raises:
        WsiFlError: in one line, when the file is damaged, not of this layout, or of STAMP before 2.
    """
    with opened(path) as file:
        features = checked_features(own_dataset(file, "feats")[:], path.name)
        n = len(features)
        size_um = _tile_um(file.attrs, path.name)
        places = checked_places(own_dataset(file, "coords")[:], n, path.name, in_um=True)
        size = number_of(file.attrs, "tile_size_px")
        facts = Facts(
            encoder=text_of(file.attrs, "extractor"),
            size_px=round(size) if size else None,
            overlap_px=round(number_of(file.attrs, "overlap_px") or 0),
            mpp=number_of(file.attrs, "mpp") or (size_um / size if size else None),
            mpp_l0=number_of(file.attrs, "mpp_level0"),
        )
        return Foreign(features, places, facts, **kept_besides(file, n))


def _tile_um(attrs: Mapping[str, Any], name: str) -> float:
    """Return the side of a tile in µm.

    Raises:
        WsiFlError: when the file does not say.
    """
    newer, older = number_of(attrs, "tile_size_um"), number_of(attrs, "tile_size")
    size = newer or (older if text_of(attrs, "unit") == "um" else None)
    if size is None:
        raise WsiFlError(f"{name}: does not say its tile size in µm; extract it again with STAMP 2 or newer")
    return size


def write_stamp(store: BagStore, folder: Path) -> list[Path]:
    """Write `<encoder>/<slide>.h5` for every bag; return their paths.

    STAMP's own features are float16; these keep float32. Attributes of our own say the slide's resolution and overlap.
    """
    files = []
    spec, encoder = store.meta.spec, store.meta.encoder
    for k, mpp_l0 in enumerate(mpp_of_each(store).tolist()):
        slide, bag = str(store.table.slide[k]), store.bag(k)
        files.append(folder / encoder.split()[0].replace("/", "_") / f"{slide}.h5")
        places = bag.xy_l0 * mpp_l0
        with (
            atomic(files[-1]) as temporary,
            created(temporary, bag.features.nbytes + bag.xy_l0.nbytes) as file,
        ):
            file["coords"] = places.astype(np.float32)
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
            write_besides(file, bag)
    return files
