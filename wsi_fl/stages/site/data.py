"""What a site's store holds for a run; patches as pixels."""

from __future__ import annotations

import glob
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.preflight import Inputs
from wsi_fl.learning.examples import IN_MEMORY_BYTES, Examples, in_memory, resized
from wsi_fl.learning.tasks import CLASSES, Task, strata
from wsi_fl.learning.validation import folds_of
from wsi_fl.runs.site import PIXELS
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.patches import PatchStore, SlideSource, SlideUnreadable
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, Train
from wsi_fl.system.machine import n_cores
from wsi_fl.types import BagTable, GridSpec, Images, PatchTable, Shape, UsageError, WsiFlError

_OPEN_SLIDES = 16
_MOST_THREADS = 8


class _SlidePixels:
    """A site's slides, as `PatchStore` reads from them; a few stay open."""

    def __init__(self, study: Study, site: str) -> None:
        self._study, self._site = study, site
        self._open: OrderedDict[str, Slide] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MOST_THREADS, n_cores()))

    def __call__(self, source: SlideSource, xy_l0: NDArray[np.int64], spec: GridSpec) -> NDArray[np.uint8]:
        """The patches uint8[b, size_px, size_px, 3] at these corners; SlideUnreadable where they cannot be read."""
        out = np.empty((len(xy_l0), spec.size_px, spec.size_px, 3), np.uint8)
        with self._lock:
            try:
                slide = self._slide(source)

                def read(row: int) -> None:
                    x, y = (int(v) for v in xy_l0[row])
                    slide.read((x, y), spec.size_px, spec.mpp, out[row], overlapping=False)

                for _ in self._threads.map(read, range(len(xy_l0))):
                    pass
            except SlideUnreadable:
                raise
            except WsiFlError as error:
                raise SlideUnreadable(str(error)) from None
        return out

    def _slide(self, source: SlideSource) -> Slide:
        if source.slide not in self._open:
            path, reader = self._find(source), cast(Reader, source.reader)
            check_opens_safely(path, source.mpp_override, reader)
            slide = Slide(path, source.mpp_override, reader)
            if slide.quickhash != source.quickhash:
                slide.close()
                raise SlideUnreadable(
                    f"{slide.path}: not the slide that was tiled; run `wsi-fl tile --site {self._site}` again"
                )
            if len(self._open) >= _OPEN_SLIDES:
                self._open.popitem(last=False)[1].close()
            self._open[source.slide] = slide
        self._open.move_to_end(source.slide)
        return self._open[source.slide]

    def _find(self, source: SlideSource) -> Path:
        """Where the slide was when it was tiled, else where the site file says slides are now."""
        path = self._study.root / source.path
        if path.exists():
            return path
        site = self._study.site(self._site)
        patterns = [site.slides] if isinstance(site.slides, str) else site.slides or []
        for pattern in patterns:
            where = str(Study(Path(glob.escape(str(self._study.root)))).resolve(pattern))
            for found in glob.iglob(where, recursive=True):  # noqa: PTH207 patterns may be absolute
                if Path(found).name == path.name:
                    return Path(found)
        raise SlideUnreadable(
            f"{path}: the slide is gone, and slides in sites/{self._site}.toml matches no {path.name}"
        )


_Store = PatchStore | BagStore
Table = PatchTable | BagTable
_Opened = TypeVar("_Opened", PatchStore, BagStore)
_AnyTable = TypeVar("_AnyTable", bound=PatchTable | BagTable)


class Data:
    """A site's store, open, as the models of a pipeline see it; a context manager.

    Attributes:
        study, site, store: where it is, whose, and the open file.
        receives: whether the site lends no labels: all of them are 0 here, whatever the store says.
    """

    store: _Store

    def __init__(self, study: Study, site: str, pipeline: Pipeline | None = None) -> None:
        """Open the site's store for a pipeline; None takes everything as stored."""
        self.study, self.site, self.pipeline = study, site, pipeline or Pipeline()
        self.receives = study.site(site).receives
        self.store = self._opened()

    def _opened(self) -> Any:
        raise NotImplementedError

    @property
    def task(self) -> Task:
        """What is asked of an example."""
        return CLASSES

    @property
    def classes(self) -> tuple[str, ...]:
        """What each output of a model is called; the classes, where classes are asked."""
        return self.store.meta.classes

    @cached_property
    def table(self) -> Any:
        """The columns of all examples, with the truth as label and the splits that the run uses."""
        return divided(self.store.table, self.pipeline.train, self.site)

    @property
    def without_answer(self) -> str:
        """What to say of slides that are left out since nothing is known of what is asked; empty for none."""
        return ""

    @property
    def shape(self) -> Shape:
        """What models see of an example."""
        raise NotImplementedError

    def examples(self, split: str) -> Examples:
        """Return the examples of one split as the models see them, in memory where they fit."""
        raise NotImplementedError

    def inputs(self) -> Inputs:
        """Return what other sites must know of what the models see, for the preflight."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return what a run must know of the store once the store is gone."""
        return {"classes": list(self.classes), "spec": asdict(self.store.meta.spec)}

    def digest(self) -> str:
        """Return the SHA-256 over what a run uses: examples, labels and splits. It stays with the site."""
        raise NotImplementedError

    def is_synthetic(self) -> bool:
        """Return whether the examples were drawn by a generator, or computed from patches that were."""
        return self.store.meta.generator is not None

    def require_current(self) -> None:
        """Refuse features of other patches than the site's patch store holds, where that is still there."""

    @cached_property
    def held_out(self) -> Examples:
        """The test examples, read once."""
        return self.examples("test")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


class Patches(Data):
    """Patches as pixels."""

    store: PatchStore

    def _opened(self) -> PatchStore:
        return open_store(self.study, self.site)

    @property
    def shape(self) -> Images:
        return Images(self.store.channels, self.pipeline.train.input_px or self.store.meta.spec.size_px)

    def examples(self, split: str) -> Examples:
        found = _pictures(_rows_of(self.store, self.table, split), self.shape.size_px)
        self.store.rest()  # a process may hold the stores of hundreds of sites
        return found

    def inputs(self) -> Inputs:
        return {"channels": self.shape.channels, "input_px": self.shape.size_px}

    def digest(self) -> str:
        return store_digest(self.store)

    def facts(self) -> dict[str, Any]:
        facts = {"min_tissue": self.store.meta.min_tissue, "channels": self.store.channels}
        return super().facts() | facts | pixels_digest(self.store)


def open_store(study: Study, site: str) -> PatchStore:
    """Open the patch store of a site; WsiFlError when there is none, or it is another site's; so does `open_bags`."""
    return _own(
        study, site, study.store(site), "tile", lambda path: PatchStore(path, _SlidePixels(study, site))
    )


def open_bags(study: Study, site: str, data: str) -> BagStore:
    """Open the bag store of a site's patches (`data` = "features") or mosaics ("mosaics")."""
    path, command = (study.features, "features") if data == "features" else (study.mosaic, "mosaic")
    return _own(study, site, path(site), command, BagStore)


def _own(study: Study, site: str, path: Path, command: str, opened: Callable[[Path], _Opened]) -> _Opened:
    """The store, if it is the site's: nobody learns from another's rows under this site's name and ledger."""
    if not path.exists():
        raise WsiFlError(
            f"{study.relative(path)}: no store of site {site} yet; run `wsi-fl {command} --site {site}`"
        )
    store = opened(path)
    if (theirs := store.meta.site) != study.owner(site):
        store.close()
        raise WsiFlError(
            f"{study.relative(path)} is the store of site {theirs}; put that back under its name, and run "
            f"`wsi-fl {store.command} --site {site}`"
        )
    return store


def store_digest(store: PatchStore) -> str:
    """Return the SHA-256 over the patches of a store, their labels and splits."""
    return hashed(store.table, store.table.xy_l0).hexdigest()


def pixels_digest(store: PatchStore) -> dict[str, str]:
    """Return {"pixels_sha256": of what a store knows of its shards}."""
    return {PIXELS: hashlib.sha256(json.dumps(list(store.shard_sums.values())).encode()).hexdigest()}


def learned_from(store: PatchStore, known: Mapping[str, Any]) -> bool:
    """Return whether a store is the one that a generator's document knows."""
    said = {"sha256": store_digest(store)} | pixels_digest(store)
    return all(known[key] == value for key, value in said.items())


def hashed(table: Table, known: NDArray[Any]) -> hashlib._Hash:
    """Return the SHA-256 so far over what is known of the examples, their labels, slides, patients and splits."""
    digest = hashlib.sha256()
    for column in (known, table.label, table.slide, table.patient, table.split):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest


def divided(table: _AnyTable, train: Train, site: str, task: Task = CLASSES) -> _AnyTable:
    """Return a store's table, with the splits of the run's fold in place of its own where the run is one of folds."""
    if train.folds is None or train.fold is None:
        return table
    try:
        kind = strata(table.label, task)
        fold = folds_of(table.patient, kind, n_folds=train.folds, seed=train.seed, stratified=train.stratify)
    except UsageError as error:
        raise UsageError(f"site {site}: {error}") from None
    return replace(table, split=np.where(fold == train.fold - 1, "test", "train"))


def examples_of(
    store: PatchStore, split: str, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES
) -> Examples:
    """Return the patches of one split of the store, reduced to input_px, in memory where they fit."""
    return _pictures(_rows_of(store, store.table, split), input_px, in_memory_bytes)


def _pictures(found: Examples, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES) -> Examples:
    """Return the same patches, reduced to input_px, in memory where they fit."""
    return in_memory(resized(found, input_px) if input_px else found, in_memory_bytes)


def _rows_of(store: PatchStore, table: PatchTable, split: str) -> Examples:
    """Return the rows of one split of the table, which is the store's or that of a fold."""
    rows = np.flatnonzero(table.split == split)
    some = table.take(rows)
    return Examples(lambda chosen: store.read(rows[chosen]), some.label, some.slide, some.patient)
