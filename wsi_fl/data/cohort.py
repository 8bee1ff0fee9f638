"""Labelled images, features or bags for training, in memory or in a store; their batches and augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wsi_fl.data.tasks import CLASSES, Task
from wsi_fl.system.direct_io import BufferPool
from wsi_fl.system.prefetch import prefetch_items
from wsi_fl.types import BagTable, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wsi_fl.privacy.cipher import CipherStream

Augment = Callable[["Tensor"], "Tensor"]
"""One image float32[channels, h, w], normalised to [−1, 1] → another, possibly outside this range."""
Inputs = NDArray[Any]
"""Pixels uint8[b, h, w, channels] of images, padded bags float32[b, m, d + 1], or features float32[b, d] of patches."""
_Features = NDArray[np.float32]
_Rows = NDArray[np.int64]

IN_MEMORY_BYTES = 1 << 30
_PREFETCH_BATCHES = 2
_DRAW_RANGE = 1 << 62
"""Range of the numbers drawn for the views of examples."""
_NORMALIZE_VALUES = 1 << 17
"""Values normalised at a time."""
_MAX_BAG_VALUES = 1 << 24
"""Values of bags per read for predictions: 64 MB."""
_BATCH_BUFFERS = BufferPool(capacity=2)
"""Buffers of past batches for reuse."""


@dataclass(frozen=True)
class Cohort:
    """n labelled images, or slides as bags of features.

    Attributes:
        read: rows int64[b] → inputs of models.
        label: int64[n] of classes, or the truth of another task (see `tasks`).
        slide, patient: str[n].
        allowed: mask bool[n, classes] of classes that are possible a priori; None for all.
        show: (rows, drawn numbers int64[b]) → training inputs, with the patches of a bag chosen by its number.
            None for the same as `read`.
        at_once: maximum number of examples per read for predictions; None for any.
        task: the prediction task.
    """

    read: Callable[[NDArray[np.int64]], Inputs]
    label: NDArray[Any]
    slide: NDArray[np.str_]
    patient: NDArray[np.str_]
    allowed: NDArray[np.bool_] | None = None
    show: Callable[[_Rows, _Rows], Inputs] | None = None
    at_once: int | None = None
    task: Task = CLASSES

    def __len__(self) -> int:
        return len(self.label)

    @staticmethod
    def from_arrays(
        x: Inputs | Sequence[Inputs], label: ArrayLike | None = None, patient: Sequence[str] = ()
    ) -> Cohort:
        """Return n examples in memory.

        Args:
            x: images uint8[n, h, w, channels], features [n, d], cast to float32, or n bags of them, float32[m, d].
            label: int64[n] of classes; None for 0, as for examples to predict. Training refuses others than integers.
            patient: of each example; all unknown by default.

        Raises:
            UsageError: for another shape, or another number of labels or patients than of examples.
        """
        if isinstance(x, np.ndarray):
            x = _convert_inputs(x)
        else:
            _require_bags(x)
        n, unknown = len(x), np.full(len(x), "")

        def read(rows: _Rows) -> Inputs:
            return x[rows] if isinstance(x, np.ndarray) else pack_bags([x[k] for k in rows])

        names = np.asarray(patient, np.str_) if len(patient) else unknown
        labels = np.zeros(n, np.int64) if label is None else _parse_labels(label)
        for kind, column in (("labels", labels), ("patients", names)):
            if column.shape != (n,):
                raise UsageError(f"{n} examples need as many {kind}, not {_format_shape(column.shape)}")
        return Cohort(read, labels, unknown, names)


def _convert_inputs(x: Inputs) -> Inputs:
    """Return an array as model input: pixels unchanged, features as float32."""
    if x.dtype == np.uint8:
        if x.ndim != _IMAGE_DIMENSIONS:
            raise UsageError(
                f"uint8 stands for images [n, h, w, channels], not {_format_shape(x.shape)}; give features as float32, "
                "and grey images one channel"
            )
        return x
    if x.dtype.kind not in "fiub" or x.ndim < 2:
        raise UsageError(f"examples are features float32[n, d], not {x.dtype} {_format_shape(x.shape)}")
    with np.errstate(over="ignore"):  # to infinity, which training refuses
        return x.astype(np.float32, copy=False)  # NumPy's own float64 fits no model


def _require_bags(bags: Sequence[Inputs]) -> None:
    """Refuse a list of anything but bags [m, d] of the same d."""
    for row, bag in enumerate(bags):
        shape = np.shape(bag)
        if not isinstance(bag, np.ndarray) or len(shape) != 2 or shape[1] != np.shape(bags[0])[1]:
            shown_shape = _format_shape(shape) if isinstance(bag, np.ndarray) else f"a {type(bag).__name__}"
            raise UsageError(f"row {row}: a bag is an array float32[m, d], with the same d in all, not {shown_shape}")


def _parse_labels(label: ArrayLike) -> NDArray[Any]:
    """Return labels as int64[n] where all are integers, else unchanged: training refuses them."""
    try:
        labels = np.asarray(label)
        if labels.dtype.kind == "U":
            return labels.astype(np.int64)
    except ValueError:  # words, or rows of unequal length
        return np.asarray(label, object)
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == labels.round()).all():
        return labels.astype(np.int64)
    return labels.astype(np.int64) if labels.dtype.kind in "iub" else labels


def _format_shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


_IMAGE_DIMENSIONS = 4


def find_problem(examples: Cohort, n_outputs: int) -> str:
    """Return why a model of `n_outputs` outputs cannot be trained on examples, "" where it can; all are read."""
    if not len(examples):
        return "it has no examples"
    if problem := _find_label_problem(examples, n_outputs):
        return problem
    broken, size = [], examples.at_once or _CHECK_ROWS
    for start in range(0, len(examples), size):
        inputs = examples.read(np.arange(start, min(start + size, len(examples))))
        if inputs.dtype.kind != "f":
            return ""
        finite = np.isfinite(inputs).reshape(len(inputs), -1).all(1)
        broken += (start + np.flatnonzero(~finite)).tolist()
    if broken:
        return (
            f"{len(broken)} of {len(examples)} rows hold numbers that are not finite, the first in row {broken[0]}; "
            "leave these rows out"
        )
    return ""


_CHECK_ROWS = 256


def _find_label_problem(examples: Cohort, n_outputs: int | None) -> str:
    """Return the first label that is invalid for a model of `n_outputs` outputs (None: any number); "" without one."""
    labels, task = examples.label, examples.task
    possible = task.find_valid(labels, n_outputs or _MAX_CLASSES)
    if possible.all():
        return ""
    row, n_bad = int(possible.argmin()), int((~possible).sum())
    valid_labels = task.describe_valid(n_outputs) if n_outputs else "positions in the classes: 0, 1, 2 and so on"
    return (
        f"row {row} has the label {labels.tolist()[row]!r}, and {n_bad} of {len(labels)} rows have none that can be "
        f"learned; labels are {valid_labels}"
    )


_MAX_CLASSES = 1 << 31


def require_labels(examples: Cohort) -> None:
    """Refuse class labels other than integers.

    Raises:
        UsageError: with the first such label.
    """
    if examples.task.kind == "classes" and examples.label.dtype.kind not in "iu":
        raise UsageError(_find_label_problem(examples, None))


def pack_bags(bags: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return bags float32[m_i, d] as float32[b, max m_i, d + 1], whose last column is 1 for a patch, 0 for padding."""
    out = np.zeros((len(bags), max(map(len, bags)), bags[0].shape[1] + 1), np.float32)
    for row, bag in zip(out, bags, strict=True):
        row[: len(bag), :-1] = bag
        row[: len(bag), -1] = 1
    return out


def build_bag_examples(
    read: Callable[[int], _Features],
    table: BagTable,
    allowed: NDArray[np.bool_] | None,
    *,
    n_features: int,
    in_memory: bool,
    at_once: int | None = None,
) -> Cohort:
    """Return the slides of a table as examples.

    Args:
        read: position in the table → features float32[m, n_features].
        allowed: bool[n, classes], the possible classes of each slide; None for all.
        in_memory: whether all bags are read now and cached.
        at_once: maximum number of bags per read for predictions; None for any.
    """
    read_bag = [read(k) for k in range(len(table))].__getitem__ if in_memory else read

    def read_rows(rows: _Rows) -> _Features:
        if not len(rows):
            return np.zeros((0, 1, n_features + 1), np.float32)
        return pack_bags([read_bag(int(k)) for k in rows])

    return Cohort(read_rows, table.label, table.slide, table.patient, allowed, at_once=at_once)


def bag_batch_size(longest: int, n_features: int) -> int:
    """Return the number of bags of at most `longest` patches per read for predictions."""
    return max(1, _MAX_BAG_VALUES // max(1, longest * (n_features + 1)))


def build_unlabelled_bags(bags: Sequence[_Features], allowed: NDArray[np.bool_], task: Task = CLASSES) -> Cohort:
    """Return unlabelled bags as examples to predict, with their possible classes bool[classes]."""
    possible = np.broadcast_to(allowed, (len(bags), len(allowed))) if task.kind == "classes" else None
    at_once = bag_batch_size(max(map(len, bags)), bags[0].shape[1])
    return replace(Cohort.from_arrays(bags), allowed=possible, at_once=at_once, task=task)


def find_allowed_classes(
    tumor_type: NDArray[np.str_], classes: Sequence[str], tumor_types: Mapping[str, Sequence[str]]
) -> NDArray[np.bool_]:
    """Return the possible classes bool[n, classes] of each slide's tumour type; all for an unknown type."""
    rows = [[name in tumor_types.get(kind, classes) for name in classes] for kind in tumor_type.tolist()]
    return np.array(rows, bool).reshape(len(tumor_type), len(classes))


def sample_patches(examples: Cohort, max_patches: int) -> Cohort:
    """Return the same bags, of which training gets at most `max_patches` patches, redrawn in every batch.

    The patches follow from a number drawn with the batch and the bag's length only. So bags are sampled independently
    of each other, as the guarantee ε requires.
    """

    def draw_patches(bag: _Features, seed: int) -> _Features:
        if len(bag) <= max_patches:
            return bag
        return bag[np.sort(np.random.default_rng(seed).choice(len(bag), max_patches, replace=False))]

    def show(rows: _Rows, draws: _Rows) -> _Features:
        bags = [examples.read(rows[k : k + 1])[0][:, :-1] for k in range(len(rows))]
        if not bags:
            return np.asarray(examples.read(rows), np.float32)
        return pack_bags([draw_patches(bag, int(seed)) for bag, seed in zip(bags, draws, strict=True)])

    return replace(examples, show=show)


def select_examples(examples: Cohort, rows: NDArray[np.int64]) -> Cohort:
    """Return the examples at rows int64[m], in this order."""
    show = examples.show
    return Cohort(
        lambda chosen: examples.read(rows[chosen]),
        examples.label[rows],
        examples.slide[rows],
        examples.patient[rows],
        None if examples.allowed is None else examples.allowed[rows],
        None if show is None else lambda chosen, draws: show(rows[chosen], draws),
        examples.at_once,
        examples.task,
    )


def resize_images(examples: Cohort, size_px: int) -> Cohort:
    """Return the same images at size_px × size_px."""
    return replace(examples, read=lambda rows: downsample_pixels(examples.read(rows), size_px))


def downsample_pixels(pixels: NDArray[np.uint8], size_px: int) -> NDArray[np.uint8]:
    """Return images uint8[n, h, w, channels] at size_px × size_px by area averaging."""
    import torch
    from torch.nn import functional

    if pixels.shape[1:3] == (size_px, size_px) or not len(pixels):
        return pixels
    planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    smaller = functional.interpolate(planes, size=(size_px, size_px), mode="area")
    return smaller.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def cache_examples(examples: Cohort, limit_bytes: int = IN_MEMORY_BYTES, chunk: int = 64) -> Cohort:
    """Return the same images cached in memory if they fit in `limit_bytes`, else unchanged."""
    if not len(examples):
        return examples
    first = examples.read(np.zeros(1, np.int64))
    if first.nbytes * len(examples) > limit_bytes:
        return examples
    pixels = np.empty((len(examples), *first.shape[1:]), first.dtype)
    for start in range(0, len(examples), chunk):
        rows = np.arange(start, min(start + chunk, len(examples)))
        pixels[rows] = examples.read(rows)
    return replace(examples, read=lambda rows: pixels[rows])


def concatenate_examples(parts: list[Cohort]) -> Cohort:
    """Concatenate sets of examples, in order; bags are padded to the longest of a batch."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts)])

    def gather_inputs(readers: Sequence[Callable[..., Inputs]], rows: _Rows, *draws: _Rows) -> Inputs:
        owner = np.searchsorted(starts, rows, side="right") - 1
        inputs_by_part = {
            k: readers[k](rows[owner == k] - starts[k], *(numbers[owner == k] for numbers in draws))
            for k in np.unique(owner).tolist()
        }
        if not inputs_by_part:
            return parts[0].read(rows)
        shape = np.max([inputs.shape[1:] for inputs in inputs_by_part.values()], axis=0)
        out = np.zeros((len(rows), *shape), next(iter(inputs_by_part.values())).dtype)
        for k, inputs in inputs_by_part.items():
            out[owner == k, : inputs.shape[1]] = inputs
        return out

    shows = [part.show for part in parts if part.show is not None]
    return Cohort(
        partial(gather_inputs, [part.read for part in parts]),
        np.concatenate([part.label for part in parts]),
        np.concatenate([part.slide for part in parts]),
        np.concatenate([part.patient for part in parts]),
        _concatenate_allowed(parts),
        partial(gather_inputs, shows) if len(shows) == len(parts) else None,
        min((part.at_once for part in parts if part.at_once is not None), default=None),
        parts[0].task,
    )


def _concatenate_allowed(parts: list[Cohort]) -> NDArray[np.bool_] | None:
    """Concatenate the allowed classes of all parts, whose classes agree by the preflight."""
    class_counts = [part.allowed.shape[1] for part in parts if part.allowed is not None]
    if not class_counts:
        return None
    masks = [np.ones((len(part), max(class_counts)), bool) if part.allowed is None else part.allowed for part in parts]
    return np.concatenate([np.pad(mask, ((0, 0), (0, max(class_counts) - mask.shape[1]))) for mask in masks])


def _normalize_pixels(pixels: NDArray[np.uint8]) -> Tensor:
    """Normalise uint8[b, h, w, c] to float32[b, c, h, w] in [−1, 1] by constants, independent of other records.

    In chunks that fit the processor's cache, without torch's threads: twice as fast as on entire arrays.
    """
    import torch

    pixels_out = _BATCH_BUFFERS.empty(pixels.shape, np.float32)
    target, source = pixels_out.reshape(-1), np.ascontiguousarray(pixels).reshape(-1)
    for start in range(0, len(source), _NORMALIZE_VALUES):
        chunk = target[start : start + _NORMALIZE_VALUES]
        np.divide(source[start : start + _NORMALIZE_VALUES], np.float32(127.5), out=chunk)
        np.subtract(chunk, np.float32(1), out=chunk)
    return torch.from_numpy(pixels_out).permute(0, 3, 1, 2)


def build_tensor(inputs: Inputs, device: torch.device | None = None) -> Tensor:
    """Return model inputs on a device: images as float32[b, c, h, w] in [−1, 1], features unchanged.

    Images go to a GPU as bytes, a quarter of their size in float32, and are converted there.
    """
    import torch

    if device is None or device.type == "cpu":
        return _normalize_pixels(inputs) if inputs.dtype == np.uint8 else torch.from_numpy(inputs)
    values = torch.from_numpy(np.ascontiguousarray(inputs)).pin_memory().to(device, non_blocking=True)
    if inputs.dtype != np.uint8:
        return values
    planes = values.permute(0, 3, 1, 2)  # also in memory order: GPUs have no other GroupNorm
    return planes.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def draw_epoch_rows(n: int, batch_size: int, epochs: int, *, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of ceil(n / batch_size) batches in each of `epochs` shuffled passes; without privacy."""
    for _ in range(epochs):
        yield from np.array_split(sampler.permutation(n), range(batch_size, n, batch_size))


def load_batches(
    examples: Cohort,
    rows: Iterator[NDArray[np.int64]],
    *,
    augment: Augment | None,
    device: torch.device,
    draws: CipherStream | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (normalised and augmented images or features, labels int64[b]) on `device`; b may be 0.

    For a GPU a thread prefetches a few batches, so that the GPU need not wait for the disk.

    Args:
        rows: of each batch, int64[b].
        draws: stream of the numbers for the training inputs of `Cohort.show`; None for the inputs of `read`.
    """
    import torch

    require_labels(examples)

    def read_inputs(chosen: _Rows) -> Inputs:
        if draws is None or examples.show is None:
            return examples.read(chosen)
        return examples.show(chosen, (draws.uniform(len(chosen)) * _DRAW_RANGE).astype(np.int64))

    def generate_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            images = build_tensor(read_inputs(chosen), device)
            if augment is not None and len(images):
                images = torch.stack([augment(image) for image in images])
            yield images, torch.from_numpy(examples.label[chosen]).to(device)

    yield from (prefetch_items(generate_batches(), _PREFETCH_BATCHES) if device.type == "cuda" else generate_batches())


_AUGMENTATIONS = ("none", "flips", "stain")
"""Names of augmentations; their parameters are constants, never statistics of a data set."""


def build_augmentation(name: str, stream: CipherStream) -> Augment | None:
    """Return the named augmentation of images float32[c, h, w] in [−1, 1], drawn by the stream.

    `flips` draws one of the eight symmetries of the square, since a patch has no up; `stain` also, per colour channel,
    a gain about mid-grey and an offset, as of other laboratories' stains. They equal MONAI's RandFlip, RandRotate90,
    RandScaleIntensity and RandShiftIntensity, whose import takes longer than a small run.

    Raises:
        UsageError: for an unknown name.
    """
    if name not in _AUGMENTATIONS:
        raise UsageError(f"unknown augmentation {name!r}; known: {', '.join(_AUGMENTATIONS)}")
    if name == "none":
        return None
    import torch

    def draw_number() -> float:
        return stream.randbelow(2**53) * 2.0**-53

    def draw_values(image: Tensor, bound: float) -> list[float]:
        return [2 * bound * draw_number() - bound for _ in image]

    def expand_channels(image: Tensor, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=image.dtype, device=image.device)[:, None, None]

    def augment(image: Tensor) -> Tensor:
        for axis in (1, 2):
            if draw_number() < 0.5:
                image = image.flip(axis)
        if draw_number() < 0.5:
            image = torch.rot90(image, stream.randbelow(3) + 1, (1, 2))
        if name == "stain":
            if draw_number() < 0.8:
                image = image * expand_channels(image, [1 + value for value in draw_values(image, 0.4)])
            if draw_number() < 0.8:
                image = image + expand_channels(image, draw_values(image, 0.5))
        return image

    return augment
