"""Files of a kit that NVIDIA FLARE 2.9 reads: identities, permissions, and folders to write to.

A hospital runs one class alone, which came with this package. Jobs bring no code, the coordinator may only submit,
watch and end them, and no log is streamed away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.hospitals.trust.certificates import Role
from wsi_fl.hospitals.trust.kit import bracket_ipv6
from wsi_fl.system.extras import explain_missing, has_extra
from wsi_fl.system.files import write_json
from wsi_fl.types import UsageError

_EXECUTOR_PATH = "wsi_fl.hospitals.flare.roles.HospitalExecutor"
_CONTROLLER_PATH = "wsi_fl.hospitals.flare.roles.JobController"
PROCESS_MODULE = "wsi_fl.hospitals.flare.processes"
"""The module of every FLARE process."""
PARENT_VARIABLE = "WSI_FL_STARTED_BY"
"""Environment variable with the id of the process that a process ends with: `federation start`, or a job's client."""
STUDY_VARIABLE, KIT_VARIABLE = "WSI_FL_STUDY", "WSI_FL_KIT"
"""Environment variables of a hospital's processes with the paths of its study and its kit."""
HEARTBEAT_S = 30
"""A hospital without a sign of life for so long has dropped out."""
SERVER, COORDINATOR = "server", "coordinator"
"""Their names in certificates."""
REPLIES_FILE = "said.json"
"""Each hospital's reply to a job, in the job's folder on the server."""


def require_flare() -> None:
    """Require NVIDIA FLARE.

    Raises:
        UsageError: with the command that installs it.
    """
    if not has_extra("flare"):
        raise mark_fault(UsageError(explain_missing("flare")), "no_flare")


_SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text("utf-8"))
"""FLARE's files by role and path, with places in braces."""


def write_flare_files(kit: Path, *, name: str, role: Role, federation: str, host: str, port: int) -> None:
    """Write the files that FLARE reads, all but key and certificates, into a kit."""
    places: dict[str, str | int] = {
        "name": name,
        "federation": federation,
        "host": bracket_ipv6(host),
        "bind_host": "0.0.0.0" if ":" in host else host,  # FLARE's server reads no IPv6 address, but listens on all
        "port": port,
        "storage": str(kit.resolve() / "storage"),
        "heartbeat_s": HEARTBEAT_S,
        "executor": _EXECUTOR_PATH,
        "controller": _CONTROLLER_PATH,
        "launcher": f"{PROCESS_MODULE}.Launcher",
    }
    for path, document in _SETTINGS[role].items():
        write_json(kit / path, _fill_places(document, places))
    if role != "coordinator":
        for path, document in _SETTINGS["all"].items():
            write_json(kit / path, document)
        (kit / "transfer").mkdir(exist_ok=True)


def _fill_places(value: object, places: Mapping[str, str | int]) -> object:
    """Fill the places in the texts of a document; a text that is one place becomes its value, of whatever type."""
    if isinstance(value, dict):
        return {key: _fill_places(part, places) for key, part in value.items()}
    if isinstance(value, list):
        return [_fill_places(part, places) for part in value]
    if not isinstance(value, str):
        return value
    only_place = re.fullmatch(r"\{(\w+)\}", value)
    return places[only_place[1]] if only_place else value.format(**places)


class JobRequest(TypedDict):
    """A plan's job for hospitals: "work", or "check", which only meets every peer."""

    what: Literal["work", "check"]
    plan: str
    resume: NotRequired[str | None]
    without: NotRequired[list[str]]
    text: NotRequired[str]
    withdrawn: NotRequired[str]


def write_job_files(folder: Path, sites: list[str], job: JobRequest) -> None:
    """Write a job: JSON that names the two classes, and no code.

    Args:
        sites: of the job.
        job: its content.
    """
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {"name": f"wsi-fl {job['what']}", "resource_spec": {}, "deploy_map": {"app": [SERVER, *sites]}}
    write_json(folder / "meta.json", meta | {"min_clients": len(sites), "mandatory_clients": sites})
    controller = {"id": "together", "path": _CONTROLLER_PATH, "args": {"sites": sites, "job": job}}
    write_json(config / "config_fed_server.json", {"format_version": 2, "workflows": [controller]})
    hospital = {"tasks": ["ready", "work"], "executor": {"path": _EXECUTOR_PATH, "args": {}}}
    write_json(config / "config_fed_client.json", {"format_version": 2, "executors": [hospital]})
