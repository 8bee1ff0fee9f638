"""The letters that sites have released once, `statistics/<site>.safetensors`: sums of features by column, and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wsi_fl.privacy.ledger_file import Guarantee, digest
from wsi_fl.stages.site.data import Data
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, Target
from wsi_fl.study.site import SiteFile
from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import Bags, UsageError, Vectors, WsiFlError, encoder_differences

if TYPE_CHECKING:
    from wsi_fl.models.directions import Directions

RUN = "oneshot"
"""What ledgers call the release."""
DAMAGED_LETTER = "copy the file from its site again, or put its backup back"
"""What helps where no copy of a letter is whole."""


class Facts(BaseModel):
    """What the header of a released file says of its numbers, as JSON text.

    Attributes:
        site: whose sums they are.
        data, example: what a row is, as `train.data` and `train.example` say it.
        encoder, n_features: of the features.
        classes: of the labels; of other questions what each output is called.
        task: what `[target]` asked, in full; empty for what stores are labelled with.
        dimensions, projection: along how many directions features are summed, and the SHA-256 of these.
        unit, n: what ε protects, and how many of them there are.
        sigma: noise multiplier; 0 without privacy.
        epsilon: of everything that the site has released like this, with `delta` and what it is worth.
        digest: SHA-256 of the vector, as in the site's ledger.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    site: str
    data: Literal["features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    encoder: str
    n_features: int = Field(ge=1)
    classes: list[str] = Field(min_length=1)
    task: str = ""
    dimensions: int = Field(ge=1)
    projection: str
    unit: Literal["row", "patient"]
    n: int = Field(ge=1)
    sigma: float = Field(ge=0)
    epsilon: float | None = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    guarantee: Guarantee
    digest: str

    @property
    def columns(self) -> int:
        """Return how many columns features are summed in; ValidationError when `task` is no `[target]`."""
        from wsi_fl.models.shared_head import n_columns  # and with it PyTorch

        asked = Target.model_validate_json(self.task or "{}")
        return n_columns(len(self.classes), asked.kind)


@dataclass(frozen=True, eq=False)
class ReleasedSums:
    """A letter as its site released it; `vector` is float32[k + columns], see `SharedHead.sums`."""

    facts: Facts
    vector: NDArray[np.float32]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of what left."""
        return self.facts.digest


def write_sums(path: Path, sums: ReleasedSums) -> None:
    """Write a released file."""
    import torch

    save_tensors(path, {"sums": torch.from_numpy(sums.vector)}, sums.facts.model_dump())


def as_file(sums: ReleasedSums) -> bytes:
    """Return what `write_sums` writes: the numbers and their header, and nothing else that a file might hold."""
    with TemporaryDirectory() as folder:
        write_sums(file := Path(folder) / "letter.safetensors", sums)
        return file.read_bytes()


def read_sums(path: Path, label: str) -> ReleasedSums:
    """Return what `write_sums` wrote; WsiFlError where numbers and header do not belong together."""
    from wsi_fl.models.shared_head import n_sums  # and with it PyTorch

    try:
        tensors, document = load_tensors(path, "release")
    except WsiFlError as error:
        raise WsiFlError(f"{str(error).replace(str(path), label, 1)}; {DAMAGED_LETTER}") from None
    try:
        facts = Facts.model_validate(document)
        vector = tensors["sums"].numpy()
        size = n_sums(facts.columns, facts.dimensions)
        whole = (
            facts.dimensions <= facts.n_features
            and vector.dtype == np.float32
            and vector.shape == (size,)
            and digest(vector) == facts.digest
            and bool(np.isfinite(vector).all())
            and vector[-facts.columns :].max() == np.float32(facts.sigma**2)
        )
    except (ValidationError, KeyError, TypeError, OverflowError):
        whole = False
    if not whole:
        raise WsiFlError(f"{label}: not sums that a site released, or edited since; {DAMAGED_LETTER}")
    return ReleasedSums(facts, vector)


def releases_of(study: Study, sites: Iterable[SiteFile]) -> dict[str, ReleasedSums]:
    """Return the released sums of those of some sites that write a letter and have a file here."""
    found = {}
    for site in sites:
        path = study.release(site.name)
        if path.exists() and not site.receives:
            found[site.name] = read_sums(path, study.relative(path))
            refuse_another_site(found[site.name].facts, site.name, study.relative(path))
    return found


def refuse_another_site(facts: Facts, site: str, label: str) -> None:
    """Refuse sums that are another site's than they are taken for; WsiFlError says whose."""
    if facts.site != site:
        theirs = _short(facts.site)
        raise WsiFlError(f"{label}: these are the sums of site {theirs}; call the file {theirs}.safetensors")


def missing_release(study: Study, site: str) -> str:
    """Return in words that a site has no file here, and what to do about it."""
    return (
        f"{study.relative(study.release(site))}: no sums of site {site} yet; run `wsi-fl statistics --site {site}` "
        "where its store is, and copy the file here"
    )


def wanted_of(data: Data) -> dict[str, Any]:
    """Return what the header of a file must say that a pipeline can use beside a site's own store."""
    assert isinstance(data.shape, Bags | Vectors)
    pipeline, directions = data.pipeline, directions_of(data)
    return {
        "data": pipeline.train.data,
        "example": pipeline.example,
        "encoder": data.inputs()["encoder"],
        "n_features": data.shape.n_features,
        "classes": list(data.classes),
        "task": pipeline.target.model_dump_json(exclude_defaults=True) if pipeline.target.asked else "",
        "dimensions": directions.n,
        "projection": directions.digest,
        "unit": pipeline.privacy.unit,
    }


def directions_of(data: Data) -> Directions:
    """Return the directions along which a site's features are summed: those of public tissue, or random ones."""
    from wsi_fl.models.directions import random_directions  # and with it PyTorch

    assert isinstance(data.shape, Bags | Vectors)
    wanted, encoder = data.pipeline.model.projection, data.inputs()["encoder"]
    if isinstance(wanted, int):
        return random_directions(data.shape.n_features, wanted)
    directions = open_directions(data.study, wanted)
    assert directions.origin is not None
    if any(encoder_differences([directions.origin.encoder, str(encoder)])):
        raise UsageError(
            f"model.projection = {wanted!r}: directions of {directions.origin.encoder}, but the features of site "
            f"{data.site} are of {encoder}; make directions with that encoder (wsi-fl projection)"
        )
    return directions


def of_patients(pipeline: Pipeline) -> bool:
    """Return whether a letter is of patients with many rows each, whose means are summed."""
    return pipeline.privacy.unit == "patient" and pipeline.example == "patch"


def open_directions(study: Study, path: str) -> Directions:
    """Return the public directions of a file, by its path in the study; WsiFlError when it is missing or damaged."""
    from wsi_fl.models.directions import read_directions

    file = study.resolve(path)
    if not file.exists():
        raise WsiFlError(
            f"model.projection = {path!r}: no such file; make it with `wsi-fl projection`, or copy it here"
        )
    return read_directions(file, study.relative(file))


def refuse_others(facts: Facts, wanted: Mapping[str, Any], label: str) -> None:
    """Refuse sums that cannot be added to those of this plan, naming the first thing that differs."""
    for key, value in wanted.items():
        theirs = getattr(facts, key)
        alike = theirs == value
        if key == "encoder":
            alike = not any(encoder_differences([str(theirs), str(value)]))
        if not alike:
            raise UsageError(
                f"{label}: sums with {key} = {_short(theirs)}, but here it is {_short(value)}; put the settings back, "
                f"or release anew (wsi-fl statistics --site {facts.site} --again), which spends the same ε again"
            )


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text[:61])
    return text if len(text) <= 60 else f"{text[:59]}…"
