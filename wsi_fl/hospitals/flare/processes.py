"""Every process of NVIDIA FLARE: connection to the right server, its own end, and a hospital's narrow set of commands.

    python -m wsi_fl.hospitals.flare.processes client|job|server …, with the arguments of FLARE's own process

FLARE 2.9 checks neither names in certificates nor a revocation list, knows no proxy and parses no IPv6 address. Anybody
who may send to a client can request its files, delete folders and run shells; rights are checked only if the message
requests it. So a client keeps no such command: it takes jobs, reports their state, and ends them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from ssl import SSLContext
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from zipfile import BadZipFile, ZipFile

import aiohttp
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.fuel.f3.drivers import aio_http_driver, net_utils
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.app.client import client_train, worker_process
from nvflare.private.fed.app.server import server_train
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.scheduler_cmds import StartJobProcessor
from nvflare.private.fed.client.training_cmds import AbortAppProcessor, DeployProcessor

from wsi_fl.hospitals.flare.flare_files import PARENT_VARIABLE, PROCESS_MODULE
from wsi_fl.hospitals.trust.kit import bracket_ipv6, find_proxy, parse_address, refuse_revoked

_LOOK_S = 0.25
_flare_ssl_context, _flare_connect = net_utils.get_ssl_context, aio_http_driver.AioHttpDriver.connect
_FLARE_MODULES = {"client": client_train, "server": server_train, "job": worker_process}
_ALLOWED_PROCESSORS = {
    *("ClientStatusProcessor", "ScopeInfoProcessor", "AbortAppProcessor", "DeployProcessor"),
    *("ClientInfoProcessor", "StartJobProcessor", "CheckResourceProcessor", "CancelResourceProcessor"),
    *("ReportResourcesProcessor", "ReportVersionProcessor", "NotifyJobStatusProcessor"),
}
_JOB_FILES = {"config_fed_client.json", "config_fed_server.json", ".__nvfl_sig.json", ".__nvfl_submitter.crt"}
_MAX_ARCHIVE_BYTES = 1 << 20


def patch_connections() -> None:
    """Connect this process to servers as `federation check` does.

    Connections use the proxy that the environment names, also to an IPv6 address. One fails if its certificate is
    revoked, or not for the host that is called.
    """
    net_utils.get_ssl_context = _make_ssl_context
    aio_http_driver.AioHttpDriver.connect = _connect_driver


def _connect_driver(driver: Any, connector: Any) -> None:
    """Connect a driver to the server of its URL."""
    host, port = parse_address(urlsplit(connector.params["url"]).netloc)
    connector.params |= {"host": bracket_ipv6(host), "port": port}
    proxy = find_proxy(host)
    proxy_options = {"proxy": f"http://{proxy}", "proxy_headers": proxy.headers} if proxy else {}
    aio_http_driver.aiohttp = SimpleNamespace(
        **vars(aiohttp) | {"ClientSession": partial(_open_session, proxy_options)}
    )
    _flare_connect(driver, connector)


@asynccontextmanager
async def _open_session(proxy_options: Mapping[str, Any]) -> AsyncIterator[SimpleNamespace]:
    """Yield the part of aiohttp's session that the driver uses; a password in a header appears in no error or log."""
    async with aiohttp.ClientSession() as session:
        yield SimpleNamespace(ws_connect=partial(session.ws_connect, **proxy_options))


def _make_ssl_context(params: Mapping[str, object], ssl_server: bool) -> SSLContext | None:
    context: SSLContext | None = _flare_ssl_context(params, ssl_server)
    if context is None:
        return None
    context.check_hostname = not ssl_server
    return refuse_revoked(context, Path(str(params[DriverParams.CA_CERT.value])))


def _end_with_parent(parent: int) -> None:
    """End this process at once when its parent has ended, for any reason."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)  # at once: threads of libraries would wait for each other

    threading.Thread(target=watch_parent, daemon=True, name="end with parent").start()


class _SingleJobProcessor(RequestProcessor):  # type: ignore[misc]
    """Passes on requests that name a job by its id, and refuses every other name: the kit has folders too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_topics(self) -> list[str]:
        """Return the topics of the inner processor."""
        return list(self._inner.get_topics())

    def process(self, req: Any, app_ctx: Any) -> Any:
        """Process the request if it names a job by a UUID."""
        job = str(req.get_header(RequestHeader.JOB_ID))
        if not _is_job_id(job):
            return error_reply(f"{job!r} is no job")
        if isinstance(self._inner, DeployProcessor) and (problem := explain_extra_files(req.body)):
            return error_reply(problem)
        return self._inner.process(req, app_ctx)


def explain_extra_files(body: bytes) -> str:
    """Return why an archive is no plain job, with two configurations and FLARE's signatures; "" if it is one."""
    if len(body) > _MAX_ARCHIVE_BYTES:
        return f"a job of {len(body)} bytes is refused; it holds two short configurations"
    try:
        names = ZipFile(BytesIO(body)).namelist()
    except BadZipFile:
        return "a job that is no archive is refused"
    extra = [name for name in names if not name.endswith("/") and PurePosixPath(name).name not in _JOB_FILES]
    deep = [name for name in names if len(PurePosixPath(name).parts) > 2 or ".." in PurePosixPath(name).parts]
    return f"a job that brings {(extra + deep)[0]!r} is refused; jobs bring no files" if extra + deep else ""


def _is_job_id(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def restrict_client() -> None:
    """Remove all commands that a client of wsi-fl must not answer."""
    allowed = [
        processor
        for processor in ClientRequestProcessors.request_processors
        if type(processor).__name__ in _ALLOWED_PROCESSORS
    ]
    if missing := _ALLOWED_PROCESSORS - {type(processor).__name__ for processor in allowed}:
        raise SystemExit(f"this NVIDIA FLARE has no {min(missing)}; wsi-fl needs version 2.9")
    job_processors = (AbortAppProcessor, DeployProcessor, StartJobProcessor)  # they make, use and remove its folder
    ClientRequestProcessors.request_processors[:] = [
        _SingleJobProcessor(processor) if isinstance(processor, job_processors) else processor for processor in allowed
    ]


class Launcher(ClientProcessJobLauncher):  # type: ignore[misc]
    """Starts this module instead of FLARE's own process of a job."""

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """Return FLARE's command line, with this module in it."""
        flare_command, module = str(super().get_command(job_meta, fl_ctx)), f"-m {worker_process.__name__} "
        if module not in flare_command:
            raise RuntimeError("this NVIDIA FLARE starts jobs in another way; wsi-fl needs version 2.9")
        return flare_command.replace(module, f"-m {PROCESS_MODULE} job ")


def main(role: str) -> None:
    """Run as FLARE's client, its server, or a job's process, with the arguments of FLARE's own."""
    _end_with_parent(int(os.environ[PARENT_VARIABLE]))
    patch_connections()
    if role == "client":
        os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the processes of jobs
        restrict_client()
    flare_module = _FLARE_MODULES[role]
    if role != "job":
        flare_module.version_check()
    arguments = flare_module.parse_arguments()
    place = str(Path(arguments.workspace, arguments.job_id)) if role == "job" else arguments.workspace
    sys.exit(flare_module.mpm.run(main_func=flare_module.main, run_dir=place, args=arguments))


if __name__ == "__main__":
    main(sys.argv.pop(1))
