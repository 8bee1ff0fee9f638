"""Tests of secure aggregation with dropouts: the sum of the remaining hospitals and the charges."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wsi_fl.federation.comm import LocalComm, PeerTimeout
from wsi_fl.federation.methods import METHODS
from wsi_fl.federation.site_state import Site
from wsi_fl.learning.local_training import Learner
from wsi_fl.oneshot.secure_aggregation import aggregate_statistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.ledger import PrivacyLedger, PrivacyTerms
from wsi_fl.privacy.privacy_plan import plan_of_round
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.types import WsiFlError

NAMES = ("C1", "C2", "C3", "C4")
PHASES = ("hands out", "tells whose keys", "sends", "tells whose messages", "votes", "opens")
CPU = torch.device("cpu")


class GoneError(Exception):
    """The killed process of a site."""


class Table(LocalComm):
    """An exchange between sites in threads: each sends its messages and waits for the running ones.

    Args:
        me: this end's site.
        laid: messages by call, sender and receiver; shared by all.
        gone: the dropped-out sites; shared by all.
    """

    def __init__(self, me, n_sites, laid, gone, changed):
        super().__init__(n_sites)
        self.sites, self.calls = (me,), 0
        self.laid, self.gone, self.changed = laid, gone, changed

    def meet(self, said, senders):
        me, self.calls = self.sites[0], self.calls + 1
        with self.changed:
            self.laid[self.calls, me] = said
            self.changed.notify_all()
            assert self.changed.wait_for(
                lambda: all((self.calls, k) in self.laid or k in self.gone for k in senders), 30
            )
            return {k: self.laid[self.calls, k] for k in senders if (self.calls, k) in self.laid}

    def gather(self, documents, kind, *, patient=False):
        others = [k for k in self.running if k not in self.sites]
        told = self.meet(documents[0], others) | {self.sites[0]: documents[0]}
        if lost := [k for k in self.running if k not in told]:
            raise PeerTimeout("gone", lost)
        return super().gather([told[k] for k in self.running], kind)

    def exchange_documents(self, documents, kind, expected):
        told = self.meet(documents, [k for k, _ in expected])
        return super().exchange_documents(
            {pair: told[pair[0]][pair] for pair in expected if pair[0] in told}, kind, expected
        )

    def exchange(self, outgoing, expected, *, lossy=False, **given):
        told = self.meet(outgoing, [k for k, _ in expected])
        here = [item for items in told.values() for item in items if item.receiver in self.sites]
        self.traffic = {k: self.traffic.get(k) or next(iter(self.traffic.values())) for k in range(self.n_sites)}
        return super().exchange(here, expected, lossy=lossy, **given)


def killed_before(comm, phase):
    """Kill this site's process at the start of a phase."""
    left = PHASES.index(phase)

    def counted(call):
        def do(*args, **given):
            nonlocal left
            left -= 1
            if left < 0:
                raise GoneError
            return call(*args, **given)

        return do

    comm.exchange_documents, comm.exchange = counted(comm.exchange_documents), counted(comm.exchange)
    return comm


def site_of(folder, index, sigma):
    """Make a hospital after its round of training: its head holds the statistics of its rows."""
    (folder / NAMES[index]).mkdir(parents=True, exist_ok=True)
    head = SharedHead(2, 6, projection=4)
    head.noiseless_statistics.copy_(
        torch.from_numpy(np.random.default_rng(index).integers(-50, 50, len(head.noiseless_statistics)) / 4.0)
    )
    head.noiseless_statistics.view(2, -1)[:, -1] = 25.0  # counts that allow such sums
    learner = Learner(head, lr=0.1, weight_decay=0.0, device=CPU, dp=None)
    terms = PrivacyTerms(1e-5, allow=("model", "sums"), guarantee="shared")
    ledger = PrivacyLedger(folder / f"{NAMES[index]}.jsonl", site=NAMES[index], run="r", terms=terms)
    plan = plan_of_round(n=50, batch_size=50, epochs=1, sigma=sigma, clip=1.0, delta=1e-5) if sigma else None
    kept = SiteFolder(folder / NAMES[index])
    brought = {"name": NAMES[index], "train": (), "n_classes": 2, "units": None, "ledger": ledger, "plan": plan}
    made = {"folder": kept, "make_model": None, "choose_engine": None}
    return Site(index=index, learners={"shared": learner}, device=CPU, **brought, **made)


RECIPE = SimpleNamespace(method=METHODS["oneshot"], colluding=1, dropouts=1, insecure_seed=None)


def together(folder, comm_of, sigma=0.0):
    """Run each site in a thread; return the sites and their exceptions."""
    sites = {k: site_of(folder, k, sigma) for k in range(4)}
    raised = {}

    def be(k):
        comm = None
        try:
            comm = comm_of(k)
            aggregate_statistics([sites[k]], comm, RECIPE, range(4), round_=1)
        except (GoneError, WsiFlError) as error:
            raised[k] = error
            comm.leave() if hasattr(comm, "leave") else None

    threads = [threading.Thread(target=be, args=(k,), daemon=True) for k in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return sites, raised


def make_exchange(phase="", lost=(), meddle=None):
    laid, gone, changed = {}, set(), threading.Condition()

    def comm_of(k):
        comm = Table(k, len(NAMES), laid, gone, changed)

        def leave():
            with changed:
                gone.add(k)
                changed.notify_all()

        comm.leave = leave
        if k in lost:
            killed_before(comm, phase)
        return meddle(comm, k) if meddle else comm

    return comm_of


def head_of(site):
    return site.learners["shared"].model


def charges(site):
    return [one for one in site.ledger.entries if one.mechanism]


def check(sites, raised, lost, inside):
    """Require that the remaining sites hold the mean over the sum and name the dropped-out sites."""
    total = sum(head_of(sites[k]).noiseless_statistics for k in inside)
    for k, site in sites.items():
        if k == lost:
            assert isinstance(raised[k], GoneError)
            continue
        assert isinstance(raised[k], PeerTimeout) and raised[k].sites == [lost], raised[k]
        assert "the sum of the remaining sites is kept, go on --without it" in str(raised[k])
        head = head_of(site)
        assert int(head.n_sites) == len(inside)
        torch.testing.assert_close(head.sums[:-2].double() * len(inside), total, rtol=1e-5, atol=1e-4)
        assert site.folder.list_checkpoints() == [1]


@pytest.mark.parametrize("phase", PHASES)
def test_a_hospital_that_drops_out_costs_the_others_no_extra_budget(tmp_path, phase):
    sites, raised = together(tmp_path, make_exchange(phase, [2]))
    check(sites, raised, 2, [0, 1, 3] if phase in PHASES[:3] else [0, 1, 2, 3])


def test_the_sum_without_a_dropped_out_site_is_charged_once_and_has_the_plans_noise(tmp_path):
    noise = []
    for turn in range(12):
        sites, raised = together(tmp_path / str(turn), make_exchange("sends", [3]), sigma=2.0)
        assert set(raised) == {0, 1, 2, 3}
        assert [len(charges(sites[k])) for k in range(4)] == [1, 1, 1, 1]  # it was about to send
        head = head_of(sites[0])
        total = sum(head_of(sites[k]).noiseless_statistics for k in range(3))
        noise.append(head.sums[:-2].double() * 3 - total)
    # two of three sites carry the noise of the plan, so three carry half as much again
    assert float(torch.cat(noise).detach().std()) == pytest.approx(2.0 * 1.5**0.5, rel=0.3)
    left = [sites[k] for k in range(3)]  # as they go on without it, nothing is sent again
    aggregate_statistics(left, LocalComm(4, running=range(3)), RECIPE, range(3), round_=1)
    assert [len(charges(site)) for site in left] == [1, 1, 1]


def test_a_sum_with_more_dropouts_than_tolerated_is_void_and_charged_and_the_others_restart(tmp_path):
    """Three sites tolerate no dropout, so the noise is that of two honest sites again."""
    sites, raised = together(tmp_path, make_exchange("tells whose messages", [2, 3]), sigma=2.0)
    assert len(raised) == 4
    for k in (0, 1):
        assert "the sum is void: 2 sites agree" in str(raised[k])
        assert len(charges(sites[k])) == 1 and int(head_of(sites[k]).n_sites) == 0
    left = [sites[k] for k in range(3)]
    aggregate_statistics(left, LocalComm(4, running=range(3)), RECIPE, range(3), round_=1)
    assert [len(charges(site)) for site in left] == [2, 2, 2]
    assert float(head_of(left[0]).released[-1]) == pytest.approx(2.0**2 / 2, rel=1e-3)


def test_without_dropouts_the_result_is_the_sum_of_all_sites(tmp_path):
    sites, raised = together(tmp_path, make_exchange())
    assert not raised
    total = sum(head_of(site).noiseless_statistics for site in sites.values())
    for site in sites.values():
        torch.testing.assert_close(head_of(site).sums[:-2].double() * 4, total, rtol=1e-5, atol=1e-4)


def test_a_message_masked_for_another_set_of_sites_is_not_counted(tmp_path):
    """C3 reports to C4 that C1's keys never arrived, so C4 masks with fewer sites, and its message fits no other."""

    def lies(comm, k):
        hand, told = comm.exchange_documents, []

        def lying(documents, kind, expected):
            told.append(1)
            if k == 2 and len(told) == 2:
                documents = documents | {(2, 3): {"sites": [1, 2, 3]}}
            return hand(documents, kind, expected)

        comm.exchange_documents = lying
        return comm

    sites, raised = together(tmp_path, make_exchange(meddle=lies))
    for k, site in sites.items():
        assert "the sum is void: 0 of 4 sites are left" in str(raised[k])
        assert int(head_of(site).n_sites) == 0


def test_a_share_for_one_site_is_never_in_the_parcel_of_another(tmp_path):
    """Every share goes to one site only."""
    seen = {}

    def watch(comm, k):
        hand = comm.exchange_documents

        def watched(documents, kind, expected):
            seen.setdefault(k, dict(documents))
            return hand(documents, kind, expected)

        comm.exchange_documents = watched
        return comm

    together(tmp_path, make_exchange(meddle=watch))
    shares = [one for k in seen for document in seen[k].values() for one in document["pieces"][2:]]
    assert len(shares) == len(set(shares)) == 4 * 3 * 2
    assert all(pair[0] == k for k in seen for pair in seen[k])
