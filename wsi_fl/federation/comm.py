"""Transport of releases between sites: MPI, in-process lockstep, and a recorder for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar

import numpy as np

from wsi_fl.federation.documents import check_length, decoded, encoded
from wsi_fl.federation.message import (
    HEADER_BYTES,
    NUMBERS,
    Arrival,
    Buffer,
    Departure,
    Message,
    Outgoing,
    PayloadType,
    body_length,
    pack,
    received,
    tag_of,
)
from wsi_fl.system.bulk import BufferPool
from wsi_fl.types import KnownToAll, UsageError, WsiFlError, one_line

_T = TypeVar("_T")

_POLL_S = 0.0005
_LATE_EVERY_S = 1.0
_GATHER_TAG = 1 << 14
_MEMORY = BufferPool(most=4)
"""Memory of received messages, used again: touching fresh memory costs as much as the copy."""


class PeerLate(KnownToAll):
    """Peers timed out: no answer within comm.timeout_s."""

    def __init__(self, message: str, sites: list[int]) -> None:
        super().__init__(message)
        self.sites = sites


@dataclass
class Traffic:
    """Messages and bytes that a local site sent, and the seconds of its exchanges."""

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        """Return the difference to an earlier tally."""
        return Traffic(
            self.messages - before.messages, self.bytes - before.bytes, self.seconds - before.seconds
        )


class Comm(Protocol):
    """Messages and documents between sites."""

    sites: tuple[int, ...]  # indices of this process's sites
    running: tuple[int, ...]  # indices of all sites that have a process
    n_sites: int  # of the study, running or not
    traffic: dict[int, Traffic]  # per local site

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
        kind: PayloadType = NUMBERS,
        lossy: bool = False,
    ) -> list[Message]:
        """Send all messages, and wait for those from the expected (sender, receiver) pairs with a local receiver.

        Raises `PeerTimeout` when a message does not arrive in time, and `NotAgreed` when it has another length than
        announced.

        Args:
            size: number of values of a message, as all sites agreed, of this kind.
            lossy: whether late messages are left out, as by `exchange_documents`.
        """
        ...

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return the JSON document of each running site, in site order: plans and tallies, never data.

        Raises `NotAgreed` when a document is not of the agreed kind (none is used then), and `PeerTimeout` when it does
        not arrive in time.

        Args:
            documents: of the sites in this process; disclosed to all running sites.
            kind: the agreed type of all documents, a TypedDict with bounds (`federation.documents`).
            patient: wait without a deadline, for sites that are not in step.
        """
        ...

    def hand(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Send JSON documents to single sites, and return those that arrive in time.

        The k-th lossy call after a gathering waits until k timeouts after it, so that the remaining sites go on
        together. Over MPI no site is left out: a lost rank ends the job.

        Args:
            documents: by (sender, receiver), of the sites in this process; disclosed to the receiver alone.
            kind: the agreed type of all documents, as in `gather`.
            expected: the (sender, receiver) pairs to wait for.
        """
        ...

    def abort(self, code: int = 1) -> None:
        """End the job everywhere, as other processes would wait for this one in vain."""
        ...


class LocalComm:
    """All sites in one process, in lockstep; with `record` (for tests) sent messages are kept."""

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
        kind: PayloadType = NUMBERS,
        lossy: bool = False,
    ) -> list[Message]:
        """Pass messages between the sites of this process; see `Comm.exchange`.

        Raises:
            WsiFlError: when an expected message was not sent.
        """
        began = time.perf_counter()
        arrived = [
            received(*pack(item, round_, hop), item.sender, item.receiver, round_, size, kind=kind)
            for item in outgoing
        ]
        pairs = {(message.sender, message.receiver) for message in arrived}
        missing = set(expected) - pairs
        if missing and not lossy:
            raise WsiFlError(f"round {round_}: nothing from site {min(missing)[0]} to site {min(missing)[1]}")
        count(self.traffic, outgoing, time.perf_counter() - began)
        if self.sent is not None:
            self.sent += arrived
        return arrived

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return the documents of all sites as a peer would read them; see `Comm.gather`."""
        return [
            decoded(encoded(document, kind, site), kind, site)
            for site, document in zip(self.running, documents, strict=True)
        ]

    def hand(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Return the documents as their receivers would read them; see `Comm.hand`."""
        return {
            pair: decoded(encoded(document, kind, pair[0]), kind, pair[0])
            for pair, document in documents.items()
            if pair in expected
        }

    def abort(self, code: int = 1) -> None:
        """Do nothing: there is no other process to end."""


def mpi_of(n_ranks: int) -> Any:
    """Return mpi4py's module, after a check of the number of ranks; 0 accepts any number.

    Raises:
        UsageError: when MPI has another number of ranks.
        WsiFlError: when MPI does not work here.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py looks for the library when it is imported
        raise WsiFlError(
            f"no MPI in this rank ({one_line(error)[:100]}); `wsi-fl doctor` tries it, and without mpiexec or srun "
            "`--backend local` trains without it"
        ) from None
    if n_ranks not in (0, size := MPI.COMM_WORLD.Get_size()):
        raise UsageError(
            f"{n_ranks} ranks work together here, but MPI sees {size}; start them by `mpiexec -n {n_ranks}`, or by "
            f"`srun --mpi=pmix -n {n_ranks}`"
        )
    return MPI


@dataclass
class MpiComm:
    """One MPI rank per running site, in site order.

    Args:
        timeout_s: how long to wait for a peer.
        running, n_sites: the sites that have a rank, and how many the study has; default: all ranks.
        names: of all sites of the study, for messages; default: their indices.
        report_waiting: called now and then while this rank waits for peers.
        report_late: called again and again with the sites that are later than timeout_s; the launcher decides which sites
            dropped out. Without it such a wait raises PeerLate.
    """

    timeout_s: float
    running: tuple[int, ...] = ()
    n_sites: int = 0
    names: tuple[str, ...] = ()
    waiting: Callable[[], None] | None = None
    late: Callable[[list[int]], None] | None = None

    def __post_init__(self) -> None:
        self._mpi = mpi_of(len(self.running))
        self._world = self._mpi.COMM_WORLD
        size = self._world.Get_size()
        self.running = tuple(self.running) or tuple(range(size))
        self.n_sites = self.n_sites or size
        self._rank_of = {site: rank for rank, site in enumerate(self.running)}
        self.sites: tuple[int, ...] = (self.running[self._world.Get_rank()],)
        self.traffic = {self.sites[0]: Traffic()}
        self._gathered = 0

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
        kind: PayloadType = NUMBERS,
        lossy: bool = False,
    ) -> list[Message]:
        """Send and receive over MPI, the headers first; see `Comm.exchange`."""
        del lossy
        began = time.perf_counter()
        mine = self.sites[0]
        sources = [sender for sender, receiver in expected if receiver == mine]
        tag = tag_of(round_, hop)
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
        bodies = [_MEMORY.empty((body_length(header, size, kind),), kind) for header in headers]
        requests = [
            self._receive(body, self._mpi_kind(kind), source, tag + 1)
            for body, source in zip(bodies, sources, strict=True)
            if body.size
        ]
        self._wait(requests, [s for body, s in zip(bodies, sources, strict=True) if body.size], round_)
        self._wait(sends, [receiver for receiver, _, _ in packed for _ in range(2)], round_)
        count(self.traffic, outgoing, time.perf_counter() - began)
        return [
            received(header, body, source, mine, round_, size, kind=kind)
            for header, body, source in zip(headers, bodies, sources, strict=True)
        ]

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return the document of each rank; see `Comm.gather`."""
        (document,) = documents
        (me,) = self.sites
        mine = encoded(document, kind, self._name(me))
        others = [site for site in self.running if site != me]
        limit = inf if patient and self.late is None else self.timeout_s
        texts = self._texts(dict.fromkeys(others, mine), others, limit) | {me: mine}
        return [decoded(texts[site], kind, self._name(site)) for site in self.running]

    def hand(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Return the documents for this rank; see `Comm.hand`."""
        (me,) = self.sites
        mine = {to: encoded(one, kind, self._name(me)) for (_, to), one in documents.items()}
        texts = self._texts(mine, [site for site, to in expected if to == me], self.timeout_s)
        return {(site, me): decoded(text, kind, self._name(site)) for site, text in texts.items()}

    def _texts(self, mine: Mapping[int, bytes], senders: Sequence[int], limit_s: float) -> dict[int, bytes]:
        """Send texts to ranks and receive the texts of the senders, the lengths first."""
        tag = _GATHER_TAG + 2 * (self._gathered % 4096)
        self._gathered += 1
        packed = {
            k: (np.array([len(text)], np.int64), np.frombuffer(text, np.uint8)) for k, text in mine.items()
        }
        sends = []
        for site, (length, text) in packed.items():
            sends += self._send(site, (length, self._mpi.INT64_T), (text, self._mpi.BYTE), tag)
        lengths = {site: np.empty(1, np.int64) for site in senders}
        self._wait(
            [self._receive(lengths[s], self._mpi.INT64_T, s, tag) for s in senders], senders, None, limit_s
        )
        for site in senders:
            check_length(int(lengths[site][0]), self._name(site))
        texts = {site: np.empty(lengths[site][0], np.uint8) for site in senders}
        self._wait(
            [self._receive(texts[s], self._mpi.BYTE, s, tag + 1) for s in senders], senders, None, limit_s
        )
        self._wait(sends, [site for site in packed for _ in range(2)], None, limit_s)
        return {site: text.tobytes() for site, text in texts.items()}

    def abort(self, code: int = 1) -> None:
        """End all ranks with this exit code, as the others would wait for this one in vain."""
        self._world.Abort(code)

    def _mpi_kind(self, kind: PayloadType) -> Any:
        return self._mpi.FLOAT if kind == NUMBERS else self._mpi.BYTE

    def _send(
        self, site: int, head: tuple[Buffer, Any], body: tuple[Buffer, Any], tag: int
    ) -> list[Departure]:
        rank = self._rank_of[site]
        return [Departure(self._world, *head, rank, tag), Departure(self._world, *body, rank, tag + 1)]

    def _receive(self, buffer: Buffer, kind: Any, site: int, tag: int) -> Arrival:
        rank = self._rank_of[site]
        return Arrival(self._mpi, self._world, buffer, kind, rank, tag, self._name(site))

    def _name(self, site: int) -> str:
        return self.names[site] if self.names else str(site)

    def _wait(
        self, requests: Sequence[Any], peers: Sequence[int], round_: int | None, limit_s: float | None = None
    ) -> None:
        """Wait for all requests up to a deadline, so that a stopped peer cannot hang this process."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        began = said = time.monotonic()
        pause = 0.0
        while sum(request.Test() for request in requests) < len(requests):  # MPI moves here
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
        if not sites:  # it has arrived by now
            return
        if self.late is None:
            where = "" if round_ is None else f" in round {round_}"
            raise PeerLate(
                f"site {self._name(sites[0])} did not answer for {self.timeout_s:g} s{where} (comm.timeout_s)",
                sites,
            )
        self.late(sites)
        time.sleep(min(_LATE_EVERY_S, self.timeout_s / 4))


def count(traffic: Mapping[int, Traffic], outgoing: Sequence[Outgoing], seconds: float) -> None:
    """Add an exchange to the tallies of the local sites: messages, bytes, and its seconds, divided among the sites."""
    for tally in traffic.values():
        tally.seconds += seconds / len(traffic)
    for item in outgoing:
        traffic[item.sender].messages += 1
        traffic[item.sender].bytes += HEADER_BYTES + item.release.vector.nbytes
