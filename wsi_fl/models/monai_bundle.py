"""MONAI bundles of image models: a folder that `monai.bundle` opens and runs, written without importing MONAI.

The model takes pixels as they are in a picture file and gives predictions, so no other program prepares its input.
Specification: https://monai.readthedocs.io/en/stable/mb_specification.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from wsi_fl.models.export_formats import example_batch, write_torchscript
from wsi_fl.system.files import write_json, write_text
from wsi_fl.types import Images, UsageError

BUNDLE_FILES = ("models/model.ts", "configs/metadata.json", "configs/inference.json", "docs/README.md")

_Config = dict[str, object]

_SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_COLORS = {1: ("L", ["grey"]), 3: ("RGB", ["red", "green", "blue"])}
"""Pillow's mode and the channels of a picture, by their number."""


@dataclass(frozen=True)
class BundleFacts:
    """What a bundle's metadata say of its model.

    Attributes:
        name: of the model.
        task: what it predicts, in a sentence.
        description: of its training.
        authors: who trained it.
        output_type, output_range: "probabilities", or another type of output in words, and its bounds.
        outputs: names of the columns of its predictions.
        mpp: µm per pixel of its patches; 0 where they have no scale.
    """

    name: str
    task: str
    description: str
    authors: str
    output_type: str
    output_range: Sequence[float]
    outputs: Sequence[str]
    mpp: float


class _PixelModel(nn.Module):
    """A model of pixels from 0 to 255, float32[b, channels, h, w], that gives predictions float32[b, k]."""

    def __init__(self, model: nn.Module, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.predict = model, predict

    def forward(self, pixels: Tensor) -> Tensor:
        return self.predict(self.model(pixels / 127.5 - 1))


def write_bundle(
    folder: Path, model: nn.Module, predict: Callable[[Tensor], Tensor], shape: Images, facts: BundleFacts
) -> float:
    """Write a bundle and return the largest error of its predictions relative to the largest one, at least 1.

    An interrupted writer leaves no configuration, so a folder that MONAI opens is whole.

    Args:
        model: of images float32[b, channels, size_px, size_px] in [−1, 1], to outputs.
        predict: outputs float32[b, k] to predictions float32[b, k].

    Raises:
        UsageError: for images that no picture file holds.
        WsiFlError: for an error above 10⁻⁵ and above the model's own noise.
    """
    if shape.channels not in _COLORS:
        raise UsageError(f"--format monai-bundle: pictures have 1 or 3 channels, not {shape.channels}; use onnx")
    model_file, metadata_file, inference_file, readme = (folder / file for file in BUNDLE_FILES)
    for path in (metadata_file, inference_file):
        path.unlink(missing_ok=True)
    metadata, inference = _describe_model(shape, _quote_facts(facts)), _configure_inference(shape)
    embedded = {metadata_file.name: json.dumps(metadata), inference_file.name: json.dumps(inference)}
    pixels = (example_batch(shape) + 1) * 127.5
    difference = write_torchscript(
        model_file, _PixelModel(model, predict).eval(), shape, example=pixels, embedded=embedded
    )
    write_text(readme, _README.format(name=facts.name, task=facts.task, input=_describe_input(shape, facts.mpp)))
    write_json(inference_file, inference)
    write_json(metadata_file, metadata)
    return difference


def _quote_facts(facts: BundleFacts) -> BundleFacts:
    """Return facts in whose texts MONAI sees no expression (`$`), reference (`@`) or file (`%`), which it would run."""
    return replace(
        facts,
        name=_quote_text(facts.name),
        task=_quote_text(facts.task),
        description=_quote_text(facts.description),
        authors=_quote_text(facts.authors),
        outputs=[_quote_text(name) for name in facts.outputs],
    )


def _quote_text(text: str) -> str:
    text = re.sub(r"([@%])(?=#|::)", r"\1 ", text)
    return f"'{text}'" if text.startswith(("$", "@", "%")) else text


def _describe_input(shape: Images, mpp: float) -> str:
    scale = f" at {mpp:g} µm per pixel" if mpp > 0 else ""
    return f"{_COLORS[shape.channels][0]} patches of {shape.size_px} × {shape.size_px} px{scale}, as they were cut"


def _describe_model(shape: Images, facts: BundleFacts) -> _Config:
    """Return the metadata, by the schema that they name."""
    image: _Config = {
        "type": "image",
        "format": "magnitude",
        "modality": "histopathology",
        "num_channels": shape.channels,
        "spatial_shape": [shape.size_px, shape.size_px],
        "dtype": "float32",
        "value_range": [0, 255],
        "is_patch_data": True,
        "channel_def": _number_names(_COLORS[shape.channels][1]),
    }
    prediction: _Config = {
        "type": facts.output_type,
        "format": "classes" if facts.output_type == "probabilities" else facts.output_type,
        "num_channels": len(facts.outputs),
        "spatial_shape": [],
        "dtype": "float32",
        "value_range": list(facts.output_range),
        "is_patch_data": False,
        "channel_def": _number_names(facts.outputs),
    }
    return {
        "schema": _SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": "export of the trained model"},
        "monai_version": version("monai"),
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {"pillow": version("pillow")},
        "name": facts.name,
        "task": facts.task,
        "description": facts.description,
        "authors": facts.authors,
        "copyright": "not stated: no licence is chosen yet, see MODEL_CARD.md",
        "data_type": "png, jpeg",
        "image_classes": _describe_input(shape, facts.mpp),
        "pred_classes": ", ".join(facts.outputs),
        "intended_use": "research; it is not a medical device",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": prediction}},
    }


def _number_names(names: Sequence[str]) -> Mapping[str, str]:
    return {str(k): name for k, name in enumerate(names)}


def _configure_inference(shape: Images) -> _Config:
    """Return the configuration of `run`, which writes the predictions of a folder of pictures to eval/predictions.csv.

    `run` needs MONAI and Pillow alone; the evaluator, for programs that ask for one, PyTorch-Ignite too.
    """
    load = {
        "_target_": "LoadImaged",
        "keys": "image",
        "reader": "PILReader",
        "converter": f"$lambda picture: picture.convert('{_COLORS[shape.channels][0]}')",
        "reverse_indexing": False,  # else MONAI transposes pictures
    }
    files = "sorted(glob.glob(@dataset_dir + '/*.png') + glob.glob(@dataset_dir + '/*.jp*g'))"
    items = "$[{'image': file, 'pred_meta_dict': {'filename_or_obj': file}} for file in " + files + "]"
    predictions = "{**batch, 'pred': @inferer(batch['image'].as_tensor().to(@device), @network_def)}"
    return {
        "imports": ["$import glob", "$import torch", "$from monai.data import decollate_batch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/patches'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": {
            "_target_": "torch.jit.load",
            "f": f"$@bundle_root + '/{BUNDLE_FILES[0]}'",
            "map_location": "@device",
        },
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [load, {"_target_": "EnsureChannelFirstd", "keys": "image"}],
        },
        "dataset": {"_target_": "Dataset", "data": items, "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 32, "num_workers": 0},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "SaveClassificationd", "keys": "pred", "output_dir": "@output_dir"}],
        },
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network_def",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "predict_batch": f"$torch.no_grad()(lambda batch: @postprocessing(decollate_batch({predictions})))",
        "run": ["$[@predict_batch(batch) for batch in @dataloader]"],
    }


_README = """# {name}

{task}

Input: {input}, pixels from 0 to 255. What it was trained on, its scores and its privacy: `../MODEL_CARD.md`.

Put patches as PNG or JPEG into a folder, and with MONAI and Pillow (in Python, in this bundle's folder):

    from monai.bundle import run
    run(config_file="configs/inference.json", meta_file="configs/metadata.json", dataset_dir="PATCHES")

On a command line the same needs `pip install fire`:

    python -m monai.bundle run --config_file configs/inference.json --dataset_dir PATCHES

`eval/predictions.csv` has a line for each patch: its file, and the numbers in the order of `channel_def` of the output
in `configs/metadata.json`. `evaluator` of the configuration needs `pip install pytorch-ignite`; `run` does not.
"""
