"""Hospitals as processes over a folder transport: one process imports PyTorch and forks one for each hospital.

`python tests/folder_hospitals.py JOBS` takes a JSON list of groups. A group is a list of hospitals that work at the
same time: {"study", "kit", "kill": {"where", "round"}, "gone", "without", "calls", "until", "leaving_s", "end_s",
"lies", "after", "back_s", "begins_s", "slow_s", "approves"}. Who was killed is started again, as cron would, unless
it is gone for good. A group may also be {"jobs": the hospitals, "faults": {"seed", "seconds", "share"}}: then they
suffer by dice, as `strike` says, and cron calls everybody until all have a summary.
"""

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import sklearn.linear_model  # noqa: F401
import sklearn.model_selection  # noqa: F401

from wsi_fl.federation import loop
from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, plan_path, record_approval
from wsi_fl.hospitals.transports import secure_comm
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.work import start as starting
from wsi_fl.oneshot import secure_aggregation
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.stages.training import ranks
from wsi_fl.study.folder import Study

FAULTS = ("kill", "kill", "stop", "cut", "full", "clock", "code", "ended")


def be(job, killed):
    """Act as a hospital: take part, and leave the result in its study."""
    study = Path(job["study"])
    os.environ["XDG_STATE_HOME"] = str(study / "state")
    log = os.open(study / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _suffer(study)
    if job.get("kill") is not None and not killed:
        _die_in(job["kill"])
    time.sleep(job.get("back_s", 0) if killed else job.get("begins_s", 0))
    if job.get("slow_s"):
        _take_your_time(job["slow_s"])
    if job.get("lies"):
        _lie(job["lies"])
    if job.get("approves"):
        record_approval(
            Study(study), FederationPlan.load(plan_path(Study(study))), Kit.open(Path(job["kit"])).load_identity()
        )
    if job.get("after"):  # cron starts a hospital that another one waits for
        share = Path(Kit.open(Path(job["kit"])).folder)
        deadline = time.monotonic() + 120
        while not any(share.rglob(f"{job['after']}~hello~*.letter")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job['after']} never said hello")
            time.sleep(0.02)
    secure_comm._FAREWELL_S = job.get("end_s", secure_comm._FAREWELL_S)
    starting._LEAVING_S = job.get("leaving_s", starting._LEAVING_S)
    try:
        for _ in range(job.get("calls", 1)):
            found = starting.take_part_by_folder(
                Study(study), Kit.open(Path(job["kit"])), without=job.get("without", ())
            )
        while job.get("until") and not Path(job["until"]).exists():  # cron calls, until somebody has finished
            time.sleep(0.2)
            found = starting.take_part_by_folder(Study(study), Kit.open(Path(job["kit"])))
        document = {"summary": found}
    except Exception as error:
        traceback.print_exc()
        document = {"error": f"{type(error).__name__}: {error}"}
    (study / "result.json").write_text(json.dumps(document))


def _suffer(study):
    """Apply the clock, code and disk faults in files of the study; the clock may jump later, too."""
    real = time.time

    def ahead_s():
        with suppress(OSError, ValueError):
            return float((study / "clock").read_text())
        return 0.0

    class Clock(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.fromtimestamp(time.time(), zone)

    time.time = lambda: real() + ahead_s()
    certificates.datetime = Clock
    if (study / "code").exists():
        installed_code.code_digest = lambda _: "0" * 64
    if (study / "full").exists():
        limit_files([os.getpid()], int((study / "full").read_text()))


def limit_files(pids, n_bytes):
    """Limit the length of files that processes write, as on a full disk; -1 lifts the limit."""
    for pid in pids:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (n_bytes, most))


def _take_your_time(seconds):
    train = loop._train_round

    def slowly(*args, **kwargs):
        time.sleep(seconds)
        return train(*args, **kwargs)

    loop._train_round = slowly


def _lie(how):
    """Act as a hostile hospital: spoil sums, or claim that it never had one and begin again."""
    masked = secure_aggregation.mask_values
    if how == "spoils":
        secure_aggregation.mask_values = lambda values, *args: masked(values, *args) ^ np.uint64(0x5A5A5A5A5A5A5A5A)
    secure_aggregation._is_done = lambda *_: False
    starting.find_summary = lambda *_, **__: None
    PrivacyLedger.fits_budget = lambda *_: True
    secure_aggregation._find_refusal = lambda *_: ""
    PrivacyLedger._check_budget = lambda *_: None


def _die_in(kill):
    """Kill the process before a function of the loop in a round, or the rank or the sums in round none."""
    module = loop if kill["round"] else next(m for m in (ranks, secure_aggregation) if hasattr(m, kill["where"]))
    real = getattr(module, kill["where"])

    def deadly(*args, **kwargs):
        if not kill["round"] or kill["round"] in (*args, *kwargs.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, kill["where"], deadly)


def start(job, killed=False):
    pid = os.fork()
    if pid == 0:
        try:
            be(job, killed)
        finally:
            os._exit(0)
    return pid


def torture(jobs, seed, seconds, share):
    """Apply random faults to hospitals for some seconds; return the faults."""
    dice, share = random.Random(seed), Path(share)
    alive, faults, due = {}, [], dict.fromkeys(range(len(jobs)), 0.0)
    mended = {}  # fault and hospital → when it is over, and what mends it
    ends, strikes = time.monotonic() + seconds, time.monotonic() + 5
    while alive or due:
        time.sleep(0.1)
        now = time.monotonic()
        for k in [k for k, at in due.items() if at <= now]:
            del due[k]
            alive[start(jobs[k], killed=True)] = k
        for fault in [fault for fault, (at, _) in mended.items() if at <= now]:
            mended.pop(fault)[1]()
        while alive and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            k = alive.pop(ended[0])
            if os.WIFSIGNALED(ended[1]):
                due[k] = now + dice.choice((0.5, 3.0, 25.0))
            elif not all("summary" in _result(job) for job in jobs):
                due[k] = now + 1.0
        if now < strikes or now > ends or not alive:
            continue
        strikes = now + dice.uniform(1, 6)
        fault, pid = dice.choice(FAULTS), dice.choice(list(alive))
        struck = fault, None if fault == "cut" else alive[pid]
        if struck not in mended:
            mend = strike(fault, pid, jobs[alive[pid]], dice, share, alive)
            if mend is not None:
                mended[struck] = now + dice.uniform(1, 20), mend
            faults.append(fault)
    return faults


def strike(fault, pid, job, dice, share, alive):
    """Apply one fault to a hospital or the share; return its repair, or None where cron repairs it.

    Its process is killed or stopped; its disk is full; its clock is wrong by hours or days, at once or after a reboot;
    it comes back with other code, or with a certificate that has ended; or the share is away.
    """
    study, startup, k, mend = Path(job["study"]), Path(job["kit"]) / "startup", alive[pid], None
    if fault == "stop":
        os.kill(pid, signal.SIGSTOP)
        return partial(_wake, pid)
    if fault == "cut":
        share.rename(share.with_name("away"))
        return partial(share.with_name("away").rename, share)
    if fault == "full":
        n_bytes = dice.choice((0, 500, 20_000))
        (study / fault).write_text(str(n_bytes))
        limit_files([pid], n_bytes)

        def mend():
            (study / fault).unlink()
            limit_files([one for one in alive if alive[one] == k], -1)

        return mend
    if fault == "ended":
        good = (startup / "client.crt").read_text()
        (startup / "client.crt").write_text((startup / "ended.crt").read_text())
        mend = partial((startup / "client.crt").write_text, good)
    elif fault in ("clock", "code"):
        (study / fault).write_text(str(dice.choice((-1, 1)) * dice.uniform(1, 80) * 3600))
        mend = (study / fault).unlink
        if fault == "clock" and dice.random() < 0.5:
            return mend
    os.kill(pid, signal.SIGKILL)
    return mend


def _wake(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _result(job):
    path = Path(job["study"]) / "result.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main(groups):
    for jobs in groups:
        if isinstance(jobs, dict):
            for job in jobs["jobs"]:
                (Path(job["study"]) / "result.json").unlink(missing_ok=True)
            print(json.dumps(torture(jobs["jobs"], **jobs["faults"])))
            continue
        alive = {start(job): job for job in jobs}
        while alive:
            pid, status = os.wait()
            job = alive.pop(pid)
            if os.WIFSIGNALED(status):
                (Path(job["study"]) / "killed").touch()
                if not job.get("gone"):
                    alive[start(job, killed=True)] = job


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
