"""Who of a plan's sites is there, where the others go on without a site that fell silent.

Every process keeps, for each site, the newest hello that it knows, and the hello of a process that is believed gone:
that it fell silent, or ended. A hello tells what its sender believes, and beliefs are put together by the later time,
so that all who hear each other come to believe the same. Only a newer hello of the site itself ends such a belief. A
session binds the hellos of all its members (`letters.session_of`): nothing is exchanged by sites that disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wsi_fl.types import Interrupted


class SiteReturned(Interrupted):
    """A peer's process began anew, so that all begin again from their checkpoints."""


class SitesGone(Interrupted):
    """Peers fell silent or ended, and the others begin again without them from their checkpoints.

    Attributes:
        sites: their names.
    """

    def __init__(self, message: str, sites: Sequence[str]) -> None:
        super().__init__(message)
        self.sites = tuple(sites)


class LeftOut(Interrupted):
    """The others went on without this site, whose process is there: it says a new hello."""


@dataclass
class Attendance:
    """What one process knows of who is there; it outlives the process's sessions.

    Args:
        me: the site of this process.
        names: of all sites of the plan, this one among them.
        at_least: how many must be there for a session; more than half must be in any case, lest two groups that do not
            hear each other both go on.
        heard: site → time of its newest hello, in seconds since 1970 by the site's clock; shared with the `Writer`.
    """

    me: str
    names: tuple[str, ...]
    at_least: int
    heard: dict[str, float]
    gone: dict[str, float] = field(default_factory=dict)
    """Site → time of the hello of its newest process that is gone; 0 for a site that never said hello."""
    why: dict[str, str] = field(default_factory=dict)
    """Site → why this process believed it gone; what others say of it has no reason."""

    def expected(self) -> list[str]:
        """Return the other sites that are not gone, in the order of the plan."""
        return [name for name in self.names if name != self.me and not self.is_gone(name)]

    def is_gone(self, name: str) -> bool:
        """Return whether the newest process of a site is gone."""
        return name in self.gone and self.heard.get(name, 0.0) <= self.gone[name]

    def lacking(self) -> list[str]:
        """Return those that are gone, of whom some must come back before there are enough; none where there are."""
        expected = self.expected()
        enough = len(expected) + 1 >= max(self.at_least, len(self.names) // 2 + 1)
        return [] if enough else [name for name in self.names if name not in (self.me, *expected)]

    def note_gone(self, names: Iterable[str], why: str) -> None:
        """Believe that the newest process of each of some sites is gone, and remember in words why."""
        for name in names:
            self.gone[name], self.why[name] = self.heard.get(name, 0.0), why

    def learn(self, told: Mapping[str, float]) -> None:
        """Believe what a peer's hello tells, where it is of a later process."""
        for name, time in told.items():
            if name in self.names:
                self.gone[name] = max(time, self.gone.get(name, 0.0))

    def left_out(self, since: float) -> bool:
        """Return whether others believe that this site's process is gone, which said hello at `since`."""
        return self.gone.get(self.me, -1.0) >= since
