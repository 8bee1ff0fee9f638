"""`export` of a trained model: a file that other programs run, and the card that says what it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsi_fl.report.model_card import rendered, warning_of
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.leaving import Leaving, Made, asked_for, card_of, require_allowed
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_json, write_text
from wsi_fl.types import Bags, GridSpec, Images, UsageError, Vectors, WsiFlError, encoder_differences

if TYPE_CHECKING:
    from torch import nn

FORMATS = ("wsinfer", "onnx")


def export_model(
    study: Study,
    run_name: str,
    *,
    called: str,
    form: str,
    site: str | None = None,
    private: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Write a model of a run for another program, with MODEL_CARD.md and model_card.json; return the document.

    Args:
        called: a name that `offered` gives.
        form: "wsinfer" or "onnx".
        site: whose; by default the first that finished and is here, for models that travelled.
        private: whether a private model may leave.

    Raises:
        UsageError: when the run has no such model, it cannot be had in this format, or the site does not let it go.
        WsiFlError: when the run has not finished.
    """
    if form not in FORMATS:
        raise UsageError(f"--format {form!r}: for a model use {' or '.join(FORMATS)}")
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    run.finished()
    with RunContext.of_run(study, run) as party:
        leaving = asked_for(party, called, site)
        require_allowed(leaving, private=private)
        name = f"{run.name}-{leaving.site.name}-{called}"
        folder = out or run.path / "exports" / form / f"{leaving.site.name}-{called}"
        network = _network(leaving)
        write = {"wsinfer": _write_wsinfer, "onnx": _write_onnx}[form]
        for old in ("MODEL_CARD.md", "model_card.json"):  # never beside a model that is not its own
            (folder / old).unlink(missing_ok=True)
        made = write(leaving, network, folder, name)
        card = card_of(leaving, name, made, folder)
    write_json(folder / "model_card.json", card)
    write_text(folder / "MODEL_CARD.md", rendered(card))
    run.site(leaving.site.name).log(f"export: the {called} model as {form}, {', '.join(card['files'])}")
    return {
        "run": study.relative(run.path),
        "site": leaving.site.name,
        "model": called,
        "format": form,
        "out": study.relative(folder),
        "files": sorted((*card["files"], "MODEL_CARD.md", "model_card.json")),
        "difference": made.difference,
        "warning": warning_of(card),
    }


def _network(leaving: Leaving) -> nn.Module:
    """The trained model on the CPU, without anything that must not leave."""
    import torch

    from wsi_fl.models.exporting import fit_to_leave
    from wsi_fl.stages.answers.trained import answering

    party = leaving.party
    known = leaving.facts["classes"]
    found = answering(
        party.run, party.pipeline, leaving.site, known, leaving.shape, torch.device("cpu"), every=True
    )
    return fit_to_leave(found.models[leaving.role]).eval().requires_grad_(False)


def _write_onnx(leaving: Leaving, network: nn.Module, folder: Path, name: str) -> Made:
    """One file; of a head on features the head alone."""
    del name
    from wsi_fl.models.exporting import input_of, write_onnx

    shape, encoder = leaving.shape, leaving.facts.get("encoder") or "its encoder"
    if isinstance(shape, Images):
        network, shape, says = _of_patches(network, shape, leaving.spec.size_px)
    elif isinstance(shape, Bags):
        filled = "the last column 1 for a patch and 0 for padding"
        says = f"float32[batch, patches, {shape.n_features} + 1], {filled}; features of {encoder}"
    else:
        says = f"float32[batch, {shape.n_features}], features of {encoder}"
    said = f"`{input_of(shape)}` {says}"
    facts = {"input": said, "class_names": json.dumps(list(leaving.facts["classes"]))}
    facts |= {"patch_size_pixels": str(leaving.spec.size_px), "spacing_um_px": str(leaving.spec.mpp)}
    difference = write_onnx(folder / "model.onnx", network, shape, facts)
    return Made(["model.onnx"], difference, said, leaving.architecture)


def _of_patches(network: nn.Module, shape: Images, size_px: int) -> tuple[nn.Module, Images, str]:
    """A model of patches as they are cut, which reduces them itself as training did: its input, and what that is."""
    from wsi_fl.models.exporting import Reduced

    says = f"float32[batch, {shape.channels}, {size_px}, {size_px}], pixels / 127.5 − 1"
    if shape.size_px == size_px:
        return network, shape, says
    inside = f"; reduced inside to {shape.size_px} px by area, as in training"
    return Reduced(network, shape.size_px).eval(), Images(shape.channels, size_px), says + inside


def _write_wsinfer(leaving: Leaving, network: nn.Module, folder: Path, name: str) -> Made:
    """`torchscript_model.pt` and `config.json`, as WSInfer's zoo has them; it takes the softmax itself."""
    from wsi_fl.models.exporting import Encoded, write_torchscript

    shape, spec = leaving.shape, leaving.spec
    if isinstance(shape, Bags):
        raise UsageError("--format wsinfer: WSInfer runs models of patches, and this one sees bags; use onnx")
    if spec.mpp <= 0 or leaving.facts.get("channels", 3) != 3:
        raise UsageError("--format wsinfer: this model learned from images without a scale; use onnx")
    architecture = leaving.architecture
    taken = Images(3, spec.size_px)
    if isinstance(shape, Vectors):
        encoder = _encoder(leaving)
        network, architecture = Encoded(encoder.network, network), f"{encoder.name}+{architecture}"
        shape = taken
    network, taken, says = _of_patches(network, shape, spec.size_px)
    difference = write_torchscript(folder / "torchscript_model.pt", network.eval(), taken)
    write_json(folder / "config.json", wsinfer_config(name, architecture, leaving.facts["classes"], spec))
    return Made(["torchscript_model.pt", "config.json"], difference, says, architecture)


def wsinfer_config(name: str, architecture: str, classes: Sequence[str], spec: GridSpec) -> dict[str, Any]:
    """Return the configuration of a model of patches as WSInfer reads it (wsinfer-zoo, model-config.schema.json)."""
    half = [0.5, 0.5, 0.5]
    return {
        "spec_version": "1.0",
        "name": name,
        "architecture": architecture,
        "num_classes": len(classes),
        "class_names": list(classes),
        "patch_size_pixels": spec.size_px,
        "spacing_um_px": spec.mpp,
        "transform": [
            {"name": "Resize", "arguments": {"size": spec.size_px}},
            {"name": "ToTensor"},
            {"name": "Normalize", "arguments": {"mean": half, "std": half}},
        ],
    }


def _encoder(leaving: Leaving) -> Any:
    """The encoder of the features that a head learned from.

    Raises:
        UsageError: when its weights are not at hand, or are others by now.
    """
    import torch

    from wsi_fl.stages.site.encoders import encoder_of

    party, wanted, cpu = leaving.party, leaving.facts["encoder"], torch.device("cpu")
    alone = "use --format onnx, which needs the head alone"
    try:
        encoder = encoder_of(
            party.study, party.pipeline.encoding, 1, "features", gpu=party.pipeline.gpu, device=cpu
        )
    except WsiFlError as error:
        raise UsageError(f"{error}; {alone}") from None
    if any(encoder_differences([encoder.label, wanted])):
        raise UsageError(
            f"the model learned from features of {wanted}, the encoder here is {encoder.label}; {alone}"
        )
    return encoder


def export_model_lines(document: dict[str, Any]) -> Lines:
    """Say where the files are, and first of all what they may tell of patients."""
    private = document["model"] == "private" or "without differential privacy" in document["warning"]
    yield Line(document["warning"], "bold yellow" if private else "")
    yield Line(f"{document['out']}: {', '.join(document['files'])}")
    yield Line("  read MODEL_CARD.md and write a licence into it before you share this")
