"""What `tile` and `mosaic` say at their end: a row per site for `--json`, tables for people, and what was set aside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from wsi_fl.stages.prepare.quality import Quality, quality_lines, quality_row
from wsi_fl.stages.work.console import Line, Lines, Table, by_site, say, speed_lines
from wsi_fl.stores.columns import Counts
from wsi_fl.study.folder import Study
from wsi_fl.types import CLASSES, SPLITS, UNLABELLED, BagTable, SetAside, SlideRecord

_NAMED = 20
"""Slides of a site that are named to people; the others are counted."""


def tile_row(
    study: Study,
    site: str,
    found: Counts,
    failed: Sequence[SetAside],
    seen: Mapping[str, Quality],
    *,
    n_slides: int,
    seconds: float,
) -> dict[str, Any]:
    """Return a site's part of the document of `tile`.

    Args:
        found: patches of each class by split.
        seen: the quality of each slide.
    """
    names = CLASSES if len(found["train"]) > 1 else UNLABELLED
    counts = {split: {name: int(found[split][k]) for k, name in enumerate(names)} for split in SPLITS}
    return {
        "site": site,
        "slides": n_slides,
        "failed": [asdict(aside) for aside in failed],
        "patches": sum(sum(c.values()) for c in counts.values()),
        **{name: sum(c.get(name, 0) for c in counts.values()) for name in CLASSES},
        "train": sum(counts["train"].values()),
        "test": sum(counts["test"].values()),
        **quality_row(seen),
        "store": study.relative(study.store(site)),
        "seconds": seconds,
        "table": counts,
    }


def mosaic_row(
    study: Study,
    site: str,
    table: BagTable,
    *,
    n_patches: int,
    encoder: str,
    classes: Sequence[str],
    failed: Sequence[SetAside],
    notes: Sequence[Mapping[str, str]],
    n_slides: int,
    seconds: float,
) -> dict[str, Any]:
    """Return a site's part of the document of `mosaic`."""
    counts = np.bincount(table.label, minlength=len(classes))
    return {
        "site": site,
        "slides": n_slides,
        "failed": [asdict(aside) for aside in failed],
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


def say_tables(site: str, said: Iterable[str]) -> None:
    """Say what became of the rows of a site's tables."""
    for line in said:
        say(f"  {site}: {line}")


def weak_note(records: Sequence[SlideRecord]) -> str:
    """Say how many slides lend their label to all their patches; "" when none does."""
    n = sum(record.supervision == "weak" for record in records)
    return (
        f"{n} slides have no annotation: their patches take the slide's label (weak supervision)" if n else ""
    )


def storage_note(contents: Sequence[str], wanted: str) -> str:
    """Say how many slides could not be stored as their own bytes; "" when all could."""
    n = sum(content != wanted for content in contents)
    return (
        f"{n} of {len(contents)} slides are stored raw: their patches are not whole JPEG tiles of theirs"
        if n
        else ""
    )


def first_reason(failed: Sequence[SetAside]) -> str:
    """Say what went wrong first at a site that gave nothing."""
    return f"the first: {failed[0].slide}: {failed[0].reason}" if failed else "the first: it has no slides"


def tile_lines(document: dict[str, Any]) -> Lines:
    """Yield the table of the paper (Table 1), labels × train and test × sites, and what was set aside."""
    rows = document["sites"]
    lines: list[list[Any] | None] = []
    for split in SPLITS:
        counts = [row["table"][split] for row in rows]
        if any(sum(count.values()) for count in counts):
            names = dict.fromkeys(name for count in counts for name in count)
            lines += [[f"{split} {name}", *(count.get(name, 0) for count in counts)] for name in names]
            lines += [[f"{split} sum", *(sum(count.values()) for count in counts)], None]
    yield _summed("patches", rows, lines)
    yield from _aside_lines(rows, "patch")
    for row in rows:
        yield from quality_lines(row)
        if UNLABELLED[0] in row["table"]["train"]:
            continue
        if missing := [name for name in CLASSES if not row[name]]:
            yield Line(f"  {row['site']}: has no {missing[0]} patch at all", "bold yellow")
        else:
            yield from _untested_lines(row)
    if idle := [row["site"] for row in rows if not row["train"]]:
        yield Line(f"not ready ({', '.join(idle)}); see what was set aside, then run `wsi-fl tile` again")
        return
    yield Line(
        f"stores ready ({', '.join(row['store'] for row in rows)}); next: {' && '.join(document['next'])}"
    )


def _untested_lines(row: Mapping[str, Any]) -> Lines:
    """Say which label a site will not be tested on."""
    untested = [name for name in CLASSES if not row["table"]["test"][name]]
    if untested and row["train"]:
        what = "test patch" if len(untested) == len(CLASSES) else f"{untested[0]} patch for testing"
        yield Line(
            f"  {row['site']}: has no {what}; test patients are drawn before slides are opened: set split in its "
            "table, or raise slides.test_fraction",
            "bold yellow",
        )


def mosaic_lines(document: dict[str, Any]) -> Lines:
    """Yield bags by class and split of every site, and what was set aside."""
    rows = document["sites"]
    names = dict.fromkeys(name for row in rows for name in row["classes"])
    classes = [[name, *(row["classes"].get(name, 0) for row in rows)] for name in names]
    splits = [[key, *(row[key] for row in rows)] for key in ("train", "test", "patches")]
    yield _summed("mosaics", rows, [*classes, None, *splits])
    yield from _aside_lines(rows, "slide")
    yield from speed_lines(document.get("speed", ()))
    stores = ", ".join(row["store"] for row in rows)
    yield Line(f"mosaics ready ({stores}; {rows[0]['encoder']}); next: wsi-fl train --set train.data=mosaics")


def _summed(title: str, rows: Sequence[Any], lines: Iterable[list[Any] | None]) -> Table:
    """Print lines of a name and a number for each site as a table, with their sum."""
    summed = [line and [*line, sum(line[1:])] for line in lines]
    return by_site(title, "", [*(row["site"] for row in rows), "sum"], summed)


def _aside_lines(rows: Sequence[Any], unit: str) -> Lines:
    """Say which slides were set aside, what is to be known of others, and which sites have nothing to learn from."""
    for row in rows:
        for aside in row["failed"][:_NAMED]:
            whole = "" if " patches set aside" in aside["reason"] else " set aside"
            yield Line(f"  {row['site']}: {aside['slide']}{whole}: {aside['reason']}", "yellow")
        if len(row["failed"]) > _NAMED:
            yield Line(
                f"  {row['site']}: and {len(row['failed']) - _NAMED} more set aside; --json names all",
                "yellow",
            )
        notes = row.get("notes", ())
        for one in notes[:_NAMED]:
            yield Line(f"  {row['site']}: {one['slide']}: {one['note']}", "yellow")
        if len(notes) > _NAMED:
            yield Line(
                f"  {row['site']}: and {len(notes) - _NAMED} more such notes; --json has all", "yellow"
            )
        if not row["train"]:
            yield Line(
                f"  {row['site']}: has no training {unit}, so nothing can be trained on it",
                "bold yellow",
            )
