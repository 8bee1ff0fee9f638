"""The section of a run's page on local and generated images: the table of `train --method mpcpa --baselines`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wsi_fl.report import figures
from wsi_fl.report.figures import ACCENT, INK, MUTED, Bar, Chart, open_figure, render_svg
from wsi_fl.report.formatting import Json, format_number
from wsi_fl.report.run_page import VOTING_RULES
from wsi_fl.report.sections import Section, SectionContext
from wsi_fl.system.files import read_maybe_sealed, write_sealed

_DECISIVE = ("aggregated A", "aggregated B")


class _BaselinesSection:
    """An entry of `wsi_fl.report_sections`."""

    def build(self, context: SectionContext) -> Section | None:
        """Return the section; None for a run without baselines."""
        table = read_baselines(context.run_context.run.path)
        if table is None:
            return None
        values = {
            "table": table,
            "chart": _models_chart(table["rows"]),
            "curve": _curve_chart(table["curve"], context.colors) if len(table["curve"]) > 2 else None,
            "rule": VOTING_RULES[table["aggregate"]],
            "failed": [row["site"] for row in table["memorization"] if not row["passed"]],
        }
        html = context.fill("baselines", Path(__file__).parent, values)
        return Section("generated-images", "Local and generated images", "aggregation", html)


SECTION = _BaselinesSection()


def write_baselines(run: Path, document: Mapping[str, Any]) -> None:
    """Write the document of the baselines into a run."""
    write_sealed(run / "mpcpa.json", document)


def read_baselines(run: Path) -> dict[str, Any] | None:
    """Return the document of the baselines of a run; None without one."""
    advice = "delete it; `wsi-fl train --method mpcpa --baselines` writes it again"
    path = run / "mpcpa.json"
    return read_maybe_sealed(path, ("run", "runs", "curve"), advice) if path.exists() else None


def _models_chart(rows: Sequence[Json]) -> Chart:
    """Return a bar chart of the accuracy of every model of the comparison; aggregations are marked."""
    labels = [", ".join(row[key] for key in ("row", "site") if key in row) for row in rows]
    bars = [
        Bar(label, row["accuracy"], None, dp=True, this=row["row"] in _DECISIVE)
        for label, row in zip(labels, rows, strict=True)
    ]
    return figures.plot_bars(bars, "Local and generated images", "Accuracy on the merged test set")


def _curve_chart(points: Sequence[Json], colors: Mapping[str, str]) -> Chart:
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
