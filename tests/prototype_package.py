"""The package of `docs/reference/python-api.md` with a payload of its own, as an installer leaves it."""

from __future__ import annotations

import re
import tomllib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from conftest import write_features
from test_plugins import found_in, installed

_PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
_TOML, PYTHON = (
    re.search(rf"```{kind}\n(.+?)```", _PAGE.partition("(your-payload)=")[2], re.DOTALL)[1]
    for kind in ("toml", "python")
)
_GROUPS = tomllib.loads(_TOML)["project"]["entry-points"]
SETTINGS = ("train.data=features", "privacy.enabled=false")
D = 6


@contextmanager
def package_installed(folder: Path):
    """Install the package for this process and those that it starts."""
    installed(folder, name="prototypes", groups=_GROUPS, text=PYTHON)
    with found_in(folder):
        yield


def draw_rows(k: int):
    """Return features of two well separated classes, and their labels; the first site lacks the second class."""
    rng, labels = np.random.default_rng(k), np.arange(60) % 2 * (k > 0)
    x = rng.normal(size=(60, D)) + np.outer(4 * labels, np.arange(D) < 2)
    return x.astype(np.float32), labels


def furnish(study, site: str, k: int) -> None:
    x, labels = draw_rows(k)
    write_features(study, site, x, labels, [f"p{i // 2}" for i in range(60)], ["train"] * 40 + ["test"] * 20)


def expected_sums(sites) -> np.ndarray:
    """Return the mean over sites of the sums and counts float64[2, D + 1] of the training rows by class."""
    sums = np.zeros((2, D + 1))
    for k in sites:
        x, labels = draw_rows(k)
        np.add.at(sums, labels[:40], np.column_stack([x, np.ones(60)])[:40])
    return sums / len(sites)
