"""Would another letter do better? Each idea at the same ε, on the same draws, beside the shipped one; LETTERS.md tells.

    python studies/search_letters.py tissue.npz --out letters.jsonl       # from the repository, with PYTHONPATH=.
    python studies/search_letters.py --show letters.jsonl

The table holds `x` float[n, d], features of an encoder, `y` int[n] of two classes, and `public` float[m, d], those of
tissue that is nobody's secret. An idea sees the letters of all hospitals and says what each of them would answer. All
share the draws of rows, the noise where their letters have the same shape, the lone heads and the mixture of both.
Seeds 10 to 14 are those that WORTH.md was read on once; nothing here may look at them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from worth import SETTINGS, Setting, drawn

from wsi_fl.learning.ensemble import (
    is_worse_than_local,
    single_federated_ensemble,
    single_local_ensemble,
    weight_by_sample_size,
)
from wsi_fl.learning.tuning import fit_linear_head
from wsi_fl.oneshot.projection import Projection, fit_projection, normalize_rows
from wsi_fl.oneshot.shared_head import COUNT_WEIGHT, SharedHead
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.types import WsiFlError

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
DELTA = 1e-5
REPEATS = 3
"""Draws of noise for one draw of rows."""
READ_ONCE = range(10, 15)
RIDGE = 0.5
ASKED = (
    ("8 × 200, each one class", False),
    ("4 × 150, 95 %", False),
    ("4 × 250, 90 %", False),
    ("16 × 50, 90 %", False),
    ("16 × 50, alike", False),
    ("16 × 50, 90 %", True),
    ("16 × 50, alike", True),
    ("50 × 50, alike", True),
    ("4 × 250, one lacks a class", False),
    ("4 × 300, class 1 is 5 %", False),
    ("4 × 500, alike", False),
    ("4 × 50, each one class", False),
    ("4 × 50, 90 %", False),
    ("4 × 50, 90 %", True),
    ("4 × 50, alike", True),
)
"""Settings, and whether their noise is shared. The last four are for tables of a few hundred rows."""


@dataclass(frozen=True, eq=False)
class Table:
    """Features `x` as a head sees them and `raw` as the encoder gives them, labels, and rows of public tissue."""

    raw: NDArray[np.float32]
    label: NDArray[np.int64]
    public: NDArray[np.float32]

    @cached_property
    def x(self) -> Array:
        return normalize_rows(self.raw)

    @cached_property
    def public_x(self) -> Array:
        return normalize_rows(self.public)

    @cached_property
    def directions(self) -> Projection:
        return fit_projection(self.public)

    @cache  # noqa: B019 likewise
    def z(self, along: Projection) -> Array:
        return embedded(self.x, along)

    @cache  # noqa: B019 a table lives as long as the process
    def first(self, n: int) -> Projection:
        return fit_projection(self.public, n=n)


@dataclass(frozen=True, eq=False)
class Lone:
    """What a hospital's own head says of its own rows and of the test rows, as probabilities [n, 2].

    Attributes:
        held_out: whether heads that had not seen a row's patient say it of own rows.
        strength: of its regularisation.
    """

    own: Array
    test: Array
    held_out: bool
    strength: float


@dataclass(frozen=True, eq=False)
class Draw:
    """Hospitals, their lone heads, a test set, and the noise that a letter needs.

    Attributes:
        sigma: standard deviation of the noise of a letter in which a row counts for at most 1, in L2.
        shared: whether the noise is added once in all. One hospital may betray the others, so that K − 1 shares are it.
        key: of the random numbers.
    """

    table: Table
    parts: list[NDArray[np.int64]]
    test: NDArray[np.int64]
    lone: list[Lone]
    sigma: float
    shared: bool
    key: tuple[int, ...]
    along: Projection

    @property
    def k(self) -> int:
        return len(self.parts)

    @cached_property
    def labels(self) -> list[NDArray[np.int64]]:
        return [self.table.label[part] for part in self.parts]

    def rng(self, *more: int) -> np.random.Generator:
        return np.random.default_rng([*self.key, *more])

    def variance(self, share: float = 1.0) -> float:
        """Of the noise in each hospital's part of a letter that has this share of the budget (of μ²)."""
        return self.sigma**2 / share / ((self.k - 1) if self.shared else 1)

    def z(self) -> tuple[list[Array], Array]:
        """Rows of each hospital and of the test set, along the directions, at most 1 long."""
        found = self.table.z(self.along)
        return [found[part] for part in self.parts], found[self.test]


def embedded(x: Array, along: Projection) -> Array:
    return clipped((x - along.mean) @ along.components)


def clipped(z: Array) -> Array:
    found: Array = z / np.linalg.norm(z, axis=1, keepdims=True).clip(min=1) * (1 - 1e-6)
    return found


@dataclass(frozen=True, eq=False)
class Said:
    """Logits [n, 2] that a shared head gives to a hospital's own rows and to the test rows, and what both are worth."""

    own: Array
    test: Array
    worth: tuple[float, float]


Idea = Callable[[Draw], list[Said]]


# ---- letters and what is made of them


@dataclass(frozen=True, eq=False)
class Letters:
    """Class sums and counts [K, 2, d + 1] of hospitals, exact and noisy, and variances [K, 2] of the noise."""

    exact: Array
    noisy: Array
    variance: Array

    def others(self, i: int) -> tuple[Array, Array]:
        """The sums of all but one, and the variance [2] of the noise in them."""
        return self.noisy.sum(0) - self.noisy[i], self.variance.sum(0) - self.variance[i]


def by_class(z: Array, y: Rows) -> Array:
    counted = np.column_stack([z, np.ones(len(z))])
    return np.stack([counted[y == one].sum(0) for one in (0, 1)])


def letters(
    draw: Draw, z: Sequence[Array], share: float = 1.0, count: float = COUNT_WEIGHT, salt: tuple[int, ...] = ()
) -> Letters:
    """One letter of each hospital's rows z[n, d] of length ≤ 1; a row's (z, count · 1) is scaled to length ≤ 1."""
    exact = np.stack([by_class(*pair) for pair in zip(z, draw.labels, strict=True)])
    unit = np.sqrt(1 + count**2)
    noise = draw.rng(*salt).normal(size=exact.shape) * np.sqrt(draw.variance(share)) * unit
    noise[..., -1] /= count
    return Letters(exact, exact + noise, np.full(exact.shape[:2], draw.variance(share) * unit**2))


def scatter(z: Array, y: Rows) -> Array:
    apart = np.concatenate([z[y == one] - z[y == one].mean(0) for one in np.unique(y)])
    return apart.T @ apart


def means_of(own: Array, within: Array, others: Array, noise: Array) -> tuple[Array, Array]:
    """Means [2, d] of own exact sums and others' noisy ones, each by its precision, and what they are worth in rows."""
    v = np.trace(within) / len(within)
    counts = others[:, -1].clip(min=0)
    trust = counts / (v * counts + noise).clip(min=1e-30)
    precision = counts * trust + own[:, -1] / v
    return (others[:, :-1] * trust[:, None] + own[:, :-1] / v) / precision[:, None].clip(min=1e-30), precision * v


def within_of(z: Array, y: Rows, covariance: Array) -> Array:
    """The covariance within own classes, to which that of public rows adds as much as d rows."""
    d = z.shape[1]
    freedom = sum(max((y == one).sum() - 1, 0) for one in (0, 1))
    found: Array = (scatter(z, y) + d * covariance) / (freedom + d)
    return found


def discriminant(means: Array, within: Array, ridge: float = RIDGE, rows: Array | None = None) -> tuple[Array, Array]:
    """With `rows`, what the means are worth, their squares are not too large by the noise in them."""
    d, v = len(within), np.trace(within) / len(within)
    inverse = np.linalg.inv(within + ridge * v * np.eye(d))
    longer = np.trace(inverse) * v / rows.clip(min=1e-30) if rows is not None else 0.0
    weights = inverse @ means.T
    return weights, -((means.T * weights).sum(0) - longer) / 2


def harmonic(rows: Array) -> float:
    return float(len(rows) / (1 / rows.clip(min=1e-30)).sum())


Solver = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(means [2, d], what they are worth in rows [2], within [d, d], public covariance) → weights [d, 2] and bias [2]."""
Map = Callable[["Table"], Projection]
Send = Callable[["Draw", Sequence[Array]], Letters]


def solved(draw: Draw, sent: Letters, z: Sequence[Array], test: Array, solver: Solver) -> list[Said]:
    """What follows from letters as the shipped head makes it, or with another last step."""
    found = []
    for i, (mine, y) in enumerate(zip(z, draw.labels, strict=True)):
        within = within_of(mine, y, draw.along.covariance)
        means, rows = means_of(sent.exact[i], within, *sent.others(i))
        made = solver(means, rows, within, draw.along.covariance)
        found.append(linear(mine, test, *made, (harmonic(sent.exact[i, :, -1]), harmonic(rows))))
    return found


def usual(table: Table) -> Projection:
    return table.directions


def ridged(ridge: float) -> Solver:
    return lambda means, rows, within, covariance: discriminant(means, within, ridge, rows)


USUALLY = ridged(RIDGE)


def unlevelled(means: Array, rows: Array, within: Array, covariance: Array) -> tuple[Array, Array]:
    """The last step of before: noise moves the threshold away from the class that is less known."""
    return discriminant(means, within)


def letter(along: Map = usual, send: Send | None = None, solver: Solver = USUALLY) -> Idea:
    """One letter of class sums, of which the map, what is sent, or the last step may differ from the shipped one's."""

    once = cache(along)

    def idea(draw: Draw) -> list[Said]:
        draw = replace(draw, along=once(draw.table))
        z, test = draw.z()
        return solved(draw, (send or letters)(draw, z), z, test, solver)

    return idea


def linear(own: Array, test: Array, weights: Array, bias: Array, worth: tuple[float, float]) -> Said:
    return Said(own @ weights + bias, test @ weights + bias, worth)


# ---- the reference


def shipped(draw: Draw) -> list[Said]:
    """The head of the package itself."""
    table, heads = draw.table, []
    noise = draw.rng().normal(size=(draw.k, 2 * (table.directions.n_components + 1))) * np.sqrt(draw.variance())
    for part, y, one in zip(draw.parts, draw.labels, noise, strict=True):
        head = SharedHead(2, table.raw.shape[1], projection=table.directions)
        z, label = head.embed_rows(torch.from_numpy(table.raw[part])), torch.from_numpy(y)
        head.set_local_statistics(z, label)
        exact = head.pack_statistics(z, label)
        noisy, variance = exact + torch.from_numpy(one), draw.variance()
        head.set_noisy_statistics(
            exact, *((noisy, variance) if draw.shared else head.weight_by_precision(noisy, variance))
        )
        heads.append(head)
    SharedHead.combine(heads)
    test = torch.from_numpy(table.raw[draw.test])
    own = (torch.from_numpy(table.raw[part]) for part in draw.parts)
    return [
        Said(head(x).double().numpy(), head(test).double().numpy(), head.effective_sample_sizes())
        for head, x in zip(heads, own, strict=True)
    ]


in_numpy = letter()
"""The same in the words of this file, with letters as they are; ideas differ from it by the idea alone."""


# ---- ideas


def first(n: int) -> Map:
    """Fewer or more principal components of the public rows."""
    return lambda table: table.first(n)


def by_budget(send: Send | None = None, solver: Solver = USUALLY) -> Idea:
    """As many directions as 9 times the cube root of the rows that noise leaves a class's mean worth, 16 to 96.

    These are v N² / s², where v is the mean variance of public rows along the usual directions, N half of all
    hospitals' rows and s² the variance of the noise in their sum; all of them are known before anything is sent.
    """

    def idea(draw: Draw) -> list[Said]:
        v = np.diag(draw.table.directions.covariance).mean()
        left = v * (sum(map(len, draw.parts)) / 2) ** 2 / (draw.variance() * draw.k)
        most = min(96, len(draw.table.public) // 2)
        return letter(first(int(np.clip(9 * left ** (1 / 3), 16, most))), send, solver)(draw)

    return idea


def reshaped(table: Table, power: float, quantile: float, n: int) -> Projection:
    """Directions divided by another power of their variance, or with another share of public rows left unclipped."""
    usual = table.first(n)
    scale = np.linalg.norm(usual.components, axis=0)
    components = usual.components.astype(np.float64) * scale ** (power / -0.25 - 1)
    long = np.linalg.norm((table.public_x - usual.mean) @ components, axis=1)
    components /= np.quantile(long, quantile)
    covariance = np.cov(clipped((table.public_x - usual.mean) @ components).T)
    return Projection(usual.mean, components.astype(np.float32), covariance)


def shaped(power: float = -0.25, quantile: float = 0.5, n: int = 32) -> Map:
    return lambda table: reshaped(table, power, quantile, n)


def boxed(most: float) -> Idea:
    """Clip every coordinate at so many public standard deviations, then what is left to length 1 as before."""

    def idea(draw: Draw) -> list[Said]:
        along = draw.along
        public = (draw.table.public_x - along.mean) @ along.components.astype(np.float64)
        box = most * public.std(0)
        length = np.median(np.linalg.norm(public.clip(-box, box), axis=1))

        def see(x: Array) -> Array:
            return clipped(((x - along.mean) @ along.components).clip(-box, box) / length)

        z, test = [see(draw.table.x[part]) for part in draw.parts], see(draw.table.x[draw.test])
        draw = replace(draw, along=replace(along, covariance=np.cov(see(draw.table.public_x).T)))
        return solved(draw, letters(draw, z), z, test, ridged(RIDGE))

    return idea


def counted(weight: float) -> Send:
    """Another weight of the count beside the sum."""
    return lambda draw, z: letters(draw, z, count=weight)


def nearest_mean(means: Array, rows: Array, within: Array, covariance: Array) -> tuple[Array, Array]:
    """Private prototypes as the nearest class mean (DPPL-Mean, 2024): no covariance."""
    return discriminant(means, np.eye(len(within)))


def shrunk(means: Array, rows: Array, within: Array, covariance: Array) -> tuple[Array, Array]:
    """Shrink the difference of the means along each direction, as far as noise may have made it.

    Beforehand it varies as public rows do, times what the difference's length leaves after noise (empirical Bayes).
    """
    apart = kept_part(means, rows, within, covariance) @ (means[1] - means[0])
    return discriminant(means.mean(0) + np.outer([-0.5, 0.5], apart), within)


def kept_part(means: Array, rows: Array, within: Array, covariance: Array) -> Array:
    """By which the difference of the means is multiplied [d, d]."""
    d, apart = len(within), means[1] - means[0]
    error = np.trace(within) / d * (1 / rows.clip(min=1e-9)).sum()
    size = max((apart @ apart - d * error) / np.trace(covariance), 1e-3)
    found: Array = size * covariance @ np.linalg.inv(size * covariance + error * np.eye(d))
    return found


def shrunk_and_level(means: Array, rows: Array, within: Array, covariance: Array) -> tuple[Array, Array]:
    """The same, and noise does not move the threshold."""
    d, v = len(within), np.trace(within) / len(within)
    both = np.linalg.inv(within + RIDGE * v * np.eye(d)) @ kept_part(means, rows, within, covariance)
    weight = both @ (means[1] - means[0])
    longer = np.trace(both) * v / rows.clip(min=1e-30)
    bias = -(weight @ means.sum(0) - longer[1] + longer[0]) / 2
    return np.outer(weight, [-0.5, 0.5]), bias * np.array([-0.5, 0.5])


def shrunk_to(power: float) -> Solver:
    """The same, where beforehand the means differ as a power of the covariance of public rows."""

    def solve(means: Array, rows: Array, within: Array, covariance: Array) -> tuple[Array, Array]:
        values, axes = np.linalg.eigh(covariance)
        return shrunk(means, rows, within, (axes * values.clip(min=1e-12) ** power) @ axes.T)

    return solve


def leading(part: float, least: int = 32) -> Solver:
    """Use the first directions alone, as many as this part of the rows that a class's mean is worth."""

    def solve(means: Array, rows: Array, within: Array, covariance: Array) -> tuple[Array, Array]:
        m = int(np.clip(part * harmonic(rows), least, len(within)))
        weights, bias = discriminant(means[:, :m], within[:m, :m])
        return np.concatenate([weights, np.zeros((len(within) - m, 2))]), bias

    return solve


def second_moment(share: float, *, diagonal: bool = False) -> Idea:
    """Release Σ z zᵀ too, with a share of the budget, for the covariance within classes."""

    def idea(draw: Draw) -> list[Said]:
        z, test = draw.z()
        d, covariance = z[0].shape[1], draw.along.covariance
        sent = letters(draw, z, 1 - share)
        moments = noisy_moments(draw, z, share, diagonal=diagonal)
        found = []
        for i, (mine, y) in enumerate(zip(z, draw.labels, strict=True)):
            others, noise = sent.others(i)
            within = within_of(mine, y, covariance)
            means, rows = means_of(sent.exact[i], within, others, noise)
            v, n = np.trace(within) / d, max(others[:, -1].sum(), 1.0)
            theirs = (moments.sum(0) - moments[i]) / n - means.T @ (means * others[:, -1:].clip(min=0)) / n
            if diagonal:  # the correlations stay as they are
                theirs = within * np.sqrt(np.outer(*[np.diag(theirs).clip(min=0.1 * v) / np.diag(within)] * 2))
            worth = n / (1 + draw.variance(share) * (draw.k - 1) / (2 * n * v**2))
            base = (y == 0).sum() + (y == 1).sum() - len(np.unique(y)) + d
            values, axes = np.linalg.eigh((base * within + worth * theirs) / (base + worth))
            within = (axes * values.clip(min=0.05 * v)) @ axes.T
            worths = harmonic(sent.exact[i, :, -1]), harmonic(rows)
            found.append(linear(mine, test, *discriminant(means, within), worths))
        return found

    return idea


def noisy_moments(draw: Draw, z: Sequence[Array], share: float, *, diagonal: bool = False) -> Array:
    """Σ z zᵀ [K, d, d] of each hospital with noise: of length |z|² ≤ 1 for a row, √2 × those off the diagonal."""
    noise = draw.rng(1).normal(size=(draw.k, *[z[0].shape[1]] * 2)) * np.sqrt(draw.variance(share))
    if diagonal:
        return np.stack([np.diag(np.diag(one.T @ one) + np.diag(e)) for one, e in zip(z, noise, strict=True)])
    return np.stack([one.T @ one for one in z]) + (noise + noise.transpose(0, 2, 1)) / 2


def learned_map(share: float, wide: int = 64, n: int = 32) -> Idea:
    """Two letters: the second moment along many public directions gives the map along which the second one sums."""

    def idea(draw: Draw) -> list[Said]:
        wide_along = draw.table.first(wide)
        z, _ = replace(draw, along=wide_along).z()
        _, axes = np.linalg.eigh(noisy_moments(draw, z, share).sum(0))
        components = wide_along.components @ axes[:, ::-1][:, :n]
        public = (draw.table.public_x - wide_along.mean) @ components
        components /= np.median(np.linalg.norm(public, axis=1))
        along = Projection(wide_along.mean, components.astype(np.float32), np.eye(n))
        along = replace(along, covariance=np.cov(embedded(draw.table.public_x, along).T))
        return letter(lambda _: along, lambda draw, z: letters(draw, z, 1 - share))(draw)

    return idea


def hessian_mixing(draw: Draw, rounds: int = 2, rows: int = 100, share: float = 0.5, bound: float = 1.0) -> list[Said]:
    """Iterative Hessian Mixing (Lev et al., 2601.07545): Newton's steps of least squares from random mixtures of rows.

    A round releases mixtures S X + η N for the Hessian, and the gradient Xᵀ(y − X θ), residuals clipped, with noise.
    Both are charged by Rényi orders. All is by the sum of sites, so that no own part is exact.
    """
    z, test = draw.z()
    x = [clipped(np.column_stack([one, np.full(len(one), 0.5)]) / np.sqrt(1.25)) for one in z]
    y = [2.0 * one - 1 for one in draw.labels]
    unit = draw.sigma * np.sqrt(rounds / share)
    eta = mixing_noise(draw, rounds, rows, unit)
    if not np.isfinite(eta):
        raise ValueError("no noise of the mixtures meets the budget")
    rng, d, k = draw.rng(2), x[0].shape[1], (draw.k - 1 if draw.shared else 1)
    theta = np.zeros(d)
    for _ in range(rounds):
        hessian, gradient = np.zeros((d, d)), np.zeros(d)
        mixture = np.zeros((rows, d))
        for mine, label in zip(x, y, strict=True):
            mixture += rng.normal(size=(rows, len(mine))) @ mine + rng.normal(size=(rows, d)) * eta / np.sqrt(k)
            gradient += mine.T @ (label - mine @ theta).clip(-bound, bound)
            gradient += rng.normal(size=d) * unit * bound / np.sqrt(k)
        hessian = mixture.T @ mixture / rows
        theta = theta + np.linalg.solve(hessian, gradient)
    weights = np.outer(theta[:-1], [-0.5, 0.5]) / np.sqrt(1.25)
    bias = theta[-1] * 0.5 / np.sqrt(1.25) * np.array([-0.5, 0.5])
    return [linear(mine, test, weights, bias, said.worth) for mine, said in zip(z, in_numpy(draw), strict=True)]


def mixing_noise(draw: Draw, rounds: int, rows: int, sigma: float) -> float:
    """Least η with which mixtures and gradients of all rounds spend what one letter does."""
    orders = np.concatenate([np.arange(1.1, 12, 0.1), np.arange(12, 200)])

    def spent(eta: float) -> float:
        q = 1 / (1 + eta**2)  # the most that a row's direction can hold of the mixtures' variance
        both = np.maximum(renyi(orders, 1.0, 1 - q), renyi(orders, 1 - q, 1.0))
        all_ = rounds * (rows * both + orders / (2 * sigma**2))
        found = all_ + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)
        return float(found.min())

    target = draw.table.__dict__["epsilon"]
    low, high = 1e-2, 1e4
    while high / low > 1.001:
        middle = np.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > target else (low, middle)
    return high if spent(high) <= target else np.inf


def renyi(orders: Array, a: float, b: float) -> Array:
    """Rényi divergence of N(0, a) from N(0, b)."""
    both = (1 - orders) * a + orders * b
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = 0.5 * np.log(b / a) + np.log(b / both) / (2 * (orders - 1))
    return np.where(both > 0, found, np.inf)


def prototypes(cells: int) -> Idea:
    """Sums for each class and cell of public tissue (a row lies in one): a mixture of Gaussians for each class."""

    def idea(draw: Draw) -> list[Said]:
        z, test = draw.z()
        along, d = draw.along, z[0].shape[1]
        public = embedded(draw.table.public_x, along)
        centres, _ = kmeans2(public, cells, seed=0, minit="++")
        exact = np.stack([by_cell(*pair, centres) for pair in zip(z, draw.labels, strict=True)])
        unit = 1 + COUNT_WEIGHT**2
        noise = draw.rng().normal(size=exact.shape) * np.sqrt(draw.variance() * unit)
        noise[..., -1] /= COUNT_WEIGHT
        noisy = exact + noise
        said, found = in_numpy(draw), []
        for i, (mine, y) in enumerate(zip(z, draw.labels, strict=True)):
            within = within_of(mine, y, along.covariance)
            v = np.trace(within) / d
            others = noisy.sum(0) - noisy[i]
            whole = means_of(
                exact[i].sum(1), within, others.sum(1), np.full(2, draw.variance() * unit * cells * (draw.k - 1))
            )[0]
            flat, rows = means_of(
                exact[i].reshape(-1, d + 1),
                within,
                others.reshape(-1, d + 1),
                np.full(2 * cells, draw.variance() * unit * (draw.k - 1)),
            )
            trust = (rows / (rows + 5)).reshape(2, cells, 1)  # a cell counts as 5 rows near its class's mean
            middle = trust * flat.reshape(2, cells, d) + (1 - trust) * whole[:, None]
            part = rows.reshape(2, cells) + 1.0
            part /= part.sum(1, keepdims=True)
            inverse = np.linalg.inv(within + RIDGE * v * np.eye(d))

            def logits(at: Array, middle: Array = middle, part: Array = part, inverse: Array = inverse) -> Array:
                apart = at[:, None, None] - middle
                far = -0.5 * np.einsum("ncjd,de,ncje->ncj", apart, inverse, apart) + np.log(part)
                return np.logaddexp.reduce(far, axis=2)

            found.append(Said(logits(mine), logits(test), said[i].worth))
        return found

    return idea


def by_cell(z: Array, y: Rows, centres: Array) -> Array:
    cell = ((z[:, None] - centres) ** 2).sum(2).argmin(1)
    counted = np.column_stack([z, np.ones(len(z))])
    found = np.zeros((2, len(centres), counted.shape[1]))
    np.add.at(found, (y, cell), counted)
    return found


def votes(draw: Draw) -> list[Said]:
    """Public prototypes: every row votes for the public row that is nearest; the votes of a class weigh public rows."""
    z, test = draw.z()
    along = draw.along
    public = embedded(draw.table.public_x, along)
    exact = np.stack([by_cell(*pair, public)[..., -1] for pair in zip(z, draw.labels, strict=True)])
    noisy = exact + draw.rng().normal(size=exact.shape) * np.sqrt(draw.variance())
    said, found = in_numpy(draw), []
    for i, (mine, y) in enumerate(zip(z, draw.labels, strict=True)):
        counts = noisy.sum(0) - noisy[i]
        others = np.column_stack([counts @ public, counts.sum(1)])
        within = within_of(mine, y, along.covariance)
        noise = draw.variance() * (draw.k - 1) * (public**2).sum() / public.shape[1]
        means, rows = means_of(by_class(mine, y), within, others, np.full(2, noise))
        worth = said[i].worth[0], harmonic(rows)
        found.append(linear(mine, test, *discriminant(means, within), worth))
    return found


def weighed(weights: Callable[[Draw, Letters], Array], send: Send = letters) -> Send:
    """Multiply every class's part of a noisy letter by a weight [K, 2] before all are added up."""

    def sent(draw: Draw, z: Sequence[Array]) -> Letters:
        found = send(draw, z)
        w = weights(draw, found)
        w = w / w.max(0)
        return Letters(found.exact, found.noisy * w[..., None], found.variance * w**2)

    return sent


def of_known_number(draw: Draw, z: Sequence[Array]) -> Letters:
    """Noisy counts of both classes are made to add up to the number of rows, were that no secret."""
    found = letters(draw, z)
    rows = np.array([[len(part)] for part in draw.parts])
    noisy = found.noisy.copy()
    noisy[..., -1] += (rows - noisy[..., -1].sum(1, keepdims=True)) / 2
    return Letters(found.exact, noisy, found.variance)


def by_own_count(draw: Draw, sent: Letters) -> Array:
    """Each hospital by its own noisy counts, shrunk to half of its rows as noise may have made the rest."""
    rows = np.array([[len(part)] for part in draw.parts])
    apart = (sent.noisy[:, 1, -1] - sent.noisy[:, 0, -1])[:, None]
    error = 2 * sent.variance[:, :1] / COUNT_WEIGHT**2
    real = (1 - error / apart**2).clip(min=0) * apart
    return (rows + real * [[-1, 1]]).clip(min=0.02 * rows) / 2 / rows


def by_all_counts(draw: Draw, sent: Letters) -> Array:
    """By all hospitals' noisy counts, shrunk to their mean as far as noise may have made them differ."""
    counts = sent.noisy[..., -1]
    mean = counts.mean(0).clip(min=1)
    error = sent.variance[0] / COUNT_WEIGHT**2
    real = (1 - error / counts.var(0).clip(min=1e-9)).clip(min=0)
    return (mean + real * (counts - mean)).clip(min=0.02 * mean)


def by_likeness(draw: Draw, sent: Letters) -> Array:
    """Letters of hospitals whose means lie further from the common ones than noise explains count for less."""
    covariance = draw.along.covariance
    d, v = len(covariance), np.trace(covariance) / len(covariance)
    total = sent.noisy.sum(0)
    means = total[:, :-1] / total[:, -1:].clip(min=1)
    counts = sent.noisy[..., -1].clip(min=1)
    far = ((sent.noisy[..., :-1] - counts[..., None] * means) ** 2).sum(2)
    due = d * (sent.variance + v * counts) + (sent.variance / COUNT_WEIGHT**2) * (means**2).sum(1)
    found: Array = 1 / (1 + (far / due - 1).clip(min=0))
    return found


def synthetic(draw: Draw) -> list[Said]:
    """Rows drawn around the class means, and one logistic regression of these and the own rows."""
    from sklearn.linear_model import LogisticRegression

    table, (z, _) = draw.table, draw.z()
    along, sent = draw.along, letters(draw, z)
    back = np.linalg.pinv(along.components.astype(np.float64))
    covariance, public = along.covariance, embedded(table.public_x, along)
    found = []
    for i, (mine, y) in enumerate(zip(z, draw.labels, strict=True)):
        within = within_of(mine, y, covariance)
        means, rows = means_of(sent.exact[i], within, *sent.others(i))
        made = np.concatenate([table.public_x + (mean - public.mean(0)) @ back for mean in means])
        label = np.repeat([0, 1], len(public))
        own = table.x[draw.parts[i]]
        x, labels = np.concatenate([own, made]), np.concatenate([y, label])
        counts = sent.exact[i, :, -1]
        theirs = np.minimum((rows - counts).clip(min=1), 60)  # as `stack_by_rows` believes a head along few directions
        weight = np.concatenate([np.ones(len(y)), (theirs / len(public))[label]])
        weight *= (weight.sum() / 2 / np.bincount(labels, weight))[labels]
        basis = np.linalg.qr(x.T)[0]
        fit = LogisticRegression(C=draw.lone[i].strength, solver="newton-cg").fit(x @ basis, labels, weight)
        w = np.outer(basis @ fit.coef_[0], [-0.5, 0.5])
        b = fit.intercept_[0] * np.array([-0.5, 0.5])
        worth = harmonic(counts), harmonic(rows)
        found.append(linear(own, table.x[draw.test], w, b, worth))
    return found


IDEAS: Mapping[str, Idea] = {
    "shipped": shipped,
    "letters as they are": letter(),
    "threshold as before": letter(solver=unlevelled),
    **{f"{n} directions": letter(first(n)) for n in (8, 16, 24, 48, 64, 96)},
    "directions from n·ε": by_budget(),
    "directions from n·ε, shrunk": by_budget(solver=shrunk),
    "variance to the power 0": letter(shaped(power=-1e-9)),
    "variance to the power −1/8": letter(shaped(power=-0.125)),
    "variance to the power −1/2": letter(shaped(power=-0.5)),
    "clip at the 5 % quantile": letter(shaped(quantile=0.05)),
    "clip at the 25 % quantile": letter(shaped(quantile=0.25)),
    "clip at the 75 % quantile": letter(shaped(quantile=0.75)),
    "clip each at 1 sd": boxed(1.0),
    "clip each at 2 sd": boxed(2.0),
    "count 0.15": letter(send=counted(0.15)),
    "count 0.6": letter(send=counted(0.6)),
    "nearest class mean": letter(solver=nearest_mean),
    "ridge 0.2": letter(solver=ridged(0.2)),
    "ridge 1": letter(solver=ridged(1.0)),
    "ridge 2": letter(solver=ridged(2.0)),
    "shrunk difference": letter(solver=shrunk),
    "own counts weigh, shrunk, threshold level": letter(send=weighed(by_own_count), solver=shrunk_and_level),
    "shrunk, threshold level": letter(solver=shrunk_and_level),
    "shrunk, power ½": letter(solver=shrunk_to(0.5)),
    "shrunk, power ½, directions from n·ε": by_budget(solver=shrunk_to(0.5)),
    "shrunk, 64 directions": letter(first(64), solver=shrunk),
    "shrunk, 64 directions, power 0": letter(shaped(-1e-9, n=64), solver=shrunk),
    "shrunk, 96 directions, power −1/8": letter(shaped(-0.125, n=96), solver=shrunk),
    "64 directions, 32 used": letter(first(64), solver=leading(0)),
    "96 directions, 32 used": letter(first(96), solver=leading(0)),
    "96 directions, power −1/8, 32 used": letter(shaped(-0.125, n=96), solver=leading(0)),
    "96 directions, power 0, 32 used": letter(shaped(-1e-9, n=96), solver=leading(0)),
    "64 directions, used by worth / 2": letter(first(64), solver=leading(0.5)),
    "96 directions, used by worth / 2": letter(first(96), solver=leading(0.5)),
    "96 directions, power −1/8, used by worth / 2": letter(shaped(-0.125, n=96), solver=leading(0.5)),
    "96 directions, power −1/8, used by worth / 3": letter(shaped(-0.125, n=96), solver=leading(1 / 3)),
    "96 directions, power 0, used by worth / 2": letter(shaped(-1e-9, n=96), solver=leading(0.5)),
    "64 directions, used by worth / 2, own counts weigh": letter(first(64), weighed(by_own_count), leading(0.5)),
    "second moment, 20 %": second_moment(0.2),
    "variances, 20 %": second_moment(0.2, diagonal=True),
    "second moment for the map, 20 %": learned_map(0.2),
    "second moment for the map, 40 %": learned_map(0.4),
    "Iterative Hessian Mixing": hessian_mixing,
    "4 prototypes": prototypes(4),
    "votes for public rows": votes,
    "known number of rows": letter(send=of_known_number),
    "own counts weigh": letter(send=weighed(by_own_count)),
    "all counts weigh": letter(send=weighed(by_all_counts)),
    "own counts weigh, known number": letter(send=weighed(by_own_count, of_known_number)),
    "own counts weigh, 48 directions": letter(first(48), weighed(by_own_count)),
    "own counts weigh, shrunk": letter(send=weighed(by_own_count), solver=shrunk),
    "own counts weigh, shrunk, 64 directions": letter(first(64), weighed(by_own_count), shrunk),
    "own counts weigh, shrunk, directions from n·ε": by_budget(weighed(by_own_count), shrunk),
    "shrunk, clip at the 25 % quantile": letter(shaped(quantile=0.25), solver=shrunk),
    "own counts weigh, shrunk, clip at the 25 % quantile": letter(shaped(quantile=0.25), weighed(by_own_count), shrunk),
    "likeness weighs": letter(send=weighed(by_likeness)),
    "synthetic rows": synthetic,
}
SEES_EACH = tuple(one for one in IDEAS if "weigh" in one)
"""Ideas that need each letter with noise of its own."""


# ---- measuring


def mixed(draw: Draw, i: int, said: Said) -> float:
    """Accuracy of the mixture that hospital i would use; balanced, since the tests are."""
    y, lone, shared = draw.labels[i], draw.lone[i], probabilities(said.own)
    if len(np.unique(y)) < 2:
        stack = single_federated_ensemble(2)
    else:
        stack = weight_by_sample_size(lone.own, shared, y, said.worth)
        if lone.held_out and is_worse_than_local(stack, lone.own, shared, y):
            stack = single_local_ensemble(2)
    answer = stack(lone.test, probabilities(said.test))
    return float((answer.argmax(1) == draw.table.label[draw.test]).mean())


def probabilities(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(1, keepdims=True))
    found: Array = raised / raised.sum(1, keepdims=True)
    return found


def lone_heads(table: Table, parts: Sequence[Rows], test: Rows, kept: Path) -> list[Lone]:
    """What the heads say that hospitals have alone; fitted once."""
    if not kept.exists():
        made = [fit_linear_head(table.x[one], table.label[one], np.array([""] * len(one)), 2) for one in parts]
        kept.parent.mkdir(exist_ok=True)
        np.savez(
            kept,
            weight=[one.weight for one in made],
            bias=[one.bias for one in made],
            strength=[one.strength for one in made],
            held_out=[0 if one.held_out is None else 1 for one in made],
            seen=np.concatenate(
                [np.zeros((len(p), 2)) if h.held_out is None else h.held_out for p, h in zip(parts, made, strict=True)]
            ),
        )
    heads = np.load(kept)
    found, ends = [], np.cumsum([len(part) for part in parts])
    for k, part in enumerate(parts):
        weight, bias = heads["weight"][k], heads["bias"][k]
        own, asked = (probabilities(table.x[rows] @ weight.T + bias) for rows in (part, test))
        held_out = bool(heads["held_out"][k])
        seen = heads["seen"][ends[k] - len(part) : ends[k]] if held_out else own
        found.append(Lone(seen, asked, held_out, float(heads["strength"][k])))
    return found


def measured(table: Table, args: argparse.Namespace, done: set[tuple[str, ...]]) -> list[dict[str, Any]]:
    """A row for each setting, seed and idea that is not done: accuracy of each hospital, over draws of noise."""
    sigma = find_sigma(args.epsilon, 1.0, 1, DELTA)
    table.__dict__["epsilon"] = args.epsilon
    rows = []
    for seed in args.seeds:
        for name, shared in ASKED:
            setting = next(one for one in SETTINGS if one.name == name)
            label = name + (", shared noise" if shared else "")
            if args.settings and label not in args.settings:
                continue
            draw = draw_of(table, setting, seed, sigma, shared, args.cache)
            if draw is None:
                continue
            for idea in args.ideas or IDEAS:
                if (label, idea, str(seed)) in done or (shared and idea in SEES_EACH):
                    continue
                sites = [one_repeat(replace(draw, key=(seed, k)), idea) for k in range(REPEATS)]
                if not sites[0]:
                    continue
                row = {"setting": label, "idea": idea, "seed": seed, "sites": np.mean(sites, 0).tolist()}
                rows.append(row)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def one_repeat(draw: Draw, idea: str) -> list[float]:
    try:
        said = IDEAS[idea](draw)
    except WsiFlError as error:  # as where public rows are too few for so many directions
        print(f"{idea}: {error}")
        return []
    return [mixed(draw, i, one) for i, one in enumerate(said)]


def draw_of(table: Table, setting: Setting, seed: int, sigma: float, shared: bool, kept: Path) -> Draw | None:
    """A seed's hospitals, or None where the table has too few rows."""
    try:
        parts, test = drawn(setting, table.label, seed)
    except ValueError:
        return None
    lone = lone_heads(table, parts, test, kept / f"{setting.name}-{seed}.npz")
    return Draw(table, parts, test, lone, sigma, shared, (seed, 0), table.directions)


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each idea less the shipped head, its 95 % interval over seeds, and the worst hospital's mean."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    ideas = [one for one in IDEAS if any(row["idea"] == one for row in rows)]
    found = {(row["setting"], row["idea"], row["seed"]): np.array(row["sites"]) for row in rows}
    lines = [" | ".join(["| idea", *settings]) + " |", "|---" * (len(settings) + 1) + "|"]
    for idea in ideas:
        cells = [idea]
        for setting in settings:
            seeds = sorted(
                {s for name, one, s in found if (name, one) == (setting, idea) and (setting, "shipped", s) in found}
            )
            if not seeds:
                cells.append("")
                continue
            each = np.stack([found[setting, idea, s] for s in seeds])
            usual = np.stack([found[setting, "shipped", s] for s in seeds])
            cells.append(f"{each.mean():.3f}" if idea == "shipped" else difference(each - usual))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(each: Array) -> str:
    seeds = each.mean(1)
    if len(seeds) < 2:
        return f"{seeds.mean():+.4f}"
    half = student.ppf(0.975, len(seeds) - 1) * seeds.std(ddof=1) / np.sqrt(len(seeds))
    sure = "**" if abs(seeds.mean()) > half else ""
    return f"{sure}{seeds.mean():+.4f}{sure} ± {half:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--ideas", nargs="+", choices=IDEAS)
    parser.add_argument("--settings", nargs="+")
    parser.add_argument("--cache", type=Path, default=Path("lone_heads"), help="of the heads that hospitals have alone")
    parser.add_argument("--out", type=Path, default=Path("letters.jsonl"))
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    path = args.show or args.out
    rows = [json.loads(one) for one in path.read_text("utf-8").splitlines()] if path.exists() else []
    if not args.show:
        if read := set(args.seeds) & set(READ_ONCE):
            parser.error(f"seeds {sorted(read)} were read once, for WORTH.md; take others")
        with np.load(args.table) as kept:
            table = Table(kept["x"].astype(np.float32), kept["y"].astype(np.int64), kept["public"].astype(np.float32))
        done = {(row["setting"], row["idea"], str(row["seed"])) for row in rows}
        rows += measured(table, args, done)
    print(shown(rows))


if __name__ == "__main__":
    main()
