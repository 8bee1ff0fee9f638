"""The next steps in a federation, each with its person: a pure function of the known facts, and `remedies.toml`."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wsi_fl.hospitals.flare.files import COORDINATOR
from wsi_fl.hospitals.trust.certificates import Role
from wsi_fl.hospitals.trust.kit import SOON_DAYS
from wsi_fl.learning.counts import Scores

_SITE, _ALL = "SITE", "everybody"


@dataclass(frozen=True)
class Member:
    """A member of the federation, as far as it is known here; None stands for unknown values.

    Attributes:
        until: when the certificate ends.
        withdrawn_on: when it was revoked instead.
        signed: whether it signed the plan.
        withdrawn: whether the key in the plan was revoked.
        connected, since: whether a process of its own takes part, and since when; over a folder that is unknown of a
            process without a message.
        round, heard: the last that it began or finished, and when it last wrote a message or a line of its log.
        spent, budget: ε of everything that it ever released, and its max_epsilon.
        labels: classes that it has examples of.
    """

    name: str
    role: Role
    until: datetime | None = None
    withdrawn_on: datetime | None = None
    version: str | None = None
    signed: bool | None = None
    withdrawn: bool | None = None
    connected: bool | None = None
    since: datetime | None = None
    round: int | None = None
    heard: datetime | None = None
    spent: float | None = None
    budget: float | None = None
    labels: tuple[str, ...] | None = None


@dataclass
class Facts:
    """All that is known of a federation at one place; "" stands for missing things.

    Attributes:
        me: the holder of the kit.
        over: the connection between the hospitals.
        plan, sha256, sites, method, rounds, patience_s: the newest plan: its file, and its content.
        job, running, reason: the newest job of the plan, whether it runs, and why it failed.
        run, report, scores: the finished run of the plan, its page, and the counts that hospitals disclosed.
        kit, study: their paths, as commands name them.
        trouble: failures while this was collected, a line each.
    """

    members: dict[str, Member]
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    me: str = ""
    over: Literal["server", "folder", ""] = ""
    plan: str = ""
    sha256: str = ""
    sites: tuple[str, ...] = ()
    method: str = "METHOD"
    rounds: int = 0
    patience_s: float = 0.0
    job: str = ""
    running: bool = False
    reason: str = ""
    run: str = ""
    report: str = ""
    scores: Scores | None = None
    kit: str = "KIT"
    study: str = "."
    trouble: list[str] = field(default_factory=list)

    def note(self, name: str, **found: Any) -> None:
        """Record values of a member; None changes nothing, and unknown names are ignored."""
        if name in self.members:
            known = {key: value for key, value in found.items() if value is not None}
            self.members[name] = replace(self.members[name], **known)


class _Step(NamedTuple):
    """Somebody's next step; `command` is "" if no command of wsi-fl does it."""

    who: str
    what: str
    command: str = ""


_SAID = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text("utf-8"))
_COMMANDS: dict[str, str] = _SAID["command"]
"""Commands with places for known values."""
_REMEDIES = [
    (one["problem"].replace(_SITE, r"(?P<site>[\w.-]+)"), [_Step(*step) for step in one["steps"]])
    for one in _SAID["remedy"]
]
"""(problem, steps) of each known problem."""


def next_steps(facts: Facts) -> list[_Step]:
    """Return the next steps, the most pressing first, each once; unknown values need no step."""
    return list(dict.fromkeys(_steps(facts)))


def _steps(facts: Facts) -> Iterator[_Step]:
    if facts.run:
        done = _step(facts, facts.me, "done: make the report", "report")
        yield _Step(facts.me, f"done: open {facts.report}") if facts.report else done
    for line in facts.trouble:
        yield from _remedied(facts, line)
    for member in facts.members.values():
        yield from _renewal(facts, member)
    if not facts.me:
        yield _Step("", "give --kit too: without it nothing is known of signatures, server and folder")
    elif not facts.plan:
        yield _step(facts, COORDINATOR, "make the plan, and send it to every hospital", "plan")
    elif facts.running:
        yield _Step(_ALL, "wait: the hospitals work")
    elif not facts.run:
        yield from _to_a_run(facts)
    elif facts.reason:  # a further run was tried
        yield from _remedied(facts, facts.reason)


def _to_a_run(facts: Facts) -> Iterator[_Step]:
    """Yield the missing steps before a run of the plan can begin, or go on."""
    hospitals = [facts.members[name] for name in facts.sites]
    missing = [step for one in hospitals for step in _from_hospital(facts, one)]
    yield from missing
    if facts.reason:
        yield from _remedied(facts, facts.reason)
    elif facts.over == "server" and not missing:
        ready = all(one.signed and one.connected for one in hospitals)
        what = "all have signed: submit" if ready else "submit, once all have signed and started"
        yield _step(facts, COORDINATOR, what, "submit")


def _from_hospital(facts: Facts, one: Member) -> Iterator[_Step]:
    waited_for = one.heard if facts.over == "folder" else None  # a server detects dropouts itself
    if one.withdrawn:
        what = f"the key of {one.name} was withdrawn: make a plan without it, or with its new key"
        yield _step(facts, COORDINATOR, what, "plan")
    elif one.signed is False:
        yield _step(facts, one.name, "sign the plan, and send the approval to the coordinator", "approve")
    elif one.connected is False:
        yield _step(facts, one.name, "not connected: start", "start")
    elif waited_for and (facts.now - waited_for).total_seconds() > facts.patience_s:
        yield _step(facts, one.name, f"silent since {waited_for:%Y-%m-%d %H:%M}: start again", "start")
    elif one.connected is None and facts.over == "folder":
        yield _step(facts, one.name, "if it has not run yet", "start")


def _renewal(facts: Facts, one: Member) -> Iterator[_Step]:
    if (
        one.withdrawn
        or one.withdrawn_on
        or one.until is None
        or (days := (one.until - facts.now).days) >= SOON_DAYS
    ):
        return
    when = f"ends in {days} days" if days >= 0 else f"ended on {one.until:%Y-%m-%d}"
    renew = f"the certificate of {one.name} {when}: approve its request again, send it back"
    yield _step(facts, COORDINATOR, renew, "renew", one.name)
    yield _step(facts, one.name, "put the new certificate into the kit", "join")


def _remedied(facts: Facts, line: str) -> Iterator[_Step]:
    """Yield the steps for a problem; an unknown one is shown as it is."""
    for problem, steps in _REMEDIES:
        if found := re.search(problem, line):
            site = found.groupdict().get("site") or facts.me
            for who, what, command in steps:
                yield _step(facts, site if who == _SITE else who, what, command, site)
            return
    yield _Step(facts.me, line)


def _step(facts: Facts, who: str, what: str, command: str, site: str = "") -> _Step:
    """Return a step with known values in its places: paths for this place, words in capitals for others."""
    if facts.over == "folder" and command in ("submit", "resume"):  # there every hospital resumes by itself
        who, what, command = _ALL, "start; to start again is always right", "start"
    mine = who == facts.me
    places = {
        "kit": facts.kit if mine else "KIT",
        "study": facts.study if mine else "DIR",
        "plan": facts.plan if mine else "plan.json",
        "founded": "FOUNDED",
        "method": facts.method,
        "run": facts.run,
        "site": site or who,
    }
    quoted = {name: shlex.quote(value) for name, value in places.items()}
    return _Step(who, what.format(**places), _COMMANDS[command].format(**quoted) if command else "")
