"""`wsi-fl class-means`: a page with the public patches nearest to the class means in a site's statistics.

A class mean is a point among projected public patches, so the patches nearest to it show what it says. Near is a small
angle as seen from the mean of public examples, the origin of the projection. Class means are much shorter than
examples, so that by Euclidean distance the length of an example would count more than its likeness. Random directions
begin at no tissue: all patches point much the same way then, and the page says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import exp, inf, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from wsi_fl.models.encoder import encode_batches
from wsi_fl.oneshot.build_projection import read_slide_patches, read_sources
from wsi_fl.oneshot.class_statistics import refuse_invalid_statistics
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
)
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.report.inline_pictures import encode_patch
from wsi_fl.report.templates import fill_template
from wsi_fl.stages.prepare.tile_plans import build_grid_spec
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.site.encoders import load_same_encoder
from wsi_fl.stages.site.public_sources import SourceCheck, sample_indices
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError, WsiFlError

_N_PATCHES, _N_DRAWS = 6, 3
"""Patches shown for a mean, and means with other noise."""
_Z = 1.96
_PICTURE_PX = 256
_SIZE_TOLERANCE = 0.02
_MAX_EXPONENT = 700.0  # of a float64
_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClassMean:
    """A class mean float64[d] in a site's statistics."""

    name: str
    mean: _Floats
    length: float  # of the mean without noise, estimated; 0 where noise is all
    noise_sd: float  # standard deviation of the noise in each component; 0 without noise, infinite for no units
    count: float  # number of units of the class, with noise
    count_sd: float  # standard deviation of that noise
    is_centred: bool = True  # whether the mean begins at average public tissue, as it does not on random directions

    @property
    def count_margin(self) -> float:
        """Half the 95 % interval of the count, by its noise."""
        return _Z * self.count_sd

    @property
    def is_hidden(self) -> bool:
        """Whether noise alone could make the count."""
        return self.count <= self.count_margin

    @property
    def noise_ratio(self) -> float:
        """Return the expected length of the noise over that of the mean; infinite where noise is all."""
        return sqrt(len(self.mean)) * self.noise_sd / self.length if self.length else inf

    def describe_noise(self) -> str:
        """Return what the noise means for the patches nearest to the mean, in a sentence."""
        ratio = self.noise_ratio
        if not self.noise_sd:
            return "It has no noise."
        if ratio > 1:
            return "The noise is larger than all that it says: these patches may be of any tissue, and tell nothing."
        if not self.is_centred:
            return (
                f"The noise moves it by about {ratio:.2f} of its length. Most of that length is what all tissue has in "
                "common, as its directions are random: the noise hides more of the class than this says."
            )
        size = f"The noise moves it by about {ratio:.2f} of its distance from average public tissue"
        if ratio > 1 / 3:  # an angle of 18°
            return f"{size}, which is noticeable: some of these patches may be here by chance."
        return f"{size}, which is little."

    def redraw_noise(self, rng: np.random.Generator) -> _Floats:
        """Return some means with as much noise once more, float64[n, d]; none without noise."""
        n = _N_DRAWS if self.noise_sd else 0
        return self.mean + rng.normal(scale=self.noise_sd, size=(n, len(self.mean)))


def unpack_class_means(
    statistics: ReleasedStatistics, projection: Projection, label: str, *, is_exact: bool = False
) -> list[ClassMean]:
    """Return the class means in statistics, with the noise that they have, or would get where they are exact.

    Raises:
        UsageError: for another projection, or statistics of numbers, survival or counts alone.
        WsiFlError: for statistics that no honest site would release.
    """
    header = statistics.header
    if header.projection != projection.digest:
        raise UsageError(
            f"{label}: made with another projection than model.projection; take the file that its hospital had"
        )
    if header.columns != len(header.classes) or not header.dimensions:
        raise UsageError(f"{label}: no statistics of classes with features, of which there are no class means to show")
    is_mean = header.unit == "patient" and header.example == "patch"
    head = SharedHead(len(header.classes), header.n_features, projection=projection, patients=is_mean)
    refuse_invalid_statistics(head.layout, statistics, label)
    vector = head.layout.remove_weights(torch.from_numpy(statistics.vector))
    sums, counts = head.unpack_statistics(vector)
    noise_sds, count_sd, means = head.noise_variances(vector).sqrt(), header.sigma / head.layout.count_scale, []
    for name, total, count, sd in zip(header.classes, sums, counts.tolist(), noise_sds.tolist(), strict=True):
        mean, noise_sd = ((total / count).numpy(), sd / count) if count > 0 else (np.zeros(len(total)), inf)
        length = sqrt(max(0.0, float(mean @ mean) - (0.0 if is_exact else len(mean) * noise_sd**2)))
        means.append(ClassMean(name, mean, length, noise_sd, count, count_sd, bool(projection.mean.any())))
    return means


class PublicPatch(NamedTuple):
    """A public patch uint8[h, w, 3]: the cosine of its angle, its source and row there, slide, corner and width."""

    similarity: float
    source: str
    row: int
    slide: str
    xy_l0: tuple[int, ...]
    width_um: float  # 0 where it is not known
    pixels: NDArray[np.uint8]


def chance_similarity(n: int, d: int) -> float:
    """Return the median of the largest cosine of a direction in d dimensions and n random ones."""
    # cos² has the distribution Beta(1/2, (d − 1)/2), and the largest of n is below its median with probability 1/2
    return sqrt(beta.isf(2 * (1 - 0.5 ** (1 / n)), 0.5, (d - 1) / 2))


def show_class_means(
    study: Study,
    sources: Sequence[Path],
    *,
    site: str,
    out: Path,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    mpp: float | None = None,
    public: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Write the page of a site's class means; return the `--json` document.

    The means are those that the site has released. Before a release they are those of its store, and the page must not
    leave the site. Nothing is charged.

    Args:
        sources: public slides or pictures, cut by the settings of `[tile]`, patch stores, or folders of these.
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
    queries = [[] if mean.is_hidden else [mean.mean, *mean.redraw_noise(rng)] for mean in means]
    points = np.array([*chain(*queries)]).reshape(-1, header.dimensions)
    search, check = _PatchSearch(study, pipeline, header, projection, points), SourceCheck(study, public)
    search_source = partial(search.search_source, mpp=mpp)
    counts, _ = read_sources(sources, None, check, search_source, watcher or SilentProgress())
    if not (n_rows := dict(counts)):
        raise WsiFlError("--from: no slide, picture or patch store")
    nearest = iter(search.nearest)
    strips = [[next(nearest) for _ in points] for points in queries]
    unit = header.example if header.unit == "row" else header.unit
    document = {
        **header.model_dump(exclude={"task", "n_features", "digest", "classes", "golden"}),
        "units": "patches" if unit == "patch" else f"{unit}s",
        "file": label,
        "sources": n_rows,
        "classes": [_describe_class(mean, rows) for mean, rows in zip(means, strips, strict=True)],
        "page": str(out),
        "random_directions": not projection.mean.any(),
    }
    page = {
        "document": document,
        "classes": [*zip(means, strips, strict=True)],
        "is_declared": public,
        "chance": chance_similarity(sum(n_rows.values()), header.dimensions),
        "odds": exp(min(header.epsilon or 0.0, _MAX_EXPONENT)),
        "made_from": label or f"the store of site {site}",
        "encode": lambda patch: encode_patch(patch.pixels, _PICTURE_PX),
    }
    write_text(out, fill_template("class_means", page, Path(__file__).parent))
    return document


def _find_statistics(study: Study, pipeline: Pipeline, site: str) -> tuple[ReleasedStatistics, str | None]:
    """Return the released statistics of a site and the name of their file, or those of its store and None."""
    for path in (study.release_path(site), study.local_release_path(site)):
        if path.exists():
            label = study.relative_path(path)
            return read_statistics(path, label, site), label
    if site not in study.site_names():
        raise WsiFlError(describe_missing(study, site))
    return preview_statistics(study, pipeline, study.load_site(site)), None


class _PatchSearch:
    """A search of public patches for those of the smallest angle to each of some means float64[q, d]."""

    def __init__(
        self, study: Study, pipeline: Pipeline, header: StatisticsHeader, projection: Projection, means: _Floats
    ) -> None:
        self.study, self.pipeline, self.header, self.projection = study, pipeline, header, projection
        self.means, self.nearest = _normalize_lengths(means), [list[PublicPatch]() for _ in means]
        self.encoder = load_same_encoder(study, pipeline, {f"site {header.site}": header.encoder})

    def search_source(self, path: Path, mpp: float | None) -> tuple[str, int]:
        """Search a source; return its name and its number of patches."""
        spec, name = build_grid_spec(self.pipeline), self.study.relative_path(path.resolve())
        if path.suffix == ".h5":
            with PatchStore(path) as store:
                if store.meta.site == self.header.site:
                    raise UsageError(f"{path}: patches of site {store.meta.site} itself; take public ones")
                rows, spec = sample_indices(len(store), MAX_PATCHES), store.meta.spec
                slides, corners = store.names["slide"].expand_names(rows).tolist(), store.xy_l0[rows]
                pixels = store.read(rows)
        else:
            corners, batches = read_slide_patches(self.study, self.pipeline, path, mpp)
            rows, slides, pixels = np.arange(len(corners)), [path.stem] * len(corners), np.concatenate([*batches])
        width_um, expected_um = spec.size_px * spec.mpp, self.header.size_px * self.header.mpp
        if width_um and expected_um and abs(width_um / expected_um - 1) > _SIZE_TOLERANCE:
            raise UsageError(
                f"{path}: patches {width_um:.0f} µm wide, but those of site {self.header.site} are {expected_um:.0f} "
                f"µm; for slides set tile.size_px={self.header.size_px} and tile.mpp={self.header.mpp:g}"
            )
        x = torch.from_numpy(encode_batches(iter([pixels]), self.encoder))
        z = embed_rows(x, torch.from_numpy(self.projection.mean), torch.from_numpy(self.projection.components))
        for patches, cosines in zip(self.nearest, self.means @ _normalize_lengths(z.numpy()).T, strict=True):
            for k in np.argsort(-cosines, kind="stable")[:_N_PATCHES].tolist():
                place = (name, int(rows[k]), slides[k], tuple(corners[k].tolist()), width_um)
                patches.append(PublicPatch(float(cosines[k]), *place, pixels[k].copy()))
            patches[:] = sorted(patches, key=lambda patch: -patch.similarity)[:_N_PATCHES]
        return name, len(rows)


def _normalize_lengths(rows: _Floats) -> _Floats:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-30))


def _describe_class(mean: ClassMean, strips: Sequence[Sequence[PublicPatch]]) -> dict[str, Any]:
    """Return a class of the `--json` document, with its nearest patches and those with other noise."""
    keys = ("source", "row", "slide", "xy_l0", "similarity")
    rows = [[{key: getattr(patch, key) for key in keys} for patch in strip] for strip in strips]
    return {
        "class": mean.name,
        "count": round(mean.count, 1),
        "count_sd": round(mean.count_sd, 2),
        "hidden": mean.is_hidden,
        "noise_ratio": None if mean.noise_ratio == inf else mean.noise_ratio,
        "nearest": rows[0] if rows else [],
        "with_other_noise": rows[1:],
    }


def render_class_lines(document: Mapping[str, Any]) -> Lines:
    """Yield a line for each class, and the page."""
    for row in document["classes"]:
        ratio = "larger than the mean" if row["noise_ratio"] is None else f"{row['noise_ratio']:.2f} of the mean"
        hidden = "hidden by the noise" if document["sigma"] else "none at this site"
        noise = hidden if row["hidden"] else f"noise {ratio}" if document["sigma"] else "no noise"
        yield TextLine(f"  {row['class']}: about {max(0, row['count']):.0f} {document['units']}; {noise}")
    if document["random_directions"]:
        yield TextLine("  random directions: noise and likeness look better than they are, as the page says", "yellow")
    yield TextLine(f"{document['page']}: the public patches nearest to each class mean")
    if document["file"] is None:
        yield TextLine("not released, and nothing was charged: the page must not leave the hospital", "yellow")
