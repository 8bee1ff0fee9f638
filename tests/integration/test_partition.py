"""Tests of image data sets divided among simulated sites: reading, dividing, storing and training."""

import gzip
import json
from functools import partial

import conftest
import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chisquare

from wsi_fl.stages.prepare.partition import parse_skew, partition_images
from wsi_fl.stores.images import read_data_set
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError, WsiFlError


def pixels(n, side=8, channels=3, seed=0):
    shape = (n, side, side, channels) if channels else (n, side, side)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def npz(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def refused(path, *words, error=UsageError, **options):
    conftest.refused(lambda: read_data_set(path, **options), *words, error=error)


def test_every_form_of_npz_gives_the_same_pixels(tmp_path):
    y = np.array([0, 2, 1, 0, 2], np.uint8)
    for channels in (1, 3):
        x = pixels(5, channels=channels)
        for form in (x, np.moveaxis(x, -1, 1), *([x[..., 0]] if channels == 1 else [])):
            found = read_data_set(npz(tmp_path, x=form, y=y))
            assert found.train.x.dtype == np.uint8 and np.array_equal(found.train.x, x)
            assert found.train.y.dtype == np.int64 and found.train.y.tolist() == [0, 2, 1, 0, 2]
            assert found.test is None and found.classes == ("0", "1", "2")


@pytest.mark.parametrize("names", [str, lambda name: f"{name[2:]}_{'images' if name[0] == 'x' else 'labels'}"])
@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_test_images_come_with_the_data_where_there_are_any(tmp_path, suffix, names):
    """Arrays may have the names of MedMNIST."""
    arrays = {"x_train": pixels(4, channels=0), "y_train": np.zeros((4, 1), int), "notes": np.array([1.0])}
    arrays |= {"x_test": pixels(1, channels=0, seed=1), "y_test": np.array([[3]])}
    named = {name if name == "notes" else names(name): values for name, values in arrays.items()}
    path = npz(tmp_path, **named)
    if suffix == "h5":
        path = tmp_path / "data.h5"
        with h5py.File(path, "w") as file:
            for name, values in named.items():
                file[name] = values
            file.create_group("x_more")
    found = read_data_set(path)
    assert np.array_equal(found.train.x[..., 0], arrays["x_train"])
    assert np.array_equal(found.test.x[..., 0], arrays["x_test"])
    assert found.test.y.tolist() == [3] and found.classes == ("0", "1", "2", "3")


GOOD, LABELS = pixels(3), np.arange(3)
BAD = [
    ({"x": GOOD.astype(np.int32), "y": LABELS}, "x is int32; needs uint8"),
    ({"x": GOOD / 100, "y": LABELS}, "between 0 and 1"),
    ({"x": GOOD[..., :2], "y": LABELS}, "2 channels"),
    ({"x": np.uint8(3), "y": LABELS}, "has shape"),
    ({"x": GOOD[:0], "y": LABELS[:0]}, "no images"),
    ({"x": GOOD, "y": LABELS[:2]}, "each of the 3 images"),
    ({"x": GOOD, "y": LABELS / 2}, "whole number"),
    ({"x": GOOD, "y": LABELS - 1}, "negative"),
    ({"x": GOOD, "y": LABELS + 10**12}, "number the classes from 0"),
    ({"x_train": GOOD, "y_train": LABELS, "x_test": GOOD[..., :1], "y_test": LABELS}, "two shapes, 8×8×1"),
    ({"x_train": GOOD, "y_train": LABELS, "x_test": GOOD}, "has x_test but no y_test"),
    ({"pictures": GOOD, "labels": LABELS}, "has nothing; needs x and y"),
    ({"x": GOOD[:, :5], "y": LABELS}, "8 × 5; make them squares with --size-px"),
    ({"x": GOOD, "y": np.array([0, 1, None])}, "not a readable npz"),
]


def test_a_file_without_labelled_images_is_refused_in_one_line(tmp_path):
    for arrays, message in BAD:
        refused(npz(tmp_path, **arrays), message)
    for name in ("data.npz", "data.h5"):
        for content in (b"", b"PK\x03\x04 torn", b"some text"):
            (tmp_path / name).write_bytes(content)
            refused(tmp_path / name, "not a readable")
    refused(tmp_path / "absent.npz", "no such file")


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress)])
def test_the_files_of_mnist_are_read_from_their_folder(tmp_path, suffix, pack):
    sets = {
        "train": (pixels(5, 28, 0), np.array([3, 1, 0, 2, 1])),
        "t10k": (pixels(2, 28, 0, seed=1), np.array([1, 9])),
    }
    for name, (x, y) in sets.items():
        header = b"".join(n.to_bytes(4, "big") for n in (0x0803, *x.shape))
        (tmp_path / f"{name}-images-idx3-ubyte{suffix}").write_bytes(pack(header + x.tobytes()))
        labels = b"\0\0\x08\x01" + len(y).to_bytes(4, "big") + bytes(y.astype(np.uint8))
        (tmp_path / f"{name}-labels-idx1-ubyte{suffix}").write_bytes(pack(labels))
    found = read_data_set(tmp_path)
    for part, (x, y) in zip((found.train, found.test), sets.values(), strict=True):
        assert np.array_equal(part.x[..., 0], x) and part.y.tolist() == y.tolist()
    assert found.classes == tuple("0123456789")
    last = tmp_path / f"t10k-images-idx3-ubyte{suffix}"
    for content in (header, header + x.tobytes() + b"0", b"\0\0\x0d\x03" + header[4:] + x.tobytes(), b"\0"):
        last.write_bytes(pack(content))
        refused(tmp_path, "MNIST's four files")
    last.unlink()
    refused(tmp_path, "t10k-images-idx3-ubyte is missing")


def test_resizing_averages_areas(tmp_path):
    x = pixels(3)
    found = read_data_set(npz(tmp_path, x=x, y=LABELS), size_px=4)
    wanted = x.astype(float).reshape(3, 4, 2, 4, 2, 3).mean((2, 4))
    assert np.abs(found.train.x - wanted).max() <= 1
    wide = read_data_set(npz(tmp_path, x=x[:, :4], y=LABELS), size_px=4)
    assert np.abs(wide.train.x - x[:, :4].astype(float).reshape(3, 4, 4, 2, 3).mean(3)).max() <= 1
    refused(tmp_path / "data.npz", "--size-px", size_px=0)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def test_folders_are_classes_in_alphabetical_order(tmp_path):
    x = pixels(4)
    for k, name in enumerate(["dog/1.png", "cat/2.png", "dog/0.bmp", "cat/ü 1.PNG"]):
        save(tmp_path / name, x[k])
    (tmp_path / "dog" / "notes.txt").write_text("not a picture")
    (tmp_path / "dog" / "._1.png").write_text("what some systems leave")
    (tmp_path / "empty").mkdir()
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "readme.txt").write_text("no class")
    found = read_data_set(tmp_path)
    assert found.classes == ("cat", "dog") and found.train.y.tolist() == [0, 0, 1, 1]
    assert read_data_set(tmp_path, empty_classes=True).classes == ("cat", "dog", "empty")
    assert np.array_equal(found.train.x, x[[1, 3, 2, 0]]) and found.test is None


def test_images_in_folders_inside_a_class_are_refused_and_hidden_ones_are_left_out(tmp_path):
    for name in ("cat/0", "dog/0", "dog/.ipynb_checkpoints/1"):
        save(tmp_path / f"{name}.png", pixels(1)[0])
    assert len(read_data_set(tmp_path).train) == 2
    save(tmp_path / "mouse/p1/0.png", pixels(1)[0])
    refused(tmp_path, "mouse: p1/0.png lies in a folder of its own")


@pytest.mark.parametrize("suffix", [".jp2", ".webp", ".ppm"])
def test_images_of_further_formats_are_read(tmp_path, suffix):
    x = pixels(2, side=32)
    for name, image in zip(("a/0.png", "a/1"), x, strict=True):
        path = tmp_path / f"{name}{suffix if name == 'a/1' else ''}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path, **{"lossless": True} if suffix == ".webp" else {})
    assert np.array_equal(read_data_set(tmp_path).train.x, x)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_as_where_a_slide_has_no_scan(tmp_path, mode):
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:4] = (90, 90, 90, 255)
    picture = Image.fromarray(rgba)
    if mode == "P":
        picture = picture.convert("RGB").quantize(2)
        picture.info["transparency"] = picture.getpixel((0, 7))
    (tmp_path / "a").mkdir()
    picture.convert(mode).save(tmp_path / "a/0.png")
    (image,) = read_data_set(tmp_path).train.x
    assert (image[:4] == 90).all() and (image[4:] == 255).all()


def test_train_and_test_folders_share_classes_channels_and_size(tmp_path):
    grey = pixels(3, channels=0)
    for name, image in zip(("train/a/0", "train/b/0", "test/b/0"), grey, strict=True):
        save(tmp_path / f"{name}.png", image)
    found = read_data_set(tmp_path)
    assert np.array_equal(found.train.x[..., 0], grey[:2]) and np.array_equal(found.test.x[..., 0], grey[2:])
    assert found.test.y.tolist() == [1]
    save(tmp_path / "test/a/0.png", np.repeat(grey[0][..., None], 3, 2))  # grey, though it is saved as RGB
    assert np.array_equal(read_data_set(tmp_path).train.x[..., 0], grey[:2])
    save(tmp_path / "test/a/0.png", pixels(1)[0])  # one in colour makes all three channels
    assert np.array_equal(read_data_set(tmp_path).train.x, np.repeat(grey[:2, ..., None], 3, 3))
    save(tmp_path / "test/a/1.png", pixels(1, side=9)[0])
    refused(tmp_path, "several sizes", "--size-px")
    assert read_data_set(tmp_path, size_px=4).test.x.shape == (3, 4, 4, 3)
    save(tmp_path / "test/c/0.png", grey[0])
    refused(tmp_path, "test: c is no class of ")


def test_a_broken_image_is_named(tmp_path):
    save(tmp_path / "a/0.png", pixels(1, side=64)[0])
    whole = (tmp_path / "a/0.png").read_bytes()
    for content in (whole[: len(whole) // 2], b"text", b"", whole[:30] + b"xx" + whole[32:]):
        (tmp_path / "a/1.png").write_bytes(content)
        refused(tmp_path, "a/1.png: not a readable image", error=WsiFlError)


def test_sixteen_bit_images_keep_their_greys_and_one_bit_images_are_black_and_white(tmp_path):
    grey = pixels(1, channels=0)[0]
    save(tmp_path / "a/0.png", grey.astype(np.uint16) * 257)
    save(tmp_path / "a/1.png", grey > 127)
    found = read_data_set(tmp_path).train.x
    assert np.array_equal(found[0, ..., 0], grey)
    assert np.array_equal(found[1, ..., 0], np.where(grey > 127, 255, 0))
    save(tmp_path / "a/2.tif", grey.astype(np.float32))
    refused(tmp_path, "8 or 16 bits", error=WsiFlError)


def divide_images(text, y, n_sites, per_site, seed=0):
    return parse_skew(text)(y, n_sites, per_site, np.random.default_rng(seed))


LABEL_LISTS = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(lambda y: np.array(y, np.int64))
SKEWS = st.sampled_from(
    ["iid", "major:0", "major:0.3", "major:1", "random-major:0.3", "random-major:1", "dirichlet:0.3", "dirichlet:9"]
)


@settings(max_examples=100, deadline=None)
@given(SKEWS, LABEL_LISTS, st.integers(1, 6), st.none() | st.integers(1, 30), st.integers(0, 9))
def test_parts_are_disjoint_have_the_given_size_and_repeat_with_the_seed(text, y, n, per_site, seed):
    size = len(y) // n if per_site is None else per_site
    try:
        parts = divide_images(text, y, n, per_site, seed)
    except UsageError as error:
        assert "\n" not in str(error)
        # alike parts fail for want of images alone
        assert text != "iid" or size == 0 or size * n > len(y)
        return
    together = np.concatenate(parts)
    assert len(parts) == n and len(np.unique(together)) == len(together)
    assert together.min() >= 0 and together.max() < len(y)
    assert all(len(part) and (np.diff(part) > 0).all() for part in parts)
    if text.startswith("dirichlet"):
        assert len(together) == len(y) if per_site is None else max(map(len, parts)) <= per_site
    else:
        assert {len(part) for part in parts} == {size}
    if text.startswith("major"):  # exactly, and the classes go round
        classes, most = np.unique(y), round(float(text.split(":")[1]) * size)
        assert all((y[part] == classes[k % len(classes)]).sum() == most for k, part in enumerate(parts))
    if text.startswith("random-major"):  # of some class, exactly
        most = round(float(text.split(":")[1]) * size)
        assert all(most in np.bincount(y[part]) or most == 0 for part in parts)
    again = divide_images(text, y, n, per_site, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_the_majority_class_of_a_site_is_drawn_where_asked():
    y = np.repeat(np.arange(10), 400)
    drawn = [
        [np.bincount(y[part]).argmax() for part in divide_images("random-major:0.8", y, 8, 50, seed)]
        for seed in range(60)
    ]
    counts = np.bincount(np.ravel(drawn), minlength=10)
    assert chisquare(counts).pvalue > 0.001  # uniform over the ten classes
    assert len({tuple(sites) for sites in drawn}) == 60 and any(len(set(sites)) < 8 for sites in drawn)


def test_every_site_has_as_many_test_images_of_each_class_where_asked(study, tmp_path):
    y_test = np.repeat([0, 1, 2], [20, 9, 13])
    path = npz(tmp_path, x_train=pixels(30, 4), y_train=np.arange(30) % 3, x_test=pixels(42, 4, seed=1), y_test=y_test)
    partition_images(study, path, n_sites=4, balance_test=True)
    seen = [read_store(study, f"S{k}")[1] for k in (1, 2, 3, 4)]
    assert all(np.bincount(y_test[rows]).tolist() == [2, 2, 2] for rows in seen)
    assert len(np.unique(np.concatenate(seen))) == 24
    conftest.refused(
        partial(partition_images, study, path, n_sites=10, prefix="T", balance_test=True),
        "class 1 has 9 test images, too few for 10 sites",
    )


def test_an_impossible_division_is_refused_in_one_line():
    for text in ("even", "iid:1", "major:1.1", "major:nan", "dirichlet:0", "dirichlet:inf", ""):
        conftest.refused(partial(parse_skew, text), f"--skew {text!r}", ": known are iid, major:0.8")
    for text, n_sites, per_site, message in (
        ("iid", 3, 5, "3 sites of 5 need 15 training images, but there are 12"),
        ("iid", 13, None, "12 training images are too few for 13 sites"),
        ("major:0.5", 3, 5, "need 15"),
        ("major:1", 2, 5, "class 0 has too few images for 5 "),
        ("dirichlet:0.001", 5, None, "got no image at all"),
        ("dirichlet:1e308", 2, None, "beyond what can be drawn"),
    ):
        classes = np.repeat(np.arange(3), 4)
        conftest.refused(partial(divide_images, text, classes, n_sites, per_site), message)


@pytest.fixture
def study(tmp_path):
    for name in ("pipelines", "sites"):
        (tmp_path / "study" / name).mkdir(parents=True)
    return Study(tmp_path / "study")


def read_store(study, site):
    """Return (train rows, test rows, table, pixels) of a site's store, rows by the names of its patients."""
    with PatchStore(study.store_path(site)) as store:
        table = store.table
        rows = [
            np.array([int(p.split("_")[1]) for p in table.patient[table.split == split]], int)
            for split in ("train", "test")
        ]
        return *rows, table, store.read(np.arange(len(store)))


@pytest.mark.parametrize("channels", [0, 3])
def test_stores_hold_the_rows_of_the_source_with_one_patient_per_row(study, tmp_path, channels):
    x, x_test = pixels(300, 4, channels), pixels(11, 4, channels, seed=1)
    y, y_test = np.arange(300) % 3, np.arange(11) % 3
    path = npz(tmp_path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    document = partition_images(study, path, n_sites=3, per_site=90, skew="major:0.5", seed=4)
    seen_train, seen_test = [], []
    for k, row in enumerate(document["sites"]):
        train, test, table, found = read_store(study, row["site"])
        assert np.array_equal(found.squeeze(), np.concatenate([x[train], x_test[test]]))
        assert np.array_equal(table.label, np.concatenate([y[train], y_test[test]]))
        assert len(np.unique(table.patient)) == len(table) == 90 + len(test)
        assert np.isnan(table.tumor_fraction).all() and study.load_site(row["site"]).real is False
        assert (row["train"], row["test"]) == (90, len(test))
        assert row["classes"] == {str(c): int((y[train] == c).sum()) for c in range(3)}
        assert row["classes"][str(k)] == 45
        seen_train += train.tolist()
        seen_test += test.tolist()
    assert len(set(seen_train)) == 270
    assert sorted(seen_test) == list(range(11))  # the whole of it, each once
    with PatchStore(study.store_path("S1")) as store:
        assert store.n_channels == (channels or 1)
        assert (store.meta.site, store.meta.classes) == ("S1", ("0", "1", "2"))


def test_test_images_held_out_are_in_no_training_set(study, tmp_path):
    x = np.arange(40, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)  # its row in each pixel
    partition_images(study, npz(tmp_path, x=x, y=np.arange(40) % 2), n_sites=4, test_fraction=0.25)
    train, test = [], []
    for site in ("S1", "S2", "S3", "S4"):
        _, _, table, found = read_store(study, site)
        rows = found[:, 0, 0, 0]
        assert np.array_equal(table.label, rows % 2)
        train += rows[table.split == "train"].tolist()
        test += rows[table.split == "test"].tolist()
    assert (len(train), len(test), len({*train, *test})) == (28, 10, 38)


@pytest.fixture
def twenty(tmp_path):
    return npz(tmp_path, x=pixels(20, 4), y=np.arange(20) % 2)


def test_existing_stores_are_not_overwritten(study, twenty):
    partition_images(study, twenty, n_sites=2)
    before = {p: p.read_bytes() for p in study.root.rglob("*.h5")}
    again = partial(partition_images, study, twenty)
    conftest.refused(partial(again, n_sites=3), "sites/S1.toml exists already; use another --prefix")
    for k in (1, 2):
        (study.root / "sites" / f"S{k}.toml").unlink()
    conftest.refused(partial(again, n_sites=2), "stores/S1/patches.h5 exists already")
    again(n_sites=2, prefix="other")
    assert study.site_names() == ["other1", "other2"]
    assert all(p.read_bytes() == content for p, content in before.items())


def test_wrong_options_are_refused_in_one_line_and_leave_nothing_behind(study, twenty):
    for option, message in (
        ({"n_sites": 0}, "--sites"),
        ({"per_site": 0}, "--per-site"),
        ({"seed": -1}, "--seed"),
        ({"prefix": "../S"}, "--prefix"),
        ({"test_fraction": 1.0}, "--test-fraction 1.0"),
        ({"test_fraction": 0.999}, "no test or training"),
        ({"n_sites": 30}, "too few"),
        ({"skew": "odd"}, "--skew 'odd'"),
    ):
        conftest.refused(partial(partition_images, study, twenty, **{"n_sites": 2} | option), message)
    assert not [p for p in study.root.rglob("*") if p.is_file()]


@pytest.mark.end_to_end
def test_the_command_line_leads_from_a_data_set_to_an_evaluation(study, tmp_path, wsi_fl):
    y, y_test = np.arange(64) % 2, np.arange(12) % 2
    arrays = {"x_train": pixels(64, 28, 0), "y_train": y, "x_test": pixels(12, 28, 0), "y_test": y_test}
    data = npz(tmp_path, **arrays)

    def run(*arguments, code=0):
        done = wsi_fl(*arguments, cwd=study.root)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if not code else done.stderr.splitlines()[-1]

    divide = ["partition", data, "--sites", 2, "--per-site", 30, "--skew", "major:0.6", "--json"]
    made = run(*divide)
    assert [row["classes"] for row in made["sites"]] == [{"0": 18, "1": 12}, {"0": 12, "1": 18}]
    assert made["sites"][0]["store"] == "stores/S1/patches.h5"
    assert "exists already" in run(*divide, code=2)
    smaller = ("train.rounds=1", "train.batch_size=10", "evaluate.bootstrap=20")
    small = ["--backend", "local", "--pipeline", "mnist", *(word for one in smaller for word in ("--set", one))]
    document = run("evaluate", run("train", *small, "--json")["run"], "--json")
    for row in document["sites"]:
        assert (row["n"], row["own"]["n"], row["slides"], row["own"]["slides"]) == (12, 6, None, None)
