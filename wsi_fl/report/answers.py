"""Figures of what models say where no classes are asked: numbers against the truth, survival by predicted risk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.survival import kaplan_meier, logrank, risk
from wsi_fl.report.figures import ACCENT, INK, MUTED, Chart, new_figure, to_svg
from wsi_fl.report.page import Page
from wsi_fl.report.words import number

Floats = NDArray[np.float64]


def figures_of(page: Page) -> list[tuple[str, Chart, str]]:
    """Return (title, chart, caption) of each site's own test part; nothing where classes are asked."""
    if page.task == "number":
        return [(site, _against_truth(site, *found), "") for site, found in page.said.items()]
    ends = [float(name) for name in page.outputs] if page.task == "survival" else []
    return [(site, *_by_risk(site, truth, said, ends)) for site, (truth, said) in page.said.items()]


def _against_truth(site: str, truth: Floats, said: Floats) -> Chart:
    """A dot per example, and the line on which the model is right."""
    low, high = (float(f([f(truth), f(said)])) for f in (np.min, np.max))
    with new_figure() as (figure, axes):
        axes.plot([low, high], [low, high], color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.plot(truth[:, 0], said[:, 0], "o", color=ACCENT, ms=4, alpha=0.6)
        axes.set(xlabel="true", ylabel="predicted")
        svg = to_svg(figure, f"Predicted against true, {site}")
    return Chart(svg, f"Predicted against true numbers of {len(truth)} test examples of {site}.")


def _by_risk(site: str, truth: Floats, said: Floats, ends: list[float]) -> tuple[Chart, str]:
    """Kaplan–Meier curves of the half of the patients with the higher predicted risk, and of the others."""
    stated = risk(said, ends)
    high = stated > np.median(stated)
    p = logrank(truth, high)
    with new_figure() as (figure, axes):
        for mine, color, name in ((high, ACCENT, "higher risk"), (~high, INK, "lower risk")):
            if mine.any():
                times, share = kaplan_meier(truth[mine])
                axes.step(times, share, where="post", color=color, label=f"{name} ({int(mine.sum())})")
        axes.set(ylim=(0, 1.03), xlabel="time", ylabel="without the event")
        axes.legend(frameon=False, loc="lower left")
        svg = to_svg(figure, f"Survival by predicted risk, {site}")
    tested = "Too few patients or events for a test." if p is None else f"Log-rank p = {number(p)}."
    return Chart(
        svg, f"Kaplan–Meier curves of two halves of {len(truth)} test patients of {site}. {tested}"
    ), tested
