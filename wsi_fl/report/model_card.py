"""The page that leaves with a model: what it is, what it learned from, what its ε is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsi_fl.report import worth
from wsi_fl.report.words import DASH, SCORES, SHORT, detected_of, interval, number, scientific

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
    model, inputs = card["model"], card["inputs"]
    sections = [
        f"# {card['name']}\n\n**{warning_of(card)}**",
        _table(
            "Model",
            {
                "architecture": model["architecture"],
                "files": ", ".join(
                    f"`{name}` (sha256 {digest[:16]}…)" for name, digest in card["files"].items()
                ),
                "input": model["input"],
                "answers": model["answers"],
                "output": _OUTPUT[model["task"]].format(", ".join(model["classes"])),
                "checked": f"outputs of the file are the model's within {model['difference']:.1e}",
            },
        ),
        _table(
            "Data",
            {
                "sites": ", ".join(card["sites"]),
                "an example is": f"one of the {card['examples']}",
                "patch": f"{inputs['size_px']} px at {inputs['mpp']:g} µm per pixel"
                if inputs["mpp"]
                else f"{inputs['size_px']} px",
                "encoder": inputs["encoder"] or "none",
            },
        ),
        _metrics(card["metrics"]),
        *([_worth(card["worth"])] if card["worth"] else []),
        _privacy(card["privacy"]),
        _table(
            "Origin",
            {
                "run": f"{card['run']}, method {card['method']}",
                "wsi-fl": card["version"],
                "made": card["made"],
            },
        ),
        "## Licence\n\nNone is chosen yet. Write one here before you share this model.",
        "## Use\n\nFor research. It is no medical device, and it was tested on no patients but those above.",
    ]
    return "\n\n".join(sections) + "\n"


def _table(title: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _metrics(metrics: Mapping[str, Any] | None) -> str:
    if metrics is None:
        return (
            "## Metrics\n\nNone leave with this model: the run was not evaluated, or the hospital does not allow its "
            'scores to leave (`allow = ["scores"]`).'
        )
    lines = [
        f"| {part['on']} | {part['n']} | "
        + " | ".join(_cell(part, name) for name in metrics["scores"])
        + " |"
        for part in metrics["parts"]
    ]
    names = [SHORT.get(name, SCORES[name].lower()) for name in metrics["scores"]]
    heading = [f"| tested on | n | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    known = any(part["intervals"] for part in metrics["parts"])
    note = ["", "In brackets 95 % intervals, patients drawn anew."] if known else []
    return "\n".join(["## Metrics", "", *heading, *lines, *note])


def _worth(gain: Mapping[str, Any]) -> str:
    reached = f"In the run joining reached {number(gain['joined']['mean'], 2)} in {gain['measure']}"
    said = worth.finding(gain, reached, "a hospital alone without differential privacy")
    return f"## Whether joining paid\n\n{said.text}"


def _cell(part: Mapping[str, Any], name: str) -> str:
    bounds = interval((part["intervals"] or {}).get(name))
    return f"{number(part[name])} {bounds}".strip()


def _privacy(privacy: Mapping[str, Any]) -> str:
    rows: Sequence[str] = [
        f"| {site['site']} | {number(site['epsilon'], 2)} | {scientific(site['delta'])} | {site['unit']} "
        f"| {_WORTH[site['guarantee']]} | {number(site['epsilon_lower'], 2)} | {(site['ledger'] or DASH)[:16]} |"
        for site in privacy["sites"]
    ]
    heading = [
        "| site | ε | δ | protects one | worth | ε ≥ (audit) | ledger (sha256) |",
        "|---|---|---|---|---|---|---|",
    ]
    away = "This ε is of what travelled in the run, and does **not** cover this model."
    said = [] if privacy["covered"] else [away, ""]
    means = detected_of(privacy["sites"])
    return "\n".join(
        ["## Privacy", "", *said, *heading, *rows, *(["", f"What ε means: {means}."] if means else [])]
    )
