"""`wsi-fl class-means`: a page with the public patches nearest to the class means in a site's statistics.

A class mean is a point among projected public patches, so the patches nearest to it show what it says. Near is a small
angle as seen from the mean of public examples, the origin of the projection: class means are much shorter than
examples, and by Euclidean distance examples of small norm are near to the means of all classes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import exp, inf
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from wsi_fl.models.encoder import Encoder, encode_batches
from wsi_fl.oneshot.build_projection import list_files, read_slide_patches
from wsi_fl.oneshot.class_means import ClassMean, unpack_class_means
from wsi_fl.oneshot.column_sums import embed_rows
from wsi_fl.oneshot.projection import Projection, random_projection
from wsi_fl.oneshot.public_features import MAX_PATCHES
from wsi_fl.oneshot.release_statistics import preview_statistics
from wsi_fl.oneshot.released_statistics import (
    ReleasedStatistics,
    StatisticsHeader,
    describe_missing,
    open_projection,
    read_statistics,
    refuse_another_site,
)
from wsi_fl.report.inline_pictures import encode_patch
from wsi_fl.report.templates import fill_template
from wsi_fl.stages.prepare.tile_plans import build_grid_spec
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.public_sources import require_public, require_public_patches, sample_indices
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import write_text
from wsi_fl.system.machine import n_cores
from wsi_fl.types import GridSpec, UsageError, WsiFlError, encoder_differences

_PICTURE_PX = 256
_similarity = attrgetter("similarity")
_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PublicPatch:
    """A public patch uint8[h, w, 3], its place in its source, its width in words, and the cosine of its angle."""

    source: str
    row: int
    slide: str
    xy_l0: tuple[int, int]
    width: str
    pixels: NDArray[np.uint8]
    similarity: float

    @property
    def picture(self) -> str:
        """Return a data URI."""
        return encode_patch(self.pixels, _PICTURE_PX)


class _PublicSource(NamedTuple):
    """Some patches uint8[m, h, w, 3] of a public source: their rows, slides, corners int64[m, 2] and width."""

    name: str
    row: NDArray[np.int64]
    slide: NDArray[np.str_]
    xy_l0: NDArray[np.int64]
    width: str
    pixels: NDArray[np.uint8]

    def find_nearest(self, means: _Floats, z: _Floats, n: int) -> Iterator[list[PublicPatch]]:
        """Yield the n patches of the smallest angle to each mean float64[q, d], given their features float64[m, d]."""
        for cosines in _normalize(means) @ _normalize(z).T:
            best = np.argsort(-cosines, kind="stable")[:n].tolist()
            columns = (self.row.tolist(), self.slide.tolist(), map(tuple, self.xy_l0.tolist()))
            places = [*zip(*columns, strict=True)]
            yield [
                PublicPatch(self.name, *places[k], self.width, self.pixels[k].copy(), float(cosines[k])) for k in best
            ]


def _read_source(study: Study, pipeline: Pipeline, path: Path, *, mpp: float | None, public: bool) -> _PublicSource:
    if path.suffix == ".h5":
        with PatchStore(path) as store:
            if not public:
                require_public_patches(study, path, store)
            rows, table = sample_indices(len(store), MAX_PATCHES), store.table
            width, pixels = _describe_width(store.meta.spec), store.read(rows)
            return _PublicSource(path.name, rows, table.slide[rows], table.xy_l0[rows], width, pixels)
    if not public:
        require_public(study, path)
    corners, batches = read_slide_patches(study, pipeline, path, mpp)
    rows, pixels = np.arange(len(corners)), np.concatenate([*batches])
    width = _describe_width(build_grid_spec(pipeline))
    return _PublicSource(path.name, rows, np.full(len(rows), path.stem), corners, width, pixels)


def _describe_width(spec: GridSpec) -> str:
    return f"{spec.size_px * spec.mpp:.0f} µm" if spec.mpp else f"{spec.size_px} pixels"


def _normalize(rows: _Floats) -> _Floats:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-30))


def chance_similarity(n: int, d: int) -> float:
    """Return the median of the largest cosine of a direction in d dimensions and n random ones."""
    # cos² has the distribution Beta(1/2, (d − 1)/2), and the largest of n is below its median with probability 1/2
    return float(beta.isf(2 * (1 - 0.5 ** (1 / n)), 0.5, (d - 1) / 2)) ** 0.5


def show_class_means(
    study: Study,
    sources: Sequence[Path],
    *,
    site: str,
    out: Path,
    n_patches: int = 6,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    mpp: float | None = None,
    public: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Write the page of a site's class means; return the `--json` document.

    The means are those in `statistics/SITE.safetensors`; without this file those of the site's store, and the page may
    not leave the site. Nothing is charged.

    Args:
        sources: public slides or pictures, cut by the settings of `[tile]`, patch stores, or folders of these.
        n_patches: number of patches nearest to each mean.
        mpp, public: see `build_projection`.

    Raises:
        UsageError: for sources of a site, or another encoder or projection than that of the statistics.
        WsiFlError: without patches, or without statistics and store.
    """
    pipeline = study.load_pipeline(study.pipeline_name(pipeline_name), overrides)
    statistics, label = _find_statistics(study, pipeline, site)
    header, choice = statistics.header, pipeline.model.projection
    projection = (
        random_projection(header.n_features, choice) if isinstance(choice, int) else open_projection(study, choice)
    )
    means = unpack_class_means(statistics, projection, label or f"site {site}", is_exact=label is None)
    rng = np.random.default_rng(0)
    queries = [[] if m.is_hidden else [m.mean, *m.redraw_noise(rng)] for m in means]
    points = np.array([*chain(*queries)]).reshape(-1, header.dimensions)
    embed, n_rows = partial(_embed_pixels, _load_encoder(study, pipeline, header), projection), dict[str, int]()
    nearest: list[list[PublicPatch]] = [[] for _ in points]
    for path in list_files(sources, None):
        try:
            source = _read_source(study, pipeline, path, mpp=mpp, public=public)
        except WsiFlError as error:
            if path in sources or isinstance(error, UsageError):
                raise
            continue  # another file of a folder
        n_rows[path.name] = len(source.pixels)
        found = source.find_nearest(points, embed(source.pixels), n_patches)
        nearest = [heapq.nlargest(n_patches, [*a, *b], _similarity) for a, b in zip(nearest, found, strict=True)]
        (watcher or SilentProgress()).update(path.name, 1, 1)
    if not n_rows:
        raise WsiFlError("--from: no slide, picture or patch store")
    rows = iter(nearest)
    strips = [[next(rows) for _ in points] for points in queries]
    document = {
        **header.model_dump(exclude={"task", "n_features", "digest", "classes"}),
        "file": label,
        "sources": n_rows,
        "classes": [_describe_class(m, rows) for m, rows in zip(means, strips, strict=True)],
        "page": str(out),
    }
    page = {
        "document": document,
        "classes": [
            (m, rows, _count_common(k, strips, means)) for k, (m, rows) in enumerate(zip(means, strips, strict=True))
        ],
        "is_declared": public,
        "chance": chance_similarity(sum(n_rows.values()), header.dimensions),
        "widths": sorted({patch.width for patch in chain(*nearest)}),
        "odds": None if header.epsilon is None else exp(header.epsilon),
        "made_from": label or f"the store of site {site}",
    }
    write_text(out, fill_template("class_means", page, Path(__file__).parent))
    return document


def _count_common(
    k: int, strips: Sequence[Sequence[Sequence[PublicPatch]]], means: Sequence[ClassMean]
) -> list[tuple[str, int]]:
    """Return (class, number) of other classes whose nearest patches are partly those of class k."""
    places = [{(patch.source, patch.row) for patch in rows[0]} if rows else set() for rows in strips]
    common = [(other.name, len(places[k] & place)) for other, place in zip(means, places, strict=True)]
    return [(name, n) for j, (name, n) in enumerate(common) if n and j != k]


def _find_statistics(study: Study, pipeline: Pipeline, site: str) -> tuple[ReleasedStatistics, str | None]:
    """Return the released statistics of a site and the name of their file, or those of its store and None."""
    for path in (study.release_path(site), study.local_release_path(site)):
        if path.exists():
            label = study.relative_path(path)
            statistics = read_statistics(path, label)
            refuse_another_site(statistics.header, site, label)
            return statistics, label
    if site not in study.site_names():
        raise WsiFlError(describe_missing(study, site))
    return preview_statistics(study, pipeline, study.load_site(site)), None


def _load_encoder(study: Study, pipeline: Pipeline, header: StatisticsHeader) -> Encoder:
    """Load the pipeline's encoder; UsageError where the statistics are of another."""
    encoder = load_encoder(study, pipeline, "features", n_cores())
    if any(encoder_differences([header.encoder, encoder.label])):
        raise UsageError(
            f"features.encoder: {encoder.label}, but the statistics of site {header.site} are of {header.encoder}; "
            "take the same encoder and weights"
        )
    return encoder


def _embed_pixels(encoder: Encoder, projection: Projection, pixels: NDArray[np.uint8]) -> _Floats:
    x = torch.from_numpy(encode_batches(iter([pixels]), encoder))
    z = embed_rows(x, torch.from_numpy(projection.mean), torch.from_numpy(projection.components))
    return np.asarray(z.numpy())


def _describe_class(mean: ClassMean, strips: Sequence[Sequence[PublicPatch]]) -> dict[str, Any]:
    """Return a class of the `--json` document."""
    keys = ("source", "row", "slide", "xy_l0", "similarity")
    patches = [[{key: getattr(patch, key) for key in keys} for patch in strip] for strip in strips]
    return {
        "class": mean.name,
        "count": round(mean.count, 1),
        "count_sd": round(mean.count_sd, 2),
        "noise_ratio": None if mean.noise_ratio == inf else round(mean.noise_ratio, 3),
        "hidden": mean.is_hidden,
        "nearest": patches[0] if patches else [],
        "with_other_noise": patches[1:],
    }


def render_class_lines(document: Mapping[str, Any]) -> Lines:
    """Yield a line for each class, and the page."""
    for row in document["classes"]:
        ratio = "larger than the mean" if row["noise_ratio"] is None else f"{row['noise_ratio']:.2f} of the mean"
        noise = "hidden by the noise" if row["hidden"] else f"noise {ratio}" if document["sigma"] else "no noise"
        yield TextLine(f"  {row['class']}: about {max(0, row['count']):.0f} {document['unit']}s; {noise}")
    yield TextLine(f"{document['page']}: the public patches nearest to each class mean")
    if document["file"] is None:
        yield TextLine("not released, and nothing was charged: the page must not leave the hospital", "yellow")
