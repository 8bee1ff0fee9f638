"""Draw the packages and their imports: docs/explanation/architecture.md and .svg; `make docs` runs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

import grimp

FOLDER = Path(__file__).parent / "explanation"
EXTENSIONS = ("oneshot", "evidence", "synthesis", "viewer", "hospitals", "demo")
"""Packages that join the core by entry points."""
_WIDTH, _LAYER, _BOX_WIDTH, _BOX_HEIGHT = 860, 78, 92, 32

Imports = Mapping[str, frozenset[str]]
"""Package → the packages that it imports."""

_PAGE = """\
# Architecture

The drawing and the table are generated from the imports, and a test compares them with the code. What each package
holds is in [ARCHITECTURE.md](../../ARCHITECTURE.md), with the order of a run and the places where things are added.

![Packages in layers; arrows are imports](architecture.svg)

An arrow goes from a package to one that it imports. Arrows that follow from others are left out: who imports `stages`
may import all below it. Nothing points upwards. Blue packages are extensions, which the core knows by their entry
points alone.

| package | imports |
|---|---|
{rows}
"""


def find_imports() -> Imports:
    """Return the imports between the packages and modules directly below `wsi_fl`."""
    graph = grimp.build_graph("wsi_fl", cache_dir=None)
    imports: defaultdict[str, set[str]] = defaultdict(set)
    for importer in graph.modules - {"wsi_fl"}:
        package = importer.split(".")[1]
        imported = {name.split(".")[1] for name in graph.find_modules_directly_imported_by(importer) if "." in name}
        imports[package] |= imported - {package}
    return {package: frozenset(imports[package]) for package in sorted(imports)}


def assign_layers(imports: Imports) -> list[list[str]]:
    """Return the packages in layers from the lowest on, each above all that it imports; CycleError for a circle."""
    level: dict[str, int] = {}
    for package in TopologicalSorter(imports).static_order():
        level[package] = 1 + max((level[name] for name in imports[package]), default=-1)
    layers: list[list[str]] = [[] for _ in range(1 + max(level.values()))]
    for package in sorted(level):
        layers[level[package]].append(package)
    return layers


def drop_implied(imports: Imports) -> Iterator[tuple[str, str]]:
    """Yield the imports (importer, imported) that do not follow from others."""
    reachable: dict[str, set[str]] = {}
    for package in TopologicalSorter(imports).static_order():
        reachable[package] = set(imports[package]).union(*(reachable[name] for name in imports[package]))
    for package, imported in imports.items():
        for name in sorted(imported):
            if not any(name in reachable[other] for other in imported - {name}):
                yield package, name


def draw(imports: Imports) -> str:
    """Return the packages as boxes in layers, and the arrows between them, as SVG."""
    layers = assign_layers(imports)
    height = _LAYER * len(layers)
    places: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(layers):
        for k, name in enumerate(names):
            shift = _BOX_WIDTH * 0.3 * (-1) ** level  # arrows past a layer go beside its boxes
            places[name] = (_WIDTH * (k + 0.5) / len(names) + shift, height - _LAYER * (level + 0.5))
    arrows = [
        f'<line x1="{x1:.0f}" y1="{y1 + _BOX_HEIGHT / 2:.0f}" x2="{x2:.0f}" y2="{y2 - _BOX_HEIGHT / 2 - 3:.0f}"/>'
        for (x1, y1), (x2, y2) in ((places[package], places[name]) for package, name in drop_implied(imports))
    ]
    boxes = [
        f'<rect class="{"extension" if name in EXTENSIONS else "core"}" x="{x - _BOX_WIDTH / 2:.0f}" '
        f'y="{y - _BOX_HEIGHT / 2:.0f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}">{escape(name)}</text>'
        for name, (x, y) in sorted(places.items())
    ]
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="Packages of wsi-fl in layers, and their imports">',
        "<style>rect.core{fill:#fff;stroke:#444} rect.extension{fill:#dcebfb;stroke:#26629e} "
        "line{stroke:#888;marker-end:url(#head)} text{font:14px sans-serif;text-anchor:middle;fill:#222}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        '<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 6 3 0 6z" fill="#888"/></marker></defs>',
        *arrows, *boxes, "</svg>\n",
    ))  # fmt: skip


def render_page(imports: Imports) -> str:
    """Return the page with the table of imports, from the highest layer down."""
    names = [name for layer in reversed(assign_layers(imports)) for name in layer]
    rows = (f"| `{name}` | {', '.join(sorted(imports[name])) or '–'} |" for name in names)
    return _PAGE.format(rows="\n".join(rows))


def render_files() -> dict[Path, str]:
    """Return the texts of the page and the drawing by their paths."""
    imports = find_imports()
    return {FOLDER / "architecture.md": render_page(imports), FOLDER / "architecture.svg": draw(imports)}


if __name__ == "__main__":
    for path, text in render_files().items():
        path.write_text(text, encoding="utf-8")
