"""Messages that have arrived at a site and wait to be read."""

from __future__ import annotations

from collections.abc import Sequence

from wsi_fl.hospitals.trust.sealed_messages import SealedMessage

_MAX_PENDING = 64
"""Messages of one peer that wait to be read: a site is never more than a few sequence ids ahead."""


class Inbox:
    """The verified messages of a session: each is read once, and a peer's unread ones are bounded.

    Args:
        most_bytes: of a message.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._messages: dict[tuple[str, str], SealedMessage] = {}
        self._consumed: set[tuple[str, str]] = set()

    def is_full(self, arrival: SealedMessage) -> bool:
        """Return whether a peer's unread messages leave no room for a further one."""
        sender = arrival.header["sender"]
        sizes = [len(message.body) for (name, _), message in self._messages.items() if name == sender]
        return len(sizes) >= _MAX_PENDING or sum(sizes) + len(arrival.body) > 2 * self._most_bytes

    def add_message(self, message: SealedMessage) -> bool:
        """Keep a message; return False for a repeated one."""
        key = (message.header["sender"], message.header["place"])
        if key in self._messages or key in self._consumed:
            return False
        self._messages[key] = message
        return True

    def list_missing(self, senders: Sequence[str], sequence_id: str) -> list[str]:
        """Return the senders whose message with a sequence id has not arrived."""
        return [name for name in senders if (name, sequence_id) not in self._messages]

    def read(self, senders: Sequence[str], sequence_id: str) -> dict[str, SealedMessage]:
        """Return the messages of some senders with a sequence id, by sender; later ones are of no use."""
        keys = [(name, sequence_id) for name in senders]
        self._consumed |= set(keys)
        return {key[0]: self._messages.pop(key) for key in keys if key in self._messages}
