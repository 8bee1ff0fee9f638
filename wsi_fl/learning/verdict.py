"""Whether a hospital should join: one rule, and intervals that know where chance came in.

An estimate is a mean over test examples and runs. Its variance has three sources, which add up: the test *patients* who
happened to be asked, the *seeds* of training, and the *noise* of what was released. The noise of a linear head has a
known variance, so it can be drawn anew around one run (`SharedHead.redrawn`); of other models only seeds tell of it.
What other training patients would have taught is not among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

_SMALLEST_DIFFERENCE = 0.01
"""Smaller differences in a score are called negligible."""
_EQUIVALENT = 0.03
"""Where the interval of what pooling brings ends below it, there is nothing to gain."""
_LEVEL = 0.95
"""Of all intervals."""
_MORE = 4
"""Patients by which a stratum's ratio is moved towards that of the whole."""
_ROUNDING = 1e-12
_LEAST = float(np.finfo(float).tiny)
"""No p-value is below it: a test never says that something is impossible."""


class Value(TypedDict):
    """An `Estimate` as documents have it."""

    mean: float
    low: float | None
    high: float | None
    n_patients: int | None
    sources: dict[str, float | None]


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95 % interval, and the standard errors that it is made of, each None where nothing tells of it.

    Attributes:
        low, high: None where fewer than two patients were asked.
        patients, seeds, noise: the standard error by each source.
        n_patients: how many test patients were asked.
    """

    mean: float
    low: float | None
    high: float | None
    patients: float | None = None
    seeds: float | None = None
    noise: float | None = None
    n_patients: int | None = None

    def between(self, least: float, most: float) -> Estimate:
        """Return it with an interval of possible values alone.

        Patients who all say the same have no variance, which does not make others like them. Of n so many as
        1 − 0.025^(1/n) of all may be otherwise (Clopper and Pearson, 1934), and by the most that is possible.
        """
        if self.low is None or self.high is None:
            return self
        low, high = self.low, self.high
        if self.patients == 0 and self.n_patients:
            unseen = 1 - ((1 - _LEVEL) / 2) ** (1 / self.n_patients)
            low = min(low, self.mean - unseen * (self.mean - least))
            high = max(high, self.mean + unseen * (most - self.mean))
        return replace(self, low=max(low, least), high=min(high, most))

    def document(self) -> Value:
        """Return it as ``--json`` has it: mean, low, high, the number of test patients, and the sources apart."""
        sources = {"patients": self.patients, "seeds": self.seeds, "noise": self.noise}
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "n_patients": self.n_patients,
            "sources": sources,
        }


def estimate(
    values: _Floats, weights: _Floats, patient: NDArray[np.str_], noise: _Floats | None = None
) -> Estimate:
    """Return the weighted mean of values, with its interval.

    Args:
        values, weights: float64[r, n] of n test examples in each of r runs. Examples of one weight are a stratum, as
            those of one class are where all classes count alike.
        patient, noise: as of `ratio`.
    """
    return ratio(values * weights, weights, patient, noise, weights[0])


def ratio(
    part: _Floats,
    whole: _Floats,
    patient: NDArray[np.str_],
    noise: _Floats | None = None,
    stratum: _Floats | None = None,
) -> Estimate:
    """Return Σ part / Σ whole, with the interval of Student's t around it.

    With e_p the part of the sum of part − ratio · whole that is a patient's, over the sum of whole, patients have the
    variance K/(K − 1) Σ e_p² and (Σ e_p²)² / Σ e_p⁴ degrees of freedom: as many as there are patients who matter
    (Carter, Schnepel and Steigerwald, Review of Economics and Statistics 99, 2017). Runs add their variance, at least
    that of the noise. Degrees of freedom add up by Satterthwaite, Biometrics 2, 1946.

    How many examples a stratum has is no chance where weights make up for it, so e_p counts from the stratum's own
    ratio. That is moved towards the whole by four patients, as Agresti and Coull (The American Statistician 52, 1998)
    add four: three of three right prove little.

    Args:
        part, whole: float64[r, n] of n test examples in each of r runs.
        patient: str[n], whose example each is.
        noise: float64[r], the standard deviation of each run's ratio by the noise of what was released, where known.
        stratum: float64[n], the same for examples whose share in the sums is fixed; None for a single stratum.
    """
    mean = float(part.sum() / whole.sum())
    apart = part - mean * whole
    names, which = np.unique(patient[whole.any(0)], return_inverse=True)
    if len(names) < 2:
        return Estimate(mean, None, None)
    strata = np.zeros(whole.shape[1]) if stratum is None else stratum
    for one in np.unique(strata):
        mine = strata == one
        n = len(np.unique(patient[mine]))
        own = apart[:, mine].sum() / (whole[:, mine].sum() or 1.0)
        apart[:, mine] -= n / (n + _MORE) * own * whole[:, mine]
    squares = (np.bincount(which, apart.sum(0)[whole.any(0)], len(names)) / whole.sum()) ** 2
    squares[squares < _ROUNDING**2] = 0
    of_patients = len(names) / (len(names) - 1) * float(squares.sum())
    matter = float(squares.sum()) ** 2 / max(float((squares**2).sum()), 1e-300)
    free = min(matter, len(names) - len(np.unique(strata)))
    sources = [(of_patients, max(1.0, free))]
    n_runs = len(part)
    of_seeds = float((apart.sum(1) / whole.sum(1)).var(ddof=1)) / n_runs if n_runs > 1 else None
    of_noise = None if noise is None else float((noise**2).sum()) / n_runs**2
    if of_noise is not None and of_noise > (of_seeds or 0):
        sources.append((of_noise, inf))
    elif of_seeds is not None:
        sources.append((of_seeds, n_runs - 1))
    half = _half(sources)
    patients, seeds, noises = (
        None if one is None else sqrt(one) for one in (of_patients, of_seeds, of_noise)
    )
    return Estimate(mean, mean - half, mean + half, patients, seeds, noises, len(names))


def of_repetitions(mean: float, sd: float | None, n: int) -> Estimate:
    """Return the mean of n values that repetitions with other seeds gave, with the interval of Student's t.

    Args:
        sd: their standard deviation, with n − 1 in the divisor; None for a single one. Where it is 0, as of training
            without chance, repetitions tell nothing, and there is no interval.
    """
    if not sd:
        return Estimate(mean, None, None)
    half = _half([(sd**2 / n, n - 1)])
    return Estimate(mean, mean - half, mean + half, seeds=sd / sqrt(n))


def _half(sources: list[tuple[float, float]]) -> float:
    """Half the width of an interval, of the variances that add up and the degrees of freedom of each."""
    from scipy.stats import norm, t

    variance = sum(one for one, _ in sources)
    if variance <= 0:
        return 0.0
    unsure = sum(one**2 / free for one, free in sources)
    tail = (1 + _LEVEL) / 2
    return float(t.ppf(tail, variance**2 / unsure) if unsure > 0 else norm.ppf(tail)) * sqrt(variance)


def verdict(gain: Estimate | None, room: Estimate | None) -> str:
    """Return what follows for a hospital: "join", "local", "nothing to gain", or "inconclusive".

    Args:
        gain: of joining over the hospital alone.
        room: what a model of all data gains over it; None where nobody trained one.
    """
    if gain is None or gain.low is None or gain.high is None:
        return "inconclusive"
    if gain.low > 0 and gain.mean >= _SMALLEST_DIFFERENCE:
        return "join"
    if gain.high < 0 and gain.mean <= -_SMALLEST_DIFFERENCE:
        return "local"
    if room is None or room.high is None:
        return "inconclusive"
    little = room.mean < _SMALLEST_DIFFERENCE and room.high < _EQUIVALENT
    return "nothing to gain" if little else "inconclusive"


def shows_room(room: Estimate | None) -> bool:
    """Return whether pooling brings something beyond doubt, so that a share of it can be told."""
    return room is not None and room.low is not None and room.low > 0


# ---- methods against each other


class Paired(TypedDict):
    """The mean of n differences a − b, their standard deviation (n − 1 in the divisor), and how surprising it is.

    `sd` is None for a single pair. `p` is two-sided; None for fewer than two pairs, or where nothing differs.
    """

    difference: float
    sd: float | None
    n: int
    p: float | None


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Return Student's paired t-test of n values each; a[k] and b[k] were measured under the same conditions.

    Where all differ by the same, their variance is nothing, and p that of a sign test: 2^(1 − n). No p is 0.

    Raises:
        ValueError: when there is no pair, or a value without a partner.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values make no pairs")
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        return {"difference": mean, "sd": None, "n": n, "p": None}
    if float(np.ptp(differences)) <= _ROUNDING:
        sign_test = max(0.5 ** (n - 1), _LEAST) if abs(mean) > _ROUNDING else None
        return {"difference": mean, "sd": 0.0, "n": n, "p": sign_test}
    from scipy.stats import ttest_rel

    p = float(ttest_rel(a, b).pvalue)
    sd = float(differences.std(ddof=1))
    return {"difference": mean, "sd": sd, "n": n, "p": max(p, _LEAST) if isfinite(p) else None}


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values of one family of tests, adjusted by Holm's method (1979).

    The k-th smallest of m is multiplied by m − k + 1, and none may fall below a smaller one's. None, a test that
    could not be made, stays None and does not count.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[index] = highest
    return corrected
