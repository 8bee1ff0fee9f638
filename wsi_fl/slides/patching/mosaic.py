"""Yottixel's mosaic: a few patches as a sample of a slide (Kalra et al., Medical Image Analysis 2020).

Patches full of tissue are clustered by mean colour, each cluster is clustered by position, and the patch nearest each
centre is selected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from wsi_fl.slides.patching.mask_regions import area_mean
from wsi_fl.slides.patching.slide_survey import SlideSurvey, survey_slide
from wsi_fl.slides.patching.tissue import TissueParams, tissue_fraction
from wsi_fl.slides.reading.reader import Reader
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

_N_STARTS = 4
"""Starts of k-means; the best is taken."""
_PATCH_IN_THUMBNAIL_PX = 16
_MIN_SHARE_OF_BEST = 0.5
_THREAD_LIMIT_LOCK = threading.Lock()
"""The limit on threads holds for the whole process."""


@dataclass(frozen=True)
class MosaicParams:
    """Parameters of a mosaic."""

    min_tissue: float = 0.7
    clusters: int = 9
    """Number of colour clusters."""
    fraction: float = 0.05
    """Share of each cluster that is selected."""
    seed: int = 0
    tissue: TissueParams = field(default_factory=TissueParams)


@dataclass(frozen=True)
class _MosaicSelection:
    """The m patches selected from n candidates."""

    rows: NDArray[np.int64]
    """[m] of the candidates, ascending."""
    cluster: NDArray[np.int64]
    """[n] colour cluster of every candidate, from 0, dark to light."""
    weight: NDArray[np.float32]
    """[m] share of the candidates that a patch represents; the sum is 1."""


@dataclass(frozen=True)
class MosaicPlan:
    """The mosaic of one slide, planned on its thumbnail."""

    survey: SlideSurvey
    xy_l0: NDArray[np.int64]
    """[n, 2] corners (x, y) of the candidates, row by row."""
    mosaic: _MosaicSelection
    note: str
    """A note for users, or ""."""

    @property
    def mosaic_xy_l0(self) -> NDArray[np.int64]:
        """int64[m, 2]"""
        return self.xy_l0[self.mosaic.rows]

    @property
    def mosaic_cluster(self) -> NDArray[np.int64]:
        """int64[m]"""
        return self.mosaic.cluster[self.mosaic.rows]


def plan_mosaic(record: SlideRecord, spec: GridSpec, params: MosaicParams, *, reader: Reader) -> MosaicPlan:
    """Choose the mosaic of a slide from its thumbnail, with bounded memory.

    The mean colour of a patch is the same at every magnification, so the thumbnail's replaces that at 5×.
    """
    patch_px = _PATCH_IN_THUMBNAIL_PX
    survey = survey_slide(record, spec, params.tissue, patch_px=patch_px, section="mosaic", reader=reader)
    rows, note = _find_candidates(survey.tissue, params.min_tissue, params.clusters)
    xy_l0 = survey.xy_l0[rows]
    colors = _mean_colors(survey, xy_l0)
    mosaic = choose_mosaic(colors, xy_l0, params.clusters, params.fraction, params.seed)
    return MosaicPlan(survey, xy_l0, mosaic, note)


def _find_candidates(tissue: NDArray[np.float32], min_tissue: float, max_patches: int) -> tuple[NDArray[np.int64], str]:
    """Return (rows, note) of the patches with enough tissue, by their shares float32[n]; else of the best few."""
    rows = np.flatnonzero(tissue >= max(min_tissue, 1e-6))
    if len(rows):
        return rows, ""
    best = float(tissue.max(initial=0))
    if best == 0:
        raise WsiFlError("no patch of the grid touches the tissue")
    order = np.argsort(-tissue, kind="stable")[:max_patches]
    rows = np.sort(order[tissue[order] >= _MIN_SHARE_OF_BEST * best])
    best_text = f"{100 * best:.4g}%"
    shares = f"{100 * tissue[rows].min():.4g}% to {best_text}" if len(rows) > 1 else best_text
    subject = f"the best {len(rows)} stand" if len(rows) > 1 else "the best one stands"
    return rows, f"no patch holds {100 * min_tissue:.4g}% tissue; {subject} for the slide ({shares})"


def _mean_colors(survey: SlideSurvey, xy_l0: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean red, green and blue float64[n, 3] (0 to 255) of the parts of patches on the slide."""
    full_mask = np.ones(survey.thumbnail.shape[:2], bool)
    inside_share = tissue_fraction(full_mask, xy_l0, survey.side_l0, survey.downsample)
    corner, side = xy_l0 / survey.downsample, survey.side_l0 / survey.downsample
    sums = np.stack([area_mean(survey.thumbnail[..., k], corner, side) for k in range(3)], axis=1)
    return sums / np.maximum(inside_share, 1e-6)[:, None]


def choose_mosaic(
    colors: NDArray[np.float64], xy: NDArray[np.int64], clusters: int, fraction: float, seed: int
) -> _MosaicSelection:
    """Return the mosaic of n ≥ 1 candidates with mean colours [n, 3] and positions [n, 2], independent of threads."""
    with _THREAD_LIMIT_LOCK, threadpool_limits(1):  # sums over threads depend on their order
        cluster = _cluster_colors(colors, clusters, seed)
        rows: list[int] = []
        weight: list[float] = []
        for group in range(int(cluster.max()) + 1):
            members = np.flatnonzero(cluster == group)
            for row, share in _choose_spread(xy[members], max(1, round(fraction * len(members))), seed):
                rows.append(int(members[row]))
                weight.append(share / len(colors))
    order = np.argsort(rows)
    return _MosaicSelection(np.array(rows, np.int64)[order], cluster, np.array(weight, np.float32)[order])


def _cluster_colors(colors: NDArray[np.float64], clusters: int, seed: int) -> NDArray[np.int64]:
    """Return the cluster int64[n] of each colour [n, 3], from dark to light; at most as many as distinct colours."""
    n_clusters = min(clusters, len(np.unique(colors, axis=0)))
    from sklearn.cluster import KMeans  # takes seconds, and only mosaics need it

    means = KMeans(n_clusters, n_init=_N_STARTS, random_state=seed).fit(colors)
    order = np.argsort(means.cluster_centers_.sum(axis=1), kind="stable")
    return np.asarray(np.argsort(order)[means.labels_], np.int64)


def _choose_spread(xy: NDArray[np.int64], n_kept: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield (row, number of positions it represents) of at most n_kept positions spread over all [n, 2]."""
    from sklearn.cluster import KMeans

    means = KMeans(n_kept, n_init=_N_STARTS, random_state=seed).fit(xy.astype(np.float64))
    for k in range(n_kept):
        if len(members := np.flatnonzero(means.labels_ == k)):
            distance = ((xy[members] - means.cluster_centers_[k]) ** 2).sum(axis=1)
            yield int(members[np.argmin(distance)]), len(members)
