"""Hospitals as processes of their own over a folder: one process that has imported PyTorch, and forks one each.

`python tests/folder_hospitals.py JOBS` takes a JSON list of groups. A group is a list of hospitals that work at the
same time: {"study", "kit", "kill": {"where", "round"}, "gone", "without", "calls", "until", "leaving_s", "end_s",
"lies", "after", "back_s", "begins_s", "slow_s", "approves"}. Who was killed is started again, as cron would, unless
it is gone for good.
"""

import json
import os
import signal
import sys
import time
import traceback
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
        while not any(share.rglob(f"{job['after']}~hello~*.letter")):
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
    starting.finished_summary = lambda *_: None
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


def main(groups):
    for jobs in groups:
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
