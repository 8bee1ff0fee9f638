"""What a clinic asks, in cells, sentences and a decision curve: the document of ``clinical --json`` in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from wsi_fl.report import words
from wsi_fl.report.figures import INK, MUTED, Chart, new_figure, to_svg
from wsi_fl.report.words import Json, number


def section(document: Json | None, colors: Mapping[str, str]) -> dict[str, object] | None:
    """What the section shows; None where nobody described the run by patient."""
    if document is None:
        return None
    groups = _groups(document)
    return {
        "cells": cells(document),
        "groups": [one for one in groups if one["told"]],
        "not_told": sum(not one["told"] for one in groups),
        "findings": findings(document),
        "curves": _curves(document, colors),
        "told_by_name": any(one["told"] and one["group"] != "unknown" for one in groups),
        "share": f"{words.stated_percent(document['prevalence'])} of patients"
        if document["prevalence"]
        else "as many as among these patients",
        "several": any(len(site["classes"]) > 1 for site in document["sites"]),
        "any_counts": any(site["any_counts"] for site in document["sites"]),
        "merged": any(site["on"] == "merged" for site in document["sites"]),
    }


def cells(document: Json) -> list[dict[str, str]]:
    """A row per site and class, each value with its interval.

    >>> _interval({"value": 0.9, "low": 0.72, "high": 0.97, "n": 20}), _interval(None)
    ('0.90 (0.72–0.97)', '–')
    """
    prevalence = document["prevalence"]
    rows = []
    for site in document["sites"]:
        for name, one in site["classes"].items():
            at = one.get("at_prevalence") or {}
            share = "" if prevalence is None else words.stated_percent(prevalence)
            predictive = {f"{which.upper()} at {share}": _interval(at.get(which)) for which in ("ppv", "npv")}
            calibration = {
                part: _interval((one["calibration"] or {}).get(part)) for part in ("slope", "intercept")
            }
            row = {"site": site["site"], "class": name, "patients": str(one["n"]), "cases": str(one["cases"])}
            row |= {"case from": number(site["point"], 2)}
            row |= {which: _interval(one[which]) for which in ("sensitivity", "specificity")}
            row |= {which.upper(): _interval(one[which]) for which in ("ppv", "npv")}
            row |= {} if prevalence is None else predictive
            row |= {"AUROC": _interval(one["auroc"]), "AUPRC": number(one["auprc"], 2)}
            rows.append(row | calibration)
    return rows


def _interval(value: Json | None) -> str:
    """A value and its 95 % interval."""
    if not value:
        return words.DASH
    return f"{number(value['value'], 2)} ({number(value['low'], 2)}–{number(value['high'], 2)})"


_Group = TypedDict("_Group", {"site": str, "class": str, "group": str, "told": Json | None})
"""A group of the patients of a site, and what is told of it, in words."""


def _groups(document: Json) -> list[_Group]:
    return [
        {
            "site": site["site"],
            "class": name,
            "group": group or "unknown",
            "told": told and {k: _interval(v) if isinstance(v, Mapping) else v for k, v in told.items()},
        }
        for site in document["sites"]
        for name, one in site["classes"].items()
        for group, told in (one["subgroups"] or {}).items()
    ]


def findings(document: Json) -> list[str]:
    """What the numbers say, in sentences; of one class of each site."""
    found, few = [], set()
    for site in document["sites"]:
        for name, one in site["classes"].items():
            whose = f"{site['site']}, {name}"
            found += [f"{whose}: {said}." for said in (_calibrated(one), _over_alone(one)) if said]
            if one["cases"] < document["least"]:
                few.add(f"{one['cases']} {name}")
    if few:
        found.append(
            f"So few cases say little ({', '.join(sorted(few))}); `wsi-fl plan-size` says how many patients it takes."
        )
    return found


def _calibrated(one: Json) -> str:
    slope = (one["calibration"] or {}).get("slope")
    if not slope or not (slope["high"] < 1 or slope["low"] > 1):
        return ""
    much = "too extreme" if slope["high"] < 1 else "not extreme enough"
    return f"probabilities are {much}, the slope is {_interval(slope)}"


def _over_alone(one: Json) -> str:
    more = one["over_local"]
    if not more or more["p"] is None:
        return ""
    side = "above" if more["value"] >= 0 else "below"
    around = f"{words.signed(more['low'])} to {words.signed(more['high'])}"
    return f"AUROC is {abs(more['value']):.2f} {side} that of its lone model ({around})"


def _curves(document: Json, colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A decision curve for every class, with a line per site, as far as acting on everybody does no great harm.

    A site whose model's net benefit is not known, as of patients of one kind at another prevalence, has no line.
    """
    found = []
    thresholds = document["thresholds"]
    for name in document["sites"][0]["classes"]:
        benefit = {site["site"]: site["classes"][name]["net_benefit"] for site in document["sites"]}
        # a site's curve, as its share of cases has it
        everybody = {tuple(one["everybody"]): site for site, one in benefit.items()}
        lines = {site: one["model"] for site, one in benefit.items() if words.known(one["model"][0])}
        most = max([0.02, *map(max, lines.values())])
        with new_figure() as (figure, axes):
            for curve, site in everybody.items():
                shown = [(t, b) for t, b in zip(thresholds, curve, strict=True) if b > -0.3 * most]
                color = MUTED if len(everybody) == 1 else colors.get(site, INK)
                axes.plot(*zip(*shown, strict=True), color=color, lw=1.2, ls=(0, (4, 3)), label="everybody")
            axes.axhline(0, color=INK, lw=0.8)
            for site, one in lines.items():
                axes.plot(thresholds, one, color=colors.get(site, INK), lw=1.6, label=site)
            axes.set_ylim(-0.3 * most, 1.15 * most)
            axes.set_xlim(0, 1)
            axes.set_xlabel("acts from this probability on", loc="right", labelpad=1)
            title = f"Net benefit, {name}"
            alt = f"{title}: " + "; ".join(_said(site, one, thresholds) for site, one in lines.items())
            found.append((title, Chart(to_svg(figure, title), alt)))
    return found


def _said(site: str, benefit: Sequence[float], thresholds: Sequence[float]) -> str:
    shown = (0.1, 0.25, 0.5)
    at = [f"{number(benefit[thresholds.index(t)], 2)} at {t:g}" for t in shown if t in thresholds]
    return f"{site} {', '.join(at)}"
