"""HTML pages and Markdown documents from templates with a common layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

from wsi_fl.privacy.guarantee import describe_detection
from wsi_fl.report import formatting
from wsi_fl.types import make_printable

_TEMPLATE_FOLDER = Path(__file__).parent


def fill_template(kind: str, context: Mapping[str, Any], folder: Path = _TEMPLATE_FOLDER, form: str = "html") -> str:
    """Return a filled template without external files, of printable characters only.

    All pages share `layout.html.j2` and the macros of `parts.html.j2`; the functions of `words` are filters, without
    the prefixes `format_` and `describe_`.

    Args:
        kind: name of the template with the page's sections: run, comparison, coordinator, or one of `folder`.
        context: values of the template.
        folder: the templates of another package.
        form: "html", or "md" for Markdown.
    """
    text = _load_environment(folder, form).get_template(f"{kind}.{form}.j2").render(context)
    return make_printable(re.sub(r"\n\s*\n+", "\n", text) if form == "html" else text)


@cache
def _load_environment(folder: Path, form: str) -> Environment:
    """Return the environment of a folder, which caches compiled templates."""
    environment = Environment(
        loader=FileSystemLoader([folder, _TEMPLATE_FOLDER]),
        autoescape=form == "html",
        undefined=ChainableUndefined,  # a missing part of a document is like None
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, function in getmembers(formatting, isfunction):
        environment.filters[re.sub("^(format|describe)_", "", name)] = function
    environment.filters["svg"] = lambda chart: Markup(chart.svg)
    environment.filters |= {"known": formatting.is_number, "detected": describe_detection}
    environment.tests["known"] = formatting.is_number
    return environment
