"""`clinical`: what a clinic asks of a run, by patient; and `plan-size`: how many patients it takes to know that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning import clinical as measures
from wsi_fl.learning.clinical import LEAST, Names, Patients
from wsi_fl.learning.predictions import Predictions
from wsi_fl.learning.sample_size import Wanted, patients_needed
from wsi_fl.learning.validation import LONE
from wsi_fl.report.clinical import cells, findings
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.compare_runs import named
from wsi_fl.stages.answers.predictions import read_predictions
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.site.targets import column_of
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.types import UsageError, WsiFlError

_THRESHOLDS = tuple(round(k / 100, 2) for k in (1, 2, *range(5, 100, 5)))
"""Of the decision curve."""
_BESIDE = 4
"""Sites whose columns stand beside each other."""
_MOST_GROUPS = 30
_CRITERIA = {
    "auroc": "AUROC",
    "expected": "observed over expected cases",
    "slope": "calibration slope",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
}


def clinical(
    study: Study,
    names: Sequence[str],
    *,
    prevalence: float | None = None,
    by: str | None = None,
    least: int = LEAST,
) -> dict[str, Any]:
    """Describe each site's answers by patient, as `evaluate` left them; return the document.

    It is measured on the merged test set where there is one, and else on the site's own part. Of one run clinical.json
    keeps it. Folds are taken together, each of whose patients one model has not seen.

    Args:
        names: of a run, or of all folds of one, as `compare` takes them.
        prevalence: at which predictive values are told too.
        by: a column by which patients are grouped: `part` or `tumor_type`, or one of the sites' own tables.
        least: patients, and of these cases and others, of whom a group must have so many that it is told.

    Raises:
        UsageError: for a prevalence that is none, a column that nobody has, or a run whose answers are no classes.
        WsiFlError: when the run was not evaluated.
    """
    if prevalence is not None and not 0 < prevalence < 1:
        raise UsageError(f"--prevalence {prevalence:g}: it is a share between 0 and 1")
    runs = _folds(study, names)
    name = runs[0].name
    with ExitStack() as stack:
        parties = [stack.enter_context(RunContext.of_run(as_begun(study, run), run)) for run in runs]
        if parties[0].task.kind != "classes":
            raise UsageError(f"{name}: answers no question of classes; `wsi-fl report` says how good it is")
        document = described_runs(parties, prevalence=prevalence, by=by, least=least)
    if document is None:
        raise WsiFlError(f"{name} has no predictions of a test set; run `wsi-fl evaluate {name}`")
    if len(runs) == 1:
        runs[0].write("clinical", document)
    return document


def _folds(study: Study, names: Sequence[str]) -> list[RunFolder]:
    """Return one run, or runs that are folds of one; no patient is asked twice."""
    first, *others = runs = named(study, names)
    folds = {run.member.fold for run in runs}
    alike = all(
        (run.method, run.seed, run.settings) == (first.method, first.seed, first.settings) for run in others
    )
    if others and not (alike and None not in folds and len(folds) == len(runs)):
        raise UsageError("clinical takes one run, or the folds of one: a patient is asked once")
    return [run.folder for run in runs]


def described_runs(
    parties: Sequence[RunContext],
    *,
    prevalence: float | None = None,
    by: str | None = None,
    least: int = LEAST,
) -> dict[str, Any] | None:
    """Return the document of `clinical` without writing it; None where no predictions of classes lie here.

    Args:
        parties: a run, or the folds of one.
    """
    first = parties[0]
    told = {
        site.name: [one for party in parties if (one := _asked(party, site, by)) is not None]
        for site in first.members
    }
    rows = [_site(name, those, prevalence, least) for name, those in told.items() if those]
    if not rows:
        return None
    return {
        "run": first.study.relative(first.run.path),
        "folds": len(parties) if len(parties) > 1 else None,
        "least": least,
        "prevalence": prevalence,
        "by": by,
        "thresholds": list(_THRESHOLDS),
        "sites": rows,
    }


@dataclass(frozen=True)
class _Asked:
    """What the models of one site say of the patients of one run's test.

    Attributes:
        called: int64[m], the class that each is said to be of.
        groups: str[m]; None where nobody asked.
        alone: of the site's lone model, on the same patients.
        point: the score from which on a patient is called a case, as the run found it on the site's own slides, or one
            half; None of more than two classes.
    """

    patients: Patients
    called: NDArray[np.int64]
    groups: Names | None
    alone: Patients | None
    table: Predictions
    point: float | None


def _asked(party: RunContext, site: SiteFile, by: str | None) -> _Asked | None:
    folder = party.run.site(site.name)
    table = read_predictions(folder)
    if table is None or not len(table):
        return None
    patients, choice = _patients(table), folder.kept("prediction_model") or {}
    point = None  # of more than two classes the most probable one is called
    if len(table.outputs) == 2:
        found = choice.get("slide_threshold") if choice.get("model") == table.answer else None
        point = float(found) if found and patients.any_counts else 0.5  # an earlier version rounded to 0
    called = (patients.said[:, 1] >= point).astype(np.int64) if point is not None else patients.said.argmax(1)
    groups = _groups(party.study, site, table, patients, by) if by else None
    alone = read_predictions(folder, model=LONE) if table.answer != LONE else None
    return _Asked(patients, called, groups, None if alone is None else _patients(alone), table, point)


def _site(name: str, told: Sequence[_Asked], prevalence: float | None, least: int) -> dict[str, Any]:
    """One site's answers, class by class; of two classes the second one is the case."""
    patients = measures.together([one.patients for one in told])
    called = np.concatenate([one.called for one in told])
    groups = [one.groups for one in told if one.groups is not None]
    alone = [one.alone for one in told if one.alone is not None]
    theirs = measures.together(alone) if len(alone) == len(told) else None
    table, points = told[0].table, {one.point for one in told}
    found = {}
    for k in [1] if len(table.outputs) == 2 else range(len(table.outputs)):
        score, positive, case = patients.said[:, k], called == k, patients.truth == k
        more = None if theirs is None else measures.auroc_difference(score, theirs.said[:, k], case)
        whose = measures.subgroups(np.concatenate(groups), positive, case, score, least) if groups else None
        found[table.outputs[k]] = measures.described(score, positive, case, prevalence) | {
            "net_benefit": measures.net_benefit(score, case, _THRESHOLDS, prevalence),
            "subgroups": whose,
            "over_local": asdict(more) if more else None,
        }
    return {
        "site": name,
        "on": "merged" if (table.part != name).any() else "own",
        "model": table.answer,
        "unit": "patient" if all(table.patient) else "example",
        "any_counts": patients.any_counts,
        "point": points.pop() if len(points) == 1 else None,
        "classes": found,
    }


def _patients(table: Predictions) -> Patients:
    """By patient; examples of no known patient each by themselves."""
    rows = np.char.add("row ", np.arange(len(table)).astype(str))
    whose = np.where(table.patient == "", rows, table.whose(table.patient))
    return measures.by_patient(table.answers, table.truth, whose)


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


_LEAST = 1e-5
"""Shares and widths below it ask for more patients than there are people."""


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
        if value is not None and not _LEAST <= value <= 1 - _LEAST:
            raise UsageError(f"--{name} {value:g}: it must lie between {_LEAST:g} and {1 - _LEAST:g}")
    if not 0.5 + _LEAST <= area <= 1 - _LEAST:
        raise UsageError(f"--auroc {area:g}: it must lie between {0.5 + _LEAST:g} and {1 - _LEAST:g}")
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


def size_lines(document: dict[str, Any]) -> Lines:
    """Yield a row for each interval, then what decides."""
    rows = [
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
    on = f"{on} of {document['folds']} folds" if document["folds"] else on
    for class_name in {name: None for site in document["sites"] for name in site["classes"]}:
        columns = [one for one in cells(document) if one["class"] == class_name]
        for some in (columns[k : k + _BESIDE] for k in range(0, len(columns), _BESIDE)):
            kinds = [kind for kind in some[0] if kind not in ("site", "class")]
            rows = [[kind, *(one[kind] for one in some)] for kind in kinds]
            yield Table(f"{class_name}, by patient, on the {on}", ["", *(one["site"] for one in some)], rows)
    for site in document["sites"]:
        for name, one in site["classes"].items():
            for group, told in (one["subgroups"] or {}).items():
                whose = f"  {site['site']}, {name}, {document['by']} {group or 'unknown'}"
                yield Line(f"{whose}: {_group(told, document['least'])}")
    yield from (Line(f"  {said}") for said in findings(document))
    if document["folds"] is None:
        yield Line(f"next: wsi-fl report {document['run']}")


def _group(told: Mapping[str, Any] | None, least: int) -> str:
    if told is None:
        return f"fewer than {least} patients, not told"
    values = [f"{name} {one['value']:.2f}" for name, one in told.items() if isinstance(one, dict)]
    return ", ".join([f"{told['n']} patients", *values])
