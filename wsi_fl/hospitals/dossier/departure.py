"""The record of a hospital that leaves: its releases, what of them stays with others, and the remaining steps."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from wsi_fl.hospitals.dossier.dossier_page import DOSSIER_TEXTS, RunAccount, list_accounts
from wsi_fl.hospitals.plans.disclosures import fill_plan_text
from wsi_fl.hospitals.plans.signed_plan import approval_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.oneshot.released_statistics import STATISTICS_RUN
from wsi_fl.privacy.ledger_file import LedgerFile, run_id
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.system.files import write_json


class _DepartedRun(RunAccount):
    """The releases of one run that have left, its method if the run is still here, and the other sites."""

    method: str | None
    to: list[str]


class _Departure(TypedDict):
    """What a hospital leaves behind; `says` is the same for people, and what to do."""

    created: str
    site: str
    federation: str
    runs: list[_DepartedRun]
    says: list[str]


def write_departure(study: Study, kit: Kit, *, out: Path, delete_approval: bool = False) -> _Departure:
    """Write, as JSON, a hospital's releases with their receivers, and the remaining steps; return the document.

    If its approval is to be deleted too, so that no further run starts, no process of it may still run.
    """
    site, approval = study.load_site(kit.name), approval_path(study, kit.name)
    entries = [entry for entry in LedgerFile(study.ledger_path(site.name)).entries if entry.site == site.name]
    delta = site.delta or next((entry.delta for entry in reversed(entries) if entry.delta), 1e-5)
    accounts = list_accounts(study, site.name, entries, delta, None)
    runs = [_describe_release(study, site.name, account) for account in accounts]
    if delete_approval:
        with kit.lock_kit():  # a process that runs would go on
            approval.unlink(missing_ok=True)
    facts = {"signed": str(approval) if approval.exists() else "", "ledger": study.ledger_path(site.name)}
    facts |= {"runs": runs, "site": site.name, "statistics_run": STATISTICS_RUN, "kit": kit.path}
    document: _Departure = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "site": site.name,
        "federation": kit.document["federation"],
        "runs": runs,
        "says": fill_plan_text(DOSSIER_TEXTS["departure"], **facts),
    }
    write_json(out, document)
    return document


def _describe_release(study: Study, site: str, account: RunAccount) -> _DepartedRun:
    """Return the releases of one run, and its other sites, if the run is still here.

    Class statistics that were released by themselves went to the sites of all plans whose runs carried them.
    """
    folders = [RunFolder(file.parent) for file in sorted(study.runs_path.glob("*/config.toml"))]
    run = next((folder for folder in folders if folder.id == run_id(account["run"])), None)
    carrying = (
        folder
        for folder in folders
        if folder.agreement_digest and site in (folder.site_folder(site).read_statistics_digests() or ())
    )
    runs = [run] if run else carrying if account["run"] == STATISTICS_RUN else ()
    site_lists = (load_run_pipeline(folder.path / "config.toml").sites or [] for folder in runs)
    names = list(dict.fromkeys(name for sites in site_lists for name in sites))
    return {
        **account,
        "releases": [release for release in account["releases"] if release["final"]],
        "method": run.manifest["method"] if run else None,
        "to": [name for name in names if name != site],
    }


def departure_lines(document: _Departure) -> Lines:
    """Report what stays with others, and what to do."""
    yield TextLine(f"{document['site']} leaves {document['federation']}")
    yield from (TextLine(f"  {sentence}") for sentence in document["says"])
