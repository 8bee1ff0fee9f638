"""What a plan says of data: what is learned from, what leaves a hospital and what never does.

What leaves are the shares of the plan's method, in words. What is learned is as a store has it, or as settings know.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from jinja2 import Environment, StrictUndefined
from typing_extensions import TypedDict

from wsi_fl.federation.methods import FILES, HUB, Share
from wsi_fl.learning.validation import COMMON
from wsi_fl.privacy.guarantee import MOST_ATTEMPTS
from wsi_fl.report.words import size
from wsi_fl.stages.site.account import guarantee_of, spends
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import open_directions
from wsi_fl.stages.site.targets import outputs_of, question
from wsi_fl.study.toml import value_of
from wsi_fl.types import CLASSES, Bags, Images, Shape, Vectors

_FLOAT_BYTES = 4
_SUM_BYTES = 8
"""Of a number in a sum that is masked."""
WORDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("plan.toml").read_text("utf-8"))
_TEMPLATES = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
_TEMPLATES.filters["size"] = size


def filled(text: str, **known: Any) -> list[str]:
    """Return the lines of a jinja2 template that are not empty once it is filled with what is known."""
    return [line for line in _TEMPLATES.from_string(text).render(known).splitlines() if line]


class Leaving(TypedDict):
    """One kind of thing that leaves a hospital.

    Attributes:
        what, to, often, protected_by: in words.
        times: how often at most in a run, to each receiver of one hop; None where it is not fixed.
        bytes: size of each; None where it is not known yet, or small and not fixed.
        large: whether it bounds the longest letter.
        of_records: whether it is computed of records, be it that they are counted.
    """

    what: str
    to: str
    often: str
    times: int | None
    bytes: int | None
    large: bool
    of_records: bool
    protected_by: str


def leaving(party: RunContext, shape: Shape | None, n_classes: int | None) -> list[Leaving]:
    """Return a row for every kind of thing that leaves a hospital.

    Args:
        shape, n_classes: of what the models see and answer; None where only the hospitals' stores know.
    """
    rows: list[Leaving] = []
    for share in party.method.shares:
        rows.append(own := _row(party, share, shape, n_classes))
        if share.what == "generator" and share.by != HUB:
            others = len(party.names) - 1
            n_bytes = None if own["bytes"] is None else own["bytes"] * others
            rows.append(_as(own, "handed_on", bytes=n_bytes, others=others))
    if any(party.tells_scores(name) for name in party.names):
        if (passed := party.method.mixed) is not None:
            last = _row(party, passed, shape, n_classes)
            if not spends(party.pipeline):
                last["protected_by"] += '; only a site with allow = ["scores"] passes its own on'
            n_bytes = _bytes(party, passed, shape, n_classes, _FLOAT_BYTES)
            rows.append(_as(last, "once_more", times=1, bytes=n_bytes))
        rows.append(_as(_SMALL, "scores"))
    rounds = party.pipeline.train.rounds
    return [
        *rows,
        _as(_SMALL, "documents", of_records=False),
        _as(_SMALL, "tallies", of_records=False, times=rounds, rounds=rounds),
        _as(_SMALL, "final", times=1),
    ]


_SMALL = Leaving(
    what="", to="", often="", times=None, bytes=None, large=False, of_records=True, protected_by=""
)
"""What is of a few kB."""


def _as(row: Leaving, name: str, **more: Any) -> Leaving:
    """A row with the words of that name, and other values of its keys; the rest of what is given fills the words."""
    said = {key: text.format(**more) for key, text in WORDS[name].items()}
    return cast("Leaving", row | said | {key: value for key, value in more.items() if key in row})


def staying(party: RunContext) -> list[str]:
    """Return what never leaves a hospital under a plan."""
    lets_go = any("private_model" in site.allow for site in party.sites)
    private = party.method.travels != "private" and not lets_go
    lone = party.method.keeps_lone and party.pipeline.train.local_baseline
    return filled(WORDS["texts"]["stays"], private=private, lone=lone)


def _row(party: RunContext, share: Share, shape: Shape | None, n_classes: int | None) -> Leaving:
    """One share of the method, in words and bytes."""
    pipeline, kind = party.pipeline, _kind_of(party, share)
    letter = kind == "letter"  # protected as it was made
    rounds, masked, generator = pipeline.train.rounds, kind == "masked sums", kind == "generator"
    mixed = share.times == "rounds" and share == party.method.mixed
    often = kind if letter else "tried" if masked else "mixed" if mixed else share.times
    covered = kind if letter or generator else "leave" if share.is_bare(spends(pipeline)) else "dp"
    model, part = _architecture(party, share.of), pipeline.model.train
    model += "" if part == "all" else f", model.train = {part}"
    return {
        "what": WORDS["what"][kind].format(model=model, n=value_of(pipeline, "replay.buffer")),
        "to": "all sites" if masked else WORDS["to"][HUB] if generator else _receivers(party, share),
        "often": WORDS["often"][often].format(rounds=rounds, attempts=MOST_ATTEMPTS),
        "times": MOST_ATTEMPTS if masked else rounds if share.times == "rounds" else 1,
        "bytes": _bytes(party, share, shape, n_classes, _SUM_BYTES if masked else _FLOAT_BYTES),
        "large": True,
        "of_records": True,
        "protected_by": WORDS["protected"][covered].format(
            unit=pipeline.privacy.unit, worth=guarantee_of(party.method, pipeline), content=share.content
        ),
    }


def _kind_of(party: RunContext, share: Share) -> str:
    """What plans call a share."""
    if share.what == "sums":
        if share.by == FILES:
            return "letter"
        return "masked sums" if party.pipeline.privacy.noise == "shared" else "sums"
    if share.what != "model":
        return share.what
    if share.of == "proxy":
        return "proxy model"
    return "classifier" if share.times == "after" else "central model"


def _architecture(party: RunContext, role: str) -> str:
    """The name of the model that all sites have in a role."""
    return party.pipeline.model.proxy if role in COMMON else party.pipeline.model.private


def _receivers(party: RunContext, share: Share) -> str:
    """Who gets a share, in words."""
    graph = party.pipeline.topology.graph if share == party.method.mixed else None
    if graph is not None and graph.endswith(".json"):
        return f"the sites that the graph of {graph} names"
    by = graph or share.by
    return WORDS["to"].get(by if isinstance(by, str) else "", "other sites, as the method's graph says")


def _bytes(
    party: RunContext, share: Share, shape: Shape | None, n_classes: int | None, each: int
) -> int | None:
    """Bytes of a share, of `each` a number; None where its shape is not known."""
    if shape is None or n_classes is None:
        return None
    if share.what in ("buffer", "generator"):
        found: int | None = share.stage().n_bytes(party.pipeline, shape, n_classes)
        return found
    return each * _of_model(*_recipe(party, share.of), n_classes, shape)[0]


def _recipe(
    party: RunContext, role: str
) -> tuple[str, Literal["all", "head", "last", "norm", "lora"] | None]:
    """Return the architecture of a role, and the part of it that is trained where it starts from weights."""
    said = party.pipeline.model
    return _architecture(party, role), said.train if said.weights else None


@lru_cache(maxsize=64)
def _of_model(name: str, part: Any, n_classes: int, shape: Shape) -> tuple[int, str]:
    """Return how many parameters of a model are trained, and the SHA-256 of the names and shapes of all."""
    from wsi_fl.models import Start, build, parameters_digest  # and with it PyTorch

    start = None if part is None else Start(part)
    model = build(name, n_classes=n_classes, shape=shape, seed=0, start=start)
    return sum(p.numel() for p in model.parameters() if p.requires_grad), parameters_digest(model)


class Learned(TypedDict):
    """What models are trained on; None where only the hospitals' stores know.

    Attributes:
        data, example: `train.data` and what a row is, `train.example`.
        task: what models answer, in words.
        classes: the classes; of numbers and survival what each output is called.
        channels, size_px: of patches as models see them.
        n_features, encoder: of features and mosaics.
        weights: that the model that travels starts from, by the SHA-256 of all its tensors.
        parameters: of the model that travels, by the SHA-256 of all their names and shapes.
        projection: along which features are summed, by the SHA-256 of their file or by how many random ones there are.
        says: where this is from, and what it rests on.
    """

    data: Literal["patches", "features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    task: str
    classes: list[str] | None
    channels: int | None
    size_px: int | None
    n_features: int | None
    encoder: str | None
    weights: str | None
    parameters: str | None
    projection: str | None
    says: str


_OF_STORE = "As a store has it where this plan was made; the stores of all sites must agree."
_OF_SETTINGS = "As `wsi-fl tile` makes stores with these settings; the hospitals' stores must agree."
_OF_NOTHING = (
    "No store was there when this plan was made. The hospitals' stores must agree on the encoder, its weights, "
    "the number of features and the classes; the sites compare them before anything is trained."
)


def odd_in(learned: Learned, party: RunContext) -> str:
    """Return the first key of what a plan says of its data that no plan says so; "" for none.

    Whoever makes a plan may leave to the stores what only they know, and nothing else; and adds no words of his own.
    """
    if learned["says"] not in (_OF_STORE, _OF_SETTINGS, _OF_NOTHING):
        return "says"
    if party.method.once and learned["projection"] is None:
        return "projection"
    if party.method.travels is None or shape_of(learned) is None or not learned["classes"]:
        return ""
    if party.pipeline.model.weights and learned["weights"] is None:
        return "weights"
    return "parameters" if learned["parameters"] is None else ""


def learned_by(party: RunContext) -> Learned:
    """Return what models are trained on, from the first store of a site of the party that is in this study.

    Without a store the pipeline's settings say what `wsi-fl tile` would make, and the stores of all must agree.
    """
    for name in party.names:
        if party.has_store(name):
            return of_store(party, name)
    pipeline = party.pipeline
    if pipeline.train.data == "patches":
        shape = Images(3, pipeline.train.input_px or pipeline.tile.size_px)
        return _learned(party, list(CLASSES), shape, None, _OF_SETTINGS)
    diagnoses = sorted({one for names in pipeline.subtypes.values() for one in names})
    asked = list(outputs_of(pipeline.target)) if pipeline.target.asked else diagnoses
    return _learned(party, asked or None, None, pipeline.encoding.encoder, _OF_NOTHING)


def of_store(party: RunContext, site: str) -> Learned:
    """Return what the models of a party see, from the store of one site."""
    data = party.data(site)
    return _learned(party, list(data.classes), data.shape, data.inputs().get("encoder"), _OF_STORE)


def _learned(
    party: RunContext, classes: list[str] | None, shape: Shape | None, encoder: str | None, says: str
) -> Learned:
    pipeline = party.pipeline
    return {
        "data": pipeline.train.data,
        "example": pipeline.example,
        "task": question(pipeline.target),
        "classes": classes,
        "channels": shape.channels if isinstance(shape, Images) else None,
        "size_px": shape.size_px if isinstance(shape, Images) else None,
        "n_features": shape.n_features if isinstance(shape, Bags | Vectors) else None,
        "encoder": encoder,
        "weights": _weights(party, shape),
        "parameters": _parameters(party, shape, classes),
        "projection": _directions(party),
        "says": says,
    }


def _parameters(party: RunContext, shape: Shape | None, classes: list[str] | None) -> str | None:
    role = party.method.travels
    if role is None or shape is None or not classes:
        return None
    return _of_model(*_recipe(party, role), len(classes), shape)[1]


def _weights(party: RunContext, shape: Shape | None) -> str | None:
    role = party.method.travels
    if not party.pipeline.model.weights or role is None or shape is None:
        return None
    from wsi_fl.models import build, started_from  # and with it PyTorch
    from wsi_fl.stages.training.workshop import start_of

    start = start_of(party.pipeline, party.study)
    model = build(_architecture(party, role), n_classes=2, shape=shape, seed=0, start=start)
    return started_from(model)


def _directions(party: RunContext) -> str | None:
    if not party.method.once:
        return None
    wanted = party.pipeline.model.projection
    return f"{wanted} random ones" if isinstance(wanted, int) else open_directions(party.study, wanted).digest


def shape_of(learned: Learned) -> Shape | None:
    """Return the shape of what models see; None where it is not known."""
    if learned["channels"] is not None and learned["size_px"] is not None:
        return Images(learned["channels"], learned["size_px"])
    if learned["n_features"] is None:
        return None
    return (Bags if learned["example"] == "slide" else Vectors)(learned["n_features"])
