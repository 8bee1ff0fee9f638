"""What joining brings each hospital: alone, joined and pooled on the same test examples, with intervals."""

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
"""What the measure is called where classes are so unlike in number that all are made to count alike."""
_SKEWED = 0.5
"""Part of an equal share below which the rarest class makes accuracy say little."""


@dataclass(frozen=True)
class Said:
    """What the runs of one seed say of the test examples.

    Attributes:
        answers: test example → what it adds to the mean, and its weight.
        score: the name of the score that the weighted mean is.
        noise: standard deviation of that score by the noise of what was released; None where nobody knows it.
    """

    answers: dict[Key, tuple[float, float]] = field(default_factory=dict)
    score: str = "accuracy"
    noise: float | None = None


_BySeed = Mapping[int, Said]
Gain = dict[str, Value | str | None]
"""What joining brings, as `_compared` says it."""


def compared_by_site(runs: Mapping[str, Sequence[Run]], on: str) -> tuple[str, dict[str, Gain]]:
    """Return what is measured, in words, and by site what joining brings it, as `_compared` says it.

    Args:
        runs: "local", "federated", and perhaps "pooled" → the runs of each.
        on: which test examples are asked, those "merged" or each site's "own".
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    answers = {kind: _by_site(those, names, on) for kind, those in runs.items()}
    found = {name: _compared({kind: sites[name] for kind, sites in answers.items()}) for name in names}
    return _measure(answers["federated"][names[0]]), found


def compared_over_all(runs: Mapping[str, Sequence[Run]], on: str) -> Gain:
    """Return what joining brings over all sites, with what is measured (`measure`).

    All sites' models are taken as one: the examples of each apart, patients not. Their heads rest on the same noisy
    letters, so that their noise is taken to move them alike.

    Args:
        runs, on: as `compared_by_site` takes them.
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
    """Site → seed → what it says; all folds together, which have no patient in common."""
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
    """What the folds of one seed say, each of which had its own noise.

    Where one class is much rarer than others, examples are weighed so that all classes count alike, and the weighted
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
    """Whether the rarest of several classes has less than half of an equal share.

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
    """{"local": value, "federated": value, "pooled": value or None, "gain": value, "gap_closed": value or None,
    "verdict"}, each value as `Estimate.document` has it.
    """
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
    """Ours less theirs on the examples of both, by seed."""
    found = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = ours[seed].answers, theirs[seed].answers
        known = [one.noise for one in (ours[seed], theirs[seed]) if one.noise is not None]
        answers = {key: (a[key][0] - b[key][0], a[key][1]) for key in a if key in b}
        found[seed] = Said(answers, ours[seed].score, hypot(*known) if known else None)
    return found


def _value(runs: _BySeed) -> Estimate | None:
    """Mean and interval over runs on the same examples; None without any."""
    keys = _shared(runs.values())
    return estimate(*_arrays(runs, keys)) if keys else None


def _share(gains: _BySeed, rooms: _BySeed, room: Estimate) -> Estimate:
    """The part of the room that the gains fill, over the seeds that have both."""
    gains = {seed: gains[seed] for seed in rooms}
    keys = _shared([*gains.values(), *rooms.values()])
    part, weights, patients, noise = _arrays(gains, keys)
    whole, weights_of_whole, *_ = _arrays(rooms, keys)
    relative = None if noise is None else noise / room.mean
    return ratio(part * weights, whole * weights_of_whole, patients, relative, weights[0])


def _shared(those: Iterable[Said]) -> list[Key]:
    """The examples that all say something of."""
    known = [said.answers.keys() for said in those]
    return sorted(set.intersection(*map(set, known))) if known else []


def _arrays(
    runs: _BySeed, keys: Sequence[Key]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_], NDArray[np.float64] | None]:
    """Values and weights, float64[seeds, examples]; whose each example is; and the noise of each seed, 0 where none is
    known, or None where it is known of none.
    """
    seeds = sorted(runs)
    pairs = np.array([[runs[seed].answers[key] for key in keys] for seed in seeds])
    known = [runs[seed].noise for seed in seeds]
    noise = None if all(one is None for one in known) else np.array([one or 0.0 for one in known])
    return pairs[:, :, 0], pairs[:, :, 1], np.array(["\n".join(key[:2]) for key in keys]), noise
