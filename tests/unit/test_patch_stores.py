"""Patch stores return exactly the written patches, and damaged stores are refused."""

import hashlib
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import conftest
import h5py
import numpy as np
import pytest
from conftest import nightly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsi_fl.stages.site import site_data
from wsi_fl.stores import fields
from wsi_fl.stores import patch_shards as shards
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patch_shards import ShardMeta, pack_store, write_columns, write_shard, write_streams
from wsi_fl.stores.patch_store import PatchStore, SlideSource
from wsi_fl.system import jpeg
from wsi_fl.types import CLASSES, GridSpec, PatchTable, WsiFlError

refused = partial(conftest.refused, error=WsiFlError)
FIXTURES = Path(__file__).parents[1] / "fixtures"
SPEC = GridSpec(8, 0.5, 4)
META = StoreMeta("C1", CLASSES, SPEC)
SHARD = ShardMeta("a", "p", "train", SPEC, "hash")
NAMES = ("plain", "two words", "Gewebe ü 组织", "🔬 slide", "per%cent #1", "dots.in.name")


def table_of(slide: str, n: int, seed: int = 0) -> PatchTable:
    rng = np.random.default_rng(seed)
    return PatchTable(
        rng.integers(0, 1 << 40, (n, 2)),
        rng.integers(0, 2, n),
        rng.random(n).astype(np.float32),
        np.full(n, slide),
        np.full(n, f"patient of {slide}"),
        np.full(n, "train"),
    )


def pixels_of(n: int, seed: int = 0, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n, size, size, 3), np.uint8)


def streams_of(n: int, seed: int = 0) -> list[bytes]:
    return [jpeg.encode(patch, 90) for patch in pixels_of(n, seed)]


def add_shard(folder: Path, slide: str, n: int, seed: int = 0, *, streams: bool = False) -> Path:
    table, shard = table_of(slide, n, seed), folder / "slides" / f"{slide}.h5"
    meta = ShardMeta(slide, f"patient of {slide}", "train", SPEC, "")
    if streams:
        write_streams(shard, replace(meta, content="native"), table, iter(streams_of(n, seed)))
    else:
        write_shard(shard, meta, table, iter([pixels_of(n, seed)]))
    return shard


def make_store(folder: Path, counts: dict[str, int], *, streams: bool = False) -> tuple[Path, np.ndarray]:
    """Write a store, of JPEG streams or not, and return the pixels of all its rows."""
    shards = [add_shard(folder, slide, n, seed, streams=streams) for seed, (slide, n) in enumerate(counts.items())]
    path = folder / "patches.h5"
    write_columns(path, META, shards)
    pixels = [pixels_of(n, seed) for seed, n in enumerate(counts.values())]
    if streams:
        pixels = [[jpeg.decode(stream) for stream in streams_of(n, seed)] for seed, n in enumerate(counts.values())]
    return path, np.concatenate(pixels)


def read(path: Path, rows, *how) -> np.ndarray:
    with PatchStore(path, *how) as store:
        return store.read(np.array(rows, np.int64))


@pytest.fixture(scope="module")
def odd_names(tmp_path_factory):
    """Return a linked and a packed store of slides with odd names, and their pixels."""
    folder = tmp_path_factory.mktemp("odd")
    path, pixels = make_store(folder, {name: k + 1 for k, name in enumerate(NAMES)})
    pack_store(path, folder / "elsewhere" / "packed.h5")
    return path, folder / "elsewhere" / "packed.h5", pixels


def test_linked_and_packed_stores_give_back_what_was_written(odd_names):
    linked, packed, pixels = odd_names
    parts = [table_of(name, k + 1, k) for k, name in enumerate(NAMES)]
    for path in (linked, packed):
        with PatchStore(path) as store:
            assert (store.meta, tuple(store.slides), len(store)) == (META, NAMES, 21)
            for name in ("xy_l0", "label", "tumor_fraction", "slide", "patient", "split"):
                found = getattr(store.table, name)
                wanted = np.concatenate([getattr(part, name) for part in parts])
                np.testing.assert_array_equal(found, wanted)
                assert found.dtype.kind == wanted.dtype.kind
            np.testing.assert_array_equal(store.read(np.arange(21)), pixels)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, 20), max_size=30), packed=st.booleans())
def test_rows_come_in_the_requested_order_with_repeats(odd_names, rows, packed):
    found = read(odd_names[int(packed)], rows)
    assert found.dtype == np.uint8 and found.shape == (len(rows), 8, 8, 3)
    np.testing.assert_array_equal(found, odd_names[2][rows])


def test_a_missing_shard_raises_and_is_not_taken_from_the_current_folder(tmp_path, monkeypatch):
    """HDF5 looks there when a link's target is missing: it would read another hospital's slide."""
    path, pixels = make_store(tmp_path / "C1", {"a": 3, "b": 2})
    make_store(tmp_path / "C2", {"a": 3})
    (tmp_path / "C1" / "slides" / "a.h5").unlink()
    monkeypatch.chdir(tmp_path / "C2")
    with PatchStore(path) as store:
        np.testing.assert_array_equal(store.read(np.array([3, 4])), pixels[3:])
        words = ("patches.h5", "the shard of slide a is missing; ", "wsi-fl tile")
        refused(lambda: store.read(np.array([4, 0])), *words)


def test_truncated_shard_raises(tmp_path):
    path, _ = make_store(tmp_path, {"a": 40})
    shard = tmp_path / "slides" / "a.h5"
    whole = shard.read_bytes()
    for kept in (0, len(whole) // 2):
        shard.write_bytes(whole[:kept])
        refused(lambda: read(path, range(40)), "slide a", "damaged")


@pytest.mark.parametrize("change", ["other rows", "other labels", "fewer rows", "other grid"])
def test_shard_written_after_its_columns_is_refused(tmp_path, change):
    """`tile` with other parameters, killed half-way: old columns, new pixels."""
    path, _ = make_store(tmp_path, {"a": 4, "b": 4})
    table = table_of("a", 4, seed=9 if change == "other rows" else 0)
    if change == "other labels":
        table = replace(table, label=1 - table.label)
    table = table.take(np.arange(3 if change == "fewer rows" else 4))
    spec = GridSpec(8, 0.25, 4) if change == "other grid" else SPEC
    meta = ShardMeta("a", "patient of a", "train", spec, "")
    write_shard(tmp_path / "slides" / "a.h5", meta, table, [pixels_of(len(table))])
    read(path, [4])
    refused(lambda: read(path, [0]), "slide a", "other patches", "wsi-fl tile")


def test_a_file_that_is_no_store_of_this_version_is_refused_in_one_line(tmp_path):
    refused(lambda: PatchStore(tmp_path / "patches.h5"), str(tmp_path), "wsi-fl tile")
    path, _ = make_store(tmp_path, {"a": 2})
    for name, value, words in (
        ("version", 2, ("version 2", "reads version 1", "update wsi-fl")),
        ("format", "someone else's store", ("not a wsi-fl patch store", "someone else's")),
    ):
        with h5py.File(path, "a") as file:
            file.attrs[name] = value
        refused(lambda: PatchStore(path), str(path), *words)


def n_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_hundred_slides_are_read_where_the_system_allows_64_open_files(tmp_path):
    path, pixels = make_store(tmp_path, {f"s{k}": 1 for k in range(100)})
    rows = np.random.default_rng(0).permutation(100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = n_open()  # a GPU's driver holds some
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, opened + 48), hard))
        with PatchStore(path) as store:
            assert n_open() < opened + 48
            found = store.read(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(found, pixels[rows])


def interrupt_writing():
    yield pixels_of(2)
    raise KeyboardInterrupt


@pytest.mark.parametrize("had_one", [False, True])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, had_one):
    shard = add_shard(tmp_path, "a", 3) if had_one else tmp_path / "slides" / "a.h5"
    before = shard.read_bytes() if had_one else None
    with pytest.raises(KeyboardInterrupt):
        write_shard(shard, SHARD, table_of("a", 5), interrupt_writing())
    assert [p.name for p in shard.parent.iterdir()] == (["a.h5"] if had_one else [])
    assert not had_one or shard.read_bytes() == before


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([pixels_of(2)], ("got 2 patches", "expected 3")),
        ([pixels_of(2), pixels_of(2)], ("more than the 3",)),
        ([pixels_of(3, size=9)], ("9, 9, 3", "8 px")),
        ([pixels_of(3).astype(np.float32)], ("float32", "uint8")),
    ],
)
def test_pixels_that_do_not_fit_the_columns_are_refused(tmp_path, batches, words):
    refused(lambda: write_shard(tmp_path / "a.h5", SHARD, table_of("a", 3), batches), "a.h5", *words)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from resource import RLIMIT_FSIZE, setrlimit
import numpy as np
sys.path[:0] = {tests!r}
from test_patch_stores import SHARD, table_of
from wsi_fl.stores.patch_shards import write_shard
for path, limit in (({room!r}, 200_000), ({path!r}, {limit})):
    setrlimit(RLIMIT_FSIZE, (limit, 200_000))
    write_shard(Path(path), SHARD, table_of("a", 5), [np.zeros((1, 8, 8, 3), np.uint8)] * 5)
    print("written")
"""


@pytest.mark.parametrize("limit_bytes", [*nightly(500), 6_000])
def test_full_disk_ends_in_one_line_and_keeps_the_old_shard(tmp_path, limit_bytes):
    shard = add_shard(tmp_path, "a", 3)
    before, tests = shard.read_bytes(), [str(p) for p in Path(__file__).parents[:2]]
    code = WRITER.format(tests=tests, room=str(tmp_path / "room.h5"), path=str(shard), limit=limit_bytes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "written\n", "the limit itself leaves room enough"
    assert done.returncode == 1, "HDF5 took the process down"
    error = done.stderr.strip().split("\n")[-1]
    assert error.startswith("wsi_fl.types.DiskFull: ") and "disk is full" in error and str(shard) in error
    assert shard.read_bytes() == before and [p.name for p in shard.parent.iterdir()] == ["a.h5"]


def test_fingerprint_tells_every_parameter_apart(tmp_path):
    table = table_of("a", 3)
    write_shard(tmp_path / "a.h5", SHARD, table, [pixels_of(3)])
    assert shards.explain_stale(tmp_path / "a.h5", SHARD, table_of("a", 3)) is None
    assert shards.explain_stale(tmp_path / "b.h5", SHARD, table) == ""
    grids = [{"spec": GridSpec(*grid)} for grid in ((16, 0.5, 4), (8, 0.25, 4), (8, 0.5, 8))]
    for change in (*grids, {"slide": "b"}, {"patient": "q"}, {"split": "test"}, {"quickhash": ""}):
        meta = replace(SHARD, **change)
        assert shards.explain_stale(tmp_path / "a.h5", meta, table) == "parameters or slide changed", change


def test_same_content_is_the_same_bytes(tmp_path):
    for name in ("first", "second"):
        path, _ = make_store(tmp_path / name, {"a": 3, "🔬 b": 2})
        pack_store(path, tmp_path / name / "packed.h5")
        if name == "first":
            time.sleep(1.05 - time.time() % 1)  # HDF5 can keep times, in seconds
    for file in ("patches.h5", "slides/a.h5", "slides/🔬 b.h5", "packed.h5"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_streams_come_back_decoded_linked_and_packed(tmp_path):
    path, pixels = make_store(tmp_path, {"a": 7, "süd 2": 5}, streams=True)
    pack_store(path, tmp_path / "packed.h5")
    rows = np.random.default_rng(0).integers(0, 12, 50)
    for one in (path, tmp_path / "packed.h5"):
        with PatchStore(one) as store:
            assert store.n_channels == 3
            np.testing.assert_array_equal(store.read(rows), pixels[rows])
            assert b"".join(streams_of(7)) == store.open_shard("a")["bytes"][:].tobytes()
        shutil.rmtree(tmp_path / "slides", ignore_errors=True)  # what is packed needs nothing else


@pytest.mark.parametrize("damage", ["cut", "garbage", "start", "other size"])
def test_a_damaged_stream_raises_and_names_its_row(tmp_path, damage):
    path, pixels = make_store(tmp_path, {"a": 6}, streams=True)
    with h5py.File(tmp_path / "slides" / "a.h5", "a") as file:
        first, end = file["start"][4:6].astype(int)
        if damage == "cut":
            file["bytes"][(first + end) // 2 : end] = 0
        elif damage == "garbage":
            file["bytes"][first:end] = 7
        elif damage == "start":
            file["start"][-1] += 9
        else:
            smaller = np.frombuffer(jpeg.encode(np.zeros((4, 4, 3), np.uint8), 5), np.uint8)
            file["bytes"][first:end] = np.pad(smaller, (0, max(0, end - first - len(smaller))))[: end - first]
    named = ("slide a", "damaged", *(() if damage == "start" else ("patch 4",)))
    refused(lambda: read(path, [0, 5, 4, 1]), *named)
    if damage != "start":
        np.testing.assert_array_equal(read(path, [3]), pixels[3:4])


@pytest.mark.parametrize("kind", ["raw", "native", "none"])
def test_unread_rows_are_omitted_and_recorded(tmp_path, kind):
    table, unread = table_of("a", 5), {1: "cut short", 3: "garbled ü"}
    kept, meta, shard = np.array([0, 2, 4]), replace(SHARD, content=kind), tmp_path / "slides" / "a.h5"
    if kind == "raw":
        write_shard(shard, meta, table, [pixels_of(5)[kept]], unread=unread)
    elif kind == "native":
        write_streams(shard, meta, table, [streams_of(5)[k] for k in kept], unread=unread)
    else:
        source = SlideSource("a", "slides/a.tif", "hash", None, "auto")
        shards.write_positions(shard, meta, table, source, unread=unread)
    assert shards.explain_stale(shard, meta, table) is None
    corners = table.xy_l0[[1, 3]].tolist()
    assert shards.read_shard_content(shard) == (kind, ((*corners[0], "cut short"), (*corners[1], "garbled ü")))
    found = write_columns(tmp_path / "patches.h5", META, [shard])
    np.testing.assert_array_equal(found.xy_l0, table.xy_l0[kept])


@pytest.mark.parametrize("packed", [False, True])
def test_a_store_of_version_1_opens(tmp_path, packed):
    """It changes with the version of the format alone."""
    asked, path = [], FIXTURES / "patches-v1" / "patches.h5"
    if packed:
        pack_store(path, path := tmp_path / "packed.h5")

    def slides(source, xy_l0, spec):
        asked.append((source, spec))
        return np.broadcast_to(xy_l0[:, :1, None, None], (len(xy_l0), 8, 8, 3)).astype(np.uint8)

    ramp = np.arange(8)[:, None] * 9 + 40 * np.arange(3)[:, None, None, None] + np.zeros((8, 1, 3), int)
    with PatchStore(path, slides) as store:
        assert store.slides == ["raw", "native", "lossy", "positions"]
        assert [bool(store.open_shard(name).attrs["lossy"]) for name in ("native", "lossy")] == [False, True]
        assert store.table.xy_l0[:, 0].tolist() == [0, 8, 16, 0, 16, 0, 8, 16, 0, 8, 16]
        pixels = store.read(np.arange(11)).astype(int)
        np.testing.assert_array_equal(pixels[:3], ramp)
        assert np.abs(pixels[3:8] - ramp[[0, 2, 0, 1, 2]]).max() <= 8
        assert pixels[8:, 0, 0, 0].tolist() == [0, 8, 16]
        assert store.read(np.array([10, 8, 10]))[:, 0, 0, 0].tolist() == [16, 0, 16]
    source = SlideSource("positions", "slides/positions.svs", "ab12", None, "auto")
    assert asked == [(source, GridSpec(8, 0.5, 8))] * 2


def test_shards_that_changed_places_are_refused_though_their_columns_are_equal(tmp_path):
    """Training and checks both refuse them; images have such columns, and grids may have."""
    shards, table = [], table_of("a", 4)
    for k, (slide, split) in enumerate((("a", "train"), ("b", "test"))):
        mine = replace(table, slide=np.full(4, slide), patient=np.full(4, slide), split=np.full(4, split))
        shards.append(tmp_path / "slides" / f"{slide}.h5")
        write_shard(shards[-1], ShardMeta(slide, slide, split, SPEC, ""), mine, [pixels_of(4, seed=k)])
    write_columns(tmp_path / "patches.h5", META, shards)
    for source, target in ((shards[0], tmp_path / "x"), (shards[1], shards[0]), (tmp_path / "x", shards[1])):
        source.rename(target)
    for slide in "ab":
        for act in (PatchStore.verify, PatchStore.open_shard):
            with PatchStore(tmp_path / "patches.h5") as store:
                refused(partial(act, store, slide), f"slide {slide}", "other patches", "wsi-fl tile")


@pytest.mark.parametrize("width", [None, 40])
@pytest.mark.parametrize("names", [["組織 ü", "a", "", "a", "a", "🔬"], ["", ""], ["b"], []])
def test_names_that_repeat_take_four_bytes_a_row_and_keep_their_array(names, width, tmp_path):
    with h5py.File(tmp_path / "names.h5", "w") as file:
        file["slide"] = np.array([name.encode() for name in names], h5py.string_dtype("utf-8", width))
        texts, column = fields.read_texts(file, "slide"), fields.read_name_column(file, "slide")
    assert column.expand_names().tolist() == names and column.expand_names().dtype == texts.dtype
    assert column.codes.nbytes == 4 * len(names) and len(column.names) == len({*names})
    again = fields.encode_names(texts)
    assert np.array_equal(again.codes, column.codes) and np.array_equal(again.names, column.names)
    counts = np.arange(len(names))
    assert column.repeat_rows(counts).expand_names().tolist() == np.repeat(texts, counts).tolist()


def test_the_digest_of_a_store_is_that_of_its_whole_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(site_data, "_HASHED_ROWS", 5)
    shards_written = [
        add_shard(tmp_path, name, n, seed) for seed, (name, n) in enumerate((("ü", 7), ("longer name", 9)))
    ]
    write_columns(tmp_path / "patches.h5", META, shards_written)
    with PatchStore(tmp_path / "patches.h5") as store:
        table = store.table
        columns = (table.xy_l0, table.label, table.slide, table.patient, table.split)
        whole = hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns))
        assert site_data.store_digest(store) == whole.hexdigest()


@pytest.mark.parametrize("streams", [False, True])
def test_shards_beyond_the_open_ones_are_checked_once_and_read_without_hdf5(streams, tmp_path, monkeypatch):
    monkeypatch.setattr("wsi_fl.stores.patch_store._MAX_OPEN_SHARDS", 1)
    paths = [add_shard(tmp_path, name, 6, seed, streams=streams) for seed, name in enumerate("abc")]
    write_columns(tmp_path / "patches.h5", META, paths)
    rows = np.random.default_rng(0).integers(0, 18, 60)
    with PatchStore(tmp_path / "patches.h5") as store:
        first = store.read(rows)
        monkeypatch.setattr(PatchStore, "_check_columns", lambda *_: pytest.fail("a shard was opened again"))
        assert np.array_equal(store.read(rows[::-1]), first[::-1])
        whole = store.read(np.arange(6))  # of shard a, which is closed by now
        content = paths[0].read_bytes()
        needle = streams_of(6)[3] if streams else whole[3].tobytes()
        place = content.index(needle) + len(needle) // 2
        paths[0].write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert np.array_equal(store.read(np.array([2])), whole[2:3])
        refused(lambda: store.read(np.array([1, 3])), "patch 3 in the shard of slide a is damaged")
        paths[0].unlink()
        refused(lambda: store.read(np.array([1])), "the shard of slide a")
