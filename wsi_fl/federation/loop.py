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
from wsi_fl.federation.exchange import exchange, pass_buffers
from wsi_fl.federation.message import BUFFERS, FAREWELL, WELCOME
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum
from wsi_fl.federation.roster import (
    Answer,
    Arrival,
    Roster,
    Standing,
    State,
    first_round,
    roster_of,
    stands,
)
from wsi_fl.federation.scoring import chosen, evaluated, heeded
from wsi_fl.federation.site import (
    Schedule,
    Site,
    checkpoint,
    reissued,
    relayed,
    release,
    release_buffer,
    released_buffer,
    restore,
)
from wsi_fl.federation.topology import Matrix, handover, over, receivers, welcome
from wsi_fl.learning.examples import batches
from wsi_fl.learning.local import Batch, mean_losses
from wsi_fl.privacy.dpsgd import entropy_generator, seed_from_entropy
from wsi_fl.privacy.plan import Mode, PrivacyPlan, require_planned
from wsi_fl.privacy.release import Release
from wsi_fl.types import WsiFlError

Report = Callable[[dict[str, Any]], None]
"""Told {"site", "round", "step", "steps"} while training and {"site", "round", "done": metrics} after a round."""


def run(sites: list[Site], method: Method, schedule: Schedule, comm: Comm, report: Report) -> None:
    """Runs all rounds, from the last checkpoint that every site has.

    Args:
        sites: those of `comm.sites`, in that order.

    Raises:
        WsiFlError: a peer or a disk failed; what was finished stays and can be resumed.
    """
    firsts = _first_rounds(sites, method, schedule, comm)
    for site in sites:
        _begin(site, method, firsts[site.index])
    for round_ in range(min(firsts.values()), schedule.rounds + 1):
        acting = [site for site in sites if round_ >= firsts[site.index]]
        before = {index: replace(tally) for index, tally in comm.traffic.items()}
        roster = _roll_call(acting, method, comm, round_, firsts)
        roster, hosts = _regroup(acting, method, comm, roster, round_, firsts)
        releases: dict[int, Release | None] = {}
        for site in acting:
            if round_ not in site.folder.checkpoints():
                carrying = bool(_carriers(method, comm, round_, range(comm.n_sites)))
                releases[site.index] = _trained(site, method, schedule, round_, report, carrying=carrying)
                continue
            if round_ != firsts[site.index]:  # there it was restored before the roll call
                restore(site, round_)
            again = relayed if site.index in hosts else reissued
            releases[site.index] = again(site, method, round_)
        if method.travels is not None:
            _communicate(acting, method, schedule, comm, roster, releases, round_=round_)
        for matrix in _carriers(method, comm, round_, roster.present):
            buffers = {k.index: released_buffer(k, round_) for k in acting if receivers(matrix, k.index)}
            pass_buffers(acting, comm, matrix, buffers, round_=round_, hop=BUFFERS)
        for site in acting:
            tally = comm.traffic[site.index].since(before[site.index])
            _log_round(site, method, schedule, tally, round_=round_, report=report)
    for site in sites:
        for role, learner in site.learners.items():
            site.folder.save_model(role, learner.model.state_dict())
        last = {"site": site.name, "round": schedule.rounds, "step": 1, "steps": 1}
        if (choice := chosen(site, method, schedule, partial(report, last))) is not None:
            site.folder.remember_choice(choice)


def _first_rounds(sites: list[Site], method: Method, schedule: Schedule, comm: Comm) -> dict[int, int]:
    """1, or the last round for which every site has a checkpoint, for each of `sites`.

    A site that comes back does not take the others further back than they stand, and one that nobody waits
    for goes on from its own.
    """
    if not method.talks:
        firsts = {site.index: max(site.folder.checkpoints(), default=1) for site in sites}
    else:
        mine: list[Standing] = [
            {"kept": site.folder.checkpoints(), "returning": site.returning} for site in sites
        ]
        firsts = dict.fromkeys((site.index for site in sites), first_round(comm.gather(mine, Standing)))
    for site in sites:
        kept, first = site.folder.checkpoints(), firsts[site.index]
        last = max(kept, default=0)
        if not stands(kept, first) and (last > first or not site.returning):
            raise WsiFlError(f"{site.folder.path}: no checkpoint of round {first}, where the others stand")
        sent = min(site.ledger.last_sent(), schedule.rounds)  # mpcpa sends its models after the last round
        ahead = site.ledger.last_round() > last + 1 and not site.returning  # it has missed rounds
        if ahead or sent > last:
            raise WsiFlError(
                f"{site.folder.path}: the ledger knows later rounds than its checkpoints; start a new run"
            )
    return firsts


def _begin(site: Site, method: Method, first: int) -> None:
    """The site as it enters round `first`."""
    site.folder.forget_rounds_from(first)
    kept = site.folder.checkpoints()
    if first in kept:
        restore(site, first)
    elif site.returning and first > 1:
        if kept:
            restore(site, max(kept))
        site.settle(active=False)
        site.returning = True  # the checkpoint is of a time before
    else:  # it starts like everybody
        site.returning = False
        if method.travels is not None:
            site.push = PushSum(site.traveller(method).vector(), 1.0)


def _roll_call(
    sites: list[Site], method: Method, comm: Comm, round_: int, firsts: Mapping[int, int]
) -> Roster:
    """Who takes part. Nobody runs ahead of it, since others may still need the checkpoints of the last round."""
    mine: list[Answer] = []
    for site in sites:
        later = [r for r in site.folder.checkpoints() if r > firsts[site.index]]
        ahead = any(r >= round_ for r in later)
        mine.append({"state": _state(site, round_, round_ in later), "ahead": ahead})
    if method.talks:
        return roster_of(comm.running, comm.gather(mine, Answer))
    return roster_of([site.index for site in sites], mine)


def _state(site: Site, round_: int, decided: bool) -> State:
    """A site whose next round would cross its budget leaves the graph for good.

    Args:
        decided: whether the round's checkpoint, written before a restart, is still to be restored.
    """
    if decided:
        took_part = site.folder.load_checkpoint(round_)[1]["active"]
        return ("staying" if took_part else "leaving") if site.active else "away"
    if site.returning and round_ in site.folder.checkpoints():  # it waited in this round before the restart
        return "away"
    if not (site.active or site.returning):
        return "away"
    paid = round_ in site.folder.checkpoints()
    if site.plan is not None and not paid and not site.ledger.affords(round_, site.plan):
        site.returning = False
        return "leaving" if site.active else "away"
    return "returning" if site.returning else "staying"


def _regroup(
    sites: list[Site], method: Method, comm: Comm, roster: Roster, round_: int, firsts: Mapping[int, int]
) -> tuple[Roster, set[int]]:
    """Who leaves hands its mass to the next site; who returns is given a share by one, a host.

    Returns the roster of those who can take part now, and the hosts.
    """
    here = {site.index: site for site in sites}
    hosts: set[int] = set()
    if method.travels is not None and roster.leaving and roster.staying and round_ > 1:
        matrix = handover(comm.n_sites, roster.leaving, roster.staying)
        relays = {i: relayed(here[i], method, round_ - 1) for i in roster.leaving if i in here}
        exchange(sites, method, comm, matrix, relays, round_=round_ - 1, hop=FAREWELL)
    for index in roster.leaving:
        if index in here:
            here[index].settle(active=False)
            here[index].folder.log(
                f"round {round_}: left the graph, its max_epsilon does not allow the round"
            )
    if method.travels is not None and roster.returning:
        roster, hosts = _welcomed(sites, method, comm, roster, round_, firsts)
    elif roster.returning:  # there is no mass to share
        for index in roster.returning:
            if index in here:
                _back(here[index], round_)
    if roster.leaving or roster.returning:
        _load(sites, method)
    return roster, hosts


def _welcomed(
    sites: list[Site], method: Method, comm: Comm, roster: Roster, round_: int, firsts: Mapping[int, int]
) -> tuple[Roster, set[int]]:
    """The roster with those who got a share, and who gave it."""
    here = {site.index: site for site in sites}
    matrix = welcome(comm.n_sites, roster.returning, roster.staying)
    hosts = {i for i in roster.staying if receivers(matrix, i)}
    latest = round_ if round_ == firsts[sites[0].index] else round_ - 1
    relays = {i: relayed(here[i], method, latest) for i in hosts if i in here}
    exchange(sites, method, comm, matrix, relays, round_=latest, hop=WELCOME, back=roster.returning)
    for site in sites:
        if site.returning and site.push is not None and site.push.w > 0:
            _back(site, round_)
    mine: list[Arrival] = [{"active": site.active} for site in sites]
    told = dict(zip(comm.running, comm.gather(mine, Arrival), strict=True))
    return replace(roster, returning=tuple(k for k in roster.returning if told[k]["active"])), hosts


def _back(site: Site, round_: int) -> None:
    site.returning = False
    site.settle(active=True)
    site.folder.log(f"round {round_}: back again")


def _carriers(method: Method, comm: Comm, round_: int, present: Sequence[int]) -> list[Matrix]:
    """The hops of buffers in a round, among the sites present; there is room for one."""
    return (
        over(method.carries, comm.n_sites, present, round_ - 1, room=1) if method.carries is not None else []
    )


def _load(sites: list[Site], method: Method, *, reset_optimizer: bool = False) -> None:
    """Puts the de-biased mixture into the model that travels (line 11)."""
    for site in sites:
        if site.push is not None and site.active:
            learner = site.traveller(method)
            learner.load_vector(site.push.z)
            if reset_optimizer:
                learner.optimizer.state.clear()


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
    """All hops of the round's graph over those who are present."""
    held = {site.index: site.push for site in sites}
    graph = schedule.graph or method.exchange
    for hop, matrix in enumerate(over(graph, comm.n_sites, roster.present, round_ - 1, schedule.self_weight)):
        if hop > 0:
            passing = [site for site in sites if receivers(matrix, site.index)]
            releases = {site.index: relayed(site, method, round_) for site in passing}
        exchange(sites, method, comm, matrix, releases, round_=round_, hop=hop, back=roster.returning)
    for site in sites:
        if site.push is not None and site.push.w <= 0:  # all it was sent was rejected
            site.push = held[site.index]
    _load(sites, method, reset_optimizer=schedule.reset_optimizer)


def _trained(
    site: Site, method: Method, schedule: Schedule, round_: int, report: Report, *, carrying: bool
) -> Release | None:
    """One round of local training, checkpointed; what it releases is on record before it can leave.

    From its checkpoint on a round under differential privacy is final, also where nothing leaves the site.
    """
    began = time.perf_counter()
    site.losses, site.listened = {}, {}
    if site.active or schedule.train_after_leaving:
        before = {role: k.vector() for role, k in site.learners.items() if role != method.travels}
        site.losses = _train_round(site, method, schedule, round_, report)
        _freeze_diverged(site, before, round_)
    for role, learner in site.learners.items():
        if not np.isfinite(learner.vector()).all():
            raise WsiFlError(
                f"site {site.name}: its {role} model is not finite in round {round_}; lower train.lr"
            )
    released = release(site, method, round_)
    if carrying := carrying and site.active:
        release_buffer(site, round_)
    checkpoint(site, round_)
    made = [site.own] if site.active and (released is not None or site.plan is not None) else []
    if carrying and site.leaving is not None:
        made.append(site.leaving.digest)
    if made:
        site.ledger.sending(round_, *made)
    site.seconds = time.perf_counter() - began
    return released


def _freeze_diverged(site: Site, before: Mapping[str, NDArray[np.float32]], round_: int) -> None:
    """Puts a model that stays at home back to what it was where it is no longer finite; the others hear nothing of it.

    Whether it diverged depends on records that no ε covers, so the round goes on as if nothing had happened.
    """
    if "proxy" not in site.learners:  # nothing else would go on
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
    """Return whether a weight is not finite or, which comes before, has no square that is."""
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.isfinite(np.square(vector)).all()


def _train_round(
    site: Site, method: Method, schedule: Schedule, round_: int, report: Report
) -> dict[str, float | None]:
    """Lines 2–5 of Algorithm 1. Poisson batches wherever a learner is under differential privacy.

    There the augmentation is secret too: a sequence that others know would tie every record to the number of
    records before it in the batch, and ε holds only where one record changes one gradient.
    """
    seed = _seed(schedule.seed, site.index, round_)
    lesson = method.learns(site.material())
    if lesson is None or all(learner.frozen for learner in site.learners.values()):
        return {}
    insecure = schedule.insecure_seed
    fixed = None if insecure is None else _seed(insecure, site.index, round_)
    noise = entropy_generator(site.device, fixed)
    sampler = entropy_generator("cpu", seed if site.plan is None else fixed)
    if site.plan is None:
        rows = lesson.rows(schedule.batch_size, schedule.epochs_per_round, sampler=sampler)
    else:
        seed = int(torch.randint(2**62, (), generator=sampler))
        rows = lesson.rows_of(site.plan, sampler)
        _require_planned(site, site.plan, schedule, lesson.units.n, len(rows))
    alive = partial(report, {"site": site.name, "round": round_, "step": 0, "steps": len(rows)})
    weights, site.listened = heeded(site, method, schedule, alive)
    augment = schedule.make_augment(seed)
    images = batches(lesson.examples(), iter(rows), augment=augment, device=site.device, stain_seed=seed)
    drawn = lesson.units.labelled(images, rows, site.device)
    with torch.random.fork_rng(devices=[site.device] if site.device.type == "cuda" else []):
        if site.plan is None:
            torch.manual_seed(seed)
        else:
            seed_from_entropy(site.device, None if insecure is None else seed)

        def step(number: int, batch: Batch) -> dict[str, float]:
            report({"site": site.name, "round": round_, "step": number, "steps": len(rows)})
            return method.step(site.learners, batch, weights, noise)

        return mean_losses(step(number, batch) for number, batch in enumerate(drawn))


def _require_planned(site: Site, plan: PrivacyPlan, schedule: Schedule, n: int, steps: int) -> None:
    """Refuses a round whose steps would not be those that the ledger is told of."""
    mode: Mode = "paper" if schedule.weights.beta else "strict"
    for learner in site.learners.values():
        if learner.trainer is not None:
            delta = site.ledger.terms.delta
            require_planned(plan, learner.trainer, n=n, steps=steps, delta=delta, mode=mode)


def _log_round(
    site: Site, method: Method, schedule: Schedule, traffic: Traffic, *, round_: int, report: Report
) -> None:
    """Evaluates and writes the round's line."""
    line: dict[str, Any] = {
        "round": round_,
        "seconds": round(site.seconds, 3),
        "loss": site.losses,
        "epsilon": site.ledger.epsilon(),
        "takes_part": site.active,
    }
    line |= site.listened
    if site.rejected:
        line["rejected"], site.rejected = site.rejected, []
    alive = partial(report, {"site": site.name, "round": round_, "step": 1, "steps": 1})
    if round_ % schedule.eval_every == 0 or round_ == schedule.rounds:
        line |= evaluated(site, method, schedule, alive)
    line |= {
        "messages": traffic.messages,
        "bytes": traffic.bytes,
        "communication_seconds": round(traffic.seconds, 4),
    }
    site.folder.log_round(line)
    report({"site": site.name, "round": round_, "done": line})


def _seed(*parts: int) -> int:
    """One seed for (study seed, site, round), unrelated to its neighbours'."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
