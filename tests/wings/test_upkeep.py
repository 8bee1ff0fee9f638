"""What a service needs that runs for years: logs that are rotated, jobs that are forgotten, units, a clean end."""

import os
import shutil
import signal
import socket
import subprocess
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import refused

from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.making import provision
from wsi_fl.hospitals.work import start as starting
from wsi_fl.types import WsiFlError

DEPLOY = Path(__file__).parents[2] / "deploy"
needs_flare = pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'")


def test_logs_are_rotated_and_five_older_ones_kept(tmp_path):
    for number in range(8):
        (tmp_path / "console.txt").write_text(f"start {number}")
        (tmp_path / "audit.log").write_text("x" * (11 if number == 3 else 10))
        (tmp_path / "C1.log").write_text("short")
        starting._rotate(tmp_path / "console.txt", 0)
        starting._rotate(tmp_path / "audit.log", 10)
        starting._rotate(tmp_path / "C1.log")
    kept = {path.name: path.read_text() for path in tmp_path.glob("console.txt*")}
    assert kept == {f"console.txt.{k}": f"start {8 - k}" for k in range(1, 6)}
    assert sorted(path.name for path in tmp_path.glob("*.log*")) == ["C1.log", "audit.log", "audit.log.1"]


def test_the_newest_jobs_are_kept_and_nothing_but_jobs_goes(tmp_path):
    jobs = [tmp_path / str(uuid.uuid4()) for _ in range(23)]
    for age, folder in enumerate(jobs):
        folder.mkdir()
        (folder / "log.txt").write_text("x")
        os.utime(folder, (1e9 - age, 1e9 - age))
    for name in ("startup", "local", "transfer"):
        (tmp_path / name).mkdir()
    starting._forget_jobs(tmp_path)
    assert [folder.exists() for folder in jobs] == [True] * 20 + [False] * 3
    assert len(list(tmp_path.iterdir())) == 23


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    folder = tmp_path_factory.mktemp("founded")
    provision(folder, federation="one", server=f"localhost:{port}")
    return Kit.open(folder / "server")


@needs_flare
def test_a_server_whose_port_is_taken_says_so_before_it_starts(server, monkeypatch):
    monkeypatch.setattr(starting, "_process", lambda *_: pytest.fail("it was started"))
    port = int(server.document["server"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        refused(
            lambda: starting.start(server, None, told=print),
            f"port {port} cannot be opened",
            "end what has it",
            error=WsiFlError,
        )


@needs_flare
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_usual_end(server, monkeypatch, sign):
    popen, said = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda _, **given: popen(["sleep", "60"], **given))
    monkeypatch.setattr(starting, "_until", lambda *_: None)
    monkeypatch.setattr(starting, "_forget_jobs", lambda _: os.kill(os.getpid(), sign))
    starting.start(server, None, told=said.append)
    assert said[-1] == "server stopped"
    assert (server.path / "console.txt").exists()


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda path: path.stem)
def test_units_are_as_systemd_wants_them(unit, tmp_path):
    text = unit.read_text()
    assert "Restart=always" in text and ("CAP_NET_BIND_SERVICE" in text) == ("server" in unit.name)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    (tmp_path / unit.name).write_text(text.replace("/opt/wsi-fl/bin/wsi-fl", shutil.which("true")))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
