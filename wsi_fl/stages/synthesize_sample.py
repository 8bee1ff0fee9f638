"""`synthesize sample`: a synthetic patch store, refused unless the check of exactly this generator was passed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.config import Site, dump_toml, validated
from wsi_fl.files import write_text
from wsi_fl.stages.console import say
from wsi_fl.stages.devices import device_of_rank
from wsi_fl.stages.generators import outcome, provenance, trained_folder
from wsi_fl.stages.tile_shards import locked
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patches import PatchStore
from wsi_fl.stores.shards import ShardMeta, write_columns, write_shard
from wsi_fl.study import Study
from wsi_fl.synthesis.sampling import balanced_labels, sampled
from wsi_fl.synthesis.stylegan2 import Generator
from wsi_fl.types import GridSpec, PatchTable, UsageError, WsiFlError

_SLIDE = "synthetic"
_CHUNK = 256


def sample(
    study: Study,
    *,
    site: str,
    n_per_class: int,
    name: str | None = None,
    seed: int = 0,
    as_site: bool = False,
    despite_failed_check: bool = False,
) -> dict[str, Any]:
    """Writes `stores/<name>/patches.h5` of synthetic patches, all of split train; returns the `--json` document.

    Args:
        name: default `<site>-synthetic`.
        as_site: also writes a site file, so that every command takes the store by name.
        despite_failed_check: writes the set although the check failed or was not run; the store says so.

    Raises:
        WsiFlError: when the check of exactly this generator was not passed.
        UsageError: when the name is taken by anything that is not synthetic.
    """
    began = time.perf_counter()
    name = name or f"{site}-synthetic"
    target = _target(name, n_per_class, seed)
    folder, document = trained_folder(study, site)
    made_by = provenance(folder, document) | {"seed": seed}
    if made_by["check"] != "passed" and not despite_failed_check:
        raise WsiFlError(
            f"site {site}: no shareable set is written, the check of this generator was {outcome(made_by)}. "
            "--despite-failed-check writes it all the same"
        )
    _refuse_taken(study, name, as_site)
    meta = _meta(name, document, made_by)
    with locked(study.store(name).parent, name):
        generator = folder.load_generator(made_by["phase"], device_of_rank())
        table = _write(study, meta, generator, n_per_class, made_by)
    if as_site:
        command = f"wsi-fl synthesize sample --site {site} --n-per-class {n_per_class}"
        first = f"# made by {command}; every patch is synthetic"
        write_text(_site_file(study, name), dump_toml(target.model_copy(update={"allow": None}), first))
    return {
        "site": site,
        "name": name,
        "store": study.relative(study.store(name)),
        "patches": len(table),
        "classes": {c: int((table.label == k).sum()) for k, c in enumerate(meta.classes)},
        "generator": made_by,
        "site_file": study.relative(_site_file(study, name)) if as_site else None,
        "seconds": time.perf_counter() - began,
    }


def _meta(name: str, document: dict[str, Any], made_by: dict[str, Any]) -> StoreMeta:
    """The grid of the real patches, reduced: as many µm on fewer pixels."""
    real, resolution = document["store"], document["settings"]["shape"]["resolution"]
    spec = GridSpec(resolution, real["mpp"] * real["size_px"] / resolution, resolution)
    return StoreMeta(name, tuple(real["classes"]), spec, json.dumps(made_by, sort_keys=True))


def _target(name: str, n_per_class: int, seed: int) -> Site:
    if n_per_class < 1:
        raise UsageError("--n-per-class must be at least 1")
    if seed < 0:
        raise UsageError("--seed must be at least 0")
    return validated(Site, {"name": name, "real": False}, f"--name {name!r}")


def _site_file(study: Study, name: str) -> Path:
    return study.root / "sites" / f"{name}.toml"


def _refuse_taken(study: Study, name: str, as_site: bool) -> None:
    """Only what was synthetic before is written over."""
    path = study.store(name)
    if path.exists():
        with PatchStore(path) as store:
            if store.meta.generator is None:
                raise UsageError(
                    f"{study.relative(path)}: a store of real patches is there; use another --name"
                )
    elif _site_file(study, name).exists():
        raise UsageError(f"sites/{name}.toml exists already; use another --name")
    if as_site and _site_file(study, name).exists() and not path.exists():
        raise UsageError(f"sites/{name}.toml exists already; use another --name")


def _write(
    study: Study, meta: StoreMeta, generator: Generator, n_per_class: int, made_by: dict[str, Any]
) -> PatchTable:
    labels = balanced_labels(len(meta.classes), n_per_class)
    n = len(labels)
    table = PatchTable(
        np.zeros((n, 2), np.int64),
        labels,
        np.full(n, np.nan, np.float32),
        np.full(n, _SLIDE),
        np.array([f"synthetic_{k}" for k in range(n)]),
        np.full(n, "train"),
    )
    path = study.store(meta.site)
    shard = path.parent / "slides" / f"{_SLIDE}.h5"
    shard_meta = ShardMeta(_SLIDE, _SLIDE, "train", meta.spec, "", source=meta.generator or "")
    images = sampled(generator, labels, seed=made_by["seed"], truncation=made_by["truncation"])
    pixels = images.permute(0, 2, 3, 1).numpy()
    write_shard(shard, shard_meta, table, _chunks(pixels), channels=pixels.shape[-1])
    return write_columns(path, meta, [shard])


def _chunks(pixels: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(pixels), _CHUNK):
        yield pixels[start : start + _CHUNK]


def print_sampled(document: dict[str, Any]) -> None:
    """What was written, and what it is worth."""
    generator = document["generator"]
    say(f"{document['patches']} synthetic patches: {document['store']}")
    if generator["check"] != "passed":
        say(f"  written although its check was {outcome(generator)}", "red")
    say("  a check is evidence, not differential privacy: nothing bounds what a patch may reveal", "yellow")
