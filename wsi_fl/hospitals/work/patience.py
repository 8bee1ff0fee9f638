"""The coordinator's patience: a plan that can do without a hospital goes on by itself, job after job, until it is done.

A job is for the hospitals that are there. When one falls silent or fails, the next job is for the others, from their
checkpoints; when it is there again, the job under way ends and the next one is for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from wsi_fl.hospitals.flare.jobs import JobFailed, SiteBack
from wsi_fl.hospitals.plans.signed import Plan
from wsi_fl.hospitals.work.taking_part import LAST
from wsi_fl.stages.work.console import Watcher
from wsi_fl.types import WsiFlError

_LOOK_S = 5.0
_TRIES = 3
"""Times that a hospital which is connected may fail before it is left out until it was away, or for its patience."""
_IN_VAIN = 10
"""Jobs in a row that fail and name nobody, before people have to look."""


@dataclass
class Absences:
    """Which hospitals a job may be for, from when each was seen or failed last.

    Attributes:
        names: of the hospitals, those left out by people aside.
        patience_s: how long one that is not there is waited for, in seconds.
        since: hospital → when it was first missed, or given up, in seconds of one clock.
    """

    names: Sequence[str]
    patience_s: float
    since: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, float] = field(default_factory=dict)

    def see(self, here: Sequence[str], now: float) -> None:
        """Note who is connected now."""
        self.since = {name: self.since.get(name, now) for name in self.names if name not in here}
        for name in [name for name in self.given_up if name in self.since or self._forgiven(name, now)]:
            del self.given_up[name]
            self.failures.pop(name, None)

    def blame(self, names: Sequence[str], now: float) -> None:
        """Note who made a job fail; who does so again and again is left out for a while."""
        for name in names:
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] >= _TRIES:
                self.given_up[name] = now

    def there(self) -> list[str]:
        """Return the hospitals that a job can be for."""
        return [name for name in self.names if name not in self.since and name not in self.given_up]

    def awaited(self, now: float) -> list[str]:
        """Return those that are missed, and not yet for as long as the plan's patience."""
        return [name for name, since in self.since.items() if now - since < self.patience_s]

    def _forgiven(self, name: str, now: float) -> bool:
        return now - self.given_up[name] >= self.patience_s


def until_done(
    plan: Plan,
    ask: Callable[[list[str], dict[str, Any]], dict[str, Any]],
    connected: Callable[[], list[str]],
    *,
    resume: str | None,
    without: Sequence[str],
    watcher: Watcher,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Ask hospitals for a plan's job until one ends well, and return what each of them said.

    Args:
        ask: gives a job to some hospitals and waits for its end; given their names and the job.
        connected: returns who is connected to the server.
        resume: the run to go on with at first; afterwards it is the last one.
        without: hospitals that people leave out.

    Raises:
        WsiFlError: when the plan's day is over, or a job failed for a reason that no other job mends.
    """
    settings = plan.pipeline()
    least, until = settings.train.at_least or len(plan.sites), settings.train.until
    absences = Absences([name for name in plan.sites if name not in without], settings.comm.timeout_s)
    said, in_vain = "", 0

    def tell(text: str) -> None:
        nonlocal said
        if text != said:
            watcher.say(f"  {text}", public=True)
        said = text

    while True:
        if until and date.today().isoformat() > until:
            raise WsiFlError(f"the plan was good until {until} (train.until); what was finished is kept")
        try:
            absences.see(connected(), clock())
        except WsiFlError as error:
            tell(f"{error}; it is tried again")
            sleep(_LOOK_S)
            continue
        there, awaited = absences.there(), absences.awaited(clock())
        if awaited or len(there) < least:
            missing = [name for name in absences.names if name not in there]
            tell(f"waiting for {', '.join(missing)}; {len(there)} of {len(plan.sites)} are there")
            sleep(_LOOK_S)
            continue
        left_out = [name for name in plan.sites if name not in there]
        tell(f"{', '.join(left_out)} left out of this job" if left_out else f"all {len(there)} are there")
        job = {"what": "work", "plan": plan.digest, "resume": resume, "without": left_out}
        try:
            return ask(there, job)
        except SiteBack as back:
            tell(f"{', '.join(back.sites)} is back, so a job for all who are there begins")
            in_vain = 0
        except JobFailed as failed:
            if not failed.again:
                raise
            in_vain = 0 if failed.blamed else in_vain + 1
            if in_vain >= _IN_VAIN:
                raise
            tell(str(failed))
            absences.blame([name for name in failed.blamed if name in there], clock())
            sleep(_LOOK_S)
        resume = LAST
