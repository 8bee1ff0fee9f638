"""The page of a run: plain values in, one self-contained HTML document out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray

from wsi_fl.report import aggregation, audit, figures, pictures, sections, sets, words

Json = Mapping[str, Any]
"""A JSON object as the run's files hold it."""


@dataclass(frozen=True)
class Page:
    """Everything the page shows. Any number may be None; what has not been done yet is None or empty."""

    run: str
    """Name of the run's folder, ``00001-proxyfl-camelyon17``."""
    method: str
    pipeline: str
    classes: tuple[str, ...]
    config_toml: str
    manifest: Json
    """``created`` (ISO time), ``argv``, ``versions`` by package, ``git``, ``inputs`` (hash by site)."""
    summary: Json
    """The document of ``train --json``; each site may carry ``max_epsilon``, its budget."""
    evaluation: Json | None = None
    """The document of ``evaluate --json``. ``confusion`` rows are true classes, columns predicted ones."""
    metrics: Mapping[str, Sequence[Json]] = field(default_factory=dict)
    """Lines of ``metrics.jsonl`` by site; ``messages``, ``bytes`` and seconds are those of the round."""
    baselines: Sequence[Json] = ()
    """Other evaluated runs of the study."""
    stores: Sequence[Json] = ()
    patches: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Sample patches by site: (label, uint8[h, w, 3])."""
    overviews: Mapping[str, Sequence[tuple[str, bytes]]] = field(default_factory=dict)
    """Overview pictures by site: (slide, PNG bytes)."""
    groups: Mapping[str, Json] = field(default_factory=dict)
    """What ε per row is worth to each site's largest patient: ``rows``, ``epsilon`` (None beyond 1000), ``delta``."""
    audit: Json | None = None
    """The document of ``audit --json``."""
    mpcpa: Json | None = None
    """The document of ``train --method mpcpa --baselines``."""
    generated: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Images that were generated for this run, by the site whose denoiser they come from."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sites of real patients whose ``patches``, ``overviews`` or ``generated`` images are not shown."""
    patients_of: Sequence[str] = ()
    """Sites of real patients of whom the page holds pictures."""
    examples: str = "patches"
    """What a model is asked about: patches, or whole slides, of which there are no pixels."""


def render(page: Page) -> str:
    """One HTML document that needs nothing beside it.

    Raises WsiFlError where an overview is no picture.
    """
    return fill("template.html.j2", _context(page))


def fill(template: str, context: Mapping[str, Any], **filters: Callable[..., Any]) -> str:
    """One of the room's templates, filled; numbers are shown by the functions of `words`, and by `filters`."""
    environment = Environment(
        loader=PackageLoader("wsi_fl", "report"),
        autoescape=True,
        undefined=ChainableUndefined,  # a missing part of a document reads like None
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (
        "number",
        "count",
        "signed",
        "spread",
        "size",
        "interval",
        "duration",
        "scientific",
        "known",
        "percent",
    )
    environment.filters.update({name: getattr(words, name) for name in shown} | filters)
    return re.sub(r"\n\s*\n+", "\n", environment.get_template(template).render(context))


def _context(page: Page) -> dict[str, Any]:
    names = _site_names(page)
    evaluated = list((page.evaluation or {}).get("sites", ()))
    colors = {name: figures.site_color(i, len(names)) for i, name in enumerate(names)}
    rows = sections.rows(page)
    return {
        "page": page,
        "names": names,
        "many": len(names) > sections.MANY_SITES,
        "slots": {name: i if len(names) <= sections.MANY_SITES else 0 for i, name in enumerate(names)},
        "title": f"{words.method_name(page.method)} on {page.pipeline}",
        "method": words.method_name(page.method),
        "metric_names": sections.METRICS,
        "evaluated": evaluated,
        "headline": sections.headline(page, len(names)),
        "privacy": sections.privacy(page),
        "audit": audit.section(page, colors),
        "aggregation": aggregation.section(page, colors),
        "rows": rows,
        "comparison": sections.comparison(page, rows, colors),
        "curves": sections.curves(page, colors),
        "has_accuracy": any(
            line.get("own") or line.get("merged") for m in page.metrics.values() for line in m
        ),
        "spent": sections.spent(page, colors),
        "reliability": sections.reliability(evaluated, colors),
        "pooled": sections.pooled(evaluated),
        "heats": sections.heats(evaluated),
        "data": sets.data(page),
        "slidewise": page.examples == "slides",
        "tests": sets.test_sets(page),
        "tumor_types": sets.tumor_types(evaluated),
        "traffic": sections.traffic(page),
        "patches": sections.patches(page, names),
        "overviews": pictures.overview_uris(page.overviews),
        "svg": lambda chart: Markup(chart.svg),
    }


def _site_names(page: Page) -> list[str]:
    """Every site that any part of the page mentions, in the order of the run."""
    everywhere = [
        *(s["site"] for s in page.summary.get("sites", ())),
        *(s["site"] for s in (page.evaluation or {}).get("sites", ())),
        *page.metrics,
        *(s["site"] for s in page.stores),
    ]
    return list(dict.fromkeys(everywhere))
