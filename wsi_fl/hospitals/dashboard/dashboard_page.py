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
from wsi_fl.data.cross_site_counts import CrossSiteCounts, score_cross_site
from wsi_fl.federation.documents import ProtocolError
from wsi_fl.hospitals.dashboard.next_steps import FederationMember, FederationState, next_steps
from wsi_fl.hospitals.dossier.dossier_page import build_dossier
from wsi_fl.hospitals.plans.signed_plan import (
    FederationPlan,
    check_code_version,
    check_site_terms,
    collect_approvals,
    plan_path,
)
from wsi_fl.hospitals.transports.folder_transport import list_messages
from wsi_fl.hospitals.trust.certificates import NotTrusted, parse_revocation_list, verify_certificate
from wsi_fl.hospitals.trust.kit import Kit, check_connection
from wsi_fl.hospitals.trust.root_ca import RootCA
from wsi_fl.hospitals.trust.sealed_messages import HANDSHAKE, SealedMessage
from wsi_fl.hospitals.work.submit import load_job_log, load_status
from wsi_fl.report.cross_site_section import build_cross_site_section
from wsi_fl.report.figures import N_COLORS
from wsi_fl.report.formatting import format_number
from wsi_fl.report.templates import fill_template
from wsi_fl.stages.evaluation.cross_site import render_cross_site_lines
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.stages.training.resume import list_plan_runs
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json, write_text
from wsi_fl.types import UsageError, WsiFlError, single_line

_SILENT_S, _SKEW_S = 60.0, 900.0
_ROUND = re.compile(r"x(\d+)\.\d")
_COORDINATOR, _COORDINATOR_AND_HOSPITAL, _HOSPITAL = (
    "the coordinator",
    "the coordinator and the hospital",
    "the hospital",
)
_COLUMNS = {
    "until": ("certificate", _COORDINATOR_AND_HOSPITAL),
    "version": ("version", _HOSPITAL),
    "signed": ("signed", _COORDINATOR_AND_HOSPITAL),
    "connected": ("connected", _COORDINATOR),
    "since": ("since", _HOSPITAL),
    "round": ("round", _HOSPITAL),
    "heard": ("last heard", _HOSPITAL),
    "spent": ("ε spent", _HOSPITAL),
    "labels": ("labels", _HOSPITAL),
}
"""The columns of a member: its heading, and who could know it if nothing here does."""
_HEADINGS = ["who", *(heading for heading, _ in _COLUMNS.values())]


def make_dashboard(
    study: Study, *, kit: Path | None, out: Path | None = None, study_label: str = "."
) -> dict[str, Any]:
    """Return what is known here of a federation and the next steps, and write the page if one is requested.

    Nothing is sent to any hospital. A server is asked for connected clients, and a folder is listed. None stands for
    unknown values, and "unknown" names who could know them.

    Args:
        kit: a coordinator's or a hospital's; without it only files of the study are read.
        out: the page.
        study_label: the study, as the commands of the steps name it.
    """
    facts = _collect_state(study, Kit.open(kit) if kit else None)
    facts.kit, facts.study = str(kit or facts.kit), study_label
    dashboard = _build_document(facts)
    if out is not None:
        write_text(out, _render_page(dashboard))
    return dashboard


def _build_document(facts: FederationState) -> dict[str, Any]:
    members = [_convert_values(asdict(member)) for member in facts.members.values()]
    unknown: dict[str, list[str]] = {}
    for key, (heading, source) in _COLUMNS.items():
        if any(member[key] is None for member in members if member["role"] == "hospital"):
            by_itself = key == "connected" and facts.over == "folder"
            unknown.setdefault(_HOSPITAL if by_itself else source, []).append(heading)
    return _convert_values(vars(facts)) | {
        "wsi_fl": __version__,
        "members": members,
        "next": [step._asdict() for step in next_steps(facts)],
        "unknown": unknown,
        "scores": score_cross_site(facts.scores) if facts.scores else None,
    }


def _convert_values(fields: dict[str, Any]) -> dict[str, Any]:
    times = {k: v.isoformat(timespec="seconds") for k, v in fields.items() if isinstance(v, datetime)}
    return fields | times | {k: list(v) for k, v in fields.items() if isinstance(v, tuple)}


def _render_page(dashboard: dict[str, Any]) -> str:
    """Return a dashboard's `--json` document as one self-contained HTML document."""
    names = [member["name"] for member in dashboard["members"] if member["role"] == "hospital"]
    many = len(names) > N_COLORS
    context = {
        "b": dashboard,
        "headings": _HEADINGS,
        "rows": [_member_cells(member, dashboard["rounds"]) for member in dashboard["members"]],
        "slots": {name: 0 if many else k for k, name in enumerate(names)},
        "between": build_cross_site_section(dashboard["scores"]),
        "many": many,
    }
    return fill_template("board", context, Path(__file__).parent)


def _member_cells(member: dict[str, Any], rounds: int) -> list[str]:
    """Return the row of a member: "–" for unknown values, "" for those that a server or a coordinator has not."""
    cells = {key: "–" if member[key] is None else str(member[key]) for key in _COLUMNS}
    cells |= {key: ("no", "yes")[member[key]] for key in ("signed", "connected") if member[key] is not None}
    cells |= {key: member[key][5:16].replace("T", " ") for key in ("since", "heard") if member[key]}
    ended = f"withdrawn {member['withdrawn_on'][:10]}" if member["withdrawn_on"] else cells["until"][:10]
    cells |= {"until": ended, "labels": ", ".join(member["labels"] or "–")}
    cells |= {"round": f"{member['round']} of {rounds}"} if member["round"] is not None else {}
    budget_text = f" of {member['budget']:g}" if member["budget"] is not None else ""
    cells |= {"spent": f"{format_number(member['spent'], 2)}{budget_text}"} if member["spent"] is not None else {}
    if member["role"] != "hospital":
        cells |= dict.fromkeys(list(_COLUMNS)[2:], "")
    return [member["name"], *cells.values()]


def dashboard_lines(dashboard: dict[str, Any]) -> Lines:
    """Render the members, the plan's result, and the next steps."""
    title = f"plan {dashboard['sha256'][:8]}, {dashboard['method']}, {dashboard['rounds']} rounds"
    rows = [_member_cells(member, dashboard["rounds"]) for member in dashboard["members"]]
    yield TextTable(title if dashboard["plan"] else "no plan yet", _HEADINGS[:-1], [row[:-1] for row in rows])
    for row in rows:
        if row[-1] not in ("", "–"):
            yield TextLine(f"  {row[0]} has {row[-1]}")
    for who, headings in dashboard["unknown"].items():
        yield TextLine(f"  – is known by {who}: {', '.join(headings)}")
    if dashboard["scores"]:
        yield from render_cross_site_lines(dashboard["scores"])
    for line in dashboard["trouble"]:
        yield TextLine(f"  {line}", "yellow")
    yield TextLine("next:")
    for step in dashboard["next"]:
        yield TextLine(f"  {step['who'] or 'you'}: {step['what']}{': ' if step['command'] else ''}{step['command']}")


def _collect_state(study: Study, kit: Kit | None) -> FederationState:
    """Collect what is known here of a federation; only the lock that shows whether a kit is in use is written.

    Without a kit nothing is known of signatures, folder and server.
    """
    path, plan = _find_newest_plan(study) or (None, None)
    facts = FederationState({member.name: member for member in _list_members(kit, plan)})
    if path is not None and plan is not None:
        facts.plan, facts.sha256, facts.method = study.relative_path(path), plan.digest, plan.method
        facts.sites = tuple(plan.sites)
        facts.rounds, facts.patience_s = int(plan.document["rounds"]), plan.pipeline().comm.timeout_s
    if kit is not None:
        facts.me, facts.over = kit.name, "folder" if kit.folder else "server"
        _collect_kit_state(facts, kit)
    if plan is not None and kit is not None:
        for look_at in (_collect_signatures, _collect_run_progress, _collect_folder_status, _collect_ledger_status):
            try:
                look_at(facts, study, plan, kit)
            except WsiFlError as error:  # the other parts are collected all the same
                facts.trouble.append(str(error))
    facts.trouble = list(dict.fromkeys(facts.trouble))
    return facts


def _find_newest_plan(study: Study) -> tuple[Path, FederationPlan] | None:
    """Return the newest plan of a study: the received or the signed one."""
    plans = []
    for path in (study.root / "plan.json", plan_path(study)):
        with suppress(UsageError):
            plans.append((path, FederationPlan.load(path)))
    return max(plans, key=lambda pair: str(pair[1].document.get("created")), default=None)


def _list_members(kit: Kit | None, plan: FederationPlan | None) -> Iterator[FederationMember]:
    """Yield all holders of certificates, if their list is here, otherwise the plan's sites, and the kit's holder."""
    issued: dict[str, Any] = {}
    revoked_keys: Mapping[str, datetime] = {}
    with suppress(UsageError, NotTrusted):  # the provisioned folder is the coordinator's
        if kit is not None:
            root = RootCA.open(kit.path.parent)
            issued = {str(line["name"]): line for line in root.list_issued()}
            revoked_keys = parse_revocation_list(root.trust_pem).keys
    roles = dict.fromkeys(plan.sites if plan else (), "hospital") | ({kit.name: kit.role} if kit else {})
    for name, role in {**{name: line["role"] for name, line in issued.items()}, **roles}.items():
        line = issued.get(name, {})
        until = datetime.fromisoformat(line["until"]) if line.get("until") else None
        yield FederationMember(name, role, until=until, withdrawn_on=revoked_keys.get(line.get("fingerprint", "")))


def _collect_kit_state(facts: FederationState, kit: Kit) -> None:
    """Collect the kit's certificate, its connection, and whether a hospital's process has the kit."""
    facts.trouble += [step.said for step in check_connection(kit) if not step.ok]
    with suppress(WsiFlError):  # reported by `look`
        identity = kit.load_identity()
        facts.note_member(
            kit.name, until=verify_certificate(identity.certificate, identity.root).until, version=__version__
        )
    if kit.role == "hospital":
        running, started = True, kit.path / "startup" / "fed_client.json"  # which `start` writes anew
        with suppress(WsiFlError), kit.lock_kit():
            running = False
        facts.note_member(kit.name, connected=running, since=_write_time(started) if running else None)


def _collect_signatures(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect who has signed the plan; hospitals receive no approvals of others, so a missing one is unknown there."""
    root = kit.load_identity().root
    approval_status, document = collect_approvals(study, plan, root), plan.document
    for name in approval_status.signed:
        certificate = read_json(plan_path(study).parent / f"approval-{name}.json")["certificate"]
        classes, until = document["learns"]["classes"], verify_certificate(str(certificate), root).until
        facts.note_member(
            name, signed=True, until=until, version=document["wsi_fl"], labels=tuple(classes or ()) or None
        )
    revoked_keys = parse_revocation_list(root).keys
    for name, key in plan.keys.items():
        facts.note_member(name, withdrawn=key in revoked_keys)
    for name in approval_status.missing if kit.role == "coordinator" else {kit.name} & set(approval_status.missing):
        facts.note_member(name, signed=False)


def _collect_run_progress(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect the progress of the plan's run, by the coordinator's jobs or a hospital's own files."""
    if kit.role == "coordinator":
        _collect_job_progress(facts, study, plan, kit)
        return
    for run in list_plan_runs(study, plan.digest)[-1:]:
        folder, summary = run.site_folder(kit.name), run.read_summary()
        last_write = _write_time(folder.log_path)
        facts.job, done = run.name, max((line["round"] for line in folder.read_metrics()), default=None)
        facts.note_member(kit.name, round=done, heard=last_write)
        if summary is None:
            late = last_write is None or time.time() - last_write.timestamp() > facts.patience_s
            facts.running = bool(facts.members[kit.name].connected) and not late
            facts.reason = "" if facts.running else f"{run.name} has not finished"
        else:
            report = run.path / "report" / "index.html"
            _note_finished_run(
                facts, summary, study.relative_path(report) if report.is_file() else "", folder.read_document("scores")
            )


def _collect_job_progress(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect the coordinator's jobs and results, and, if there is a server, the clients connected to it."""
    plan_jobs = [(key, job) for key, job in load_job_log(kit).items() if job["plan"] == plan.digest]
    for key, job in [pair for pair in plan_jobs if pair[1]["what"] == "work"]:  # the newest counts
        facts.job, facts.reason = key, job["reason"] or ""
        for file in sorted(study.root.glob("*/summary.json"), key=lambda path: path.stat().st_mtime):
            summary, scores = read_json(file), file.with_name("scores.json")
            if isinstance(summary, dict) and job["run"] and summary.get("run") == job["run"]:
                score_counts = read_json(scores) if scores.is_file() else None
                _note_finished_run(facts, summary, study.relative_path(file.with_name("report.html")), score_counts)
    current = load_status(kit) if kit.folder is None else {"connected": [], "jobs": []}
    for name in plan.sites if kit.folder is None else ():
        facts.note_member(name, connected=name in current["connected"])
    for row in [row for row in current["jobs"] if row["id"] == facts.job]:
        facts.reason = row["reason"] or ""
        facts.running = not facts.reason and not str(row["status"]).startswith(("FINISHED", "DEAD"))


def _note_finished_run(facts: FederationState, summary: dict[str, Any], report: str, scores: Any) -> None:
    """Record a finished run, and its summary's values for each site, which all hold alike."""
    facts.run, facts.report, facts.scores = (str(summary["run"]), report, cast("CrossSiteCounts | None", scores))
    for name in scores["hospitals"] if scores else ():
        facts.note_member(name, labels=tuple(scores["classes"]))
    for row in summary["sites"]:
        facts.note_member(row["site"], round=row["rounds"], spent=row["lifetime_epsilon"], budget=row["max_epsilon"])


def _collect_folder_status(facts: FederationState, study: Study, plan: FederationPlan, kit: Kit) -> None:
    """Collect the sites with a handshake in the folder, and the newest round of any message."""
    try:
        messages = list_messages(kit.folder, plan.digest) if kit.folder else []
    except WsiFlError:
        raise
    except Exception as error:  # each backend of fsspec has others
        raise WsiFlError(f"the folder cannot be used: {type(error).__name__}: {single_line(error)}") from None
    for message in sorted(messages, key=lambda message: message.time or 0.0):
        round_ = _ROUND.fullmatch(message.place)
        facts.note_member(message.sender, heard=_utc_time(message.time), round=int(round_[1]) if round_ else None)
        with suppress(ProtocolError, NotTrusted):
            if message.place == HANDSHAKE:
                sealed = SealedMessage.read(message.content)
                handshake, holder = sealed.read_handshake(kit.load_identity().root)
                if sealed.header["session"] == plan.digest:  # so it has signed
                    fields = {
                        "version": handshake["version"],
                        "since": _utc_time(handshake["time"]),
                        "until": holder.until,
                    }
                    facts.note_member(holder.name, connected=True, signed=True, **fields)
    # by the clock of the share, which knows when files were written; a living process writes several times a minute
    latest = max([message.time or 0.0 for message in messages] + [facts.now.timestamp() - _SKEW_S])
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
    facts.trouble += [dossier["warning"]] if dossier["warning"] else []
    if not facts.run:
        check_code_version(plan, kit.name)
        check_site_terms(next(row for row in plan.document["sites"] if row["name"] == kit.name), site)


def _utc_time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _write_time(file: Path) -> datetime | None:
    return _utc_time(file.stat().st_mtime) if file.is_file() else None
