"""The account file: the privacy budget of a hospital in federations of other software, which have no study folder."""

from __future__ import annotations

from math import floor, log10
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from wsi_fl.privacy.accounting import Mechanism, epsilon, find_sigma
from wsi_fl.privacy.ledger_file import user_head_path
from wsi_fl.privacy.model_updates import UpdateTerms, UpdateUnit
from wsi_fl.privacy.privacy_plan import explain_large_delta
from wsi_fl.study.toml import MIN_SIGMA, Section, SiteName, read_toml, validate_model
from wsi_fl.types import UsageError

_Budget = Annotated[float, Field(gt=0, le=50)]
_MAX_NOISE = 1e36  # a standard deviation in float32, with room for the draws of a model's size


class AccountFile(Section):
    """The terms under which a hospital releases model updates."""

    name: SiteName
    """Name of the hospital; one for the same patients in all federations."""
    ledger: str
    """Path of the ledger, seen from this file. All federations on the same patients share it."""
    unit: UpdateUnit
    """What ε protects: "site", the hospital's whole update, or "patient", where the job gives an update per patient."""
    n: int = Field(ge=2)
    """Number of the hospital's patients. It is public, and stays the same when patients come and go."""
    clip: float = Field(gt=0)
    """Bound C on the L2 norm of a unit's update."""
    max_epsilon: _Budget
    """Budget: the largest ε of all releases in the ledger, for good."""
    delta: float = Field(gt=0, lt=1)
    """The δ of the budget, below 1/n."""
    sigma: float | None = Field(None, ge=MIN_SIGMA)
    """Noise multiplier: the noise's standard deviation is sigma · clip. In its place, `target_epsilon` and `rounds`."""
    target_epsilon: _Budget | None = None
    """ε of a job of `rounds` rounds, from which the noise multiplier follows."""
    rounds: int | None = Field(None, ge=1, le=100_000)
    """Largest number of a job's releases. Not set: as many as the budget allows."""

    @model_validator(mode="after")
    def _check_amounts(self) -> AccountFile:
        if problem := explain_large_delta(self.delta, self.n, "patient"):
            raise ValueError(problem)
        if (self.sigma is None) == (self.target_epsilon is None):
            raise ValueError("write one of sigma and target_epsilon")
        if self.target_epsilon is not None and self.rounds is None:
            raise ValueError("target_epsilon is that of a job of so many rounds; write rounds")
        single = [] if self.sigma is None else [Mechanism(self.sigma, self.clip, 1.0, 1)]
        if self.target_epsilon is not None and self.target_epsilon > self.max_epsilon:
            raise ValueError("target_epsilon exceeds max_epsilon")
        if epsilon(single, self.delta) > self.max_epsilon:
            raise ValueError("sigma is so small that a single release exceeds max_epsilon; write a larger one")
        return self


def load_account(path: Path) -> UpdateTerms:
    """Return the terms in an account file, whose ledger has heads beside the file and in the user's state.

    Raises:
        UsageError: in one line, with the key and what to write.
    """
    try:
        file = validate_model(AccountFile, read_toml(path), path.name)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; write the account of this hospital there") from None
    sigma = file.sigma or find_sigma(file.target_epsilon or 0.0, 1.0, file.rounds or 1, file.delta)
    if (largest := _MAX_NOISE / max(sigma, 1)) < file.clip:
        raise UsageError(
            f"{path.name}: clip = {file.clip:g} with sigma = {sigma:g} makes numbers above those of float32; write a "
            f"clip of at most 1e{floor(log10(largest))}"
        )
    heads = (path.with_suffix(".head.json"), user_head_path(file.name))
    same = file.model_dump(include={"unit", "n", "clip", "delta", "max_epsilon", "rounds"})
    return UpdateTerms(site=file.name, ledger=path.parent / file.ledger, sigma=sigma, heads=heads, **same)
