"""Processes share the work on a folder: each item has one owner, and nobody writes after the end."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from conftest import refused

from wsi_fl.stages.runtime.rank_job import RankJob, parse_part
from wsi_fl.stages.runtime.slide_work import SlideWork
from wsi_fl.system import files, shared_work
from wsi_fl.system.files import JOBS_FOLDER, write_bytes
from wsi_fl.system.join_work import join_work, site_lock
from wsi_fl.system.shared_work import WorkEnded, WorkKey
from wsi_fl.types import WsiFlError

KEY, OTHER_KEY = WorkKey("tile", "a"), WorkKey("tile", "b")
LONG_AGO = 1_000.0


@pytest.fixture(autouse=True)
def _fresh_view(monkeypatch):
    monkeypatch.setattr(shared_work, "_CACHE_S", 0.0)


def join(folder, key=KEY, **more):
    return join_work(folder, key, "site C1", **more)


def edit_heartbeats(folder, *, machine="another", seconds_ago=0.0):
    """Make all processes at the work those of a machine (None: of their own), with a heartbeat so many seconds ago."""
    for path in folder.glob(f"{JOBS_FOLDER}/*/jobs/*"):
        document = json.loads(path.read_text())
        document["identity"]["machine"] = machine or document["identity"]["machine"]
        path.write_text(json.dumps(document))
        now = path.stat().st_mtime
        os.utime(path, (now - seconds_ago, now - seconds_ago))


def killed_after(folder, action):
    """Run a process that joins the work, acts and is killed."""
    code = f"""
import os, signal, sys
from pathlib import Path
from wsi_fl.system.join_work import join_work
from wsi_fl.system.shared_work import WorkKey
with join_work(Path(sys.argv[1]), WorkKey("tile", "a"), "site C1") as work:
    {action}
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode < 0


def test_an_item_is_claimed_once_and_an_outcome_is_final(tmp_path):
    with join(tmp_path) as first, join(tmp_path) as second:
        assert first.claim_item("plans", "x") and not first.claim_item("plans", "x")
        assert not second.claim_item("plans", "x") and second.claim_item("plans", "x.1")
        first.record_outcome("plans", "x", {"n": 1})
        second.release_claims()
        assert not second.claim_item("plans", "x") and first.claim_item("plans", "x.1")
        assert second.read_outcome("plans", "x") == (first.group, {"n": 1})
        assert second.list_items("plans") == ({"x"}, {"x", "x.1"})
        assert not first.is_resumed or not second.is_resumed


def test_items_of_a_killed_process_are_free_at_once_and_its_outcomes_remain(tmp_path):
    killed_after(tmp_path, "work.claim_item('p', 'x'), work.claim_item('p', 'y'), work.record_outcome('p', 'y', 2)")
    with join(tmp_path) as work:
        assert work.is_resumed
        assert work.claim_item("p", "x") and not work.claim_item("p", "y")
        assert work.read_outcome("p", "y")[1] == 2
        work.forget_outcomes("p", lambda item, outcome: outcome == 2)
        assert work.claim_item("p", "y")


def test_items_of_another_machine_are_free_when_its_heartbeat_is_old_by_the_disks_clock(tmp_path, monkeypatch):
    with join(tmp_path) as there:
        there.claim_item("p", "x")
        edit_heartbeats(tmp_path, seconds_ago=shared_work.SILENT_S - 20)
        with join(tmp_path) as here:
            monkeypatch.setattr(shared_work.time, "time", lambda: 4e9)  # this machine's clock is not asked
            assert not here.claim_item("p", "x") and not here.is_resumed
        edit_heartbeats(tmp_path, seconds_ago=shared_work.SILENT_S + 20)
        with join(tmp_path) as here:
            assert here.claim_item("p", "x") and here.is_resumed
            there.record_outcome("p", "x", "late")  # it lives, and did the item too
            here.record_outcome("p", "x", "again")
            assert there.read_outcome("p", "x")[1] == "again"


def test_files_that_a_power_loss_emptied_and_strays_block_nothing(tmp_path):
    killed_after(tmp_path, "[(work.claim_item('p', x), work.record_outcome('p', x, x)) for x in 'xyz']")
    (path,) = (tmp_path / JOBS_FOLDER).iterdir()
    (path / "p" / "x.done").write_bytes(b"")
    (path / "p" / "y.done").write_bytes(b"\0\xff")
    (path.parent / ".DS_Store").touch()
    (path.parent / "@eaDir" / "x").mkdir(parents=True)
    with join(tmp_path) as work:
        assert work.path == path and work.list_items("p")[0] == {"z"}
        assert work.claim_item("p", "x") and work.claim_item("p", "y")
    (path / "work.json").write_bytes(b"\0\xff")
    with join(tmp_path) as work:
        assert work.path != path and work.list_items("p") == (set(), set())
        work.finish_work()
    assert list(tmp_path.iterdir()) == []


def test_an_outcome_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    steps, real_sync, real_replace, real_rename = [], os.fsync, Path.replace, Path.rename
    monkeypatch.setattr(os, "fsync", lambda *a: (steps.append("sync"), real_sync(*a)))
    monkeypatch.setattr(Path, "replace", lambda *a: (steps.append("rename"), real_replace(*a)))
    monkeypatch.setattr(Path, "rename", lambda *a: (steps.append("rename"), real_rename(*a)))
    with join(tmp_path) as work:
        assert steps.index("sync") < steps.index("rename")
        work.claim_item("p", "x")
        steps.clear()
        work.record_outcome("p", "x", 1)
    assert steps[:2] == ["sync", "rename"]


def test_of_many_who_find_a_dead_owner_one_takes_its_item(tmp_path):
    killed_after(tmp_path, "work.claim_item('p', 'x')")
    barrier = threading.Barrier(6)

    def take(_):
        with join(tmp_path) as work:
            barrier.wait()
            is_mine = work.claim_item("p", "x")
            barrier.wait()
            return is_mine

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(take, range(6))) == 1


def test_a_claim_whose_owner_was_killed_before_it_signed_is_judged_by_its_age(tmp_path):
    with join(tmp_path) as work:
        work.claim_item("p", "y")
        unsigned = work.path / "p" / "x.1"
        unsigned.touch()
        assert not work.claim_item("p", "x")
        os.utime(unsigned, (LONG_AGO, LONG_AGO))
        assert work.claim_item("p", "x")


def test_after_a_pause_of_the_disk_nobody_is_taken_for_dead(tmp_path):
    """When it answers again, the heartbeats of all are old."""
    with join(tmp_path) as there, join(tmp_path) as here:
        there.claim_item("p", "x")
        here._write_heartbeat()
        here._beat_time -= 2 * shared_work.SILENT_S
        edit_heartbeats(tmp_path, seconds_ago=2 * shared_work.SILENT_S)
        here._write_heartbeat()
        assert not here.claim_item("p", "x")


def test_who_was_taken_for_dead_cannot_write_after_the_end(tmp_path):
    target = tmp_path / "slides" / "x.h5"
    with join(tmp_path) as sleeper:
        sleeper.claim_item("p", "x")
        with pytest.raises(WorkEnded), sleeper.stage_file(target) as staged:
            write_bytes(staged, b"old")
            edit_heartbeats(tmp_path, seconds_ago=2 * shared_work.SILENT_S)
            with join(tmp_path, OTHER_KEY) as work, work.stage_file(target) as new:
                new.write_bytes(b"new")
                sleeper_folder = sleeper.path
        refused(lambda: sleeper.delete_file(target), "start it again", error=WorkEnded)
        with pytest.raises((WorkEnded, FileNotFoundError)), sleeper.stage_file(target) as staged:
            write_bytes(staged, b"old")
        for act in (
            lambda: sleeper.claim_item("p", "y"),
            lambda: sleeper.record_outcome("p", "x", 1),
            sleeper.list_workers,
            sleeper.finish_work,
        ):
            refused(act, "start it again", error=WorkEnded)
        assert target.read_bytes() == b"new" and not sleeper_folder.exists()


def test_finished_work_does_not_wait_for_a_stopped_process(tmp_path, monkeypatch):
    """One of this machine runs, and gives no sign of life."""

    def fail(seconds):
        raise AssertionError(f"waits {seconds} s")

    with join(tmp_path) as stopped:
        stopped.finish_work()
        edit_heartbeats(tmp_path, machine=None, seconds_ago=2 * shared_work.SILENT_S)
        monkeypatch.setattr(time, "sleep", fail)
        with join(tmp_path) as work:
            assert work.path != stopped.path and work.claim_item("p", "x")


def test_errors_of_a_staged_file_name_its_place(tmp_path):
    target = tmp_path / "x.h5"
    with join(tmp_path) as work:
        with pytest.raises(WsiFlError, match=r"/x\.h5: the disk is full") as caught, work.stage_file(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert JOBS_FOLDER not in str(caught.value)
        with pytest.raises(WsiFlError) as caught, work.stage_file(target) as staged:
            raise WsiFlError(f"{staged}: damaged")
        assert str(caught.value) == f"{target}: damaged"


def test_finished_work_is_removed_by_the_last_and_unfinished_work_is_kept_for_its_settings_alone(tmp_path):
    with join(tmp_path) as first:
        first.claim_item("p", "x")
        first.record_outcome("p", "x", 1)
    with join(tmp_path) as work:
        assert work.list_items("p")[0] == {"x"}
        with join(tmp_path) as second:
            second.finish_work()
        assert work.path.exists()
    assert list(tmp_path.iterdir()) == []
    with join(tmp_path) as first:
        first.claim_item("p", "x")
        first.record_outcome("p", "x", 1)
    with join(tmp_path, OTHER_KEY) as work:
        assert work.list_items("p") == (set(), set())
    (path,) = (tmp_path / JOBS_FOLDER).iterdir()
    (path / "work.json").unlink()  # by whatever: no work can be told from it
    with join(tmp_path) as work:
        assert work.path != path


def test_work_that_is_kept_is_not_dropped_for_other_work_before_it_is_finished(tmp_path):
    with join(tmp_path) as work:
        assert work.keep_unfinished("3") == "3" == work.keep_unfinished("2")  # the first one's
        folder = work.path.parent
    words = "site C1:", "finished parts of unfinished work (tile)", f"{folder}", "or delete that folder"
    for other in (join(tmp_path, OTHER_KEY), site_lock(tmp_path, "C1"), site_lock(tmp_path, "C1", wait=True)):
        refused(other.__enter__, *words, error=WsiFlError)
    (folder / work.path.name / "work.json").write_text("")  # nobody can finish it
    with join(tmp_path, OTHER_KEY) as other:
        other.keep_unfinished("2")
        other.finish_work()
    with join(tmp_path) as work:
        assert work.path != other.path


def test_other_work_at_the_same_time_is_refused_in_one_line_that_names_the_process(tmp_path):
    with join(tmp_path):
        who = f"(process {os.getpid()} on "
        refused(join(tmp_path, OTHER_KEY).__enter__, "with other settings", who, error=WsiFlError)
        refused(join(tmp_path, WorkKey("import", "a")).__enter__, "another wsi-fl command", who, error=WsiFlError)
        refused(site_lock(tmp_path, "C1").__enter__, "site C1: another wsi-fl command is writing", error=WsiFlError)
        edit_heartbeats(tmp_path, seconds_ago=2 * shared_work.SILENT_S)
        with site_lock(tmp_path, "C1"):
            pass
    with pytest.raises(ZeroDivisionError), site_lock(tmp_path, "C1"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_who_works_alone_keeps_others_out_though_it_is_suspended_where_there_are_locks(tmp_path, monkeypatch):
    target = tmp_path / "x.h5"
    with pytest.raises(WorkEnded), site_lock(tmp_path, "C1") as sleeper:
        edit_heartbeats(tmp_path, seconds_ago=2 * shared_work.SILENT_S)
        refused(site_lock(tmp_path, "C1").__enter__, "site C1: another wsi-fl command is writing", error=WsiFlError)
        sleeper.require_presence()
        edit_heartbeats(tmp_path, seconds_ago=2 * shared_work.SILENT_S)
        monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
        with site_lock(tmp_path, "C1"):
            pass
        refused(sleeper.require_presence, "start it again", error=WorkEnded)
        refused(lambda: list(sleeper.guard_items([1])), "start it again", error=WorkEnded)
        with pytest.raises(WorkEnded), sleeper.stage_file(target) as staged:
            write_bytes(staged, b"old")
    assert not target.exists()


def test_a_lock_is_waited_for_where_that_is_asked(tmp_path):
    order = []

    def wait():
        with site_lock(tmp_path, "C1", wait=True):
            order.append("second")

    with ThreadPoolExecutor(1) as threads:
        with site_lock(tmp_path, "C1"):
            waiting = threads.submit(wait)
            threading.Event().wait(0.1)
            order.append("first")
        waiting.result(timeout=20)
    assert order == ["first", "second"]


def test_who_joins_and_leaves_at_any_moment_never_meets_other_work(tmp_path):
    """Eight threads begin, do and end work with two settings; a file holds what its last writer wrote in its time."""
    ends, present = Counter(), Counter()

    def work_through(work, digest):
        items = [str(k) for k in range(4)]
        while set(items) - work.list_items("p")[0]:
            for item in items:
                if work.claim_item("p", item):
                    with work.stage_file(tmp_path / "out" / item) as staged:
                        staged.write_text(digest)
                    work.record_outcome("p", item, digest)
        assert {work.read_outcome("p", item)[1] for item in items} == {digest}

    def repeat(seed):
        rng = random.Random(seed)
        for _ in range(12):
            digest = rng.choice("aab")
            try:
                with join(tmp_path, WorkKey("tile", digest)) as work:
                    present[digest] += 1
                    ends["met"] += all(present[key] > 0 for key in "ab")
                    work_through(work, digest)
                    present[digest] -= 1
                    work.finish_work()
                    ends["done"] += 1
            except WorkEnded as error:
                ends[str(error)] += 1
            except WsiFlError:
                ends["refused"] += 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(repeat, range(8)))
    assert ends["met"] == 0 and ends["done"] > 8 and ends["done"] + ends["refused"] == 8 * 12, ends
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_parts_are_disjoint_and_together_all(tmp_path):
    items = [f"slide_{k}" for k in range(11)]
    parts = [parse_part(f"{k}/4").select_items(items) for k in (1, 2, 3, 4)]
    assert sorted(chain(*parts)) == sorted(items) and max(map(len, parts)) == 3
    assert parse_part(None) is None and str(parse_part("3/64")) == "3/64"
    for text in ("0/4", "5/4", "4", "1/0", "-1/3", "a/b", "1/2/3", ""):
        refused(lambda text=text: parse_part(text), f"--part {text}:", "1/8")


def test_outcomes_stay_for_jobs_that_joined_since_unfinished_work_was_taken_up(tmp_path):
    killed_after(tmp_path, "work.claim_item('p', 'x'), work.record_outcome('p', 'x', 'failed')")
    with join(tmp_path) as first:
        work = SlideWork(RankJob(), first, "C1")
        with join(tmp_path) as second:
            work.retry_items("p", lambda item, outcome: True)
            assert second.read_outcome("p", "x")[1] == "failed"
        work.retry_items("p", lambda item, outcome: True)
        assert first.claim_item("p", "x")
