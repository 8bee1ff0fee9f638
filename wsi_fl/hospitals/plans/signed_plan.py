"""The plan that hospitals sign: one readable file with what runs, what leaves, and its cost.

A hospital's approval is a signature of the file's SHA-256 with the key of its kit. A process takes part only in the
plan that is approved in its own study, and its ledger names that plan.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.hospitals.plans.preapproval import StandingApproval, find_end_reason
from wsi_fl.hospitals.trust.certificates import Identity, key_fingerprint, parse_revocation_list, verify_document
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import toml_value, validate_model
from wsi_fl.system.files import read_object, require_regular_file, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError

FORMAT, VERSION = "wsi-fl plan", 1
_REQUEST_FORMAT = "wsi-fl federation request"
SITE_TERMS = ("real", "role", "allow", "max_epsilon", "delta")
"""Keys of a site's file that are copied into a plan."""
_PURPOSE = b"wsi-fl approval of a plan, version 1\n"
_TOML_STRING, _MAX_DOTS = re.compile(r'"(?:[^"\\]|\\.)*"'), 8
"""A string in the settings of a plan, and a limit of dots per line outside of strings."""


@dataclass(frozen=True)
class FederationPlan:
    """A plan as written: the text of its file, whose SHA-256 hospitals sign."""

    text: str

    @staticmethod
    def load(path: Path) -> FederationPlan:
        """Read a plan; UsageError if the file is none."""
        try:
            text = require_regular_file(path).read_text(encoding="utf-8")
        except (OSError, ValueError):
            text = ""
        return FederationPlan.parse_text(text, str(path))

    @staticmethod
    def parse_text(text: str, label: str) -> FederationPlan:
        """Return the plan of a text; UsageError, with a label of its origin, if it is none."""
        plan = FederationPlan(text)
        try:
            header = (plan.document.get("format"), plan.document.get("version"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{label}: this is no plan; make one with `wsi-fl federation plan`") from None
        if header != (FORMAT, VERSION):
            raise UsageError(f"{label}: this is no plan that this version of wsi-fl reads")
        return plan

    @cached_property
    def document(self) -> dict[str, Any]:
        """The content of the file."""
        return dict(json.loads(self.text))

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def method(self) -> str:
        return str(self.document["method"])

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return str(self.document["pipeline"])

    @property
    def sites(self) -> list[str]:
        """The names of all sites, in order."""
        return [str(site["name"]) for site in self.document["sites"]]

    def remaining_sites(self, without: Sequence[str]) -> list[str]:
        """Return the sites but those; UsageError for one that the plan does not have."""
        if unknown := sorted(set(without) - set(self.sites)):
            raise UsageError(f"unknown site {unknown[0]!r}; the plan has {', '.join(self.sites)}")
        return [site for site in self.sites if site not in without]

    @property
    def keys(self) -> dict[str, str]:
        """The fingerprint of each site's key, if the plan pins it."""
        return {str(site["name"]): str(site["key"]) for site in self.document["sites"] if site.get("key")}

    @property
    def parameters(self) -> str:
        """The SHA-256 of the parameters of the model that travels; "" if only the hospitals' stores determine it."""
        return str(self.document.get("learns", {}).get("parameters") or "")

    @property
    def most_bytes(self) -> int:
        """The longest message that can be part of this plan."""
        return int(self.document["most_bytes"])

    def pipeline(self) -> Pipeline:
        """Return the settings of the plan; UsageError if they are none of this version."""
        return validate_model(pipeline_model(), _parse_settings(str(self.document["settings"])), "plan")


def _parse_settings(text: str) -> dict[str, object]:
    """Return the settings of a plan from its untrusted TOML text; UsageError for any other text."""
    try:  # parsing TOML can cost much memory and time, so lines that plans never contain are refused unread
        for line in text.split("\n"):
            bare = _TOML_STRING.sub("\0", line)
            if bare.count(".") > _MAX_DOTS or any(character in bare for character in ("'", '"', "\0\0")):
                raise ValueError
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("plan: its settings are not as plans write them; ask for it again") from None


def describe_changes(earlier: FederationPlan, plan: FederationPlan) -> list[str]:
    """Describe how a plan differs from an earlier one: sites, method, settings, and permissions of sites."""
    common_sites = [name for name in plan.sites if name in earlier.sites]
    old_terms, new_terms = (_collect_terms(candidate, common_sites) for candidate in (earlier, plan))
    return [
        *(f"without {name}" for name in earlier.sites if name not in common_sites),
        *(f"with {name}" for name in plan.sites if name not in common_sites),
        *(
            f"{key} {format_value(old_terms.get(key))} → {format_value(new_terms.get(key))}"
            for key in dict.fromkeys([*old_terms, *new_terms])
            if old_terms.get(key) != new_terms.get(key)
        ),
    ]


def settings_by_key(settings: str) -> dict[str, object]:
    """Return the settings of a TOML text by "section.key", without the list of sites."""
    sections = _parse_settings(settings).items()
    return {f"{name}.{key}": value for name, keys in sections if isinstance(keys, dict) for key, value in keys.items()}


def _collect_terms(plan: FederationPlan, sites: Collection[str]) -> dict[str, object]:
    """Return the method, the settings, and the terms of some sites in a plan, by name."""
    terms: dict[str, object] = {"method": plan.method, **settings_by_key(str(plan.document["settings"]))}
    for site in plan.document["sites"]:
        if site["name"] in sites:
            terms |= {f"{site['name']}'s {key}": site.get(key) for key in (*SITE_TERMS, "key")}
    return terms


def is_request(path: Path) -> bool:
    """Return whether a file is a certificate request, which is approved otherwise than a plan."""
    try:
        document = json.loads(require_regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == _REQUEST_FORMAT


def plan_path(study: Study) -> Path:
    """Return the path of the signed plan in a study."""
    return study.root / "federation" / "plan.json"


def approval_path(study: Study, site: str) -> Path:
    """Return the path of a site's approval of that plan in a study."""
    return study.root / "federation" / f"approval-{site}.json"


def cost_path(study: Study, site: str) -> Path:
    """Return the path of the plan's cost as its site saw it when signing, which stays at the site."""
    return study.root / "federation" / f"cost-{site}.json"


def archive_other_plan(path: Path, plan: FederationPlan) -> str:
    """Copy a plan or an approval of another plan to a name with the first digits of its plan's digest.

    The copy, such as approval-A-8e8966ae.json, is for people alone. Returns its path, "" if there is nothing to keep.
    """
    try:
        text = require_regular_file(path).read_text(encoding="utf-8")
        content = json.loads(text)
        plan_digest = FederationPlan(text).digest if content.get("format") == FORMAT else str(content["plan"])
    except (OSError, ValueError, KeyError, AttributeError, RecursionError):
        return ""
    if plan_digest == plan.digest or not re.fullmatch("[0-9a-f]{64}", plan_digest):
        return ""
    archive = path.with_name(f"{path.stem}-{plan_digest[:8]}.json")
    write_text(archive, text)
    return str(archive)


def record_approval(
    study: Study, plan: FederationPlan, identity: Identity, standing_approval: StandingApproval | None = None
) -> dict[str, str]:
    """Sign a plan in the name of a hospital, or by its standing approval; store plan and approval in its study."""
    if identity.name not in plan.sites:
        raise UsageError(f"site {identity.name} is not in this plan, which has {', '.join(plan.sites)}")
    plan_path(study).parent.mkdir(exist_ok=True)
    for path in (plan_path(study), approval_path(study, identity.name)):
        archive_other_plan(path, plan)
    write_text(plan_path(study), plan.text)
    document = {"site": identity.name, "plan": plan.digest, "time": datetime.now(UTC).isoformat()}
    if standing_approval is not None:
        approval_json = json.dumps(standing_approval, sort_keys=True).encode()
        document |= {
            "preapproval": standing_approval["id"],
            "preapproval_sha256": hashlib.sha256(approval_json).hexdigest(),
        }
    write_json(approval_path(study, identity.name), identity.sign_document(document, _PURPOSE))
    return document


_SIGN_AGAIN = "sign the plan again with `wsi-fl federation approve`"


def load_approved_plan(study: Study, identity: Identity) -> FederationPlan:
    """Return a hospital's signed plan; UsageError if there is none, or the file has changed."""
    path, approval = plan_path(study), approval_path(study, identity.name)
    if not path.exists() or not approval.exists():
        text = f"site {identity.name} has approved no plan; read it and sign it with `wsi-fl federation approve PLAN`"
        raise mark_fault(UsageError(text), "unsigned", identity.name)
    plan = FederationPlan.load(path)
    if plan.keys.get(identity.name) in parse_revocation_list(identity.root).keys:  # not of the identity, which holds
        text = f"this plan names an older key of {identity.name}; ask for a new plan, and sign it"
        raise mark_fault(UsageError(text), "older_key", identity.name)
    _check_approval(read_object(approval, _SIGN_AGAIN), plan, identity.root, site=identity.name)
    approval_id = approval_time(study, identity.name).partition(" frame ")[2]
    if approval_id and (reason := find_end_reason(study, identity, approval_id)):
        text = f"site {identity.name} {reason} ({plan.digest[:8]}); have it approve the plan itself"
        raise mark_fault(UsageError(text), "withdrew", identity.name)
    return plan


def approval_time(study: Study, site: str) -> str:
    """Return when a site approved its plan, valid for one run, and by which standing approval; "" if it did not."""
    path = approval_path(study, site)
    approval = read_object(path, _SIGN_AGAIN, ["time"]) if path.exists() else {"time": ""}
    return f"{approval['time']} frame {approval['preapproval']}" if "preapproval" in approval else str(approval["time"])


def _check_approval(document: Mapping[str, object], plan: FederationPlan, root: str, *, site: str) -> None:
    """Refuse an approval that is not a site's signature of this very plan, by the trusted text (PEM)."""
    holder = verify_document(document, root, _PURPOSE, f"the approval of {site}")
    check_pinned_key(plan, str(document["certificate"]), site)
    if (holder.name, document.get("site"), document.get("plan")) != (site, site, plan.digest):
        text = (
            f"site {site} has signed another plan than federation/plan.json ({plan.digest[:8]}); read it and sign it "
            "with `wsi-fl federation approve`"
        )
        raise mark_fault(UsageError(text), "unsigned", site)


class _ApprovalStatus(NamedTuple):
    """The sites whose signature of a plan is there, in its order, and why every other site's does not count."""

    signed: tuple[str, ...]
    missing: dict[str, str]


def collect_approvals(study: Study, plan: FederationPlan, root: str) -> _ApprovalStatus:
    """Return the sites that have and have not signed a plan, by a study's approvals and the trusted text (PEM)."""
    missing: dict[str, str] = {}
    for site in plan.sites:
        path = approval_path(study, site)
        try:
            if not path.is_file():
                raise UsageError("has not signed it, or its approval has not arrived")
            _check_approval(read_object(path, _SIGN_AGAIN), plan, root, site=site)
        except WsiFlError as error:
            missing[site] = str(error)
        except (TypeError, ValueError):
            missing[site] = f"{path.name} is damaged"
    return _ApprovalStatus(tuple(site for site in plan.sites if site not in missing), missing)


def check_pinned_key(plan: FederationPlan, certificate: str, site: str) -> None:
    """Refuse a certificate (PEM) for another key than a plan pins for a site."""
    pinned = plan.keys.get(site)
    if pinned is not None and key_fingerprint(certificate) != pinned:
        text = (
            f"the plan names another key of {site} than its certificate here has; a new key needs a new plan, and one "
            f"that {site} did not ask for needs a telephone call"
        )
        raise mark_fault(UsageError(text), "other_key", site)


def check_revoked(plan: FederationPlan, root: str, sites: Collection[str]) -> None:
    """Refuse sites whose key, as the plan pins it, was revoked by the trusted text (PEM)."""
    revoked_keys = parse_revocation_list(root).keys
    for site in sites:
        if (revoked_on := revoked_keys.get(plan.keys.get(site, ""))) is not None:
            raise UsageError(
                f"the plan names a key of {site} that was withdrawn on {revoked_on:%Y-%m-%d}; a new plan needs its "
                f"new key, or sites/{site}.toml taken away; a run goes on --without {site}"
            )


def check_site_terms(plan_terms: Mapping[str, Any], file: SiteFile) -> None:
    """Refuse a site file that differs from its part of a plan."""
    for key in SITE_TERMS:
        local_value, plan_value = getattr(file, key), plan_terms.get(key)
        if key in plan_terms and (
            sorted(local_value) != sorted(plan_value or ()) if key == "allow" else local_value != plan_value
        ):
            text = (
                f"the plan says {key} = {format_value(plan_value)} of {file.name}, and sites/{file.name}.toml says "
                f"{format_value(local_value)}; have the plan made with your site file, or change your site file"
            )
            raise mark_fault(UsageError(text), "site_terms", file.name)


def format_value(value: Any) -> str:
    """Return a value as TOML, and "nothing" for none."""
    return "nothing" if value is None else toml_value(value)
