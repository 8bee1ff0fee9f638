"""The sections on what there was to learn from, and on the sets that models were tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wsi_fl.report.page import Json, Page


def data(page: Page) -> dict[str, Any]:
    """Examples per site, split and class, with sums; the splits any store has, in their usual order."""
    tables = {s["site"]: s.get("table") or {} for s in page.stores}
    splits = [x for x in ("train", "val", "test") if any(x in t for t in tables.values())]
    sums = {
        (split, label): sum(t.get(split, {}).get(label) or 0 for t in tables.values())
        for split in splits
        for label in page.classes
    }
    row_sums = {
        (site, split): sum(table[split].get(label) or 0 for label in page.classes)
        for site, table in tables.items()
        for split in splits
        if split in table
    }
    geometries = {(s.get("size_px"), s.get("mpp")) for s in page.stores}
    return {
        "splits": splits,
        "sums": sums,
        "row_sums": row_sums,
        "patients": sum(s.get("patients") or 0 for s in page.stores),
        "slides": sum(s.get("slides") or 0 for s in page.stores),
        "geometry": geometries.pop() if len(geometries) == 1 else None,
        "encoder": next((s["encoder"] for s in page.stores if s.get("encoder")), None),
        "single": _of_one_site(tables, page.classes),
    }


def _of_one_site(tables: Mapping[str, Json], classes: Sequence[str]) -> list[tuple[str, str]]:
    """(class, site) of the classes that only one site of several has."""
    holders = {
        label: [site for site, table in tables.items() if any(counts.get(label) for counts in table.values())]
        for label in classes
    }
    return [(label, of[0]) for label, of in holders.items() if len(of) == 1 and len(tables) > 1]


def test_sets(page: Page) -> list[dict[str, Any]]:
    """Mean ± sd over sites on the internal and the external test sets; empty without others' test sets."""
    evaluation = page.evaluation or {}
    if not evaluation.get("external"):
        return []
    named = (
        ("Internal", "internal", "each model on its own site's test part"),
        ("External", "external", "each model on the test parts of all the other sites"),
        ("Merged", "merged", "each model on the test parts of all sites"),
    )
    return [{"name": name, "what": what, **evaluation[key]} for name, key, what in named]


def tumor_types(evaluated: Sequence[Json]) -> list[dict[str, Any]]:
    """Per tumour type: slides, and mean ± sd over sites of both accuracies on the set of the headline."""
    kinds = sorted({kind for site in evaluated for kind in site.get("tumor_types") or {}})
    found = []
    for kind in kinds:
        rows = [site["tumor_types"][kind] for site in evaluated if kind in (site.get("tumor_types") or {})]
        means = {key: _spread([row[key] for row in rows]) for key in ("accuracy", "macro_accuracy")}
        found.append({"name": kind, "n": max(row["n"] for row in rows), **means})
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values))}
