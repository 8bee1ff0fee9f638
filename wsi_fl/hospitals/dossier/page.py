"""The dossier of a hospital: answers for its data protection officer and its network administrators, from local files.

It is made from the plan, the approvals, the kit, the site's own ledger, its runs and their audits, and opens no store;
further texts are in `dossier.toml`. A hospital that leaves keeps a part of it: its releases, and what of them stays
with others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

from wsi_fl import __version__
from wsi_fl.hospitals.plans.contents import filled
from wsi_fl.hospitals.plans.making import PlanDocument, document_of, left_by
from wsi_fl.hospitals.plans.signed import Plan, approval_path, approvals, cost_path, plan_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.privacy.accounting import group_epsilon
from wsi_fl.privacy.guarantee import applied, epsilon_of, guarantee_of, of_hospital, rounds_of, units_of
from wsi_fl.privacy.ledger_file import Entry, LedgerFile, run_id
from wsi_fl.report.fill import fill
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import Group, group_words, open_ledger, terms_of
from wsi_fl.stages.site.sums import RUN
from wsi_fl.stages.training.going_on import runs_of_plan
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import read_object, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError

_MOST_LINES = 12
"""Releases of a run that are shown; the JSON beside the page has all."""
_WIDEST = 36
"""Characters of a line in the drawing."""
_SAID = tomllib.loads(Path(__file__).with_name("dossier.toml").read_text("utf-8"))


def _render(dossier: Mapping[str, Any]) -> str:
    """Return a dossier's `--json` document as one self-contained HTML document."""
    context = {
        "d": dossier,
        "plan": dossier["plan"],
        "flow": _flow(dossier),
        "most_lines": _MOST_LINES,
        "n_releases": sum(len(account["releases"]) for account in dossier["accounts"]),
    }
    return fill("dossier", context, Path(__file__).parent)


def _flow(dossier: Mapping[str, Any]) -> dict[str, object]:
    """Return the labels of the data flow drawing: at the hospital, in transit, at the others; and the same in words."""
    plan, way = dossier["plan"], dossier["network"][0]["to"]
    others = [site["name"] for site in plan["sites"] if site["name"] != dossier["site"]]
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
            f"Data flow. In hospital {dossier['site']} stay {', '.join(stays)}. Sealed messages with "
            f"{', '.join(leaves)} go by the {relay}, which cannot read them, to {named or 'nobody'}. "
            "Theirs come back."
        ),
    }


def make_dossier(
    study: Study, *, site: str | None, kit: Path | None, out: Path, for_others: bool = False
) -> dict[str, Any]:
    """Write the page, and its content as JSON beside it; return the content.

    Args:
        site: of the dossier; default: that of the kit.
        for_others: whether it leaves the hospital; see `build_dossier`.

    Raises:
        UsageError: when no plan is in the study, or the site is not given.
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
    dossier = dossier_of(study, plan, study.site(name), found, for_others=for_others)
    write_json(out.with_suffix(".json"), dossier)
    write_text(out, _render(dossier))
    return dossier


def dossier_of(
    study: Study, plan: Plan, site: SiteFile, kit: Kit | None, *, for_others: bool = False
) -> dict[str, Any]:
    """Return a hospital's dossier on a plan, from the files of its study and its kit.

    A dossier that leaves the hospital (`for_others`) holds nothing that depends on single patients without an ε, nor a
    path of the machine: neither the number of rows of the patient with the most nor its group ε; not the plan's cost as
    the hospital saw it; no attack on a local model; of an invalid ledger only that it is invalid.

    Returns:
        Among others "missing": why sites have not signed, None if the federation's root CA is not here to verify;
        "spent": ε of everything released so far, per unit of the plan; "group": the same for the patient with the most
        rows; "cost": the plan's cost, as the hospital saw it when it signed; "warning": why the ledger is invalid, as
        by `approve`; "accounts": as `_list_accounts`; "audits": results of attacks.
    """
    said = document_of(plan)
    heard = approvals(study, plan, kit.identity().root) if kit else None
    lines, warning = _ledger(study, plan, site)
    entries = [entry for entry in lines if entry.site == site.name]
    delta, cost = site.delta or said["privacy"]["delta"], _kept_cost(study, site.name, plan)
    rows = _most_rows(study, site.name, cost)
    if for_others:
        cost, rows, warning = None, None, warning and "the hospital can say why"
    counted = of_hospital(entries, said["privacy"]["unit"]) if site.real else entries
    group, audits = _group_of(counted, delta, rows), _audits(study, site.name, for_others=for_others)
    promised = (cost or {}).get("lifetime_group") or group
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "wsi_fl": __version__,
        "site": site.name,
        "for_others": for_others,
        "plan_sha256": plan.digest,
        "plan": said | {"leaves": left_by(said, site.name)},
        "signed": list(heard.signed) if heard else [],
        "missing": _missing(study, plan, heard.missing) if heard else None,
        "budget": {"max_epsilon": site.max_epsilon, "delta": delta},
        "spent": epsilon_of(counted, delta),
        "group": group,
        "cost": cost,
        "warning": warning,
        "accounts": _accounts(study, site.name, entries, delta, rows),
        "audits": audits,
        **_said_beside(said, site, kit, promised, audited=bool(audits), for_others=for_others),
    }


def _said_beside(
    plan: PlanDocument,
    site: SiteFile,
    kit: Kit | None,
    group: Group | None,
    *,
    audited: bool,
    for_others: bool,
) -> dict[str, object]:
    """Return the connections, the remaining risks, and the draft of an assessment: {"heading", "facts", "gaps"}.

    Args:
        group: ε of all releases and of the plan for the patient with the most rows.
        audited: whether a model of the site was attacked by `audit`.
        for_others: whether this leaves the hospital.
    """
    known: dict[str, object] = {
        "plan": plan,
        "privacy": plan["privacy"],
        "site": site,
        "folder": None,
        "worth": group_words(group) if group else "",
        "audited": audited,
        "scores": any("scores" in one["allow"] for one in plan["sites"]),
    }

    known["not_protected"] = "\n".join(filled(_SAID["not_protected"], **known))
    known |= _reached(kit)
    if for_others and known["folder"] and "://" not in str(known["folder"]):
        known["folder"] = "a path of this hospital"
    rows = _SAID["network"]["folder" if known["folder"] else "server"]
    return {
        "network": [{key: "".join(filled(text, **known)) for key, text in row.items()} for row in rows],
        "not_protected": filled(_SAID["not_protected"], **known),
        "assessment": [part | {"facts": filled(part["facts"], **known)} for part in _SAID["assessment"]],
    }


def _reached(kit: Kit | None) -> dict[str, str | None]:
    """Return the shared folder, or host and port of the server, in words if no kit names them."""
    if kit is None or not (server := kit.document.get("server")):
        known = {"host": "the coordinator's server", "port": "the server's one TCP port"}
        return {"folder": kit.folder if kit else None, **known}
    host, _, port = str(server).rpartition(":")
    return {"folder": kit.folder, "host": f"server {host}", "port": f"TCP {port}"}


def _ledger(study: Study, plan: Plan, site: SiteFile) -> tuple[Sequence[Entry], str]:
    """Return the lines of a site's ledger, and why they are invalid; "" if they are valid."""
    try:
        terms = terms_of(site, plan.pipeline(), "none")
        return open_ledger(study, site, f"plan {plan.digest[:32]}", terms).entries, ""
    except WsiFlError as error:
        return LedgerFile(study.ledger(site.name)).entries, str(error).replace(f"{study.root}/", "")


def _missing(study: Study, plan: Plan, missing: Mapping[str, str]) -> dict[str, str]:
    """Return why no approval of a site is here; for a participant in a run of the plan that is normal."""
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


def _accounts(
    study: Study, site: str, entries: Sequence[Entry], delta: float, rows: int | None
) -> list[dict[str, Any]]:
    """Return the site's releases in each run, the first run first, and their cost.

    "plan" is "" if none was signed, and "epsilon" None if no ε holds. "releases" have the "bytes" that the round sent
    in all, None if its run is no longer here, and as "final" whether they may have left.
    """
    found = []
    for run in dict.fromkeys(entry.run_id for entry in entries):
        lines, sent = [entry for entry in entries if entry.run_id == run], _sent(study, site, run)
        spent = epsilon_of(lines, delta)
        releases = [
            {
                "round": one.number,
                "what": kind,
                "sha256": digest,
                "bytes": sent.get(one.number),
                "final": one.final,
            }
            for one in rounds_of(lines)
            for kind, digest in one.releases.items()
        ]
        account = {
            "run": lines[0].run,
            "plan": next((line.agreement for line in lines if line.agreement and not line.sending), ""),
            "epsilon": spent,
            "delta": delta,
            "unit": ", ".join(sorted(units_of(lines))),
            "guarantee": "none" if spent is None else guarantee_of(lines),
            "group": _group_of(lines, delta, rows),
            "releases": releases,
        }
        found.append(account)
    return found


def _sent(study: Study, site: str, run: str) -> dict[int, int]:
    """Return the bytes that the site sent in each round of a run, if its folder is still here."""
    for manifest in sorted(study.runs.glob("*/manifest.json")):
        folder = RunFolder(manifest.parent)
        if folder.id == run:
            return {line["round"]: line["bytes"] for line in folder.site(site).metrics()}
    return {}


def _audits(study: Study, site: str, *, for_others: bool = False) -> list[dict[str, object]]:
    """Return `audit`'s results on the models of the site, in every audited run here; intervals are of 95 %.

    For others these are results on models that left.
    """
    found = []
    for file in sorted(study.runs.glob("*/audit/audit.json")):
        document = RunFolder(file.parent.parent).audit() or {}
        mine = [one for one in document.get("sites", ()) if one["site"] == site]
        for model in [model for one in mine for model in one["models"]]:
            if for_others and model["model"] == "private":
                continue
            own, planted = model["membership"]["own"], model["canaries"] or {}
            audited = {
                "run": str(document["run"]),
                "model": str(model["model"]),
                "auroc": own["auroc"],
                "interval": own["interval"],
                "epsilon_lower": planted.get("epsilon_lower"),
                "epsilon_upper": planted.get("epsilon_upper"),
            }
            found.append(audited)
    return found


def _kept_cost(study: Study, site: str, plan: Plan) -> dict[str, Any] | None:
    """Return a plan's cost as a hospital saw it when it signed; None if it saw none."""
    path = cost_path(study, site)
    kept = read_object(path, "delete it") if path.is_file() else {}
    return kept["cost"] if kept.get("plan") == plan.digest else None


def _most_rows(study: Study, site: str, cost: Mapping[str, Any] | None) -> int | None:
    """Return the largest number of rows of a patient of a site, as it signed or in a run; None if unknown."""
    places = [RunFolder(path).site(site) for path in sorted(study.runs.glob("*"))]
    accounts = [place.account() for place in places if place.account_path.is_file()]
    seen = [one.get("group") for one in (cost or {}, *accounts)]
    return max((int(one["rows"]) for one in seen if one), default=None)


def _group_of(entries: Sequence[Entry], delta: float, rows: int | None) -> Group | None:
    """Return ε per row of ledger lines for a patient with a number of rows; None if no such ε holds."""
    if rows is None or units_of(entries) != {"row"} or epsilon_of(entries, delta) is None:
        return None
    return {"rows": rows, "epsilon": group_epsilon(applied(entries), delta, rows), "delta": delta}


def leave(study: Study, kit: Kit, *, out: Path, delete_approval: bool = False) -> dict[str, Any]:
    """Write, as JSON, a hospital's releases with their receivers, and the remaining steps; return the document.

    If its approval is to be deleted too, so that no further run starts, no process of it may still run.
    """
    site, approval = study.site(kit.name), approval_path(study, kit.name)
    entries = [one for one in LedgerFile(study.ledger(site.name)).entries if one.site == site.name]
    delta = site.delta or next((one.delta for one in reversed(entries) if one.delta), 1e-5)
    runs = [_released(study, site.name, one) for one in _accounts(study, site.name, entries, delta, None)]
    if delete_approval:
        with kit.alone():  # a process that runs would go on
            approval.unlink(missing_ok=True)
    there = f"{approval} is there: --delete-approval deletes it"
    signed = there if approval.exists() else "no plan is signed here"
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


def _released(study: Study, site: str, account: dict[str, Any]) -> dict[str, Any]:
    """Return the releases of one run, and its other sites, if the run is still here.

    Class statistics that were released by themselves went to the sites of all plans whose runs carried them.
    """
    folders = [RunFolder(file.parent) for file in sorted(study.runs.glob("*/config.toml"))]
    run = next((one for one in folders if one.id == run_id(account["run"])), None)
    carried = (one for one in folders if one.agreement and site in (one.site(site).released() or ()))
    runs = [run] if run else carried if account["run"] == RUN else ()
    of_each = (load_pipeline(one.path / "config.toml").sites or [] for one in runs)
    names = list(dict.fromkeys(name for sites in of_each for name in sites))
    said = {"method": run.manifest["method"] if run else None, "to": [name for name in names if name != site]}
    return account | said | {"releases": [one for one in account["releases"] if one["final"]]}


def _stays(site: str, run: dict[str, Any]) -> str:
    """Describe what of a run stays with others."""
    name, gone = run["run"].split()[0], run["releases"]
    if not gone:
        return f"{name}: nothing has left"
    kinds, rounds = ", ".join(sorted({one["what"] for one in gone})), [one["round"] for one in gone]
    spent = "no ε holds" if run["epsilon"] is None else f"ε = {run['epsilon']:.2f} per {run['unit']}"
    others = ", ".join(run["to"]) or "the other sites"
    others += ", and whoever was given the file," if name == RUN else ""
    return (
        f"{name}: {others} may hold {len(gone)} releases of {site} ({kinds}; rounds "
        f"{min(rounds)} to {max(rounds)}; {spent}), and models that learned from them; nothing calls them back"
    )


def leaving_lines(document: dict[str, Any]) -> Lines:
    """Report what stays with others, and what to do."""
    yield Line(f"{document['site']} leaves {document['federation']}")
    yield from (Line(f"  {said}") for said in document["says"])
