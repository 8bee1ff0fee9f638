"""AnnData of one slide (scverse, `write_h5ad`), as LazySlide makes it of its tiles: `<slide>.h5ad`.

`X` float[m, d]; `obsm/spatial` [m, 2], the corners of tiles in level-0 pixels; `uns/tile_spec` with `width`,
`stride_width` and `mpp` of a tile; `uns/slide_properties` with `mpp` of the slide. All but `X` may be missing.
"""

from __future__ import annotations

from pathlib import Path

import h5py

from wsi_fl.stores.exchange.foreign import Facts, Foreign, by_slide, checked_features, checked_places, opened
from wsi_fl.stores.own import is_own, own_dataset, own_group
from wsi_fl.types import UsageError


def find_anndata(folder: Path) -> dict[str, Path]:
    """Return the files of all slides.

    Raises:
        UsageError: when there is none.
    """
    found = by_slide(folder.glob("*.h5ad"))
    if not found:
        raise UsageError(
            f"{folder}: no .h5ad file in it; LazySlide writes one with "
            'wsi.fetch.features_anndata("uni").write_h5ad("SLIDE.h5ad")'
        )
    return found


def read_anndata(path: Path) -> Foreign:
    """Return the features of one slide.

    Raises:
        WsiFlError: in one line, when the file is damaged or not of this layout.
    """
    with opened(path) as file:
        features = checked_features(own_dataset(file, "X")[:], path.name)
        xy = own_dataset(own_group(file, "obsm"), "spatial")[:] if is_own(file, "obsm") else None
        size, stride = (_number(file, "tile_spec", name) for name in ("width", "stride_width"))
        facts = Facts(
            size_px=round(size) if size else None,
            overlap_px=round(size - stride) if size and stride else None,
            mpp=_number(file, "tile_spec", "mpp"),
            mpp_l0=_number(file, "slide_properties", "mpp"),
        )
        return Foreign(features, None if xy is None else checked_places(xy, len(features), path.name), facts)


def _number(file: h5py.File, group: str, name: str) -> float | None:
    """Return a positive number of `uns`; None where there is none."""
    found: h5py.Group = file
    for step in ("uns", group):
        if not is_own(found, step):
            return None
        found = own_group(found, step)
    value = float(own_dataset(found, name)[()]) if is_own(found, name) else 0.0
    return value if 0 < value < float("inf") else None
