"""`compute_privacy`: ε of settings, or the noise for a budget."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

from wsi_fl.privacy import accounting
from wsi_fl.privacy.guarantee import describe_detection
from wsi_fl.privacy.privacy_plan import BudgetProposal, list_proposals, propose_plan
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.study.toml import MIN_SIGMA
from wsi_fl.types import UsageError

_BATCH_SIZE = 32
_MIN_DELTA = 1e-300
_ACCOUNTANTS = {
    "exact": "exact",
    "rdp": "RDP accountant, an upper bound",
    "unsampled": "as if nothing was sampled, an upper bound",
}


def compute_privacy(
    *,
    n: int,
    batch_size: int | None,
    epochs: float,
    delta: float,
    sigma: float | None,
    target_epsilon: float | None,
    group: int | None = None,
) -> dict[str, Any]:
    """Return ε of `epochs` epochs of DP-SGD over n rows, and of a patient with `group` of them; or σ for a target ε.

    Given a target and a batch size, it is the least σ; without a batch size, the planner proposes one.
    """
    _check_options(delta, sigma, target_epsilon)
    if batch_size is not None and batch_size > n:
        raise UsageError(f"--batch-size {batch_size} is more than the {n} rows of --n")
    options: list[BudgetProposal] = []
    if sigma is not None:
        mechanism = accounting.plan_mechanism(n, batch_size or _BATCH_SIZE, epochs, sigma, 1.0)
    elif target_epsilon is not None and batch_size is not None:
        mechanism = accounting.plan_mechanism(n, batch_size, epochs, 0.0, 1.0)
        least_sigma = accounting.find_sigma(target_epsilon, mechanism.sample_rate, mechanism.steps, delta)
        mechanism = replace(mechanism, sigma=least_sigma)
    else:
        assert target_epsilon is not None
        options = list_proposals(n, epochs, target_epsilon, delta)
        best = propose_plan(n, epochs, target_epsilon, delta)
        mechanism, batch_size = best.mechanism, best.batch_size
    if not mechanism.steps:
        raise UsageError(f"{epochs:g} epochs make less than one step; ask for more rounds")
    value = accounting.epsilon([mechanism], delta)
    patient_epsilon = accounting.group_epsilon([mechanism], delta, group) if group else None
    return {
        "epsilon": value if isfinite(value) else None,
        "max_tpr_at_fpr_1pct": accounting.max_tpr([mechanism]) if isfinite(value) else None,
        "delta": delta,
        "sigma": mechanism.sigma,
        "sample_rate": mechanism.sample_rate,
        "steps": mechanism.steps,
        "accountant": accounting.pricing_method([mechanism], delta),
        "n": n,
        "batch_size": batch_size or _BATCH_SIZE,
        "ways": [
            {
                "batch_size": option.batch_size,
                "sigma": option.mechanism.sigma,
                "steps": option.mechanism.steps,
                "signal_to_noise": option.signal_to_noise,
            }
            for option in options
        ],
        "group": {"rows": group, "epsilon": patient_epsilon} if group else None,
    }


def _check_options(delta: float, sigma: float | None, target_epsilon: float | None) -> None:
    if (sigma is None) == (target_epsilon is None):
        raise UsageError(
            "give one of --sigma and --target-epsilon, not both"
            if sigma is not None
            else "give --sigma or --target-epsilon"
        )
    if not _MIN_DELTA <= delta < 1:
        raise UsageError(f"--delta {delta:g}: give a probability from {_MIN_DELTA:g} to below 1, such as 1e-5")
    if sigma is not None and not (sigma == 0 or sigma >= MIN_SIGMA):
        raise UsageError(f"--sigma {sigma:g}: use 0 for no noise, or at least {MIN_SIGMA:g}")


def privacy_lines(document: dict[str, Any]) -> Lines:
    value = "no guarantee (no noise)" if document["epsilon"] is None else f"ε = {document['epsilon']:.3f}"
    if document["delta"] * document["n"] >= 1:
        yield TextLine(
            f"δ = {document['delta']:g} is not below 1/n: it would allow the publication of whole patches", "yellow"
        )
    for option in document["ways"]:
        mark = "→" if option["batch_size"] == document["batch_size"] else " "
        yield TextLine(
            f" {mark} B = {option['batch_size']:<6} σ = {option['sigma']:<7.3f} {option['steps']:>6} steps   "
            f"signal to noise {option['signal_to_noise']:.0f}"
        )
    if document["ways"]:
        yield TextLine(f"most steps at nearly the best signal to noise: batch_size = {document['batch_size']}")
    yield TextLine(
        f"{value} at δ = {document['delta']:g}: {document['steps']} steps at sample rate "
        f"{document['sample_rate']:.5f} with σ = {document['sigma']:g} ({_ACCOUNTANTS[document['accountant']]})"
    )
    if document["max_tpr_at_fpr_1pct"] is not None:
        yield TextLine(describe_detection(document["max_tpr_at_fpr_1pct"], "row"))
    if document["group"]:
        rows, patient_epsilon = document["group"]["rows"], document["group"]["epsilon"]
        above = (
            f"more than {accounting.MAX_GROUP_EPSILON:g}, no protection"
            if patient_epsilon is None
            else f"{patient_epsilon:.3g}"
        )
        yield TextLine(f"for a patient with {rows} rows together: ε = {above} (group privacy)")
