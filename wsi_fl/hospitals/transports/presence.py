"""Which sites are there, as one process knows it: who has dropped out, and which sites begin a session together.

If the others may go on without a site that timed out, every process keeps, per site, the newest handshake it knows, and
the handshake of a process that is believed to have dropped out. A handshake states its sender's beliefs, which are
merged by the later time, so that all processes in contact agree. Only a newer handshake of the site itself ends such a
belief.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer
from wsi_fl.types import Interrupted

MAX_CLOCK_SKEW_S = 900.0
"""Difference of two clocks that is tolerated."""


def _clock_offset_s() -> float:
    """Return the offset of the clock from one that nobody sets; both go on while a machine sleeps."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SiteReturned(Interrupted):
    """A peer's process began again, so all resume from their checkpoints."""


class SitesDroppedOut(Interrupted):
    """Peers timed out or ended, or they went on without this site; all others resume.

    Attributes:
        sites: those that dropped out.
    """

    def __init__(self, message: str, sites: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.sites = tuple(sites)


@dataclass
class SitePresence:
    """The presence of all sites as one process knows it; it outlives the process's sessions.

    Args:
        identity: of this site.
        names: of all sites of the plan, this one included.
        min_sites: sites required for a session, if the others go on without a site that timed out; more than half are
            required in any case, so that two groups out of contact cannot both go on. By default all are required, and
            no site drops out.
    """

    identity: Identity
    names: Sequence[str]
    min_sites: int | None = None
    dropped_out: dict[str, float] = field(default_factory=dict)
    """Site → time of the handshake of its newest process that dropped out; 0 for a site that never sent one."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Site → why this process believes it dropped out; beliefs of others carry no reason."""

    def __post_init__(self) -> None:
        self.sealer, self._start_offset_s = MessageSealer(self.identity, time.time()), _clock_offset_s()

    def has_clock_jumped(self) -> bool:
        """Return whether this machine's clock was set, so that its handshake's time is no longer comparable."""
        return abs(_clock_offset_s() - self._start_offset_s) > MAX_CLOCK_SKEW_S

    def has_dropped_out(self, name: str) -> bool:
        """Return whether the newest process of a site dropped out."""
        return name in self.dropped_out and self.sealer.latest_handshakes.get(name, 0.0) <= self.dropped_out[name]

    def missing_sites(self) -> list[str]:
        """Return the sites that dropped out, if too few are left; none if enough are."""
        dropped_out = [name for name in self.names if name != self.identity.name and self.has_dropped_out(name)]
        is_quorum = len(self.names) - len(dropped_out) >= max(self.min_sites or 0, len(self.names) // 2 + 1)
        return [] if is_quorum else dropped_out

    def mark_dropped_out(self, names: Sequence[str], reason: str) -> None:
        """Mark the newest process of each of some sites as dropped out, with a reason, and renew the handshake."""
        self.dropped_out |= {name: self.sealer.latest_handshakes.get(name, 0.0) for name in names}
        self.reasons |= dict.fromkeys(names, reason)
        started_at = 0.0 if self.has_clock_jumped() else self.sealer.started_at
        self.sealer = self.sealer.renew_handshake(max(started_at, self.dropped_out.get(self.identity.name, 0.0)))
        self._start_offset_s = _clock_offset_s()

    def merge_peer_view(self, peer_view: Mapping[str, float]) -> bool:
        """Merge the beliefs in a peer's handshake, of later processes alone; return whether this site is left out."""
        if self.min_sites is None:
            return False
        for name, dropped_at in peer_view.items():
            if name in self.names:
                self.dropped_out[name] = max(dropped_at, self.dropped_out.get(name, 0.0))
        return self.dropped_out.get(self.identity.name, -1.0) >= self.sealer.started_at
