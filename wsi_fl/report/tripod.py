"""The TRIPOD+AI checklist of a run, filled in as far as its files know.

Reference: Collins et al., "TRIPOD+AI statement: updated guidance for reporting clinical prediction models that use
regression or machine learning methods", BMJ 385, 2024. The items are told in our own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from wsi_fl.report import words
from wsi_fl.report.page import Page
from wsi_fl.report.words import known


class Item(NamedTuple):
    """A line of the checklist; `known` is what the files say of it, "" where only its authors can."""

    number: str
    asks: str
    known: str


_ITEMS: tuple[tuple[str, str], ...] = (
    ("1", "Title: a prediction model, of whom and of what"),
    ("2", "Abstract, by the checklist for abstracts"),
    ("3", "Background: why, for whom, and known inequalities"),
    ("4", "Objectives: development, evaluation, or both"),
    ("5", "Data: their sources, and from when to when"),
    ("6", "Participants: setting, who was eligible, treatments"),
    ("7", "Data preparation, and whether it was the same for all"),
    ("8", "Outcome: what, who judged it, and how blinded"),
    ("9", "Predictors: which, and how they were measured"),
    ("10", "Sample size: how it was reached"),
    ("11", "Missing data: how they were handled"),
    ("12", "Analysis: how data were divided, the model, its training, its measures"),
    ("13", "Class imbalance: whether and how it was handled"),
    ("14", "Fairness: what was done for it"),
    ("15", "Model output: probabilities, classes, thresholds"),
    ("16", "How training and evaluation data differ"),
    ("17", "Ethical approval"),
    ("18", "Open science: funding, conflicts, protocol, registration, data, code"),
    ("19", "Patients and public: how they were involved"),
    ("20", "Participants: their flow and characteristics"),
    ("21", "Model development: numbers in each analysis"),
    ("22", "Model specification, so that others can use it"),
    ("23", "Performance with intervals, in subgroups, and between sites"),
    ("24", "Model updating"),
    ("25", "Interpretation, with fairness and other studies"),
    ("26", "Limitations"),
    ("27", "Use: bad input, who handles it, what next"),
)


def checklist(page: Page) -> list[Item]:
    """Return all 27 items, in order."""
    said = _known(page)
    return [Item(number, asks, said.get(number, "")) for number, asks in _ITEMS]


def _known(page: Page) -> Mapping[str, str]:
    """What the files of a run say, by item."""
    sites = page.summary.get("sites", ())
    stores = [one for one in page.stores if known(one.get("patients"))]
    evaluated = (page.evaluation or {}).get("sites", ())
    found = {"4": "development and evaluation" if evaluated else "development; it is not evaluated yet"}
    if stores:
        patients, slides = (sum(int(one[name]) for one in stores) for name in ("patients", "slides"))
        divided = ", ".join(
            f"{one['train']} for training and {one['test']} for testing at {one['site']}" for one in stores
        )
        found |= {
            "5": f"{len(stores)} sites whose stores lie here: {', '.join(str(one['site']) for one in stores)}",
            "20": f"{patients} patients with {slides} slides; see Data",
            "21": f"{page.examples}: {divided}",
        }
        size, mpp = stores[0].get("size_px"), stores[0].get("mpp")
        if known(mpp) and mpp:
            found["9"] = f"{page.examples} of {size} px at {mpp:g} µm per pixel"
    asks = {
        "classes": f"one of {', '.join(page.classes)}",
        "number": "a number",
        "survival": "the time of an event",
    }
    found["8"] = f"what is asked is {asks[page.task]}; who judged it, only you know"
    measures = ", ".join(words.measured_in(name) for name in page.scores)
    method = words.method_name(page.method)
    found |= {
        "7": "the configuration at the end of this page, the same at every site",
        "12": f"{method} over {len(sites)} sites; measured by {measures}; intervals by patient; see the configuration",
        "22": "the run's folder; `wsi-fl export` writes the model with a card",
        "26": "see the notes of this page; training patients are not drawn anew in any interval",
        "27": "`predict` refuses slides of another magnification, and marks what it cannot read",
    }
    clinical = page.clinical
    if clinical:
        first = clinical["sites"][0]
        where = "merged test" if first["on"] == "merged" else f"{first['site']}'s test"
        cases = ", ".join(f"{name} {one['cases']} of {one['n']}" for name, one in first["classes"].items())
        found |= {
            "10": f"cases among {where} patients: {cases}; `wsi-fl plan-size` says what it takes",
            "15": "probabilities"
            + (
                "; a case from a score on that each hospital's own slides chose, or 0.5"
                if first["point"] is not None
                else "; the likeliest class"
            ),
            "23": "see For the clinic" + (f", by {clinical['by']}" if clinical["by"] else ""),
        }
        if clinical["by"] and any(_told(site) for site in clinical["sites"]):
            found["14"] = f"performance by {clinical['by']}; see For the clinic"
    if any(site.get("external") for site in evaluated):
        found["16"] = "sites differ; see Who generalises"
    return found


def _told(site: Mapping[str, Any]) -> bool:
    """Whether a named group of patients was told."""
    classes = site["classes"].values()
    return any(name and told for one in classes for name, told in (one["subgroups"] or {}).items())
