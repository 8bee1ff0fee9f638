"""Adapter to NVIDIA FLARE 2.9: a controller for its server, an executor for hospitals, and messages between them.

FLARE brings connections, mutual TLS, and processes that are started for a job. It is not trusted: what it carries is
sealed and signed by `trust.sealed_messages`, and its own end-to-end encryption is on as well. A job names the plan that
the hospitals have signed; everything else about it comes from the hospital's own study.
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

from wsi_fl.hospitals.faults import Fault, find_fault
from wsi_fl.hospitals.flare.flare_files import KIT_VARIABLE, REPLIES_FILE, STUDY_VARIABLE, JobRequest
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.hospitals.transports.transport import Receipt
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.sealed_messages import Buffer
from wsi_fl.hospitals.work.client import greet_sites, public_summary, take_part
from wsi_fl.hospitals.work.job_replies import failure_reply, parse_failure, parse_reply
from wsi_fl.runs.site_folder import append_note
from wsi_fl.stages.training.launch import hint_way_on
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_json
from wsi_fl.types import ReportableError, SiteFailed, WsiFlError, single_line

_CHANNEL = "wsi_fl"
_ALIVE_TOPIC, _BEAT_S, _SILENT_S = "wsi_fl_alive", 0.2, 1.0
_READY_S = 120


class JobController(Controller):  # type: ignore[misc]
    """The server's part of a job: start it at all hospitals, wait until all are done, and store their replies.

    Args:
        sites: of the job.
        job: its content, see `HospitalExecutor`.
    """

    def __init__(self, sites: list[str], job: JobRequest) -> None:
        super().__init__()
        self._sites, self._job = sites, job
        self._replies: dict[str, Mapping[str, object]] = {}
        self._last_signs: dict[str, float] = {}

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Request "ready", so that every process listens, and then the work itself."""
        for name, seconds in (("ready", _READY_S), ("work", 0)):
            self._replies = {}
            data = Shareable({"job": self._job})
            task = Task(name=name, data=data, timeout=seconds, result_received_cb=self._receive_reply)
            self.broadcast_and_wait(
                task=task, targets=self._sites, min_responses=len(self._sites), fl_ctx=fl_ctx, abort_signal=abort_signal
            )
            self._write_replies(fl_ctx)
            if missing := [site for site in self._sites if site not in self._replies]:
                self._note_silent_sites()
                self._write_replies(fl_ctx)
                self.system_panic(f"no answer of {', '.join(missing)} to {name}", fl_ctx)
            if missing or any("error" in reply for reply in self._replies.values()):
                return

    def _receive_reply(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Store a reply; after a failure the others would wait in vain, so the job ends."""
        result, site = client_task.result, client_task.client.name
        job_kind = "ready" if client_task.task.name == "ready" else str(self._job["what"])
        try:
            if (code := result.get_return_code()) == ReturnCode.OK:
                self._replies[site] = parse_reply(str(result.get("said", "")), site, job_kind)
                return
            text = result.get("said")
            failure = failure_reply(f"site {site}: {code}") if text is None else parse_failure(str(text), site)
        except WsiFlError as error:
            failure = failure_reply(str(error))
        self._replies[site] = failure
        self._write_replies(fl_ctx)
        self.system_panic(failure["error"], fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Receive the signs of life of the hospitals' processes from the beginning."""
        if event_type == EventType.START_RUN:
            cell = fl_ctx.get_engine().get_cell()
            cell.register_request_cb(channel=_CHANNEL, topic=_ALIVE_TOPIC, cb=self._note_sign)

    def _note_sign(self, request: Message) -> None:
        self._last_signs[str(request.get_header(MessageHeaderKey.ORIGIN)).split(".")[0]] = time.monotonic()

    def _note_silent_sites(self) -> None:
        """Record the first silent sites, if a job ends without a reason: the others end because of them, later."""
        time.sleep(_SILENT_S)
        latest = max(self._last_signs.values(), default=0.0)
        silent = {site: latest - self._last_signs.get(site, 0.0) for site in self._sites if site not in self._replies}
        for site, seconds in silent.items():
            if seconds > _SILENT_S / 2:
                text = f"site {site} was lost: it fell silent before the others"
                self._replies[site] = failure_reply(text, Fault("lost", site))

    def _write_replies(self, fl_ctx: FLContext) -> None:
        folder = Path(self._engine.get_workspace().get_run_dir(fl_ctx.get_job_id()))
        write_json(folder / REPLIES_FILE, self._replies)

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing where FLARE expects a method."""

    start_controller = stop_controller = process_result_of_unknown_task = _do_nothing


class _CellTransport:
    """A transport over FLARE's cells: from one hospital's job process to another's, by way of the server."""

    lag_s = 60.0

    def __init__(self) -> None:
        self._receive: Callable[[Buffer], Receipt] | None = None
        self._stop_signal: Signal | None = None

    def attach_cell(self, fl_ctx: FLContext) -> None:
        """Register for every message; one that comes before `listen` is answered "later"."""
        self._cell, self._job = fl_ctx.get_engine().get_cell(), fl_ctx.get_job_id()
        self._cell.register_request_cb(channel=_CHANNEL, topic=_CHANNEL, cb=self._receive_message)

    def set_stop_signal(self, stop_signal: Signal) -> None:
        """Carry nothing more once FLARE has stopped the job."""
        self._stop_signal = stop_signal

    def _receive_message(self, request: Message) -> Message:
        receive = self._receive
        return make_cell_reply(CellCode.OK, body="later" if receive is None else receive(request.payload))

    def listen(self, receive: Callable[[Buffer], Receipt]) -> None:
        self._receive = receive

    def send(self, receiver: str, sequence_id: str, message: bytes, timeout_s: float) -> str:
        del sequence_id
        reply = self._cell.send_request(
            channel=_CHANNEL,
            topic=_CHANNEL,
            target=f"{receiver}.{self._job}",
            request=Message({}, message),
            timeout=max(1.0, timeout_s),
            secure=True,  # from end to end; FLARE's default is off
            abort_signal=self._stop_signal,
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE, CellCode.OK)
        if code != CellCode.OK:
            return str(reply.get_header(MessageHeaderKey.ERROR, "") or code)
        return "" if reply.payload == "taken" else "it was not taken"

    def failure_reason(self) -> str:
        is_stopped = self._stop_signal is not None and self._stop_signal.triggered
        return "the job was ended by the coordinator, or because a site was lost" if is_stopped else ""

    def silence_s(self, site: str) -> float:
        del site
        return inf

    def close(self) -> None:
        self._receive = None


@contextmanager
def _send_signs_of_life(engine: Any, job: str) -> Iterator[None]:
    """Send the server several signs of life a second."""
    done, cell = threading.Event(), engine.get_cell()

    def send_signs() -> None:
        while not done.wait(_BEAT_S):
            cell.fire_and_forget(
                channel=_CHANNEL, topic=_ALIVE_TOPIC, targets=f"server.{job}", message=Message({}, b"")
            )

    threading.Thread(target=send_signs, daemon=True).start()
    yield
    done.set()  # after a failure it goes on to the very end: the first silent process is the one that failed


class HospitalExecutor(Executor):  # type: ignore[misc]
    """A hospital's part of a job, in a process of its own that FLARE's client started.

    The content of a job is a `JobRequest`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._transport = _CellTransport()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen from the beginning, before any task, so that no message is lost."""
        if event_type == EventType.START_RUN:
            self._transport.attach_cell(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Do the job; any failure is reported in one line."""
        code = ReturnCode.OK
        try:
            self._transport.set_stop_signal(abort_signal)
            with _send_signs_of_life(fl_ctx.get_engine(), fl_ctx.get_job_id()):
                result = self._run_request(shareable["job"]) if task_name == "work" else {}
        except Exception as error:
            name = fl_ctx.get_identity_name()
            with suppress(OSError):
                append_note(
                    Study(Path(os.environ[STUDY_VARIABLE])).runs_path / f"{name}.log", "".join(format_exception(error))
                )
            is_reportable = isinstance(error, ReportableError)
            text = single_line(error) if is_reportable else f"site {name} failed; its own log says why"
            fault = find_fault(error) if is_reportable and not isinstance(error, SiteFailed) else Fault("failed", name)
            code, result = ReturnCode.EXECUTION_EXCEPTION, failure_reply(text, fault)
        reply = make_reply(code)
        reply["said"] = json.dumps(result)
        return reply

    def _run_request(self, job: JobRequest) -> Mapping[str, object]:
        study, kit = Study(Path(os.environ[STUDY_VARIABLE])), Kit.open(Path(os.environ[KIT_VARIABLE]))
        kit.update_revocation_list(str(job["withdrawn"]))
        identity = kit.load_identity()
        plan, brought = str(job["plan"]), FederationPlan(str(job["text"])) if "text" in job else None
        if job["what"] == "check":
            return greet_sites(study, identity, self._transport, plan=plan, received_plan=brought)
        with hint_way_on(study.runs_path, "have the coordinator go on with `wsi-fl federation submit --resume last`"):
            summary = take_part(
                study,
                identity,
                self._transport,
                resume=job["resume"],
                without=job["without"],
                plan=plan,
                received_plan=brought,
                load_revoked=lambda: kit.load_revocation_list().keys,
            )
        return public_summary(study, identity.name, summary)
