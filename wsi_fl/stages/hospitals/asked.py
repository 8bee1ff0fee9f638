"""What the coordinator asked the hospitals for, and what became of it: a line for each in `jobs.jsonl` of its kit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from wsi_fl.stages.hospitals.kits.kit import Kit
from wsi_fl.stages.hospitals.plans.signed import Plan
from wsi_fl.system.files import append_line, read_lines

_FILE = "jobs.jsonl"
KNOWN = ("what", "plan", "method", "sites", "resume", "without", "asked", "run", "reason")
"""What is known of a job; "reason" is why it failed, "run" what came of it, and None stands for neither yet."""


def note_asked(kit: Kit, number: str, plan: Plan, job: Mapping[str, Any], sites: list[str]) -> None:
    """Note that hospitals were asked for a job.

    Args:
        number: FLARE's id of it.
        job: as it was submitted.
        sites: that take part.
    """
    line = {"id": number, "what": job["what"], "plan": plan.digest, "method": plan.method, "sites": sites}
    line |= {"resume": job.get("resume"), "without": job.get("without", []), "asked": _now()}
    append_line(kit.path / _FILE, line)


def note_ended(kit: Kit, number: str, *, run: str | None = None, reason: str | None = None) -> None:
    """Note what became of a job: its run, or the reason why it failed."""
    append_line(kit.path / _FILE, {"id": number, "run": run, "reason": reason, "ended": _now()})


def asked_for(kit: Kit) -> dict[str, dict[str, Any]]:
    """Return what is known of each job by its id, with all keys of `KNOWN`."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(kit.path / _FILE, {"id": str}):
        of_job = found.setdefault(line["id"], dict.fromkeys(KNOWN))
        of_job |= {key: line[key] for key in KNOWN if key in line}
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
