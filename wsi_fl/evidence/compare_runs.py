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
    for run in runs:
        if problem := _explain_incomparable(run, runs[0], study.relative_path(runs[0].folder.path)):
            raise UsageError(f"{study.relative_path(run.folder.path)}: {problem}")
    return runs


def _explain_incomparable(run: FinishedRun, first: FinishedRun, first_path: str) -> str:
    """Return the reason why a run cannot be compared with the first one; "" without one."""
    if not run.summary["sites"]:
        return "only a site without labels is here, with nothing to compare"
    question, first_question = (describe_target(compared_run.pipeline.target) for compared_run in (run, first))
    if question != first_question:
        return f"has another target ({question}) than {first_path} ({first_question}); compare runs of one target"
    if run.division != first.division:
        return (
            f"tests other patients than {first_path}, by {_describe_division(run)} and not by "
            f"{_describe_division(first)}; compare runs of one division"
        )
    if run.has_same_inputs(first.inputs):
        return ""
    a, b = first.inputs, run.inputs
    names = a.keys() & b.keys() if first.division[1] else a.keys() | b.keys()
    differing_site = next(name for name in sorted(names) if a.get(name) != b.get(name))
    examples = find_example_kind(run.pipeline).plural
    return f"was trained on other {examples} than {first_path} (site {differing_site}); compare runs on the same stores"


def _describe_division(run: FinishedRun) -> str:
    folds, left_out = run.division
    return f"{folds} folds" if folds else "leaving a site out" if left_out else "the stores' own split"


def _resolve_paths(study: Study, selection: str) -> list[Path]:
    span = re.fullmatch(r"(\d+)-(\d+)", selection)
    if span is None and not re.search(r"[*?[]", selection):
        return [study.find_run(selection)]
    paths = sorted(path.parent for path in study.runs_path.glob("*/config.toml"))
    if span:
        numbers = range(int(span[1]), int(span[2]) + 1)
        chosen = [path for path in paths if (m := re.match(r"(\d+)-", path.name)) and int(m[1]) in numbers]
    else:
        chosen = [path for path in paths if path.match(Path(selection).name)]
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
    others = (run for run in selected if run.repetition not in baseline_members)
    missing = []
    for run in {run.repetition: run for run in sorted(others, key=lambda run: run.repetition.sort_key)}.values():
        reference = replace(first, pipeline=_pipeline_like(study, first.pipeline, run), inputs=run.inputs)
        pipeline = baseline_pipeline(reference.pipeline)
        if existing_run := find_finished_run(study, LOCAL_METHOD, pipeline, reference.inputs):
            runs.append(existing_run)
        else:
            missing.append(reference)
    if not missing:
        return runs, []
    subject = f"The baseline of {_format_members(missing)}"
    problem = "" if train_missing else "not asked for"
    if problem := problem or next(filter(None, (_explain_untrainable(study, reference) for reference in missing)), ""):
        more = f", and likewise for {_format_members(missing[1:])}" if missing[1:] else ""
        command = _training_command(*_training_recipe(study, missing[0]))
        return runs, [
            f"{subject} was not trained ({problem}): `{command}` trains that of {_format_members(missing[:1])}{more}."
        ]
    trained = [
        _train_baseline(study, reference, NestedProgress(watcher, k, len(missing)))
        for k, reference in enumerate(missing)
    ]
    names = ", ".join(study.relative_path(run.folder.path) for run in trained)
    return [*runs, *trained], [f"{subject} was trained for this comparison ({names})."]


def _pipeline_like(study: Study, pipeline: Pipeline, run: FinishedRun) -> Pipeline:
    """Return the pipeline with the seed, fold and sites of a run; if some stores are here, only with those sites."""
    run_values = {key: getattr(run.pipeline.train, key) for key in ("seed", "folds", "fold", "left_out")}
    pipeline = pipeline.replace_keys(train=run_values).model_copy(update={"sites": run.pipeline.sites})
    with RunContext.create(study, pipeline, LOCAL_METHOD) as context:
        names = [site.name for site in context.sites if context.has_store(site.name)]
        return pipeline.model_copy(update={"sites": names}) if 0 < len(names) < len(context.sites) else pipeline


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


def _explain_untrainable(study: Study, reference: FinishedRun) -> str:
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
    keys = ["privacy.enabled", "train.tune", "train.seed", "train.fold", "train.left_out"]
    keys += ["sites"] if reference.repetition.left_out is not None else []
    overrides = [f"{key}={toml_value(value)}" for key in keys if (value := target_values[key]) is not None]
    return str(reference.folder.path / "config.toml"), overrides


def _training_command(name: str, overrides: Sequence[str]) -> str:
    """Return the shell command that trains the baseline."""
    sets = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["wsi-fl", "train", "--method", LOCAL_METHOD, "--pipeline", name, *sets])
