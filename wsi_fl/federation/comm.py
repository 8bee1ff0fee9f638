"""Transport of releases between sites: MPI, in-process lockstep, and a recorder for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar

import numpy as np

from wsi_fl.federation.documents import check_length, decode_document, encode_document
from wsi_fl.federation.message import (
    HEADER_BYTES,
    NUMBERS,
    Message,
    Outgoing,
    PayloadType,
    PendingReceive,
    PendingSend,
    RawBuffer,
    body_length,
    compute_tag,
    pack_message,
    unpack_message,
)
from wsi_fl.system.direct_io import BufferPool
from wsi_fl.types import ReportableError, UsageError, WsiFlError, single_line

_T = TypeVar("_T")

_POLL_S = 0.0005
_LATE_REPORT_S = 1.0
_GATHER_TAG = 1 << 14
_RECEIVE_POOL = BufferPool(capacity=4)
"""Memory of received messages, used again: touching fresh memory costs as much as the copy."""


class PeerTimeout(ReportableError):
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

    def traffic_since(self, earlier: Traffic) -> Traffic:
        """Return the difference to an earlier tally."""
        return Traffic(self.messages - earlier.messages, self.bytes - earlier.bytes, self.seconds - earlier.seconds)


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

        Raises `PeerTimeout` when a message does not arrive in time, and `ProtocolError` when it has another length than
        announced.

        Args:
            size: number of values of a message, as all sites agreed, of this kind.
            lossy: whether late messages are left out, as by `exchange_documents`.
        """
        ...

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return the JSON document of each running site, in site order: plans and tallies, never data.

        Raises `ProtocolError` when a document is not of the agreed kind (none is used then), and `PeerTimeout` when it
        does not arrive in time.

        Args:
            documents: of the sites in this process; disclosed to all running sites.
            kind: the agreed type of all documents, a TypedDict with bounds (`federation.documents`).
            patient: wait without a deadline, for sites that are not in step.
        """
        ...

    def exchange_documents(
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
        start = time.perf_counter()
        arrived = [
            unpack_message(*pack_message(item, round_, hop), item.sender, item.receiver, round_, size, kind=kind)
            for item in outgoing
        ]
        pairs = {(message.sender, message.receiver) for message in arrived}
        missing = set(expected) - pairs
        if missing and not lossy:
            raise WsiFlError(f"round {round_}: nothing from site {min(missing)[0]} to site {min(missing)[1]}")
        count_traffic(self.traffic, outgoing, time.perf_counter() - start)
        if self.sent is not None:
            self.sent += arrived
        return arrived

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return the documents of all sites as a peer would read them; see `Comm.gather`."""
        return [
            decode_document(encode_document(document, kind, site), kind, site)
            for site, document in zip(self.running, documents, strict=True)
        ]

    def exchange_documents(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Return the documents as their receivers would read them; see `Comm.exchange_documents`."""
        return {
            pair: decode_document(encode_document(document, kind, pair[0]), kind, pair[0])
            for pair, document in documents.items()
            if pair in expected
        }

    def abort(self, code: int = 1) -> None:
        """Do nothing: there is no other process to end."""


def load_mpi(n_ranks: int) -> Any:
    """Return mpi4py's module, after a check of the number of ranks; 0 accepts any number.

    Raises:
        UsageError: when MPI has another number of ranks.
        WsiFlError: when MPI does not work here.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py looks for the library when it is imported
        raise WsiFlError(
            f"no MPI in this rank ({single_line(error)[:100]}); `wsi-fl doctor` tries it, and without mpiexec or srun "
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
        report_late: called again and again with the sites that are later than timeout_s; the launcher decides which
            sites dropped out. Without it such a wait raises PeerTimeout.
    """

    timeout_s: float
    running: tuple[int, ...] = ()
    n_sites: int = 0
    names: tuple[str, ...] = ()
    report_waiting: Callable[[], None] | None = None
    report_late: Callable[[list[int]], None] | None = None

    def __post_init__(self) -> None:
        self._mpi = load_mpi(len(self.running))
        self._world = self._mpi.COMM_WORLD
        size = self._world.Get_size()
        self.running = tuple(self.running) or tuple(range(size))
        self.n_sites = self.n_sites or size
        self._site_ranks = {site: rank for rank, site in enumerate(self.running)}
        self.sites: tuple[int, ...] = (self.running[self._world.Get_rank()],)
        self.traffic = {self.sites[0]: Traffic()}
        self._n_gathered = 0

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
        start = time.perf_counter()
        local_site = self.sites[0]
        sources = [sender for sender, receiver in expected if receiver == local_site]
        tag = compute_tag(round_, hop)
        packed = [(item.receiver, *pack_message(item, round_, hop)) for item in outgoing]
        sends = []
        for receiver, head, body in packed:
            sends += self._start_send(receiver, (head, self._mpi.BYTE), (body, self._mpi_kind(body.dtype)), tag)
        headers = [bytearray(HEADER_BYTES) for _ in sources]
        self._wait_all(
            [self._start_receive(h, self._mpi.BYTE, s, tag) for h, s in zip(headers, sources, strict=True)],
            sources,
            round_,
        )
        bodies = [_RECEIVE_POOL.empty((body_length(header, size, kind),), kind) for header in headers]
        requests = [
            self._start_receive(body, self._mpi_kind(kind), source, tag + 1)
            for body, source in zip(bodies, sources, strict=True)
            if body.size
        ]
        self._wait_all(requests, [s for body, s in zip(bodies, sources, strict=True) if body.size], round_)
        self._wait_all(sends, [receiver for receiver, _, _ in packed for _ in range(2)], round_)
        count_traffic(self.traffic, outgoing, time.perf_counter() - start)
        return [
            unpack_message(header, body, source, local_site, round_, size, kind=kind)
            for header, body, source in zip(headers, bodies, sources, strict=True)
        ]

    def gather(self, documents: Sequence[_T], kind: type[_T], *, patient: bool = False) -> list[_T]:
        """Return the document of each rank; see `Comm.gather`."""
        (document,) = documents
        (local_site,) = self.sites
        local_text = encode_document(document, kind, self._site_name(local_site))
        others = [site for site in self.running if site != local_site]
        limit = inf if patient and self.report_late is None else self.timeout_s
        texts = self._exchange_texts(dict.fromkeys(others, local_text), others, limit) | {local_site: local_text}
        return [decode_document(texts[site], kind, self._site_name(site)) for site in self.running]

    def exchange_documents(
        self, documents: Mapping[tuple[int, int], _T], kind: type[_T], expected: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], _T]:
        """Return the documents for this rank; see `Comm.exchange_documents`."""
        (local_site,) = self.sites
        outgoing_texts = {
            to: encode_document(document, kind, self._site_name(local_site)) for (_, to), document in documents.items()
        }
        texts = self._exchange_texts(
            outgoing_texts, [site for site, to in expected if to == local_site], self.timeout_s
        )
        return {(site, local_site): decode_document(text, kind, self._site_name(site)) for site, text in texts.items()}

    def _exchange_texts(
        self, outgoing_texts: Mapping[int, bytes], senders: Sequence[int], limit_s: float
    ) -> dict[int, bytes]:
        """Send texts to ranks and receive the texts of the senders, the lengths first."""
        tag = _GATHER_TAG + 2 * (self._n_gathered % 4096)
        self._n_gathered += 1
        packed = {
            k: (np.array([len(text)], np.int64), np.frombuffer(text, np.uint8)) for k, text in outgoing_texts.items()
        }
        sends = []
        for site, (length, text) in packed.items():
            sends += self._start_send(site, (length, self._mpi.INT64_T), (text, self._mpi.BYTE), tag)
        lengths = {site: np.empty(1, np.int64) for site in senders}
        self._wait_all(
            [self._start_receive(lengths[s], self._mpi.INT64_T, s, tag) for s in senders], senders, None, limit_s
        )
        for site in senders:
            check_length(int(lengths[site][0]), self._site_name(site))
        texts = {site: np.empty(lengths[site][0], np.uint8) for site in senders}
        self._wait_all(
            [self._start_receive(texts[s], self._mpi.BYTE, s, tag + 1) for s in senders], senders, None, limit_s
        )
        self._wait_all(sends, [site for site in packed for _ in range(2)], None, limit_s)
        return {site: text.tobytes() for site, text in texts.items()}

    def abort(self, code: int = 1) -> None:
        """End all ranks with this exit code, as the others would wait for this one in vain."""
        self._world.Abort(code)

    def _mpi_kind(self, kind: PayloadType) -> Any:
        return self._mpi.FLOAT if kind == NUMBERS else self._mpi.BYTE

    def _start_send(
        self, site: int, head: tuple[RawBuffer, Any], body: tuple[RawBuffer, Any], tag: int
    ) -> list[PendingSend]:
        rank = self._site_ranks[site]
        return [PendingSend(self._world, *head, rank, tag), PendingSend(self._world, *body, rank, tag + 1)]

    def _start_receive(self, buffer: RawBuffer, kind: Any, site: int, tag: int) -> PendingReceive:
        rank = self._site_ranks[site]
        return PendingReceive(self._mpi, self._world, buffer, kind, rank, tag, self._site_name(site))

    def _site_name(self, site: int) -> str:
        return self.names[site] if self.names else str(site)

    def _wait_all(
        self, requests: Sequence[Any], peers: Sequence[int], round_: int | None, limit_s: float | None = None
    ) -> None:
        """Wait for all requests up to a deadline, so that a stopped peer cannot hang this process."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        start = last_report = time.monotonic()
        pause = 0.0
        while sum(request.Test() for request in requests) < len(requests):  # MPI moves here
            current = time.monotonic()
            if current - last_report > _LATE_REPORT_S or current - start > limit_s:
                last_report = current
                if self.report_waiting is not None:
                    self.report_waiting()
                if current - start > limit_s:
                    late = [p for p, request in zip(peers, requests, strict=True) if not request.Test()]
                    self._handle_late(late, round_)
            time.sleep(pause)
            pause = min(pause + _POLL_S / 10, _POLL_S)

    def _handle_late(self, sites: list[int], round_: int | None) -> None:
        if not sites:  # it has arrived by now
            return
        if self.report_late is None:
            where = "" if round_ is None else f" in round {round_}"
            raise PeerTimeout(
                f"site {self._site_name(sites[0])} did not answer for {self.timeout_s:g} s{where} (comm.timeout_s)",
                sites,
            )
        self.report_late(sites)
        time.sleep(min(_LATE_REPORT_S, self.timeout_s / 4))


def count_traffic(traffic: Mapping[int, Traffic], outgoing: Sequence[Outgoing], seconds: float) -> None:
    """Add an exchange to the tallies of the local sites: messages, bytes, and its seconds, divided among the sites."""
    for tally in traffic.values():
        tally.seconds += seconds / len(traffic)
    for item in outgoing:
        traffic[item.sender].messages += 1
        traffic[item.sender].bytes += HEADER_BYTES + item.release.vector.nbytes
