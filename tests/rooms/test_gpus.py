"""Which GPUs a command takes, and what it starts on them."""

import os
import sys

import pytest
import torch
from conftest import refused

from wsi_fl.cli.options import take_gpus


@pytest.fixture
def started(monkeypatch):
    """What would be started in the place of this process, on a machine with two GPUs."""
    commands = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "execvpe", lambda *command: commands.append(command))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["wsi-fl", "features", "--all", "--gpus", "0,3"])
    return commands


def test_a_command_begins_again_with_a_rank_on_each_gpu(started):
    take_gpus("0,3")
    ((file, command, environment),) = started
    assert file == command[0] and command[0].endswith("mpiexec") and command[command.index("-n") + 1] == "2"
    assert command[-7:] == [sys.executable, "-m", "wsi_fl", "features", "--all", "--gpus", "0,3"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,3" and int(environment["OMP_NUM_THREADS"]) >= 1


def test_ranks_and_training_and_one_gpu_start_nothing(started, monkeypatch):
    take_gpus(None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    take_gpus("1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    take_gpus("0,1", ranks=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    take_gpus("1,0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0" and started == []


@pytest.mark.parametrize("gpus", ["", "a", "0,", "0,0", "-1", "0;1"])
def test_what_is_no_list_of_gpus_is_refused(started, gpus):
    refused(lambda: take_gpus(gpus), f"--gpus {gpus}: write the numbers of GPUs, such as 0,1,2,3")


@pytest.mark.parametrize(
    ("gpus", "here", "words"), [("0,1,2", 2, "this machine has 2"), ("0", 0, "has none")]
)
def test_gpus_that_are_not_there_are_refused(started, monkeypatch, gpus, here, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    refused(lambda: take_gpus(gpus), f"--gpus {gpus}: of these", words)
