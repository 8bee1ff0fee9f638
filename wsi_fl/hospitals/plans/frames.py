"""A frame: what plans a hospital lets run without signing each of them, for how long and up to which ε.

It is `federation/preapproval.json` in the hospital's study, signed with the key of its kit. An approval that was made
in its name names its id, and is worth nothing once the frame is gone, another one lies there, or its last day is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict

from wsi_fl.hospitals.trust.certificates import Identity, fingerprint, signer_of
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import applied
from wsi_fl.privacy.ledger_file import Entry, LedgerFile
from wsi_fl.study.folder import Study
from wsi_fl.system.files import alone, read_object, write_json
from wsi_fl.types import UsageError, WsiFlError

FORMAT = "wsi-fl frame 2"
_PURPOSE = b"wsi-fl frame of plans, version 1\n"
_ROUND_OFF = 1e-6
"""Of ε: the same rounds are added up in another order as a plan is admitted."""


class Frame(TypedDict):
    """What a hospital signs for weeks.

    Attributes:
        id: stays when code is added, so that what was spent in the frame still counts.
        allows: what plans may say of each thing that `admitting` names, such as "method" and "leaves".
        settings: of each method, all settings of its plans as TOML; few of them may vary.
        epsilon: of all plans in the frame together; None where nothing is under differential privacy.
        runs: how many plans may be approved in it, whatever becomes of them.
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


def frame_path(study: Study) -> Path:
    """Return where a study keeps the frame that its hospital signed."""
    return study.root / "federation" / "preapproval.json"


def write_frame(study: Study, frame: Frame, identity: Identity) -> None:
    """Sign a frame in the name of its hospital; it holds from now on."""
    write_json(frame_path(study), identity.signed(frame, _PURPOSE))


def open_frame(study: Study, identity: Identity) -> Frame | None:
    """Return the frame that lies in a study, over or not; None where there is none, or it was withdrawn.

    UsageError where it is damaged, of another version, or not signed with this hospital's own key.
    """
    if not (path := frame_path(study)).exists():
        return None
    document, what = read_object(path, "sign another frame"), study.relative(path)
    holder = signer_of(document, identity.root, _PURPOSE, what)
    own = fingerprint(str(document["certificate"])) == fingerprint(identity.certificate)
    if not own or (holder.name, document["site"], document["format"]) != (identity.name, holder.name, FORMAT):
        raise UsageError(
            f"{what}: not a frame of {identity.name} that this version of wsi-fl reads; sign another"
        )
    if _withdrawn(path, document["id"]).exists():  # it came back from a backup
        return None
    return cast("Frame", {key: document[key] for key in Frame.__annotations__})


def _withdrawn(path: Path, number: str) -> Path:
    """What the file of a frame is called once it is withdrawn."""
    return path.with_name(f"preapproval-{number}-withdrawn.json")


def is_over(frame: Frame, today: date | None = None) -> bool:
    """Return whether the last day of a frame is over, in UTC."""
    return (today or datetime.now(UTC).date()) > date.fromisoformat(frame["until"])


def ended(study: Study, identity: Identity, number: str) -> str:
    """Return in words how a hospital ended the frame with an id, or what its ledger holds beyond it; "" for neither.

    Each plan fitted as it was admitted, but a run may go on beside one that was admitted later.
    """
    frame = open_frame(study, identity)
    if frame is None or frame["id"] != number:
        return "withdrew the frame of this plan"
    if is_over(frame):
        return f"allowed this plan until {frame['until']}"
    site, limit = frame["site"], frame["epsilon"]
    lines = of_frame(LedgerFile(study.ledger(site)).entries, site, frame["id"])
    if (runs := len({line.run_id for line in lines})) > frame["runs"]:
        return f"began {runs} runs in a frame for {frame['runs']}"
    deltas = [delta for delta in frame["allows"]["delta"] if delta]
    spent = epsilon(applied(lines), min(deltas)) if deltas else 0.0
    over = limit is not None and spent > limit * (1 + _ROUND_OFF)
    return f"spent ε = {spent:.2f} of the {limit:g} of its frame" if over else ""


def listed_codes(study: Study, identity: Identity) -> list[str]:
    """Return the SHA-256 of each wsi-fl that a hospital takes for one another; none without a frame that stands."""
    frame = open_frame(study, identity)
    return [] if frame is None or is_over(frame) else frame["allows"]["code"]


def require_frame(study: Study, identity: Identity) -> Frame:
    """Return the frame that lies in a study; UsageError where there is none."""
    if (frame := open_frame(study, identity)) is None:
        raise UsageError(f"{study.relative(frame_path(study))}: {identity.name} has signed no frame")
    return frame


def withdraw(study: Study, identity: Identity) -> Frame:
    """End the frame and all approvals in its name; a run under way ends before it sends more. The file is renamed."""
    frame, path = require_frame(study, identity), frame_path(study)
    path.replace(_withdrawn(path, frame["id"]))
    return frame


def _admitted_path(study: Study, number: str) -> Path:
    return study.root / "federation" / f"preapproval-{number}-admitted.json"


def admitted_plans(study: Study, number: str) -> list[str]:
    """Return the plans that were approved in the frame with an id, by SHA-256, each as often as it was."""
    path = _admitted_path(study, number)
    if not path.exists():
        return []
    found = read_object(path, "put its backup back").get("plans")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise WsiFlError(f"{study.relative(path)}: damaged; put its backup back, or sign another frame")
    return found


def note_admitted(study: Study, frame: Frame, plan: str) -> bool:
    """Count a plan that is about to be approved in a frame; return False, and count nothing, where it had all."""
    path = _admitted_path(study, frame["id"])
    with alone(path.with_suffix(".lock")):
        before = admitted_plans(study, frame["id"])
        if len(before) >= frame["runs"]:
            return False
        write_json(path, {"plans": [*before, plan]})
        return True


def of_frame(entries: Iterable[Entry], site: str, number: str) -> list[Entry]:
    """Return the lines of a site's ledger of all runs that were approved in the name of a frame."""
    own = [entry for entry in entries if entry.site == site]
    runs = {entry.run_id for entry in own if entry.approved.endswith(f" frame {number}")}
    return [entry for entry in own if entry.run_id in runs]
