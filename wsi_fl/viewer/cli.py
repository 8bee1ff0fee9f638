"""The command `view`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from wsi_fl.cli.options import ExtraCommand, Json, Pipeline, announce_start, find_study, print_document
from wsi_fl.system.extras import require_extra
from wsi_fl.types import UsageError


@announce_start
def view(
    of_run: Annotated[str | None, typer.Argument(metavar="RUN", help="The same as --run.")] = None,
    site: Annotated[
        str | None, typer.Option(help="Show this site's slides, or of a run this site's predictions.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Show the predictions of a run.")] = None,
    predictions: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Show what `predict --out` wrote there.")
    ] = None,
    pipeline: Pipeline = None,
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="Where to listen. Default: 8642, or a free one.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser on this machine.")] = False,
    as_json: Json = False,
) -> None:
    """View slides in a browser on this machine, with kept patches and predictions. Read-only."""
    if of_run is not None and run is not None:
        raise UsageError("view takes one run: give it as RUN or with --run")
    study = find_study()
    require_extra("view")
    from wsi_fl.viewer.build_gallery import build_gallery
    from wsi_fl.viewer.server import ViewServer, address_lines, describe_server

    gallery = build_gallery(study, site=site, run=run or of_run, predictions=predictions, pipeline=pipeline)
    with ViewServer(gallery, port) as server:
        print_document(describe_server(server), as_json, address_lines)
        if open_browser:
            webbrowser.open(server.url)
        server.serve()


VIEW = ExtraCommand(view, "Results")
