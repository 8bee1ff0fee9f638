"""Copies by C against copies by numpy, and what both refuse."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from wsi_fl.slides.reading import scatter as scatter_module
from wsi_fl.slides.reading.scatter import is_compiled, scatter

WITH_C = pytest.mark.skipif(not is_compiled(), reason="wsi-fl was installed without a C compiler")


@pytest.fixture(params=[pytest.param("c", marks=WITH_C), "numpy"])
def either(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(scatter_module, "_by_c", None)


def part(top, bottom, left, right, row, column):
    return [99, top, bottom, left, right, row, column]


@WITH_C
@pytest.mark.parametrize("seed", range(30))
def test_c_writes_what_numpy_writes_and_nothing_else(seed):
    draw = np.random.default_rng(seed)
    height, width, channels = (*draw.integers(1, 90, 2).tolist(), int(draw.integers(1, 5)))
    tile = draw.integers(0, 256, (height, width, channels), np.uint8)
    parts, mine, theirs = [], [], []
    for _ in range(int(draw.integers(0, 6))):
        n_rows, n_columns = int(draw.integers(0, height + 1)), int(draw.integers(0, width + 1))
        above, before, below, behind = draw.integers(0, 70, 4).tolist()
        top, left = int(draw.integers(height - n_rows + 1)), int(draw.integers(width - n_columns + 1))
        parts.append(part(top, top + n_rows, left, left + n_columns, above, before))
        shape = (above + n_rows + below, before + n_columns + behind, channels)
        room = draw.integers(0, 256, int(np.prod(shape)) + 200, np.uint8)  # begins at no particular address
        mine.append(room)
        theirs.append(room.copy())
        mine[-1], theirs[-1] = (
            (whole, whole[at : at + int(np.prod(shape))].reshape(shape))
            for at in [int(draw.integers(200))]
            for whole in (mine[-1], theirs[-1])
        )
    table = np.array(parts, np.int64).reshape(-1, 7)
    scatter(tile, table, [patch for _, patch in mine])
    scatter_module._by_numpy(tile, table, [patch for _, patch in theirs])
    for (whole, _), (expected, _) in zip(mine, theirs, strict=True):
        assert np.array_equal(whole, expected)


@pytest.mark.parametrize(
    "beyond",
    [
        part(0, 9, 0, 4, 0, 0),
        part(0, 4, 0, 9, 0, 0),
        part(-1, 4, 0, 4, 0, 0),
        part(0, 4, -1, 4, 0, 0),
        part(0, 8, 0, 8, 3, 0),
        part(0, 8, 0, 8, 0, 3),
        part(0, 8, 0, 8, -2, 0),
        part(0, 8, 0, 8, 0, -2),
        part(0, 1, 0, 1, 20, 20),
        part(0, 2, 0, 2, 2**62, 0),
        part(0, 2**63 - 1, 0, 2, 0, 0),
    ],
    ids=str,
)
def test_a_part_beyond_its_tile_or_patch_is_refused(either, beyond):
    tile, patch = np.ones((8, 8, 3), np.uint8), np.zeros((10, 10, 3), np.uint8)
    with pytest.raises(ValueError):
        scatter(tile, np.array([beyond]), [patch])
    assert not patch.any()


@WITH_C
def test_arrays_of_another_kind_are_refused():
    tile, parts, patch = np.ones((8, 8, 3), np.uint8), np.array([part(0, 8, 0, 8, 0, 0)]), np.zeros((9, 9, 3))
    patch = patch.astype(np.uint8)
    for arguments in (
        (tile[0], parts, [patch]),
        (tile.astype(np.int16), parts, [patch]),
        (tile, parts.astype(np.int32), [patch]),
        (tile, parts[:, :6].copy(), [patch]),
        (tile, parts[0], [patch]),
        (tile, parts, []),
        (tile, parts, [patch, patch]),
        (tile, parts, [patch[..., :1].copy()]),
        (tile, parts, [patch[0]]),
        (tile, parts, [patch.astype(np.float32)]),
        (tile[:, ::2], parts, [patch]),  # not contiguous
        (tile, parts, [patch[:, ::2]]),
        (tile, parts, [b"unwritable"]),
        (tile, parts.astype(np.float64), [patch]),
        (tile, parts.view(np.uint64), [patch]),
        (
            tile,
            np.frombuffer(b"." + parts.tobytes(), np.int64, offset=1).reshape(1, 7),
            [patch],
        ),  # not aligned
        (tile, parts, 1),
    ):
        with pytest.raises((ValueError, TypeError, BufferError)):
            scatter(*arguments)
    assert not patch.any()
    frozen = patch.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError):
        scatter(tile, parts, [frozen])


@WITH_C
@pytest.mark.parametrize("given", [["patch", "patch"], ["patch", b"unwritable"], ["patch"]])
def test_memory_is_let_go_of_whether_it_worked_or_not(given):
    tile, patch = (memoryview(bytearray(9 * 9 * 3)).cast("B", (9, 9, 3)) for _ in range(2))
    parts = memoryview(np.array([part(0, 8, 0, 8, 0, 0)] * 2, np.int64))
    try:
        scatter_module._by_c(tile, parts, [patch if one == "patch" else one for one in given])
    except (ValueError, BufferError):
        assert given != ["patch", "patch"]
    for view in (tile, patch, parts):
        view.release()  # raises while it is held


def test_others_run_while_pixels_are_copied(either):
    tile, out = np.ones((4000, 4000, 3), np.uint8), np.zeros((4000, 4000, 3), np.uint8)
    table = np.array([part(0, 4000, 0, 4000, 0, 0)])
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    for _ in range(3):
        before = counted[0]
        scatter(tile, table, [out])
        if counted[0] > before + 5:
            break
    done.set()
    other.join()
    assert counted[0] > before + 5
    assert out.all()
