"""Fills a template of this room."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader

from wsi_fl.report import words
from wsi_fl.types import printable


def fill(template: str, context: Mapping[str, Any], **filters: Callable[..., Any]) -> str:
    """One of the room's templates, filled, of printable characters alone.

    Numbers are shown by the functions of `words`, and by `filters`.
    """
    environment = _environment()
    environment.filters.update(filters)
    return printable(re.sub(r"\n\s*\n+", "\n", environment.get_template(template).render(context)))


@cache
def _environment() -> Environment:
    """It keeps the templates that it has compiled."""
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
    environment.filters.update({name: getattr(words, name) for name in shown})
    return environment
