"""A hop of an exchange: send P·(x, w), screen and add up messages (Algorithm 1, lines 7–10); buffers too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.message import BYTES, Message, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.push_sum import PushSum, Vector, mix_states
from wsi_fl.federation.site_state import BufferShape, Flat, Site
from wsi_fl.federation.topology import Matrix, list_receivers, list_senders
from wsi_fl.models import schema_digest
from wsi_fl.oneshot.class_statistics import explain_invalid_statistics
from wsi_fl.privacy.ledger_file import Release

_MAX_DISTANCE_RATIO = 10.0  # accepted distance from the local model, in units of the usual distance
_DISTANCE_HISTORY, _MIN_DISTANCES = 20, 5
_MAX_ROWS = 1 << 30  # more rows than any sum has


def exchange_models(
    sites: Sequence[Site],
    method: Method,
    comm: Comm,
    matrix: Matrix,
    releases: Mapping[int, Release | None],
    *,
    round_: int,
    hop: int,
    returning: Collection[int] = (),
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
        for to in list_receivers(matrix, site.index)
    ]
    expected = [(sender, site.index) for site in sites for sender in list_senders(matrix, site.index)]
    size = sites[0].mixing_learner(method).parameter_vector().size
    arrived = comm.exchange(outgoing, expected, round_=round_, hop=hop, size=size)
    for site in sites:
        site_messages = [message for message in arrived if message.receiver == site.index]
        if site_messages or site.push is not None:
            site.push = _mix_messages(site, method, matrix, site_messages, comm.n_sites, returning, is_single=hop == 0)


def _mix_messages(
    site: Site,
    method: Method,
    matrix: Matrix,
    messages: Sequence[Message],
    n_sites: int,
    returning: Collection[int],
    *,
    is_single: bool,
) -> PushSum:
    """Return a site's state after a hop, and log rejected messages.

    A rejected message counts as the receiver's own state, rejected class statistics as empty ones. Messages are of a
    single sender (`is_single`) or mixtures.
    """
    learner = site.mixing_learner(method)
    local_vector = learner.parameter_vector()
    agreed_schema = schema_digest(learner.model)
    local_share, accepted = float(matrix[site.index, site.index]), []
    for message in messages:
        is_returning = site.index in returning or message.sender in returning
        distances = () if is_returning else site.distances
        problem = _find_problem(message, agreed_schema, n_sites) or (
            (
                _find_range_problem(
                    message, site.global_head(method).shape[0], is_noisy=bool(site.plan and site.plan.sigma)
                )
                or _find_statistics_problem(message, site, method, is_single=is_single)
            )
            if method.is_oneshot
            else _find_distance_problem(message, local_vector, distances)
        )
        if problem:
            missing = float(matrix[site.index, message.sender])
            if method.is_oneshot:
                accepted.append(PushSum(np.zeros_like(local_vector), missing))
            else:
                local_share += missing
            site.rejected.append(f"site {message.sender}: {problem}")
            site.folder.log(f"round {message.round}: rejected the model from site {message.sender}: {problem}")
        else:
            accepted.append(_message_state(message))
            if not is_returning:
                site.distances = [*site.distances, _compute_distance(accepted[-1], local_vector)][-_DISTANCE_HISTORY:]
    return mix_states(site.push or PushSum(np.zeros_like(local_vector), 0.0), local_share, accepted)


def _find_problem(message: Message, agreed_schema: str, n_sites: int) -> str:
    """Return why no honest site would send a message, or ""."""
    if message.refused:
        return message.refused
    if message.schema != agreed_schema:
        return "it has another architecture"
    if not np.isfinite(message.vector).all():
        return "it is not finite"
    if not 0 < message.weight <= n_sites * (1 + 1e-9):
        return f"its weight is {message.weight:g}"
    return ""


def _find_range_problem(message: Message, n_columns: int, *, is_noisy: bool) -> str:
    """Return why numbers cannot be sums of rows of norm at most 1 with variances of noise, or ""."""
    largest, variance = float(np.abs(message.vector).max(initial=0)), float(message.vector[-n_columns:].min())
    if variance < 0 or (is_noisy and variance == 0):
        return f"its noise has a variance of {variance:.3g}"
    return f"it holds {largest:.3g}, which is no sum of rows" if largest > _MAX_ROWS else ""


def _find_statistics_problem(message: Message, site: Site, method: Method, *, is_single: bool) -> str:
    """Return why numbers cannot be class statistics of the announced units, or "" where they can.

    The number of units is known for statistics of a single sender (`is_single`), not for a mean of several.
    """
    unknown = (None, None)
    announced = site.announced_units.get(message.sender, unknown) if is_single else unknown
    rows = site.units.kind == "row" and site.canaries is None  # of canaries about half have a row
    return explain_invalid_statistics(
        site.global_head(method), torch.tensor(_message_state(message).z), *announced, rows=rows
    )


def _find_distance_problem(message: Message, local_vector: Vector, distances: Sequence[float]) -> str:
    """Return why a model lies implausibly far from the local one, or ""."""
    distance = _compute_distance(_message_state(message), local_vector)
    usual = median(distances) if len(distances) >= _MIN_DISTANCES else float(np.linalg.norm(local_vector))
    if not distance <= _MAX_DISTANCE_RATIO * usual:  # nor where it is NaN, as of 0 / 0
        return f"it lies {distance:.3g} from the local model, where {usual:.3g} is usual"
    return ""


def _message_state(message: Message) -> PushSum:
    return PushSum(np.asarray(message.vector, np.float32), message.weight)


def _compute_distance(state: PushSum, local_vector: Vector) -> float:
    """Return ‖z − own‖₂."""
    return float(np.linalg.norm(state.z - local_vector))


def load_mixture(sites: list[Site], method: Method, *, n_present: int = 0, reset_optimizer: bool = False) -> None:
    """Load the de-biased mixture z = x / w into the exchanged model (Algorithm 1, line 11)."""
    for site in sites:
        if site.push is not None and site.active:
            learner = site.mixing_learner(method)
            learner.load_vector(site.push.z, n_sites=n_present)
            if reset_optimizer:
                learner.optimizer.state.clear()


def pass_buffers(
    sites: Sequence[Site], comm: Comm, matrix: Matrix, releases: Mapping[int, Release], *, round_: int, hop: int
) -> None:
    """Send each site's buffer along the nonzeros of `matrix`; arriving buffers replace those held before.

    A receiver whose messages are all rejected goes on without a buffer.
    """
    outgoing = [
        Outgoing(sender, to, 1.0, release)
        for sender, release in releases.items()
        for to in list_receivers(matrix, sender)
    ]
    expected = [(sender, site.index) for site in sites for sender in list_senders(matrix, site.index)]
    assert sites[0].buffer is not None
    shape = sites[0].buffer.shape
    arrived = comm.exchange(outgoing, expected, round_=round_, hop=hop, size=shape.n_bytes, kind=BYTES)
    for site in sites:
        site_messages = [message for message in arrived if message.receiver == site.index]
        if site_messages:
            site.received_buffers = _accept_buffers(site, site_messages, shape)


def _accept_buffers(site: Site, messages: Sequence[Message], shape: BufferShape) -> dict[int, Flat]:
    """Return the valid buffers by sender, and log rejected ones."""
    accepted = {}
    for message in messages:
        values = np.asarray(message.vector, np.uint8)
        problem = message.refused or (
            "it has another shape" if message.schema != shape.schema else shape.find_problem(values)
        )
        if problem:
            site.rejected.append(f"buffer of site {message.sender}: {problem}")
            site.folder.log(f"round {message.round}: rejected the buffer of site {message.sender}: {problem}")
        else:
            accepted[message.sender] = values
    return accepted
