"""Take the noise off a released proxy, where the noise's bits are linear in a generator's state.

The noise of a DP-SGD step on a CPU once came from PyTorch's Mersenne Twister. Its outputs are linear over
GF(2) in 19 937 bits of state. Whoever knows a model before and after one step, and the plan, which is public, can solve
for them:

1. Adam's first step g / (|g| + ε) is undone. A sum of gradients and its noise appear, in units of the noise.
2. Four normals x made three numbers of noise, so x = a + t/2 with a known and t ~ N(0, 1) unknown. Where |a| is large
   the sign of x is certain.
3. Normals are √(−2 ln(1 − u₁)) · cos 2πu₂ and the same with sin. A sign is the first bit of u₂, or the sum of the first
   two: one linear equation in the state.
4. Elimination finds the state, from which all noise follows. It proves itself: more equations are taken than there are
   unknown bits, and those beyond must hold, but for a few wrong signs.

Noise from a cipher gives equations that are as good as random. They have full rank, and half of those beyond the rank
contradict the others: nothing is found. How noise was made then is written down here. `noise_attack.py` is the command.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import erfc, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attacks.linear import Sequences, Solved, Twister, solve, tempered

MT19937 = Twister(n=624, m=397, r=31, a=0x9908B0DF)
"""PyTorch's generator on a CPU (Matsumoto and Nishimura, 1998)."""
_SPARE = 463
"""Equations beyond the number of unknown bits: fewer than a quarter of random ones fail with a chance of 10⁻²⁸."""

# How noise was made


_AT_ONCE = 3 * 2**14
_LANES, _HALF = 16, 8
"""PyTorch fills 16 numbers at a time: 8 words are radii, and the 8 after them angles of a cosine and a sine each."""
_ORTHONORMAL: NDArray[np.float64] = torch.linalg.qr(
    torch.vander(torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64).sqrt(), increasing=True)
).Q[:, 1:].mT.numpy()  # fmt: skip
"""[3, 4]: what made three numbers of noise of four normals."""


class Chunk(NamedTuple):
    """A part of a parameter that got its noise in one go: numbers `first` to `first + n` of the flat vector.

    Attributes:
        k: four rows of k normals made three rows of k numbers, of which the first n were used.
        word: the generator's output that it began with.
    """

    first: int
    n: int
    k: int
    word: int

    @property
    def small(self) -> bool:
        """Return whether PyTorch drew its normals one by one, which are few and left alone here."""
        return 4 * self.k < _LANES

    @property
    def n_words(self) -> int:
        """Return how many outputs it took: one per normal, 16 anew for an uneven end, two per normal drawn singly."""
        if self.small:
            return 8 * self.k
        return 4 * self.k + _LANES * (4 * self.k % _LANES > 0)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return of each normal [4k] the outputs with its radius and its angle, and whether it is a cosine."""
        own, lane = np.arange(4 * self.k), np.arange(4 * self.k) % _LANES
        if 4 * self.k % _LANES:
            own[-_LANES:], lane[-_LANES:] = 4 * self.k + np.arange(_LANES), np.arange(_LANES)
        cosine = lane < _HALF
        return (self.word + np.where(cosine, own, own - _HALF), self.word + np.where(cosine, own + _HALF, own), cosine)


def chunks_of(sizes: Sequence[int]) -> Iterator[Chunk]:
    """Yield the chunks of parameters of these sizes, in the order in which they got their noise."""
    at_once = 3 * -(-min(_AT_ONCE, max(sizes)) // 3)
    first = word = 0
    for size in sizes:
        for offset in range(0, size, at_once):
            n = min(at_once, size - offset)
            chunk = Chunk(first + offset, n, -(-n // 3), word)
            yield chunk
            word += chunk.n_words
        first += size


def noise_of(words: NDArray[np.uint32], sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return the noise float64[d] in units of its standard deviation that these outputs made; NaN in small chunks."""
    uniform = (words & 0xFFFFFF) / 2.0**24
    noise = np.full(sum(sizes), np.nan)
    for chunk in chunks_of(sizes):
        if not chunk.small:
            radius, angle, cosine = chunk.places()
            turn = 2 * np.pi * uniform[angle]
            x = np.sqrt(-2 * np.log1p(-uniform[radius])) * np.where(cosine, np.cos(turn), np.sin(turn))
            noise[chunk.first : chunk.first + chunk.n] = (_ORTHONORMAL @ x.reshape(4, -1)).ravel()[: chunk.n]
    return noise


def words_of(sizes: Sequence[int]) -> int:
    """Return how many outputs the noise of parameters of these sizes took."""
    return sum(chunk.n_words for chunk in chunks_of(sizes))


# What a release tells


@dataclass(frozen=True)
class Release:
    """What a peer knows of one step: the model before and after it, and the plan.

    Attributes:
        start, released: float[d], all trained parameters.
        sizes: how many numbers each parameter has, in the model's order.
        lr, eps: of Adam, whose first step it was, without weight decay.
        sigma, clip, batch_size: the noise has the standard deviation σC, and the divisor is B.
        true_sum: float[d], Σ clip(g_i, C): what nobody may learn; to compare with alone, not for the attack.
    """

    start: NDArray[Any]
    released: NDArray[Any]
    sizes: tuple[int, ...]
    lr: float
    eps: float
    sigma: float
    clip: float
    batch_size: int
    true_sum: NDArray[Any] | None = None

    def save(self, path: Path) -> None:
        """Write it as npz."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        np.savez(path, **{name: value for name, value in given.items() if value is not None})

    @classmethod
    def load(cls, path: Path) -> Release:
        """Return what `save` wrote."""
        with np.load(path) as file:
            given = {name: file[name] if file[name].ndim else file[name].item() for name in file.files}
        return cls(**given | {"sizes": tuple(given["sizes"].tolist())})

    def noisy_sum(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noisy sum of gradients and its rounding error, float64[d] each, in units of σC.

        Both are NaN where Adam's step was rounded to the whole rate.
        """
        start, released = self.start.astype(np.float64), self.released.astype(np.float64)
        u = (start - released) / self.lr  # = g / (|g| + ε)
        size = np.abs(u)
        size[size >= 1] = np.nan
        g = self.eps * size / (1 - size)
        ulp = np.spacing(np.abs(self.released)).astype(np.float64)
        wrong = np.hypot(ulp / self.lr / sqrt(12), _ARITHMETIC * size) * (g + self.eps) ** 2 / self.eps
        scale = self.batch_size / (self.sigma * self.clip)
        return np.sign(u) * g * scale, wrong * scale


def simulate_release(noise: NDArray[np.float64], sizes: tuple[int, ...]) -> Release:
    """Return a peer's view of one step of Adam on random gradients under this noise, float64[d] in units of σC."""
    sigma, clip, batch_size, lr, eps = 3.7, 0.01, 150, 1e-3, 1e-8
    rng = np.random.default_rng(0)
    true = rng.standard_normal(len(noise))
    true *= 0.1 * batch_size * clip / np.linalg.norm(true)  # gradients agree in part
    start = rng.uniform(-0.01, 0.01, len(noise)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    gradient = (true + np.nan_to_num(noise) * sigma * clip) / batch_size
    parameter.grad = torch.from_numpy(gradient.astype(np.float32))
    torch.optim.Adam([parameter], lr=lr, eps=eps, fused=True).step()
    return Release(start, parameter.detach().numpy(), sizes, lr, eps, sigma, clip, batch_size, true_sum=true)


def simulate_noise(twister: Twister, sizes: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the noise of parameters of these sizes from a fixed state: some others make a certain sign wrong."""
    first = np.random.default_rng(0).integers(1 << 32, size=twister.n, dtype=np.uint32)
    return noise_of(tempered(twister.words(first, twister.n + words_of(sizes))[twister.n :]), sizes)


_ARITHMETIC = 1e-7
"""Of Adam's own float32 numbers, relative."""


class Signs(NamedTuple):
    """Certain signs of normals: `negative` says that bit 23 of output `word`, or of cosines bit 23 + bit 22, is 1.

    Attributes:
        margin: how far the known part is from 0.
    """

    word: NDArray[np.int64]
    cosine: NDArray[np.bool_]
    negative: NDArray[np.bool_]
    margin: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[Signs]) -> Signs:
        """Return all signs of all parts."""
        word, cosine, negative, margin = zip(*parts, strict=True)
        return cls(*map(np.concatenate, (word, cosine, negative, margin)))

    def at(self, rows: NDArray[np.intp]) -> Signs:
        """Return some of them."""
        return Signs(self.word[rows], self.cosine[rows], self.negative[rows], self.margin[rows])

    @property
    def expected_wrong(self) -> float:
        """Return how many are expected to be wrong: t/2 is beyond the margin."""
        return sum(erfc(2 * one / sqrt(2)) / 2 for one in self.margin.tolist())


def certain_signs(noisy: NDArray[np.float64], wrong: NDArray[np.float64], sizes: Sequence[int], n: int) -> Signs:
    """Return at least the n most certain signs, and a quarter more where there are, the most certain first."""
    parts = []
    for chunk in chunks_of(sizes):
        if not chunk.small:
            one = slice(chunk.first, chunk.first + chunk.n)
            known, error = (
                np.pad(numbers[one], (0, 3 * chunk.k - chunk.n), constant_values=np.nan).reshape(3, -1)
                for numbers in (noisy, wrong)
            )
            a = (_ORTHONORMAL.T @ known).ravel()
            margin = np.abs(a) - 3 * np.sqrt(_ORTHONORMAL.T**2 @ error**2).ravel()
            _, angle, cosine = chunk.places()
            good = np.flatnonzero(margin > _LEAST_MARGIN)
            parts.append(Signs(angle[good], cosine[good], a[good] < 0, margin[good]))
    found = sum(len(part.word) for part in parts)
    if found < n:
        raise SystemExit(f"{found} signs are certain, and {n} are needed: release a larger model")
    every = Signs.joined(parts)
    return every.at(np.argsort(-every.margin, kind="stable")[: n * 5 // 4])


_LEAST_MARGIN = 1.5

# The attack


def attack(release: Release, twister: Twister = MT19937, *, tries: int = 1) -> dict[str, Any]:
    """Return what was found: equations, rank, contradictions, seconds, and how well the predicted noise fits.

    Of noise that is not the twister's, `found` is false and nothing is predicted. One wrong sign hides the state, too,
    so the next tries are with others of the signs.
    """
    began = time.perf_counter()
    noisy, wrong = release.noisy_sum()
    n = twister.n_bits + _SPARE
    pool = certain_signs(noisy, wrong, release.sizes, n)
    sequences, rng = Sequences(twister), np.random.default_rng(0)
    told: dict[str, Any] = {"numbers": len(noisy), "unknown_bits": twister.n_bits}
    noise = None
    for one in range(tries):
        rows = rng.choice(len(pool.word), n, replace=False) if one else np.arange(n)
        signs = pool.at(rows[np.argsort(pool.word[rows], kind="stable")])
        solved = _solved(signs, sequences)
        told |= {
            "tries": one + 1,
            "equations": n,
            "expected_wrong_signs": signs.expected_wrong,
            "rank": solved.rank,
            "beyond_the_rank": n - solved.rank,
            "contradictions": solved.contradictions,
            "found": solved.rank == twister.n_bits and solved.contradictions < _SPARE / 4,
        }
        if told["found"]:
            words = tempered(twister.words(sequences.first_words(solved.bits), words_of(release.sizes)))
            noise = noise_of(words, release.sizes)
            break
    told["seconds"] = time.perf_counter() - began
    return told | _fit(release, noisy, wrong, noise)


def _solved(signs: Signs, sequences: Sequences) -> Solved:
    """Solve the equations that signs are, which come in the order of outputs."""
    equations = np.empty((len(signs.word), sequences.n_bytes), np.uint8)
    for cosine in (False, True):
        mine = np.flatnonzero(signs.cosine == cosine)
        equations[mine] = sequences.equations(signs.word[mine], bits=(23, 22) if cosine else (23,))
    return solve(equations, signs.negative, sequences.twister.n_bits)


def _fit(
    release: Release, noisy: NDArray[np.float64], wrong: NDArray[np.float64], noise: NDArray[np.float64] | None
) -> dict[str, float]:
    """How the predicted noise agrees with the released step, and what is left with the true sum of gradients."""
    told = {}
    usable = wrong < _USABLE
    true = None if release.true_sum is None else release.true_sum.astype(np.float64)
    if true is not None:
        told["cosine_with_noise"] = _cosine(noisy[usable], true[usable])
    if noise is not None:
        usable &= np.isfinite(noise)
        told["correlation"] = float(np.corrcoef(noise[usable], noisy[usable])[0, 1])
        if true is not None:
            precise = usable & (wrong < _PRECISE)
            told["precise_numbers"] = int(precise.sum())
            told["cosine"] = _cosine((noisy - noise)[precise], true[precise])
    return told


_USABLE, _PRECISE = 0.25, 1e-4
"""Of the noise's standard deviation: rounding errors of numbers that are compared at all, and with the true sum."""


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
