"""Hospitals as processes of their own over a folder: one process that has imported PyTorch, and forks one each.

`python tests/folder_hospitals.py JOBS` takes a JSON list of groups. A group is a list of hospitals that work at the
same time: {"study", "kit", "kill": {"where", "round"}, "gone", "without", "calls", "until", "leaving_s", "end_s",
"lies", "after", "back_s", "begins_s", "slow_s", "approves"}. Who was killed is started again, as cron would, unless
it is gone for good. A group may also be {"jobs": the hospitals, "faults": {"seed", "seconds", "share"}}: then somebody
kills them, stops them, and takes the share away, by dice, and cron calls everybody until all have a summary.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import sklearn.linear_model  # noqa: F401
import sklearn.model_selection  # noqa: F401

from wsi_fl.federation import loop, shared
from wsi_fl.hospitals.lines import relayed
from wsi_fl.hospitals.plans.signed import Plan, approve, plan_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.work import start as starting
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.stages.training import ranks
from wsi_fl.study.folder import Study


def be(job, killed):
    """Be a hospital: take part, and leave what came of it in its study."""
    study = Path(job["study"])
    os.environ["XDG_STATE_HOME"] = str(study / "state")
    log = os.open(study / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job.get("kill") is not None and not killed:
        _die_in(job["kill"])
    time.sleep(job.get("back_s", 0) if killed else job.get("begins_s", 0))
    if job.get("slow_s"):
        _take_your_time(job["slow_s"])
    if job.get("lies"):
        _lie(job["lies"])
    if job.get("approves"):
        approve(Study(study), Plan.load(plan_path(Study(study))), Kit.open(Path(job["kit"])).identity())
    if job.get("after"):  # cron starts a hospital that another one waits for
        share = Path(Kit.open(Path(job["kit"])).folder)
        deadline = time.monotonic() + 120
        while not any(share.rglob(f"{job['after']}~hello~*.letter")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job['after']} never said hello")
            time.sleep(0.02)
    relayed._END_S = job.get("end_s", relayed._END_S)
    starting._LEAVING_S = job.get("leaving_s", starting._LEAVING_S)
    try:
        for _ in range(job.get("calls", 1)):
            found = starting.take_part_by_folder(
                Study(study), Kit.open(Path(job["kit"])), without=job.get("without", ())
            )
        while (
            job.get("until") and not Path(job["until"]).exists()
        ):  # cron calls again, until somebody has finished
            time.sleep(0.2)
            found = starting.take_part_by_folder(Study(study), Kit.open(Path(job["kit"])))
        document = {"summary": found}
    except Exception as error:
        traceback.print_exc()
        document = {"error": f"{type(error).__name__}: {error}"}
    (study / "result.json").write_text(json.dumps(document))


def _take_your_time(seconds):
    train = loop._train_round

    def slowly(*args, **kwargs):
        time.sleep(seconds)
        return train(*args, **kwargs)

    loop._train_round = slowly


def _lie(how):
    """Be a hospital that wants others to spend: it spoils sums, or says that it never had one and begins again."""
    masked = shared.masked
    if how == "spoils":
        shared.masked = lambda values, *args: masked(values, *args) ^ np.uint64(0x5A5A5A5A5A5A5A5A)
    shared._is_done = lambda *_: False
    starting.finished_summary = lambda *_, **__: None
    PrivacyLedger.affords = lambda *_: True
    shared._refusal = lambda *_: ""
    PrivacyLedger._check = lambda *_: None


def _die_in(kill):
    """SIGKILL where a function of the loop is about to be called in a round, or of the rank or the sums in none."""
    module = loop if kill["round"] else next(m for m in (ranks, shared) if hasattr(m, kill["where"]))
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
    """Let hospitals suffer for some seconds; return the faults that there were."""
    dice, share = random.Random(seed), Path(share)
    alive, faults, due = {}, [], dict.fromkeys(range(len(jobs)), 0.0)
    mended = {}  # fault → when it is over, and what mends it
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
        fault, pid = dice.choice(("kill", "kill", "stop", "cut")), dice.choice(list(alive))
        if fault == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault == "stop":
            os.kill(pid, signal.SIGSTOP)
            mended[pid] = (now + dice.uniform(1, 20), partial(_wake, pid))
        elif "cut" not in mended:
            share.rename(share.with_name("away"))
            mended["cut"] = (now + dice.uniform(1, 15), partial(share.with_name("away").rename, share))
        faults.append(fault)
    return faults


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
