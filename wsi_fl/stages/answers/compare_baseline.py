"""The baseline of a comparison: every hospital alone, found among the runs of the study or trained."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wsi_fl.federation.methods import ALONE, SHARED
from wsi_fl.stages.answers.compare_runs import Run, finished, flat, is_of, settings
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.train import Member, train
from wsi_fl.stages.work.console import OneOf, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Audit, Pipeline
from wsi_fl.study.toml import toml_value
from wsi_fl.types import UsageError

BASELINE = ALONE


def with_baseline(
    study: Study, given: Sequence[Run], *, train_missing: bool, watcher: Watcher
) -> tuple[list[Run], list[str]]:
    """(given runs and those of their baseline, notes): every hospital alone, for every seed and fold given.

    The baseline has the settings of the first run. Runs of the study that are that are taken; missing ones are
    trained, or named in a note where they may not or cannot be.
    """
    first, runs = given[0], list(given)
    alone = {run.member for run in given if is_baseline(run, first)}
    wanted = {
        run.member: replace(first, pipeline=_here(study, _of_member(first.pipeline, run)), inputs=run.inputs)
        for run in sorted(given, key=lambda run: run.member.place)
        if run.member not in alone
    }
    found = {
        member: finished(study, BASELINE, _alone(like.pipeline), like.inputs)
        for member, like in wanted.items()
    }
    runs += [run for run in found.values() if run is not None]
    missing = [wanted[member] for member, run in found.items() if run is None]
    if not missing:
        return runs, []
    said = _members([like.member for like in missing])
    problem = (
        next(filter(None, (_cannot_train(study, like) for like in missing)), "")
        if train_missing
        else "not asked for"
    )
    if problem:
        name, overrides = _recipe(study, missing[0])
        others = f", and likewise of {_members([like.member for like in missing[1:]])}" if missing[1:] else ""
        return runs, [
            f"The baseline of {said} was not trained ({problem}): "
            f"`{_command(name, overrides)}` trains that of {_members([missing[0].member])}{others}."
        ]
    trained = [_trained(study, like, OneOf(watcher, k, len(missing))) for k, like in enumerate(missing)]
    names = ", ".join(study.relative(run.folder.path) for run in trained)
    return [*runs, *trained], [f"The baseline of {said} was trained for this comparison ({names})."]


def _here(study: Study, pipeline: Pipeline) -> Pipeline:
    """The pipeline with the sites alone whose stores are here, if there are some: a hospital measures itself."""
    with RunContext.of(study, pipeline, BASELINE) as party:
        names = [site.name for site in party.sites if party.has_store(site.name)]
        fewer = 0 < len(names) < len(party.sites)
    return pipeline.model_copy(update={"sites": names}) if fewer else pipeline


def _of_member(pipeline: Pipeline, run: Run) -> Pipeline:
    """The pipeline with the seed, fold and sites of a run."""
    own = {key: getattr(run.pipeline.train, key) for key in ("seed", "folds", "fold", "left_out")}
    train_keys = pipeline.train.model_copy(update=own)
    return pipeline.model_copy(update={"train": train_keys, "sites": run.pipeline.sites})


def _trained(study: Study, like: Run, watcher: Watcher) -> Run:
    name, overrides = _recipe(study, like)
    watcher.say(
        f"  no run yet of a hospital alone without DP, {like.member}; training it: {_command(name, overrides)}"
    )
    party = RunContext.of(study, like.pipeline, BASELINE)
    backend = "local" if party.may_merge or len(party.sites) == 1 else "mpi"
    summary = train(
        study,
        method=BASELINE,
        pipeline_name=name,
        overrides=overrides,
        backend=backend,
        watcher=watcher,
        told=True,
    )
    return Run.of(study.run(summary["run"]))


def _members(members: Sequence[Member]) -> str:
    """Seeds by their numbers alone; folds and sites in full."""
    if any(one.fold is not None or one.left_out is not None for one in members):
        return "; ".join(map(str, members))
    return f"seed{'' if len(members) == 1 else 's'} {', '.join(str(one.seed) for one in members)}"


def is_baseline(run: Run, first: Run) -> bool:
    """Whether `run` is every hospital alone, with the settings and stores of the first run."""
    return is_of(run, BASELINE, _alone(first.pipeline), first.inputs)


def baseline_settings(first: Run) -> dict[str, Any]:
    return settings(BASELINE, _alone(first.pipeline))


def _alone(pipeline: Pipeline) -> Pipeline:
    """A hospital alone at its best: its settings are chosen on its own patients, and it has no DP, which nobody alone
    needs, and no canaries.
    """
    off = pipeline.privacy.model_copy(update={"enabled": False})
    model = pipeline.model
    if model.proxy.startswith(SHARED):  # which nobody alone can make, and needs
        model = model.model_copy(update={"proxy": model.private})
    changed = {
        "model": model,
        "privacy": off,
        "audit": Audit(),
        "train": pipeline.train.model_copy(update={"tune": True}),
    }
    return pipeline.model_copy(update=changed)


def _cannot_train(study: Study, like: Run) -> str:
    """Why the baseline cannot be trained here; empty when it can."""
    with RunContext.of(study, like.pipeline, BASELINE) as party:
        for site in party.sites:
            if not party.has_store(site.name):
                return f"the store of {site.name} is not here"
            if not site.allows("patches"):
                continue
            data = party.data(site.name)
            if data.digest() != like.inputs.get(site.name):
                return f"the store of {site.name} was made anew since these runs"
            try:
                data.require_current()
            except UsageError:
                return f"the features of {site.name} are of patches before it was tiled again"
    return ""


def _recipe(study: Study, like: Run) -> tuple[str, list[str]]:
    """(pipeline, overrides) that give the settings of a run without DP."""
    wanted = flat(_alone(like.pipeline))
    name = str(like.folder.manifest["pipeline"])
    with suppress(UsageError):  # the pipeline may be gone
        base = flat(study.pipeline(name))
        base["sites"] = base["sites"] or study.site_names()
        changed = {key: value for key, value in wanted.items() if value != base.get(key)}
        if None not in changed.values():
            return name, [f"{key}={toml_value(value)}" for key, value in changed.items()]
    whole = like.folder.path / "config.toml"
    fixed = ["privacy.enabled=false", "train.tune=true"]
    own = {key: wanted[key] for key in ("train.seed", "train.fold", "train.left_out", "sites")}
    if like.member.left_out is None:
        own.pop("sites")
    return str(whole), [*fixed, *(f"{key}={toml_value(v)}" for key, v in own.items() if v is not None)]


def _command(name: str, overrides: Sequence[str]) -> str:
    """What to type in a shell."""
    return shlex.join(
        [
            "wsi-fl",
            "train",
            "--method",
            BASELINE,
            "--pipeline",
            name,
            *(x for one in overrides for x in ("--set", one)),
        ]
    )
