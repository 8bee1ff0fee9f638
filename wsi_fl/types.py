"""Types shared by all packages: frozen dataclasses of numpy arrays and plain values, and the errors.

Frames and units are in the names: ``xy_l0`` are (x, y) pixels of level 0, ``size_px`` pixels of a patch,
``mpp`` micrometres per pixel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unicodedata import category

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CLASSES = ("healthy", "tumor")
"""Labels of a histology patch store; ``label`` columns hold positions in such a tuple."""

UNLABELLED = ("unlabelled",)
"""The only class of a store whose site has no labels."""

SPLITS = ("train", "val", "test")

MPP_BOUNDS = 0.01, 1000
"""Plausible µm per pixel of a slide's finest level."""

Supervision = Literal["negative", "annotated", "partial", "weak", "unlabelled"]
"""Source of the labels of a slide's patches.

``negative``   the whole slide is healthy
``annotated``  tumour is outlined exhaustively: inside is tumour, outside is healthy
``partial``    tumour is outlined, but tissue outside is not safely healthy (isolated tumour cells)
``weak``       no outline: every patch has the label of its slide
``unlabelled`` no label: every patch is of the only class, `UNLABELLED`
"""


class WsiFlError(Exception):
    """A failure with a one-line message: what is wrong, where, and what to do (exit code 1)."""


class DiskFull(WsiFlError):
    """No space is left; finished work is not lost."""


class UsageError(WsiFlError):
    """Wrong usage or configuration (exit code 2)."""


class ReportableError(WsiFlError):
    """A failure that may be reported to other sites: its text has only facts that all sites exchanged."""


class SiteFailed(ReportableError):
    """A failure at a real hospital, of which others learn nothing else."""


class Interrupted(ReportableError):
    """The end of this process without a failure; its caller goes on."""


class NoCommonPlan(ReportableError, UsageError):
    """Data and models of the sites that do not fit one plan (exit code 2)."""


def single_line(error: BaseException) -> str:
    """Return an error's message in one line, or the name of its type where it is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def shorten_text(text: str, max_chars: int = 60) -> str:
    """Return a text in one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def natural_key(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key of names with numbers ordered by their size.

    Example:
        >>> sorted(["S10", "S2", "S1"], key=natural_key)
        ['S1', 'S2', 'S10']
    """
    return tuple((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d{0,18})", name))


def make_printable(text: str) -> str:
    """Return a text with U+FFFD for characters that move a cursor, reverse the order of letters or hide text.

    These are control and format characters (ESC and the marks of bidirectional text among them), lone surrogates and
    breaks other than a line feed or a tab.

    Example:
        >>> make_printable("Zoë" + chr(10) + "a" + chr(27) + "[2J" + chr(0x202E)) == f"Zoë{chr(10)}a\ufffd[2J\ufffd"
        True
    """
    return "\n".join(line if line.isprintable() else "".join(map(_replace_hidden, line)) for line in text.split("\n"))


def _replace_hidden(character: str) -> str:
    return "\ufffd" if category(character) in _HIDDEN_CATEGORIES and character != "\t" else character


_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def find_control_character(text: str) -> str | None:
    """Return the first control character or lone surrogate of a text as U+0000, or None.

    Names and paths must not hold one: files, messages and other programs treat it differently.

    Example:
        >>> find_control_character("Zoë 名"), find_control_character("a" + chr(0))
        (None, 'U+0000')
    """
    control = next((character for character in text if category(character) in ("Cc", "Cs")), None)
    return None if control is None else f"U+{ord(control):04X}"


_PART_SEPARATOR = "; "
PLAIN_NAME_MESSAGE = (
    "is no plain name of an architecture (letters, digits, dots, dashes, underscores); a hub's is not taken"
)


def is_plain_name(name: str) -> bool:
    """Return whether an architecture's name can only be looked up in a library's own table.

    Example:
        >>> [is_plain_name(name) for name in ("vit_base_patch16_224.dino", "hf-hub:me/net", "local-dir:/tmp", "")]
        [True, False, False, False]
    """
    return re.fullmatch("[A-Za-z0-9_.-]+", name) is not None


_DIGEST_PREFIX, _SHORT_DIGITS = " sha256:", 16


def encoder_label(head: str, parts: Sequence[str]) -> str:
    """Return a store's encoder label: name and digest of the weights, then transform and pooling."""
    return _PART_SEPARATOR.join([head, *parts])


def encoder_differences(labels: Sequence[str]) -> list[str]:
    """Return the differing parts of each label; all are empty for the same features.

    A label without a digest of weights, as of another tool's features, is compared by its name alone. Digests are
    compared whole, and with a shorter one of an earlier version by its digits.

    Example:
        >>> encoder_differences(["a sha256:1; mean 0.5; bilinear", "a sha256:1; mean 0.4; bilinear"])
        ['mean 0.5', 'mean 0.4']
        >>> encoder_differences(["uni; written as uni_v1", "uni at 224 px sha256:1; mean 0.5"])
        ['', '']
        >>> encoder_differences([f"a sha256:{16 * '1'}", f"a sha256:{64 * '1'}"])
        ['', '']
    """
    if any(_count_digits(label) == _SHORT_DIGITS for label in labels):
        labels = [short_label(label) for label in labels]
    if len({_encoder_name(label) for label in labels}) == 1:
        reference = next(filter(has_weights_digest, labels), labels[0])
        labels = [label if has_weights_digest(label) else reference for label in labels]
    rows = list(zip_longest(*(label.split(_PART_SEPARATOR) for label in labels), fillvalue=""))
    return [_PART_SEPARATOR.join(row[k] for row in rows if len(set(row)) > 1) for k in range(len(labels))]


GOLDEN_NUMBERS, MAX_GOLDEN_DISTANCE, MIN_GOLDEN_SPREAD = 8, 0.1, 1e-6
"""Numbers of the vector of a golden patch, and the largest distance of the same features by two programs or precisions
(tests/integration/test_golden_patches.py); a spread of patches, in parts of the largest number, that is round-off."""


def golden_distance(a: Sequence[float | None], b: Sequence[float | None]) -> float:
    """Return how far two encoders' vectors of the golden patches are apart, as a share of what patches differ by.

    NaN where they have fewer than two patches in common, or all of these have one and the same vector.
    """
    import numpy as np

    rows = select_common(a, b)
    if rows.shape[1] < 2:
        return nan
    spread = np.linalg.norm(rows - rows.mean(1, keepdims=True), axis=(1, 2)).max()
    distance = float(np.linalg.norm(rows[0] - rows[1]))
    if spread <= MIN_GOLDEN_SPREAD * np.abs(rows).max():
        return inf if distance else nan
    return distance / float(spread)


def select_common(a: Sequence[float | None], b: Sequence[float | None]) -> NDArray[np.float64]:
    """Return the vectors float64[2, n, 8] of the n golden patches that both encoders have."""
    import numpy as np

    n = min(len(a), len(b)) // GOLDEN_NUMBERS
    rows = np.array([a[: n * GOLDEN_NUMBERS], b[: n * GOLDEN_NUMBERS]], np.float64).reshape(2, n, GOLDEN_NUMBERS)
    common: NDArray[np.float64] = rows[:, np.isfinite(rows).all((0, 2))]
    return common


def short_label(label: str) -> str:
    """Return a store's encoder label with the shorter digest of earlier versions."""
    return re.sub(f"({_DIGEST_PREFIX}[0-9a-f]{{{_SHORT_DIGITS}}})[0-9a-f]*", r"\1", label)


def has_weights_digest(label: str) -> bool:
    """Return whether a store's encoder label has a digest of weights, unlike that of another tool."""
    return _DIGEST_PREFIX in label


def _count_digits(label: str) -> int:
    match = re.search(f"{_DIGEST_PREFIX}([0-9a-f]*)", label)
    return len(match[1]) if match else 0


def _encoder_name(label: str) -> str:
    """Return the name of an encoder."""
    head = label.split(_PART_SEPARATOR, maxsplit=1)[0]
    return head.split(maxsplit=1)[0] if _DIGEST_PREFIX in head else head


@dataclass(frozen=True)
class SlideRecord:
    """One slide of a site, as its archive describes it."""

    path: Path
    slide: str
    """File name without its suffix; unique within a site."""
    patient: str
    site: str
    supervision: Supervision
    positive: bool
    """Whether the slide holds tumour according to its label."""
    annotation: Path | None = None
    split: str | None = None
    """One of SPLITS when the archive prescribes it."""
    mpp_override: float | None = None
    diagnosis: str = ""
    """Label of the whole slide in a study of subtypes; empty elsewhere."""
    tumor_type: str = ""
    """The kind of tumour known before the diagnosis, such as its organ; may be empty."""


@dataclass(frozen=True)
class ExcludedSlide:
    """An excluded slide, with its one-line reason."""

    slide: str
    reason: str


@dataclass(frozen=True)
class GridSpec:
    """The regular grid of patches over a slide; its origin is (0, 0) of level 0."""

    size_px: int
    mpp: float
    stride_px: int


class _Table:
    """Columns of equal length."""

    label: NDArray[Any]

    def __post_init__(self) -> None:
        columns = vars(self)
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of unequal length: {lengths}")
        for name, column in columns.items():
            if column.dtype.kind == "U" and column.ndim != 1:
                raise ValueError(f"column {name} has {column.ndim} dimensions instead of one")

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class BagTable(_Table):
    """The columns of s bags, one per slide; every array has length s."""

    label: NDArray[Any]
    """[s] int64, position in the store's classes, or the target of another task."""
    tumor_type: NDArray[np.str_]
    """[s] the kind of tumour known before the diagnosis, or empty."""
    slide: NDArray[np.str_]
    patient: NDArray[np.str_]
    split: NDArray[np.str_]


@dataclass(frozen=True)
class PatchTable(_Table):
    """The columns of n patches; every array has length n."""

    xy_l0: NDArray[np.int64]
    """[n, 2] top-left corner (x, y) in level-0 pixels."""
    label: NDArray[np.int64]
    """[n] position in the store's classes."""
    tumor_fraction: NDArray[np.float32]
    """[n] share of the patch's area inside tumour outlines; NaN where nothing is outlined (weak labels)."""
    slide: NDArray[np.str_]
    patient: NDArray[np.str_]
    split: NDArray[np.str_]

    @staticmethod
    def from_images(label: NDArray[np.int64], slide: str, patient: list[str], split: str) -> PatchTable:
        """Return the table of images in one shard that were cut from no slide."""
        import numpy as np

        n = len(label)
        xy, fraction = np.zeros((n, 2), np.int64), np.full(n, np.nan, np.float32)
        return PatchTable(xy, label, fraction, np.full(n, slide), np.array(patient), np.full(n, split))

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> PatchTable:
        """Return the rows at these positions, in a mask or in a slice."""
        return PatchTable(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True)
class Images:
    """Square images as input."""

    channels: int
    size_px: int

    def __str__(self) -> str:
        return f"{self.size_px}-px images of {self.channels} channel{'' if self.channels == 1 else 's'}"


@dataclass(frozen=True)
class Bags:
    """Bags of patch features as input, of any length each."""

    n_features: int

    def __str__(self) -> str:
        return f"bags of {self.n_features} features per patch"


@dataclass(frozen=True)
class Vectors:
    """The features of one patch as input."""

    n_features: int

    def __str__(self) -> str:
        return f"vectors of {self.n_features} features"


Shape = Images | Bags | Vectors
"""Shape of a model's input."""
