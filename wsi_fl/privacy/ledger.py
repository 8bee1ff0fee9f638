"""The ledger of a site, and the only door through which anything leaves it.

A `Release` is what `Comm` accepts, and only `PrivacyLedger.release` makes one, after writing down what it
costs. Ledgers are append-only JSON lines, one file per site and study; each run composes its own ε, and for a
real site `max_epsilon` is a budget for its lifetime, over all runs and seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import ACCOUNTANT, Mechanism, epsilon
from wsi_fl.privacy.book import Book, Entry, Guarantee, run_id
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.privacy.release import SEAL, Release, Values, digest
from wsi_fl.privacy.terms import PROTECTS_UP_TO, BudgetSpent, Terms
from wsi_fl.types import WsiFlError

_MECHANISM = ("sigma", "clip", "sample_rate", "steps")
_PLAN = ("n", "batch_size", "mode")
_WEAKEST_FIRST: tuple[Guarantee, ...] = ("none", "nominal", "guaranteed")


class PrivacyLedger:
    """The privacy account of one site in one run.

    Args:
        run: the run's id, which identifies it for ever: a folder may be renamed or deleted, and a name given again.
        includes: other entries of the same ledger, by what they call their run ("stain"), whose cost is part of
            this run's; they are no rounds of it.
        heads: files that remember how far the ledger was, so that an emptied, shortened or older one is noticed.

    Raises:
        WsiFlError: when the file is damaged or not the newest, counts another unit towards the same budget, was priced
            at a smaller δ before, or belongs to a real hospital while this site is said to be simulated.
    """

    def __init__(
        self,
        path: Path,
        *,
        site: str,
        run: str,
        terms: Terms,
        includes: Collection[str] = (),
        heads: Sequence[Path] = (),
    ) -> None:
        self.path, self.site, self.run, self.terms = path, site, run, terms
        self._counted = {run_id(run), *map(run_id, includes)}
        self._book = Book(path, heads)
        self._check_account()

    @property
    def entries(self) -> Sequence[Entry]:
        """Return every line of the account, oldest first, as far as it was read."""
        return self._book.entries

    def mechanisms(self, *, lifetime: bool = False) -> list[Mechanism]:
        """Return what was applied, in this run with what it includes or in all.

        A round that was redone before its release counts once.
        """
        return _applied(self._scope(lifetime))

    def n_rounds(self) -> int:
        """Return how many rounds of this run are on the account."""
        return len(_applied(self._own()))

    def epsilon(self, *, lifetime: bool = False) -> float | None:
        """Return the ε spent so far at the δ of the terms, or None where it says nothing.

        It says nothing when something left without privacy, nothing is accounted, units differ, ε is above
        `PROTECTS_UP_TO`, or, over a lifetime, when some noise came from a known seed.
        """
        scope = self._scope(lifetime)
        bare = any(e.released and e.mechanism is None for e in scope)
        known = lifetime and any(e.mechanism and e.insecure for e in scope)
        spent = _applied(scope)
        if not spent or bare or known or _units(scope) - {self.terms.unit}:
            return None
        value = epsilon(spent, self.terms.delta)
        return value if value <= PROTECTS_UP_TO else None

    def guarantee(self, *, lifetime: bool = False) -> Guarantee:
        """Return what the ε is worth: as much as the weakest of all promises that it adds up."""
        spent = [e for e in self._scope(lifetime) if e.mechanism or e.released]
        worth: set[Guarantee] = {"none" if e.insecure or not e.mechanism else e.guarantee for e in spent}
        if spent and self.epsilon(lifetime=lifetime) is None:
            return "none"
        return min({self.terms.guarantee, *worth}, key=_WEAKEST_FIRST.index)

    def released(self) -> list[str]:
        """Return what this run released, as content and digest, oldest first."""
        return [e.released for e in self._own() if e.released]

    def last_round(self) -> int:
        """Return the last round of this run that was recorded; 0 before the first."""
        return max((e.round for e in self._own()), default=0)

    def sending(self, round_: int, *, again: bool = False) -> None:
        """Note that the release of a round is about to leave: from now on it can only be sent again, never redone."""
        with self._book.locked():
            self._note_sending(round_, again=again)

    def _note_sending(self, round_: int, *, again: bool) -> None:
        entry = {"run": self.run, "site": self.site, "round": round_, "sending": True}
        self._append(entry | ({"again": True} if again else {}))

    def last_sent(self) -> int:
        """Return the last round of this run whose release may have left; 0 before the first."""
        return max((e.round for e in self._own() if e.sending), default=0)

    def affords(self, round_: int, mechanism: Mechanism) -> bool:
        """Return whether `mechanism` in this round, on top of the past, stays within max_epsilon.

        What this run has recorded of the round already costs nothing more.
        """
        if self.terms.max_epsilon is None:
            return True
        self._book.catch_up()
        if any(e.round == round_ and e.mechanism for e in self._own()):
            return True
        try:
            self._check(round_, mechanism)
        except BudgetSpent:
            return False
        return True

    def _check_account(self) -> None:
        """Refuse to add what does not add up with the account."""
        terms, spent = self.terms, [e for e in self._book.entries if e.mechanism]
        if not terms.lifetime and any(e.real for e in self._book.entries):
            raise WsiFlError(
                f"{self.path}: this is the ledger of a real hospital, and sites/{self.site}.toml says real = false; "
                "say real = true, or simulate under another name"
            )
        binding = terms.lifetime and terms.max_epsilon is not None
        if other := _units(self._scope(binding)) - {terms.unit}:
            raise WsiFlError(
                f"{self.path}: the account of site {self.site} counts ε per {other.pop()}, this run per "
                f"{terms.unit}, and the two do not add up; keep the privacy.unit that the site began with"
            )
        least = min((e.delta for e in spent if e.delta), default=1.0)
        if binding and terms.delta > least:
            raise WsiFlError(
                f"{self.path}: the account of site {self.site} is priced at delta = {least:g}, this run at "
                f"{terms.delta:g}; δ is part of the budget, so set delta = {least:g} or less in sites/{self.site}.toml"
            )

    def _check(self, round_: int, mechanism: Mechanism | None) -> None:
        """Refuse what crosses the budget."""
        limit = self.terms.max_epsilon
        if mechanism is None:
            return
        if limit is None:
            if self.terms.lifetime and mechanism.sigma > 0 and not self.terms.insecure:
                raise WsiFlError(
                    f"sites/{self.site}.toml: a real hospital spends nothing without a budget; "
                    "write max_epsilon and delta there"
                )
            return
        if self.terms.lifetime and isinstance(mechanism, PrivacyPlan):
            mechanism.refuse_large_delta()
        self._check_account()
        after = self._epsilon_with(round_, mechanism)
        if after > limit:
            raise BudgetSpent(
                f"site {self.site}: round {round_} would raise epsilon to {after:.3f}, above its {limit:g}"
            )

    def _epsilon_with(self, round_: int, mechanism: Mechanism) -> float:
        """Return ε once this round has been recorded."""
        entry = Entry.model_validate(self._entry(round_, mechanism, ""))
        return epsilon(_applied([*self._scope(self.terms.lifetime), entry]), self.terms.delta)

    def record(self, round_: int, mechanism: Mechanism | None, content: str = "") -> None:
        """Write down one round of training under `mechanism`, and `content` if that leaves the site.

        Raises:
            BudgetSpent: when a run beside this one has spent what was left.
            WsiFlError: when the round was sent already, or a real hospital has no max_epsilon.
        """
        with self._book.locked():
            if any(e.sending and e.round == round_ for e in self._own()):
                raise WsiFlError(
                    f"{self.path}: round {round_} of run {self.run} was sent already and is never redone; "
                    "start a new run"
                )
            self._check(round_, mechanism)
            self._append(self._entry(round_, mechanism, content))

    def _append(self, entry: dict[str, Any]) -> None:
        self._book.append(entry | ({"real": True} if self.terms.lifetime else {}))

    def _entry(self, round_: int, mechanism: Mechanism | None, content: str) -> dict[str, Any]:
        told = asdict(mechanism) if mechanism else {}
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.run,
            "site": self.site,
            "round": round_,
            "released": content or None,
            "mechanism": {key: told[key] for key in _MECHANISM} if told else None,
            "plan": {key: told[key] for key in _PLAN} if isinstance(mechanism, PrivacyPlan) else None,
            "delta": self.terms.delta,
            "unit": self.terms.unit,
            "guarantee": self.terms.guarantee if mechanism else "none",
            "accountant": ACCOUNTANT,
            "insecure": self.terms.insecure,
        }

    def _scope(self, lifetime: bool) -> list[Entry]:
        """Return what counts towards ε."""
        return [e for e in self._book.entries if lifetime or e.run_id in self._counted]

    def _own(self) -> list[Entry]:
        """Return the rounds of this run alone."""
        return self.of_run(self.run)

    def of_run(self, run: str) -> list[Entry]:
        """Return the lines of a run of this account."""
        return [e for e in self._book.entries if e.run_id == run_id(run)]

    def release(
        self,
        round_: int,
        vector: Values,
        *,
        schema: str,
        weight: float = 1.0,
        mechanism: Mechanism | None,
        content: str,
    ) -> Release:
        """Records and makes a release of `content` ("proxy", "model", "buffer", …).

        Args:
            vector: float32[d], or uint8[d] of a buffer; copied.
            weight: PushSum weight that travels along.
            mechanism: what protected it, or None: then the site must allow `content` by name. A mechanism
                without noise, or with noise that others can compute, protects nothing.

        Raises:
            WsiFlError: when the content may not leave without differential privacy, or is not finite.
        """
        if content not in self.terms.allow and not self._protects(round_, mechanism):
            raise WsiFlError(
                f"sites/{self.site}.toml: a {content} without differential privacy may not leave this site; "
                f'add allow = ["{content}"] there, or switch privacy on'
            )
        if not np.isfinite(vector).all():
            raise WsiFlError(
                f"site {self.site}: its {content} is not finite in round {round_}; lower train.lr"
            )
        self.record(round_, mechanism, f"{content} {digest(vector)}")
        return self._sealed(round_, vector, schema, weight)

    def _protects(self, round_: int, mechanism: Mechanism | None) -> bool:
        """Return whether what leaves under `mechanism` is protected at all, on top of what left before."""
        if mechanism is None or mechanism.sigma <= 0 or self.terms.insecure:
            return False
        return self._epsilon_with(round_, mechanism) <= PROTECTS_UP_TO

    def reissue(self, round_: int, vector: Values, *, schema: str, weight: float = 1.0) -> Release:
        """Return the same bytes once more after a restart, at no cost but on record.

        Raises:
            WsiFlError: when they are not the bytes that this round released last.
        """
        known = digest(vector)
        with self._book.locked():
            kind = {
                e.released.split()[0]: e.released for e in self._own() if e.round == round_ and e.released
            }
            if not any(released.endswith(known) for released in kind.values()):
                raise WsiFlError(f"{self.path}: round {round_} of run {self.run} did not release these bytes")
            self._note_sending(round_, again=True)
        return self._sealed(round_, vector, schema, weight)

    def relay(self, round_: int, vector: NDArray[np.float32], *, schema: str, weight: float) -> Release:
        """A mixture of this site's release of the round with what others released: noted, at no further cost.

        Whatever is computed from releases alone is as private as they are (post-processing).

        Raises:
            WsiFlError: when this site released nothing in this round.
        """
        if not any(e.released and e.round == round_ for e in self._own()):
            raise WsiFlError(
                f"{self.path}: round {round_} of run {self.run} released nothing that could be passed on"
            )
        entry = {"run": self.run, "site": self.site, "round": round_, "relayed": digest(vector)}
        with self._book.locked():
            self._append(entry)
        return self._sealed(round_, vector, schema, weight)

    def _sealed(self, round_: int, vector: Values, schema: str, weight: float) -> Release:
        return Release(self.site, round_, schema, vector, weight, seal=SEAL)

    def summary(self) -> dict[str, Any]:
        """The state of the account as plain JSON values."""
        return {
            "site": self.site,
            "run": self.run,
            "epsilon": self.epsilon(),
            "lifetime_epsilon": self.epsilon(lifetime=True),
            "delta": self.terms.delta,
            "max_epsilon": self.terms.max_epsilon,
            "guarantee": self.guarantee(),
            "lifetime_guarantee": self.guarantee(lifetime=True),
            "unit": self.terms.unit,
            "accountant": ACCOUNTANT,
            "insecure": self.terms.insecure,
            "steps": sum(mechanism.steps for mechanism in self.mechanisms()),
        }


def _units(entries: Sequence[Entry]) -> set[str]:
    """Return whose records all that was spent protects."""
    return {str(e.unit) for e in entries if e.mechanism}


def _applied(entries: Sequence[Entry]) -> list[Mechanism]:
    """Return the mechanisms of all entries.

    A round recorded twice in a row in its run was redone and counts once, unless it was sent in between.
    """
    applied: list[Mechanism] = []
    latest: dict[str, tuple[int, int]] = {}
    for entry in entries:
        run = entry.run_id
        if entry.sending and latest.get(run, (-1, 0))[0] == entry.round:
            del latest[run]
        if entry.mechanism is None:
            continue
        round_, position = latest.get(run, (-1, 0))
        if round_ == entry.round:
            applied[position] = entry.mechanism.mechanism
        else:
            latest[run] = entry.round, len(applied)
            applied.append(entry.mechanism.mechanism)
    return applied
