"""`wsi-fl partition`: divide an image data set among simulated sites, each with a store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from shutil import rmtree
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from wsi_fl.stages.runtime.console import Lines, TextLine, build_site_table
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.images import ImageDataSet, ImageSet, read_data_set
from wsi_fl.stores.patch_shards import ShardMeta, link_shards, write_shard
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import MAX_SEED, dump_toml, validate_model
from wsi_fl.system.files import read_sealed, remove_abandoned, write_sealed, write_text
from wsi_fl.system.join_work import WORK_NAMES, site_lock
from wsi_fl.system.shared_work import SharedWork
from wsi_fl.types import GridSpec, PatchTable, UsageError

_BATCH_ROWS = 256
_MAX_SITES = 10_000
_FILE_HEADER = "# made by wsi-fl partition "
"""The start of its site files."""
_PROGRESS_FILE = "partition.json"
"""A file in the first site's folder: the number of sites of an unfinished partition."""


class SiteImages(TypedDict):
    """A site of images: numbers of training images, also by class, and of test images."""

    site: str
    train: int
    test: int
    store: str
    classes: dict[str, int]


class _PartitionDocument(TypedDict):
    """The document of `partition`."""

    data: str
    skew: str
    seed: int
    classes: list[str]
    copies: list[str]
    sites: list[SiteImages]


def partition_images(
    study: Study,
    data: Path,
    *,
    n_sites: int,
    per_site: int | None = None,
    skew: str = "iid",
    seed: int = 0,
    test_fraction: float = 0.2,
    size_px: int | None = None,
    prefix: str = "S",
    balance_test: bool = False,
) -> _PartitionDocument:
    """Write site files and stores S1 … SK into the study; return the `--json` document.

    Training images are divided by `skew`. The common test set (that of the data set, else a random share
    `test_fraction`) is divided evenly, so that the merged test set is complete. With `balance_test` every site's part
    of it has as many images of each class; what is left over is used nowhere.
    """
    if per_site is not None and per_site < 1:
        raise UsageError("--per-site must be at least 1")
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed must be at least 0, and at most {MAX_SEED}")
    sites = _name_sites(prefix, n_sites)
    _list_unfinished(study, sites)  # before the data are read
    divide = parse_skew(skew)
    rng = np.random.default_rng(seed)
    data_set = _split_test_set(read_data_set(data, size_px), test_fraction, rng)
    assert data_set.test is not None
    copies = _describe_copies(data_set)
    if n_sites > len(data_set.train):
        raise UsageError(f"--sites {n_sites}: {data} has too few training images ({len(data_set.train)})")
    train = divide(data_set.train.y, n_sites, per_site, rng)
    divide_test = _divide_balanced if balance_test else _divide_all
    test = divide_test(data_set.test.y, n_sites, rng)
    header = f"{_FILE_HEADER}{data.name} --sites {n_sites} --skew {skew} --seed {seed}"
    rows: list[SiteImages] = []
    with _mark_unfinished(study, sites) as work:
        for site, train_rows, test_rows in zip(sites, train, test, strict=True):
            parts = {"train": train_rows, "test": np.sort(test_rows)}
            work.require_presence()
            rows.append(write_image_store(study, site.name, data_set, parts))
        for site in sites:  # last, so that a site file means a complete store
            work.require_presence()
            write_text(study.site_path(site.name), dump_toml(site.model_copy(update={"allow": None}), header))
    return {
        "data": str(data),
        "skew": skew,
        "seed": seed,
        "classes": list(data_set.classes),
        "copies": copies,
        "sites": rows,
    }


def _name_sites(prefix: str, n_sites: int) -> list[SiteFile]:
    if not 1 <= n_sites <= _MAX_SITES:
        raise UsageError(f"--sites must be at least 1, and at most {_MAX_SITES}")
    names = [f"{prefix}{k + 1}" for k in range(n_sites)]
    return [validate_model(SiteFile, {"name": name, "real": False}, f"--prefix {prefix!r}") for name in names]


def _list_unfinished(study: Study, sites: list[SiteFile]) -> list[str]:
    """Refuse existing site names; return the sites left by a killed partition.

    A partition with all site files had ended; a site with a ledger has trained.
    """
    names, mark = [site.name for site in sites], study.store_path(sites[0].name).with_name(_PROGRESS_FILE)
    unfinished = []
    if mark.exists():
        n_unfinished = read_sealed(mark, ["sites"], f"delete {mark.parent} if nobody needs it")["sites"]
        unfinished = [f"{names[0][:-1]}{k + 1}" for k in range(int(n_unfinished))]
    ended = all(study.site_path(name).exists() for name in unfinished)
    if ended or any(study.ledger_path(name).exists() for name in unfinished):
        unfinished = []
    for name in dict.fromkeys([*names, *unfinished]):
        file, store = study.site_path(name), study.store_path(name)
        is_replaceable = name in unfinished and (
            not file.exists() or file.read_text(errors="replace").startswith(_FILE_HEADER)
        )
        for path in (file, store):
            if path.exists() and not is_replaceable:
                raise UsageError(f"{study.relative_path(path)} exists already; use another --prefix, or an empty study")
    return unfinished


@contextmanager
def _mark_unfinished(study: Study, sites: list[SiteFile]) -> Iterator[SharedWork]:
    """Remove the sites of a killed partition, and mark sites as unfinished until the block ends without an error."""
    first_folder = study.store_path(sites[0].name).parent
    with site_lock(first_folder, sites[0].name) as work:
        mark = first_folder / _PROGRESS_FILE
        for name in _list_unfinished(study, sites):
            study.site_path(name).unlink(missing_ok=True)
            remove_abandoned(study.site_path(name))
            for path in study.store_path(name).parent.glob("*"):
                if path in (mark, *(first_folder / name for name in WORK_NAMES)):
                    continue
                rmtree(path) if path.is_dir() else path.unlink()
        write_sealed(mark, {"sites": len(sites)})
        yield work
        work.require_presence()
        mark.unlink()


def _split_test_set(data_set: ImageDataSet, fraction: float, rng: np.random.Generator) -> ImageDataSet:
    """Return the data set with a test set: its own, or a share of the training images."""
    if data_set.test is not None:
        return data_set
    if not 0 < fraction < 1:
        raise UsageError(f"--test-fraction {fraction}: the data bring no test set; hold out a share between 0 and 1")
    order = rng.permutation(len(data_set.train))
    n_test = round(fraction * len(order))
    if not 0 < n_test < len(order):
        raise UsageError(f"--test-fraction {fraction} of {len(order)} images leaves no test or training images")
    x, y = data_set.train.x, data_set.train.y
    digests, test_rows = hash_images(data_set.train), order[:n_test]
    test_rows = np.sort(test_rows[~np.isin(digests[test_rows], digests[order[n_test:]])])  # without copies
    train_rows = np.setdiff1d(order, test_rows)
    if not len(test_rows):
        raise UsageError(f"--test-fraction {fraction}: all images that it draws are in training too; bring a test set")
    return ImageDataSet(ImageSet(x[train_rows], y[train_rows]), ImageSet(x[test_rows], y[test_rows]), data_set.classes)


def _divide_all(y: NDArray[np.int64], n_sites: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    return np.array_split(rng.permutation(len(y)), n_sites)


def _divide_balanced(y: NDArray[np.int64], n_sites: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Give each site the same number of rows of each class, as many as the rarest class allows."""
    classes, counts = np.unique(y, return_counts=True)
    n_each = int(counts.min()) // n_sites
    if not n_each:
        rarest = classes[counts.argmin()]
        raise UsageError(
            f"--balance-test: class {rarest} has {counts.min()} test images, too few for {n_sites} sites; use fewer "
            "--sites or a larger --test-fraction"
        )
    columns = [rng.permutation(np.flatnonzero(y == c))[: n_each * n_sites].reshape(n_sites, n_each) for c in classes]
    return list(np.concatenate(columns, axis=1))


def hash_images(images: ImageSet) -> NDArray[np.uint64]:
    """Return a digest of each image; equal images have equal digests."""
    return np.array([hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images.x], "V8").view("u8")


def _describe_copies(data_set: ImageDataSet) -> list[str]:
    """Return lines on copies among training images, and on test images also in training."""
    train = hash_images(data_set.train)
    test = hash_images(data_set.test) if data_set.test is not None else train[:0]
    copies = len(train) - len(np.unique(train))
    lines = [f"{copies} training images are copies of others, and each counts as a patient"] if copies else []
    return lines + describe_leaks(train, test)


def describe_leaks(train: NDArray[np.uint64], test: NDArray[np.uint64]) -> list[str]:
    """Return a line on the test images that are in training too, by digests of both; [] without any."""
    leaks = int(np.isin(test, train).sum())
    return [f"{leaks} test images are in training too, so scores are too good"] if leaks else []


def write_image_store(
    study: Study,
    site: str,
    data_set: ImageDataSet,
    splits: Mapping[str, NDArray[np.int64]],
    *,
    patients: Mapping[str, Sequence[str]] | None = None,
    mpp: float = 0.0,
) -> SiteImages:
    """Write one shard per split; return the row of the document.

    Args:
        splits: rows of the training or test images of the data set, by "train" and "test".
        patients: of all of these images; None where every image counts as one.
        mpp: µm per pixel, 0 where unknown.
    """
    size, channels = data_set.train.x.shape[1], data_set.train.x.shape[3]
    spec = GridSpec(size, mpp, size)
    path = study.store_path(site)
    shards = []
    for split, rows in splits.items():
        if not len(rows):
            continue
        images = data_set.train if split == "train" else data_set.test
        assert images is not None
        names = [patients[split][row] if patients else f"{split}_{row}" for row in rows]
        table = PatchTable.from_images(images.y[rows], split, names, split)
        shard = path.parent / "slides" / f"{split}.h5"
        starts = range(0, len(rows), _BATCH_ROWS)
        digest = hashlib.sha256()  # else features of other images, with the same labels, would be taken for these
        for first in starts:
            digest.update(images.x[rows[first : first + _BATCH_ROWS]].tobytes())
        meta = ShardMeta(split, split, split, spec, "", digest.hexdigest())
        batches = (images.x[rows[first : first + _BATCH_ROWS]] for first in starts)
        write_shard(shard, meta, table, batches, channels=channels)
        shards.append(shard)
    counts = link_shards(path, StoreMeta(site, data_set.classes, spec), shards)
    training = counts["train"].tolist()
    return {
        "site": site,
        "train": sum(training),
        "test": int(counts["test"].sum()),
        "store": study.relative_path(path),
        "classes": dict(zip(data_set.classes, training, strict=True)),
    }


def render_partition_lines(document: _PartitionDocument) -> Lines:
    """Yield the table of training images, classes × sites."""
    sites = document["sites"]
    rows = [[name, *(row["classes"][name] for row in sites)] for name in document["classes"]]
    sums = [["sum", *(row["train"] for row in sites)], ["test", *(row["test"] for row in sites)]]
    title = f"training images ({document['skew']})"
    yield build_site_table(title, "class", [row["site"] for row in sites], [*rows, None, *sums])
    yield from (TextLine(f"  {line}", "bold yellow") for line in document["copies"])


_Skew = Callable[[NDArray[np.int64], int, int | None, np.random.Generator], list[NDArray[np.int64]]]
"""(labels, n_sites, rows per site or None, generator) → the rows of each site, disjoint."""


def parse_skew(text: str) -> _Skew:
    """Return the division `iid`, `major:0.8`, `random-major:0.8` or `dirichlet:0.5`.

    `major` gives each site this share of one class, by turns; `random-major` draws the class of each site, so that two
    sites may have the same (ProxyFL, section 4.1).
    """
    name, _, number = text.partition(":")
    try:
        value = float(number) if number else None
    except ValueError:
        value = None
    if text == "iid":
        return _divide_evenly
    if name in ("major", "random-major") and value is not None and 0 <= value <= 1:
        return partial(_divide_by_majority, share=value, is_random=name == "random-major")
    if name == "dirichlet" and value is not None and value > 0 and isfinite(value):
        return partial(_divide_by_dirichlet, alpha=value)
    raise UsageError(
        f"--skew {text!r}: known are iid, major:0.8 and random-major:0.8 (a share up to 1) and dirichlet:0.5 (above 0)"
    )


def _count_per_site(per_site: int | None, n_sites: int, n_images: int) -> int:
    """Return the number of images per site: as requested, or an equal share of all."""
    per_site = n_images // n_sites if per_site is None else per_site
    if per_site < 1:
        raise UsageError(f"{n_images} training images are too few for {n_sites} sites")
    if per_site * n_sites > n_images:
        raise UsageError(
            f"{n_sites} sites of {per_site} need {per_site * n_sites} training images, but there are {n_images}"
        )
    return per_site


def _divide_evenly(
    y: NDArray[np.int64], n_sites: int, per_site: int | None, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    per_site = _count_per_site(per_site, n_sites, len(y))
    order = rng.permutation(len(y))
    return [np.sort(order[k * per_site : (k + 1) * per_site]) for k in range(n_sites)]


def _divide_by_majority(
    y: NDArray[np.int64],
    n_sites: int,
    per_site: int | None,
    rng: np.random.Generator,
    *,
    share: float,
    is_random: bool = False,
) -> list[NDArray[np.int64]]:
    """Give each site a share of one class, and random images of all others (ProxyFL, section 4.1)."""
    per_site = _count_per_site(per_site, n_sites, len(y))
    classes = np.unique(y)
    majors = rng.choice(classes, n_sites) if is_random else np.resize(classes, n_sites)
    free = rng.permutation(len(y))
    sites: list[NDArray[np.int64]] = []
    n_major = round(share * per_site)
    for major in majors:  # majorities first, so that no site uses up another's majority
        majority_rows = free[y[free] == major][:n_major]
        if len(majority_rows) < n_major:
            raise UsageError(
                f"class {major} has too few images for {n_major} at each site that specialises in it; use a smaller "
                "--per-site"
            )
        sites.append(majority_rows)
        free = free[~np.isin(free, majority_rows)]
    free = rng.permutation(free)  # else its front holds none of the majorities' classes
    for k, (major, majority_rows) in enumerate(zip(majors, sites, strict=True)):
        other_rows = free[y[free] != major][: per_site - n_major]
        if len(other_rows) < per_site - n_major:
            raise UsageError(f"too few images for {per_site} at each of {n_sites} sites; use a smaller --per-site")
        sites[k] = np.sort(np.concatenate([majority_rows, other_rows]))
        free = free[~np.isin(free, other_rows)]
    return sites


def _divide_by_dirichlet(
    y: NDArray[np.int64], n_sites: int, per_site: int | None, rng: np.random.Generator, *, alpha: float
) -> list[NDArray[np.int64]]:
    """Divide each class among the sites in proportions drawn from Dirichlet(α) (Yurochkin et al., 2019)."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(n_sites)]
    for c in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == c))
        shares = rng.dirichlet(np.full(n_sites, alpha))
        if not np.isclose(shares.sum(), 1):  # outside the generator's range
            raise UsageError(f"--skew dirichlet:{alpha:g} is beyond what can be drawn; use 0.01 to 1000")
        cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for k, piece in enumerate(np.split(rows, cuts)):
            parts[k].append(piece)
    sites = [rng.permutation(np.concatenate(pieces)) for pieces in parts]
    empty = [k + 1 for k, rows in enumerate(sites) if not len(rows)]
    if empty:
        raise UsageError(f"site {empty[0]} got no image at all; use another --seed or a larger dirichlet:α")
    return [np.sort(rows[:per_site]) for rows in sites]
