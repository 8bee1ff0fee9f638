"""What other packages add, by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def entries(group: str) -> dict[str, Any]:
    """Return what installed packages add to a group, by name."""
    return {point.name: point.load() for point in sorted(entry_points(group=group), key=lambda one: one.name)}
