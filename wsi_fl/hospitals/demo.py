"""`federation demo`: a server, a coordinator and four hospitals as processes of this machine, each in its own folder.

Whatever one of them does is a command of `wsi-fl` that people would give there. What they send each other, as people
send files by mail, this process copies: requests, certificates, the plan, approvals, and promises for the plan.
"""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsi_fl.demo.phantom import paint_archive
from wsi_fl.demo.run import write_untrained
from wsi_fl.hospitals.children import Children, Place, children
from wsi_fl.hospitals.flare.files import need_flare
from wsi_fl.learning.counts import results
from wsi_fl.stages.answers.evaluate import between_lines
from wsi_fl.stages.work.console import Line, Lines, say
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import toml_value
from wsi_fl.system.files import read_json, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError

_PIPELINE, _METHOD = "hospitals", "proxyfl"
_N_HOSPITALS, _PATIENTS, _SLIDE_PX = 4, 8, 1024
_WEIGHTS = Path("weights") / "untrained.safetensors"
_KIT = Path("..") / "kit"
_FOUNDED = Path("..") / "federation"
_ALLOW = 'allow = ["scores"]'
_TOLD = ("name", "real", "allow", "max_epsilon", "delta")
"""What of its site file a hospital tells the coordinator, who makes the plan."""
_DONE = "demo.json"


@dataclass(frozen=True)
class _Bed:
    """Everybody's places in the folder of a demo."""

    root: Path

    @property
    def hospitals(self) -> dict[str, Place]:
        return {name: self._place(name, "study") for name in (f"C{k + 1}" for k in range(_N_HOSPITALS))}

    @property
    def coordinator(self) -> Place:
        return self._place("coordinator", "study")

    @property
    def server(self) -> Place:
        return self._place("server", ".")

    def _place(self, name: str, here: str) -> Place:
        return Place(name, self.root / name, self.root / name / here)


def federation_demo(folder: Path) -> dict[str, Any]:
    """Let four hospitals of painted slides learn together over NVIDIA FLARE, from their keys to their reports.

    Args:
        folder: a new one. That of a finished demo is left as it is, and what came out is returned.

    Returns:
        {"folder", "seconds", "run", "sites" (of the summary), "scores", "report" (the coordinator's page),
        "reports": {hospital: its own page}}.

    Raises:
        UsageError: when the folder holds anything else, or NVIDIA FLARE is not installed.
        WsiFlError: when a command fails, with its last line, or when it is interrupted.
    """
    need_flare()
    bed = _Bed(folder.resolve())
    if (bed.root / _DONE).is_file():
        say(f"{folder}: this demo has finished; for another one remove the folder, or choose another --out")
        return dict(read_json(bed.root / _DONE))
    if bed.root.exists() and any(bed.root.iterdir()):
        raise UsageError(f"{folder}: is not empty and no finished demo; remove it, or choose another --out")
    try:
        document = _demonstrated(bed)
    except KeyboardInterrupt:
        raise WsiFlError(f"interrupted; all processes were ended; to begin again, remove {folder}") from None
    write_json(bed.root / _DONE, document)
    return document


def _demonstrated(bed: _Bed) -> dict[str, Any]:
    """The document of a demo, once everything is done."""
    began = time.monotonic()
    with children() as crew:
        _say("Painting each hospital's own slides")
        _paint(bed)
        _say("Each hospital makes its study and its key")
        crew.each(lambda place: _settle(crew, place), list(bed.hospitals.values()))
        _found(crew, bed)
        _say("Each hospital joins, and cuts its slides into patches and features")
        crew.each(lambda place: _join(crew, bed, place), list(bed.hospitals.values()))
        _agree(crew, bed)
        summary = _learn(crew, bed)
        _say("Each hospital evaluates and reports, on its own data")
        reports = _report(crew, bed, summary["run"])
    return {
        "folder": str(bed.root),
        "seconds": round(time.monotonic() - began, 1),
        "run": summary["run"],
        "sites": summary["sites"],
        "scores": results(read_json(bed.coordinator.here / summary["out"] / "scores.json")),
        "report": str(bed.coordinator.here / summary["report"]),
        "reports": reports,
    }


def _paint(bed: _Bed) -> None:
    """Give each hospital its slides, and everybody who learns the weights of the public encoder."""
    for index, place in enumerate(bed.hospitals.values()):
        paint_archive(
            place.folder / "archive",
            n_sites=_N_HOSPITALS,
            patients_per_site=_PATIENTS,
            size_px=_SLIDE_PX,
            only=index,
        )
    weights = bed.coordinator.here / _WEIGHTS
    write_untrained(weights)
    for place in bed.hospitals.values():
        _send(weights, place.here / _WEIGHTS)


def _settle(crew: Children, place: Place) -> None:
    """Make a hospital's study, which lets counts of its test part go, and its request to join."""
    archive = Path("..") / "archive"
    crew.run(place, "init", ".", "--from", archive, "--real", "--pipeline", _PIPELINE)
    site = place.here / "sites" / f"{place.name}.toml"
    write_text(site, f"{site.read_text(encoding='utf-8').rstrip()}\n{_ALLOW}\n")
    organization = f"Hospital {place.name} of the demo"
    crew.run(place, "federation", "request", place.name, "--kit", _KIT, "--organization", organization)


def _found(crew: Children, bed: _Bed) -> None:
    """Found the federation, give the server its kit, and approve the hospitals' requests."""
    chief = bed.coordinator
    _say(
        "The coordinator founds a federation and approves the hospitals' keys; people compare fingerprints too"
    )
    address = f"localhost:{free_port()}"
    crew.run(chief, "federation", "provision", _FOUNDED, "--name", "demo", "--server", address)
    bed.server.folder.mkdir()
    shutil.move(chief.here / _FOUNDED / "server", bed.server.folder / "kit")
    for name, place in bed.hospitals.items():
        request = _send(place.folder / "kit" / f"request-{name}.json", chief.folder / f"request-{name}.json")
        crew.run(chief, "federation", "approve", Path("..") / request.name, "--kit", _FOUNDED)


def _join(crew: Children, bed: _Bed, place: Place) -> None:
    """Complete a hospital's kit, and make what it learns from."""
    name = f"certificate-{place.name}.json"
    _send(bed.coordinator.folder / name, place.folder / name)
    crew.run(place, "federation", "join", Path("..") / name, "--kit", _KIT)
    crew.run(place, "tile", "--site", place.name)
    crew.run(place, "features", "--site", place.name)


def _agree(crew: Children, bed: _Bed) -> None:
    """Make the plan of what the hospitals promise, and let all sign it."""
    chief, plan = bed.coordinator, "plan.json"
    _say("The coordinator makes a plan, and every hospital signs it")
    crew.run(chief, "init", ".")
    for name, place in bed.hospitals.items():
        write_text(chief.here / "sites" / f"{name}.toml", _promises(Study(place.here), name))
    crew.run(
        chief,
        "federation",
        "plan",
        "--method",
        _METHOD,
        "--pipeline",
        _PIPELINE,
        "--out",
        plan,
        "--kit",
        _FOUNDED,
    )

    def sign(place: Place) -> None:
        _send(chief.here / plan, place.here / plan)
        crew.run(place, "federation", "approve", plan, "--kit", _KIT, "--yes")
        approval = Path("federation") / f"approval-{place.name}.json"
        _send(place.here / approval, chief.here / approval)

    crew.each(sign, list(bed.hospitals.values()))


def _learn(crew: Children, bed: _Bed) -> dict[str, Any]:
    """Start the server and the hospitals' clients, look whether all reach each other, and let them learn."""
    chief, kit = bed.coordinator, _FOUNDED / "coordinator"
    _say("The server and the hospitals start; the coordinator looks whether all is well, and lets them learn")
    crew.start(bed.server, "federation", "start", "kit")
    crew.each(lambda place: crew.start(place, "federation", "start", _KIT), list(bed.hospitals.values()))
    crew.run(chief, "federation", "check", kit, "--plan", "plan.json")
    return crew.run(chief, "federation", "submit", "--kit", kit, "--plan", "plan.json", "--out", "result")


def _report(crew: Children, bed: _Bed, run: str) -> dict[str, str]:
    """Let every hospital evaluate its models and write its own page; return the pages."""

    def report(place: Place) -> None:
        crew.run(place, "evaluate", run)
        crew.run(place, "report", run)

    crew.each(report, list(bed.hospitals.values()))
    return {name: str(place.here / run / "report" / "index.html") for name, place in bed.hospitals.items()}


def _promises(study: Study, name: str) -> str:
    """The site file of a hospital as its coordinator has it: promises, and no paths."""
    site = study.site(name)
    return "".join(f"{key} = {toml_value(getattr(site, key))}\n" for key in _TOLD)


def _send(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(source, target))


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def _say(text: str) -> None:
    say(text, style="bold")


def federation_demo_lines(document: dict[str, Any]) -> Lines:
    """Yield every model's accuracy at every hospital, and where the pages lie."""
    yield from between_lines(document["scores"])
    for name, page in document["reports"].items():
        yield Line(f"  {name}'s own page: {page}")
    yield Line(f"done in {document['seconds']:.0f} s; the coordinator's page, of releases alone:")
    yield document["report"]
