"""The dossier of a hospital: answers for its data protection officer and its network administrators, from local files.

It is made from the plan, the approvals, the kit, the site's own ledger, its runs and their audits, and opens no store;
further texts are in `dossier.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from wsi_fl import __version__
from wsi_fl.hospitals.dossier.answers import AnswerSheet, answer_sheets
from wsi_fl.hospitals.plans.build_plan import PlanDocument, parse_plan_document, site_disclosures
from wsi_fl.hospitals.plans.disclosures import fill_plan_text
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, collect_approvals, cost_path, plan_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.privacy.accounting import group_epsilon
from wsi_fl.privacy.guarantee import RoundHistory, lifetime_entries
from wsi_fl.privacy.ledger_file import LedgerEntry, LedgerFile
from wsi_fl.report.templates import fill_template
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.privacy_account import Group, build_terms, describe_group
from wsi_fl.stages.site.site_ledger import open_ledger
from wsi_fl.stages.training.resume import list_plan_runs
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.files import read_object, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError


class _ReleaseRow(TypedDict):
    """A release by a line of the ledger.

    Attributes:
        bytes: that the round sent in all; None if its run is no longer here.
        final: whether it may have left.
    """

    round: int
    what: str
    sha256: str
    bytes: int | None
    final: bool


class RunAccount(TypedDict):
    """A site's releases in one run, and their cost.

    Attributes:
        plan: SHA-256 of the signed plan; "" if none was signed.
        epsilon: None if no ε holds.
        group: ε for the patient with the most rows; None if it is not known.
    """

    run: str
    plan: str
    epsilon: float | None
    delta: float
    unit: str
    guarantee: str
    group: Group | None
    releases: list[_ReleaseRow]


class _AuditResult(TypedDict):
    """The result of attacks on a model; the interval is of 95 %."""

    run: str
    model: str
    auroc: float
    interval: list[float]
    epsilon_lower: float | None
    epsilon_upper: float | None


class _Risks(TypedDict):
    network: list[dict[str, str]]
    not_protected: list[str]
    assessment: list[dict[str, object]]


class _Dossier(_Risks):
    """The content of a hospital's dossier on a plan.

    Attributes:
        for_others: whether it may leave the hospital.
        missing: why sites have not signed; None if the federation's root CA is not here to verify.
        spent: ε of everything released so far, per unit of the plan.
        group: the same for the patient with the most rows.
        cost: the plan's cost, as the hospital saw it when it signed.
        warning: why the ledger is invalid, as by `approve`.
        network: the kinds of connections.
        assessment: the draft of an impact assessment: {"heading", "facts", "gaps"} each.
        answers: to the forms of others.
    """

    created: str
    wsi_fl: str
    site: str
    for_others: bool
    plan_sha256: str
    plan: PlanDocument
    signed: list[str]
    missing: dict[str, str] | None
    budget: dict[str, float | None]
    spent: float | None
    group: Group | None
    cost: Mapping[str, Any] | None
    warning: str
    accounts: list[RunAccount]
    audits: list[_AuditResult]
    answers: list[AnswerSheet]


DOSSIER_TEXTS = tomllib.loads(Path(__file__).with_name("dossier.toml").read_text("utf-8"))


def _render_page(dossier: Mapping[str, Any]) -> str:
    """Return a dossier's `--json` document as one self-contained HTML document."""
    return fill_template("dossier", {"d": dossier, "plan": dossier["plan"]}, Path(__file__).parent)


def make_dossier(study: Study, *, site: str | None, kit: Path | None, out: Path, for_others: bool = False) -> _Dossier:
    """Write the page, and its content as JSON beside it; return the content.

    Args:
        site: of the dossier; default: that of the kit.
        for_others: whether it leaves the hospital; see `build_dossier`.

    Raises:
        UsageError: when no plan is in the study, or the site is not given.
    """
    if not plan_path(study).is_file():
        raise UsageError(
            f"{study.relative_path(plan_path(study))}: no plan lies here; sign one with `wsi-fl federation "
            "approve PLAN`"
        )
    opened_kit, plan = (Kit.open(kit) if kit else None), FederationPlan.load(plan_path(study))
    name = site or (opened_kit.name if opened_kit and opened_kit.role == "hospital" else None)
    if name is None:
        raise UsageError("of which hospital? add --site NAME, or --kit DIR of a hospital")
    if name not in plan.sites:
        raise UsageError(f"site {name} is not in this plan, which has {', '.join(plan.sites)}")
    dossier = build_dossier(study, plan, study.load_site(name), opened_kit, for_others=for_others)
    write_json(out.with_suffix(".json"), dossier)
    write_text(out, _render_page(dossier))
    return dossier


def build_dossier(
    study: Study, plan: FederationPlan, site: SiteFile, kit: Kit | None, *, for_others: bool = False
) -> _Dossier:
    """Return a hospital's dossier on a plan, from the files of its study and its kit.

    A dossier that leaves the hospital (`for_others`) holds nothing that depends on single patients without an ε, nor a
    path of the machine: neither the number of rows of the patient with the most nor its group ε; not the plan's cost as
    the hospital saw it; no attack on a local model; of an invalid ledger only that it is invalid.
    """
    document = parse_plan_document(plan)
    approval_status = collect_approvals(study, plan, kit.load_identity().root) if kit else None
    lines, warning = _load_ledger(study, plan, site)
    entries = [entry for entry in lines if entry.site == site.name]
    delta, cost = site.delta or document["privacy"]["delta"], _load_signed_cost(study, site.name, plan)
    rows = _largest_patient_rows(study, site.name, cost)
    if for_others:
        cost, rows, warning = None, None, warning and "the hospital can say why"
    history = RoundHistory(lifetime_entries(entries, document["privacy"]["unit"]) if site.real else entries)
    group, audits = _group_epsilon(history, delta, rows), _list_audits(study, site.name, for_others=for_others)
    planned_group = (cost or {}).get("lifetime_group") or group
    dossier: _Dossier = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "wsi_fl": __version__,
        "site": site.name,
        "for_others": for_others,
        "plan_sha256": plan.digest,
        "plan": {**document, "leaves": site_disclosures(document, site.name)},
        "signed": list(approval_status.signed) if approval_status else [],
        "missing": _explain_missing(study, plan, approval_status.missing) if approval_status else None,
        "budget": {"max_epsilon": site.max_epsilon, "delta": delta},
        "spent": history.compute_epsilon(delta),
        "group": group,
        "cost": cost,
        "warning": warning,
        "accounts": list_accounts(study, site.name, entries, delta, rows),
        "audits": audits,
        "answers": [],
        **_describe_risks(document, site, kit, planned_group, audited=bool(audits), for_others=for_others),
    }
    dossier["answers"] = answer_sheets(dossier)
    return dossier


def _describe_risks(
    plan: PlanDocument, site: SiteFile, kit: Kit | None, group: Group | None, *, audited: bool, for_others: bool
) -> _Risks:
    """Return the connections, the risks and the draft of an assessment; `group` is of all releases and of the plan."""
    host, _, port = str(kit.document.get("server") or "").rpartition(":") if kit else ("", "", "")
    folder = kit.folder if kit else None
    if for_others and folder and "://" not in folder:
        folder = "a path of this hospital"
    facts: dict[str, object] = {
        "plan": plan,
        "privacy": plan["privacy"],
        "site": site,
        "folder": None,
        "worth": describe_group(group) if group else "",
        "audited": audited,
        "scores": any("scores" in row["allow"] for row in plan["sites"]),
        "host": f"server {host}" if host else "the coordinator's server",
        "port": f"TCP {port}" if host else "the server's one TCP port",
    }
    facts["not_protected"] = "\n".join(fill_plan_text(DOSSIER_TEXTS["not_protected"], **facts))
    facts["folder"] = folder
    rows = DOSSIER_TEXTS["network"]["folder" if folder else "server"]
    return {
        "network": [{key: "".join(fill_plan_text(text, **facts)) for key, text in row.items()} for row in rows],
        "not_protected": fill_plan_text(DOSSIER_TEXTS["not_protected"], **facts),
        "assessment": [
            part | {"facts": fill_plan_text(part["facts"], **facts)} for part in DOSSIER_TEXTS["assessment"]
        ],
    }


def _load_ledger(study: Study, plan: FederationPlan, site: SiteFile) -> tuple[Sequence[LedgerEntry], str]:
    """Return the lines of a site's ledger, and why they are invalid; "" if they are valid."""
    try:
        terms = build_terms(site, plan.pipeline(), "none")
        return open_ledger(study, site, f"plan {plan.digest[:32]}", terms).entries, ""
    except WsiFlError as error:
        return LedgerFile(study.ledger_path(site.name)).entries, str(error).replace(f"{study.root}/", "")


def _explain_missing(study: Study, plan: FederationPlan, missing: Mapping[str, str]) -> dict[str, str]:
    """Return why no approval of a site is here; for a participant in a run of the plan that is normal."""
    took_part = {
        row["site"]: run.name
        for run in list_plan_runs(study, plan.digest)
        for row in (run.read("summary") or {"sites": []})["sites"]
    }
    return {
        site: f"took part in {took_part[site]} under this plan; its approval lies with itself and the coordinator"
        if site in took_part and not (plan_path(study).parent / f"approval-{site}.json").is_file()
        else why
        for site, why in missing.items()
    }


def list_accounts(
    study: Study, site: str, entries: Sequence[LedgerEntry], delta: float, rows: int | None
) -> list[RunAccount]:
    """Return the site's releases in each run, the first run first, and their cost."""
    accounts: list[RunAccount] = []
    for run in dict.fromkeys(entry.run_id for entry in entries):
        lines, n_bytes = [entry for entry in entries if entry.run_id == run], _bytes_by_round(study, site, run)
        history = RoundHistory(lines)
        spent = history.compute_epsilon(delta)
        releases = [
            _ReleaseRow(round=sent.number, what=kind, sha256=digest, bytes=n_bytes.get(sent.number), final=sent.final)
            for sent in history.rounds
            for kind, digest in sent.releases.items()
        ]
        account: RunAccount = {
            "run": lines[0].run,
            "plan": next((line.agreement for line in lines if line.agreement and not line.sending), ""),
            "epsilon": spent,
            "delta": delta,
            "unit": ", ".join(sorted(history.units)),
            "guarantee": "none" if spent is None else history.weakest_guarantee(),
            "group": _group_epsilon(history, delta, rows),
            "releases": releases,
        }
        accounts.append(account)
    return accounts


def _bytes_by_round(study: Study, site: str, run: str) -> dict[int, int]:
    """Return the bytes that the site sent in each round of a run, if its folder is still here."""
    for manifest in sorted(study.runs_path.glob("*/manifest.json")):
        folder = RunFolder(manifest.parent)
        if folder.id == run:
            return {line["round"]: line["bytes"] for line in folder.site_folder(site).read_metrics()}
    return {}


def _list_audits(study: Study, site: str, *, for_others: bool = False) -> list[_AuditResult]:
    """Return `audit`'s results on the models of the site, in every audited run here; for others of those that left."""
    files = sorted(study.runs_path.glob("*/audit/audit.json"))
    return [
        {
            "run": str(document["run"]),
            "model": str(model["model"]),
            "auroc": model["membership"]["own"]["auroc"],
            "interval": model["membership"]["own"]["interval"],
            "epsilon_lower": (model["canaries"] or {}).get("epsilon_lower"),
            "epsilon_upper": (model["canaries"] or {}).get("epsilon_upper"),
        }
        for document in (RunFolder(file.parent.parent).read("audit") or {} for file in files)
        for audit in document.get("sites", ())
        for model in (audit["models"] if audit["site"] == site else ())
        if not (for_others and model["model"] == "private")
    ]


def _load_signed_cost(study: Study, site: str, plan: FederationPlan) -> Mapping[str, Any] | None:
    """Return a plan's cost as a hospital saw it when it signed; None if it saw none."""
    path = cost_path(study, site)
    document = read_object(path, "delete it") if path.is_file() else {}
    cost: Mapping[str, Any] | None = document["cost"] if document.get("plan") == plan.digest else None
    return cost


def _largest_patient_rows(study: Study, site: str, cost: Mapping[str, Any] | None) -> int | None:
    """Return the largest number of rows of a patient of a site, as it signed or in a run; None if unknown."""
    site_folders = [RunFolder(path).site_folder(site) for path in sorted(study.runs_path.glob("*"))]
    accounts = [site_folder.read_account() for site_folder in site_folders if site_folder.account_path.is_file()]
    groups = [account.get("group") for account in (cost or {}, *accounts)]
    return max((int(group["rows"]) for group in groups if group), default=None)


def _group_epsilon(history: RoundHistory, delta: float, rows: int | None) -> Group | None:
    """Return ε per row of recorded rounds for a patient with a number of rows; None if no such ε holds."""
    if rows is None or history.units != {"row"} or history.compute_epsilon(delta) is None:
        return None
    return {"rows": rows, "epsilon": group_epsilon(history.list_mechanisms(), delta, rows), "delta": delta}
