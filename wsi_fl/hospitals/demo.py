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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from wsi_fl.demo.phantom import paint_archive
from wsi_fl.demo.run import write_untrained
from wsi_fl.hospitals.flare.files import need_flare
from wsi_fl.learning.counts import Between, results
from wsi_fl.stages.answers.between import between_lines
from wsi_fl.stages.work.console import Line, Lines, say
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
_ALLOW = 'allow = ["scores"]'
_TOLD = ("name", "real", "allow", "max_epsilon", "delta")
"""Keys of its site file that a hospital discloses to the coordinator, who makes the plan."""
_DONE = "demo.json"


@dataclass(frozen=True)
class Place:
    """A machine of the demo: a folder that no other machine's commands read or write.

    Attributes:
        name: of its user.
        folder: all its files, its user's state and its commands' output included.
        working_folder: where its commands are given, in `folder`.
    """

    name: str
    folder: Path
    here: Path

    @property
    def log(self) -> Path:
        """The output of the commands."""
        return self.folder / "commands.txt"

    def environment(self) -> dict[str, str]:
        """Return the environment of this machine's user, by default with one core for each process."""
        return {"OMP_NUM_THREADS": "1", **os.environ, "XDG_STATE_HOME": str(self.folder / "state")}


class Children:
    """The running processes; `children()` ends them all."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._over = False

    def run(self, place: Place, *arguments: str | Path) -> dict[str, Any]:
        """Run a command and return its `--json` document; WsiFlError with its last line if it fails."""
        said = _words(arguments)
        say(f"  {place.name}$ {said}")
        with place.log.open("a+b") as log:
            process = self._start(place, [*arguments, "--json"], stdout=subprocess.PIPE, stderr=log)
            output, _ = process.communicate()
        with self._lock:
            self._running.pop(process.pid, None)
        if process.returncode:
            raise WsiFlError(f"{place.name}: {said}: {_last_line(place.log)}")
        return dict(json.loads(output))

    def start(self, place: Place, *arguments: str | Path) -> None:
        """Start a command that goes on, and wait until it reports that it is ready; WsiFlError if it does not."""
        said = _words(arguments)
        say(f"  {place.name}$ {said} &")
        file = place.folder / "start.txt"
        with file.open("wb") as log:
            process = self._start(place, arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + _READY_S
        while _READY not in file.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise WsiFlError(f"{place.name}: {said}: {_last_line(file)}")
            time.sleep(_POLL_S)

    def each(self, work: Callable[[_T], object], things: Sequence[_T]) -> None:
        """Call a function for each item, several at the same time; if one fails, all end."""
        with ThreadPoolExecutor(max(1, min(len(things), n_cores()))) as pool:
            jobs = [pool.submit(work, thing) for thing in things]
            try:
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.end()
                raise

    def end(self) -> None:
        """End all processes, first by SIGTERM, and start no more."""
        with self._lock:
            self._over, running = True, list(self._running.values())
            self._running = {}
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal(process, signal.SIGKILL)

    def _start(
        self, place: Place, arguments: Sequence[str | Path], *, stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own, so that Ctrl-C reaches this process alone, which ends the others."""
        with self._lock:
            if self._over:
                raise WsiFlError("the demo has ended")
            process = subprocess.Popen(
                [sys.executable, "-m", "wsi_fl", *map(str, arguments)],
                cwd=place.here,
                env=place.environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._running[process.pid] = process
        return process


@contextmanager
def children() -> Iterator[Children]:
    """Yield a group of processes and end it afterwards, also after Ctrl-C, a failure or a closed terminal."""
    found = Children()
    ends = [sign for sign in _ENDS if signal.getsignal(sign) is not signal.SIG_IGN]  # as of nohup
    before = {sign: signal.signal(sign, _interrupt) for sign in ends}
    try:
        yield found
    finally:
        for sign in before:
            signal.signal(sign, signal.SIG_IGN)  # the end itself is not interrupted a second time
        found.end()
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _signal(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)


def _words(arguments: Sequence[str | Path]) -> str:
    return shlex.join(["wsi-fl", *map(str, arguments)])


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("wsi-fl: error: ") if lines else f"it said nothing; see {log}"


class _Finished(TypedDict):
    """The result: the summary's sites, the coordinator's page, and by hospital its own page."""

    folder: str
    seconds: float
    run: str
    sites: list[dict[str, object]]
    scores: Between
    report: str
    reports: dict[str, str]


def federation_demo(folder: Path) -> _Finished:
    """Run federated learning of four hospitals with simulated slides over NVIDIA FLARE, from keys to reports.

    Args:
        folder: a new one. That of a finished demo is left as it is, and its result is returned.

    Raises:
        UsageError: when the folder holds anything else, or NVIDIA FLARE is not installed.
        WsiFlError: when a command fails, with its last line, or when it is interrupted.
    """
    need_flare()
    root = folder.resolve()
    if (root / _DONE).is_file():
        say(f"{folder}: this demo has finished; for another one remove the folder, or choose another --out")
        return cast(_Finished, read_object(root / _DONE, "remove the folder"))
    if root.exists() and any(root.iterdir()):
        raise UsageError(f"{folder}: is not empty and no finished demo; remove it, or choose another --out")
    try:
        with children() as crew:
            document = _Demo(root, crew).document()
    except KeyboardInterrupt:
        raise WsiFlError(f"interrupted; all processes were ended; to begin again, remove {folder}") from None
    write_json(root / _DONE, document)
    return document


class _Demo:
    """The machines in the folder of a demo, and their actions in turn."""

    def __init__(self, root: Path, crew: Children) -> None:
        self.root, self.crew, self.run = root, crew, crew.run
        self.read_out: dict[str, str] = {}
        """Fingerprints that were read out, by holder."""
        self.hospitals = [self._place(f"C{k + 1}") for k in range(_N_HOSPITALS)]
        self.chief, self.server = self._place("coordinator"), self._place("server", ".")

    def _place(self, name: str, here: str = "study") -> Place:
        return Place(name, self.root / name, self.root / name / here)

    def document(self) -> _Finished:
        began = time.monotonic()
        _say("Simulating each hospital's own slides")
        self._paint()
        _say("Each hospital makes its study and its key")
        self.crew.each(self._settle, self.hospitals)
        _say(
            "The coordinator provisions a federation and approves the hospitals' keys; people compare fingerprints"
        )
        self._found()
        _say("Each hospital completes its kit, and cuts its slides into patches and features")
        self.crew.each(self._join, self.hospitals)
        _say("The coordinator makes a plan, and every hospital signs it")
        self._plan()
        self.crew.each(self._sign, self.hospitals)
        _say(
            "The server and the hospitals start; the coordinator checks all connections, and submits the plan"
        )
        summary = self._learn()
        _say("Each hospital evaluates and reports, on its own data")
        self.crew.each(lambda place: self._report(place, summary["run"]), self.hospitals)
        return {
            "folder": str(self.root),
            "seconds": round(time.monotonic() - began, 1),
            "run": summary["run"],
            "sites": summary["sites"],
            "scores": results(read_json(self.chief.here / summary["out"] / "scores.json")),
            "report": str(self.chief.here / summary["report"]),
            "reports": {
                place.name: str(place.here / summary["run"] / "report" / "index.html")
                for place in self.hospitals
            },
        }

    def _paint(self) -> None:
        """Give each hospital its simulated slides, and all that train the weights of the public encoder."""
        weights = self.chief.here / _WEIGHTS
        write_untrained(weights)
        for index, place in enumerate(self.hospitals):
            archive = place.folder / "archive"
            paint_archive(archive, n_sites=_N_HOSPITALS, patients_per_site=8, size_px=1024, only=index)
            _send(weights, place.here / _WEIGHTS)

    def _settle(self, place: Place) -> None:
        """Make a hospital's study, which discloses counts of its test part, and its certificate request."""
        self.run(place, "init", ".", "--from", Path("..") / "archive", "--real", "--pipeline", _PIPELINE)
        site = place.here / "sites" / f"{place.name}.toml"
        write_text(site, f"{site.read_text(encoding='utf-8').rstrip()}\n{_ALLOW}\n")
        organization = f"Hospital {place.name} of the demo"
        asked = self.run(
            place, "federation", "request", place.name, "--kit", _KIT, "--organization", organization
        )
        self.read_out[place.name] = asked["fingerprint"]

    def _found(self) -> None:
        """Provision the federation, give the server its kit, and approve the hospitals' requests."""
        chief, address = self.chief, f"localhost:{free_port()}"
        founded = self.run(chief, "federation", "provision", _FOUNDED, "--name", "demo", "--server", address)
        self.read_out["root"] = founded["fingerprint"]
        self.server.folder.mkdir()
        shutil.move(chief.here / _FOUNDED / "server", self.server.folder / "kit")
        for place in self.hospitals:
            name = f"request-{place.name}.json"
            _send(place.folder / "kit" / name, chief.folder / name)
            given = ("--kit", _FOUNDED, "--fingerprint", self.read_out[place.name])
            self.run(chief, "federation", "approve", Path("..") / name, *given)

    def _join(self, place: Place) -> None:
        """Complete a hospital's kit, and make its training data."""
        name = f"certificate-{place.name}.json"
        _send(self.chief.folder / name, place.folder / name)
        given = ("--kit", _KIT, "--fingerprint", self.read_out["root"])
        self.run(place, "federation", "join", Path("..") / name, *given)
        self.run(place, "tile", "--site", place.name)
        self.run(place, "features", "--site", place.name)

    def _plan(self) -> None:
        """Make the plan from the hospitals' site files."""
        chief, what = self.chief, ("--method", _METHOD, "--pipeline", _PIPELINE)
        self.run(chief, "init", ".")
        for place in self.hospitals:
            site = Study(place.here).site(place.name)
            told = "".join(f"{key} = {toml_value(getattr(site, key))}\n" for key in _TOLD)
            write_text(chief.here / "sites" / f"{place.name}.toml", told)
        self.run(chief, "federation", "plan", *what, "--out", "plan.json", "--kit", _FOUNDED)

    def _sign(self, place: Place) -> None:
        _send(self.chief.here / "plan.json", place.here / "plan.json")
        self.run(place, "federation", "approve", "plan.json", "--kit", _KIT, "--yes")
        approval = Path("federation") / f"approval-{place.name}.json"
        _send(place.here / approval, self.chief.here / approval)

    def _learn(self) -> dict[str, Any]:
        chief, kit = self.chief, _FOUNDED / "coordinator"
        self.crew.start(self.server, "federation", "start", "kit")
        self.crew.each(lambda place: self.crew.start(place, "federation", "start", _KIT), self.hospitals)
        self.run(chief, "federation", "check", kit, "--plan", "plan.json")
        return self.run(chief, "federation", "submit", "--kit", kit, "--plan", "plan.json", "--out", "result")

    def _report(self, place: Place, run: str) -> None:
        self.run(place, "evaluate", run)
        self.run(place, "report", run)


def _send(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _say(text: str) -> None:
    say(text, style="bold")


def free_port() -> int:
    """Return a port of this machine that no process listens on now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def federation_demo_lines(document: _Finished) -> Lines:
    """Yield every model's accuracy at every hospital, and the paths of the pages."""
    yield from between_lines(document["scores"])
    for name, page in document["reports"].items():
        yield Line(f"  {name}'s own page: {page}")
    yield Line(f"done in {document['seconds']:.0f} s; the coordinator's page, of releases alone:")
    yield document["report"]
