"""What letters tell of those behind them, and what each letter changes, in words and cells for console and page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wsi_fl.report.page import Json
from wsi_fl.report.words import DASH, known, number

Cells = tuple[str, tuple[str, ...], list[list[str]]]
"""Title, headings and rows of a table."""


def tables(audit: Json) -> list[Cells]:
    """Return the tables on letters of an audit's document; none for other methods."""
    tails = [
        [site["site"], group["group"], str(group["n"]), *_cells(site["tail"], group, other)]
        for site in _with_tails(audit)
        for group, other in zip(
            *(site["tail"]["attackers"][who]["groups"] for who in ("others", "population")), strict=True
        )
    ]
    moved = [
        [
            row["site"],
            str(row["n"]),
            number(row["length"], 1),
            _percent(row["moved"]),
            _percent(row["answers_changed"]),
        ]
        for row in audit.get("influence") or ()
    ]
    found = [
        ("Who is found in a letter, with so many false alarms", _TAIL, tails),
        ("What each letter changes", _MOVED, moved),
    ]
    return [one for one in found if one[2]]


_FOUND = ("μ at most", "found at 1 %", "noise redrawn", "guarantee", "found at 0.1 %", "others unknown")
_TAIL = ("site", "who", "n", *_FOUND)
_MOVED = ("site", "moves the sum by at most", "length with noise", "head without it", "answers without it")


def _cells(tail: Json, group: Json, other: Json) -> Iterator[str]:
    often, rare = (group["found"][rate] for rate in ("0.01", "0.001"))
    yield number(group["most"], 2) if known(group["most"]) else "∞"
    yield _percent(often["exact"])
    low, high = often.get("interval", (None, None))
    yield f"{100 * low:.1f}–{_percent(high)}" if known(low) and known(high) else DASH
    yield _percent((tail["guaranteed"] or {}).get("0.01"))
    yield _percent(rare["exact"])
    yield _percent(other["found"]["0.01"]["exact"])


def _percent(share: Any) -> str:
    return f"{100 * share:.1f} %" if known(share) else DASH


def findings(audit: Json) -> list[tuple[str, bool]]:
    """Return sentences on letters, each with whether a promise is broken."""
    found = []
    for site in _with_tails(audit):
        tail, unit = site["tail"], f"{site['tail']['unit']}s"
        if tail["beyond"]:
            found.append(
                (
                    f"{site['site']}: more are found in its letter than is guaranteed: {', '.join(tail['beyond'])}",
                    True,
                )
            )
        everybody, most = (
            group["found"]["0.01"]["exact"] for group in tail["attackers"]["population"]["groups"][:2]
        )
        if not tail["sigma"]:
            known_all = f"whoever knows all other {unit} finds each in its letter, which has no noise"
            unknown = f"whoever knows none finds {_percent(everybody)}, of the most exposed {_percent(most)}"
            found.append((f"{site['site']}: {known_all}; {unknown}", False))
    return found


def _with_tails(audit: Json) -> list[Json]:
    return [site for site in audit["sites"] if site.get("tail")]
