"""`privacy`: what a plan costs, or the noise that a budget asks for."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

from wsi_fl.privacy import accounting
from wsi_fl.privacy.plan import Proposal, planned, proposals
from wsi_fl.report.words import detected
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.toml import LEAST_SIGMA
from wsi_fl.types import UsageError

_BATCH_SIZE = 32
_LEAST_DELTA = 1e-300
_ACCOUNTANTS = {
    "exact": "exact",
    "rdp": "RDP accountant, an upper bound",
    "unsampled": "as if nothing was sampled, an upper bound",
}


def privacy(
    *,
    n: int,
    batch_size: int | None,
    epochs: float,
    delta: float,
    sigma: float | None,
    target_epsilon: float | None,
    group: int | None = None,
) -> dict[str, Any]:
    """ε of `epochs` epochs of DP-SGD over n rows, and for a patient with `group` of them; or how to keep to a target.

    Given a target and a batch size, that is the least σ; without a batch size, the planner proposes one.
    """
    if (sigma is None) == (target_epsilon is None):
        raise UsageError(
            "give one of --sigma and --target-epsilon, not both"
            if sigma is not None
            else "give --sigma or --target-epsilon"
        )
    if not _LEAST_DELTA <= delta < 1:
        raise UsageError(
            f"--delta {delta:g}: give a probability from {_LEAST_DELTA:g} to below 1, such as 1e-5"
        )
    if sigma is not None and not (sigma == 0 or sigma >= LEAST_SIGMA):
        raise UsageError(f"--sigma {sigma:g}: use 0 for no noise, or at least {LEAST_SIGMA:g}")
    if batch_size is not None and batch_size > n:
        raise UsageError(f"--batch-size {batch_size} is more than the {n} rows of --n")
    ways: list[Proposal] = []
    if sigma is not None:
        mechanism = accounting.plan(n, batch_size or _BATCH_SIZE, epochs, sigma, 1.0)
    elif target_epsilon is not None and batch_size is not None:
        mechanism = accounting.plan(n, batch_size, epochs, 0.0, 1.0)
        found = accounting.sigma_for(target_epsilon, mechanism.sample_rate, mechanism.steps, delta)
        mechanism = replace(mechanism, sigma=found)
    else:
        assert target_epsilon is not None
        ways = proposals(n, epochs, target_epsilon, delta)
        best = planned(n, epochs, target_epsilon, delta)
        mechanism, batch_size = best.mechanism, best.batch_size
    value = accounting.epsilon([mechanism], delta)
    worth = accounting.group_epsilon([mechanism], delta, group) if group else None
    return {
        "epsilon": value if isfinite(value) else None,
        "max_tpr_at_fpr_1pct": accounting.detection([mechanism]) if isfinite(value) else None,
        "delta": delta,
        "sigma": mechanism.sigma,
        "sample_rate": mechanism.sample_rate,
        "steps": mechanism.steps,
        "accountant": accounting.priced_by([mechanism], delta),
        "n": n,
        "batch_size": batch_size or _BATCH_SIZE,
        "ways": [
            {
                "batch_size": way.batch_size,
                "sigma": way.mechanism.sigma,
                "steps": way.mechanism.steps,
                "signal_to_noise": way.signal_to_noise,
            }
            for way in ways
        ],
        "group": {"rows": group, "epsilon": worth} if group else None,
    }


def privacy_lines(document: dict[str, Any]) -> Lines:
    value = "no guarantee (no noise)" if document["epsilon"] is None else f"ε = {document['epsilon']:.3f}"
    if document["delta"] * document["n"] >= 1:
        yield Line(
            f"δ = {document['delta']:g} is not below 1/n: it would allow some patches to be published whole",
            "yellow",
        )
    for way in document["ways"]:
        mark = "→" if way["batch_size"] == document["batch_size"] else " "
        yield Line(
            f" {mark} B = {way['batch_size']:<6} σ = {way['sigma']:<7.3f} {way['steps']:>6} steps   "
            f"signal to noise {way['signal_to_noise']:.0f}"
        )
    if document["ways"]:
        yield Line(f"most steps at nearly the best signal to noise: batch_size = {document['batch_size']}")
    yield Line(
        f"{value} at δ = {document['delta']:g}: {document['steps']} steps at sample rate "
        f"{document['sample_rate']:.5f} with σ = {document['sigma']:g} ({_ACCOUNTANTS[document['accountant']]})"
    )
    if document["max_tpr_at_fpr_1pct"] is not None:
        yield Line(detected(document["max_tpr_at_fpr_1pct"], "row"))
    if document["group"]:
        rows, worth = document["group"]["rows"], document["group"]["epsilon"]
        above = f"more than {accounting.MOST_EPSILON:g}, no protection" if worth is None else f"{worth:.3g}"
        yield Line(f"for a patient with {rows} rows together: ε = {above} (group privacy)")
