"""The dossier of a hospital: what its data protection officer and its network people ask, from the files that are here.

It reads the plan, the approvals, the kit, the site's own ledger, its runs and their audits, and opens no store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

from typing_extensions import TypedDict

from wsi_fl import __version__
from wsi_fl.hospitals.dossier.assessment import (
    Connection,
    Part,
    assessment,
    connections,
    not_protected,
)
from wsi_fl.hospitals.plans.making import PlanDocument, document_of
from wsi_fl.hospitals.plans.signed import Plan, approvals, kept_cost, plan_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.privacy.accounting import group_epsilon
from wsi_fl.privacy.guarantee import (
    Round,
    applied,
    epsilon_of,
    guarantee_of,
    of_hospital,
    rounds_of,
    units_of,
)
from wsi_fl.privacy.ledger_file import Entry, LedgerFile
from wsi_fl.report.fill import fill
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import Group, terms_of
from wsi_fl.stages.site.ledgers import open_ledger
from wsi_fl.stages.training.going_on import runs_of_plan
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import read_json, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError

_MOST_LINES = 12
"""Releases of a run that are shown; the JSON beside the page has them all."""
_WIDEST = 36
"""Characters of a line in the drawing."""


def render(dossier: Mapping[str, Any]) -> str:
    """Return one HTML document that needs nothing beside it.

    Args:
        dossier: as `wsi-fl federation dossier --json` prints it.
    """
    plan = dossier["plan"]
    others = [site["name"] for site in plan["sites"] if site["name"] != dossier["site"]]
    return fill(
        "dossier",
        {
            "d": dossier,
            "plan": plan,
            "others": others,
            "flow": _flow(dossier, others),
            "most_lines": _MOST_LINES,
            "n_releases": sum(len(account["releases"]) for account in dossier["accounts"]),
        },
        Path(__file__).parent,
    )


def _flow(dossier: Mapping[str, Any], others: list[str]) -> dict[str, Any]:
    """What the drawing of the data flow says: at the hospital, on the way, at the others; and the same in words."""
    plan, way = dossier["plan"], dossier["network"][0]["to"]
    leaves = [row["what"].partition(" (")[0].partition(":")[0] for row in plan["leaves"]]
    named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    private = ["private model"] if any("private model" in one for one in plan["stays"]) else []
    stays = ["slides, patches, features", "labels and names", *private, "checkpoints", "private key"]
    relay = "folder" if way.startswith("the folder") else "server"
    return {
        "leaves": [line for one in leaves for line in wrap(f"· {one}", _WIDEST)],
        "stays": stays,
        "relay": f"shared {relay}" if relay == "folder" else relay,
        "others": named or "nobody",
        "alt": (
            f"Data flow. In hospital {dossier['site']} stay {', '.join(stays)}. Sealed letters with "
            f"{', '.join(leaves)} go by the {relay}, which cannot read them, to {named or 'nobody'}. "
            "Theirs come back."
        ),
    }


class _ReleaseEntry(TypedDict):
    """One thing that left the site, or may have.

    Attributes:
        what: the kind, as the ledger has it.
        sha256: of the bytes.
        bytes: what the round sent in all; None where its run is no longer here.
        final: whether it may have left; else it is on record and was not sent.
    """

    round: int
    what: str
    sha256: str
    bytes: int | None
    final: bool


class Account(TypedDict):
    """What a site released in one run, and what that cost.

    Attributes:
        plan: SHA-256 of the plan that was signed for it; "" where none was asked for.
        epsilon: None where ε says nothing.
        group: what ε per row is worth to the patient with the most rows; None where that is not the question, or the
            number of rows is not known here.
    """

    run: str
    plan: str
    epsilon: float | None
    delta: float | None
    unit: str
    guarantee: str
    group: Group | None
    releases: list[_ReleaseEntry]


class _Audited(TypedDict):
    """What attacks found out about one model of the site; `interval` is that of 95 %."""

    run: str
    model: str
    auroc: float | None
    interval: list[float] | None
    epsilon_lower: float | None
    epsilon_upper: float | None


class Dossier(TypedDict):
    """All that the page shows.

    Attributes:
        signed: the sites that have signed the plan.
        missing: the others, and why; None where the federation's root is not here to tell.
        spent: ε of everything released so far, per unit of the plan.
        group: what that is worth to the patient with the most rows, as in `Account`.
        cost: what the plan costs, as the hospital saw it when it signed; None where its store was not there.
        warning: why the ledger is not to be believed, as `approve` says it; "" where it is.
    """

    created: str
    wsi_fl: str
    site: str
    plan_sha256: str
    plan: PlanDocument
    signed: list[str]
    missing: dict[str, str] | None
    budget: dict[str, float | None]
    spent: float | None
    group: Group | None
    cost: dict[str, Any] | None
    warning: str
    network: list[Connection]
    accounts: list[Account]
    audits: list[_Audited]
    not_protected: list[str]
    assessment: list[Part]


def make_dossier(study: Study, *, site: str | None, kit: Path | None, out: Path) -> Dossier:
    """Write the page, and the same as JSON; return what the page says.

    Args:
        site: whose dossier; default: that of the kit.
        out: the page; `.json` lies beside it.

    Raises:
        UsageError: when no plan lies in the study, or nobody says of which site the dossier is.
    """
    if not plan_path(study).is_file():
        raise UsageError(
            f"{study.relative(plan_path(study))}: no plan lies here; sign one with `wsi-fl federation approve PLAN`"
        )
    found, plan = (Kit.open(kit) if kit else None), Plan.load(plan_path(study))
    name = site or (found.name if found and found.role == "hospital" else None)
    if name is None:
        raise UsageError("of which hospital? add --site NAME, or --kit DIR of a hospital")
    if name not in plan.sites:
        raise UsageError(f"site {name} is not in this plan, which has {', '.join(plan.sites)}")
    dossier = dossier_of(study, plan, study.site(name), found)
    write_json(out.with_suffix(".json"), dossier)
    write_text(out, render(dossier))
    return dossier


def dossier_of(study: Study, plan: Plan, site: SiteFile, kit: Kit | None) -> Dossier:
    """Return what the page of a hospital says of a plan, from the files of its study and its kit."""
    said = document_of(plan)
    heard = approvals(study, plan, kit.identity().root) if kit else None
    lines, warning = _ledger(study, plan, site)
    entries = [entry for entry in lines if entry.site == site.name]
    delta, cost = site.delta or said["privacy"]["delta"], kept_cost(study, site.name, plan)
    rows = _most_rows(study, site.name, cost)
    counted = of_hospital(entries, said["privacy"]["unit"]) if site.real else entries
    group, audits = _group_of(counted, delta, rows), _audits(study, site.name)
    promised = (cost or {}).get("lifetime_group") or group
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "wsi_fl": __version__,
        "site": site.name,
        "plan_sha256": plan.digest,
        "plan": said,
        "signed": list(heard.signed) if heard else [],
        "missing": _missing(study, plan, heard.missing) if heard else None,
        "budget": {"max_epsilon": site.max_epsilon, "delta": delta},
        "spent": epsilon_of(counted, delta),
        "group": group,
        "cost": cost,
        "warning": warning,
        "network": connections(kit),
        "accounts": accounts(study, site.name, entries, delta, rows),
        "audits": audits,
        "not_protected": not_protected(said, kit, promised),
        "assessment": assessment(said, site, promised, audited=bool(audits)),
    }


def _ledger(study: Study, plan: Plan, site: SiteFile) -> tuple[Sequence[Entry], str]:
    """The lines of a site's ledger, and why they are not to be believed; "" where they are."""
    try:
        terms = terms_of(site, plan.pipeline(), "none")
        return open_ledger(study, site, f"plan {plan.digest[:32]}", terms).entries, ""
    except WsiFlError as error:
        return LedgerFile(study.ledger(site.name)).entries, str(error).replace(f"{study.root}/", "")


def _missing(study: Study, plan: Plan, missing: Mapping[str, str]) -> dict[str, str]:
    """Why no approval of a site is here; of one that took part in a run of the plan that is no sign of anything."""
    took_part = {
        row["site"]: run.name
        for run in runs_of_plan(study, plan.digest)
        for row in (run.summary() or {"sites": []})["sites"]
    }
    return {
        site: f"took part in {took_part[site]} under this plan; its approval lies with itself and the coordinator"
        if site in took_part and not (plan_path(study).parent / f"approval-{site}.json").is_file()
        else why
        for site, why in missing.items()
    }


def accounts(
    study: Study, site: str, entries: Sequence[Entry], delta: float, rows: int | None
) -> list[Account]:
    """What the site released in each run, the first run first."""
    return [
        _account([entry for entry in entries if entry.run_id == run], delta, _sent(study, site, run), rows)
        for run in dict.fromkeys(entry.run_id for entry in entries)
    ]


def _account(lines: Sequence[Entry], delta: float, sent: dict[int, int], rows: int | None) -> Account:
    spent = epsilon_of(lines, delta)
    return {
        "run": lines[0].run,
        "plan": next((line.agreement for line in lines if line.agreement), ""),
        "epsilon": spent,
        "delta": delta,
        "unit": ", ".join(sorted(units_of(lines))),
        "guarantee": "none" if spent is None else guarantee_of(lines),
        "group": _group_of(lines, delta, rows),
        "releases": [one for round_ in rounds_of(lines) for one in _released(round_, sent)],
    }


def _released(round_: Round, sent: dict[int, int]) -> list[_ReleaseEntry]:
    return [
        {
            "round": round_.number,
            "what": kind,
            "sha256": digest,
            "bytes": sent.get(round_.number),
            "final": round_.final,
        }
        for kind, digest in round_.releases.items()
    ]


def _sent(study: Study, site: str, run: str) -> dict[int, int]:
    """Bytes that the site sent in each round of a run, where its folder is still here."""
    for manifest in sorted(study.runs.glob("*/manifest.json")):
        folder = RunFolder(manifest.parent)
        if folder.id == run:
            return {line["round"]: line["bytes"] for line in folder.site(site).metrics()}
    return {}


def _audits(study: Study, site: str) -> list[_Audited]:
    """What `audit` found about the models of the site, in every run that was audited here."""
    found: list[_Audited] = []
    for file in sorted(study.runs.glob("*/audit/audit.json")):
        document: dict[str, Any] = read_json(file)
        for one in document.get("sites", ()):
            if one["site"] == site:
                found += [_audited(document, model) for model in one["models"]]
    return found


def _audited(document: dict[str, Any], model: dict[str, Any]) -> _Audited:
    own, planted = model["membership"]["own"], model["canaries"] or {}
    return {
        "run": str(document["run"]),
        "model": str(model["model"]),
        "auroc": own["auroc"],
        "interval": own["interval"],
        "epsilon_lower": planted.get("epsilon_lower"),
        "epsilon_upper": planted.get("epsilon_upper"),
    }


def _most_rows(study: Study, site: str, cost: Mapping[str, Any] | None) -> int | None:
    """Return the most rows that a patient of a site had, as it signed or in a run; None where nobody looked.

    Args:
        cost: what the hospital saw of the plan's cost as it signed.
    """
    runs = [path for path in study.runs.glob("*/sites/*/ledger.json") if path.parent.name == site]
    seen = [(cost or {}).get("group"), *(read_json(path).get("group") for path in runs)]
    return max((int(one["rows"]) for one in seen if one), default=None)


def _group_of(entries: Sequence[Entry], delta: float, rows: int | None) -> Group | None:
    """Return what ε per row of lines of a ledger is worth to a patient with so many rows.

    None where ε is not per row or says nothing, or the number of rows is not known.
    """
    if rows is None or units_of(entries) != {"row"} or epsilon_of(entries, delta) is None:
        return None
    return {"rows": rows, "epsilon": group_epsilon(applied(entries), delta, rows), "delta": delta}
