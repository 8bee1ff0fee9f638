"""What a plan costs, before anything is spent: the preflight, ε, memory and time; and what is wrong with it."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wsi_fl.config import Pipeline
from wsi_fl.federation import loop, preflight
from wsi_fl.federation.methods import METHODS
from wsi_fl.learning.examples import batches
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.dpsgd import entropy_generator
from wsi_fl.runs import RunFolder
from wsi_fl.stages.console import say
from wsi_fl.stages.workshop import (
    assemble,
    brought,
    guarantee_of,
    method_named,
    open_store,
    planned,
    schedule_of,
)
from wsi_fl.study import Study
from wsi_fl.types import UsageError

_TIMED_STEPS = 3


def check(study: Study, pipeline: Pipeline, method: str, backend: str, *, stores: bool = True) -> None:
    """Everything that can be known to be wrong before anything is started.

    Args:
        stores: whether the stores of all sites are on this machine; a rank of a hospital has its own alone.
    """
    row = method_named(method)
    if backend not in {"mpi", "local"}:
        raise UsageError(f"unknown backend {backend!r}; known: mpi, local")
    sites = study.sites(pipeline)
    privacy = pipeline.privacy
    bare = not privacy.enabled or privacy.sigma == 0 or privacy.insecure_seed is not None
    for site in sites:
        if row.travels is not None and bare and not site.allows("model"):
            raise UsageError(
                f"sites/{site.name}.toml: a model without differential privacy may not leave this site; "
                'add allow = ["model"] there, or switch privacy on'
            )
    if row.pooled and (shut := [site.name for site in sites if not site.allows("patches")]):
        raise UsageError(
            f'sites/{shut[0]}.toml: {method} needs every site\'s patches; allow = ["patches"] would let them'
        )
    real = [site.name for site in sites if not site.allows("patches")]
    if backend == "local" and real and len(sites) > 1:
        raise UsageError(
            f"sites/{real[0]}.toml is a real hospital, whose store no other site's process may open; use --backend mpi"
        )
    for site in sites:
        if stores and not study.store(site.name).exists():
            open_store(study, site.name)
        if stores and site.allows("patches"):
            open_store(study, site.name).close()


def warn_of_other_patches(study: Study, pipeline: Pipeline) -> None:
    """Says when stores belong to no site, or were tiled otherwise than the pipeline would."""
    named = {site.name for site in study.sites(pipeline)}
    left = sorted(p.parent.name for p in study.root.glob("stores/*/patches.h5") if p.parent.name not in named)
    if left and pipeline.sites is None:
        say(f"  stores/{left[0]} has no site file, so this site takes no part", style="yellow")
    site = study.sites(pipeline)[0]
    if not site.allows("patches"):
        return
    with open_store(study, site.name) as store:
        spec = store.meta.spec
    tile = pipeline.tile
    if spec.mpp and (spec.size_px, spec.mpp) != (tile.size_px, tile.mpp):
        say(
            f"  the stores hold patches of {spec.size_px} px at {spec.mpp:g} µm, this pipeline would tile "
            f"{tile.size_px} px at {tile.mpp:g} µm (another --pipeline?); training uses what is in the stores",
            style="yellow",
        )


def check_budget(site: loop.Site, pipeline: Pipeline) -> None:
    """Refuses a plan that would cross the site's budget, saying how far it would get."""
    limit = site.ledger.terms.max_epsilon
    if limit is None or site.mechanism is None:
        return
    past = site.ledger.mechanisms(lifetime=site.ledger.terms.lifetime)
    rounds = pipeline.train.rounds - len(site.ledger.mechanisms())
    affordable = next(
        (
            r
            for r in range(rounds, 0, -1)
            if epsilon([*past, *[site.mechanism] * r], site.ledger.terms.delta) <= limit
        ),
        0,
    )
    if affordable < rounds:
        raise UsageError(
            f"sites/{site.name}.toml: max_epsilon = {limit:g} is enough for {affordable} of {rounds} rounds; "
            "lower train.rounds, raise privacy.sigma, or agree on a larger budget"
        )


def dry_run(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
) -> dict[str, Any]:
    """The preflight, and what the plan costs: ε of every site, memory and time from a few timed steps."""
    name = study.pipeline_name(pipeline_name)
    pipeline = study.pipeline(name, overrides)
    check(study, pipeline, method, backend)
    warn_of_other_patches(study, pipeline)
    sites = study.sites(pipeline)
    folder = RunFolder(study.runs / "dry-run")
    assembled = [assemble(study, pipeline, method, folder, index) for index in range(len(sites))]
    preflight.compare([brought(site, study, pipeline, method) for site in assembled])
    for site in assembled:
        check_budget(site, pipeline)
    rows = [_cost(site, pipeline, method) for site in assembled]
    # On CPUs the sites share the cores; on GPUs each has its own.
    shared = rows[0].pop("cpu")
    for row in rows[1:]:
        row.pop("cpu")
    seconds = [row["seconds"] for row in rows]
    return {
        "method": method,
        "pipeline": name,
        "rounds": pipeline.train.rounds,
        "seconds": sum(seconds) if shared else max(seconds),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sites": rows,
    }


def _cost(site: loop.Site, pipeline: Pipeline, method: str) -> dict[str, Any]:
    """ε of the plan, and the time of all rounds from a few steps on throw-away models."""
    rows = np.arange(min(pipeline.train.batch_size, len(site.train)))
    noise = entropy_generator(site.device)
    schedule = schedule_of(pipeline)
    drawn = batches(
        site.train, iter([rows] * (_TIMED_STEPS + 1)), augment=schedule.make_augment(0), device=site.device
    )
    began = 0.0
    for number, batch in enumerate(drawn):
        if number == 1:  # the first step warms up
            began = time.perf_counter()
        METHODS[method].step(site.learners, batch, schedule.weights, noise)
    per_step = (time.perf_counter() - began) / _TIMED_STEPS
    steps = -(-len(site.train) // pipeline.train.batch_size) * pipeline.train.epochs_per_round
    cost = planned(site, pipeline.train.rounds)
    return {
        "site": site.name,
        "n_train": len(site.train),
        "epsilon": epsilon([cost], site.ledger.terms.delta) if cost and cost.sigma > 0 else None,
        "delta": site.ledger.terms.delta,
        "guarantee": guarantee_of(METHODS[method], pipeline),
        "seconds": per_step * steps * pipeline.train.rounds,
        "parameters": sum(
            p.numel() for learner in site.learners.values() for p in learner.model.parameters()
        ),
        "gpu_bytes": torch.cuda.max_memory_allocated(site.device) if site.device.type == "cuda" else None,
        "cpu": site.device.type == "cpu",
    }


def print_plan(document: dict[str, Any]) -> None:
    for row in document["sites"]:
        spent = (
            "no differential privacy"
            if row["epsilon"] is None
            else (f"ε = {row['epsilon']:.2f} ({row['guarantee']}) at δ = {row['delta']:g}")
        )
        say(
            f"  {row['site']}: {row['n_train']} training patches, {spent}, {row['parameters'] / 1e6:.2f} M parameters"
        )
    say(
        f"all sites fit together; {document['rounds']} rounds of {document['method']} take about "
        f"{document['seconds'] / 60:.1f} min and {document['memory_bytes'] / 1e9:.1f} GB of memory, evaluation left out"
    )
