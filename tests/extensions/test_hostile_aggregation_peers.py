"""Secure aggregation over an untrusted transport: a lying peer causes no extra release; a dropout ends no run."""

import time

import pytest
from conftest import metrics, nightly
from federation_fixtures import Wire
from hospitals import SITES, Bed, charged, heads, one_installation, start  # noqa: F401
from test_oneshot import HEADS
from test_sealed_messages import Said
from test_sealed_messages import together as three_together
from test_secure_aggregation_recovery import NAMES, PHASES, check, killed_before, together

from wsi_fl.hospitals.transports.secure_comm import SecureComm
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import MAX_ATTEMPTS, collect_mechanisms
from wsi_fl.privacy.ledger_file import LedgerFile

pytestmark = pytest.mark.end_to_end

HONEST, LIAR = SITES[:2], SITES[2]
SHARED = (*HEADS, "privacy.noise=shared", "privacy.sigma=9", "comm.timeout_s=60")


class Turns(Bed):
    """Hospitals that cron restarts repeatedly; the last one waits when it starts the others."""

    def __init__(self, root):
        root.mkdir(exist_ok=True)
        super().__init__(root, 3, folder=str(root / "share"), furnish=heads)
        self.sign("oneshot", *SHARED)
        self.jobs = [job | {"end_s": 0.2} for job in self.jobs]

    def turn(self, lie="", *, approve=False):
        jobs = [job | {"approves": approve} for job in self.jobs]
        return [*(job | {"after": LIAR, "leaving_s": 0.0} for job in jobs[:2]), jobs[2] | {"lies": lie}]

    def charges(self, site):
        """The ledger lines of a site's charges, by the approval that each names, oldest first."""
        lines = [e for e in LedgerFile(self.study(site).ledger_path(site)).entries if e.mechanism]
        return {one: [e for e in lines if e.approved == one] for one in dict.fromkeys(e.approved for e in lines)}


@pytest.mark.slow
@pytest.mark.parametrize(("spoils", "again"), [(4, 2), (6, 13)], ids=["7", "20"])
def test_restarts_of_a_lying_peer_cost_no_more_than_was_approved(tmp_path, spoils, again):
    group = Turns(tmp_path)
    turns = [group.turn("spoils")] * spoils + [group.turn(approve=True)]
    start(group.root, turns + [group.turn("begins again")] * again)
    logs = [(group.root / site / "stderr.txt").read_text() for site in HONEST]
    told = sum(log.count("let its people approve the plan again; nothing was sent") for log in logs)
    assert told >= spoils - MAX_ATTEMPTS  # who tells it first ends the run of the other
    assert any("it has the sum, and takes part in another one only after its people" in log for log in logs)
    for site in HONEST:
        first, second = group.charges(site).values()
        assert (len(first), len(second)) == (MAX_ATTEMPTS, 1)
        one = first[0].mechanism.gaussian_mechanism
        spent, approved = (
            epsilon(collect_mechanisms([*first, *second]), 1e-5),
            epsilon([one] * 2 * MAX_ATTEMPTS, 1e-5),
        )
        assert spent == pytest.approx(epsilon([one] * (MAX_ATTEMPTS + 1), 1e-5)) and spent < approved
        assert group.result(site)["lost"] == []  # of the finished run, whoever said hello
        assert [line["round"] for line in metrics(group.run(site), site)] == [1]


@pytest.mark.slow
def test_a_hospital_that_drops_out_of_secure_aggregation_is_awaited_until_others_have_the_sum(tmp_path):
    """Before that all sites try again; afterwards a site with the sum computes no other one without a new approval."""
    early, late = (Turns(tmp_path / name) for name in ("early", "late"))
    early.jobs[2] |= {"kill": {"where": "_mask_statistics", "round": 0}, "back_s": 2}
    late.jobs[2] |= {"kill": {"where": "_open_sum", "round": 0}, "back_s": 3}
    again = [{k: v for k, v in job.items() if k not in ("kill", "after")} for job in late.turn(approve=True)]
    start(tmp_path, [early.jobs, late.jobs, again])
    for group, approvals, most in ((early, 1, 2), (late, 2, 1)):
        for site in SITES:
            charged = [len(one) for one in group.charges(site).values()]
            assert len(charged) == approvals and max(charged) <= most
            assert group.result(site)["lost"] == []
    log = (late.root / "S2" / "stderr.txt").read_text()
    assert "site 0: it has the sum" in log or "site 1: it has the sum" in log  # one may have heard of the end before


TIMEOUT_S = 3.0


@pytest.mark.parametrize(("phase", "ends"), [(PHASES[0], "ends"), *nightly(*((one, "is gone") for one in PHASES))])
def test_the_other_sites_wait_for_a_dropout_and_read_their_sum_before_they_end(tmp_path, federation, phase, ends):
    """The site has dropped out, or reports its end in a message that ends everything after the sum."""
    identities, wires = {name: federation.identity(name) for name in NAMES}, {}

    def comm_of(k):
        comm = SecureComm(identities[NAMES[k]], NAMES, range(4), Wire(NAMES[k], wires), TIMEOUT_S)
        comm.leave = comm.abort if ends == "ends" else comm.close
        return killed_before(comm, phase) if k == 2 else comm

    sites, raised = together(tmp_path, comm_of)
    check(sites, raised, 2, [0, 1, 3] if phase in PHASES[:3] else [0, 1, 2, 3])


def test_a_late_site_is_left_out_and_its_messages_are_never_read(identities):
    """It finds the messages of the others, and all sites are in step again at the next gathering."""

    def work(comm):
        (me,), others = comm.sites, [k for k in range(3) if k not in comm.sites]
        comm.gather([Said(n=0)], Said)
        time.sleep(1.5 * TIMEOUT_S if me == 2 else 0)
        told = comm.exchange_documents({(me, k): Said(n=10 * me + k) for k in others}, Said, [(k, me) for k in others])
        assert all(one == {"n": 10 * k + me} for (k, _), one in told.items())
        assert comm.gather([Said(n=me)], Said) == [{"n": k} for k in range(3)]
        return sorted(k for k, _ in told), list(comm._inbox._messages)

    found = three_together(identities, work, timeout_s=TIMEOUT_S)
    assert found == {"C1": ([1], []), "C2": ([0], []), "C3": ([0, 1], [])}


@pytest.mark.slow
def test_hospitals_finish_without_a_killed_one_at_no_second_charge(tmp_path):
    """S3 is killed as it masks its sums; the others keep theirs, and continue without it on request."""
    group = Bed(tmp_path, 4, folder=str(tmp_path / "share"), furnish=lambda study, site, k: heads(study, site, k % 3))
    group.sign("oneshot", *SHARED[:-1], "comm.timeout_s=10", "privacy.dropouts=1")
    kill = {"kill": {"where": "_mask_statistics", "round": 0}, "gone": True}
    *left, killed = group.jobs
    start(group.root, [[*left, killed | kill], [job | {"without": ["S3"]} for job in left]])
    logs = {site: (group.root / site / "stderr.txt").read_text() for site in SITES}
    said = "the sum of the remaining sites is kept, go on --without it"
    assert any(said in log for log in logs.values()), logs
    for site in SITES:
        assert group.result(site)["lost"] == ["S3"] and len(charged(group.study(site), site)) == 1
