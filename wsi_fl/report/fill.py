"""The one kind of page: a layout that all share, and the sections that its data has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

from wsi_fl.report import words
from wsi_fl.types import printable

_HERE = Path(__file__).parent


def fill(kind: str, context: Mapping[str, Any], folder: Path = _HERE) -> str:
    """Return a page that needs nothing beside it, of printable characters alone.

    All pages share `layout.html.j2` and the tables, figures and tags of `parts.html.j2`. Numbers are shown by the
    functions of `words`.

    Args:
        kind: name of the template that holds the page's sections: run, comparison, coordinator, or one of `folder`.
        context: what the template shows.
        folder: where a page of another room has its template.
    """
    template = _environment(folder).get_template(f"{kind}.html.j2")
    return printable(re.sub(r"\n\s*\n+", "\n", template.render(context)))


@cache
def _environment(folder: Path) -> Environment:
    """It keeps the templates that it has compiled."""
    environment = Environment(
        loader=FileSystemLoader([folder, _HERE]),
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
        "detected",
        "singular",
    )
    environment.filters.update({name: getattr(words, name) for name in shown})
    environment.filters["svg"] = lambda chart: Markup(chart.svg)
    return environment
