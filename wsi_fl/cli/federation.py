"""`wsi-fl federation …`: hospitals that learn together over NVIDIA FLARE, or over a folder that all can reach."""

from __future__ import annotations

import typer

app = typer.Typer(
    no_args_is_help=True, help="Hospitals that learn together: kits, plans, and what joins them."
)
