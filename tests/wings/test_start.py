"""What `federation start` ends: the process, and the jobs that it started in groups of their own."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import refused

from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.making import provision
from wsi_fl.hospitals.work import start as starting
from wsi_fl.hospitals.work.start import _end, start
from wsi_fl.types import WsiFlError

pytestmark = pytest.mark.story

needs_flare = pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'")

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
    _end(process)
    process.stdout.close()
    assert process.returncode is not None
    assert _ended(job)


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
def test_nothing_goes_on_after_what_started_it_was_killed(module):
    command = [sys.executable, "-c", STARTER, STARTED, module]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE)
    started = int(starter.stdout.readline())
    assert not _ended(started)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 10
    while not _ended(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert _ended(started)
    finally:
        if not _ended(started):
            os.kill(started, signal.SIGKILL)


HOLDER = """
import sys, time
from pathlib import Path
from wsi_fl.hospitals.trust.kit import Kit
with Kit.open(Path(sys.argv[1])).alone():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A kit that another process has."""
    folder = tmp_path_factory.mktemp("held")
    provision(folder, federation="one", server="localhost:1", sites=["C1"])
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder / "C1")], stdout=subprocess.PIPE)
    assert holder.stdout.readline()
    yield Kit.open(folder / "C1")
    holder.kill()
    holder.wait()
    holder.stdout.close()


@needs_flare
def test_a_kit_that_runs_is_not_started_again(held, tmp_path, monkeypatch):
    study = SimpleNamespace(root=tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a second client was started"))
    refused(lambda: start(held, study, told=print), "C1 runs already", error=WsiFlError)


def test_a_kit_that_runs_is_not_started_again_over_a_folder(held, tmp_path, monkeypatch):
    settings = SimpleNamespace(comm=SimpleNamespace(timeout_s=60.0))
    plan = SimpleNamespace(digest="0" * 64, most_bytes=1, pipeline=lambda: settings)
    monkeypatch.setattr(starting, "approved_plan", lambda *_: plan)
    monkeypatch.setattr(starting, "_until_done", lambda *_: pytest.fail("a second one takes part"))
    study = SimpleNamespace(root=tmp_path / "other")
    (tmp_path / "share").mkdir()
    again = lambda: starting.take_part_by_folder(study, held, folder=str(tmp_path / "share"))  # noqa: E731
    refused(again, "C1 runs already", error=WsiFlError)


def _ended(pid):
    """Whether a process is gone, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
