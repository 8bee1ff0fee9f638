"""What is known at one place of a federation, from the files that lie there, its folder and its server; of no store."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from wsi_fl import __version__
from wsi_fl.federation.documents import NotAgreed
from wsi_fl.hospitals.board.steps import Agreed, Facts, Job, Member, Result
from wsi_fl.hospitals.dossier.page import dossier_of
from wsi_fl.hospitals.lines.folder_line import lying
from wsi_fl.hospitals.plans.signed import Plan, approvals, check_code, check_promises, plan_path
from wsi_fl.hospitals.trust.certificates import NotTrusted, Role, verified
from wsi_fl.hospitals.trust.kit import Kit, look
from wsi_fl.hospitals.trust.letters import HELLO, Letter
from wsi_fl.hospitals.trust.making import issued_lines
from wsi_fl.hospitals.work.submit import asked_for, status
from wsi_fl.learning.counts import Scores
from wsi_fl.stages.training.going_on import runs_of_plan
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError, one_line

_Json = dict[str, Any]
_ROUND = re.compile(r"x(\d+)\.\d")


@dataclass
class Seen:
    """What was found while files, folder and server were looked at, one after another.

    Attributes:
        members: by name.
        scores: counts of the finished run, where hospitals let them go.
    """

    members: dict[str, Member]
    trouble: list[str]
    job: Job | None = None
    result: Result | None = None
    scores: Scores | None = None

    def note(self, name: str, **found: Any) -> None:
        """Note what was found of a member; a stranger's name in a folder is nobody's."""
        if name in self.members:
            known = {key: value for key, value in found.items() if value is not None}
            self.members[name] = replace(self.members[name], **known)


def gather(
    study: Study, kit: Kit | None, *, named: tuple[str, str] = ("KIT", ".")
) -> tuple[Facts, Scores | None]:
    """Return what is known here, and the counts of the finished run of the plan; nothing is written.

    Args:
        study: of whoever looks.
        kit: theirs; without it nothing is known of signatures, folder and server.
        named: kit and study as commands name them.
    """
    plan = _newest_plan(study)
    seen = Seen({one.name: one for one in _members(kit, plan)}, [])
    if kit is not None:
        _look_at_kit(seen, kit)
    if plan is not None:
        with _told(seen):
            _look_at_plan(seen, study, plan[1], kit)
        with _told(seen):
            _look_at_work(seen, study, plan[1], kit)
        with _told(seen):
            if seen.result is None and kit is not None and kit.name in plan[1].sites:
                _refuse_unfit(study, plan[1], kit.name)
    facts = Facts(
        now=datetime.now(UTC),
        me=kit.name if kit else "",
        over="" if kit is None else "folder" if kit.folder else "server",
        members=tuple(seen.members.values()),
        plan=_agreed(study, plan) if plan else None,
        job=seen.job,
        result=seen.result,
        trouble=tuple(dict.fromkeys(seen.trouble)),
        kit=named[0],
        study=named[1],
    )
    return facts, seen.scores


@contextmanager
def _told(seen: Seen) -> Iterator[None]:
    """Within it what fails is one line among the troubles, and the rest is looked at all the same."""
    try:
        yield
    except WsiFlError as error:
        seen.trouble.append(str(error))


def _newest_plan(study: Study) -> tuple[Path, Plan] | None:
    """The newest plan of a study: the one that came, or the one that was signed."""
    found = []
    for path in (study.root / "plan.json", plan_path(study)):
        with suppress(UsageError):
            found.append((path, Plan.load(path)))
    return max(found, key=lambda one: str(one[1].document.get("created")), default=None)


def _agreed(study: Study, plan: tuple[Path, Plan]) -> Agreed:
    path, said = plan
    timeout_s = said.pipeline().comm.timeout_s
    return Agreed(study.relative(path), said.digest, said.method, int(said.document["rounds"]), timeout_s)


def _members(kit: Kit | None, plan: tuple[Path, Plan] | None) -> Iterator[Member]:
    """Everybody who has a certificate, where the list of them lies here, else who is in the plan, and oneself."""
    told = {str(line["name"]): line for line in issued_lines(kit.path.parent)} if kit else {}
    names: dict[str, Role] = {name: line["role"] for name, line in told.items()}
    names |= {name: "hospital" for name in (plan[1].sites if plan else ()) if name not in names}
    names |= {kit.name: kit.role} if kit else {}
    for name, role in names.items():
        until = told.get(name, {}).get("until")
        yield Member(name, role, until=datetime.fromisoformat(until) if until else None)


def _look_at_kit(seen: Seen, kit: Kit) -> None:
    """One's own certificate, and whether it gets through; only hospitals have a process that runs."""
    seen.note(kit.name, version=__version__)
    seen.trouble += [step.said for step in look(kit) if not step.ok]
    with suppress(WsiFlError):  # `look` has said it
        identity = kit.identity()
        seen.note(kit.name, until=verified(identity.certificate, identity.root).until)
    if kit.role == "hospital":
        started = kit.path / "startup" / "fed_client.json"  # which `start` writes anew
        running = _runs(kit)
        since = started.stat().st_mtime if running and started.is_file() else None
        seen.note(kit.name, connected=running, since=_time(since))


def _runs(kit: Kit) -> bool:
    """Whether a process has the kit."""
    try:
        with kit.alone():
            return False
    except WsiFlError:
        return True


def _look_at_plan(seen: Seen, study: Study, plan: Plan, kit: Kit | None) -> None:
    """Who has signed it, and what a hospital's own ledger says."""
    if kit is None:
        return
    heard = approvals(study, plan, kit.identity().root)
    labels = tuple(plan.document["learns"]["classes"] or ()) or None
    for name in heard.signed:
        seen.note(name, signed=True, version=str(plan.document["wsi_fl"]), labels=labels)
        approval = dict(read_json(plan_path(study).parent / f"approval-{name}.json"))
        seen.note(name, until=verified(str(approval["certificate"]), kit.identity().root).until)
    for name, why in heard.missing.items():
        if name == kit.name or kit.role == "coordinator":  # nobody sends approvals to other hospitals
            seen.note(name, signed=False, why=why)
    if kit.name in plan.sites:
        own = dossier_of(study, plan, study.site(kit.name), kit)
        budget = own["budget"]["max_epsilon"]
        seen.note(kit.name, version=__version__, spent=own["spent"] or 0.0, budget=budget)
        seen.trouble += [own["warning"]] if own["warning"] else []


def _refuse_unfit(study: Study, plan: Plan, name: str) -> None:
    """Refuse what a hospital's own process would: other code than the plan's, or another promise."""
    check_code(plan, name)
    said = next(one for one in plan.document["sites"] if one["name"] == name)
    check_promises(said, study.site(name))


def _look_at_work(seen: Seen, study: Study, plan: Plan, kit: Kit | None) -> None:
    """How far the plan's run is, by one's own files, the letters in the folder, and the server."""
    if kit is not None and kit.role == "coordinator":
        _look_at_jobs(seen, study, plan, kit)
    elif kit is not None:
        _look_at_run(seen, study, plan, kit.name)
    if kit is not None and kit.folder is not None:
        _look_into_folder(seen, kit, kit.folder, plan)


def _look_at_run(seen: Seen, study: Study, plan: Plan, name: str) -> None:
    """The newest run of a plan in a hospital's own study."""
    for run in runs_of_plan(study, plan.digest)[-1:]:
        folder = run.site(name)
        written = folder.log_path.stat().st_mtime if folder.log_path.is_file() else None
        done = max((line["round"] for line in folder.metrics()), default=None)
        seen.note(name, round=done, heard=_time(written))
        if (summary := run.summary()) is None:
            silent_s = time.time() - (written or 0.0)
            running = bool(seen.members[name].connected) and silent_s < plan.pipeline().comm.timeout_s
            seen.job = Job(run.name, running, None if running else f"{run.name} has not finished")
        else:
            report = run.path / "report" / "index.html"
            seen.result = Result(study.relative(run.path), study.relative(report) if report.is_file() else "")
            seen.scores = cast("Scores | None", folder.kept("scores"))
            _note_rows(seen, summary)


def _look_at_jobs(seen: Seen, study: Study, plan: Plan, kit: Kit) -> None:
    """What the coordinator asked for, what came back, and, where there is a server, who is connected to it."""
    asked = {
        key: job for key, job in asked_for(kit).items() if (job["what"], job["plan"]) == ("work", plan.digest)
    }
    for number, job in list(asked.items())[-1:]:
        seen.job = Job(number, reason=job["reason"])
        _look_at_result(seen, study, str(job["run"]))
    if kit.folder is not None:
        return
    with _told(seen):
        now = status(kit)
        for member in [one for one in seen.members.values() if one.role == "hospital"]:
            seen.note(member.name, connected=member.name in now["connected"])
        for row in now["jobs"]:
            if seen.job is not None and row["id"] == seen.job.id:
                running = not str(row["status"]).startswith(("FINISHED", "DEAD"))
                seen.job = Job(seen.job.id, running and not row["reason"], row["reason"])


def _look_at_result(seen: Seen, study: Study, run: str) -> None:
    """The folder beside the plan that `submit` wrote of a run, the newest first."""
    for file in sorted(study.root.glob("*/summary.json"), key=lambda path: -path.stat().st_mtime):
        summary = dict(read_json(file))
        if summary.get("run") == run:
            scores = file.with_name("scores.json")
            seen.result = Result(run, study.relative(file.with_name("report.html")))
            seen.scores = read_json(scores) if scores.is_file() else None
            _note_rows(seen, summary)
            return


def _note_rows(seen: Seen, summary: _Json) -> None:
    """What a summary, which all hold alike, says of each site; one's own ledger, where it lies here, says more."""
    for row in summary["sites"]:
        known = seen.members.get(row["site"])
        if known is not None and known.spent is None:
            seen.note(row["site"], spent=row["lifetime_epsilon"], budget=row["max_epsilon"])
        seen.note(row["site"], round=row["rounds"])


def _look_into_folder(seen: Seen, kit: Kit, address: str, plan: Plan) -> None:
    """Who said hello and has not left, and the newest round that letters are of."""
    try:
        letters = lying(address, plan.digest)
    except WsiFlError:
        raise
    except Exception as error:  # each backend of fsspec has others
        raise WsiFlError(f"the folder cannot be used: {type(error).__name__}: {one_line(error)}") from None
    for name in plan.sites:
        own = [one for one in letters if one.sender == name]
        rounds = [int(found[1]) for one in own if (found := _ROUND.fullmatch(one.place))]
        known, newest = seen.members[name].round, max((one.time for one in own if one.time), default=None)
        seen.note(name, round=max([*rounds, *([] if known is None else [known])], default=None))
        seen.note(name, heard=_time(newest), connected=None if name == kit.name else False)
        for one in own:
            if one.place == HELLO:
                _greeted(seen, name, one.content, plan.digest, kit.identity().root)


def _greeted(seen: Seen, name: str, content: bytes, digest: str, root: str) -> None:
    """Note what a hello says, once it is known to be of this member and this plan."""
    with suppress(NotAgreed, NotTrusted):
        letter = Letter.read(content)
        said, holder = letter.hello(root)
        if (holder.name, letter.head["session"]) == (name, digest):
            since, until = _time(said["time"]), holder.until
            seen.note(name, connected=True, since=since, version=said["version"], until=until)


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
