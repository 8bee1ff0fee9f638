"""Transport of releases between sites: MPI, in-process lockstep, and a recorder for tests.

A message is a fixed header and a flat float32 buffer; nothing is ever pickled. Only a `Release` can be sent.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.ledger import Release
from wsi_fl.types import WsiFlError

_MAGIC = b"WSFL"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIId32sQ")
"""magic, version, hop, sender, round, weight, schema (SHA-256), number of float32 values."""
_POLL_S = 0.0005


@dataclass(frozen=True)
class Outgoing:
    """A release on its way from local site `sender` to site `receiver`, scaled by `share` (P[receiver, sender])."""

    sender: int
    receiver: int
    share: float
    release: Release

    def __post_init__(self) -> None:
        if not isinstance(self.release, Release):
            raise TypeError(f"only a Release may leave a site, not {type(self.release).__name__}")


@dataclass(frozen=True)
class Message:
    """What arrived: vector float32[d] and weight, both already scaled by the sender's share."""

    sender: int
    receiver: int
    round: int
    schema: str
    vector: NDArray[np.float32]
    weight: float


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
    """How sites reach each other. `sites` are the indices of those that live in this process."""

    sites: tuple[int, ...]
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
    ) -> list[Message]:
        """Sends all, waits for the (sender, receiver) pairs in `expected` whose receiver is local.

        Args:
            size: number of float32 values that all sites agreed on.

        Raises:
            WsiFlError: when a message does not arrive in time or is not what was agreed.
        """
        ...

    def gather(self, documents: Sequence[Any]) -> list[Any]:
        """One JSON document of every site, in site order, known to all: plans and tallies, never data."""
        ...


class LocalComm:
    """All sites in one process, in lockstep. Also keeps what was sent when `record` is set (for tests)."""

    def __init__(self, n_sites: int, *, record: bool = False) -> None:
        self.sites = tuple(range(n_sites))
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
    ) -> list[Message]:
        began = time.perf_counter()
        for item in outgoing:
            if item.release.vector.size != size:
                raise WsiFlError(
                    f"round {round_}: site {item.sender} sent {item.release.vector.size} values, agreed on {size}"
                )
        arrived = [_unpack(*_pack(item, round_, hop), item.receiver) for item in outgoing]
        pairs = {(message.sender, message.receiver) for message in arrived}
        missing = set(expected) - pairs
        if missing:
            raise WsiFlError(f"round {round_}: nothing from site {min(missing)[0]} to site {min(missing)[1]}")
        _count(self.traffic, outgoing, time.perf_counter() - began)
        if self.sent is not None:
            self.sent += arrived
        return arrived

    def gather(self, documents: Sequence[Any]) -> list[Any]:
        return [json.loads(json.dumps(document)) for document in documents]


@dataclass
class MpiComm:
    """One MPI rank per site; rank k is site k."""

    timeout_s: float

    def __post_init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.sites: tuple[int, ...] = (self._world.Get_rank(),)
        self.n_sites: int = self._world.Get_size()
        self.traffic = {self.sites[0]: Traffic()}

    def exchange(
        self,
        outgoing: Sequence[Outgoing],
        expected: Sequence[tuple[int, int]],
        *,
        round_: int,
        hop: int,
        size: int,
    ) -> list[Message]:
        began = time.perf_counter()
        mine = self.sites[0]
        sources = [sender for sender, receiver in expected if receiver == mine]
        tag = 2 * ((round_ * 8 + hop) % 4096)
        packed = [(item.receiver, *_pack(item, round_, hop)) for item in outgoing]
        sends = []
        for receiver, head, body in packed:
            sends.append(self._world.Isend([head, self._mpi.BYTE], receiver, tag))
            sends.append(self._world.Isend([body, self._mpi.FLOAT], receiver, tag + 1))
        headers = [bytearray(_HEADER.size) for _ in sources]
        self._receive(headers, self._mpi.BYTE, sources, tag, round_)
        for source, header in zip(sources, headers, strict=True):
            if _length(header) != size:
                raise WsiFlError(
                    f"round {round_}: site {source} sent {_length(header)} values, agreed on {size}"
                )
        vectors = [np.empty(size, np.float32) for _ in sources]
        self._receive(vectors, self._mpi.FLOAT, sources, tag + 1, round_)
        self._wait(sends, [receiver for receiver, _, _ in packed for _ in range(2)], round_)
        _count(self.traffic, outgoing, time.perf_counter() - began)
        messages = [_unpack(header, vector, mine) for header, vector in zip(headers, vectors, strict=True)]
        for message, source in zip(messages, sources, strict=True):
            if (message.sender, message.round) != (source, round_):
                raise WsiFlError(
                    f"round {round_}: site {source} sent round {message.round} of site {message.sender}"
                )
        return messages

    def _receive(
        self, buffers: Sequence[Any], kind: Any, sources: Sequence[int], tag: int, round_: int
    ) -> None:
        """Fills each buffer from its source."""
        pairs = zip(sources, buffers, strict=True)
        self._wait(
            [self._world.Irecv([buffer, kind], source, tag) for source, buffer in pairs], sources, round_
        )

    def gather(self, documents: Sequence[Any]) -> list[Any]:
        (document,) = documents
        mine = np.frombuffer(json.dumps(document).encode(), np.uint8)
        sizes = np.empty(self.n_sites, np.int64)
        self._collective(self._world.Iallgather(np.array([len(mine)], np.int64), sizes))
        everything = np.empty(int(sizes.sum()), np.uint8)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._collective(
            self._world.Iallgatherv(mine, [everything, (sizes.tolist(), starts.tolist()), self._mpi.BYTE])
        )
        parts = np.split(everything, np.cumsum(sizes)[:-1])
        return [json.loads(part.tobytes()) for part in parts]

    def abort(self, code: int = 1) -> None:
        """Ends all ranks at once with this exit code; the others could only wait for this one."""
        self._world.Abort(code)

    def _collective(self, request: Any) -> None:
        self._wait([request], [None], None)

    def _wait(self, requests: list[Any], peers: Sequence[int | None], round_: int | None) -> None:
        """Waits for all requests with a deadline of our own: a slow or stopped peer must not hang us for ever."""
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0
        while not all(request.Test() for request in requests):
            if time.monotonic() > deadline:
                late = [p for p, request in zip(peers, requests, strict=True) if not request.Test()]
                if not late:  # it came just now
                    return
                who = "a peer" if late[0] is None else f"site {late[0]}"
                where = "" if round_ is None else f" in round {round_}"
                raise WsiFlError(f"{who} did not answer for {self.timeout_s:g} s{where} (comm.timeout_s)")
            time.sleep(pause)
            pause = min(pause + _POLL_S / 10, _POLL_S)


def _pack(item: Outgoing, round_: int, hop: int) -> tuple[bytes, NDArray[np.float32]]:
    release = item.release
    if release.round != round_:
        raise WsiFlError(f"a release of round {release.round} cannot be sent in round {round_}")
    vector = release.vector if item.share == 1 else release.vector * np.float32(item.share)
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        hop,
        item.sender,
        round_,
        release.weight * item.share,
        bytes.fromhex(release.schema),
        vector.size,
    )
    return header, np.ascontiguousarray(vector, np.float32)


def _fields(header: bytes | bytearray) -> tuple[Any, ...]:
    fields = _HEADER.unpack(header)
    if fields[:2] != (_MAGIC, _VERSION):
        raise WsiFlError("a peer speaks another protocol; install the same wsi-fl at every site")
    return fields


def _length(header: bytes | bytearray) -> int:
    return int(_fields(header)[-1])


def _unpack(header: bytes | bytearray, vector: NDArray[np.float32], receiver: int) -> Message:
    _, _, _, sender, round_, weight, schema, _ = _fields(header)
    return Message(sender, receiver, round_, schema.hex(), vector, weight)


def _count(traffic: Mapping[int, Traffic], outgoing: Sequence[Outgoing], seconds: float) -> None:
    for tally in traffic.values():
        tally.seconds += seconds / len(traffic)
    for item in outgoing:
        traffic[item.sender].messages += 1
        traffic[item.sender].bytes += _HEADER.size + item.release.vector.nbytes
