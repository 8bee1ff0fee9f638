"""Taking part without a server: hospitals whose letters are files in a folder that all can reach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from wsi_fl.hospitals.lines.folder_line import FolderLine
from wsi_fl.hospitals.lines.relayed import SiteReturned
from wsi_fl.hospitals.plans.signed import Plan, approved_plan
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.letters import Writer
from wsi_fl.hospitals.work.taking_part import take_part
from wsi_fl.stages.training.going_on import finished_summary
from wsi_fl.stages.work.console import say
from wsi_fl.study.folder import Study
from wsi_fl.system.locks import alone
from wsi_fl.types import Interrupted, KnownToAll, UsageError

_LEAVING_S = 10.0
"""How long a site that has the last letter of a run may take to write its summary and to leave."""


class _NobodyWaits(Interrupted):
    """A run that has finished here has finished for everybody."""


def take_part_by_folder(
    study: Study, kit: Kit, *, folder: str | None = None, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Do a hospital's part of the plan that it has signed, over a folder, and return the run's summary.

    To call it again is always right, also from cron. It begins the plan's run, or goes on with the one that all
    sites have, from their checkpoints; what was sent is sent again, and nothing is charged twice but a sum that was
    spoilt. When the run has finished, the summary is returned at once, unless a peer that was stopped before its own
    end says hello: then this site helps it to finish, as far as that costs nothing. A sum that a site holds is never
    made again, unless its people approve the plan again. A peer that was stopped and started again makes all begin
    again from their checkpoints, in the same process.

    The processes of all sites must be alive at the same time: to say hello, and then in every round, as each waits for
    the others' letters of that round. With `comm.timeout_s` of days a site waits that long for a machine that sleeps,
    and letters lie in the folder meanwhile; but a process that was stopped has forgotten the key that letters to it
    were sealed with, so that all begin again. Two processes that are never alive at the same time finish no hello.

    Args:
        study: of this hospital, the only other folder that is read or written.
        folder: the address of the folder, an fsspec URL or a path. By default that of the kit.
        without: sites that were lost, to go on without; all others must leave out the same ones.

    Raises:
        UsageError: when no folder is known, no plan was signed, or wsi-fl is another than the plan's.
        WsiFlError: when a site did not answer within `comm.timeout_s`, another process of this study takes part
            already, or the sites' runs do not fit together.
    """
    address = folder or kit.folder
    if address is None:
        raise UsageError(f"{kit.path}: this kit names no folder; give its address")
    identity = kit.identity()
    plan = approved_plan(study, identity)
    line = FolderLine(address, identity.name, plan.digest, most_bytes=plan.most_bytes)
    busy = f"site {identity.name}: another process of this study takes part already; wait for it"
    with alone(study.root / "federation" / f".{identity.name}.lock", busy), kit.alone():
        return _until_done(study, kit, plan, line, without)


def _until_done(
    study: Study, kit: Kit, plan: Plan, line: FolderLine, without: Sequence[str]
) -> dict[str, Any]:
    """Take part, and begin again whenever a peer does."""
    identity = kit.identity()
    writer, peers = Writer(identity), set(plan.sites) - {identity.name, *without}
    finished, told = finished_summary(study, plan.digest, plan.sites, without), {""}

    def notice() -> None:
        if (trouble := line.trouble) not in told:
            told.add(trouble)
            say(f"  {trouble}; it is tried again", "yellow")
        if finished is not None and not peers & line.waiting():
            raise _NobodyWaits

    if finished is not None and not _still_wait(line, peers):
        return finished
    say(f"  {identity.name} takes part in plan {plan.digest[:8]}, as soon as all others do")
    while True:
        try:
            return take_part(
                study, identity, line, without=without, go_on=True, writer=writer, waiting=notice
            )
        except SiteReturned as returned:
            say(f"  {returned}; all begin again from their checkpoints")
        except KnownToAll as refusal:
            if finished is None:
                raise
            if not isinstance(refusal, _NobodyWaits):
                say(f"  {refusal}; the run has finished here", "yellow")
            return finished
        finally:
            line.close()


def _still_wait(line: FolderLine, peers: set[str]) -> bool:
    """Whether a peer waits for a run that has finished here, and is not just about to leave it too."""
    deadline = time.monotonic() + _LEAVING_S
    while peers & line.waiting():
        if time.monotonic() > deadline:
            return True
        time.sleep(_LEAVING_S / 50)
    return False
