"""Tests of one budget spent by concurrent processes, on one ledger or on copies of it."""

import json
import os
import random
import shutil
import time
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from conftest import refused

from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.ledger import BudgetSpent, PrivacyLedger, PrivacyTerms
from wsi_fl.privacy.ledger_file import user_head_path
from wsi_fl.types import WsiFlError

DELTA, LIMIT, TRIES = 1e-5, 3.0, 100
SUM = Mechanism(sigma=17.0, clip=1.0, sample_rate=1.0, steps=1)
"""More than a hundred of them are within the limit, two hundred are not."""
TERMS = PrivacyTerms(delta=DELTA, max_epsilon=LIMIT, lifetime=True, guarantee="guaranteed")
FORK = get_context("fork")


def open_ledger(place, user, run):
    heads = [place / "ledger.head.json", user / "C1.head.json"]
    return PrivacyLedger(place / "C1.jsonl", site="C1", run=run, terms=TERMS, heads=heads)


def release_round(ledger, round_, number):
    vector = np.full(3, number, np.float32)
    made = ledger.release(round_, vector, schema="ab" * 32, mechanism=SUM, content="model")
    ledger.record_transmission(round_, made.digest)
    return made.digest


def spend(place, user, run, ready, told):
    """Spend a hundred times at random moments from a ledger opened before the other process began."""
    chance, ledger, let, why = random.Random(run), open_ledger(place, user, run), [], []
    ready.wait(30)
    for k in range(1, TRIES + 1):
        time.sleep(chance.random() / 1000)
        try:
            if chance.random() < 0.1:
                ledger = open_ledger(place, user, run)
            let.append(release_round(ledger, k, chance.random()))
        except BudgetSpent:
            why.append("spent")
        except WsiFlError as error:
            assert "this is not the ledger that" in str(error), error
            why.append("not the newest")
    told.put((run, let, why))


def run_two_processes(places, user):
    """Run two processes at once; return their releases, {run: digests}, and refusals, {run: words}."""
    ready, told = FORK.Barrier(2), FORK.Queue()
    jobs = [FORK.Process(target=spend, args=(p, user, f"r{k}", ready, told)) for k, p in enumerate(places)]
    for job in jobs:
        job.start()
    found = [told.get(timeout=60) for _ in jobs]
    for job in jobs:
        job.join(30)
    return {run: let for run, let, _ in found}, {run: why for run, _, why in found}


def lines(place):
    return [json.loads(line) for line in (place / "C1.jsonl").read_text().splitlines()]


def charged(place):
    return {line["released"].split()[1] for line in lines(place) if line.get("mechanism")}


@pytest.fixture
def place(tmp_path):
    for name in ("study", "user"):
        (tmp_path / name).mkdir()
    release_round(open_ledger(tmp_path / "study", tmp_path / "user", "before"), 1, 0.0)
    return tmp_path / "study"


def test_two_processes_on_one_ledger_spend_all_of_its_budget_and_no_more(place):
    let, why = run_two_processes([place, place], place.parent / "user")
    left = [*let["r0"], *let["r1"]]
    assert charged(place) >= set(left) and len(charged(place)) == 1 + len(left)
    assert epsilon([SUM] * (1 + len(left)), DELTA) <= LIMIT < epsilon([SUM] * (2 + len(left)), DELTA)
    assert {*why["r0"], *why["r1"]} == {"spent"} and len(left) < 2 * TRIES


def test_only_one_of_two_concurrent_copies_of_a_study_spends(place):
    user = place.parent / "user"
    copy = shutil.copytree(place, place.parent / "copy")
    let, why = run_two_processes([place, copy], user)
    left = [*let["r0"], *let["r1"]]
    assert epsilon([SUM] * (1 + len(left)), DELTA) <= LIMIT
    # whoever was first lost nothing to the other, and the head knows all that left
    assert sorted(map(len, let.values())) == [0, TRIES]
    assert sorted(map(len, why.values())) == [0, TRIES]
    head = json.loads((user / "C1.head.json").read_text())
    newest = next(p for p in (place, copy) if len(lines(p)) == head["lines"])
    assert sha256((newest / "C1.jsonl").read_bytes()).hexdigest() == head["sha256"]
    assert charged(newest) >= set(left)


def copy_ledger(study):
    return shutil.copytree(study, study.parent / "copy")


def test_copies_share_a_ledger_head_that_is_a_link(place):
    user, other = place.parent / "user", place.parent / "other"
    other.mkdir()
    shared = shutil.move(user / "C1.head.json", place.parent / "shared.json")
    for folder in (user, other):
        (folder / "C1.head.json").symlink_to(shared)
    copied = copy_ledger(place)
    release_round(open_ledger(place, user, "one"), 1, 1.0)
    refused(lambda: open_ledger(copied, other, "two"), "this is not the ledger that", error=WsiFlError)


def test_a_ledger_head_deleted_meanwhile_is_noticed(place):
    user = place.parent / "user"
    both = open_ledger(place, user, "one"), open_ledger(copy_ledger(place), user, "two")
    (user / "C1.head.json").unlink()
    for ledger in both:
        refused(lambda ledger=ledger: release_round(ledger, 1, 1.0), "C1.head.json is missing", error=WsiFlError)


@pytest.mark.parametrize("content", ['{"lines": 0, "sha256": ""}', None])
def test_an_unusable_ledger_head_is_reported_as_damaged(place, content):
    head = place.parent / "user" / "C1.head.json"
    head.unlink()
    head.write_text(content) if content else head.mkdir()
    refused(lambda: open_ledger(place, head.parent, "one"), "damaged", error=WsiFlError)


def test_a_state_folder_that_is_missing_or_not_writable_is_named(tmp_path, monkeypatch):
    """Without a state folder, copies of a ledger could not detect each other."""
    state, real = tmp_path / "state", os.access
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    assert user_head_path("C1") == state / "wsi-fl" / "ledgers" / "C1.head.json"
    monkeypatch.setattr(os, "access", lambda path, mode: state not in Path(path).parents and real(path, mode))
    refused(lambda: user_head_path("C1"), "cannot be written", "set XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    for relative in ("", "state"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        refused(lambda: user_head_path("C1"), "set XDG_STATE_HOME")


def nowhere():
    raise RuntimeError("Could not determine home directory.")
