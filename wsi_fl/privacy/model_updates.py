"""Release of model updates under differential privacy, charged to a hospital's own ledger: for any federation.

An update is what training changed: weights minus the weights that it began with. It is clipped, noise of the cipher is
added, and its cost is on the ledger's disk before `release_update` returns it. Only arrays are known here; an adapter
finds them in a federation's software (`hospitals.flare.ledger_filter` for NVIDIA FLARE).

The guarantee is void where a row depends on several patients though the unit is the patient, where the update reaches
others on another way as well, or where two accounts are kept for the same patients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import Mechanism, group_epsilon, max_tpr
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.guarantee import BudgetSpent, PrivacyTerms, describe_detection
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.system.files import write_bytes
from wsi_fl.types import WsiFlError

UpdateUnit = Literal["site", "patient"]
"""The privacy unit of updates: all of a site's update, or the part of one patient."""
_CONTENT = "update"
_CLIP_MARGIN = 1e-9  # beyond the round-off of a norm in float64


@dataclass(frozen=True)
class UpdateTerms:
    """The terms under which a hospital releases updates, of all federations that share its ledger."""

    site: str  # the hospital's name
    ledger: Path
    unit: UpdateUnit  # what ε protects
    n: int  # number of the hospital's patients, public and fixed; the divisor of a sum over patients
    clip: float  # bound C on the L2 norm of a unit's update
    sigma: float  # noise multiplier; the noise's standard deviation is sigma * clip
    delta: float  # δ of the budget, below 1 / n
    max_epsilon: float  # the budget, over all jobs, for good
    rounds: int | None = None  # the largest number of releases of a job; None for no limit but the budget
    heads: Sequence[Path] = ()  # files that remember how far the ledger was

    @property
    def release_mechanism(self) -> Mechanism:
        """The mechanism of one release."""
        return Mechanism(self.sigma, self.clip, 1.0, 1)


@dataclass(frozen=True)
class UpdateRelease:
    """A released update and its price."""

    values: NDArray[np.float32]  # float32[d], read-only
    number: int  # of the release in its job, from 1 on
    epsilon: float  # of the job so far
    lifetime_epsilon: float  # of all that the ledger holds
    patient_epsilon: float | None  # of the job, for one patient's record replaced by another; None above 1000
    max_tpr: float  # the largest true positive rate, at a false positive rate of 1 %, of a test for a patient's record
    is_repeat: bool  # whether these bytes were released before, and nothing was charged


def sum_clipped(rows: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
    """Return the sum float64[d] of rows float64[p, d], each scaled down to an L2 norm of at most `clip`.

    One row changes it by at most `clip`. A row that is not finite counts as zero: an error would tell of it.

    Example:
        >>> sum_clipped(np.array([[3.0, 4.0], [0.0, 0.5], [np.nan, 0.0]]), 1.0).round(6).tolist()
        [0.6, 1.3]
    """
    rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
    largest = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)  # divided out: squares may overflow
    rows = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    scales = np.minimum(largest, np.divide((1 - _CLIP_MARGIN) * clip, norms, out=np.zeros_like(norms), where=norms > 0))
    total: NDArray[np.float64] = (rows * scales).sum(axis=0)
    return total


def privatize_update(rows: NDArray[np.float64], terms: UpdateTerms) -> NDArray[np.float32]:
    """Return the clipped sum of rows float64[p, d] with fresh noise of the cipher, float32[d].

    For the unit "patient" it is divided by n. The noise's key comes from the operating system and is forgotten.
    """
    total = sum_clipped(rows, terms.clip)
    total += terms.sigma * terms.clip * CipherStream.from_entropy().draw_normal(len(total))
    return (total / (terms.n if terms.unit == "patient" else 1)).astype(np.float32)


def release_update(rows: NDArray[np.float64], terms: UpdateTerms, *, job: str, task: str) -> UpdateRelease:
    """Return the release of a job's task, which is charged, and whose bytes are stored beside the ledger.

    Asked for again, as after a kill, it is the same bytes at no cost; where another release took their place, a new one
    is charged.

    Args:
        rows: float64[1, d] for the unit "site", the update; float64[p, d] for "patient", a row for each.
        job, task: their ids; a task is charged once.

    Raises:
        WsiFlError: when the ledger is damaged or not the newest, or has another unit.
        BudgetSpent: when the budget, or the job's number of rounds, does not allow it. Nothing was charged.
    """
    ledger, copy_path = _open_ledger(terms, job, task), terms.ledger.with_name(f"{terms.ledger.name}.last")
    if (stored := _find_copy(ledger, copy_path, task)) is not None:
        number, values = stored
        return _price_release(ledger, ledger.release_again(number, values, schema=_CONTENT), is_repeat=True)
    if ledger.guarantee(lifetime=True) == "none":
        raise WsiFlError(
            f"site {terms.site}: no ε holds for what {terms.ledger} records already, such as a release without noise; "
            "with it no budget can be kept"
        )
    if terms.rounds is not None and ledger.last_final_round() >= terms.rounds:
        raise BudgetSpent(f"site {terms.site}: job {job} has had its {terms.rounds} rounds")
    values = privatize_update(rows, terms)
    release = ledger.release(None, values, schema=_CONTENT, mechanism=terms.release_mechanism, content=_CONTENT)
    write_bytes(copy_path, release.vector.astype("<f4").tobytes())
    ledger.record_transmission(release.round, release.digest)
    return _price_release(ledger, release, is_repeat=False)


def _open_ledger(terms: UpdateTerms, job: str, task: str) -> PrivacyLedger:
    privacy_terms = PrivacyTerms(
        terms.delta, terms.max_epsilon, lifetime=True, guarantee="guaranteed", unit=terms.unit, file="the account file"
    )
    return PrivacyLedger(
        terms.ledger, site=terms.site, run=job, terms=privacy_terms, heads=terms.heads, references={"task": task}
    )


def _find_copy(ledger: PrivacyLedger, path: Path, task: str) -> tuple[int, NDArray[np.float32]] | None:
    """Return the number and bytes of the job's last release, if it is this task's and they are still stored."""
    charges = [entry for entry in ledger.entries_of_run(ledger.run) if entry.released]
    if not charges or charges[-1].task != task or not path.exists():
        return None
    content = path.read_bytes()
    if charges[-1].released != f"{_CONTENT} {hashlib.sha256(content).hexdigest()}":
        return None
    return charges[-1].round, np.frombuffer(content, "<f4").astype(np.float32, copy=False)


def _price_release(ledger: PrivacyLedger, release: Release, *, is_repeat: bool) -> UpdateRelease:
    spent, epsilon, lifetime_epsilon = ledger.list_mechanisms(), ledger.epsilon(), ledger.epsilon(lifetime=True)
    assert epsilon is not None and lifetime_epsilon is not None
    # a patient can turn a site's clipped update around, and so counts as two units of it
    of_patient = [replace(k, sigma=k.sigma / 2) for k in spent] if ledger.terms.unit == "site" else spent
    return UpdateRelease(
        values=release.vector.astype(np.float32, copy=False),
        number=release.round,
        epsilon=epsilon,
        lifetime_epsilon=lifetime_epsilon,
        patient_epsilon=group_epsilon(spent, ledger.terms.delta, 2),
        max_tpr=max_tpr(of_patient),
        is_repeat=is_repeat,
    )


def describe_release(release: UpdateRelease, terms: UpdateTerms) -> str:
    """Return a release and its price in words, in one line."""
    units = {"site": "this site's whole update", "patient": "one patient"}
    above = "more than 1000" if release.patient_epsilon is None else f"{release.patient_epsilon:.3g}"
    sent_again = ", sent again at no cost" if release.is_repeat else ""
    return (
        f"release {release.number} of this job{sent_again}: ε = {release.epsilon:.4g} for this job, "
        f"{release.lifetime_epsilon:.4g} of {terms.max_epsilon:g} for all jobs, at δ = {terms.delta:g}, where "
        f"{units[terms.unit]} is replaced by nothing; ε = {above} where one patient is replaced by another; "
        f"{describe_detection(release.max_tpr, 'patient')}"
    )
