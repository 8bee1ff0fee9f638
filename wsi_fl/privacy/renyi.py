"""Rényi divergences of a step of the subsampled Gaussian mechanism (Mironov et al., 2019), and the ε they allow."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import UsageError

NORMAL_CUTOFF = 12.0
"""Standard deviations beyond which a normal density is nothing."""
_MAX_SIGMA = 1e6
_LARGE_SIGMA = 20.0
_GRID_STEP, _UNIT_ROUND_OFF, _INTEGRAL_ROUND_OFF = 1 / 16, 1e-15, 1e-12  # of an integral


@cache
def _load_opacus() -> ModuleType:
    """Return Opacus's accountant without the rest of the package, whose import takes each rank a second."""
    package = find_spec("opacus")
    assert package is not None and package.origin is not None
    spec = spec_from_file_location("opacus_rdp", Path(package.origin).parent / "accountants" / "analysis" / "rdp.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1024)
def compute_step_rdp(sigma: float, sample_rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the Rényi divergence of one step for every order, float64[orders].

    Args:
        sigma: noise multiplier.
        sample_rate: probability q of each unit to enter a batch.

    Raises:
        UsageError: when sigma is above 1e6.
    """
    if sigma > _MAX_SIGMA:
        raise UsageError(f"sigma {sigma:g} is too large; the accountant goes up to {_MAX_SIGMA:g}")
    if sigma >= _LARGE_SIGMA:
        return _integrate_step_rdp(sigma, sample_rate, orders)
    rdp = _load_opacus().compute_rdp(q=sample_rate, noise_multiplier=sigma, steps=1, orders=list(orders))
    return np.asarray(rdp, np.float64)


def _integrate_step_rdp(sigma: float, rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the divergences by their integral (Mironov et al., 2019, eq. 7); Opacus' series takes seconds here.

    With u = dP/dQ − 1, whose mean is 0, E_Q[(1 + u)^α] = 1 + E_Q[(1 + u)^α − 1 − αu]. This integrand is never negative,
    so a divergence of 1e-12 keeps the digits that the series loses. The trapezoid rule is exact to round-off for such
    smooth integrands on the whole line; a bound on round-off is added.
    """
    order = np.asarray(orders)
    x = np.arange(-NORMAL_CUTOFF, NORMAL_CUTOFF + order.max() / sigma + _GRID_STEP, _GRID_STEP)
    density = np.exp(-(x**2) / 2) * (_GRID_STEP / np.sqrt(2 * np.pi))
    u = rate * np.expm1(x / sigma - 1 / (2 * sigma**2))
    linear = np.outer(order, u)
    remainder = np.maximum(np.expm1(np.outer(order, np.log1p(u))) - linear, 0) + _UNIT_ROUND_OFF * np.abs(linear)
    rdp: NDArray[np.float64] = np.log1p((remainder @ density) * (1 + _INTEGRAL_ROUND_OFF)) / (order - 1)
    return rdp


def convert_divergences(divergences: NDArray[np.float64], orders: tuple[float, ...], delta: float) -> float:
    """Return ε at `delta` by the Rényi divergences float64[orders]: an ε for each order, of which the least counts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)  # still an upper bound
        value, _ = _load_opacus().get_privacy_spent(orders=list(orders), rdp=divergences, delta=delta)
    return max(0.0, float(value))
