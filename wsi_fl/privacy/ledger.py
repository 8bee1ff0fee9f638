"""The privacy ledger of a site; whatever leaves the site is recorded here first.

A `Release` is what `Comm` accepts, and only `PrivacyLedger.release` makes one, after writing down what it
costs. Ledgers are append-only JSON lines, one file per site and study; each run composes its own ε, and for a
real site `max_epsilon` is a budget for its lifetime, over all runs and seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import ACCOUNTANT, Mechanism, epsilon
from wsi_fl.privacy.guarantee import (
    PROTECTS_UP_TO,
    BudgetSpent,
    Round,
    Terms,
    applied,
    detection_of,
    epsilon_of,
    guarantee_of,
    of_hospital,
    rounds_of,
    units_of,
)
from wsi_fl.privacy.ledger_file import SEAL, Entry, Guarantee, LedgerFile, Release, Values, digest, run_id
from wsi_fl.types import WsiFlError


class PrivacyLedger:
    """The privacy account of one site in one run.

    Args:
        run: the run's id, which stays when its folder is renamed, and is never used again.
        includes: runs in the same ledger, such as "oneshot", whose cost is part of this run's, but whose rounds are
            not.
        heads: files that remember how far the ledger was, so that an emptied, shortened or older one is noticed.
        named: what every line of training names: "promise", SHA-256 of the site file that the run keeps, and
            "agreement" and "approved", SHA-256 of the plan that the hospital signed, and when; "" for none.

    Raises:
        WsiFlError: when the file is damaged or not the newest, does not fit the terms, or knows this run with another
            site file.
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
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path, self.site, self.run, self.terms = path, site, run, terms
        self.named = {key: said for key, said in named.items() if said}
        self._counted = {run_id(run), *map(run_id, includes)}
        self._book = LedgerFile(path, heads)
        self._check_account()

    @property
    def entries(self) -> Sequence[Entry]:
        """Return every line of the account, oldest first, as far as it was read."""
        return self._book.entries

    def mechanisms(self, *, lifetime: bool = False) -> list[Mechanism]:
        """Return the mechanisms that were applied, in this run and those it includes, or over the site's lifetime."""
        return applied(self._scope(lifetime))

    def detection(self) -> float | None:
        """Return what share of members any test finds in this run; see `detection_of`."""
        return detection_of(self.guarantee(), self.mechanisms())

    def rounds(self) -> list[Round]:
        """Return the rounds of this run at this site, oldest first."""
        return rounds_of(self._own())

    def n_rounds(self) -> int:
        """Return how many rounds of this run are on the account."""
        return len(applied(self._own()))

    def recorded_plan(self) -> dict[str, Any] | None:
        """Return the fields of the privacy plan that this run recorded last; None before the first round."""
        for entry in reversed(self._own()):
            if entry.mechanism is not None:
                known = {"delta": entry.delta, "unit": entry.unit}
                return known | entry.mechanism.model_dump() | (entry.plan.model_dump() if entry.plan else {})
        return None

    def epsilon(self, *, lifetime: bool = False) -> float | None:
        """Return the ε spent so far at the δ of the terms, or None where no ε holds (see `epsilon_of`).

        Over a lifetime none holds either when some noise came from a known seed.
        """
        scope = self._scope(lifetime)
        if units_of(scope) - {self.terms.unit}:
            return None
        return epsilon_of(scope, self.terms.delta, seeded=not lifetime)

    def guarantee(self, *, lifetime: bool = False) -> Guarantee:
        """Return the guarantee of the ε: the weakest among all rounds that it adds up."""
        scope = self._scope(lifetime)
        if any(e.mechanism or e.bare for e in scope) and self.epsilon(lifetime=lifetime) is None:
            return "none"
        return guarantee_of(scope, self.terms.guarantee)

    def released(self) -> list[str]:
        """Return what this run has released, each as content and digest, oldest first."""
        return [said for one in self.rounds() for said in one.released]

    def last_round(self) -> int:
        """Return the last round of this run that was recorded; 0 before the first."""
        return max((one.number for one in self.rounds()), default=0)

    def sending(self, round_: int, *leaving: str) -> None:
        """Note that a round is final: what has these SHA-256 is about to leave or is kept, and the round is never
        trained anew.
        """
        with self._book.locked():
            for known in leaving:
                self._require_newest(round_, known)
            self._append(self._line(round_) | {"sending": True})

    def settle(self, round_: int, kept: str) -> None:
        """Check, as a run goes on, that what it kept of a round is what the ledger knows; note that the round is
        final.
        """
        with self._book.locked():
            here = self._round(round_)
            if here is None:
                return
            self._require_newest(round_, kept)
            if not here.final:
                self._append(self._line(round_) | {"sending": True})

    def _line(self, round_: int) -> dict[str, Any]:
        return {"run": self.run, "site": self.site, "round": round_}

    def _round(self, number: int) -> Round | None:
        """Return a round of this run as it stands."""
        return next((one for one in reversed(self.rounds()) if one.number == number), None)

    def _require_newest(self, round_: int, known: str) -> None:
        here = self._round(round_)
        if here is None or known not in here.releases.values():
            raise WsiFlError(
                f"{self.path}: round {round_} of run {self.run} did not release these bytes, or released others since "
                "(does another job work on a copy of this run?); start a new run"
            )

    def last_sent(self) -> int:
        """Return the last round of this run that is final; 0 before the first."""
        return max((one.number for one in self.rounds() if one.final), default=0)

    def affords(self, round_: int, mechanism: Mechanism) -> bool:
        """Return whether `mechanism` in this round, on top of the past, stays within max_epsilon.

        A round that was recorded and never sent is charged once, however often it is redone.
        """
        if self.terms.max_epsilon is None:
            return True
        self._book.catch_up()
        try:
            self._check(round_, mechanism)
        except BudgetSpent:
            return False
        return True

    def _check_account(self) -> None:
        binding = self.terms.lifetime and self.terms.max_epsilon is not None
        scope = self._scope(binding)
        self.terms.check_account(self._book.entries, scope, path=self.path, site=self.site)
        promise = self.named.get("promise")
        if promise and {e.promise for e in self._own() if e.promise} - {promise}:
            raise WsiFlError(
                f"{self.path}: run {self.run} began with another sites/{self.site}/site.toml than it has now; put that "
                "file back, or start a new run"
            )

    def _check(self, round_: int, mechanism: Mechanism | None) -> None:
        if mechanism is None:
            return
        self.terms.check_mechanism(mechanism, self.site)
        if (limit := self.terms.max_epsilon) is None:
            return
        self._check_account()
        if (after := self._epsilon_with(round_, mechanism)) > limit:
            raise BudgetSpent(
                f"site {self.site}: round {round_} would raise epsilon to {after:.3f}, above its {limit:g}"
            )

    def _epsilon_with(self, round_: int, mechanism: Mechanism) -> float:
        """Return ε once this round has been recorded."""
        entry = Entry.model_validate(self._entry(round_, mechanism, "") | {"prev": "0" * 64})
        return epsilon(applied([*self._scope(self.terms.lifetime), entry]), self.terms.delta)

    def record(self, round_: int | None, mechanism: Mechanism | None, content: str = "") -> int:
        """Write down one round of training under `mechanism`, and `content` if that leaves the site; return its number.

        Without a number it is the first that is not final.

        Raises:
            WsiFlError: when the round is final already, a run beside this one has spent what was left (`BudgetSpent`),
                or a real hospital has no max_epsilon.
        """
        with self._book.locked():
            if round_ is None:
                round_ = self.last_sent() + 1
            if (here := self._round(round_)) and here.final:
                raise WsiFlError(
                    f"{self.path}: round {round_} of run {self.run} was sent already and is never redone; "
                    "start a new run"
                )
            self._check(round_, mechanism)
            self._append(self._entry(round_, mechanism, content))
        return round_

    def _append(self, entry: dict[str, Any]) -> None:
        self._book.append(entry | ({"real": True} if self.terms.lifetime else {}))

    def _entry(self, round_: int, mechanism: Mechanism | None, content: str) -> dict[str, Any]:
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds")} | self._line(round_)
        return entry | self.terms.line(mechanism, content) | self.named

    def _scope(self, lifetime: bool) -> list[Entry]:
        """Return what counts towards ε; over a lifetime also what others have written since."""
        if lifetime:
            self._book.catch_up()
            if self.terms.lifetime:
                return of_hospital(self._book.entries, self.terms.unit)
        return [
            e for e in self._book.entries if lifetime or (e.site == self.site and e.run_id in self._counted)
        ]

    def _own(self) -> list[Entry]:
        """Return the rounds of this run alone."""
        return self.of_run(self.run)

    def of_run(self, run: str) -> list[Entry]:
        """Return the lines of this site in a run."""
        return [e for e in self._book.entries if e.site == self.site and e.run_id == run_id(run)]

    def release(
        self,
        round_: int | None,
        vector: Values,
        *,
        schema: str,
        weight: float = 1.0,
        mechanism: Mechanism | None,
        content: str,
    ) -> Release:
        """Put a release of `content` ("model", "buffer", "generator", "scores", …) on record, and return it.

        Args:
            round_: its round, or None for the first that is not final.
            vector: float32[d], or uint8[d] of a buffer; copied.
            weight: PushSum weight that travels along.
            mechanism: what protected it. Where it is None, has no noise, or noise that others can compute, the site
                must allow `content` by name.

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
        known = digest(vector)
        round_ = self.record(round_, mechanism, f"{content} {known}")
        return self._sealed(round_, vector, schema, weight, known)

    def _protects(self, round_: int | None, mechanism: Mechanism | None) -> bool:
        """Return whether what leaves under `mechanism` is protected at all, on top of what left before."""
        if mechanism is None or mechanism.sigma <= 0 or self.terms.insecure:
            return False
        number = self.last_sent() + 1 if round_ is None else round_
        return self._epsilon_with(number, mechanism) <= PROTECTS_UP_TO

    def reissue(
        self, round_: int, vector: Values, *, schema: str, weight: float = 1.0, agreement: str = ""
    ) -> Release:
        """Return the same bytes once more, after a restart or under a later plan, at no cost but on record.

        `agreement` is the SHA-256 of that plan; "" for none.
        """
        known = digest(vector)
        with self._book.locked():
            self._require_newest(round_, known)
            under = {"agreement": agreement} if agreement else {}
            self._append(self._line(round_) | {"sending": True, "again": True} | under)
        return self._sealed(round_, vector, schema, weight, known)

    def relay(
        self, round_: int, vector: NDArray[np.float32], *, own: str, schema: str, weight: float
    ) -> Release:
        """Return a mixture of this site's release of the round with others', on record and at no further cost.

        Whatever is computed from releases alone is as private as they are (post-processing). The round is final then,
        as if its release itself, of SHA-256 `own`, had left.
        """
        known = digest(vector)
        with self._book.locked():
            self._require_newest(round_, own)
            self._append(self._line(round_) | {"relayed": known})
        return self._sealed(round_, vector, schema, weight, known)

    def _sealed(self, round_: int, vector: Values, schema: str, weight: float, known: str) -> Release:
        return Release(self.site, round_, schema, vector, weight, known, seal=SEAL)

    def summary(self) -> dict[str, Any]:
        """Return the state of the account as plain JSON values."""
        return {
            "site": self.site,
            "run": self.run,
            "epsilon": self.epsilon(),
            "lifetime_epsilon": self.epsilon(lifetime=True),
            "max_tpr_at_fpr_1pct": self.detection(),
            "delta": self.terms.delta,
            "max_epsilon": self.terms.max_epsilon,
            "guarantee": self.guarantee(),
            "lifetime_guarantee": self.guarantee(lifetime=True),
            "unit": self.terms.unit,
            "accountant": ACCOUNTANT,
            "insecure": self.terms.insecure,
            "steps": sum(mechanism.steps for mechanism in self.mechanisms()),
        }
