"""A head that several sites make together from one letter each: the sums of their features by class, with noise.

z is a row's feature vector along directions that all know (`directions`), clipped to norm 1. A site's letter holds, for
each of some columns, the sum of z over its rows and their number. A row counts in columns with weights that add up to
1: its class is a column. Noise of a known variance is added to each of these numbers before they leave. Letters add up.
Who receives them knows its own class means exactly and the others' up to noise, weighs each by its precision, and
solves linear discriminant analysis with the covariance within its own classes, shrunk to that of public rows (Fisher,
1936; Friedman, "Regularized discriminant analysis", JASA 1989).

For a number or the time of an event it takes one Newton step of a linear model from the one that knows no features,
which says the mean number, or one hazard for each interval. A row's residual r is what its answer differs by from that:
u − ū of a number u in [0, 1], or the martingale residual of a patient (Therneau, Grambsch and Fleming, Biometrika
1990). All rows of a column have the same one, so Σ r z, the gradient of the likelihood where no feature counts, follows
from the sums of z by column. The step is linear regression for a number, and for survival discrete-time proportional
hazards to first order, as Cox's score test has it.
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
"""What a row adds to the count of its class, beside z of length 1: counts need less precision than sums."""
_SCALE = 1 / sqrt(1 + COUNT**2)  # makes the letter of one row at most 1 long
_PATIENT = 0.4
"""What the mean of a patient's patches is clipped to, in lengths of one row: patches differ more than their means."""
_ROUND_OFF = 1e-6
_RIDGE = 0.5  # added to the covariance, in parts of its mean variance
_LEAST_SURE = 0.01  # so that the order of probabilities stays
_NEVER = -30.0  # logit of a class of which nothing is known
_LEAST_WEIGHT = 0.02  # of a class in a letter, beside 1 of the most frequent one


class SharedHead(nn.Module):
    """A linear head that is solved from letters, with the site's own part exact.

    Its parameters are one letter: what a site releases, and after the exchange the mean over all sites. What the site
    alone may know, its own sums without noise, stands in buffers and never travels.

    Args:
        n_classes, n_features: of the task and of the encoder; of other tasks the number of outputs.
        bags: whether rows are bags of features, float32[b, m, d + 1], of which the mean counts.
        directions: along which rows are summed, or how many random ones.
        patients: whether units are patients with many rows each.

    Attributes:
        shape: (columns, d + 1).
        sums: float32[k + columns], `packed` sums and counts, and the variances of the noise in each column's numbers,
            which are no secret.
        released: float64[k + columns], the site's own letter as it left, and `exact` float64[k], without noise.
        own: float64[columns, d + 1], sums and numbers of the site's own rows, and `scatter` float64[d, d], how these
            vary about the means of their classes, or about that of all where classes are not asked.
        spread: where a number is asked, Σ (u − ū)² of the own rows' places in the range.
        alike: how many times wider the means of own rows vary than those of as many unlike rows; 1 where every row is
            of another patient.
        size: how many rows a unit is the mean of: 1, or of own patients the mean number.
        length: what a unit's z was divided by before it was summed: 1, or `_PATIENT` where units are patients.
        n_sites: how many sites `sums` is the mean of; 0 before the exchange.
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
        """Sum along other directions, as many as before."""
        for name in ("mean", "components", "covariance"):
            getattr(self, name).copy_(torch.from_numpy(getattr(directions, name)))
        self.length.fill_(_PATIENT if patients else 1.0)

    def embedded(self, x: Tensor) -> Tensor:
        """Return z float64[b, d] of each row, at most 1 long; 0 where it is not finite.

        Raises:
            UsageError: for rows of another number of features.
        """
        n_features = x.shape[-1] - (1 if isinstance(self.pooled, MeanOfBag) else 0)
        if n_features != len(self.mean):
            raise UsageError(f"the head sums {len(self.mean)} features, and the rows have {n_features}")
        return _embedded(self.pooled(x), self.mean, self.components)

    def packed(self, z: Tensor, y: Tensor) -> Tensor:
        """Return float64[k], the letter of rows z[b, d]; that of one row is at most 1 long.

        Weights w make it |w| times as long as that of a row of one class, and |w| is at most the sum of w, which is 1.

        Args:
            y: int64[b], the column of each row, such as its class; or float64[b], the weight from 0 to 1 with which it
                counts in the second of two columns, and with what is left in the first.
        """
        return self._letter(_by_column(z, y, self.shape[0], weights=self.kind == "number"))

    def packed_means(self, z: Tensor, y: Tensor) -> Tensor:
        """Return float64[k], the letter of one patient's rows: the mean of each class among them, counted once.

        A patient whose rows share columns counts with the mean of their letters. It is clipped by whoever adds it up.
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
        """Return sums float64[columns, d] and counts float64[columns] of a letter."""
        both = sums[: self.shape[0] * self.shape[1]].double().view(self.shape) / _SCALE
        return both[:, :-1] * self.length, both[:, -1] / COUNT

    @torch.no_grad()
    def know(self, z: Tensor, y: Tensor, patient: Tensor | None = None) -> None:
        """Keep what the site alone may know of its rows z[n, d] and columns y: exact sums and their scatter.

        Args:
            patient: int64[n], whose each row is. Rows of one patient are alike, and tell less than as many of different
                patients (Liang and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika
                1986). None where every row is of another one.
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
        self.alike.fill_(n / units)  # as where nobody knows how patients differ
        self.size.copy_(torch.where(self.length < 1, self.alike, 1.0))
        if units > seen:
            together = _summed(apart, of, units).square().sum() / (1 - seen / units)
            alone = apart.square().sum() / (1 - seen / n)
            self.alike.copy_((together / alone.clamp(min=_TINY)).clamp(min=1.0))

    @torch.no_grad()
    def hold(self, exact: Tensor, noisy: Tensor, variance: float | Tensor) -> None:
        """Keep the site's own letter float64[k], as it is and with noise of this variance, or float64[columns], as it
        may leave.
        """
        self.exact.copy_(exact)
        self.sums.copy_(torch.cat([noisy, noisy.new_ones(self.shape[0]) * variance]))
        self.released.copy_(self.sums)
        self.n_sites.zero_()

    @torch.no_grad()
    def weighed(self, noisy: Tensor, variance: float) -> tuple[Tensor, Tensor]:
        """Return a noisy letter float64[k] in which classes of few rows count for less, and the variances of its noise.

        Many sites' sums of n rows, with variance v within and noise of variance s², tell most of a class's mean where
        each counts as n / (v n + s²) of itself (Cochran, "Problems arising in the analysis of a series of similar
        experiments", JRSS supplement 1937). The numbers of rows are the noisy ones, drawn to their mean as far as noise
        may part them, so that nothing but what has been released says the weights. The most frequent class counts
        fully, and none for nothing. Where columns are no classes, all count fully.
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
        """Give each of several sites' heads the letters of all, as they do when they have released their own."""
        mean = torch.stack([head.released for head in heads]).mean(0)
        for head in heads:
            head.sums.copy_(mean)
            head.n_sites.fill_(len(heads))

    def others(self) -> Tensor:
        """Return the letters float64[k + classes] of all other sites; last come the variances of the noise in them."""
        return self.sums.double() * int(self.n_sites) - self.released * (int(self.n_sites) > 0)

    @property
    def is_noisy(self) -> bool:
        """Whether there is noise in the letters of others."""
        return bool((self.others()[-self.shape[0] :] > 0).any())

    @torch.no_grad()
    def redrawn(self, rng: np.random.Generator) -> SharedHead:
        """Return the head that would be made of the same letters of others with more of their noise on top.

        It differs from this one as this one does from the head that their letters would make without noise, so that its
        answers tell how much the noise moves them. It is for measuring alone; nothing of it is released.
        """
        head = copy.deepcopy(self)
        n, width = self.shape
        variance = self.others()[-n:].clamp(min=0).cpu().numpy()
        noise = rng.normal(size=(n, width)) * np.sqrt(variance)[:, None] / max(1, int(self.n_sites))
        head.sums[: n * width] += torch.from_numpy(noise.ravel()).to(head.sums)
        return head

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means float64[classes, d] of all classes, what each is worth in rows, and the covariance within.

        A class's mean over n own rows has the variance a v / n in each direction, where v is the mean variance within
        classes, and a says how alike the rows of a patient are (`alike`). That over N units of others, of m rows each
        (`size`), whose sum has noise of variance s², has a v / (m N) + s² / N².
        """
        d = self.shape[1] - 1
        # 1. The covariance within classes: that of public rows counts as much as d own rows.
        n = float((self.own[:, -1] - 1).clamp(min=0).sum())
        within = (self.scatter + d * self.covariance) / (n + d)
        v = within.trace() / d
        # 2. The means of others, and how precisely they are known.
        letters = self.others()
        sums, counts = self.unpacked(letters)
        noise = letters[-len(counts) :].clamp(min=0) / _SCALE**2 * self.length**2
        counts, mean = counts.clamp(min=0), v * self.alike / self.size
        trust = counts / (mean * counts + noise).clamp(min=_TINY)
        # 3. Own and others' means, each as far as it is known.
        own = v * self.alike
        precision = counts * trust + self.own[:, -1] / own
        weighed = sums * trust[:, None] + self.own[:, :-1] / own
        means = weighed / precision.clamp(min=_TINY)[:, None]
        return means, precision * v, within

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor, _Featureless, Tensor]:
        """Return the linear model of a number or of hazards, one Newton step from the one that knows no features.

        A row of others counts for less than one of its own, by as much as noise hides. Σ r z over their rows has the
        variance w v V, where V is their information, v that of z in each direction and w that of residuals, and noise
        adds s² Σ r² over the columns.

        Returns:
            The slope float64[d], the z float64[d] where it says what the featureless model does, that model, and
                float64[2], how many rows of each of two classes own rows and all that it rests on are worth: a quarter
                of their information.
        """
        d, of = self.shape[1] - 1, _of_numbers if self.kind == "number" else _of_times
        # 1. How z and residuals vary: as of public rows, or evenly over the range, counts as much as d own rows.
        n = float((self.own[:, -1].sum() - 1).clamp(min=0))
        within = (self.scatter + d * self.covariance) / (n + d)
        varied = (self.spread + d / 12) / (n + d) if self.kind == "number" else 1.0
        # 2. The sums of others, and how much each of their rows counts.
        letters = self.others()
        sums, counts = self.unpacked(letters)
        theirs, own = torch.cat([sums, counts.clamp(min=0)[:, None]], dim=1), self.own / self.alike
        noise = letters[-len(counts) :].clamp(min=0).max() / _SCALE**2 * self.length**2
        guess = of(own[:, -1] + theirs[:, -1])
        told, likeness = guess.information @ theirs[:, -1], self.alike / self.size
        hidden = noise * guess.residuals.square().sum() / (varied * within.trace() / d)
        weight = told / (told * likeness + hidden).clamp(min=_TINY)
        # 3. The step from all rows together.
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

        For classes it is linear discriminant analysis. All classes are as likely beforehand, however rare one is. The
        square of a mean that is known up to noise is too large by the variance of that noise, which is taken off. Where
        the site has rows of its own, these temper what it answers; a head without any is as sure as its means are.
        """
        if self.kind != "classes":
            slope, middle, model, _ = self.step()
            weights = slope[:, None].expand(-1, self.n_outputs)
            bias = model.offsets - middle @ weights
            return (2 * weights, 2 * bias - 1) if self.kind == "number" else (weights, bias)
        means, rows, within = self.means()
        if not bool((rows > 0).any()):  # nobody has released anything
            return means.new_zeros(means.shape[1], len(means)), means.new_zeros(len(means))
        v = within.trace() / len(within)
        inverse = torch.linalg.inv(within + _RIDGE * v * torch.eye(len(within)).to(within))
        weights = inverse @ means.mT
        # noise makes a mean longer by so much as is known; the threshold would move away from that class
        longer = torch.where(rows > 0, inverse.trace() * v / rows, 0.0)
        bias = -((means.mT * weights).sum(0) - longer) / 2
        if not bool(self.own[:, -1].any()):
            sure = _sure(means[rows > 0], rows[rows > 0], inverse, v)
            weights, bias = sure * weights, sure * bias
        # a class of which nothing is known is no answer
        return torch.where(rows > 0, weights, 0.0), torch.where(rows > 0, bias, bias.new_tensor(_NEVER))

    @torch.no_grad()
    def worth(self) -> tuple[float, float]:
        """Return how many unlike rows of each class own rows and the head's means are worth, as harmonic means."""
        if self.kind != "classes":
            own, shared = self.step()[3].tolist()
            return own, shared
        both = self.own[:, -1] / self.alike, self.means()[1]
        own, shared = (float(len(rows) / (1 / rows.clamp(min=_TINY)).sum()) for rows in both)
        return own, shared

    @torch.no_grad()
    def linear(self) -> tuple[Tensor, Tensor]:
        """Return weight float32[classes, n_features] and bias float32[classes] of a linear layer after LayerNorm.

        It answers as this head does, but for rows that are longer than 1 along the directions, which it leaves as they
        are.
        """
        weights, bias = self.head()
        weight = self.components.double() @ weights
        return weight.mT.float(), (bias - self.mean.double() @ weight).float()

    def forward(self, x: Tensor) -> Tensor:
        weights, bias = self.head()
        logits: Tensor = torch.addmm(bias, self.embedded(x), weights).float()
        return logits

    def as_released(self) -> nn.Module:
        """Return the head that follows from what sites have released alone, without any sums."""
        public = copy.deepcopy(self)
        public.forget()
        return SolvedHead(copy.deepcopy(self.pooled), self.mean, self.components, *public.head())

    @torch.no_grad()
    def forget(self) -> None:
        """Forget all that the site alone knows, so that its own letter is one of the others'."""
        for mine in (self.released, self.exact, self.own, self.scatter):
            mine.zero_()
        if self.kind == "number":
            self.spread.zero_()
        for mine in (self.alike, self.size):
            mine.fill_(1)
        self.n_sites.clamp_(min=1)


class SolvedHead(nn.Module):
    """A shared head that was solved: its weights and nothing that they were made of."""

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
    """Return the part, from 0.01 to 1, of what sets the means of classes apart that is not their noise.

    Logits that are multiplied by it are those of means that are drawn together by as much (James and Stein, "Estimation
    with quadratic loss", 1961): which class is the most probable stays, how sure that is does not.

    Args:
        means, rows: float64[k, d] of the classes that are known, and how many rows each is worth.
        inverse: float64[d, d], of the covariance within classes.
        v: its mean variance.
    """
    if len(means) < 2:
        return v.new_ones(())
    apart = means - means.mean(0)
    seen = ((apart @ inverse) * apart).sum()
    by_noise = (1 - 1 / len(means)) * inverse.trace() * (v / rows).sum()
    by_noise = by_noise * (1 + 2 * (2 / len(inverse)) ** 0.5)  # with two standard deviations of it
    sure: Tensor = 1 - by_noise / seen.clamp(min=_TINY)
    return sure.clamp(min=_LEAST_SURE)


def _embedded(x: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    rows = nn.functional.layer_norm(x, x.shape[-1:]).double() - mean.double()
    z = rows @ components.double()
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1) * (1 - _ROUND_OFF)
    return torch.where(z.isfinite().all(1, keepdim=True), z, 0.0)


def _by_column(z: Tensor, y: Tensor, n_columns: int, *, weights: bool) -> Tensor:
    """Return float64[columns, d + 1], the sum of the rows z[b, d] in each column, and their number.

    Args:
        weights: whether y are weights of the second of two columns.

    Raises:
        UsageError: for a column that there is not, or a weight outside 0 to 1, by which a row would count for more.
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
    """Return [n, d], the sums of the rows [b, d] that are of each group int64[b], made by the processor.

    A GPU would add them in another order every time.
    """
    sums = torch.zeros(n, rows.shape[1], dtype=rows.dtype)
    return sums.index_add_(0, of.cpu(), rows.cpu()).to(rows.device)


def n_columns(n_outputs: int, kind: Kind = "classes") -> int:
    """Return how many columns a letter has: a class each, two for a number, and of k intervals 2k + 1."""
    return {"classes": n_outputs, "number": 2, "survival": 2 * n_outputs + 1}[kind]


def n_sums(n_columns: int, n_directions: int) -> int:
    """Return how many numbers `SharedHead.sums` has: each column's sum and count, and the variance of their noise."""
    return n_columns * (n_directions + 2)


_PRIOR = 4.0
"""Rows with the mean hazard that every interval has beside its own, so that none has a hazard of 0 or 1."""
_EXPLAINED = torch.logspace(-2, 0.5, 11, dtype=torch.float64)
"""Variance of what z explains, in parts of that of residuals."""


class _Featureless(NamedTuple):
    """The model that knows no features."""

    residuals: Tensor  # float64[columns], r of a row of each column
    # float64[columns], what a row of each column adds to the information about the slope, in parts of the
    # covariance of z
    information: Tensor
    offsets: Tensor  # float64[outputs], what it says: ū, or the logit of each interval's hazard


def _of_numbers(counts: Tensor) -> _Featureless:
    """Return the model of numbers in [0, 1], whose weights 1 − u and u add up to counts float64[2]."""
    mean = (counts[1] + _TINY / 2) / (counts.sum() + _TINY)
    return _Featureless(torch.stack([-mean, 1 - mean]), torch.ones_like(counts), mean[None])


def _of_times(counts: Tensor) -> _Featureless:
    """Return the model of hazards in k intervals from counts float64[2k + 1].

    Of so many the event came in each interval, and so many were last seen without it after passing 0, 1, …, k.
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
    """Return the slope float64[d] that a gradient float64[d] says, drawn to 0 as far as chance may have made it.

    The gradient Σ r z has the mean V C β, with the information V and the covariance C of z, here `within`, and the
    variance sampled · C + noise · I. All directions of β are as likely beforehand. What z explains is from 1 % to three
    times what the residuals vary by (`varied`, in parts of what V takes it for), and each of these counts as far as the
    gradient bears it out (MacKay, "Bayesian interpolation", Neural Computation 1992).
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
