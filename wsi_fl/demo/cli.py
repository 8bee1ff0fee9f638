"""The command `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from wsi_fl.cli.options import Json, announce_start, print_document


@announce_start
def demo(
    out: Annotated[Path, Option(help="Folder for the study.")] = Path("wsi-fl-demo"), as_json: Json = False
) -> None:
    """Simulate four hospitals' slides, tile, train local and federated models, and report each hospital's benefit."""
    from wsi_fl.demo.run import render_demo_lines, run_demo

    print_document(run_demo(out), as_json, render_demo_lines)
