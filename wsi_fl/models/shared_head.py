"""A head that several sites make together from sums of their features, each released once.

z is a row's feature vector, layer-normalised, projected onto a few public random directions, clipped to norm 1, with a
constant appended. Over all rows, A = Σ z zᵀ and B = Σ z v(y)ᵀ suffice for ridge regression on the labels' codes v.
Sums of several sites add up, and noise that was added to them stays what it was (sufficient statistics perturbation;
Wang, "Revisiting differentially private linear regression", UAI 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from wsi_fl.models.heads import MeanOfBag

N_DIRECTIONS = 128
"""Width of the projection: with fewer directions features are lost, with more there is more noise."""
CONSTANT = 0.5
"""The constant appended to every row, so that means can be read from the sums."""
LONGEST = 1 + CONSTANT**2
"""Bound on |z|²."""
_ON_A = 0.6
"""Share of the sensitivity's square that A gets, and B the rest."""
_SCALE_A, _SCALE_B = sqrt(_ON_A) / LONGEST, sqrt((1 - _ON_A) / LONGEST)
_ROUND_OFF = 1e-6
_PUBLIC_SEED = 1_618_033


class SharedHead(nn.Module):
    """A linear head that is solved from sums which travel, with the site's own part exact.

    Its parameters are one vector of sums: what a site releases, and after the exchange the mean over all sites. The
    site's own sums without noise are kept in buffers and never travel.

    Args:
        n_classes, n_features: of the task and of the encoder.
        bags: whether rows are bags of features, float32[b, m, d + 1], of which the mean counts.
        n_directions: of the projection, at most n_features.

    Example:
        >>> SharedHead(2, 1280)(torch.zeros(3, 1280)).shape
        torch.Size([3, 2])

    Attributes:
        sums: float32[k + 1], `packed` A and B, and the variance of the noise in each of these k numbers, which is
            no secret.
        released, exact: float64[k + 1], the site's own sums with noise and without.
        n_sites: how many sites `sums` is the mean of; 0 before the exchange.
    """

    sums: nn.Parameter
    released: Tensor
    exact: Tensor
    n_sites: Tensor
    projection: Tensor
    codes: Tensor

    def __init__(
        self, n_classes: int, n_features: int, *, bags: bool = False, n_directions: int = N_DIRECTIONS
    ) -> None:
        super().__init__()
        self.pooled: nn.Module = MeanOfBag() if bags else nn.Identity()
        projection = projection_of(n_features, n_directions)
        self.width = projection.shape[1] + 1
        self.register_buffer("projection", projection, persistent=False)
        self.register_buffer("codes", codes(n_classes), persistent=False)
        size = n_sums(n_classes, n_features, n_directions)
        self.sums = nn.Parameter(torch.zeros(size))
        for name, value in (("released", torch.zeros(size)), ("exact", torch.zeros(size))):
            self.register_buffer(name, value.double())
        self.register_buffer("n_sites", torch.zeros((), dtype=torch.int64))

    def embedded(self, x: Tensor) -> Tensor:
        """Return z float64[b, width] of each row, whose square is at most `LONGEST`; 0 where it is not finite."""
        return self._embedded(self.pooled(x), self.projection)

    @staticmethod
    def _embedded(x: Tensor, projection: Tensor) -> Tensor:
        rows = (nn.functional.layer_norm(x, x.shape[-1:]) @ projection).double()
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1) * (1 - _ROUND_OFF)
        z = torch.cat([rows, torch.full_like(rows[:, :1], CONSTANT)], dim=1)
        return torch.where(z.isfinite().all(1, keepdim=True), z, 0.0)

    def packed(self, z: Tensor, y: Tensor) -> Tensor:
        """Return float64[k], A and B of rows z[b, width] with labels int64[b]; those of one row are at most 1 long.

        Off the diagonal A is scaled by √2, so that the vector of a row is as long as its matrix and every number
        deserves the same noise.
        """
        a = z.mT @ z
        b = z.mT @ self.codes[y]
        upper = torch.triu_indices(self.width, self.width, device=z.device)
        factor = torch.where(upper[0] == upper[1], 1.0, sqrt(2))
        return torch.cat([a[upper[0], upper[1]] * factor * _SCALE_A, b.flatten() * _SCALE_B])

    def unpacked(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return A float64[width, width] and B float64[width, classes − 1] of packed sums."""
        upper = torch.triu_indices(self.width, self.width, device=sums.device)
        n = upper.shape[1]
        b = sums[n : n + self.width * self.codes.shape[1]]
        factor = torch.where(upper[0] == upper[1], 1.0, sqrt(2))
        a = sums.new_zeros(self.width, self.width, dtype=torch.float64)
        a[upper[0], upper[1]] = sums[:n].double() / factor / _SCALE_A
        a = a + torch.triu(a, 1).mT
        return a, b.double().view(self.width, -1) / _SCALE_B

    @torch.no_grad()
    def hold(self, exact: Tensor, noisy: Tensor, variance: float) -> None:
        """Keep the site's own sums float64[k], as they are and with noise of this variance, as they may leave it."""
        self.exact.copy_(torch.cat([exact, exact.new_zeros(1)]))
        self.sums.copy_(torch.cat([noisy, noisy.new_full((1,), variance)]))
        self.released.copy_(self.sums)
        self.n_sites.zero_()

    @staticmethod
    @torch.no_grad()
    def combine(heads: Sequence[SharedHead]) -> None:
        """Give each of several sites' heads the sums of all, as they do when they have released their own.

        Example:
            >>> heads = [SharedHead(2, 8), SharedHead(2, 8)]
            >>> SharedHead.combine(heads)
            >>> [int(head.n_sites) for head in heads]
            [2, 2]
        """
        mean = torch.stack([head.released for head in heads]).mean(0)
        for head in heads:
            head.sums.copy_(mean)
            head.n_sites.fill_(len(heads))

    def total(self, *, own: bool = True) -> Tensor:
        """Return the sums float64[k + 1] over all sites; the last is the variance of the noise in the others.

        Args:
            own: whether the site's own part is among them, without noise; else it is left out.
        """
        n = max(1, int(self.n_sites))
        others = self.sums.double() * n - self.released
        return others + self.exact if own else others

    @torch.no_grad()
    def head(self, *, own: bool = True) -> tuple[Tensor, Tensor]:
        """Return weights float64[width, classes] and bias float64[classes] of the ridge regression.

        Noise of standard deviation s moves eigenvalues of A by up to 2 s √d. Negative ones are set to 0, and the ridge
        s √d is added to all. The classes count alike, however rare one is: their logits are equal midway between the
        means of all classes. Noisy sums do not tell how certain the answers are, so logits are given a usual spread; a
        stack finds the right one.
        """
        # 1. A, B, and from them the rows and the mean of each class
        sums = self.total(own=own)
        a, b = self.unpacked(sums)
        n_classes = len(self.codes)
        counts, means, learned = self._means(a, b)
        # 2. A without negative eigenvalues, and the ridge from the noise in A
        spread = sqrt(max(0.0, float(sums[-1])) / 2) / _SCALE_A
        values, vectors = torch.linalg.eigh(a)
        values = values.clamp(min=0)
        a = vectors * values @ vectors.mT
        ridge = max(spread * sqrt(self.width), _LEAST_RIDGE * float(values.sum()) / self.width)
        if ridge == 0:  # nobody has released anything
            return b.new_zeros(self.width, n_classes), b.new_zeros(n_classes)
        # 3. ridge regression on the codes, (A + ridge)⁻¹ B; a class's logit is the product with its code
        solved = vectors @ ((vectors.mT @ b) / (values + ridge)[:, None])
        weights = solved @ self.codes.mT
        # 4. the mean over classes of their means' logits, less what weights and means owe to the same noise in B
        noise_in_b = max(0.0, float(sums[-1])) / _SCALE_B**2
        by_heart = noise_in_b * float((1 / (values + ridge)).sum()) * learned @ self.codes.mT
        middle = (means @ weights - by_heart / counts[:, None]).mean(0)
        # 5. variance of each logit over all rows, and the factor that gives logits the usual spread
        every = counts.sum()
        squares = (weights.mT @ a @ weights).diagonal() / every
        centred = squares - ((counts @ means) @ weights / every) ** 2
        scale = _USUAL / torch.maximum(centred, _LEAST_SPREAD * squares).clamp(min=_TINY).mean().sqrt()
        return weights * scale, -middle * scale

    @torch.no_grad()
    def linear(self) -> tuple[Tensor, Tensor]:
        """Return weight float32[classes, n_features] and bias float32[classes] of a linear layer after LayerNorm.

        It answers as this head does, but for rows that are longer than 1 when projected, which it leaves as they are.
        """
        weights, bias = self.head()
        weight = (self.projection.double() @ weights[:-1]).mT
        return weight.float(), (bias + CONSTANT * weights[-1]).float()

    def _means(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many rows each class has, their means, and how much of each column of B is in each class's sum.

        The shapes are [classes], at least 1, [classes, width] and [classes, classes − 1].

        B and the column of the constant in A are all sums over classes, from which each class's own follow.
        """
        n_classes = len(self.codes)
        every = torch.cat([b, a[:, -1:] / CONSTANT], dim=1)  # Σ_c S_c [v_c, 1]
        known = torch.cat([self.codes, self.codes.new_ones(n_classes, 1)], dim=1)
        parts = torch.linalg.inv(known.mT)
        of_class = parts @ every.mT
        counts = (of_class[:, -1] / CONSTANT).clamp(min=1)
        return counts, of_class / counts[:, None], parts[:, :-1]

    def forward(self, x: Tensor, own: bool = True) -> Tensor:
        """Return logits float32[b, classes]."""
        weights, bias = self.head(own=own)
        logits: Tensor = torch.addmm(bias, self.embedded(x), weights).float()
        return logits

    def as_released(self) -> nn.Module:
        """Return the head that follows from what sites have released alone, without any sums.

        The site's own part is the noisy one that the others have too.
        """
        public = copy.deepcopy(self)
        public.exact.copy_(public.released)
        return SolvedHead(copy.deepcopy(self.pooled), self.projection, *public.head())


class SolvedHead(nn.Module):
    """A shared head that was solved: its weights and nothing that they were made of."""

    projection: Tensor
    weights: Tensor
    bias: Tensor

    def __init__(self, pooled: nn.Module, projection: Tensor, weights: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.pooled = pooled
        for name, value in (("projection", projection), ("weights", weights), ("bias", bias)):
            self.register_buffer(name, value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float32[b, classes]."""
        z = SharedHead._embedded(self.pooled(x), self.projection)
        logits: Tensor = torch.addmm(self.bias, z, self.weights).float()
        return logits


_LEAST_RIDGE, _TINY = 1e-6, 1e-30
_USUAL, _LEAST_SPREAD = 2.0, 0.05
"""Standard deviation of logits over all rows, and the least part of their square that is not their mean."""


def projection_of(n_features: int, n_directions: int = N_DIRECTIONS) -> Tensor:
    """Return float32[n_features, directions], the projection that all sites know.

    |LayerNorm(x)|² is n_features, so that a projected row is about 1 long.
    """
    directions = min(n_directions, n_features)
    public = torch.Generator().manual_seed(_PUBLIC_SEED)
    drawn = torch.randn(n_features, directions, dtype=torch.float64, generator=public)
    return (drawn / sqrt(directions * n_features)).float()


def n_sums(n_classes: int, n_features: int, n_directions: int = N_DIRECTIONS) -> int:
    """Return how many numbers `SharedHead.sums` has: packed A and B, and the variance of their noise.

    Example:
        >>> n_sums(2, 1280), SharedHead(2, 1280).sums.numel()
        (8515, 8515)
    """
    width = min(n_directions, n_features) + 1
    return width * (width + 1) // 2 + width * (n_classes - 1) + 1


def codes(n_classes: int) -> Tensor:
    """Return float64[classes, classes − 1]: the corners of a regular simplex about 0, all 1 long.

    Of two classes they are −1 and +1. A label's code has the length 1 however many classes there are, which one
    column for each class would have too, but without telling the number of rows once more.

    Example:
        >>> codes(2).tolist()
        [[-1.0], [1.0]]
        >>> (codes(4) @ codes(4).mT).round(decimals=3)[0].tolist()
        [1.0, -0.333, -0.333, -0.333]
    """
    if n_classes == 2:
        return torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    centred = torch.eye(n_classes, dtype=torch.float64) - 1 / n_classes
    values, vectors = torch.linalg.eigh(centred)
    corners = vectors[:, 1:] * values[1:].sqrt()
    found: Tensor = corners / corners.norm(dim=1, keepdim=True)
    return found
