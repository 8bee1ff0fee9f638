"""`audit_run`: worst-case attacks on the models of a run, and empirical bounds of its ε.

Results are rates and bounds; no example, no single loss and no inclusion of a canary is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypedDict

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.data.metrics import choose_classes
from wsi_fl.data.privacy_units import Canaries, PrivacyUnits
from wsi_fl.data.tasks import target_columns
from wsi_fl.evidence import attacks
from wsi_fl.evidence.audit_section import (
    SOURCE_HEADINGS,
    build_source_table,
    build_statistics_tables,
    list_audit_findings,
    list_model_rows,
)
from wsi_fl.evidence.source_inference import attack_sources
from wsi_fl.federation.methods import Method
from wsi_fl.learning.ensemble import COMMON
from wsi_fl.learning.local_training import example_losses, predict_examples
from wsi_fl.oneshot.class_statistics import NoisyStatistics, explain_invalid_statistics, head_excluding_site
from wsi_fl.oneshot.released_statistics import statistics_of
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.guarantee import ADJACENCY
from wsi_fl.report.formatting import DASH, Json, format_number
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.load_models import is_trained_with_dp
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.stages.site.site_data import select_choices
from wsi_fl.stages.training.build_sites import load_canaries, load_training
from wsi_fl.stages.training.checks import list_traits
from wsi_fl.stages.training.initial_models import build_model
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import find_clash
from wsi_fl.system.files import write_text
from wsi_fl.types import WsiFlError

_CONFIDENCE = 0.95
"""Confidence of a single bound, and of all statements on broken guarantees in a run together."""
_N_CANARIES = 400
"""Number of canaries for a useful lower bound on ε."""
_FALSE_POSITIVE_RATES = (0.01, 0.001)
_EXPOSURE_FILE = "exposure.csv"
"""File of a site with the exposure of each unit in its class statistics; it names patients and stays at the site."""


class AuditDocument(TypedDict):
    """The document of `audit_run`."""

    run: str
    method: str
    examples: str
    confidence: float
    tests: int
    level: float
    tested: str | None
    adjacency: str
    sites: list[Json]
    sources: Json | None
    influence: list[dict[str, object]]
    may_plant: bool


def audit_run(study: Study, run_name: str, *, watcher: Watcher | None = None) -> AuditDocument:
    """Audit a finished run, write audit/audit.json, and return the document.

    A hospital that does not share its patches is audited where its store is, on local examples only.

    Raises:
        WsiFlError: when the run is not finished, or no store of its sites is here.
    """
    watcher = watcher or SilentProgress()
    run = RunFolder(study.find_run(run_name))
    study = restore_study(study, run)
    run.require_summary()
    with RunContext.restore(study, run) as context:
        document = _build_document(context, watcher)
    run.write("audit", document)
    return document


def _build_document(context: RunContext, watcher: Watcher) -> AuditDocument:
    merged, lost = context.may_merge and len(context.members) > 1, context.sites_lost
    finished = [name for name in context.names if name not in lost and name not in context.receivers]
    audited_sites = [name for name in finished if merged or context.has_store(name)]
    if not audited_sites:
        raise WsiFlError(f"{context.study.root}/stores: no store of a site of this run; an audit needs one")
    tests = 0
    if context.pipeline.audit.canaries:  # of all sites, wherever they are audited
        summary = context.run.require_summary()
        guaranteed_sites = [row["site"] for row in summary["sites"] if row["guarantee"] != "none"]
        roles = [role for _, role in _list_models(context.method) if is_trained_with_dp(context, role)]
        tests = len(set(guaranteed_sites) - lost) * len(roles)
    level, rows = attacks.bonferroni_level(_CONFIDENCE, tests), []
    for done, name in enumerate(audited_sites):
        watcher.update("audit", done, len(audited_sites), name)
        rows.append(_audit_site(context, context.names.index(name), merged=merged, level=level))
        watcher.update("audit", done + 1, len(audited_sites), name)

    def load_released(name: str) -> nn.Module:
        if context.method.payload.is_single_release:
            return _load_head(context, name)
        return _load_audited_models(context, context.names.index(name))[-1].network

    return {
        "run": context.study.relative_path(context.run.path),
        "method": context.name,
        "examples": context.kind.plural,
        "confidence": _CONFIDENCE,
        "tests": tests,
        "level": level,
        "tested": attacks.describe_tests(tests, _CONFIDENCE) if tests else None,
        "adjacency": ADJACENCY,
        "sites": rows,
        "sources": attack_sources(context, rows, load_released) if merged else None,
        "influence": _measure_influence(context, audited_sites) if context.method.payload.is_single_release else [],
        "may_plant": not context.pipeline.audit.canaries and _can_plant_canaries(context),
    }


def _can_plant_canaries(context: RunContext) -> bool:
    """Return whether the settings of the run permit canaries."""
    return not find_clash(context.pipeline.replace_keys(audit={"canaries": _N_CANARIES}), list_traits(context.method))


def _list_models(method: Method) -> list[tuple[str, str]]:
    """Return (name, role) of the final model of each site, and of its released model if any."""
    mixed = method.mixing_role
    models = [("central" if method.learns_from == "everybody" or mixed == "private" else "private", "private")]
    return models if mixed is None else [*models, (mixed if mixed in COMMON else "released", mixed)]


class _AuditedModel(NamedTuple):
    """A site's "private" model, its "proxy", "shared" or "released" one of the last round, or the "central" one."""

    name: str
    dp: bool
    network: nn.Module


def _audit_site(context: RunContext, index: int, *, merged: bool, level: float) -> Json:
    name, pipeline = context.names[index], context.pipeline
    data, folder = context.open_data(name), context.run.site_folder(name)
    folder.record_store(data.digest(), data.describe_store())
    members = select_choices(load_training(context, name).train)  # as the others are
    others = {"own": data.test_examples}
    if merged:
        others["merged"] = context.join_tests()
    account = folder.read_account()
    if pipeline.audit.canaries and folder.read_document("canaries") is None:
        raise WsiFlError(f"{folder.path}/canaries.json is missing, the only record of the canaries; restore it")
    planted = load_canaries(data, folder)
    rows = []
    for model in _load_audited_models(context, index):
        upper = account["epsilon"] if model.dp and account["guarantee"] != "none" else None
        membership = _attack_membership(model, members, others, pipeline.evaluate.bootstrap)
        canaries = _score_canaries(model, planted, upper, account["delta"], level) if planted else None
        rows.append({"model": model.name, "dp": model.dp, "membership": membership, "canaries": canaries})
    released_statistics = context.method.payload.is_single_release and (
        not context.uses_files or name in context.statistics
    )
    return {
        "site": name,
        **{key: account[key] for key in ("epsilon", "delta", "guarantee", "unit")},
        "models": rows,
        "tail": _measure_exposure(context, name) if released_statistics else None,
    }


def _load_audited_models(context: RunContext, index: int) -> list[_AuditedModel]:
    """Load the final model of a site, and its released model from the checkpoint before the last exchange."""
    method, name = context.method, context.names[index]
    folder = context.run.site_folder(name)
    rounds = folder.list_checkpoints()
    if not rounds:
        raise WsiFlError(f"{folder.path}/state: no checkpoint, so the release of {name} cannot be audited")
    state, _ = folder.load_checkpoint(rounds[-1])
    models: list[_AuditedModel] = []
    for model_name, role in _list_models(method):
        prefix, sent = f"{role}/model/", bool(models)
        last = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        tensors = last if sent else folder.load_model(role)
        common = method.mixing_role == "private"
        network = build_model(context, index, role, common=common, state=tensors)
        if isinstance(network, SharedHead) and sent:
            network.clear_local_statistics()  # only the noisy statistics were released
        models.append(_AuditedModel(model_name, is_trained_with_dp(context, role), network.to(select_device()).eval()))
    return models


def _attack_membership(
    model: _AuditedModel, members: Cohort, others: Mapping[str, Cohort], repeats: int
) -> dict[str, Json]:
    """Attack membership by a threshold on the loss (Yeom et al., 2018), against each set of non-members."""
    scores = -example_losses(model.network, members, select_device())
    results: dict[str, Json] = {}
    for name, examples in others.items():
        non_member_scores = -example_losses(model.network, examples, select_device())
        interval = attacks.auroc_interval(scores, non_member_scores, members.patient, examples.patient, repeats=repeats)
        results[name] = {
            "members": len(scores),
            "non_members": len(non_member_scores),
            "auroc": attacks.compute_auroc(scores, non_member_scores),
            "interval": interval,
            "accuracy": attacks.threshold_accuracy(scores, non_member_scores, members.patient, examples.patient),
            "alarm": None if interval is None else interval[0] > 0.5,
            "tpr_at_fpr": {
                f"{rate:g}": attacks.tpr_at_fpr(scores, non_member_scores, rate) for rate in _FALSE_POSITIVE_RATES
            },
            "roc": [list(point) for point in attacks.roc_points(scores, non_member_scores)],
        }
    return results


def _score_canaries(
    model: _AuditedModel, planted: Canaries, upper: float | None, delta: float, level: float
) -> dict[str, float | None]:
    """Return the accuracy of guesses from canaries' losses after training, and the lower bound on ε.

    The guaranteed ε, `upper`, is broken when the bound exceeds it at the confidence `level`.
    """
    scores = -example_losses(model.network, planted.examples, select_device())
    bound_at = partial(attacks.canary_bound, scores, planted.included, delta)
    bound, among_all = bound_at(confidence=_CONFIDENCE), bound_at(confidence=level)
    return {
        "n": bound.n,
        "accuracy": bound.accuracy,
        "guesses": bound.guesses,
        "right": bound.n_correct,
        "epsilon_lower": bound.epsilon,
        "epsilon_lower_corrected": among_all.epsilon,
        "epsilon_upper": upper,
        "delta": delta,
        "broken": None if upper is None else among_all.epsilon > upper,
    }


def render_audit_lines(document: AuditDocument) -> Lines:
    """Yield a table with a row per model, then alarming results."""
    rows = []
    for row in list_model_rows(document):
        local_test, planted = row["own"], row["canaries"] or {}
        interval = DASH.join(f"{end:.3f}" for end in local_test["interval"] or ()) or DASH
        rates = (format_number(local_test["tpr_at_fpr"][f"{rate:g}"]) for rate in _FALSE_POSITIVE_RATES)
        bounds = (format_number(planted.get(f"epsilon_{end}"), 2) for end in ("lower", "upper"))
        auroc, accuracy = (format_number(local_test.get(name)) for name in ("auroc", "accuracy"))
        rows.append([f"{row['site']}, {row['model']}", auroc, interval, accuracy, *rates, *bounds])
    title = f"audit of {document['run']}: members against the site's own test {document['examples']}"
    yield TextTable(title, ("site, model", "AUROC", "95 %", "accuracy", "TPR 1 %", "0.1 %", "ε ≥", "ε ≤"), rows)
    if sources := build_source_table(document):
        yield TextTable("source inference: which site a record comes from", SOURCE_HEADINGS, sources)
    statistics_tables = build_statistics_tables(document)
    yield from (TextTable(*table) for table in statistics_tables)
    for finding in list_audit_findings(document):
        yield TextLine(f"  {finding.text}", "red" if finding.tone == "bad" else "yellow")
    if statistics_tables:
        yield TextLine(
            f"  sites/*/{_EXPOSURE_FILE} lists all, the most exposed first; it names patients, so keep it here"
        )
    if document["tests"]:
        yield from (TextLine(f"  {sentence}") for sentence in (document["tested"], document["adjacency"]))
    if document["may_plant"]:
        yield TextLine(f"  no canaries: train with --set audit.canaries={_N_CANARIES} to bound ε from below")
    yield TextLine(f"{document['run']} audited; next: wsi-fl report {document['run']}")


def _measure_exposure(context: RunContext, name: str) -> dict[str, object]:
    """Attack every unit of a site's class statistics, write the exposures to its folder, and return those of groups.

    For patients with more rows than the statistics use, rows are sampled. The file has the most exposed first, by μ for
    attackers who know all other units.
    """
    train, _, all_units = load_training(context, name)
    units, folder, stream = all_units.drop_empty(), context.run.site_folder(name), CipherStream.from_entropy()
    sigma = (folder.read_document("plan") or {}).get("sigma", 0.0)
    if context.uses_files:
        sigma = statistics_of(context)[name].header.sigma
    mechanism = NoisyStatistics(sigma, 1.0, units.n, units.kind)
    rows = units.draw_rows(np.arange(units.n), stream)
    parts = _unit_statistics(_load_head(context, name), mechanism, train, units, rows)
    empty = torch.zeros(parts.shape[1], dtype=torch.float64)
    groups = _group_units(context.open_data(name).classes, train, units)
    tail = attacks.measure_exposure(parts, sigma, groups, lambda: mechanism.add_noise(empty, stream).numpy())
    mu, mu_population = (attacks.compute_mu(parts, sigma, others_known=others) for others in (True, False))
    _, row, n_rows = np.unique(units.of_row, return_index=True, return_counts=True)
    slide = train.slide[row] if units.kind == "row" else ""
    table = pd.DataFrame({"patient": train.patient[row], "slide": slide, "rows": n_rows, "mu": mu})
    table["found_at_0.01"], table["mu_population"] = attacks.best_test_tpr(mu, 0.01), mu_population
    table = table.sort_values(["mu", "mu_population"], ascending=False, kind="stable")
    write_text(folder.path / _EXPOSURE_FILE, table.to_csv(index=False, float_format="%.6g"))
    return {"unit": units.kind, "n": units.n, **tail}


def _load_head(context: RunContext, name: str) -> SharedHead:
    state = context.run.site_folder(name).load_model("shared")
    head = build_model(context, context.names.index(name), "shared", state=state)
    assert isinstance(head, SharedHead)
    return head.to(select_device()).eval()


def _unit_statistics(
    head: SharedHead, mechanism: NoisyStatistics, train: Cohort, units: PrivacyUnits, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return float64[units, k], the contribution of each unit to the class statistics."""
    ((x, y),) = load_batches(train, iter([rows]), augment=None, device=select_device())
    z, y, unit_of_row = head.embed_rows(x).cpu(), target_columns(train.task, y.cpu()), units.of_row[rows]
    unit_tensor, head = torch.from_numpy(unit_of_row), head.cpu()
    order = np.argsort(unit_of_row, kind="stable")
    rows_by_unit = np.split(order, np.searchsorted(unit_of_row[order], np.arange(1, units.n)))
    selections = map(torch.from_numpy, rows_by_unit)
    return np.stack([mechanism.clip_statistics(head, z[k], y[k], unit_tensor[k]).numpy() for k in selections])


def _group_units(classes: Sequence[str], train: Cohort, units: PrivacyUnits) -> dict[str, NDArray[np.bool_]]:
    """Return masks of units by class, and by number of slides where some have several."""
    label = train.label[np.unique(units.of_row, return_index=True)[1]]
    slides = pd.Series(train.slide).groupby(units.of_row).nunique().clip(upper=3).to_numpy()
    groups = {f"class {name}": label == k for k, name in enumerate(classes) if train.task.kind == "classes"}
    names = ("1 slide", "2 slides", "3 slides or more") if slides.max() > 1 else ()
    groups |= {name: slides == k for k, name in enumerate(names, 1)}
    return {name: mask for name, mask in groups.items() if mask.any()}


def _measure_influence(context: RunContext, site_names: list[str]) -> list[dict[str, object]]:
    """Return the influence of each site's class statistics on the one-shot global head, by leaving them out.

    Statistics are a sum of n units, each of norm 1 at most, and noise; so n bounds a site's influence on the sum.
    Predictions are compared on the local test parts of `site_names`.
    """
    heads = {name: _load_head(context, name) for name in site_names}
    head = heads[site_names[0]]
    if int(head.n_sites) < 2:
        return []
    statistics: Mapping[str, Tensor] = {name: site_head.released.clone() for name, site_head in heads.items()}
    n_units = {row["site"]: row["n_units"] for row in (context.run.read("summary") or {})["sites"]}
    if context.uses_files:
        n_units = {name: release.header.n for name, release in statistics_of(context).items()}
        statistics = {
            name: torch.from_numpy(release.vector).double() for name, release in statistics_of(context).items()
        }
    head.clear_local_statistics()
    tests = [examples for name in site_names if len(examples := context.open_data(name).test_examples)]
    weights, classes = head.solve_head()[0], _predict_classes(head, tests)
    length = float(weights.norm())
    rows = context.pipeline.privacy.unit == "row" and not context.pipeline.audit.canaries

    def build_row(name: str, vector: Tensor) -> dict[str, object]:
        refusal = explain_invalid_statistics(head.layout, vector, n_units[name], rows=rows)  # as where it arrived
        remaining_head = head if refusal else head_excluding_site(head, vector)
        change = float((remaining_head.solve_head()[0] - weights).norm())
        shift = change / length if length else None  # noise may leave no weight
        is_comparable = len(classes) and head.kind == "classes"
        changed_share = float((_predict_classes(remaining_head, tests) != classes).mean()) if is_comparable else None
        row = {"site": name, "n": n_units[name], "length": float(vector[: -head.shape[0]].norm())}
        return row | {"refused": refusal, "moved": shift, "answers_changed": changed_share}

    return [build_row(name, vector) for name, vector in statistics.items()]


def _predict_classes(head: SharedHead, tests: list[Cohort]) -> NDArray[np.int64]:
    """Return the predicted class of every example."""
    predictions = [
        choose_classes(predict_examples(head.solve_released_head(), examples, select_device())) for examples in tests
    ]
    return np.concatenate(predictions) if predictions else np.zeros(0, np.int64)
