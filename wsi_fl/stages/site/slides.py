"""A site's bags of features as a pipeline sees them: patches one by one, slides as bags, patients as mean vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.preflight import Inputs
from wsi_fl.learning.examples import (
    IN_MEMORY_BYTES,
    Examples,
    allowed_classes,
    bag_examples,
    bags_at_once,
    in_memory,
)
from wsi_fl.learning.tasks import Task
from wsi_fl.stages.site.data import Data, Patches, Table, divided, hashed, open_bags, open_store
from wsi_fl.stages.site.targets import answers, classes_of, outputs_of, task_of
from wsi_fl.stores.bags import BagStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import CLASSES, UNLABELLED, Bags, BagTable, Shape, UsageError, Vectors, WsiFlError

_READ = 4096
"""Features read at a time."""


_INSTEAD = {
    "slide": "train.example = 'patch'",
    "patient": "train.example = 'slide' and model.private = model.proxy = 'mean_head', or give a patient one label",
}
"""What to ask of instead."""


class _Bagged(Data):
    """The rows of a bag store, as `train.example` says, and what the site's own table says of them (`[target]`)."""

    store: BagStore

    def __init__(self, study: Study, site: str, pipeline: Pipeline | None = None) -> None:
        super().__init__(study, site, pipeline)
        target, store = self.pipeline.target, self.store
        self.answers = answers(study, study.site(site), target, store.table) if target.asked else None
        self.example = self.pipeline.example

    def _opened(self) -> BagStore:
        return open_bags(self.study, self.site, self.pipeline.train.data)

    @property
    def task(self) -> Task:
        return task_of(self.pipeline.target)

    @property
    def classes(self) -> tuple[str, ...]:
        if self.answers:
            return outputs_of(self.pipeline.target)
        known = self.store.meta.classes
        return classes_of(self.pipeline.subtypes) if self.receives and known == UNLABELLED else known

    @property
    def shape(self) -> Shape:
        return (Bags if self.example == "slide" else Vectors)(self.store.n_features)

    @property
    def without_answer(self) -> str:
        if self.answers is None or not (aside := self.answers.aside):
            return ""
        shown = ", ".join(aside[:3]) + (", …" if len(aside) > 3 else "")
        where = f"site {self.site}: {len(aside)} of {len(self.store)} slides have no answer"
        return f"{where} in {self.answers.source} and are left out: {shown}"

    @cached_property
    def whole(self) -> Table:
        """The columns of all examples, with the splits of the store; a receiver's are all to be predicted."""
        table = self._whole()
        if not self.receives:
            return table
        return replace(table, label=np.zeros_like(table.label), split=np.full(len(table), "test"))

    def _whole(self) -> Table:
        if self.answers is not None:
            return self.answers.table
        if self.example == "patch":
            return self.store.patches
        if self.example == "patient":
            return self._patients()
        if self.store.own_labels and self.store.meta.classes != CLASSES:
            self._require_one(self.store.bag_of_patch, self.store.table.slide, "slide")
        return self.store.table

    @cached_property
    def table(self) -> Any:
        return divided(self.whole, self.pipeline.train, self.site, self.task)

    def _patients(self) -> BagTable:
        """A row per patient, in the order of the store; one with any tumour is a tumour."""
        patches, bags = self.store.patches, self.store.table
        if unnamed := patches.slide[patches.patient == ""][:1].tolist():
            raise UsageError(
                f"{self.store.path}: slide {unnamed[0]} has no patient, and train.example = 'patient' asks for one"
            )
        _, first, of = np.unique(patches.patient, return_index=True, return_inverse=True)
        names = patches.patient[first]
        if self.store.meta.classes != CLASSES:
            self._require_one(of, names, "patient")
        label = np.zeros(len(first), np.int64)
        np.maximum.at(label, of, patches.label)
        kinds = [bags.tumor_type[np.unique(self.store.bag_of_patch[of == k])] for k in range(len(first))]
        kind = [str(some[0]) if len(set(some.tolist())) == 1 else "" for some in kinds]
        table = BagTable(label, np.array(kind, np.str_), names, names, patches.split[first])
        return table.take(np.argsort(first))

    def _require_one(self, of: NDArray[np.int64], names: NDArray[np.str_], what: str) -> None:
        """Refuse slides or patients whose patches have several labels that nothing ranks."""
        if self.receives:
            return
        label = self.store.patches.label
        _, first = np.unique(of, return_index=True)
        if len(strange := np.flatnonzero(label != label[first][of])):
            raise UsageError(
                f"{self.store.path}: the patches of {what} {names[of[strange[0]]]} have different labels; "
                f"set {_INSTEAD[what]}"
            )

    @cached_property
    def _means(self) -> NDArray[np.float32]:
        """float32[n, d], the mean over all features of each patient's slides; of those in `whole`."""
        store, whole = self.store, self.whole
        number = {name: k for k, name in enumerate(whole.patient.tolist())}
        used = range(len(store)) if self.answers is None else np.concatenate(self.answers.bags).tolist()
        sums, n = np.zeros((len(whole), store.n_features)), np.zeros(len(whole))
        for bag in used:
            rows = store.rows_of(bag)
            of = np.array([number[name] for name in store.patches.patient[rows].tolist()])
            np.add.at(n, of, 1)
            features = store.bag(bag).features
            for k in np.unique(of):
                sums[k] += features[of == k].sum(axis=0, dtype=np.float64)
        return (sums / n[:, None]).astype(np.float32)

    def examples(self, split: str) -> Examples:
        rows = np.flatnonzero(self.table.split == split)
        table = self.table.take(rows)
        allowed = None if self.answers else self._allowed(table, rows)
        if self.example == "slide":
            bags = self.answers.bags if self.answers else np.arange(len(self.store))[:, None]
            found = self._bags(table, [bags[row] for row in rows], allowed)
            return replace(found, task=self.task)
        read = self._means.__getitem__ if self.example == "patient" else self.store.read
        found = Examples(
            lambda chosen: read(rows[chosen]),
            table.label,
            table.slide,
            table.patient,
            allowed,
            task=self.task,
        )
        return in_memory(found, chunk=_READ)

    def _allowed(self, table: Table, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """bool[n, classes], what examples may be by their tumour types; WsiFlError for one that is something else."""
        meta, store = self.store.meta, self.store
        if self.example != "slide" and not meta.tumor_types:
            return None
        whose = table.tumor_type if isinstance(table, BagTable) else None
        kinds = store.table.tumor_type[store.bag_of_patch[rows]] if whose is None else whose
        allowed = allowed_classes(kinds, meta.classes, meta.tumor_types)
        strange = ~allowed[np.arange(len(table)), table.label] & (not self.receives)
        for row in np.flatnonzero(strange)[:1]:
            raise WsiFlError(
                f"{store.path}: slide {table.slide[row]} is labelled {meta.classes[table.label[row]]}, which "
                f"{kinds[row]} does not have in [subtypes]; correct one of them and run `wsi-fl mosaic` again"
            )
        return allowed

    def _bags(
        self, table: BagTable, rows: Sequence[NDArray[np.int64]], allowed: NDArray[np.bool_] | None
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
        meta = self.store.meta
        found = Inputs(n_features=self.store.n_features, encoder=meta.encoder)
        if meta.made_by != "features":
            types = {} if self.answers else meta.tumor_types
            found["tumor_types"] = {kind: list(classes) for kind, classes in types.items()}
        return found

    def digest(self) -> str:
        whole, store = self.whole, self.store
        digest = hashed(whole, whole.tumor_type if isinstance(whole, BagTable) else whole.xy_l0)
        if self.answers is not None:
            digest.update(np.concatenate(self.answers.bags).tobytes())
        digest.update(store.meta.encoder.encode())
        for k in range(len(store)):
            bag = store.bag(k)
            digest.update(bag.features.tobytes() + bag.xy_l0.tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        return super().facts() | {**self.inputs(), "recipe": dict(self.store.meta.recipe)}

    def require_current(self) -> None:
        meta, study = self.store.meta, self.study
        if meta.made_by != "features" or not study.store(self.site).exists():
            return
        with open_store(study, self.site) as made:
            cut, table = made.meta, made.table
        columns = ("slide", "xy_l0", "label", "patient", "split")
        if (cut.spec, cut.classes) != (meta.spec, meta.classes) or any(
            not np.array_equal(getattr(table, name), getattr(self.store.patches, name)) for name in columns
        ):
            raise UsageError(
                f"{study.relative(self.store.path)}: features of patches as they were before the site was tiled "
                f"again; run `wsi-fl features --site {self.site}`"
            )


@dataclass(frozen=True)
class ExampleKind:
    """What a pipeline learns from: which store, what a row of it is, and a word for many of them."""

    data: Literal["patches", "features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    word: str

    @property
    def of_images(self) -> bool:
        """Whether models see pixels."""
        return self.data == "patches"

    @property
    def cut_by(self) -> Literal["tile", "mosaic"]:
        """The command, and the section of a pipeline, by which slides become what the store holds."""
        return "mosaic" if self.data == "mosaics" else "tile"

    @property
    def linear(self) -> str | None:
        """The linear head on such examples; None for pixels."""
        return None if self.of_images else "mean_head" if self.example == "slide" else "linear_head"

    def shape(self, n_features: int) -> Shape:
        """Return what models see of examples of so many features."""
        return (Bags if self.example == "slide" else Vectors)(n_features)

    def path(self, study: Study, site: str) -> Path:
        """Return where a site's store is, or would be."""
        return {"patches": study.store, "features": study.features, "mosaics": study.mosaic}[self.data](site)


def kind_of(pipeline: Pipeline) -> ExampleKind:
    """Return what a pipeline learns from; UsageError where there are no such examples."""
    data, example, target = pipeline.train.data, pipeline.example, pipeline.target
    if data == "patches" and example != "patch":
        raise UsageError(
            f"train.example = {example!r} is for features; set train.data = 'features' or 'mosaics'"
        )
    if not target.asked:
        return ExampleKind(data, example, {"patch": "patches"}.get(example, f"{example}s"))
    if example == "patch":
        raise UsageError(
            "[target] asks about slides; set train.data = 'mosaics', or train.example = 'slide' or 'patient'"
        )
    if example == "patient" and target.of != "patient":
        raise UsageError(
            "[target] asks about slides, and train.example = 'patient'; set target.per = 'patient'"
        )
    return ExampleKind(data, example, f"{target.of}s")


def open_data(study: Study, site: str, pipeline: Pipeline) -> Data:
    """Open the store that a pipeline trains on; says which command makes a missing one."""
    return (Patches if kind_of(pipeline).of_images else _Bagged)(study, site, pipeline)
