"""Splits separate patients, samples balance labels, and neither depends on the order of files."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.slides.patching.splits import assign_splits, sample_rows
from wsi_fl.stages.prepare.tile_plans import sample_patches
from wsi_fl.types import SlideRecord


def record(slide: int, patient: int, positive: bool, split: str | None = None) -> SlideRecord:
    kind = "annotated" if positive else "negative"
    path = Path(f"{slide}.tif")
    return SlideRecord(path, f"s{slide}", f"p{patient:03d}", "C1", kind, positive, None, split)


COHORTS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=120).map(
    lambda rows: [record(k, patient, positive) for k, (patient, positive) in enumerate(rows)]
)
FRACTIONS = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 0.5, 0.8])


@given(cohort=COHORTS, fraction=FRACTIONS, seed=st.integers(0, 1000), data=st.data())
def test_split_is_disjoint_stratified_and_independent_of_order(cohort, fraction, seed, data):
    split = assign_splits(cohort, test_fraction=fraction, seed=seed)
    assert [replace(r, split=None) for r in split] == cohort
    of = {r.patient: r.split for r in split}
    assert all(of[r.patient] == r.split for r in split), "a patient in two splits"
    test = {patient for patient, name in of.items() if name == "test"}
    assert set(of.values()) <= {"train", "test"}
    if fraction == 0:
        assert not test
    elif len(of) > 1:
        assert 1 <= len(test) < len(of) and abs(len(test) - fraction * len(of)) <= 1
    else:
        assert not test
    ill = {r.patient for r in cohort if r.positive}
    for stratum in (ill, set(of) - ill):
        # one rounding for the number of test patients, one for the stratum's share of them
        share = len(test) / len(of)
        assert abs(len(test & stratum) - share * len(stratum)) <= 0.5 + 1e-9
    shuffled = assign_splits(data.draw(st.permutations(cohort)), test_fraction=fraction, seed=seed)
    assert {r.slide: r.split for r in shuffled} == {r.slide: r.split for r in split}


def test_the_seed_decides_which_patients_are_held_out():
    cohort = [record(k, k, k % 2 == 0) for k in range(40)]
    draws = {tuple(r.split for r in assign_splits(cohort, test_fraction=0.2, seed=seed)) for seed in range(8)}
    assert len(draws) > 4
    drawn = [assign_splits(cohort, test_fraction=0.2, seed=seed) for seed in range(300)]
    counts = np.mean([[r.split == "test" for r in some] for some in drawn], axis=0)
    assert counts.min() > 0.1 and counts.max() < 0.3, "every patient is held out as often as any other"


def test_prescribed_splits_are_kept():
    cohort = [record(k, k // 2, k > 3, ("train", "val", "test")[k // 2 % 3]) for k in range(12)]
    for seed in range(3):
        assert assign_splits(cohort, test_fraction=0.5, seed=seed) == cohort


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ({(0, 7): "train", (1, 8): "test", (2, 7): "test"}, "p007 is in two splits (train and test)"),
        ({(0, 1): "train", (1, 2): None}, "p002 has no split"),
    ],
)
def test_splits_that_contradict_each_other_or_lack_a_patient_are_refused(splits, said):
    cohort = [record(slide, patient, True, split) for (slide, patient), split in splits.items()]
    refused(lambda: assign_splits(cohort, test_fraction=0.2, seed=0), f"site C1: patient {said}")


def sample_by_slide(label, slide, **settings):
    """Return the rows of `sample_rows` with each patch's slide by name."""
    names, which = np.unique(slide, return_inverse=True)
    return sample_rows(label, which, names.tolist(), **settings)


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=80).map(
    lambda rows: (np.array([r[0] for r in rows], np.int64), np.array([f"s{r[1]}" for r in rows], np.str_))
)


@given(rows=ROWS, balance=st.booleans(), cap=st.none() | st.integers(1, 12), seed=st.integers(0, 99))
def test_sample_is_capped_per_slide_then_balanced(rows, balance, cap, seed):
    label, slide = rows
    keep = sample_by_slide(label, slide, balance=balance, max_per_slide=cap, seed=seed)
    assert keep.dtype == np.bool_ and keep.shape == label.shape
    np.testing.assert_array_equal(keep, sample_by_slide(label, slide, balance=balance, max_per_slide=cap, seed=seed))
    available = {name: int((slide == name).sum()) for name in np.unique(slide)}
    for name, n in available.items():
        kept = int(keep[slide == name].sum())
        assert kept <= min(n, cap or n)
        assert balance or kept == min(n, cap or n), "nothing is dropped without a reason"
    counts = [int((keep & (label == c)).sum()) for c in range(3)]
    if balance:
        assert len({n for n in counts if n}) <= 1
    assert keep.any() == (len(label) > 0), "a sample of something is something"
    if balance and cap is None:
        present = [int((label == c).sum()) for c in np.unique(label)]
        assert keep.sum() == min(present, default=0) * len(present)


def test_the_limit_of_a_site_keeps_balance_and_is_spread_over_patients_and_their_slides():
    rng, sizes = np.random.default_rng(1), (900, 40, 40, 7, 300, 3)
    patients, names = ["a", "a", "a", "b", "c", "d"], [f"s{k}" for k in range(6)]
    slide = np.repeat(np.arange(6), sizes)
    label = rng.integers(0, 2, len(slide))

    def sample(limit, *, balance=True):
        settings = {"max_per_slide": None, "seed": 5, "max_per_site": limit, "patients": patients}
        return sample_rows(label, slide, names, balance=balance, **settings)

    keep = sample(140)
    assert [int((keep & (label == c)).sum()) for c in (0, 1)] == [70, 70]
    for c in (0, 1):
        kept, there = (
            [int((rows & (slide == k)).sum()) for k in range(6)] for rows in (keep & (label == c), label == c)
        )
        assert kept[3] == there[3] and kept[5] == there[5], "those of small patients are all taken"
        assert max(kept[:3]) - min(kept[:3]) <= 1, "the slides of a patient give equally many"
        assert abs(sum(kept[:3]) - kept[4]) <= 1, "the patients too"
    assert int(sample(100, balance=False).sum()) == 100 and sample(10**6, balance=False).all()
    unlimited = sample_rows(label, slide, names, balance=True, max_per_slide=None, seed=5)
    np.testing.assert_array_equal(sample(10**6), unlimited)
    assert int(sample(1).sum()) == 2, "one of each label at least"


def sample_each_slide(labels: dict[str, np.ndarray], **settings) -> dict[str, np.ndarray]:
    """Return the sampled rows of each slide, given the labels of its patches."""
    names = list(labels)
    planned = SimpleNamespace(slide_name=names.__getitem__, load_labels=lambda k: labels[names[k]])
    keep = sample_patches(planned, range(len(labels)), max_per_slide=50, balance=False, **settings)
    return dict(zip(labels, keep, strict=True))


def test_taking_a_slide_away_changes_no_decision_about_another():
    rng = np.random.default_rng(0)
    labels = {f"slide {k}": rng.integers(0, 2, 200) for k in range(20)}
    whole = sample_each_slide(labels, seed=3)
    assert {int(keep.sum()) for keep in whole.values()} == {50}
    assert len({keep.tobytes() for keep in whole.values()}) == 20, "slides of one size draw apart"
    fewer = [{name: label for name, label in labels.items() if name != gone} for gone in labels]
    for rest in (*fewer, dict(reversed(labels.items()))):
        for name, keep in sample_each_slide(rest, seed=3).items():
            np.testing.assert_array_equal(keep, whole[name])
    other = sample_each_slide(labels, seed=4)
    assert not any(np.array_equal(other[name], keep) for name, keep in whole.items())
