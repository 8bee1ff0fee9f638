"""Source inference: which of K sites a record comes from, guessed from what each site released.

An attacker scores a record against the release of every site and names the site of the highest score (Hu et al.,
"Source inference attacks in federated learning", ICDM 2021). The source of unseen records can be guessed too, by
scanner, stain and case mix; only what training adds to that is membership, which ε bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.data.metrics import fill_patient_names, percentile_interval, resample_clusters, share_interval
from wsi_fl.learning.local_training import example_losses
from wsi_fl.oneshot.payload import require_head
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.report.formatting import Json
from wsi_fl.stages.evaluation.load_models import is_trained_with_dp
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import select_choices
from wsi_fl.stages.training.build_sites import load_training

_Array = NDArray[np.float64]
_ClassMeans = tuple[_Array, _Array, _Array]
"""A site's class means float64[classes, d], the variances of their noise, and the counts of records, also noisy."""
_Groups = Mapping[str, Sequence[Cohort]]
"""The training and unseen records of each site, by "training" and "unseen"."""
_MAX_RECORDS = 4000
"""Maximum number of training records, and of unseen ones, of all sites together."""
_BATCH_RECORDS = 1000
_MIN_PATIENTS = 3
"""Least number of patients at a site for an interval."""


def bound_accuracy(epsilon: float, delta: float, n_sites: int) -> float:
    """Return the largest accuracy of any guess at which of K sites, each as likely, holds a unit.

    All else is fixed and known: the unit, a row or a patient, is at one site and replaced by nothing at the others.
    Each site's release, all rounds together, then follows from one random answer to "is it here?", which is known to be
    true with probability δ, and otherwise is true with probability p = e^ε / (1 + e^ε) (Kairouz, Oh and Viswanath,
    ICML 2015; for sites that learn from each other's releases: Lyu, NeurIPS 2022). Without δ the best guess is a site
    that answers yes, or any where none does: g = (p + p² + … + p^(K−1) + p^(K−1)) / K is the accuracy, which some
    ε-private releases attain. With δ it is at most 1 − (1 − δ)^K (1 − g).

    Args:
        epsilon, delta: the largest of a site.

    Example:
        >>> [round(bound_accuracy(epsilon, 0.0, 3), 3) for epsilon in (0.0, 1.0, 8.0)]
        [0.333, 0.6, 0.999]
    """
    powers = (1 / (1 + np.exp(-epsilon))) ** np.arange(1, n_sites)
    return float(1 - (1 - delta) ** n_sites * (1 - (powers.sum() + powers[-1]) / n_sites))


def bound_whole_sites(epsilon: float, delta: float, n_sites: int) -> float:
    """Return the largest accuracy at which of K sites holds given data, were ε that of all data of a site.

    Every other site holds fixed data of its own. Data replaced by other data is a group of two: (2ε, (1 + e^ε) δ).
    """
    return bound_accuracy(2 * epsilon, min(1.0, (1 + float(np.exp(epsilon))) * delta), n_sites)


def measure_accuracy(
    scores: Sequence[_Array], patients: Sequence[NDArray[np.str_]], *, by_patient: bool, repeats: int
) -> Json:
    """Measure guesses of the site with the highest score; where scores are equal, of the first.

    Args:
        scores: float64[n, K] for the records of each of the K sites.
        patients: str[n], the patients of these records.
        by_patient: whether a record is a patient, scored by the mean of its rows.
        repeats: number of bootstrap draws.

    Returns:
        `n` records; `accuracy`, the mean over sites of the share of right guesses; its 95 % `interval`, which redraws
            whole patients of each site, None with fewer than three at a site, and where all draws are alike the exact
            binomial one of as many trials as the smallest site has patients; `confusion`, records by true and guessed
            site.
    """
    clusters = [np.unique(fill_patient_names(names), return_inverse=True)[1] for names in patients]
    n_patients = [int(cluster.max()) + 1 for cluster in clusters]
    if by_patient:
        sums = [np.zeros((n, len(scores))) for n in n_patients]
        for total, rows, cluster in zip(sums, scores, clusters, strict=True):
            np.add.at(total, cluster, rows / np.bincount(cluster)[cluster, None])
        scores, clusters = sums, [np.arange(n) for n in n_patients]
    is_right = [rows.argmax(1) == k for k, rows in enumerate(scores)]
    accuracy, interval = float(np.mean([hits.mean() for hits in is_right])), None
    if min(n_patients) >= _MIN_PATIENTS and repeats:
        rng = np.random.default_rng(0)
        sites = list(zip(is_right, clusters, n_patients, strict=True))
        draws = [
            np.mean([np.average(hits, weights=resample_clusters(rng, cluster, n)) for hits, cluster, n in sites])
            for _ in range(repeats)
        ]
        low, high = percentile_interval(draws, min(n_patients))
        interval = [*share_interval(accuracy, min(n_patients))] if low == high else [low, high]
    confusion = [np.bincount(rows.argmax(1), minlength=len(scores)).tolist() for rows in scores]
    return {"n": sum(map(len, scores)), "accuracy": accuracy, "interval": interval, "confusion": confusion}


def calibrate_losses(losses: Sequence[_Array]) -> list[_Array]:
    """Return scores float64[n, K] of the records of each site: by how much a site's model has a lower loss than usual.

    A loss counts relative to the mean loss of the K models on the record. What is usual is the median over all records,
    and the unit their median distance from it, or a model that is better or varies more would be guessed everywhere.

    Args:
        losses: float64[n, K] for the records of each site, a column for the model of each site.
    """
    relative = [rows.mean(1, keepdims=True) - rows for rows in losses]
    usual = np.median(np.concatenate(relative), axis=0)
    scale = np.median(np.abs(np.concatenate(relative) - usual), axis=0)
    return [(rows - usual) / scale.clip(min=1e-300) for rows in relative]


def read_class_means(head: SharedHead, statistics: Tensor) -> _ClassMeans:
    """Return the class means of released statistics, as in `SharedHead.sums`; for other tasks the mean of all."""
    statistics = head.layout.remove_weights(statistics)
    parts = (*head.unpack_statistics(statistics), head.noise_variances(statistics))
    sums, counts, noise = (part.numpy() for part in parts)
    if head.kind != "classes":
        sums, counts, noise = (part.sum(0, keepdims=True) for part in (sums, counts, noise))
    sizes = counts.clip(min=1)
    # a class without records or noise may lie anywhere
    noise = np.where((counts < 0.5) & (noise == 0), 1.0, noise / sizes**2)
    return sums / sizes[:, None], noise, counts


def score_class_means(
    z: Sequence[_Array], label: Sequence[NDArray[np.int64]], sites: Sequence[_ClassMeans], covariance: _Array
) -> list[_Array]:
    """Return the log likelihood float64[n, K] of each site's records and labels by the class means of K sites.

    With noise of variance t in a mean m, z ~ N(m, V + t I). V is the covariance of all records within their classes, in
    which public ones count as much as d records, as in `SharedHead.class_means`. Labels have the site's shares.

    Args:
        z, label: float64[n, d], the projected records of each site, and the class int64[n] of each.
        covariance: float64[d, d] of public examples.
    """
    rows, classes = np.concatenate(z), np.eye(len(sites[0][2]))[np.concatenate(label)]
    deviations, d = rows - classes @ (classes.T @ rows / classes.sum(0).clip(min=1)[:, None]), rows.shape[1]
    variances, axes = np.linalg.eigh((deviations.T @ deviations + d * covariance) / (len(rows) + d))

    def score_site(rows: _Array, label: NDArray[np.int64], site: _ClassMeans) -> _Array:
        means, noise, counts = site
        spread, sizes = variances.clip(min=1e-12) + noise[label, None], counts.clip(min=1)
        distances = np.square((rows - means[label]) @ axes) / spread + np.log(spread)
        scores: _Array = np.log(sizes / sizes.sum())[label] - distances.sum(1) / 2
        return scores

    return [np.stack([score_site(*records, site) for site in sites], 1) for records in zip(z, label, strict=True)]


def attack_sources(
    context: RunContext, audits: Sequence[Json], load_released: Callable[[str], nn.Module]
) -> Json | None:
    """Guess the source of training records and of unseen ones by the releases of all sites.

    Args:
        audits: of the sites, with their `site`, `epsilon`, `delta`, `guarantee` and `unit`.
        load_released: loads the model of a site as it left the site, or the head with its released statistics.

    Returns:
        None where there are fewer than two sites, or where nobody can read the release of a single one. Bounds are None
            unless the ε of all sites is guaranteed.
    """
    audits = [row for row in audits if not context.uses_files or row["site"] in context.statistics]
    by_statistics, n, names = context.method.payload.is_single_release, len(audits), [row["site"] for row in audits]
    role = "shared" if by_statistics else context.method.mixing_role
    if role is None or n < 2 or context.pipeline.privacy.noise == "shared":
        return None
    parts = [_sample_records(context, name, _MAX_RECORDS // n) for name in names]
    groups = {key: cohorts for key, *cohorts in zip(("training", "unseen"), *parts, strict=True) if all(cohorts)}
    score = _score_statistics if by_statistics else _score_losses
    scores, records = score(map(load_released, names), groups), {}
    for key, cohorts in groups.items():
        names_by_site, repeats = [examples.patient for examples in cohorts], context.pipeline.evaluate.bootstrap
        guess = partial(
            measure_accuracy, patients=names_by_site, by_patient=audits[0]["unit"] == "patient", repeats=repeats
        )
        by_label = None
        if context.task.kind == "classes" and "training" in groups:
            by_label = guess(_score_labels(groups["training"], cohorts), repeats=0)["accuracy"]
        records[key] = {**guess(scores[key]), "by_label": by_label}
    has_epsilon = is_trained_with_dp(context, role) and all(row["guarantee"] == "guaranteed" for row in audits)
    epsilons, delta = [row["epsilon"] for row in audits], max(row["delta"] for row in audits)
    epsilon = max(epsilons) if has_epsilon and None not in epsilons else None
    bounds = {"bound": bound_accuracy, "bound_whole_sites": bound_whole_sites}
    return {
        "attack": "statistics" if by_statistics else "models",
        "unit": audits[0]["unit"],
        "sites": names,
        "records": records,
        "epsilon": epsilon,
        "delta": delta,
        **{key: None if epsilon is None else bound(epsilon, delta, n) for key, bound in bounds.items()},
    }


def _sample_records(context: RunContext, name: str, n: int) -> list[Cohort]:
    """Return at most n training and n test examples of a site, the same in every audit."""
    rng = np.random.default_rng(0)
    parts = select_choices(load_training(context, name).train), context.open_data(name).test_examples
    return [part[np.sort(rng.permutation(len(part))[:n])] for part in parts]


def _score_labels(training: Sequence[Cohort], cohorts: Sequence[Cohort]) -> list[_Array]:
    """Return scores float64[n, K] by the share of a record's class at each site: what the label alone gives away."""
    n_classes = 1 + max(int(examples.label.max()) for examples in (*training, *cohorts))
    shares = [np.bincount(examples.label, minlength=n_classes) / len(examples) for examples in training]
    return [np.stack(shares, axis=1)[examples.label] for examples in cohorts]


def _score_losses(networks: Iterable[nn.Module], groups: _Groups) -> dict[str, list[_Array]]:
    """Return scores float64[n, K] of each site's records by the losses of the K models."""
    columns: dict[str, list[list[_Array]]] = {key: [] for key in groups}
    for network in networks:  # one at a time in memory
        for key, cohorts in groups.items():
            columns[key].append([example_losses(network, examples, select_device()) for examples in cohorts])
    return {
        key: calibrate_losses([np.stack(losses, axis=1) for losses in zip(*parts, strict=True)])
        for key, parts in columns.items()
    }


def _score_statistics(networks: Iterable[nn.Module], groups: _Groups) -> dict[str, list[_Array]]:
    """Return scores float64[n, K] of each site's records by the class statistics of the K sites."""
    heads = [require_head(network).cpu() for network in networks]
    head, device = heads[0], torch.device("cpu")

    def embed_records(examples: Cohort) -> _Array:
        rows, size = np.arange(len(examples)), examples.at_once or _BATCH_RECORDS
        batches = load_batches(
            examples, iter(np.split(rows, range(size, len(rows), size))), augment=None, device=device
        )
        return np.concatenate([head.embed_rows(x).numpy() for x, _ in batches])

    def list_labels(examples: Cohort) -> NDArray[np.int64]:
        return examples.label if head.kind == "classes" else np.zeros(len(examples), np.int64)

    sites, covariance = [read_class_means(head, network.released) for network in heads], head.covariance.numpy()
    return {
        key: score_class_means([*map(embed_records, cohorts)], [*map(list_labels, cohorts)], sites, covariance)
        for key, cohorts in groups.items()
    }
