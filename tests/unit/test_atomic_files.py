"""Files are whole or absent, even when the writer fails, is killed, or the disk is full."""

import errno
import math
import os
import signal
import subprocess
import sys
import threading

import pytest
from builders import refused
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.runs.site_folder import hold_site_lock
from wsi_fl.system import files
from wsi_fl.system.files import append_line, atomic_path, file_lock, read_lines, remove_leftovers, write_text
from wsi_fl.types import WsiFlError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aé🔬"), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
DOCUMENTS = st.dictionaries(st.sampled_from(["round", "größe", "🔬"]), JSON, min_size=1, max_size=3)


def names_in(folder):
    return {p.name for p in folder.iterdir()}


def test_content_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "report.html"
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent and temporary.suffix == ".html" and not path.exists()
    assert path.read_text() == "whole" and names_in(path.parent) == {"report.html"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError, None])
def test_failed_write_leaves_the_old_file_unchanged(tmp_path, error):
    """A writer without any output fails as well."""
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(error or FileNotFoundError), atomic_path(path) as temporary:
        if error:
            temporary.write_text("half")
            raise error
    assert path.read_text() == "old" and names_in(tmp_path) == {"a.txt"}


KILLED = """
import os, signal, sys
from pathlib import Path
from wsi_fl.system.files import atomic_path
with atomic_path(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("old", [None, "old"])
def test_killed_writer_leaves_the_old_file_and_a_leftover_that_is_removed(tmp_path, old):
    path, kept = tmp_path / "model.safetensors", {".hidden"}
    if old:
        write_text(path, old)
        kept.add(path.name)
    write_text(tmp_path / ".hidden", "not ours")
    process = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert (path.read_text() if path.exists() else None) == old
    assert len(names_in(tmp_path) - kept) == 1
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == kept


def test_only_temporary_leftovers_are_removed_from_a_folder_and_its_subfolders(tmp_path):
    ours = [".a.12.partial.h5", "state/.b.7.partial.safetensors", "state/.tmp2rCX7g"]
    others = ["a.h5", "state/.hidden", "state/deep/.a.12.partial.h5", "state/tmp2rCX7g"]
    for name in [*ours, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    with hold_site_lock(tmp_path):  # as a run does that goes on
        left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert [name for name in left if "lock" not in name] == others


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_is_one_line_that_names_the_file(tmp_path, monkeypatch, code):
    path, words = tmp_path / "a.txt", "a.txt: the disk is full; free some space and start again"

    def full(*_):
        raise OSError(code, os.strerror(code))

    with pytest.raises(WsiFlError, match=words), atomic_path(path) as temporary:
        temporary.write_text("half")
        full()
    assert names_in(tmp_path) == set()
    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: append_line(path, {"round": 1}), words)


def test_disk_space_is_reserved_before_it_is_needed(tmp_path):
    with pytest.raises(WsiFlError, match="disk is full"), atomic_path(tmp_path / "a.h5") as temporary:
        files.reserve_space(temporary, 1 << 60)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(tmp_path, value):
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "a.json", {"auroc": value})
    with pytest.raises(ValueError):
        append_line(tmp_path / "a.jsonl", {"auroc": [value]})
    assert names_in(tmp_path) <= {"a.jsonl"} and read_lines(tmp_path / "a.jsonl") == []


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"{'a': 1}", b"9" * 5000])
def test_damaged_json_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    refused(lambda: files.read_json(tmp_path / "a.json"), "a.json: not valid JSON")


@given(documents=st.lists(DOCUMENTS, max_size=4), last=DOCUMENTS, after=DOCUMENTS, data=st.data())
def test_documents_read_back_and_log_lines_survive_a_crash_at_any_byte(tmp_path_factory, documents, last, after, data):
    """All finished lines read back after any loss in the last one, and the next line starts afresh."""
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    files.write_json(path.with_suffix(".json"), last)
    assert files.read_json(path.with_suffix(".json")) == last
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


@pytest.mark.parametrize("damaged", [b'{"a": 1}\n{"a"\n{"a": 3}\n', b'{"a": 1}\n\xff\n', b'{"a": 1}\n{"a"\n'])
def test_damage_before_the_last_line_is_an_error(tmp_path, damaged):
    (tmp_path / "ledger.jsonl").write_bytes(damaged)
    refused(lambda: read_lines(tmp_path / "ledger.jsonl"), "ledger.jsonl: line 2 is damaged")


def test_a_lock_is_awaited_until_its_timeout(tmp_path):
    path, held, done = tmp_path / ".lock", threading.Event(), threading.Event()

    def hold():
        with file_lock(path):
            held.set()
            done.wait(10)

    for waiting in ({"busy": "busy", "patience_s": 10}, {}):
        held.clear()
        done.clear()
        other = threading.Thread(target=hold)
        other.start()
        assert held.wait(10)
        with pytest.raises(WsiFlError, match="busy"), file_lock(path, "busy", patience_s=0.05):
            pass
        threading.Timer(0.05, done.set).start()
        with file_lock(path, **waiting):
            other.join(10)
        assert not other.is_alive()
