"""TRIDENT's layout (mahmoodlab/TRIDENT, `WSI.extract_patch_features`): `features_<encoder>/<slide>.h5`.

`features` float[m, d] has the attribute `encoder`; `coords` int64[m, 2] in level-0 pixels has those of the patching:
`patch_size` at the target magnification, `patch_size_level0`, `level0_magnification`, `target_magnification` and
`overlap`. Of encoders of whole slides, `slide_features_<encoder>/<slide>.h5` has `features` float[d].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wsi_fl.stores.bags import Bag, BagStore
from wsi_fl.stores.exchange.foreign import (
    MAGNIFIED,
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
from wsi_fl.types import GridSpec, UsageError

_PREFIX = "features_"


def find_trident(folder: Path) -> dict[str, Path]:
    """Return the files of all slides, in `features_<encoder>` or in the one such folder below.

    Raises:
        UsageError: when there is none, or several.
    """
    if files := list(folder.glob("*.h5")):
        return by_slide(files)
    found = sorted(path for path in folder.rglob(f"{_PREFIX}*") if path.is_dir() and any(path.glob("*.h5")))
    if len(found) != 1:
        several = f"several folders of features ({', '.join(path.name for path in found)}); name one"
        raise UsageError(f"{folder}: {several if found else f'no {_PREFIX}<encoder>/*.h5 in it'}")
    return by_slide(found[0].glob("*.h5"))


def read_trident(path: Path) -> Foreign:
    """Return the features of one slide.

    Raises:
        WsiFlError: in one line, when the file is damaged or not of this layout.
    """
    with opened(path) as file:
        features_of = own_dataset(file, "features")
        features = checked_features(features_of[:], path.name)
        coords = own_dataset(file, "coords")
        whole = features_of.ndim == 1  # one vector of the whole slide, beside the places of its patches
        places = None if whole else checked_places(coords[:], len(features), path.name)
        _, prefix, rest = path.parent.name.partition(_PREFIX)
        named = rest if prefix else None
        facts = _facts_of(coords.attrs, text_of(features_of.attrs, "encoder") or named)
        return Foreign(features, places, facts, **kept_besides(file, len(features)))


def _facts_of(attrs: Mapping[str, Any], encoder: str | None) -> Facts:
    """Return what attributes of `coords` say; `mpp` and `mpp_level0` are our own, and exact."""
    size, size_l0 = number_of(attrs, "patch_size"), number_of(attrs, "patch_size_level0")
    magnification = number_of(attrs, "target_magnification")
    exact = number_of(attrs, "mpp")
    mpp = exact or (MAGNIFIED / magnification if magnification else None)
    mpp_l0 = number_of(attrs, "mpp_level0")
    if mpp_l0 is None and mpp and size and size_l0:
        mpp_l0 = mpp * size / size_l0
    overlap = attrs.get("overlap")
    return Facts(
        encoder=encoder,
        size_px=round(size) if size else None,
        overlap_px=None if overlap is None else round(number_of(attrs, "overlap") or 0),
        mpp=mpp,
        nominal=exact is None and mpp is not None,
        mpp_l0=mpp_l0,
    )


def write_trident(store: BagStore, folder: Path) -> list[Path]:
    """Write `features_<encoder>/<slide>.h5` for every bag; return their paths.

    TRIDENT's magnifications are rounded; `mpp` and `mpp_level0` beside them are exact.
    """
    files = []
    name = store.meta.encoder.split()[0].replace("/", "_")
    for k, mpp_l0 in enumerate(mpp_of_each(store).tolist()):
        slide = str(store.table.slide[k])
        files.append(folder / f"{_PREFIX}{name}" / f"{slide}.h5")
        write_bag(files[-1], store.bag(k), store.meta.encoder, attrs_of(slide, store.meta.spec, mpp_l0))
    return files


def attrs_of(slide: str, spec: GridSpec, mpp_l0: float) -> dict[str, Any]:
    """Return the attributes of `coords` that readers of TRIDENT's and CLAM's files want."""
    return {
        "name": slide,
        "patch_size": spec.size_px,
        "patch_size_level0": round(spec.size_px * spec.mpp / mpp_l0),
        "patch_level": 0,
        "overlap": spec.size_px - spec.stride_px,
        "level0_magnification": max(1, round(MAGNIFIED / mpp_l0)),
        "target_magnification": max(1, round(MAGNIFIED / spec.mpp)),
        "mpp": spec.mpp,
        "mpp_level0": mpp_l0,
    }


def write_bag(path: Path, bag: Bag, encoder: str, attrs: Mapping[str, Any]) -> None:
    """Write one slide's file atomically: `features` float32[m, d] and `coords` int64[m, 2] in level-0 pixels."""
    with atomic(path) as temporary, created(temporary, bag.features.nbytes + bag.xy_l0.nbytes) as file:
        file["features"] = bag.features
        file["features"].attrs.update({"name": attrs["name"], "encoder": encoder})
        file["coords"] = bag.xy_l0
        file["coords"].attrs.update(attrs)
        write_besides(file, bag)
