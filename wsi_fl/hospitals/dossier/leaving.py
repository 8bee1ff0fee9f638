"""What a hospital that leaves a federation keeps for its records: what it let go, and what of it stays with others."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wsi_fl.hospitals.dossier.page import Account, accounts
from wsi_fl.hospitals.plans.signed import approval_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.privacy.ledger_file import LedgerFile, run_id
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.system.files import write_json


def leave(study: Study, kit: Kit, *, out: Path, delete_approval: bool = False) -> dict[str, Any]:
    """Write down what a hospital has released to whom, and what is left to be done; return the document.

    Args:
        out: the file to write, JSON.
        delete_approval: delete the hospital's approval of its plan, so that no further run of it starts.

    Raises:
        WsiFlError: when the approval is to be deleted and a process of the hospital still runs.
    """
    site, approval = study.site(kit.name), approval_path(study, kit.name)
    entries = [one for one in LedgerFile(study.ledger(site.name)).entries if one.site == site.name]
    delta = site.delta or next((one.delta for one in reversed(entries) if one.delta), 1e-5)
    runs = [_released(study, site.name, one) for one in accounts(study, site.name, entries, delta, None)]
    if delete_approval:
        with kit.alone():  # a process that runs would go on
            approval.unlink(missing_ok=True)
    signed = (
        f"{approval} is there: --delete-approval deletes it"
        if approval.exists()
        else "no plan is signed here"
    )
    document = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "site": site.name,
        "federation": kit.document["federation"],
        "runs": runs,
        "says": [
            *(_stays(site.name, run) for run in runs),
            f"{signed}; without an approval no run starts",
            f"keep {study.ledger(site.name)}: whoever uses these patients again must know what was spent",
            f"have the coordinator say `wsi-fl federation revoke {site.name} --kit FOUNDED`, then delete {kit.path}",
        ],
    }
    write_json(out, document)
    return document


def _released(study: Study, site: str, account: Account) -> dict[str, Any]:
    """What left in one run, and which other sites took part in it; of a run that is no longer here nobody knows."""
    folders = (RunFolder(file.parent) for file in study.runs.glob("*/config.toml"))
    run = next((one for one in folders if one.id == run_id(account["run"])), None)
    names = load_pipeline(run.path / "config.toml").sites or [] if run else []
    said = {"method": run.manifest["method"] if run else None, "to": [name for name in names if name != site]}
    return account | said | {"releases": [one for one in account["releases"] if one["final"]]}


def _stays(site: str, run: dict[str, Any]) -> str:
    """What of a run stays with others, in words."""
    name, gone = run["run"].split()[0], run["releases"]
    if not gone:
        return f"{name}: nothing has left"
    kinds, rounds = ", ".join(sorted({one["what"] for one in gone})), [one["round"] for one in gone]
    spent = "no ε holds" if run["epsilon"] is None else f"ε = {run['epsilon']:.2f} per {run['unit']}"
    return (
        f"{name}: {', '.join(run['to']) or 'the other sites'} may hold {len(gone)} releases of {site} ({kinds}; rounds "
        f"{min(rounds)} to {max(rounds)}; {spent}), and models that learned from them; nothing calls them back"
    )


def leaving_lines(document: dict[str, Any]) -> Lines:
    """Say what stays with others, and what to do."""
    yield Line(f"{document['site']} leaves {document['federation']}")
    yield from (Line(f"  {said}") for said in document["says"])
