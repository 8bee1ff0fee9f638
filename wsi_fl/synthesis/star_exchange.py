"""A star that is used once: uploads to a server, packages back, and what else is sent to it (MPCPA, section 3.3).

The server has no process of its own: it lives beside the first running site. What that site hands to the server, and
what the server hands to it, is a transfer all the same, as the paper counts them, and so each is written down.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.message import HEADER_BYTES, Outgoing
from wsi_fl.federation.site import Site
from wsi_fl.privacy.ledger_file import Release, digest
from wsi_fl.types import WsiFlError

SERVER = "server"
Vector = NDArray[np.float32]


class Size(TypedDict):
    """The number of values of what a site is about to send to the server, which takes memory for them."""

    values: Annotated[int, Field(ge=1, le=1 << 30)]


@dataclass(frozen=True)
class StarExchange:
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

    def gather(
        self, what: str, releases: Mapping[int, Release], *, round_: int, hop: int, agreed: Mapping[int, str]
    ) -> dict[int, Vector]:
        """Bring every site's release float32[d] to the server; return them there by site, elsewhere nothing.

        Args:
            what: what `transfers.jsonl` calls a release.
            releases: of the sites of this process.
            agreed: the schema of each site's release, as it said before.

        Raises:
            WsiFlError: when a release is not what was agreed on.
        """
        mine: list[Size] = [{"values": releases[site.index].vector.size} for site in self.sites]
        sizes = zip(self.comm.running, self.comm.gather(mine, Size), strict=True)
        carry = partial(self._carry, what, round_=round_, hop=hop)
        found = {k: carry((k, self.hub), releases.get(k), one["values"], agreed[k]) for k, one in sizes}
        return {k: vector for k, vector in found.items() if vector is not None}

    def broadcast(
        self, held: Mapping[int, Vector], size: int, *, round_: int, hop: int, schema: str
    ) -> dict[int, dict[int, Vector]]:
        """Bring each site the others' releases in one package, and return these for the sites of this process.

        Args:
            held: what `gather` found.
            size: number of values of one release, the same for all.
            schema: of each release.

        Raises:
            WsiFlError: when a package is not what was agreed on.
        """
        found: dict[int, dict[int, Vector]] = {}
        bundled = hashlib.sha256(f"package of {schema}".encode()).hexdigest()
        for receiver in self.comm.running:
            others = [k for k in self.comm.running if k != receiver]
            arrived: Vector | None = None
            load: Release | Vector | None = None
            if held and others:
                load = package = np.concatenate([held[k] for k in others])
                if receiver != self.hub:
                    own, ledger = digest(held[self.hub]), self._site(self.hub).ledger
                    load = ledger.relay(round_, package, own=own, schema=bundled, weight=1.0)
            if others:
                pair, total = (self.hub, receiver), size * len(others)
                arrived = self._carry("package", pair, load, total, bundled, round_=round_, hop=hop)
            if receiver in self.comm.sites:
                parts = [] if arrived is None else np.split(arrived, len(others))
                found[receiver] = dict(zip(others, (part.copy() for part in parts), strict=True))
        return found

    def _carry(
        self,
        what: str,
        pair: tuple[int, int],
        load: Release | Vector | None,
        size: int,
        agreed: str,
        *,
        round_: int,
        hop: int,
    ) -> Vector | None:
        """Carry a load, where it lies here, from one site to another; return it where it arrives, and write it down."""
        began, (sender, receiver) = time.perf_counter(), pair
        vector = (
            np.asarray(load.vector if isinstance(load, Release) else load, np.float32)
            if load is not None
            else None
        )
        arrived = vector if sender == receiver else None
        if sender != receiver:
            outgoing = [Outgoing(sender, receiver, 1.0, load)] if isinstance(load, Release) else []
            expected = [pair] if receiver in self.comm.sites else []
            for message in self.comm.exchange(outgoing, expected, round_=round_, hop=hop, size=size):
                arrived = np.array(message.vector, np.float32)
                problem = message.refused or (
                    "it has another architecture" if message.schema != agreed else ""
                )
                if problem or not np.isfinite(arrived).all():
                    whose = f"the {what} from site {self.names[sender]}"
                    raise WsiFlError(f"{whose} is no use: {problem or 'it is not finite'}")
        if vector is not None:
            ends = (SERVER, self.names[receiver]) if what == "package" else (self.names[sender], SERVER)
            line = {"what": what, "from": ends[0], "to": ends[1], "bytes": HEADER_BYTES + vector.nbytes}
            seconds = round(time.perf_counter() - began, 6)
            self._site(sender).folder.note_transfer(line | {"seconds": seconds})
        return arrived

    def _site(self, index: int) -> Site:
        return next(site for site in self.sites if site.index == index)
