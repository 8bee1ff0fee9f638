"""Commands select GPUs and start ranks on them."""

import os
import sys

import pytest
import torch
from conftest import refused

from wsi_fl.cli.options import take_gpus


@pytest.fixture
def started_commands(monkeypatch):
    """Record the command that would replace this process on a machine with two GPUs."""
    commands = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "execvpe", lambda *command: commands.append(command))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["wsi-fl", "features", "--all", "--gpus", "0,3"])
    return commands


def test_a_command_begins_again_with_a_rank_on_each_gpu(started_commands):
    take_gpus("0,3")
    ((file, command, environment),) = started_commands
    assert file == command[0] and command[0].endswith("mpiexec") and command[command.index("-n") + 1] == "2"
    assert command[-7:] == [sys.executable, "-m", "wsi_fl", "features", "--all", "--gpus", "0,3"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,3" and int(environment["OMP_NUM_THREADS"]) >= 1


def test_ranks_and_training_and_one_gpu_start_nothing(started_commands, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    take_gpus(None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    take_gpus("0,1", ranks=False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    take_gpus("1,0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0" and started_commands == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("2,3", "3,2"),  # Slurm without control groups says numbers of the machine
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1b2c", "GPU-1b2c"),  # and names since 25.11
        ("MIG-377e0049-554c-540b-93c6-d0976f8426cb", "MIG-377e0049-554c-540b-93c6-d0976f8426cb"),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"),
        ("", "GPU-8932f937"),
        ("0, 1", "0"),
    ],
)
def test_gpus_are_selected_by_number_or_name_among_those_of_a_job(started_commands, monkeypatch, given, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    take_gpus(wanted, ranks=False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted


@pytest.mark.parametrize(("given", "wanted"), [("2,3", "0,1"), ("2,3", "2,1"), ("GPU-1b2c", "0"), ("NoDevFiles", "0")])
def test_gpus_outside_a_job_are_not_taken(started_commands, monkeypatch, given, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    refused(lambda: take_gpus(wanted), f"--gpus {wanted}: this process was given the GPUs {given}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == given and started_commands == []


@pytest.mark.parametrize("gpus", ["", "a", "GPU-", "GPU-1;2", "gpu-1", "0,", "0,0", "-1", "0;1"])
def test_a_malformed_list_of_gpus_is_refused(started_commands, gpus):
    refused(lambda: take_gpus(gpus), f"--gpus {gpus}: write the numbers of GPUs, such as 0,1,2,3")


@pytest.mark.parametrize(("gpus", "here", "words"), [("0,1,2", 2, "this machine has 2"), ("0", 0, "has none")])
def test_missing_gpus_are_refused(started_commands, monkeypatch, gpus, here, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    refused(lambda: take_gpus(gpus), f"--gpus {gpus}: of these", words)
