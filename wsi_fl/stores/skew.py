"""How the images of a data set are divided among sites: alike, by specialty, or by Dirichlet draws."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import UsageError

Skew = Callable[[NDArray[np.int64], int, int | None, np.random.Generator], list[NDArray[np.int64]]]
"""(labels, n_sites, rows per site or None, generator) → the rows of each site, disjoint."""


def parse_skew(text: str) -> Skew:
    """Return the skew `iid`, `major:0.8` (a share of one class at each site, by turns) or `dirichlet:0.5`.

    Raises:
        UsageError: when the text is none of these.
    """
    name, _, number = text.partition(":")
    try:
        value = float(number) if number else None
    except ValueError:
        value = None
    if text == "iid":
        return _iid
    if name == "major" and value is not None and 0 <= value <= 1:
        return lambda y, n, per, rng: _major(y, n, per, rng, value)
    if name == "dirichlet" and value is not None and value > 0 and isfinite(value):
        return lambda y, n, per, rng: _dirichlet(y, n, per, rng, value)
    raise UsageError(
        f"--skew {text!r}: known are iid, major:0.8 (a share up to 1) and dirichlet:0.5 (above 0)"
    )


def _iid(
    y: NDArray[np.int64], n_sites: int, per_site: int | None, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    per_site = len(y) // n_sites if per_site is None else per_site
    _enough(per_site, n_sites, len(y))
    order = rng.permutation(len(y))
    return [np.sort(order[k * per_site : (k + 1) * per_site]) for k in range(n_sites)]


def _major(
    y: NDArray[np.int64], n_sites: int, per_site: int | None, rng: np.random.Generator, share: float
) -> list[NDArray[np.int64]]:
    """Give each site a share of one class, the rest at random of all others (ProxyFL, section 4.1).

    Raises:
        UsageError: when there are too few images.
    """
    per_site = len(y) // n_sites if per_site is None else per_site
    _enough(per_site, n_sites, len(y))
    classes = np.unique(y)
    free = rng.permutation(len(y))
    sites: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * n_sites
    n_major = round(share * per_site)
    for k in range(n_sites):  # majorities first, so that no site's rest uses up another's majority
        mine = free[y[free] == classes[k % len(classes)]][:n_major]
        if len(mine) < n_major:
            raise UsageError(
                f"class {classes[k % len(classes)]} has too few images for {n_major} at each site that "
                "specialises in it; use a smaller --per-site"
            )
        sites[k] = mine
        free = free[~np.isin(free, mine)]
    free = rng.permutation(free)  # its front holds none of the classes that were just taken from it
    for k in range(n_sites):
        rest = free[y[free] != classes[k % len(classes)]][: per_site - n_major]
        if len(rest) < per_site - n_major:
            raise UsageError(
                f"too few images for {per_site} at each of {n_sites} sites; use a smaller --per-site"
            )
        sites[k] = np.sort(np.concatenate([sites[k], rest]))
        free = free[~np.isin(free, rest)]
    return sites


def _dirichlet(
    y: NDArray[np.int64], n_sites: int, per_site: int | None, rng: np.random.Generator, alpha: float
) -> list[NDArray[np.int64]]:
    """Divide each class among the sites in proportions drawn from Dirichlet(α) (Yurochkin et al., 2019).

    Raises:
        UsageError: when α is out of range, or a site gets no image.
    """
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(n_sites)]
    for c in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == c))
        shares = rng.dirichlet(np.full(n_sites, alpha))
        if not np.isclose(shares.sum(), 1):  # the generator left its range
            raise UsageError(f"--skew dirichlet:{alpha:g} is beyond what can be drawn; use 0.01 to 1000")
        cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for k, piece in enumerate(np.split(rows, cuts)):
            parts[k].append(piece)
    sites = [rng.permutation(np.concatenate(pieces)) for pieces in parts]
    empty = [k + 1 for k, rows in enumerate(sites) if not len(rows)]
    if empty:
        raise UsageError(f"site {empty[0]} got no image at all; use another --seed or a larger dirichlet:α")
    return [np.sort(rows[:per_site]) for rows in sites]


def _enough(per_site: int, n_sites: int, there: int) -> None:
    if per_site < 1:
        raise UsageError(f"{there} training images are too few for {n_sites} sites")
    if per_site * n_sites > there:
        raise UsageError(
            f"{n_sites} sites of {per_site} need {per_site * n_sites} training images, but there are {there}"
        )
