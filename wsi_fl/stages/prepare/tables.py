"""What `tile` says at its end: the table of the paper (Table 1), and what was set aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wsi_fl.stages.work.console import say
from wsi_fl.stores.columns import Counts
from wsi_fl.study.folder import Study
from wsi_fl.types import (
    CLASSES,
    SPLITS,
    SetAside,
    SlideRecord,
)


def row_of(
    study: Study, site: str, found: Counts, failed: Sequence[SetAside], n_slides: int, seconds: float
) -> dict[str, Any]:
    """One site of the `--json` document; `found` holds the patches of each class by split."""
    counts = {split: {name: int(found[split][k]) for k, name in enumerate(CLASSES)} for split in SPLITS}
    return {
        "site": site,
        "slides": n_slides,
        "failed": [{"slide": aside.slide, "reason": aside.reason} for aside in failed],
        "patches": sum(sum(c.values()) for c in counts.values()),
        "healthy": sum(c["healthy"] for c in counts.values()),
        "tumor": sum(c["tumor"] for c in counts.values()),
        "train": sum(counts["train"].values()),
        "test": sum(counts["test"].values()),
        "store": study.relative(study.store(site)),
        "seconds": seconds,
        "table": counts,
    }


def weak_note(records: Sequence[SlideRecord]) -> str:
    """Says how many slides lend their label to all their patches."""
    n = sum(record.supervision == "weak" for record in records)
    return (
        f"{n} slides have no annotation: their patches take the slide's label (weak supervision)" if n else ""
    )


def storage_note(contents: Sequence[str], wanted: str) -> str:
    """Says how many slides could not be stored as their own bytes."""
    n = sum(content != wanted for content in contents)
    return (
        f"{n} of {len(contents)} slides are stored raw: their patches are not whole JPEG tiles of theirs"
        if n
        else ""
    )


def print_tile(document: dict[str, Any]) -> None:
    """The table of the paper (Table 1): labels × train/test × sites, and what was set aside."""
    from rich.table import Table

    from wsi_fl.stages.work.console import stderr

    rows = document["sites"]
    table = Table(title="patches", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["site"], justify="right")
    table.add_column("sum", justify="right")
    for split in SPLITS:
        if not any(sum(row["table"][split].values()) for row in rows):
            continue
        for name in CLASSES:
            values = [row["table"][split][name] for row in rows]
            table.add_row(f"{split} {name}", *map(str, values), str(sum(values)))
        totals = [sum(row["table"][split].values()) for row in rows]
        table.add_row(f"{split} sum", *map(str, totals), str(sum(totals)), style="bold", end_section=True)
    stderr.print(table)
    for row in rows:
        for aside in row["failed"]:
            whole = "" if " patches set aside" in aside["reason"] else " set aside"
            say(f"  {row['site']}: {aside['slide']}{whole}: {aside['reason']}", style="yellow")
        if not row["train"]:
            say(
                f"  {row['site']}: has no training patch, so nothing can be trained on it",
                style="bold yellow",
            )
        missing = [name for name in CLASSES if not row[name]]
        if missing:
            say(f"  {row['site']}: has no {missing[0]} patch at all", style="bold yellow")
    say(f"stores ready ({', '.join(row['store'] for row in rows)}); next: {' && '.join(document['next'])}")
