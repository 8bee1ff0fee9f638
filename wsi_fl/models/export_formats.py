"""Export of trained models to TorchScript and ONNX, each read back and compared before it is kept."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_fl.models.encoder import Network
from wsi_fl.models.traces import remove_onnx_traces, remove_torchscript_traces
from wsi_fl.system.extras import require_extra
from wsi_fl.system.files import atomic_path
from wsi_fl.types import Bags, Images, Shape, UsageError, WsiFlError

_TOLERANCE, _MAX_NOISE = 1e-5, 1e-3
"""Tolerance of a file's logits relative to the largest (at least 1): rounding of float32 in another order of sums; and
its maximum for a model with larger differences between batches and single examples."""
_N_EXAMPLES, _N_PATCHES = 3, 5


class DownsamplingModel(nn.Module):
    """A model of larger images, float32[b, 3, h, w] in [−1, 1], downsampled as in training."""

    def __init__(self, model: nn.Module, size_px: int) -> None:
        super().__init__()
        self.model, self.size_px = model, size_px

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images + 1) * 127.5
        smaller = functional.interpolate(pixels, size=(self.size_px, self.size_px), mode="area")
        logits: Tensor = self.model(smaller.round().clamp(0, 255) / 127.5 - 1)
        return logits


class HeadWithEncoder(nn.Module):
    """A head with its encoder in front: images float32[b, 3, h, w] in [−1, 1] to logits."""

    def __init__(self, encoder: Network, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = copy.deepcopy(encoder).cpu(), head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder.encode_images(images * 0.5 + 0.5))
        return logits


def example_batch(shape: Shape) -> Tensor:
    """Return a batch of model inputs: deterministic noise; bags of different lengths."""
    source = torch.Generator().manual_seed(0)
    if isinstance(shape, Images):
        size = (_N_EXAMPLES, shape.channels, shape.size_px, shape.size_px)
        return torch.randint(0, 256, size, generator=source) / 127.5 - 1
    if isinstance(shape, Bags):
        bags = torch.randn(_N_EXAMPLES, _N_PATCHES, shape.n_features + 1, generator=source)
        bags[..., -1] = torch.arange(_N_PATCHES) < torch.arange(_N_PATCHES - 2, _N_PATCHES + 1)[:, None]
        return bags
    return torch.randn(_N_EXAMPLES, shape.n_features, generator=source)


def write_torchscript(
    path: Path,
    model: nn.Module,
    shape: Shape,
    *,
    example: Tensor | None = None,
    embedded: Mapping[str, str] | None = None,
) -> float:
    """Write a traced model and return the largest error of its logits relative to the largest logit.

    Args:
        example: a batch of its inputs where they are not those of networks, images in [−1, 1].
        embedded: texts by name, stored with the model in the file.

    Raises:
        WsiFlError: for an error above 10⁻⁵ and above the model's own noise; then there is no file.
    """
    example = example_batch(shape) if example is None else example
    with atomic_path(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # WSInfer's runtime reads traced models, deprecated or not
        torch.jit.save(torch.jit.trace(model, example), str(temporary), embedded)  # type: ignore[no-untyped-call]
        remove_torchscript_traces(temporary)
        read_back = torch.jit.load(str(temporary), map_location="cpu")  # type: ignore[no-untyped-call]
        return _check_difference(path, model, read_back, example)


def write_onnx(path: Path, model: nn.Module, shape: Shape, facts: Mapping[str, str] | None = None) -> float:
    """Write an ONNX file and return the largest error of its logits relative to the largest logit.

    The input is `images`, `bags` or `features`, the output `logits`; the dimensions `batch` and `patches` are free.
    `facts` are the file's metadata (`custom_metadata_map`).

    Raises:
        UsageError: when the extra `export` is missing.
        WsiFlError: for an error above 10⁻⁵ and above the model's own noise; then there is no file.
    """
    require_extra("export")
    import onnxruntime

    dynamic = {0: "batch", 1: "patches"} if isinstance(shape, Bags) else {0: "batch"}
    name = input_name(shape)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with atomic_path(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"input_names": [name], "output_names": ["logits"], "verbose": False}
        try:
            program = torch.onnx.export(
                model,
                (example_batch(shape),),
                dynamo=True,
                dynamic_shapes=(dynamic,),
                **options,  # type: ignore[arg-type]
            )
        except torch.onnx.OnnxExporterError:
            program = None
        if program is None:
            raise UsageError(f"--format onnx: a {type(model).__name__} works bag by bag, which ONNX cannot express")
        program.model.metadata_props.update(facts or {})
        proto = program.model_proto
        remove_onnx_traces(proto)
        temporary.write_bytes(proto.SerializeToString())
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])

        def read_back(x: Tensor) -> Tensor:
            return torch.from_numpy(session.run(["logits"], {name: x.numpy()})[0])

        return _check_difference(path, model, read_back, example_batch(shape))


def input_name(shape: Shape) -> str:
    """Return the name of an ONNX file's input."""
    return {"Images": "images", "Bags": "bags", "Vectors": "features"}[type(shape).__name__]


@torch.no_grad()
def _check_difference(path: Path, model: nn.Module, read_back: Callable[[Tensor], Tensor], batch: Tensor) -> float:
    """Return the largest error over a batch and a single example: a file must work for any batch size."""
    logits = cast(Tensor, model(batch))
    single_logits = torch.cat([cast(Tensor, model(batch[k : k + 1])) for k in range(len(batch))])
    scale = max(1.0, float(logits.abs().max()))
    tolerance = max(_TOLERANCE, min(_MAX_NOISE, 2 * float((logits - single_logits).abs().max()) / scale))
    files = ((logits, read_back(batch)), (single_logits[:1], read_back(batch[:1].contiguous())))
    difference = float(torch.stack([(expected - actual).abs().max() for expected, actual in files]).max()) / scale
    if not difference <= tolerance:
        raise WsiFlError(f"{path}: gives other numbers than the model (by {difference:.1e}); it is not written")
    return difference
