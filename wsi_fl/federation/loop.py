"""The training loop of all methods: local training → release → checkpoint → exchange → evaluate → log.

The same code runs one site per MPI rank or all sites in lockstep: it handles the sites of this process, and `Comm`
reaches the others.
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

from wsi_fl.data.batches import load_batches
from wsi_fl.data.privacy_units import TrainingSet, row_units
from wsi_fl.federation.comm import Comm, Traffic
from wsi_fl.federation.exchange import exchange_models, load_mixture, pass_buffers
from wsi_fl.federation.membership import (
    Membership,
    collect_membership,
    enter_round,
    find_first_rounds,
    update_membership,
)
from wsi_fl.federation.message import BUFFERS
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_evaluation import choose_prediction_model, evaluate_site
from wsi_fl.federation.site_state import (
    Site,
    reissue_buffer,
    reissue_model,
    relay_mixture,
    release_buffer,
    release_model,
    restore_checkpoint,
    write_checkpoint,
)
from wsi_fl.federation.topology import Matrix, list_hops, list_receivers
from wsi_fl.learning.ensemble import LOCAL
from wsi_fl.learning.local_training import Batch, mean_losses, take_supervised_step
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.privacy.privacy_plan import Mode, PrivacyPlan, require_plan
from wsi_fl.types import WsiFlError

_Report = Callable[[Mapping[str, Any]], None]
"""Called with {"site", "round", "step", "steps"} in training and {"site", "round", "done": metrics} after a round."""


def run(sites: list[Site], recipe: Recipe, comm: Comm, report: _Report) -> None:
    """Run all rounds from the last checkpoint common to all sites; `sites` are in the order of `comm.sites`.

    After a failure of a peer or disk, finished rounds remain and can be resumed.
    """
    first_rounds = find_first_rounds(sites, recipe, comm)
    for site in sites:
        enter_round(site, recipe.method, first_rounds[site.index])
    for round_ in range(min(first_rounds.values()), recipe.rounds + 1):
        active_sites = [site for site in sites if round_ >= first_rounds[site.index]]
        previous_traffic = {index: replace(tally) for index, tally in comm.traffic.items()}
        membership = collect_membership(active_sites, recipe.method, comm, round_, first_rounds)
        membership, hosts = update_membership(active_sites, recipe.method, comm, membership, round_, first_rounds)
        releases: dict[int, Release | None] = {}
        has_buffers = bool(_buffer_hops(recipe, comm, round_, range(comm.n_sites)))
        for site in active_sites:
            if not site.folder.has_checkpoint(round_):
                weight = _weigh_site(site, membership) if recipe.counts_units else None
                releases[site.index] = _train_and_record(
                    site, recipe, round_, report, sends_buffer=has_buffers, weight=weight
                )
                continue
            if round_ != first_rounds[site.index]:  # then it was restored before memberships were collected
                restore_checkpoint(site, round_)
            if recipe.colluding is None:
                resend = relay_mixture if site.index in hosts else reissue_model
                releases[site.index] = resend(site, recipe.method, round_)
        if recipe.method.mixing_role is not None:
            _exchange_round(active_sites, recipe, comm, membership, releases, round_=round_)
        for matrix in _buffer_hops(recipe, comm, round_, membership.present):
            buffers = {k.index: reissue_buffer(k, round_) for k in active_sites if list_receivers(matrix, k.index)}
            pass_buffers(active_sites, comm, matrix, buffers, round_=round_, hop=BUFFERS)
        for site in active_sites:
            tally = comm.traffic[site.index].traffic_since(previous_traffic[site.index])
            is_first_round = round_ == first_rounds[site.index]
            _log_round(site, recipe, tally, round_=round_, is_first_round=is_first_round, report=report)
    for site in sites:
        for role, learner in site.learners.items():
            site.folder.save_model(role, learner.model.state_dict())
        last = {"site": site.name, "round": recipe.rounds, "step": 1, "steps": 1}
        if (choice := choose_prediction_model(site, recipe, partial(report, last))) is not None:
            site.folder.write_document("prediction_model", choice)


_UNIT_WEIGHT = 2.0**-30
"""The weight of one unit where models weigh by units; a mean does not depend on it."""


def _weigh_site(site: Site, membership: Membership) -> float:
    """Return a site's weight n_k in the mean of a round (McMahan et al., 2017), in a unit that keeps it below 1.

    It depends on the site alone, since a release that is sent again after a restart must not depend on who is present
    then. It is 0 for a site that takes no part.
    """
    n_units: int = site.announced_units[site.index][0]
    return n_units * _UNIT_WEIGHT if site.index in membership.present else 0.0


def _buffer_hops(recipe: Recipe, comm: Comm, round_: int, present: Sequence[int]) -> list[Matrix]:
    """Return the hops of buffers in a round among the sites present, one at most."""
    share = recipe.method.find_disclosure("buffer")
    if share is None or (share.timing == "once" and round_ > 1):
        return []
    return list_hops(share.build_graph(recipe.seed), comm.n_sites, present, round_ - 1, max_hops=1)


def _exchange_round(
    sites: list[Site],
    recipe: Recipe,
    comm: Comm,
    membership: Membership,
    releases: Mapping[int, Release | None],
    *,
    round_: int,
) -> None:
    """Take all hops of the round's graph over the sites present, or aggregate their payloads securely."""
    if recipe.colluding is not None:
        recipe.method.payload.aggregate_securely(sites, comm, recipe, membership.present, round_)
        return
    previous_states = {site.index: site.push for site in sites}
    graph = recipe.graph or recipe.method.build_graph(recipe.seed)
    participation, weight = (comm.n_sites, membership.present, round_ - 1), recipe.self_weight
    for hop, matrix in enumerate(list_hops(graph, *participation, weight, listening=membership.listening)):
        if hop > 0:
            relaying_sites = [site for site in sites if list_receivers(matrix, site.index)]
            releases = {site.index: relay_mixture(site, recipe.method, round_) for site in relaying_sites}
        exchange_models(
            sites, recipe.method, comm, matrix, releases, round_=round_, hop=hop, returning=membership.returning
        )
    for site in sites:
        if site.push is not None and site.push.w <= 0:  # all messages to it were rejected
            site.push = previous_states[site.index]
    load_mixture(sites, recipe.method, n_present=len(membership.present), reset_optimizer=recipe.reset_optimizer)


def _train_and_record(
    site: Site, recipe: Recipe, round_: int, report: _Report, *, sends_buffer: bool, weight: float | None
) -> Release | None:
    start = time.perf_counter()
    previous_vectors = {
        role: k.parameter_vector() for role, k in site.learners.items() if role != recipe.method.mixing_role
    }
    site.losses = _train_round(site, recipe, round_, report)
    _freeze_diverged(site, previous_vectors, round_)
    for role, learner in site.learners.items():
        if not np.isfinite(learner.parameter_vector()).all():
            raise WsiFlError(
                f"site {site.name}: its {role} model is not finite in round {round_}; "
                "lower the learning rate (train.lr)"
            )
    released = release_model(site, recipe.method, round_, weight=weight) if recipe.colluding is None else None
    if sends_buffer := sends_buffer and site.active:
        release_buffer(site, round_)
    write_checkpoint(site, round_)
    digests = [site.release_digest] if site.active and (released is not None or site.release_digest) else []
    if sends_buffer and site.buffer_release is not None:
        digests.append(site.buffer_release.digest)
    if digests:
        site.ledger.record_transmission(round_, *digests)
    site.seconds = time.perf_counter() - start
    return released


def _freeze_diverged(site: Site, previous_vectors: Mapping[str, NDArray[np.float32]], round_: int) -> None:
    """Restore a local model that is no longer finite, without disclosure to other sites.

    Divergence depends on records that no ε covers, so the round continues.
    """
    if len(site.learners) == 1:  # no other model remains
        return
    for role, vector in previous_vectors.items():
        learner = site.learners[role]
        if _is_diverged(learner.parameter_vector()) and not _is_diverged(vector):
            learner.load_vector(vector)
            learner.optimizer.state.clear()
            site.freeze_role(role)
            site.folder.log(
                f"round {round_}: the {role} model was no longer finite and stays as it was; "
                "lower the learning rate (train.lr)"
            )


def _is_diverged(vector: NDArray[np.float32]) -> bool:
    """Return whether a weight or its square is not finite; squares overflow first."""
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.isfinite(np.square(vector)).all()


def _train_round(site: Site, recipe: Recipe, round_: int, report: _Report) -> dict[str, float | None]:
    """Train on all batches of a round (Algorithm 1, lines 2–5), and return the mean loss of each role.

    The local baseline learns from the site's rows in separate batches, without differential privacy.
    """
    learn = partial(_train_batches, site, recipe=recipe, round_=round_, report=report)
    losses: dict[str, float | None] = {}
    training_set = None if site.receives else site.training_set(recipe.method.learns_from)
    if training_set is not None and not all(k.frozen for role, k in site.learners.items() if role != LOCAL):
        losses |= learn(
            training_set,
            site.plan,
            lambda batch, noise: recipe.method.step(site.learners, batch, recipe.weights, noise),
        )
    local_learner = site.learners.get(LOCAL)
    if local_learner is not None and not (local_learner.fitted or local_learner.frozen):
        local_set = TrainingSet(site.train, row_units(len(site.train)))
        losses |= learn(
            local_set, None, lambda batch, noise: {LOCAL: take_supervised_step(local_learner, batch, noise)}
        )
    return losses


def _train_batches(
    site: Site,
    training_set: TrainingSet,
    plan: PrivacyPlan | None,
    step: Callable[[Batch, CipherStream], dict[str, float]],
    *,
    recipe: Recipe,
    round_: int,
    report: _Report,
) -> dict[str, float | None]:
    """Take a step on each batch of a training set, and return the mean losses.

    Under differential privacy batches are Poisson samples, and augmentation is secret: a known sequence would tie each
    record to the number of records before it in the batch, and ε holds only where a record changes one gradient. Each
    training set has its own streams, so that draws are independent.
    """
    seed = recipe.seed if plan is None else recipe.insecure_seed
    noise, sampler, views = (
        CipherStream.from_entropy() if seed is None else CipherStream.from_seed(seed, site.index, round_, purpose)
        for purpose in ("noise", "batches", "views")
    )
    if plan is None:
        batch_size = site.batch_size or recipe.batch_size
        rows = training_set.epoch_batches(batch_size, recipe.epochs_per_round, sampler=sampler)
    else:
        rows = training_set.private_batches(plan, sampler)
        mode: Mode = "paper" if recipe.weights.beta else "strict"
        for trainer in (learner.trainer for learner in site.learners.values() if learner.trainer is not None):
            delta = site.ledger.terms.delta
            require_plan(plan, trainer, n=training_set.units.n, steps=len(rows), delta=delta, mode=mode)
    dropout = views.randbelow(2**63)  # only local models have dropout, none with differential privacy
    augment = recipe.make_augment(views)
    images = load_batches(training_set.join_examples(), iter(rows), augment=augment, device=site.device, draws=views)
    labelled_batches = training_set.units.attach_units(images, rows, site.device)
    with torch.random.fork_rng(devices=[site.device] if site.device.type == "cuda" else []):
        torch.manual_seed(dropout)

        def take_step(number: int, batch: Batch) -> dict[str, float]:
            report({"site": site.name, "round": round_, "step": number, "steps": len(rows)})
            return step(batch, noise)

        return mean_losses(take_step(number, batch) for number, batch in enumerate(labelled_batches))


def _log_round(
    site: Site, recipe: Recipe, traffic: Traffic, *, round_: int, is_first_round: bool, report: _Report
) -> None:
    """Evaluate the site's models and write the round's line; `is_first_round`: it replaces lines from this round on."""
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
    if round_ % recipe.eval_every == 0 or round_ == recipe.rounds:
        line |= evaluate_site(site, recipe, alive)
    line |= {"messages": traffic.messages, "bytes": traffic.bytes, "communication_seconds": round(traffic.seconds, 4)}
    if is_first_round:
        site.folder.drop_rounds_from(round_)
    site.folder.log_round(line)
    report({"site": site.name, "round": round_, "done": line})
