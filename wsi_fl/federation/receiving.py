"""Receiving from peers by MPI: nothing but what was announced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.documents import NotAgreed
from wsi_fl.federation.message import Values


@dataclass
class Arrival:
    """A message on its way from a peer, received only when it has the length that was announced.

    A peer that sends more than it announced could otherwise overwrite memory: Open MPI 5.0.11 writes messages above
    4 kB past the end of a buffer that is too short. Of one that sends less, what was there before would be taken.

    Attributes:
        mpi, world: mpi4py's module, and the communicator of all ranks.
        buffer, kind: what to fill, to its last value, and the MPI type of these values.
        rank, tag: whose message, and which.
        name: what messages call the site of this rank.
    """

    mpi: Any
    world: Any
    buffer: Values | NDArray[np.int64] | bytearray
    kind: Any
    rank: int
    tag: int
    name: str
    _request: Any = None

    def Test(self) -> bool:
        """Return whether it is here by now, as an MPI request does.

        Raises:
            NotAgreed: when it has another length; it is not received.
        """
        if self._request is None:
            status = self.mpi.Status()
            message = self.world.Improbe(self.rank, self.tag, status)
            if message is None:
                return False
            if status.Get_count(self.kind) != len(self.buffer):
                raise NotAgreed(
                    f"site {self.name} sent something else than the {len(self.buffer)} values it announced"
                )
            self._request = message.Irecv([self.buffer, self.kind])
        return bool(self._request.Test())
