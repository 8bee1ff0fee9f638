"""A federation's certificates, and a line within one process, to try what lines do to letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from wsi_fl.hospitals.lines.relayed import Answer
from wsi_fl.hospitals.trust.certificates import Identity, approved, new_key, new_request, new_root
from wsi_fl.hospitals.trust.letters import Buffer

NAMES = ("C1", "C2", "C3")


class Federation:
    """A root, and the identities of sites."""

    def __init__(self) -> None:
        self.key = new_key()
        self.root = new_root(self.key, "a federation")

    def identity(self, name, **given):
        key = new_key()
        certificate = approved(new_request(key, name, "org"), self.key, self.root, role="hospital", **given)
        return Identity.load(key, certificate, self.root)


class Wire:
    """A line within one process, and a bench for what lines do: tests slow it down, lose, repeat and alter with it.

    Args:
        name: the site at this end.
        ends: all ends by name, shared by all; an end adds itself when it listens.
        meddle: given (sender, receiver, name, letter), return the letters that arrive in its place.
    """

    lag_s = 0.0

    def __init__(
        self,
        name: str,
        ends: dict[str, Callable[[Buffer], Answer]],
        meddle: Callable[[str, str, str, bytes], Sequence[bytes]] | None = None,
    ) -> None:
        self._name, self._ends, self._meddle = name, ends, meddle
        self._down = ""

    def listen(self, take: Callable[[Buffer], Answer]) -> None:
        self._ends[self._name] = take

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        del timeout_s
        arriving = [letter] if self._meddle is None else self._meddle(self._name, to, name, letter)
        take = self._ends.get(to)
        if take is None:
            return "nobody is there"
        answers = [take(one) for one in arriving]
        return "" if "taken" in answers else "it was not taken"

    def cut(self, why: str) -> None:
        """Let the line carry nothing any more."""
        self._down = why

    def broken(self) -> str:
        return self._down

    def silent_s(self, site: str) -> float:
        del site
        return inf

    def close(self) -> None:
        self._ends.pop(self._name, None)
