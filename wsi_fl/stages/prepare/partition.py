"""`partition`: an image data set divided among simulated sites, each with its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.stages.work.console import Line, Lines, by_site
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.images import DataSet, Images, read_data_set
from wsi_fl.stores.shards import ShardMeta, write_columns, write_shard
from wsi_fl.stores.skew import parse_skew
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import MOST_SEED, dump_toml, validated
from wsi_fl.system.files import locked, read_sealed, remove_abandoned, write_sealed, write_text
from wsi_fl.types import GridSpec, PatchTable, UsageError

_BATCH = 256
_MOST_SITES = 10_000
_MADE = "# made by wsi-fl partition "
"""How its site files begin."""
_BEGUN = "partition.json"
"""In the first site's folder: how many sites a partition makes that has not ended."""


def partition(
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
) -> dict[str, Any]:
    """Writes site files and stores S1 … SK into the study.

    Training images are divided by `skew`; the common test set (the one the data set brings, else a share of
    `test_fraction` drawn at random) is divided evenly, so that the merged test set is the whole of it.
    """
    if n_sites < 1 or (per_site is not None and per_site < 1):
        raise UsageError("--sites and --per-site must be at least 1")
    if n_sites > _MOST_SITES:
        raise UsageError(f"--sites must be at most {_MOST_SITES}")
    if not 0 <= seed <= MOST_SEED:
        raise UsageError(f"--seed must be at least 0, and at most {MOST_SEED}")
    sites = [
        validated(SiteFile, {"name": f"{prefix}{k + 1}", "real": False}, f"--prefix {prefix!r}")
        for k in range(n_sites)
    ]
    _unfinished(study, sites)  # before the data are read
    divide = parse_skew(skew)
    rng = np.random.default_rng(seed)
    data_set = _with_test(read_data_set(data, size_px), test_fraction, rng)
    assert data_set.test is not None
    if n_sites > len(data_set.train):
        raise UsageError(f"--sites {n_sites}: {data} has too few training images ({len(data_set.train)})")
    train = divide(data_set.train.y, n_sites, per_site, rng)
    test = np.array_split(rng.permutation(len(data_set.test)), n_sites)
    first = f"{_MADE}{data.name} --sites {n_sites} --skew {skew} --seed {seed}"
    rows = []
    with _begun(study, sites):
        for site, mine, held_out in zip(sites, train, test, strict=True):
            table = _write_store(study, site.name, data_set, {"train": mine, "test": np.sort(held_out)})
            rows.append(_row(study, site.name, table, data_set.classes))
        for site in sites:  # last, so that a site file stands for a whole store
            write_text(
                _site_file(study, site.name), dump_toml(site.model_copy(update={"allow": None}), first)
            )
    return {"data": str(data), "skew": skew, "seed": seed, "classes": list(data_set.classes), "sites": rows}


def _site_file(study: Study, site: str) -> Path:
    return study.root / "sites" / f"{site}.toml"


def _unfinished(study: Study, sites: list[SiteFile]) -> list[str]:
    """Refuse names that are taken; return the sites that a partition which was killed has left.

    One that had written all its site files had ended, and whoever has a ledger has been at work.
    """
    names, mark = [site.name for site in sites], study.store(sites[0].name).with_name(_BEGUN)
    left = []
    if mark.exists():
        n = read_sealed(mark, ["sites"], f"delete {mark.parent} if nobody needs it")["sites"]
        left = [f"{names[0][:-1]}{k + 1}" for k in range(int(n))]
    ended = all(_site_file(study, name).exists() for name in left)
    if ended or any(study.ledger(name).exists() for name in left):
        left = []
    for name in dict.fromkeys([*names, *left]):
        file, store = _site_file(study, name), study.store(name)
        ours = name in left and (not file.exists() or file.read_text(errors="replace").startswith(_MADE))
        for path in (file, store):
            if path.exists() and not ours:
                raise UsageError(
                    f"{study.relative(path)} exists already; use another --prefix, or an empty study"
                )
    return left


@contextmanager
def _begun(study: Study, sites: list[SiteFile]) -> Iterator[None]:
    """Mark sites as unfinished until the block ends well, after removing what a killed partition left."""
    first = study.store(sites[0].name).parent
    with locked(first, sites[0].name):
        mark = first / _BEGUN
        for name in _unfinished(study, sites):
            _site_file(study, name).unlink(missing_ok=True)
            remove_abandoned(_site_file(study, name))
            for path in study.store(name).parent.glob("*"):
                if path.is_dir():
                    rmtree(path)
                elif path not in (mark, first / ".lock"):
                    path.unlink()
        write_sealed(mark, {"sites": len(sites)})
        yield
        mark.unlink()


def _with_test(data_set: DataSet, fraction: float, rng: np.random.Generator) -> DataSet:
    """The data set with a test set: its own, or a share of the training images."""
    if data_set.test is not None:
        return data_set
    if not 0 < fraction < 1:
        raise UsageError(
            f"--test-fraction {fraction}: the data bring no test set; hold out a share between 0 and 1"
        )
    order = rng.permutation(len(data_set.train))
    n_test = round(fraction * len(order))
    if not 0 < n_test < len(order):
        raise UsageError(
            f"--test-fraction {fraction} of {len(order)} images leaves no test or training images"
        )
    held_out, kept = np.sort(order[:n_test]), np.sort(order[n_test:])
    x, y = data_set.train.x, data_set.train.y
    return DataSet(Images(x[kept], y[kept]), Images(x[held_out], y[held_out]), data_set.classes)


def _write_store(
    study: Study, site: str, data_set: DataSet, splits: dict[str, NDArray[np.int64]]
) -> PatchTable:
    """One shard per split; every image is a patient of its own."""
    size, channels = data_set.train.x.shape[1], data_set.train.x.shape[3]
    spec = GridSpec(size, 0.0, size)
    path = study.store(site)
    shards = []
    for split, rows in splits.items():
        if not len(rows):
            continue
        images = data_set.train if split == "train" else data_set.test
        assert images is not None
        table = PatchTable.of_images(images.y[rows], split, [f"{split}_{row}" for row in rows], split)
        shard = path.parent / "slides" / f"{split}.h5"
        meta = ShardMeta(split, split, split, spec, "")
        write_shard(shard, meta, table, _batches(images.x, rows), channels=channels)
        shards.append(shard)
    return write_columns(path, StoreMeta(site, data_set.classes, spec), shards)


def _batches(x: NDArray[np.uint8], rows: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(rows), _BATCH):
        yield x[rows[start : start + _BATCH]]


def _row(study: Study, site: str, table: PatchTable, classes: tuple[str, ...]) -> dict[str, Any]:
    training = table.label[table.split == "train"]
    return {
        "site": site,
        "train": len(training),
        "test": int((table.split == "test").sum()),
        "store": study.relative(study.store(site)),
        "classes": {name: int((training == k).sum()) for k, name in enumerate(classes)},
    }


def partition_lines(document: dict[str, Any]) -> Lines:
    """Yield training images, classes × sites."""
    sites = document["sites"]
    rows = [[name, *(row["classes"][name] for row in sites)] for name in document["classes"]]
    sums = [["sum", *(row["train"] for row in sites)], ["test", *(row["test"] for row in sites)]]
    title = f"training images ({document['skew']})"
    yield by_site(title, "class", [row["site"] for row in sites], [*rows, None, *sums])
    yield Line("stores ready; next: wsi-fl train --method proxyfl --pipeline NAME")
