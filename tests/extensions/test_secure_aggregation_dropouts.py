"""Secure aggregation is exact for the remaining sites, and never opens two survivor sets or both keys of a site."""

from functools import partial

import numpy as np
import pytest
from builders import refused
from conftest import nightly
from Crypto.Protocol.SecretSharing import Shamir
from test_secure_aggregation_masks import N, looks_random, secret

from wsi_fl.oneshot import secagg
from wsi_fl.oneshot.secagg import KeyPair, SecureSum, _self_mask, mask_values, require_enough_sites, vote_threshold
from wsi_fl.types import UsageError, WsiFlError

CONTEXT = b"run 7 attempt 3"
PHASES = ("hands out", "tells whose keys", "sends", "tells whose messages", "votes", "opens")


class Sum:
    """A sum of sites, some of which drop out before given phases.

    Args:
        values: int64[n] of each site, or of how many sites.
        lost: who goes before a phase, by phase.
    """

    def __init__(self, values, colluding=1, dropouts=1, lost=None):
        self.values = [secret(k, 20) for k in range(values)] if isinstance(values, int) else values
        self.lost = lost or {}
        self.alive = list(range(len(self.values)))
        self.parts = {k: SecureSum(k, self.alive, colluding, dropouts, CONTEXT) for k in self.alive}

    def phase(self, name):
        self.alive = [k for k in self.alive if k not in self.lost.get(name, ())]
        return self.alive

    def taken(self, site, handing):
        """Return the sites whose parcels a site has taken."""
        return self.parts[site].take_parcels({j: self.parts[j].parcels[site] for j in handing if j != site})

    def join(self):
        handing = self.phase("hands out")
        held = {k: self.taken(k, handing) for k in handing}
        told = {j: held[j] for j in self.phase("tells whose keys")}
        for k in self.alive:
            self.parts[k].join([told[j] for j in self.alive if j != k])
        return self

    def send(self):
        self.messages = {k: self.parts[k].mask_values(self.values[k]) for k in self.phase("sends")}
        self.came = {k: set(self.messages) for k in self.alive}
        return self

    def vote(self):
        told = {j: self.came[j] for j in self.phase("tells whose messages")}
        votes = {
            k: self.parts[k].vote_survivors(self.came[k], [told[j] for j in self.alive if j != k]) for k in self.alive
        }
        self.votes = {k: votes[k] for k in self.phase("votes")}
        return self

    def open(self):
        opened = {k: self.parts[k].open_shares(self.votes) for k in self.alive}
        self.openings = {k: opened[k] for k in self.phase("opens")}
        return self

    def until_opened(self):
        return self.join().send().vote().open()

    def total(self, reader):
        return self.parts[reader].compute_total(self.messages, self.openings).tolist()

    def of(self, sites):
        """Return the sum of these sites' values."""
        return sum(self.values[k] for k in sites).tolist()


@pytest.mark.parametrize("n_sites", [4, 6, 20, *nightly(50)])
def test_all_remaining_sites_read_the_same_sum_after_any_dropouts(n_sites):
    dropouts = (n_sites - 2) // 2
    for seed in range(8 if n_sites < 20 else 2):
        rng = np.random.default_rng(seed)
        gone = rng.choice(n_sites, dropouts, replace=False).tolist()
        when = {one: PHASES[rng.integers(len(PHASES))] for one in gone}
        lost = {phase: [one for one in gone if when[one] == phase] for phase in PHASES}
        sum_ = Sum(n_sites, dropouts=dropouts, lost=lost).until_opened()
        inside = [k for k in range(n_sites) if when.get(k, "later") not in PHASES[:3]]
        assert sum_.parts[sum_.alive[0]].survivors == inside
        for reader in sum_.alive:
            assert sum_.total(reader) == sum_.of(inside), (seed, when)


def test_a_site_whose_message_reached_only_some_sites_is_left_out():
    sum_ = Sum(5).join().send()
    sum_.came[3] -= {1}
    sum_.vote().open()
    assert sum_.parts[1].survivors == [0, 2, 3, 4]
    for reader in range(5):  # the one whose message was late reads it too
        assert sum_.total(reader) == sum_.of((0, 2, 3, 4))


def test_the_message_of_a_late_site_stays_masked():
    """The others' opened values, its key of pairwise masks included, leave its self mask on the message."""
    values = [np.zeros(N, np.int64) for _ in range(5)]
    sum_ = Sum(values)
    secrets = sum_.parts[4]._seeds
    sum_.join().send()
    for k in (0, 1, 2, 3):
        sum_.came[k] -= {4}
    sum_.came.pop(4)
    sum_.lost["tells whose messages"] = [4]
    sum_.vote().open()
    assert sum_.total(0) == [0] * N
    seed = Shamir.combine([(k + 1, sum_.openings[k][1 + 4]) for k in range(4)])
    part = sum_.parts[0]
    publics = [part._received[k][0] for k in range(5)]
    assert KeyPair.from_seed(seed).public == publics[4]
    unpaired = sum_.messages[4] - mask_values(values[4], 4, KeyPair.from_seed(seed), publics, part.sum_context)
    assert looks_random(unpaired)
    assert not (unpaired - _self_mask(secrets[1], part.sum_context, N)).any()  # with both keys it would be read


class Adversary:
    """Colluding sites that combine their parcels and the others' openings."""

    def __init__(self, sum_, colluding):
        self.sum, self.sites = sum_, range(colluding)
        self.shares = {}
        for k in self.sites:
            for site, one in sum_.parts[k]._received.items():
                for kind in (0, 1):
                    self.shares.setdefault((site, kind), {})[k + 1] = one[2 + kind]

    def hear(self, opener, opening):
        """Record the openings of an honest site, of any seeds."""
        part = self.sum.parts[opener]
        for site, share in zip(part.participants, opening[1:], strict=True):
            self.shares[site, part._seed_kind(site)][opener + 1] = share

    def keys_of(self, site, votes):
        """Return the seeds of a site that the adversary can recover."""
        key = self.sum.parts[0]._received[site]
        found = set()
        for kind in (0, 1):
            shares = list(self.shares[site, kind].items())
            if len(shares) >= votes and KeyPair.from_seed(Shamir.combine(shares[:votes])).public == key[kind]:
                found.add(kind)
        return found


def vote_with_liars(n_sites, colluding, dropouts):
    """Return a sum whose colluding sites misinform half of the honest ones about the last message, and the votes."""
    sum_ = Sum(n_sites, colluding, dropouts).join()
    adversary = Adversary(sum_, colluding)
    sum_.send()
    honest, votes = range(colluding, n_sites), {}
    for k in honest:
        lie = sum_.came[0] if k % 2 else sum_.came[0] - {n_sites - 1}
        told = [sum_.came[j] for j in honest if j != k] + [lie] * colluding
        votes[k] = sum_.parts[k].vote_survivors(sum_.came[k], told)
    return sum_, adversary, honest, votes


@pytest.mark.parametrize(("n_sites", "colluding", "dropouts"), [(5, 1, 1), (6, 1, 2), (9, 2, 3), (9, 4, 2)])
def test_two_survivor_sets_are_never_opened(n_sites, colluding, dropouts):
    """Colluding sites vote for both sets; they recover both keys of no site, and at most one set opens."""
    sum_, adversary, honest, votes = vote_with_liars(n_sites, colluding, dropouts)
    assert len(set(votes.values())) == 2
    opened_for = set()
    for k in honest:
        for_it = votes | dict.fromkeys(adversary.sites, votes[k])
        try:
            adversary.hear(k, sum_.parts[k].open_shares(for_it))
            opened_for.add(votes[k])
        except WsiFlError as error:
            assert "the sum is void" in str(error)
    assert len(opened_for) <= 1
    for site in honest:
        assert len(adversary.keys_of(site, vote_threshold(n_sites, colluding))) < 2


def test_a_lower_vote_threshold_would_open_two_survivor_sets(monkeypatch):
    """The same adversary wins with a lower threshold, so the test above can fail."""
    monkeypatch.setattr(secagg, "vote_threshold", lambda n_sites, colluding: n_sites // 2)
    sum_, adversary, honest, votes = vote_with_liars(6, 1, 2)
    for k in honest:
        adversary.hear(k, sum_.parts[k].open_shares(votes | dict.fromkeys(adversary.sites, votes[k])))
    assert adversary.keys_of(5, 3) == {0, 1} and len({votes[k] for k in honest}) == 2


def test_two_survivor_sets_cannot_both_have_enough_votes():
    for n_sites in range(3, 60):
        for colluding in range(n_sites):
            votes = vote_threshold(n_sites, colluding)
            assert 2 * votes - n_sites > colluding  # whoever votes for both is more than those who may lie
            assert 2 * (votes - 1) - n_sites <= colluding  # and fewer would not do


def test_the_remaining_sites_suffice_to_agree_and_to_mask_each_other():
    for dropouts in range(1, 20):
        for colluding in range(1, 20):
            n_sites = colluding + 2 * dropouts + 1
            assert vote_threshold(n_sites, colluding) <= n_sites - dropouts
            assert vote_threshold(n_sites - 1, colluding) > n_sites - 1 - dropouts
            assert n_sites - dropouts - colluding >= 2


def test_a_site_votes_once_and_opens_once():
    sum_ = Sum(5).until_opened()
    part = sum_.parts[2]
    refused(lambda: part.vote_survivors({0, 1, 2, 3}, []), "a site votes once in a sum")
    refused(lambda: part.open_shares(sum_.votes), "a site opens its shares once")
    refused(lambda: part.mask_values(sum_.values[2]), "a site masks its values once")
    assert not hasattr(part, "_seeds") and not hasattr(part, "parcels")
    assert all(len(one) == 2 for one in part._received.values())  # it has forgotten all shares
    refused(lambda: SecureSum(0, range(5), 1, 1, CONTEXT).open_shares({}), "in order")


def test_no_key_is_opened_without_enough_votes():
    sum_ = Sum(5).join().send().vote()
    few = {k: sum_.votes[k] for k in (0, 1, 2)}
    refused(lambda: sum_.parts[0].open_shares(few), "the sum is void: 3 sites agree", "4 must")
    refused(lambda: sum_.parts[0].open_shares(sum_.votes), "once")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda shares: (*shares[:4], bytes(16)), ("the sum is void", "of site 3 do not fit its key")),
        (lambda shares: shares[:-1], ("the sum is void: 2 sites opened", "3 must")),
    ],
)
def test_inconsistent_shares_void_the_sum_in_one_line(spoil, words):
    sum_ = Sum(4, lost={"opens": [3]}).until_opened()
    sum_.openings[1] = spoil(sum_.openings[1])
    refused(lambda: sum_.total(0), *words)


def test_a_seed_that_a_site_opens_itself_is_checked_against_its_key():
    sum_ = Sum(4).until_opened()
    sum_.openings[1] = (bytes(16), *sum_.openings[1][1:])
    assert sum_.total(0) == sum_.of(range(4))  # from shares instead


def test_an_invalid_parcel_counts_as_missing():
    sum_ = Sum(4)
    whole = {k: sum_.parts[k].parcels[0] for k in (1, 2, 3)}
    for bad in ((), whole[3][:3], (*whole[3][:3], bytes(15)), (*whole[3], b"")):
        assert SecureSum(0, range(4), 1, 1, CONTEXT).take_parcels(whole | {3: bad}) == [0, 1, 2]


def test_too_few_remaining_sites_void_the_sum_at_no_cost_before_messages():
    words = "the sum is void: 3 of 5 sites are left"
    refused(Sum(5, lost={"hands out": [3, 4]}).join, words, "--resume")
    refused(Sum(5, lost={"sends": [3, 4]}).join().send().vote, words)


def test_a_site_unheard_by_the_others_sends_no_message():
    sum_ = Sum(4)
    sum_.taken(0, range(4))
    refused(lambda: sum_.parts[0].join([{1, 2, 3}] * 3), "did not reach the others in time")


@pytest.mark.parametrize(("n_sites", "colluding", "dropouts"), [(3, 1, 1), (2, 1, 0), (50, 1, 25), (9, 3, 3)])
def test_too_few_sites_for_the_settings_are_refused_in_one_line(n_sites, colluding, dropouts):
    least = colluding + max(1, 2 * dropouts) + 1
    act = partial(require_enough_sites, n_sites, colluding, dropouts)
    refused(act, f"needs {least} sites or more, not {n_sites}", error=UsageError)
    require_enough_sites(least, colluding, dropouts)
