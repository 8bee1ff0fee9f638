"""Messages: a fixed header and flat float32 or uint8 values. Nothing is pickled; only a `Release` can be sent.

A message that breaks the agreement arrives as `refused`, with the reason, and without values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.documents import ProtocolError
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:  # the ledger brings torch along, and ranks that only tile need none
    from wsi_fl.privacy.ledger_file import Release

_MAGIC = b"WSFL"
_VERSION = 1
_HEADER = struct.Struct("<4sHBBIId32sQ")
"""magic, version, hop, kind, sender, round, weight, schema (SHA-256), number of values."""
HEADER_BYTES = _HEADER.size
NUMBERS, BYTES = np.dtype(np.float32), np.dtype(np.uint8)
"""Types of values: a model's parameters, or a buffer of images and labels."""
_KINDS = (NUMBERS, BYTES)
Values = NDArray[np.float32] | NDArray[np.uint8]
RawBuffer = Values | NDArray[np.int64] | bytes | bytearray
PayloadType = np.dtype[Any]
HOPS = 9
"""Most hops of a round that message tags and headers distinguish."""
GRAPH_HOPS = 5
"""Hops 0, 1, … of a round's graph; the others are for messages beside it."""
BUFFERS, FAREWELL, WELCOME, SCORING = range(GRAPH_HOPS, HOPS)
"""Hops of buffers, of leaving sites, of returning sites, and of models and counts after the last round."""
_TAGS = 1 << 14
"""Upper bound of message tags, in pairs of header and body; tags repeat after many rounds."""
_MAX_OVERSIZE = 4
"""A body up to this multiple of the agreed length is received and discarded; a longer one is not received."""
_PART_BYTES = 1 << 30
"""Longest part of a body: MPI counts values in 31 bits, and Open MPI 5 offers no larger counts."""


@dataclass(frozen=True)
class Outgoing:
    """A release to send from local site `sender` to site `receiver`, scaled by `share` (P[receiver, sender])."""

    sender: int
    receiver: int
    share: float
    release: Release

    def __post_init__(self) -> None:
        from wsi_fl.privacy.ledger_file import Release

        if not isinstance(self.release, Release):
            raise TypeError(f"only a Release may leave a site, not {type(self.release).__name__}")


@dataclass(frozen=True)
class Message:
    """A received message: values [d] and their weight, both scaled by the sender's share.

    A message that breaks the agreement has no values, and the reason in `refused`.
    """

    sender: int
    receiver: int
    round: int
    schema: str
    vector: Values
    weight: float
    refused: str = ""


def compute_tag(round_: int, hop: int) -> int:
    """Return the MPI tag of the headers of a hop; bodies have the next tag."""
    return 2 * (round_ * HOPS + hop) % _TAGS


def pack_message(item: Outgoing, round_: int, hop: int) -> tuple[bytes, Values]:
    """Return the header and the values of a message; float32 values are scaled by the share.

    Raises:
        WsiFlError: when the release is of another round.
        ValueError: when bytes are to be scaled.
    """
    assert 0 <= hop < HOPS
    release = item.release
    if release.round != round_:
        raise WsiFlError(f"a release of round {release.round} cannot be sent in round {round_}")
    vector: Values = release.vector
    if item.share != 1:
        if vector.dtype != NUMBERS:
            raise ValueError(f"bytes cannot be scaled by {item.share:g}")
        vector = vector * np.float32(item.share)
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        hop,
        _KINDS.index(vector.dtype),
        item.sender,
        round_,
        release.weight * item.share,
        bytes.fromhex(release.schema),
        vector.size,
    )
    return header, vector


def _find_problem(header: bytes | bytearray, sender: int, round_: int, size: int, kind: PayloadType) -> str:
    """Return why a header breaks the agreement, or ""."""
    if len(header) != HEADER_BYTES:
        return "it speaks another protocol"
    magic, version, _, header_kind, header_sender, header_round, _, _, length = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, _VERSION):
        return "it speaks another protocol"
    if (header_sender, header_round) != (sender, round_):
        return f"it is of round {header_round} of site {header_sender}"
    if header_kind != _KINDS.index(kind):
        return "it holds values of another kind"
    return "" if length == size else f"it has {length} values, agreed on {size}"


def body_length(header: bytes | bytearray, size: int, kind: PayloadType = NUMBERS) -> int:
    """Return the number of values to receive after this header; 0 for an invalid header."""
    if len(header) != HEADER_BYTES:
        return 0
    magic, _, _, header_kind, *_, length = _HEADER.unpack(header)
    sensible = magic == _MAGIC and header_kind == _KINDS.index(kind) and length <= _MAX_OVERSIZE * size
    return int(length) if sensible else 0


def unpack_message(
    header: bytes | bytearray,
    vector: Values,
    sender: int,
    receiver: int,
    round_: int,
    size: int,
    *,
    kind: PayloadType = NUMBERS,
) -> Message:
    """Return the message; where it breaks the agreement, without values and with the reason."""
    problem = _find_problem(header, sender, round_, size, kind)
    if not problem and (vector.size, vector.dtype) != (size, kind):
        problem = f"it brings {vector.size} values, announced {size}"
    if problem:
        return Message(sender, receiver, round_, "", np.empty(0, np.float32), 0.0, problem)
    *_, weight, schema, _ = _HEADER.unpack(header)
    return Message(sender, receiver, round_, schema.hex(), vector, weight)


def split_buffer(buffer: RawBuffer) -> list[memoryview]:
    """Return the parts of a buffer in order, at least one."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # mypy takes no array for a buffer before Python 3.12
    step = _PART_BYTES // view.itemsize
    return [view[start : start + step] for start in range(0, max(1, len(view)), step)]


class PendingSend:
    """A pending send to a peer, in parts."""

    def __init__(self, world: Any, buffer: RawBuffer, kind: Any, rank: int, tag: int) -> None:
        self._requests = [world.Isend([part, kind], rank, tag) for part in split_buffer(buffer)]

    def Test(self) -> bool:
        """Return whether all parts were sent, as an MPI request does."""
        return bool(sum(request.Test() for request in self._requests) == len(self._requests))


@dataclass
class PendingReceive:
    """A pending message from a peer, received only if it has the announced length.

    A longer message could overwrite memory: Open MPI 5.0.11 writes messages above 4 kB past the end of a buffer that is
    too short. After a shorter one old content of the buffer would be read.
    """

    # mpi4py's module, and the communicator of all ranks
    mpi: Any
    world: Any
    # the buffer to fill completely, and the MPI type of its values
    buffer: RawBuffer
    kind: Any
    # rank and tag of the sender, and its name for messages
    rank: int
    tag: int
    name: str

    def __post_init__(self) -> None:
        self._pending_parts = split_buffer(self.buffer)
        self._requests: list[Any] = []

    def Test(self) -> bool:
        """Return whether the message was received, as an MPI request does.

        Raises:
            ProtocolError: when it has another length; then it is not received.
        """
        while self._pending_parts:
            status = self.mpi.Status()
            message = self.world.Improbe(self.rank, self.tag, status)
            if message is None:
                return False
            if status.Get_count(self.kind) != len(self._pending_parts[0]):
                raise ProtocolError(
                    f"site {self.name} sent another length than the {len(self.buffer)} values it announced"
                )
            self._requests.append(message.Irecv([self._pending_parts.pop(0), self.kind]))
        return bool(sum(request.Test() for request in self._requests) == len(self._requests))
