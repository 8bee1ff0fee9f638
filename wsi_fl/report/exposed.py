"""What letters tell of those behind them, and what each letter changes, in words and cells for console and page."""

from __future__ import annotations

from typing import Any

from wsi_fl.report.page import Json
from wsi_fl.report.words import DASH, known, number

Cells = tuple[str, tuple[str, ...], list[list[str]]]
"""Title, headings and rows of a table."""
_FOUND = ("μ at most", "found at 1 %", "noise redrawn", "guarantee", "found at 0.1 %", "others unknown")
_MOVED = ("site", "moves the sum by at most", "length with noise", "head without it", "answers without it")


def tables(audit: Json) -> list[Cells]:
    """Return the tables on letters of an audit's document; none for other methods."""
    tails = [
        [site["site"], group["group"], str(group["n"]), *_cells(site["tail"], group, other)]
        for site in _with_tails(audit)
        for group, other in zip(*(who["groups"] for who in site["tail"]["attackers"].values()), strict=True)
    ]
    moved = [
        [
            row["site"],
            str(row["n"]),
            number(row["length"], 1),
            *map(_percent, (row["moved"], row["answers_changed"])),
        ]
        for row in audit.get("influence") or ()
    ]
    title = "Who is found in a letter, with so many false alarms"
    found = [(title, ("site", "who", "n", *_FOUND), tails), ("What each letter changes", _MOVED, moved)]
    return [one for one in found if one[2]]


def _cells(tail: Json, group: Json, other: Json) -> list[str]:
    often, rare = (group["found"][rate] for rate in ("0.01", "0.001"))
    low, high = often.get("interval", (None, None))
    shares = ((tail["guaranteed"] or {}).get("0.01"), rare["exact"], other["found"]["0.01"]["exact"])
    most = number(group["most"], 2) if known(group["most"]) else "∞"
    drawn = f"{100 * low:.1f}–{_percent(high)}" if known(low) else DASH
    return [most, _percent(often["exact"]), drawn, *map(_percent, shares)]


def _percent(share: Any) -> str:
    return f"{100 * share:.1f} %" if known(share) else DASH


def findings(audit: Json) -> list[tuple[str, bool]]:
    """Return sentences on letters, each with whether a promise is broken."""
    letters = audit.get("influence") or ()
    found = [
        (f"the letter of {one['site']} is refused: {one['refused']}", True)
        for one in letters
        if one["refused"]
    ]
    for site in _with_tails(audit):
        name, tail = site["site"], site["tail"]
        if tail["beyond"]:
            who = ", ".join(tail["beyond"])
            found.append((f"{name}: more are found in its letter than is guaranteed: {who}", True))
        if not tail["sigma"]:
            groups = tail["attackers"]["population"]["groups"]
            everybody, most = (_percent(group["found"]["0.01"]["exact"]) for group in groups[:2])
            known_all = (
                f"whoever knows all other {tail['unit']}s finds each in its letter, which has no noise"
            )
            unknown = f"whoever knows none finds {everybody}, of the most exposed {most}"
            found.append((f"{name}: {known_all}; {unknown}", False))
    return found


def _with_tails(audit: Json) -> list[Json]:
    return [site for site in audit["sites"] if site.get("tail")]
