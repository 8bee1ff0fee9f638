"""`clinical`: what a clinic asks of a run, by patient; and `plan-size`: how many patients it takes to know that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from wsi_fl.learning.clinical import (
    LEAST,
    Names,
    Patients,
    Wanted,
    auroc_difference,
    by_patient,
    described,
    net_benefit,
    patients_needed,
    subgroups,
)
from wsi_fl.learning.predictions import Predictions
from wsi_fl.learning.validation import LONE
from wsi_fl.report.clinical import cells, findings
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.predictions import read_predictions
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.site.targets import column_of
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.types import UsageError, WsiFlError

THRESHOLDS = tuple(round(k / 100, 2) for k in (1, 2, *range(5, 100, 5)))
"""Of the decision curve."""
_BESIDE = 4
"""Sites whose columns stand beside each other."""


def clinical(
    study: Study,
    run_name: str,
    *,
    prevalence: float | None = None,
    by: str | None = None,
    least: int = LEAST,
) -> dict[str, Any]:
    """Describe each site's answers by patient, as `evaluate` left them; write clinical.json and return the document.

    It is measured on the merged test set where there is one, and else on the site's own part.

    Args:
        prevalence: at which predictive values are told too.
        by: a column by which patients are grouped: `part` or `tumor_type`, or one of the sites' own tables.
        least: patients, and of these cases and others, of whom a group must have so many that it is told.

    Raises:
        UsageError: for a prevalence that is none, a column that nobody has, or a run whose answers are no classes.
        WsiFlError: when the run was not evaluated.
    """
    if prevalence is not None and not 0 < prevalence < 1:
        raise UsageError(f"--prevalence {prevalence:g}: it is a share between 0 and 1")
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    with RunContext.of_run(study, run) as party:
        if party.task.kind != "classes":
            raise UsageError(
                f"{run.name}: answers no question of classes; `wsi-fl report` says how good it is"
            )
        document = described_run(party, prevalence=prevalence, by=by, least=least)
    if document is None:
        raise WsiFlError(f"{run.name} has no predictions of a test set; run `wsi-fl evaluate {run.name}`")
    run.write_clinical(document)
    return document


def described_run(
    party: RunContext, *, prevalence: float | None = None, by: str | None = None, least: int = LEAST
) -> dict[str, Any] | None:
    """Return the document of `clinical` without writing it; None where no predictions of classes lie here."""
    rows = []
    for site in party.members:
        table = read_predictions(party.run.site(site.name))
        if table is not None and len(table):
            rows.append(_site(party, site, table, prevalence, by, least))
    if not rows:
        return None
    return {
        "run": party.study.relative(party.run.path),
        "least": least,
        "prevalence": prevalence,
        "by": by,
        "thresholds": list(THRESHOLDS),
        "sites": rows,
    }


def _site(
    party: RunContext,
    site: SiteFile,
    table: Predictions,
    prevalence: float | None,
    by: str | None,
    least: int,
) -> dict[str, Any]:
    """One site's answers, class by class; of two classes the second one is the case."""
    folder = party.run.site(site.name)
    patients = _patients(table)
    point = _point(folder.kept("choice") or {}, table, patients)
    called = patients.said[:, 1] >= point if point is not None else patients.said.argmax(1)
    groups = _groups(party.study, site, table, patients, by) if by else None
    alone = read_predictions(folder, model=LONE)
    found = {}
    for k in range(len(table.outputs)) if len(table.outputs) > 2 else [1]:
        score, positive, case = patients.said[:, k], called == k, patients.truth == k
        found[table.outputs[k]] = described(score, positive, case, prevalence) | {
            "net_benefit": net_benefit(score, case, THRESHOLDS, prevalence),
            "subgroups": None if groups is None else subgroups(groups, positive, case, score, least),
            "over_alone": _over_alone(patients, alone, k) if table.answer != LONE else None,
        }
    return {
        "site": site.name,
        "on": "merged" if (table.part != site.name).any() else "own",
        "with": table.answer,
        "unit": "patient" if all(table.patient) else "example",
        "any_counts": patients.any_counts,
        "point": point,
        "classes": found,
    }


def _patients(table: Predictions) -> Patients:
    """By patient; examples of no known patient each by themselves."""
    rows = np.arange(len(table)).astype(str)
    known = table.whose(table.patient)
    return by_patient(
        table.answers, table.truth, np.where(table.patient == "", np.char.add("row ", rows), known)
    )


def _point(choice: Mapping[str, Any], table: Predictions, patients: Patients) -> float | None:
    """The score from which on a patient is called a case: as the run found it on the site's own slides, or one half.

    None of more than two classes, where the most probable one is called.
    """
    if len(table.outputs) > 2:
        return None
    found = choice.get("slide_threshold") if choice.get("with") == table.answer else None
    return float(found) if found is not None and patients.any_counts else 0.5


def _over_alone(patients: Patients, alone: Predictions | None, k: int) -> dict[str, Any] | None:
    """By how much the AUROC exceeds that of the site's lone model on the same patients."""
    if alone is None:
        return None
    theirs = _patients(alone)
    found = auroc_difference(patients.said[:, k], theirs.said[:, k], patients.truth == k)
    return asdict(found) if found else None


def _groups(study: Study, site: SiteFile, table: Predictions, patients: Patients, by: str) -> Names:
    """Which group each patient is of, that of the first example; "" where nobody says."""
    if by == "part":
        column = table.part
    elif by in table.about:
        column = table.about[by]
    else:
        said: dict[tuple[str, str, str], str] = {}
        for name in sorted(set(table.part.tolist())):
            whose = site if name == site.name else study.site(name)
            said |= {(name, *key): value for key, value in column_of(study, whose, by).items()}
        who = zip(table.part.tolist(), table.slide.tolist(), table.patient.tolist(), strict=True)
        column = np.array([
            said.get((part, "slide", slide), said.get((part, "patient", patient), ""))
            for part, slide, patient in who
        ])  # fmt: skip
    if not any(column.tolist()):
        raise UsageError(f"--by {by}: no table of the sites has a slide or patient of this test set")
    if len(set(column.tolist())) > _MOST_GROUPS:
        raise UsageError(
            f"--by {by}: has more than {_MOST_GROUPS} values; group them in a column of their own"
        )
    known = table.whose(table.patient)
    first = dict(zip(known[::-1].tolist(), column[::-1].tolist(), strict=True))
    return np.array([str(first.get(name, "")) for name in patients.name.tolist()])


_MOST_GROUPS = 30


def plan_size(
    prevalence: float,
    area: float,
    *,
    width: float | None = None,
    sensitivity: float | None = None,
    specificity: float | None = None,
) -> dict[str, Any]:
    """Return how many patients a test set needs, the `--json` document.

    Args:
        prevalence: the share of cases.
        area: the AUROC that is expected.
        width: of the intervals of AUROC, sensitivity and specificity, from end to end; 0.1 if nothing is said.

    Raises:
        UsageError: for numbers out of their range.
    """
    wanted = Wanted() if width is None else Wanted(auroc=width, sensitivity=width, specificity=width)
    asked = {"prevalence": prevalence, "sensitivity": sensitivity, "specificity": specificity}
    for name, value in (*asked.items(), ("width", wanted.auroc)):
        if value is not None and not 0 < value < 1:
            raise UsageError(f"--{name} {value:g}: it must lie between 0 and 1")
    if not 0.5 < area < 1:
        raise UsageError(f"--auroc {area:g}: it must lie between 0.5 and 1")
    needed = patients_needed(prevalence, area, wanted, sensitivity=sensitivity, specificity=specificity)
    most = max(needed.values())
    return {
        **asked,
        "auroc": area,
        "widths": asdict(wanted),
        "needed": needed,
        "patients": most,
        "cases": round(most * prevalence),
    }


_CRITERIA = {
    "auroc": "AUROC",
    "expected": "observed over expected cases",
    "slope": "calibration slope",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
}


def size_lines(document: dict[str, Any]) -> Lines:
    """Yield a row for each interval, then what decides."""
    rows: list[list[str] | None] = [
        [_CRITERIA[name], f"{document['widths'][name]:g}", f"{n:,}"] for name, n in document["needed"].items()
    ]
    title = (
        f"patients for intervals so wide (prevalence {document['prevalence']:g}, AUROC {document['auroc']:g})"
    )
    yield Table(title, ["of", "width", "patients"], rows)
    most = max(document["needed"], key=document["needed"].get)
    yield Line(
        f"{document['patients']:,} test patients, of them {document['cases']:,} cases, meet all; "
        f"the {_CRITERIA[most]} asks for most"
    )


def clinical_lines(document: dict[str, Any]) -> Lines:
    """Yield a column per site and class, then what follows."""
    on = "merged test set" if any(site["on"] == "merged" for site in document["sites"]) else "own test part"
    for class_name in {name: None for site in document["sites"] for name in site["classes"]}:
        columns = [one for one in cells(document) if one["class"] == class_name]
        for some in (columns[k : k + _BESIDE] for k in range(0, len(columns), _BESIDE)):
            kinds = [kind for kind in some[0] if kind not in ("site", "class")]
            rows: list[list[str] | None] = [[kind, *(one[kind] for one in some)] for kind in kinds]
            yield Table(f"{class_name}, by patient, on the {on}", ["", *(one["site"] for one in some)], rows)
    for site in document["sites"]:
        for name, one in site["classes"].items():
            for group, told in (one["subgroups"] or {}).items():
                whose = f"  {site['site']}, {name}, {document['by']} {group or 'unknown'}"
                yield Line(f"{whose}: {_group(told, document['least'])}")
    yield from (Line(f"  {said}") for said in findings(document))
    yield Line(f"next: wsi-fl report {document['run']}")


def _group(told: Mapping[str, Any] | None, least: int) -> str:
    if told is None:
        return f"fewer than {least} patients, not told"
    values = [f"{name} {one['value']:.2f}" for name, one in told.items() if isinstance(one, dict)]
    return ", ".join([f"{told['n']} patients", *values])
