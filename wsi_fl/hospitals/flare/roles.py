"""Adapter to NVIDIA FLARE 2.9: a controller for its server, an executor for hospitals, and messages between them.

FLARE brings connections, mutual TLS, and processes that are started for a job. It is not trusted: what it carries is
sealed and signed by `trust.letters`, and its own end-to-end encryption is on as well. A job names the plan that the
hospitals have signed; everything else about it comes from the hospital's own study.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from traceback import format_exception
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.utils import make_reply as make_cell_reply
from nvflare.fuel.f3.message import Message

from wsi_fl.hospitals.flare.files import KIT, SAID, STUDY, Job
from wsi_fl.hospitals.lines.relayed import Answer
from wsi_fl.hospitals.plans.signed import Plan
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.letters import Buffer
from wsi_fl.hospitals.work.said import answered, failed
from wsi_fl.hospitals.work.taking_part import greet, known_to_all, take_part
from wsi_fl.runs.site import note
from wsi_fl.stages.training.launch import naming
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_json
from wsi_fl.types import KnownToAll, WsiFlError, one_line

_CHANNEL = "wsi_fl"
_ALIVE, _BEAT_S, _SILENT_S = "wsi_fl_alive", 0.2, 1.0
_READY_S = 120


class Together(Controller):  # type: ignore[misc]
    """The server's part of a job: start it at all hospitals, wait until all are done, and store their replies.

    Args:
        sites: of the job.
        job: its content, see `HospitalExecutor`.
    """

    def __init__(self, sites: list[str], job: Job) -> None:
        super().__init__()
        self._sites, self._job = sites, job
        self._said: dict[str, Mapping[str, object]] = {}
        self._heard: dict[str, float] = {}

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Request "ready", so that every process listens, and then the work itself."""
        for name, seconds in (("ready", _READY_S), ("work", 0)):
            self._said = {}
            data = Shareable({"job": self._job})
            task = Task(name=name, data=data, timeout=seconds, result_received_cb=self._answered)
            self.broadcast_and_wait(
                task=task,
                targets=self._sites,
                min_responses=len(self._sites),
                fl_ctx=fl_ctx,
                abort_signal=abort_signal,
            )
            self._note(fl_ctx)
            if missing := [site for site in self._sites if site not in self._said]:
                self._name_the_lost()
                self._note(fl_ctx)
                self.system_panic(f"no answer of {', '.join(missing)} to {name}", fl_ctx)
            if missing or any("error" in said for said in self._said.values()):
                return

    def _answered(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Store a reply; after a failure the others would wait in vain, so the job ends."""
        result, site = client_task.result, client_task.client.name
        asked = "ready" if client_task.task.name == "ready" else str(self._job["what"])
        try:
            if (code := result.get_return_code()) != ReturnCode.OK:
                raise WsiFlError(str(result.get("said", f"site {site}: {code}")))
            self._said[site] = answered(str(result.get("said", "")), site, asked)
        except WsiFlError as error:
            said = failed(str(error))
            self._said[site] = said
            self._note(fl_ctx)
            self.system_panic(said["error"], fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Receive the signs of life of the hospitals' processes from the beginning."""
        if event_type == EventType.START_RUN:
            cell = fl_ctx.get_engine().get_cell()
            cell.register_request_cb(channel=_CHANNEL, topic=_ALIVE, cb=self._hear)

    def _hear(self, request: Message) -> None:
        self._heard[str(request.get_header(MessageHeaderKey.ORIGIN)).split(".")[0]] = time.monotonic()

    def _name_the_lost(self) -> None:
        """Record the first silent sites, if a job ends without a reason: the others end because of them, later."""
        time.sleep(_SILENT_S)
        latest = max(self._heard.values(), default=0.0)
        silent = {site: latest - self._heard.get(site, 0.0) for site in self._sites if site not in self._said}
        for site, seconds in silent.items():
            if seconds > _SILENT_S / 2:
                self._said[site] = failed(f"site {site} was lost: it fell silent before the others")

    def _note(self, fl_ctx: FLContext) -> None:
        folder = Path(self._engine.get_workspace().get_run_dir(fl_ctx.get_job_id()))
        write_json(folder / SAID, self._said)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing where FLARE expects a method."""

    start_controller = stop_controller = process_result_of_unknown_task = _nothing


class _CellLine:
    """A transport over FLARE's cells: from one hospital's job process to another's, by way of the server."""

    lag_s = 60.0

    def __init__(self) -> None:
        self._take: Callable[[Buffer], Answer] | None = None
        self._stopped: Signal | None = None

    def attach(self, fl_ctx: FLContext) -> None:
        """Register for every message; one that comes before `listen` is answered "later"."""
        self._cell, self._job = fl_ctx.get_engine().get_cell(), fl_ctx.get_job_id()
        self._cell.register_request_cb(channel=_CHANNEL, topic=_CHANNEL, cb=self._arrived)

    def until(self, stopped: Signal) -> None:
        """Carry nothing more once FLARE has stopped the job."""
        self._stopped = stopped

    def _arrived(self, request: Message) -> Message:
        take = self._take
        return make_cell_reply(CellCode.OK, body="later" if take is None else take(request.payload))

    def listen(self, take: Callable[[Buffer], Answer]) -> None:
        self._take = take

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        del name
        reply = self._cell.send_request(
            channel=_CHANNEL,
            topic=_CHANNEL,
            target=f"{to}.{self._job}",
            request=Message({}, letter),
            timeout=max(1.0, timeout_s),
            secure=True,  # from end to end; FLARE's default is off
            abort_signal=self._stopped,
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE, CellCode.OK)
        if code != CellCode.OK:
            return str(reply.get_header(MessageHeaderKey.ERROR, "") or code)
        return "" if reply.payload == "taken" else "it was not taken"

    def broken(self) -> str:
        stopped = self._stopped is not None and self._stopped.triggered
        return "the job was ended by the coordinator, or because a site was lost" if stopped else ""

    def silent_s(self, site: str) -> float:
        del site
        return inf

    def close(self) -> None:
        self._take = None


@contextmanager
def _signs_of_life(engine: Any, job: str) -> Iterator[None]:
    """Send the server several signs of life a second."""
    done, cell = threading.Event(), engine.get_cell()

    def tell() -> None:
        while not done.wait(_BEAT_S):
            cell.fire_and_forget(
                channel=_CHANNEL, topic=_ALIVE, targets=f"server.{job}", message=Message({}, b"")
            )

    threading.Thread(target=tell, daemon=True).start()
    yield
    done.set()  # after a failure it goes on to the very end: the first silent process is the one that failed


class Hospital(Executor):  # type: ignore[misc]
    """A hospital's part of a job, in a process of its own that FLARE's client started.

    The content of a job is a `files.Job`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._line = _CellLine()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen from the beginning, before any task, so that no message is lost."""
        if event_type == EventType.START_RUN:
            self._line.attach(fl_ctx)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Do the job; any failure is reported in one line."""
        try:
            self._line.until(abort_signal)
            with _signs_of_life(fl_ctx.get_engine(), fl_ctx.get_job_id()):
                said = self._do(shareable["job"]) if task_name == "work" else {}
        except Exception as error:
            name = fl_ctx.get_identity_name()
            with suppress(OSError):
                note(Study(Path(os.environ[STUDY])).runs / f"{name}.log", "".join(format_exception(error)))
            reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
            reply["said"] = (
                one_line(error)
                if isinstance(error, KnownToAll)
                else f"site {name} failed; its own log says why"
            )
            return reply
        reply = make_reply(ReturnCode.OK)
        reply["said"] = json.dumps(said)
        return reply

    def _do(self, job: Job) -> Mapping[str, object]:
        study, kit = Study(Path(os.environ[STUDY])), Kit.open(Path(os.environ[KIT]))
        kit.take(str(job["withdrawn"]))
        identity = kit.identity()
        plan, brought = str(job["plan"]), Plan(str(job["text"])) if "text" in job else None
        if job["what"] == "check":
            return greet(study, identity, self._line, plan=plan, brought=brought)
        with naming(study.runs, "have the coordinator go on with `wsi-fl federation submit --resume last`"):
            summary = take_part(
                study,
                identity,
                self._line,
                resume=job["resume"],
                without=job["without"],
                plan=plan,
                brought=brought,
                withdrawn=lambda: kit.withdrawn().keys,
            )
        return known_to_all(study, identity.name, summary)
