"""Formats of an exported model: the files of WSInfer, MONAI and ONNX."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from wsi_fl import __version__
from wsi_fl.data.tasks import NumberTask
from wsi_fl.models.export_formats import DownsamplingModel, HeadWithEncoder, input_name, write_onnx, write_torchscript
from wsi_fl.models.monai_bundle import BUNDLE_FILES, BundleFacts, write_bundle
from wsi_fl.report.formatting import Json
from wsi_fl.stages.evaluation.load_models import is_trained_with_dp
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.target_labels import describe_target
from wsi_fl.stages.training.initial_models import find_architecture
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.files import write_json
from wsi_fl.types import Bags, GridSpec, Images, Shape, UsageError, Vectors, WsiFlError, encoder_differences


@dataclass(frozen=True)
class ExportRequest:
    """A model to export: its public name, its role in the run, and the run's record of its training store (`facts`)."""

    context: RunContext
    site: SiteFile
    model_name: str
    role: str
    facts: Json

    @cached_property
    def site_names(self) -> list[str]:
        """The sites of its training patients."""
        return [site.name for site in ([self.site] if self.model_name == "private" else self.context.members)]

    @cached_property
    def accounts(self) -> dict[str, Json]:
        """The final privacy accounts of the sites of its training patients whose part of the run is here."""
        folders = {name: self.context.run.site_folder(name) for name in self.site_names}
        return {name: folder.read_account() for name, folder in folders.items() if folder.account_path.exists()}

    @property
    def has_guarantee(self) -> bool:
        """Whether the ε of the run's ledgers covers this model."""
        guarantees = [account["guarantee"] != "none" for account in self.accounts.values()]
        return is_trained_with_dp(self.context, self.role) and bool(guarantees) and all(guarantees)

    @property
    def architecture_name(self) -> str:
        common = self.context.method.mixing_role == "private"
        return find_architecture(self.site, self.context.pipeline, self.role, common=common)

    @property
    def name(self) -> str:
        return f"{self.context.run.name}-{self.site.name}-{self.model_name}"

    @property
    def spec(self) -> GridSpec:
        return GridSpec(**self.facts["spec"])

    @property
    def shape(self) -> Shape:
        """The shape of its input."""
        if self.context.kind.is_images:
            size = self.context.pipeline.train.input_px or self.spec.size_px
            return Images(int(self.facts.get("channels", 3)), size)
        return self.context.kind.shape(int(self.facts["n_features"]))


class ExportResult(NamedTuple):
    """The written files, the largest difference of outputs from the model's, the input in words, the architecture, and
    whether the outputs are predictions."""

    files: Sequence[str]
    difference: float
    input: str
    architecture: str
    predicts: bool = False


def _write_onnx(request: ExportRequest, network: nn.Module, folder: Path) -> ExportResult:
    """Write one file; of a head on features without the encoder."""
    shape, encoder = request.shape, request.facts.get("encoder") or "its encoder"
    if isinstance(shape, Images):
        network, shape, shape_text = _add_resizing(network, shape, request.spec.size_px)
    elif isinstance(shape, Bags):
        filled = "the last column 1 for a patch and 0 for padding"
        shape_text = f"float32[batch, patches, {shape.n_features} + 1], {filled}; features of {encoder}"
    else:
        shape_text = f"float32[batch, {shape.n_features}], features of {encoder}"
    input_text = f"`{input_name(shape)}` {shape_text}"
    facts = {"input": input_text, "class_names": json.dumps(list(request.facts["classes"]))}
    facts |= {"patch_size_pixels": str(request.spec.size_px), "spacing_um_px": str(request.spec.mpp)}
    difference = write_onnx(folder / "model.onnx", network, shape, facts)
    return ExportResult(["model.onnx"], difference, input_text, request.architecture_name)


def _add_resizing(network: nn.Module, shape: Images, size_px: int) -> tuple[nn.Module, Images, str]:
    """Return a model of full-size patches that resizes them as in training, its input shape, and that in words."""
    shape_text = f"float32[batch, {shape.channels}, {size_px}, {size_px}], pixels / 127.5 − 1"
    if shape.size_px == size_px:
        return network, shape, shape_text
    resize_note = f"; reduced inside to {shape.size_px} px by area, as in training"
    return (DownsamplingModel(network, shape.size_px).eval(), Images(shape.channels, size_px), shape_text + resize_note)


class _PatchModel(NamedTuple):
    """A model of whole patches, the shape of its input, that in words, and its architecture with the encoder."""

    network: nn.Module
    shape: Images
    shape_text: str
    architecture: str


def _build_patch_model(request: ExportRequest, network: nn.Module, form: str) -> _PatchModel:
    """Return a model of full-size patches, with the encoder in front of a head; UsageError for a model of bags."""
    shape, size_px, architecture = request.shape, request.spec.size_px, request.architecture_name
    if isinstance(shape, Bags):
        raise UsageError(f"--format {form} is for models of patches, not of bags; use onnx")
    if isinstance(shape, Vectors):
        encoder = _load_encoder(request, form)
        network, architecture = HeadWithEncoder(encoder.network, network), f"{encoder.name}+{architecture}"
        shape = Images(3, size_px)
    network, shape, shape_text = _add_resizing(network, shape, size_px)
    return _PatchModel(network.eval(), shape, shape_text, architecture)


def _write_wsinfer(request: ExportRequest, network: nn.Module, folder: Path) -> ExportResult:
    """Write `torchscript_model.pt` with the softmax, and `config.json` by wsinfer-zoo's model-config.schema.json."""
    spec = request.spec
    if request.context.task.kind != "classes":
        raise UsageError(
            "--format wsinfer is for classes, as WSInfer takes the softmax of outputs, not for "
            f"{describe_target(request.context.pipeline.target)}; use onnx or monai-bundle"
        )
    if request.context.kind.is_images and (spec.mpp <= 0 or request.facts.get("channels", 3) != 3):
        raise UsageError("--format wsinfer: this model was trained on images without a scale; use onnx")
    model = _build_patch_model(request, network, "wsinfer")
    difference = write_torchscript(folder / "torchscript_model.pt", model.network, model.shape)
    half, classes = [0.5, 0.5, 0.5], list(request.facts["classes"])
    config = {
        "spec_version": "1.0",
        "name": request.name,
        "architecture": model.architecture,
        "num_classes": len(classes),
        "class_names": classes,
        "patch_size_pixels": spec.size_px,
        "spacing_um_px": spec.mpp,
        "transform": [
            {"name": "Resize", "arguments": {"size": spec.size_px}},
            {"name": "ToTensor"},
            {"name": "Normalize", "arguments": {"mean": half, "std": half}},
        ],
    }
    write_json(folder / "config.json", config)
    return ExportResult(["torchscript_model.pt", "config.json"], difference, model.shape_text, model.architecture)


def _write_bundle(request: ExportRequest, network: nn.Module, folder: Path) -> ExportResult:
    """Write a MONAI bundle, whose model gives the predictions of pixels."""
    model, task = _build_patch_model(request, network, "monai-bundle"), request.context.task
    classes, target = tuple(request.facts["classes"]), describe_target(request.context.pipeline.target)
    facts = BundleFacts(
        name=request.name,
        task=f"Prediction of {', '.join(classes)} for patches of whole-slide images ({target}).",
        description=f"{model.architecture}, trained by {request.context.name} with wsi-fl {__version__}.",
        authors=f"run {request.context.run.name}, sites {', '.join(request.site_names)}",
        output_type="values" if isinstance(task, NumberTask) else "probabilities",
        output_range=(task.low, task.high) if isinstance(task, NumberTask) else (0, 1),
        outputs=classes,
        mpp=request.spec.mpp,
    )
    difference = write_bundle(folder, model.network, task.predict, model.shape, facts)
    text = model.shape_text.replace("pixels / 127.5 − 1", "pixels from 0 to 255")
    return ExportResult(BUNDLE_FILES, difference, text, model.architecture, predicts=True)


def _load_encoder(request: ExportRequest, form: str) -> Any:
    """Return the encoder of a head's training features; UsageError if its weights are missing or changed."""
    context, encoder_label, cpu = request.context, request.facts["encoder"], torch.device("cpu")
    advice = "use --format onnx, which needs the head only"
    if any(encoder_differences([context.pipeline.encoder_settings.encoder, encoder_label])):
        raise UsageError(
            f"--format {form}: the model was trained on features of {encoder_label}, which is no encoder of the "
            f"study; {advice}"
        )
    try:
        encoder = load_encoder(context.study, context.pipeline, "features", 1, device=cpu)
    except WsiFlError as error:
        raise UsageError(f"{error}; {advice}") from None
    if any(encoder_differences([encoder.label, encoder_label])):
        raise UsageError(
            f"the model was trained on features of {encoder_label}, the encoder here is {encoder.label}; {advice}"
        )
    return encoder


FORMATS: Mapping[str, Callable[[ExportRequest, nn.Module, Path], ExportResult]] = {
    "wsinfer": _write_wsinfer,
    "monai-bundle": _write_bundle,
    "onnx": _write_onnx,
}
"""Format → a writer of a model into a folder."""
