"""The privacy ledger of a site, in which every release is recorded before it leaves.

`Comm` accepts a `Release`, and only `PrivacyLedger.release` makes one, after recording its cost. Ledgers are
append-only JSON lines, one file per site and study; each run composes its own ε, and for a real site `max_epsilon` is a
budget for its lifetime, over all runs and seeds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import ACCOUNTANT, Mechanism
from wsi_fl.privacy.guarantee import (
    MAX_PROTECTIVE_EPSILON,
    BudgetSpent,
    LedgerRound,
    PrivacyTerms,
    RoundHistory,
    collect_rounds,
    lifetime_entries,
    reportable_max_tpr,
)
from wsi_fl.privacy.ledger_file import (
    SEAL,
    Guarantee,
    LedgerEntry,
    LedgerFile,
    Release,
    ReleaseValues,
    digest_values,
    run_id,
)
from wsi_fl.types import WsiFlError

_Scope = Literal["run", "cost", "lifetime"]
"""Lines of this run, of all runs whose cost is part of this run's, or of all that count over the site's lifetime."""


def _cost_scope(*, lifetime: bool) -> _Scope:
    return "lifetime" if lifetime else "cost"


class PrivacyLedger:
    """The privacy account of one site in one run.

    Args:
        run: the run's id, independent of its folder's name and never used again.
        includes: runs in the same ledger, such as "oneshot", whose cost is part of this run's, but whose rounds are
            not.
        heads: files with the last length of the ledger, which detect an emptied, shortened or older one.
        references: fields of every line of training: "promise", SHA-256 of the site file that the run keeps, and
            "agreement" and "approved", SHA-256 of the plan that the hospital signed, and when; "" for none.

    Raises:
        WsiFlError: when the file is damaged or not the newest, does not fit the terms, or has this run with another
            site file.
    """

    def __init__(
        self,
        path: Path,
        *,
        site: str,
        run: str,
        terms: PrivacyTerms,
        includes: Collection[str] = (),
        heads: Sequence[Path] = (),
        references: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path, self.site, self.run, self.terms = path, site, run, terms
        self.references = {key: value for key, value in references.items() if value}
        self._counted_runs = {run_id(run), *map(run_id, includes)}
        self._file = LedgerFile(path, heads)
        self._histories: defaultdict[_Scope, RoundHistory] = defaultdict(RoundHistory)
        self._n_counted: Counter[_Scope] = Counter()  # lines of the file in each history, or left out of it
        self._n_checked = 0
        self._check_account()

    @property
    def entries(self) -> Sequence[LedgerEntry]:
        """Every line of the account, oldest first, as far as it was read."""
        return self._file.entries

    def list_mechanisms(self, *, lifetime: bool = False) -> list[Mechanism]:
        """Return the mechanisms applied in this run and its included runs, or over the site's lifetime."""
        return self._update_history(_cost_scope(lifetime=lifetime)).list_mechanisms()

    def max_tpr(self) -> float | None:
        """Return the largest true positive rate at a false positive rate of 1 % in this run; None without guarantee."""
        return reportable_max_tpr(self.guarantee(), self.list_mechanisms())

    def list_rounds(self) -> list[LedgerRound]:
        """Return the rounds of this run at this site, oldest first."""
        return collect_rounds(self.entries_of_run(self.run))

    def count_rounds(self) -> int:
        """Return the number of rounds of this run on the account."""
        return self._update_history("run").n_charged

    def last_plan(self) -> dict[str, Any] | None:
        """Return the fields of this run's last recorded privacy plan; None before the first round."""
        for entry in reversed(self.entries_of_run(self.run)):
            if entry.mechanism is not None:
                terms = {"delta": entry.delta, "unit": entry.unit}
                return terms | entry.mechanism.model_dump() | (entry.plan.model_dump() if entry.plan else {})
        return None

    def epsilon(self, *, lifetime: bool = False) -> float | None:
        """Return the ε spent so far at the δ of the terms, or None where no ε holds.

        Over a lifetime none holds where noise came from a known seed.
        """
        history = self._update_history(_cost_scope(lifetime=lifetime))
        if history.units - {self.terms.unit}:
            return None
        return history.compute_epsilon(self.terms.delta, seeded=not lifetime)

    def guarantee(self, *, lifetime: bool = False) -> Guarantee:
        """Return the guarantee of ε: the weakest among all its rounds."""
        history = self._update_history(_cost_scope(lifetime=lifetime))
        if history.has_spent and self.epsilon(lifetime=lifetime) is None:
            return "none"
        return history.weakest_guarantee(self.terms.guarantee)

    def list_releases(self) -> list[str]:
        """Return the releases of this run, each as content and digest, oldest first."""
        return [text for round_ in self.list_rounds() for text in round_.release_texts]

    def last_round(self) -> int:
        """Return the last recorded round of this run; 0 before the first."""
        return self._update_history("run").last_round

    def record_transmission(self, round_: int, *digests: str) -> None:
        """Record that a round is final: content of these SHA-256 is about to leave, so it is never trained again."""
        self._record_departure(round_, *digests, sending=True)

    def settle_round(self, round_: int, sha256: str) -> None:
        """Check that the stored content of a resumed round is on record, and record that the round is final."""
        with self._file.hold_lock():
            current = self._find_round(round_)
            if current is None:
                return
            self._require_newest(round_, sha256)
            if not current.final:
                self._append_entry(self._line_head(round_) | {"sending": True})

    def _record_departure(self, round_: int, *digests: str, **fields: object) -> None:
        with self._file.hold_lock():
            for sha256 in digests:
                self._require_newest(round_, sha256)
            self._append_entry(self._line_head(round_) | fields)

    def _line_head(self, round_: int) -> dict[str, object]:
        return {"run": self.run, "site": self.site, "round": round_}

    def _find_round(self, number: int) -> LedgerRound | None:
        """Return the current record of a round of this run."""
        return self._update_history("run").find_round(number)

    def _require_newest(self, round_: int, sha256: str) -> None:
        current = self._find_round(round_)
        if current is None or sha256 not in current.releases.values():
            raise WsiFlError(
                f"{self.path}: round {round_} of run {self.run} did not release these bytes, or released others since "
                "(does another job work on a copy of this run?); start a new run"
            )

    def last_final_round(self) -> int:
        """Return the last final round of this run; 0 before the first."""
        return self._update_history("run").last_final_round

    def fits_budget(self, round_: int, mechanism: Mechanism) -> bool:
        """Return whether `mechanism` in this round, on top of the past, stays within max_epsilon.

        A recorded round that was never sent is charged once, however often it is trained again.
        """
        if self.terms.max_epsilon is None:
            return True
        self._file.catch_up()
        try:
            self._check_budget(round_, mechanism)
        except BudgetSpent:
            return False
        return True

    def _check_account(self) -> None:
        # only lines read since the last check: one that fits the terms does so for good
        binding = self.terms.lifetime and self.terms.max_epsilon is not None
        entries = self._file.entries[self._n_checked :]
        scope = self._select_entries(entries, _cost_scope(lifetime=binding))
        self.terms.check_account(entries, scope, path=self.path, site=self.site)
        promise = self.references.get("promise")
        if promise and {e.promise for e in self._select_entries(entries, "run") if e.promise} - {promise}:
            raise WsiFlError(
                f"{self.path}: sites/{self.site}/site.toml of run {self.run} is not the one it began with; put that "
                "file back, or start a new run"
            )
        self._n_checked += len(entries)

    def _check_budget(self, round_: int, mechanism: Mechanism | None) -> None:
        if mechanism is None:
            return
        self.terms.check_mechanism(mechanism, self.site)
        if (limit := self.terms.max_epsilon) is None:
            return
        self._check_account()
        if (epsilon_after := self._epsilon_with(round_, mechanism)) > limit:
            raise BudgetSpent(
                f"site {self.site}: round {round_} would raise epsilon to {epsilon_after:.3f}, above its {limit:g}"
            )

    def _epsilon_with(self, round_: int, mechanism: Mechanism) -> float:
        """Return ε once this round has been recorded."""
        entry = LedgerEntry.model_validate(self._build_entry(round_, mechanism, "") | {"prev": "0" * 64})
        return self._update_history(_cost_scope(lifetime=self.terms.lifetime)).epsilon_with(entry, self.terms.delta)

    def record(self, round_: int | None, mechanism: Mechanism | None, content: str = "") -> int:
        """Record one round of training under `mechanism`, and `content` if that leaves the site; return its number.

        None as its number means the first round that is not final.

        Raises:
            WsiFlError: when the round is final already, a concurrent run has spent the budget (`BudgetSpent`), or a
                real hospital has no max_epsilon.
        """
        with self._file.hold_lock():
            if round_ is None:
                round_ = self.last_final_round() + 1
            if (current := self._find_round(round_)) and current.final:
                raise WsiFlError(
                    f"{self.path}: round {round_} of run {self.run} was sent already and is not trained again; "
                    "start a new run"
                )
            self._check_budget(round_, mechanism)
            self._append_entry(self._build_entry(round_, mechanism, content))
        return round_

    def _append_entry(self, entry: dict[str, object]) -> None:
        self._file.append(entry | ({"real": True} if self.terms.lifetime else {}))

    def _build_entry(self, round_: int, mechanism: Mechanism | None, content: str) -> dict[str, object]:
        entry: dict[str, object] = {"time": datetime.now(UTC).isoformat(timespec="seconds")} | self._line_head(round_)
        return entry | self.terms.ledger_fields(mechanism, content) | self.references

    def _update_history(self, scope: _Scope) -> RoundHistory:
        """Return the rounds in a scope, those in lines read since included; over a lifetime also of other processes."""
        if scope == "lifetime":
            self._file.catch_up()
        history, entries = self._histories[scope], self._file.entries
        history.add_entries(self._select_entries(entries[self._n_counted[scope] :], scope))
        self._n_counted[scope] = len(entries)
        return history

    def _select_entries(self, entries: Sequence[LedgerEntry], scope: _Scope) -> list[LedgerEntry]:
        if scope == "lifetime":
            return lifetime_entries(entries, self.terms.unit) if self.terms.lifetime else list(entries)
        runs = self._counted_runs if scope == "cost" else {run_id(self.run)}
        return [e for e in entries if e.site == self.site and e.run_id in runs]

    def entries_of_run(self, run: str) -> list[LedgerEntry]:
        """Return the lines of this site in a run."""
        return [e for e in self._file.entries if e.site == self.site and e.run_id == run_id(run)]

    def release(
        self,
        round_: int | None,
        vector: ReleaseValues,
        *,
        schema: str,
        weight: float = 1.0,
        mechanism: Mechanism | None,
        content: str,
    ) -> Release:
        """Record a release of `content` ("model", "buffer", "generator", "scores", …), and return it.

        Args:
            round_: its round, or None for the first that is not final.
            vector: float32[d], or uint8[d] of a buffer; copied.
            weight: PushSum weight of the message.
            mechanism: its protection. Without one, without noise, or with noise that others can compute, the site must
                allow `content` by name.

        Raises:
            WsiFlError: when the content may not leave without differential privacy, or is not finite.
        """
        self._require_allowed(round_, mechanism, content)
        if not np.isfinite(vector).all():
            raise WsiFlError(
                f"site {self.site}: its {content} is not finite in round {round_}; lower the learning rate (train.lr)"
            )
        sha256 = digest_values(vector)
        round_ = self.record(round_, mechanism, f"{content} {sha256}")
        return self._seal_release(round_, vector, schema, weight, sha256)

    def check_release(self, mechanism: Mechanism | None, content: str) -> None:
        """Raise the error of `release` for content that may not leave, or a spent budget; nothing is recorded."""
        self._require_allowed(None, mechanism, content)
        self._check_budget(self.last_final_round() + 1, mechanism)

    def _require_allowed(self, round_: int | None, mechanism: Mechanism | None, content: str) -> None:
        if content not in self.terms.allow and not self._is_protective(round_, mechanism):
            raise WsiFlError(
                f"sites/{self.site}.toml: a {content} without differential privacy may not leave this site; "
                f'add allow = ["{content}"] there, or switch privacy on'
            )

    def _is_protective(self, round_: int | None, mechanism: Mechanism | None) -> bool:
        """Return whether a release under `mechanism`, on top of earlier ones, has a meaningful ε."""
        if mechanism is None or mechanism.sigma <= 0 or self.terms.insecure:
            return False
        number = self.last_final_round() + 1 if round_ is None else round_
        return self._epsilon_with(number, mechanism) <= MAX_PROTECTIVE_EPSILON

    def release_again(
        self, round_: int, vector: ReleaseValues, *, schema: str, weight: float = 1.0, agreement: str = ""
    ) -> Release:
        """Return the same bytes again, after a restart or under a later plan, at no cost but on record.

        `agreement` is the SHA-256 of that plan; "" for none.
        """
        sha256 = digest_values(vector)
        agreement_field = {"agreement": agreement} if agreement else {}
        self._record_departure(round_, sha256, sending=True, again=True, **agreement_field)
        return self._seal_release(round_, vector, schema, weight, sha256)

    def relay_mixture(
        self, round_: int, vector: NDArray[np.float32], *, own_sha256: str, schema: str, weight: float
    ) -> Release:
        """Return a mixture of this site's release of the round with others', on record and at no further cost.

        A function of releases alone is as private as they are (post-processing). The round is then final, as if its
        release itself, of SHA-256 `own_sha256`, had left.
        """
        sha256 = digest_values(vector)
        self._record_departure(round_, own_sha256, relayed=sha256)
        return self._seal_release(round_, vector, schema, weight, sha256)

    def _seal_release(self, round_: int, vector: ReleaseValues, schema: str, weight: float, sha256: str) -> Release:
        return Release(self.site, round_, schema, vector, weight, sha256, seal=SEAL)

    def summary(self) -> dict[str, object]:
        """Return the state of the account as plain JSON values."""
        return {
            "site": self.site,
            "run": self.run,
            "epsilon": self.epsilon(),
            "lifetime_epsilon": self.epsilon(lifetime=True),
            "max_tpr_at_fpr_1pct": self.max_tpr(),
            "delta": self.terms.delta,
            "max_epsilon": self.terms.max_epsilon,
            "guarantee": self.guarantee(),
            "lifetime_guarantee": self.guarantee(lifetime=True),
            "unit": self.terms.unit,
            "accountant": ACCOUNTANT,
            "insecure": self.terms.insecure,
            "steps": sum(mechanism.steps for mechanism in self.list_mechanisms()),
        }
