"""Under which terms a site takes part: what it may spend, at which δ, and what it lets go without privacy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wsi_fl.privacy.accounting import ACCOUNTANT, Mechanism
from wsi_fl.privacy.book import Entry, Guarantee
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.privacy.rounds import units_of
from wsi_fl.types import WsiFlError

PROTECTS_UP_TO = 100.0
"""An ε above it protects nobody: it is shown as none, and what it covers leaves only where the site allows that."""


MOST_ATTEMPTS = 3
"""At a sum of all sites that hides its parts, under one approval: whoever spoils sums makes others spend no more."""


_MECHANISM = ("sigma", "clip", "sample_rate", "steps")
_PLAN = ("n", "batch_size", "mode")


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

    def line(self, mechanism: Mechanism | None, content: str) -> dict[str, Any]:
        """Return what a line of the ledger says of what was applied, and of what may leave by it, as JSON values."""
        told = asdict(mechanism) if mechanism else {}
        return {
            "released": content or None,
            "mechanism": {key: told[key] for key in _MECHANISM} if told else None,
            "plan": {key: told[key] for key in _PLAN} if isinstance(mechanism, PrivacyPlan) else None,
            "delta": self.delta,
            "unit": self.unit,
            "guarantee": self.guarantee if mechanism else "none",
            "accountant": ACCOUNTANT,
            "insecure": self.insecure,
        }

    def check_mechanism(self, mechanism: Mechanism, site: str) -> None:
        """Refuse what a real hospital never applies: noise without a budget, or a plan whose δ is not below 1 / n.

        Raises:
            WsiFlError: in one line, with what to write in the site's file.
        """
        if not self.lifetime:
            return
        if self.max_epsilon is None:
            if mechanism.sigma > 0 and not self.insecure:
                raise WsiFlError(
                    f"sites/{site}.toml: a real hospital spends nothing without a budget; "
                    "write max_epsilon and delta there"
                )
        elif isinstance(mechanism, PrivacyPlan):
            mechanism.refuse_large_delta()

    def check_account(
        self, entries: Sequence[Entry], scope: Sequence[Entry], *, path: Path, site: str
    ) -> None:
        """Refuse an account with which these terms do not add up.

        Args:
            entries: all lines of the site's ledger.
            scope: those that count towards the budget.
            path: the ledger, for messages.

        Raises:
            WsiFlError: when it is a real hospital's and the site is said to be simulated, counts another unit, or was
                priced at a smaller δ before.
        """
        if not self.lifetime and any(e.real for e in entries):
            raise WsiFlError(
                f"{path}: this is the ledger of a real hospital, and sites/{site}.toml says real = false; "
                "say real = true, or simulate under another name"
            )
        if other := units_of(scope) - {self.unit}:
            raise WsiFlError(
                f"{path}: the account of site {site} counts ε per {other.pop()}, this run per {self.unit}, and the two "
                "do not add up; keep the privacy.unit that the site began with"
            )
        least = min((e.delta for e in scope if e.mechanism and e.delta), default=1.0)
        if self.lifetime and self.max_epsilon is not None and self.delta > least:
            raise WsiFlError(
                f"{path}: the account of site {site} is priced at delta = {least:g}, this run at "
                f"{self.delta:g}; δ is part of the budget, so set delta = {least:g} or less in sites/{site}.toml "
                "and start a new run"
            )
