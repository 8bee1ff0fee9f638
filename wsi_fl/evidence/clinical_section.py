"""Clinical measures as cells, sentences and decision curves, from the document of ``clinical --json``."""

from __future__ import annotations

from collections.abc import Mapping

from wsi_fl.evidence.predicted_lesions import explain_left_out, tabulate_lesions
from wsi_fl.report import formatting
from wsi_fl.report.figures import INK, MUTED, Chart, open_figure, render_svg
from wsi_fl.report.formatting import Json, format_number


def build_clinical_section(document: Json, colors: Mapping[str, str]) -> dict[str, object]:
    """Return the values of the section."""
    lesions = document.get("lesions") or ()
    groups = [
        {
            "site": site["site"],
            "class": name,
            "group": group or "unknown",
            "told": values and {k: _format_interval(v) if isinstance(v, Mapping) else v for k, v in values.items()},
        }
        for site in document["sites"]
        for name, measures in site["classes"].items()
        for group, values in (measures["subgroups"] or {}).items()
    ]
    return {
        "cells": build_clinical_cells(document),
        "groups": [group for group in groups if group["told"]],
        "not_told": sum(not group["told"] for group in groups),
        "findings": list_clinical_findings(document),
        "curves": _decision_curves(document, colors),
        "told_by_name": any(group["told"] and group["group"] != "unknown" for group in groups),
        "share": f"{formatting.format_stated_percent(document['prevalence'])} of patients"
        if document["prevalence"]
        else "as many as among these patients",
        "several": any(len(site["classes"]) > 1 for site in document["sites"]),
        "any_counts": any(site["any_counts"] for site in document["sites"]),
        "merged": any(site["on"] == "merged" for site in document["sites"]),
        "lesions": tabulate_lesions(lesions) if lesions else None,
        "left_out": explain_left_out(lesions),
    }


def build_clinical_cells(document: Json) -> list[dict[str, str]]:
    """Return a row per site and class, each value with its interval.

    >>> _format_interval({"value": 0.9, "low": 0.72, "high": 0.97, "n": 20}), _format_interval(None)
    ('0.90 (0.72–0.97)', '–')
    """
    prevalence = document["prevalence"]
    rows = []
    for site in document["sites"]:
        for name, measures in site["classes"].items():
            row = {"site": site["site"], "class": name, "patients": str(measures["n"]), "cases": str(measures["cases"])}
            row |= {"case from": format_number(site["point"], 2)}
            row |= {measure: _format_interval(measures[measure]) for measure in ("sensitivity", "specificity")}
            row |= {measure.upper(): _format_interval(measures[measure]) for measure in ("ppv", "npv")}
            if prevalence is not None:
                share, values = formatting.format_stated_percent(prevalence), measures.get("at_prevalence") or {}
                row |= {f"{part.upper()} at {share}": _format_interval(values.get(part)) for part in ("ppv", "npv")}
            row |= {"AUROC": _format_interval(measures["auroc"]), "AUPRC": format_number(measures["auprc"], 2)}
            calibration = measures["calibration"] or {}
            rows.append(row | {part: _format_interval(calibration.get(part)) for part in ("slope", "intercept")})
    return rows


def _format_interval(value: Json | None) -> str:
    """Return a value with its 95 % interval."""
    if not value:
        return formatting.DASH
    return f"{format_number(value['value'], 2)} ({format_number(value['low'], 2)}–{format_number(value['high'], 2)})"


def list_clinical_findings(document: Json) -> list[str]:
    """Return sentences on calibration, on the gain over local models, and on small classes."""
    sentences, small_classes = [], set()
    for site in document["sites"]:
        for name, measures in site["classes"].items():
            label = f"{site['site']}, {name}"
            slope, difference = (measures["calibration"] or {}).get("slope"), measures["over_local"]
            if slope and (slope["high"] < 1 or slope["low"] > 1):
                direction = "too extreme" if slope["high"] < 1 else "not extreme enough"
                text = f"probabilities are {direction}, the slope is {_format_interval(slope)}"
                sentences.append(f"{label}: {text}.")
            if difference and difference["p"] is not None:
                side = "above" if difference["value"] >= 0 else "below"
                ends = " to ".join(formatting.format_signed(difference[end]) for end in ("low", "high"))
                text = f"AUROC is {abs(difference['value']):.2f} {side} that of its local model ({ends})"
                sentences.append(f"{label}: {text}.")
            if measures["cases"] < document["least"]:
                small_classes.add(f"{measures['cases']} {name}")
    if small_classes:
        sentences.append(
            f"So few cases are not conclusive ({', '.join(sorted(small_classes))}); "
            "pmvalsampsize computes the sample size of a test set."
        )
    return sentences


def _decision_curves(document: Json, colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """Return a decision curve for every class, with a line per site whose net benefit is known."""
    charts = []
    thresholds = document["thresholds"]
    for name in {name: None for site in document["sites"] for name in site["classes"]}:
        of_class = {
            site["site"]: site["classes"].get(name) for site in document["sites"]
        }  # None where none may have it
        benefit = {site: measures["net_benefit"] for site, measures in of_class.items() if measures}
        # a site's curve, as its share of cases has it
        treat_all_curves = {tuple(curves["everybody"]): site for site, curves in benefit.items()}
        lines = {site: curves["model"] for site, curves in benefit.items() if formatting.is_number(curves["model"][0])}
        highest = max([0.02, *map(max, lines.values())])
        with open_figure() as (figure, axes):
            for curve, site in treat_all_curves.items():
                visible = [(t, b) for t, b in zip(thresholds, curve, strict=True) if b > -0.3 * highest]
                color = MUTED if len(treat_all_curves) == 1 else colors.get(site, INK)
                axes.plot(*zip(*visible, strict=True), color=color, lw=1.2, ls=(0, (4, 3)), label="treat all")
            axes.axhline(0, color=INK, lw=0.8)
            for site, net_benefit in lines.items():
                axes.plot(thresholds, net_benefit, color=colors.get(site, INK), lw=1.6, label=site)
            axes.set_ylim(-0.3 * highest, 1.15 * highest)
            axes.set_xlim(0, 1)
            axes.set_xlabel("threshold probability", loc="right", labelpad=1)
            title = f"Net benefit, {name}"
            positions = {t: thresholds.index(t) for t in (0.1, 0.25, 0.5) if t in thresholds}
            values = {
                site: ", ".join(f"{format_number(net_benefit[k], 2)} at {t:g}" for t, k in positions.items())
                for site, net_benefit in lines.items()
            }
            alt = f"{title}: " + "; ".join(map(" ".join, values.items()))
            charts.append((title, Chart(render_svg(figure, title), alt)))
    return charts
