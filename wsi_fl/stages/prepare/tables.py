"""What `tile` and `mosaic` say at their end: a row per site for `--json`, tables for people, and what was set aside."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.slides.patching.quality import KINDS
from wsi_fl.stages.prepare.sources import Quality
from wsi_fl.stages.work.console import Line, Lines, Table, by_site, speed_lines
from wsi_fl.stores.bags import BagMeta
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_csv
from wsi_fl.types import CLASSES, SPLITS, UNLABELLED, BagTable, SetAside, WsiFlError

_NAMED = 20
"""Slides of a site that are named to people; the others are counted."""


def mosaic_row(
    study: Study,
    meta: BagMeta,
    table: BagTable,
    *,
    n_patches: int,
    failed: Sequence[SetAside],
    notes: Mapping[str, str],
    n_slides: int,
) -> dict[str, Any]:
    """Return a site's part of the document of `mosaic` and `import`; a slide without a note has the note ""."""
    counts = np.bincount(table.label, minlength=len(meta.classes))
    return {
        "site": meta.site,
        "slides": n_slides,
        "failed": [asdict(aside) for aside in failed],
        "notes": [{"slide": slide, "note": note} for slide, note in notes.items() if note],
        "bags": len(table),
        "patches": n_patches,
        "classes": dict(zip(meta.classes, counts.tolist(), strict=True)),
        "train": int((table.split == "train").sum()),
        "test": int((table.split == "test").sum()),
        "encoder": meta.encoder,
        "store": study.relative(study.mosaic(meta.site)),
    }


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
        missing = [name for name in CLASSES if not row[name]]
        untested = [name for name in CLASSES if not row["table"]["test"].get(name)]
        if UNLABELLED[0] in row["table"]["train"]:
            continue
        if missing:
            yield Line(f"  {row['site']}: has no {missing[0]} patch at all", "bold yellow")
        elif untested and row["train"]:
            what = "test patch" if len(untested) == len(CLASSES) else f"{untested[0]} patch for testing"
            yield Line(
                f"  {row['site']}: has no {what}; test patients are drawn before slides are opened: set split in its "
                "table, or raise slides.test_fraction",
                "bold yellow",
            )
    if idle := [row["site"] for row in rows if not row["train"]]:
        yield Line(f"not ready ({', '.join(idle)}); see what was set aside, then run `wsi-fl tile` again")
        return
    yield Line(
        f"stores ready ({', '.join(row['store'] for row in rows)}); next: {' && '.join(document['next'])}"
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
    """A table of lines of a name and a number for each site, with their sum."""
    summed = [line and [*line, sum(line[1:])] for line in lines]
    return by_site(title, "", [*(row["site"] for row in rows), "sum"], summed)


def _aside_lines(rows: Sequence[Any], unit: str) -> Lines:
    """Say which slides were set aside, what is to be known of others, and which sites have nothing to learn from."""
    for row in rows:
        aside = [
            f"{one['slide']}{'' if ' patches set aside' in one['reason'] else ' set aside'}: {one['reason']}"
            for one in row["failed"]
        ]
        notes = [f"{one['slide']}: {one['note']}" for one in row.get("notes", ())]
        for said, more in ((aside, "set aside; --json names all"), (notes, "such notes; --json has all")):
            rest = [f"and {len(said) - _NAMED} more {more}"] if len(said) > _NAMED else []
            yield from (Line(f"  {row['site']}: {line}", "yellow") for line in [*said[:_NAMED], *rest])
        if not row["train"]:
            nothing = f"has no training {unit}, so nothing can be trained on it"
            yield Line(f"  {row['site']}: {nothing}", "bold yellow")


def write_quality(path: Path, seen: Mapping[str, Quality]) -> None:
    """Write a line per slide; no file where nothing was set aside and all tissue was found by saturation."""
    if not any(one["aside"] or one["tissue_by"] != "saturation" for one in seen.values()):
        path.unlink(missing_ok=True)
        return
    rows: list[list[object]] = [["slide", "good", *KINDS, "tissue_by", "tissue_gain"]]
    for slide, one in seen.items():
        counts = [one["aside"].get(kind, 0) for kind in KINDS]
        gain = "" if isnan(one["tissue_gain"]) else f"{one['tissue_gain']:.3g}"
        rows.append([slide, one["good"], *counts, one["tissue_by"], gain])
    write_csv(path, rows)


def read_set_aside(path: Path) -> dict[str, dict[str, int]]:
    """Return slide → how many patches were set aside for which fault, as `write_quality` wrote it; {} for no file.

    Raises:
        WsiFlError: when it is another table.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {
                line["slide"]: {kind: n for kind in KINDS if (n := int(line[kind]))}
                for line in csv.DictReader(file)
            }
    except (KeyError, TypeError, ValueError):
        raise WsiFlError(f"{path}: not what `wsi-fl tile` writes; tile the site again") from None


def quality_lines(row: Mapping[str, Any]) -> Lines:
    """Say what patches of a site were set aside for, and where tissue was not found by saturation."""
    where = Path(row["store"]).parent / "quality.csv"
    if aside := row["set_aside"]:
        said = ", ".join(f"{n} {kind}" for kind, n in aside.items())
        yield Line(
            f"  {row['site']}: {sum(aside.values())} patches set aside ({said}); by slide: {where}",
            "yellow",
        )
    for name, one in row["tissue"].items():
        if name != "saturation":
            gain = one["gain"]
            beside = "where saturation finds none" if gain is None else f"{gain:.2g} × that by saturation"
            area = "" if name == "masks" else f", its area {beside}"
            yield Line(
                f"  {row['site']}: tissue of {one['slides']} slides by {name}{area}; by slide: {where}"
            )
