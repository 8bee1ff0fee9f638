"""A hospital's client of NVIDIA FLARE, deaf to all that wsi-fl has no use for.

FLARE 2.9 lets whoever may send to a client ask for its files, have folders deleted and shells run, and asks for rights
only where the message says that it should. So nothing is left here that could answer: a client takes jobs, tells how
they stand, and ends them.
"""

from __future__ import annotations

import os
import sys
import uuid
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any
from zipfile import BadZipFile, ZipFile

from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.app.client import client_train
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.scheduler_cmds import StartJobProcessor
from nvflare.private.fed.client.training_cmds import AbortAppProcessor, DeployProcessor

from wsi_fl.hospitals.flare.files import STARTED_BY
from wsi_fl.hospitals.flare.processes import end_with, find_the_way

_KEPT = {
    "ClientStatusProcessor",
    "ScopeInfoProcessor",
    "AbortAppProcessor",
    "DeployProcessor",
    "ClientInfoProcessor",
    "StartJobProcessor",
    "CheckResourceProcessor",
    "CancelResourceProcessor",
    "ReportResourcesProcessor",
    "ReportVersionProcessor",
    "NotifyJobStatusProcessor",
}
_OF_A_JOB = {
    "config_fed_client.json",
    "config_fed_server.json",
    ".__nvfl_sig.json",
    ".__nvfl_submitter.crt",
}
_MOST_BYTES = 1 << 20
_OF_JOBS = (AbortAppProcessor, DeployProcessor, StartJobProcessor)
"""They make, use and remove a folder that is called after the job."""


class _OfOneJob(RequestProcessor):  # type: ignore[misc]
    """Hands on what concerns a job by its id, and refuses every other name: the kit has folders too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_topics(self) -> list[str]:
        """Return what the inner processor answers to."""
        return list(self._inner.get_topics())

    def process(self, req: Any, app_ctx: Any) -> Any:
        """Answer where the message names a job by a UUID."""
        job = str(req.get_header(RequestHeader.JOB_ID))
        if not _is_job(job):
            return error_reply(f"{job!r} is no job")
        if isinstance(self._inner, DeployProcessor) and (problem := brings_more(req.body)):
            return error_reply(problem)
        return self._inner.process(req, app_ctx)


def brings_more(body: bytes) -> str:
    """Return what a job's archive holds beside its two configurations and FLARE's signatures; "" for nothing."""
    if len(body) > _MOST_BYTES:
        return f"a job of {len(body)} bytes is refused; it holds two short configurations"
    try:
        names = ZipFile(BytesIO(body)).namelist()
    except BadZipFile:
        return "a job that is no archive is refused"
    more = [name for name in names if not name.endswith("/") and PurePosixPath(name).name not in _OF_A_JOB]
    deep = [name for name in names if len(PurePosixPath(name).parts) > 2 or ".." in PurePosixPath(name).parts]
    return f"a job that brings {(more + deep)[0]!r} is refused; jobs bring no files" if more + deep else ""


def _is_job(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def narrow() -> list[str]:
    """Take away all that a client of wsi-fl must not answer; return the names of what is left."""
    left = [one for one in ClientRequestProcessors.request_processors if type(one).__name__ in _KEPT]
    ClientRequestProcessors.request_processors[:] = [
        _OfOneJob(one) if isinstance(one, _OF_JOBS) else one for one in left
    ]
    return sorted(type(one).__name__ for one in left)


def main() -> None:
    """Be FLARE's client, with the arguments that `client_train` takes."""
    end_with(int(os.environ[STARTED_BY]))
    os.environ[STARTED_BY] = str(os.getpid())  # for the processes of jobs
    find_the_way()
    missing = _KEPT - set(narrow())
    if missing:
        raise SystemExit(f"this NVIDIA FLARE has no {sorted(missing)[0]}; wsi-fl needs version 2.9")
    client_train.version_check()
    arguments = client_train.parse_arguments()
    sys.exit(client_train.mpm.run(main_func=client_train.main, run_dir=arguments.workspace, args=arguments))


if __name__ == "__main__":
    main()
