"""What a plan costs, before anything is spent: the preflight, ε, memory and time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from wsi_fl.federation import preflight
from wsi_fl.federation.site import Site
from wsi_fl.learning.examples import batches
from wsi_fl.learning.local import supervised_step
from wsi_fl.learning.validation import LONE
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.gradients import trained
from wsi_fl.privacy.guarantee import detection_of
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.report.words import detected_of
from wsi_fl.stages.site.account import Group, above_budget, group_of, group_words, planned, spent_words
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.checks import check, check_budgets, tell_doubts
from wsi_fl.stages.training.workshop import brought, build_site, schedule_of
from wsi_fl.stages.work.console import Line, Lines, say
from wsi_fl.study.folder import Study
from wsi_fl.system.machine import peak_bytes
from wsi_fl.types import Images

_TIMED_STEPS = 3
_ROUNDS_FROM = 600.0
"""Units of a site, times ε, from which on rounds of linear heads brought more than one letter (studies/ROUNDS.md)."""
_RARE, _MANY = 0.5, 1000
"""A class is rare below that part of an equal share; from so many units on a head alone is good already."""


class _Cost(TypedDict):
    """What a plan costs one site; of a real one rows are counted before any are held out, and how many these are is
    None.
    """

    site: str
    n_train: int
    n_units: int
    canaries: int
    n_validation: int | None
    epsilon: float | None
    max_tpr_at_fpr_1pct: float | None
    group: Group | None
    max_epsilon: float | None
    delta: float
    guarantee: Guarantee
    unit: str
    batch_size: int
    sigma: float | None
    seconds: float
    parameters: int
    trained_parameters: int
    expected: str | None
    gpu_bytes: int | None
    affordable_rounds: int


class _Plan(TypedDict):
    """What a plan costs all sites together, and each of those that pay."""

    method: str
    pipeline: str
    rounds: int
    examples: str
    inference_sites: list[str]
    seconds: float
    memory_bytes: int
    sites: list[_Cost]


def dry_run(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
) -> _Plan:
    """The preflight, and what the plan costs: ε of every site, memory and time from a few timed steps."""
    name = study.pipeline_name(pipeline_name)
    with RunContext.of(study, study.pipeline(name, overrides), method) as party:
        check(party, backend)
        tell_doubts(party)
        assembled = [build_site(party, index) for index in party.running_here]
        documents = [brought(site, party) for site in assembled]
        preflight.compare(documents)
        limits, rounds = {site.name: site.max_epsilon for site in party.sites}, party.pipeline.train.rounds
        if warning := check_budgets(documents, limits, rounds):
            say(f"  {warning}", "yellow")
        paying = [site for site in assembled if site.name not in party.receivers]
        affordable = {document["site"]: document["affordable"] for document in documents}
        rows = [_cost(site, party, affordable[site.name]) for site in paying]
    seconds = [row["seconds"] for row in rows]
    return {
        "method": method,
        "pipeline": name,
        "rounds": rounds,
        "examples": party.examples,
        "inference_sites": [site.name for site in assembled if site.name in party.receivers],
        # on CPUs the sites share the cores; on GPUs each has its own
        "seconds": sum(seconds) if all(site.device.type == "cpu" for site in paying) else max(seconds),
        "memory_bytes": peak_bytes(),
        "sites": rows,
    }


def _cost(site: Site, party: RunContext, affordable: int) -> _Cost:
    """ε of the plan, and the time of all rounds from a few steps on throw-away models."""
    pipeline = party.pipeline
    batch_size = site.plan.batch_size if site.plan else pipeline.train.batch_size
    units = np.unique(site.units.of_row)[:batch_size]
    stream = CipherStream.fresh()
    rows = [site.units.rows(units, stream)] * (_TIMED_STEPS + 1)
    schedule = schedule_of(party)
    drawn = batches(
        site.learned(), iter(rows), augment=schedule.make_augment(stream), device=site.device, draws=stream
    )
    began = 0.0
    for number, batch in enumerate(site.units.labelled(drawn, rows, site.device)):
        if number == 1:  # the first step warms up
            began = time.perf_counter()
        party.method.step(site.learners, batch, schedule.weights, stream)
        if lone := site.learners.get(LONE):
            supervised_step(lone, batch, stream)
    per_step = (time.perf_counter() - began) / _TIMED_STEPS
    steps = site.plan.steps if site.plan else -(-site.units.n // batch_size) * pipeline.train.epochs_per_round
    terms, models = site.ledger.terms, [learner.model for learner in site.learners.values()]
    cost = planned(site, pipeline.train.rounds) if pipeline.privacy.noisy else []
    return {
        "site": site.name,
        "n_train": len(party.data(site.name).eligible().patient if terms.lifetime else site.train),
        "n_units": site.units.n,
        "canaries": site.n_canaries,
        "n_validation": None if terms.lifetime else len(site.validation) if site.validation else 0,
        "epsilon": epsilon(cost, terms.delta) if cost else None,
        "max_tpr_at_fpr_1pct": detection_of(terms.guarantee, cost),
        "group": group_of(site, cost),
        "max_epsilon": terms.max_epsilon,
        "delta": terms.delta,
        "guarantee": terms.guarantee,
        "unit": terms.unit,
        "batch_size": batch_size,
        "sigma": site.plan.sigma if site.plan else None,
        "seconds": per_step * steps * pipeline.train.rounds,
        "parameters": sum(p.numel() for model in models for p in model.parameters()),
        "trained_parameters": sum(p.numel() for model in models for p in trained(model)),
        "expected": _expected(site, party, cost),
        "gpu_bytes": torch.cuda.max_memory_allocated(site.device) if site.device.type == "cuda" else None,
        "affordable_rounds": affordable,
    }


def _expected(site: Site, party: RunContext, cost: list[Mechanism]) -> str | None:
    """Return what the study expects of heads on features, for two classes as it had, under differential privacy."""
    data = party.data(site.name)
    if (
        not cost
        or isinstance(data.shape, Images)
        or site.train.task.kind != "classes"
        or len(data.classes) != 2
    ):
        return None
    counts = np.bincount(site.train.label, minlength=len(data.classes))
    rarest = float(counts.min() * len(counts) / counts.sum())
    return expected(site.units.n, epsilon(cost, site.ledger.terms.delta), rarest)


def expected(n: int, target_epsilon: float, rarest: float) -> str:
    """Return what joining brought such a site in the study of linear heads on frozen features (studies/ROUNDS.md).

    Args:
        n: training rows, or patients, of the site.
        rarest: the share of its rarest class, times the number of classes: 1 where all are as frequent.

    Example:
        >>> expected(250, 3.0, rarest=0.2)
        '0.01 to 0.07 more than alone, by rounds (fedavg, proxyfl) rather than one letter (oneshot)'
    """
    few = n < _MANY
    if rarest == 0:
        gain = "0.2 or more above alone where others have the class that it lacks"
    elif rarest < _RARE:
        gain = f"{'0.01 to 0.07' if few else '0 to 0.03'} more than alone"
    else:
        gain = f"0 to {'0.03' if few else '0.02'} more than alone"
    ways = ["rounds (fedavg, proxyfl)", "one letter (oneshot)"]
    better, other = ways if n * target_epsilon >= _ROUNDS_FROM else reversed(ways)
    return f"{gain}, by {better} rather than {other}"


def plan_lines(document: _Plan) -> Lines:
    for row in document["sites"]:
        held = f" and {row['n_validation']} validation" if row["n_validation"] else ""
        n_patients = row["n_units"] - row["canaries"]
        of = f" of {n_patients} training patients" if n_patients != row["n_train"] else ""
        planted = f" and {row['canaries']} canaries" if row["canaries"] else ""
        part = f" ({row['trained_parameters']} trained)"
        yield Line(
            f"  {row['site']}: {row['n_train']} training{held} {document['examples']}{of}{planted}, "
            f"{spent_words(row)}, {row['parameters'] / 1e6:.2f} M parameters"
            f"{part if row['trained_parameters'] < row['parameters'] else ''}"
        )
        if row["expected"] is not None:
            yield Line(
                f"    of heads on features, in our study joining brought: {row['expected']} (studies/ROUNDS.md)"
            )
        if row["group"] is not None:
            above = above_budget(row["group"], row["max_epsilon"])
            told = f", which is above its max_epsilon = {row['max_epsilon']:g}" if above else ""
            yield Line(f"    {group_words(row['group'])}{told}", "yellow" if above else "")
    if found := detected_of(document["sites"]):
        yield Line(f"  {found}")
    seconds, gigabytes = document["seconds"], document["memory_bytes"] / 1e9
    told = f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
    yield Line(
        f"all sites fit together; {document['rounds']} rounds of {document['method']} take about {told} and "
        f"{gigabytes:.1f} GB of memory, start and evaluation left out"
    )
