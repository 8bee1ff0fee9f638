"""The plan's terms on data: what is trained on, what leaves a hospital and what never does.

Disclosures are the shares of the plan's method, in words. Training data are described from a store, or from settings.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from jinja2 import Environment, StrictUndefined
from typing_extensions import TypedDict

from wsi_fl.federation.methods import FILES, HUB, Disclosure
from wsi_fl.learning.ensemble import COMMON
from wsi_fl.oneshot.released_statistics import open_projection
from wsi_fl.privacy.guarantee import MAX_ATTEMPTS, describe_detection
from wsi_fl.report.formatting import format_count, format_size
from wsi_fl.stages.site.privacy_account import costs_epsilon, find_guarantee
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.target_labels import describe_target, name_outputs
from wsi_fl.study.toml import read_setting
from wsi_fl.types import CLASSES, Bags, Images, Shape, Vectors

_FLOAT_BYTES = 4
_SUM_BYTES = 8
"""Of a number in a masked sum."""
PLAN_TEXTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("plan.toml").read_text("utf-8"))
_TEMPLATES = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
_TEMPLATES.filters |= {"size": format_size, "grouped": format_count, "detected": describe_detection}


def fill_plan_text(text: str, **values: Any) -> list[str]:
    """Return the non-empty lines of a jinja2 template after filling it with values."""
    return [line for line in _TEMPLATES.from_string(text).render(values).splitlines() if line]


class PlannedDisclosure(TypedDict):
    """One kind of disclosure by a hospital.

    Attributes:
        what, to, often, protected_by: in words.
        times: maximum per run, to each receiver of one hop; None if it is not fixed.
        bytes: size of each; None if it is not known yet, or small and not fixed.
        large: whether it bounds the longest message.
        of_records: whether it is computed from records, be it by counting.
    """

    what: str
    to: str
    often: str
    times: int | None
    bytes: int | None
    large: bool
    of_records: bool
    protected_by: str


def list_disclosures(context: RunContext, shape: Shape | None, n_classes: int | None) -> list[PlannedDisclosure]:
    """Return a row for every kind of disclosure by a hospital.

    Args:
        shape, n_classes: of the models' inputs and outputs; None if only the hospitals' stores determine them.
    """
    rows: list[PlannedDisclosure] = []
    for share in context.method.disclosures:
        rows.append(row := _share_row(context, share, shape, n_classes))
        if share.kind == "generator" and share.route != HUB:
            others = len(context.names) - 1
            n_bytes = None if row["bytes"] is None else row["bytes"] * others
            rows.append(_reword_row(row, "handed_on", bytes=n_bytes, others=others))
    if any(context.reports_scores(name) for name in context.names):
        if (mixed_share := context.method.round_disclosure) is not None:
            mixed_row = _share_row(context, mixed_share, shape, n_classes)
            if not costs_epsilon(context.pipeline):
                mixed_row["protected_by"] += '; only a site with allow = ["scores"] passes its own on'
            n_bytes = _share_bytes(context, mixed_share, shape, n_classes, _FLOAT_BYTES)
            rows.append(_reword_row(mixed_row, "once_more", times=1, bytes=n_bytes))
        rows.append(_reword_row(_SMALL_ROW, "scores"))
    rounds = context.pipeline.train.rounds
    return [
        *rows,
        _reword_row(_SMALL_ROW, "documents", of_records=False),
        _reword_row(_SMALL_ROW, "tallies", of_records=False, times=rounds, rounds=rounds),
        _reword_row(_SMALL_ROW, "final", times=1),
    ]


_SMALL_ROW = PlannedDisclosure(
    what="", to="", often="", times=None, bytes=None, large=False, of_records=True, protected_by=""
)
"""A row of a few kB."""


def _reword_row(row: PlannedDisclosure, name: str, **values: Any) -> PlannedDisclosure:
    """Return a row with the texts of a name, and other values of its keys; further values fill the texts."""
    texts = {key: text.format(**values) for key, text in PLAN_TEXTS[name].items()}
    return cast("PlannedDisclosure", row | texts | {key: value for key, value in values.items() if key in row})


def list_retained(context: RunContext) -> list[str]:
    """Return what never leaves a hospital under a plan."""
    discloses_private = any("private_model" in site.allow for site in context.sites)
    keeps_private = context.method.mixing_role != "private" and not discloses_private
    has_local_model = context.method.has_local_baseline and context.pipeline.train.local_baseline
    return fill_plan_text(PLAN_TEXTS["texts"]["stays"], private=keeps_private, lone=has_local_model)


def _share_row(context: RunContext, share: Disclosure, shape: Shape | None, n_classes: int | None) -> PlannedDisclosure:
    """Return one share of the method, in words and bytes."""
    pipeline, kind = context.pipeline, _share_kind(context, share)
    is_released = kind == "letter"  # protected by its own release
    rounds, is_masked, is_generator = pipeline.train.rounds, kind == "masked sums", kind == "generator"
    is_mixed = share.timing == "rounds" and share == context.method.round_disclosure
    frequency = kind if is_released else "tried" if is_masked else "mixed" if is_mixed else share.timing
    protection = "leave" if share.is_unprotected(costs_epsilon(pipeline)) else "dp"
    protection = kind if is_released or is_generator else protection
    model, part = _role_architecture(context, share.role), pipeline.model.train
    model += "" if part == "all" else f", model.train = {part}"
    return {
        "what": PLAN_TEXTS["what"][kind].format(model=model, n=read_setting(pipeline, "replay.buffer")),
        "to": "all sites" if is_masked else PLAN_TEXTS["to"][HUB] if is_generator else _share_receivers(context, share),
        "often": PLAN_TEXTS["often"][frequency].format(rounds=rounds, attempts=MAX_ATTEMPTS),
        "times": MAX_ATTEMPTS if is_masked else rounds if share.timing == "rounds" else 1,
        "bytes": _share_bytes(context, share, shape, n_classes, _SUM_BYTES if is_masked else _FLOAT_BYTES),
        "large": True,
        "of_records": True,
        "protected_by": PLAN_TEXTS["protected"][protection].format(
            unit=pipeline.privacy.unit, worth=find_guarantee(context.method, pipeline), content=share.content
        ),
    }


def _share_kind(context: RunContext, share: Disclosure) -> str:
    """Return the plan's name for a share."""
    if share.kind == "sums":
        if share.route == FILES:
            return "letter"
        return "masked sums" if context.pipeline.privacy.noise == "shared" else "sums"
    if share.kind != "model":
        return share.kind
    if share.role == "proxy":
        return "proxy model"
    return "classifier" if share.timing == "after" else "central model"


def _role_architecture(context: RunContext, role: str) -> str:
    """Return the architecture that all sites have in a role."""
    return context.pipeline.model.proxy if role in COMMON else context.pipeline.model.private


def _share_receivers(context: RunContext, share: Disclosure) -> str:
    """Return the receivers of a share, in words."""
    graph = context.pipeline.topology.graph if share == context.method.round_disclosure else None
    if graph is not None and graph.endswith(".json"):
        return f"the sites that the graph of {graph} names"
    by = graph or share.route
    return PLAN_TEXTS["to"].get(by if isinstance(by, str) else "", "other sites, as the method's graph says")


def _share_bytes(
    context: RunContext, share: Disclosure, shape: Shape | None, n_classes: int | None, number_bytes: int
) -> int | None:
    """Return the bytes of a share, by the bytes of a number; None if its shape is not known."""
    if shape is None or n_classes is None:
        return None
    if share.kind in ("buffer", "generator"):
        return context.hooks.count_bytes(context.pipeline, share, shape, n_classes)
    return number_bytes * _measure_model(*_role_recipe(context, share.role), n_classes, shape)[0]


def _role_recipe(context: RunContext, role: str) -> tuple[str, Literal["all", "head", "last", "norm", "lora"] | None]:
    """Return the architecture of a role, and its trained part if it starts from pretrained weights."""
    model = context.pipeline.model
    return _role_architecture(context, role), model.train if model.weights else None


@lru_cache(maxsize=64)
def _measure_model(name: str, part: Any, n_classes: int, shape: Shape) -> tuple[int, str]:
    """Return the number of a model's trained parameters, and the SHA-256 of the names and shapes of all."""
    from wsi_fl.models import StartWeights, create_model, parameters_digest  # and with it PyTorch

    start = None if part is None else StartWeights(part)
    model = create_model(name, n_classes=n_classes, shape=shape, seed=0, start=start)
    return sum(p.numel() for p in model.parameters() if p.requires_grad), parameters_digest(model)


class DataDescription(TypedDict):
    """The training data of models; None if only the hospitals' stores determine a value.

    Attributes:
        data, example: `train.data` and the kind of a row, `train.example`.
        task: what models answer, in words.
        classes: the classes; for numbers and survival the names of the outputs.
        channels, size_px: of patches as models see them.
        n_features, encoder: of features and mosaics.
        weights: that the shared model starts from, by the SHA-256 of all its tensors.
        parameters: of the shared model, by the SHA-256 of all their names and shapes.
        projection: along which features are summed, by the SHA-256 of their file or by how many random ones there are.
        says: the origin and basis of these values.
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


def find_odd_key(data: DataDescription, context: RunContext) -> str:
    """Return the first key of a plan's data description that is invalid; "" for none.

    A plan may leave to the stores only what they alone determine, and must not add its own words.
    """
    if data["says"] not in PLAN_TEXTS["says"].values():
        return "says"
    if context.hooks.uses_projection and data["projection"] is None:
        return "projection"
    if context.method.mixing_role is None or input_shape(data) is None or not data["classes"]:
        return ""
    if context.pipeline.model.weights and data["weights"] is None:
        return "weights"
    return "parameters" if data["parameters"] is None else ""


def describe_data(context: RunContext) -> DataDescription:
    """Return the training data of models, from the first store of a participating site in this study.

    Without a store it follows from the settings of `wsi-fl tile`, and the stores of all must agree.
    """
    for name in context.names:
        if context.has_store(name):
            return describe_store(context, name)
    pipeline = context.pipeline
    if pipeline.train.data == "patches":
        shape = Images(3, pipeline.train.input_px or pipeline.tile.size_px)
        return _build_description(context, list(CLASSES), shape, None, "settings")
    diagnoses = sorted({diagnosis for names in pipeline.subtypes.values() for diagnosis in names})
    outputs = list(name_outputs(pipeline.target)) if pipeline.target.is_set else diagnoses
    return _build_description(context, outputs or None, None, pipeline.encoder_settings.encoder, "nothing")


def describe_store(context: RunContext, site: str) -> DataDescription:
    """Return the training data of a run's models, from the store of one site."""
    data = context.open_data(site)
    return _build_description(context, list(data.classes), data.shape, data.describe_inputs().get("encoder"), "store")


def _build_description(
    context: RunContext, classes: list[str] | None, shape: Shape | None, encoder: str | None, origin: str
) -> DataDescription:
    pipeline = context.pipeline
    return {
        "data": pipeline.train.data,
        "example": pipeline.example_level,
        "task": describe_target(pipeline.target),
        "classes": classes,
        "channels": shape.channels if isinstance(shape, Images) else None,
        "size_px": shape.size_px if isinstance(shape, Images) else None,
        "n_features": shape.n_features if isinstance(shape, Bags | Vectors) else None,
        "encoder": encoder,
        "weights": _weights_digest(context, shape),
        "parameters": _parameters_digest(context, shape, classes),
        "projection": _projection_label(context),
        "says": PLAN_TEXTS["says"][origin],
    }


def _parameters_digest(context: RunContext, shape: Shape | None, classes: list[str] | None) -> str | None:
    role = context.method.mixing_role
    if role is None or shape is None or not classes:
        return None
    return _measure_model(*_role_recipe(context, role), len(classes), shape)[1]


def _weights_digest(context: RunContext, shape: Shape | None) -> str | None:
    role = context.method.mixing_role
    if not context.pipeline.model.weights or role is None or shape is None:
        return None
    from wsi_fl.models import create_model, start_digest  # and with it PyTorch
    from wsi_fl.stages.training.initial_models import find_start

    start = find_start(context.pipeline, context.study)
    model = create_model(_role_architecture(context, role), n_classes=2, shape=shape, seed=0, start=start)
    return start_digest(model)


def _projection_label(context: RunContext) -> str | None:
    if not context.hooks.uses_projection:
        return None
    if isinstance(projection := context.pipeline.model.projection, int):
        return f"{projection} random ones"
    return open_projection(context.study, projection).digest


def input_shape(data: DataDescription) -> Shape | None:
    """Return the shape of the models' input; None if it is not known."""
    if data["channels"] is not None and data["size_px"] is not None:
        return Images(data["channels"], data["size_px"])
    if data["n_features"] is None:
        return None
    return (Bags if data["example"] == "slide" else Vectors)(data["n_features"])
