"""What is to be done next in a federation, by whom: one pure function of what is known, and one table of remedies."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

from wsi_fl.hospitals.flare.files import COORDINATOR, SERVER
from wsi_fl.hospitals.trust.certificates import Role
from wsi_fl.hospitals.trust.kit import SOON_DAYS

_SITE = "SITE"
"""In a remedy: whoever the problem names, and where it names nobody, whoever looks."""
_ALL = "everybody"
_APPROVE = "wsi-fl federation approve {plan} --kit {kit}"
_START = "wsi-fl federation start {kit} --study {study}"
_SUBMIT = "wsi-fl federation submit --kit {kit} --plan {plan}"
_RESUME = f"{_SUBMIT} --resume last"
_PLAN = "wsi-fl federation plan --method {method} --kit {founded}"
_CHECK = "wsi-fl federation check {kit}"
_RENEW = "wsi-fl federation approve request-{site}.json --kit {founded}"


@dataclass(frozen=True)
class Member:
    """Who takes part, as far as it is known here; None stands for what is not.

    Attributes:
        until: when the certificate ends.
        version: of wsi-fl; of another hospital the one that it said hello with, or signed the plan with.
        signed: whether the plan; `why` says why not.
        connected, since: whether a process of its own takes part, and since when.
        round: the last that it has begun or finished.
        heard: when it last wrote something: a letter, or a line of its own log.
        spent, budget: ε of everything that it ever released, and its max_epsilon.
        labels: classes that it offers examples of.
    """

    name: str
    role: Role
    until: datetime | None = None
    version: str | None = None
    signed: bool | None = None
    why: str = ""
    connected: bool | None = None
    since: datetime | None = None
    round: int | None = None
    heard: datetime | None = None
    spent: float | None = None
    budget: float | None = None
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Agreed:
    """The newest plan that lies in the study.

    Attributes:
        file: as commands name it.
        patience_s: how long sites wait for one another.
    """

    file: str
    sha256: str
    method: str
    rounds: int
    patience_s: float


@dataclass(frozen=True)
class Job:
    """What became of the newest job of the plan; None for what is not so.

    Attributes:
        running: whether the server works on it.
        reason: why it failed.
    """

    id: str
    running: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Result:
    """The finished run of the plan; `report` is the page of it, or "" where none was made."""

    run: str
    report: str = ""


@dataclass(frozen=True)
class Facts:
    """All that is known of a federation at one place.

    Attributes:
        me: whose kit looks; "" without one.
        over: what joins the hospitals; "" where no kit says so.
        kit, study: where they lie, as commands name them.
        trouble: what failed while this was looked up, a line each.
    """

    now: datetime
    me: str
    over: Literal["server", "folder", ""]
    members: tuple[Member, ...]
    plan: Agreed | None = None
    job: Job | None = None
    result: Result | None = None
    trouble: tuple[str, ...] = ()
    kit: str = "KIT"
    study: str = "."


class Step(NamedTuple):
    """What somebody does next; `command` is "" where no command of wsi-fl does it."""

    who: str
    what: str
    command: str = ""


class Remedy(NamedTuple):
    """What is to be done about a known problem.

    Attributes:
        problem: a regular expression of what is told; its group `site` names whom it is about.
        steps: whose commands have places for what is known here.
    """

    problem: str
    steps: tuple[Step, ...]


_GO_ON = Step(COORDINATOR, "go on from the last common round", _RESUME)
_NEW_PLAN = Step(COORDINATOR, "make a new plan, which all sign", _PLAN)
_S = r"(?P<site>[\w.-]+)"
REMEDIES = (
    Remedy(
        "no way through to",
        (
            Step(
                SERVER,
                "start the server, and let TCP in and out at its port",
                "wsi-fl federation start {kit}",
            ),
        ),
    ),
    Remedy(
        r"the name \S+ is not known here", (Step(_SITE, "ask your network's people to resolve it", _CHECK),)
    ),
    Remedy(
        "the server's certificate was refused",
        (Step(_SITE, "compare the server's address and your clock with the coordinator's", _CHECK),),
    ),
    Remedy(
        "the server refused this kit's certificate|set the clock, or request a new certificate",
        (
            Step(_SITE, "set the clock; where it is right, send your request once more", _CHECK),
            Step(COORDINATOR, "approve it again, and send the certificate back", _RENEW),
        ),
    ),
    Remedy(rf"{_S} not connected", (Step(_SITE, "start", _START),)),
    Remedy(
        rf"{_S} has (approved no|signed another) plan", (Step(_SITE, "read the plan and sign it", _APPROVE),)
    ),
    Remedy(
        rf"site {_S} signed plan .* but this job is plan", (Step(_SITE, "sign the newest plan", _APPROVE),)
    ),
    Remedy(
        rf"{_S} approved plan .* for one run",
        (_GO_ON, Step(_SITE, "for another run, and its ε once more, sign again", _APPROVE)),
    ),
    Remedy(
        rf"the plan is for .*, (and site|but) {_S} has",
        (
            Step(_SITE, "install what the plan names, or make your store as it says", "wsi-fl doctor"),
            _NEW_PLAN,
        ),
    ),
    Remedy(
        rf"the plan says .* of {_S}, and sites/",
        (Step(_SITE, "send the coordinator your site file's promises"), _NEW_PLAN),
    ),
    Remedy(
        rf"the plan names another key of {_S}",
        (Step(COORDINATOR, "compare the fingerprint by telephone, then make the plan anew", _PLAN),),
    ),
    Remedy("is not enough for one round", (_NEW_PLAN._replace(what="plan more noise or fewer rounds"),)),
    Remedy(
        rf"site {_S} failed; its own log says why",
        (Step(_SITE, "look into your own log, runs/{site}.log, and mend what it says"), _GO_ON),
    ),
    Remedy(
        rf"site {_S} (was lost|took nothing|did not answer)",
        (Step(_SITE, "start again, unless it runs", _START), _GO_ON),
    ),
    Remedy("the server was (stopped|lost) while|has not finished", (_GO_ON,)),
    Remedy(
        r"the server \S+ is gone",
        (Step(SERVER, "start the server again", "wsi-fl federation start {kit}"), _GO_ON),
    ),
    Remedy("was ended by the coordinator", (_GO_ON._replace(what="go on, if it was not ended for good"),)),
    Remedy(
        "nothing was begun: submit again|has not begun within", (Step(COORDINATOR, "submit again", _SUBMIT),)
    ),
    Remedy(
        "and no hospital said why|has no answer of",
        (Step(SERVER, "look into the server's log.txt"), _GO_ON),
    ),
    Remedy("another process", (Step(_SITE, "end the other process, or let it do the work"),)),
    Remedy(
        "the folder cannot be used|no such folder; mount the share",
        (Step(_SITE, "mount the share, or give its address", _START + " --folder ADDRESS"),),
    ),
    Remedy(
        "backup of the ledger back|restore it: it is the|restore both from the same backup",
        (Step(_SITE, "put the newest backup of your ledger back, and start nothing before"),),
    ),
    Remedy("this kit is incomplete|this kit says", (Step(_SITE, "put the kit's own backup back", _CHECK),)),
    Remedy(r"wsi-fl\[flare\]", (Step(_SITE, "install NVIDIA FLARE: pip install 'wsi-fl[flare]'"),)),
)


def next_steps(facts: Facts) -> list[Step]:
    """Return what is to be done next, the most pressing first, each step once.

    Args:
        facts: what is known; what is unknown asks nothing of anybody.
    """
    return list(dict.fromkeys(_steps(facts)))


def _steps(facts: Facts) -> Iterator[Step]:
    for line in facts.trouble:
        yield from _remedied(facts, line)
    for member in facts.members:
        yield from _renewal(facts, member)
    if not facts.me:
        yield Step("", "say --kit too: without it nothing is known of signatures, server and folder")
    elif facts.plan is None:
        yield _step(facts, Step(COORDINATOR, "make the plan, and send it to every hospital", _PLAN))
    elif facts.result is not None:
        yield _open(facts, facts.result)
    elif facts.job is not None and facts.job.running:
        yield Step(_ALL, "wait: the hospitals work")
    else:
        yield from _to_a_run(facts)


def _to_a_run(facts: Facts) -> Iterator[Step]:
    """What is missing for a run of the plan to begin, or to go on."""
    hospitals = [one for one in facts.members if one.role == "hospital"]
    missing = [*_signatures(facts, hospitals), *_starts(facts, hospitals)]
    yield from missing
    if facts.job is not None and facts.job.reason:
        yield from _remedied(facts, facts.job.reason)
    elif facts.over == "server" and not missing:
        known = all(one.signed and one.connected for one in hospitals)
        what = "all have signed: submit" if known else "submit, once all have signed and started"
        yield _step(facts, Step(COORDINATOR, what, _SUBMIT))


def _signatures(facts: Facts, hospitals: list[Member]) -> Iterator[Step]:
    send = "sign the plan, and send the approval to the coordinator"
    for one in hospitals:
        if one.signed is False:
            yield _step(facts, Step(one.name, send, _APPROVE))


def _starts(facts: Facts, hospitals: list[Member]) -> Iterator[Step]:
    """Of hospitals that are not there, or have been silent for longer than the others wait."""
    assert facts.plan is not None
    for one in hospitals:
        waited_for = one.heard if facts.over == "folder" else None
        silent_s = (facts.now - waited_for).total_seconds() if waited_for else 0.0
        if one.connected is False and one.signed is not False:
            yield _step(facts, Step(one.name, "not connected: start", _START))
        elif silent_s > facts.plan.patience_s:
            yield _step(
                facts, Step(one.name, f"silent since {one.heard:%Y-%m-%d %H:%M}: start again", _START)
            )


def _renewal(facts: Facts, member: Member) -> Iterator[Step]:
    if member.until is None or (days := (member.until - facts.now).days) >= SOON_DAYS:
        return
    when = f"ends in {days} days" if days >= 0 else f"ended on {member.until:%Y-%m-%d}"
    renew = f"the certificate of {member.name} {when}: approve its request again, send it back"
    yield _step(facts, Step(COORDINATOR, renew, _RENEW), member.name)
    join = "wsi-fl federation join certificate-{site}.json --kit {kit}"
    yield _step(facts, Step(member.name, "put the new certificate into the kit", join), member.name)


def _open(facts: Facts, result: Result) -> Step:
    if result.report:
        return Step(facts.me, f"done: open {result.report}")
    return Step(facts.me, "done: make the report", f"wsi-fl report {shlex.quote(result.run)}")


def _remedied(facts: Facts, line: str) -> Iterator[Step]:
    """What is to be done about a problem; one that nobody knows is shown as it is."""
    for remedy in REMEDIES:
        if found := re.search(remedy.problem, line):
            site = found.groupdict().get("site") or facts.me
            yield from (_step(facts, step, site) for step in remedy.steps)
            return
    yield Step(facts.me, line)


def _step(facts: Facts, step: Step, site: str = "") -> Step:
    """A step with what is known put into its places: own paths for oneself, words in capitals for others."""
    if facts.over == "folder" and step.command in (
        _SUBMIT,
        _RESUME,
    ):  # there every hospital goes on by itself
        return Step(_ALL, "start; to start again is always right", "wsi-fl federation start KIT --study DIR")
    who = site if step.who == _SITE else step.who
    mine, plan = who == facts.me, facts.plan
    places = {
        "kit": facts.kit if mine else "KIT",
        "study": facts.study if mine else "DIR",
        "founded": "FOUNDED",
        "plan": plan.file if plan and mine else "plan.json",
        "method": plan.method if plan else "METHOD",
        "site": site or who,
    }
    quoted = {name: shlex.quote(value) for name, value in places.items()}
    return Step(who, step.what.format(**places), step.command.format(**quoted))
