"""`federation demo`: a server, a coordinator and four hospitals as processes of this machine, each in its own folder.

Each of them runs the commands of `wsi-fl` that people would give there. Files that people send by mail are copied by
this process: requests, certificates, the plan, approvals, and site files for the plan.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from wsi_fl.data.cross_site_counts import CrossSiteScores, score_cross_site
from wsi_fl.demo.run import write_untrained_weights
from wsi_fl.demo.simulated_slides import simulate_archive
from wsi_fl.hospitals.flare.flare_files import require_flare
from wsi_fl.hospitals.work.submit import SubmittedRun
from wsi_fl.stages.evaluation.evaluation_lines import render_cross_site_lines
from wsi_fl.stages.runtime.console import Lines, TextLine, print_message
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import toml_value
from wsi_fl.system.files import read_json, read_object, write_json, write_text
from wsi_fl.system.machine import n_cores
from wsi_fl.types import UsageError, WsiFlError

_T = TypeVar("_T")

_READY = "Ctrl-C ends it"
_READY_S, _END_S, _POLL_S = 90.0, 45.0, 0.2
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PIPELINE, _METHOD = "hospitals", "proxyfl"
_N_HOSPITALS = 4
_WEIGHTS = Path("weights") / "untrained.safetensors"
_KIT = Path("..") / "kit"
_FOUNDED = Path("..") / "federation"
_ALLOW_LINE = 'allow = ["scores"]'
_SITE_KEYS = ("name", "real", "allow", "max_epsilon", "delta")
"""Keys of its site file that a hospital discloses to the coordinator, who makes the plan."""
_RESULT_FILE = "demo.json"


@dataclass(frozen=True)
class DemoMachine:
    """A machine of the demo: a folder that no other machine's commands read or write.

    Attributes:
        name: of its user.
        folder: all its files, its user's state and its commands' output included.
        working_folder: where its commands are given, in `folder`.
    """

    name: str
    folder: Path
    working_folder: Path

    @property
    def log(self) -> Path:
        """The output of the commands."""
        return self.folder / "commands.txt"


class ChildProcesses:
    """The running processes; `children()` ends them all."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._has_ended = False

    def run(self, place: DemoMachine, *arguments: str | Path) -> Mapping[str, object]:
        """Run a command and return its `--json` document; WsiFlError with its last line if it fails."""
        command = _format_command(arguments)
        print_message(f"  {place.name}$ {command}")
        with place.log.open("a+b") as log:
            process = self._start_process(place, [*arguments, "--json"], stdout=subprocess.PIPE, stderr=log)
            output, _ = process.communicate()
        with self._lock:
            self._running.pop(process.pid, None)
        if process.returncode:
            raise WsiFlError(f"{place.name}: {command}: {_last_line(place.log)}")
        return cast(Mapping[str, object], json.loads(output))

    def start_server(self, place: DemoMachine, *arguments: str | Path) -> None:
        """Start a command that goes on, and wait until it reports that it is ready; WsiFlError if it does not."""
        command = _format_command(arguments)
        print_message(f"  {place.name}$ {command} &")
        file = place.folder / "start.txt"
        with file.open("wb") as log:
            process = self._start_process(place, arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + _READY_S
        while _READY not in file.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise WsiFlError(f"{place.name}: {command}: {_last_line(file)}")
            time.sleep(_POLL_S)

    def run_parallel(self, work: Callable[[_T], object], things: Sequence[_T]) -> None:
        """Call a function for each item, several at the same time; if one fails, all end."""
        with ThreadPoolExecutor(max(1, min(len(things), n_cores()))) as pool:
            jobs = [pool.submit(work, thing) for thing in things]
            try:
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.end_all()
                raise

    def end_all(self) -> None:
        """End all processes, first by SIGTERM, and start no more."""
        with self._lock:
            self._has_ended, running = True, list(self._running.values())
            self._running = {}
        for process in running:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)

    def _start_process(
        self, place: DemoMachine, arguments: Sequence[str | Path], *, stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own, so that Ctrl-C reaches this process alone, which ends the others."""
        with self._lock:
            if self._has_ended:
                raise WsiFlError("the demo has ended")
            process = subprocess.Popen(
                [sys.executable, "-m", "wsi_fl", *map(str, arguments)],
                cwd=place.working_folder,
                env={"OMP_NUM_THREADS": "1", **os.environ, "XDG_STATE_HOME": str(place.folder / "state")},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._running[process.pid] = process
        return process


@contextmanager
def child_processes() -> Iterator[ChildProcesses]:
    """Yield a group of processes and end it afterwards, also after Ctrl-C, a failure or a closed terminal."""
    processes = ChildProcesses()
    ends = [sign for sign in _ENDS if signal.getsignal(sign) is not signal.SIG_IGN]  # as of nohup
    handlers = {sign: signal.signal(sign, signal.default_int_handler) for sign in ends}
    try:
        yield processes
    finally:
        for sign in handlers:
            signal.signal(sign, signal.SIG_IGN)  # the end itself is not interrupted a second time
        processes.end_all()
        for sign, handler in handlers.items():
            signal.signal(sign, handler)


def _signal_group(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)


def _format_command(arguments: Sequence[str | Path]) -> str:
    return shlex.join(["wsi-fl", *map(str, arguments)])


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("wsi-fl: error: ") if lines else f"it said nothing; see {log}"


class _DemoResult(TypedDict):
    """The result: the summary's sites, the coordinator's page, and by hospital its own page."""

    folder: str
    seconds: float
    run: str
    sites: Sequence[Mapping[str, object]]
    scores: CrossSiteScores
    report: str
    reports: dict[str, str]


def run_federation_demo(folder: Path) -> _DemoResult:
    """Run federated learning of four hospitals with simulated slides over NVIDIA FLARE, from keys to reports.

    Args:
        folder: a new one. That of a finished demo is left as it is, and its result is returned.

    Raises:
        UsageError: when the folder holds anything else, or NVIDIA FLARE is not installed.
        WsiFlError: when a command fails, with its last line, or when it is interrupted.
    """
    require_flare()
    root = folder.resolve()
    if (root / _RESULT_FILE).is_file():
        print_message(f"{folder}: this demo has finished; for another one remove the folder, or choose another --out")
        return cast(_DemoResult, read_object(root / _RESULT_FILE, "remove the folder"))
    if root.exists() and any(root.iterdir()):
        raise UsageError(f"{folder}: is not empty and no finished demo; remove it, or choose another --out")
    try:
        with child_processes() as crew:
            document = _FederationDemo(root, crew).run_demo()
    except KeyboardInterrupt:
        raise WsiFlError(f"interrupted; all processes were ended; to begin again, remove {folder}") from None
    write_json(root / _RESULT_FILE, document)
    return document


class _FederationDemo:
    """The machines in the folder of a demo, and their actions in turn."""

    def __init__(self, root: Path, crew: ChildProcesses) -> None:
        self.root, self.crew, self.run = root, crew, crew.run
        self.fingerprints: dict[str, str] = {}
        """Fingerprints that were read out, by holder."""
        self.hospitals = [self._make_machine(f"C{k + 1}") for k in range(_N_HOSPITALS)]
        self.coordinator, self.server = self._make_machine("coordinator"), self._make_machine("server", ".")

    def _make_machine(self, name: str, subfolder: str = "study") -> DemoMachine:
        return DemoMachine(name, self.root / name, self.root / name / subfolder)

    def run_demo(self) -> _DemoResult:
        started_s = time.monotonic()
        _announce_step("Simulating each hospital's own slides")
        self._simulate_slides()
        _announce_step("Each hospital makes its study and its key")
        self.crew.run_parallel(self._prepare_hospital, self.hospitals)
        _announce_step(
            "The coordinator provisions a federation and approves the hospitals' keys; people compare fingerprints"
        )
        self._provision_federation()
        _announce_step("Each hospital completes its kit, and cuts its slides into patches and features")
        self.crew.run_parallel(self._complete_kit, self.hospitals)
        _announce_step("The coordinator makes a plan, and every hospital signs it")
        self._make_plan()
        self.crew.run_parallel(self._sign_plan, self.hospitals)
        _announce_step(
            "The server and the hospitals start; the coordinator checks all connections, and submits the plan"
        )
        summary = self._run_training()
        _announce_step("Each hospital evaluates and reports, on its own data")
        self.crew.run_parallel(lambda place: self._report_run(place, summary["run"]), self.hospitals)
        return {
            "folder": str(self.root),
            "seconds": round(time.monotonic() - started_s, 1),
            "run": summary["run"],
            "sites": summary["sites"],
            "scores": score_cross_site(read_json(self.coordinator.working_folder / summary["out"] / "scores.json")),
            "report": str(self.coordinator.working_folder / summary["report"]),
            "reports": {
                place.name: str(place.working_folder / summary["run"] / "report" / "index.html")
                for place in self.hospitals
            },
        }

    def _simulate_slides(self) -> None:
        """Give each hospital its simulated slides, and all that train the weights of the public encoder."""
        weights = self.coordinator.working_folder / _WEIGHTS
        write_untrained_weights(weights)
        for index, place in enumerate(self.hospitals):
            archive = place.folder / "archive"
            simulate_archive(archive, n_sites=_N_HOSPITALS, patients_per_site=8, size_px=1024, only_site=index)
            _copy_file(weights, place.working_folder / _WEIGHTS)

    def _prepare_hospital(self, place: DemoMachine) -> None:
        """Make a hospital's study, which discloses counts of its test part, and its certificate request."""
        self.run(place, "init", ".", "--from", Path("..") / "archive", "--real", "--pipeline", _PIPELINE)
        site = place.working_folder / "sites" / f"{place.name}.toml"
        write_text(site, f"{site.read_text(encoding='utf-8').rstrip()}\n{_ALLOW_LINE}\n")
        organization = f"Hospital {place.name} of the demo"
        request = self.run(place, "federation", "request", place.name, "--kit", _KIT, "--organization", organization)
        self.fingerprints[place.name] = str(request["fingerprint"])

    def _provision_federation(self) -> None:
        """Provision the federation, give the server its kit, and approve the hospitals' requests."""
        chief, address = self.coordinator, f"localhost:{find_free_port()}"
        federation = self.run(chief, "federation", "provision", _FOUNDED, "--name", "demo", "--server", address)
        self.fingerprints["root"] = str(federation["fingerprint"])
        self.server.folder.mkdir()
        shutil.move(chief.working_folder / _FOUNDED / "server", self.server.folder / "kit")
        for place in self.hospitals:
            name = f"request-{place.name}.json"
            _copy_file(place.folder / "kit" / name, chief.folder / name)
            options = ("--kit", _FOUNDED, "--fingerprint", self.fingerprints[place.name])
            self.run(chief, "federation", "approve", Path("..") / name, *options)

    def _complete_kit(self, place: DemoMachine) -> None:
        """Complete a hospital's kit, and make its training data."""
        name = f"certificate-{place.name}.json"
        _copy_file(self.coordinator.folder / name, place.folder / name)
        options = ("--kit", _KIT, "--fingerprint", self.fingerprints["root"])
        self.run(place, "federation", "join", Path("..") / name, *options)
        self.run(place, "tile", "--site", place.name)
        self.run(place, "features", "--site", place.name)

    def _make_plan(self) -> None:
        """Make the plan from the hospitals' site files."""
        chief, options = self.coordinator, ("--method", _METHOD, "--pipeline", _PIPELINE)
        self.run(chief, "init", ".")
        for place in self.hospitals:
            site = Study(place.working_folder).load_site(place.name)
            site_text = "".join(f"{key} = {toml_value(getattr(site, key))}\n" for key in _SITE_KEYS)
            write_text(chief.working_folder / "sites" / f"{place.name}.toml", site_text)
        self.run(chief, "federation", "plan", *options, "--out", "plan.json", "--kit", _FOUNDED)

    def _sign_plan(self, place: DemoMachine) -> None:
        _copy_file(self.coordinator.working_folder / "plan.json", place.working_folder / "plan.json")
        self.run(place, "federation", "approve", "plan.json", "--kit", _KIT, "--yes")
        approval = Path("federation") / f"approval-{place.name}.json"
        _copy_file(place.working_folder / approval, self.coordinator.working_folder / approval)

    def _run_training(self) -> SubmittedRun:
        chief, kit = self.coordinator, _FOUNDED / "coordinator"
        self.crew.start_server(self.server, "federation", "start", "kit")
        self.crew.run_parallel(lambda place: self.crew.start_server(place, "federation", "start", _KIT), self.hospitals)
        self.run(chief, "federation", "check", kit, "--plan", "plan.json")
        words = ("submit", "--kit", kit, "--plan", "plan.json", "--out", "result")
        return cast(SubmittedRun, self.run(chief, "federation", *words))

    def _report_run(self, place: DemoMachine, run: str) -> None:
        self.run(place, "evaluate", run)
        self.run(place, "report", run)


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _announce_step(text: str) -> None:
    print_message(text, style="bold")


def find_free_port() -> int:
    """Return a port of this machine that no process listens on now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def federation_demo_lines(document: _DemoResult) -> Lines:
    """Yield every model's accuracy at every hospital, and the paths of the pages."""
    yield from render_cross_site_lines(document["scores"])
    for name, page in document["reports"].items():
        yield TextLine(f"  {name}'s own page: {page}")
    yield TextLine(f"done in {document['seconds']:.0f} s; the coordinator's page, of releases alone:")
    yield document["report"]
