"""`privacy`: what a plan costs, or the noise that a budget asks for."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

from wsi_fl.privacy.accounting import ACCOUNTANT, epsilon, plan, sigma_for
from wsi_fl.stages.console import say
from wsi_fl.types import UsageError


def privacy(
    *, n: int, batch_size: int, epochs: float, delta: float, sigma: float | None, target_epsilon: float | None
) -> dict[str, Any]:
    """ε of `epochs` epochs of DP-SGD over n rows; or, given a target, the least σ that keeps to it."""
    if (sigma is None) == (target_epsilon is None):
        raise UsageError(
            "give one of --sigma and --target-epsilon, not both"
            if sigma
            else "give --sigma or --target-epsilon"
        )
    mechanism = plan(n, batch_size, epochs, sigma or 0.0, 1.0)
    if target_epsilon is not None:
        found = sigma_for(target_epsilon, mechanism.sample_rate, mechanism.steps, delta)
        mechanism = replace(mechanism, sigma=found)
    value = epsilon([mechanism], delta)
    return {
        "epsilon": value if isfinite(value) else None,
        "delta": delta,
        "sigma": mechanism.sigma,
        "sample_rate": mechanism.sample_rate,
        "steps": mechanism.steps,
        "accountant": ACCOUNTANT,
        "n": n,
    }


def print_privacy(document: dict[str, Any]) -> None:
    value = "no guarantee (no noise)" if document["epsilon"] is None else f"ε = {document['epsilon']:.3f}"
    if document["delta"] * document["n"] >= 1:
        say(
            f"δ = {document['delta']:g} is not below 1/n: it would allow some patches to be published whole",
            style="yellow",
        )
    say(
        f"{value} at δ = {document['delta']:g}: {document['steps']} steps at sample rate "
        f"{document['sample_rate']:.5f} with σ = {document['sigma']:g} ({document['accountant'].upper()} accountant)"
    )
