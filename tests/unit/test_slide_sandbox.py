"""A malformed slide ends a child process and never the command; damaged slides give no wrong pixel."""

import io
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from builders import refused
from PIL import Image
from test_tile import generic_study

from wsi_fl.demo import simulated_slides
from wsi_fl.slides.reading import probe
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.tile import tile_slides

OPENSLIDE = """
import sys, openslide
openslide.OpenSlide(sys.argv[1]).read_region((0, 0), 0, (64, 64))
"""


def write_false_tiff(path: Path, *, tile_px=256, n_bytes=None) -> Path:
    """Write a BigTIFF of one tile with a false size or a false number of bytes."""
    picture = io.BytesIO()
    Image.fromarray(np.full((256, 256, 3), 180, np.uint8)).save(picture, "JPEG")
    data = picture.getvalue()
    numbers = [(256, 4, tile_px), (257, 4, tile_px), (259, 3, 7), (262, 3, 6), (277, 3, 3), (284, 3, 1)]
    numbers += [(322, 4, tile_px), (323, 4, tile_px), (324, 16, 16), (325, 16, n_bytes or len(data))]
    entries = [struct.pack("<HHQQ", tag, kind, 1, value) for tag, kind, value in numbers]
    entries.insert(2, struct.pack("<HHQHHHH", 258, 3, 3, 8, 8, 8, 0))
    head = b"II" + struct.pack("<HHHQ", 43, 8, 0, 16 + len(data))
    path.write_bytes(head + data + struct.pack("<Q", len(entries)) + b"".join(entries) + bytes(8))
    return path


@pytest.fixture
def fresh(monkeypatch):
    """A child of the test's own."""
    child = probe._ProbeProcess()
    monkeypatch.setattr(probe, "_CHILD", child)
    monkeypatch.setattr(probe, "_FINE", set())
    yield child
    child.close()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "archive"
    return simulated_slides.simulate_archive(folder, n_sites=1, patients_per_site=1, size_px=512)


@pytest.fixture(scope="module")
def slide(archive):
    return next(archive.rglob("*.tif"))


LIES = {"bytes": {"n_bytes": 1 << 40}, "pixels": {"tile_px": 1 << 20}}


@pytest.mark.parametrize("lie", LIES)
def test_a_tile_of_2_to_the_40_ends_only_the_child_process(tmp_path, fresh, lie):
    path = write_false_tiff(tmp_path / "a.tif", **LIES[lie])
    bare = subprocess.run([sys.executable, "-c", OPENSLIDE, path], capture_output=True, check=False)
    if bare.returncode != -signal.SIGABRT:  # what would become of the command
        pytest.skip("this machine has the memory")
    refused(lambda: check_opens_safely(path), "a.tif", "ended the reader (SIGABRT); the file is damaged")
    check_opens_safely(write_false_tiff(tmp_path / "b.tif"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("signal.alarm(1); time.sleep(60)", "takes more than 60 s; is its disk slow?"),
        ("input(); os.kill(os.getpid(), 9)", "killed twice (SIGKILL); is there too little memory?"),
    ],
)
def test_a_slide_that_hangs_or_kills_the_child_twice_is_excluded(slide, fresh, monkeypatch, code, said):
    command = [sys.executable, "-c", f"import os, signal, time; print('ready', flush=True); {code}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setattr("wsi_fl.slides.reading.probe._start_child", lambda: subprocess.Popen(command, **pipes))
    refused(lambda: check_opens_safely(slide), said)


def test_a_ventana_slide_of_one_row_that_hangs_the_child_is_named(tmp_path, fresh, monkeypatch):
    """The file is never opened here: only its XML matters."""
    for rows, why in ((1, "single row or column of tiles"), (2, "is its disk slow?")):
        path = tmp_path / f"{rows}.bif"
        xml = f'<EncodeInfo><AoiInfo XIMAGESIZE="64" NumRows="{rows}" NumCols="7"/></EncodeInfo>'.encode()
        tag = (700, 1, len(xml), xml, True)
        tifffile.imwrite(path, np.zeros((64, 64, 3), np.uint8), photometric="rgb", extratags=[tag])
        monkeypatch.setattr("wsi_fl.slides.reading.probe._ProbeProcess._send_request", lambda *_: -signal.SIGALRM)
        refused(lambda path=path: check_opens_safely(path), path.name, why)


@pytest.mark.parametrize("seen", [True, False])
def test_a_child_that_was_killed_costs_no_slide(slide, fresh, seen):
    child = fresh._require_ready()
    child.kill()
    if seen:
        child.wait()
    check_opens_safely(slide)


def test_a_slide_that_needs_too_much_memory_is_excluded_by_every_reader(tmp_path, fresh):
    zarr = pytest.importorskip("zarr")
    path, shape = tmp_path / "a.zarr", (3, 40_000, 40_000)
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    group.create_array("0", shape=shape, chunks=shape, dtype="uint8", compressors=None)
    axes = [{"name": "c", "type": "channel"}, *({"name": one, "type": "space"} for one in "yx")]
    scale = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1]}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": [scale]}]}
    chunk = path / "0/c/0/0/0"
    chunk.parent.mkdir(parents=True)
    chunk.touch()
    os.truncate(chunk, 3 * 40_000 * 40_000)
    refused(lambda: check_opens_safely(path), "a.zarr: opening it needs more than 2 GB")


def test_the_child_runs_nothing_of_the_current_folder(slide, tmp_path):
    (tmp_path / "resource.py").write_text("open('ran', 'w')\n")
    code = "import sys, os; from pathlib import Path; from wsi_fl.slides.reading.probe import check_opens_safely\n"
    code += "sys.path.insert(0, os.getcwd()); check_opens_safely(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, slide], cwd=tmp_path, check=True)
    assert not (tmp_path / "ran").exists()


def test_the_child_goes_when_its_parent_is_killed(slide):
    code = "import sys, time; from pathlib import Path; from wsi_fl.slides.reading import probe\n"
    code += "probe.check_opens_safely(Path(sys.argv[1])); print(probe._CHILD._process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, slide], stdout=subprocess.PIPE, text=True) as parent:
        state = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        parent.kill()
    for _ in range(200):
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the child lives on")


def test_tile_excludes_a_slide_with_false_sizes_and_continues(slide, tmp_path):
    good, lie = tmp_path / "good.tif", write_false_tiff(tmp_path / "lie.tif", n_bytes=1 << 40)
    shutil.copy(slide, good)
    rows = [(path.name, path.stem, "G", "normal") for path in (good, lie)]
    study = generic_study(tmp_path / "archive", rows, (good, lie))
    settings = ["tile.size_px=32", "tile.mpp=1.0", "tile.balance=false"]
    row = tile_slides(study, site="G", overrides=settings)["sites"][0]
    (aside,) = row["failed"]
    assert aside["slide"] == "lie" and "SIGABRT" in aside["reason"] and row["patches"] > 0


@pytest.mark.slow
def test_damaged_slides_give_no_wrong_pixel():
    script = Path(__file__).parents[2] / "benchmarks" / "slides_fuzz.py"
    command = [sys.executable, script, "--files", "25", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"WRONG": 0' in done.stdout and '"refused": 0' not in done.stdout
    assert done.stderr.split("\n", 1)[1] == ""  # and nothing but the seed is said


def test_a_named_pipe_is_refused_as_a_slide_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.svs")
    check_opens_safely(tmp_path / "a.svs")
    refused(lambda: Slide(tmp_path / "a.svs"), "a.svs", "neither a file nor a folder")
