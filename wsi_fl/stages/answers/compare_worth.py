"""The benefit of federation: local, federated and pooled models on the same test examples, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import SCORES
from wsi_fl.learning.tasks import CLASSES, Task
from wsi_fl.learning.verdict import Estimate, Value, estimate, ratio, shows_room, verdict
from wsi_fl.report.words import measured_in
from wsi_fl.stages.answers.compare_runs import Run
from wsi_fl.stages.answers.predictions import Answers, Key, read_answers
from wsi_fl.stages.site.targets import task_of

BALANCED = "balanced accuracy"
"""Name of the measure where classes are so unequal in size that they are weighted equally."""
_SKEWED = 0.5
"""Share of the rarest class, relative to an equal share, below which classes are weighted equally."""


@dataclass(frozen=True)
class Said:
    """The scores of test examples by the runs of one seed.

    Attributes:
        values: test example → its term in the mean, and its weight.
        score: the name of the weighted mean.
        noise: standard deviation of that score by the privacy noise; None where unknown.
    """

    answers: dict[Key, tuple[float, float]] = field(default_factory=dict)
    score: str = "accuracy"
    noise: float | None = None


_BySeed = Mapping[int, Said]
Gain = dict[str, Value | str | None]
"""The benefit of federation: values by name, and the verdict."""


def compared_by_site(runs: Mapping[str, Sequence[Run]], on: str) -> tuple[str, dict[str, Gain]]:
    """Return the measure in words, and the benefit of federation by site.

    Args:
        runs: "local", "federated", and perhaps "pooled" → the runs of each.
        test_set: the test examples, "merged" or each site's "own".
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    answers = {kind: _by_site(those, names, on) for kind, those in runs.items()}
    found = {name: _compared({kind: sites[name] for kind, sites in answers.items()}) for name in names}
    return _measure(answers["federated"][names[0]]), found


def compared_over_all(runs: Mapping[str, Sequence[Run]], on: str) -> Gain:
    """Return the benefit of federation over all sites, with the measure (`measure`).

    Examples of all sites are pooled, by patient. The heads depend on the same class statistics, so their noise is taken
    as fully correlated.

    Args:
        runs, test_set: as for the benefit by site.
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    answers: dict[str, _BySeed] = {}
    for kind, those in runs.items():
        seen: dict[int, list[Said]] = {}
        for by_seed in _by_site(those, names, on).values():
            for seed, said in by_seed.items():
                seen.setdefault(seed, []).append(said)
        answers[kind] = {seed: _together(sites) for seed, sites in seen.items()}
    return {"measure": _measure(answers["federated"]), **_compared(answers)}


def _by_site(runs: Iterable[Run], names: Iterable[str], on: str) -> dict[str, dict[int, Said]]:
    """Return site → seed → scores; folds, which share no patients, are pooled."""
    answers: dict[str, dict[int, Answers]] = {name: {} for name in names}
    noises: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    task: Task = CLASSES
    for run in runs:
        task = task_of(run.pipeline.target)
        rows = {row["site"]: row for row in (run.folder.evaluation() or {"sites": []})["sites"]}
        for name, by_seed in answers.items():
            if (found := read_answers(run.folder.site(name), on, task)) is not None:
                by_seed.setdefault(run.seed, {}).update(found)
                row = rows.get(name, {})
                moved = (row.get("own", {}) if on == "own" else row).get("noise")
                noises.setdefault((name, run.seed), []).append(moved or {})
    return {
        name: {seed: _said(found, task, noises[name, seed]) for seed, found in by_seed.items()}
        for name, by_seed in answers.items()
    }


def _said(answers: Answers, task: Task, noises: Sequence[Mapping[str, float]]) -> Said:
    """Return the pooled scores of the folds of one seed, with independent noise.

    Where one class is much rarer than others, examples are weighted so that all classes count equally, and the weighted
    mean is balanced accuracy.
    """
    n, counts = len(answers), Counter(label for _, label in answers.values())
    skewed = _is_skewed(counts)
    weights = {label: n / len(counts) / count if skewed else 1.0 for label, count in counts.items()}
    score = "macro_accuracy" if len(set(weights.values())) > 1 else task.scores[0]
    known = [noise[score] for noise in noises if score in noise]
    whole = len(known) == len(noises) > 0
    weighed = {key: (value, weights[label]) for key, (value, label) in answers.items()}
    return Said(weighed, score, hypot(*known) / len(known) if whole else None)


def _is_skewed(counts: Mapping[str, int]) -> bool:
    """Return whether the rarest of several classes has less than half of an equal share.

    >>> _is_skewed({"healthy": 90, "tumor": 30}), _is_skewed({"healthy": 90, "tumor": 20})
    (False, True)
    """
    return len(counts) > 1 and min(counts.values()) < _SKEWED * sum(counts.values()) / len(counts)


def _together(those: Sequence[Said]) -> Said:
    answers = {(*key, str(k)): value for k, said in enumerate(those) for key, value in said.answers.items()}
    known = [said.noise for said in those if said.noise is not None]
    return Said(answers, those[0].score, sum(known) / len(those) if known else None)


def _measure(said: _BySeed) -> str:
    score = next((one.score for one in said.values()), "accuracy")
    return BALANCED if score == "macro_accuracy" else measured_in(score)


def _compared(answers: Mapping[str, _BySeed]) -> Gain:
    """Return the scores by kind of model, the gain, the pooled gain, the share of the gap closed, and the verdict."""
    found: dict[str, Estimate | None] = {"pooled": None}
    found |= {kind: _value(runs) for kind, runs in answers.items()}
    bounded = all(one.score in SCORES for runs in answers.values() for one in runs.values())
    if bounded:
        found = {kind: one and one.between(0.0, 1.0) for kind, one in found.items()}
    gains = _differences(answers["federated"], answers["local"])
    rooms = _differences(answers.get("pooled", {}), {seed: answers["local"][seed] for seed in gains})
    gain, room = _value(gains), _value(rooms)
    if bounded:
        gain, room = gain and gain.between(-1.0, 1.0), room and room.between(-1.0, 1.0)
    share = _share(gains, rooms, room) if room and shows_room(room) else None
    found |= {"gain": gain, "pooled_gain": room, "gap_closed": share}
    told = {name: None if one is None else one.document() for name, one in found.items()}
    return told | {"verdict": verdict(gain, room)}


def _differences(ours: _BySeed, theirs: _BySeed) -> dict[int, Said]:
    """Return the differences of scores on common examples, by seed."""
    found = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = ours[seed].answers, theirs[seed].answers
        known = [one.noise for one in (ours[seed], theirs[seed]) if one.noise is not None]
        answers = {key: (a[key][0] - b[key][0], a[key][1]) for key in a if key in b}
        found[seed] = Said(answers, ours[seed].score, hypot(*known) if known else None)
    return found


def _value(runs: _BySeed) -> Estimate | None:
    """Return mean and interval over runs on common examples; None without any."""
    keys = _shared(runs.values())
    return estimate(*_arrays(runs, keys)) if keys else None


def _share(gains: _BySeed, rooms: _BySeed, room: Estimate) -> Estimate:
    """Return the ratio of the gain to the pooled gain, over common seeds."""
    gains = {seed: gains[seed] for seed in rooms}
    keys = _shared([*gains.values(), *rooms.values()])
    part, weights, patients, noise = _arrays(gains, keys)
    whole, weights_of_whole, *_ = _arrays(rooms, keys)
    relative = None if noise is None else noise / room.mean
    return ratio(part * weights, whole * weights_of_whole, patients, relative, weights[0])


def _shared(those: Iterable[Said]) -> list[Key]:
    """Return the examples of all runs."""
    known = [said.answers.keys() for said in those]
    return sorted(set.intersection(*map(set, known))) if known else []


def _arrays(
    runs: _BySeed, keys: Sequence[Key]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_], NDArray[np.float64] | None]:
    """Return values and weights, float64[seeds, examples]; the patient of each example; and the noise by seed, 0 where
    unknown, or None where all are unknown.
    """
    seeds = sorted(runs)
    pairs = np.array([[runs[seed].answers[key] for key in keys] for seed in seeds])
    known = [runs[seed].noise for seed in seeds]
    noise = None if all(one is None for one in known) else np.array([one or 0.0 for one in known])
    return pairs[:, :, 0], pairs[:, :, 1], np.array(["\n".join(key[:2]) for key in keys]), noise
