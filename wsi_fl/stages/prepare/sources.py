"""Where the slides of a site lie, and what its archive says of them."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wsi_fl.slides.layouts import Sources, read_site
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import SetAside, SlideRecord, UsageError


def sources_of(study: Study, site: SiteFile) -> Sources:
    """Return the paths of a site file, resolved against the study."""
    if site.slides is None:
        raise UsageError(
            f"sites/{site.name}.toml: slides is missing; a site made by `wsi-fl partition` has none to tile"
        )
    escaped = Study(Path(glob.escape(str(study.root))))  # the study's own folder may hold a [ or *

    def path(text: str | None) -> Path | None:
        return study.resolve(text) if text is not None else None

    return Sources(
        site=site.name,
        label=f"sites/{site.name}.toml",
        slides=tuple(str(escaped.resolve(pattern)) for pattern in _patterns(site.slides)),
        annotations=path(site.annotations),
        labels=path(site.labels),
        split=path(site.split),
        mpp_override=site.mpp_override,
        manifests=tuple(str(escaped.resolve(pattern)) for pattern in _patterns(site.manifest)),
        slide_types=tuple(site.slide_types or ("DX",)),
        labelled=not site.receives,
        columns={str(key): name for key, name in site.columns.items()},
    )


def _patterns(patterns: str | list[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns or []


@dataclass(frozen=True)
class Listed:
    """A site and its slides.

    Attributes:
        records: the slides that its archive describes well.
        aside: the others.
        said: what became of the rows of its tables.
    """

    study: Study
    site: SiteFile
    pipeline: Pipeline
    records: tuple[SlideRecord, ...]
    aside: tuple[SetAside, ...]
    said: tuple[str, ...]


def asked_for(
    study: Study, site: str | None, pipeline_name: str | None, overrides: Sequence[str]
) -> tuple[Pipeline, list[SiteFile]]:
    """Return the pipeline that a command runs, and the site that it names or else every site of the pipeline."""
    pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
    return pipeline, study.sites(pipeline) if site is None else [study.site(site)]


def list_slides(
    study: Study, site: str | None, pipeline_name: str | None, overrides: Sequence[str]
) -> list[Listed]:
    """Return the slides of the sites that `asked_for` gives; every site's paths are looked at before any archive."""
    pipeline, sites = asked_for(study, site, pipeline_name, overrides)
    listed = []
    for one, sources in [(one, sources_of(study, one)) for one in sites]:
        said: list[str] = []
        records, aside = read_site(one.layout, replace(sources, tell=said.append))
        listed.append(Listed(study, one, pipeline, tuple(records), tuple(aside), tuple(said)))
    return listed
