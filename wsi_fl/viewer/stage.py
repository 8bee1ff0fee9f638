"""`view`: a page on this machine to look at slides, with what was kept of them and what models say."""

from __future__ import annotations

import getpass
import platform
import signal
import webbrowser
from pathlib import Path
from typing import Any

from wsi_fl.stages.work.console import Lines
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError
from wsi_fl.viewer.gallery import Gallery
from wsi_fl.viewer.server import ADDRESS, ViewServer
from wsi_fl.viewer.viewing import gallery_of_predictions, gallery_of_site


def gallery(
    study: Study,
    *,
    site: str | None = None,
    run: str | None = None,
    predictions: Path | None = None,
    pipeline: str | None = None,
) -> Gallery:
    """Return what a viewer shows: a site's slides, or those that were predicted.

    Args:
        site: whose slides.
        run: whose predictions.
        predictions: a folder that `predict --out` wrote.
        pipeline: how the site's slides are cut, where it has no store.

    Raises:
        UsageError, WsiFlError: when there is nothing to show, or it may not be shown.
    """
    if run is None and predictions is None:
        if site is None:
            raise UsageError("view needs --site NAME for a site's slides, or --run RUN for predictions")
        return gallery_of_site(study, site, pipeline)
    if pipeline is not None:
        raise UsageError("--pipeline is for the slides of a site; a run keeps its own")
    return gallery_of_predictions(study, run, predictions, site)


def describe(server: ViewServer) -> dict[str, Any]:
    """Return the `--json` document: where the page is, and how to reach it from elsewhere."""
    port, slides = server.port, server.gallery.exhibits
    return {
        "url": server.url,
        "port": port,
        "tunnel": f"ssh -N -L {port}:{ADDRESS}:{port} {getpass.getuser()}@{platform.node()}",
        "title": server.gallery.title,
        "slides": sum(one.path is not None for one in slides),
        "not_shown": [{"slide": one.name, "reason": one.note} for one in slides if one.path is None],
    }


def address_lines(document: dict[str, Any]) -> Lines:
    """Say where the page is, and the line of a tunnel to it."""
    n = document["slides"]
    yield f"{document['title']}: {n} slide{'' if n == 1 else 's'}"
    for one in document["not_shown"]:
        yield f"  not shown: {one['slide']}: {one['reason']}"
    yield f"\n  {document['url']}\n"
    yield f"From another machine, run there first:\n  {document['tunnel']}\n\nCtrl-C ends it."


def serve(server: ViewServer, *, open_browser: bool = False) -> None:
    """Serve until Ctrl-C.

    It is noted rather than raised: raised while a thread starts, it would leave Python hanging.
    """
    asked_to_end: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked_to_end.append(number))
    try:
        if open_browser:
            webbrowser.open(server.url)
        while not asked_to_end:
            server.handle_request()
    finally:
        signal.signal(signal.SIGINT, before)
