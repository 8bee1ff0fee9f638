"""Charts as inline SVG, with text in the page's font and colours as the page's CSS variables."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from wsi_fl.learning.metrics import mean_of_known
from wsi_fl.report.words import number

# Matplotlib needs real colours; these stand for CSS variables and are replaced in the finished SVG, so that one chart
# serves light, dark and print.
INK, MUTED, LINE, PAPER, ACCENT = "#010101", "#010102", "#010103", "#010104", "#010105"
N_COLORS = 8
"""Largest number of sites with colours of their own; of more sites lines are faint and the mean is strong."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "wsi-fl",
    "text.parse_math": False,  # a site may be called $C_1$
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}

TOKENS = {
    **{"ink": INK, "muted": MUTED, "line": LINE, "paper": PAPER},
    **{f"s{k}": f"#0202{k:02x}" for k in range(N_COLORS)},
}
"""Placeholders of the page's colours by the name of their variable."""

Points = Sequence[tuple[float, float]]
"""(x, y) of a curve, in order of x."""


@dataclass(frozen=True)
class Chart:
    """An SVG element and its text alternative."""

    svg: str
    alt: str


@dataclass(frozen=True)
class Bar:
    """One row of a comparison: mean ± sd; ``sites`` are (colour, value) of single sites."""

    label: str
    mean: float
    sd: float | None
    dp: bool
    this: bool
    sites: Sequence[tuple[str, float]] = ()


def palette() -> dict[str, str]:
    """Return the colours of the page's light theme by the name of their variable (``ink``, ``s0``, …)."""
    css = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    light = css[: css.index("@media")]
    return {name: color for name, color in re.findall(r"--(\w+): (#\w+)", light) if name in TOKENS}


def png_style() -> Any:
    """Return Matplotlib's settings for a figure in the style of the page's charts, in real colours."""
    real = {TOKENS[name]: color for name, color in palette().items()}
    style = {key: real.get(value, value) for key, value in _STYLE.items() if isinstance(value, str)}
    return {**_STYLE, **style, "figure.dpi": 160, "savefig.facecolor": palette()["paper"]}


def slots(sites: Sequence[str]) -> dict[str, int]:
    """Return the number of each site's colour, ``s0``, …; 0 for all of more than N_COLORS sites."""
    return {site: 0 if len(sites) > N_COLORS else k for k, site in enumerate(sites)}


def band(curves_: Iterable[Points]) -> list[tuple[float, float, float]]:
    """Return (x, mean, standard deviation) over curves at every common x.

    >>> mean_band([[(1, 0.5), (2, 0.6)], [(1, 0.75)]])
    [(1, 0.625, 0.125)]
    """
    columns = [dict(points) for points in curves_ if points]
    shared = sorted(set.intersection(*(set(c) for c in columns))) if columns else []
    values = {x: [column[x] for column in columns] for x in shared}
    return [(x, float(np.mean(v)), float(np.std(v))) for x, v in values.items()]


def curves(
    series: Mapping[str, Points],
    colors: Mapping[str, str],
    what: str,
    *,
    ylim: tuple[float, float] | None = None,
    reference: tuple[str, float] | None = None,
) -> Chart:
    """Return a chart with a line per site over rounds, their mean for two or more, and a dashed reference."""
    many = len(series) > N_COLORS
    mean = [(x, y) for x, y, _ in band(series.values())] if len(series) > 1 else []
    with new_figure() as (figure, axes):
        _lines(axes, series, colors, width=1.5)
        if mean:
            axes.plot(*zip(*mean, strict=True), color=INK, lw=2.4, **_marker(mean))
        if reference:
            _dashed(axes, reference[1], reference[0])
        if ylim:
            axes.set_ylim(*ylim)
        round_axis(axes, series)
        said = _ends({**({} if many else series), **({"mean": mean} if mean else {})})
        return Chart(to_svg(figure, what), f"{what} by round. {said}")


def budget_curves(
    series: Mapping[str, Points], colors: Mapping[str, str], budgets: Mapping[str, float], what: str
) -> Chart:
    """Return a chart of privacy spent over rounds, with the budget of each site as a dashed line.

    A budget beyond four times the largest value is in the text alternative only, since it would flatten the curves.
    """
    top = max(y for points in series.values() for _, y in points)
    near = {site: b for site, b in budgets.items() if b <= 4 * top}
    shared = len(set(budgets.values())) == 1 and len(budgets) == len(series)
    with new_figure() as (figure, axes):
        _lines(axes, series, colors)
        for budget in sorted(set(near.values())):
            owners = [s for s, b in near.items() if b == budget]
            words = "budget" if shared or len(series) > N_COLORS else f"budget {', '.join(owners)}"
            color = colors[owners[0]] if len(owners) == 1 < len(series) else INK
            _dashed(axes, budget, f"{words} {budget:g}", color)
        axes.set_ylim(0, 1.12 * max([top, *near.values()]))
        round_axis(axes, series)
        limits = "; ".join(f"budget of {site} {b:g}" for site, b in budgets.items()) or "no budget set"
        return Chart(to_svg(figure, what), f"{what} by round. {_ends(series)} {limits}.")


def comparison(rows: Sequence[Bar], what: str, measure: str) -> Chart:
    """Return a chart of mean ± sd by run; hollow without DP; the sites of this run as small dots."""
    left_in = min(1.75, 0.2 + 0.07 * max(len(shortened(row.label)) for row in rows))
    with new_figure(height_in=0.42 + 0.34 * len(rows), left_in=left_in, bottom_in=0.25) as (figure, axes):
        for y, row in enumerate(rows):
            color = ACCENT if row.this else MUTED
            if row.this:
                axes.axhspan(y - 0.5, y + 0.5, color=ACCENT, alpha=0.09, lw=0)
            mark(axes, row.mean, y, [row.sd or 0] * 2, color, fill=color if row.dp else PAPER)
            for site_color_, value in row.sites:
                axes.plot(value, y + 0.3, ".", color=site_color_, ms=4, alpha=0.9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        names = [shortened(row.label) for row in rows]
        name_rows(axes, names, [ACCENT if row.this else INK for row in rows], [row.this for row in rows])
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.margins(x=0.08)
        said = "; ".join(f"{r.label} {number(r.mean)}{f' ± {number(r.sd)}' if r.sd else ''}" for r in rows)
        return Chart(to_svg(figure, what), f"{measure}: {said}.")


def reliability(series: Mapping[str, Points], colors: Mapping[str, str], what: str) -> Chart:
    """Return a reliability diagram, accuracy against confidence; the dashed diagonal is perfect calibration."""
    many = len(series) > N_COLORS
    lowest = min((x for points in series.values() for x, _ in points), default=0.0)
    start = 0.5 if lowest >= 0.5 else 0.0
    with new_figure(width_in=4.4 if many else 3.3) as (figure, axes):
        axes.plot([start, 1], [start, 1], color=MUTED, lw=1, ls=(0, (4, 3)))
        _lines(axes, series, colors, marker="" if many else "o")
        axes.set(xlim=(start, 1.01), ylim=(0, 1.03), xlabel="confidence", ylabel="accuracy")
        axes.set_xticks(np.linspace(start, 1, 6))
        pairs = "; ".join(f"{number(x, 2)} → {number(y, 2)}" for p in list(series.values())[:1] for x, y in p)
        alt = f"{what}: confidence against accuracy. {'' if many else pairs}".strip()
        return Chart(to_svg(figure, what), alt)


def matrix(values: Sequence[Sequence[float | None]], limits: tuple[float, float], what: str) -> Chart:
    """Return a heatmap without numbers for many sites; rows are models, columns test parts."""
    grid = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    with new_figure(height_in=4.0, width_in=4.4) as (figure, axes):
        drawn = axes.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], interpolation="nearest")
        axes.set(xlabel="test part of site (in order of the table)", ylabel="model of site")
        axes.grid(visible=False)
        bar = figure.colorbar(drawn, ax=axes, fraction=0.045)
        bar.outline.set_visible(False)
        size, mean = f"{len(grid)} models by {grid.shape[1]} test parts", mean_of_known(grid[~np.isnan(grid)])
        return Chart(to_svg(figure, what), f"{what}: {size}, mean {number(mean)}.")


def _lines(
    axes: Axes, series: Mapping[str, Points], colors: Mapping[str, str], width: float = 1.8, marker: str = ""
) -> None:
    """Draw a line per site; faint ones where there are more sites than colours."""
    many = len(series) > N_COLORS
    for site, points in series.items():
        shown = {"marker": marker, "ms": 4} if marker else _marker(points)
        alpha, lw = (0.3, 0.9) if many else (0.95, width)
        axes.plot(*zip(*points, strict=True), color=colors[site], alpha=alpha, lw=lw, **shown)


def mark(
    axes: Axes, x: float, y: float, below_above: Sequence[float], color: str, *, fill: str, marker: str = "o"
) -> None:
    """Draw a value and its interval, `below_above` of it, in the row y."""
    axes.errorbar(
        x, y, xerr=[[one] for one in below_above], color=color, marker=marker, ms=7, mec=color, mew=1.6,
        mfc=fill, elinewidth=1.7, zorder=4,
    )  # fmt: skip


def name_rows(axes: Axes, names: Sequence[str], colors: Sequence[str], bold: Sequence[bool]) -> None:
    """Name the rows of a chart on its left."""
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", visible=False)
    for text, color, heavy in zip(axes.get_yticklabels(), colors, bold, strict=True):
        text.set_color(color)
        text.set_fontweight("bold" if heavy else "normal")


def to_png(figure: Figure) -> bytes:
    """Return the figure as a PNG without metadata."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


@contextmanager
def new_figure(
    width_in: float = 4.4, height_in: float = 2.5, left_in: float = 0.55, bottom_in: float = 0.45
) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure with margins fixed in inches, so that plots in a row are aligned."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The browser's fonts draw the text; what matplotlib's own font lacks does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(width_in, height_in))
        bottom, right = bottom_in / height_in, 0.12 / width_in
        left = left_in / width_in
        axes = figure.add_axes((left, bottom, 1 - left - right, 1 - bottom - 0.12 / height_in))
        yield figure, axes


def to_svg(figure: Figure, what: str) -> str:
    """Return the figure as an ``<svg>`` element without header and styles, with unique ids."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg )", "", out.getvalue(), count=1, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" focusable="false">', svg, count=1)
    svg = re.sub(r"font: (?:bold|[6-9]00) ([\d.]+)px [^;\"]*", r"font-weight: 600; font-size: \1px", svg)
    svg = re.sub(r"font: (?:\d+ )?([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for name, color in {**TOKENS, "accent": ACCENT}.items():
        svg = svg.replace(color, f"var(--{name})")
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    prefix = re.sub(r"\W+", "-", what.lower())

    def rename(found: re.Match[str]) -> str:
        return f' id="{prefix}-{found[1]}"' if found[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', rename, svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}-", svg)
    return re.sub(r">\s+<", "><", svg).strip()


def _marker(points: Points) -> dict[str, Any]:
    return {"marker": "o", "ms": 3.5} if len(points) < 4 else {}


def _dashed(axes: Axes, y: float, words: str, color: str = MUTED) -> None:
    axes.axhline(y, color=color, lw=1.1, ls=(0, (4, 3)))
    corner = (0.01, y)  # free of curves that rise
    how: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(words, corner, (0, 3), ha="left", va="bottom", fontsize=8.5, color=color, **how)


def round_axis(axes: Axes, series: Mapping[str, Points]) -> None:
    every = [x for points in series.values() for x, _ in points] or [1]
    first, last = min(every), max(every)
    pad = max(0.02 * (last - first), 0.3 if last == first else 0)
    axes.set_xlim(first - pad, last + pad)
    axes.set_xlabel("round", loc="right", labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True) if last > first else FixedLocator([last]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _ends(series: Mapping[str, Points]) -> str:
    parts = [f"{name} from {number(p[0][1])} to {number(p[-1][1])}" for name, p in series.items() if p]
    return "; ".join(parts) + "."


def shortened(label: str, limit: int = 22) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"
