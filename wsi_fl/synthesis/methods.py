"""The methods that share synthetic patches or generators, registered by the entry points `wsi_fl.methods`."""

from __future__ import annotations

from dataclasses import replace

from wsi_fl.federation.methods import COMMON, HUB, PRIVATE, Disclosure, Method, step_private

_MPCPA = "wsi_fl.synthesis.stages.mpcpa"
_GENERATOR = Disclosure("generator", "star", protection="leave", timing="before", stage_module=_MPCPA)
_HANDED_OVER = Disclosure("model", HUB, protection="leave", timing="after", stage_module=_MPCPA)


def _build_replay() -> Method:
    """Experience replay with synthetic samples (Pennisi et al., section III-C), and its variants.

    Only models are sent (Table III), or only buffers (Fig. 5a); owners too train on synthetic samples (Fig. 5b); or
    every site trains a model on all sites' synthetic samples (Table I).
    """
    models = Disclosure("model", "random", protection="leave")
    buffers = Disclosure("buffer", "random", protection="leave", stage_module="wsi_fl.synthesis.stages.buffers")
    complete_buffers, description = (
        replace(buffers, route="complete", timing="once"),
        "models and synthetic patches go round",
    )
    row = Method("Replay", description, COMMON, step_private, (models, buffers), "own+received")
    variants = {
        "no_buffer": replace(row, disclosures=(models,), learns_from="own"),
        "buffer_only": replace(row, learners=PRIVATE, disclosures=(buffers,)),
        "synthetic_only": replace(row, learns_from="synthetic+received"),
        "central": replace(row, learners=PRIVATE, disclosures=(complete_buffers,), learns_from="all synthetic"),
    }
    return replace(row, variants={("replay.variant", name): variant for name, variant in variants.items()})


GENERATED = Method("Generated", "all sites' generated data alone", PRIVATE, step_private, (_GENERATOR,), "generated")
MPCPA = Method(
    "MPCPA",
    "own and others' generated data",
    PRIVATE,
    step_private,
    (_GENERATOR, _HANDED_OVER),
    "own+received",
    baselines="wsi_fl.synthesis.stages.baselines",
)
REPLAY = _build_replay()
