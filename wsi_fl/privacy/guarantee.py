"""What a site promises and has spent: its terms, the rounds that a ledger records, and the guarantee they give."""

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
"""An ε above it protects nobody: it is shown as none, and what it covers leaves only where the site allows that."""


MOST_ATTEMPTS = 3
"""At a sum of all sites that hides its parts, under one approval: whoever spoils sums makes others spend no more."""


_MECHANISM = ("sigma", "clip", "sample_rate", "steps")
_PLAN = ("n", "batch_size", "mode")


class BudgetSpent(WsiFlError):
    """The next step would cross the site's max_epsilon."""


@dataclass(frozen=True)
class Terms:
    """The terms under which a site takes part in a run."""

    delta: float  # δ of the site's promise, at which everything on its account is priced
    max_epsilon: float | None = None  # the most it will spend, or None
    # whether the site is a real hospital: max_epsilon then covers every run in the ledger, and without one nothing
    # is spent. For a simulated site it covers this run alone.
    lifetime: bool = False
    allow: Collection[str] = ()  # kinds of content that may leave without differential privacy
    guarantee: Guarantee = "none"  # what ε is worth in this run
    unit: str = "row"  # what one record is: "row" or "patient"
    insecure: bool = False  # whether noise comes from a fixed seed (tests)

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
        """Refuse what a real hospital must not apply: noise without a budget, or a plan with a δ of 1 / n or more.

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
        """Refuse an account that these terms do not fit, given all lines of the ledger and those that count towards the
        budget.

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


@dataclass
class Round:
    """One round of a site in a run, as it stands on the ledger."""

    site: str
    run: str
    number: int  # from 1 on, or 0 for what is released before the first round
    mechanism: Mechanism | None = None  # what was applied; None where there was no differential privacy
    # what may leave, by kind: {"model": SHA-256}. Of each kind the newest alone.
    releases: dict[str, str] = field(default_factory=dict)
    final: bool = False  # whether something of it may have left the site, so that it is never trained anew

    @property
    def released(self) -> list[str]:
        """Return what may leave as the ledger's lines say it, "model 5f2c…"."""
        return [f"{kind} {digest}" for kind, digest in self.releases.items()]


def rounds_of(entries: Iterable[Entry]) -> list[Round]:
    """Return the rounds that lines of a ledger record, in the order in which they were begun.

    A round that is recorded anew at once, before anything of it left, takes the place of what it was: it is charged
    once, and what it had made before may leave no more. Recorded after that it is charged once more. Rounds of two
    sites that share a ledger are charged apart, also in one run.
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
    """Return the mechanisms of all rounds that lines of a ledger record."""
    return [one.mechanism for one in rounds_of(entries) if one.mechanism is not None]


def detection_of(guarantee: str, spent: Sequence[Mechanism]) -> float | None:
    """Return what share of members any test finds that is wrong about 1 in 100; None where nothing is promised."""
    return detection(spent) if spent and guarantee in ("guaranteed", "shared") else None


def of_hospital(entries: Iterable[Entry], unit: str) -> list[Entry]:
    """Return the lines that count for a real hospital that counts ε per `unit`.

    What it did as a simulated site counts like all else, but does not bind it to the unit of that time: such lines of
    another unit are left out.
    """
    return [e for e in entries if e.real or e.unit in (None, unit)]


def attempts_of(entries: Iterable[Entry], site: str, approved: str) -> int:
    """Return in how many rounds of all runs a model could leave a site under one approval; "" for none."""
    under = [e for e in entries if (e.site, e.approved) == (site, approved) and e.released]
    return len({(e.run_id, e.round) for e in under if str(e.released).startswith("model ")})


def units_of(entries: Iterable[Entry]) -> set[str]:
    """Return the units of privacy that were used: "row", "patient", or both."""
    return {str(e.unit) for e in entries if e.mechanism}


_WEAKEST_FIRST: tuple[Guarantee, ...] = ("none", "nominal", "shared", "guaranteed")


def epsilon_of(entries: Collection[Entry], delta: float, *, seeded: bool = False) -> float | None:
    """Return the ε of lines of a ledger at a δ, or None where no ε holds.

    None holds when data of training patients left without privacy, nothing is accounted, the lines count different
    units, or ε is above `PROTECTS_UP_TO`. Noise from a known seed counts where `seeded`, as within a run of tests.
    """
    spent = applied(entries)
    bare = any(entry.bare for entry in entries)
    known = not seeded and any(entry.mechanism and entry.insecure for entry in entries)
    if not spent or bare or known or len(units_of(entries)) > 1:
        return None
    value = epsilon(spent, delta)
    return value if value <= PROTECTS_UP_TO else None


def guarantee_of(entries: Collection[Entry], terms: Guarantee = "guaranteed") -> Guarantee:
    """Return the guarantee of lines of a ledger: the weakest of theirs and the terms'."""
    spent = [entry for entry in entries if entry.mechanism or entry.bare]
    said: set[Guarantee] = {"none" if one.insecure or one.bare else one.guarantee for one in spent}
    return min({terms, *said}, key=_WEAKEST_FIRST.index)
