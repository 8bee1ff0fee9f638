"""The public API for notebooks: short names, imported on first use.

All of it is `wsi_fl.NAME` too. Paths may be strings, arrays are NumPy's, and errors are `WsiFlError` in one line.
`docs/reference/python-api.md` shows each in five lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.utils.data import DataLoader

    from wsi_fl.data.cohort import Cohort
    from wsi_fl.slides.reading.reader import Slide
    from wsi_fl.stores.bag_store import BagStore
    from wsi_fl.stores.patch_store import PatchStore
    from wsi_fl.types import GridSpec

_MODULES = {
    "Slide": "slides.reading.reader",
    "simulate_archive": "demo.simulated_slides",
    "GridSpec": "types",
    "tissue_mask": "slides.patching.tissue",
    "PatchStore": "stores.patch_store",
    "BagStore": "stores.bag_store",
    "Encoder": "models.encoder",
    "encode_batches": "models.encoder",
    "create_model": "models",
    "Images": "types",
    "Bags": "types",
    "Vectors": "types",
    "Cohort": "data.cohort",
    "CipherStream": "privacy.cipher",
    "PrivacyPlan": "privacy.privacy_plan",
    "plan_of_round": "privacy.privacy_plan",
    "epsilon": "privacy.accounting",
    "max_tpr": "privacy.accounting",
    "DPTrainer": "privacy.dpsgd",
    "NoisyStatistics": "oneshot.class_statistics",
    "SharedHead": "oneshot.shared_head",
    "fit_projection": "oneshot.projection",
    "METHODS": "federation.methods",
    "federate": "federation.federate",
    "score_predictions": "data.tasks",
    "WsiFlError": "types",
}
"""Name → its module."""

__all__ = [*_MODULES, "examples", "loader", "patches"]  # noqa: PLE0604 they are strings


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"wsi_fl.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def patches(
    slide: Slide, spec: GridSpec, *, min_tissue: float = 0.2
) -> tuple[NDArray[np.int64], Iterator[NDArray[np.uint8]]]:
    """Return positions and pixels of the patches of a slide's grid with enough tissue.

    Args:
        spec: size, resolution and step of the grid.
        min_tissue: least share of a patch's area that is tissue.

    Returns:
        The top-left corners (x, y) int64[n, 2] in level-0 pixels, and batches uint8[b, size_px, size_px, 3] in the same
        order, read on demand.

    Raises:
        WsiFlError: when the slide has no tissue or no µm per pixel; while it is read, when it is damaged.
    """
    from wsi_fl.slides.patching.grid import grid_positions, patch_side_l0
    from wsi_fl.slides.patching.tissue import tissue_fraction, tissue_mask
    from wsi_fl.slides.reading.patch_reader import read_patches
    from wsi_fl.system.machine import n_cores
    from wsi_fl.types import SlideRecord

    thumbnail, downsample = slide.thumbnail()
    mask = tissue_mask(thumbnail, downsample * slide.mpp)
    xy_l0 = grid_positions(slide.size_l0, spec, slide.mpp)
    share = tissue_fraction(mask, xy_l0, patch_side_l0(spec, slide.mpp), downsample)
    chosen = xy_l0[share >= min_tissue]
    record = SlideRecord(slide.path, slide.path.stem, "", "", "weak", False, mpp_override=slide.mpp)
    read = read_patches(record, chosen, spec, threads=n_cores())
    return chosen, (pixels for _, pixels in read)


def examples(store: PatchStore | BagStore, split: str = "train") -> Cohort:
    """Return the labelled rows of a split, "train", "val" or "test": patches, or a feature store's bags."""
    from wsi_fl.data.cohort import Cohort
    from wsi_fl.stores.bag_store import BagStore

    patches = Cohort.read_store(store)
    rows = patches.group("slide") if isinstance(store, BagStore) else patches
    return rows[rows.obs["split"] == split]


def loader(dataset: Cohort, *, batch_size: int = 32, shuffle: bool = False) -> DataLoader[int]:
    """Return a PyTorch loader of batches as `build`'s models take them: (inputs, labels int64[b]).

    Images are float32[b, channels, h, w] in [−1, 1], features float32[b, d], and bags float32[b, m, d + 1], padded to
    the longest of the batch; their last column is 1 for a patch and 0 for padding.

    Raises:
        UsageError: for labels that are no whole numbers.
    """
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

    from wsi_fl.data.batches import build_tensor
    from wsi_fl.data.cohort import require_labels

    require_labels(dataset)

    def collate_batch(rows: list[int]) -> tuple[Tensor, Tensor]:
        chosen = np.array(rows, np.int64)
        return build_tensor(dataset.read(chosen)), torch.from_numpy(dataset.label[chosen])

    return DataLoader(range(len(dataset)), batch_size, shuffle=shuffle, collate_fn=collate_batch)  # type: ignore[arg-type]
