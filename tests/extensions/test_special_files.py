"""Pipes, sockets, devices and folders in place of others' files: one line, no wait, and nobody is accused."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import refused

from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.root_ca import sync_revocation_list
from wsi_fl.hospitals.work import start
from wsi_fl.system.files import file_lock, remove_abandoned
from wsi_fl.types import WsiFlError


def lay_a_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        listening.bind(path.name)
        os.chdir(here)


def lay_a_link_to_a_pipe(path):
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


ODD = {
    "pipe": os.mkfifo,
    "socket": lay_a_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lay_a_link_to_a_pipe,
}


@pytest.fixture(params=ODD)
def special_file(request, tmp_path):
    """A path of a shared folder with something other than a regular file."""
    ODD[request.param](tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_share_reads_no_special_file(special_file):
    with pytest.raises((WsiFlError, OSError)):  # a socket cannot even be opened
        SharedFolder(str(special_file.parent)).read(100, special_file.name)


def test_a_special_file_in_place_of_a_plan_is_reported_and_skipped(special_file, monkeypatch, capfd):
    monkeypatch.setattr(start, "load_preapproval", lambda *_: {"id": "1"})
    monkeypatch.setattr(start, "admit_plan", lambda *_: pytest.fail("there is no plan"))
    start._admit_shared_plan(None, SimpleNamespace(name="S0"), str(special_file.parent))
    said = capfd.readouterr().err
    assert said.count("\n") <= 1
    if not special_file.is_socket():
        assert "plan.json: is no ordinary file" in said


def test_a_special_file_in_place_of_a_revocation_list_is_reported_in_one_line(special_file):
    special_file.rename(special_file.with_name("withdrawn.pem"))
    kit = SimpleNamespace(update_revocation_list=lambda _: False, load_revocation_list=lambda: SimpleNamespace(text=""))
    assert "\n" not in sync_revocation_list(kit, str(special_file.parent))


@pytest.mark.parametrize("read", [FederationPlan.load, lambda path: file_lock(path, "busy").__enter__()])
def test_files_of_others_are_checked_before_they_are_opened(special_file, read):
    refused(lambda: read(special_file), "", error=WsiFlError)


def test_abandoned_pipes_are_skipped(tmp_path):
    os.mkfifo(tmp_path / ".store.1.partial.h5")
    remove_abandoned(tmp_path / "store.h5")
    assert (tmp_path / ".store.1.partial.h5").is_fifo()
