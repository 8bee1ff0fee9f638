"""Slides as bags of features: a site's store of mosaics or imported features, and what its own table says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.preflight import Inputs
from wsi_fl.learning.bags import allowed_classes, bag_examples, bags_at_once
from wsi_fl.learning.examples import IN_MEMORY_BYTES, Examples
from wsi_fl.learning.tasks import Task
from wsi_fl.stages.site.data import Data, hashed, open_mosaic
from wsi_fl.stages.site.parts import divided
from wsi_fl.stages.site.targets import answers, outputs_of, task_of
from wsi_fl.stores.features import FeatureStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import Bags, BagTable, WsiFlError


class Mosaics(Data):
    """Slides as bags of features."""

    word = "slides"
    cut_by = "mosaic"
    store: FeatureStore

    def _opened(self) -> FeatureStore:
        return open_mosaic(self.study, self.site)

    @property
    def shape(self) -> Bags:
        return Bags(self.store.n_features)

    @staticmethod
    def path(study: Study, site: str) -> Path:
        return study.mosaic(site)

    def examples(self, split: str) -> Examples:
        store = self.store
        rows = np.flatnonzero(self.table.split == split)
        table, meta = self.table.take(rows), store.meta
        allowed = allowed_classes(table.tumor_type, meta.classes, meta.tumor_types)
        for row in np.flatnonzero(~allowed[np.arange(len(table)), table.label])[:1]:
            label, kind = meta.classes[table.label[row]], table.tumor_type[row]
            raise WsiFlError(
                f"{store.path}: slide {table.slide[row]} is labelled {label}, which {kind} does not have in "
                "[subtypes]; correct one of them and run `wsi-fl mosaic` again"
            )
        return self._bags(table, rows[:, None], allowed)

    def _bags(
        self,
        table: BagTable,
        rows: Sequence[NDArray[np.int64]] | NDArray[np.int64],
        allowed: NDArray[np.bool_] | None,
    ) -> Examples:
        """Examples of a table, each of one or more slides of the store, by position."""
        store = self.store

        def read(k: int) -> NDArray[np.float32]:
            parts = [store.bag(int(row)).features for row in rows[k]]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        sizes = np.array([store.sizes[some].sum() for some in rows], np.int64)
        return bag_examples(
            read,
            table,
            allowed,
            n_features=store.n_features,
            in_memory=int(sizes.sum()) * store.n_features * np.float32().nbytes <= IN_MEMORY_BYTES,
            at_once=bags_at_once(int(sizes.max(initial=1)), store.n_features),
        )

    def inputs(self) -> Inputs:
        meta, n = self.store.meta, self.store.n_features
        types = {kind: list(classes) for kind, classes in meta.tumor_types.items()}
        return {"n_features": n, "encoder": meta.encoder, "tumor_types": types}

    def digest(self) -> str:
        digest = self._labelled()
        for k in range(len(self.store)):
            bag = self.store.bag(k)
            digest.update(bag.features.tobytes() + bag.xy_l0.tobytes())
        return digest.hexdigest()

    def _labelled(self) -> hashlib._Hash:
        return hashed(self.store.table, self.store.table.tumor_type)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {**self.inputs(), "recipe": dict(self.store.meta.recipe)}


class Asked(Mosaics):
    """Slides or patients as bags of features, with what the site's own table says of them (`[target]`)."""

    def __init__(self, study: Study, site: str, pipeline: Pipeline | None = None) -> None:
        super().__init__(study, site, pipeline)
        self.target = self.pipeline.target
        self._task = task_of(self.target)
        self.answers = answers(study, study.site(site), self.target, self.store.table)

    @property
    def task(self) -> Task:
        return self._task

    @property
    def classes(self) -> tuple[str, ...]:
        return outputs_of(self.target)

    @cached_property
    def table(self) -> Any:
        return divided(self.answers.table, self.pipeline.train, self.site, self.task)

    @property
    def without_answer(self) -> str:
        aside = self.answers.aside
        shown = ", ".join(aside[:3]) + (", …" if len(aside) > 3 else "")
        where = f"site {self.site}: {len(aside)} of {len(self.store)} slides have no answer"
        return f"{where} in {self.answers.source} and are left out: {shown}" if aside else ""

    def examples(self, split: str) -> Examples:
        rows = np.flatnonzero(self.table.split == split)
        found = self._bags(self.table.take(rows), [self.answers.bags[row] for row in rows], None)
        return replace(found, task=self.task)

    def inputs(self) -> Inputs:
        return super().inputs() | {"tumor_types": {}}

    def _labelled(self) -> hashlib._Hash:
        return hashed(self.answers.table, np.concatenate(self.answers.bags))
