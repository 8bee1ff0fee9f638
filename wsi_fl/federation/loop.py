"""The one loop that runs every method: local training → release → checkpoint → exchange → evaluate → log.

The same code runs one site per MPI rank or all sites in lockstep: it handles the list of sites that live in
this process, and `Comm` knows where the others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsi_fl.federation.comm import Comm, Message, Outgoing, Traffic
from wsi_fl.federation.methods import Method, Weights
from wsi_fl.federation.mixing import PushSum, mix
from wsi_fl.federation.topology import Matrix, receivers, senders
from wsi_fl.learning.examples import Augment, Examples, batches, epoch_rows
from wsi_fl.learning.local import Learners, mean_losses, probabilities
from wsi_fl.learning.metrics import scores
from wsi_fl.models import schema
from wsi_fl.privacy.accounting import Mechanism
from wsi_fl.privacy.dpsgd import entropy_generator
from wsi_fl.privacy.ledger import PrivacyLedger, Release
from wsi_fl.runs import SiteFolder
from wsi_fl.types import WsiFlError

_CONTENT = "model"
"""What leaves, as a site file's `allow` names it where it leaves without differential privacy."""

Report = Callable[[dict[str, Any]], None]
"""Told {"site", "round", "step", "steps"} while training and {"site", "round", "done": metrics} after a round."""


@dataclass(frozen=True)
class Schedule:
    """What all sites agree on.

    Attributes:
        make_augment: seed → augmentation of one image, or None.
        self_weight: P[i, i] of the exponential graph.
        insecure_seed: fixed noise, for tests alone.
    """

    rounds: int
    epochs_per_round: int
    batch_size: int
    eval_every: int
    seed: int
    weights: Weights
    self_weight: float
    make_augment: Callable[[int], Augment | None]
    insecure_seed: int | None = None


@dataclass
class Site:
    """One site that lives in this process.

    Attributes:
        tests: what its model is evaluated on: "own", and "merged" where that is allowed.
        mechanism: what one round costs, or None without differential privacy.
        push: PushSum state of the travelling parameters; None when nothing travels.
    """

    index: int
    name: str
    learners: Learners
    train: Examples
    tests: Mapping[str, Examples]
    ledger: PrivacyLedger
    folder: SiteFolder
    device: torch.device
    mechanism: Mechanism | None
    push: PushSum | None = None
    losses: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0


def run(sites: list[Site], method: Method, schedule: Schedule, comm: Comm, report: Report) -> None:
    """Runs all rounds, from the last checkpoint that every site has.

    Args:
        sites: those of `comm.sites`, in that order.

    Raises:
        WsiFlError: a budget, a peer or a disk failed; what was finished stays and can be resumed.
    """
    for site in sites:
        if method.travels is not None and site.push is None:
            site.push = PushSum(site.learners[method.travels].vector(), 1.0)
    first = _first_round(sites, method, comm)
    for site in sites:
        site.folder.forget_rounds_from(first)
    for round_ in range(first, schedule.rounds + 1):
        before = {index: replace(tally) for index, tally in comm.traffic.items()}
        releases = {site.index: _trained(site, method, schedule, round_, report) for site in sites}
        for hop, matrix in enumerate(method.exchange(comm.n_sites, round_ - 1, schedule.self_weight)):
            if hop > 0:
                releases = {site.index: _relayed(site, method, matrix, round_) for site in sites}
            _exchange(sites, method, comm, matrix, releases, round_=round_, hop=hop)
        for site in sites:
            if method.travels is not None and site.push is not None:
                site.learners[method.travels].load_vector(site.push.z)
        for site in sites:
            tally = comm.traffic[site.index].since(before[site.index])
            _log_round(site, method, schedule, tally, round_=round_, report=report)
        if method.travels is not None:
            comm.gather([round_ for _ in sites])  # nobody runs ahead of a checkpoint that others may need
    for site in sites:
        for role, learner in site.learners.items():
            site.folder.save_model(role, learner.model.state_dict())


def _first_round(sites: list[Site], method: Method, comm: Comm) -> int:
    """1, or the last round for which every site has a checkpoint; a site nobody waits for goes on from its own."""
    latest = [max(site.folder.checkpoints(), default=1) for site in sites]
    first: int = min(comm.gather(latest)) if method.travels is not None else min(latest)
    for site in sites:
        kept = site.folder.checkpoints()
        if (kept or first > 1) and first not in kept:
            raise WsiFlError(f"{site.folder.path}: no checkpoint of round {first}, where the others stand")
        latest_kept = max(kept, default=0)
        if site.ledger.last_round() > latest_kept + 1 or site.ledger.last_sent() > latest_kept:
            raise WsiFlError(
                f"{site.folder.path}: the ledger knows later rounds than its checkpoints; start a new run"
            )
    return first


def _trained(site: Site, method: Method, schedule: Schedule, round_: int, report: Report) -> Release | None:
    """The site after local training of the round: from its checkpoint if there is one, else by training."""
    began = time.perf_counter()
    if round_ in site.folder.checkpoints():
        release = _restore(site, method, round_)
    else:
        if site.mechanism is not None:
            site.ledger.check_budget(round_, site.mechanism)
        site.losses = _train_round(site, method, schedule, round_, report)
        for role, learner in site.learners.items():
            if not np.isfinite(learner.vector()).all():
                raise WsiFlError(
                    f"site {site.name}: its {role} model is not finite in round {round_}; lower train.lr"
                )
        release = _release(site, method, round_)
        _checkpoint(site, round_)
        if release is not None:
            site.ledger.sending(round_)
    site.seconds = time.perf_counter() - began
    return release


def _train_round(
    site: Site, method: Method, schedule: Schedule, round_: int, report: Report
) -> dict[str, float | None]:
    """Lines 2–5 of Algorithm 1. Poisson batches wherever a learner is under differential privacy.

    There the augmentation is secret too: a sequence that others know would tie every record to the number of
    records before it in the batch, and ε holds only where one record changes one gradient.
    """
    seed = _seed(schedule.seed, site.index, round_)
    insecure = schedule.insecure_seed
    fixed = None if insecure is None else _seed(insecure, site.index, round_)
    poisson = any(learner.private for learner in site.learners.values())
    noise = entropy_generator(site.device, fixed)
    sampler = entropy_generator("cpu", fixed if poisson else seed)
    if poisson:
        seed = int(torch.randint(2**62, (), generator=sampler))
    rows = epoch_rows(
        len(site.train), schedule.batch_size, schedule.epochs_per_round, sampler=sampler, poisson=poisson
    )
    n_steps = schedule.epochs_per_round * -(-len(site.train) // schedule.batch_size)
    drawn = batches(site.train, rows, augment=schedule.make_augment(seed), device=site.device)
    with torch.random.fork_rng(devices=[site.device] if site.device.type == "cuda" else []):
        torch.manual_seed(seed)

        def step(number: int, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
            report({"site": site.name, "round": round_, "step": number, "steps": n_steps})
            return method.step(site.learners, batch, schedule.weights, noise)

        return mean_losses(step(number, batch) for number, batch in enumerate(drawn))


def _release(site: Site, method: Method, round_: int) -> Release | None:
    """Line 7: what leaves the site, recorded in its ledger first."""
    if method.travels is None:
        if site.mechanism is not None:
            site.ledger.record(round_, site.mechanism)
        return None
    learner = site.learners[method.travels]
    assert site.push is not None
    site.push = site.push.trained(learner.vector())
    return site.ledger.release(
        round_,
        site.push.x,
        schema=schema(learner.model),
        weight=site.push.w,
        mechanism=site.mechanism,
        content=_CONTENT,
    )


def _relayed(site: Site, method: Method, matrix: Matrix, round_: int) -> Release | None:
    """What a site passes on in a further hop: the mixture it holds by now."""
    if not receivers(matrix, site.index):
        return None
    assert site.push is not None and method.travels is not None
    agreed = schema(site.learners[method.travels].model)
    return site.ledger.relay(round_, site.push.x, schema=agreed, weight=site.push.w)


def _checkpoint(site: Site, round_: int) -> None:
    """Everything needed to send the same bytes again and go on."""
    tensors = {
        f"{role}/{name}": value
        for role, learner in site.learners.items()
        for name, value in learner.state().items()
    }
    if site.push is not None:
        tensors["push/x"] = torch.from_numpy(np.array(site.push.x))
    weight = site.push.w if site.push else None
    site.folder.save_checkpoint(round_, tensors, {"round": round_, "weight": weight, "losses": site.losses})


def _restore(site: Site, method: Method, round_: int) -> Release | None:
    tensors, document = site.folder.load_checkpoint(round_)
    for role, learner in site.learners.items():
        prefix = f"{role}/"
        learner.load_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    site.losses = document["losses"]
    if method.travels is None:
        return None
    site.push = PushSum(tensors["push/x"].numpy(), float(document["weight"]))
    return site.ledger.reissue(
        round_, site.push.x, schema=schema(site.learners[method.travels].model), weight=site.push.w
    )


def _exchange(
    sites: list[Site],
    method: Method,
    comm: Comm,
    matrix: Matrix,
    releases: Mapping[int, Release | None],
    *,
    round_: int,
    hop: int,
) -> None:
    """Lines 7–10: sends P·(x, w) and adds up what arrives."""
    assert method.travels is not None
    outgoing = [
        Outgoing(site.index, to, float(matrix[to, site.index]), release)
        for site in sites
        if (release := releases[site.index]) is not None
        for to in receivers(matrix, site.index)
    ]
    expected = [(sender, site.index) for site in sites for sender in senders(matrix, site.index)]
    size = sites[0].learners[method.travels].vector().size
    arrived = comm.exchange(outgoing, expected, round_=round_, hop=hop, size=size)
    for site in sites:
        learner = site.learners[method.travels]
        agreed = schema(learner.model)
        mine = [_accepted(message, agreed) for message in arrived if message.receiver == site.index]
        assert site.push is not None
        site.push = mix(site.push, float(matrix[site.index, site.index]), mine)


def _accepted(message: Message, learner_schema: str) -> PushSum:
    """The message as PushSum mass, once it is what was agreed on."""
    what = f"round {message.round}: the proxy from site {message.sender}"
    if message.schema != learner_schema:
        raise WsiFlError(f"{what} has another architecture; set the same model.proxy at every site")
    if not np.isfinite(message.vector).all() or not 0 < message.weight < np.inf:
        raise WsiFlError(f"{what} is not finite")
    return PushSum(message.vector, message.weight)


def _log_round(
    site: Site, method: Method, schedule: Schedule, traffic: Traffic, *, round_: int, report: Report
) -> None:
    """Evaluates and writes the round's line."""
    line: dict[str, Any] = {
        "round": round_,
        "seconds": round(site.seconds, 3),
        "loss": site.losses,
        "epsilon": site.ledger.epsilon(),
    }
    if round_ % schedule.eval_every == 0 or round_ == schedule.rounds:
        for name, examples in site.tests.items():
            predicted = probabilities(lambda x: method.predict(site.learners, x), examples, site.device)
            line[name] = scores(predicted, examples.label)
        if "proxy" in site.learners and site.tests:
            name, examples = list(site.tests.items())[-1]
            predicted = probabilities(site.learners["proxy"].logits, examples, site.device)
            line["proxy"] = {"on": name, **scores(predicted, examples.label)}
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
