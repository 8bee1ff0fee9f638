"""The released stains of a study, `stains/<site>.json`, and training patches shown in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.release import digest
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.slides.stains.methods import AnyStain

RUN = "stain"
"""What ledgers call the release."""


@dataclass(frozen=True)
class Released:
    """A stain as its site released it.

    Attributes:
        method: key of `STAIN_METHODS`.
        moments: float32[n_numbers], the very numbers that the digest is of.
        digest: SHA-256, as in the site's ledger.
    """

    method: str
    moments: NDArray[np.float32]
    digest: str

    @property
    def stain(self) -> AnyStain:
        from wsi_fl.slides.stains.methods import STAIN_METHODS  # and with it scikit-image

        found: AnyStain = STAIN_METHODS[self.method].stain_of(self.moments.astype(np.float64))
        return found


def read_stain(document: Any, label: str) -> Released:
    """The stain of a file's content.

    Raises:
        WsiFlError: when it is damaged, or its numbers are not those of its digest.
    """
    from wsi_fl.slides.stains.methods import STAIN_METHODS

    try:
        moments = np.array(document["moments"], np.float32)
        known, method = str(document["digest"]), str(document["method"])
        whole = moments.shape == (STAIN_METHODS[method].n_numbers,) and bool(np.isfinite(moments).all())
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or digest(moments) != known:
        raise WsiFlError(f"{label}: not a released stain; copy the file from its site again")
    return Released(method, moments, known)


def stains_of(study: Study, pipeline: Pipeline, *more: str) -> dict[str, Released]:
    """The released stain of every site of a pipeline, and of those named besides.

    Raises:
        WsiFlError: when one is missing; says which command to run where.
    """
    found = {}
    for name in dict.fromkeys([*(site.name for site in study.sites(pipeline)), *more]):
        path = study.stain(name)
        if not path.exists():
            raise WsiFlError(
                f"{study.relative(path)}: no stain of site {name} yet; run `wsi-fl stain --site {name}` where its "
                "store is, and copy the file here"
            )
        found[name] = read_stain(read_json(path), study.relative(path))
        if found[name].method != pipeline.stain.method:
            raise UsageError(
                f"{study.relative(path)}: a stain by {found[name].method}, stain.method is {pipeline.stain.method}; "
                f"set it, or release another one (wsi-fl stain --site {name} --again)"
            )
    return found
