"""The page of a generator's check: verdict, histograms of projected distances (Fig. 3), projected images (Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from wsi_fl.report import figures
from wsi_fl.report.figures import Chart, palette, png_style
from wsi_fl.report.fill import fill
from wsi_fl.report.pictures import enlarged, patch_uri
from wsi_fl.report.words import number

NAMES = {"before": "without the privacy loss", "after": "with the privacy loss", "real": "real images"}
NAMES |= {"denoiser": "diffusion model", "held_out": "held-out real images"}
PROJECTED = "LPIPS between a training image and its projection"
NEAREST = "Euclidean distance to the nearest training image"
_BINS = 24

Distances = Mapping[str, NDArray[np.float64]]
"""LPIPS of each projected training image by phase, "before" and "after"; or how near the images of a diffusion model,
"denoiser", and "held_out" ones come to training images."""
Rows = Sequence[tuple[str, NDArray[np.uint8]]]
"""("real", "before" or "after"; patches uint8[n, h, w, 3])."""


def render(
    document: Mapping[str, Any], distances: Distances, rows: Rows, samples: Rows, *, axis: str = PROJECTED
) -> str:
    """One HTML document that needs nothing beside it.

    Args:
        document: the verdict, as `synthesize check --json` prints it.
        rows: the same images in every row: real, projected without, projected with.
        samples: some images of each generator.
        axis: what the distances are, `PROJECTED` or `NEAREST`.
    """
    context = {
        "document": document,
        "names": NAMES,
        "chart": histogram(distances, axis),
        "rows": [(NAMES[name], [patch_uri(enlarged(p)) for p in patches]) for name, patches in rows],
        "samples": [(NAMES[name], [patch_uri(enlarged(p)) for p in patches]) for name, patches in samples],
    }
    return fill("check", context, Path(__file__).parent)


def histogram(distances: Distances, axis: str = PROJECTED) -> Chart:
    """Fig. 3 as SVG in the page's colours."""
    colors = {name: figures.site_color(k, len(distances)) for k, name in enumerate(distances)}
    said = [f"{NAMES[name]} median {number(float(np.median(d)), 3)}" for name, d in distances.items()]
    with figures.new_figure(width_in=6.4, height_in=2.9) as (figure, axes):
        _draw(axes, distances, colors, axis)
        svg = figures.to_svg(figure, axis)
    return Chart(svg, f"Histograms: {axis}; {'; '.join(said)}.")


def histogram_png(distances: Distances, axis: str = PROJECTED) -> bytes:
    """Fig. 3 for slides and papers."""
    colors = {name: palette()[f"s{k}"] for k, name in enumerate(distances)}
    with mpl.rc_context(png_style()):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        _draw(figure.add_subplot(), distances, colors, axis)
        return figures.to_png(figure)


def _draw(axes: Axes, distances: Distances, colors: Mapping[str, str], axis: str) -> None:
    everything = np.concatenate(list(distances.values()))
    edges = np.linspace(0.0, float(everything.max()) * 1.05 + 1e-6, _BINS + 1)
    for name, values in distances.items():
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, edges.tolist(), weights=weights, color=colors[name], alpha=0.55, label=NAMES[name])
        axes.axvline(float(np.median(values)), color=colors[name], lw=1.4, ls="--")
    axes.set_xlabel(f"{axis} (dashed: median)")
    axes.set_ylabel("share of images")
    axes.legend(frameon=False, fontsize=8.5)
