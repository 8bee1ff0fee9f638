"""What `federation start` keeps up and ends: processes, jobs, rotated logs and systemd units."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import refused
from federation_fixtures import needs_flare

from wsi_fl.hospitals.demo import find_free_port
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.work import start as starting
from wsi_fl.hospitals.work.start import _end_process, start_kit
from wsi_fl.types import WsiFlError

pytestmark = pytest.mark.end_to_end


PARENT = """
import subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(job.pid, flush=True)
time.sleep(60)
"""


def test_a_job_ends_with_the_client_that_started_it():
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    job = int(process.stdout.readline())
    assert os.getpgid(job) == job != process.pid
    _end_process(process)
    process.stdout.close()
    assert process.returncode is not None and _ended(job)


STARTED = """
import os, sys, time
from wsi_fl.hospitals.flare import processes
for one in (processes.client_train, processes.server_train, processes.worker_process):
    one.parse_arguments = lambda *_, **__: time.sleep(60)
print(os.getpid(), flush=True)
processes.main(sys.argv[1])
"""
STARTER = """
import os, subprocess, sys, time
environment = os.environ | {"WSI_FL_STARTED_BY": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environment, start_new_session=True)
time.sleep(60)
"""


@needs_flare
@pytest.mark.parametrize("module", ["client", "job", "server"])
def test_child_processes_end_after_their_parent_was_killed(module):
    command = [sys.executable, "-c", STARTER, STARTED, module]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE)
    started = int(starter.stdout.readline())
    assert not _ended(started)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 10
    while not _ended(started):
        if time.monotonic() > deadline:
            os.kill(started, signal.SIGKILL)
            pytest.fail("it goes on")
        time.sleep(0.05)


@pytest.fixture
def held_kit(tmp_path):
    """A startup kit that another process holds."""
    provision_federation(tmp_path / "kits", federation="one", server="localhost:1", sites=["C1"])
    kit = Kit.open(tmp_path / "kits" / "C1")
    with kit.lock_kit():
        yield kit


@needs_flare
def test_a_running_startup_kit_is_not_started_again(held_kit, tmp_path, monkeypatch):
    study = SimpleNamespace(root=tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a second client was started"))
    refused(lambda: start_kit(held_kit, study, report=print), "C1 runs already", error=WsiFlError)


def test_a_running_startup_kit_is_not_started_again_over_a_folder(held_kit, tmp_path, monkeypatch):
    settings = SimpleNamespace(comm=SimpleNamespace(timeout_s=60.0))
    plan = SimpleNamespace(digest="0" * 64, most_bytes=1, pipeline=lambda: settings)
    monkeypatch.setattr(starting, "load_approved_plan", lambda *_: plan)
    monkeypatch.setattr(starting, "_FolderWork", lambda *_: pytest.fail("a second one takes part"))
    study = SimpleNamespace(root=tmp_path / "other")
    (tmp_path / "share").mkdir()
    again = lambda: starting.take_part_by_folder(study, held_kit, folder=str(tmp_path / "share"))  # noqa: E731
    refused(again, "C1 runs already", error=WsiFlError)


def _ended(pid):
    """Return whether a process has ended, collected by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


DEPLOY = Path(__file__).parents[2] / "deploy"


def test_logs_are_rotated_and_five_older_ones_are_kept(tmp_path):
    for number in range(8):
        (tmp_path / "console.txt").write_text(f"start {number}")
        (tmp_path / "audit.log").write_text("x" * (11 if number == 3 else 10))
        (tmp_path / "C1.log").write_text("short")
        starting._rotate_log(tmp_path / "console.txt", 0)
        starting._rotate_log(tmp_path / "audit.log", 10)
        starting._rotate_log(tmp_path / "C1.log")
    kept = {path.name: path.read_text() for path in tmp_path.glob("console.txt*")}
    assert kept == {f"console.txt.{k}": f"start {8 - k}" for k in range(1, 6)}
    assert sorted(path.name for path in tmp_path.glob("*.log*")) == ["C1.log", "audit.log", "audit.log.1"]


def test_the_newest_jobs_are_kept_and_only_jobs_are_removed(tmp_path):
    jobs = [tmp_path / str(uuid.uuid4()) for _ in range(23)]
    for age, folder in enumerate(jobs):
        folder.mkdir()
        (folder / "log.txt").write_text("x")
        os.utime(folder, (1e9 - age, 1e9 - age))
    for name in ("startup", "local", "transfer"):
        (tmp_path / name).mkdir()
    starting._delete_old_jobs(tmp_path)
    assert [folder.exists() for folder in jobs] == [True] * 20 + [False] * 3
    assert len(list(tmp_path.iterdir())) == 23


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("founded")
    provision_federation(folder, federation="one", server=f"localhost:{find_free_port()}")
    return Kit.open(folder / "server")


@needs_flare
def test_a_taken_port_is_reported_before_the_server_starts(server, monkeypatch):
    monkeypatch.setattr(starting, "_flare_process", lambda *_: pytest.fail("it was started"))
    port = int(server.document["server"].rpartition(":")[2])
    words = f"port {port} cannot be opened", "end what has it"
    with socket.create_server(("127.0.0.1", port)):
        refused(lambda: starting.start_kit(server, None, report=print), *words, error=WsiFlError)


@needs_flare
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_start_without_an_error(server, monkeypatch, sign):
    popen, said = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda _, **given: popen(["sleep", "60"], **given))
    monkeypatch.setattr(starting, "_wait_until", lambda *_: None)
    monkeypatch.setattr(starting, "_delete_old_jobs", lambda _: os.kill(os.getpid(), sign))
    starting.start_kit(server, None, report=said.append)
    assert said[-1] == "server stopped" and (server.path / "console.txt").exists()


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda path: path.stem)
def test_units_are_accepted_by_systemd(unit, tmp_path):
    text = unit.read_text()
    assert "Restart=always" in text and ("CAP_NET_BIND_SERVICE" in text) == ("server" in unit.name)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    (tmp_path / unit.name).write_text(text.replace("/opt/wsi-fl/bin/wsi-fl", shutil.which("true")))
    command = ["systemd-analyze", "verify", str(tmp_path / unit.name)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
