"""The runs that `compare` sets side by side: found by name, checked, and completed by their baseline."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsi_fl.federation.methods import SHARED
from wsi_fl.runs import RunFolder
from wsi_fl.stages.answers.report import inputs_of
from wsi_fl.stages.site.data import kind_of
from wsi_fl.stages.site.party import Party, method_for
from wsi_fl.stages.training.train import train
from wsi_fl.stages.work.console import Watcher
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Audit, Pipeline
from wsi_fl.study.toml import Section, toml_value
from wsi_fl.types import UsageError, WsiFlError

BASELINE = "regular"
FITTED = ("linear_head", "mean_head")
"""Models that are fitted at once where they may choose their settings."""
OF_ROUNDS = (
    *("train.rounds", "train.epochs_per_round", "train.batch_size", "train.lr", "train.weight_decay"),
    *("train.balance", "model.proxy"),
)
"""Settings that are nothing to them."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        inputs: digest of the store of every site that lies here.
        summary: the document of `train --json`.
    """

    folder: RunFolder
    method: str
    pipeline: Pipeline
    inputs: Mapping[str, str]
    summary: Mapping[str, Any]

    @property
    def seed(self) -> int:
        return self.pipeline.train.seed

    @property
    def dp(self) -> bool:
        return self.pipeline.privacy.noisy

    @property
    def settings(self) -> dict[str, Any]:
        return settings(self.method, self.pipeline)


def settings(method: str, pipeline: Pipeline) -> dict[str, Any]:
    """The keys that can change what this method learns from given stores, with their values."""
    without = ["sites", "subtypes.", *method_for(method, pipeline).ignores]
    for name, section in pipeline:
        if isinstance(section, Section):
            without += [f"{name}.{key}" for key in section.without_effect]
    if not kind_of(pipeline).of_images:
        without += ["train.augment", "train.input_px"]
    if pipeline.train.tune and not pipeline.privacy.enabled and pipeline.model.private in FITTED:
        without += OF_ROUNDS
    if not pipeline.stain.exchange:
        without += ["stain.method", "stain.sigma", "stain.clip"]
    if not pipeline.privacy.enabled:
        without += ["privacy.", "train.after_budget"]
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
    tuned: dict[tuple[str, bool], set[bool]] = {}
    for run in runs:
        tuned.setdefault((run.method, run.dp), set()).add(run.pipeline.train.tune)
    for run in runs:
        for key, value in run.settings.items():
            if key == "train.tune" and len(tuned[run.method, run.dp]) == 1:
                continue
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    return [k for k, seen in values.items() if len(seen) > 1 or (k == "privacy.sigma" and seen == [0])]


def _flat(pipeline: Pipeline) -> dict[str, Any]:
    """Every key as it is written after `--set`."""
    found: dict[str, Any] = {}
    for section, content in pipeline.model_dump(by_alias=True).items():
        if isinstance(content, dict):
            found |= {f"{section}.{key}": value for key, value in content.items()}
        else:
            found[section] = content
    return found


def opened(study: Study, path: Path) -> Run:
    """The run in a folder.

    Raises:
        WsiFlError: when it has not finished.
    """
    folder = RunFolder(path)
    summary = folder.summary()
    if summary is None:
        again = study.relative(path)
        raise WsiFlError(f"{again}: has not finished; continue it with `wsi-fl train --resume {again}`")
    return Run(
        folder, folder.manifest["method"], load_pipeline(path / "config.toml"), inputs_of(folder), summary
    )


def named(study: Study, words: Iterable[str]) -> list[Run]:
    """Runs by folder, name, number, range of numbers (3-8) or pattern (*-proxyfl-*), each once and in this order.

    Raises:
        UsageError: when a word names no run, or the runs learned from other patches than the first.
        WsiFlError: when one has not finished.
    """
    paths = dict.fromkeys(path for word in words for path in _paths(study, word))
    runs = [opened(study, path) for path in paths]
    if not runs:
        raise UsageError(
            "compare needs runs: folders, names, numbers, a range (3-8) or a pattern ('*-proxyfl-*')"
        )
    for run in runs[1:]:
        if run.inputs != runs[0].inputs:
            raise UsageError(
                f"{study.relative(run.folder.path)}: learned from other {kind_of(run.pipeline).word} than "
                f"{study.relative(runs[0].folder.path)} ({_odd_site(runs[0], run)}); compare runs on the same stores"
            )
    return runs


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


def _odd_site(first: Run, other: Run) -> str:
    names = sorted(first.inputs.keys() | other.inputs.keys())
    return "site " + next(name for name in names if first.inputs.get(name) != other.inputs.get(name))


def with_baseline(
    study: Study, given: Sequence[Run], *, train_missing: bool, watcher: Watcher
) -> tuple[list[Run], list[str]]:
    """(given runs and those of their baseline, notes): every hospital alone, for every seed given.

    The baseline has the settings of the first run. Runs of the study that are that are taken; missing ones are
    trained, or named in a note where they may not or cannot be.
    """
    first, runs = given[0], list(given)
    seeds = sorted({run.seed for run in given} - {run.seed for run in given if is_baseline(run, first)})
    found = {
        seed: finished(study, BASELINE, _alone(first.pipeline, seed=seed), first.inputs) for seed in seeds
    }
    runs += [run for run in found.values() if run is not None]
    missing = [seed for seed, run in found.items() if run is None]
    if not missing:
        return runs, []
    problem = _cannot_train(study, first) if train_missing else "not asked for"
    if problem:
        name, overrides = _recipe(study, first, missing[0])
        others = f", and likewise of {_seeds(missing[1:])}" if missing[1:] else ""
        return runs, [
            f"The baseline of {_seeds(missing)} was not trained ({problem}): "
            f"`{_command(name, overrides)}` trains that of seed {missing[0]}{others}."
        ]
    trained = [_trained(study, first, seed, watcher) for seed in missing]
    names = ", ".join(study.relative(run.folder.path) for run in trained)
    return [*runs, *trained], [
        f"The baseline of {_seeds(missing)} was trained for this comparison ({names})."
    ]


def _trained(study: Study, first: Run, seed: int, watcher: Watcher) -> Run:
    name, overrides = _recipe(study, first, seed)
    watcher.say(
        f"  no run yet of a hospital alone without DP, seed {seed}; training it: {_command(name, overrides)}"
    )
    party = Party.of(study, first.pipeline, BASELINE)
    backend = "local" if party.may_merge or len(party.sites) == 1 else "mpi"
    summary = train(
        study, method=BASELINE, pipeline_name=name, overrides=overrides, backend=backend, watcher=watcher
    )
    return opened(study, study.run(summary["run"]))


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def is_baseline(run: Run, first: Run) -> bool:
    """Whether `run` is every hospital alone, with the settings and stores of the first run."""
    return _is(run, BASELINE, _alone(first.pipeline), first.inputs)


def _is(run: Run, method: str, pipeline: Pipeline, inputs: Mapping[str, str]) -> bool:
    """Whether a run is the same in all that matters, whatever its seed."""
    return (
        run.method == method
        and run.pipeline.privacy.enabled == pipeline.privacy.enabled
        and run.inputs == inputs
        and run.settings == settings(method, pipeline)
    )


def finished(study: Study, method: str, pipeline: Pipeline, inputs: Mapping[str, str]) -> Run | None:
    """Return the last finished run of a method with these settings and this seed on these stores, if there is one."""
    for path in sorted(study.runs.glob(f"[0-9]*-{method}-*"), reverse=True):
        with suppress(WsiFlError):  # unfinished, or written by another version
            run = opened(study, path)
            if run.seed == pipeline.train.seed and _is(run, method, pipeline, inputs):
                return run
    return None


def baseline_settings(first: Run) -> dict[str, Any]:
    return settings(BASELINE, _alone(first.pipeline))


def _alone(pipeline: Pipeline, **train_keys: Any) -> Pipeline:
    """A hospital alone at its best: its settings are chosen on its own patients, and it has no DP, which nobody alone
    needs, no others' stains, which nobody alone has, and no canaries.
    """
    off = pipeline.privacy.model_copy(update={"enabled": False})
    own = pipeline.stain.model_copy(update={"exchange": False})
    model = pipeline.model
    if model.proxy.startswith(SHARED):  # which nobody alone can make, and needs
        model = model.model_copy(update={"proxy": model.private})
    changed = {
        "model": model,
        "privacy": off,
        "stain": own,
        "audit": Audit(),
        "train": pipeline.train.model_copy(update={"tune": True, **train_keys}),
    }
    return pipeline.model_copy(update=changed)


def _cannot_train(study: Study, first: Run) -> str:
    """Why the baseline cannot be trained here; empty when it can."""
    with Party.of(study, first.pipeline, BASELINE) as party:
        for site in party.sites:
            if not party.has_store(site.name):
                return f"the store of {site.name} is not here"
            if not site.allows("patches"):
                continue
            data = party.data(site.name)
            if data.digest() != first.inputs.get(site.name):
                return f"the store of {site.name} was made anew since these runs"
            try:
                data.require_current()
            except UsageError:
                return f"the features of {site.name} are of patches before it was tiled again"
    return ""


def _recipe(study: Study, first: Run, seed: int) -> tuple[str, list[str]]:
    """(pipeline, overrides) that give the first run's settings without DP, with this seed."""
    wanted = _flat(_alone(first.pipeline, seed=seed))
    name = str(first.folder.manifest["pipeline"])
    with suppress(UsageError):  # the pipeline may be gone
        base = _flat(study.pipeline(name))
        base["sites"] = base["sites"] or study.site_names()
        changed = {key: value for key, value in wanted.items() if value != base.get(key)}
        if None not in changed.values():
            return name, [f"{key}={toml_value(value)}" for key, value in changed.items()]
    whole = first.folder.path / "config.toml"
    fixed = ["privacy.enabled=false", "stain.exchange=false", "train.tune=true"]
    return str(whole), [*fixed, f"train.seed={seed}"]


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
