"""The command `demo` (entry point `wsi_fl.commands`): it uses extensions, so the core does not know it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from wsi_fl.cli.options import ExtraCommand, Json, announce_start, print_document


@partial(announce_start, name="demo")
def start_demo(
    out: Annotated[Path, Option(help="Folder for the study.")] = Path("wsi-fl-demo"), as_json: Json = False
) -> None:
    """Simulate four hospitals' slides, tile, train local and federated models, and report each hospital's benefit."""
    from wsi_fl.demo.run import render_demo_lines, run_demo

    print_document(run_demo(out), as_json, render_demo_lines)


DEMO = ExtraCommand(start_demo, "Start", is_first=True)
