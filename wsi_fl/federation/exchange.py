"""A hop of an exchange: send P·(x, w), screen and add up messages (Algorithm 1, lines 7–10); buffers too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.message import BYTES, Message, Outgoing
from wsi_fl.federation.methods import Method
from wsi_fl.federation.payload import message_state
from wsi_fl.federation.push_sum import PushSum, mix_states
from wsi_fl.federation.site_state import BufferShape, Flat, Site
from wsi_fl.federation.topology import Matrix, list_receivers, list_senders
from wsi_fl.models import schema_digest
from wsi_fl.privacy.ledger_file import Release

_DISTANCE_HISTORY = 20


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

    A rejected message counts as the payload says, by default as the receiver's own state. Messages are of a single
    sender (`is_single`) or mixtures.
    """
    learner, payload = site.mixing_learner(method), method.payload
    local_vector = learner.parameter_vector()
    agreed_schema = schema_digest(learner.model)
    local_share, accepted = float(matrix[site.index, site.index]), []
    for message in messages:
        is_returning = site.index in returning or message.sender in returning
        distances = () if is_returning else site.distances
        problem = _find_problem(message, agreed_schema, n_sites)
        if problem := problem or payload.find_problem(message, site, learner, distances, is_single=is_single):
            missing = float(matrix[site.index, message.sender])
            if (replacement := payload.replace_rejected(local_vector, missing)) is None:
                local_share += missing
            else:
                accepted.append(replacement)
            site.rejected.append(f"site {message.sender}: {problem}")
            site.folder.log(f"round {message.round}: rejected the model from site {message.sender}: {problem}")
            continue
        accepted.append(message_state(message))
        if not is_returning:
            distance = float(np.linalg.norm(accepted[-1].z - local_vector))
            site.distances = [*site.distances, distance][-_DISTANCE_HISTORY:]
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


def load_mixture(sites: list[Site], method: Method, *, n_present: int = 0, reset_optimizer: bool = False) -> None:
    """Load the de-biased mixture z = x / w into the exchanged model (Algorithm 1, line 11)."""
    for site in sites:
        if site.push is not None and site.active:
            learner = site.mixing_learner(method)
            method.payload.load_mixture(learner, site.push.z, n_present)
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
