"""Labelled images or bags as training sees them, whether they lie in memory or in a store, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import Queue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wsi_fl.privacy.dpsgd import poisson_rows

Augment = Callable[[Tensor], Tensor]
"""Maps one image float32[channels, h, w], normalised to [−1, 1], to another; it may leave that range."""

Inputs = NDArray[Any]
"""Pixels uint8[b, h, w, channels] of images, or bags float32[b, m, d + 1] as `bags.packed` makes them."""

IN_MEMORY_BYTES = 1 << 30
_PREFETCHED = 2


@dataclass(frozen=True)
class Examples:
    """n labelled images, or slides as bags of features.

    Attributes:
        read: rows int64[b] → what the models see of them.
        label: int64[n].
        slide, patient: str[n].
        allowed: bool[n, classes] which classes are possible by what is known beforehand; None for all.
    """

    read: Callable[[NDArray[np.int64]], Inputs]
    label: NDArray[np.int64]
    slide: NDArray[np.str_]
    patient: NDArray[np.str_]
    allowed: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.label)


def unlabelled(pixels: NDArray[np.uint8]) -> Examples:
    """Images uint8[n, h, w, channels] of which nothing is known, as examples to predict."""
    n = len(pixels)
    unknown = np.full(n, "")
    return Examples(lambda rows: pixels[rows], np.zeros(n, np.int64), unknown, unknown)


def subset(examples: Examples, rows: NDArray[np.int64]) -> Examples:
    """The examples in these rows int64[m], in this order."""
    return Examples(
        lambda chosen: examples.read(rows[chosen]),
        examples.label[rows],
        examples.slide[rows],
        examples.patient[rows],
        None if examples.allowed is None else examples.allowed[rows],
    )


def resized(examples: Examples, size_px: int) -> Examples:
    """The same images at size_px × size_px by area averaging."""

    def read(rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        pixels = examples.read(rows)
        if pixels.shape[1:3] == (size_px, size_px) or not len(rows):
            return pixels
        planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
        smaller = functional.interpolate(planes, size=(size_px, size_px), mode="area")
        return smaller.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()

    return replace(examples, read=read)


def in_memory(examples: Examples, limit_bytes: int = IN_MEMORY_BYTES, chunk: int = 64) -> Examples:
    """The same images held in memory when they fit in `limit_bytes`, else unchanged."""
    if not len(examples):
        return examples
    first = examples.read(np.zeros(1, np.int64))
    if first.nbytes * len(examples) > limit_bytes:
        return examples
    pixels = np.empty((len(examples), *first.shape[1:]), np.uint8)
    for start in range(0, len(examples), chunk):
        rows = np.arange(start, min(start + chunk, len(examples)))
        pixels[rows] = examples.read(rows)
    return replace(examples, read=lambda rows: pixels[rows])


def joined(parts: list[Examples]) -> Examples:
    """Several sets of examples as one, in order; bags are padded to the longest that is read with them."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts)])

    def read(rows: NDArray[np.int64]) -> Inputs:
        owner = np.searchsorted(starts, rows, side="right") - 1
        found = {k: parts[k].read(rows[owner == k] - starts[k]) for k in np.unique(owner)}
        if not found:
            return parts[0].read(rows)
        shape = np.max([some.shape[1:] for some in found.values()], axis=0)
        out = np.zeros((len(rows), *shape), next(iter(found.values())).dtype)
        for k, some in found.items():
            out[owner == k, : some.shape[1]] = some
        return out

    return Examples(
        read,
        np.concatenate([part.label for part in parts]),
        np.concatenate([part.slide for part in parts]),
        np.concatenate([part.patient for part in parts]),
        _all_allowed([part.allowed for part in parts if part.allowed is not None]),
    )


def _all_allowed(parts: list[NDArray[np.bool_]]) -> NDArray[np.bool_] | None:
    """Of stores whose classes agree; where they do not, the preflight says so, and not this."""
    if not parts:
        return None
    n_classes = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, n_classes - part.shape[1]))) for part in parts])


def to_unit(pixels: NDArray[np.uint8]) -> Tensor:
    """uint8[b, h, w, c] → float32[b, c, h, w] in [0, 1]."""
    unit = torch.from_numpy(np.empty(pixels.shape, np.float32))  # numpy asks for huge pages: half the time
    return unit.copy_(torch.from_numpy(np.ascontiguousarray(pixels))).div_(255).permute(0, 3, 1, 2)


def normalised(unit: Tensor) -> Tensor:
    """[0, 1] → [−1, 1] in place, by constants: statistics of the data set would be fitted on other records."""
    return unit.sub_(0.5).div_(0.5)


def tensor_of(inputs: Inputs) -> Tensor:
    """What models take: images float32[b, c, h, w] in [−1, 1], or bags as they are."""
    return normalised(to_unit(inputs)) if inputs.dtype == np.uint8 else torch.from_numpy(inputs)


def epoch_rows(
    n: int, batch_size: int, epochs: int, *, sampler: torch.Generator, poisson: bool
) -> Iterator[NDArray[np.int64]]:
    """Rows of the batches of `epochs` epochs, ceil(n / batch_size) batches each.

    With `poisson` every row enters every batch independently with probability 1 / ceil(n / batch_size), as the
    accountant assumes; otherwise each epoch is one shuffled pass.
    """
    steps = -(-n // batch_size)
    for _ in range(epochs):
        if poisson:
            for _ in range(steps):
                yield poisson_rows(n, 1 / steps, sampler).numpy()
        else:
            order = torch.randperm(n, generator=sampler).numpy()
            yield from np.array_split(order, range(batch_size, n, batch_size))


def batches(
    examples: Examples,
    rows: Iterator[NDArray[np.int64]],
    *,
    augment: Augment | None,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, normalised and augmented, or bags, and labels int64[b]) on `device`; b may be 0."""

    def load() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            images = tensor_of(examples.read(chosen))
            if augment is not None and len(images):
                images = torch.stack([augment(image) for image in images])
            labels = torch.from_numpy(examples.label[chosen])
            if device.type == "cuda":
                images, labels = images.pin_memory(), labels.pin_memory()
            yield images, labels

    loaded = _prefetched(load()) if device.type == "cuda" else load()
    for images, labels in loaded:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def _prefetched(items: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws the items in a thread, a few ahead of the consumer, so that the GPU need not wait for the disk."""
    queue: Queue[tuple[Tensor, Tensor] | BaseException | None] = Queue(_PREFETCHED)
    stopped = Event()

    def produce() -> None:
        try:
            for item in items:
                queue.put(item)
                if stopped.is_set():
                    return
            queue.put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            queue.put(error)

    thread = Thread(target=produce, daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        while thread.is_alive():
            while not queue.empty():
                queue.get_nowait()
            thread.join(0.05)
