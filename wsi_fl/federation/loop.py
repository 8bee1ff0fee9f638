"""The one loop that runs every method: local training → release → checkpoint → exchange → evaluate → log.

The same code runs one site per MPI rank or all sites in lockstep: it handles the list of sites that live in
this process, and `Comm` knows where the others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.federation.comm import Comm, Traffic
from wsi_fl.federation.exchange import exchange, load_mixture, pass_buffers
from wsi_fl.federation.message import BUFFERS
from wsi_fl.federation.methods import Method
from wsi_fl.federation.roster import Roster, begin, call_roll, find_first_rounds, regroup
from wsi_fl.federation.scoring import choose_answer, evaluate
from wsi_fl.federation.shared import share_sums
from wsi_fl.federation.site import (
    Schedule,
    Site,
    checkpoint,
    reissue,
    reissue_buffer,
    relay,
    release,
    release_buffer,
    restore,
)
from wsi_fl.federation.topology import Matrix, over, receivers
from wsi_fl.learning.examples import batches
from wsi_fl.learning.local import Batch, mean_losses, supervised_step
from wsi_fl.learning.units import TrainingSet, rows_alone
from wsi_fl.learning.validation import LONE
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.privacy.plan import Mode, PrivacyPlan, require_planned
from wsi_fl.types import WsiFlError

_Report = Callable[[dict[str, Any]], None]
"""Told {"site", "round", "step", "steps"} while training and {"site", "round", "done": metrics} after a round."""


def run(sites: list[Site], method: Method, schedule: Schedule, comm: Comm, report: _Report) -> None:
    """Run all rounds, from the last checkpoint that every site has; `sites` are those of `comm.sites`, in that order.

    What was finished stays where a peer or a disk fails, and can be resumed.
    """
    firsts = find_first_rounds(sites, method, schedule, comm)
    for site in sites:
        begin(site, method, firsts[site.index])
    for round_ in range(min(firsts.values()), schedule.rounds + 1):
        acting = [site for site in sites if round_ >= firsts[site.index]]
        before = {index: replace(tally) for index, tally in comm.traffic.items()}
        roster = call_roll(acting, method, comm, round_, firsts)
        roster, hosts = regroup(acting, method, comm, roster, round_, firsts)
        releases: dict[int, Release | None] = {}
        carrying = bool(_carriers(method, schedule, comm, round_, range(comm.n_sites)))
        for site in acting:
            if round_ not in site.folder.checkpoints():
                releases[site.index] = _train_and_record(
                    site, method, schedule, round_, report, carrying=carrying
                )
                continue
            if round_ != firsts[site.index]:  # there it was restored before the roll call
                restore(site, round_)
            if schedule.colluding is None:
                again = relay if site.index in hosts else reissue
                releases[site.index] = again(site, method, round_)
        if method.travels is not None:
            _communicate(acting, method, schedule, comm, roster, releases, round_=round_)
        for matrix in _carriers(method, schedule, comm, round_, roster.present):
            buffers = {k.index: reissue_buffer(k, round_) for k in acting if receivers(matrix, k.index)}
            pass_buffers(acting, comm, matrix, buffers, round_=round_, hop=BUFFERS)
        for site in acting:
            tally = comm.traffic[site.index].since(before[site.index])
            anew = round_ == firsts[site.index]
            _log_round(site, method, schedule, tally, round_=round_, anew=anew, report=report)
    for site in sites:
        for role, learner in site.learners.items():
            site.folder.save_model(role, learner.model.state_dict())
        last = {"site": site.name, "round": schedule.rounds, "step": 1, "steps": 1}
        if (choice := choose_answer(site, schedule, partial(report, last))) is not None:
            site.folder.keep("prediction_model", choice)


def _carriers(
    method: Method, schedule: Schedule, comm: Comm, round_: int, present: Sequence[int]
) -> list[Matrix]:
    """Return the hops of buffers in a round, among the sites present; there is room for one."""
    share = method.share("buffer")
    if share is None or (share.times == "once" and round_ > 1):
        return []
    return over(share.graph(schedule.seed), comm.n_sites, present, round_ - 1, room=1)


def _communicate(
    sites: list[Site],
    method: Method,
    schedule: Schedule,
    comm: Comm,
    roster: Roster,
    releases: Mapping[int, Release | None],
    *,
    round_: int,
) -> None:
    """Take all hops of the round's graph over the sites present, or let them make a masked sum."""
    if schedule.colluding is not None:
        share_sums(sites, method, comm, schedule, roster.present, round_=round_)
        return
    held = {site.index: site.push for site in sites}
    graph = schedule.graph or method.graph(schedule.seed)
    among, weight = (comm.n_sites, roster.present, round_ - 1), schedule.self_weight
    for hop, matrix in enumerate(over(graph, *among, weight, listening=roster.listening)):
        if hop > 0:
            passing = [site for site in sites if receivers(matrix, site.index)]
            releases = {site.index: relay(site, method, round_) for site in passing}
        exchange(sites, method, comm, matrix, releases, round_=round_, hop=hop, back=roster.returning)
    for site in sites:
        if site.push is not None and site.push.w <= 0:  # all it was sent was rejected
            site.push = held[site.index]
    load_mixture(sites, method, n_present=len(roster.present), reset_optimizer=schedule.reset_optimizer)


def _train_and_record(
    site: Site, method: Method, schedule: Schedule, round_: int, report: _Report, *, carrying: bool
) -> Release | None:
    began = time.perf_counter()
    before = {role: k.vector() for role, k in site.learners.items() if role != method.travels}
    site.losses = _train_round(site, method, schedule, round_, report)
    _freeze_diverged(site, before, round_)
    for role, learner in site.learners.items():
        if not np.isfinite(learner.vector()).all():
            raise WsiFlError(
                f"site {site.name}: its {role} model is not finite in round {round_}; lower train.lr"
            )
    released = release(site, method, round_) if schedule.colluding is None else None
    if carrying := carrying and site.active:
        release_buffer(site, round_)
    checkpoint(site, round_)
    made = [site.own] if site.active and (released is not None or site.own) else []
    if carrying and site.leaving is not None:
        made.append(site.leaving.digest)
    if made:
        site.ledger.sending(round_, *made)
    site.seconds = time.perf_counter() - began
    return released


def _freeze_diverged(site: Site, before: Mapping[str, NDArray[np.float32]], round_: int) -> None:
    """Restore a model that stays at home where it is no longer finite; tell nobody else.

    Whether it diverged depends on records that no ε covers, so the round goes on as if nothing had happened.
    """
    if len(site.learners) == 1:  # nothing else would go on
        return
    for role, vector in before.items():
        learner = site.learners[role]
        if _diverged(learner.vector()) and not _diverged(vector):
            learner.load_vector(vector)
            learner.optimizer.state.clear()
            site.freeze(role)
            site.folder.log(
                f"round {round_}: the {role} model was no longer finite and stays as it was before; lower train.lr"
            )


def _diverged(vector: NDArray[np.float32]) -> bool:
    """Return whether a weight or its square is not finite; the square overflows first."""
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.isfinite(np.square(vector)).all()


def _train_round(
    site: Site, method: Method, schedule: Schedule, round_: int, report: _Report
) -> dict[str, float | None]:
    """Train on every batch of a round (Algorithm 1, lines 2–5), and return the mean loss of each role.

    The model that the site would have alone learns from the site's rows as it would there: in batches of its own.
    """
    learn = partial(_learn, site, schedule=schedule, round_=round_, report=report)
    losses: dict[str, float | None] = {}
    lesson = None if site.receives else site.material().lesson(method.learns_from)
    if lesson is not None and not all(k.frozen for role, k in site.learners.items() if role != LONE):
        losses |= learn(
            lesson, site.plan, lambda batch, noise: method.step(site.learners, batch, schedule.weights, noise)
        )
    lone = site.learners.get(LONE)
    if lone is not None and not (lone.fitted or lone.frozen):
        own = TrainingSet(site.train, rows_alone(len(site.train)))
        losses |= learn(own, None, lambda batch, noise: {LONE: supervised_step(lone, batch, noise)})
    return losses


def _learn(
    site: Site,
    lesson: TrainingSet,
    plan: PrivacyPlan | None,
    step: Callable[[Batch, CipherStream], dict[str, float]],
    *,
    schedule: Schedule,
    round_: int,
    report: _Report,
) -> dict[str, float | None]:
    """Take a step on every batch of a lesson, and return the mean losses.

    Batches are Poisson samples wherever a learner is under differential privacy. There the
    augmentation is secret too: a sequence that others know would tie every record to the number of records before it
    in the batch, and ε holds only where one record changes one gradient. Streams of their own keep what each lesson
    draws from the others.
    """
    seed = schedule.seed if plan is None else schedule.insecure_seed
    noise, sampler, views = (
        CipherStream.fresh() if seed is None else CipherStream.seeded(seed, site.index, round_, purpose)
        for purpose in ("noise", "batches", "views")
    )
    if plan is None:
        rows = lesson.rows(schedule.batch_size, schedule.epochs_per_round, sampler=sampler)
    else:
        rows = lesson.rows_of(plan, sampler)
        mode: Mode = "paper" if schedule.weights.beta else "strict"
        for trainer in (one.trainer for one in site.learners.values() if one.trainer is not None):
            delta = site.ledger.terms.delta
            require_planned(plan, trainer, n=lesson.units.n, steps=len(rows), delta=delta, mode=mode)
    dropout = views.below(2**63)  # of a model that stays at home: none under privacy has any
    augment = schedule.make_augment(views)
    images = batches(lesson.examples(), iter(rows), augment=augment, device=site.device, draws=views)
    drawn = lesson.units.labelled(images, rows, site.device)
    with torch.random.fork_rng(devices=[site.device] if site.device.type == "cuda" else []):
        torch.manual_seed(dropout)

        def taken(number: int, batch: Batch) -> dict[str, float]:
            report({"site": site.name, "round": round_, "step": number, "steps": len(rows)})
            return step(batch, noise)

        return mean_losses(taken(number, batch) for number, batch in enumerate(drawn))


def _log_round(
    site: Site,
    method: Method,
    schedule: Schedule,
    traffic: Traffic,
    *,
    round_: int,
    anew: bool,
    report: _Report,
) -> None:
    """Evaluate the site's models and write the round's line; `anew`, it takes the place of lines of this round and
    later.
    """
    line: dict[str, Any] = {
        "round": round_,
        "seconds": round(site.seconds, 3),
        "loss": site.losses,
        "epsilon": site.ledger.epsilon(),
        "takes_part": site.active,
    }
    if site.rejected:
        line["rejected"], site.rejected = site.rejected, []
    alive = partial(report, {"site": site.name, "round": round_, "step": 1, "steps": 1})
    if round_ % schedule.eval_every == 0 or round_ == schedule.rounds:
        line |= evaluate(site, schedule, alive)
    line |= {
        "messages": traffic.messages,
        "bytes": traffic.bytes,
        "communication_seconds": round(traffic.seconds, 4),
    }
    if anew:
        site.folder.forget_rounds_from(round_)
    site.folder.log_round(line)
    report({"site": site.name, "round": round_, "done": line})
