"""What carries messages between hospitals, without knowledge of their content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from wsi_fl.hospitals.trust.sealed_messages import Buffer

Receipt = Literal["taken", "later", "refused"]
"""A receiver's answer to a message: taken, not yet decidable, or refused for good."""
MAX_MESSAGE_BYTES = 1 << 30
"""The longest message that is taken unless the signed plan sets a limit."""


class Transport(Protocol):
    """Carries messages without knowledge of their content.

    Attributes:
        lag_s: the greatest age of a message at its arrival: seconds for an engine, days for a folder.
    """

    lag_s: float

    def listen(self, receive: Callable[[Buffer], Receipt]) -> None:
        """Hand over all arrivals from now on, from any thread."""

    def send(self, receiver: str, sequence_id: str, message: bytes, timeout_s: float) -> str:
        """Carry a message to a site; return "" once it has arrived, or why not, and it may be retried.

        Args:
            sequence_id: of the message among those of the sender and the receiver in this session.
        """
        ...

    def failure_reason(self) -> str:
        """Return why the transport has failed for good; "" if it has not."""
        ...

    def silence_s(self, site: str) -> float:
        """Return the seconds since the last sign of life of a site's process; infinite if there was none."""
        ...

    def close(self) -> None:
        """Stop listening."""
