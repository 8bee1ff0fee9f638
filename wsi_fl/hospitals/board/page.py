"""The dashboard: participants, progress, results, and the next steps with the person for each.

It gathers what one place of a federation knows from its files, its shared folder and its server; never from a store.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from wsi_fl import __version__
from wsi_fl.federation.documents import NotAgreed
from wsi_fl.hospitals.board.steps import Facts, Member, next_steps
from wsi_fl.hospitals.dossier.page import dossier_of
from wsi_fl.hospitals.lines.folder_line import lying
from wsi_fl.hospitals.plans.signed import Plan, approvals, check_code, check_promises, plan_path
from wsi_fl.hospitals.trust.certificates import NotTrusted, verified, withdrawn
from wsi_fl.hospitals.trust.kit import Kit, look
from wsi_fl.hospitals.trust.letters import HELLO, Letter
from wsi_fl.hospitals.trust.root import Root
from wsi_fl.hospitals.work.submit import asked_for, status
from wsi_fl.learning.counts import Scores, results
from wsi_fl.report.between import section
from wsi_fl.report.figures import N_COLORS
from wsi_fl.report.fill import fill
from wsi_fl.report.words import number
from wsi_fl.stages.answers.between import between_lines
from wsi_fl.stages.training.going_on import runs_of_plan
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json, write_text
from wsi_fl.types import UsageError, WsiFlError, one_line

_SILENT_S, _SKEW_S = 60.0, 900.0
_ROUND = re.compile(r"x(\d+)\.\d")
_COORDINATOR, _BOTH, _HOSPITAL = "the coordinator", "the coordinator and the hospital", "the hospital"
_COLUMNS = {
    "until": ("certificate", _BOTH),
    "version": ("version", _HOSPITAL),
    "signed": ("signed", _BOTH),
    "connected": ("connected", _COORDINATOR),
    "since": ("since", _HOSPITAL),
    "round": ("round", _HOSPITAL),
    "heard": ("last heard", _HOSPITAL),
    "spent": ("ε spent", _HOSPITAL),
    "labels": ("labels", _HOSPITAL),
}
"""The columns of a member: its heading, and who could know it if nothing here does."""
_HEADINGS = ["who", *(heading for heading, _ in _COLUMNS.values())]


def make_board(
    study: Study, *, kit: Path | None, out: Path | None = None, named: str = "."
) -> dict[str, Any]:
    """Return what is known here of a federation and the next steps, and write the page if one is requested.

    Nothing is sent to any hospital. A server is asked for connected clients, and a folder is listed. None stands for
    unknown values, and "unknown" names who could know them.

    Args:
        kit: a coordinator's or a hospital's; without it only files of the study are read.
        out: the page.
        study_label: the study, as the commands of the steps name it.
    """
    facts = _gather(study, Kit.open(kit) if kit else None)
    facts.kit, facts.study = str(kit or facts.kit), named
    board = _document_of(facts)
    if out is not None:
        write_text(out, _render(board))
    return board


def _document_of(facts: Facts) -> dict[str, Any]:
    members = [_plain(asdict(one)) for one in facts.members.values()]
    unknown: dict[str, list[str]] = {}
    for key, (heading, who) in _COLUMNS.items():
        if any(one[key] is None for one in members if one["role"] == "hospital"):
            by_itself = key == "connected" and facts.over == "folder"
            unknown.setdefault(_HOSPITAL if by_itself else who, []).append(heading)
    return _plain(vars(facts)) | {
        "wsi_fl": __version__,
        "members": members,
        "next": [step._asdict() for step in next_steps(facts)],
        "unknown": unknown,
        "scores": results(facts.scores) if facts.scores else None,
    }


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    times = {k: v.isoformat(timespec="seconds") for k, v in said.items() if isinstance(v, datetime)}
    return said | times | {k: list(v) for k, v in said.items() if isinstance(v, tuple)}


def _render(board: dict[str, Any]) -> str:
    """Return a dashboard's `--json` document as one self-contained HTML document."""
    names = [one["name"] for one in board["members"] if one["role"] == "hospital"]
    many = len(names) > N_COLORS
    context = {
        "b": board,
        "headings": _HEADINGS,
        "rows": [_cells(one, board["rounds"]) for one in board["members"]],
        "slots": {name: 0 if many else k for k, name in enumerate(names)},
        "between": section(board["scores"]),
        "many": many,
    }
    return fill("board", context, Path(__file__).parent)


def _cells(one: dict[str, Any], rounds: int) -> list[str]:
    """Return the row of a member: "–" for unknown values, "" for those that a server or a coordinator has not."""
    shown = {key: "–" if one[key] is None else str(one[key]) for key in _COLUMNS}
    shown |= {key: ("no", "yes")[one[key]] for key in ("signed", "connected") if one[key] is not None}
    shown |= {key: one[key][5:16].replace("T", " ") for key in ("since", "heard") if one[key]}
    ended = f"withdrawn {one['withdrawn_on'][:10]}" if one["withdrawn_on"] else shown["until"][:10]
    shown |= {"until": ended, "labels": ", ".join(one["labels"] or "–")}
    shown |= {"round": f"{one['round']} of {rounds}"} if one["round"] is not None else {}
    of = f" of {one['budget']:g}" if one["budget"] is not None else ""
    shown |= {"spent": f"{number(one['spent'], 2)}{of}"} if one["spent"] is not None else {}
    if one["role"] != "hospital":
        shown |= dict.fromkeys(list(_COLUMNS)[2:], "")
    return [one["name"], *shown.values()]


def board_lines(board: dict[str, Any]) -> Lines:
    """Render the members, the plan's result, and the next steps."""
    about = f"plan {board['sha256'][:8]}, {board['method']}, {board['rounds']} rounds"
    rows = [_cells(one, board["rounds"]) for one in board["members"]]
    yield Table(about if board["plan"] else "no plan yet", _HEADINGS[:-1], [row[:-1] for row in rows])
    for row in rows:
        if row[-1] not in ("", "–"):
            yield Line(f"  {row[0]} has {row[-1]}")
    for who, what in board["unknown"].items():
        yield Line(f"  – is known by {who}: {', '.join(what)}")
    if board["scores"]:
        yield from between_lines(board["scores"])
    for line in board["trouble"]:
        yield Line(f"  {line}", "yellow")
    yield Line("next:")
    for step in board["next"]:
        yield Line(
            f"  {step['who'] or 'you'}: {step['what']}{': ' if step['command'] else ''}{step['command']}"
        )


def _gather(study: Study, kit: Kit | None) -> Facts:
    """Collect what is known here of a federation; only the lock that shows whether a kit is in use is written.

    Without a kit nothing is known of signatures, folder and server.
    """
    path, plan = _newest_plan(study) or (None, None)
    facts = Facts({one.name: one for one in _members(kit, plan)})
    if path is not None and plan is not None:
        facts.plan, facts.sha256, facts.method = study.relative(path), plan.digest, plan.method
        facts.sites = tuple(plan.sites)
        facts.rounds, facts.patience_s = int(plan.document["rounds"]), plan.pipeline().comm.timeout_s
    if kit is not None:
        facts.me, facts.over = kit.name, "folder" if kit.folder else "server"
        _look_at_kit(facts, kit)
    if plan is not None and kit is not None:
        for look_at in (_at_signatures, _at_work, _at_folder, _at_own_part):
            try:
                look_at(facts, study, plan, kit)
            except WsiFlError as error:  # the other parts are collected all the same
                facts.trouble.append(str(error))
    facts.trouble = list(dict.fromkeys(facts.trouble))
    return facts


def _newest_plan(study: Study) -> tuple[Path, Plan] | None:
    """Return the newest plan of a study: the received or the signed one."""
    found = []
    for path in (study.root / "plan.json", plan_path(study)):
        with suppress(UsageError):
            found.append((path, Plan.load(path)))
    return max(found, key=lambda one: str(one[1].document.get("created")), default=None)


def _members(kit: Kit | None, plan: Plan | None) -> Iterator[Member]:
    """Yield all holders of certificates, if their list is here, otherwise the plan's sites, and the kit's holder."""
    told: dict[str, Any] = {}
    gone: Mapping[str, datetime] = {}
    with suppress(UsageError, NotTrusted):  # the provisioned folder is the coordinator's
        if kit is not None:
            root = Root.open(kit.path.parent)
            told = {str(line["name"]): line for line in root.issued()}
            gone = withdrawn(root.trusted).keys
    roles = dict.fromkeys(plan.sites if plan else (), "hospital") | ({kit.name: kit.role} if kit else {})
    for name, role in {**{name: line["role"] for name, line in told.items()}, **roles}.items():
        line = told.get(name, {})
        until = datetime.fromisoformat(line["until"]) if line.get("until") else None
        yield Member(name, role, until=until, withdrawn_on=gone.get(line.get("fingerprint", "")))


def _look_at_kit(facts: Facts, kit: Kit) -> None:
    """Collect the kit's certificate, its connection, and whether a hospital's process has the kit."""
    facts.trouble += [step.said for step in look(kit) if not step.ok]
    with suppress(WsiFlError):  # reported by `look`
        identity = kit.identity()
        facts.note(kit.name, until=verified(identity.certificate, identity.root).until, version=__version__)
    if kit.role == "hospital":
        running, started = True, kit.path / "startup" / "fed_client.json"  # which `start` writes anew
        with suppress(WsiFlError), kit.alone():
            running = False
        facts.note(kit.name, connected=running, since=_written(started) if running else None)


def _at_signatures(facts: Facts, study: Study, plan: Plan, kit: Kit) -> None:
    """Collect who has signed the plan; hospitals receive no approvals of others, so a missing one is unknown there."""
    root = kit.identity().root
    heard, said = approvals(study, plan, root), plan.document
    for name in heard.signed:
        certificate = read_json(plan_path(study).parent / f"approval-{name}.json")["certificate"]
        classes, until = said["learns"]["classes"], verified(str(certificate), root).until
        facts.note(
            name, signed=True, until=until, version=said["wsi_fl"], labels=tuple(classes or ()) or None
        )
    gone = withdrawn(root).keys
    for name, key in plan.keys.items():
        facts.note(name, withdrawn=key in gone)
    for name in heard.missing if kit.role == "coordinator" else {kit.name} & set(heard.missing):
        facts.note(name, signed=False)


def _at_work(facts: Facts, study: Study, plan: Plan, kit: Kit) -> None:
    """Collect the progress of the plan's run, by the coordinator's jobs or a hospital's own files."""
    if kit.role == "coordinator":
        _look_at_jobs(facts, study, plan, kit)
        return
    for run in runs_of_plan(study, plan.digest)[-1:]:
        folder, summary = run.site(kit.name), run.summary()
        heard = _written(folder.log_path)
        facts.job, done = run.name, max((line["round"] for line in folder.metrics()), default=None)
        facts.note(kit.name, round=done, heard=heard)
        if summary is None:
            late = heard is None or time.time() - heard.timestamp() > facts.patience_s
            facts.running = bool(facts.members[kit.name].connected) and not late
            facts.reason = "" if facts.running else f"{run.name} has not finished"
        else:
            report = run.path / "report" / "index.html"
            _finish(facts, summary, study.relative(report) if report.is_file() else "", folder.kept("scores"))


def _look_at_jobs(facts: Facts, study: Study, plan: Plan, kit: Kit) -> None:
    """Collect the coordinator's jobs and results, and, if there is a server, the clients connected to it."""
    asked = [(key, one) for key, one in asked_for(kit).items() if one["plan"] == plan.digest]
    for key, job in [one for one in asked if one[1]["what"] == "work"]:  # the newest counts
        facts.job, facts.reason = key, job["reason"] or ""
        for file in sorted(study.root.glob("*/summary.json"), key=lambda path: path.stat().st_mtime):
            summary, scores = read_json(file), file.with_name("scores.json")
            if isinstance(summary, dict) and job["run"] and summary.get("run") == job["run"]:
                told = read_json(scores) if scores.is_file() else None
                _finish(facts, summary, study.relative(file.with_name("report.html")), told)
    now = status(kit) if kit.folder is None else {"connected": [], "jobs": []}
    for name in plan.sites if kit.folder is None else ():
        facts.note(name, connected=name in now["connected"])
    for row in [row for row in now["jobs"] if row["id"] == facts.job]:
        facts.reason = row["reason"] or ""
        facts.running = not facts.reason and not str(row["status"]).startswith(("FINISHED", "DEAD"))


def _finish(facts: Facts, summary: dict[str, Any], report: str, scores: Any) -> None:
    """Record a finished run, and its summary's values for each site, which all hold alike."""
    facts.run, facts.report, facts.scores = str(summary["run"]), report, cast("Scores | None", scores)
    for name in scores["hospitals"] if scores else ():
        facts.note(name, labels=tuple(scores["classes"]))
    for row in summary["sites"]:
        facts.note(row["site"], round=row["rounds"], spent=row["lifetime_epsilon"], budget=row["max_epsilon"])


def _at_folder(facts: Facts, study: Study, plan: Plan, kit: Kit) -> None:
    """Collect the sites with a handshake in the folder, and the newest round of any message."""
    try:
        letters = lying(kit.folder, plan.digest) if kit.folder else []
    except WsiFlError:
        raise
    except Exception as error:  # each backend of fsspec has others
        raise WsiFlError(f"the folder cannot be used: {type(error).__name__}: {one_line(error)}") from None
    for one in sorted(letters, key=lambda one: one.time or 0.0):
        round_ = _ROUND.fullmatch(one.place)
        facts.note(one.sender, heard=_time(one.time), round=int(round_[1]) if round_ else None)
        with suppress(NotAgreed, NotTrusted):
            if one.place == HELLO:
                letter = Letter.read(one.content)
                said, holder = letter.hello(kit.identity().root)
                if letter.head["session"] == plan.digest:  # so it has signed
                    told = {"version": said["version"], "since": _time(said["time"]), "until": holder.until}
                    facts.note(holder.name, connected=True, signed=True, **told)
    # by the clock of the share, which knows when files were written; a living process writes several times a minute
    latest = max([one.time or 0.0 for one in letters] + [facts.now.timestamp() - _SKEW_S])
    for name, member in list(facts.members.items()):
        if member.connected and member.heard and latest - member.heard.timestamp() > _SILENT_S:
            facts.note(name, connected=False)


def _at_own_part(facts: Facts, study: Study, plan: Plan, kit: Kit) -> None:
    """Collect a hospital's own ledger, and before a run what its own process would refuse."""
    if kit.name not in plan.sites:
        return
    site = study.site(kit.name)
    own = dossier_of(study, plan, site, kit)
    facts.note(kit.name, spent=own["spent"] or 0.0, budget=site.max_epsilon, version=__version__)
    facts.trouble += [own["warning"]] if own["warning"] else []
    if not facts.run:
        check_code(plan, kit.name)
        check_promises(next(one for one in plan.document["sites"] if one["name"] == kit.name), site)


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _written(file: Path) -> datetime | None:
    return _time(file.stat().st_mtime) if file.is_file() else None
