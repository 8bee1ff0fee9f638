"""`wsi-fl survival`: Kaplan–Meier curves from released class statistics, which count patients by interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from wsi_fl.oneshot.class_statistics import refuse_invalid_statistics
from wsi_fl.oneshot.column_sums import StatisticsLayout
from wsi_fl.oneshot.released_statistics import ReleasedStatistics, describe_unknown_sites, load_statistics
from wsi_fl.report import figures
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable, print_message
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import TargetSettings
from wsi_fl.system.files import write_bytes
from wsi_fl.types import UsageError, WsiFlError

_Floats = NDArray[np.float64]
_Z = 1.96


def estimate_curve(counts: _Floats, noise_variance: float) -> pd.DataFrame:
    """Return the share without the event at the ends of k intervals, its 95 % interval, and its s.d. by noise alone.

    All are NaN from where noise hides who is at risk, or nobody is seen to pass an interval, in whose first half
    follow-up may have ended. Noise can make hazards negative; the share is the nearest that does not rise (Barlow et
    al., "Statistical inference under order restrictions", 1972).

    Args:
        counts: float64[2k + 1], events by interval, then patients censored after 0, 1, …, k passed intervals.
        noise_variance: of each count.
    """
    from sklearn.isotonic import isotonic_regression

    k = len(counts) // 2
    # 1. at risk in an interval are all who have the event in it or later, or pass it; both numbers must be above noise
    risk = np.concatenate([np.triu(np.ones((k, k))), np.triu(np.ones((k, k + 1)), 1)], axis=1)
    above_noise = [
        summed @ counts > _Z * np.sqrt(noise_variance * summed.sum(1)) for summed in (risk, risk - np.eye(k, 2 * k + 1))
    ]
    visible = np.logical_and.accumulate(np.logical_and(*above_noise))
    n = np.where(visible, risk @ counts, np.nan)
    # 2. S = Π (1 − d / n), its variance by chance (Greenwood), and its change with each count, whose noise is known
    hazard = counts[:k] / n
    share, chance, slope, steps = 1.0, 0.0, np.zeros(2 * k + 1), []
    for h, m, change in zip(hazard, n, (np.eye(k, 2 * k + 1) - hazard[:, None] * risk) / n[:, None], strict=True):
        chance = (1 - h) ** 2 * chance + share**2 * h.clip(0) * (1 - h) / m
        slope = (1 - h) * slope - share * change
        share *= 1 - h
        steps.append((share, chance, noise_variance * np.square(slope).sum()))
    share, chance, noise = np.array(steps).T
    share[visible] = isotonic_regression(share[visible], y_min=0, y_max=1, increasing=False) if visible.any() else []
    low, high = (share + sign * _Z * np.sqrt(chance + noise) for sign in (-1, 1))
    columns = {"share": share, "low": low.clip(0), "high": high.clip(None, 1), "noise_sd": np.sqrt(noise), "at_risk": n}
    return pd.DataFrame(columns)


def draw_survival(study: Study, out: Path) -> dict[str, Any]:
    """Draw the curves of all hospitals with statistics in the study, and of all together; return the `--json` document.

    Raises:
        UsageError: for statistics without survival of patients, or of different targets.
        WsiFlError: without statistics, or for forged ones.
    """
    for line in describe_unknown_sites(study):
        print_message(f"  {line}", "yellow")
    statistics = [*load_statistics(study, map(study.load_site, study.site_names())).values()]
    if not statistics:
        raise WsiFlError("no statistics/*.safetensors here; release some with `wsi-fl statistics`, or copy them here")
    headers = [released.header for released in statistics]
    target = TargetSettings.model_validate_json(headers[0].task or "{}")
    if len({header.task for header in headers}) > 1 or target.target_kind != "survival":
        sites = ", ".join(header.site for header in headers)
        raise UsageError(f"statistics of {sites}: curves need one target of all, with time, event and intervals")
    rows: list[Any] = [*map(_read_counts, statistics)]
    rows.append([sum(values) for values in zip(*rows, strict=True)])
    owners = [*((header.site, header.epsilon) for header in headers), ("all", None)]
    curves = []
    for (site, epsilon), (n, counts, variance) in zip(owners, rows, strict=True):
        curve = estimate_curve(counts, variance).round(6).astype(object)
        counted = int(counts.sum().clip(0, n).round())  # n has also those held out, and those without a target
        row = {"site": site, "n": n, "counted": counted, "epsilon": epsilon, "count_noise_sd": variance**0.5}
        curves.append(row | curve.where(curve.notna(), None).to_dict("list"))
    write_bytes(out, _draw_png(curves, target.intervals or [], f"{target.time} until {target.event}"))
    facts = {"event": target.event, "time": target.time, "ends": target.intervals, "delta": headers[0].delta}
    return facts | {"curves": curves, "picture": str(out)}


def _read_counts(released: ReleasedStatistics) -> tuple[int, _Floats, float]:
    """Return the number of patients, their counts float64[2k + 1], and the variance of the noise of each count."""
    header, label = released.header, f"statistics of site {released.header.site}"
    n_intervals = len(TargetSettings.model_validate_json(header.task).intervals or [])
    if len(header.classes) != n_intervals:
        raise WsiFlError(f"{label} have {len(header.classes)} outputs for {n_intervals} intervals; ask it for the file")
    if header.unit != "patient":
        raise UsageError(f"{label} count rows; curves need privacy.unit = 'patient'")
    layout = StatisticsLayout(header.columns, header.dimensions)
    refuse_invalid_statistics(layout, released, label)
    counts: _Floats = layout.unpack_sums(torch.from_numpy(released.vector))[:, -1].numpy()
    return header.n, counts, (header.sigma / layout.count_scale) ** 2


def _draw_png(curves: Sequence[Mapping[str, Any]], ends: Sequence[float], label: str) -> bytes:
    columns, rows, color = min(4, len(curves)), -(-len(curves) // 4), figures.load_palette()["s0"]
    with mpl.rc_context(figures.build_png_style()):
        figure = Figure(figsize=(3.1 * columns, 2.6 * rows), layout="constrained")
        for panel, row in enumerate(curves, 1):
            axes = figure.add_subplot(rows, columns, panel)
            share, low, high, noise = (np.array(row[key], float) for key in ("share", "low", "high", "noise_sd"))
            axes.plot([0, *ends], [1, *share], color=color, marker="o", ms=3)
            axes.vlines(ends, low, high, color=color, lw=1, label="95 %")
            axes.vlines(ends, share - _Z * noise, share + _Z * noise, color=color, lw=5, alpha=0.4, label="noise")
            title = f"{row['site']}: {_format_counted(row)} patients, {_format_price(row)}"
            axes.set_title(title, loc="left", fontsize=8)
            axes.set(ylim=(0, 1.03), xlim=(0, 1.05 * ends[-1]), xlabel=label, ylabel="without the event")
        axes.legend(frameon=False)
        return figures.render_png(figure)


def _format_counted(row: Mapping[str, Any]) -> str:
    return f"{row['counted']} of {row['n']}"


def _format_price(row: Mapping[str, Any]) -> str:
    return ("" if row["epsilon"] is None else f"ε = {row['epsilon']:.2f}, ") + f"counts ±{row['count_noise_sd']:.1f}"


def render_survival_lines(document: Mapping[str, Any]) -> Lines:
    """Yield a row for each curve, and the picture."""
    headings, rows = ["site", "patients", "ε, noise", *(f"≤ {end:g}" for end in document["ends"])], []
    for row in document["curves"]:
        shares = zip(row["share"], row["low"], row["high"], strict=True)
        cells = ["–" if s is None else f"{s:.2f} ({low:.2f}–{high:.2f})" for s, low, high in shares]
        rows.append([row["site"], _format_counted(row), _format_price(row), *cells])
    yield TextTable(f"share without {document['event']}", headings, rows)
    ended = "–: noise hides how many are at risk, or nobody passed it"
    yield TextLine(f"95 % intervals of chance and noise ({ended}); {document['picture']}")
