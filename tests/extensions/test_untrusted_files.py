"""Files from elsewhere read only themselves, take no more memory than they hold, and never cause a wait.

Pipes, sockets, devices and folders in place of others' files are reported in one line, and nobody is accused.
"""

import os
import signal
import socket
import subprocess
import sys
import zipfile
import zlib
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import make_study, refused

from wsi_fl.hospitals.plans.signed_plan import FederationPlan, is_request
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.root_ca import sync_revocation_list
from wsi_fl.hospitals.work import start
from wsi_fl.models.weights import read_weights
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.slides.layouts.common import read_rows
from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.patching.outline_files import read_outlines
from wsi_fl.stages.prepare.check_stores import check_sites
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.stores.images import read_data_set
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import load_run_pipeline
from wsi_fl.system.files import file_lock, read_json, read_lines, remove_abandoned
from wsi_fl.system.tensors import load_tensors, load_weights
from wsi_fl.types import WsiFlError

N, D = 6, 4
BOMB_ROWS = 70_000
"""Of 1024 float32: a quarter of a GB and more, which is not harmless any more."""


def write(path, features=None, **layout):
    """Write a file of TRIDENT's layout with the given features."""
    with h5py.File(path, "w") as file:
        if features is not None or layout:
            file.create_dataset("features", data=features, **layout)
        n = len(file["features"]) if "features" in file else N
        file["coords"] = np.zeros((n, 2), np.int64)
    return path


def link_to_other(path, other):
    with h5py.File(path, "r+") as file:
        file["features"] = h5py.ExternalLink(str(other), "/features")


def soft_through_other(path, other):
    with h5py.File(path, "r+") as file:
        file["x"] = h5py.ExternalLink(str(other), "/")
        file["features"] = h5py.SoftLink("/x/features")


def virtual(path, other):
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout((N, D), np.float32)
        layout[:] = h5py.VirtualSource(str(other), "features", (N, D))
        file.create_virtual_dataset("features", layout)


def stored_outside(path, other):
    with h5py.File(path, "r+") as file:
        file.create_dataset("features", (N, D), np.float32, external=[(str(other), 0, h5py.h5f.UNLIMITED)])


@pytest.mark.parametrize(
    ("reach", "other"),
    [
        (link_to_other, "h5"),
        (link_to_other, "pipe"),
        (soft_through_other, "pipe"),
        (virtual, "h5"),
        (stored_outside, "h5"),
    ],
)
def test_a_file_from_elsewhere_reads_only_itself(tmp_path, reach, other):
    """No other file is even opened: opening a pipe would wait for ever."""
    secret, path, images = tmp_path / "other.h5", write(tmp_path / "a.h5"), tmp_path / "x.h5"
    if other == "h5":
        write(secret, np.full((N, D), 7, np.float32))
    else:
        os.mkfifo(secret)
    reach(path, secret)
    for layout in ("trident", "clam"):
        refused(partial(LAYOUTS[layout].read, path), "a.h5", "'features'", error=WsiFlError)
    with h5py.File(images, "w") as file:
        file["y"] = file["y_train"] = np.zeros(N, np.int64)
    reach(images, secret)
    with h5py.File(images, "r+") as file:
        file.move("features", "x_train")
    refused(partial(read_data_set, images), "x.h5: its 'x", error=WsiFlError)


@pytest.mark.parametrize(("layout", "name"), [("trident", "cluster"), ("stamp", "feats")])
def test_groups_next_to_features_cannot_read_other_files(tmp_path, layout, name):
    secret = write(tmp_path / "other.h5", np.full((N, D), 7, np.float32))
    path = write(tmp_path / "a.h5", np.ones((N, D), np.float32))
    with h5py.File(path, "r+") as file:
        file[name] = h5py.ExternalLink(str(secret), "/features")
    refused(partial(LAYOUTS[layout].read, path), "a.h5", f"'{name}'", error=WsiFlError)


def never_written(path):
    write(path, shape=(BOMB_ROWS, 1024), dtype=np.float32)


def packed_zeros(path):
    write(path, shape=(BOMB_ROWS, 1024), dtype=np.float32, chunks=(BOMB_ROWS // 4, 1024), compression="gzip")
    with h5py.File(path, "r+") as file:
        for first in range(0, BOMB_ROWS, BOMB_ROWS // 4):
            file["features"].id.write_direct_chunk((first, 0), _zeros(BOMB_ROWS // 4 * 4096))


def more_in_a_chunk_than_it_says(path):
    write(path, shape=(N, D), dtype=np.float32, chunks=(N, D), compression="gzip")
    with h5py.File(path, "r+") as file:
        file["features"].id.write_direct_chunk((0, 0), _zeros(BOMB_ROWS * 4096))


def packed_twice(path):
    write(path, shape=(N, D), dtype=np.float32, chunks=(N, D), compression="gzip")
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_chunk((N, D))
    layout.set_deflate(9)
    layout.set_deflate(9)
    with h5py.File(path, "r+") as file:
        del file["features"]
        space = h5py.h5s.create_simple((N, D))
        made = h5py.h5d.create(file.id, b"features", h5py.h5t.NATIVE_FLOAT, space, layout)
        made.write_direct_chunk((0, 0), zlib.compress(_zeros(BOMB_ROWS * 4096)))


@cache
def _zeros(n_bytes):
    """Zeros of the given length, compressed piece by piece."""
    packer, piece = zlib.compressobj(6), bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(n_bytes >> 20)), packer.flush()])


READ = """
import resource, sys
from pathlib import Path
from wsi_fl.stores.foreign_formats import LAYOUTS
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    before = peak()
    try:
        LAYOUTS["trident"].read(Path(path))
    except Exception as error:
        print(peak() - before, type(error).__name__, error)
"""


def test_a_file_that_states_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path):
    """In a separate process: HDF5 takes its memory outside Python."""
    bombs = (never_written, packed_zeros, more_in_a_chunk_than_it_says, packed_twice)
    paths = [tmp_path / f"{bomb.__name__}.h5" for bomb in bombs]
    for bomb, path in zip(bombs, paths, strict=True):
        bomb(path)
    command = [sys.executable, "-c", READ, *map(str, paths)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not told.returncode, told.stderr
    for line, path in zip(told.stdout.splitlines(), paths, strict=True):
        grown_kb, kind, said = line.split(" ", 2)
        assert said.startswith(path.name) and kind in ("WsiFlError", "UsageError") and int(grown_kb) < 100_000


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"chunks": (7, 5), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"chunks": (7, 5), "compression": "lzf"},
        {"chunks": (1000, 512), "maxshape": (None, 512), "compression": "gzip"},
    ],
    ids=str,
)
def test_honest_features_are_read_in_any_layout_of_the_file(tmp_path, layout):
    for kind in (np.float16, np.float64):
        features = np.random.default_rng(0).normal(size=(30, 512)).astype(kind)
        found = LAYOUTS["trident"].read(write(tmp_path / "a.h5", features, **layout)).features
        assert np.array_equal(found, features.astype(np.float32))


def test_an_npz_bomb_of_zeros_is_not_unpacked(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((BOMB_ROWS, 64, 64), np.uint8), y=np.zeros(BOMB_ROWS, np.int64))
    assert path.stat().st_size < 3_000_000
    refused(partial(read_data_set, path), "x.npz", error=WsiFlError)


def test_a_compressed_tensor_is_refused_and_a_plain_one_read(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(torch.ones(N, D), path)
    assert LAYOUTS["clam"].read(path).features.shape == (N, D)
    packed = tmp_path / "b.pt"
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name in plain.namelist():
            file.writestr(name, plain.read(name))
    refused(partial(LAYOUTS["clam"].read, packed), "b.pt", "compressed", error=WsiFlError)


READERS = {
    "trident": LAYOUTS["trident"].read,
    "tensor": LAYOUTS["clam"].read,
    "features": BagStore,
    "patches": PatchStore,
    "JSON": read_json,
    "JSON lines": read_lines,
    "safetensors": partial(load_tensors, kind="model"),
    "weights": partial(load_weights, advice=""),
    "table": partial(read_rows, needed=["slide"]),
    "outlines": read_outlines,
    "pipeline": load_run_pipeline,
    "plan": FederationPlan.load,
    "request": is_request,
    "data set": read_data_set,
    "encoder": read_weights,
    "ledger": LedgerFile,
    "annotations": read_annotations,
}


@contextmanager
def at_most(seconds):
    """End a wait that takes longer."""

    def end(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_named_pipe_is_refused_without_waiting(tmp_path):
    suffixes = {"tensor": ".pt", "encoder": ".pth", "trident": ".h5", "data set": ".npz"}
    for reader, read in READERS.items():
        path = tmp_path / f"{reader}{suffixes.get(reader, '.x')}"
        os.mkfifo(path)
        with at_most(10):
            refused(partial(read, path), str(path), error=WsiFlError)


def test_check_names_a_pipe_among_a_site_s_files_and_continues(tmp_path):
    study = make_study(tmp_path / "study", 1)
    site = study.site_names()[0]
    path = sorted(study.store_path(site).parent.glob("slides/*.h5"))[0]
    path.unlink()
    os.mkfifo(path)
    with at_most(20):
        (row,) = check_sites(study, site=site)["sites"]
    assert len(row["damaged"]) == 1 and f"{path}: is a pipe" in row["damaged"][0] and row["read"] > 1


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


def test_files_of_others_are_checked_before_they_are_opened(special_file):
    kind = "socket" if special_file.is_socket() else "device" if special_file.is_char_device() else "pipe"
    refused(partial(read_json, special_file), f"is a {kind}", "ordinary file", error=WsiFlError)
    for read in (FederationPlan.load, lambda path: file_lock(path, "busy").__enter__()):
        refused(partial(read, special_file), "", error=WsiFlError)


def test_abandoned_pipes_are_skipped(tmp_path):
    os.mkfifo(tmp_path / ".store.1.partial.h5")
    remove_abandoned(tmp_path / "store.h5")
    assert (tmp_path / ".store.1.partial.h5").is_fifo()
