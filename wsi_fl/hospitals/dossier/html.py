"""The page of a hospital's dossier: plain values in, one self-contained HTML document out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from wsi_fl.report.fill import fill

_MOST_LINES = 12
"""Releases of a run that are shown; the JSON beside the page has them all."""
_WIDEST = 36
"""Characters of a line in the drawing."""


def render(dossier: Mapping[str, Any]) -> str:
    """Return one HTML document that needs nothing beside it.

    Args:
        dossier: as `wsi-fl federation dossier --json` prints it.
    """
    plan = dossier["plan"]
    others = [site["name"] for site in plan["sites"] if site["name"] != dossier["site"]]
    return fill(
        "dossier",
        {
            "d": dossier,
            "plan": plan,
            "others": others,
            "flow": _flow(dossier, others),
            "most_lines": _MOST_LINES,
            "n_releases": sum(len(account["releases"]) for account in dossier["accounts"]),
        },
        Path(__file__).parent,
    )


def _flow(dossier: Mapping[str, Any], others: list[str]) -> dict[str, Any]:
    """What the drawing of the data flow says: at the hospital, on the way, at the others; and the same in words."""
    plan, way = dossier["plan"], dossier["network"][0]["to"]
    leaves = [row["what"].partition(" (")[0].partition(":")[0] for row in plan["leaves"]]
    named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    private = ["private model"] if any("private model" in one for one in plan["stays"]) else []
    stays = ["slides, patches, features", "labels and names", *private, "checkpoints", "private key"]
    relay = "folder" if way.startswith("the folder") else "server"
    return {
        "leaves": [line for one in leaves for line in wrap(f"· {one}", _WIDEST)],
        "stays": stays,
        "relay": f"shared {relay}" if relay == "folder" else relay,
        "others": named or "nobody",
        "alt": (
            f"Data flow. In hospital {dossier['site']} stay {', '.join(stays)}. Sealed letters with "
            f"{', '.join(leaves)} go by the {relay}, which cannot read them, to {named or 'nobody'}. "
            "Theirs come back."
        ),
    }
