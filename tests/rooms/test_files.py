"""Files are whole or absent, also when the writer fails, is killed, or the disk is full."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.runs.site import hold_alone
from wsi_fl.system.files import (
    alone,
    append_line,
    atomic,
    read_json,
    read_lines,
    remove_leftovers,
    reserve,
    write_bytes,
    write_json,
    write_text,
)
from wsi_fl.types import WsiFlError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aé🔬"), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
DOCUMENTS = st.dictionaries(st.sampled_from(["round", "größe", "🔬"]), JSON, min_size=1, max_size=3)


def test_content_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "report.html"
    with atomic(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent and temporary.suffix == ".html"
        assert not path.exists()
    assert path.read_text() == "whole"
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
def test_failed_write_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(error), atomic(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_block_that_wrote_nothing_fails(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "a.txt"):
        pass
    assert (tmp_path / "a.txt").read_text() == "old"


KILLED = """
import os, signal, sys
from pathlib import Path
from wsi_fl.system.files import atomic
with atomic(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("old", [None, "old"])
def test_killed_writer_leaves_the_old_file_and_a_leftover_that_is_removed(tmp_path, old):
    path = tmp_path / "model.safetensors"
    if old:
        write_text(path, old)
    write_text(tmp_path / ".hidden", "not ours")
    process = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert (path.read_text() if path.exists() else None) == old
    kept = {".hidden", path.name} if old else {".hidden"}
    assert len({p.name for p in tmp_path.iterdir()} - kept) == 1
    remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == kept


def test_leftovers_of_the_folders_within_go_too_and_nothing_else(tmp_path):
    ours = [".a.12.partial.h5", "state/.b.7.partial.safetensors", "state/.tmp2rCX7g"]
    others = ["a.h5", "state/.hidden", "state/tmp2rCX7g", "state/deep/.a.12.partial.h5"]
    for name in [*ours, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == sorted(
        others
    )


def test_a_run_that_goes_on_removes_what_a_killed_rank_left(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".round_00001.12.partial.safetensors").write_text("half")
    with hold_alone(tmp_path):
        assert not any((tmp_path / "state").iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_is_one_line_that_names_the_file(tmp_path, code):
    path = tmp_path / "a.txt"
    with pytest.raises(WsiFlError) as caught, atomic(path) as temporary:
        temporary.write_text("half")
        raise OSError(code, os.strerror(code))
    assert str(caught.value) == f"{path}: the disk is full; free some space and start again"
    assert list(tmp_path.iterdir()) == []


def test_append_to_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WsiFlError, match=r"a\.jsonl: the disk is full"):
        append_line(tmp_path / "a.jsonl", {"round": 1})


def test_room_is_refused_before_it_is_needed(tmp_path):
    with pytest.raises(WsiFlError, match="disk is full"), atomic(tmp_path / "a.h5") as temporary:
        reserve(temporary, 1 << 60)
    assert list(tmp_path.iterdir()) == []


@given(document=JSON, data=st.binary())
def test_documents_and_bytes_come_back(tmp_path_factory, document, data):
    folder = tmp_path_factory.mktemp("json")
    write_json(folder / "a.json", document)
    write_bytes(folder / "a.bin", data)
    assert read_json(folder / "a.json") == document
    assert (folder / "a.bin").read_bytes() == data


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(tmp_path, value):
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"auroc": value})
    with pytest.raises(ValueError):
        append_line(tmp_path / "a.jsonl", {"auroc": [value]})
    assert not (tmp_path / "a.json").exists() and read_lines(tmp_path / "a.jsonl") == []


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"{'a': 1}", b"9" * 5000])
def test_damaged_json_is_one_line(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(WsiFlError, match=r"a\.json: not valid JSON") as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


@given(documents=st.lists(DOCUMENTS, max_size=4), last=DOCUMENTS, after=DOCUMENTS, data=st.data())
def test_lines_survive_a_crash_at_any_byte(tmp_path_factory, documents, last, after, data):
    """All finished lines come back, whatever of the last one is lost, and the next line starts afresh."""
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    for document in documents:
        append_line(path, document)
    finished = path.read_bytes() if documents else b""
    append_line(path, last)
    whole = path.read_bytes()
    assert read_lines(path) == [*documents, last]
    cut = data.draw(st.integers(len(finished), len(whole) - 1))
    path.write_bytes(whole[:cut])
    kept = [*documents, last] if cut == len(whole) - 1 else documents  # only the newline is missing
    assert read_lines(path) == kept
    append_line(path, after)
    assert read_lines(path) == [*kept, after]


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for damaged in (b'{"a": 1}\n{"a"\n{"a": 3}\n', b'{"a": 1}\n\xff\n', b'{"a": 1}\n{"a"\n'):
        path.write_bytes(damaged)
        with pytest.raises(WsiFlError, match=r"ledger\.jsonl: line 2 is damaged"):
            read_lines(path)


def test_a_lock_is_waited_for_as_long_as_it_was_said(tmp_path):
    path = tmp_path / ".lock"
    held, done = threading.Event(), threading.Event()

    def hold():
        with alone(path):
            held.set()
            done.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(10)
    with pytest.raises(WsiFlError, match="busy"), alone(path, "busy", patience_s=0.2):
        pass
    threading.Timer(0.3, done.set).start()
    with alone(path, "busy", patience_s=10):
        other.join(10)
    assert not other.is_alive()
