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

import numpy as np
import torch
from torch import Tensor, nn

from wsi_fl.models.mil import MeanOfBag
from wsi_fl.oneshot.column_sums import (
    COUNT_WEIGHT,
    ROUND_OFF,
    SCALE,
    TINY,
    HeadKind,
    StatisticsLayout,
    count_columns,
    count_sums,
    embed_rows,
    sum_by_column,
    sum_groups,
)
from wsi_fl.oneshot.newton_step import BaselineModel, hazard_baseline, number_baseline, shrink_slope
from wsi_fl.oneshot.projection import N_RANDOM, Projection, random_projection
from wsi_fl.types import UsageError

_PATIENT_CLIP = 0.4
"""Clipping norm of the mean of a patient's patches, in norms of one example: patches vary more than their means."""
_RIDGE = 0.5  # added to the covariance, in parts of its mean variance
_MIN_SIGNAL_FRACTION = 0.01  # keeps the order of probabilities
_UNKNOWN_LOGIT = -30.0  # logit of a class without statistics
_MIN_CLASS_WEIGHT = 0.02  # of a class in the statistics, relative to the most frequent one


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
        layout: of the packed statistics.
        shape: (columns, d + 1).
        sums: float32[k + columns], packed sums and counts, and the public variances of the noise by column.
        released: float64[k + columns], this site's release, and `noiseless_statistics` float64[k], the same without
            noise.
        local_sums: float64[columns, d + 1], sums and counts of the local examples, and `scatter` float64[d, d], their
            scatter about the means of their classes, or about the mean of all for other tasks.
        total_sum_of_squares: for a number, Σ (u − ū)² of the local examples' places in the range.
        design_effect: the design effect, the variance of means of local examples relative to that of independent ones;
            1 for one example per patient.
        rows_per_unit: number of examples averaged in a unit: 1, or the mean number of the local patients.
        clip_scale: divisor of a unit's z before the sum: 1, or the clipping norm where units are patients.
        n_sites: number of sites in the mean `sums`; 0 before the exchange.
    """

    def __init__(
        self,
        n_classes: int,
        n_features: int,
        *,
        bags: bool = False,
        projection: Projection | int = N_RANDOM,
        patients: bool = False,
        kind: HeadKind = "classes",
    ) -> None:
        super().__init__()
        self.kind, self.n_outputs = kind, n_classes
        self.pooled: nn.Module = MeanOfBag() if bags else nn.Identity()
        if isinstance(projection, int):
            projection = random_projection(n_features, projection)
        self.layout = StatisticsLayout(count_columns(n_classes, kind), projection.n_components)
        self.shape = self.layout.table_shape
        n_values = count_sums(self.shape[0], projection.n_components)
        self.sums = nn.Parameter(torch.zeros(n_values))
        self.mean = nn.Buffer(torch.from_numpy(projection.mean))
        self.components = nn.Buffer(torch.from_numpy(projection.components))
        self.covariance = nn.Buffer(torch.from_numpy(projection.covariance))
        self.released = nn.Buffer(torch.zeros(n_values, dtype=torch.float64))
        self.noiseless_statistics = nn.Buffer(torch.zeros(n_values - self.shape[0], dtype=torch.float64))
        self.local_sums = nn.Buffer(torch.zeros(self.shape, dtype=torch.float64))
        self.scatter = nn.Buffer(torch.zeros(projection.n_components, projection.n_components, dtype=torch.float64))
        self.design_effect = nn.Buffer(torch.ones((), dtype=torch.float64))
        self.rows_per_unit = nn.Buffer(torch.ones((), dtype=torch.float64))
        self.clip_scale = nn.Buffer(torch.tensor(_PATIENT_CLIP if patients else 1.0, dtype=torch.float64))
        self.n_sites = nn.Buffer(torch.zeros((), dtype=torch.int64))
        if kind == "number":
            self.total_sum_of_squares = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def set_projection(self, projection: Projection, *, patients: bool = False) -> None:
        """Set another projection of as many components."""
        for name in ("mean", "components", "covariance"):
            getattr(self, name).copy_(torch.from_numpy(getattr(projection, name)))
        self.clip_scale.fill_(_PATIENT_CLIP if patients else 1.0)

    def embed_rows(self, x: Tensor) -> Tensor:
        """Return z float64[b, d] of each example, with a norm of at most 1; 0 where it is not finite.

        Raises:
            UsageError: for another number of features.
        """
        n_features = x.shape[-1] - (1 if isinstance(self.pooled, MeanOfBag) else 0)
        if n_features != len(self.mean):
            raise UsageError(f"the head sums {len(self.mean)} features, and the rows have {n_features}")
        return embed_rows(self.pooled(x), self.mean, self.components)

    def pack_statistics(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the statistics float64[k] of examples z[b, d]; those of one example have a norm of at most 1.

        With weights w the norm is |w| times that of an example of one class, and |w| ≤ Σ w = 1.

        Args:
            y: int64[b], the column of each example, such as its class; or float64[b], its weight from 0 to 1 in the
                second of two columns, with the remainder in the first.
        """
        return self._flatten_sums(sum_by_column(z, y, self.shape[0], weights=self.kind == "number"))

    def pack_patient_means(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the statistics float64[k] of one patient's examples: the mean of each class, counted once.

        With fractional weights it is the mean of the examples' statistics. The caller clips the result.
        """
        sums = sum_by_column(z, y, self.shape[0], weights=self.kind == "number")
        counts = sums[:, -1:].sum() if y.is_floating_point() else sums[:, -1:]
        means = sums / counts.clamp(min=1)
        means[:, :-1] /= self.clip_scale
        norms = means[:, :-1].norm().clamp(min=1) * (1 + ROUND_OFF)
        means[:, :-1] /= norms
        return self._flatten_sums(means)

    def _flatten_sums(self, sums: Tensor) -> Tensor:
        return torch.cat(
            [sums[:, :-1] * self.layout.sum_scale, sums[:, -1:] * self.layout.count_scale], dim=1
        ).flatten()

    def unpack_statistics(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums float64[columns, d] and counts float64[columns] of packed statistics."""
        table = self.layout.unpack_sums(sums)
        return table[:, :-1] * self.clip_scale, table[:, -1]

    def noise_variances(self, statistics: Tensor) -> Tensor:
        """Return the variances float64[columns] of the noise in each component of the sums of packed statistics."""
        return statistics[-self.shape[0] :].double().clamp(min=0) / SCALE**2 * self.clip_scale**2

    @torch.no_grad()
    def set_local_statistics(self, z: Tensor, y: Tensor, patient: Tensor | None = None) -> None:
        """Set exact sums and scatter of the local examples z[n, d] with columns y; they never leave the site.

        Args:
            patient: int64[n] of each example. Examples of one patient are correlated and count for less than as many of
                different patients (Liang and Zeger, "Longitudinal data analysis using generalized linear models",
                Biometrika 1986). None for a different patient of each example.
        """
        self.local_sums.copy_(sum_by_column(z, y, self.shape[0], weights=self.kind == "number"))
        group = y
        sums: Tensor = self.local_sums
        if self.kind != "classes":
            group = torch.zeros(len(y), dtype=torch.int64, device=y.device)
            sums = self.local_sums.sum(0, keepdim=True)
        if self.kind == "number" and len(y):
            self.total_sum_of_squares.copy_((y - y.mean()).square().sum())
        means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        deviations = z - means[group]
        self.scatter.copy_(deviations.mT @ deviations)
        if patient is None or not len(z):
            return
        _, unit = torch.unique(patient * len(sums) + group, return_inverse=True)
        n, units, n_groups = len(z), int(unit.max()) + 1, int((sums[:, -1] > 0).sum())
        self.design_effect.fill_(n / units)  # without an estimate of the variation between patients
        self.rows_per_unit.copy_(torch.where(self.clip_scale < 1, self.design_effect, 1.0))
        if units > n_groups:
            unit_variation = sum_groups(deviations, unit, units).square().sum() / (1 - n_groups / units)
            row_variation = deviations.square().sum() / (1 - n_groups / n)
            self.design_effect.copy_((unit_variation / row_variation.clamp(min=TINY)).clamp(min=1.0))

    @torch.no_grad()
    def set_noisy_statistics(self, exact: Tensor, noisy: Tensor, variance: float | Tensor) -> None:
        """Set this site's statistics float64[k], exact and noisy with a variance, or one by column."""
        self.noiseless_statistics.copy_(exact)
        self.sums.copy_(torch.cat([noisy, noisy.new_ones(self.shape[0]) * variance]))
        self.released.copy_(self.sums)
        self.n_sites.zero_()

    @torch.no_grad()
    def weight_by_precision(self, noisy: Tensor, variance: float) -> tuple[Tensor, Tensor]:
        """Return noisy statistics float64[k] with classes weighted by precision, and the variances of their noise.

        For sums of n examples from many sites, with variance v within a class and noise of variance s², weights
        n / (v n + s²) are the most precise (Cochran, "Problems arising in the analysis of a series of similar
        experiments", JRSS supplement 1937). They depend on the release only: on the noisy counts, shrunk to their mean
        by as much as noise may separate them. The most frequent class has weight 1, every other at least 0.02. For
        other tasks all columns have weight 1.
        """
        if self.kind != "classes":
            return noisy, noisy.new_full(self.shape[:1], variance)
        table = noisy.view(self.shape)
        counts, noise = table[:, -1] / (COUNT_WEIGHT * SCALE), variance / SCALE**2
        deviations = counts - counts.mean()
        noise_share = (len(counts) - 1) * noise / COUNT_WEIGHT**2 / deviations.square().sum().clamp(min=TINY)
        counts = (counts.mean() + deviations * (1 - noise_share).clamp(min=0)).clamp(min=1)
        v = self.covariance.trace() / len(self.covariance) / self.clip_scale**2
        weights = counts / (v * counts + noise)
        weights = (weights / weights.max()).clamp(min=_MIN_CLASS_WEIGHT)
        return (table * weights[:, None]).flatten(), variance * weights**2

    @staticmethod
    @torch.no_grad()
    def combine(heads: Sequence[SharedHead]) -> None:
        """Set the mean of all released statistics in each of several sites' heads."""
        mean = torch.stack([head.released for head in heads]).mean(0)
        for head in heads:
            head.sums.copy_(mean)
            head.n_sites.fill_(len(heads))

    def sum_of_other_sites(self) -> Tensor:
        """Return the sum of all other sites' statistics float64[k + columns], the variances of their noise last."""
        return self.sums.double() * int(self.n_sites) - self.released * (int(self.n_sites) > 0)

    @property
    def is_noisy(self) -> bool:
        """Whether the statistics of other sites are noisy."""
        return bool((self.sum_of_other_sites()[-self.shape[0] :] > 0).any())

    @torch.no_grad()
    def redraw_noise(self, rng: np.random.Generator) -> SharedHead:
        """Return the head for other sites' statistics with noise added once more.

        It differs from this head as much as this one from the head without noise, so its predictions measure the effect
        of the noise. It is for evaluation only and never released.
        """
        head = copy.deepcopy(self)
        n, width = self.shape
        variance = self.sum_of_other_sites()[-n:].clamp(min=0).cpu().numpy()
        noise = rng.normal(size=(n, width)) * np.sqrt(variance)[:, None] / max(1, int(self.n_sites))
        head.sums[: n * width] += torch.from_numpy(noise.ravel()).to(head.sums)
        return head

    def class_means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the class means float64[classes, d], their effective sample sizes, and the covariance within classes.

        A class mean over n local examples has the variance a v / n in each component, with the mean variance v within
        classes and the design effect a. The mean over N units of other sites, of m examples each, with noise of
        variance s² in the sum, has a v / (m N) + s² / N².
        """
        d = self.shape[1] - 1
        # 1. The covariance within classes: that of public examples counts as much as d local ones.
        n = float((self.local_sums[:, -1] - 1).clamp(min=0).sum())
        within = (self.scatter + d * self.covariance) / (n + d)
        v = within.trace() / d
        # 2. The means of others and their precision.
        statistics = self.sum_of_other_sites()
        sums, counts = self.unpack_statistics(statistics)
        noise = self.noise_variances(statistics)
        counts, unit_variance = counts.clamp(min=0), v * self.design_effect / self.rows_per_unit
        precisions = counts / (unit_variance * counts + noise).clamp(min=TINY)
        # 3. Local and others' means, weighted by precision.
        local_variance = v * self.design_effect
        precision = counts * precisions + self.local_sums[:, -1] / local_variance
        weighted_sums = sums * precisions[:, None] + self.local_sums[:, :-1] / local_variance
        means = weighted_sums / precision.clamp(min=TINY)[:, None]
        return means, precision * v, within

    @torch.no_grad()
    def newton_step(self) -> tuple[Tensor, Tensor, BaselineModel, Tensor]:
        """Return the linear model of a number or of hazards, one Newton step from the baseline without features.

        An example of another site has less weight than a local one because of the noise. Σ r z over others' examples
        has the variance w v V, with their information V, the variance v of z in each component and w of residuals, and
        noise adds s² Σ r² over the columns.

        Returns:
            The slope float64[d], the z float64[d] at which the model equals the baseline, the baseline, and float64[2],
                the effective examples of each of two classes, local ones and all: a quarter of their information.
        """
        d, build_baseline = self.shape[1] - 1, number_baseline if self.kind == "number" else hazard_baseline
        # 1. Variances of z and residuals: public examples and uniform residuals count as much as d local ones.
        n = float((self.local_sums[:, -1].sum() - 1).clamp(min=0))
        within = (self.scatter + d * self.covariance) / (n + d)
        residual_variance = (self.total_sum_of_squares + d / 12) / (n + d) if self.kind == "number" else 1.0
        # 2. The sums of others and the weight of their examples.
        statistics = self.sum_of_other_sites()
        sums, counts = self.unpack_statistics(statistics)
        other_sums = torch.cat([sums, counts.clamp(min=0)[:, None]], dim=1)
        local_sums = self.local_sums / self.design_effect
        noise = self.noise_variances(statistics).max()
        baseline = build_baseline(local_sums[:, -1] + other_sums[:, -1])
        other_information = baseline.information @ other_sums[:, -1]
        design_effect = self.design_effect / self.rows_per_unit
        hidden = noise * baseline.residuals.square().sum() / (residual_variance * within.trace() / d)
        weight = other_information / (other_information * design_effect + hidden).clamp(min=TINY)
        # 3. The step from all examples.
        all_sums = local_sums + other_sums * weight
        model = build_baseline(all_sums[:, -1])
        middle = all_sums[:, :-1].sum(0) / all_sums[:, -1].sum().clamp(min=TINY)
        gradient = model.residuals @ (all_sums[:, :-1] - all_sums[:, -1:] * middle)
        information = torch.stack([model.information @ local_sums[:, -1], model.information @ all_sums[:, -1]])
        sampled = residual_variance * (information[0] + weight**2 * other_information * design_effect)
        uncertainty = weight**2 * noise * model.residuals.square().sum()
        slope = shrink_slope(gradient, information[1].clamp(min=TINY), within, residual_variance, sampled, uncertainty)
        return slope, middle, model, information / 4

    @torch.no_grad()
    def solve_head(self) -> tuple[Tensor, Tensor]:
        """Return weights float64[d, outputs] and bias float64[outputs] of a linear model.

        For classes it is linear discriminant analysis with equal priors of all classes. The square of a noisy mean is
        too large by the variance of its noise, which is subtracted. Without local examples the logits are shrunk by the
        precision of the means.
        """
        if self.kind != "classes":
            slope, middle, model, _ = self.newton_step()
            weights = slope[:, None].expand(-1, self.n_outputs)
            bias = model.offsets - middle @ weights
            return (2 * weights, 2 * bias - 1) if self.kind == "number" else (weights, bias)
        means, rows, within = self.class_means()
        if not bool((rows > 0).any()):  # no site has released statistics
            return means.new_zeros(means.shape[1], len(means)), means.new_zeros(len(means))
        v = within.trace() / len(within)
        inverse = torch.linalg.inv(within + _RIDGE * v * torch.eye(len(within)).to(within))
        weights = inverse @ means.mT
        # noise lengthens a mean by a known amount, which would move the threshold away from its class
        longer = torch.where(rows > 0, inverse.trace() * v / rows, 0.0)
        bias = -((means.mT * weights).sum(0) - longer) / 2
        if not bool(self.local_sums[:, -1].any()):
            fraction = _signal_fraction(means[rows > 0], rows[rows > 0], inverse, v)
            weights, bias = fraction * weights, fraction * bias
        # a class without statistics is never predicted
        return torch.where(rows > 0, weights, 0.0), torch.where(rows > 0, bias, bias.new_tensor(_UNKNOWN_LOGIT))

    @torch.no_grad()
    def effective_sample_sizes(self) -> tuple[float, float]:
        """Return effective sample sizes per class of the local examples and of the head's means, as harmonic means."""
        if self.kind != "classes":
            local_rows, federated_rows = self.newton_step()[3].tolist()
            return local_rows, federated_rows
        row_counts = self.local_sums[:, -1] / self.design_effect, self.class_means()[1]
        local_rows, federated_rows = (float(len(rows) / (1 / rows.clamp(min=TINY)).sum()) for rows in row_counts)
        return local_rows, federated_rows

    @torch.no_grad()
    def linear_layer(self) -> tuple[Tensor, Tensor]:
        """Return weight float32[classes, n_features] and bias float32[classes] of a linear layer after LayerNorm.

        It equals this head except for examples of a projected norm above 1, which it does not clip.
        """
        weights, bias = self.solve_head()
        weight = self.components.double() @ weights
        return weight.mT.float(), (bias - self.mean.double() @ weight).float()

    def forward(self, x: Tensor) -> Tensor:
        weights, bias = self.solve_head()
        logits: Tensor = torch.addmm(bias, self.embed_rows(x), weights).float()
        return logits

    def solve_released_head(self) -> nn.Module:
        """Return the head solved from released statistics only, without any sums."""
        public = copy.deepcopy(self)
        public.clear_local_statistics()
        return SolvedHead(copy.deepcopy(self.pooled), self.mean, self.components, *public.solve_head())

    @torch.no_grad()
    def clear_local_statistics(self) -> None:
        """Clear the local statistics; this site's release counts like those of other sites."""
        for buffer in (self.released, self.noiseless_statistics, self.local_sums, self.scatter):
            buffer.zero_()
        if self.kind == "number":
            self.total_sum_of_squares.zero_()
        for buffer in (self.design_effect, self.rows_per_unit):
            buffer.fill_(1)
        self.n_sites.clamp_(min=1)


class SolvedHead(nn.Module):
    """The weights of a solved one-shot global head, without statistics."""

    def __init__(self, pooled: nn.Module, mean: Tensor, components: Tensor, weights: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.pooled = pooled
        tensors = (mean, components, weights, bias)
        self.mean, self.components, self.weights, self.bias = (nn.Buffer(value.detach().clone()) for value in tensors)

    def forward(self, x: Tensor) -> Tensor:
        z = embed_rows(self.pooled(x), self.mean, self.components)
        logits: Tensor = torch.addmm(self.bias, z, self.weights).float()
        return logits


def _signal_fraction(means: Tensor, rows: Tensor, inverse: Tensor, v: Tensor) -> Tensor:
    """Return the share, from 0.01 to 1, of the distance between class means that is not noise.

    As a factor of logits it shrinks the means together (James and Stein, "Estimation with quadratic loss", 1961): the
    most probable class stays, its probability falls.

    Args:
        means, rows: float64[k, d] of the classes with statistics, and their effective sample sizes.
        inverse, v: float64[d, d], of the covariance within classes, and its mean variance.
    """
    if len(means) < 2:
        return v.new_ones(())
    deviations = means - means.mean(0)
    total = ((deviations @ inverse) * deviations).sum()
    noise_part = (1 - 1 / len(means)) * inverse.trace() * (v / rows).sum()
    noise_part = noise_part * (1 + 2 * (2 / len(inverse)) ** 0.5)  # plus two standard deviations
    fraction: Tensor = 1 - noise_part / total.clamp(min=TINY)
    return fraction.clamp(min=_MIN_SIGNAL_FRACTION)
