"""What can go wrong between hospitals over NVIDIA FLARE, what everyone is told, and how it goes on."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec

import pytest
from hospitals import Bed, digests

from wsi_fl.hospitals.trust.making import provision
from wsi_fl.privacy.ledger_file import LedgerFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'"),
]
ROUNDS = 40
SETTINGS = (f"train.rounds={ROUNDS}", "comm.timeout_s=20", "train.batch_size=4")
RUNS = iter(range(1, 100))


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    bed = Bed(tmp_path_factory.mktemp("bed"), 2)
    bed.sign("proxyfl", *SETTINGS)
    bed.expected = bed.locally("proxyfl", *SETTINGS)
    with bed.running():
        yield bed


def plan_file(bed):
    return str(bed.root / "S0" / "federation" / "plan.json")


def told(process):
    """The one line of a submission that failed."""
    out, err = process.communicate(timeout=240)
    assert process.returncode, out
    lines = [line for line in err.splitlines() if line.startswith("wsi-fl: error:")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    print(lines[0])
    return lines[0]


def all_connected(bed):
    bed.wait_for(
        lambda: (
            json.loads(
                bed.command("status", "--kit", str(bed.root / "kits" / "coordinator"), "--json").stdout
                or "{}"
            ).get("connected")
            == bed.sites
        ),
        120,
    )


def goes_on(bed, run):
    """The run is finished by --resume, with the models of one that nothing happened to, and every round on record."""
    all_connected(bed)
    said = bed.submit("--plan", plan_file(bed), "--resume", "last")
    assert said.returncode == 0, said.stderr
    for site in bed.sites:
        assert digests(bed.root / site / "runs" / run, site) == bed.expected[site]
        book = LedgerFile(bed.study(site).ledger(site))
        identity = json.loads((bed.root / site / "runs" / run / "manifest.json").read_text())["id"]
        rounds = {e.round for e in book.entries if e.mechanism and e.run_id == identity}
        assert rounds == set(range(1, ROUNDS + 1))


def under_way(bed, least=2):
    """A submission, and its run, once a few rounds are done."""
    bed.sign("proxyfl", *SETTINGS)  # each approval is good for one run
    run = f"{next(RUNS):05d}-proxyfl-small"
    process = bed.submitting("--plan", plan_file(bed))
    bed.wait_for(lambda: bed.rounds("S0", run) >= least or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()
    return process, run


def test_a_killed_job(bed):
    process, run = under_way(bed)
    bed.kill_job("S1")
    assert "S1" in told(process)
    goes_on(bed, run)


def test_a_killed_client(bed):
    process, run = under_way(bed)
    client = bed.processes.pop("S1")
    os.killpg(os.getpgid(bed_client(bed, "S1")), signal.SIGKILL)
    for pid in bed.job_processes("S1"):  # it ends with its client, too
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    client.kill()
    client.wait()
    assert "S1" in told(process)
    bed.start("S1")
    goes_on(bed, run)


def bed_client(bed, site):
    """The process id of FLARE's client of a hospital."""
    out = subprocess.run(
        ["pgrep", "-f", f"processes client -m {bed.root / 'kits' / site} "], capture_output=True, check=False
    )
    return int(out.stdout.split()[0])


def test_a_stopped_client_is_waited_for(bed):
    process, run = under_way(bed)
    bed.kill_job("S1", signal.SIGSTOP)
    time.sleep(8)
    bed.kill_job("S1", signal.SIGCONT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    for site in bed.sites:
        assert digests(bed.root / site / "runs" / run, site) == bed.expected[site]


def test_a_server_that_is_killed_and_comes_back(bed):
    process, run = under_way(bed)
    server = bed.processes.pop("server")
    out = subprocess.run(
        ["pgrep", "-f", "--", f"-m {bed.root / 'kits' / 'server'} "], capture_output=True, check=False
    )
    for pid in out.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    server.kill()
    server.wait()
    told(process)
    bed.start("server")
    bed.wait_for(lambda: not bed.job_processes("S0") and not bed.job_processes("S1"), 120)
    goes_on(bed, run)


def test_a_full_disk(bed):
    bed.stop("S1")
    bed.start("S1", file_limit=400_000)
    all_connected(bed)
    bed.sign("proxyfl", *SETTINGS)
    process = bed.submitting("--plan", plan_file(bed))
    assert "S1" in told(process)
    logs = [
        *(bed.root / "S1" / "runs").rglob("*.log"),
        *(bed.root / "S1" / "runs").rglob("log.txt"),
    ]
    said = "".join(path.read_text() for path in logs)
    assert "disk is full" in said and "`wsi-fl federation submit --resume last`" in said
    bed.stop("S1")
    bed.start("S1")
    all_connected(bed)
    bed.sign("proxyfl", *SETTINGS)
    said = bed.submit("--plan", plan_file(bed))
    assert said.returncode == 0, said.stderr
    for name in ("S0", "S1"):
        assert digests(bed.root / name / json.loads(said.stdout)["run"], name) == bed.expected[name]


def test_another_plan_version_or_none(bed):
    bed.sign("proxyfl", *SETTINGS)
    bed.sign("proxyfl", "train.rounds=3", by=["S1"])
    line = told(bed.submitting("--plan", plan_file(bed)))
    assert "site S1 signed plan" in line
    bed.sign("proxyfl", *SETTINGS)
    text = (bed.root / "S0" / "federation" / "plan.json").read_text()
    (bed.root / "S1" / "federation" / "plan.json").write_text(text.replace('"small"', '"smell"'))
    assert "site S1 has signed another plan" in told(bed.submitting("--plan", plan_file(bed)))
    bed.sign("proxyfl", *SETTINGS)


def test_kits_that_do_not_fit(bed, tmp_path):
    provision(tmp_path / "other", federation="trial", server=bed.kit("S0").document["server"], sites=["S9"])
    began = time.monotonic()
    command = ["start", str(tmp_path / "other" / "S9"), "--study", str(bed.root / "S0")]
    said = bed.command(*command)
    assert time.monotonic() - began < 45
    assert said.returncode == 1
    print(said.stderr)
    assert "certificate" in said.stderr
    kit = bed.root / "kits" / "S1" / "federation.json"
    before = kit.read_text()
    kit.write_text(before.replace('"S1"', '"S0"'))
    said = bed.command("start", str(kit.parent), "--study", str(bed.root / "S0"))
    kit.write_text(before)
    assert "its certificate belongs to S1" in said.stderr
