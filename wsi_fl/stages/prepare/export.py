"""`export` of a site's bags: features in the layouts of other tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from wsi_fl.stages.site.data import open_bags
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.stores.exchange import LAYOUTS, write_labels
from wsi_fl.stores.exchange.clam import write_clam
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError


def export(
    study: Study, *, site: str, form: str, out: Path | None = None, tensors: bool = False
) -> dict[str, Any]:
    """Write a site's mosaics for another tool; return the `--json` document. Nothing leaves this machine.

    Args:
        tensors: whether CLAM's `.pt` files are written too.

    Raises:
        UsageError: for an unknown format, or `.pt` files of another tool than CLAM.
        WsiFlError: when the site has no feature store, or it does not say how large its patches are on the slides.
    """
    written = {name: layout.write for name, layout in LAYOUTS.items() if layout.write}
    if form not in written:
        raise UsageError(f"--format {form!r}: use {', '.join(written)}")
    if tensors and form != "clam":
        raise UsageError(f"--pt: {form} reads no .pt files; leave it out")
    study.site(site)
    folder = out or study.root / "exports" / form / site
    write = partial(write_clam, tensors=True) if tensors else written[form]
    table = folder / f"{site}.csv"
    with open_bags(study, site, "mosaics") as store:
        files = write(store, folder)
        write_labels(store, table)
    return {
        "site": site,
        "format": form,
        "bags": len(files),
        "out": study.relative(folder),
        "features": study.relative(files[0].parent),
        "table": study.relative(table),
        "pt": tensors,
    }


def export_lines(document: dict[str, Any]) -> Lines:
    """Say where the files are, and what CLAM's users need."""
    yield Line(f"{document['bags']} slides in {document['features']}, labels in {document['table']}")
    if document["format"] == "clam" and not document["pt"]:
        yield Line("  CLAM's training reads .pt files: add --pt, or call load_from_h5(True) on its data set")
