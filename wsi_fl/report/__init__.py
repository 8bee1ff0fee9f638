"""One self-contained HTML page about a federated run: ``render(Page(...))`` returns it as text."""

from __future__ import annotations

from wsi_fl.report.page import Page
from wsi_fl.report.run import render

__all__ = ["Page", "render"]
