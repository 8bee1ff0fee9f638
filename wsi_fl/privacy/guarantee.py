"""Privacy terms of a site, the rounds recorded in its ledger, and the guarantee over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from wsi_fl.privacy.accounting import ACCOUNTANT, Composition, Mechanism, max_tpr
from wsi_fl.privacy.ledger_file import Guarantee, LedgerEntry
from wsi_fl.privacy.privacy_plan import PrivacyPlan
from wsi_fl.types import WsiFlError

MAX_PROTECTIVE_EPSILON = 100.0
"""The largest meaningful ε: above it no ε is reported, and content leaves only where the site allows that."""


ADJACENCY = (
    "The guarantee concerns one record (a row, or a patient) replaced by nothing while n stays fixed; for one "
    "record replaced by another, ε is that of a group of two."
)
"""The neighbouring data sets of ε; a canary's coin decides between two of them."""


MAX_ATTEMPTS = 3
"""Attempts at secure aggregation under one approval, the limit of what spoiled sums can make other sites spend."""


_WEAKEST_FIRST: tuple[Guarantee, ...] = ("none", "nominal", "shared", "guaranteed")
_MECHANISM_KEYS = ("sigma", "clip", "sample_rate", "steps")
_PLAN_KEYS = ("n", "batch_size", "mode")


class BudgetSpent(WsiFlError):
    """The next step would cross the site's max_epsilon."""


@dataclass(frozen=True)
class PrivacyTerms:
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
    file: str = ""  # the file that has them; "" for sites/SITE.toml

    def ledger_fields(self, mechanism: Mechanism | None, content: str) -> dict[str, object]:
        """Return the fields of a ledger line on a mechanism and the content released by it, as JSON values."""
        values = asdict(mechanism) if mechanism else {}
        return {
            "released": content or None,
            "mechanism": {key: values[key] for key in _MECHANISM_KEYS} if values else None,
            "plan": {key: values[key] for key in _PLAN_KEYS} if isinstance(mechanism, PrivacyPlan) else None,
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
        self, entries: Sequence[LedgerEntry], scope: Sequence[LedgerEntry], *, path: Path, site: str
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
        if other := {str(e.unit) for e in scope if e.mechanism} - {self.unit}:
            raise WsiFlError(
                f"{path}: the account of site {site} counts ε per {other.pop()}, this run per {self.unit}, and the two "
                "do not add up; keep the privacy.unit that the site began with"
            )
        least = min((e.delta for e in scope if e.mechanism and e.delta), default=1.0)
        if self.lifetime and self.max_epsilon is not None and self.delta > least:
            raise WsiFlError(
                f"{path}: the account of site {site} is priced at delta = {least:g}, and {self.delta:g} is larger; δ "
                f"is part of the budget, so set delta = {least:g} or less in {self.file or f'sites/{site}.toml'}, and "
                "start again"
            )


@dataclass
class LedgerRound:
    """One round of a site in a run, as recorded in the ledger."""

    site: str
    run: str
    number: int  # from 1 on, or 0 for releases before the first round
    mechanism: Mechanism | None = None  # None without differential privacy
    # content that may leave, by kind: {"model": SHA-256}, the newest of each kind
    releases: dict[str, str] = field(default_factory=dict)
    final: bool = False  # whether content may have left the site, so that the round is never trained again

    @property
    def release_texts(self) -> list[str]:
        """The released contents as written in the ledger, "model 5f2c…"."""
        return [f"{kind} {digest}" for kind, digest in self.releases.items()]


class RoundHistory:
    """The rounds recorded in lines of a ledger and their guarantee, at a cost that does not grow with their number.

    A round recorded again before any of its content left replaces the earlier record: it is charged once, and its
    earlier content may not leave. Recorded again after that, it is charged once more. Rounds of two sites that share a
    ledger are charged separately, also in one run.

    Attributes:
        rounds: in the order of their beginnings.
        n_charged: the number of rounds with a mechanism.
        last_round, last_final_round: their largest numbers; 0 before the first.
        units: the privacy units in use: "row", "patient", or both.
    """

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self.rounds: list[LedgerRound] = []
        self.n_charged = self.last_round = self.last_final_round = 0
        self.units: set[str] = set()
        self._guarantees: set[Guarantee] = set()
        self._has_unprotected = self._has_known_noise = False
        self._current: dict[tuple[str, str], LedgerRound] = {}  # by site and run
        self._newest: dict[int, LedgerRound] = {}  # by number
        self._earlier, self._n_earlier = Composition(), 0  # of rounds before the last, as far as composed
        self.add_entries(entries)

    def add_entries(self, entries: Iterable[LedgerEntry]) -> None:
        """Add further lines."""
        for entry in entries:
            self._add_guarantee(entry)
            if entry.sending or entry.relayed:
                self._finish_round(entry)
            else:
                self._record_round(entry)

    def _add_guarantee(self, entry: LedgerEntry) -> None:
        if entry.mechanism:
            self.units.add(str(entry.unit))
            self._guarantees.add("none" if entry.insecure else entry.guarantee)
            self._has_known_noise |= entry.insecure
        elif entry.is_unprotected:
            self._guarantees.add("none")
            self._has_unprotected = True

    def _finish_round(self, entry: LedgerEntry) -> None:
        current = self._current.get((entry.site, entry.run_id))
        if current is not None and current.number == entry.round:
            current.final = True
            self.last_final_round = max(self.last_final_round, current.number)

    def _record_round(self, entry: LedgerEntry) -> None:
        current = self._find_replaced(entry)
        if current is None:
            current = LedgerRound(entry.site, entry.run_id, entry.round)
            self._current[entry.site, entry.run_id] = self._newest[entry.round] = current
            self.rounds.append(current)
            self.last_round = max(self.last_round, entry.round)
        if entry.mechanism is not None:
            self._charge_round(current, entry.mechanism.gaussian_mechanism)
        if entry.released:
            kind, _, digest = entry.released.partition(" ")
            current.releases[kind] = digest

    def _find_replaced(self, entry: LedgerEntry) -> LedgerRound | None:
        """Return the round that a line adds to or replaces; None where a round begins."""
        current = self._current.get((entry.site, entry.run_id))
        if current is None or current.number != entry.round or (current.final and entry.mechanism):
            return None
        return current

    def _charge_round(self, round_: LedgerRound, mechanism: Mechanism) -> None:
        self.n_charged += round_.mechanism is None
        if round_ is not self.rounds[-1] and round_.mechanism != mechanism:
            self._earlier, self._n_earlier = Composition(), 0
        round_.mechanism = mechanism

    def list_mechanisms(self) -> list[Mechanism]:
        """Return the mechanisms of all rounds, one for each, equal ones too."""
        return _list_mechanisms(self.rounds)

    def find_round(self, number: int) -> LedgerRound | None:
        """Return the round of this number that began last."""
        return self._newest.get(number)

    def weakest_guarantee(self, terms: Guarantee = "guaranteed") -> Guarantee:
        """Return the weakest guarantee of the terms and of the lines."""
        return min({terms, *self._guarantees}, key=_WEAKEST_FIRST.index)

    @property
    def has_spent(self) -> bool:
        """Return whether a line has a mechanism, or data of training patients left without privacy."""
        return bool(self._guarantees)

    def compute_epsilon(self, delta: float, *, seeded: bool = False) -> float | None:
        """Return ε at a δ, or None where none holds.

        None holds when data of training patients left without privacy, no mechanism is recorded, the lines have
        different privacy units, or ε is above 100. Noise from a known seed counts where `seeded`, as within a run of
        tests.
        """
        has_known_noise = self._has_known_noise and not seeded
        if not self.n_charged or self._has_unprotected or has_known_noise or len(self.units) > 1:
            return None
        value = self._compose_earlier().with_mechanisms(_list_mechanisms(self.rounds[-1:])).compute_epsilon(delta)
        return value if value <= MAX_PROTECTIVE_EPSILON else None

    def epsilon_with(self, entry: LedgerEntry, delta: float) -> float:
        """Return ε at a δ once a further line, with a mechanism, has been added."""
        assert entry.mechanism is not None
        replaced, mechanism = self._find_replaced(entry), entry.mechanism.gaussian_mechanism
        if replaced is None:
            later = [*_list_mechanisms(self.rounds[-1:]), mechanism]
        elif replaced is self.rounds[-1]:
            later = [mechanism]
        else:  # seldom: another run has gone on since
            rounds = [replace(k, mechanism=mechanism) if k is replaced else k for k in self.rounds]
            return Composition(_list_mechanisms(rounds)).compute_epsilon(delta)
        return self._compose_earlier().with_mechanisms(later).compute_epsilon(delta)

    def _compose_earlier(self) -> Composition:
        """Return the composition of all rounds but the last, whose mechanism may still be replaced."""
        for mechanism in _list_mechanisms(self.rounds[self._n_earlier : -1]):
            self._earlier.add_mechanism(mechanism)
        self._n_earlier = max(0, len(self.rounds) - 1)
        return self._earlier


def _list_mechanisms(rounds: Iterable[LedgerRound]) -> list[Mechanism]:
    return [round_.mechanism for round_ in rounds if round_.mechanism is not None]


def collect_rounds(entries: Iterable[LedgerEntry]) -> list[LedgerRound]:
    """Return the rounds recorded in lines of a ledger, in the order of their beginnings."""
    return RoundHistory(entries).rounds


def collect_mechanisms(entries: Iterable[LedgerEntry]) -> list[Mechanism]:
    """Return the mechanisms of all rounds recorded in lines of a ledger, one for each, equal ones too."""
    return RoundHistory(entries).list_mechanisms()


def reportable_max_tpr(guarantee: str, spent: Sequence[Mechanism]) -> float | None:
    """Return the largest true positive rate at a false positive rate of 1 %; None without a guarantee."""
    return max_tpr(spent) if spent and guarantee in ("guaranteed", "shared") else None


def describe_detection(rate: float, unit: str) -> str:
    """Return the meaning of ε as rates of the most powerful membership test.

    Args:
        rate: the largest true positive rate of a test with a false positive rate of 0.01.
        unit: the privacy unit.

    Example:
        >>> describe_detection(0.0198, "patient").split(", ")[1]
        'an attacker with all releases and all other data identifies at most 2.0'
    """
    return (
        f"of 100 {unit}s in it, an attacker with all releases and all other data identifies at most "
        f"{100 * rate:.1f}, at a false positive rate of 1 %"
    )


def lifetime_entries(entries: Iterable[LedgerEntry], unit: str) -> list[LedgerEntry]:
    """Return the ledger lines that count for a real hospital with this privacy unit.

    Its lines as a simulated site count too, but do not fix the unit: such lines of another unit are left out.
    """
    return [e for e in entries if e.real or e.unit in (None, unit)]


def count_attempts(entries: Iterable[LedgerEntry], site: str, approved: str) -> int:
    """Return the number of rounds of all runs in which a model could leave a site under one approval ("" for none)."""
    under = [e for e in entries if (e.site, e.approved) == (site, approved) and e.released]
    return len({(e.run_id, e.round) for e in under if str(e.released).startswith("model ")})
