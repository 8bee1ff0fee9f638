"""How fast patches were encoded, for people and for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wsi_fl.stages.work.console import Line, Lines

if TYPE_CHECKING:
    from wsi_fl.models.encoder import Spent


def speed_of(site: str, spent: Spent, slides: int, patches: int, seconds: float) -> dict[str, Any]:
    """Return for `--json` how fast patches were encoded and what took the time, on all ranks together.

    Args:
        slides, patches: how many were encoded; what was there already does not count.
    """
    return {
        "site": site,
        "slides_per_second": slides / seconds,
        "patches_per_second": patches / seconds,
        "spent": {"read": spent.read, "encode": spent.encode, "write": spent.write},
    }


def speed_lines(rows: Sequence[dict[str, Any]]) -> Lines:
    """Say how fast the patches of each site were encoded, where any were."""
    for row in rows:
        if row["patches_per_second"]:
            spent = ", ".join(f"{key} {seconds:.1f} s" for key, seconds in row["spent"].items())
            speed = f"{row['patches_per_second']:.1f} patches/s, {row['slides_per_second']:.2f} slides/s"
            yield Line(f"  {row['site']}: {speed} ({spent}, partly at once)")
