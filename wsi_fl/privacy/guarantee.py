"""Privacy terms of a site, the rounds recorded in its ledger, and the guarantee over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wsi_fl.privacy.accounting import ACCOUNTANT, Mechanism, detection, epsilon
from wsi_fl.privacy.ledger_file import Entry, Guarantee
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.types import WsiFlError

PROTECTS_UP_TO = 100.0
"""The largest meaningful ε: above it no ε is reported, and content leaves only where the site allows that."""


MOST_ATTEMPTS = 3
"""Attempts at secure aggregation under one approval, the limit of what spoiled sums can make other sites spend."""


_MECHANISM = ("sigma", "clip", "sample_rate", "steps")
_PLAN = ("n", "batch_size", "mode")


class BudgetSpent(WsiFlError):
    """The next step would cross the site's max_epsilon."""


@dataclass(frozen=True)
class Terms:
    """The terms under which a site takes part in a run."""

    delta: float  # δ of the guarantee, for every mechanism on the account
    max_epsilon: float | None = None  # the budget, or None
    # whether the site is a real hospital: max_epsilon then covers every run in the ledger, and nothing is spent
    # without one. For a simulated site it covers this run alone.
    lifetime: bool = False
    allow: Collection[str] = ()  # kinds of content that may leave without differential privacy
    guarantee: Guarantee = "none"  # guarantee level of ε in this run
    unit: str = "row"  # privacy unit: "row" or "patient"
    insecure: bool = False  # whether noise comes from a fixed seed (tests)

    def line(self, mechanism: Mechanism | None, content: str) -> dict[str, Any]:
        """Return the fields of a ledger line on a mechanism and the content released by it, as JSON values."""
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
        """Refuse, for a real hospital, noise without a budget or a plan with a δ of 1 / n or more.

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
        """Refuse an account that these terms do not fit.

        Args:
            entries: all lines of the ledger.
            scope: the lines that count towards the budget.

        Raises:
            WsiFlError: when a simulated site has the account of a real hospital, or the account has another privacy
                unit or a smaller δ.
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


@dataclass
class Round:
    """One round of a site in a run, as recorded in the ledger."""

    site: str
    run: str
    number: int  # from 1 on, or 0 for releases before the first round
    mechanism: Mechanism | None = None  # None without differential privacy
    # content that may leave, by kind: {"model": SHA-256}, the newest of each kind
    releases: dict[str, str] = field(default_factory=dict)
    final: bool = False  # whether content may have left the site, so that the round is never trained again

    @property
    def released(self) -> list[str]:
        """The released contents as written in the ledger, "model 5f2c…"."""
        return [f"{kind} {digest}" for kind, digest in self.releases.items()]


def rounds_of(entries: Iterable[Entry]) -> list[Round]:
    """Return the rounds recorded in lines of a ledger, in the order of their beginnings.

    A round recorded again before any of its content left replaces the earlier record: it is charged once, and its
    earlier content may not leave. Recorded again after that, it is charged once more. Rounds of two sites that share a
    ledger are charged separately, also in one run.
    """
    found: list[Round] = []
    latest: dict[tuple[str, str], Round] = {}
    for entry in entries:
        key = entry.site, entry.run_id
        here = latest.get(key)
        if entry.sending or entry.relayed:
            if here is not None and here.number == entry.round:
                here.final = True
            continue
        if here is None or here.number != entry.round or (here.final and entry.mechanism):
            here = latest[key] = Round(*key, entry.round)
            found.append(here)
        if entry.mechanism is not None:
            here.mechanism = entry.mechanism.mechanism
        if entry.released:
            kind, _, digest = entry.released.partition(" ")
            here.releases[kind] = digest
    return found


def applied(entries: Iterable[Entry]) -> list[Mechanism]:
    """Return the mechanisms of all rounds recorded in lines of a ledger."""
    return [one.mechanism for one in rounds_of(entries) if one.mechanism is not None]


def detection_of(guarantee: str, spent: Sequence[Mechanism]) -> float | None:
    """Return the largest true positive rate at a false positive rate of 1 %; None without a guarantee."""
    return detection(spent) if spent and guarantee in ("guaranteed", "shared") else None


def of_hospital(entries: Iterable[Entry], unit: str) -> list[Entry]:
    """Return the ledger lines that count for a real hospital with this privacy unit.

    Its lines as a simulated site count too, but do not fix the unit: such lines of another unit are left out.
    """
    return [e for e in entries if e.real or e.unit in (None, unit)]


def attempts_of(entries: Iterable[Entry], site: str, approved: str) -> int:
    """Return the number of rounds of all runs in which a model could leave a site under one approval ("" for none)."""
    under = [e for e in entries if (e.site, e.approved) == (site, approved) and e.released]
    return len({(e.run_id, e.round) for e in under if str(e.released).startswith("model ")})


def units_of(entries: Iterable[Entry]) -> set[str]:
    """Return the privacy units in use: "row", "patient", or both."""
    return {str(e.unit) for e in entries if e.mechanism}


_WEAKEST_FIRST: tuple[Guarantee, ...] = ("none", "nominal", "shared", "guaranteed")


def epsilon_of(entries: Collection[Entry], delta: float, *, seeded: bool = False) -> float | None:
    """Return the ε of lines of a ledger at a δ, or None where no ε holds.

    None holds when data of training patients left without privacy, no mechanism is recorded, the lines have different
    privacy units, or ε is above 100. Noise from a known seed counts where `seeded`, as within a run of tests.
    """
    spent = applied(entries)
    bare = any(entry.bare for entry in entries)
    known = not seeded and any(entry.mechanism and entry.insecure for entry in entries)
    if not spent or bare or known or len(units_of(entries)) > 1:
        return None
    value = epsilon(spent, delta)
    return value if value <= PROTECTS_UP_TO else None


def guarantee_of(entries: Collection[Entry], terms: Guarantee = "guaranteed") -> Guarantee:
    """Return the weakest guarantee of the terms and of lines of a ledger."""
    spent = [entry for entry in entries if entry.mechanism or entry.bare]
    said: set[Guarantee] = {"none" if one.insecure or one.bare else one.guarantee for one in spent}
    return min({terms, *said}, key=_WEAKEST_FIRST.index)
