"""Data of a site: patches as pixels, or features of patches, of slides as bags, of patients as means."""

from __future__ import annotations

import glob
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from wsi_fl import types
from wsi_fl.data.cohort import (
    IN_MEMORY_BYTES,
    Cohort,
    bag_batch_size,
    build_bag_examples,
    cache_examples,
    find_allowed_classes,
    resize_images,
)
from wsi_fl.data.tasks import Task, fold_strata
from wsi_fl.data.validation import HoldoutDraw, assign_folds
from wsi_fl.federation.preflight import ModelInputs
from wsi_fl.runs.site_folder import PIXELS_KEY
from wsi_fl.slides.patching.scan_copies import Scan
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stages.site.holdout_secret import load_holdout_draw
from wsi_fl.stages.site.target_labels import build_task, list_classes, look_up_labels, name_outputs
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.patch_store import PatchStore, SlideSource, SlideUnreadable
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import compose_text, glob_paths
from wsi_fl.system.machine import n_cores
from wsi_fl.types import BagTable, GridSpec, PatchTable, Shape, UsageError, WsiFlError

_MAX_OPEN_SLIDES = 16
_MAX_THREADS = 8
_READ_ROWS = 4096
"""Rows of features read at a time."""
_ALTERNATIVES = {
    "slide": "train.example = 'patch'",
    "patient": "train.example = 'slide' and model.private = model.proxy = 'mean_head', or give a patient one label",
}
"""Settings to use instead."""


class _SlidePixels:
    """Reader of a site's slides for `PatchStore`; a few stay open."""

    def __init__(self, study: Study, site: str) -> None:
        self._study, self._site = study, site
        self._open: OrderedDict[str, Slide] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _thread_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MAX_THREADS, n_cores()))

    def __call__(self, source: SlideSource, xy_l0: NDArray[np.int64], spec: GridSpec) -> NDArray[np.uint8]:
        """Return the patches uint8[b, size_px, size_px, 3] at corners; SlideUnreadable where they cannot be read."""
        out = np.empty((len(xy_l0), spec.size_px, spec.size_px, 3), np.uint8)
        with self._lock:
            try:
                slide = self._open_slide(source)

                def read_patch(row: int) -> None:
                    x, y = (int(v) for v in xy_l0[row])
                    slide.read((x, y), spec.size_px, spec.mpp, out[row], overlapping=False)

                for _ in self._thread_pool.map(read_patch, range(len(xy_l0))):
                    pass
            except SlideUnreadable:
                raise
            except WsiFlError as error:
                raise SlideUnreadable(str(error)) from None
        return out

    def _open_slide(self, source: SlideSource) -> Slide:
        if source.slide not in self._open:
            path, reader = self._find_slide(source), cast(Reader, source.reader)
            check_opens_safely(path, source.mpp_override, reader)
            slide = Slide(path, source.mpp_override, reader)
            if slide.quickhash != source.quickhash:
                slide.close()
                raise SlideUnreadable(
                    f"{slide.path}: not the slide that was tiled; run `wsi-fl tile --site {self._site}` again"
                )
            if len(self._open) >= _MAX_OPEN_SLIDES:
                self._open.popitem(last=False)[1].close()
            self._open[source.slide] = slide
        self._open.move_to_end(source.slide)
        return self._open[source.slide]

    def _find_slide(self, source: SlideSource) -> Path:
        """Return the slide's path at tiling, or its match among the slides of the site file."""
        path = self._study.root / source.path
        if path.exists():
            return path
        site = self._study.load_site(self._site)
        name = compose_text(path.name)
        candidates = (file for file in list_slides(self._study, site) if compose_text(file.name) == name)
        if (moved_path := next(candidates, None)) is None:
            raise SlideUnreadable(
                f"{path}: the slide is gone, and slides in sites/{self._site}.toml matches no {path.name}"
            )
        return moved_path


def resolve_patterns(study: Study, patterns: str | list[str] | None) -> tuple[str, ...]:
    """Return the glob patterns of a site file's key, resolved; a [ or * in the study's path is escaped."""
    escaped = Study(Path(glob.escape(str(study.root))))
    return tuple(
        str(escaped.resolve(pattern)) for pattern in ([patterns] if isinstance(patterns, str) else patterns or [])
    )


def list_slides(study: Study, site: SiteFile) -> Iterator[Path]:
    """Yield the current matches of the patterns in `slides` of a site file."""
    for pattern in resolve_patterns(study, site.slides):
        yield from glob_paths(pattern)


class EligibleRows(NamedTuple):
    """Rows that a site may train on. Others see their number, so it is independent of settings that others could choose
    for the sake of a patient.

    Attributes:
        patient: str[m], of each row.
        training: int64[n], positions of the training rows, in the order of the training examples.
    """

    patient: NDArray[np.str_]
    training: NDArray[np.int64]


Table = PatchTable | BagTable
_Opened = TypeVar("_Opened", PatchStore, BagStore)


class SiteData:
    """A site's open store as input of a pipeline's models; a context manager.

    Attributes:
        study, site, store: its study and site, and the open file.
        receives: whether the site has no labels: all are 0 here.
    """

    store: PatchStore | BagStore

    def __init__(self, study: Study, site: str, pipeline: Pipeline, store: Any) -> None:
        self.study, self.site, self.pipeline, self.store = study, site, pipeline, store
        self.receives = study.load_site(site).is_receiver

    @property
    def task(self) -> Task:
        """The prediction task."""
        return build_task(self.pipeline.target)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of a model's outputs, such as the classes."""
        return self.store.meta.classes

    @cached_property
    def full_table(self) -> Any:
        """The table of all examples, with the true labels and the splits of the store."""
        return self.store.table

    @cached_property
    def holdout_draw(self) -> HoldoutDraw:
        """The held-out draw of the site."""
        return load_holdout_draw(self.study, self.site)

    @property
    def is_fold(self) -> bool:
        """Whether a cross-validation fold replaces the store's test set."""
        train = self.pipeline.train
        return train.folds is not None and train.fold is not None and not self.receives

    @cached_property
    def table(self) -> Any:
        """The table of all examples with the splits of the run, such as its fold."""
        table, train = self.full_table, self.pipeline.train
        if not self.is_fold:
            return table
        assert train.folds is not None and train.fold is not None
        try:
            fold = assign_folds(
                table.patient,
                fold_strata(table.label, self.task),
                n_folds=train.folds,
                seed=train.seed,
                stratified=train.stratify,
                holdout=self.holdout_draw,
            )
        except UsageError as error:
            raise UsageError(f"site {self.site}: {error}") from None
        return replace(table, split=np.where(fold == train.fold - 1, "test", "train"))

    def list_eligible(self) -> EligibleRows:
        """Return the rows that may be trained on, before a fold or validation patients are held out."""
        split = np.full(len(self.table), "train") if self.is_fold else self.table.split
        rows = np.flatnonzero(split == "train")
        return EligibleRows(self.table.patient[rows], np.flatnonzero(self.table.split[rows] == "train"))

    @property
    def remark(self) -> str:
        """A remark on examples that are excluded, or all alike; empty for none."""
        return ""

    @property
    def shape(self) -> Shape:
        """The shape of a model's input."""
        raise NotImplementedError

    def load_examples(self, split: str) -> Cohort:
        """Return the examples of a split, in memory where they fit."""
        raise NotImplementedError

    def describe_inputs(self) -> ModelInputs:
        """Return the inputs of models for the preflight."""
        raise NotImplementedError

    def describe_store(self) -> dict[str, Any]:
        """Return the facts that a run keeps of the store."""
        return {"classes": list(self.classes), "spec": asdict(self.store.meta.spec)}

    def digest(self) -> str:
        """Return the SHA-256 over examples, labels, splits and the held-out secret where used; it stays at the site."""
        draws = self.is_fold or self.pipeline.train.val_fraction > 0
        if not draws or not (mark := self.holdout_draw.secret_digest):
            return self._store_digest()
        return hashlib.sha256(f"{self._store_digest()} {mark}".encode()).hexdigest()

    def _store_digest(self) -> str:
        """Return the SHA-256 over the store's examples, labels and splits."""
        raise NotImplementedError

    def is_synthetic(self) -> bool:
        """Return whether the examples are from a generator, or computed from its patches."""
        return self.store.meta.generator is not None

    def require_current(self) -> None:
        """Refuse features of other patches than those of the site's patch store, where that exists."""

    @cached_property
    def test_examples(self) -> Cohort:
        """The test examples, read once."""
        return self.load_examples("test")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


class PatchData(SiteData):
    """Patches as pixels."""

    store: PatchStore

    @property
    def shape(self) -> types.Images:
        return types.Images(self.store.n_channels, self.pipeline.train.input_px or self.store.meta.spec.size_px)

    def load_examples(self, split: str) -> Cohort:
        examples = load_patches(self.store, split, self.shape.size_px, table=self.table)
        self.store.close_shards()  # a process may hold the stores of hundreds of sites
        return examples

    def describe_inputs(self) -> ModelInputs:
        return {"channels": self.shape.channels, "input_px": self.shape.size_px}

    def _store_digest(self) -> str:
        return store_digest(self.store)

    def describe_store(self) -> dict[str, Any]:
        facts = {"min_tissue": self.store.meta.min_tissue, "channels": self.store.n_channels}
        return super().describe_store() | facts | pixels_digest(self.store)


def open_store(study: Study, site: str) -> PatchStore:
    """Open the patch store of a site; WsiFlError for none, or another site's."""
    return _open_local(
        study, site, study.store_path(site), "tile", lambda path: PatchStore(path, _SlidePixels(study, site))
    )


def open_bags(study: Study, site: str, data: str) -> BagStore:
    """Open the bag store of a site's patches ("features") or mosaics ("mosaics"); WsiFlError as for `open_store`."""
    path, command = (study.features_path, "features") if data == "features" else (study.mosaic_path, "mosaic")
    return _open_local(study, site, path(site), command, BagStore)


def maker_command(study: Study, site: str, command: str) -> str:
    """Return the command that makes a site's store: without slides, `import` of features, `partition` of images."""
    named = study.site_path(site).is_file()
    if not named or study.load_site(site).slides is not None or (study.mosaic_path(site).parent / "mosaics").is_dir():
        return f"{command} --site {site}"
    others = {"mosaic": f"import --site {site} …", "tile": "partition DATA …"}
    return others.get(command, f"{command} --site {site}")


def _open_local(study: Study, site: str, path: Path, command: str, open_file: Callable[[Path], _Opened]) -> _Opened:
    """Open a store of the site itself: no other site's rows are used under its name and ledger."""
    if not path.exists():
        maker = maker_command(study, site, command)
        raise WsiFlError(f"{study.relative_path(path)}: no store of site {site} yet; run `wsi-fl {maker}`")
    store = open_file(path)
    if (store_site := store.meta.site) != study.store_owner(site):
        store.close()
        raise WsiFlError(
            f"{study.relative_path(path)} is the store of site {store_site}; put that back under its name, and run "
            f"`wsi-fl {store.command} --site {site}`"
        )
    return store


def list_scans(store: PatchStore | BagStore) -> list[Scan]:
    """Return the slides of a store with content marks; none of synthetic images."""
    if store.meta.generator is not None:
        return []
    slides, (_, first) = store.table.slide, np.unique(store.table.slide, return_index=True)
    marks, rows = store.compute_marks(), np.sort(first)
    return [
        Scan(store.meta.site, str(slides[k]), str(store.table.patient[k]), str(store.table.split[k]), marks[name])
        for k in rows.tolist()
        if (name := str(slides[k])) in marks
    ]


def store_digest(store: PatchStore) -> str:
    """Return the SHA-256 over the patches of a store, their labels and splits."""
    return _hash_examples(store.table, store.table.xy_l0).hexdigest()


def pixels_digest(store: PatchStore) -> dict[str, str]:
    """Return {"pixels_sha256": SHA-256 over the checksums of a store's shards}."""
    return {PIXELS_KEY: hashlib.sha256(json.dumps(list(store.shard_sums.values())).encode()).hexdigest()}


def is_source_store(store: PatchStore, document: Mapping[str, Any]) -> bool:
    """Return whether a store is the source in a generator's document."""
    digests = {"sha256": store_digest(store)} | pixels_digest(store)
    return all(document[key] == value for key, value in digests.items())


def _hash_examples(table: Table, content: NDArray[Any]) -> hashlib._Hash:
    """Return the SHA-256 over a column of examples, labels, slides, patients and splits; still open for updates."""
    digest = hashlib.sha256()
    label, remainder = table.label, None
    if label.dtype == np.float64:
        # float32 part first, so that digests equal those of float32 labels
        label = label.astype(np.float32)
        remainder = table.label - label
    for column in (content, label, table.slide, table.patient, table.split):
        digest.update(np.ascontiguousarray(column).tobytes())
    if remainder is not None and remainder.any():
        digest.update(remainder.tobytes())
    return digest


def load_patches(
    store: PatchStore,
    split: str,
    input_px: int | None,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    table: PatchTable | None = None,
) -> Cohort:
    """Return the patches of a split of the store, reduced to input_px, in memory where they fit.

    Args:
        table: of a fold, in place of the store's table.
    """
    table = store.table if table is None else table
    rows = np.flatnonzero(table.split == split)
    split_table = table.take(rows)
    examples = Cohort(
        lambda chosen: store.read(rows[chosen]), split_table.label, split_table.slide, split_table.patient
    )
    return cache_examples(resize_images(examples, input_px) if input_px else examples, in_memory_bytes)


class _BagData(SiteData):
    """Examples of a bag store (`train.example`), with labels of the store or of the site's table (`[target]`)."""

    store: BagStore

    def __init__(self, study: Study, site: str, pipeline: Pipeline, store: BagStore) -> None:
        super().__init__(study, site, pipeline, store)
        target = pipeline.target
        self.target_labels = (
            look_up_labels(study, study.load_site(site), target, store.table) if target.is_set else None
        )
        self.example = pipeline.example_level

    @property
    def classes(self) -> tuple[str, ...]:
        if self.target_labels:
            return name_outputs(self.pipeline.target)
        store_classes = self.store.meta.classes
        return (
            list_classes(self.pipeline.subtypes)
            if self.receives and store_classes == types.UNLABELLED
            else store_classes
        )

    @property
    def shape(self) -> Shape:
        return (types.Bags if self.example == "slide" else types.Vectors)(self.store.n_features)

    @property
    def remark(self) -> str:
        if self.target_labels is None:
            label, patches = self.full_table.label, self.store.patch_table.label
            if self.receives or len(set(label.tolist())) != 1 or len(set(patches.tolist())) == 1:
                return ""
            class_name = self.classes[label[0]]
            examples = f"site {self.site}: each of {len(label)} {self.example}s"
            return f"{examples} has some {class_name}, so all are labelled {class_name}"
        if not (excluded := self.target_labels.excluded):
            return ""
        listed = ", ".join(excluded[:3]) + (", …" if len(excluded) > 3 else "")
        where = f"site {self.site}: {len(excluded)} of {len(self.store)} slides have no label"
        strange = self.target_labels.problems
        values_note = f"; {len(strange)} values were not agreed on, such as {strange[0]}" if strange else ""
        return f"{where} in {self.target_labels.source} and are left out: {listed}{values_note}"

    @cached_property
    def full_table(self) -> Table:
        """The table of all examples; at a site without labels all are test examples."""
        table = self._build_table()
        if not self.receives:
            return table
        return replace(table, label=np.zeros_like(table.label), split=np.full(len(table), "test"))

    def list_eligible(self) -> EligibleRows:
        """Return the rows that may be trained on; of a real site also those without a label: n discloses none.

        Where the unit is the patient, a slide without a patient and a label is left out.
        """
        if self.target_labels is None or self.receives or not self.study.load_site(self.site).real:
            return super().list_eligible()
        slides, table = self.store.table, self.table
        rows = np.flatnonzero(table.split == "train")
        may_train = self.is_fold | (slides.split == "train")
        if counts_patients(self.pipeline):
            has_label = np.zeros(len(slides), bool)
            has_label[np.concatenate(self.target_labels.bags)] = True
            may_train &= has_label | (slides.patient != "")
        if self.pipeline.target.example_level == "patient":
            names = np.unique(slides.patient[may_train])
            return EligibleRows(names, np.searchsorted(names, table.patient[rows]))
        positions = np.cumsum(may_train) - 1
        return EligibleRows(slides.patient[may_train], positions[[self.target_labels.bags[row][0] for row in rows]])

    def _build_table(self) -> Table:
        if self.target_labels is not None:
            return self.target_labels.table
        if self.example == "patch":
            return self.store.patch_table
        if self.example == "patient":
            return self._patient_table()
        if self.store.has_patch_labels and self.store.meta.classes != types.CLASSES:
            self._require_one_label(self.store.bag_of_patch, self.store.table.slide, "slide")
        return self.store.table

    def _patient_table(self) -> BagTable:
        """Return a row per patient, in the order of the store; a patient with any tumour is labelled tumour."""
        patches, bags = self.store.patch_table, self.store.table
        if unnamed := patches.slide[patches.patient == ""][:1].tolist():
            raise UsageError(
                f"{self.store.path}: slide {unnamed[0]} has no patient, and train.example = 'patient' needs one"
            )
        _, first, patient_index = np.unique(patches.patient, return_index=True, return_inverse=True)
        names = patches.patient[first]
        if self.store.meta.classes != types.CLASSES:
            self._require_one_label(patient_index, names, "patient")
        label = np.zeros(len(first), np.int64)
        np.maximum.at(label, patient_index, patches.label)
        kinds = [bags.tumor_type[np.unique(self.store.bag_of_patch[patient_index == k])] for k in range(len(first))]
        kind = [str(bag_types[0]) if len(set(bag_types.tolist())) == 1 else "" for bag_types in kinds]
        table = BagTable(label, np.array(kind, np.str_), names, names, patches.split[first])
        return table.take(np.argsort(first))

    def _require_one_label(self, group_index: NDArray[np.int64], names: NDArray[np.str_], group_kind: str) -> None:
        """Refuse slides or patients whose patches have several labels without an order."""
        if self.receives:
            return
        label = self.store.patch_table.label
        _, first = np.unique(group_index, return_index=True)
        if len(strange := np.flatnonzero(label != label[first][group_index])):
            raise UsageError(
                f"{self.store.path}: the patches of {group_kind} {names[group_index[strange[0]]]} have different "
                f"labels; set {_ALTERNATIVES[group_kind]}"
            )

    @cached_property
    def _patient_means(self) -> NDArray[np.float32]:
        """Means float32[n, d] of the features of each patient in `full_table`."""
        store, full_table = self.store, self.full_table
        number = {name: k for k, name in enumerate(full_table.patient.tolist())}
        used = range(len(store)) if self.target_labels is None else np.concatenate(self.target_labels.bags).tolist()
        sums, n = np.zeros((len(full_table), store.n_features)), np.zeros(len(full_table))
        for bag in used:
            rows = store.bag_rows(bag)
            patient_index = np.array([number[name] for name in store.patch_table.patient[rows].tolist()])
            np.add.at(n, patient_index, 1)
            features = store.read_bag(bag).features
            for k in np.unique(patient_index):
                sums[k] += features[patient_index == k].sum(axis=0, dtype=np.float64)
        return (sums / n[:, None]).astype(np.float32)

    def load_examples(self, split: str) -> Cohort:
        rows = np.flatnonzero(self.table.split == split)
        table = self.table.take(rows)
        allowed = None if self.target_labels else self._find_allowed(table, rows)
        if self.example == "slide":
            bags = self.target_labels.bags if self.target_labels else np.arange(len(self.store))[:, None]
            examples = self._bag_examples(table, [bags[row] for row in rows], allowed)
            return replace(examples, task=self.task)
        read = self._patient_means.__getitem__ if self.example == "patient" else self.store.read
        examples = Cohort(
            lambda chosen: read(rows[chosen]), table.label, table.slide, table.patient, allowed, task=self.task
        )
        return cache_examples(examples, chunk=_READ_ROWS)

    def _find_allowed(self, table: Table, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return bool[n, classes], the classes allowed by tumour type; WsiFlError for a label that is not."""
        meta, store = self.store.meta, self.store
        if self.example != "slide" and not meta.tumor_types:
            return None
        bag_types = table.tumor_type if isinstance(table, BagTable) else None
        kinds = store.table.tumor_type[store.bag_of_patch[rows]] if bag_types is None else bag_types
        allowed = find_allowed_classes(kinds, meta.classes, meta.tumor_types)
        strange = ~allowed[np.arange(len(table)), table.label] & (not self.receives)
        for row in np.flatnonzero(strange)[:1]:
            raise WsiFlError(
                f"{store.path}: slide {table.slide[row]} is labelled {meta.classes[table.label[row]]}, which "
                f"{kinds[row]} does not have in [subtypes]; correct one of them and run `wsi-fl mosaic` again"
            )
        return allowed

    def _bag_examples(
        self, table: BagTable, rows: Sequence[NDArray[np.int64]], allowed: NDArray[np.bool_] | None
    ) -> Cohort:
        """Return the examples of a table, each of one or more slides of the store, by position."""
        store = self.store

        def read_bag(k: int) -> NDArray[np.float32]:
            parts = [store.read_bag(int(row)).features for row in rows[k]]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        sizes = np.array([store.bag_sizes[bag_rows].sum() for bag_rows in rows], np.int64)
        return build_bag_examples(
            read_bag,
            table,
            allowed,
            n_features=store.n_features,
            in_memory=int(sizes.sum()) * store.n_features * np.float32().nbytes <= IN_MEMORY_BYTES,
            at_once=bag_batch_size(int(sizes.max(initial=1)), store.n_features),
        )

    def describe_inputs(self) -> ModelInputs:
        meta = self.store.meta
        inputs = ModelInputs(n_features=self.store.n_features, encoder=meta.encoder)
        if meta.made_by != "features":
            kinds = {} if self.target_labels else meta.tumor_types
            inputs["tumor_types"] = {kind: list(classes) for kind, classes in kinds.items()}
        return inputs

    def _store_digest(self) -> str:
        full_table, store = self.full_table, self.store
        digest = _hash_examples(
            full_table, full_table.tumor_type if isinstance(full_table, BagTable) else full_table.xy_l0
        )
        if self.target_labels is not None:
            digest.update(np.concatenate(self.target_labels.bags).tobytes())
        digest.update(store.meta.encoder.encode())
        for k in range(len(store)):
            bag = store.read_bag(k)
            digest.update(bag.features.tobytes() + bag.xy_l0.tobytes())
        return digest.hexdigest()

    def describe_store(self) -> dict[str, Any]:
        return super().describe_store() | {**self.describe_inputs(), "recipe": dict(self.store.meta.recipe)}

    def require_current(self) -> None:
        meta, study = self.store.meta, self.study
        if meta.made_by != "features" or not study.store_path(self.site).exists():
            return
        with open_store(study, self.site) as patch_store:
            patch_meta, table = patch_store.meta, patch_store.table
        columns = ("slide", "xy_l0", "label", "patient", "split")
        if (patch_meta.spec, patch_meta.classes) != (meta.spec, meta.classes) or any(
            not np.array_equal(getattr(table, name), getattr(self.store.patch_table, name)) for name in columns
        ):
            raise UsageError(
                f"{study.relative_path(self.store.path)}: features of patches as they were before the site was tiled "
                f"again; run `wsi-fl features --site {self.site}`"
            )


@dataclass(frozen=True)
class ExampleKind:
    """The kind of a pipeline's examples: its store, the example, and the plural for texts."""

    data: Literal["patches", "features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    plural: str

    @property
    def is_images(self) -> bool:
        """Whether examples are images."""
        return self.data == "patches"

    @property
    def tiling_command(self) -> Literal["tile", "mosaic"]:
        """The command, and the section of a pipeline, that cuts slides for the store."""
        return "mosaic" if self.data == "mosaics" else "tile"

    @property
    def linear_head(self) -> str | None:
        """The linear head for such examples; None for images."""
        return None if self.is_images else "mean_head" if self.example == "slide" else "linear_head"

    def shape(self, n_features: int) -> Shape:
        """Return the shape of a model's input, given the number of features."""
        return (types.Bags if self.example == "slide" else types.Vectors)(n_features)

    def store_path(self, study: Study, site: str) -> Path:
        """Return the path of a site's store, which may not exist."""
        return {"patches": study.store_path, "features": study.features_path, "mosaics": study.mosaic_path}[self.data](
            site
        )


def counts_patients(pipeline: Pipeline) -> bool:
    """Return whether the privacy unit is the patient; otherwise it is the row."""
    return pipeline.privacy.enabled and pipeline.privacy.unit == "patient"


def find_example_kind(pipeline: Pipeline) -> ExampleKind:
    """Return the kind of a pipeline's examples; UsageError for settings that exclude each other."""
    data, example, target = pipeline.train.data, pipeline.example_level, pipeline.target
    if data == "patches" and example != "patch":
        raise UsageError(f"train.example = {example!r} is for features; set train.data = 'features' or 'mosaics'")
    if not target.is_set:
        return ExampleKind(data, example, {"patch": "patches"}.get(example, f"{example}s"))
    if example == "patch":
        raise UsageError("[target] is for slides; set train.data = 'mosaics', or train.example = 'slide' or 'patient'")
    if example == "patient" and target.example_level != "patient":
        raise UsageError("[target] is for slides, and train.example = 'patient'; set target.per = 'patient'")
    return ExampleKind(data, example, f"{target.example_level}s")


def open_data(study: Study, site: str, pipeline: Pipeline) -> SiteData:
    """Open the store that a pipeline trains on; the error for a missing one names the command to make it."""
    if find_example_kind(pipeline).is_images:
        return PatchData(study, site, pipeline, open_store(study, site))
    return _BagData(study, site, pipeline, open_bags(study, site, pipeline.train.data))
