"""Transport of releases between sites: MPI, in-process lockstep, and a recorder for tests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np

from wsi_fl.federation.message import (
    BYTES,
    HEADER_BYTES,
    NUMBERS,
    Kind,
    Message,
    Outgoing,
    Values,
    body_length,
    pack,
    received,
)
from wsi_fl.types import UsageError, WsiFlError

_POLL_S = 0.0005
_LATE_EVERY_S = 1.0
_GATHER_TAG = 1 << 14
_UNUSED = 3
"""References to an array that only its list, the loop over it and the call that counts know."""


class PeerLate(WsiFlError):
    """Peers did not answer within comm.timeout_s."""

    def __init__(self, message: str, sites: list[int]) -> None:
        super().__init__(message)
        self.sites = sites


@dataclass
class Traffic:
    """What local sites sent, and how long exchanges took."""

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        """What was added after `before` was noted down."""
        return Traffic(
            self.messages - before.messages, self.bytes - before.bytes, self.seconds - before.seconds
        )


class Comm(Protocol):
    """How sites reach each other.

    Attributes:
        sites: indices of those that live in this process.
        running: indices of all that have a process.
        n_sites: of the study, running or not.
    """

    sites: tuple[int, ...]
    running: tuple[int, ...]
    n_sites: int
    traffic: dict[int, Traffic]
    """Per local site."""

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
        kind: Kind = NUMBERS,
    ) -> list[Message]:
        """Sends all, waits for the (sender, receiver) pairs in `expected` whose receiver is local.

        Args:
            size: number of values that all sites agreed on, and of which kind.

        Raises:
            PeerLate: when a message does not arrive in time.
        """
        ...

    def gather(self, documents: Sequence[Any], *, patient: bool = False) -> list[Any]:
        """One JSON document of every running site, in site order, known to all: plans and tallies, never data.

        Args:
            patient: wait without a deadline, for sites that are not in step.
        """
        ...


class LocalComm:
    """All sites in one process, in lockstep. Also keeps what was sent when `record` is set (for tests)."""

    def __init__(self, n_sites: int, *, running: Sequence[int] | None = None, record: bool = False) -> None:
        self.sites = self.running = tuple(range(n_sites) if running is None else running)
        self.n_sites = n_sites
        self.traffic = {site: Traffic() for site in self.sites}
        self.sent: list[Message] | None = [] if record else None

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
        kind: Kind = NUMBERS,
    ) -> list[Message]:
        began = time.perf_counter()
        arrived = [
            received(*pack(item, round_, hop), item.sender, item.receiver, round_, size, kind=kind)
            for item in outgoing
        ]
        pairs = {(message.sender, message.receiver) for message in arrived}
        missing = set(expected) - pairs
        if missing:
            raise WsiFlError(f"round {round_}: nothing from site {min(missing)[0]} to site {min(missing)[1]}")
        _count(self.traffic, outgoing, time.perf_counter() - began)
        if self.sent is not None:
            self.sent += arrived
        return arrived

    def gather(self, documents: Sequence[Any], *, patient: bool = False) -> list[Any]:
        return [json.loads(json.dumps(document)) for document in documents]


class _Buffers:
    """Arrays to receive into, used again once nobody holds them: touching fresh memory costs as much as the copy."""

    def __init__(self, kind: Kind = NUMBERS) -> None:
        self._kind = kind
        self._arrays: list[Values] = []

    def take(self, size: int) -> Values:
        """[size] of any content that nobody else refers to, views included."""
        for array in self._arrays:
            if array.size == size and sys.getrefcount(array) <= _UNUSED:
                return array
        fresh: Values = np.empty(size, self._kind)
        self._arrays = [a for a in self._arrays if a.size == size] + [fresh]
        return fresh


@dataclass
class MpiComm:
    """One MPI rank per running site, in site order.

    Args:
        timeout_s: how long to wait for a peer.
        running: indices of the sites that have a rank; default: all.
        n_sites: of the study; default: as many as there are ranks.
        waiting: called now and then while this rank waits for peers.
        late: told the sites that let this rank wait longer than timeout_s, again and again: somebody else then
            decides who is lost. Without it such a wait raises PeerLate.
    """

    timeout_s: float
    running: tuple[int, ...] = ()
    n_sites: int = 0
    waiting: Callable[[], None] | None = None
    late: Callable[[list[int]], None] | None = None

    def __post_init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        size = self._world.Get_size()
        self.running = tuple(self.running) or tuple(range(size))
        if len(self.running) != size:
            raise UsageError(
                f"{len(self.running)} sites need {len(self.running)} ranks, but MPI sees {size}; "
                "try mpiexec, or srun --mpi=pmix"
            )
        self.n_sites = self.n_sites or size
        self._rank_of = {site: rank for rank, site in enumerate(self.running)}
        self.sites: tuple[int, ...] = (self.running[self._world.Get_rank()],)
        self.traffic = {self.sites[0]: Traffic()}
        self._gathered = 0
        self._buffers = {kind: _Buffers(kind) for kind in (NUMBERS, BYTES)}

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
        kind: Kind = NUMBERS,
    ) -> list[Message]:
        began = time.perf_counter()
        mine = self.sites[0]
        sources = [sender for sender, receiver in expected if receiver == mine]
        tag = 2 * ((round_ * 8 + hop) % 4096)
        packed = [(item.receiver, *pack(item, round_, hop)) for item in outgoing]
        sends = []
        for receiver, head, body in packed:
            sends += self._send(receiver, (head, self._mpi.BYTE), (body, self._mpi_kind(body.dtype)), tag)
        headers = [bytearray(HEADER_BYTES) for _ in sources]
        self._wait(
            [self._receive(h, self._mpi.BYTE, s, tag) for h, s in zip(headers, sources, strict=True)],
            sources,
            round_,
        )
        bodies = [self._buffers[kind].take(body_length(header, size, kind)) for header in headers]
        requests = [
            self._receive(body, self._mpi_kind(kind), source, tag + 1)
            for body, source in zip(bodies, sources, strict=True)
            if body.size
        ]
        self._wait(requests, [s for body, s in zip(bodies, sources, strict=True) if body.size], round_)
        self._wait(sends, [receiver for receiver, _, _ in packed for _ in range(2)], round_)
        _count(self.traffic, outgoing, time.perf_counter() - began)
        return [
            received(header, body, source, mine, round_, size, kind=kind)
            for header, body, source in zip(headers, bodies, sources, strict=True)
        ]

    def gather(self, documents: Sequence[Any], *, patient: bool = False) -> list[Any]:
        (document,) = documents
        mine = np.frombuffer(json.dumps(document).encode(), np.uint8)
        others = [site for site in self.running if site != self.sites[0]]
        tag = _GATHER_TAG + 2 * (self._gathered % 4096)
        self._gathered += 1
        length = np.array([mine.size], np.int64)
        sends = []
        for site in others:
            sends += self._send(site, (length, self._mpi.INT64_T), (mine, self._mpi.BYTE), tag)
        limit = inf if patient and self.late is None else self.timeout_s
        lengths = {site: np.empty(1, np.int64) for site in others}
        self._wait(
            [self._receive(lengths[s], self._mpi.INT64_T, s, tag) for s in others], others, None, limit
        )
        texts = {site: np.empty(int(lengths[site][0]), np.uint8) for site in others}
        self._wait([self._receive(texts[s], self._mpi.BYTE, s, tag + 1) for s in others], others, None, limit)
        self._wait(sends, [site for site in others for _ in range(2)], None, limit)
        texts[self.sites[0]] = mine
        return [json.loads(texts[site].tobytes()) for site in self.running]

    def abort(self, code: int = 1) -> None:
        """Ends all ranks at once with this exit code; the others could only wait for this one."""
        self._world.Abort(code)

    def _mpi_kind(self, kind: Kind) -> Any:
        return self._mpi.FLOAT if kind == NUMBERS else self._mpi.BYTE

    def _send(self, site: int, head: tuple[Any, Any], body: tuple[Any, Any], tag: int) -> list[Any]:
        rank = self._rank_of[site]
        return [self._world.Isend(list(head), rank, tag), self._world.Isend(list(body), rank, tag + 1)]

    def _receive(self, buffer: Any, kind: Any, site: int, tag: int) -> Any:
        return self._world.Irecv([buffer, kind], self._rank_of[site], tag)

    def _wait(
        self, requests: Sequence[Any], peers: Sequence[int], round_: int | None, limit_s: float | None = None
    ) -> None:
        """Waits for all requests with a deadline of our own: a slow or stopped peer must not hang us for ever."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        began = said = time.monotonic()
        pause = 0.0
        while not self._mpi.Request.Testall(requests):
            now = time.monotonic()
            if now - said > _LATE_EVERY_S or now - began > limit_s:
                said = now
                if self.waiting is not None:
                    self.waiting()
                if now - began > limit_s:
                    late = [p for p, request in zip(peers, requests, strict=True) if not request.Test()]
                    self._late(late, round_)
            time.sleep(pause)
            pause = min(pause + _POLL_S / 10, _POLL_S)

    def _late(self, sites: list[int], round_: int | None) -> None:
        if not sites:  # it came just now
            return
        if self.late is None:
            where = "" if round_ is None else f" in round {round_}"
            raise PeerLate(
                f"site {sites[0]} did not answer for {self.timeout_s:g} s{where} (comm.timeout_s)", sites
            )
        self.late(sites)
        time.sleep(min(_LATE_EVERY_S, self.timeout_s / 4))


def _count(traffic: Mapping[int, Traffic], outgoing: Sequence[Outgoing], seconds: float) -> None:
    for tally in traffic.values():
        tally.seconds += seconds / len(traffic)
    for item in outgoing:
        traffic[item.sender].messages += 1
        traffic[item.sender].bytes += HEADER_BYTES + item.release.vector.nbytes
