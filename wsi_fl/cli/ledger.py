"""The commands of `wsi-fl ledger` (entry point `wsi_fl.commands`): they need no study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from wsi_fl.cli.options import ExtraCommand, Json, print_document

_LedgerPath = Annotated[Path, Argument(metavar="LEDGER", help="A ledger (.jsonl), or an account file (.toml).")]
_Heads = Annotated[list[Path] | None, Option("--head", help="A head of the ledger to compare it with. Repeatable.")]
_app = Typer(help="The privacy ledger of a hospital: what it has spent.", rich_markup_mode=None)


@_app.command("show")
def show_ledger(ledger: _LedgerPath, head: _Heads = None, as_json: Json = False) -> None:
    """Show the ε of each run or job in a ledger, and of all together."""
    from wsi_fl.stages.site.ledger_report import render_ledger_lines, summarize_ledger

    print_document(summarize_ledger(ledger, head or []), as_json, render_ledger_lines)


@_app.command("verify")
def verify_ledger(ledger: _LedgerPath, head: _Heads = None, as_json: Json = False) -> None:
    """Verify a ledger's chain, its heads and, with an account file, its budget; exit code 1 where they do not fit."""
    from wsi_fl.stages.site.ledger_report import render_verdict_lines, summarize_ledger

    print_document(summarize_ledger(ledger, head or []), as_json, render_verdict_lines)


LEDGER = ExtraCommand(_app, "Train")
