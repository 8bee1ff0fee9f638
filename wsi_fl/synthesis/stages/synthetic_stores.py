"""Patch stores of synthetic images, of any generator.

`synthesize sample` writes one if the check of exactly this generator was passed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patch_shards import ShardMeta, write_columns, write_shard
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import dump_toml, validate_model
from wsi_fl.synthesis.folder import Document
from wsi_fl.synthesis.keys import Synthesis
from wsi_fl.synthesis.stages.generator_types import GeneratorType, describe_outcome, load_kind
from wsi_fl.synthesis.training_state import balance_labels
from wsi_fl.system.files import write_text
from wsi_fl.system.join_work import site_lock
from wsi_fl.types import GridSpec, PatchTable, UsageError, WsiFlError

_SLIDE = "synthetic"


class _SampleDocument(TypedDict):
    """The `--json` document of `synthesize sample`."""

    site: str
    name: str
    store: str
    patches: int
    classes: dict[str, int]
    """Class → number of patches."""
    generator: Document
    """The provenance of the patches, with the result of the check."""
    site_file: str | None
    seconds: float


def sample_generator(
    study: Study,
    *,
    site: str,
    n_per_class: int,
    name: str | None = None,
    seed: int = 0,
    generator: str | None = None,
    as_site: bool = False,
    despite_failed_check: bool = False,
    pipeline: Pipeline | None = None,
) -> _SampleDocument:
    """Write `stores/<name>/patches.h5` of synthetic patches, all of split train; return the `--json` document.

    Args:
        name: default `<site>-synthetic`.
        generator: "gan" or "ddpm"; default: the site's, where it has both the pipeline's, or a GAN.
        as_site: also write a site file, for the store's name in every command.
        pipeline: settings that the images are to have; they are drawn as in the check, and others are refused.

    Raises:
        WsiFlError: when the check of exactly this generator was not passed, unless `despite_failed_check`.
        UsageError: for the name of a store or site that is not synthetic.
    """
    start_time = time.perf_counter()
    name = name or f"{site}-synthetic"
    if n_per_class < 1:
        raise UsageError("--n-per-class must be at least 1")
    site_file = validate_model(SiteFile, {"name": name, "real": False}, f"--name {name!r}")
    source = study.load_site(site)
    kind = _load_kind(study, source.name, generator, pipeline)
    folder, document = kind.require_trained(study, site)
    provenance = kind.build_provenance(folder, document) | {"seed": seed}
    if pipeline is not None:
        kind.refuse_other_sampling(pipeline, provenance)
    _require_permission(source, provenance, as_site=as_site, despite_failed_check=despite_failed_check)
    _require_free_name(study, name)
    store_facts, shape = document["store"], document["settings"]["shape"]
    grid = (store_facts["size_px"], store_facts["mpp"])
    meta = synthetic_meta(name, store_facts["classes"], grid, shape["resolution"], provenance)
    labels = balance_labels(len(meta.classes), n_per_class)
    with site_lock(study.store_path(name).parent, name) as work:
        images = transpose_images(work.guard_items(kind.draw_images(folder, provenance, labels)))
        write_synthetic(study.store_path(name), meta, labels, images, shape["channels"])
    if as_site:
        command = f"wsi-fl synthesize sample --site {site} --n-per-class {n_per_class}"
        header = f"# made by {command}; every patch is synthetic"
        write_text(study.site_path(name), dump_toml(site_file.model_copy(update={"allow": None}), header))
    return {
        "site": site,
        "name": name,
        "store": study.relative_path(study.store_path(name)),
        "patches": len(labels),
        "classes": dict.fromkeys(meta.classes, n_per_class),
        "generator": provenance,
        "site_file": study.relative_path(study.site_path(name)) if as_site else None,
        "seconds": time.perf_counter() - start_time,
    }


def _load_kind(study: Study, site: str, generator: str | None, pipeline: Pipeline | None) -> GeneratorType:
    """Return the named kind of generator, or the site's; where it has both, or none, the pipeline's, or a GAN."""
    has_gan, has_denoiser = study.generator_path(site).exists(), study.denoiser_path(site).exists()
    name = "gan" if pipeline is None else pipeline.find_section(Synthesis).generator
    if has_gan != has_denoiser:
        name = "gan" if has_gan else "ddpm"
    return load_kind(generator or name)


def _require_permission(site: SiteFile, provenance: Document, *, as_site: bool, despite_failed_check: bool) -> None:
    if provenance["check"] != "passed" and not despite_failed_check:
        raise WsiFlError(
            f"site {site.name}: no shareable set is written, the check of this generator was "
            f"{describe_outcome(provenance)}. --despite-failed-check writes it all the same"
        )
    if as_site and site.real and not site.allows("generator"):
        raise UsageError(
            f"sites/{site.name}.toml is a real hospital: a site made of its generator would let others use it; add "
            'allow = ["generator"] there if they may'
        )


def _require_free_name(study: Study, name: str) -> None:
    path = study.store_path(name)
    if path.exists():
        with PatchStore(path) as store:
            if store.meta.generator is None:
                raise UsageError(f"{study.relative_path(path)}: a store of real patches is there; use another --name")
    elif study.site_path(name).exists():
        raise UsageError(f"sites/{name}.toml exists already; use another --name")


def render_sample_lines(document: _SampleDocument) -> Lines:
    """Yield the written store and the limits of its check."""
    generator = document["generator"]
    yield TextLine(f"{document['patches']} synthetic patches: {document['store']}")
    if generator["check"] != "passed":
        yield TextLine(f"  written although its check was {describe_outcome(generator)}", "red")
    yield TextLine("  a check is evidence, not differential privacy: nothing bounds what a patch may reveal", "yellow")


def write_synthetic(
    path: Path, meta: StoreMeta, labels: NDArray[np.int64], pixels: Iterable[NDArray[np.uint8]], channels: int
) -> None:
    """Write a patch store of synthetic images, all of split train.

    Args:
        pixels: batches uint8[b, h, h, channels], one image per label in order.
    """
    patients = [f"synthetic_{k}" for k in range(len(labels))]
    table = PatchTable.from_images(labels, _SLIDE, patients, "train")
    shard = path.parent / "slides" / f"{_SLIDE}.h5"
    shard_meta = ShardMeta(_SLIDE, _SLIDE, "train", meta.spec, "", source=meta.generator or "")
    write_shard(shard, shard_meta, table, pixels, channels=channels)
    write_columns(path, meta, [shard])


def transpose_images(batches: Iterable[torch.Tensor]) -> Iterator[NDArray[np.uint8]]:
    """Return batches uint8[b, c, h, h] as uint8[b, h, h, c]."""
    for batch in batches:
        yield batch.permute(0, 2, 3, 1).numpy()


def synthetic_meta(
    site: str, classes: Sequence[str], grid: tuple[int, float], resolution: int, provenance: Mapping[str, Any]
) -> StoreMeta:
    """Return the metadata of synthetic images like a real store's, reduced: as many µm on fewer pixels.

    Args:
        grid: size in pixels and µm per pixel of the real patches.
    """
    size_px, mpp = grid
    spec = GridSpec(resolution, mpp * size_px / resolution, resolution)
    return StoreMeta(site, tuple(classes), spec, json.dumps(provenance, sort_keys=True))
