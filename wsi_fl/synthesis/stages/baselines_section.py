"""The section of a run's page on mpcpa and its baselines, by the entry points `wsi_fl.report_sections`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wsi_fl.report.figures import ACCENT, INK, MUTED, Bar, Chart, open_figure, plot_bars, render_svg
from wsi_fl.report.formatting import Json, format_number
from wsi_fl.report.sections import PageSection, SectionContext
from wsi_fl.system.files import read_maybe_sealed

BASELINES_FILE = "mpcpa.json"
"""The document of `train --method mpcpa --baselines` in a run's folder."""
_AGGREGATED_ROWS = ("aggregated A", "aggregated B")


class BaselinesSection:
    """The section "Local and generated images"."""

    def build_section(self, context: SectionContext) -> PageSection | None:
        """Return the section; None for a run without baselines of mpcpa."""
        path = context.run_context.run.path / BASELINES_FILE
        if not path.exists():
            return None
        advice = "delete it; `wsi-fl train --method mpcpa --baselines` writes it again"
        document = read_maybe_sealed(path, ("run", "runs", "curve"), advice)
        points = document["curve"]
        values = {
            "document": document,
            "chart": _plot_models(document["rows"]),
            "curve": _plot_curve(points, context.colors) if len(points) > 2 else None,
            "failed": [row["site"] for row in document["memorization"] if not row["passed"]],
        }
        html = context.fill_template("baselines", Path(__file__).parent, values)
        return PageSection("generated", "Local and generated images", "aggregation", html)


BASELINES = BaselinesSection()
"""The entry of `wsi_fl.report_sections`."""


def _plot_models(rows: Sequence[Json]) -> Chart:
    """Return a bar chart of the accuracy of every model of the comparison; aggregations are marked."""
    labels = [", ".join(row[key] for key in ("row", "site") if key in row) for row in rows]
    bars = [
        Bar(label, row["accuracy"], None, dp=True, this=row["row"] in _AGGREGATED_ROWS)
        for label, row in zip(labels, rows, strict=True)
    ]
    return plot_bars(bars, "Local and generated images", "Accuracy on the merged test set")


def _plot_curve(points: Sequence[Json], colors: Mapping[str, str]) -> Chart:
    """Return a chart of accuracy over generated images per class and denoiser (the paper's Figure 5)."""
    x = [point["per_class"] for point in points]
    with open_figure(left_in=0.6) as (figure, axes):
        for site in points[0]["sites"]:
            values = [point["sites"][site] for point in points]
            axes.plot(x, values, color=colors.get(site, MUTED), lw=1.1, alpha=0.8)
        axes.plot(x, [point["mean"] for point in points], color=INK, ls=(0, (4, 3)))
        axes.plot(x, [point["aggregated"] for point in points], color=ACCENT, marker="o", ms=4)
        axes.set(xlabel="generated images of each class", ylabel="accuracy")
        points_text = "; ".join(
            f"{point['per_class']}: {format_number(point['aggregated'])}, sites {format_number(point['mean'])} "
            "on average"
            for point in points
        )
        alt = f"Accuracy of the aggregated predictions over generated images of each class: {points_text}."
        return Chart(render_svg(figure, "Number of generated images"), alt)
