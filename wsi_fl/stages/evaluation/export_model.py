"""`export` of a trained model: a file for other programs, and its model card."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from wsi_fl import __version__
from wsi_fl.learning.ensemble import COMMON
from wsi_fl.report.formatting import (
    SCORES,
    SHORT_SCORES,
    Json,
    describe_worst_detection,
    find_departures,
    format_number,
)
from wsi_fl.report.sections import find_benefit_measure
from wsi_fl.report.templates import fill_template
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.load_models import available_models, load_prediction_models
from wsi_fl.stages.evaluation.model_formats import FORMATS, ExportRequest, ExportResult
from wsi_fl.stages.evaluation.write_report import find_baselines
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.stages.site.target_labels import describe_target
from wsi_fl.stages.training.finished_runs import FinishedRun
from wsi_fl.study.folder import Study
from wsi_fl.system.files import file_sha256, write_json, write_text
from wsi_fl.types import UsageError

_CARD_FILES = ("MODEL_CARD.md", "model_card.json")


def export_model(
    study: Study,
    run_name: str,
    *,
    model_name: str,
    form: str,
    site: str | None = None,
    private: bool = False,
    out: Path | None = None,
) -> Json:
    """Write a model of a run for another program, with MODEL_CARD.md and model_card.json; return the document.

    Args:
        model_name: public name of the model.
        form: "wsinfer", "monai-bundle" or "onnx".
        site: of the model; by default the first finished site here, for exchanged models.
        private: whether a private model may leave.

    Raises:
        UsageError: when the run has no such model, the format does not support it, or the site does not allow it.
        WsiFlError: when the run is not finished.
    """
    if form not in FORMATS:
        raise UsageError(f"--format {form!r}: for a model use {', '.join(FORMATS)}")
    run = RunFolder(study.find_run(run_name))
    study = restore_study(study, run)
    run.require_summary()
    with RunContext.restore(study, run) as context:
        request = find_model(context, model_name, site)
        _require_allowed(request, private=private)
        folder = out or run.path / "exports" / form / f"{request.site.name}-{model_name}"
        build_arguments = (request.facts["classes"], request.shape, torch.device("cpu"))
        models = load_prediction_models(run, context.pipeline, request.site, *build_arguments, all_roles=True).models
        network = models[request.role]
        if request.role in COMMON:
            network = request.context.method.payload.strip_local_state(network)
        network.eval().requires_grad_(False)
        for card_file in _CARD_FILES:  # no card of another model
            (folder / card_file).unlink(missing_ok=True)
        result = FORMATS[form](request, network, folder)
        card = build_card(request, result, folder)
    write_json(folder / "model_card.json", card)
    write_text(folder / "MODEL_CARD.md", _render_card(card))
    run.site_folder(request.site.name).log(f"export: the {model_name} model as {form}, {', '.join(card['files'])}")
    return {
        "run": study.relative_path(run.path),
        "site": request.site.name,
        "model": model_name,
        "format": form,
        "out": study.relative_path(folder),
        "files": sorted((*card["files"], *_CARD_FILES)),
        "difference": result.difference,
        "warning": _warning_text(card),
    }


def render_model_export(document: Json) -> Lines:
    """Yield the privacy warning, then the files."""
    private = document["model"] == "private" or "without differential privacy" in document["warning"]
    yield TextLine(document["warning"], "bold yellow" if private else "")
    yield TextLine(f"{document['out']}: {', '.join(document['files'])}")
    yield TextLine("  read MODEL_CARD.md and write a licence into it before you share this")


def find_model(context: RunContext, model_name: str, site_name: str | None) -> ExportRequest:
    """Return the model of this name, of a site or of the first site with it here.

    Raises:
        UsageError: when the run has no such model, or it is not here.
        WsiFlError: when the record of its training store is missing.
    """
    run, models = context.run, available_models(context.method)
    if model_name not in models:
        raise UsageError(f"--model {model_name!r}: {context.name} has {' and '.join(models)}")
    role = models[model_name]
    if site_name is None and model_name == "private":
        raise UsageError("--model private: every site has one; add --site NAME")
    sites_with_model = [name for name in context.names if (run.site_folder(name).path / f"{role}.safetensors").exists()]
    candidates = [name for name in sites_with_model if name not in context.sites_lost and site_name in (None, name)]
    if not candidates:
        raise UsageError(
            f"{run.name}: no {model_name} model of {site_name or 'any site'} here; "
            f"found: {', '.join(sites_with_model) or 'none'}"
        )
    return ExportRequest(
        context, context.find_site(candidates[0]), model_name, role, run.site_folder(candidates[0]).store_facts()
    )


def _require_allowed(request: ExportRequest, *, private: bool) -> None:
    """Refuse a model that the site does not allow to leave, and a private model without `--private`."""
    site = request.site
    if request.model_name == "private":
        if not private:
            raise UsageError("--model private: it may have memorised patients; add --private if it may leave the site")
        if not site.allows("private_model"):
            raise UsageError(
                f"sites/{site.name}.toml: a real hospital's private model may leave only if this file allowed it when "
                'the run began; add allow = ["private_model"] and train a new run'
            )
        return
    refusing = [member.name for member in request.context.members if not member.allows("model")]
    if refusing and not request.has_guarantee:
        raise UsageError(
            f"sites/{refusing[0]}.toml: this model was trained without differential privacy; "
            'it may leave only with allow = ["model"]'
        )


def build_card(request: ExportRequest, result: ExportResult, folder: Path) -> Json:
    """Return the card of an exported model as a document."""
    context = request.context
    departures = find_departures(context.run.require_summary())
    return {
        "name": request.name,
        "role": request.model_name,
        "run": context.run.name,
        "method": context.name,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {file: file_sha256(folder / file) for file in result.files},
        "model": {
            "architecture": result.architecture,
            "input": result.input,
            "task": context.task.kind,
            "target": describe_target(context.pipeline.target),
            "classes": list(request.facts["classes"]),
            "difference": result.difference,
            "predicts": result.predicts,
        },
        "sites": request.site_names,
        "examples": context.kind.plural,
        "inputs": asdict(request.spec) | {"encoder": request.facts.get("encoder")},
        **_collect_scores(request),
        "privacy": {
            "covered": request.has_guarantee,
            "sites": _describe_privacy(request),
            "lost": [loss for loss in departures if loss["site"] in request.site_names],
        },
        "license": None,
    }


def _collect_scores(request: ExportRequest) -> dict[str, object]:
    """Return `metrics` on test patients and `benefit` over all sites, None where unknown or not allowed (`missing`)."""
    context, evaluation = request.context, request.context.run.read("evaluation")
    as_released = request.model_name == "shared" and context.method.payload.is_single_release
    missing, parts, benefit = "the run was not evaluated", [], None
    if evaluation is not None:
        refusal = 'the hospital does not allow the release of its scores (`allow = ["scores"]`)'
        missing = "the run has no scores of it" if request.site.allows("scores") else refusal
        merged = evaluation["merged"] is not None and all(site.allows("scores") for site in context.members)
        parts = _score_released_parts(request, evaluation) if as_released else _model_parts(request, evaluation, merged)
        baselines = find_baselines(context, FinishedRun.load(context.run.path)) if merged else ()
        benefit = next((baseline["gain"] for baseline in baselines if baseline.get("gain")), None)
    metrics = {"scores": list(evaluation["scores"]), "parts": parts} if evaluation and parts else None
    return {"metrics": metrics, "benefit": benefit, "as_released": as_released, "missing": missing}


def _score_released_parts(request: ExportRequest, evaluation: Json) -> list[Json]:
    """Return the scores of a released head at each site that allows them."""
    return [
        {"on": f"the test part of {row['site']}", "intervals": None} | row
        for row in evaluation.get("global_head") or ()
        if request.context.find_site(row["site"]).allows("scores")
    ]


def _model_parts(request: ExportRequest, evaluation: Json, merged: bool) -> list[Json]:
    """Return the scores of a site's model on its test part, and on all where `merged`, as far as the site allows."""
    row = next((row for row in evaluation["sites"] if row["site"] == request.site.name), None)
    if row is None or not request.site.allows("scores") or not (model := row["models"].get(request.role)):
        return []
    test_sets = [("the test parts of all sites", model, row)] * merged
    test_sets.append(("the test part of its site", model["own"], row["own"]))
    is_selected = row["model"] == request.role  # else intervals and some numbers of examples are unknown
    parts: list[Json] = []
    for on, scores, site_scores in test_sets:
        shared = {name: site_scores.get(name) if is_selected else None for name in ("n", "intervals")}
        known_n = {} if scores.get("n") is None else {"n": scores["n"]}
        parts.append({"on": on, **shared, **{name: scores.get(name) for name in evaluation["scores"]}, **known_n})
    return parts


def _describe_privacy(request: ExportRequest) -> list[dict[str, object]]:
    """Return the privacy account of every site whose part of the run is here."""
    ledgers = {name: request.context.study.ledger_path(name) for name in request.accounts}
    return [
        {
            "site": name,
            **{key: account[key] for key in ("epsilon", "delta", "guarantee", "unit")},
            "max_tpr_at_fpr_1pct": account.get("max_tpr_at_fpr_1pct"),
            "epsilon_lower": _find_audit_bound(request, name),
            "ledger": file_sha256(ledgers[name]) if ledgers[name].exists() else None,
        }
        for name, account in request.accounts.items()
    ]


def _find_audit_bound(request: ExportRequest, site: str) -> float | None:
    """Return the audit's lower bound on ε of this site's release, where the site allows scores."""
    document = request.context.run.read("audit") if request.context.find_site(site).allows("scores") else None
    if document is None:
        return None
    bounds = [
        model["canaries"]["epsilon_lower"]
        for row in document["sites"]
        for model in row["models"]
        if row["site"] == site
        and model["canaries"]
        and (model["model"] == "private") == (request.model_name == "private")
    ]
    return max(bounds, default=None)


def _warning_text(card: Json) -> str:
    """Return the privacy warning of a model card."""
    private = card["role"] == "private"
    if card["privacy"]["covered"]:
        home = "This is a private model, which was meant to stay at its site. " if private else ""
        return f"{home}Trained with differential privacy; its guarantee is under Privacy."
    description = "a private model: it was" if private else "a model that was"
    return (
        f"This is {description} trained without differential privacy and may have memorised patients. "
        "Treat it like its training data."
    )


def _render_card(card: Json) -> str:
    gain, scores = card["benefit"], (card["metrics"] or {}).get("scores", ())
    benefit_text = None
    if gain and (benefit := find_benefit_measure()):
        ensemble_note = " (ensembles with local models)" if card["as_released"] else ""
        score = format_number(gain["federated"]["mean"], 2)
        score_text = f"In the run federation{ensemble_note} reached {score} in {gain['measure']}"
        benefit_text = benefit.describe_benefit(gain, score_text, "local models without differential privacy").text
    context = {
        "card": card,
        "warning": _warning_text(card),
        "measures": {name: SHORT_SCORES.get(name, SCORES[name].lower()) for name in scores},
        "detected": describe_worst_detection(card["privacy"]["sites"]),
        "joining": benefit_text,
    }
    return fill_template("model_card", context, form="md") + "\n"
