"""A hop of an exchange: send P·(x, w), screen and add up messages (Algorithm 1, lines 7–10); buffers too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.message import BYTES, Message, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.mixing import PushSum, Vector, mix
from wsi_fl.federation.site import BufferShape, Flat, Site
from wsi_fl.federation.topology import Matrix, receivers, senders
from wsi_fl.models import schema
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.privacy.sums import impossible

_FAR = 10.0  # accepted distance from the local model, in units of the usual distance
_REMEMBERED, _ENOUGH = 20, 5
_MOST_ROWS = 1 << 30  # more rows than any sum has


def exchange(
    sites: Sequence[Site],
    method: Method,
    comm: Comm,
    matrix: Matrix,
    releases: Mapping[int, Release | None],
    *,
    round_: int,
    hop: int,
    back: Collection[int] = (),
) -> None:
    """Send mass along the nonzeros of a hop P[n, n]; a rejected message is replaced by the receiver's own share.

    Args:
        releases: of the sending sites of this process.
        returning: sites that returned; the usual distance of their models is unknown.
    """
    outgoing = [
        Outgoing(site.index, to, float(matrix[to, site.index]), release)
        for site in sites
        if (release := releases.get(site.index)) is not None
        for to in receivers(matrix, site.index)
    ]
    expected = [(sender, site.index) for site in sites for sender in senders(matrix, site.index)]
    size = sites[0].traveller(method).vector().size
    arrived = comm.exchange(outgoing, expected, round_=round_, hop=hop, size=size)
    for site in sites:
        mine = [message for message in arrived if message.receiver == site.index]
        if mine or site.push is not None:
            site.push = _mix_in(site, method, matrix, mine, comm.n_sites, back, alone=hop == 0)


def _mix_in(
    site: Site,
    method: Method,
    matrix: Matrix,
    messages: Sequence[Message],
    n_sites: int,
    back: Collection[int],
    *,
    alone: bool,
) -> PushSum:
    """Return a site's state after a hop, and log rejected messages.

    A rejected message counts as the receiver's own state, rejected class statistics as empty ones. Messages are of a
    single sender (`is_single`) or mixtures.
    """
    learner = site.traveller(method)
    own = learner.vector()
    agreed = schema(learner.model)
    share, accepted = float(matrix[site.index, site.index]), []
    for message in messages:
        stranger = site.index in back or message.sender in back
        heard = () if stranger else site.heard
        problem = _problem(message, agreed, n_sites) or (
            (
                _no_sums(
                    message, site.shared_head(method).shape[0], noisy=bool(site.plan and site.plan.sigma)
                )
                or _no_letter(message, site, method, alone=alone)
            )
            if method.once
            else _too_far(message, own, heard)
        )
        if problem:
            missing = float(matrix[site.index, message.sender])
            if method.once:
                accepted.append(PushSum(np.zeros_like(own), missing))
            else:
                share += missing
            site.rejected.append(f"site {message.sender}: {problem}")
            site.folder.log(
                f"round {message.round}: rejected the model from site {message.sender}: {problem}"
            )
        else:
            accepted.append(_state(message))
            if not stranger:
                site.heard = [*site.heard, _distance(accepted[-1], own)][-_REMEMBERED:]
    return mix(site.push or PushSum(np.zeros_like(own), 0.0), share, accepted)


def _problem(message: Message, agreed: str, n_sites: int) -> str:
    """Return why no honest site would send a message, or ""."""
    if message.refused:
        return message.refused
    if message.schema != agreed:
        return "it has another architecture"
    if not np.isfinite(message.vector).all():
        return "it is not finite"
    if not 0 < message.weight <= n_sites * (1 + 1e-9):
        return f"its weight is {message.weight:g}"
    return ""


def _no_sums(message: Message, n_columns: int, *, noisy: bool) -> str:
    """Return why numbers cannot be sums of rows of norm at most 1 with variances of noise, or ""."""
    largest, variance = float(np.abs(message.vector).max(initial=0)), float(message.vector[-n_columns:].min())
    if variance < 0 or (noisy and variance == 0):
        return f"its noise has a variance of {variance:.3g}"
    return f"it holds {largest:.3g}, which is no sum of rows" if largest > _MOST_ROWS else ""


def _no_letter(message: Message, site: Site, method: Method, *, alone: bool) -> str:
    """Return why numbers cannot be class statistics of the announced units, or "" where they can.

    The number of units is known for statistics of a single sender (`is_single`), not for a mean of several.
    """
    none = (None, None)
    told = site.announced.get(message.sender, none) if alone else none
    rows = site.units.kind == "row" and site.canaries is None  # of canaries about half have a row
    return impossible(site.shared_head(method), torch.tensor(_state(message).z), *told, rows=rows)


def _too_far(message: Message, own: Vector, heard: Sequence[float]) -> str:
    """Return why a model lies implausibly far from the local one, or ""."""
    distance = _distance(_state(message), own)
    usual = median(heard) if len(heard) >= _ENOUGH else float(np.linalg.norm(own))
    if not distance <= _FAR * usual:  # nor where it is NaN, as of 0 / 0
        return f"it lies {distance:.3g} from the local model, where {usual:.3g} is usual"
    return ""


def _state(message: Message) -> PushSum:
    return PushSum(np.asarray(message.vector, np.float32), message.weight)


def _distance(state: PushSum, own: Vector) -> float:
    """Return ‖z − own‖₂."""
    return float(np.linalg.norm(state.z - own))


def load_mixture(
    sites: list[Site], method: Method, *, n_present: int = 0, reset_optimizer: bool = False
) -> None:
    """Load the de-biased mixture z = x / w into the exchanged model (Algorithm 1, line 11)."""
    for site in sites:
        if site.push is not None and site.active:
            learner = site.traveller(method)
            learner.load_vector(site.push.z, n_sites=n_present)
            if reset_optimizer:
                learner.optimizer.state.clear()


def pass_buffers(
    sites: Sequence[Site],
    comm: Comm,
    matrix: Matrix,
    releases: Mapping[int, Release],
    *,
    round_: int,
    hop: int,
) -> None:
    """Send each site's buffer along the nonzeros of `matrix`; arriving buffers replace those held before.

    A receiver whose messages are all rejected goes on without a buffer.
    """
    outgoing = [
        Outgoing(sender, to, 1.0, release)
        for sender, release in releases.items()
        for to in receivers(matrix, sender)
    ]
    expected = [(sender, site.index) for site in sites for sender in senders(matrix, site.index)]
    assert sites[0].buffer is not None
    shape = sites[0].buffer.shape
    arrived = comm.exchange(outgoing, expected, round_=round_, hop=hop, size=shape.n_bytes, kind=BYTES)
    for site in sites:
        mine = [message for message in arrived if message.receiver == site.index]
        if mine:
            site.received = _accept(site, mine, shape)


def _accept(site: Site, messages: Sequence[Message], shape: BufferShape) -> dict[int, Flat]:
    """Return the valid buffers by sender, and log rejected ones."""
    accepted = {}
    for message in messages:
        values = np.asarray(message.vector, np.uint8)
        problem = message.refused or (
            "it has another shape" if message.schema != shape.schema else shape.problem_of(values)
        )
        if problem:
            site.rejected.append(f"buffer of site {message.sender}: {problem}")
            site.folder.log(f"round {message.round}: rejected the buffer of site {message.sender}: {problem}")
        else:
            accepted[message.sender] = values
    return accepted
