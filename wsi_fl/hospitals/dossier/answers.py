"""Answers to the forms of others: security, anonymity, the EHDS and a register, from the facts of a dossier.

The questions and the texts are in `answers.toml`; a place in braces is a fact, by its key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from wsi_fl.privacy.accounting import ACCOUNTANT

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


_SHEETS: list[AnswerSheet] = tomllib.loads(Path(__file__).with_name("answers.toml").read_text("utf-8"))["sheet"]


def answer_sheets(dossier: Mapping[str, Any]) -> list[AnswerSheet]:
    """Return the answers to all forms, from the content of a dossier."""
    facts = _drop_unknown({**dossier, **_collect_facts(dossier)})
    return [{**sheet, "row": [_answer_row(row, facts) for row in sheet["row"]]} for sheet in _SHEETS]


def _collect_facts(dossier: Mapping[str, Any]) -> dict[str, object]:
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
    }


def _largest_value(audits: Sequence[Mapping[str, float | None]], key: str) -> float | None:
    return max((value for audit in audits if (value := audit[key]) is not None), default=None)


def _drop_unknown(value: Any) -> Any:
    """Return a document without the keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _drop_unknown(item) for key, item in value.items() if item is not None}
    return [_drop_unknown(item) for item in value] if isinstance(value, list) else value


def _answer_row(row: Mapping[str, Any], facts: Mapping[str, Any]) -> _Answer:
    try:
        return {"asks": row["asks"], "complete": True, "says": row["says"].format_map(facts)}
    except KeyError:  # a fact that is not known
        return {"asks": row["asks"], "complete": False, "says": row.get("otherwise", "")}
