"""`synthesize sample`: a synthetic patch store, refused unless the check of exactly this generator was passed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from wsi_fl.stages.synthesis.gan import outcome, provenance, trained_folder
from wsi_fl.stages.synthesis.synthetic import as_pixels, reduced_spec, write_synthetic
from wsi_fl.stages.work.console import say
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import dump_toml, validated
from wsi_fl.synthesis.sampling import balanced_labels, sampled
from wsi_fl.synthesis.stylegan2 import Generator
from wsi_fl.system.files import write_text
from wsi_fl.system.locks import locked
from wsi_fl.types import PatchTable, UsageError, WsiFlError

_CHUNK = 256


def sample(
    study: Study,
    *,
    site: str,
    n_per_class: int,
    name: str | None = None,
    seed: int = 0,
    generator: str | None = None,
    as_site: bool = False,
    despite_failed_check: bool = False,
) -> dict[str, Any]:
    """Writes `stores/<name>/patches.h5` of synthetic patches, all of split train; returns the `--json` document.

    Args:
        name: default `<site>-synthetic`.
        generator: "gan" or "ddpm"; default: the one that the site has, a GAN where it has both.
        as_site: also writes a site file, so that every command takes the store by name.
        despite_failed_check: writes the set although the check failed or was not run; the store says so.

    Raises:
        WsiFlError: when the check of exactly this generator was not passed.
        UsageError: when the name is taken by anything that is not synthetic.
    """
    began = time.perf_counter()
    name = name or f"{site}-synthetic"
    target = _target(name, n_per_class, seed)
    ddpm = _of_ddpm(study, site, generator)
    if ddpm:
        from wsi_fl.stages.synthesis.sample_ddpm import (
            ddpm_provenance,
            write_drawn,
        )  # diffusers takes seconds to import

        document, made_by = ddpm_provenance(study, site, seed)
    else:
        folder, document = trained_folder(study, site)
        made_by = provenance(folder, document) | {"seed": seed}
    if made_by["check"] != "passed" and not despite_failed_check:
        raise WsiFlError(
            f"site {site}: no shareable set is written, the check of this generator was {outcome(made_by)}. "
            "--despite-failed-check writes it all the same"
        )
    source = study.site(site)
    if as_site and source.real and not source.allows("generator"):
        raise UsageError(
            f"sites/{site}.toml is a real hospital: a site made of its generator would let others use it; "
            'allow = ["generator"] there lets it'
        )
    _refuse_taken(study, name, as_site)
    meta = _meta(name, document, made_by)
    with locked(study.store(name).parent, name):
        if ddpm:
            table = write_drawn(study, meta, site, n_per_class, made_by)
        else:
            gan = folder.load_generator(made_by["phase"], device_of_rank())
            table = _write(study, meta, gan, n_per_class, made_by)
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


def _of_ddpm(study: Study, site: str, generator: str | None) -> bool:
    if generator not in {None, "gan", "ddpm"}:
        raise UsageError(f"--generator {generator!r}: use gan or ddpm")
    if generator is None:
        name = study.site(site).name
        return study.denoiser(name).exists() and not study.generator(name).exists()
    return generator == "ddpm"


def _meta(name: str, document: dict[str, Any], made_by: dict[str, Any]) -> StoreMeta:
    real, resolution = document["store"], document["settings"]["shape"]["resolution"]
    spec = reduced_spec(real["size_px"], real["mpp"], resolution)
    return StoreMeta(name, tuple(real["classes"]), spec, json.dumps(made_by, sort_keys=True))


def _target(name: str, n_per_class: int, seed: int) -> SiteFile:
    if n_per_class < 1:
        raise UsageError("--n-per-class must be at least 1")
    if seed < 0:
        raise UsageError("--seed must be at least 0")
    return validated(SiteFile, {"name": name, "real": False}, f"--name {name!r}")


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
    images = sampled(generator, labels, seed=made_by["seed"], truncation=made_by["truncation"])
    chunks = as_pixels(torch.split(images, _CHUNK))
    return write_synthetic(study.store(meta.site), meta, labels, chunks, images.shape[1])


def print_sampled(document: dict[str, Any]) -> None:
    """What was written, and what it is worth."""
    generator = document["generator"]
    say(f"{document['patches']} synthetic patches: {document['store']}")
    if generator["check"] != "passed":
        say(f"  written although its check was {outcome(generator)}", "red")
    say("  a check is evidence, not differential privacy: nothing bounds what a patch may reveal", "yellow")
