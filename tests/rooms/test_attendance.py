"""Who is there: beliefs that come together, whatever order they are heard in."""

import itertools
import random

from wsi_fl.hospitals.lines.attendance import Attendance

NAMES = ("C1", "C2", "C3", "C4")


def of(me, at_least=2, **heard):
    return Attendance(me, NAMES, at_least, dict(heard))


def test_whoever_fell_silent_is_not_expected_until_it_says_a_newer_hello():
    one = of("C1", C2=5.0, C3=6.0)
    assert one.expected() == ["C2", "C3", "C4"]
    one.note_gone(["C3", "C4"], "silent")
    assert one.expected() == ["C2"] and one.gone == {"C3": 6.0, "C4": 0.0}
    one.heard["C3"] = 6.5
    assert one.expected() == ["C2", "C3"]
    one.heard["C4"] = 1.0  # it came for the first time
    assert one.expected() == ["C2", "C3", "C4"]


def test_below_so_many_those_who_are_gone_are_lacking():
    one = of("C1", at_least=3)
    one.note_gone(["C3"], "silent")
    assert one.lacking() == []
    one.note_gone(["C4"], "silent")
    assert one.lacking() == ["C3", "C4"]
    one.heard["C4"] = 1.0
    assert one.lacking() == []


def test_two_halves_never_go_on_apart_however_few_the_plan_asks_for():
    for gone in (["C3", "C4"], ["C1", "C2"]):
        one = of(next(name for name in NAMES if name not in gone))
        one.note_gone(gone, "silent")
        assert one.lacking() == gone


def test_a_site_knows_when_the_others_went_on_without_it():
    one = of("C1")
    assert not one.left_out(10.0)
    one.learn({"C1": 9.0})
    assert not one.left_out(10.0)  # that was an earlier process of it
    one.learn({"C1": 10.0, "C9": 3.0})
    assert one.left_out(10.0) and not one.left_out(10.001) and "C9" not in one.gone


def test_all_who_hear_the_same_believe_the_same_in_any_order():
    dice = random.Random(3)
    told = [{name: float(dice.randrange(5)) for name in dice.sample(NAMES, 2)} for _ in range(4)]
    found = set()
    for order in itertools.permutations(told):
        one = of("C1", C2=2.0, C3=2.0, C4=2.0)
        for beliefs in order:
            one.learn(beliefs)
        found.add((tuple(one.expected()), tuple(sorted(one.gone.items()))))
    assert len(found) == 1
