"""The part of `tile` that decides: a plan per slide, kept on disk so that a site needs no more memory than a slide."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.choosing.patches import SlidePlan
from wsi_fl.slides.choosing.splits import sample_rows
from wsi_fl.stages.work.aside import reason_of
from wsi_fl.system.ordered import in_order
from wsi_fl.types import GridSpec, SlideRecord

_PLANNERS = 4
"""Slides planned at once: each needs some hundred megabytes for its tissue mask."""


class Plans:
    """The plans of a site's slides in a folder that lives as long as the job; every rank reads all of them."""

    def __init__(self, folder: Path, records: Sequence[SlideRecord], spec: GridSpec) -> None:
        self.folder, self._records, self._spec = folder, records, spec

    def clear(self) -> None:
        """Forgets all plans, those of a killed job too."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, number: int, plan: SlidePlan) -> None:
        """Keeps the plan of the slide with this number."""
        arrays: dict[str, NDArray[Any]] = {}
        plain: dict[str, Any] = {}
        for field in fields(SlidePlan):
            value = getattr(plan, field.name)
            if field.name in {"record", "spec"}:
                continue
            if isinstance(value, np.ndarray):
                arrays[field.name] = value
            elif isinstance(value, bytes):
                arrays[f"bytes {field.name}"] = np.frombuffer(value, np.uint8)
            elif isinstance(value, list):
                arrays[f"cuts {field.name}"] = np.cumsum([len(part) for part in value], dtype=np.int64)
                arrays[f"list {field.name}"] = np.concatenate(value) if value else np.empty((0, 2))
            else:
                plain[field.name] = list(value) if isinstance(value, tuple) else value
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays["plain"] = np.array(json.dumps(plain))
        with self._path(number).open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle

    def load(self, number: int) -> SlidePlan:
        """A plan as it was saved."""
        values: dict[str, Any] = {}
        with np.load(self._path(number)) as file:
            for key in file.files:
                kind, _, name = key.rpartition(" ")
                if kind == "bytes":
                    values[name] = file[key].tobytes()
                elif kind == "list":
                    values[name] = np.split(file[key], file[f"cuts {name}"])[:-1]
                elif not kind and key != "plain":
                    values[name] = file[key]
            for name, value in json.loads(str(file["plain"])).items():
                values[name] = tuple(value) if isinstance(value, list) else value
        return SlidePlan(record=self._records[number], spec=self._spec, **values)

    def slide(self, number: int) -> str:
        return self._records[number].slide

    def labels(self, number: int) -> NDArray[np.int8]:
        """The labels of a slide's patches alone."""
        with np.load(self._path(number)) as file:
            return np.asarray(file["label"], np.int8)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.npz"


def plan_each(
    numbers: Sequence[int],
    records: Sequence[SlideRecord],
    plan: Callable[[SlideRecord], SlidePlan],
    plans: Plans,
    threads: int,
) -> Iterator[str | None]:
    """Plan and save the slides with these numbers, a few at a time; yield in order why one cannot be used, or None."""

    def one(number: int) -> str | None:
        try:
            found = plan(records[number])
        except Exception as error:  # one slide that a library chokes on must not end the others
            return reason_of(error)
        plans.save(number, found)
        return None

    n_threads = min(threads, _PLANNERS)
    yield from in_order(one, numbers, threads=n_threads, ahead=2 * n_threads)


def choose(
    plans: Plans,
    numbers: Sequence[int],
    *,
    balance: bool,
    max_per_slide: int | None,
    seed: int,
) -> list[NDArray[np.bool_]]:
    """Which patches of each of these slides are kept, balanced over the site if asked; the same in every rank.

    Without `balance` no slide's patches depend on which other slides there are (`sample_rows`).
    """
    if not numbers:
        return []
    labels = [plans.labels(number) for number in numbers]
    sizes = [len(label) for label in labels]
    keep = sample_rows(
        np.concatenate(labels).astype(np.int64),
        np.repeat(np.arange(len(sizes)), sizes),
        [plans.slide(number) for number in numbers],
        balance=balance,
        max_per_slide=max_per_slide,
        seed=seed,
    )
    return np.split(keep, np.cumsum(sizes)[:-1])
