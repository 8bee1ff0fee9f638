"""Where the slides of a site lie, and what its archive says of them."""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path

from wsi_fl.slides.layouts import Sources
from wsi_fl.stages.work.console import Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile as SiteConfig
from wsi_fl.types import UsageError


def sources_of(study: Study, site: SiteConfig) -> Sources:
    """The paths of a site file, resolved against the study."""
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
        verify=site.verify is not False,
        verified=study.store(site.name).parent / "verified.jsonl",
        slide_types=tuple(site.slide_types or ("DX",)),
        columns={str(key): name for key, name in site.columns.items()},
    )


def _patterns(patterns: str | list[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns or []


def watched(sources: Sources, watcher: Watcher | None) -> Sources:
    """Verifying an archive may take hours: these sources say how far it is."""
    if watcher is None:
        return sources
    return replace(
        sources, progress=lambda done, total: watcher.update(sources.site, done, total, "checking MD5")
    )
