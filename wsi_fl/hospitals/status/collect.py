"""The status of a federation: who is there, the progress, the jobs, and the next steps with the person for each.

It is gathered from what one place knows by its files, its shared folder and its server; never from a store.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from wsi_fl import __version__
from wsi_fl.federation.documents import ProtocolError
from wsi_fl.hospitals.dossier.dossier_page import build_dossier
from wsi_fl.hospitals.faults import Fault, find_fault
from wsi_fl.hospitals.flare import jobs
from wsi_fl.hospitals.plans.installed_code import check_code_version
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, check_site_terms, collect_approvals, plan_path
from wsi_fl.hospitals.status.next_steps import FederationMember, FederationState, JobRow, Trouble, next_steps
from wsi_fl.hospitals.transports.folder_transport import list_messages
from wsi_fl.hospitals.trust.certificates import NotTrusted, Role, parse_revocation_list, verify_certificate
from wsi_fl.hospitals.trust.kit import Kit, check_connection
from wsi_fl.hospitals.trust.root_ca import RootCA
from wsi_fl.hospitals.trust.sealed_messages import HANDSHAKE, SealedMessage
from wsi_fl.hospitals.work.job_log import LoggedJob, empty_entry, load_job_log, log_end
from wsi_fl.report.formatting import format_number
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.stages.training.resume import list_plan_runs
from wsi_fl.stages.training.summary import Summary
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError, single_line

_SILENT_S, _SKEW_S = 60.0, 900.0
_ROUND = re.compile(r"x(\d+)\.\d")
_HEADINGS = ["who", "certificate", "version", "signed", "connected", "round", "last heard", "ε spent"]


def collect_state(study: Study | None, kit: Kit, *, study_label: str = ".") -> FederationState:
    """Return what is known here of a federation.

    Nothing is sent to any hospital. A server is asked for clients and jobs, and a folder is listed; only the lock that
    shows whether a kit is in use is written.

    Args:
        study: where the plan lies; None if there is none.
        kit: a coordinator's or a hospital's.
        study_label: the study, as the commands of the next steps name it.
    """
    path, plan = (_find_newest_plan(study) if study else None) or (None, None)
    state = FederationState({member.name: member for member in _list_members(kit, plan)})
    state.me, state.kit, state.over = kit.name, str(kit.path), "folder" if kit.folder else "server"
    state.study = study_label if study else ""
    if study is not None and path is not None and plan is not None:
        state.plan, state.sha256, state.method = study.relative_path(path), plan.digest, plan.method
        state.sites = tuple(plan.sites)
        state.rounds, state.patience_s = int(plan.document["rounds"]), plan.pipeline().comm.timeout_s
    _collect_kit_state(state, kit)
    with _noting_trouble(state):
        if kit.role == "coordinator" and kit.folder is None:
            state.connected, state.jobs = ask_server(kit)
            for site in state.sites:
                state.note_member(site, connected=site in state.connected)
    if study is not None and plan is not None:
        if kit.role == "coordinator":
            _collect_job_progress(state, study, plan, kit)
        for collect in (_collect_signatures, _collect_own_run, _collect_folder_status, _collect_ledger_status):
            with _noting_trouble(state):  # the other parts are collected all the same
                collect(state, study, plan, kit)
    state.troubles = list({trouble.text: trouble for trouble in state.troubles}.values())
    return state


@contextmanager
def _noting_trouble(state: FederationState) -> Iterator[None]:
    try:
        yield
    except WsiFlError as error:
        state.troubles.append(Trouble(str(error), find_fault(error)))


def status_document(state: FederationState) -> dict[str, object]:
    """Return the content of `status --json`: a federation's state, with times as ISO 8601, and the next steps."""
    keys = ("connected", "jobs", "plan", "sha256", "method", "rounds", "running", "run", "report")
    members = [
        {k: v.isoformat(timespec="seconds") if isinstance(v, datetime) else v for k, v in asdict(member).items()}
        for member in state.members.values()
    ]
    trouble, steps = [trouble.text for trouble in state.troubles], [step._asdict() for step in next_steps(state)]
    return {**{key: getattr(state, key) for key in keys}, "members": members, "trouble": trouble, "next": steps}


def ask_server(kit: Kit) -> tuple[list[str], list[JobRow]]:
    """Return the hospitals that are connected and answer, and the newest jobs with the kit's own entries of them.

    A reason that the kit did not know yet is recorded there.
    """
    connected, job_log = jobs.list_connected(kit), load_job_log(kit)
    rows: list[JobRow] = []
    for row in jobs.list_jobs(kit, [number for number, entry in job_log.items() if entry["reason"]]):
        entry = job_log.get(row["id"], empty_entry())
        if row["reason"] and row["id"] in job_log and row["status"] != "DEAD":
            log_end(kit, row["id"], reason=row["reason"], fault=Fault(row["code"], row["site"]))
        rows.append(cast(JobRow, {**entry, **row} if row["reason"] else {**row, **entry}))
    return connected, rows


def _find_newest_plan(study: Study) -> tuple[Path, FederationPlan] | None:
    """Return the newest plan of a study: the received or the signed one."""
    plans = []
    for path in (study.root / "plan.json", plan_path(study)):
        with suppress(UsageError):
            plans.append((path, FederationPlan.load(path)))
    return max(plans, key=lambda pair: str(pair[1].document.get("created")), default=None)


def _list_members(kit: Kit, plan: FederationPlan | None) -> Iterator[FederationMember]:
    """Yield all holders of certificates, if their list is here, otherwise the plan's sites, and the kit's holder."""
    issued: dict[str, dict[str, str]] = {}
    revoked_keys: Mapping[str, datetime] = {}
    with suppress(UsageError, NotTrusted):  # the provisioned folder is the coordinator's
        root = RootCA.open(kit.path.parent)
        issued = {line["name"]: line for line in root.list_issued()}
        revoked_keys = parse_revocation_list(root.trust_pem).keys
    roles: dict[str, Role] = {name: cast(Role, line["role"]) for name, line in issued.items()}
    for name in plan.sites if plan else ():
        roles[name] = "hospital"
    roles[kit.name] = kit.role
    for name, role in roles.items():
        line = issued.get(name, {})
        until = datetime.fromisoformat(line["until"]) if line.get("until") else None
        revoked_on = revoked_keys.get(line.get("fingerprint", ""))
        yield FederationMember(name, role, until=until, withdrawn_on=revoked_on)


def _collect_kit_state(facts: FederationState, kit: Kit) -> None:
    """Collect the kit's certificate, its connection, and whether a hospital's process has the kit."""
    steps = check_connection(kit)
    facts.troubles += [Trouble(step.said, Fault(step.fault, kit.name)) for step in steps if not step.ok]
    with suppress(WsiFlError):  # reported by the check
        identity = kit.load_identity()
        until = verify_certificate(identity.certificate, identity.root).until
        facts.note_member(kit.name, until=until, version=__version__)
    if kit.role == "hospital":
        running = True
        with suppress(WsiFlError), kit.lock_kit():
            running = False
        facts.note_member(kit.name, connected=running)


def _collect_signatures(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect who has signed the plan; hospitals receive no approvals of others, so a missing one is unknown there."""
    root = kit.load_identity().root
    approval_status = collect_approvals(study, plan, root)
    for name in approval_status.signed:
        certificate = read_json(plan_path(study).parent / f"approval-{name}.json")["certificate"]
        until = verify_certificate(str(certificate), root).until
        facts.note_member(name, signed=True, until=until, version=plan.document["wsi_fl"])
    revoked_keys = parse_revocation_list(root).keys
    for name, key in plan.keys.items():
        facts.note_member(name, withdrawn=key in revoked_keys)
    for name in approval_status.missing if kit.role == "coordinator" else {kit.name} & set(approval_status.missing):
        facts.note_member(name, signed=False)


def _collect_own_run(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect the progress of the plan's run by a hospital's own files."""
    for run in list_plan_runs(study, plan.digest)[-1:] if kit.role == "hospital" else ():
        folder, summary = run.site_folder(kit.name), run.read("summary")
        last_write = _utc_time(folder.log_path.stat().st_mtime) if folder.log_path.is_file() else None
        facts.job, done = run.name, max((line["round"] for line in folder.read_metrics()), default=None)
        facts.note_member(kit.name, round=done, heard=last_write)
        if summary is None:
            late = last_write is None or time.time() - last_write.timestamp() > facts.patience_s
            facts.running = bool(facts.members[kit.name].connected) and not late
            unfinished = Trouble(f"{run.name} has not finished", Fault("server_stopped"))
            facts.failure = None if facts.running else unfinished
        else:
            report = run.path / "report" / "index.html"
            page = study.relative_path(report) if report.is_file() else ""
            _note_finished_run(facts, cast(Summary, summary), page)


def _collect_job_progress(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect the coordinator's jobs and results."""
    summaries = sorted(study.root.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    for key, entry in load_job_log(kit).items():
        if entry["plan"] != plan.digest or entry["what"] != "work":
            continue
        facts.job, facts.failure = key, _find_trouble(entry)
        for file in summaries if entry["run"] else ():
            summary: Summary | None = read_json(file)
            if isinstance(summary, dict) and summary.get("run") == entry["run"]:
                _note_finished_run(facts, summary, study.relative_path(file.with_name("report.html")))
    for row in facts.jobs:
        if row["id"] == facts.job:
            facts.failure = _find_trouble(row)
            facts.running = facts.failure is None and not row["status"].startswith(("FINISHED", "DEAD"))


def _find_trouble(entry: LoggedJob) -> Trouble | None:
    return Trouble(entry["reason"], Fault(entry["code"] or "", entry["site"] or "")) if entry["reason"] else None


def _note_finished_run(facts: FederationState, summary: Summary, report: str) -> None:
    """Record a finished run, and its summary's values for each site, which all hold alike."""
    facts.run, facts.report = str(summary["run"]), report
    for row in summary["sites"]:
        facts.note_member(row["site"], round=row["rounds"], spent=row["lifetime_epsilon"], budget=row["max_epsilon"])


def _collect_folder_status(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect the sites with a handshake in the folder, and the newest round of any message."""
    try:
        messages = list_messages(kit.folder, plan.digest) if kit.folder else []
    except Exception as error:  # each backend of fsspec has others
        text = str(error) if isinstance(error, WsiFlError) else f"{type(error).__name__}: {single_line(error)}"
        facts.troubles.append(Trouble(f"the folder cannot be used: {text}", Fault("folder", kit.name)))
        return
    for message in sorted(messages, key=lambda message: message.time or 0.0):
        round_ = _ROUND.fullmatch(message.place)
        facts.note_member(message.sender, heard=_utc_time(message.time), round=int(round_[1]) if round_ else None)
        with suppress(ProtocolError, NotTrusted):
            if message.place == HANDSHAKE:
                sealed = SealedMessage.read(message.content)
                handshake, holder = sealed.read_handshake(kit.load_identity().root)
                if sealed.header["session"] == plan.digest:  # so it has signed
                    beliefs = {"version": handshake["version"], "until": holder.until}
                    facts.note_member(holder.name, connected=True, signed=True, **beliefs)
    # by the clock of the share, which knows when files were written; a living process writes several times a minute
    latest = max([message.time or 0.0 for message in messages] + [facts.moment.timestamp() - _SKEW_S])
    for name, member in list(facts.members.items()):
        if member.connected and member.heard and latest - member.heard.timestamp() > _SILENT_S:
            facts.note_member(name, connected=False)


def _collect_ledger_status(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect a hospital's own ledger, and before a run what its own process would refuse."""
    if kit.name not in plan.sites:
        return
    site = study.load_site(kit.name)
    dossier = build_dossier(study, plan, site, kit)
    facts.note_member(kit.name, spent=dossier["spent"] or 0.0, budget=site.max_epsilon, version=__version__)
    if dossier["warning"]:
        facts.troubles.append(Trouble(dossier["warning"], Fault("ledger", kit.name)))
    if not facts.run:
        check_code_version(plan, kit.name)
        check_site_terms(next(row for row in plan.document["sites"] if row["name"] == kit.name), site)


def _utc_time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def status_lines(state: FederationState) -> Lines:
    """Report the members, the jobs on a server, and the next steps."""
    if state.connected is not None:
        yield TextLine(f"connected: {', '.join(state.connected) or 'nobody'}")
    plan = f"plan {state.sha256[:8]}, {state.method}, {state.rounds} rounds"
    rows = [_member_cells(member, state.rounds) for member in state.members.values()]
    yield TextTable(plan if state.plan else "no plan is here", _HEADINGS, rows)
    job_rows: list[list[str] | None] = [
        [
            *(job["id"], _format_time(job["submitted"]), job["what"] or job["name"] or ""),
            *((job["plan"] or "")[:8], job["method"] or "", Path(job["run"] or "").name, job["status"].lower()),
        ]
        for job in state.jobs
    ]
    if job_rows:
        yield TextTable("jobs", ["id", "submitted", "what", "plan", "method", "run", "status"], job_rows)
    reasons = [f"{job['id'][:8]}: {job['reason']}" for job in state.jobs if job["reason"]]
    for line in [*reasons, *(trouble.text for trouble in state.troubles)]:
        yield TextLine(f"  {line}", "yellow")
    yield TextLine("next:")
    for step in next_steps(state):
        yield TextLine(f"  {step.who or 'you'}: {step.what}{': ' if step.command else ''}{step.command}")


def _member_cells(member: FederationMember, rounds: int) -> list[str]:
    """Return the row of a member: "–" for unknown values, "" for those that a server or a coordinator has not."""
    until = f"{member.until:%Y-%m-%d}" if member.until else "–"
    until = f"withdrawn {member.withdrawn_on:%Y-%m-%d}" if member.withdrawn_on else until
    cells = [member.name, until, member.version or "–"]
    if member.role != "hospital":
        return [*cells, *[""] * (len(_HEADINGS) - len(cells))]
    answers = {None: "–", False: "no", True: "yes"}
    return [
        *cells,
        answers[member.signed],
        answers[member.connected],
        "–" if member.round is None else f"{member.round} of {rounds}",
        f"{member.heard:%m-%d %H:%M}" if member.heard else "–",
        f"{format_number(member.spent, 2)}{'' if member.budget is None else f' of {member.budget:g}'}",
    ]


def _format_time(submitted: float | str | None) -> str:
    """Return the time at which the server took a job, in UTC, from its seconds."""
    try:
        return datetime.fromtimestamp(float(submitted or ""), UTC).strftime("%Y-%m-%d %H:%M")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
