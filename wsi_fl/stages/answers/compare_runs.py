"""The runs that `compare` sets side by side, found by name and checked; and their baseline, every hospital alone, found
among the runs of the study or trained."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsi_fl.federation.methods import ALONE, SHARED
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.data import kind_of
from wsi_fl.stages.site.party import RunContext, method_for
from wsi_fl.stages.site.targets import question
from wsi_fl.stages.training.train import Member, train
from wsi_fl.stages.work.console import OneOf, Watcher
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Audit, Pipeline
from wsi_fl.study.toml import Section, toml_value
from wsi_fl.types import UsageError, WsiFlError

_FITTED = ("linear_head", "mean_head")
"""Models that are fitted at once where they may choose their settings."""
_OF_ROUNDS = (
    *("train.rounds", "train.epochs_per_round", "train.batch_size", "train.lr", "train.private_lr"),
    *("train.weight_decay", "train.balance", "model.proxy"),
)
"""Settings that are nothing to them."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        inputs: digest of the store of every site that lies here and learned from it.
        summary: the document of `train --json`.
    """

    folder: RunFolder
    method: str
    pipeline: Pipeline
    inputs: Mapping[str, str]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path) -> Run:
        """Return the run in a folder.

        Raises:
            WsiFlError: when it has not finished.
        """
        folder = RunFolder(path)
        summary, pipeline = folder.finished(), load_pipeline(path / "config.toml")
        receivers = summary.get("inference_sites", ())
        inputs = {name: digest for name, digest in folder.inputs().items() if name not in receivers}
        return cls(folder, folder.manifest["method"], pipeline, inputs, summary)

    @property
    def seed(self) -> int:
        return self.pipeline.train.seed

    @property
    def member(self) -> Member:
        """Which repetition it is: by seed, fold and the site that was left out."""
        return Member.of(self.pipeline)

    @property
    def division(self) -> tuple[int | None, bool]:
        """How patients were divided: the number of folds, and whether a whole site is for testing."""
        return self.pipeline.train.folds, self.pipeline.train.left_out is not None

    @property
    def dp(self) -> bool:
        return self.pipeline.privacy.noisy

    @property
    def settings(self) -> dict[str, Any]:
        return settings(self.method, self.pipeline)

    @property
    def settings_alone(self) -> dict[str, Any]:
        """Of its baseline, every hospital alone."""
        return settings(ALONE, _alone(self.pipeline))


def settings(method: str, pipeline: Pipeline) -> dict[str, Any]:
    """Return the keys that can change what this method learns from given stores, with their values."""
    without = ["sites", "subtypes.", *method_for(method, pipeline).ignores]
    for name, section in pipeline:
        if isinstance(section, Section):
            without += [f"{name}.{key}" for key in section.without_effect]
    if not kind_of(pipeline).of_images:
        without += ["train.augment", "train.input_px"]
    if pipeline.train.tune and not pipeline.privacy.enabled and pipeline.model.private in _FITTED:
        without += _OF_ROUNDS
    if not pipeline.privacy.enabled:
        without += ["privacy."]
    elif pipeline.privacy.target_epsilon is not None:  # every site has its own
        without += ["privacy.sigma", "train.batch_size"]
    if pipeline.privacy.enabled and pipeline.privacy.mode == "strict":
        without += ["train.beta"]
    return {key: value for key, value in _flat(pipeline).items() if not key.startswith(tuple(without))}


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings that are not the same in all runs to which they matter, in the order of the configuration.

    A σ of 0 is named too: such a run clips gradients, though it has no differential privacy. That the hospital alone
    chose its settings is not, where no other row is the same but for that.
    """
    values: dict[str, list[Any]] = {}
    tuned = {(run.method, run.dp, run.pipeline.train.tune) for run in runs}
    for run in runs:
        for key, value in run.settings.items():
            if key == "train.tune" and (run.method, run.dp, not value) not in tuned:
                continue
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    return [k for k, seen in values.items() if len(seen) > 1 or (k == "privacy.sigma" and seen == [0])]


def _flat(pipeline: Pipeline) -> dict[str, Any]:
    """Every key as it is written after `--set`."""
    found: dict[str, Any] = {}
    for section, content in pipeline.model_dump(by_alias=True).items():
        keys = content if isinstance(content, dict) else {"": content}
        found |= {f"{section}.{key}".removesuffix("."): value for key, value in keys.items()}
    return found


def runs_of(study: Study, method: str = "*") -> Iterator[Run]:
    """Yield the finished runs of a study, or of a method in it, the last first."""
    for path in sorted(study.runs.glob(f"[0-9]*-{method}-*"), reverse=True):
        with suppress(WsiFlError):  # unfinished, or written by another version
            yield Run.of(path)


def named(study: Study, words: Iterable[str]) -> list[Run]:
    """Runs by folder, name, number, range of numbers (3-8) or pattern (*-proxyfl-*), each once and in this order.

    Raises:
        UsageError: when a word names no run, or the runs learned from other patches than the first.
        WsiFlError: when one has not finished.
    """
    paths = dict.fromkeys(path for word in words for path in _paths(study, word))
    runs = [Run.of(path) for path in paths]
    if not runs:
        raise UsageError(
            "compare needs runs: folders, names, numbers, a range (3-8) or a pattern ('*-proxyfl-*')"
        )
    if lone := next((run for run in runs if not run.summary["sites"]), None):
        raise UsageError(
            f"{study.relative(lone.folder.path)}: here is a receiver alone, with nothing to compare"
        )
    first = runs[0]
    for run in runs[1:]:
        here, there = (study.relative(one.folder.path) for one in (run, first))
        asked, wanted = (question(one.pipeline.target) for one in (run, first))
        if asked != wanted:
            raise UsageError(
                f"{here}: answers another question ({asked}) than {there} ({wanted}); compare runs of one question"
            )
        if run.division != first.division:
            raise UsageError(
                f"{here}: tests other patients than {there}, by {_division(run)} and not by {_division(first)}; "
                "compare runs of one division"
            )
        if not _agree(run, first.inputs):
            a, b = first.inputs, run.inputs
            names = a.keys() & b.keys() if first.division[1] else a.keys() | b.keys()
            odd = next(name for name in sorted(names) if a.get(name) != b.get(name))
            raise UsageError(
                f"{here}: learned from other {kind_of(run.pipeline).word} than {there} (site {odd}); "
                "compare runs on the same stores"
            )
    return runs


def _division(run: Run) -> str:
    folds, left_out = run.division
    return f"{folds} folds" if folds else "leaving a site out" if left_out else "the stores' own split"


def _agree(run: Run, inputs: Mapping[str, str]) -> bool:
    """Whether a run learned from stores with these digests; of runs that leave a site out, each has other sites."""
    if run.pipeline.train.left_out is None:
        return run.inputs == inputs
    return all(inputs.get(name, digest) == digest for name, digest in run.inputs.items())


def _paths(study: Study, word: str) -> list[Path]:
    span = re.fullmatch(r"(\d+)-(\d+)", word)
    if span is None and not re.search(r"[*?[]", word):
        return [study.run(word)]
    every = sorted(path.parent for path in study.runs.glob("*/config.toml"))
    if span:
        first, last = int(span[1]), int(span[2])
        chosen = [p for p in every if (m := re.match(r"(\d+)-", p.name)) and first <= int(m[1]) <= last]
    else:
        pattern = Path(word).name
        chosen = [path for path in every if path.match(pattern)]
    if not chosen:
        raise UsageError(f"no run {word!r} in {study.relative(study.runs)}/")
    return chosen


def _is_of(run: Run, method: str, pipeline: Pipeline, inputs: Mapping[str, str]) -> bool:
    """Whether a run is the same in all that matters, whatever its seed or fold."""
    return (
        run.method == method
        and run.pipeline.privacy.enabled == pipeline.privacy.enabled
        and _agree(run, inputs)
        and run.settings == settings(method, pipeline)
    )


def finished(study: Study, method: str, pipeline: Pipeline, inputs: Mapping[str, str]) -> Run | None:
    """Return the last finished run of a method with these settings, seed and fold on these stores, if there is one."""
    for run in runs_of(study, method):
        same = run.member == Member.of(pipeline) and run.division[0] == pipeline.train.folds
        if same and _is_of(run, method, pipeline, inputs):
            return run
    return None


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
        run.member: replace(first, pipeline=_like(study, first.pipeline, run), inputs=run.inputs)
        for run in sorted(given, key=lambda run: run.member.place)
        if run.member not in alone
    }
    missing = []
    for like in wanted.values():
        if (run := finished(study, ALONE, _alone(like.pipeline), like.inputs)) is not None:
            runs.append(run)
        else:
            missing.append(like)
    if not missing:
        return runs, []
    said = _members(missing)
    problem = "not asked for"
    if train_missing:
        problem = next(filter(None, (_cannot_train(study, like) for like in missing)), "")
    if problem:
        others = f", and likewise of {_members(missing[1:])}" if missing[1:] else ""
        return runs, [
            f"The baseline of {said} was not trained ({problem}): "
            f"`{_command(*_recipe(study, missing[0]))}` trains that of {_members(missing[:1])}{others}."
        ]
    trained = [_trained(study, like, OneOf(watcher, k, len(missing))) for k, like in enumerate(missing)]
    names = ", ".join(study.relative(run.folder.path) for run in trained)
    return [*runs, *trained], [f"The baseline of {said} was trained for this comparison ({names})."]


def _like(study: Study, pipeline: Pipeline, run: Run) -> Pipeline:
    """The pipeline with the seed, fold and sites of a run; of these the sites alone whose stores are here, if there are
    some: a hospital measures itself.
    """
    own = {key: getattr(run.pipeline.train, key) for key in ("seed", "folds", "fold", "left_out")}
    pipeline = pipeline.changed(train=own).model_copy(update={"sites": run.pipeline.sites})
    with RunContext.of(study, pipeline, ALONE) as party:
        names = [site.name for site in party.sites if party.has_store(site.name)]
        fewer = 0 < len(names) < len(party.sites)
    return pipeline.model_copy(update={"sites": names}) if fewer else pipeline


def _trained(study: Study, like: Run, watcher: Watcher) -> Run:
    name, overrides = _recipe(study, like)
    watcher.say(
        f"  no run yet of a hospital alone without DP, {like.member}; training it: {_command(name, overrides)}"
    )
    party = RunContext.of(study, like.pipeline, ALONE)
    backend = "local" if party.may_merge or len(party.sites) == 1 else "mpi"
    how: Any = {"overrides": overrides, "backend": backend, "watcher": watcher, "told": True}
    return Run.of(study.run(train(study, method=ALONE, pipeline_name=name, **how)["run"]))


def _members(runs: Sequence[Run]) -> str:
    """Seeds by their numbers alone; folds and sites in full."""
    members = [run.member for run in runs]
    if any(one.fold is not None or one.left_out is not None for one in members):
        return "; ".join(map(str, members))
    return f"seed{'' if len(members) == 1 else 's'} {', '.join(str(one.seed) for one in members)}"


def is_baseline(run: Run, first: Run) -> bool:
    """Whether `run` is every hospital alone, with the settings and stores of the first run."""
    return _is_of(run, ALONE, _alone(first.pipeline), first.inputs)


def _alone(pipeline: Pipeline) -> Pipeline:
    """A hospital alone at its best: its settings are chosen on its own patients, and it has no DP, which nobody alone
    needs, and no canaries.
    """
    model = pipeline.model
    shared = model.proxy.startswith(SHARED)  # which nobody alone can make, and needs
    proxy = model.private if shared else model.proxy
    own = pipeline.changed(model={"proxy": proxy}, privacy={"enabled": False}, train={"tune": True})
    return own.model_copy(update={"audit": Audit()})


def _cannot_train(study: Study, like: Run) -> str:
    """Why the baseline cannot be trained here; empty when it can."""
    with RunContext.of(study, like.pipeline, ALONE) as party:
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
    wanted = _flat(_alone(like.pipeline))
    name = str(like.folder.manifest["pipeline"])
    with suppress(UsageError):  # the pipeline may be gone
        base = _flat(study.pipeline(name))
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
    sets = [word for one in overrides for word in ("--set", one)]
    return shlex.join(["wsi-fl", "train", "--method", ALONE, "--pipeline", name, *sets])
