"""What joins hospitals, against MPI: a model around a ring of four, in one run on one machine.

    python benchmarks/hospitals.py [--megabytes 44] [--repeats 6] [--rounds 4] [--json]

Four parts, one after the other, so that none slows another down:

- `mpi`: `MpiComm.exchange` between four ranks (`transport.py`).
- `letters`: sealing and signing one letter, and checking and opening it, in one process; no line at all.
- `folder`: `RelayedComm.exchange` between four processes over a folder of this machine.
- `runs`: the same ProxyFL run, a ResNet-18 that travels and hardly any data, over MPI ranks and over NVIDIA FLARE: a
  server and four hospitals with kits and a signed plan. Seconds of an exchange are those that each site notes in its
  own metrics, the slowest site of a round; training is not in them, waiting for a slower site's letter is.

Memory is VmHWM of /proc, the most that a process ever had, sampled while it runs. Real lines between hospitals are
slower than this machine's memory: the seconds here are what software costs, not what a line does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from wsi_fl.federation.message import HEADER_BYTES, Outgoing
from wsi_fl.hospitals.demo import ChildProcesses, DemoMachine, child_processes, find_free_port
from wsi_fl.hospitals.transports.folder_transport import FolderTransport
from wsi_fl.hospitals.transports.secure_comm import SecureComm
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer, SealedMessage
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.system.files import read_lines

SITES = ["S1", "S2", "S3", "S4"]
WARM_UP = 2
ALLOWED = 'real = true\nallow = ["model"]\nmax_epsilon = 1.0\ndelta = 1e-5'
SETTINGS = (
    *("model.proxy=resnet18", "model.private=lenet5", "privacy.enabled=false", "train.epochs_per_round=1"),
    *("train.batch_size=16", "train.augment=none", "comm.timeout_s=300"),
)
PROCESSES = {
    "transport.py": "MPI rank that only exchanges",
    " rank ": "MPI rank of a run",
    "runner_process": "FLARE server's job",
    "processes server": "FLARE server",
    "processes job": "hospital's job",
    "processes client": "hospital's client",
}
"""What a process is, by a part of its command line."""


# memory


@contextmanager
def peaks(found: dict[str, float]) -> Iterator[None]:
    """Note within the largest VmHWM of each kind of process, in MB."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and (seen := _memory(entry)):
                    found[seen[0]] = max(found.get(seen[0], 0.0), seen[1])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _memory(entry: Path) -> tuple[str, float] | None:
    """What a process is, and its VmHWM in MB; None of any other process."""
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        kind = next((kind for part, kind in PROCESSES.items() if part in words), None)
        if kind is None or "python" not in words.split(" ")[0]:
            return None
        lines = (entry / "status").read_text().splitlines()
        return kind, next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


# MPI, letters, folder


def mpi(megabytes: float, repeats: int) -> dict[str, Any]:
    """Seconds of an exchange between four ranks."""
    script = str(Path(__file__).with_name("transport.py"))
    command = [sys.executable, script, "--megabytes", str(megabytes), "--repeats", str(repeats + WARM_UP)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {"seconds": float(json.loads(said.strip().splitlines()[-1])["exchange"])}


def letters(identities: Sequence[Identity], megabytes: float, repeats: int) -> dict[str, Any]:
    """Seconds of making and of opening a letter, and the bytes that it has beside its content."""
    sender, receiver = MessageSealer(identities[0]), MessageSealer(identities[1])
    content = np.random.default_rng(0).bytes(int(megabytes * 1e6))
    holder = SealedMessage.read(sender.write_handshake(_hello(sender), "")).read_handshake(identities[1].root)[1]
    make: list[float] = []
    open_: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        text = sender.seal_message(identities[1].name, receiver.public, "0" * 64, "x1.0", [content])
        made = time.perf_counter()
        letter = SealedMessage.read(text)
        letter.verify_sender(holder)
        opened = receiver.open(letter)
        open_.append(time.perf_counter() - made)
        make.append(made - began)
        assert opened == content
    return {"make": median(make), "open": median(open_), "added_bytes": len(text) - len(content)}


def _hello(writer: MessageSealer) -> Any:
    return {
        "certificate": writer.identity.certificate,
        "public": writer.public,
        "time": time.time(),
        "version": "1",
        "code": "0" * 64,
    }


def folder(root: Path, megabytes: float, repeats: int) -> dict[str, Any]:
    """Seconds of an exchange between four processes over a folder, beside which their kits lie."""
    root.mkdir()
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(len(SITES)), context.Queue()
    work = partial(_by_folder, root, megabytes, repeats)
    processes = [context.Process(target=work, args=(name, barrier, queue)) for name in SITES]
    for process in processes:
        process.start()
    found = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    slowest = [max(times) for times in zip(*(one["seconds"] for one in found), strict=True)]
    return {
        "seconds": median(slowest[WARM_UP:]),
        "sent_bytes": max(one["sent_bytes"] for one in found),
        "peak_mb": max(one["peak_mb"] for one in found),
    }


def _by_folder(root: Path, megabytes: float, repeats: int, name: str, barrier: Barrier, queue: Any) -> None:
    """One site: an exchange in each repeat, after all have come so far."""
    identity, me = Kit.open(root.parent / "kits" / name).load_identity(), SITES.index(name)
    line = FolderTransport(str(root), name, "0" * 64)
    comm = SecureComm(identity, SITES, tuple(range(len(SITES))), line, 300.0)
    ledger = PrivacyLedger(root.parent / f"{name}.jsonl", site=name, run="r", terms=_TERMS)
    vector = np.random.default_rng(me).standard_normal(int(megabytes * 1e6 / 4), np.float32)
    right, left = (me + 1) % len(SITES), (me - 1) % len(SITES)
    seconds, before = [], comm.sent_bytes
    for round_ in range(1, repeats + WARM_UP + 1):
        release = ledger.release(round_, vector, schema="ab" * 32, mechanism=None, content="model")
        barrier.wait()
        began = time.perf_counter()
        comm.exchange([Outgoing(me, right, 1.0, release)], [(left, me)], round_=round_, hop=0, size=vector.size)
        seconds.append(time.perf_counter() - began)
    sent = (comm.sent_bytes - before) / len(seconds)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))
    barrier.wait()
    comm.close()
    queue.put({"seconds": seconds, "sent_bytes": sent, "peak_mb": peak})


_TERMS = PrivacyTerms(1e-5, allow=("model",))


# the same run over MPI and over FLARE


def runs(root: Path, rounds: int) -> dict[str, Any]:
    """Seconds of an exchange and bytes of a round of ProxyFL over MPI ranks, and over NVIDIA FLARE."""
    root.mkdir()
    whole, settings = root / "whole", [*SETTINGS, f"train.rounds={rounds}"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    address = f"localhost:{find_free_port()}"
    provision_federation(root / "kits", federation="bench", server=address, sites=SITES)
    kits = {name: root / "kits" / name for name in (*SITES, "server", "coordinator")}
    with child_processes() as crew:
        _divide(crew, whole)
        places = {name: _hospital(root, whole, name) for name in SITES}
        bench = DemoMachine("bench", root, whole)
        common = ["--method", "proxyfl", "--pipeline", "mnist", *overrides]
        over_mpi = _measured([whole] * len(SITES), str(crew.run(bench, "train", *common)["run"]))
        plan = root / "plan.json"
        first = places[SITES[0]]
        crew.run(first, "federation", "plan", *common, "--out", plan)
        for name, place in places.items():
            crew.run(place, "federation", "approve", plan, "--kit", kits[name], "--yes")
        crew.start_server(DemoMachine("server", kits["server"], kits["server"]), "federation", "start", kits["server"])
        for name, place in places.items():
            crew.start_server(place, "federation", "start", kits[name])
        said = crew.run(bench, "federation", "submit", "--kit", kits["coordinator"], "--plan", plan)
        over_flare = _measured([places[name].working_folder for name in SITES], str(said["run"]))
    return {"mpi": over_mpi, "flare": over_flare}


def _divide(crew: ChildProcesses, whole: Path) -> None:
    """A study of four simulated sites, with a few noisy pictures each."""
    rng = np.random.default_rng(0)
    n = 12 * len(SITES)
    whole.mkdir()
    images, labels = rng.integers(0, 256, (n, 32, 32, 3), np.uint8), np.arange(n) % 2
    np.savez(whole / "data.npz", x=images, y=labels)
    place = DemoMachine("bench", whole, whole)
    crew.run(place, "init", ".")
    crew.run(place, "partition", "data.npz", "--sites", str(len(SITES)))


def _hospital(root: Path, whole: Path, name: str) -> DemoMachine:
    """The place of a hospital, with its own part of the data alone."""
    study = root / name / "study"
    shutil.copytree(whole, study)
    for other in set(SITES) - {name}:
        shutil.rmtree(study / "stores" / other)
    for file in (study / "sites").glob("*.toml"):
        file.write_text(file.read_text().replace("real = false", ALLOWED))
    return DemoMachine(name, root / name, study)


def _measured(studies: Sequence[Path], run: str) -> dict[str, Any]:
    """Seconds of an exchange, the slowest site's, and the bytes of all sites in a round."""
    lines = [
        read_lines(study / run / "sites" / name / "metrics.jsonl") for name, study in zip(SITES, studies, strict=True)
    ]
    rounds = [[line for line in lines_of_site if line["messages"]] for lines_of_site in zip(*lines, strict=True)]
    slowest = [max(line["communication_seconds"] for line in round_) for round_ in rounds if round_]
    return {
        "seconds": median(slowest[1:] or slowest),
        "all_seconds": slowest,
        "bytes_per_round": sum(line["bytes"] for line in rounds[0]),
    }


def print_document(document: dict[str, Any]) -> None:
    """Print a row per way, its ratio to MPI in the same run, and memory."""
    base, of_runs = document["mpi"]["seconds"], document["runs"]
    print(f"{'':<34}{'s / exchange':>14}{'against MPI':>14}")
    for what, seconds, against in (
        ("MPI, bare", base, base),
        ("letter: seal and sign", document["letters"]["make"], base),
        ("letter: check and open", document["letters"]["open"], base),
        ("folder of this machine", document["folder"]["seconds"], base),
        ("ProxyFL run over MPI", of_runs["mpi"]["seconds"], of_runs["mpi"]["seconds"]),
        ("ProxyFL run over FLARE", of_runs["flare"]["seconds"], of_runs["mpi"]["seconds"]),
    ):
        print(f"{what:<34}{seconds:>14.3f}{seconds / against:>14.1f}")
    print(
        f"bytes of a round over MPI {of_runs['mpi']['bytes_per_round']}, over FLARE the same releases "
        f"{of_runs['flare']['bytes_per_round']}; a letter adds {document['letters']['added_bytes']} to each"
    )
    for what, megabytes in document["peak_mb"].items():
        print(f"{what:<34}{megabytes:>11.0f} MB at most")
    print(f"load average while it ran: {document['load']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=44.0)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4, help="of the run over MPI and over FLARE")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    size, repeats, memory = arguments.megabytes, arguments.repeats, dict[str, float]()
    with tempfile.TemporaryDirectory() as place, peaks(memory):
        root = Path(place)
        provision_federation(root / "kits", federation="bench", shared_folder=place, sites=SITES)
        identities = [Kit.open(root / "kits" / name).load_identity() for name in SITES[:2]]
        document: dict[str, Any] = {
            "megabytes": size,
            "header_bytes": HEADER_BYTES,
            "mpi": mpi(size, repeats),
            "letters": letters(identities, size, repeats),
            "folder": folder(root / "shared", size, repeats),
            "runs": runs(root / "runs", arguments.rounds),
        }
    memory["site over a folder"] = document["folder"]["peak_mb"]
    document |= {"peak_mb": memory, "load": Path("/proc/loadavg").read_text().split()[:3]}
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        print_document(document)


if __name__ == "__main__":
    main()
