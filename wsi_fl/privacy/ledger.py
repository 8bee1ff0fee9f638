"""The ledger of a site, and the only door through which anything leaves it.

A `Release` is what `Comm` accepts, and only `PrivacyLedger.release` makes one, after writing down what it
costs. Ledgers are append-only JSON lines, one file per site and study; each run composes its own ε, and for a
real site `max_epsilon` is a budget for its lifetime, over all runs and seeds.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.files import append_line, read_lines_from
from wsi_fl.privacy.accounting import ACCOUNTANT, Mechanism, epsilon
from wsi_fl.types import WsiFlError

Values = NDArray[np.float32] | NDArray[np.uint8]
"""Parameters of a model, or the bytes of a buffer of images."""

Guarantee = Literal["guaranteed", "nominal", "none"]
"""What an ε is worth.

``guaranteed``  the per-example gradient depends on nothing fitted on other records
``nominal``     the arithmetic of Algorithm 1, whose gradient contains a teacher trained without DP
``none``        no differential privacy, or noise from a seed that others may know
"""

_SEAL = object()


class BudgetSpent(WsiFlError):
    """The next step would cross the site's max_epsilon."""


@dataclass(frozen=True, eq=False)
class Release:
    """What a site lets go: flat numbers with their PushSum weight, or flat bytes, recorded in a ledger."""

    site: str
    round: int
    schema: str
    vector: Values
    weight: float
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("only PrivacyLedger.release makes a Release")
        frozen = np.array(self.vector, _kind_of(self.vector))
        frozen.flags.writeable = False
        object.__setattr__(self, "vector", frozen)


@dataclass(frozen=True)
class Terms:
    """Under which a site takes part in a run.

    Attributes:
        delta: δ of the site's guarantee.
        max_epsilon: the most it will spend, or None.
        lifetime: whether max_epsilon covers every run in the ledger (real sites) or this run alone.
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


class PrivacyLedger:
    """The privacy account of one site in one run.

    Args:
        run: identifies the run for ever; a name that is given again after a run was deleted does not.
        includes: other entries of the same ledger, by what they call their run ("stain"), whose cost is part of
            this run's; they are no rounds of it.

    Raises:
        WsiFlError: when the file is damaged (a line cut short by a crash was never followed by a release), or counts
            another unit towards the same ε or budget.
    """

    def __init__(
        self, path: Path, *, site: str, run: str, terms: Terms, includes: Collection[str] = ()
    ) -> None:
        self.path, self.site, self.run, self.terms = path, site, run, terms
        self._counted = {run, *includes}
        self._entries: list[dict[str, Any]] = []
        self._read = 0
        self._catch_up()
        self._check_unit()

    def _catch_up(self) -> None:
        """Reads what this run and others beside it have written since."""
        new, self._read = read_lines_from(self.path, self._read)
        self._entries += new

    def _append(self, entry: dict[str, Any]) -> None:
        append_line(self.path, entry)
        self._catch_up()

    def mechanisms(self, *, lifetime: bool = False) -> list[Mechanism]:
        """What was applied, in this run with what it includes or in all; a round redone before its release is one."""
        return _applied(self._scope(lifetime))

    def n_rounds(self) -> int:
        """How many rounds of this run are on the account."""
        return len(_applied(self._own()))

    def epsilon(self, *, lifetime: bool = False) -> float | None:
        """ε spent so far; None when something left without privacy, nothing is accounted, or units differ."""
        scope = self._scope(lifetime)
        if _units(scope) - {self.terms.unit}:
            return None
        bare = any(entry.get("released") and entry["mechanism"] is None for entry in scope)
        spent = _applied(scope)
        value = epsilon(spent, self.terms.delta)
        return value if spent and not bare and isfinite(value) else None

    def released(self) -> list[str]:
        """What this run released, as content and digest, oldest first."""
        return [str(entry["released"]) for entry in self._own() if entry.get("released")]

    def last_round(self) -> int:
        """The last round of this run that was recorded; 0 before the first."""
        return max((int(entry["round"]) for entry in self._own()), default=0)

    def sending(self, round_: int) -> None:
        """Notes that the release of a round is about to leave: from now on it can only be sent again, never redone."""
        entry = {"run": self.run, "site": self.site, "round": round_, "sending": True}
        with _locked(self.path):
            self._append(entry)

    def last_sent(self) -> int:
        """The last round of this run whose release may have left; 0 before the first."""
        return max((int(e["round"]) for e in self._own() if e.get("sending")), default=0)

    def affords(self, round_: int, mechanism: Mechanism) -> bool:
        """Whether `mechanism` in this round, on top of the past, stays within max_epsilon.

        What this run has recorded of the round already costs nothing more.
        """
        if self.terms.max_epsilon is None:
            return True
        self._catch_up()
        if any(e["round"] == round_ and e.get("mechanism") for e in self._own()):
            return True
        try:
            self._check(self._entry(round_, mechanism, ""))
        except BudgetSpent:
            return False
        return True

    def _check_unit(self) -> None:
        """What was spent per row says little of a patient, who may have many rows; and the other way round."""
        binding = self.terms.lifetime and self.terms.max_epsilon is not None
        if other := _units(self._scope(binding)) - {self.terms.unit}:
            raise WsiFlError(
                f"{self.path}: the account of site {self.site} counts ε per {other.pop()}, this run per "
                f"{self.terms.unit}, and the two do not add up; keep the privacy.unit that the site began with"
            )

    def _check(self, entry: dict[str, Any]) -> None:
        limit = self.terms.max_epsilon
        if limit is None or entry["mechanism"] is None:
            return
        self._check_unit()
        after = epsilon(_applied([*self._scope(self.terms.lifetime), entry]), self.terms.delta)
        if after > limit:
            raise BudgetSpent(
                f"site {self.site}: round {entry['round']} would raise epsilon to {after:.3f}, above its {limit:g}"
            )

    def record(self, round_: int, mechanism: Mechanism | None, content: str = "") -> None:
        """Writes down one round of training under `mechanism`, and `content` if that leaves the site.

        Raises:
            BudgetSpent: when a run beside this one has spent what was left.
        """
        entry = self._entry(round_, mechanism, content)
        with _locked(self.path):
            self._catch_up()
            if any(e.get("sending") and e["round"] == round_ for e in self._own()):
                raise WsiFlError(
                    f"{self.path}: round {round_} of run {self.run} was sent already and is never redone; "
                    "start a new run"
                )
            self._check(entry)
            self._append(entry)

    def _entry(self, round_: int, mechanism: Mechanism | None, content: str) -> dict[str, Any]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.run,
            "site": self.site,
            "round": round_,
            "released": content or None,
            "mechanism": asdict(mechanism) if mechanism else None,
            "delta": self.terms.delta,
            "unit": self.terms.unit,
            "guarantee": self.terms.guarantee if mechanism else "none",
            "accountant": ACCOUNTANT,
            "insecure": self.terms.insecure,
        }

    def _scope(self, lifetime: bool) -> list[dict[str, Any]]:
        """What counts towards ε."""
        return [entry for entry in self._entries if lifetime or entry["run"] in self._counted]

    def _own(self) -> list[dict[str, Any]]:
        """The rounds of this run alone."""
        return [entry for entry in self._entries if entry["run"] == self.run]

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
        protected = mechanism is not None and mechanism.sigma > 0 and not self.terms.insecure
        if not protected and content not in self.terms.allow:
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

    def reissue(self, round_: int, vector: Values, *, schema: str, weight: float = 1.0) -> Release:
        """The same bytes once more after a restart, at no cost; refused unless the ledger knows them."""
        known = digest(vector)
        for entry in self._own():
            if entry["round"] == round_ and known in (entry.get("released") or ""):
                return self._sealed(round_, vector, schema, weight)
        raise WsiFlError(f"{self.path}: round {round_} of run {self.run} did not release these bytes")

    def relay(self, round_: int, vector: NDArray[np.float32], *, schema: str, weight: float) -> Release:
        """A mixture of this site's release of the round with what others released: noted, at no further cost.

        Whatever is computed from releases alone is as private as they are (post-processing).

        Raises:
            WsiFlError: when this site released nothing in this round.
        """
        if not any(e.get("released") and e["round"] == round_ for e in self._own()):
            raise WsiFlError(
                f"{self.path}: round {round_} of run {self.run} released nothing that could be passed on"
            )
        entry = {"run": self.run, "site": self.site, "round": round_, "relayed": digest(vector)}
        with _locked(self.path):
            self._append(entry)
        return self._sealed(round_, vector, schema, weight)

    def _sealed(self, round_: int, vector: Values, schema: str, weight: float) -> Release:
        return Release(self.site, round_, schema, vector, weight, seal=_SEAL)

    def summary(self) -> dict[str, Any]:
        """The state of the account as plain JSON values."""
        return {
            "site": self.site,
            "run": self.run,
            "epsilon": self.epsilon(),
            "lifetime_epsilon": self.epsilon(lifetime=True),
            "delta": self.terms.delta,
            "max_epsilon": self.terms.max_epsilon,
            "guarantee": self.terms.guarantee,
            "unit": self.terms.unit,
            "accountant": ACCOUNTANT,
            "insecure": self.terms.insecure,
            "steps": sum(mechanism.steps for mechanism in self.mechanisms()),
        }


def _units(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Of all that was spent."""
    return {str(entry["unit"]) for entry in entries if entry.get("mechanism")}


def _applied(entries: Sequence[Mapping[str, Any]]) -> list[Mechanism]:
    """The mechanisms of all entries.

    A round recorded twice in a row in its run was redone and counts once, unless it was sent in between.
    """
    applied: list[Mechanism] = []
    latest: dict[str, tuple[int, int]] = {}
    for entry in entries:
        if entry.get("sending"):
            latest.pop(entry["run"], None)
        if entry.get("mechanism") is None:
            continue
        mechanism = Mechanism(**entry["mechanism"])
        round_, position = latest.get(entry["run"], (-1, 0))
        if round_ == entry["round"]:
            applied[position] = mechanism
        else:
            latest[entry["run"]] = entry["round"], len(applied)
            applied.append(mechanism)
    return applied


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else reads what is left of the budget, or spends it, meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _kind_of(vector: Values) -> type[np.uint8] | type[np.float32]:
    return np.uint8 if vector.dtype == np.uint8 else np.float32


def digest(vector: Values) -> str:
    """SHA-256 of the bytes that travel."""
    kind = "u1" if vector.dtype == np.uint8 else "<f4"
    return hashlib.sha256(np.ascontiguousarray(vector, kind).tobytes()).hexdigest()
