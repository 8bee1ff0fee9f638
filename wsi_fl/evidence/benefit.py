"""The benefit of federation: local, federated and pooled models on the same test examples, with intervals.

The module is the entry of `wsi_fl.benefit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl.data.tasks import Task
from wsi_fl.evidence.benefit_figure import ALL_SITES, gain_words, verdict_words
from wsi_fl.evidence.verdict import Estimate, IntervalDocument, decide_verdict, estimate_mean, estimate_ratio
from wsi_fl.report.formatting import Finding, Json, score_in_sentence
from wsi_fl.stages.evaluation.write_predictions import ExampleScores, read_example_scores
from wsi_fl.stages.site.target_labels import build_task
from wsi_fl.stages.training.finished_runs import FinishedRun

BALANCED = "balanced accuracy"
"""Name of the measure where classes are so unequal in size that they are weighted equally."""
_MIN_CLASS_SHARE = 0.5
"""Share of the rarest class, relative to an equal share, below which classes are weighted equally."""
Gain = dict[str, IntervalDocument | str | None]
"""The benefit of federation: values by name, and the verdict."""


@dataclass(frozen=True)
class ScoreTable:
    """The scores of n test examples by the runs of each seed.

    Attributes:
        values, weights: examples × seeds: an example's term in the mean, and its weight; NaN where it was not tested.
            An example is named by its site, its patient and more, in lines.
        noise: standard deviation of each seed's weighted mean by the privacy noise; NaN where unknown.
        score: the name of the weighted mean.
    """

    values: pd.DataFrame
    weights: pd.DataFrame
    noise: pd.Series
    score: str = "accuracy"

    def find_common_rows(self) -> pd.Index:
        """Return the examples that were tested with every seed; none without seeds."""
        return self.values.dropna().index if len(self.values.columns) else self.values.index[:0]

    def list_noise(self) -> NDArray[np.float64] | None:
        """Return the noise of each seed, 0 where unknown; None where all are unknown."""
        return None if self.noise.isna().all() else self.noise.fillna(0.0).to_numpy()

    def subtract_scores(self, other: ScoreTable, seeds: pd.Index | None = None) -> ScoreTable:
        """Return the differences on common examples, with the common seeds (of `seeds`, where given)."""
        common = self.values.columns.intersection(other.values.columns)
        seeds = common if seeds is None else common.intersection(seeds)
        rows = self.values.index.intersection(other.values.index)
        noises = pd.concat([self.noise[seeds], other.noise[seeds]], axis=1)
        noise = pd.Series(np.hypot(*noises.fillna(0.0).to_numpy().T), seeds).where(noises.notna().any(axis=1))
        values = self.values.loc[rows, seeds] - other.values.loc[rows, seeds]
        return ScoreTable(values, self.weights.loc[rows, seeds], noise, self.score)


def compare_by_site(runs: Mapping[str, Sequence[FinishedRun]], test_set: str) -> tuple[str, dict[str, Gain]]:
    """Return the measure in words, and the benefit of federation by site.

    Args:
        runs: "local", "federated", and perhaps "pooled" → the runs of each.
        test_set: the test examples, "merged" or each site's "own".
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    scores = _read_scores(runs, names, test_set)
    gains = {name: estimate_benefit({kind: sites[name] for kind, sites in scores.items()}) for name in names}
    return _measure_words(scores["federated"][names[0]]), gains


def measure_benefit(runs: Mapping[str, Sequence[FinishedRun]], test_set: str) -> Gain:
    """Return the benefit of federation over all sites, with the measure (`measure`).

    Examples of all sites are pooled, by patient. The heads depend on the same class statistics, so their noise is taken
    as fully correlated.

    Args:
        runs, test_set: as for the benefit by site.
    """
    names = [site["site"] for site in runs["federated"][0].summary["sites"]]
    scores = {kind: _pool_sites(sites) for kind, sites in _read_scores(runs, names, test_set).items()}
    return {"measure": _measure_words(scores["federated"]), **estimate_benefit(scores)}


def _read_scores(
    runs: Mapping[str, Sequence[FinishedRun]], names: Sequence[str], test_set: str
) -> dict[str, dict[str, ScoreTable]]:
    """Return the scores by kind of model and by site, all of one measure.

    Where a class is rare in any test set, all classes count equally in every one (balanced accuracy).
    """
    task = build_task(runs["federated"][0].pipeline.target)
    results = {kind: _read_examples(kind_runs, names, test_set, task) for kind, kind_runs in runs.items()}
    frames = [frame for sites, _ in results.values() for by_seed in sites.values() for frame in by_seed.values()]
    is_balanced = any(_is_skewed(frame["label"].value_counts()) for frame in frames)
    score = "macro_accuracy" if is_balanced else task.scores[0]
    return {
        kind: {
            name: build_score_table(
                {seed: _weight_examples(frame, balanced=is_balanced) for seed, frame in by_seed.items()},
                score,
                {seed: noises[name, seed] for seed in by_seed},
            )
            for name, by_seed in sites.items()
        }
        for kind, (sites, noises) in results.items()
    }


def _read_examples(
    runs: Iterable[FinishedRun], names: Iterable[str], test_set: str, task: Task
) -> tuple[dict[str, dict[int, pd.DataFrame]], dict[tuple[str, int], list[Mapping[str, float]]]]:
    """Return value and label by example, and the noise of each fold, by site and seed; folds, which share no patients,
    are pooled."""
    examples: dict[str, dict[int, ExampleScores]] = {name: {} for name in names}
    noises: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for run in runs:
        rows = {row["site"]: row for row in (run.folder.read("evaluation") or {"sites": []})["sites"]}
        for name, by_seed in examples.items():
            if (example_scores := read_example_scores(run.folder.site_folder(name), test_set, task)) is not None:
                by_seed.setdefault(run.seed, {}).update(example_scores)
                row = rows.get(name, {})
                noise = (row.get("own", {}) if test_set == "own" else row).get("noise")
                noises.setdefault((name, run.seed), []).append(noise or {})
    frames = {
        name: {
            seed: pd.DataFrame(scores.values(), ["\n".join(key) for key in scores], ["value", "label"])
            for seed, scores in by_seed.items()
        }
        for name, by_seed in examples.items()
    }
    return frames, noises


def _weight_examples(frame: pd.DataFrame, *, balanced: bool) -> pd.DataFrame:
    """Return value, label and weight by example, with equal weight of the classes where balanced."""
    counts = frame["label"].value_counts()
    weights = len(frame) / len(counts) / counts if balanced else counts * 0 + 1.0
    return frame.assign(weight=frame["label"].map(weights))


def _is_skewed(counts: pd.Series) -> bool:
    """Return whether the rarest of several classes has less than half of an equal share.

    >>> _is_skewed(pd.Series({"healthy": 90, "tumor": 30})), _is_skewed(pd.Series({"healthy": 90, "tumor": 20}))
    (False, True)
    """
    return len(counts) > 1 and bool(counts.min() < _MIN_CLASS_SHARE * counts.sum() / len(counts))


def build_score_table(
    by_seed: Mapping[int, pd.DataFrame], score: str, noises: Mapping[int, Sequence[Mapping[str, float]]]
) -> ScoreTable:
    """Return the scores of all seeds.

    Args:
        by_seed: value and weight by example.
        score: the name of the unweighted mean.
        noises: standard deviations of the scores of each fold by the privacy noise; folds are independent.
    """
    seeds = sorted(by_seed)
    values, weights = (pd.DataFrame({seed: by_seed[seed][name] for seed in seeds}) for name in ("value", "weight"))
    names = {seed: "macro_accuracy" if by_seed[seed]["weight"].nunique() > 1 else score for seed in seeds}
    noise = {}
    for seed, name in names.items():
        folds = noises.get(seed, ())
        deviations = [fold[name] for fold in folds if name in fold]
        noise[seed] = hypot(*deviations) / len(deviations) if len(deviations) == len(folds) > 0 else np.nan
    return ScoreTable(values, weights, pd.Series(noise, seeds, float), next(iter(names.values()), score))


def _pool_sites(sites: Mapping[str, ScoreTable]) -> ScoreTable:
    by_index = {k: table for k, table in enumerate(sites.values()) if not table.values.empty}
    if not by_index:
        return next(iter(sites.values()))
    values, weights = (
        pd.concat([getattr(table, name).rename(lambda key, k=k: f"{key}\n{k}") for k, table in by_index.items()])
        for name in ("values", "weights")
    )
    tables = list(by_index.values())
    n_sites = values.columns.map(lambda seed: sum(seed in table.values for table in tables))
    noise = pd.concat([table.noise for table in tables], axis=1).sum(axis=1, min_count=1)[values.columns] / n_sites
    return ScoreTable(values, weights, noise, tables[0].score)


def _measure_words(scores: ScoreTable) -> str:
    return BALANCED if scores.score == "macro_accuracy" else score_in_sentence(scores.score)


def estimate_benefit(scores: Mapping[str, ScoreTable]) -> Gain:
    """Return the scores by kind of model, the gain, the pooled gain, the share of the gap closed, and the verdict."""
    is_bounded = all(table.score != "r2" for table in scores.values())

    def estimate_score(table: ScoreTable | None, minimum: float) -> Estimate | None:
        if table is None or not len(rows := table.find_common_rows()):
            return None
        values, weights = (frame.loc[rows].to_numpy().T for frame in (table.values, table.weights))
        mean = estimate_mean(values, weights, _patient_names(rows), table.list_noise())
        return mean.clip_interval(minimum, 1.0) if is_bounded else mean

    gains, pooled_gains = scores["federated"].subtract_scores(scores["local"]), None
    if "pooled" in scores:
        pooled_gains = scores["pooled"].subtract_scores(scores["local"], gains.values.columns)
    estimates = {kind: estimate_score(scores.get(kind), 0.0) for kind in ("pooled", *scores)}
    gain, pooled_gain = estimate_score(gains, -1.0), estimate_score(pooled_gains, -1.0)
    share = None
    if pooled_gains is not None and pooled_gain is not None and (pooled_gain.low or 0) > 0:  # a significant gain
        share = _estimate_gap_closed(gains, pooled_gains, pooled_gain)
    estimates |= {"gain": gain, "pooled_gain": pooled_gain, "gap_closed": share}
    document = {name: None if value is None else value.build_document() for name, value in estimates.items()}
    return document | {"verdict": decide_verdict(gain, pooled_gain)}


def _estimate_gap_closed(gains: ScoreTable, pooled_gains: ScoreTable, pooled_gain: Estimate) -> Estimate:
    """Return the ratio of the gain to the pooled gain, over common seeds and examples."""
    seeds = pooled_gains.values.columns
    rows = gains.values[seeds].dropna().index.intersection(pooled_gains.find_common_rows())
    numerator, denominator = (
        (table.values * table.weights).loc[rows, seeds].to_numpy().T for table in (gains, pooled_gains)
    )
    noise = ScoreTable(gains.values, gains.weights, gains.noise[seeds]).list_noise()
    relative = None if noise is None else noise / pooled_gain.mean
    return estimate_ratio(
        numerator, denominator, _patient_names(rows), relative, gains.weights.loc[rows, seeds[0]].to_numpy()
    )


def _patient_names(rows: pd.Index) -> NDArray[np.str_]:
    return np.array(["\n".join(key.split("\n")[:2]) for key in rows], np.str_)


def describe_benefit(row: Json, score_text: str, baseline: str) -> Finding:
    """Return the average benefit of a method as a sentence, the same on the console and on pages.

    Args:
        row: the values over all sites.
        score_text: the score of the method, in words.
        baseline: the baseline, in words.
    """
    text = f"{score_text}, {gain_words(row)} over {baseline}: {verdict_words(row, ALL_SITES)}."
    return Finding({"join": "good", "local": "bad"}.get(row["verdict"], "unclear"), text)
