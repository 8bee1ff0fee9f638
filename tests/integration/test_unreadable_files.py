"""Tests that a temporarily unreadable file is reported as in use and not as damaged."""

import errno
import os
import subprocess
import sys
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
from conftest import make_study, refused
from test_duplicate_scans_of_sites import bring, draw_features, features_study
from test_import import labels, of_trident

from wsi_fl.stages.prepare.check_stores import check_sites
from wsi_fl.stages.prepare.import_export import import_features
from wsi_fl.stages.site.site_data import open_bags, open_store
from wsi_fl.stores.images import read_data_set
from wsi_fl.study.folder import Study
from wsi_fl.system.files import FileUnavailable
from wsi_fl.system.tensors import load_tensors
from wsi_fl.types import WsiFlError

IN_USE = "it is in use by another program"
HOLD = "import h5py, sys; f = h5py.File(sys.argv[1], 'a'); print('held', flush=True); sys.stdin.readline(); f.close()"


@contextmanager
def hold_open(path):
    """Keep a file open for writing in another process, as a notebook does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as other:
        other.stdout.readline()
        yield
        other.stdin.close()


@pytest.fixture
def imported_study(tmp_path):
    study = features_study(tmp_path / "study", "A")
    bring(study, "A", tmp_path / "bags", {f"s{k}": (f"p{k}", draw_features(k)) for k in range(4)})
    return study


def test_an_imported_store_that_a_notebook_holds_is_in_use_and_intact_afterwards(imported_study, wsi_fl):
    with hold_open(imported_study.mosaic_path("A")):
        checked = wsi_fl("check", "--site", "A", cwd=imported_study.root)
        trained = wsi_fl("train", "--dry-run", "--set", "privacy.enabled=false", cwd=imported_study.root)
    for ended in (checked, trained):
        assert ended.returncode == 1 and IN_USE in ended.stderr and "close it there (a notebook?)" in ended.stderr
        assert "run `wsi-fl" not in ended.stderr and "damaged;" not in ended.stderr
    assert check_sites(imported_study, site="A")["ok"]


def test_a_shard_that_a_notebook_holds_is_in_use(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    shard = next((study.store_path("S0").parent / "slides").glob("*.h5"))
    with hold_open(shard):
        row = check_sites(study, site="S0")["sites"][0]
        with open_store(study, "S0") as store:
            refused(lambda: store.read(np.arange(len(store))), str(shard), IN_USE, error=FileUnavailable)
    assert row["damaged"] == [] and any(IN_USE in line for line in row["unavailable"])
    assert check_sites(study, site="S0")["ok"]


def test_features_that_a_notebook_holds_are_excluded_as_in_use(tmp_path):
    study = features_study(tmp_path / "study", "S0")
    folder, _ = of_trident(tmp_path / "job")
    table = labels(tmp_path / "t.csv")
    table.write_text(table.read_text().replace("KIRC", "a").replace("KIRP", "b"))
    with hold_open(folder / "b.h5"):
        (row,) = import_features(study, site="S0", form="trident", source=folder, labels=table)["sites"]
    (aside,) = row["failed"]
    assert aside["slide"] == "b" and IN_USE in aside["reason"] and row["bags"] == 3


def test_images_that_a_notebook_holds_are_in_use(tmp_path):
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4) % 2
    with hold_open(tmp_path / "images.h5"):
        refused(lambda: read_data_set(tmp_path / "images.h5"), IN_USE, error=FileUnavailable)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "may not read it; change its permissions"),
        (errno.ESTALE, "network disk has lost it; mount that disk again"),
        (errno.EMFILE, "too many files open; raise the limit"),
        (errno.ENOLCK, "no file locks; set HDF5_USE_FILE_LOCKING=FALSE"),
        (errno.EIO, "its disk fails to read it"),
    ],
)
@pytest.mark.parametrize("by_hdf5", [True, False])
def test_an_operating_system_error_is_not_reported_as_damage_of_a_store(
    imported_study, monkeypatch, number, words, by_hdf5
):
    def fail(*_, **__):
        if by_hdf5:  # in words alone
            raise OSError(f"Can't synchronously read data (errno = {number}, error message = '{os.strerror(number)}')")
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(h5py.File, "__init__", fail)
        with pytest.raises(FileUnavailable, match=words) as error:
            open_bags(imported_study, "A", "mosaics")
        row = check_sites(imported_study, site="A")["sites"][0]
    assert "damaged" not in str(error.value) and "again`" not in str(error.value)
    assert row["damaged"] == [] and words in row["unavailable"][0]


def test_a_model_without_read_permission_is_not_reported_as_damaged(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"")

    def fail(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("wsi_fl.system.tensors.safe_open", fail)
    refused(lambda: load_tensors(tmp_path / "a.safetensors", "model"), "may not read it", error=FileUnavailable)


def test_the_advised_repair_of_a_store_is_the_command_that_made_it(imported_study, tmp_path):
    def advice(error):
        return str(error.value).replace(str(tmp_path), "")

    store = imported_study.mosaic_path("A")
    with h5py.File(store, "a") as file:
        file["label"][0] = 1
    with pytest.raises(WsiFlError, match="damaged") as error:
        open_bags(imported_study, "A", "mosaics")
    assert advice(error).endswith("run `wsi-fl import --site A` again, as before")
    store.write_bytes(b"")
    with pytest.raises(WsiFlError, match="not a readable HDF5 file") as error:
        open_bags(imported_study, "A", "mosaics")
    assert "make it anew with `wsi-fl import` where its features were imported" in advice(error)
    store.unlink()
    with pytest.raises(WsiFlError, match="no store of site A yet") as error:
        open_bags(imported_study, "A", "mosaics")
    assert advice(error).endswith("run `wsi-fl import --site A …`")
    with pytest.raises(WsiFlError, match="no store of site A yet") as error:
        open_store(imported_study, "A")
    assert advice(error).endswith("run `wsi-fl partition DATA …`")


def test_a_missing_mosaic_is_refused_with_the_mosaic_command(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)  # its site has slides
    refused(lambda: open_bags(study, "S0", "mosaics"), "run `wsi-fl mosaic --site S0`", error=WsiFlError)
    bare = Study(study.root)
    (study.root / "sites" / "S0.toml").write_text('name = "S0"\nreal = false\n')
    (bare.mosaic_path("S0").parent / "mosaics").mkdir()
    bare.mosaic_path("S0").write_bytes(b"")
    refused(lambda: open_bags(bare, "S0", "mosaics"), "run `wsi-fl mosaic --site S0` again", error=WsiFlError)
