"""Faults between hospitals over NVIDIA FLARE, the messages about them, and the resumption of runs."""

import json
import signal
import time
from pathlib import Path

import pytest
from federation_fixtures import needs_flare
from hospitals import Bed, digests

from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.privacy.ledger_file import LedgerFile

pytestmark = [pytest.mark.slow, needs_flare]
ROUNDS = 40
SETTINGS = (f"train.rounds={ROUNDS}", "comm.timeout_s=20", "train.batch_size=4")
RUNS = iter(range(1, 100))


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    bed = Bed(tmp_path_factory.mktemp("bed"), 2)
    bed.sign("proxyfl", *SETTINGS)
    run = bed.simulated / bed.locally("proxyfl", *SETTINGS)["run"]
    bed.expected = {site: digests(run, site) for site in bed.sites}
    with bed.running():
        yield bed


def error_line(process):
    """The one line of a submission that failed."""
    out, err = process.communicate(timeout=240)
    assert process.returncode, out
    lines = [line for line in err.splitlines() if line.startswith("wsi-fl: error:")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def all_connected(bed):
    def connected():
        said = bed.command("status", "--kit", bed.root / "kits" / "coordinator", "--json").stdout
        return json.loads(said or "{}").get("connected") == bed.sites

    bed.wait_for(connected, 120)


def require_expected(bed, run):
    for site in bed.sites:
        assert digests(bed.root / site / "runs" / run, site) == bed.expected[site]


def require_resumption(bed, run):
    """Check that --resume finishes the run with the models of an undisturbed one, and every round on record."""
    all_connected(bed)
    said = bed.submit("--plan", bed.plan_file(), "--resume", "last")
    assert said.returncode == 0, said.stderr
    require_expected(bed, run)
    for site in bed.sites:
        book = LedgerFile(bed.study(site).ledger_path(site))
        identity = json.loads((bed.root / site / "runs" / run / "manifest.json").read_text())["id"]
        rounds = {e.round for e in book.entries if e.mechanism and e.run_id == identity}
        assert rounds == set(range(1, ROUNDS + 1))


def start_run(bed, least=2):
    """A submission, and its run, after a few rounds."""
    bed.sign("proxyfl", *SETTINGS)  # each approval is good for one run
    run = f"{next(RUNS):05d}-proxyfl-small"
    process = bed.submitting("--plan", bed.plan_file())
    bed.wait_for(lambda: bed.rounds("S0", run) >= least or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()
    return process, run


@pytest.mark.parametrize("who", ["job", "client", "server"])
def test_a_run_resumes_after_a_killed_process(bed, who):
    process, run = start_run(bed)
    name = "server" if who == "server" else "S1"
    if who == "job":
        bed.kill_job("S1")
    else:
        bed.kill(name)
    line = error_line(process)
    if who != "job":
        bed.start(name)
    assert name == "server" or "S1" in line
    bed.wait_for(lambda: not any(map(bed.job_processes, bed.sites)), 120)
    require_resumption(bed, run)


def test_a_stopped_client_is_awaited(bed):
    process, run = start_run(bed)
    bed.kill_job("S1", signal.SIGSTOP)
    time.sleep(8)
    bed.kill_job("S1", signal.SIGCONT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    require_expected(bed, run)


def test_a_run_resumes_after_a_full_disk(bed):
    bed.stop("S1")
    bed.start("S1", file_limit=400_000)
    all_connected(bed)
    bed.sign("proxyfl", *SETTINGS)
    process = bed.submitting("--plan", bed.plan_file())
    assert "S1" in error_line(process)
    logs = [*(bed.root / "S1" / "runs").rglob("*.log"), *(bed.root / "S1" / "runs").rglob("log.txt")]
    said = "".join(path.read_text() for path in logs)
    assert "disk is full" in said and "`wsi-fl federation submit --resume last`" in said
    bed.stop("S1")
    bed.start("S1")
    all_connected(bed)
    bed.sign("proxyfl", *SETTINGS)
    said = bed.submit("--plan", bed.plan_file())
    assert said.returncode == 0, said.stderr
    require_expected(bed, json.loads(said.stdout)["run"].removeprefix("runs/"))


def test_a_site_with_another_plan_or_version_or_none_is_refused(bed):
    bed.sign("proxyfl", *SETTINGS)
    bed.sign("proxyfl", "train.rounds=3", by=["S1"])
    line = error_line(bed.submitting("--plan", bed.plan_file()))
    assert "site S1 signed plan" in line
    bed.sign("proxyfl", *SETTINGS)
    text = Path(bed.plan_file()).read_text()
    (bed.root / "S1" / "federation" / "plan.json").write_text(text.replace('"small"', '"smell"'))
    assert "site S1 has signed another plan" in error_line(bed.submitting("--plan", bed.plan_file()))
    bed.sign("proxyfl", *SETTINGS)


def test_startup_kits_that_do_not_match_are_refused(bed, tmp_path):
    provision_federation(tmp_path / "other", federation="trial", server=bed.kit("S0").document["server"], sites=["S9"])
    began = time.monotonic()
    said = bed.command("start", tmp_path / "other" / "S9", "--study", bed.root / "S0")
    assert time.monotonic() - began < 45
    assert said.returncode == 1 and "certificate" in said.stderr
    kit = bed.root / "kits" / "S1" / "federation.json"
    before = kit.read_text()
    kit.write_text(before.replace('"S1"', '"S0"'))
    said = bed.command("start", str(kit.parent), "--study", str(bed.root / "S0"))
    kit.write_text(before)
    assert "its certificate belongs to S1" in said.stderr
