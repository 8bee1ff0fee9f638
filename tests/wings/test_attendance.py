"""Who is there: beliefs that come together, whatever order they are heard in."""

import itertools
import random
import time
from types import SimpleNamespace

from wsi_fl.hospitals.lines.relayed import Attendance

NAMES = ("C1", "C2", "C3", "C4")


def of(me, at_least=2, **heard):
    one = Attendance(SimpleNamespace(name=me), NAMES, at_least)
    one.writer.heard.update(heard)
    return one


def gone(one):
    return [name for name in NAMES if one.is_gone(name)]


def test_whoever_fell_silent_is_gone_until_it_says_a_newer_hello():
    one = of("C1", C2=5.0, C3=6.0)
    assert gone(one) == []
    one.note_gone(["C3", "C4"], "silent")
    assert gone(one) == ["C3", "C4"] and one.gone == {"C3": 6.0, "C4": 0.0}
    one.writer.heard["C3"] = 6.5
    assert gone(one) == ["C4"]
    one.writer.heard["C4"] = 1.0  # it came for the first time
    assert gone(one) == []


def test_below_so_many_those_who_are_gone_are_lacking():
    one = of("C1", at_least=3)
    one.note_gone(["C3"], "silent")
    assert one.lacking() == []
    one.note_gone(["C4"], "silent")
    assert one.lacking() == ["C3", "C4"]
    one.writer.heard["C4"] = 1.0
    assert one.lacking() == []


def test_two_halves_never_go_on_apart_however_few_the_plan_asks_for():
    for away in (["C3", "C4"], ["C1", "C2"]):
        one = of(next(name for name in NAMES if name not in away))
        one.note_gone(away, "silent")
        assert one.lacking() == away


def test_a_site_knows_when_the_others_went_on_without_it_and_says_a_later_hello():
    one = of("C1")
    since = one.writer.since
    assert not one.learn({"C1": since - 1.0})  # that was an earlier process of it
    assert one.learn({"C1": since + 5.0, "C9": 3.0}) and "C9" not in one.gone
    one.note_gone((), "the others went on")
    assert one.writer.since > since + 5.0 and not one.learn({"C1": since + 5.0})


def test_after_a_clock_was_set_the_next_hello_has_its_new_time(monkeypatch):
    """Others take none from the future, and would take one that is later than such for a lie too."""
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 2 * 86400)
        one = of("C1")
        assert not one.clock_was_set()
    assert one.clock_was_set()
    one.note_gone((), "its clock was set")
    assert abs(one.writer.since - real()) < 60 and not one.clock_was_set()


def test_where_all_are_needed_nobody_is_gone_because_a_peer_says_so():
    one = of("C1", at_least=None)
    assert not one.learn({"C1": 1e11, "C2": 1e11}) and one.gone == {}


def test_all_who_hear_the_same_believe_the_same_in_any_order():
    dice = random.Random(3)
    told = [{name: float(dice.randrange(5)) for name in dice.sample(NAMES, 2)} for _ in range(4)]
    found = set()
    for order in itertools.permutations(told):
        one = of("C1", C2=2.0, C3=2.0, C4=2.0)
        for beliefs in order:
            one.learn(beliefs)
        found.add((tuple(gone(one)), tuple(sorted(one.gone.items()))))
    assert len(found) == 1
