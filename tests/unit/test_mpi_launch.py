"""Ranks start on this machine under mpiexec, srun and resource managers, or fail with the reason."""

import os
import signal
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wsi_fl.federation.comm import load_mpi
from wsi_fl.stages import doctor
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.stages.runtime.rank_job import take_threads
from wsi_fl.stages.training import launch
from wsi_fl.system import machine
from wsi_fl.system.machine import count_ranks, launcher_reason, threads_per_rank
from wsi_fl.types import UsageError, WsiFlError

BOX = "-" * 75
ELSEWHERE = "node17.invalid"
MANAGERS = {
    "Slurm": {
        "SLURM_JOBID": "9",
        "SLURM_JOB_ID": "9",
        "SLURM_NODELIST": ELSEWHERE,
        "SLURM_JOB_NODELIST": ELSEWHERE,
        "SLURM_TASKS_PER_NODE": "2(x2)",
    },
    "PBS": {"PBS_JOBID": "9.head", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "HOSTS"},
    "Cobalt": {"COBALT_JOBID": "9"},
    "LSF": {"LSB_JOBID": "9", "LSB_HOSTS": ELSEWHERE, "LSB_DJOB_HOSTFILE": "HOSTS"},
    "SGE": {"SGE_ROOT": "/opt/sge", "ARC": "lx-amd64", "PE_HOSTFILE": "HOSTS", "JOB_ID": "9"},
    "Hydra": {"HYDRA_BOOTSTRAP": "slurm", "HYDRA_HOST_FILE": "HOSTS", "I_MPI_HYDRA_BOOTSTRAP": "lsf"},
    "Flux": {"FLUX_JOB_ID": "9", "FLUX_URI": "local:///none"},
}


@pytest.fixture
def no_launcher(monkeypatch):
    """Remove launchers and settings of threads from the environment."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS", "SLURM_PTY_PORT")
    for name in (*names, "OMPI_COMM_WORLD_LOCAL_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other_machines(monkeypatch, tmp_path):
    """Put jobs of all resource managers on other machines into the environment."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{ELSEWHERE}\n")
    for name, value in (item for variables in MANAGERS.values() for item in variables.items()):
        monkeypatch.setenv(name, str(hosts) if value == "HOSTS" else value)


@pytest.mark.usefixtures("other_machines")
def test_two_ranks_start_here_within_a_job_on_other_machines_of_any_manager(tmp_path):
    environment = launch.rank_environment(2)
    assert not {ELSEWHERE, str(tmp_path / "hosts")} & set(environment.values())
    assert environment["PATH"] == os.environ["PATH"]
    assert "two ranks communicate" in doctor._check_mpi()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Slurm", f"job 9 of Slurm on {ELSEWHERE}, while this machine is gpu07.clinic"),
        ("PBS", f"job 9.head of PBS on {ELSEWHERE}, while this machine is gpu07.clinic"),
        ("LSF", f"job 9 of LSF on {ELSEWHERE}, while this machine is gpu07.clinic"),
        ("SGE", f"job 9 of Grid Engine on {ELSEWHERE}, while this machine is gpu07.clinic"),
        ("Flux", "job 9 of Flux"),
    ],
)
def test_doctor_tells_the_job_around_it_its_machines_and_the_way_out(monkeypatch, other_machines, name, said):
    for variable in [variable for other in MANAGERS if other != name for variable in MANAGERS[other]]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu07.clinic")
    found = doctor._check_cluster()
    assert found.startswith(f"{said};") and "on this machine alone" in found and "srun --mpi=pmix" in found
    if name == "Slurm":
        for nodes in ("gpu07", "gpu[01-09]"):
            monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
            assert doctor._check_cluster().startswith(f"job 9 of Slurm on {nodes};")


@pytest.mark.usefixtures("other_machines")
def test_variables_of_a_login_node_are_no_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "COBALT_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name)
    assert doctor._check_cluster().startswith("none")
    monkeypatch.setenv("JOB_ID", "9")  # of something else
    for name in ("SGE_ROOT", "PE_HOSTFILE"):
        monkeypatch.delenv(name)
    assert doctor._check_cluster().startswith("none")


def test_a_container_without_proc_is_named_as_the_reason_of_a_silent_launcher(monkeypatch, tmp_path):
    plant_launcher(monkeypatch, tmp_path, "exit 255")
    with pytest.raises(WsiFlError, match=r"it printed nothing$"):
        doctor._check_mpi()
    monkeypatch.setattr(machine, "_PROC", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(WsiFlError, match=r"two ranks do not work together: without /proc .*mount -t proc proc /proc"):
        doctor._check_mpi()
    monkeypatch.setattr(sys, "platform", "darwin")  # never has one
    with pytest.raises(WsiFlError, match=r"it printed nothing$"):
        doctor._check_mpi()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (f"sh: 1: srun: not found\nssh: no host node17\n{BOX}\nA daemon failed\n{BOX}\n", "ssh: no host node17"),
        (f"{BOX}\nToo few\nslots: 2.\n{BOX}\n[vm:1] ERROR in file x.c\n", "Too few slots: 2."),
        (f"Traceback\n  File\nImportError: no libmpi\n{BOX}\nexited on 1\n{BOX}", "ImportError: no libmpi"),
        ("", "it printed nothing"),
        (f"{BOX}\n", "it printed nothing"),
        (f"{BOX}\n{'slot ' * 100}\n{BOX}\n", ("slot " * 40)),
    ],
)
def test_the_failure_reason_is_the_last_line_of_the_launcher_without_borders(said, reason):
    assert launcher_reason(said) == reason


def plant_launcher(monkeypatch, folder, script):
    """Let a shell script be mpiexec."""
    launcher = folder / "mpiexec"
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(stat.S_IRWXU)
    monkeypatch.setattr(launch, "find_mpiexec", lambda: str(launcher))


def run_job(folder):
    launch.run_ranks(["A"], [], log=folder / "log", timeout_s=9, watcher=SilentProgress(), resume="again")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'no such slot' >&2; exit 213", "^no site's process began: no such slot .*exit code 213.*doctor"),
        ("exit 1", "^no site's process began: it printed nothing "),
        ("""echo '{"site": "A", "pid": 1}'; exit 7""", "^a site's process died .*; continue with `again`$"),
    ],
)
def test_resuming_is_advised_only_for_a_job_that_started(monkeypatch, tmp_path, script, said):
    plant_launcher(monkeypatch, tmp_path, script)
    with pytest.raises(WsiFlError, match=said) as caught:
        run_job(tmp_path)
    assert ("again" in str(caught.value)) == ("pid" in script)


@pytest.mark.parametrize("delay_s", [0, 0.3], ids=["while the job starts", "while it runs"])
@pytest.mark.parametrize("sign", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_job_however_early_it_comes(monkeypatch, tmp_path, sign, delay_s):
    plant_launcher(monkeypatch, tmp_path, f"echo $$ > pid; sleep {delay_s}; kill -{sign.value} $PPID; exec sleep 99")
    monkeypatch.chdir(tmp_path)
    previous = signal.signal(sign, signal.default_int_handler)  # also where the tests themselves ignore it
    try:
        with pytest.raises(WsiFlError, match=r"^interrupted; continue with `again`$"):
            run_job(tmp_path)
    finally:
        signal.signal(sign, previous)
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def test_a_closed_terminal_does_not_end_a_job_under_nohup(monkeypatch, tmp_path):
    plant_launcher(monkeypatch, tmp_path, "kill -HUP $PPID; sleep 0.2; exit 1")
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(WsiFlError, match=r"^no site's process began"):
            run_job(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, previous)


class _NoLibrary:
    @property
    def MPI(self):
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (
            SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1))),
            UsageError,
            "MPI sees 1; .*-n 4`",
        ),
        (_NoLibrary(), WsiFlError, "no MPI in this rank .cannot load MPI library"),
        (None, WsiFlError, "no MPI in this rank"),
    ],
)
def test_ranks_without_their_mpi_fail_in_one_line(monkeypatch, module, error, said):
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    with pytest.raises(error, match=said):
        load_mpi(4)


@pytest.mark.usefixtures("no_launcher")
def test_the_terminal_of_srun_is_no_rank(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert count_ranks() == 4
    monkeypatch.setenv("SLURM_PTY_PORT", "40123")
    assert count_ranks() is None
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # one's own mpiexec in that terminal
    assert count_ranks() == 2


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("asked", "ranks", "taken"),
    [
        ({}, None, 3),  # the default of PyTorch
        ({}, 2, 4),
        ({"OMP_NUM_THREADS": "1"}, 2, 1),
        ({"MKL_NUM_THREADS": "3"}, 2, 3),
        ({"OMP_NUM_THREADS": "9,2"}, 4, 2),
    ],
)
def test_a_process_takes_its_threads_and_a_rank_its_share_of_the_cores(monkeypatch, asked, ranks, taken):
    threads = []
    monkeypatch.setattr("torch.get_num_threads", lambda: 1 if ranks else 3)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name in ("SIZE", "LOCAL_SIZE") if ranks else ():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(ranks))
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    launch.share_threads()
    take_threads(threads_per_rank())  # as encoders do
    take_threads(2)
    assert threads == [taken, taken, min(taken, 2)]
