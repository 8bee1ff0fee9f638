"""The runs of a comparison, resolved by name and checked, and their baseline of local models, found or trained."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wsi_fl.federation.methods import LOCAL_METHOD
from wsi_fl.plugins import PAYLOAD_MODELS
from wsi_fl.stages.runtime.console import NestedProgress, Watcher
from wsi_fl.stages.site.example_kind import find_example_kind
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.target_labels import describe_target
from wsi_fl.stages.training.finished_runs import FinishedRun, find_finished_run, flatten_settings
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import AuditSettings, Pipeline
from wsi_fl.study.toml import toml_value
from wsi_fl.types import UsageError


def find_differing_settings(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the settings with different values in the runs that they affect, in the order of the configuration.

    A σ of 0 is included: such a run clips gradients without differential privacy. `train.tune` is included only where
    two rows differ in nothing else.
    """
    values: dict[str, list[Any]] = {}
    tuned = {(run.method, run.dp, run.pipeline.train.tune) for run in runs}
    for run in runs:
        for key, value in run.settings.items():
            if key == "train.tune" and (run.method, run.dp, not value) not in tuned:
                continue
            distinct = values.setdefault(key, [])
            if value not in distinct:
                distinct.append(value)
    return [k for k, distinct in values.items() if len(distinct) > 1 or (k == "privacy.sigma" and distinct == [0])]


def resolve_runs(study: Study, selections: Iterable[str]) -> list[FinishedRun]:
    """Return runs by folder, name, number, range of numbers (3-8) or pattern (*-proxyfl-*), without duplicates, in
    order.

    Raises:
        UsageError: when a word names no run, or a run was trained on other patches than the first.
        WsiFlError: when a run is not finished.
    """
    paths = dict.fromkeys(path for selection in selections for path in _resolve_paths(study, selection))
    runs = [FinishedRun.load(path) for path in paths]
    if not runs:
        raise UsageError("compare needs runs: folders, names, numbers, a range (3-8) or a pattern ('*-proxyfl-*')")
    if receiver_run := next((run for run in runs if not run.summary["sites"]), None):
        raise UsageError(
            f"{study.relative_path(receiver_run.folder.path)}: only a site without labels is here, with "
            "nothing to compare"
        )
    first = runs[0]
    for run in runs[1:]:
        run_path, first_path = (study.relative_path(compared_run.folder.path) for compared_run in (run, first))
        run_question, first_question = (describe_target(compared_run.pipeline.target) for compared_run in (run, first))
        if run_question != first_question:
            raise UsageError(
                f"{run_path}: has another target ({run_question}) than {first_path} ({first_question}); "
                "compare runs of one target"
            )
        if run.division != first.division:
            raise UsageError(
                f"{run_path}: tests other patients than {first_path}, by {_describe_division(run)} and not by "
                f"{_describe_division(first)}; compare runs of one division"
            )
        if not run.has_same_inputs(first.inputs):
            a, b = first.inputs, run.inputs
            names = a.keys() & b.keys() if first.division[1] else a.keys() | b.keys()
            differing_site = next(name for name in sorted(names) if a.get(name) != b.get(name))
            raise UsageError(
                f"{run_path}: was trained on other {find_example_kind(run.pipeline).plural} than {first_path} (site "
                f"{differing_site}); compare runs on the same stores"
            )
    return runs


def _describe_division(run: FinishedRun) -> str:
    folds, left_out = run.division
    return f"{folds} folds" if folds else "leaving a site out" if left_out else "the stores' own split"


def _resolve_paths(study: Study, selection: str) -> list[Path]:
    span = re.fullmatch(r"(\d+)-(\d+)", selection)
    if span is None and not re.search(r"[*?[]", selection):
        return [study.find_run(selection)]
    all_paths = sorted(path.parent for path in study.runs_path.glob("*/config.toml"))
    if span:
        first, last = int(span[1]), int(span[2])
        chosen = [p for p in all_paths if (m := re.match(r"(\d+)-", p.name)) and first <= int(m[1]) <= last]
    else:
        pattern = Path(selection).name
        chosen = [path for path in all_paths if path.match(pattern)]
    if not chosen:
        raise UsageError(f"no run {selection!r} in {study.relative_path(study.runs_path)}/")
    return chosen


def add_baseline(
    study: Study, selected: Sequence[FinishedRun], *, train_missing: bool, watcher: Watcher
) -> tuple[list[FinishedRun], list[str]]:
    """Return (given runs and those of the local baseline for every seed and fold, notes).

    The baseline has the settings of the first run. Its runs are found in the study; missing runs are trained, or named
    in a note where that is not wanted or impossible.
    """
    first, runs = selected[0], list(selected)
    baseline_members = {run.repetition for run in selected if is_baseline(run, first)}
    references = {
        run.repetition: replace(first, pipeline=_pipeline_like(study, first.pipeline, run), inputs=run.inputs)
        for run in sorted(selected, key=lambda run: run.repetition.sort_key)
        if run.repetition not in baseline_members
    }
    missing = []
    for reference in references.values():
        if (
            run := find_finished_run(study, LOCAL_METHOD, baseline_pipeline(reference.pipeline), reference.inputs)
        ) is not None:
            runs.append(run)
        else:
            missing.append(reference)
    if not missing:
        return runs, []
    member_text = _format_members(missing)
    problem = "not asked for"
    if train_missing:
        problem = next(filter(None, (_explain_missing_baseline(study, reference) for reference in missing)), "")
    if problem:
        others = f", and likewise for {_format_members(missing[1:])}" if missing[1:] else ""
        return runs, [
            f"The baseline of {member_text} was not trained ({problem}): "
            f"`{_training_command(*_training_recipe(study, missing[0]))}` "
            f"trains that of {_format_members(missing[:1])}{others}."
        ]
    trained = [
        _train_baseline(study, reference, NestedProgress(watcher, k, len(missing)))
        for k, reference in enumerate(missing)
    ]
    names = ", ".join(study.relative_path(run.folder.path) for run in trained)
    return [*runs, *trained], [f"The baseline of {member_text} was trained for this comparison ({names})."]


def _pipeline_like(study: Study, pipeline: Pipeline, run: FinishedRun) -> Pipeline:
    """Return the pipeline with the seed, fold and sites of a run; if some stores are here, only with those sites."""
    run_values = {key: getattr(run.pipeline.train, key) for key in ("seed", "folds", "fold", "left_out")}
    pipeline = pipeline.replace_keys(train=run_values).model_copy(update={"sites": run.pipeline.sites})
    with RunContext.create(study, pipeline, LOCAL_METHOD) as context:
        names = [site.name for site in context.sites if context.has_store(site.name)]
        fewer = 0 < len(names) < len(context.sites)
    return pipeline.model_copy(update={"sites": names}) if fewer else pipeline


def _train_baseline(study: Study, reference: FinishedRun, watcher: Watcher) -> FinishedRun:
    name, overrides = _training_recipe(study, reference)
    watcher.print_message(
        f"  no run yet of local models without DP, {reference.repetition}; training it: "
        f"{_training_command(name, overrides)}"
    )
    context = RunContext.create(study, reference.pipeline, LOCAL_METHOD)
    backend = "local" if context.may_merge or len(context.sites) == 1 else "mpi"
    options: Any = {"overrides": overrides, "backend": backend, "watcher": watcher, "is_reported": True}
    return FinishedRun.load(study.find_run(train(study, method=LOCAL_METHOD, pipeline_name=name, **options)["run"]))


def _format_members(runs: Sequence[FinishedRun]) -> str:
    """Return repetitions as text: seeds by number, folds and sites in full."""
    members = [run.repetition for run in runs]
    if any(member.fold is not None or member.left_out is not None for member in members):
        return "; ".join(map(str, members))
    return f"seed{'' if len(members) == 1 else 's'} {', '.join(str(member.seed) for member in members)}"


def is_baseline(run: FinishedRun, first: FinishedRun) -> bool:
    """Return whether a run is the local baseline with the settings and stores of the first run."""
    return run.repeats(LOCAL_METHOD, baseline_pipeline(first.pipeline), first.inputs)


def baseline_pipeline(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline of the local baseline: tuned on the site's patients, without DP and canaries."""
    model = pipeline.model
    is_payload = model.proxy.split(":")[0] in PAYLOAD_MODELS  # of all sites, which a local baseline does not have
    proxy = model.private if is_payload else model.proxy
    local_pipeline = pipeline.replace_keys(model={"proxy": proxy}, privacy={"enabled": False}, train={"tune": True})
    return local_pipeline.model_copy(update={"audit": AuditSettings()})


def _explain_missing_baseline(study: Study, reference: FinishedRun) -> str:
    """Return the reason why the baseline cannot be trained here; "" without one."""
    with RunContext.create(study, reference.pipeline, LOCAL_METHOD) as context:
        for site in context.sites:
            if not context.has_store(site.name):
                return f"the store of {site.name} is not here"
            if not site.allows("patches"):
                continue
            data = context.open_data(site.name)
            if data.digest() != reference.inputs.get(site.name):
                return f"the store of {site.name} was rewritten since these runs"
            try:
                data.require_current()
            except UsageError:
                return f"the features of {site.name} are of patches before it was tiled again"
    return ""


def _training_recipe(study: Study, reference: FinishedRun) -> tuple[str, list[str]]:
    """Return (pipeline, overrides) with the settings of a run's local baseline."""
    target_values = flatten_settings(baseline_pipeline(reference.pipeline))
    name = str(reference.folder.manifest["pipeline"])
    with suppress(UsageError):  # the pipeline may be gone
        base = flatten_settings(study.load_pipeline(name))
        base["sites"] = base["sites"] or study.site_names()
        changed = {key: value for key, value in target_values.items() if value != base.get(key)}
        if None not in changed.values():
            return name, [f"{key}={toml_value(value)}" for key, value in changed.items()]
    config_path = reference.folder.path / "config.toml"
    fixed = ["privacy.enabled=false", "train.tune=true"]
    run_values = {key: target_values[key] for key in ("train.seed", "train.fold", "train.left_out", "sites")}
    if reference.repetition.left_out is None:
        run_values.pop("sites")
    return str(config_path), [
        *fixed,
        *(f"{key}={toml_value(value)}" for key, value in run_values.items() if value is not None),
    ]


def _training_command(name: str, overrides: Sequence[str]) -> str:
    """Return the shell command that trains the baseline."""
    sets = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["wsi-fl", "train", "--method", LOCAL_METHOD, "--pipeline", name, *sets])
