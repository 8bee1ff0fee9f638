"""Data of a site: patches as pixels, or features of patches, of slides as bags, of patients as means."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl import types
from wsi_fl.data.cohort import IN_MEMORY_BYTES, Cohort, find_allowed_classes, read_names
from wsi_fl.data.tasks import fold_strata
from wsi_fl.data.validation import HoldoutDraw, assign_folds
from wsi_fl.federation.preflight import ModelInputs
from wsi_fl.runs.site_folder import PIXELS_KEY
from wsi_fl.slides.patching.scan_copies import Scan
from wsi_fl.stages.site.example_kind import counts_patients, find_example_kind
from wsi_fl.stages.site.holdout_secret import load_holdout_draw
from wsi_fl.stages.site.slide_files import SlidePixels
from wsi_fl.stages.site.target_labels import find_task, label_slides, list_classes, name_outputs
from wsi_fl.stores.bag_store import BagMeta, BagStore
from wsi_fl.stores.fields import NameColumn, encode_names
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import Shape, UsageError, WsiFlError

_ALTERNATIVES = {
    "slide": "train.example = 'patch'",
    "patient": "train.example = 'slide' and model.private = model.proxy = 'mean_head', or give a patient one label",
}
"""Settings to use instead."""
_HASHED_ROWS = 1 << 18
"""Rows whose names are expanded at a time."""


class _EligibleRows(NamedTuple):
    """Rows that a site may train on. Others see their number, so it is independent of settings that others could choose
    for the sake of a patient.

    Attributes:
        patient: of each of m rows.
        training: int64[n], positions of the training rows, in the order of the training examples.
    """

    patient: pd.Series
    training: NDArray[np.int64]


_Opened = TypeVar("_Opened", PatchStore, BagStore)


class SiteData:
    """A site's open store as input of a pipeline's models; a context manager.

    Examples are patches, or slides and patients as bags or means of features (`train.example`), with labels of the
    store or of the site's table (`[target]`).

    Attributes:
        study, site, store: its study and site, and the open file.
        kind, task: of its examples.
        receives: whether the site has no labels: all are 0 here.
        labelled: the slides with a label for `[target]`; None without.
    """

    def __init__(
        self,
        study: Study,
        site: str,
        pipeline: Pipeline,
        store: PatchStore | BagStore,
        in_memory_bytes: int = IN_MEMORY_BYTES,
    ) -> None:
        self.study, self.site, self.pipeline, self.store = study, site, pipeline, store
        self._in_memory_bytes = in_memory_bytes
        file, target = study.load_site(site), pipeline.target
        self.kind, self.task, self.receives = find_example_kind(pipeline), find_task(pipeline), file.is_receiver
        self.labelled: Cohort | None = None
        if target.is_set:
            self.labelled, self._exclusions = label_slides(study, file, target, self._patches.group("slide"))

    @cached_property
    def _patches(self) -> Cohort:
        return Cohort.read_store(self.store)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of a model's outputs, such as the classes."""
        if self.labelled is not None:
            return name_outputs(self.pipeline.target)
        store_classes = self.store.meta.classes
        if self.receives and store_classes == types.UNLABELLED and not self.kind.is_images:
            return list_classes(self.pipeline.subtypes)
        return store_classes

    @property
    def shape(self) -> Shape:
        """The shape of a model's input."""
        if isinstance(self.store, PatchStore):
            size_px = self.pipeline.train.input_px or self.store.meta.spec.size_px
            return types.Images(self.store.n_channels, size_px)
        return self.kind.shape(self.store.n_features)

    @cached_property
    def full_cohort(self) -> Cohort:
        """All examples with the splits of the store; at a site without labels all are test examples of label 0."""
        patches, level = self._patches, self.kind.example
        if self.kind.is_images:
            input_px = self.pipeline.train.input_px
            return patches.resize_images(input_px) if input_px else patches
        if self.labelled is not None:
            is_slide = self.pipeline.target.example_level == "slide"
            cohort = self.labelled if is_slide else self.labelled.group("patient", means=level == "patient")
        elif level == "patch":
            cohort = patches
        else:
            self._require_names(level)
            self._require_one_label(level)
            cohort = patches.group(level, means=level == "patient")
        if not self.receives:
            return cohort
        return cohort.set_truth(np.zeros_like(cohort.label), self.task).assign_columns(split="test")

    def _require_names(self, level: str) -> None:
        names = self._patches.obs[level]
        if unnamed := self._patches.slide[names == ""][:1].tolist():
            raise UsageError(
                f"{self.store.path}: slide {unnamed[0]} has no patient, and train.example = 'patient' needs one"
            )

    def _require_one_label(self, level: str) -> None:
        """Refuse slides or patients whose patches have several labels without an order."""
        if self.receives or self.store.meta.classes == types.CLASSES:
            return
        obs = self._patches.obs
        differs = obs["label"] != obs.groupby(level, observed=True)["label"].transform("first")
        for name in obs.loc[differs, level][:1]:
            raise UsageError(
                f"{self.store.path}: the patches of {level} {name} have different labels; set {_ALTERNATIVES[level]}"
            )

    @property
    def remark(self) -> str:
        """A remark on examples that are excluded, or all of one class though their patches are not; empty for none."""
        if self.labelled is not None:
            return self._exclusions
        if self.kind.example == "patch" or self.receives:
            return ""
        label, patches = self.full_cohort.label, self._patches.label
        if len(np.unique(label)) != 1 or len(np.unique(patches)) == 1:
            return ""
        name, examples = self.classes[label[0]], f"each of {len(label)} {self.kind.example}s"
        return f"site {self.site}: {examples} has some {name}, so all are labelled {name}"

    @cached_property
    def holdout_draw(self) -> HoldoutDraw:
        """The held-out draw of the site."""
        return load_holdout_draw(self.study, self.site)

    @property
    def _is_fold(self) -> bool:
        """Whether a cross-validation fold replaces the store's test set."""
        train = self.pipeline.train
        return train.folds is not None and train.fold is not None and not self.receives

    @cached_property
    def _example_folds(self) -> NDArray[np.int64]:
        """int64[n], the cross-validation fold of each example, from 0."""
        cohort, train = self.full_cohort, self.pipeline.train
        assert train.folds is not None
        try:
            return assign_folds(
                cohort.patient,
                fold_strata(cohort.label, self.task),
                n_folds=train.folds,
                seed=train.seed,
                stratified=train.stratify,
                holdout=self.holdout_draw,
            )
        except UsageError as error:
            raise UsageError(f"site {self.site}: {error}") from None

    @cached_property
    def cohort(self) -> Cohort:
        """All examples with the splits of the run, such as its fold."""
        if not self._is_fold:
            return self.full_cohort
        number = self._example_folds + 1
        return self.full_cohort.assign_columns(split=np.where(number == self.pipeline.train.fold, "test", "train"))

    def list_scans(self) -> list[Scan]:
        """Return the slides of the store with content marks, in the splits of the store or the folds of the run."""
        scans = list_scans(self.store)
        if not self._is_fold:
            return scans
        fold = dict(zip(self.full_cohort.patient.tolist(), self._example_folds.tolist(), strict=True))
        return [replace(scan, split=f"fold {fold[scan.patient] + 1}") for scan in scans if scan.patient in fold]

    def list_eligible(self) -> _EligibleRows:
        """Return the rows that may be trained on, before a fold or validation patients are held out.

        Of a real site with `[target]` also those without a label: n discloses none. Where the unit is the patient, a
        slide without a patient and a label is left out.
        """
        cohort, labelled = self.cohort, self.labelled
        is_training = np.asarray(cohort.obs["split"] == "train")
        if labelled is None or self.receives or not self.study.load_site(self.site).real:
            rows = np.arange(len(cohort)) if self._is_fold else np.flatnonzero(is_training)
            return _EligibleRows(pd.Series(cohort.obs["patient"].array[rows]), np.flatnonzero(is_training[rows]))
        slides = self.store.table
        may_train = self._is_fold | (slides.split == "train")
        if counts_patients(self.pipeline):
            may_train &= np.isin(np.arange(len(slides)), labelled.obs["row"]) | (slides.patient != "")
        if self.pipeline.target.example_level == "patient":
            names = np.unique(slides.patient[may_train])
            return _EligibleRows(pd.Series(names), np.searchsorted(names, cohort.patient[is_training]))
        positions = np.cumsum(may_train) - 1
        return _EligibleRows(
            pd.Series(slides.patient[may_train]), positions[labelled.obs["row"].to_numpy()[is_training]]
        )

    def load_examples(self, split: str) -> Cohort:
        """Return the examples of a split, in memory where they fit; for measuring only those with a choice of class."""
        examples = self._select_split(split)
        if split != "train" and not self.receives:
            examples = select_choices(examples)
        examples = examples.load_inputs(self._in_memory_bytes)
        if isinstance(self.store, PatchStore):
            self.store.close_shards()  # a process may hold the stores of hundreds of sites
        return examples

    def _select_split(self, split: str) -> Cohort:
        """Return all examples of a split with the classes that each may have."""
        examples = self.cohort[self.cohort.obs["split"] == split]
        return replace(examples, allowed=self._find_allowed(examples), task=self.task)

    def count_unscored(self) -> dict[str, int]:
        """Return the number of test examples whose tumour type has one diagnosis, which none can miss, by type."""
        examples = self._select_split("test")
        if self.receives or examples.allowed is None:
            return {}
        has_choice = examples.allowed.sum(1) > 1
        return dict(Counter(read_names(examples.obs["tumor_type"][~has_choice]).tolist()))

    def _find_allowed(self, examples: Cohort) -> NDArray[np.bool_] | None:
        """Return bool[n, classes], the classes allowed by tumour type; WsiFlError for a label that is not."""
        meta = self.store.meta
        if not isinstance(meta, BagMeta) or self.labelled is not None:
            return None
        if self.kind.example != "slide" and not meta.tumor_types:
            return None
        kinds, label = read_names(examples.obs["tumor_type"]), examples.label
        allowed = find_allowed_classes(kinds, meta.classes, meta.tumor_types)
        for row in [] if self.receives else np.flatnonzero(~allowed[np.arange(len(label)), label])[:1]:
            raise WsiFlError(
                f"{self.store.path}: slide {examples.slide[row]} is labelled {meta.classes[label[row]]}, which "
                f"{kinds[row]} does not have in [subtypes]; correct one of them and run `wsi-fl mosaic` again"
            )
        return allowed

    @cached_property
    def test_examples(self) -> Cohort:
        """The test examples, read once."""
        return self.load_examples("test")

    def describe_inputs(self) -> ModelInputs:
        """Return the inputs of models for the preflight."""
        if isinstance(self.shape, types.Images):
            return {"channels": self.shape.channels, "input_px": self.shape.size_px}
        meta = self.store.meta
        assert isinstance(meta, BagMeta)
        inputs = ModelInputs(n_features=self.shape.n_features, encoder=meta.encoder, golden=list(meta.golden))
        if meta.made_by != "features":
            kinds = {} if self.labelled is not None else meta.tumor_types
            inputs["tumor_types"] = {kind: list(classes) for kind, classes in kinds.items()}
        return inputs

    def describe_store(self) -> Mapping[str, object]:
        """Return the facts that a run keeps of the store."""
        store, facts = self.store, {"classes": list(self.classes), "spec": asdict(self.store.meta.spec)}
        if isinstance(store, PatchStore):
            return facts | {"min_tissue": store.meta.min_tissue, "channels": store.n_channels} | pixels_digest(store)
        inputs = {name: value for name, value in self.describe_inputs().items() if name != "golden"}
        return facts | {**inputs, "recipe": dict(store.meta.recipe)}

    def digest(self) -> str:
        """Return the SHA-256 over examples, labels, splits and the held-out secret where used; it stays at the site."""
        draws = self._is_fold or self.pipeline.train.val_fraction > 0
        store_mark = store_digest(self.store) if isinstance(self.store, PatchStore) else self._hash_bags(self.store)
        if not draws or not (mark := self.holdout_draw.secret_digest):
            return store_mark
        return hashlib.sha256(f"{store_mark} {mark}".encode()).hexdigest()

    def _hash_bags(self, store: BagStore) -> str:
        """Return the SHA-256 over the features, and the names, labels and splits of all examples."""
        cohort, obs, level = self.full_cohort, self.full_cohort.obs, self.kind.example
        per_patient = level == "patient" or self.pipeline.target.example_level == "patient"
        # names of fixed width, as wide as in the store, whose empty ones have two characters
        table = store.table if self.labelled is not None or level == "slide" else store.patch_table
        widths = (table.patient if per_patient else table.slide, table.patient, table.split)
        names = [read_names(obs[name]) for name in ("slide", "patient", "split")]
        if not self.receives:
            names = [name.astype(column.dtype) for name, column in zip(names, widths, strict=True)]
        content = obs[["x_l0", "y_l0"]].to_numpy() if level == "patch" else read_names(obs["tumor_type"])
        if level == "slide" and self.labelled is None:
            content = content.astype(store.table.tumor_type.dtype)
        digest = _hash_columns(content, cohort.label, *names)
        if self.labelled is not None:
            groups = pd.factorize(self.labelled.obs["patient" if per_patient else "slide"])[0]
            digest.update(self.labelled.obs["row"].to_numpy()[np.argsort(groups, kind="stable")].tobytes())
        digest.update(store.meta.encoder.encode())
        for k in range(len(store)):
            bag = store.read_bag(k)
            digest.update(bag.features.tobytes() + bag.xy_l0.tobytes())
        return digest.hexdigest()

    def is_synthetic(self) -> bool:
        """Return whether the examples are from a generator, or computed from its patches."""
        return self.store.meta.generator is not None

    def require_current(self) -> None:
        """Refuse features of other patches than those of the site's patch store, where that exists."""
        store, study = self.store, self.study
        if not isinstance(store, BagStore) or store.meta.made_by != "features":
            return
        if not study.store_path(self.site).exists():
            return
        with open_store(study, self.site) as patch_store:
            patches, meta = Cohort.read_store(patch_store).obs, patch_store.meta
        same_meta = (meta.spec, meta.classes) == (store.meta.spec, store.meta.classes)
        if not (same_meta and patches.equals(self._patches.obs[[*patches]])):
            raise UsageError(
                f"{study.relative_path(store.path)}: features of patches as they were before the site was tiled "
                f"again; run `wsi-fl features --site {self.site}`"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def select_choices(examples: Cohort) -> Cohort:
    """Return the examples that may have several classes; no model can be wrong about the others."""
    return examples if examples.allowed is None else examples[examples.allowed.sum(1) > 1]


def open_store(study: Study, site: str) -> PatchStore:
    """Open the patch store of a site; WsiFlError for none, or another site's."""
    return _open_local(
        study, site, study.store_path(site), "tile", lambda path: PatchStore(path, SlidePixels(study, site))
    )


def open_bags(study: Study, site: str, data: str) -> BagStore:
    """Open the bag store of a site's patches ("features") or mosaics ("mosaics"); WsiFlError as for `open_store`."""
    path, command = (study.features_path, "features") if data == "features" else (study.mosaic_path, "mosaic")
    return _open_local(study, site, path(site), command, BagStore)


def _maker_command(study: Study, site: str, command: str) -> str:
    """Return the command that makes a site's store: without slides, `import` of features, `partition` of images."""
    named = study.site_path(site).is_file()
    if not named or study.load_site(site).slides is not None or (study.mosaic_path(site).parent / "mosaics").is_dir():
        return f"{command} --site {site}"
    others = {"mosaic": f"import --site {site} …", "tile": "partition DATA …"}
    return others.get(command, f"{command} --site {site}")


def _open_local(study: Study, site: str, path: Path, command: str, open_file: Callable[[Path], _Opened]) -> _Opened:
    """Open a store of the site itself: no other site's rows are used under its name and ledger."""
    if not path.exists():
        maker = _maker_command(study, site, command)
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
    keys = ("slide", "patient", "split")
    columns = [
        store.names[key] if isinstance(store, PatchStore) else encode_names(getattr(store.table, key)) for key in keys
    ]
    rows = np.sort(columns[0].find_rows()[0])
    names, marks = [column.expand_names(rows).tolist() for column in columns], store.compute_marks()
    return [
        Scan(store.meta.site, slide, patient, split, marks[slide])
        for slide, patient, split in zip(*names, strict=True)
        if slide in marks
    ]


def store_digest(store: PatchStore) -> str:
    """Return the SHA-256 over the patches of a store, their labels and splits."""
    return _hash_columns(store.xy_l0, store.label, *store.names.values()).hexdigest()


def pixels_digest(store: PatchStore) -> dict[str, str]:
    """Return {"pixels_sha256": SHA-256 over the checksums of a store's shards}."""
    return {PIXELS_KEY: hashlib.sha256(json.dumps(list(store.shard_sums.values())).encode()).hexdigest()}


def is_source_store(store: PatchStore, document: Mapping[str, Any]) -> bool:
    """Return whether a store is the source in a generator's document."""
    digests = {"sha256": store_digest(store)} | pixels_digest(store)
    return all(document[key] == value for key, value in digests.items())


def _hash_columns(content: NDArray[Any], truth: NDArray[Any], *names: NameColumn | NDArray[np.str_]) -> hashlib._Hash:
    """Return the SHA-256 over a column of examples, their truth, slides, patients and splits; open for updates."""
    digest, label = hashlib.sha256(), truth
    if truth.dtype == np.float64:
        label = truth.astype(np.float32)  # first, so that digests equal those of float32 labels
    for column in (content, label, *names):
        if isinstance(column, NameColumn):
            for start in range(0, len(column.codes), _HASHED_ROWS):
                digest.update(column.expand_names(slice(start, start + _HASHED_ROWS)).tobytes())
        else:
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
    if label is not truth and (remainder := truth - label).any():
        digest.update(remainder.tobytes())
    return digest


def load_patches(store: PatchStore, split: str, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES) -> Cohort:
    """Return the patches of a split of a store, reduced to input_px, in memory where they fit."""
    patches = Cohort.read_store(store)
    chosen = patches[patches.obs["split"] == split]
    return (chosen.resize_images(input_px) if input_px else chosen).load_inputs(in_memory_bytes)


def open_data(study: Study, site: str, pipeline: Pipeline, in_memory_bytes: int = IN_MEMORY_BYTES) -> SiteData:
    """Open the store that a pipeline trains on; the error for a missing one names the command to make it."""
    is_images = find_example_kind(pipeline).is_images
    store = open_store(study, site) if is_images else open_bags(study, site, pipeline.train.data)
    return SiteData(study, site, pipeline, store, in_memory_bytes)
