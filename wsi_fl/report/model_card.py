"""The page that leaves with a model: what it is, what it learned from, what its ε is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wsi_fl.report import worth
from wsi_fl.report.fill import fill
from wsi_fl.report.words import SCORES, SHORT, detected_of, number

_WORTH = {
    "guaranteed": "a guarantee: it holds whatever others know",
    "shared": "a guarantee as long as no more sites collude than agreed: noise was added together",
    "nominal": "nominal: computed, but not proven, since the model learned from one without privacy",
    "none": "none",
}

_OUTPUT = {
    "classes": "logits of {}; softmax makes probabilities of them",
    "number": "{}, from −1 to 1 over its range",
    "survival": "logits of the hazards in the intervals that end at {}; the chance of no event up to an end "
    "is the product of 1 − hazard up to it",
}
"""What a model's outputs mean, by task."""


def warning_of(card: Mapping[str, Any]) -> str:
    """Return what stands first: what somebody who has this file might learn of patients.

    Example:
        >>> warning_of({"role": "private", "privacy": {"covered": False}}).split(".")[0]
        'This is a private model: it was trained without differential privacy and may have memorised patients'
    """
    private = card["role"] == "private"
    if card["privacy"]["covered"]:
        home = "This is a private model, which was to stay at home. " if private else ""
        return f"{home}Trained with differential privacy; what that is worth stands under Privacy."
    what = "a private model: it was" if private else "a model that was"
    return (
        f"This is {what} trained without differential privacy and may have memorised patients. "
        "Treat it as you treat the data it learned from."
    )


def rendered(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    gain = card["worth"]
    context = {
        "card": card,
        "warning": warning_of(card),
        "output": _OUTPUT[card["model"]["task"]].format(", ".join(card["model"]["classes"])),
        "guarantees": _WORTH,
        "measures": {
            name: SHORT.get(name, SCORES[name].lower()) for name in (card["metrics"] or {}).get("scores", ())
        },
        "detected": detected_of(card["privacy"]["sites"]),
        "joining": gain
        and worth.finding(
            gain,
            f"In the run joining reached {number(gain['joined']['mean'], 2)} in {gain['measure']}",
            "a hospital alone without differential privacy",
        ).text,
    }
    return fill("model_card", context, form="md") + "\n"
