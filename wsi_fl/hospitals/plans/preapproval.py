"""A standing approval: the plans that a hospital runs without signing each, until a last day and up to an ε.

It is `federation/preapproval.json` in the hospital's study, signed with the key of its kit. An approval that was made
in its name names its id, and is worth nothing once the frame is gone, another one lies there, or its last day is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict

from wsi_fl.hospitals.trust.certificates import Identity, key_fingerprint, verify_document
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import collect_mechanisms
from wsi_fl.privacy.ledger_file import LedgerEntry, LedgerFile
from wsi_fl.study.folder import Study
from wsi_fl.system.files import file_lock, read_object, write_json
from wsi_fl.types import UsageError, WsiFlError

FORMAT = "wsi-fl frame 2"
_PURPOSE = b"wsi-fl frame of plans, version 1\n"
_EPSILON_TOLERANCE = 1e-6
"""Of ε: an admitted plan adds the same rounds up in another order."""


class StandingApproval(TypedDict):
    """A hospital's signed limits for plans of the coming weeks.

    Attributes:
        id: stays when code is added, so that ε spent under it still counts.
        allows: permitted values of each term that `admitting` names, such as "method" and "leaves".
        settings: of each method, all settings of its plans as TOML; few of them may vary.
        epsilon: of all its plans together; None if nothing is under differential privacy.
        runs: how many plans may be approved by it, whatever becomes of them.
        until: the last day, in UTC.
    """

    format: str
    id: str
    site: str
    allows: dict[str, list[Any]]
    settings: dict[str, str]
    epsilon: float | None
    runs: int
    until: str


def preapproval_path(study: Study) -> Path:
    """Return the path of a hospital's standing approval in a study."""
    return study.root / "federation" / "preapproval.json"


def write_preapproval(study: Study, approval: StandingApproval, identity: Identity) -> None:
    """Sign a standing approval in the name of its hospital; it holds from now on."""
    write_json(preapproval_path(study), identity.sign_document(approval, _PURPOSE))


def load_preapproval(study: Study, identity: Identity) -> StandingApproval | None:
    """Return the standing approval in a study, expired or not; None if there is none, or it was revoked.

    UsageError if it is damaged, of another version, or not signed with this hospital's own key.
    """
    if not (path := preapproval_path(study)).exists():
        return None
    document, label = read_object(path, "sign another frame"), study.relative_path(path)
    holder = verify_document(document, identity.root, _PURPOSE, label)
    is_own_key = key_fingerprint(str(document["certificate"])) == key_fingerprint(identity.certificate)
    if not is_own_key or (holder.name, document["site"], document["format"]) != (identity.name, holder.name, FORMAT):
        raise UsageError(
            f"{label}: not a standing approval of {identity.name} that this version of wsi-fl reads; sign another"
        )
    if _archive_path(path, document["id"]).exists():  # it came back from a backup
        return None
    return cast("StandingApproval", {key: document[key] for key in StandingApproval.__annotations__})


def _archive_path(path: Path, approval_id: str) -> Path:
    """Return the path of a standing approval's file after its revocation."""
    return path.with_name(f"preapproval-{approval_id}-withdrawn.json")


def has_expired(approval: StandingApproval, today: date | None = None) -> bool:
    """Return whether the last day of a standing approval is over, in UTC."""
    return (today or datetime.now(UTC).date()) > date.fromisoformat(approval["until"])


def find_end_reason(study: Study, identity: Identity, approval_id: str) -> str:
    """Return how a hospital ended the standing approval with an id, or how its ledger exceeds it; "" for neither.

    Each plan fitted when it was admitted, but a run may go on beside one that was admitted later.
    """
    approval = load_preapproval(study, identity)
    if approval is None or approval["id"] != approval_id:
        return "withdrew the standing approval of this plan"
    if has_expired(approval):
        return f"allowed this plan until {approval['until']}"
    site, limit = approval["site"], approval["epsilon"]
    lines = preapproval_entries(LedgerFile(study.ledger_path(site)).entries, site, approval["id"])
    if (runs := len({line.run_id for line in lines})) > approval["runs"]:
        return f"began {runs} runs under a standing approval for {approval['runs']}"
    deltas = [delta for delta in approval["allows"]["delta"] if delta]
    spent = epsilon(collect_mechanisms(lines), min(deltas)) if deltas else 0.0
    is_exceeded = limit is not None and spent > limit * (1 + _EPSILON_TOLERANCE)
    return f"spent ε = {spent:.2f} of the {limit:g} of its standing approval" if is_exceeded else ""


def list_codes(study: Study, identity: Identity) -> list[str]:
    """Return the SHA-256 of each wsi-fl that a hospital accepts; none without a valid standing approval."""
    approval = load_preapproval(study, identity)
    return [] if approval is None or has_expired(approval) else approval["allows"]["code"]


def require_preapproval(study: Study, identity: Identity) -> StandingApproval:
    """Return the standing approval in a study; UsageError if there is none."""
    if (approval := load_preapproval(study, identity)) is None:
        raise UsageError(
            f"{study.relative_path(preapproval_path(study))}: {identity.name} has signed no standing approval"
        )
    return approval


def revoke_preapproval(study: Study, identity: Identity) -> StandingApproval:
    """Revoke the standing approval and all approvals under it by renaming its file; a run ends before it sends more."""
    approval, path = require_preapproval(study, identity), preapproval_path(study)
    path.replace(_archive_path(path, approval["id"]))
    return approval


def _admissions_path(study: Study, approval_id: str) -> Path:
    return study.root / "federation" / f"preapproval-{approval_id}-admitted.json"


def list_admitted_plans(study: Study, approval_id: str) -> list[str]:
    """Return the plans that were approved by the standing approval with an id, by SHA-256, with repetitions."""
    path = _admissions_path(study, approval_id)
    if not path.exists():
        return []
    plans = read_object(path, "put its backup back").get("plans")
    if not isinstance(plans, list) or not all(isinstance(digest, str) for digest in plans):
        raise WsiFlError(f"{study.relative_path(path)}: damaged; put its backup back, or sign a new standing approval")
    return plans


def record_admission(study: Study, approval: StandingApproval, plan: str) -> bool:
    """Count a plan that is about to be approved by a standing approval; return False without counting if it is full."""
    path = _admissions_path(study, approval["id"])
    with file_lock(path.with_suffix(".lock")):
        admitted = list_admitted_plans(study, approval["id"])
        if len(admitted) >= approval["runs"]:
            return False
        write_json(path, {"plans": [*admitted, plan]})
        return True


def preapproval_entries(entries: Iterable[LedgerEntry], site: str, approval_id: str) -> list[LedgerEntry]:
    """Return the lines of a site's ledger of all runs that were approved by a standing approval."""
    site_entries = [entry for entry in entries if entry.site == site]
    runs = {entry.run_id for entry in site_entries if entry.approved.endswith(f" frame {approval_id}")}
    return [entry for entry in site_entries if entry.run_id in runs]
