"""The result of `bench` as a page, and on the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from wsi_fl.evidence.bench_sites import EXTERNAL, INTERNAL, MERGED
from wsi_fl.report.formatting import Json, format_number, is_number
from wsi_fl.report.templates import fill_template
from wsi_fl.slides.layouts.common import group_pairs
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.system.files import write_text

_TEST_SETS = {
    EXTERNAL: "external patients",
    MERGED: "the test patients of all hospitals",
    INTERNAL: "each hospital's own test patients",
}
"""Test sets, the most telling one first."""


def write_page(path: Path, document: Json) -> None:
    """Write the page of a benchmark.

    Args:
        document: of `run_benchmark`.
    """
    cells = document["cells"]
    rows = [[*group] for _, group in groupby(cells, lambda gain: (gain["sites"], gain["n"], gain["skew"]))]
    page = {
        "document": document,
        "columns": [_name_method(gain) for gain in rows[0]],
        "rows": rows,
        "most": max(abs(gain["gain"]) for gain in cells),
        "maps": _group_hospitals(document.get("hospitals", [])),
    }
    write_text(path, fill_template("bench", page, Path(__file__).parent))


def _group_hospitals(hospitals: Sequence[Json]) -> list[dict[str, Any]]:
    """Return the hospitals of each test set, the largest first, with the verdicts of each method in words."""
    maps = []
    for test_set, title in _TEST_SETS.items():
        rows = sorted((row for row in hospitals if row["test"] == test_set), key=lambda row: -row["patients"])
        by_site = group_pairs((row["site"], row) for row in rows)
        if rows:
            largest = max(abs(row["gain"]["mean"]) for row in rows)
            verdicts = group_pairs((_name_method(row), row["verdict"]) for row in rows)
            lines = [
                f"{name}: {', '.join(f'{n} {verdict}' for verdict, n in Counter(values).most_common())}"
                for name, values in verdicts.items()
            ]
            maps.append({"id": test_set, "title": title, "by_site": by_site, "most": largest, "verdicts": lines})
    return maps


def _name_method(row: Json) -> str:
    return f"{row['method']}, ε = {row['epsilon']:g}"


def render_bench_lines(document: Json) -> Lines:
    """Yield a row for each cell, method and ε, or for each hospital of the table."""
    maps = _group_hospitals(document.get("hospitals", []))
    if maps:
        yield from _render_hospitals(maps[0], document["score"])
    else:
        yield _tabulate_cells(document["cells"])
        yield TextLine(
            f"{document['seeds']} seeds; a gain is paired with the local head, ± its 95 % interval over seeds"
        )
    yield TextLine(f"{document['rows']}: a line for every seed and hospital; {document['page']}: the map")


def _render_hospitals(hospitals: Json, score: str) -> Lines:
    by_site = hospitals["by_site"]
    names = [_name_method(row) for row in next(iter(by_site.values()))]
    lines = [
        [
            *(site, str(rows[0]["patients"])),
            *map(_format_estimate, (rows[0]["local"], *(row["federated"] for row in rows), rows[0]["pooled"])),
            rows[0]["verdict"],
        ]
        for site, rows in by_site.items()
    ]
    headings = ["hospital", "patients", "local", *names, "pooled", f"verdict on {names[0]}"]
    yield TextTable(f"{score} on {hospitals['title']}, ± half of its 95 % interval", headings, lines)
    yield TextLine("; ".join(hospitals["verdicts"]))


def _format_estimate(estimate: Json) -> str:
    mean = format_number(estimate["mean"], 2)
    return f"{mean} ± {(estimate['high'] - estimate['low']) / 2:.2f}" if is_number(estimate["low"]) else mean


def _tabulate_cells(cells: Sequence[Json]) -> TextTable:
    rows = [
        [
            f"{gain['sites']} × {gain['n']}, {gain['skew']}",
            _name_method(gain),
            *(f"{gain[name]:.3f}" for name in ("local", "federated", "pooled")),
            f"{gain['gain']:+.3f}" + ("" if gain["half_width"] is None else f" ± {gain['half_width']:.3f}"),
            f"{gain['worst_site']:+.3f}",
        ]
        for gain in cells
    ]
    headings = ["hospitals", "method", "local", "federated", "pooled", "gain", "worst site"]
    return TextTable("balanced accuracy", headings, rows)
