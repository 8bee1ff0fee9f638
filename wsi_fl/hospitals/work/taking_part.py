"""A hospital's part in a signed plan, whatever carries its letters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from typing_extensions import TypedDict

from wsi_fl import __version__
from wsi_fl.federation.documents import Name
from wsi_fl.hospitals.lines.relayed import Attendance, Line, RelayedComm
from wsi_fl.hospitals.plans.admitting import admit
from wsi_fl.hospitals.plans.frames import ended, listed_codes
from wsi_fl.hospitals.plans.signed import (
    Plan,
    approved_at,
    approved_plan,
    check_code,
    check_promises,
    check_withdrawn,
    code_digest,
)
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.certificates import withdrawn as listed
from wsi_fl.hospitals.work.said import Reached
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.carrying import own_letter
from wsi_fl.stages.training.checks import check
from wsi_fl.stages.training.going_on import (
    Asked,
    begun_under,
    note_who_goes_on,
    require_same,
    taken_up,
)
from wsi_fl.stages.training.summary import Summary
from wsi_fl.stages.work.console import say
from wsi_fl.study.folder import Study
from wsi_fl.types import KnownToAll, NoCommonPlan, UsageError

_GREETING_S = 60.0
LAST = "last"
"""In place of a run: the one of the plan that all sites have, or a new one."""


def take_part(
    study: Study,
    identity: Identity,
    line: Line,
    *,
    resume: str | None = None,
    without: Sequence[str] = (),
    plan: str | None = None,
    brought: Plan | None = None,
    waiting: Callable[[], None] = lambda: None,
    attendance: Attendance | None = None,
    withdrawn: Callable[[], Mapping[str, datetime]] = dict,
) -> Summary:
    """Do a hospital's part of the plan that it has signed, and return the summary that all sites get to know.

    Args:
        study: of this hospital, the only folder that is read or written.
        identity: of its kit.
        resume: a run of this plan to go on with, or "last": the sites agree on the one of this plan that all have, or
            begin a new one; default: a new one.
        without: sites that were lost.
        plan: SHA-256 of the plan that is asked for, where somebody asks; another than the signed one is refused.
        brought: that plan as it came; it is approved now where the hospital's frame allows it.
        waiting: called now and then while this process waits for others.
        attendance: of this process, where it begins again by itself; where its sites go on without one that fell
            silent, `without` is not given. Default: all others are needed.
        withdrawn: what is known of withdrawn certificates by now, see `RelayedComm`.

    Raises:
        Interrupted: when a peer's process began anew, or fell silent, so that all begin again, or when a certificate
            was withdrawn.
        UsageError: when no plan was signed, another one is asked for, or wsi-fl is another than the plan's.
    """
    last = resume == LAST
    with _told_to_all():
        agreed, approved = _agreed(study, identity, plan, brought)
        if resume is None:
            _refuse_once_more(study, agreed, approved, identity.name)
        run = None if resume is None or last else _own_run(study, resume)
    least = agreed.pipeline().train.min_sites
    asked = Asked(
        agreed.name,
        run,
        last,
        without,
        begins_without=least is not None,
        agreement=agreed.digest,
        approved=approved,
        parameters=agreed.parameters,
    )
    party = RunContext.of(study, agreed.pipeline(), agreed.method)
    if run is not None:
        began, finished = taken_up(study, asked)
        with _told_to_all():
            require_same(began, party, agreed.digest)
        if finished is not None:
            say(f"{finished['run']} has finished already; nothing is sent again")
            return finished
        party = began
    check(party, "mpi", stores=False)
    if party.by_files and not party.site(identity.name).receives:
        with _told_to_all():
            own_letter(party, identity.name)
    if run is not None:
        note_who_goes_on(party, asked)
        running = party.running
    else:
        if unknown := sorted(set(without) - set(party.names)):
            raise UsageError(f"unknown site {unknown[0]!r}; the plan has {', '.join(party.names)}")
        left_out = without if last or least else ()
        running = tuple(k for k, name in enumerate(party.names) if name not in left_out)
    if least is not None and len(running) < least:
        raise KnownToAll(f"the plan is for at least {least} hospitals, and this job for {len(running)}")
    from wsi_fl.stages.training import ranks  # and with it PyTorch

    attendance = attendance or Attendance(identity, agreed.sites)
    comm = _introduced(
        study,
        identity,
        agreed,
        running,
        line,
        party.pipeline.comm.timeout_s,
        approved=approved,
        waiting=waiting,
        attendance=attendance,
        withdrawn=withdrawn,
    )
    if attendance.at_least is not None:
        away = [name for k, name in enumerate(agreed.sites) if k not in comm.running]
        why = {name: attendance.why.get(name, "gone, as other sites say") for name in away}
        asked = replace(asked, without=away, why=why)
    try:
        return ranks.take_part(party, comm, asked)
    finally:
        comm.close()


def known_to_all(study: Study, site: str, summary: Summary) -> Mapping[str, object]:
    """Return what `take_part` did, with one more key: as "scores" the counts that all sites of a run hold, or None."""
    run = RunFolder(study.run(str(summary["run"])))
    return {**summary, "scores": run.site(site).kept("scores")}


@contextmanager
def _told_to_all() -> Iterator[None]:
    """What does not fit the plan may be told to others: it is made of the plan, and of promises that it repeats."""
    try:
        yield
    except UsageError as error:
        raise NoCommonPlan(str(error)) from None


class Seen(TypedDict):
    """What hospitals that only go to see each other tell."""

    site: Name


def greet(
    study: Study, identity: Identity, line: Line, *, plan: str | None = None, brought: Plan | None = None
) -> Reached:
    """Go to see every other site of the signed plan and train nothing.

    Raises:
        UsageError: when no plan was signed, or another one is asked for.
        KnownToAll: when a site does not answer, or has another plan, version, code or time.
    """
    began = time.perf_counter()
    with _told_to_all():
        agreed, approved = _agreed(study, identity, plan, brought)
    everybody = tuple(range(len(agreed.sites)))
    comm = _introduced(study, identity, agreed, everybody, line, _GREETING_S, approved=approved)
    try:
        told = comm.gather([Seen(site=identity.name)], Seen)
    finally:
        comm.close()
    peers = [one["site"] for one in told if one["site"] != identity.name]
    return {"site": identity.name, "peers": peers, "seconds": round(time.perf_counter() - began, 3)}


def _own_run(study: Study, asked: str) -> RunFolder:
    """A run that somebody else asks for, once it is known to be one of this study by its plain name."""
    name = Path(asked).name
    if asked not in (name, f"runs/{name}") or not (study.runs / name / "config.toml").is_file():
        raise UsageError("the run that is asked for is not in this hospital's runs/")
    return RunFolder(study.runs / name)


def _refuse_once_more(study: Study, plan: Plan, approved: str, site: str) -> None:
    """Refuse a further run of a plan that was approved for one: each costs its ε, and lets go what the plan says."""
    if (run := begun_under(study, plan.digest, approved, site)) is not None:
        raise UsageError(
            f"site {site} approved plan {plan.digest[:8]} for one run, and has it: {run.name}; go on with it by "
            f"`federation submit --resume last`, or let {site} approve the plan again, which spends its ε once more"
        )


def _introduced(
    study: Study,
    identity: Identity,
    agreed: Plan,
    running: tuple[int, ...],
    line: Line,
    timeout_s: float,
    *,
    approved: str,
    waiting: Callable[[], None] = lambda: None,
    attendance: Attendance | None = None,
    withdrawn: Callable[[], Mapping[str, datetime]] = dict,
) -> RelayedComm:
    """The sites of a plan, once all have said hello."""
    sites, gone = [agreed.sites[k] for k in running], listed(identity.root).keys
    least = attendance.at_least if attendance is not None else None
    if least is None or sum(agreed.keys.get(name, "") not in gone for name in sites) < least:
        with _told_to_all():
            check_withdrawn(agreed, identity.root, sites)
    site, frame = identity.name, approved.partition(" frame ")[2]

    def standing() -> str:
        known = approved_at(study, site) == approved
        return ended(study, identity, frame) or ("" if known else "approved another plan in its frame")

    return RelayedComm(
        identity,
        agreed.sites,
        running,
        line,
        timeout_s,
        version=__version__,
        code=code_digest(),
        plan=agreed.digest,
        most_bytes=agreed.most_bytes,
        keys=agreed.keys,
        waiting=waiting,
        attendance=attendance,
        standing=standing if frame else lambda: "",
        withdrawn=withdrawn,
    )


def _agreed(study: Study, identity: Identity, asked: str | None, brought: Plan | None) -> tuple[Plan, str]:
    """The plan that a site has signed, once it is known to be the one asked for and for the code here, and when."""
    if brought is not None and brought.digest == asked:
        admit(study, identity, brought)
    site = identity.name
    approved, agreed = approved_at(study, site), approved_plan(study, identity)
    if approved != approved_at(study, site):
        raise UsageError(f"site {site} approved another plan just now; nothing was begun, so ask again")
    if asked is not None and asked != agreed.digest:
        raise UsageError(
            f"site {site} signed plan {agreed.digest[:8]}, but this job is plan {asked[:8]}; nothing was begun"
        )
    own = next(one for one in agreed.document["sites"] if one["name"] == site)
    check_promises(own, study.site(site))
    check_code(agreed, site, listed_codes(study, identity))
    return agreed, approved
