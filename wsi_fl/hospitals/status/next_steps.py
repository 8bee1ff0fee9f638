"""The next steps in a federation, each with its person: a pure function of the known facts, and `remedies.toml`."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wsi_fl.hospitals.faults import NO_FAULT, Fault, FaultCode
from wsi_fl.hospitals.flare.flare_files import COORDINATOR
from wsi_fl.hospitals.trust.certificates import Role
from wsi_fl.hospitals.trust.kit import RENEWAL_DAYS
from wsi_fl.hospitals.work.job_log import LoggedJob

_SITE_PLACEHOLDER, _ALL_MEMBERS = "SITE", "everybody"


@dataclass(frozen=True)
class FederationMember:
    """A member of the federation, as far as it is known here; None stands for unknown values.

    Attributes:
        until: when the certificate ends.
        withdrawn_on: when it was revoked instead.
        signed: whether it signed the plan.
        withdrawn: whether the key in the plan was revoked.
        connected: whether a process of its own takes part; over a folder that is unknown of a process without a
            message.
        round, heard: the last that it began or finished, and when it last wrote a message or a line of its log.
        spent, budget: ε of everything that it ever released, and its max_epsilon.
    """

    name: str
    role: Role
    until: datetime | None = None
    withdrawn_on: datetime | None = None
    version: str | None = None
    signed: bool | None = None
    withdrawn: bool | None = None
    connected: bool | None = None
    round: int | None = None
    heard: datetime | None = None
    spent: float | None = None
    budget: float | None = None


class Trouble(NamedTuple):
    """A failure, in words and by its kind."""

    text: str
    fault: Fault = NO_FAULT


class JobRow(LoggedJob):
    """A job as the server and the kit know it."""

    id: str
    name: str | None
    status: str
    submitted: float | str | None


@dataclass
class FederationState:
    """All that is known of a federation at one place; "" stands for missing things.

    Attributes:
        me: the holder of the kit.
        over: the connection between the hospitals.
        plan, sha256, sites, method, rounds, patience_s: the newest plan: its file, and its content.
        job, running, failure: the newest job of the plan, whether it runs, and why it failed.
        run, report: the finished run of the plan, and its page.
        kit, study: their paths, as commands name them; study "" if none was found.
        troubles: failures while this was collected.
        connected: hospitals that answer the server; None without a server, or if it was not asked.
        jobs: the newest jobs on the server.
    """

    members: dict[str, FederationMember]
    moment: datetime = field(default_factory=lambda: datetime.now(UTC))
    me: str = ""
    over: Literal["server", "folder"] = "server"
    plan: str = ""
    sha256: str = ""
    sites: tuple[str, ...] = ()
    method: str = "METHOD"
    rounds: int = 0
    patience_s: float = 0.0
    job: str = ""
    running: bool = False
    failure: Trouble | None = None
    run: str = ""
    report: str = ""
    kit: str = "KIT"
    study: str = "."
    troubles: list[Trouble] = field(default_factory=list)
    connected: list[str] | None = None
    jobs: list[JobRow] = field(default_factory=list)

    def note_member(self, name: str, **values: Any) -> None:
        """Record values of a member; None changes nothing, and unknown names are ignored."""
        if name in self.members:
            known_values = {key: value for key, value in values.items() if value is not None}
            self.members[name] = replace(self.members[name], **known_values)


class _NextStep(NamedTuple):
    """Somebody's next step; `command` is "" if no command of wsi-fl does it."""

    who: str
    what: str
    command: str = ""


_REMEDY_TEXTS = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text("utf-8"))
COMMANDS: dict[str, str] = _REMEDY_TEXTS["command"]
"""Commands with places for known values."""
REMEDIES: dict[FaultCode, list[list[str]]] = _REMEDY_TEXTS["remedy"]
"""The steps (who, what, command) of each kind of failure."""


def next_steps(facts: FederationState) -> list[_NextStep]:
    """Return the next steps, the most pressing first, each once; unknown values need no step."""
    return list(dict.fromkeys(_find_steps(facts)))


def _find_steps(facts: FederationState) -> Iterator[_NextStep]:
    if facts.run:
        done = _fill_step(facts, facts.me, "done: make the report", "report")
        yield _NextStep(facts.me, f"done: open {facts.report}") if facts.report else done
    for trouble in facts.troubles:
        yield from _remedy_steps(facts, trouble)
    for member in facts.members.values():
        yield from _renewal_steps(facts, member)
    if not facts.study:
        yield _NextStep("", "give --study DIR too: without it nothing is known of the plan")
    elif not facts.plan:
        yield _fill_step(facts, COORDINATOR, "make the plan, and send it to every hospital", "plan")
    elif facts.running:
        yield _NextStep(_ALL_MEMBERS, "wait: the hospitals work")
    elif not facts.run:
        yield from _steps_before_run(facts)
    elif facts.failure:  # a further run was tried
        yield from _remedy_steps(facts, facts.failure)


def _steps_before_run(facts: FederationState) -> Iterator[_NextStep]:
    """Yield the missing steps before a run of the plan can begin, or go on."""
    hospitals = [facts.members[name] for name in facts.sites]
    missing = [step for hospital in hospitals for step in _hospital_steps(facts, hospital)]
    yield from missing
    if facts.failure:
        yield from _remedy_steps(facts, facts.failure)
    elif facts.over == "server" and not missing:
        ready = all(hospital.signed and hospital.connected for hospital in hospitals)
        text = "all have signed: submit" if ready else "submit, once all have signed and started"
        yield _fill_step(facts, COORDINATOR, text, "submit")


def _hospital_steps(facts: FederationState, member: FederationMember) -> Iterator[_NextStep]:
    waited_for = member.heard if facts.over == "folder" else None  # a server detects dropouts itself
    if member.withdrawn:
        text = f"the key of {member.name} was withdrawn: make a plan without it, or with its new key"
        yield _fill_step(facts, COORDINATOR, text, "plan")
    elif member.signed is False:
        yield _fill_step(facts, member.name, "sign the plan, and send the approval to the coordinator", "approve")
    elif member.connected is False:
        yield _fill_step(facts, member.name, "not connected: start", "start")
    elif waited_for and (facts.moment - waited_for).total_seconds() > facts.patience_s:
        yield _fill_step(facts, member.name, f"silent since {waited_for:%Y-%m-%d %H:%M}: start again", "start")
    elif member.connected is None and facts.over == "folder":
        yield _fill_step(facts, member.name, "if it has not run yet", "start")


def _renewal_steps(facts: FederationState, member: FederationMember) -> Iterator[_NextStep]:
    if member.withdrawn or member.withdrawn_on or member.until is None:
        return
    if (days := (member.until - facts.moment).days) >= RENEWAL_DAYS:
        return
    when = f"ends in {days} days" if days >= 0 else f"ended on {member.until:%Y-%m-%d}"
    renew = f"the certificate of {member.name} {when}: approve its request again, send it back"
    yield _fill_step(facts, COORDINATOR, renew, "renew", member.name)
    yield _fill_step(facts, member.name, "put the new certificate into the kit", "join")


def _remedy_steps(facts: FederationState, trouble: Trouble) -> Iterator[_NextStep]:
    """Yield the steps for a failure; one of no known kind is shown as it is."""
    site = trouble.fault.site or facts.me
    for who, text, command in REMEDIES.get(trouble.fault.code, ()):
        yield _fill_step(facts, site if who == _SITE_PLACEHOLDER else who, text, command, site)
    if trouble.fault.code not in REMEDIES:
        yield _NextStep(facts.me, trouble.text)


def _fill_step(facts: FederationState, who: str, text: str, command: str, site: str = "") -> _NextStep:
    """Return a step with known values in its places: paths for this place, words in capitals for others."""
    if facts.over == "folder" and command in ("submit", "resume"):  # there every hospital resumes by itself
        who, text, command = _ALL_MEMBERS, "start; to start again is always right", "start"
    is_self = who == facts.me
    places = {
        "kit": facts.kit if is_self else "KIT",
        "study": facts.study if is_self else "DIR",
        "plan": facts.plan if is_self else "plan.json",
        "founded": "FOUNDED",
        "method": facts.method,
        "run": facts.run,
        "site": site or who,
    }
    quoted = {name: shlex.quote(value) for name, value in places.items()}
    return _NextStep(who, text.format(**places), COMMANDS[command].format(**quoted) if command else "")
