"""Cohorts of labelled images, features or bags: what is known of each, and a reader of what models see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from wsi_fl.data.tasks import CLASSES, Task
from wsi_fl.stores.fields import NameColumn, encode_names
from wsi_fl.types import UsageError

if TYPE_CHECKING:
    from wsi_fl.stores.bag_store import BagStore
    from wsi_fl.stores.patch_store import PatchStore

Inputs = NDArray[Any]
"""Pixels uint8[b, h, w, channels] of images, padded bags float32[b, m, d + 1], or features float32[b, d] of patches."""
_Features = NDArray[np.float32]
_Rows = NDArray[np.int64]
_Names: TypeAlias = "NDArray[np.str_] | pd.Categorical"

IN_MEMORY_BYTES = 1 << 29
"""Inputs of a split that take no more are kept in memory: four sites in a process, of three splits each, take 6 GB."""
_MAX_BAG_VALUES = 1 << 24
"""Values of bags per read for predictions: 64 MB."""
_CHECK_ROWS = 256
_READ_IMAGES, _READ_FEATURES = 64, 4096
"""Rows read at a time."""
_NAMES = ("slide", "patient", "tumor_type")
"""Columns that a group has only where all its rows have the same name."""
_SURVIVAL_TRUTH = ["time", "event"]
TRUTH_COLUMNS = ("label", *_SURVIVAL_TRUTH)
"""Columns of the truth: a class or number, or those of survival."""


@dataclass(frozen=True)
class Cohort:
    """n examples: images, features of patches, or slides and patients as bags of features.

    `cohort[mask]` and `cohort[rows]` select, `cohort.group` makes bags or means of slides and patients.

    Attributes:
        obs: a row for each example: slide, patient, label (or time and event), and what else is known, such as split,
            tumor_type, x_l0, y_l0, and of bags the number of patches (n_patches).
        read: rows int64[b] → inputs of models.
        allowed: mask bool[n, classes] of classes that are possible a priori; None for all.
        show: (rows, drawn numbers int64[b]) → training inputs, with the patches of a bag chosen by its number.
            None for the same as `read`.
        at_once: maximum number of examples per read for predictions; None for any.
        task: the prediction task.
    """

    obs: pd.DataFrame
    read: Callable[[_Rows], Inputs]
    allowed: NDArray[np.bool_] | None = None
    show: Callable[[_Rows, _Rows], Inputs] | None = None
    at_once: int | None = None
    task: Task = CLASSES

    def __len__(self) -> int:
        return len(self.obs)

    def __getitem__(self, rows: NDArray[np.bool_] | _Rows) -> Cohort:
        """Return the examples of a mask bool[n], or at rows int64[m] in this order."""
        chosen, show = np.arange(len(self))[np.asarray(rows)], self.show
        return replace(
            self,
            obs=self.obs.iloc[chosen].reset_index(drop=True),
            read=lambda rows: self.read(chosen[rows]),
            allowed=None if self.allowed is None else self.allowed[chosen],
            show=None if show is None else lambda rows, draws: show(chosen[rows], draws),
        )

    @cached_property
    def label(self) -> NDArray[Any]:
        """int64[n] of classes, or the truth of another task (see `tasks`)."""
        return read_truth(self.obs)

    @cached_property
    def slide(self) -> NDArray[np.str_]:
        """str[n]."""
        return read_names(self.obs["slide"])

    @cached_property
    def patient(self) -> NDArray[np.str_]:
        """str[n]."""
        return read_names(self.obs["patient"])

    @property
    def is_bags(self) -> bool:
        """Whether examples are bags."""
        return "n_patches" in self.obs

    @staticmethod
    def from_columns(
        read: Callable[[_Rows], Inputs],
        label: NDArray[Any],
        slide: _Names,
        patient: _Names,
        allowed: NDArray[np.bool_] | None = None,
        **columns: Any,
    ) -> Cohort:
        """Return the examples of a reader.

        Args:
            label: int64[n], or the truth of another task.
            slide, patient: str[n], or as categories.
            columns: further columns of `obs`, [n].
        """
        names = {"slide": _encode_names(slide), "patient": _encode_names(patient)}
        return Cohort(pd.DataFrame(names | tabulate_truth(label) | columns, copy=False), read, allowed)

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
        n, unknown, columns = len(x), np.full(len(x), ""), dict[str, Any]()
        if isinstance(x, np.ndarray):
            read = _convert_inputs(x).__getitem__
        else:
            _require_bags(x)
            read, columns["n_patches"] = partial(_read_bags, x), np.array([len(bag) for bag in x], np.int64)
        names = np.asarray(patient, np.str_) if len(patient) else unknown
        labels = np.zeros(n, np.int64) if label is None else _parse_labels(label)
        for kind, column in (("labels", labels), ("patients", names)):
            if column.shape != (n,):
                raise UsageError(f"{n} examples need as many {kind}, not {_format_shape(column.shape)}")
        return Cohort.from_columns(read, labels, unknown, names, **columns)

    @staticmethod
    def read_store(store: PatchStore | BagStore) -> Cohort:
        """Return all patches of a store, as pixels or as features; `group` makes bags of the latter."""
        from wsi_fl.stores.bag_store import BagStore

        if isinstance(store, BagStore):
            label, names = store.patch_label, store.patch_names
        else:
            label, names = store.label, store.names
        columns: dict[str, Any] = {name: _build_categorical(column) for name, column in names.items()}
        columns |= dict(zip(("x_l0", "y_l0"), store.xy_l0.T, strict=True))
        return Cohort.from_columns(store.read, label, **columns)

    def assign_columns(self, **columns: ArrayLike) -> Cohort:
        """Return the same examples with other values in columns of `obs`."""
        return replace(self, obs=self.obs.assign(**columns))

    def set_truth(self, truth: NDArray[Any], task: Task) -> Cohort:
        """Return the same examples with the truth of another task."""
        obs = self.obs.drop(columns=[*TRUTH_COLUMNS], errors="ignore")
        return replace(self, obs=obs.assign(**tabulate_truth(truth)), task=task)

    def group(self, by: str, *, means: bool = False) -> Cohort:
        """Return an example for each slide or patient, in order of first appearance: its bag, or the mean of its rows.

        A group has the highest label of its rows, so that any tumour counts, their first split, and "" for names that
        they do not share. Means are sums of double precision over the slides.

        Args:
            by: "slide" or "patient".
        """
        codes = pd.factorize(self.obs[by])[0]
        ends = np.cumsum(np.bincount(codes))
        rows_by_group = np.split(np.argsort(codes, kind="stable"), ends)[: len(ends)]
        groups, first = self.obs.groupby(codes), np.array([rows[0] for rows in rows_by_group], np.int64)
        obs = self.obs[[*tabulate_truth(self.label)]].groupby(codes).max()
        for name in (name for name in (*_NAMES, "split") if name in self.obs):
            shared = name == "split" or groups[name].nunique().to_numpy() == 1
            obs[name] = _encode_names(np.where(shared, read_names(self.obs[name].iloc[first]), ""))
        obs["slide"] = obs[by]  # of a patient: several
        slides, width = pd.factorize(self.obs["slide"])[0], self.read(np.zeros(0, np.int64)).shape[-1] - self.is_bags

        def read_parts(group: int) -> list[_Features]:
            rows = rows_by_group[group]
            return [self._read_features(part) for part in np.split(rows, np.flatnonzero(np.diff(slides[rows])) + 1)]

        def read_means(rows: _Rows) -> _Features:
            parts = map(read_parts, rows.tolist())
            sums = [(sum(part.sum(0, dtype=np.float64) for part in bag), sum(map(len, bag))) for bag in parts]
            return np.array([total / n for total, n in sums], np.float32).reshape(-1, width)

        def read_bags(rows: _Rows) -> _Features:
            return pack_bags([np.concatenate(read_parts(k)) for k in rows.tolist()], width)

        if means:
            return Cohort(obs, read_means, task=self.task)
        obs["n_patches"] = groups["n_patches"].sum() if self.is_bags else groups.size()
        return Cohort(obs, read_bags, task=self.task)

    def _read_features(self, rows: _Rows) -> _Features:
        """Return the features [m, d] of all patches of some rows."""
        inputs = self.read(rows)
        return inputs[inputs[:, :, -1] > 0, :-1] if self.is_bags else inputs

    def resize_images(self, size_px: int) -> Cohort:
        """Return the same images at size_px × size_px."""
        return replace(self, read=lambda rows: downsample_pixels(self.read(rows), size_px))

    def count_bytes(self) -> int:
        """Return the bytes of all inputs in memory."""
        if not len(self):
            return 0
        if self.is_bags:
            n_features = int(self.read(np.zeros(0, np.int64)).shape[-1]) - 1  # one column marks padding
            return int(self.obs["n_patches"].sum()) * n_features * np.float32().nbytes
        return self.read(np.zeros(1, np.int64)).nbytes * len(self)

    def load_inputs(self, limit_bytes: int = IN_MEMORY_BYTES) -> Cohort:
        """Return the same examples, read now and kept in memory if they fit in `limit_bytes`; bags with `at_once`."""
        fits = self.count_bytes() <= limit_bytes
        if len(self) and self.is_bags:
            width = self.read(np.zeros(0, np.int64)).shape[-1]
            at_once = max(1, _MAX_BAG_VALUES // (int(self.obs["n_patches"].max()) * width))
            features = [self._read_features(np.array([k])) for k in range(len(self))] if fits else []
            return replace(self, at_once=at_once, read=partial(_read_bags, features) if fits else self.read)
        if not fits or not len(self):
            return self
        first = self.read(np.zeros(1, np.int64))
        inputs = np.empty((len(self), *first.shape[1:]), first.dtype)
        step = _READ_IMAGES if first.dtype == np.uint8 else _READ_FEATURES
        for start in range(0, len(self), step):
            rows = np.arange(start, min(start + step, len(self)))
            inputs[rows] = self.read(rows)
        return replace(self, read=inputs.__getitem__)


def read_truth(obs: pd.DataFrame) -> NDArray[Any]:
    """Return the truth of the rows of a table, as its task has it."""
    return np.array(obs[_SURVIVAL_TRUTH if "time" in obs else "label"])


def tabulate_truth(truth: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the columns of a truth: time and event of survival, else label."""
    return dict(zip(_SURVIVAL_TRUTH, truth.T, strict=True)) if truth.ndim == 2 else {"label": truth}


def read_names(column: pd.Series) -> NDArray[np.str_]:
    """Return the names str[n] in a column."""
    codes, names = pd.factorize(column)
    values: NDArray[np.str_] = np.array(names.tolist(), np.str_)[codes]
    return values


def _encode_names(names: _Names) -> pd.Categorical:
    return names if isinstance(names, pd.Categorical) else _build_categorical(encode_names(names))


def _build_categorical(column: NameColumn) -> pd.Categorical:
    return pd.Categorical.from_codes(column.codes, column.names.astype(object))


def _read_bags(bags: Sequence[Inputs], rows: _Rows) -> Inputs:
    return pack_bags([bags[k] for k in rows.tolist()], bags[0].shape[1])


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


def pack_bags(bags: Sequence[_Features], n_features: int | None = None) -> _Features:
    """Return bags float32[m_i, d] as float32[b, max m_i, d + 1], whose last column is 1 for a patch, 0 for padding.

    Args:
        n_features: d; required without bags.
    """
    width = bags[0].shape[1] if n_features is None else n_features
    out = np.zeros((len(bags), max(map(len, bags), default=1), width + 1), np.float32)
    for row, bag in zip(out, bags, strict=True):
        row[: len(bag), :-1] = bag
        row[: len(bag), -1] = 1
    return out


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
        if not len(rows):
            return examples.read(rows)
        bags = [examples.read(rows[k : k + 1])[0][:, :-1] for k in range(len(rows))]
        return pack_bags([draw_patches(bag, seed) for bag, seed in zip(bags, draws.tolist(), strict=True)])

    return replace(examples, show=show)


def downsample_pixels(pixels: NDArray[np.uint8], size_px: int) -> NDArray[np.uint8]:
    """Return images uint8[n, h, w, channels] at size_px × size_px by area averaging."""
    import torch
    from torch.nn import functional

    if pixels.shape[1:3] == (size_px, size_px) or not len(pixels):
        return pixels
    planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    smaller = functional.interpolate(planes, size=(size_px, size_px), mode="area")
    return smaller.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


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
        pd.concat([part.obs for part in parts], ignore_index=True),
        partial(gather_inputs, [part.read for part in parts]),
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
