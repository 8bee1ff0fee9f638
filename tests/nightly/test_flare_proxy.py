"""A hospital whose only way out is an HTTP proxy with a password, over real processes of NVIDIA FLARE."""

import json
import subprocess
import time

import pytest
from federation_fixtures import needs_flare
from hospitals import Bed
from proxies import KNOWN, needs_proxy, proxying

from wsi_fl.hospitals.demo import find_free_port

pytestmark = [needs_proxy, needs_flare]

WRITTEN, PASSWORD = "s%3Acr%40t%25", "s:cr@t%"


def test_hospitals_train_through_a_proxy_that_is_the_only_way_to_the_server(tmp_path, monkeypatch):
    bed = Bed(tmp_path, 2, server=f"{KNOWN}:{find_free_port()}")
    bed.sign("fedavg", "train.rounds=1")
    with proxying(tmp_path / "proxy", PASSWORD) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:{WRITTEN}@127.0.0.1:{port}")
        monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
        with bed.running("server"):
            began = time.monotonic()
            bed.start("S0")
            assert time.monotonic() - began < 30
            bed.start("S1")
            checked = bed.command("check", bed.root / "kits" / "coordinator", "--json")
            assert checked.returncode == 0 and f"127.0.0.1:{port}" in checked.stdout, checked
            commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
            shown = "".join(line for line in commands.splitlines() if "--basic-auth" not in line)
            said = bed.submit("--plan", bed.plan_file())
        assert said.returncode == 0, said.stderr
        assert json.loads(said.stdout)["sites"]
    written = b"".join(path.read_bytes() for path in bed.root.rglob("*.txt")) + shown.encode()
    assert WRITTEN.encode() not in written and PASSWORD.encode() not in written


@pytest.mark.parametrize("user", ["", "user:wr0ng-0ne@"])
def test_a_refused_password_is_reported_and_written_nowhere(tmp_path, monkeypatch, user):
    bed = Bed(tmp_path, 2, server=f"{KNOWN}:{find_free_port()}")
    with proxying(tmp_path / "proxy", PASSWORD) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{user}127.0.0.1:{port}")
        with bed.running("server"):
            process = bed.start("S0", wait=False)
            said = process.stdout.read()
    assert "asks for a user and a password, or does not take those given (407)" in said
    logs = b"".join(path.read_bytes() for path in (bed.root / "kits" / "S0").rglob("*") if path.is_file())
    assert b"wr0ng" not in logs and "wr0ng" not in said
