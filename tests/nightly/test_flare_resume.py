"""Three hospitals over NVIDIA FLARE suffer random faults and resume without help; and withdrawals during a run."""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from federation_fixtures import needs_flare
from folder_hospitals import limit_files
from hospitals import Bed, charged, digests, send
from proxies import KNOWN, CutLine

import wsi_fl
from wsi_fl.hospitals.demo import find_free_port

pytestmark = [pytest.mark.slow, needs_flare]
SECONDS, ROUNDS = float(os.environ.get("WSI_FL_FAULT_SECONDS", "120")), 60
SEEDS = range(1, 1 + int(os.environ.get("WSI_FL_FAULT_SEEDS", "2")))
SETTINGS = (f"train.rounds={ROUNDS}", "comm.timeout_s=20", "train.batch_size=4", "train.min_sites=2")
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
FAULTS = ("job", "job", "stop", "client", "server", "cut", "full", "ended", "code", *["clock"] * bool(FAKETIME))
"""A clock is wrong by 1 to 80 h where the library of `faketime` is installed."""


class Cron(threading.Thread):
    """Restarts killed processes, as systemd does, in the current environment of their machine."""

    def __init__(self, bed, machines):
        super().__init__(daemon=True)
        self.bed, self.machines, self.over = bed, machines, threading.Event()

    def run(self):
        while not self.over.wait(1.0):
            for name, process in list(self.bed.processes.items()):
                if process.poll() is not None and not self.over.wait(2.0):
                    self.bed.start(name, wait=False, env=self.machines.get(name, {}))


@contextmanager
def inject_fault(bed, fault, name, machine, line, dice):
    """Let a hospital or the server suffer one of `FAULTS` within the context."""
    everything = partial(bed.pids, name)
    if fault in ("job", "client", "server"):
        send(bed.job_processes(name) if fault == "job" else everything(), signal.SIGKILL)
        yield
    elif fault == "stop":
        found = bed.job_processes(name)
        send(found, signal.SIGSTOP)
        yield
        send(found, signal.SIGCONT)
    elif fault == "cut":
        line.break_()
        yield
        line.cut = False
    elif fault == "full":
        limit_files(everything(), dice.choice((0, 500, 20_000)))
        yield
        limit_files(everything(), -1)
    elif fault == "ended":
        startup = bed.root / "kits" / name / "startup"
        good = (startup / "client.crt").read_text()
        (startup / "client.crt").write_text((startup / "ended.crt").read_text())
        send(everything(), signal.SIGKILL)
        yield
        (startup / "client.crt").write_text(good)
    else:
        hours = dice.choice((-1, 1)) * dice.uniform(1, 80)
        wrong = {
            "code": {"PYTHONPATH": str(bed.root / "other")},
            "clock": {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{hours:+.1f}h", "DONT_FAKE_MONOTONIC": "1"},
        }[fault]
        machine |= wrong
        send(everything(), signal.SIGKILL)
        yield
        for key in wrong:
            machine.pop(key)
        send(everything(), signal.SIGKILL)


def paid_by(bed, site):
    """The rounds on a hospital's ledger."""
    return [round_ for round_, _ in charged(bed.study(site), site)]


def other_code(bed):
    """A second installation, one file of which has one more line."""
    package = Path(wsi_fl.__file__).parent
    shutil.copytree(package, bed.root / "other" / "wsi_fl", ignore=shutil.ignore_patterns("__pycache__"))
    with (bed.root / "other" / "wsi_fl" / "types.py").open("a") as file:
        file.write("# another version\n")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_over_flare_ends_by_itself_after_random_faults(tmp_path, monkeypatch, seed):
    """Where no site was left out, the models are those of an undisturbed run."""
    monkeypatch.setenv("NO_PROXY", "")
    port = find_free_port()
    bed = Bed(tmp_path, 3, server=f"{KNOWN}:{port}")
    lines = {name: CutLine(port) for name in (*bed.sites, "coordinator")}
    machines = {name: {"HTTPS_PROXY": lines[name].proxy} for name in bed.sites}
    monkeypatch.setenv("HTTPS_PROXY", lines["coordinator"].proxy)
    other_code(bed)
    bed.write_ended_certificates()
    bed.sign("proxyfl", *SETTINGS)
    dice, suffered = random.Random(seed), []
    with bed.running("server"):
        for site in bed.sites:
            bed.start(site, env=machines[site])
        cron = Cron(bed, machines)
        cron.start()
        process = bed.submitting("--plan", bed.plan_file())
        ends = time.monotonic() + SECONDS
        time.sleep(30)
        while process.poll() is None and time.monotonic() < ends:
            fault = dice.choice(FAULTS)
            name = "server" if fault == "server" else dice.choice(bed.sites)
            with inject_fault(bed, fault, name, machines.get(name), lines.get(name), dice):
                suffered.append((fault, name))
                print(f"{time.strftime('%X')} {fault} at {name}", flush=True)
                time.sleep(dice.uniform(3, 12))
            time.sleep(dice.uniform(1, 12))
        print(f"{len(suffered)} faults: {Counter(fault for fault, _ in suffered)}", flush=True)
        out, err = process.communicate(timeout=900)
        cron.over.set()
        cron.join()
    assert process.returncode == 0, err
    summary = json.loads(out)
    print(err, {row["site"]: row["rounds_completed"] for row in summary["sites"]}, summary["losses"])
    assert len(suffered) >= SECONDS / 30
    assert {row["site"] for row in summary["sites"]} | set(summary["lost"]) == set(bed.sites)
    assert len(summary["sites"]) >= 2
    for row in summary["sites"]:
        paid = paid_by(bed, row["site"])
        assert len(paid) == len(set(paid)) == row["rounds"]
    if all(row["rounds_completed"] == [[1, ROUNDS]] for row in summary["sites"]) and not summary["lost"]:
        here, there = summary["run"], bed.simulated / bed.locally("proxyfl", *SETTINGS)["run"]
        assert all(digests(bed.root / site / here, site) == digests(there, site) for site in bed.sites)
    assert max(row["rounds_completed"][-1][1] for row in summary["sites"]) == ROUNDS


@pytest.mark.parametrize("what", ["frame", "certificate"])
def test_a_withdrawal_during_a_run_ends_it_only_at_its_hospital(tmp_path, what):
    """Its client stays connected, because a running server reads no list; the coordinator gives it no more jobs."""
    bed = Bed(tmp_path, 3)
    plan = bed.sign("proxyfl", *SETTINGS, by=["S0", "S2"])
    bed.preapprove("S1", plan)
    with bed.running():
        process = bed.submitting("--plan", bed.plan_file())
        bed.wait_for(lambda: bed.rounds("S1", "00001-proxyfl-small") >= 3 or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()
        if what == "frame":
            said = bed.command("preapprove", "--revoke", "--kit", bed.root / "kits" / "S1", "--study", bed.root / "S1")
        else:
            said = bed.command("revoke", "S1", "--kit", bed.root / "kits")
        assert said.returncode == 0, said.stderr
        out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    print(err)
    words = {"frame": "site S1 withdrew", "certificate": "site S1 has a certificate that was withdrawn"}
    assert words[what] in err
    summary = json.loads(out)
    assert summary["lost"] == ["S1"] and [row["site"] for row in summary["sites"]] == ["S0", "S2"]
    assert paid_by(bed, "S0") == paid_by(bed, "S2") == list(range(1, ROUNDS + 1))
    some = paid_by(bed, "S1")
    assert 3 <= len(some) < ROUNDS and some == list(range(1, len(some) + 1))
