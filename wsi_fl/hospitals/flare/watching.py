"""Whether a job of NVIDIA FLARE can still come to an end: FLARE itself waits without limit for who is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from nvflare.fuel.flare_api.api_spec import InvalidTarget, NoClientsAvailable, NoConnection
from nvflare.fuel.flare_api.flare_api import Session

from wsi_fl.hospitals.work.taking_part import LAST
from wsi_fl.types import WsiFlError

GO_ON = f"go on with `wsi-fl federation submit --resume {LAST}`, or --without a site that stays away"
_LOOK_S = 10.0
_BEGIN_S = 120.0
"""A job that has not begun by then never does; usually it takes some 20 s."""
_AWAY_S = 20.0
"""A hospital, or a job on the server, that is missed for so long is gone, and was not just about to begin or end."""
_TRIES = 4
BEGUN = ("RUNNING", "DISPATCHED")
"""What the server calls a job that has begun and not ended, even if it was stopped meanwhile and has forgotten it."""


def answering(session: Session) -> list[str]:
    """Return the hospitals whose clients answer now; the server lists one that was stopped for half a minute more."""
    for left in reversed(range(_TRIES)):
        try:
            if not (listed := [client.name for client in session.get_connected_client_list()]):
                return []
            told = session.get_client_job_status(listed) or []
            return sorted({str(one["client_name"]) for one in told if one.get("status") != "no_reply"})
        except (InvalidTarget, NoClientsAvailable, NoConnection):  # a client is just going away
            if not left:
                raise
            time.sleep(1.0)
    raise AssertionError


def at_work(session: Session) -> set[str]:
    """Return the ids of the jobs that have a process on the server."""
    return {str(job.job_id) for job in session.get_system_info().job_info}


class Watch:
    """Looks now and then who is there while a job has not ended.

    Args:
        sites: that take part.
        patience_s: how long a hospital may be away from a job that has begun.
    """

    def __init__(self, session: Session, job: str, sites: Sequence[str], patience_s: float) -> None:
        self._session, self._job, self._sites = session, job, sites
        self._patience_s = patience_s
        self._free = self._looked = time.monotonic()
        self._missed: dict[str, float] = {}

    def look(self, status: str) -> None:
        """Look who is there, if it is time to.

        Args:
            status: of the job, as the server has it.

        Raises:
            WsiFlError: when the job cannot end any more; it was ended on the server too.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        try:
            here, at_work_now = answering(self._session), at_work(self._session)
        except Exception:  # nothing is known then; whoever asks for the status next is told why
            return
        self._judge(status, here, at_work_now, now)

    def _judge(self, status: str, here: Sequence[str], at_work_now: set[str], now: float) -> None:
        begun = status in BEGUN
        away = {site for site in self._sites if site not in here}
        away |= {self._job} if begun and self._job not in at_work_now else set()
        self._missed = {one: self._missed.get(one, now) for one in away}
        if at_work_now - {self._job}:  # the server does one at a time
            self._free = now
        patience_s = max(_AWAY_S, self._patience_s) if begun else _AWAY_S
        if now - self._missed.get(self._job, now) >= _AWAY_S:
            self._give_up(f"the server was stopped while job {self._job} ran; {GO_ON}")
        gone = [site for site in self._sites if now - self._missed.get(site, now) >= patience_s]
        if gone and begun:
            self._give_up(f"site {gone[0]} was lost: its client does not answer; {GO_ON}")
        if gone:
            self._give_up(f"{', '.join(gone)} not connected any more; nothing was begun: submit again later")
        if not begun and now - self._free >= _BEGIN_S:
            self._give_up(
                f"job {self._job} has not begun within {_BEGIN_S:.0f} s, so it was withdrawn; see the server's log, "
                "and submit again"
            )

    def _give_up(self, why: str) -> None:
        with suppress(Exception):  # it may have ended by itself, or be forgotten
            self._session.abort_job(self._job)
        raise WsiFlError(why)
