"""A star that is used once: uploads to a server, packages back, and what else is sent to it (MPCPA, section 3.3).

The server has no process of its own: it lives beside the first running site. What that site hands to the server, and
what the server hands to it, is a transfer all the same, as the paper counts them, and so each is written down.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.message import HEADER_BYTES, Message, Outgoing
from wsi_fl.federation.site import Site
from wsi_fl.privacy.release import Release, digest
from wsi_fl.types import WsiFlError

SERVER = "server"
Vector = NDArray[np.float32]


class Size(TypedDict):
    """The number of values of what a site is about to send to the server, which takes memory for them."""

    values: Annotated[int, Field(ge=1, le=1 << 30)]


def mpcpa_transfers(n_sites: int) -> int:
    """n denoisers up, n packages down, n classifiers up.

    Example:
        >>> mpcpa_transfers(3)
        9
    """
    return 3 * n_sites


def federated_transfers(n_sites: int, rounds: int) -> int:
    """Every round n models up and n models down, to and from a server apart.

    Example:
        >>> federated_transfers(3, 200)
        1200
    """
    return 2 * n_sites * rounds


@dataclass(frozen=True)
class Courier:
    """Carries releases between the sites and the server.

    Attributes:
        sites: those of this process.
        names: of all sites of the study, by index.
    """

    sites: Sequence[Site]
    comm: Comm
    names: Sequence[str]

    @property
    def hub(self) -> int:
        """The site beside which the server lives."""
        return self.comm.running[0]

    def collected(
        self, what: str, releases: Mapping[int, Release], *, round_: int, hop: int, agreed: Mapping[int, str]
    ) -> dict[int, Vector]:
        """Every site's release, at the server; elsewhere nothing.

        Args:
            releases: of the sites of this process.
            agreed: the schema of each site's release, as it said before.
        """
        sizes = self._sizes(releases)
        found: dict[int, Vector] = {}
        for sender in self.comm.running:
            began = time.perf_counter()
            if sender == self.hub:
                if sender in releases:
                    found[sender] = _numbers(releases[sender])
            else:
                for message in self._sent(releases, sender, self.hub, sizes[sender], round_, hop):
                    found[sender] = self._accepted(message, agreed[sender], what)
            if sender in releases:
                self._note(what, sender, sender, SERVER, _numbers(releases[sender]), began)
        return found

    def packages(
        self, held: Mapping[int, Vector], size: int, *, round_: int, hop: int, schema: str
    ) -> dict[int, dict[int, Vector]]:
        """For each site of this process the others' releases, by the site they are of.

        Args:
            held: what `collected` found.
            size: number of values of one release, the same for all.
        """
        found: dict[int, dict[int, Vector]] = {}
        mine = {site.index: site for site in self.sites}
        for receiver in self.comm.running:
            others = [k for k in self.comm.running if k != receiver]
            began = time.perf_counter()
            package = (
                np.concatenate([held[k] for k in others]) if held and others else np.zeros(0, np.float32)
            )
            arrived = package
            if receiver != self.hub and others:
                releases = {}
                if self.hub in mine:
                    ledger = mine[self.hub].ledger
                    own = digest(held[self.hub])
                    releases[self.hub] = ledger.relay(
                        round_, package, own=own, schema=_bundled(schema), weight=1.0
                    )
                messages = self._sent(releases, self.hub, receiver, size * len(others), round_, hop)
                for message in messages:
                    arrived = self._accepted(message, _bundled(schema), "package")
            if self.hub in mine and others:
                self._note("package", self.hub, SERVER, receiver, package, began)
            if receiver in mine:
                parts = np.split(arrived, len(others)) if others else []
                found[receiver] = dict(zip(others, (part.copy() for part in parts), strict=True))
        return found

    def _sizes(self, releases: Mapping[int, Release]) -> dict[int, int]:
        mine: list[Size] = [{"values": releases[site.index].vector.size} for site in self.sites]
        told = self.comm.gather(mine, Size)
        return {site: one["values"] for site, one in zip(self.comm.running, told, strict=True)}

    def _sent(
        self, releases: Mapping[int, Release], sender: int, receiver: int, size: int, round_: int, hop: int
    ) -> list[Message]:
        """One release on its way; what arrived here."""
        outgoing = [Outgoing(sender, receiver, 1.0, releases[sender])] if sender in releases else []
        here = receiver in self.comm.sites
        return self.comm.exchange(
            outgoing, [(sender, receiver)] if here else [], round_=round_, hop=hop, size=size
        )

    def _accepted(self, message: Message, agreed: str, what: str) -> Vector:
        problem = message.refused
        if not problem and message.schema != agreed:
            problem = "it has another architecture"
        if not problem and not np.isfinite(message.vector).all():
            problem = "it is not finite"
        if problem:
            raise WsiFlError(f"the {what} from site {self.names[message.sender]} is no use: {problem}")
        return np.array(message.vector, np.float32)

    def _note(
        self, what: str, by: int, sender: int | str, receiver: int | str, vector: Vector, began: float
    ) -> None:
        folder = next(site.folder for site in self.sites if site.index == by)
        folder.note_transfer(
            {
                "what": what,
                "from": sender if isinstance(sender, str) else self.names[sender],
                "to": receiver if isinstance(receiver, str) else self.names[receiver],
                "bytes": HEADER_BYTES + vector.nbytes,
                "seconds": round(time.perf_counter() - began, 6),
            }
        )


def _bundled(schema: str) -> str:
    """Of a package of releases of this schema."""
    return hashlib.sha256(f"package of {schema}".encode()).hexdigest()


def _numbers(release: Release) -> Vector:
    """What a model's release holds."""
    return np.asarray(release.vector, np.float32)
