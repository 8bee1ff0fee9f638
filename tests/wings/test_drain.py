"""A hospital that lies makes others release a sum no oftener than their people approved."""

import pytest
from conftest import metrics
from test_folder_line import SITES, Group, start
from test_oneshot import HEADS

from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import MOST_ATTEMPTS, applied
from wsi_fl.privacy.ledger_file import LedgerFile

HONEST, LIAR = SITES[:2], SITES[2]
SHARED = [*HEADS, "privacy.noise=shared", "privacy.sigma=9", "comm.timeout_s=60"]


class Turns(Group):
    """Hospitals that cron starts again and again; the last one waits when it starts the others."""

    def __init__(self, *given):
        super().__init__(*given)
        self.jobs = [job | {"end_s": 0.2} for job in self.jobs]

    def turn(self, lie="", *, approve=False):
        jobs = [job | {"approves": approve} for job in self.jobs]
        given = type("", (), {})()
        given.jobs = [*(job | {"after": LIAR, "leaving_s": 0.0} for job in jobs[:2]), jobs[2] | {"lies": lie}]
        return given

    def charges(self, site):
        """The lines that charged a site, by the approval that each names, the oldest first."""
        lines = [e for e in LedgerFile(self.study(site).ledger(site)).entries if e.mechanism]
        return {
            one: [e for e in lines if e.approved == one] for one in dict.fromkeys(e.approved for e in lines)
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoils", "again"), [(4, 2), pytest.param(6, 13, marks=pytest.mark.slow)], ids=["7", "20"]
)
def test_turns_of_a_liar_cost_no_more_than_was_approved(tmp_path, federation, spoils, again):
    (tmp_path / "share").mkdir()
    group = Turns(tmp_path / "hospitals", "oneshot", SHARED, federation, tmp_path / "share")
    turns = (
        [group.turn("spoils")] * spoils + [group.turn(approve=True)] + [group.turn("begins again")] * again
    )
    start(group.root, turns)
    logs = [(group.root / site / "stderr.txt").read_text() for site in HONEST]
    told = sum(log.count("let its people approve the plan again; nothing was sent") for log in logs)
    assert told >= spoils - MOST_ATTEMPTS  # who tells it first ends the run of the other
    assert any("it has the sum, and makes another one only after its people" in log for log in logs)
    for site in HONEST:
        first, second = group.charges(site).values()
        assert (len(first), len(second)) == (MOST_ATTEMPTS, 1)
        one = first[0].mechanism.mechanism
        spent, approved = epsilon(applied([*first, *second]), 1e-5), epsilon([one] * 2 * MOST_ATTEMPTS, 1e-5)
        assert spent == pytest.approx(epsilon([one] * (MOST_ATTEMPTS + 1), 1e-5)) and spent < approved
        assert group.result(site)["lost"] == []  # of the finished run, whoever said hello
        assert [line["round"] for line in metrics(group.run(site), site)] == [1]


@pytest.mark.slow
def test_a_hospital_that_dies_in_a_sum_is_waited_for_until_others_have_theirs(tmp_path, federation):
    """Before that all try again; afterwards who has the sum makes no other one, unless its people approve again."""
    (tmp_path / "share").mkdir()
    early, late = (
        Turns(tmp_path / name, "oneshot", SHARED, federation, tmp_path / "share")
        for name in ("early", "late")
    )
    early.jobs[2] |= {"kill": {"where": "_masked", "round": 0}, "back_s": 2}
    late.jobs[2] |= {"kill": {"where": "_open", "round": 0}, "back_s": 3}
    again = late.turn(approve=True)
    again.jobs = [{k: v for k, v in job.items() if k not in ("kill", "after")} for job in again.jobs]
    start(tmp_path, [early, late, again])
    for group, approvals, most in ((early, 1, 2), (late, 2, 1)):
        for site in SITES:
            charged = [len(one) for one in group.charges(site).values()]
            assert len(charged) == approvals and max(charged) <= most
            assert group.result(site)["lost"] == []
    log = (late.root / "S2" / "stderr.txt").read_text()
    assert "site 0: it has the sum" in log
