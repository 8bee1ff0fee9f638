"""The benefit of federation: local, federated and pooled models on the same test examples, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.metrics import SCORES
from wsi_fl.data.tasks import CLASSES, Task
from wsi_fl.evidence.benefit_figure import build_benefit_finding
from wsi_fl.evidence.verdict import (
    Estimate,
    EstimateDocument,
    decide_verdict,
    estimate_mean,
    estimate_ratio,
    has_pooled_gain,
)
from wsi_fl.report.formatting import Finding, Json, score_in_sentence
from wsi_fl.stages.evaluation.write_predictions import ExampleScores, Key, read_example_scores
from wsi_fl.stages.site.target_labels import build_task
from wsi_fl.stages.training.finished_runs import FinishedRun

BALANCED = "balanced accuracy"
"""Name of the measure where classes are so unequal in size that they are weighted equally."""
_MIN_CLASS_SHARE = 0.5
"""Share of the rarest class, relative to an equal share, below which classes are weighted equally."""


@dataclass(frozen=True)
class SeedScores:
    """The scores of test examples by the runs of one seed.

    Attributes:
        values: test example → its term in the mean, and its weight.
        score: the name of the weighted mean.
        noise: standard deviation of that score by the privacy noise; None where unknown.
    """

    values: dict[Key, tuple[float, float]] = field(default_factory=dict)
    score: str = "accuracy"
    noise: float | None = None


_BySeed = Mapping[int, SeedScores]
Gain = dict[str, EstimateDocument | str | None]
"""The benefit of federation: values by name, and the verdict."""


def compare_by_site(runs: Mapping[str, Sequence[FinishedRun]], test_set: str) -> tuple[str, dict[str, Gain]]:
    """Return the measure in words, and the benefit of federation by site.

    Args:
        runs: "local", "federated", and perhaps "pooled" → the runs of each.
        test_set: the test examples, "merged" or each site's "own".
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    scores = {kind: _collect_site_scores(kind_runs, names, test_set) for kind, kind_runs in runs.items()}
    gains = {name: _estimate_benefit({kind: sites[name] for kind, sites in scores.items()}) for name in names}
    return _measure_words(scores["federated"][names[0]]), gains


def compare_over_all(runs: Mapping[str, Sequence[FinishedRun]], test_set: str) -> Gain:
    """Return the benefit of federation over all sites, with the measure (`measure`).

    Examples of all sites are pooled, by patient. The heads depend on the same class statistics, so their noise is taken
    as fully correlated.

    Args:
        runs, test_set: as for the benefit by site.
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    scores: dict[str, _BySeed] = {}
    for kind, kind_runs in runs.items():
        site_scores: dict[int, list[SeedScores]] = {}
        for by_seed in _collect_site_scores(kind_runs, names, test_set).values():
            for seed, seed_scores in by_seed.items():
                site_scores.setdefault(seed, []).append(seed_scores)
        scores[kind] = {seed: _pool_sites(sites) for seed, sites in site_scores.items()}
    return {"measure": _measure_words(scores["federated"]), **_estimate_benefit(scores)}


def _collect_site_scores(
    runs: Iterable[FinishedRun], names: Iterable[str], test_set: str
) -> dict[str, dict[int, SeedScores]]:
    """Return site → seed → scores; folds, which share no patients, are pooled."""
    values: dict[str, dict[int, ExampleScores]] = {name: {} for name in names}
    noises: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    task: Task = CLASSES
    for run in runs:
        task = build_task(run.pipeline.target)
        rows = {row["site"]: row for row in (run.folder.read_evaluation() or {"sites": []})["sites"]}
        for name, by_seed in values.items():
            if (example_scores := read_example_scores(run.folder.site_folder(name), test_set, task)) is not None:
                by_seed.setdefault(run.seed, {}).update(example_scores)
                row = rows.get(name, {})
                noise = (row.get("own", {}) if test_set == "own" else row).get("noise")
                noises.setdefault((name, run.seed), []).append(noise or {})
    return {
        name: {seed: _score_folds(example_scores, task, noises[name, seed]) for seed, example_scores in by_seed.items()}
        for name, by_seed in values.items()
    }


def _score_folds(example_scores: ExampleScores, task: Task, noises: Sequence[Mapping[str, float]]) -> SeedScores:
    """Return the pooled scores of the folds of one seed, with independent noise.

    Where one class is much rarer than others, examples are weighted so that all classes count equally, and the weighted
    mean is balanced accuracy.
    """
    n, counts = len(example_scores), Counter(label for _, label in example_scores.values())
    skewed = _is_skewed(counts)
    weights = {label: n / len(counts) / count if skewed else 1.0 for label, count in counts.items()}
    score = "macro_accuracy" if len(set(weights.values())) > 1 else task.scores[0]
    known_noises = [noise[score] for noise in noises if score in noise]
    is_complete = len(known_noises) == len(noises) > 0
    weighted = {key: (value, weights[label]) for key, (value, label) in example_scores.items()}
    return SeedScores(weighted, score, hypot(*known_noises) / len(known_noises) if is_complete else None)


def _is_skewed(counts: Mapping[str, int]) -> bool:
    """Return whether the rarest of several classes has less than half of an equal share.

    >>> _is_skewed({"healthy": 90, "tumor": 30}), _is_skewed({"healthy": 90, "tumor": 20})
    (False, True)
    """
    return len(counts) > 1 and min(counts.values()) < _MIN_CLASS_SHARE * sum(counts.values()) / len(counts)


def _pool_sites(site_scores: Sequence[SeedScores]) -> SeedScores:
    values = {(*key, str(k)): value for k, scores in enumerate(site_scores) for key, value in scores.values.items()}
    known_noises = [scores.noise for scores in site_scores if scores.noise is not None]
    return SeedScores(values, site_scores[0].score, sum(known_noises) / len(site_scores) if known_noises else None)


def _measure_words(scores_by_seed: _BySeed) -> str:
    score = next((scores.score for scores in scores_by_seed.values()), "accuracy")
    return BALANCED if score == "macro_accuracy" else score_in_sentence(score)


def _estimate_benefit(scores: Mapping[str, _BySeed]) -> Gain:
    """Return the scores by kind of model, the gain, the pooled gain, the share of the gap closed, and the verdict."""
    estimates: dict[str, Estimate | None] = {"pooled": None}
    estimates |= {kind: _estimate_mean(runs) for kind, runs in scores.items()}
    bounded = all(seed_scores.score in SCORES for runs in scores.values() for seed_scores in runs.values())
    if bounded:
        estimates = {kind: value and value.clip_interval(0.0, 1.0) for kind, value in estimates.items()}
    gains = _subtract_scores(scores["federated"], scores["local"])
    pooled_gains = _subtract_scores(scores.get("pooled", {}), {seed: scores["local"][seed] for seed in gains})
    gain, pooled_gain = _estimate_mean(gains), _estimate_mean(pooled_gains)
    if bounded:
        gain, pooled_gain = gain and gain.clip_interval(-1.0, 1.0), pooled_gain and pooled_gain.clip_interval(-1.0, 1.0)
    share = (
        _estimate_gap_closed(gains, pooled_gains, pooled_gain) if pooled_gain and has_pooled_gain(pooled_gain) else None
    )
    estimates |= {"gain": gain, "pooled_gain": pooled_gain, "gap_closed": share}
    document = {name: None if value is None else value.build_document() for name, value in estimates.items()}
    return document | {"verdict": decide_verdict(gain, pooled_gain)}


def _subtract_scores(scores: _BySeed, other_scores: _BySeed) -> dict[int, SeedScores]:
    """Return the differences of scores on common examples, by seed."""
    differences = {}
    for seed in sorted(scores.keys() & other_scores.keys()):
        a, b = scores[seed].values, other_scores[seed].values
        known_noises = [
            seed_scores.noise for seed_scores in (scores[seed], other_scores[seed]) if seed_scores.noise is not None
        ]
        values = {key: (a[key][0] - b[key][0], a[key][1]) for key in a if key in b}
        differences[seed] = SeedScores(values, scores[seed].score, hypot(*known_noises) if known_noises else None)
    return differences


def _estimate_mean(runs: _BySeed) -> Estimate | None:
    """Return mean and interval over runs on common examples; None without any."""
    keys = _common_keys(runs.values())
    return estimate_mean(*_stack_arrays(runs, keys)) if keys else None


def _estimate_gap_closed(gains: _BySeed, pooled_gains: _BySeed, pooled_gain: Estimate) -> Estimate:
    """Return the ratio of the gain to the pooled gain, over common seeds."""
    gains = {seed: gains[seed] for seed in pooled_gains}
    keys = _common_keys([*gains.values(), *pooled_gains.values()])
    gain_values, weights, patients, noise = _stack_arrays(gains, keys)
    pooled_values, pooled_weights, *_ = _stack_arrays(pooled_gains, keys)
    relative = None if noise is None else noise / pooled_gain.mean
    return estimate_ratio(gain_values * weights, pooled_values * pooled_weights, patients, relative, weights[0])


def _common_keys(all_scores: Iterable[SeedScores]) -> list[Key]:
    """Return the examples of all runs."""
    key_sets = [scores.values.keys() for scores in all_scores]
    return sorted(set.intersection(*map(set, key_sets))) if key_sets else []


def _stack_arrays(
    runs: _BySeed, keys: Sequence[Key]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_], NDArray[np.float64] | None]:
    """Return values and weights, float64[seeds, examples]; the patient of each example; and the noise by seed, 0 where
    unknown, or None where all are unknown.
    """
    seeds = sorted(runs)
    pairs = np.array([[runs[seed].values[key] for key in keys] for seed in seeds])
    known_noises = [runs[seed].noise for seed in seeds]
    noise = None if all(value is None for value in known_noises) else np.array([value or 0.0 for value in known_noises])
    return pairs[:, :, 0], pairs[:, :, 1], np.array(["\n".join(key[:2]) for key in keys]), noise


class Measure:
    """The benefit of federation, for a run's page and a model card."""

    def measure(self, runs: Mapping[str, Sequence[FinishedRun]], test_set: str) -> Gain:
        """Return the benefit over all sites, as `compare_over_all`."""
        return compare_over_all(runs, test_set)

    def describe(self, gain: Json, score_text: str, baseline: str) -> Finding:
        """Return a sentence with the gain and its verdict."""
        return build_benefit_finding(gain, score_text, baseline)


MEASURE = Measure()
"""The entry of `wsi_fl.benefit`."""
