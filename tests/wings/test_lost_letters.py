"""Hospitals that go away in the middle of a shared sum, over a line that is not trusted."""

import time
from functools import partial

import pytest
import test_folder_line
from conftest import nightly
from test_drain import SHARED
from test_folder_line import Group, charged, start
from test_lost import NAMES, PHASES, check, killed_before, together
from test_relayed import Said
from test_relayed import together as three_together
from wires import Wire

from wsi_fl.hospitals.lines.relayed import RelayedComm

pytestmark = pytest.mark.story

TIMEOUT_S = 3.0


@pytest.mark.parametrize(
    ("phase", "ends"), [(PHASES[0], "ends"), *nightly(*((one, "is gone") for one in PHASES))]
)
def test_the_others_wait_for_it_and_read_their_sum_before_they_end(tmp_path, federation, phase, ends):
    """Whether it is just gone, or says that it ended, which is a word that ends all that comes after the sum."""
    identities, wires = {name: federation.identity(name) for name in NAMES}, {}

    def comm_of(k):
        comm = RelayedComm(identities[NAMES[k]], NAMES, range(4), Wire(NAMES[k], wires), TIMEOUT_S)
        comm.leave = comm.abort if ends == "ends" else comm.close
        return killed_before(comm, phase) if k == 2 else comm

    sites, raised = together(tmp_path, comm_of)
    check(sites, raised, 2, [0, 1, 3] if phase in PHASES[:3] else [0, 1, 2, 3])


def test_who_is_late_is_left_out_and_what_it_said_is_never_read(identities):
    """It finds what the others had said, and all are in step again as they gather."""

    def work(comm):
        (me,), others = comm.sites, [k for k in range(3) if k not in comm.sites]
        comm.gather([Said(n=0)], Said)
        time.sleep(1.5 * TIMEOUT_S if me == 2 else 0)
        told = comm.hand({(me, k): Said(n=10 * me + k) for k in others}, Said, [(k, me) for k in others])
        assert all(one == {"n": 10 * k + me} for (k, _), one in told.items())
        assert comm.gather([Said(n=me)], Said) == [{"n": k} for k in range(3)]
        return sorted(k for k, _ in told), list(comm._held)

    found = three_together(identities, work, timeout_s=TIMEOUT_S)
    assert found == {"C1": ([1], []), "C2": ([0], []), "C3": ([0, 1], [])}


@pytest.mark.slow
def test_hospitals_with_a_folder_finish_without_one_that_was_killed_at_no_second_charge(
    tmp_path, federation, monkeypatch
):
    """S3 is killed as it masks its sums; the others keep theirs, and go on without it when they are told to."""
    four, furnish = ("S0", "S1", "S2", "S3"), test_folder_line.furnish
    monkeypatch.setattr(test_folder_line, "SITES", four)
    monkeypatch.setattr(test_folder_line, "plan_of", partial(test_folder_line.plan_of, sites=four))
    monkeypatch.setattr(test_folder_line, "furnish", lambda *given: furnish(*given[:-1], given[-1] % 3))
    (tmp_path / "share").mkdir()
    settings = [*SHARED[:-1], "comm.timeout_s=10", "privacy.dropouts=1"]
    group = Group(tmp_path / "hospitals", "oneshot", settings, federation, tmp_path / "share")
    first, again = [{**job} for job in group.jobs], [job | {"without": ["S3"]} for job in group.jobs[:3]]
    first[3] |= {"kill": {"where": "_masked", "round": 0}, "gone": True}
    start(group.root, [type("", (), {"jobs": jobs}) for jobs in (first, again)])
    logs = {site: (group.root / site / "stderr.txt").read_text() for site in four[:3]}
    assert any("the sum of those who stayed is kept, go on --without it" in log for log in logs.values()), (
        logs
    )
    for site in four[:3]:
        summary = group.result(site)
        assert summary["lost"] == ["S3"]
        assert len(charged(group.study(site), site)) == 1
