"""`export`: a site's bags in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wsi_fl.stages.work.console import say
from wsi_fl.stores.clam import write_clam
from wsi_fl.stores.features import FeatureStore
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError

FORMATS = ("clam",)


def export(study: Study, *, site: str, form: str, out: Path | None = None) -> dict[str, Any]:
    """Writes a site's mosaics for another tool; returns the `--json` document. Nothing leaves this machine."""
    if form not in FORMATS:
        raise UsageError(f"--format {form!r}: use {', '.join(FORMATS)}")
    study.site(site)
    folder = out or study.root / "exports" / form / site
    with FeatureStore(study.mosaic(site)) as store:
        files = write_clam(store, folder)
        bags = len(store)
    return {
        "site": site,
        "format": form,
        "bags": bags,
        "out": study.relative(folder),
        "table": study.relative(files[-1]),
    }


def print_export(document: dict[str, Any]) -> None:
    say(f"{document['bags']} slides in {document['out']}/h5_files, labels in {document['table']}")
    say("  HDF5 alone: CLAM's .pt files are pickles; its data sets read h5_files after load_from_h5(True)")
