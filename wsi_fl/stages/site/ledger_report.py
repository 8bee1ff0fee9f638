"""The spending that a ledger records, for `wsi-fl ledger`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TypedDict

from wsi_fl.privacy.guarantee import RoundHistory, lifetime_entries
from wsi_fl.privacy.ledger_file import Guarantee, LedgerEntry, LedgerFile
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.study.account_file import load_account
from wsi_fl.system.files import file_sha256
from wsi_fl.types import UsageError, WsiFlError


class RunSpending(TypedDict):
    """What one run, or one job of another framework, spent."""

    site: str
    run: str
    rounds: int  # those that cost ε
    epsilon: float | None  # null where none holds
    first: str  # times of its first and last line; "" where they have none
    last: str


class LedgerSpending(TypedDict):
    """The content of a ledger."""

    ledger: str
    lines: int
    sha256: str
    heads: list[str]  # files that were compared with it
    unit: str | None  # of all lines; null without spending, or where units differ
    delta: float | None  # the smallest of all lines, and no larger than the account's; null without spending
    epsilon: float | None  # of all lines together; null where none holds
    guarantee: Guarantee
    max_epsilon: float | None  # the budget, where the account file is given
    runs: list[RunSpending]  # those that count; of a real hospital without simulations of another unit


def summarize_ledger(path: Path, heads: Sequence[Path] = ()) -> LedgerSpending:
    """Return the spending in a ledger, whose chain and heads are verified; WsiFlError says what does not fit.

    Args:
        path: a ledger, or an account file (.toml) that names one with its heads and budget.
    """
    limit = account_delta = None
    if path.suffix == ".toml":
        terms = load_account(path)
        path, limit, account_delta = terms.ledger, terms.max_epsilon, terms.delta
        heads = [*heads, *(head for head in terms.heads if head.exists())]
        if not (path.exists() or heads):
            raise UsageError(f"{path}: not there yet; nothing was released under this account")
    if missing := [file for file in (path, *heads) if not file.is_file()]:
        raise UsageError(f"{missing[0]}: no such file; give a ledger (.jsonl) or an account file (.toml)")
    entries = LedgerFile(path, heads).entries
    n_lines = len(entries)
    real_units = {entry.unit for entry in entries if entry.real and entry.mechanism}
    if len(real_units) == 1:
        entries = lifetime_entries(entries, str(real_units.pop()))
    history = RoundHistory(entries)
    delta = min((entry.delta for entry in entries if entry.mechanism and entry.delta), default=None)
    delta = delta and min(delta, account_delta or delta)
    value = None if delta is None else history.compute_epsilon(delta)
    if limit is not None and delta is not None and (inf if value is None else value) > limit:
        raise WsiFlError(f"{path}: holds more than the budget of ε = {limit:g}: {value or 'no ε'} at δ = {delta:g}")
    runs = dict.fromkeys((entry.site, entry.run_id) for entry in entries)
    return {
        "ledger": str(path),
        "lines": n_lines,
        "sha256": file_sha256(path),
        "heads": [str(head) for head in heads],
        "unit": next(iter(history.units)) if len(history.units) == 1 else None,
        "delta": delta,
        "epsilon": value,
        "guarantee": "none" if value is None else history.weakest_guarantee(),
        "max_epsilon": limit,
        "runs": [_summarize_run([e for e in entries if (e.site, e.run_id) == key], delta) for key in runs],
    }


def _summarize_run(entries: Sequence[LedgerEntry], delta: float | None) -> RunSpending:
    history, times = RoundHistory(entries), [entry.time for entry in entries if entry.time] or [""]
    return {
        "site": entries[0].site,
        "run": entries[0].run,
        "rounds": history.n_charged,
        "epsilon": None if delta is None else history.compute_epsilon(delta),
        "first": times[0],
        "last": times[-1],
    }


def render_ledger_lines(document: LedgerSpending) -> Lines:
    """Render the spending of each run, and of all."""
    rows = [
        (run["run"], run["site"], run["rounds"], _format_epsilon(run["epsilon"]), run["first"][:10], run["last"][:10])
        for run in document["runs"]
    ]
    yield TextTable("", ["run", "site", "rounds", "ε", "first", "last"], rows)
    yield from render_verdict_lines(document)


def render_verdict_lines(document: LedgerSpending) -> Lines:
    """Render what was verified, and ε of all lines."""
    unit, delta, limit = document["unit"], document["delta"], document["max_epsilon"]
    yield TextLine(
        f"{document['ledger']}: {document['lines']} lines, each fits those before it; "
        f"{len(document['heads']) or 'no'} heads compared"
    )
    of_budget = "" if limit is None else f" of {limit:g}"
    if delta is not None:
        yield TextLine(
            f"ε = {_format_epsilon(document['epsilon'])}{of_budget} at δ = {delta:g}, "
            f"per {unit or 'different units'}, {document['guarantee']}"
        )


def _format_epsilon(value: float | None) -> str:
    return "no ε holds" if value is None else f"{value:.4g}"
