"""The one kind of page: a layout that all share, and the sections that its data has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

from wsi_fl.report import words
from wsi_fl.types import printable

_HERE = Path(__file__).parent


def fill(kind: str, context: Mapping[str, Any], folder: Path = _HERE, form: str = "html") -> str:
    """Return a page that needs nothing beside it, of printable characters alone.

    All pages share `layout.html.j2` and the tables, figures and tags of `parts.html.j2`, and know the functions of
    `words` as filters.

    Args:
        kind: name of the template that holds the page's sections: run, comparison, coordinator, or one of `folder`.
        context: what the template shows.
        folder: where a page of another room has its template.
        form: "html", or "md" for Markdown.
    """
    text = _environment(folder, form).get_template(f"{kind}.{form}.j2").render(context)
    return printable(re.sub(r"\n\s*\n+", "\n", text) if form == "html" else text)


@cache
def _environment(folder: Path, form: str) -> Environment:
    """It keeps the templates that it has compiled."""
    environment = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=form == "html",
        undefined=ChainableUndefined,  # a missing part of a document reads like None
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, function in getmembers(words, isfunction):
        environment.filters[re.sub("^(format|describe)_", "", name)] = function
    environment.filters["svg"] = lambda chart: Markup(chart.svg)
    environment.filters |= {"known": words.known, "detected": words.detected}
    environment.tests["known"] = words.known
    return environment
