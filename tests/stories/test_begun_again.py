"""A command that was killed in the middle is begun again by the same words, and leaves nothing half-written."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
from conftest import make_study, refused

from wsi_fl.cli.prepare import pack
from wsi_fl.stages.prepare.partition import partition
from wsi_fl.study.folder import Study

DATA = {"x": np.arange(60 * 64, dtype=np.uint8).reshape(60, 8, 8), "y": np.arange(60) % 2}
KILLED = """
import os, signal, sys
from pathlib import Path
from wsi_fl.stages.prepare import partition as stage
from wsi_fl.study.folder import Study
moment, name = int(sys.argv[3]), sys.argv[4]
real, calls = getattr(stage, name), 0
def killed(*args, **more):
    global calls
    calls += 1
    if calls < moment:
        return real(*args, **more)
    if name != "write_shard":
        os.kill(os.getpid(), signal.SIGKILL)
    def half():
        yield next(args[3])
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args[:3], half(), **more)
setattr(stage, name, killed)
stage.partition(Study(Path(sys.argv[1])), Path(sys.argv[2]), n_sites=3, prefix="Z")
"""


def contents(root):
    """Every file of the study but locks, by name, with its bytes."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "x.npz", **DATA)
    return tmp_path / "x.npz"


def killed(study, data, moment, name):
    (study.root / "sites").mkdir(parents=True, exist_ok=True)
    code = [sys.executable, "-c", KILLED, str(study.root), str(data), str(moment), name]
    assert subprocess.run(code, check=False, timeout=60).returncode == -9


@pytest.mark.parametrize(
    ("moment", "name"),
    [(1, "write_shard"), (2, "link_shards"), (2, "write_text")],
)
def test_partition_that_was_killed_is_made_again_as_if_it_had_not_been(tmp_path, data, moment, name):
    study, other = Study(tmp_path / "a"), Study(tmp_path / "b")
    killed(study, data, moment, name)
    partition(study, data, n_sites=3, prefix="Z")
    partition(other, data, n_sites=3, prefix="Z")
    assert contents(study.root) == contents(other.root)
    refused(lambda: partition(study, data, n_sites=3, prefix="Z"), "exists already")


def test_fewer_sites_leave_nothing_of_a_killed_partition_into_more(tmp_path, data):
    study, other = Study(tmp_path / "a"), Study(tmp_path / "b")
    killed(study, data, 6, "write_shard")
    partition(study, data, n_sites=1, prefix="Z")
    partition(other, data, n_sites=1, prefix="Z")
    assert contents(study.root) == contents(other.root)


def test_what_others_put_into_the_place_of_a_killed_partition_stays(tmp_path, data):
    study = Study(tmp_path / "a")
    killed(study, data, 6, "write_shard")
    (study.root / "sites" / "Z2.toml").write_text('name = "Z2"\nreal = false\n')
    before = contents(study.root)
    refused(lambda: partition(study, data, n_sites=3, prefix="Z"), "sites/Z2.toml", "exists already")
    assert contents(study.root) == before


def test_pack_that_was_killed_leaves_nothing_beside_the_file_once_it_is_called_again(tmp_path):
    study = make_study(tmp_path / "study", 1)
    store = next(study.root.glob("stores/*/patches.h5"))
    out, left = tmp_path / "one.h5", tmp_path / ".one.12345.partial.h5"
    left.write_bytes(b"half")
    others = tmp_path / ".other.12345.partial.h5"
    others.write_bytes(b"half")
    with h5py.File(tmp_path / ".one.54321.partial.h5", "w"):  # of another pack, which is at work
        pack(store, out)
        assert (tmp_path / ".one.54321.partial.h5").exists()
    assert out.exists() and not left.exists() and others.exists()
