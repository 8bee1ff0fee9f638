"""Files of a kit that NVIDIA FLARE 2.9 reads: identities, permissions, and folders to write to.

A hospital runs one class alone, which came with this package. Jobs bring no code, the coordinator may only submit,
watch and end them, and no log is streamed away.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.hospitals.trust.certificates import Role
from wsi_fl.hospitals.trust.kit import bracket_ipv6
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
    if find_spec("nvflare") is None:
        text = "this needs NVIDIA FLARE; install it with `pip install 'wsi-fl[flare]'`"
        raise mark_fault(UsageError(text), "no_flare")


def write_flare_files(kit: Path, *, name: str, role: Role, federation: str, host: str, port: int) -> None:
    """Write the files that FLARE reads, all but key and certificates, into a kit."""
    startup, local = kit / "startup", kit / "local"
    bind_host = "0.0.0.0" if ":" in host else host  # FLARE's server reads no IPv6 address, but listens on all
    host = bracket_ipv6(host)
    if role == "coordinator":
        write_json(startup / "fed_admin.json", _admin_document(federation, name, host, port))
        write_json(local / "resources.json", {"format_version": 1, "admin": {"idle_timeout": 900.0}})
        return
    if role == "server":
        admin_settings = {"admin_server": SERVER, "admin_port": port} | _tls_entry("server")
        server = _service_entry(federation, f"{bind_host}:{port}") | admin_settings
        write_json(startup / "fed_server.json", {"format_version": 2, "servers": [server]})
        write_json(local / "resources.json", _server_resources(kit.resolve() / "storage"))
    else:
        server = _service_entry(federation, f"{host}:{port}") | {"identity": SERVER}
        client = _tls_entry("client") | {"fqsn": name, "is_leaf": True}
        write_json(startup / "fed_client.json", {"format_version": 2, "servers": [server], "client": client})
        write_json(local / "resources.json", _hospital_resources())
    write_json(local / "authorization.json", _RIGHTS)
    write_json(local / "log_config.json", _LOG_CONFIG)
    (kit / "transfer").mkdir(exist_ok=True)


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


def _service_entry(federation: str, address: str) -> dict[str, object]:
    return {"name": federation, "service": {"target": address, "scheme": "http"}}


def _tls_entry(stem: str) -> dict[str, str]:
    files = {"ssl_private_key": f"{stem}.key", "ssl_cert": f"{stem}.crt", "ssl_root_cert": "rootCA.pem"}
    return files | {"connection_security": "mtls"}


def _admin_document(federation: str, name: str, host: str, port: int) -> dict[str, object]:
    return {
        "format_version": 1,
        "admin": {
            "project_name": federation,
            "username": name,
            "server_identity": SERVER,
            "scheme": "http",
            "host": host,
            "port": port,
            "connection_security": "mtls",
            "uid_source": "user_input",
            "with_file_transfer": True,
            "upload_dir": "transfer",
            "download_dir": "transfer",
            "client_key": "client.key",
            "client_cert": "client.crt",
            "ca_cert": "rootCA.pem",
        },
    }


_COORDINATOR_RIGHTS = dict.fromkeys(("submit_job", "manage_job", "download_job", "view"), "any")
_DENIED_RIGHTS = dict.fromkeys(("clone_job", "operate", "shell_commands", "byoc"), "none")
_RIGHTS = {"format_version": "1.0", "permissions": {"project_admin": _COORDINATOR_RIGHTS | _DENIED_RIGHTS}}
"""The coordinator's rights here. Other roles have none; `shell_commands` (which read files) are denied to all, and
`byoc` (bring your own code) is refused."""


def _resource_document(allowed: str, *components: tuple[str, str, Mapping[str, object]]) -> dict[str, object]:
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [allowed],
        "allow_log_streaming": False,
        "components": [{"id": name, "path": path, "args": arguments} for name, path, arguments in components],
    }


def _hospital_resources() -> dict[str, object]:
    common = "nvflare.app_common"
    manager = f"{common}.resource_managers.gpu_resource_manager.GPUResourceManager"
    consumer = f"{common}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
    gpus = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
    return _resource_document(
        _EXECUTOR_PATH,
        ("resource_manager", manager, gpus),
        ("resource_consumer", consumer, {}),
        ("process_launcher", f"{PROCESS_MODULE}.Launcher", {}),
    ) | {"client": {"retry_timeout": HEARTBEAT_S, "compression": "Gzip"}}


def _server_resources(storage: Path) -> dict[str, object]:
    common = "nvflare.app_common"
    files = f"{common}.storages.filesystem_storage.FilesystemStorage"
    scheduler = f"{common}.job_schedulers.job_scheduler.DefaultJobScheduler"
    manager = "nvflare.apis.impl.job_def_manager.SimpleJobDefManager"
    launcher = f"{common}.job_launcher.server_process_launcher.ServerProcessJobLauncher"
    return _resource_document(
        _CONTROLLER_PATH,
        ("job_scheduler", scheduler, {"max_jobs": 1}),
        ("job_manager", manager, {"uri_root": str(storage / "jobs"), "job_store_id": "job_store"}),
        ("job_store", files, {}),
        ("process_launcher", launcher, {}),
    ) | {
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 200,
                "heart_beat_timeout": HEARTBEAT_S,
                "download_job_url": "http://download.server.com/",
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": f"{common}.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {"path": files, "args": {"root_dir": str(storage / "snapshots"), "uri_root": "/"}},
            },
        },
    }


_LOG_CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "lines": {
            "()": "nvflare.fuel.utils.log_utils.BaseFormatter",
            "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(message)s",
        }
    },
    "handlers": {
        "logFileHandler": {
            "class": "logging.handlers.RotatingFileHandler",
            "level": "DEBUG",
            "formatter": "lines",
            "filename": "log.txt",
            "mode": "a",
            "maxBytes": 20 << 20,
            "backupCount": 5,
        }
    },
    "loggers": {
        "root": {"level": "WARNING", "handlers": ["logFileHandler"]},
        "nvflare.private.fed.client.fed_client": {"level": "INFO"},
    },
}
"""Warnings, and a client's lines on its registration, in one file of the kit."""
