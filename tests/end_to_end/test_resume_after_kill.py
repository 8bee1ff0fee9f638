"""A killed command is repeated with the same arguments, and leaves nothing half-written."""

import os
import signal
from functools import partial
from multiprocessing import get_context

import h5py
import numpy as np
import pytest
from conftest import make_study, refused

from wsi_fl.cli.prepare import pack_file
from wsi_fl.stages.prepare import partition as stage
from wsi_fl.study.folder import Study

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
DATA = {"x": PIXELS, "y": np.arange(60) % 2}


def contents(root):
    """Every file of the study by name, with its bytes."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.fixture
def partition(tmp_path):
    np.savez(tmp_path / "x.npz", **DATA)
    return lambda study, n_sites=3: stage.partition_images(study, tmp_path / "x.npz", n_sites=n_sites, prefix="Z")


@pytest.fixture
def killed(tmp_path, partition):
    """A study whose partition was killed at the n-th call of a function, or half-way through a shard."""
    study = Study(tmp_path / "a")
    (study.root / "sites").mkdir(parents=True)

    def work(moment, name):
        real, calls = getattr(stage, name), []

        def half(written):
            yield next(written)
            os.kill(os.getpid(), signal.SIGKILL)

        def cut(*args, **more):
            calls.append(1)
            if len(calls) < moment:
                return real(*args, **more)
            if name != "write_shard":
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args[:3], half(args[3]), **more)

        setattr(stage, name, cut)
        partition(study)

    def kill(moment, name):
        job = get_context("fork").Process(target=work, args=(moment, name))
        job.start()
        job.join(60)
        assert job.exitcode == -signal.SIGKILL
        return study

    return kill


@pytest.mark.parametrize(
    ("moment", "name", "n_sites"),
    [(1, "write_shard", 3), (2, "link_shards", 3), (2, "write_text", 3), (6, "write_shard", 1)],
)
def test_a_killed_partition_is_made_again_like_an_uninterrupted_one(tmp_path, killed, partition, moment, name, n_sites):
    """Also into fewer sites; no file of the other sites is left."""
    study, other = killed(moment, name), Study(tmp_path / "b")
    partition(study, n_sites)
    partition(other, n_sites)
    assert contents(study.root) == contents(other.root)
    refused(lambda: partition(study, n_sites), "exists already")


def test_foreign_files_in_the_place_of_a_killed_partition_stay(killed, partition):
    study = killed(6, "write_shard")
    (study.root / "sites" / "Z2.toml").write_text('name = "Z2"\nreal = false\n')
    before = contents(study.root)
    refused(partial(partition, study), "sites/Z2.toml", "exists already")
    assert contents(study.root) == before


def test_a_repeated_pack_leaves_nothing_of_the_killed_one_next_to_the_file(tmp_path):
    study = make_study(tmp_path / "study", 1)
    left, others, busy = (tmp_path / f".{name}.partial.h5" for name in ("one.12345", "other.12345", "one.54321"))
    for path in (left, others):
        path.write_bytes(b"half")
    with h5py.File(busy, "w"):  # of another pack, which is at work
        pack_file(study.store_path("S0"), tmp_path / "one.h5")
        assert busy.exists()
    assert (tmp_path / "one.h5").exists() and not left.exists() and others.exists()
