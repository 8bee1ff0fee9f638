"""The check of a kit: its connection, step by step, and with a plan also between all hospitals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TypedDict

from wsi_fl.hospitals.flare import jobs
from wsi_fl.hospitals.flare.flare_files import JobRequest
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.kit import CheckStep, Kit, check_connection
from wsi_fl.hospitals.trust.root_ca import sync_revocation_list
from wsi_fl.hospitals.work.submit import run_plan_job
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine
from wsi_fl.types import UsageError, WsiFlError, single_line


class _PeerReply(TypedDict):
    """The peers that a site reached, and in how many seconds."""

    peers: list[str]
    seconds: float


class _KitCheck(TypedDict):
    """Each step of the check as JSON, the connected sites, the peers that each site reached, and the verdict."""

    steps: list[dict[str, object]]
    connected: list[str] | None
    peers: dict[str, _PeerReply] | None
    ok: bool


def check_kit(kit: Kit, plan: FederationPlan | None = None, *, folder: str | None = None) -> _KitCheck:
    """Check the connection of a kit; with the coordinator's and a plan, also between all hospitals.

    Over a folder its revocation list is taken first.

    Args:
        plan: the signed one; without it hospitals are not checked.
        folder: another address of the folder than the kit's.
    """
    steps = [asdict(step) for step in _run_check_steps(kit, folder or kit.folder)]
    ok = all(step["ok"] for step in steps)
    document: _KitCheck = {"steps": steps, "connected": None, "peers": None, "ok": ok}
    if kit.role != "coordinator" or kit.folder is not None or not document["ok"]:
        return document
    document["connected"] = jobs.list_connected(kit)
    if plan is None:
        return document
    try:
        job: JobRequest = {"what": "check", "plan": plan.digest}
        replies = run_plan_job(kit, plan, plan.sites, job, SilentProgress())
        document["peers"] = {
            name: {"peers": reply["peers"], "seconds": reply["seconds"]} for name, reply in replies.items()
        }
        outcome = f"all {len(replies)} hospitals have this plan, version, code and time, and reach each other"
    except WsiFlError as error:
        outcome, document["ok"] = str(error), False
    steps.append({"what": "round trip", "ok": document["ok"], "said": outcome, "fault": ""})
    return document


def _run_check_steps(kit: Kit, address: str | None) -> Iterator[CheckStep]:
    """Yield the steps of the connection check, and whether the folder of an address can be used, whose list counts."""
    news = sync_revocation_list(kit, address) if address else ""
    steps = list(check_connection(kit))
    yield from steps
    if address and all(step.ok for step in steps):
        yield _check_folder(SharedFolder(address), news)


def _check_folder(share: SharedFolder, news: str) -> CheckStep:
    try:
        share.check_address()
        share.probe_access()
    except UsageError as error:
        return CheckStep("folder", False, str(error), "folder")
    except Exception as error:  # each backend of fsspec has others
        return CheckStep("folder", False, f"the folder cannot be used: {share.address}: {single_line(error)}", "folder")
    message = f"{share.address} can be listed, written, read and deleted in"
    return CheckStep("folder", True, f"{message}{news and f'; {news}'}")


def check_lines(document: _KitCheck) -> Lines:
    """Yield a line per step, and per site the peers that it reached."""
    for step in document["steps"]:
        yield TextLine(
            f"  {'ok    ' if step['ok'] else 'FAILED'}  {step['what']}: {step['said']}", "" if step["ok"] else "red"
        )
    if document["connected"] is not None:
        yield TextLine(f"  connected: {', '.join(document['connected']) or 'nobody'}")
    for site, reply in (document["peers"] or {}).items():
        yield TextLine(f"  {site} reached {', '.join(reply['peers'])} in {reply['seconds']:.1f} s")
