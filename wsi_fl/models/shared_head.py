"""The one-shot global head, solved from the class statistics of several sites: noisy sums of features by class.

z is an example's feature vector on the common projection (`directions`), clipped to norm 1. A site's statistics hold,
for each of some columns, the sum of z over its examples and their number. An example counts in columns with weights of
sum 1: a class is a column. Noise of a known variance is added to each number before the release. Statistics add up. A
site combines its exact class means with the noisy ones of the others, weighted by precision, and solves linear
discriminant analysis with its covariance within classes, shrunk to that of public examples (Fisher, 1936; Friedman,
"Regularized discriminant analysis", JASA 1989).

For a number or the time of an event the head is one Newton step of a linear model from the baseline without features:
the mean number, or one hazard for each interval. The residual r of an example from the baseline is u − ū for a number
u in [0, 1], or the martingale residual of a patient (Therneau, Grambsch and Fleming, Biometrika 1990). All examples of
a column have the same residual, so Σ r z, the gradient of the likelihood at the baseline, follows from the sums of z by
column. The step is linear regression for a number, and for survival discrete-time proportional hazards to first order,
as in Cox's score test.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wsi_fl.models.directions import N_RANDOM, Directions, random_directions
from wsi_fl.models.mil import MeanOfBag
from wsi_fl.types import UsageError

Kind = Literal["classes", "number", "survival"]
COUNT = 0.3
"""Weight of an example in the count of its class, for z of norm 1: counts need less precision than sums."""
_SCALE = 1 / sqrt(1 + COUNT**2)  # limits the norm of the statistics of one example to 1
_PATIENT = 0.4
"""Clipping norm of the mean of a patient's patches, in norms of one example: patches vary more than their means."""
_ROUND_OFF = 1e-6
_RIDGE = 0.5  # added to the covariance, in parts of its mean variance
_LEAST_SURE = 0.01  # keeps the order of probabilities
_NEVER = -30.0  # logit of a class without statistics
_LEAST_WEIGHT = 0.02  # of a class in the statistics, relative to the most frequent one


class SharedHead(nn.Module):
    """A linear head solved from class statistics, with exact statistics of the local examples.

    Its parameters are class statistics: a site's release, and after the exchange the mean over all sites. The site's
    statistics without noise are buffers and never leave the site.

    Args:
        n_classes, n_features: of the task and of the encoder; for other tasks the number of outputs.
        bags: whether examples are bags of features, float32[b, m, d + 1], represented by their mean.
        projection: the projection, or the number of random components.
        patients: whether the privacy units are patients with many examples each.

    Attributes:
        shape: (columns, d + 1).
        sums: float32[k + columns], packed sums and counts, and the public variances of the noise by column.
        released: float64[k + columns], this site's release, and `noiseless_statistics` float64[k], the same without noise.
        local_sums: float64[columns, d + 1], sums and counts of the local examples, and `scatter` float64[d, d], their scatter
            about the means of their classes, or about the mean of all for other tasks.
        total_sum_of_squares: for a number, Σ (u − ū)² of the local examples' places in the range.
        design_effect: the design effect, the variance of means of local examples relative to that of independent ones; 1 for
            one example per patient.
        rows_per_unit: number of examples averaged in a unit: 1, or the mean number of the local patients.
        clip_scale: divisor of a unit's z before the sum: 1, or the clipping norm where units are patients.
        n_sites: number of sites in the mean `sums`; 0 before the exchange.
    """

    sums: nn.Parameter
    released: Tensor
    exact: Tensor
    own: Tensor
    scatter: Tensor
    spread: Tensor
    alike: Tensor
    size: Tensor
    length: Tensor
    n_sites: Tensor
    mean: Tensor
    components: Tensor
    covariance: Tensor

    def __init__(
        self,
        n_classes: int,
        n_features: int,
        *,
        bags: bool = False,
        directions: Directions | int = N_RANDOM,
        patients: bool = False,
        kind: Kind = "classes",
    ) -> None:
        super().__init__()
        self.kind, self.n_outputs = kind, n_classes
        self.pooled: nn.Module = MeanOfBag() if bags else nn.Identity()
        if isinstance(directions, int):
            directions = random_directions(n_features, directions)
        self.shape = (n_columns(n_classes, kind), directions.n + 1)
        size = n_sums(self.shape[0], directions.n)
        self.sums = nn.Parameter(torch.zeros(size))
        self.mean = nn.Buffer(torch.from_numpy(directions.mean))
        self.components = nn.Buffer(torch.from_numpy(directions.components))
        self.covariance = nn.Buffer(torch.from_numpy(directions.covariance))
        self.released = nn.Buffer(torch.zeros(size, dtype=torch.float64))
        self.exact = nn.Buffer(torch.zeros(size - self.shape[0], dtype=torch.float64))
        self.own = nn.Buffer(torch.zeros(self.shape, dtype=torch.float64))
        self.scatter = nn.Buffer(torch.zeros(directions.n, directions.n, dtype=torch.float64))
        self.alike = nn.Buffer(torch.ones((), dtype=torch.float64))
        self.size = nn.Buffer(torch.ones((), dtype=torch.float64))
        self.length = nn.Buffer(torch.tensor(_PATIENT if patients else 1.0, dtype=torch.float64))
        self.n_sites = nn.Buffer(torch.zeros((), dtype=torch.int64))
        if kind == "number":
            self.spread = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def look_along(self, directions: Directions, *, patients: bool = False) -> None:
        """Set another projection of as many components."""
        for name in ("mean", "components", "covariance"):
            getattr(self, name).copy_(torch.from_numpy(getattr(directions, name)))
        self.length.fill_(_PATIENT if patients else 1.0)

    def embedded(self, x: Tensor) -> Tensor:
        """Return z float64[b, d] of each example, with a norm of at most 1; 0 where it is not finite.

        Raises:
            UsageError: for another number of features.
        """
        n_features = x.shape[-1] - (1 if isinstance(self.pooled, MeanOfBag) else 0)
        if n_features != len(self.mean):
            raise UsageError(f"the head sums {len(self.mean)} features, and the rows have {n_features}")
        return _embedded(self.pooled(x), self.mean, self.components)

    def packed(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the statistics float64[k] of examples z[b, d]; those of one example have a norm of at most 1.

        With weights w the norm is |w| times that of an example of one class, and |w| ≤ Σ w = 1.

        Args:
            y: int64[b], the column of each example, such as its class; or float64[b], its weight from 0 to 1 in the
                second of two columns, with the remainder in the first.
        """
        return self._letter(_by_column(z, y, self.shape[0], weights=self.kind == "number"))

    def packed_means(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the statistics float64[k] of one patient's examples: the mean of each class, counted once.

        With fractional weights it is the mean of the examples' statistics. The caller clips the result.
        """
        sums = _by_column(z, y, self.shape[0], weights=self.kind == "number")
        counts = sums[:, -1:].sum() if y.is_floating_point() else sums[:, -1:]
        means = sums / counts.clamp(min=1)
        means[:, :-1] /= self.length
        long = means[:, :-1].norm().clamp(min=1) * (1 + _ROUND_OFF)
        means[:, :-1] /= long
        return self._letter(means)

    def _letter(self, sums: Tensor) -> Tensor:
        return torch.cat([sums[:, :-1], COUNT * sums[:, -1:]], dim=1).flatten() * _SCALE

    def unpacked(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums float64[columns, d] and counts float64[columns] of packed statistics."""
        both = sums[: self.shape[0] * self.shape[1]].double().view(self.shape) / _SCALE
        return both[:, :-1] * self.length, both[:, -1] / COUNT

    @torch.no_grad()
    def know(self, z: Tensor, y: Tensor, patient: Tensor | None = None) -> None:
        """Set exact sums and scatter of the local examples z[n, d] with columns y; they never leave the site.

        Args:
            patient: int64[n] of each example. Examples of one patient are correlated and count for less than as many of
                different patients (Liang and Zeger, "Longitudinal data analysis using generalized linear models",
                Biometrika 1986). None for a different patient of each example.
        """
        self.own.copy_(_by_column(z, y, self.shape[0], weights=self.kind == "number"))
        group, sums = y, self.own
        if self.kind != "classes":
            group = torch.zeros(len(y), dtype=torch.int64, device=y.device)
            sums = self.own.sum(0, keepdim=True)
        if self.kind == "number" and len(y):
            self.spread.copy_((y - y.mean()).square().sum())
        means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        apart = z - means[group]
        self.scatter.copy_(apart.mT @ apart)
        if patient is None or not len(z):
            return
        _, of = torch.unique(patient * len(sums) + group, return_inverse=True)
        n, units, seen = len(z), int(of.max()) + 1, int((sums[:, -1] > 0).sum())
        self.alike.fill_(n / units)  # without an estimate of the variation between patients
        self.size.copy_(torch.where(self.length < 1, self.alike, 1.0))
        if units > seen:
            together = _summed(apart, of, units).square().sum() / (1 - seen / units)
            alone = apart.square().sum() / (1 - seen / n)
            self.alike.copy_((together / alone.clamp(min=_TINY)).clamp(min=1.0))

    @torch.no_grad()
    def hold(self, exact: Tensor, noisy: Tensor, variance: float | Tensor) -> None:
        """Set this site's statistics float64[k], exact and noisy with a variance, or one by column."""
        self.exact.copy_(exact)
        self.sums.copy_(torch.cat([noisy, noisy.new_ones(self.shape[0]) * variance]))
        self.released.copy_(self.sums)
        self.n_sites.zero_()

    @torch.no_grad()
    def weighed(self, noisy: Tensor, variance: float) -> tuple[Tensor, Tensor]:
        """Return noisy statistics float64[k] with classes weighted by precision, and the variances of their noise.

        For sums of n examples from many sites, with variance v within a class and noise of variance s², weights
        n / (v n + s²) are the most precise (Cochran, "Problems arising in the analysis of a series of similar
        experiments", JRSS supplement 1937). They depend on the release only: on the noisy counts, shrunk to their mean
        by as much as noise may separate them. The most frequent class has weight 1, every other at least 0.02. For
        other tasks all columns have weight 1.
        """
        if self.kind != "classes":
            return noisy, noisy.new_full(self.shape[:1], variance)
        both = noisy.view(self.shape)
        counts, noise = both[:, -1] / (COUNT * _SCALE), variance / _SCALE**2
        apart = counts - counts.mean()
        by_noise = (len(counts) - 1) * noise / COUNT**2 / apart.square().sum().clamp(min=_TINY)
        counts = (counts.mean() + apart * (1 - by_noise).clamp(min=0)).clamp(min=1)
        v = self.covariance.trace() / len(self.covariance) / self.length**2
        weights = counts / (v * counts + noise)
        weights = (weights / weights.max()).clamp(min=_LEAST_WEIGHT)
        return (both * weights[:, None]).flatten(), variance * weights**2

    @staticmethod
    @torch.no_grad()
    def combine(heads: Sequence[SharedHead]) -> None:
        """Set the mean of all released statistics in each of several sites' heads."""
        mean = torch.stack([head.released for head in heads]).mean(0)
        for head in heads:
            head.sums.copy_(mean)
            head.n_sites.fill_(len(heads))

    def others(self) -> Tensor:
        """Return the sum of all other sites' statistics float64[k + columns], the variances of their noise last."""
        return self.sums.double() * int(self.n_sites) - self.released * (int(self.n_sites) > 0)

    @property
    def is_noisy(self) -> bool:
        """Whether the statistics of other sites are noisy."""
        return bool((self.others()[-self.shape[0] :] > 0).any())

    @torch.no_grad()
    def redrawn(self, rng: np.random.Generator) -> SharedHead:
        """Return the head for other sites' statistics with noise added once more.

        It differs from this head as much as this one from the head without noise, so its predictions measure the effect
        of the noise. It is for evaluation only and never released.
        """
        head = copy.deepcopy(self)
        n, width = self.shape
        variance = self.others()[-n:].clamp(min=0).cpu().numpy()
        noise = rng.normal(size=(n, width)) * np.sqrt(variance)[:, None] / max(1, int(self.n_sites))
        head.sums[: n * width] += torch.from_numpy(noise.ravel()).to(head.sums)
        return head

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the class means float64[classes, d], their effective sample sizes, and the covariance within classes.

        A class mean over n local examples has the variance a v / n in each component, with the mean variance v within
        classes and the design effect a. The mean over N units of other sites, of m examples each, with noise of
        variance s² in the sum, has a v / (m N) + s² / N².
        """
        d = self.shape[1] - 1
        # 1. The covariance within classes: that of public examples counts as much as d local ones.
        n = float((self.own[:, -1] - 1).clamp(min=0).sum())
        within = (self.scatter + d * self.covariance) / (n + d)
        v = within.trace() / d
        # 2. The means of others and their precision.
        letters = self.others()
        sums, counts = self.unpacked(letters)
        noise = letters[-len(counts) :].clamp(min=0) / _SCALE**2 * self.length**2
        counts, mean = counts.clamp(min=0), v * self.alike / self.size
        trust = counts / (mean * counts + noise).clamp(min=_TINY)
        # 3. Local and others' means, weighted by precision.
        own = v * self.alike
        precision = counts * trust + self.own[:, -1] / own
        weighed = sums * trust[:, None] + self.own[:, :-1] / own
        means = weighed / precision.clamp(min=_TINY)[:, None]
        return means, precision * v, within

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor, _Featureless, Tensor]:
        """Return the linear model of a number or of hazards, one Newton step from the baseline without features.

        An example of another site has less weight than a local one because of the noise. Σ r z over others' examples
        has the variance w v V, with their information V, the variance v of z in each component and w of residuals, and
        noise adds s² Σ r² over the columns.

        Returns:
            The slope float64[d], the z float64[d] at which the model equals the baseline, the baseline, and float64[2],
                the effective examples of each of two classes, local ones and all: a quarter of their information.
        """
        d, of = self.shape[1] - 1, _of_numbers if self.kind == "number" else _of_times
        # 1. Variances of z and residuals: public examples and uniform residuals count as much as d local ones.
        n = float((self.own[:, -1].sum() - 1).clamp(min=0))
        within = (self.scatter + d * self.covariance) / (n + d)
        varied = (self.spread + d / 12) / (n + d) if self.kind == "number" else 1.0
        # 2. The sums of others and the weight of their examples.
        letters = self.others()
        sums, counts = self.unpacked(letters)
        theirs, own = torch.cat([sums, counts.clamp(min=0)[:, None]], dim=1), self.own / self.alike
        noise = letters[-len(counts) :].clamp(min=0).max() / _SCALE**2 * self.length**2
        guess = of(own[:, -1] + theirs[:, -1])
        told, likeness = guess.information @ theirs[:, -1], self.alike / self.size
        hidden = noise * guess.residuals.square().sum() / (varied * within.trace() / d)
        weight = told / (told * likeness + hidden).clamp(min=_TINY)
        # 3. The step from all examples.
        both = own + theirs * weight
        model = of(both[:, -1])
        middle = both[:, :-1].sum(0) / both[:, -1].sum().clamp(min=_TINY)
        gradient = model.residuals @ (both[:, :-1] - both[:, -1:] * middle)
        information = torch.stack([model.information @ own[:, -1], model.information @ both[:, -1]])
        sampled = varied * (information[0] + weight**2 * told * likeness)
        unsure = weight**2 * noise * model.residuals.square().sum()
        slope = _slope_of(gradient, information[1].clamp(min=_TINY), within, varied, sampled, unsure)
        return slope, middle, model, information / 4

    @torch.no_grad()
    def head(self) -> tuple[Tensor, Tensor]:
        """Return weights float64[d, outputs] and bias float64[outputs] of a linear model.

        For classes it is linear discriminant analysis with equal priors of all classes. The square of a noisy mean is
        too large by the variance of its noise, which is subtracted. Without local examples the logits are shrunk by the
        precision of the means.
        """
        if self.kind != "classes":
            slope, middle, model, _ = self.step()
            weights = slope[:, None].expand(-1, self.n_outputs)
            bias = model.offsets - middle @ weights
            return (2 * weights, 2 * bias - 1) if self.kind == "number" else (weights, bias)
        means, rows, within = self.means()
        if not bool((rows > 0).any()):  # no site has released statistics
            return means.new_zeros(means.shape[1], len(means)), means.new_zeros(len(means))
        v = within.trace() / len(within)
        inverse = torch.linalg.inv(within + _RIDGE * v * torch.eye(len(within)).to(within))
        weights = inverse @ means.mT
        # noise lengthens a mean by a known amount, which would move the threshold away from its class
        longer = torch.where(rows > 0, inverse.trace() * v / rows, 0.0)
        bias = -((means.mT * weights).sum(0) - longer) / 2
        if not bool(self.own[:, -1].any()):
            sure = _sure(means[rows > 0], rows[rows > 0], inverse, v)
            weights, bias = sure * weights, sure * bias
        # a class without statistics is never predicted
        return torch.where(rows > 0, weights, 0.0), torch.where(rows > 0, bias, bias.new_tensor(_NEVER))

    @torch.no_grad()
    def worth(self) -> tuple[float, float]:
        """Return effective sample sizes per class of the local examples and of the head's means, as harmonic means."""
        if self.kind != "classes":
            own, shared = self.step()[3].tolist()
            return own, shared
        both = self.own[:, -1] / self.alike, self.means()[1]
        own, shared = (float(len(rows) / (1 / rows.clamp(min=_TINY)).sum()) for rows in both)
        return own, shared

    @torch.no_grad()
    def linear(self) -> tuple[Tensor, Tensor]:
        """Return weight float32[classes, n_features] and bias float32[classes] of a linear layer after LayerNorm.

        It equals this head except for examples of a projected norm above 1, which it does not clip.
        """
        weights, bias = self.head()
        weight = self.components.double() @ weights
        return weight.mT.float(), (bias - self.mean.double() @ weight).float()

    def forward(self, x: Tensor) -> Tensor:
        weights, bias = self.head()
        logits: Tensor = torch.addmm(bias, self.embedded(x), weights).float()
        return logits

    def as_released(self) -> nn.Module:
        """Return the head solved from released statistics only, without any sums."""
        public = copy.deepcopy(self)
        public.forget()
        return SolvedHead(copy.deepcopy(self.pooled), self.mean, self.components, *public.head())

    @torch.no_grad()
    def forget(self) -> None:
        """Clear the local statistics; this site's release counts like those of other sites."""
        for mine in (self.released, self.exact, self.own, self.scatter):
            mine.zero_()
        if self.kind == "number":
            self.spread.zero_()
        for mine in (self.alike, self.size):
            mine.fill_(1)
        self.n_sites.clamp_(min=1)


class SolvedHead(nn.Module):
    """The weights of a solved one-shot global head, without statistics."""

    mean: Tensor
    components: Tensor
    weights: Tensor
    bias: Tensor

    def __init__(
        self, pooled: nn.Module, mean: Tensor, components: Tensor, weights: Tensor, bias: Tensor
    ) -> None:
        super().__init__()
        self.pooled = pooled
        named = {"mean": mean, "components": components, "weights": weights, "bias": bias}
        for name, value in named.items():
            self.register_buffer(name, value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = _embedded(self.pooled(x), self.mean, self.components)
        logits: Tensor = torch.addmm(self.bias, z, self.weights).float()
        return logits


_TINY = 1e-30


def _sure(means: Tensor, rows: Tensor, inverse: Tensor, v: Tensor) -> Tensor:
    """Return the share, from 0.01 to 1, of the distance between class means that is not noise.

    As a factor of logits it shrinks the means together (James and Stein, "Estimation with quadratic loss", 1961): the
    most probable class stays, its probability falls.

    Args:
        means, rows: float64[k, d] of the classes with statistics, and their effective sample sizes.
        inverse: float64[d, d], of the covariance within classes.
        v: mean variance of this covariance.
    """
    if len(means) < 2:
        return v.new_ones(())
    apart = means - means.mean(0)
    seen = ((apart @ inverse) * apart).sum()
    by_noise = (1 - 1 / len(means)) * inverse.trace() * (v / rows).sum()
    by_noise = by_noise * (1 + 2 * (2 / len(inverse)) ** 0.5)  # plus two standard deviations
    sure: Tensor = 1 - by_noise / seen.clamp(min=_TINY)
    return sure.clamp(min=_LEAST_SURE)


def _embedded(x: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    rows = nn.functional.layer_norm(x, x.shape[-1:]).double() - mean.double()
    z = rows @ components.double()
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1) * (1 - _ROUND_OFF)
    return torch.where(z.isfinite().all(1, keepdim=True), z, 0.0)


def _by_column(z: Tensor, y: Tensor, n_columns: int, *, weights: bool) -> Tensor:
    """Return the sums and counts float64[columns, d + 1] of the rows z[b, d] by column.

    Args:
        weights: whether y are weights of the second of two columns.

    Raises:
        UsageError: for a column out of range, or a weight outside 0 to 1, which would exceed the clipping norm.
    """
    if y.shape != z.shape[:1] or y.is_floating_point() != weights:
        kind = "weights float64" if weights else "columns int64"
        raise UsageError(f"{len(z)} rows need as many {kind}, not {list(y.shape)} of {y.dtype}")
    most = 1 if weights else n_columns - 1
    possible = (y >= 0) & (y <= most)
    if not bool(possible.all()):
        row = int(possible.int().argmin())
        raise UsageError(f"row {row} has the label {y[row].item():g}; labels are 0 to {most}")
    counted = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)
    if not y.is_floating_point():
        return _summed(counted, y, n_columns)
    share, first = y[:, None], torch.zeros(len(y), dtype=torch.int64)
    return _summed(counted * (1 - share), first, n_columns) + _summed(counted * share, first + 1, n_columns)


def _summed(rows: Tensor, of: Tensor, n: int) -> Tensor:
    """Return the sums [n, d] of rows [b, d] by group int64[b], on the CPU, since GPUs add in random order."""
    sums = torch.zeros(n, rows.shape[1], dtype=rows.dtype)
    return sums.index_add_(0, of.cpu(), rows.cpu()).to(rows.device)


def n_columns(n_outputs: int, kind: Kind = "classes") -> int:
    """Return the number of columns of class statistics: one per class, two for a number, 2k + 1 for k intervals."""
    return {"classes": n_outputs, "number": 2, "survival": 2 * n_outputs + 1}[kind]


def n_sums(n_columns: int, n_directions: int) -> int:
    """Return the length of packed statistics: each column's sum and count, and the variance of their noise."""
    return n_columns * (n_directions + 2)


_PRIOR = 4.0
"""Prior examples of each interval, with the mean hazard, against hazards of 0 or 1."""
_EXPLAINED = torch.logspace(-2, 0.5, 11, dtype=torch.float64)
"""Grid of the variance explained by z, in parts of that of residuals."""


class _Featureless(NamedTuple):
    """The baseline model without features."""

    residuals: Tensor  # float64[columns], r of an example of each column
    # float64[columns], information of an example of each column about the slope, in parts of the covariance of z
    information: Tensor
    offsets: Tensor  # float64[outputs], its outputs: ū, or the logit of each interval's hazard


def _of_numbers(counts: Tensor) -> _Featureless:
    """Return the baseline of numbers u in [0, 1] from counts float64[2], the sums of 1 − u and of u."""
    mean = (counts[1] + _TINY / 2) / (counts.sum() + _TINY)
    return _Featureless(torch.stack([-mean, 1 - mean]), torch.ones_like(counts), mean[None])


def _of_times(counts: Tensor) -> _Featureless:
    """Return the baseline of hazards in k intervals from counts float64[2k + 1].

    The first k count events by interval, the others censored patients after 0, 1, …, k passed intervals.
    """
    k = len(counts) // 2
    events, passed = counts[:k], counts[k + 1 :]
    at_risk = (events + passed).flip(0).cumsum(0).flip(0)
    usual = (events.sum() + _TINY / 2) / (at_risk.sum() + _TINY)
    hazard = ((events + _PRIOR * usual) / (at_risk + _PRIOR)).clamp(1e-4, 1 - 1e-4)
    before = torch.nn.functional.pad(torch.stack([hazard, hazard * (1 - hazard)]).cumsum(1), (1, 0))
    (so_far, spread), event = before, torch.ones_like(events)
    return _Featureless(
        torch.cat([event - so_far[1:], -so_far]), torch.cat([spread[1:], spread]), torch.logit(hazard)
    )


def _slope_of(
    gradient: Tensor,
    information: Tensor,
    within: Tensor,
    varied: Tensor | float,
    sampled: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return the posterior mean of the slope float64[d] given the gradient float64[d].

    The gradient Σ r z has the mean V C β, with the information V and the covariance C of z, here `within`, and the
    variance sampled · C + noise · I. The prior of β is isotropic; its scale is such that z explains from 1 % to three
    times the variance of residuals (`residual_variance`, in parts of the value in V), averaged by evidence (MacKay, "Bayesian
    interpolation", Neural Computation 1992).
    """
    spread, axes = torch.linalg.eigh(within)
    spread, found = spread.clamp(min=_TINY), axes.mT @ gradient / information
    chance = (sampled * spread + noise) / information**2
    size = varied * _EXPLAINED.to(spread)[:, None] / spread.sum()
    wide = size * spread**2 + chance
    borne_out = -(wide.log() + found**2 / wide).sum(1) / 2
    likely = borne_out.softmax(0)[:, None] * size * spread * found / wide
    slope: Tensor = axes @ likely.sum(0)
    return slope
