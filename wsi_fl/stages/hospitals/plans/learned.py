"""What the models of a plan are trained on: as a store has it, or as far as settings know."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from wsi_fl.stages.site.party import Party
from wsi_fl.stages.site.targets import outputs_of, question
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import CLASSES, Bags, Images, Shape, Vectors


class Learned(TypedDict):
    """What models are trained on; None where only the hospitals' stores know.

    Attributes:
        data, example: `train.data` and what a row is, `train.example`.
        asks: what models answer, in words.
        classes: the classes; of numbers and survival what each output is called.
        channels, size_px: of patches as models see them.
        n_features, encoder: of features and mosaics.
        says: where this is from, and what it rests on.
    """

    data: Literal["patches", "features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    asks: str
    classes: list[str] | None
    channels: int | None
    size_px: int | None
    n_features: int | None
    encoder: str | None
    says: str


def learned_by(party: Party) -> Learned:
    """Return what models are trained on, from the first store of a site of the party that is in this study.

    Without a store the pipeline's settings say what `wsi-fl tile` would make, and the stores of all must agree.
    """
    for name in party.names:
        if party.has_store(name):
            return of_store(party, name)
    return _of_settings(party.pipeline)


def of_store(party: Party, site: str) -> Learned:
    """Return what the models of a party see, from the store of one site."""
    data = party.data(site)
    shape, inputs = data.shape, data.inputs()
    found = _learned(party.pipeline, list(data.classes), shape)
    found["encoder"] = inputs.get("encoder")
    found["says"] = "As a store has it where this plan was made; the stores of all sites must agree."
    return found


def _of_settings(pipeline: Pipeline) -> Learned:
    if pipeline.train.data == "patches":
        size_px = pipeline.train.input_px or pipeline.tile.size_px
        found = _learned(pipeline, list(CLASSES), Images(3, size_px))
        found["says"] = "As `wsi-fl tile` makes stores with these settings; the hospitals' stores must agree."
        return found
    diagnoses = sorted({one for names in pipeline.subtypes.values() for one in names})
    asked = list(outputs_of(pipeline.target)) if pipeline.target.asked else diagnoses
    found = _learned(pipeline, asked or None, None)
    found["encoder"] = pipeline.encoding.encoder
    found["says"] = (
        "No store was there when this plan was made. The hospitals' stores must agree on the encoder, its weights, "
        "the number of features and the classes; the sites compare them before anything is trained."
    )
    return found


def _learned(pipeline: Pipeline, classes: list[str] | None, shape: Shape | None) -> Learned:
    return {
        "data": pipeline.train.data,
        "example": pipeline.example,
        "asks": question(pipeline.target),
        "classes": classes,
        "channels": shape.channels if isinstance(shape, Images) else None,
        "size_px": shape.size_px if isinstance(shape, Images) else None,
        "n_features": shape.n_features if isinstance(shape, Bags | Vectors) else None,
        "encoder": None,
        "says": "",
    }


def shape_of(learned: Learned) -> Shape | None:
    """Return the shape of what models see; None where it is not known."""
    if learned["channels"] is not None and learned["size_px"] is not None:
        return Images(learned["channels"], learned["size_px"])
    if learned["n_features"] is None:
        return None
    return (Bags if learned["example"] == "slide" else Vectors)(learned["n_features"])
