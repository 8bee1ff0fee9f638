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

from wsi_fl.data.metrics import mean_of_available
from wsi_fl.report.formatting import format_number

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


def load_palette() -> dict[str, str]:
    """Return the colours of the page's light theme by the name of their variable (``ink``, ``s0``, …)."""
    css = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    light = css[: css.index("@media")]
    return {name: color for name, color in re.findall(r"--(\w+): (#\w+)", light) if name in TOKENS}


def build_png_style() -> Any:
    """Return Matplotlib's settings for a figure in the style of the page's charts, in real colours."""
    real = {TOKENS[name]: color for name, color in load_palette().items()}
    style = {key: real.get(value, value) for key, value in _STYLE.items() if isinstance(value, str)}
    return {**_STYLE, **style, "figure.dpi": 160, "savefig.facecolor": load_palette()["paper"]}


def assign_color_slots(sites: Sequence[str]) -> dict[str, int]:
    """Return the number of each site's colour, ``s0``, …; 0 for all of more than N_COLORS sites."""
    return {site: 0 if len(sites) > N_COLORS else k for k, site in enumerate(sites)}


def mean_band(curves: Iterable[Points]) -> list[tuple[float, float, float]]:
    """Return (x, mean, standard deviation) over curves at every common x.

    >>> mean_band([[(1, 0.5), (2, 0.6)], [(1, 0.75)]])
    [(1, 0.625, 0.125)]
    """
    columns = [dict(points) for points in curves if points]
    shared = sorted(set.intersection(*(set(c) for c in columns))) if columns else []
    values = {x: [column[x] for column in columns] for x in shared}
    return [(x, float(np.mean(v)), float(np.std(v))) for x, v in values.items()]


def plot_curves(
    series: Mapping[str, Points],
    colors: Mapping[str, str],
    title: str,
    *,
    ylim: tuple[float, float] | None = None,
    reference: tuple[str, float] | None = None,
) -> Chart:
    """Return a chart with a line per site over rounds, their mean for two or more, and a dashed reference."""
    many = len(series) > N_COLORS
    mean = [(x, y) for x, y, _ in mean_band(series.values())] if len(series) > 1 else []
    with open_figure() as (figure, axes):
        _draw_lines(axes, series, colors, width=1.5)
        if mean:
            axes.plot(*zip(*mean, strict=True), color=INK, lw=2.4, **_marker_style(mean))
        if reference:
            _draw_dashed_line(axes, reference[1], reference[0])
        if ylim:
            axes.set_ylim(*ylim)
        format_round_axis(axes, series)
        ends_text = _ends_text({**({} if many else series), **({"mean": mean} if mean else {})})
        return Chart(render_svg(figure, title), f"{title} by round. {ends_text}")


def plot_budget_curves(
    series: Mapping[str, Points], colors: Mapping[str, str], budgets: Mapping[str, float], title: str
) -> Chart:
    """Return a chart of privacy spent over rounds, with the budget of each site as a dashed line.

    A budget beyond four times the largest value is in the text alternative only, since it would flatten the curves.
    """
    top = max(y for points in series.values() for _, y in points)
    drawn_budgets = {site: b for site, b in budgets.items() if b <= 4 * top}
    shared = len(set(budgets.values())) == 1 and len(budgets) == len(series)
    with open_figure() as (figure, axes):
        _draw_lines(axes, series, colors)
        for budget in sorted(set(drawn_budgets.values())):
            owners = [s for s, b in drawn_budgets.items() if b == budget]
            words = "budget" if shared or len(series) > N_COLORS else f"budget {', '.join(owners)}"
            color = colors[owners[0]] if len(owners) == 1 < len(series) else INK
            _draw_dashed_line(axes, budget, f"{words} {budget:g}", color)
        axes.set_ylim(0, 1.12 * max([top, *drawn_budgets.values()]))
        format_round_axis(axes, series)
        limits = "".join(f" Budget of {site} {b:g}." for site, b in budgets.items())
        return Chart(render_svg(figure, title), f"{title} by round. {_ends_text(series)}{limits}")


def plot_bars(rows: Sequence[Bar], title: str, measure: str) -> Chart:
    """Return a chart of mean ± sd by run; hollow without DP; the sites of this run as small dots."""
    left_in = min(1.75, 0.2 + 0.07 * max(len(shorten_label(row.label)) for row in rows))
    with open_figure(height_in=0.42 + 0.34 * len(rows), left_in=left_in, bottom_in=0.25) as (figure, axes):
        for y, row in enumerate(rows):
            color = ACCENT if row.this else MUTED
            if row.this:
                axes.axhspan(y - 0.5, y + 0.5, color=ACCENT, alpha=0.09, lw=0)
            draw_mark(axes, row.mean, y, [row.sd or 0] * 2, color, fill=color if row.dp else PAPER)
            for site_color_, value in row.sites:
                axes.plot(value, y + 0.3, ".", color=site_color_, ms=4, alpha=0.9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        names = [shorten_label(row.label) for row in rows]
        name_rows(axes, names, [ACCENT if row.this else INK for row in rows], [row.this for row in rows])
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.margins(x=0.08)
        means_text = "; ".join(
            f"{r.label} {format_number(r.mean)}{f' ± {format_number(r.sd)}' if r.sd else ''}" for r in rows
        )
        return Chart(render_svg(figure, title), f"{measure}: {means_text}.")


def plot_reliability(series: Mapping[str, Points], colors: Mapping[str, str], title: str) -> Chart:
    """Return a reliability diagram, accuracy against confidence; the dashed diagonal is perfect calibration."""
    many = len(series) > N_COLORS
    lowest = min((x for points in series.values() for x, _ in points), default=0.0)
    start = 0.5 if lowest >= 0.5 else 0.0
    with open_figure(width_in=4.4 if many else 3.3) as (figure, axes):
        axes.plot([start, 1], [start, 1], color=MUTED, lw=1, ls=(0, (4, 3)))
        _draw_lines(axes, series, colors, marker="" if many else "o")
        axes.set(xlim=(start, 1.01), ylim=(0, 1.03), xlabel="confidence", ylabel="accuracy")
        axes.set_xticks(np.linspace(start, 1, 6))
        pairs = "; ".join(
            f"{format_number(x, 2)} → {format_number(y, 2)}" for p in list(series.values())[:1] for x, y in p
        )
        alt = f"{title}: confidence against accuracy. {'' if many else pairs}".strip()
        return Chart(render_svg(figure, title), alt)


def plot_matrix(values: Sequence[Sequence[float | None]], limits: tuple[float, float], title: str) -> Chart:
    """Return a heatmap without numbers for many sites; rows are models, columns test parts."""
    grid = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    with open_figure(height_in=4.0, width_in=4.4) as (figure, axes):
        image = axes.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], interpolation="nearest")
        axes.set(xlabel="test part of site (in order of the table)", ylabel="model of site")
        axes.grid(visible=False)
        bar = figure.colorbar(image, ax=axes, fraction=0.045)
        bar.outline.set_visible(False)
        size, mean = (f"{len(grid)} models by {grid.shape[1]} test parts", mean_of_available(grid[~np.isnan(grid)]))
        return Chart(render_svg(figure, title), f"{title}: {size}, mean {format_number(mean)}.")


def _draw_lines(
    axes: Axes, series: Mapping[str, Points], colors: Mapping[str, str], width: float = 1.8, marker: str = ""
) -> None:
    """Draw a line per site; faint ones where there are more sites than colours."""
    many = len(series) > N_COLORS
    for site, points in series.items():
        marker_options = {"marker": marker, "ms": 4} if marker else _marker_style(points)
        alpha, lw = (0.3, 0.9) if many else (0.95, width)
        axes.plot(*zip(*points, strict=True), color=colors[site], alpha=alpha, lw=lw, **marker_options)


def draw_mark(
    axes: Axes, x: float, y: float, below_above: Sequence[float], color: str, *, fill: str, marker: str = "o"
) -> None:
    """Draw a value and its interval, `below_above` of it, in the row y."""
    axes.errorbar(
        x, y, xerr=[[distance] for distance in below_above], color=color, marker=marker, ms=7, mec=color, mew=1.6,
        mfc=fill, elinewidth=1.7, zorder=4,
    )  # fmt: skip


def name_rows(axes: Axes, names: Sequence[str], colors: Sequence[str], bold: Sequence[bool]) -> None:
    """Name the rows of a chart on its left."""
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", visible=False)
    for text, color, heavy in zip(axes.get_yticklabels(), colors, bold, strict=True):
        text.set_color(color)
        text.set_fontweight("bold" if heavy else "normal")


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG without metadata."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


@contextmanager
def open_figure(
    width_in: float = 4.4, height_in: float = 2.5, left_in: float = 0.55, bottom_in: float = 0.45
) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure with margins fixed in inches, so that plots in a row are aligned."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The browser's fonts draw the text; what matplotlib's own font lacks does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(width_in, height_in))
        bottom_share, right_share = bottom_in / height_in, 0.12 / width_in
        left_share = left_in / width_in
        axes = figure.add_axes(
            (left_share, bottom_share, 1 - left_share - right_share, 1 - bottom_share - 0.12 / height_in)
        )
        yield figure, axes


def render_svg(figure: Figure, title: str) -> str:
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
    prefix = re.sub(r"\W+", "-", title.lower())

    def prefix_id(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', prefix_id, svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}-", svg)
    return re.sub(r">\s+<", "><", svg).strip()


def _marker_style(points: Points) -> Any:
    return {"marker": "o", "ms": 3.5} if len(points) < 4 else {}


def _draw_dashed_line(axes: Axes, y: float, words: str, color: str = MUTED) -> None:
    axes.axhline(y, color=color, lw=1.1, ls=(0, (4, 3)))
    corner = (0.01, y)  # free of curves that rise
    text_options: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(words, corner, (0, 3), ha="left", va="bottom", fontsize=8.5, color=color, **text_options)


def format_round_axis(axes: Axes, series: Mapping[str, Points]) -> None:
    rounds = [x for points in series.values() for x, _ in points] or [1]
    first, last = min(rounds), max(rounds)
    pad = max(0.02 * (last - first), 0.3 if last == first else 0)
    axes.set_xlim(first - pad, last + pad)
    axes.set_xlabel("round", loc="right", labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True) if last > first else FixedLocator([last]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _ends_text(series: Mapping[str, Points]) -> str:
    parts = [f"{name} from {format_number(p[0][1])} to {format_number(p[-1][1])}" for name, p in series.items() if p]
    return "; ".join(parts) + "."


def shorten_label(label: str, limit: int = 22) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"
