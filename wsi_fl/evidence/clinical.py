"""`describe_clinically`: clinical measures of a run by patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from wsi_fl.data.prediction_table import PredictionTable
from wsi_fl.data.tasks import POSSIBLE_CLASSES
from wsi_fl.evidence import clinical_metrics as measures
from wsi_fl.evidence.clinical_metrics import MIN_SUBGROUP
from wsi_fl.evidence.clinical_section import build_clinical_cells, build_clinical_section, list_clinical_findings
from wsi_fl.evidence.compare_runs import resolve_runs
from wsi_fl.evidence.predicted_lesions import explain_left_out, score_lesions, tabulate_lesions
from wsi_fl.learning.ensemble import LOCAL
from wsi_fl.report.formatting import Json
from wsi_fl.report.sections import PageSection, SectionContext
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.write_predictions import read_predictions
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.stages.site.target_labels import read_column
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import UsageError, WsiFlError

_DECISION_THRESHOLDS = tuple(round(k / 100, 2) for k in (1, 2, *range(5, 100, 5)))
"""Thresholds of the decision curve."""
_SITES_PER_TABLE = 4
"""Number of sites in a table of the console."""
_MAX_GROUPS = 30


def describe_clinically(
    study: Study,
    names: Sequence[str],
    *,
    prevalence: float | None = None,
    by: str | None = None,
    least: int = MIN_SUBGROUP,
    lesions: bool = False,
) -> Json:
    """Compute clinical measures of each site's predictions by patient; return the document.

    The test set is the merged one, else the local test part. With one run the document is written to clinical.json.
    Folds are pooled; each patient is predicted by the model of the fold that held the patient out.

    Args:
        names: of a run, or of all folds of one, as in `compare`.
        prevalence: of additional predictive values.
        by: a column for subgroups: `part` or `tumor_type`, or a column of the sites' tables.
        least: smallest number of patients, of cases and of others, of a reported subgroup.
        lesions: whether lesions found in the slides of `predict` are scored too.

    Raises:
        UsageError: for an invalid prevalence, an unknown column, or a run without classes.
        WsiFlError: when the run was not evaluated.
    """
    if prevalence is not None and not 0 < prevalence < 1:
        raise UsageError(f"--prevalence {prevalence:g}: it is a share between 0 and 1")
    runs = _find_folds(study, names)
    name = runs[0].name
    with ExitStack() as stack:
        contexts = [stack.enter_context(RunContext.restore(restore_study(study, run), run)) for run in runs]
        if contexts[0].task.kind != "classes":
            raise UsageError(f"{name}: predicts no classes; see its scores in `wsi-fl report`")
        document = _describe_runs(contexts, prevalence=prevalence, by=by, least=least)
        if document is not None and lesions:
            document = {**document, "lesions": score_lesions(contexts)}
    if document is None:
        raise WsiFlError(f"{name} has no predictions of a test set; run `wsi-fl evaluate {name}`")
    if len(runs) == 1:
        runs[0].write("clinical", document)
    return document


def _find_folds(study: Study, names: Sequence[str]) -> list[RunFolder]:
    """Return one run, or the folds of one."""
    first, *others = runs = resolve_runs(study, names)
    folds = {run.repetition.fold for run in runs}
    expected = first.method, first.seed, first.settings
    same_settings = all((run.method, run.seed, run.settings) == expected for run in others)
    if others and not (same_settings and None not in folds and len(folds) == len(runs)):
        raise UsageError("clinical takes one run, or the folds of one: each patient counts once")
    return [run.folder for run in runs]


def _describe_runs(
    contexts: Sequence[RunContext], *, prevalence: float | None = None, by: str | None = None, least: int = MIN_SUBGROUP
) -> Json | None:
    """Return the document of a run, or of the folds of one; None without predictions of classes here."""
    first = contexts[0]
    rows = []
    for site in first.members:
        runs = _load_folds(contexts, site, by)
        if len({run.any_counts for run in runs}) > 1:
            runs = _load_folds(contexts, site, by, is_mixed=True)
        if runs:
            has_types = first.task is POSSIBLE_CLASSES
            rows.append(_describe_site(site.name, runs, prevalence, least, has_types=has_types))
    if not rows:
        return None
    return {
        "run": first.study.relative_path(first.run.path),
        "folds": len(contexts) if len(contexts) > 1 else None,
        "least": least,
        "prevalence": prevalence,
        "by": by,
        "thresholds": list(_DECISION_THRESHOLDS),
        "sites": rows,
        "lesions": None,
    }


class _SitePatients(NamedTuple):
    """The test patients of a site in a run.

    Attributes:
        rows: by patient: truth, predicted, perhaps group, and the probabilities of the classes, by the site's model
            (0, 1, …) and perhaps by its local model ("0_local", …).
        point: threshold of the score for a case, chosen on the site's training slides, else one half; None for more
            than two classes.
    """

    rows: pd.DataFrame
    table: PredictionTable
    any_counts: bool = False
    point: float | None = None


def _load_folds(
    contexts: Sequence[RunContext], site: SiteFile, by: str | None, *, is_mixed: bool = False
) -> list[_SitePatients]:
    loaded = (_load_patients(context, site, by, is_mixed=is_mixed) for context in contexts)
    return [patients for patients in loaded if patients]


def _load_patients(context: RunContext, site: SiteFile, by: str | None, *, is_mixed: bool) -> _SitePatients | None:
    folder = context.run.site_folder(site.name)
    table = read_predictions(folder)
    if table is None or not len(table):
        return None
    (rows, any_counts), choice = (
        _group_by_patient(table, is_mixed=is_mixed),
        folder.read_document("prediction_model") or {},
    )
    if len(table.outputs) != 2:
        point = None  # the most probable class is predicted
        rows["predicted"] = rows.drop(columns="truth").to_numpy().argmax(1)
    else:
        threshold = choice.get("slide_threshold") if choice.get("model") == table.model else None
        point = float(threshold) if threshold and any_counts else 0.5  # an earlier version rounded to 0
        rows["predicted"] = (rows[1] >= point).astype(np.int64)
    if by:
        rows["group"] = _group_of_patients(context.study, site, table, by).reindex(rows.index, fill_value="")
    local_table = read_predictions(folder, model=LOCAL) if table.model != LOCAL else None
    if local_table is not None:
        rows = rows.join(_group_by_patient(local_table, is_mixed=is_mixed)[0].add_suffix("_local"))
    return _SitePatients(rows, table, any_counts, point)


def _describe_site(
    name: str, runs: Sequence[_SitePatients], prevalence: float | None, least: int, *, has_types: bool = False
) -> Json:
    """Return the measures of a site by class; of two classes the second one is the case.

    In a study of tumour types (`has_types`) those of a diagnosis are among the patients who may have it, whose
    probability is above 0; where nobody may, it has none.
    """
    table, points, all_patients = runs[0].table, {run.point for run in runs}, pd.concat([run.rows for run in runs])
    has_local = all("truth_local" in run.rows for run in runs)
    class_rows = {}
    for k in [1] if len(table.outputs) == 2 else range(len(table.outputs)):
        patients = all_patients[all_patients[k] > 0] if has_types else all_patients
        if patients.empty:
            continue
        score, predicted, truth = (patients[column].to_numpy() for column in (k, "predicted", "truth"))
        positive, case, group_rows, difference = predicted == k, truth == k, None, None
        if has_local:
            difference = measures.auroc_difference(score, patients[f"{k}_local"].to_numpy(), case)
        if "group" in patients:
            group_rows = measures.describe_subgroups(patients["group"].to_numpy(str), positive, case, score, least)
        class_rows[table.outputs[k]] = measures.describe_class(score, positive, case, prevalence) | {
            "net_benefit": measures.net_benefit(score, case, _DECISION_THRESHOLDS, prevalence),
            "subgroups": group_rows,
            "over_local": asdict(difference) if difference else None,
        }
    return {
        "site": name,
        "on": "merged" if (table.obs["part"] != name).any() else "own",
        "model": table.model,
        "unit": "patient" if all(table.patient) else "example",
        "any_counts": any(run.any_counts for run in runs),
        "point": points.pop() if len(points) == 1 else None,
        "classes": class_rows,
    }


def _group_by_patient(table: PredictionTable, *, is_mixed: bool) -> tuple[pd.DataFrame, bool]:
    """Aggregate predictions by patient; an example without a known patient is one of its own."""
    rows = np.char.add("row ", np.arange(len(table)).astype(str))
    patient_names = np.where(table.patient == "", rows, table.qualify_names("patient"))
    return measures.aggregate_patients(table.model_predictions, table.truth, patient_names, is_mixed=is_mixed)


def _group_of_patients(study: Study, site: SiteFile, table: PredictionTable, by: str) -> pd.Series:
    """Return the subgroup of each patient by name, that of the first example; "" where unknown."""
    if by in ("part", *table.extra_columns):
        column = table.obs[by].to_numpy(str)
    else:
        values: dict[tuple[str, str, str], str] = {}
        for name in sorted(set(table.obs["part"])):
            owner = site if name == site.name else study.load_site(name)
            values |= {(name, *key): value for key, value in read_column(study, owner, by).items()}
        examples = table.obs[["part", "slide", "patient"]].itertuples(index=False)
        column = np.array([
            values.get((part, "slide", slide), values.get((part, "patient", patient), ""))
            for part, slide, patient in examples
        ])  # fmt: skip
    if not any(column.tolist()):
        raise UsageError(f"--by {by}: no table of the sites has a slide or patient of this test set")
    if len(set(column.tolist())) > _MAX_GROUPS:
        raise UsageError(f"--by {by}: has more than {_MAX_GROUPS} values; group them in a column of their own")
    return pd.Series(column, table.qualify_names("patient")).groupby(level=0).first()


def build_section(context: SectionContext) -> PageSection | None:
    """Return the section "For the clinic" of a run's page, with the options of the last `clinical`.

    None without predictions of classes here.
    """
    run_context = context.run_context
    if run_context.task.kind != "classes":
        return None
    last = run_context.run.read("clinical") or {}
    document = _describe_runs([run_context], **{k: last[k] for k in ("prevalence", "by", "least") if k in last})
    if document is None:
        return None
    document = {**document, "lesions": last.get("lesions")}
    values = build_clinical_section(document, context.colors)
    html = context.fill_template("clinical", Path(__file__).parent, values | {"document": document})
    return PageSection("clinic", "For the clinic", "comparison", html, _answer_checklist(document, values))


def _answer_checklist(document: Json, values: Mapping[str, Any]) -> dict[int, str]:
    """Return answers to items of TRIPOD+AI, from the first site's measures."""
    site, by = document["sites"][0], document["by"]
    cases = ", ".join(f"{name} {measures['cases']} of {measures['n']}" for name, measures in site["classes"].items())
    patients = "merged test" if site["on"] == "merged" else f"{site['site']}'s test"
    chosen = "a threshold chosen on each hospital's training slides, or 0.5" if site["point"] else "the likeliest class"
    answers = {
        10: f"cases among {patients} patients: {cases}; pmvalsampsize computes the sample size of a test set",
        15: f"probabilities; {chosen}",
        23: f"see For the clinic{f', by {by}' if by else ''}",
    }
    return answers | ({14: f"performance by {by}; see For the clinic"} if values["told_by_name"] else {})


def render_clinical_lines(document: Json) -> Lines:
    """Yield a column per site and class, then subgroups and findings."""
    on = "merged test set" if any(site["on"] == "merged" for site in document["sites"]) else "local test part"
    on = f"{on} of {document['folds']} folds" if document["folds"] else on
    for class_name in {name: None for site in document["sites"] for name in site["classes"]}:
        columns = [column for column in build_clinical_cells(document) if column["class"] == class_name]
        for block in (columns[k : k + _SITES_PER_TABLE] for k in range(0, len(columns), _SITES_PER_TABLE)):
            kinds = [kind for kind in block[0] if kind not in ("site", "class")]
            rows = [[kind, *(column[kind] for column in block)] for kind in kinds]
            yield TextTable(f"{class_name}, by patient, on the {on}", ["", *(column["site"] for column in block)], rows)
    for site in document["sites"]:
        for name, class_measures in site["classes"].items():
            for group, group_row in (class_measures["subgroups"] or {}).items():
                text = f"fewer than {document['least']} patients, not reported"
                if group_row is not None:
                    values = (f"{k} {v['value']:.2f}" for k, v in group_row.items() if isinstance(v, dict))
                    text = ", ".join([f"{group_row['n']} patients", *values])
                yield TextLine(f"  {site['site']}, {name}, {document['by']} {group or 'unknown'}: {text}")
    yield from (TextLine(f"  {sentence}") for sentence in list_clinical_findings(document))
    if document["lesions"] is not None:
        yield tabulate_lesions(document["lesions"])
        yield from (TextLine(f"  {sentence}") for sentence in explain_left_out(document["lesions"]))
    if document["folds"] is None:
        yield TextLine(f"next: wsi-fl report {document['run']}")
