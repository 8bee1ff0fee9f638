"""What travels: a fixed header and a flat float32 buffer. Nothing is ever pickled; only a `Release` can be sent.

A message that is not what was agreed on arrives as `refused`, with the reason, and the receiver goes on without.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import WsiFlError

if TYPE_CHECKING:  # the ledger brings torch along, and ranks that only tile need none
    from wsi_fl.privacy.ledger import Release

_MAGIC = b"WSFL"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIId32sQ")
"""magic, version, hop, sender, round, weight, schema (SHA-256), number of float32 values."""
HEADER_BYTES = _HEADER.size
_WIDEST = 4
"""A body up to so many times the agreed length is received and thrown away; a longer one is left where it is."""


@dataclass(frozen=True)
class Outgoing:
    """A release on its way from local site `sender` to site `receiver`, scaled by `share` (P[receiver, sender])."""

    sender: int
    receiver: int
    share: float
    release: Release

    def __post_init__(self) -> None:
        from wsi_fl.privacy.ledger import Release

        if not isinstance(self.release, Release):
            raise TypeError(f"only a Release may leave a site, not {type(self.release).__name__}")


@dataclass(frozen=True)
class Message:
    """What arrived: vector float32[d] and weight, both already scaled by the sender's share.

    `refused` says in words why its content is none, where the message was not what was agreed on.
    """

    sender: int
    receiver: int
    round: int
    schema: str
    vector: NDArray[np.float32]
    weight: float
    refused: str = ""


def pack(item: Outgoing, round_: int, hop: int) -> tuple[bytes, NDArray[np.float32]]:
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


def _problem(header: bytes | bytearray, sender: int, round_: int, size: int) -> str:
    """Why a message is not what was agreed on; empty when it is."""
    magic, version, _, said_sender, said_round, _, _, length = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, _VERSION):
        return "it speaks another protocol"
    if (said_sender, said_round) != (sender, round_):
        return f"it is of round {said_round} of site {said_sender}"
    return "" if length == size else f"it has {length} values, agreed on {size}"


def body_length(header: bytes | bytearray, size: int) -> int:
    """Number of values to receive after this header; 0 for none, where it makes no sense."""
    magic, *_, length = _HEADER.unpack(header)
    return int(length) if magic == _MAGIC and length <= _WIDEST * size else 0


def received(
    header: bytes | bytearray, vector: NDArray[np.float32], sender: int, receiver: int, round_: int, size: int
) -> Message:
    problem = _problem(header, sender, round_, size)
    if problem:
        return Message(sender, receiver, round_, "", np.empty(0, np.float32), 0.0, problem)
    *_, weight, schema, _ = _HEADER.unpack(header)
    return Message(sender, receiver, round_, schema.hex(), vector, weight)
