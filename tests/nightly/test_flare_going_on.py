"""Three hospitals over NVIDIA FLARE: processes are killed and stopped by dice, and nobody resumes anything."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from importlib.util import find_spec

import pytest
from hospitals import Bed, digests

from wsi_fl.hospitals.plans.admitting import make_frame
from wsi_fl.hospitals.plans.frames import write_frame
from wsi_fl.privacy.ledger_file import LedgerFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'"),
]
SECONDS, ROUNDS = float(os.environ.get("WSI_FL_FAULT_SECONDS", "120")), 60
SETTINGS = (f"train.rounds={ROUNDS}", "comm.timeout_s=20", "train.batch_size=4", "train.at_least=2")


class Cron(threading.Thread):
    """Starts again what was killed, as systemd does."""

    def __init__(self, bed):
        super().__init__(daemon=True)
        self.bed, self.over = bed, threading.Event()

    def run(self):
        while not self.over.wait(1.0):
            for name, process in list(self.bed.processes.items()):
                if process.poll() is not None and not self.over.wait(2.0):
                    self.bed.start(name, wait=False)


def pids(text):
    out = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, check=False, text=True)
    return [int(word) for word in out.stdout.split()]


def strike(bed, fault, name):
    """Kill or stop a job, or all of a hospital or of the server; return what mends it."""
    kit = str(bed.root / "kits" / name)
    found = bed.job_processes(name) if fault in ("job", "stop") else pids(f"{kit}( |$)")
    sign = signal.SIGSTOP if fault == "stop" else signal.SIGKILL
    for pid in found:
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            continue
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_over_flare_ends_by_itself_whatever_happens(tmp_path, seed):
    """Where nobody was left out, the models are those of a run that nothing happened to."""
    bed = Bed(tmp_path, 3)
    bed.sign("proxyfl", *SETTINGS)
    dice, suffered = random.Random(seed), []
    with bed.running():
        cron = Cron(bed)
        cron.start()
        process = bed.submitting("--plan", str(bed.root / "S0" / "federation" / "plan.json"))
        ends = time.monotonic() + SECONDS
        time.sleep(30)
        while process.poll() is None and time.monotonic() < ends:
            fault = dice.choice(("job", "job", "stop", "client", "server"))
            name = "server" if fault == "server" else dice.choice(bed.sites)
            found = strike(bed, fault, name)
            suffered.append((fault, name, len(found)))
            time.sleep(dice.uniform(3, 12))
            for pid in found if fault == "stop" else ():
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
            time.sleep(dice.uniform(1, 15))
        print(suffered)
        out, err = process.communicate(timeout=600)
        cron.over.set()
        cron.join()
    assert process.returncode == 0, err
    summary = json.loads(out)
    print(err, {row["site"]: row["attended"] for row in summary["sites"]}, summary["losses"])
    assert len(suffered) >= 4
    assert {row["site"] for row in summary["sites"]} | set(summary["lost"]) == set(bed.sites)
    assert len(summary["sites"]) >= 2
    for row in summary["sites"]:
        book = LedgerFile(bed.study(row["site"]).ledger(row["site"]))
        paid = [entry.round for entry in book.entries if entry.mechanism]
        assert len(paid) == len(set(paid)) == row["rounds"]
    if all(row["attended"] == [[1, ROUNDS]] for row in summary["sites"]) and not summary["lost"]:
        expected, run = bed.locally("proxyfl", *SETTINGS), summary["run"]
        assert all(digests(bed.root / site / run, site) == expected[site] for site in bed.sites)
    assert max(row["attended"][-1][1] for row in summary["sites"]) == ROUNDS


@pytest.mark.parametrize("what", ["frame", "certificate"])
def test_what_is_withdrawn_in_the_middle_ends_it_at_its_hospital_alone(tmp_path, what):
    """Its client stays connected, for a running server reads no list; the coordinator asks it for nothing more."""
    bed = Bed(tmp_path, 3)
    plan = bed.sign("proxyfl", *SETTINGS, by=["S0", "S2"])
    study, identity = bed.study("S1"), bed.kit("S1").identity()
    write_frame(study, make_frame(study, plan, "S1", epsilon=None, until="2099-01-31", runs=1), identity)
    with bed.running():
        process = bed.submitting("--plan", str(bed.root / "S0" / "federation" / "plan.json"))
        bed.wait_for(lambda: bed.rounds("S1", "00001-proxyfl-small") >= 3 or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()
        if what == "frame":
            said = bed.command("withdraw", "--kit", bed.root / "kits" / "S1", "--study", study.root)
        else:
            said = bed.command("revoke", "S1", "--kit", bed.root / "kits")
        assert said.returncode == 0, said.stderr
        out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    print(err)
    assert {"frame": "site S1 withdrew", "certificate": "site S1 has a certificate that was withdrawn"}[
        what
    ] in err
    summary = json.loads(out)
    assert summary["lost"] == ["S1"] and [row["site"] for row in summary["sites"]] == ["S0", "S2"]
    paid = {
        site: [one.round for one in LedgerFile(bed.study(site).ledger(site)).entries if one.mechanism]
        for site in bed.sites
    }
    assert paid["S0"] == paid["S2"] == list(range(1, ROUNDS + 1))
    assert 3 <= len(paid["S1"]) < ROUNDS and paid["S1"] == paid["S0"][: len(paid["S1"])]
