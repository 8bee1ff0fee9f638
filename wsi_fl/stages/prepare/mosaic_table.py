"""What `mosaic` says at its end: bags by class and site, and what was set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wsi_fl.stages.work.console import say
from wsi_fl.stores.features import FeatureStore
from wsi_fl.study.folder import Study
from wsi_fl.types import BagTable, SetAside


def row_of(
    study: Study,
    site: str,
    table: BagTable,
    *,
    classes: Sequence[str],
    failed: Sequence[SetAside],
    notes: Sequence[Mapping[str, str]],
    n_slides: int,
    seconds: float,
) -> dict[str, Any]:
    """One site of the `--json` document."""
    counts = np.bincount(table.label, minlength=len(classes))
    with FeatureStore(study.mosaic(site)) as store:
        n_patches, encoder = sum(len(store.bag(k).features) for k in range(len(store))), store.meta.encoder
    return {
        "site": site,
        "slides": n_slides,
        "failed": [{"slide": aside.slide, "reason": aside.reason} for aside in failed],
        "notes": list(notes),
        "bags": len(table),
        "patches": n_patches,
        "classes": {name: int(counts[k]) for k, name in enumerate(classes)},
        "train": int((table.split == "train").sum()),
        "test": int((table.split == "test").sum()),
        "encoder": encoder,
        "store": study.relative(study.mosaic(site)),
        "seconds": seconds,
    }


def print_mosaic(document: dict[str, Any]) -> None:
    """Bags by class and split of every site, and what was set aside."""
    from rich.table import Table

    from wsi_fl.stages.work.console import stderr

    rows = document["sites"]
    table = Table(title="mosaics", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["site"], justify="right")
    table.add_column("sum", justify="right")
    for name in rows[0]["classes"]:
        values = [row["classes"][name] for row in rows]
        table.add_row(name, *map(str, values), str(sum(values)))
    table.add_section()
    for key in ("train", "test", "patches"):
        values = [row[key] for row in rows]
        table.add_row(key, *map(str, values), str(sum(values)))
    stderr.print(table)
    for row in rows:
        for aside in row["failed"]:
            whole = "" if " patches set aside" in aside["reason"] else " set aside"
            say(f"  {row['site']}: {aside['slide']}{whole}: {aside['reason']}", style="yellow")
        for one in row["notes"]:
            say(f"  {row['site']}: {one['slide']}: {one['note']}", style="yellow")
        if not row["train"]:
            say(
                f"  {row['site']}: has no training slide, so nothing can be trained on it",
                style="bold yellow",
            )
    stores = ", ".join(row["store"] for row in rows)
    say(f"mosaics ready ({stores}; {rows[0]['encoder']}); next: wsi-fl train --set train.data=mosaics")
