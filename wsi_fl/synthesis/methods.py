"""The methods that share synthetic patches or generators, registered by the entry points `wsi_fl.methods`."""

from __future__ import annotations

from dataclasses import replace

from wsi_fl.federation.methods import COMMON, HUB, PRIVATE, Method, Share, supervised

_MPCPA = "wsi_fl.synthesis.stages.mpcpa"
_GENERATOR = Share("generator", "star", protected="leave", times="before", made_by=_MPCPA)
_HANDED_OVER = Share("model", HUB, protected="leave", times="after", made_by=_MPCPA)


def _replay() -> Method:
    """Experience replay with synthetic samples (Pennisi et al., section III-C), and its variants.

    Only models are sent (Table III), or only buffers (Fig. 5a); owners too train on synthetic samples (Fig. 5b); or
    every site trains a model on all sites' synthetic samples (Table I).
    """
    models = Share("model", "random", protected="leave")
    buffers = Share("buffer", "random", protected="leave", made_by="wsi_fl.synthesis.stages.buffers")
    once, does = replace(buffers, by="complete", times="once"), "models and synthetic patches go round"
    row = Method("Replay", does, COMMON, supervised, (models, buffers), "own+received")
    variants = {
        "no_buffer": replace(row, shares=(models,), learns_from="own"),
        "buffer_only": replace(row, learners=PRIVATE, shares=(buffers,)),
        "synthetic_only": replace(row, learns_from="synthetic+received"),
        "central": replace(row, learners=PRIVATE, shares=(once,), learns_from="all synthetic"),
    }
    return replace(row, variants={("replay.variant", name): one for name, one in variants.items()})


GENERATED = Method(
    "Generated", "all sites' generated data alone", PRIVATE, supervised, (_GENERATOR,), "generated"
)
MPCPA = Method(
    "MPCPA",
    "own and others' generated data",
    PRIVATE,
    supervised,
    (_GENERATOR, _HANDED_OVER),
    "own+received",
    baselines="wsi_fl.synthesis.stages.baselines",
)
REPLAY = _replay()
