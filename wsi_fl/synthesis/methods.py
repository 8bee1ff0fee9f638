"""The methods that share synthetic patches or generators, registered by the entry points `wsi_fl.methods`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wsi_fl.federation.methods import COMMON, HUB, PRIVATE, Disclosure, Method, step_private

if TYPE_CHECKING:
    from wsi_fl.stages.site.study_hooks import StudyHooks

_GENERATOR = Disclosure("generator", "star", protection="leave", timing="before")
_HANDED_OVER = Disclosure("model", HUB, protection="leave", timing="after")


def _load_generator_hooks() -> StudyHooks:
    from wsi_fl.synthesis.stages.mpcpa import HOOKS

    return HOOKS


def _load_replay_hooks() -> StudyHooks:
    from wsi_fl.synthesis.stages.buffers import HOOKS

    return HOOKS


def _load_baselines() -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    from wsi_fl.synthesis.stages.baselines import render_baseline_lines, run_baselines

    return run_baselines, render_baseline_lines


def _build_replay() -> Method:
    """Experience replay with synthetic samples (Pennisi et al., section III-C), and its variants.

    Only models are sent (Table III), or only buffers (Fig. 5a); owners too train on synthetic samples (Fig. 5b); or
    every site trains a model on all sites' synthetic samples (Table I).
    """
    models = Disclosure("model", "random", protection="leave")
    buffers = Disclosure("buffer", "random", protection="leave")
    row = Method(
        "Replay",
        "models and synthetic patches are exchanged",
        COMMON,
        step_private,
        (models, buffers),
        "own+received",
        load_hooks=_load_replay_hooks,
        sections=("replay.",),
    )
    all_buffers = replace(buffers, route="complete", timing="once")
    variants = {
        "no_buffer": replace(
            row, disclosures=(models,), learns_from="own", inert_settings=("replay.buffer", "replay.unchecked")
        ),
        "buffer_only": replace(row, learners=PRIVATE, disclosures=(buffers,)),
        "synthetic_only": replace(row, learns_from="synthetic+received"),
        "central": replace(row, learners=PRIVATE, disclosures=(all_buffers,), learns_from="all synthetic"),
    }
    return replace(row, variants={("replay.variant", name): variant for name, variant in variants.items()})


_SECTIONS = ("ddpm.", "mpcpa.")
GENERATED = Method(
    "Generated",
    "only all sites' generated data",
    PRIVATE,
    step_private,
    (_GENERATOR,),
    "generated",
    load_hooks=_load_generator_hooks,
    sections=_SECTIONS,
)
MPCPA = Method(
    "MPCPA",
    "local and others' generated data",
    PRIVATE,
    step_private,
    (_GENERATOR, _HANDED_OVER),
    "own+received",
    load_hooks=_load_generator_hooks,
    load_baselines=_load_baselines,
    sections=_SECTIONS,
)
REPLAY = _build_replay()
