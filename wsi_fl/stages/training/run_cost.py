"""Dry run: preflight, ε, memory and time of a run, before anything is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

import numpy as np
import torch

from wsi_fl.data.cohort import IN_MEMORY_BYTES
from wsi_fl.federation import preflight
from wsi_fl.federation.site_state import Site
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.gradients import trainable_parameters
from wsi_fl.privacy.guarantee import reportable_max_tpr
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.report.formatting import describe_worst_detection
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher, print_message
from wsi_fl.stages.site.privacy_account import (
    Group,
    compute_group,
    describe_group,
    describe_spending,
    is_above_budget,
    list_mechanisms,
)
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.build_sites import build_site
from wsi_fl.stages.training.checks import check_budgets, check_run, report_doubts
from wsi_fl.stages.training.site_preflight import build_preflight
from wsi_fl.stages.training.step_timing import StepTime, batch_size_of, time_steps
from wsi_fl.study.folder import Study
from wsi_fl.system.machine import is_busy, peak_bytes
from wsi_fl.types import Images

_MIN_UNITS_EPSILON = 600.0
"""Units of a site, times ε, from which on rounds of linear heads gained more than one-shot (studies/ROUNDS.md)."""
_RARE_SHARE, _MANY_UNITS = 0.5, 1000
"""A class is rare below this part of an equal share; from this number of units on local heads are good already."""


class _SiteCost(TypedDict):
    """Cost of a run for a site; a real one's rows are counted before the held-out draw, and n_validation is None.

    Attributes:
        timed_units: units of the timed step where `seconds` is an estimate from a part of a batch; None for whole ones.
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
    timed_units: int | None
    parameters: int
    trained_parameters: int
    expected: str | None
    gpu_bytes: int | None
    affordable_rounds: int


class _RunCost(TypedDict):
    """Cost of a run, in total and for each site with labels."""

    method: str
    pipeline: str
    rounds: int
    examples: str
    inference_sites: list[str]
    seconds: float
    memory_bytes: int
    sites: list[_SiteCost]


def dry_run(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> _RunCost:
    """Return the cost of a run after a preflight: ε of each site, memory and time from a few timed steps.

    Steps are timed for half a minute; where they take longer, from steps on a part of a batch.
    """
    name = study.pipeline_name(pipeline_name)
    pipeline = study.load_pipeline(name, overrides)
    with (
        TemporaryDirectory() as folder,  # sites log remarks in their run
        replace(
            RunContext.create(study, pipeline, method, RunFolder(Path(folder) / "dry-run")), in_memory_bytes=0
        ) as context,
    ):
        check_run(context, backend, is_preview=True)
        report_doubts(context)
        assembled = [build_site(context, index) for index in context.running_locally]
        documents = [build_preflight(site, context) for site in assembled]
        preflight.compare_sites(documents)
        limits, rounds = ({site.name: site.max_epsilon for site in context.sites}, context.pipeline.train.rounds)
        if warning := check_budgets(documents, limits, rounds):
            print_message(f"  {warning}", "yellow")
        paying = [site for site in assembled if site.name not in context.receivers]
        affordable = {document["site"]: document["affordable"] for document in documents}
        times = time_steps(paying, context, watcher or SilentProgress())
        if is_busy():
            print_message("  this machine is busy: times are longer than on idle cores", style="yellow")
        rows = [_measure_cost(site, context, affordable[site.name], times[site.name]) for site in paying]
        kept_bytes = sum(map(_count_kept_bytes, assembled))
    seconds = [row["seconds"] for row in rows]
    return {
        "method": method,
        "pipeline": name,
        "rounds": rounds,
        "examples": context.kind.plural,
        "inference_sites": [site.name for site in assembled if site.name in context.receivers],
        # on CPUs the sites share the cores; on GPUs each has its own
        "seconds": sum(seconds) if all(site.device.type == "cpu" for site in paying) else max(seconds),
        "memory_bytes": peak_bytes() + sum(step.n_bytes for step in times.values()) + kept_bytes,
        "sites": rows,
    }


def _count_kept_bytes(site: Site) -> int:
    """Return the bytes of a site's own examples that training keeps in memory, and a dry run does not."""
    parts = [part for part in (site.train, site.validation, site.tests.get("own")) if part is not None]
    return sum(n_bytes for part in parts if (n_bytes := part.count_bytes()) <= IN_MEMORY_BYTES)


def _measure_cost(site: Site, context: RunContext, affordable: int, step: StepTime) -> _SiteCost:
    """Return a site's cost: ε of the plan, and time of all rounds from that of a step."""
    pipeline, batch_size = context.pipeline, batch_size_of(site, context)
    steps = site.plan.steps if site.plan else -(-site.units.n // batch_size) * pipeline.train.epochs_per_round
    terms, models = site.ledger.terms, [learner.model for learner in site.learners.values()]
    cost = list_mechanisms(site, pipeline.train.rounds) if pipeline.privacy.has_noise else []
    return {
        "site": site.name,
        "n_train": len(context.open_data(site.name).list_eligible().patient if terms.lifetime else site.train),
        "n_units": site.units.n,
        "canaries": site.n_canaries,
        "n_validation": None if terms.lifetime else len(site.validation) if site.validation else 0,
        "epsilon": epsilon(cost, terms.delta) if cost else None,
        "max_tpr_at_fpr_1pct": reportable_max_tpr(terms.guarantee, cost),
        "group": compute_group(site, cost),
        "max_epsilon": terms.max_epsilon,
        "delta": terms.delta,
        "guarantee": terms.guarantee,
        "unit": terms.unit,
        "batch_size": batch_size,
        "sigma": site.plan.sigma if site.plan else None,
        "seconds": step.seconds * steps * pipeline.train.rounds,
        "timed_units": step.timed_units,
        "parameters": sum(p.numel() for model in models for p in model.parameters()),
        "trained_parameters": sum(p.numel() for model in models for p in trainable_parameters(model)),
        "expected": _estimate_gain(site, context, cost),
        "gpu_bytes": torch.cuda.max_memory_allocated(site.device) if site.device.type == "cuda" else None,
        "affordable_rounds": affordable,
    }


def _estimate_gain(site: Site, context: RunContext, cost: list[Mechanism]) -> str | None:
    """Return the expected gain of heads on features, for two classes with differential privacy, as in the study."""
    data = context.open_data(site.name)
    if not cost or isinstance(data.shape, Images) or site.train.task.kind != "classes" or len(data.classes) != 2:
        return None
    counts = np.bincount(site.train.label, minlength=len(data.classes))
    rarest = float(counts.min() * len(counts) / counts.sum())
    return describe_gain(site.units.n, epsilon(cost, site.ledger.terms.delta), rarest)


def describe_gain(n: int, target_epsilon: float, rarest: float) -> str:
    """Return the gain of such a site in the study of linear heads on frozen features (studies/ROUNDS.md).

    Args:
        n: training rows, or patients, of the site.
        rarest: the share of its rarest class, times the number of classes: 1 where all are as frequent.

    Example:
        >>> describe_gain(250, 3.0, rarest=0.2)
        '0.01 to 0.07 above local, by rounds (fedavg, proxyfl) rather than oneshot'
    """
    is_small = n < _MANY_UNITS
    if rarest == 0:
        gain = "0.2 or more above local where others have its missing class"
    elif rarest < _RARE_SHARE:
        gain = f"{'0.01 to 0.07' if is_small else '0 to 0.03'} above local"
    else:
        gain = f"0 to {'0.03' if is_small else '0.02'} above local"
    options = ["rounds (fedavg, proxyfl)", "oneshot"]
    better, other = options if n * target_epsilon >= _MIN_UNITS_EPSILON else reversed(options)
    return f"{gain}, by {better} rather than {other}"


def plan_lines(document: _RunCost) -> Lines:
    for row in document["sites"]:
        validation_note = f" and {row['n_validation']} validation" if row["n_validation"] else ""
        n_patients = row["n_units"] - row["canaries"]
        patients_note = f" of {n_patients} training patients" if n_patients != row["n_train"] else ""
        canaries_note = f" and {row['canaries']} canaries" if row["canaries"] else ""
        trained_note = f" ({row['trained_parameters']} trained)"
        yield TextLine(
            f"  {row['site']}: {row['n_train']} training{validation_note} {document['examples']}{patients_note}"
            f"{canaries_note}, {describe_spending(row)}, {row['parameters'] / 1e6:.2f} M parameters"
            f"{trained_note if row['trained_parameters'] < row['parameters'] else ''}"
        )
        if row["expected"] is not None:
            yield TextLine(f"    of heads on features, gain in our study: {row['expected']} (studies/ROUNDS.md)")
        if row["group"] is not None:
            is_above = is_above_budget(row["group"], row["max_epsilon"])
            text = f", which is above its max_epsilon = {row['max_epsilon']:g}" if is_above else ""
            yield TextLine(f"    {describe_group(row['group'])}{text}", "yellow" if is_above else "")
    if detection_line := describe_worst_detection(document["sites"]):
        yield TextLine(f"  {detection_line}")
    seconds, gigabytes = document["seconds"], document["memory_bytes"] / 1e9
    text = f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
    estimate = _describe_timing(document["sites"])
    yield TextLine(
        f"all sites fit together; {document['rounds']} rounds of {document['method']} take about {text} and "
        f"{'at least ' if estimate else ''}{gigabytes:.1f} GB of memory, start and evaluation left out{estimate}"
    )


def _describe_timing(rows: Sequence[_SiteCost]) -> str:
    """Describe that times are estimates from a part of a batch; "" where whole steps were timed."""
    parts = [(row["timed_units"], row["batch_size"], row["unit"]) for row in rows if row["timed_units"] is not None]
    return "; estimated from a step on {} of {} {}s".format(*min(parts)) if parts else ""
