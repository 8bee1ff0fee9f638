"""The history of a ledger's rounds: the same answers as from all lines at once, at a cost that does not grow."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.privacy import accounting
from wsi_fl.privacy.accounting import Composition, Mechanism, epsilon
from wsi_fl.privacy.guarantee import LedgerRound, PrivacyTerms, RoundHistory
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import LedgerEntry

DELTA = 1e-5
SAMPLED = {"sigma": 1.4, "clip": 0.7, "sample_rate": 0.1, "steps": 10}
STRONGER, FULL = SAMPLED | {"sigma": 2.3}, SAMPLED | {"sample_rate": 1.0, "steps": 1, "sigma": 3.0}
CHARGE = {"delta": DELTA, "unit": "row", "guarantee": "guaranteed"}


def make_line(run="one", number=1, site="C1", **fields):
    return LedgerEntry.model_validate({"run": run, "site": site, "round": number, "prev": "0" * 64} | fields)


def charge(mechanism=SAMPLED, **fields):
    return {"mechanism": mechanism} | CHARGE | fields


contents = st.sampled_from(
    [
        *(charge(mechanism, released="model 1") for mechanism in (SAMPLED, STRONGER, FULL)),
        charge(),
        charge(SAMPLED | {"steps": 0}),
        {"released": "scores 2"},
        {"sending": True},
        {"relayed": "3"},
    ]
)
rare_contents = st.sampled_from(
    [
        {"released": "buffer 4"},
        charge(unit="patient"),
        charge(insecure=True),
        charge(guarantee="nominal"),
        charge(SAMPLED | {"sigma": 0.0}),
    ]
)


@st.composite
def ledgers(draw):
    places = st.tuples(st.sampled_from(("one", "two")), st.integers(1, 3), st.sampled_from(("C1", "C2")))
    usual = [make_line(*draw(places), **fields) for fields in draw(st.lists(contents, max_size=12))]
    return usual + [make_line(*draw(places), **fields) for fields in draw(st.lists(rare_contents, max_size=2))]


def collect_from_all_lines(entries):
    """Return the rounds by a walk over all lines."""
    rounds, latest = [], {}
    for entry in entries:
        key = entry.site, entry.run
        current = latest.get(key)
        is_current = current is not None and current.number == entry.round
        if entry.sending or entry.relayed:
            if is_current:
                current.final = True
            continue
        if not is_current or (current.final and entry.mechanism):
            current = latest[key] = LedgerRound(*key, entry.round)
            rounds.append(current)
        if entry.mechanism:
            current.mechanism = entry.mechanism.gaussian_mechanism
        if entry.released:
            current.releases |= [entry.released.split()]
    return rounds


@settings(max_examples=80)
@given(entries=ledgers(), asked=st.sets(st.integers(0, 14)))
def test_a_history_answers_line_by_line_as_from_all_lines(entries, asked):
    history = RoundHistory()
    for n, entry in enumerate(entries, 1):
        rounds = collect_from_all_lines(entries[:n])
        spent = [k.mechanism for k in rounds if k.mechanism]
        if entry.mechanism and n in asked:  # composes what is there
            assert history.epsilon_with(entry, DELTA) == epsilon(spent, DELTA)
        history.add_entries([entry])
        assert history.rounds == rounds and history.list_mechanisms() == spent
        assert history.last_round == max((k.number for k in rounds), default=0)
        assert history.last_final_round == max((k.number for k in rounds if k.final), default=0)
        assert history.n_charged == len(spent)
        for number in range(4):
            assert history.find_round(number) == next((k for k in rounds[::-1] if k.number == number), None)
        if n in asked:
            whole = RoundHistory(entries[:n])
            for seeded in (True, False):
                assert history.compute_epsilon(DELTA, seeded=seeded) == whole.compute_epsilon(DELTA, seeded=seeded)
            assert history.weakest_guarantee() == whole.weakest_guarantee()
            if (value := history.compute_epsilon(DELTA)) is not None:
                assert value == epsilon(spent, DELTA)


@given(
    mechanisms=st.lists(st.sampled_from([Mechanism(**k) for k in (SAMPLED, STRONGER, FULL)]), max_size=8),
    n_first=st.integers(0, 8),
)
def test_a_composition_grows_to_the_same_epsilon_bit_by_bit(mechanisms, n_first):
    composition = Composition(mechanisms[:n_first])
    before = composition.compute_epsilon(DELTA)
    assert composition.with_mechanisms(mechanisms[n_first:]).compute_epsilon(DELTA) == epsilon(mechanisms, DELTA)
    assert composition.compute_epsilon(DELTA) == before == epsilon(mechanisms[:n_first], DELTA)
    for k in mechanisms[n_first:]:
        composition.add_mechanism(k)
    total, precision = np.zeros(len(accounting._ORDERS)), 0.0
    for k in mechanisms:
        total = total + k.steps * accounting.compute_step_rdp(k.sigma, k.sample_rate, accounting._ORDERS)
        precision += k.steps / k.sigma**2
    assert (composition.sum_divergences() == total).all() and composition.gaussian_mu == precision**0.5


class CountedLines(list):
    """Lines of a ledger that count how many were visited."""

    visited = 0

    def __iter__(self):
        self.visited += len(self)
        return super().__iter__()

    def __getitem__(self, place):
        lines = super().__getitem__(place)
        self.visited += len(lines) if isinstance(place, slice) else 1
        return lines


@pytest.mark.parametrize(
    "terms", [{"allow": ("model",)}, {"lifetime": True, "max_epsilon": 90.0}], ids=["run", "lifetime"]
)
def test_a_round_costs_the_same_however_many_were_before(tmp_path, monkeypatch, terms):
    composed, original = Counter(), accounting.compute_step_rdp
    monkeypatch.setattr(accounting, "compute_step_rdp", lambda *given: composed.update(["steps"]) or original(*given))
    path, mechanism = tmp_path / "C1.jsonl", Mechanism(**SAMPLED)
    ledger = PrivacyLedger(path, site="C1", run="one", terms=PrivacyTerms(delta=DELTA, **terms))
    lines = ledger._file.entries = CountedLines()
    counts, values = [], []
    for round_ in range(1, 31):
        before = lines.visited, composed["steps"]
        assert ledger.fits_budget(round_, mechanism)
        vector = np.full(3, round_, np.float32)
        sent = ledger.release(round_, vector, schema="ab" * 32, mechanism=mechanism, content="model")
        ledger.record_transmission(round_, sent.digest)
        values.append((ledger.epsilon(), ledger.last_round(), ledger.last_final_round(), ledger.guarantee()))
        counts.append((lines.visited - before[0], composed["steps"] - before[1]))
    assert len(lines) == 60 and set(counts[2:]) == {counts[2]}
    assert all(a < b for a, b in pairwise(values))
    assert values[-1][0] == ledger.epsilon(lifetime=True) == epsilon([mechanism] * 30, DELTA)
    assert ledger.summary() == PrivacyLedger(path, site="C1", run="one", terms=ledger.terms).summary()
