"""Seconds of a training step at each site, for a dry run: measured within half a minute, or estimated from a part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import IN_MEMORY_BYTES
from wsi_fl.federation.site_state import Site
from wsi_fl.learning.ensemble import LOCAL
from wsi_fl.learning.local_training import take_supervised_step
from wsi_fl.models import schema_digest
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.gradients import trainable_parameters
from wsi_fl.stages.runtime.console import Watcher
from wsi_fl.stages.site.privacy_account import find_batch_size
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.build_sites import build_recipe
from wsi_fl.system.machine import peak_bytes

_TIMING_S = 30.0
"""Time for all measurements; the step at work then is finished."""
_TIMED_STEPS = 3
_FIRST_UNITS = 2
"""Units of the first steps: norms over a batch need two."""
_STEP_TENSORS = 3
"""Tensors of a trained parameter after a step, beside its value: the gradient, and two of Adam."""


class StepTime(NamedTuple):
    """The time and memory of a training step at a site.

    Attributes:
        seconds: of a step on the whole batch.
        timed_units: of the timed step, where `seconds` is an estimate from a part of a batch; None where it is not.
        n_bytes: memory of such steps beyond this process's peak.
    """

    seconds: float
    timed_units: int | None
    n_bytes: int


def batch_size_of(site: Site, context: RunContext) -> int:
    """Return the units of a batch at a site."""
    if site.plan:
        return site.plan.batch_size
    return find_batch_size(context.find_site(site.name), context.pipeline)


def time_steps(sites: Sequence[Site], context: RunContext, watcher: Watcher) -> dict[str, StepTime]:
    """Return the step time of each site; sites with the same models and batch size share one measurement.

    Steps change the models and charge nothing.
    """
    groups: dict[object, list[Site]] = {}
    for site in sites:
        schemas = {role: schema_digest(learner.model) for role, learner in site.learners.items()}
        groups.setdefault((batch_size_of(site, context), *sorted(schemas.items())), []).append(site)
    times: dict[str, StepTime] = {}
    for number, members in enumerate(groups.values()):
        steps = _SiteSteps(members[0], context)
        steps.load_examples()

        def take_step(n_units: int, steps: _SiteSteps = steps, number: int = number) -> None:
            part = "a step" if n_units == steps.n_units else f"{n_units} of {steps.n_units} units of a step"
            watcher.update(steps.site.name, number, len(groups), f"timing {part}")
            steps.take_step(n_units)

        timed = measure_step(take_step, steps.n_units, _TIMING_S / len(groups))
        for site in members:
            share = _SiteSteps(site, context).n_rows / max(1, steps.n_rows)
            n_bytes = timed.n_bytes if site is members[0] else _count_step_bytes(site)
            times[site.name] = StepTime(timed.seconds * share, timed.timed_units, n_bytes)
    return times


def measure_step(
    take_step: Callable[[int], None],
    n_units: int,
    budget_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    read_peak: Callable[[], int] = peak_bytes,
) -> StepTime:
    """Return the time of a step on n units: the mean of some steps, or within a budget that of fewer units, scaled.

    The first step is on two units, and is all where it takes the whole budget; the budget is exceeded by what the step
    at work then needs.

    Args:
        take_step: takes a step on a number of units.
        budget_s: seconds.
        clock, read_peak: return seconds, and the peak memory of this process in bytes.
    """
    start, n_first = clock(), min(_FIRST_UNITS, n_units)

    def time_one(size: int) -> float:
        begin = clock()
        take_step(size)
        return clock() - begin

    first_seconds = time_one(n_first)  # engines are selected and memory is allocated
    first_peak, n_partial = read_peak(), n_first
    if clock() - start < budget_s:
        first_seconds = time_one(n_first)
        n_partial = _fitting_units(first_seconds / max(1, n_first), budget_s - (clock() - start), n_units)
    if n_partial >= n_units:
        take_step(n_units)
        seconds = [time_one(n_units)]
        while len(seconds) < _TIMED_STEPS and clock() - start + seconds[-1] <= budget_s:
            seconds.append(time_one(n_units))
        return StepTime(sum(seconds) / len(seconds), None, 0)
    if n_partial <= n_first:
        return StepTime(first_seconds * n_units / n_first, n_first, 0)
    partial_seconds = time_one(n_partial)
    bytes_per_unit = max(0, read_peak() - first_peak) / (n_partial - n_first)
    return StepTime(partial_seconds * n_units / n_partial, n_partial, int(bytes_per_unit * (n_units - n_partial)))


def _fitting_units(unit_seconds: float, budget_s: float, n_units: int) -> int:
    """Return all units where two such steps are within the budget, else those of one step."""
    if 2 * unit_seconds * n_units <= budget_s:
        return n_units
    return min(n_units - 1, int(budget_s / unit_seconds))


def _count_step_bytes(site: Site) -> int:
    """Return the bytes of gradients and of the optimizers' state that a site's models have after a step."""
    parameters = (p for learner in site.learners.values() for p in trainable_parameters(learner.model))
    return sum(_STEP_TENSORS * p.numel() * p.element_size() for p in parameters)


class _SiteSteps:
    """Training steps at a site on its first units."""

    def __init__(self, site: Site, context: RunContext) -> None:
        self.site, self._context, self._stream = site, context, CipherStream.from_entropy()
        self._units = site.units.nonempty_units[: batch_size_of(site, context)]
        self.n_units = len(self._units)
        self._rows = site.units.draw_rows(self._units, self._stream)
        self.n_rows, self._examples = len(self._rows), site.training_examples()[self._rows]

    def load_examples(self) -> None:
        """Read the rows of all steps now, where training keeps those of the whole site in memory."""
        if self.site.train.count_bytes() <= IN_MEMORY_BYTES and self._examples.show is None:
            self._examples = self._examples.load_inputs()

    def take_step(self, n_units: int) -> None:
        """Take a step of all models on so many units."""
        site, stream, recipe = self.site, self._stream, build_recipe(self._context)
        positions = np.flatnonzero(np.isin(site.units.of_row[self._rows], self._units[:n_units]))
        augment = recipe.make_augment(stream)
        batches = load_batches(self._examples, iter([positions]), augment=augment, device=site.device, draws=stream)
        for batch in site.units.attach_units(batches, [self._rows[positions]], site.device):
            self._context.method.step(site.learners, batch, recipe.weights, stream)
            if local_learner := site.learners.get(LOCAL):
                take_supervised_step(local_learner, batch, stream)
