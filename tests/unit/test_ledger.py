"""The ledger makes all releases, keeps a complete account, and enforces the budget."""

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from conftest import planned, refused

from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.ledger import BudgetSpent, PrivacyLedger, PrivacyTerms
from wsi_fl.privacy.ledger_file import Release, digest_values
from wsi_fl.types import WsiFlError

ROUND = Mechanism(sigma=1.4, clip=0.7, sample_rate=0.1, steps=10)
SUMS = Mechanism(sigma=6.0, clip=1.0, sample_rate=1.0, steps=1)
DELTA = 1e-5
SCHEMA = "ab" * 32
VECTOR = np.arange(5, dtype=np.float32)
UNKNOWN = "did not release these bytes"


def expected_epsilon(rounds):
    """Return ε of a number of rounds, approximate for comparison."""
    return pytest.approx(epsilon([ROUND] * rounds, DELTA))


def limit(rounds, more=1e-9):
    return epsilon([ROUND] * rounds, DELTA) + more


@pytest.fixture
def open_ledger(tmp_path):
    def open_(run="one", includes=(), delta=DELTA, **terms):
        terms = PrivacyTerms(delta=delta, **terms)
        return PrivacyLedger(tmp_path / "C1.jsonl", site="C1", run=run, terms=terms, includes=includes)

    return open_


def release(ledger, round_, mechanism=ROUND, vector=VECTOR):
    return ledger.release(round_, vector, schema=SCHEMA, mechanism=mechanism, content="model")


def record(ledger, *rounds):
    for round_ in rounds:
        ledger.record(round_, ROUND)


def send_again(ledger, round_=1, vector=VECTOR, **given):
    return ledger.release_again(round_, vector, schema=SCHEMA, **given)


def relay(ledger, round_=1):
    digest = digest_values(VECTOR)
    return ledger.relay_mixture(round_, VECTOR / 2, own_sha256=digest, schema=SCHEMA, weight=0.5)


def test_only_a_ledger_makes_a_release_which_cannot_be_changed_on_its_way(open_ledger):
    with pytest.raises(TypeError, match=r"only PrivacyLedger\.release"):
        Release("C1", 1, SCHEMA, VECTOR, 1.0, "0", seal=object())
    mine = VECTOR.copy()
    made = release(open_ledger(), 1, vector=mine)
    assert isinstance(made, Release)
    mine[:] = 7
    assert made.vector.tolist() == VECTOR.tolist()
    with pytest.raises(ValueError, match="read-only"):
        made.vector[0] = 1
    with pytest.raises(FrozenInstanceError):
        made.vector = mine
    with pytest.raises(TypeError, match="only PrivacyLedger"):
        replace(made, vector=mine, seal=None)


@pytest.mark.parametrize(
    ("mechanism", "terms"),
    [(None, {}), (replace(ROUND, sigma=0.0), {}), (ROUND, {"insecure": True})],
    ids=["no DP", "no noise", "noise that others know"],
)
def test_unprotected_values_are_released_only_if_allowed_by_name(open_ledger, mechanism, terms):
    for allow in ((), ("buffer",)):
        ledger = open_ledger(allow=allow, **terms)
        with pytest.raises(WsiFlError, match=r"sites/C1\.toml.*allow = \[\"model\"\]"):
            release(ledger, 1, mechanism)
        assert not ledger.path.exists() or not ledger.path.read_text()
    assert release(open_ledger(allow=("model",), **terms), 1, mechanism).round == 1


def test_values_that_are_not_finite_are_not_released(open_ledger):
    ledger, spoilt = open_ledger(), np.array([0, np.nan], np.float32)
    words = ("not finite in round 3", "lower the learning rate")
    refused(lambda: release(ledger, 3, vector=spoilt), *words, error=WsiFlError)
    assert ledger.list_mechanisms() == []


def test_the_account_survives_reopening_and_only_grows(open_ledger):
    ledger, before = open_ledger(), b""
    for round_ in (1, 2, 3):
        release(ledger, round_)
        now = ledger.path.read_bytes()
        assert now.startswith(before)
        before = now
    assert open_ledger().epsilon() == ledger.epsilon() == expected_epsilon(3)
    assert open_ledger("other").epsilon() is None
    line = json.loads(before.splitlines()[0])
    assert line["mechanism"] == {"sigma": 1.4, "clip": 0.7, "sample_rate": 0.1, "steps": 10}
    assert (line["site"], line["run"], line["round"], line["delta"]) == ("C1", "one", 1, DELTA)


def test_a_line_cut_short_by_a_crash_is_forgotten_and_does_not_spoil_the_next(open_ledger):
    ledger = open_ledger()
    release(ledger, 1)
    whole = ledger.path.read_bytes()
    for cut in (1, 20, len(whole) - 2):
        ledger.path.write_bytes(whole + whole[:cut])
        again = open_ledger()
        assert again.epsilon() == expected_epsilon(1)
        release(again, 2)
        assert open_ledger().epsilon() == expected_epsilon(2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("}\n{", "\n{"),
        ('"steps": 10', '"steps": -10'),
        ('"unit": "row", ', ""),
        ('"delta": 1e-05', '"delta": 0.0'),
        ('"sample_rate": 0.1', '"sample_rate": 1.5'),
        ('"sigma": 1.4', '"sigma": NaN'),
        ('"prev": "', '"next": "'),
        ('"round": 1', '"round": "' + "[" * 100_000),
    ],
)
def test_malformed_lines_are_refused(open_ledger, before, after):
    ledger = open_ledger()
    record(ledger, 1, 2)
    ledger.path.write_text(ledger.path.read_text().replace(before, after, 1))
    refused(open_ledger, "line 1", error=WsiFlError)


def test_a_round_redone_at_once_counts_once_and_an_older_round_counts_again(open_ledger):
    ledger = open_ledger()
    record(ledger, 1, 2, 2, 2, 3)
    assert ledger.epsilon() == expected_epsilon(3)
    record(ledger, 1)  # from the beginning, with new noise
    assert ledger.epsilon() == expected_epsilon(4)


def test_interleaved_runs_are_kept_apart(open_ledger):
    a, b = open_ledger("a"), open_ledger("b")
    for round_ in (1, 2):
        record(a, round_)
        record(b, round_)
    again = open_ledger("a")
    assert again.epsilon() == expected_epsilon(2) and again.epsilon(lifetime=True) == expected_epsilon(4)


def test_the_budget_of_a_real_site_is_for_life_and_of_a_simulated_one_for_a_run(open_ledger):
    record(open_ledger("first"), 1, 2)
    simulated = open_ledger("second", max_epsilon=limit(3))
    for round_ in (1, 2, 3):
        assert simulated.fits_budget(round_, ROUND)
        record(simulated, round_)
    assert not simulated.fits_budget(4, ROUND)
    assert not open_ledger("third", max_epsilon=limit(3), lifetime=True).fits_budget(1, ROUND)


def test_the_budget_refuses_exactly_the_step_that_crosses_it_and_redoing_the_last_is_no_crossing(open_ledger):
    assert open_ledger(max_epsilon=limit(1, 0)).fits_budget(1, ROUND)
    short = open_ledger(max_epsilon=limit(1, -1e-9))
    assert not short.fits_budget(1, ROUND)
    with pytest.raises(BudgetSpent, match="site C1: round 1 would raise epsilon to"):
        record(short, 1)
    ledger = open_ledger(max_epsilon=limit(2))
    record(ledger, 1, 2)
    assert ledger.fits_budget(2, ROUND) and not ledger.fits_budget(3, ROUND)


def test_two_runs_at_once_cannot_spend_the_same_budget(open_ledger):
    terms = {"max_epsilon": limit(1), "lifetime": True}
    a, b = open_ledger("a", **terms), open_ledger("b", **terms)
    assert a.fits_budget(1, ROUND) and b.fits_budget(1, ROUND)
    release(a, 1)
    with pytest.raises(BudgetSpent):
        release(b, 1)
    assert not b.fits_budget(1, ROUND) and open_ledger("a", **terms).epsilon(lifetime=True) == expected_epsilon(1)


def test_only_recorded_bytes_are_resent_at_no_cost_and_on_record(open_ledger):
    release(open_ledger(), 4)
    assert open_ledger().last_final_round() == 0
    again = send_again(open_ledger(), 4, weight=0.5)
    assert again.vector.tolist() == VECTOR.tolist() and again.weight == 0.5
    assert open_ledger().last_final_round() == 4 and open_ledger().epsilon() == expected_epsilon(1)
    for run, round_, vector in (("one", 4, VECTOR + 1), ("one", 5, VECTOR), ("other", 4, VECTOR)):
        with pytest.raises(WsiFlError, match=UNKNOWN):
            send_again(open_ledger(run), round_, vector)


def test_included_entries_count_for_their_run_alone(open_ledger):
    release(open_ledger("oneshot"), 0, SUMS)
    both = epsilon([SUMS, ROUND], DELTA)
    mine = open_ledger(includes=["oneshot"], max_epsilon=both)
    assert (mine.last_round(), mine.last_final_round(), mine.count_rounds()) == (0, 0, 0)
    assert mine.list_mechanisms() == [SUMS] and mine.epsilon() == epsilon([SUMS], DELTA)
    assert mine.fits_budget(1, ROUND)
    release(mine, 1)
    assert mine.epsilon() == pytest.approx(both)
    assert (mine.summary()["steps"], mine.summary()["epsilon"]) == (11, mine.epsilon())
    assert not mine.fits_budget(2, ROUND)
    with pytest.raises(BudgetSpent):
        record(mine, 2)
    assert (mine.last_round(), mine.count_rounds()) == (1, 1)
    assert open_ledger("one").epsilon() == expected_epsilon(1) and open_ledger("two").epsilon() is None


def test_an_included_entry_is_no_round_that_was_sent_or_could_be_passed_on(open_ledger):
    sums = open_ledger("oneshot", allow=("model",))
    release(sums, 3, SUMS)
    sums.record_transmission(3, digest_values(VECTOR))
    mine = open_ledger(includes=["oneshot"], max_epsilon=0.01)
    assert mine.last_final_round() == 0
    assert not mine.fits_budget(3, ROUND)  # the sums's round 3 is not this run's
    for act in (relay, send_again):
        with pytest.raises(WsiFlError, match=UNKNOWN):
            act(mine, 3)
    release(sums, 4, None)
    assert open_ledger(includes=["oneshot"]).epsilon() is None  # something of it left without privacy


OTHER = VECTOR + 1
REDONE = [lambda ledger: release(ledger, 1, vector=OTHER), lambda ledger: send_again(ledger, vector=OTHER)]


@pytest.mark.parametrize(
    ("done", "then", "words"),
    [
        # killed between checkpoint and `sending`: the resumed run sends the same bytes
        ([send_again], [lambda ledger: record(ledger, 1)], "was sent already and is not trained again"),
        # a host sends a share of its model to a returning site before its own release
        ([relay], [lambda ledger: record(ledger, 1)], "was sent already"),
        (REDONE, [lambda ledger: release(ledger, 1)], "was sent already"),
        (
            REDONE[:1],
            [
                *(send_again, relay),
                lambda ledger: ledger.record_transmission(1, digest_values(VECTOR)),
                lambda ledger: ledger.settle_round(1, digest_values(VECTOR)),
            ],
            "did not release these bytes, or released others since",
        ),
    ],
)
def test_one_version_of_a_round_leaves_and_is_charged_once(open_ledger, done, then, words):
    """Two jobs work on copies of one run; the later one at the ledger is refused."""
    late, early = open_ledger(), open_ledger()
    release(late, 1)
    for act in done:
        act(early)
    for act in then:
        refused(lambda act=act: act(late), words, error=WsiFlError)
    assert open_ledger().list_mechanisms() == [ROUND]


REAL = {"lifetime": True, "max_epsilon": 9.0}


def test_the_whole_past_is_priced_at_the_smallest_delta(open_ledger):
    record(open_ledger(delta=1e-3, **REAL), 1)
    later = open_ledger("two", delta=1e-6, **REAL)
    assert later.epsilon(lifetime=True) == epsilon([ROUND], 1e-6)
    record(later, 1)
    refused(lambda: open_ledger("three", **REAL), "priced at delta = 1e-06", error=WsiFlError)


def test_a_real_hospital_refuses_a_large_delta_and_too_little_noise(open_ledger):
    ledger = open_ledger(delta=0.01, **REAL)
    refused(lambda: ledger.record(1, planned(100, 10, delta=0.01)), "publishing one of 100 rows", "below 0.01")
    loud, strict = replace(ROUND, sigma=0.01), {"guarantee": "guaranteed"}
    words = ("without differential privacy", 'allow = ["model"]')
    refused(lambda: release(open_ledger(**REAL | {"max_epsilon": 1e9}, **strict), 1, loud), *words, error=WsiFlError)
    simulated = open_ledger(allow=("model",), **strict)
    release(simulated, 1, loud)
    assert (simulated.epsilon(), simulated.guarantee()) == (None, "none")


def test_the_weakest_guarantee_counts_over_a_lifetime(open_ledger):
    worth, terms = [], {**REAL, "allow": ("model",)}
    for run, more in (("a", {"guarantee": "guaranteed"}), ("b", {"guarantee": "nominal"}), ("c", {"insecure": True})):
        release(open_ledger(run, **terms, **more), 1)
        strict = open_ledger("d", guarantee="guaranteed", **terms)
        worth.append((strict.guarantee(lifetime=True), strict.epsilon(lifetime=True) is None))
    assert worth == [("guaranteed", False), ("nominal", False), ("none", True)]
