"""Answers to the forms of others: security, anonymity, the EHDS and a register, from the facts of a dossier.

The questions and the texts are in `answers.toml`; a place in braces is a fact, by its key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, TypedDict

from wsi_fl.privacy.accounting import ACCOUNTANT

SHEETS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("answers.toml").read_text("utf-8"))["sheet"]
_GUARANTEED = "It holds for all trained on, against every attack; counts of test examples, if any left, are exact."


class _Answer(TypedDict):
    """A question, and its answer; `complete` is whether all facts of the answer are known."""

    asks: str
    complete: bool
    says: str


class AnswerSheet(TypedDict):
    """The answers to one form."""

    title: str
    source: str
    row: list[_Answer]


def answer_sheets(dossier: Mapping[str, Any]) -> list[AnswerSheet]:
    """Return the answers to all forms, from the content of a dossier."""
    facts = {**dossier, **collect_facts(dossier)}
    return [
        {"title": sheet["title"], "source": sheet["source"], "row": [_answer_row(row, facts) for row in sheet["row"]]}
        for sheet in SHEETS
    ]


def collect_facts(dossier: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts that answers may name beside the dossier's own keys; None for unknown ones."""
    plan, accounts, audits = dossier["plan"], dossier["accounts"], dossier["audits"]
    group, limit = dossier["group"], dossier["budget"]["max_epsilon"]
    releases = [release for account in accounts for release in account["releases"]]
    guarantees = {account["guarantee"] for account in accounts if account["epsilon"] is not None}
    return {
        "auroc": _largest_value(audits, "auroc"),
        "lower": _largest_value(audits, "epsilon_lower"),
        "upper": _largest_value(audits, "epsilon_upper"),
        "guarantee": ", ".join(sorted(guarantees)) or plan["privacy"]["guarantee"],
        "worth": _GUARANTEED if guarantees == {"guaranteed"} else "It is no guarantee by itself: see above.",
        "patient": group["epsilon"] if group else None,
        "packages": ", ".join(f"{name} {version}" for name, version in plan["packages"].items()),
        "does": plan["does"].rstrip("."),
        "leaves": "; ".join(row["what"].partition(":")[0] for row in plan["leaves"]),
        "stays": "; ".join(plan["stays"]),
        "limit": "no limit" if limit is None else f"{limit:.4g}",
        "releases": len(releases),
        "runs": len(accounts),
        "kinds": ", ".join(sorted({release["what"] for release in releases})) or None,
        "accountant": f"{ACCOUNTANT.upper()}; exact for Gaussian sums without sampling",
        "never": None,
    }


def _largest_value(audits: Sequence[Mapping[str, float | None]], key: str) -> float | None:
    return max((value for audit in audits if (value := audit[key]) is not None), default=None)


class _UnknownFact(Exception):
    pass


class _FactFormatter(Formatter):
    """Fills places of a text with known facts."""

    def get_field(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        field = super().get_field(name, args, kwargs)
        if field[0] is None:
            raise _UnknownFact
        return field


def _answer_row(row: Mapping[str, str], facts: Mapping[str, Any]) -> _Answer:
    try:
        return {"asks": row["asks"], "complete": True, "says": _FactFormatter().vformat(row["says"], (), facts)}
    except _UnknownFact:
        return {"asks": row["asks"], "complete": False, "says": row.get("otherwise", "")}
