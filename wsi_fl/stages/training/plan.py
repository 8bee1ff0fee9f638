"""What a plan costs, before anything is spent: the preflight, ε, memory and time; and what is wrong with it."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wsi_fl.federation import preflight
from wsi_fl.federation.site import Site
from wsi_fl.federation.topology import over
from wsi_fl.learning.examples import batches
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.dpsgd import entropy_generator
from wsi_fl.stages.site.account import planned, require_budget, spends, spent_words
from wsi_fl.stages.site.data import open_data
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.site.stains import stains_of
from wsi_fl.stages.training.workshop import assemble, brought, graph_of, schedule_of
from wsi_fl.stages.work.console import say
from wsi_fl.study.folder import Study
from wsi_fl.study.site import Allowed, SiteFile
from wsi_fl.types import NoCommonPlan, UsageError

_TIMED_STEPS = 3


def check(party: Party, backend: str, *, stores: bool = True) -> None:
    """Refuse everything that can be known to be wrong before anything is started.

    Args:
        stores: whether the stores of all sites are on this machine; a rank of a hospital has its own alone.
    """
    row, pipeline, sites, method = party.method, party.pipeline, party.sites, party.name
    graph = graph_of(party) or row.exchange
    if backend not in {"mpi", "local"}:
        raise UsageError(f"unknown backend {backend!r}; known: mpi, local")
    # a graph of more hops than a round has room for is refused
    over(graph, len(sites), range(len(sites)), 0, pipeline.topology.self_weight)
    if row.bare:
        _check_bare(party)
    if pipeline.audit.canaries and (row.bare or row.generated):
        raise UsageError(
            f"audit.canaries tests what differential privacy promises, and {method} promises none; leave it out"
        )
    if stores and spends(pipeline):  # a rank of a hospital looks at its own file alone
        for site in sites:
            require_budget(site)
    if row.travels is not None and not spends(pipeline):
        _check_models_may_leave(sites)
    if row.generated:
        _check_generated(party)
    _check_stores_stay_apart(party, backend)
    if pipeline.stain.exchange:
        if party.kind.word == "slides":
            raise UsageError("stain.exchange is for patches and their features; mosaics keep their stain")
        stains_of(party.study, pipeline)
    for site in sites:
        if stores and (site.allows("patches") or not party.has_store(site.name)):
            open_data(party.study, site.name, pipeline).store.close()


def _check_stores_stay_apart(party: Party, backend: str) -> None:
    """The store of a real hospital is opened by its own process alone, unless its file allows more."""
    shut = [site.name for site in party.sites if not site.allows("patches")]
    if shut and party.method.pooled:
        raise UsageError(
            f'sites/{shut[0]}.toml: {party.name} needs every site\'s patches; allow = ["patches"] would let them'
        )
    if shut and backend == "local" and len(party.sites) > 1:
        raise UsageError(
            f"sites/{shut[0]}.toml is a real hospital, whose store no other site's process may open; use --backend mpi"
        )


def _check_models_may_leave(sites: Sequence[SiteFile]) -> None:
    """Models that leave without differential privacy are allowed by name."""
    for site in sites:
        if not site.allows("model"):
            raise UsageError(
                f"sites/{site.name}.toml: a model without differential privacy may not leave this site; "
                'add allow = ["model"] there, or switch privacy on'
            )


def _check_generated(party: Party) -> None:
    """Generators and the models that learned from their images leave without differential privacy, if at all."""
    method = party.name
    if not party.kind.of_images:
        raise UsageError(f"{method} generates images; set train.data = 'patches'")
    if party.pipeline.privacy.enabled:
        raise UsageError(f"{method} has no differential privacy and claims none; set privacy.enabled=false")
    needed: tuple[Allowed, ...] = ("generator", "model")
    for what in needed:
        if shut := [site.name for site in party.sites if not site.allows(what)]:
            raise UsageError(
                f"sites/{shut[0]}.toml: {method} lets a {what} leave this site without differential privacy; "
                'allow = ["generator", "model"] would let it'
            )


def _check_bare(party: Party) -> None:
    """What a method must be told in so many words that shares models or buffers without differential privacy."""
    pipeline, name, method, sites = party.pipeline, party.name, party.method, party.sites
    if pipeline.privacy.enabled:
        raise UsageError(
            f"{name} lets models and synthetic samples leave without differential privacy; say that you know, by "
            "--set privacy.enabled=false"
        )
    for site in sites:
        if shut := [content for content in method.leaves if content not in site.allowed]:
            wanted = ", ".join(f'"{content}"' for content in method.leaves)
            raise UsageError(
                f"sites/{site.name}.toml: a {shut[0]} without differential privacy may not leave this site; "
                f"replay.variant = {pipeline.replay.variant!r} needs allow = [{wanted}] there"
            )
    if pipeline.topology.graph is not None or pipeline.topology.self_weight:
        raise UsageError(f"{name} orders the sites anew in every round; leave [topology] out")
    if method.carries is None:
        return
    if len(sites) < 2:
        raise UsageError(f"{name} needs two sites or more: one alone has nobody to get a buffer from")
    if not party.kind.of_images or pipeline.stain.exchange:
        raise UsageError(
            "a buffer holds patches in their own stain; use train.data = 'patches' and stain.exchange = false"
        )


def warn_of_other_patches(party: Party) -> None:
    """Say when stores belong to no site, or were made otherwise than the pipeline would."""
    study, first = party.study, party.names[0]
    file = party.kind.path(study, first).name
    left = sorted(
        p.parent.name for p in study.root.glob(f"stores/*/{file}") if p.parent.name not in party.names
    )
    if left and party.pipeline.sites is None:
        say(f"  stores/{left[0]} has no site file, so this site takes no part", style="yellow")
    if not party.sites[0].allows("patches"):
        return
    with open_data(study, first, party.pipeline) as data:
        spec = data.store.meta.spec
    would = getattr(party.pipeline, party.kind.cut_by)
    if spec.mpp and (spec.size_px, spec.mpp) != (would.size_px, would.mpp):
        say(
            f"  the stores hold patches of {spec.size_px} px at {spec.mpp:g} µm, this pipeline would cut "
            f"{would.size_px} px at {would.mpp:g} µm (another --pipeline?); training uses what is in the stores",
            style="yellow",
        )


def check_budgets(
    brought: Sequence[Mapping[str, Any]], limits: Mapping[str, float | None], rounds: int
) -> str:
    """What to say of the sites whose budget ends before the plan does; empty when none does.

    Args:
        brought: the preflight documents of all sites, with "site" and "affordable" rounds.
        limits: max_epsilon of each site, as far as it is known here.

    Raises:
        NoCommonPlan: when no site can afford a single round. It names no limit that other processes do not know.
    """
    short = {one["site"]: one["affordable"] for one in brought if one["affordable"] < rounds}
    said = [_enough(name, limits.get(name), n, rounds) for name, n in short.items()]
    if len(short) == len(brought) and not any(short.values()):
        first, n = next(iter(short.items()))
        limit = limits.get(first) if len(limits) == len(brought) else None
        raise NoCommonPlan(
            f"{_enough(first, limit, n, rounds)}; lower train.rounds, raise privacy.sigma, or agree on a larger budget"
        )
    return "; ".join(said) + ("; then it leaves and the others go on" if said else "")


def _enough(site: str, limit: float | None, n: int, rounds: int) -> str:
    """For how many rounds a budget is enough; a limit that is not known is not named."""
    value = f" = {limit:g}" if limit else ""
    return f"sites/{site}.toml: max_epsilon{value} is enough for {n} of {rounds} rounds"


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
    with Party.of(study, study.pipeline(name, overrides), method) as party:
        check(party, backend)
        warn_of_other_patches(party)
        assembled = [assemble(party, index) for index in range(len(party.sites))]
        documents = [brought(site, party) for site in assembled]
        preflight.compare(documents)
        limits, rounds = {site.name: site.max_epsilon for site in party.sites}, party.pipeline.train.rounds
        if warning := check_budgets(documents, limits, rounds):
            say(f"  {warning}", "yellow")
        rows = [
            _cost(site, party) | {"affordable_rounds": document["affordable"]}
            for site, document in zip(assembled, documents, strict=True)
        ]
    # On CPUs the sites share the cores; on GPUs each has its own.
    shared = rows[0].pop("cpu")
    for row in rows[1:]:
        row.pop("cpu")
    seconds = [row["seconds"] for row in rows]
    return {
        "method": method,
        "pipeline": name,
        "rounds": rounds,
        "examples": party.kind.word,
        "seconds": sum(seconds) if shared else max(seconds),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sites": rows,
    }


def _cost(site: Site, party: Party) -> dict[str, Any]:
    """ε of the plan, and the time of all rounds from a few steps on throw-away models."""
    pipeline = party.pipeline
    batch_size = site.plan.batch_size if site.plan else pipeline.train.batch_size
    units = np.arange(min(batch_size, site.units.n))
    rows = [site.units.rows(units, entropy_generator())] * (_TIMED_STEPS + 1)
    noise = entropy_generator(site.device)
    schedule = schedule_of(party)
    drawn = batches(
        site.learned(),
        iter(rows),
        augment=schedule.make_augment(0),
        device=site.device,
        stain_seed=0,
    )
    began = 0.0
    for number, batch in enumerate(site.units.labelled(drawn, rows, site.device)):
        if number == 1:  # the first step warms up
            began = time.perf_counter()
        party.method.step(site.learners, batch, schedule.weights, noise)
    per_step = (time.perf_counter() - began) / _TIMED_STEPS
    steps = site.plan.steps if site.plan else -(-site.units.n // batch_size) * pipeline.train.epochs_per_round
    terms = site.ledger.terms
    cost = planned(site, pipeline.train.rounds) if pipeline.privacy.noisy else []
    return {
        "site": site.name,
        "n_train": len(site.train),
        "n_units": site.units.n,
        "canaries": len(site.canaries.included) if site.canaries else 0,
        "n_validation": len(site.validation) if site.validation else 0,
        "epsilon": epsilon(cost, terms.delta) if cost else None,
        "delta": terms.delta,
        "guarantee": terms.guarantee,
        "unit": terms.unit,
        "batch_size": batch_size,
        "sigma": site.plan.sigma if site.plan else None,
        "seconds": per_step * steps * pipeline.train.rounds,
        "parameters": sum(
            p.numel() for learner in site.learners.values() for p in learner.model.parameters()
        ),
        "gpu_bytes": torch.cuda.max_memory_allocated(site.device) if site.device.type == "cuda" else None,
        "cpu": site.device.type == "cpu",
    }


def print_plan(document: dict[str, Any]) -> None:
    for row in document["sites"]:
        held = f" and {row['n_validation']} validation" if row["n_validation"] else ""
        n_patients = row["n_units"] - row["canaries"]
        of = f" of {n_patients} training patients" if n_patients != row["n_train"] else ""
        planted = f" and {row['canaries']} canaries" if row["canaries"] else ""
        say(
            f"  {row['site']}: {row['n_train']} training{held} {document['examples']}{of}{planted}, "
            f"{spent_words(row)}, {row['parameters'] / 1e6:.2f} M parameters"
        )
    say(
        f"all sites fit together; {document['rounds']} rounds of {document['method']} take about "
        f"{document['seconds'] / 60:.1f} min and {document['memory_bytes'] / 1e9:.1f} GB of memory, evaluation left out"
    )
