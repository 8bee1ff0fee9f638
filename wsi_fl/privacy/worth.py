"""What lines of a ledger cost together, and what that ε is worth."""

from __future__ import annotations

from collections.abc import Collection

from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.book import Entry, Guarantee
from wsi_fl.privacy.rounds import applied, units_of
from wsi_fl.privacy.terms import PROTECTS_UP_TO

_WEAKEST_FIRST: tuple[Guarantee, ...] = ("none", "nominal", "shared", "guaranteed")


def epsilon_of(entries: Collection[Entry], delta: float, *, seeded: bool = False) -> float | None:
    """Return the ε of lines of a ledger at a δ, or None where it says nothing.

    It says nothing when something of the training patients left without privacy, nothing is accounted, the lines count
    different units, or ε is above `PROTECTS_UP_TO`.

    Args:
        seeded: whether noise from a known seed counts as noise, as within a run of tests.
    """
    spent = applied(entries)
    bare = any(entry.bare for entry in entries)
    known = not seeded and any(entry.mechanism and entry.insecure for entry in entries)
    if not spent or bare or known or len(units_of(entries)) > 1:
        return None
    value = epsilon(spent, delta)
    return value if value <= PROTECTS_UP_TO else None


def guarantee_of(entries: Collection[Entry], terms: Guarantee = "guaranteed") -> Guarantee:
    """Return what lines of a ledger promise together: as much as the weakest of them, and no more than the terms."""
    spent = [entry for entry in entries if entry.mechanism or entry.bare]
    said: set[Guarantee] = {"none" if one.insecure or one.bare else one.guarantee for one in spent}
    return min({terms, *said}, key=_WEAKEST_FIRST.index)
