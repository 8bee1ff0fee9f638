"""Hospitals over a folder that are killed and stopped, and whose share vanishes, by dice; nobody mends anything."""

import json
import os
import re
import threading
from contextlib import suppress
from functools import partial

import pytest
from test_folder_line import BASE, SITES, Group, charged, meddling, note, require_the_same, start

pytestmark = pytest.mark.slow
SECONDS, ROUNDS = float(os.environ.get("WSI_FL_FAULT_SECONDS", "100")), 25
SETTINGS = [f"train.rounds={ROUNDS}", *BASE[1:3], "comm.timeout_s=10"]
LETTER = re.compile(r"(S\d)~x(\d+)\.\d+~")


@pytest.mark.parametrize(("seed", "least"), [(1, 2), (2, 2), (3, 3), (4, 3)])
def test_whatever_happens_the_run_ends_with_all_and_ledgers_say_what_left(tmp_path, federation, seed, least):
    """Where all are needed nobody is left out, and the models are those of a run that nothing happened to."""
    share = tmp_path / "share"
    share.mkdir()
    settings = [*SETTINGS, f"train.at_least={least}"]
    group = Group(tmp_path / "group", "proxyfl", settings, federation, share)
    for job in group.jobs:
        job["slow_s"] = 1.0
    seen, stop = {}, threading.Event()

    def watch():
        while not stop.is_set():
            with suppress(OSError):  # the share is away
                meddling(share, partial(note, seen), stop)

    owner = threading.Thread(target=watch, daemon=True)
    owner.start()
    faults = {"seed": seed, "seconds": SECONDS, "share": str(share)}
    group.jobs = {"jobs": group.jobs, "faults": faults}
    suffered = start(tmp_path, [group])
    stop.set()
    owner.join()
    print(f"{len(suffered)} faults: {suffered}")
    assert len(suffered) > SECONDS / 12
    left = {(found[1], int(found[2])) for name in seen if (found := LETTER.match(name))}
    for site in SITES:
        assert group.result(site)["lost"] == []
        paid = [round_ for round_, _ in charged(group.study(site), site)]
        assert paid == sorted(set(paid)), "a round was charged twice"
        assert {round_ for name, round_ in left if name == site} <= set(paid)
        lines = (group.run(site) / "sites" / site / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["round"] == ROUNDS
    assert sum(len(charged(group.study(site), site)) == ROUNDS for site in SITES) >= 1
    if least == len(SITES):
        require_the_same(group)
