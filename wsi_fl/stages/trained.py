"""The private model that a run left at a site, and what it expects to see."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wsi_fl.config import Pipeline, Site
from wsi_fl.federation.methods import METHODS
from wsi_fl.files import read_json
from wsi_fl.models import build
from wsi_fl.runs import RunFolder
from wsi_fl.stages.workshop import architecture, input_px
from wsi_fl.stores.patches import PatchStore
from wsi_fl.types import GridSpec, WsiFlError


@dataclass(frozen=True)
class Inputs:
    """What the models of a run see: patches of `spec` reduced to input_px, and the classes they tell apart."""

    classes: tuple[str, ...]
    channels: int
    spec: GridSpec
    input_px: int


def inputs_of(pipeline: Pipeline, store: PatchStore) -> Inputs:
    """The inputs of models that were trained on a store."""
    return Inputs(store.meta.classes, store.channels, store.meta.spec, input_px(pipeline, store))


def method_of(run: RunFolder) -> str:
    """The name of the method a run was trained with."""
    return str(read_json(run.path / "manifest.json")["method"])


def private_model(
    run: RunFolder, pipeline: Pipeline, site: Site, inputs: Inputs, device: torch.device
) -> torch.nn.Module:
    """A site's private model with its trained weights, on `device`, ready to predict.

    Raises:
        WsiFlError: when the run has no such model, or it does not fit what the site's file says.
    """
    common = METHODS[method_of(run)].travels == "private"
    name = architecture(site, pipeline, "private", common=common)
    model = build(
        name,
        n_classes=len(inputs.classes),
        in_channels=inputs.channels,
        size_px=inputs.input_px,
        seed=0,  # its initial weights are all overwritten
    )
    try:
        model.load_state_dict(run.site(site.name).load_model("private"))
    except RuntimeError:
        raise WsiFlError(
            f"{run.name}: the private model of {site.name} is no {name} for {inputs.input_px}-px patches and "
            f"{len(inputs.classes)} classes; was private_model in sites/{site.name}.toml changed since the run?"
        ) from None
    return model.to(device).eval()
