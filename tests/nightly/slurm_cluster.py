"""A real Slurm of one node on this machine, without systemd: slurmctld and slurmd as Debian packages them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from wsi_fl.hospitals.demo import find_free_port

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "squeue")
"""What `apt-get install slurm-wlm munge libpmix-dev` brings."""
_FINISH_S, _END_S = 600.0, 30.0

_CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
KillWait=3
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_command() -> str | None:
    """Return why no Slurm can be started here; None where one can."""
    if os.geteuid() != 0:
        return "Slurm of a test runs as root"
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        return f"{missing[0]} is missing; apt-get install slurm-wlm munge libpmix-dev"
    return None


@contextmanager
def run_cluster(folder: Path, cpus: int = 8) -> Iterator[Mapping[str, str]]:
    """Yield the environment of a cluster that pretends so many CPUs, and end its daemons.

    `folder` must have a short path, as sockets need.
    """
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munged = [
        f"--{name}={folder}/munge/{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "log-file")
    ]
    subprocess.run(["munged", *munged, f"--seed-file={folder}/munge/seed", "--force"], check=True)
    conf = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    ports = {"controller_port": find_free_port(), "node_port": find_free_port()}
    conf.write_text(_CONF.format(host=host, folder=folder, cpus=cpus, **ports))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    try:
        subprocess.run(["slurmctld", "-i"], env=environment, check=True)
        subprocess.run(["slurmd"], env=environment, check=True)
        yield environment
    finally:
        for pid_file in (folder / "slurmd.pid", folder / "slurmctld.pid", folder / "munge" / "pid"):
            _end_daemon(pid_file)


def _end_daemon(pid_file: Path) -> None:
    """End the process of a PID file and wait until it is gone."""
    if not pid_file.exists():
        return
    pid, end = int(pid_file.read_text()), time.monotonic() + _END_S
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.1)


def submit(environment: Mapping[str, str], *arguments: str, folder: Path) -> str:
    """Submit a batch script and return the number of its job."""
    answer = subprocess.run(
        ["sbatch", "--parsable", *arguments], env=environment, cwd=folder, check=True, capture_output=True, text=True
    )
    return answer.stdout.strip()


def wait_for_jobs(environment: Mapping[str, str]) -> None:
    """Return when the queue is empty."""
    end = time.monotonic() + _FINISH_S
    while subprocess.run(["squeue", "-h"], env=environment, check=True, capture_output=True).stdout.strip():
        assert time.monotonic() < end, "jobs do not end"
        time.sleep(0.5)
