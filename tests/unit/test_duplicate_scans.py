"""Copies of a scan under several names are found by content, kept in one split, and reported."""

from pathlib import Path

import numpy as np
import pytest

from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared, drop_leaks, find_copies
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.stores.bag_store import hash_features
from wsi_fl.system.files import duplicate_marks
from wsi_fl.types import SlideRecord


def record(slide, patient, split=None, positive=False):
    return SlideRecord(Path(f"{slide}.tif"), slide, patient, "A", "weak", positive, split=split)


def parse_marks(**marks):
    return {slide: frozenset(text.split()) for slide, text in marks.items()}


def scan(slide, patient, mark, split="train", site="A"):
    return Scan(site, slide, patient, split, frozenset(mark.split()))


@pytest.mark.parametrize("seed", range(6))
def test_patients_who_share_a_scan_are_in_one_split(seed):
    records = [record(f"s{k}", f"p{k}", positive=k % 2 == 0) for k in range(12)]
    marks = parse_marks(s0="x", s5="x y", s9="y", s11="z")  # p0, p5 and p9 hang together
    split = {one.patient: one.split for one in assign_splits(records, test_fraction=0.4, seed=seed, marks=marks)}
    assert split["p0"] == split["p5"] == split["p9"] and set(split.values()) == {"train", "test"}
    assert assign_splits(records, test_fraction=0.4, seed=seed, marks=parse_marks(s0="x", s1="y")) == assign_splits(
        records, test_fraction=0.4, seed=seed
    )


def test_an_empty_list_of_slides_is_split_without_error():
    assert assign_splits([], test_fraction=0.2) == []


def test_a_scan_in_two_splits_of_a_table_is_used_for_training_only():
    records = [record("a", "p", "test"), record("b", "q", "train"), record("c", "r", "val"), record("d", "s", "test")]
    rest, aside = drop_leaks(records, parse_marks(a="x", b="x", c="x", d="y"))
    assert [one.slide for one in rest] == ["b", "d"]
    assert {one.slide: one.reason for one in aside} == dict.fromkeys(
        "ac", "it is the same scan as b of patient q, which is in train"
    )


def test_copies_are_grouped_by_any_shared_mark_and_slides_without_marks_by_none():
    scans = [scan("a", "p", "x"), scan("b", "q", "y"), scan("c", "r", "x y"), scan("d", "s", ""), scan("e", "t", "")]
    assert [[one.slide for one in group] for group in find_copies(scans)] == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("scans", "words"),
    [
        ([scan("a", "p", "x"), scan("b", "q", "x")], ("a (patient p) and b (patient q)", "counts 2", "in train")),
        ([scan("a", "p", "x"), scan("b", "q", "x", "test")], ("in test and in train", "too good")),
        ([scan("a", "p", "x"), scan("b", "p", "x")], ("are one scan, which counts 2 times",)),
        ([scan("a", "p", "x"), scan("b", "q", "x", site="B")], ("a (site A, patient p)", "b (site B", "at one site")),
        ([scan(f"s{k}", f"p{k}", "x") for k in range(9)], ("and 3 more are one scan", "counts 9")),
    ],
)
def test_copies_of_one_scan_are_reported_by_name(scans, words):
    (line,) = describe_copies(scans)
    assert all(word in line for word in words)
    assert describe_shared(scans) == ([line] if "site B" in line else [])


def test_files_are_compared_by_content_under_any_name_or_link(tmp_path):
    rng = np.random.default_rng(0)
    whole = rng.bytes(3_000_000)
    later = bytearray(whole)
    later[2_000_000:2_100_000] = rng.bytes(100_000)
    for name, data in (("a", whole), ("b", whole), ("c", bytes(later)), ("d", whole[:-1]), ("e", b""), ("f", b"")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    paths = [tmp_path / name for name in ("a", "b", "c", "d", "e", "f", "link", "gone")]
    marks = duplicate_marks([*paths, tmp_path])
    assert marks[paths[0]] == marks[paths[1]] == marks[tmp_path / "link"] != marks[paths[2]]
    assert {path.name for path in marks} == {"a", "b", "c", "link"}


def test_features_are_alike_in_any_order_and_half_precision():
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    same = hash_features(x)
    assert hash_features(x[::-1]) == hash_features(x.astype(np.float16).astype(np.float32)) == same
    assert len({same, hash_features(x[:6]), hash_features(x + 1), hash_features(x[[0, 0, 1, 2, 3, 4, 5]])}) == 4
