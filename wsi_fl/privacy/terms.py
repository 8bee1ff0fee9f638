"""Under which terms a site takes part: what it may spend, at which δ, and what it lets go without privacy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from wsi_fl.privacy.book import Guarantee
from wsi_fl.types import WsiFlError

PROTECTS_UP_TO = 100.0
"""An ε above it protects nobody: it is shown as none, and what it covers leaves only where the site allows that."""


class BudgetSpent(WsiFlError):
    """The next step would cross the site's max_epsilon."""


@dataclass(frozen=True)
class Terms:
    """Under which a site takes part in a run.

    Attributes:
        delta: δ of the site's promise, at which everything on its account is priced.
        max_epsilon: the most it will spend, or None.
        lifetime: whether the site is a real hospital: max_epsilon then covers every run in the ledger, and without
            one nothing is spent. For a simulated site it covers this run alone.
        allow: kinds of content that may leave without differential privacy.
        guarantee: what ε is worth in this run.
        unit: what one record is: "row" or "patient".
        insecure: whether noise comes from a fixed seed (tests).
    """

    delta: float
    max_epsilon: float | None = None
    lifetime: bool = False
    allow: Collection[str] = ()
    guarantee: Guarantee = "none"
    unit: str = "row"
    insecure: bool = False
