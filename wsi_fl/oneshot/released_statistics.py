"""Class statistics released by sites, `statistics/<site>.safetensors`: sums of features by column, and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wsi_fl.federation.preflight import compare_sites
from wsi_fl.privacy.ledger_file import Guarantee, digest_values
from wsi_fl.stages.site.site_data import SiteData
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, TargetSettings
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import drop_companions
from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import Bags, NoCommonPlan, UsageError, Vectors, WsiFlError, encoder_differences, shorten_text

if TYPE_CHECKING:
    from wsi_fl.oneshot.projection import Projection
    from wsi_fl.stages.site.run_context import RunContext

STATISTICS_RUN = "oneshot"
"""Name of the release in ledgers."""
_FEATURE_KEYS = {"size_px", "mpp", "golden"}
"""Keys of the header that `refuse_other_features` compares."""
_SAME_SETTINGS = "with the --pipeline and --set of this command"
"""Hint at the settings of a release: with others it costs ε and does not match."""
_DAMAGED_HINT = "copy the file from its site again, or put its backup back"
"""Hint for damaged statistics."""


class StatisticsHeader(BaseModel):
    """The header of a released file, JSON text.

    Attributes:
        site: the releasing site.
        data, example: of a row, see `train.data` and `train.example`.
        encoder, n_features: of the features.
        size_px, mpp: of the patches; 0 in files of earlier versions, which have no golden vectors either.
        golden: the encoder's vectors of the golden patches (`wsi_fl.models.golden`); empty where unknown.
        classes: of the labels; for other tasks the names of outputs.
        task: `[target]` in full; empty for labels of stores.
        dimensions, projection: number of directions, and SHA-256 of the projection.
        unit, n: privacy unit, and number of units.
        sigma: noise multiplier; 0 without differential privacy.
        epsilon: of all such releases of the site, with `delta` and `guarantee`.
        digest: SHA-256 of the vector, as in the site's ledger.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    site: str
    data: Literal["features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    encoder: str
    n_features: int = Field(ge=1)
    size_px: int = Field(0, ge=0)
    mpp: float = Field(0.0, ge=0)
    golden: list[float | None] = Field([], max_length=1000)
    classes: list[str] = Field(min_length=1)
    task: str = ""
    dimensions: int = Field(ge=0)
    projection: str
    unit: Literal["row", "patient"]
    n: int = Field(ge=1, le=1 << 53)
    sigma: float = Field(ge=0)
    epsilon: float | None = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    guarantee: Guarantee
    digest: str

    @property
    def columns(self) -> int:
        """Return the number of columns of sums; ValidationError when `task` is no `[target]`."""
        from wsi_fl.oneshot.column_sums import count_columns  # and with it PyTorch

        target = TargetSettings.model_validate_json(self.task or "{}")
        return count_columns(len(self.classes), target.target_kind)


@dataclass(frozen=True, eq=False)
class ReleasedStatistics:
    """Released class statistics; `vector` is float32[k + columns], see `SharedHead.sums`."""

    header: StatisticsHeader
    vector: NDArray[np.float32]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the released vector."""
        return self.header.digest

    @property
    def ledger_run(self) -> str:
        """Return the name of the release in its site's ledger."""
        return STATISTICS_RUN


def write_statistics(path: Path, statistics: ReleasedStatistics) -> None:
    """Write a released file; one of an earlier version is copied byte for byte."""
    import torch

    facts = statistics.header.model_dump(exclude_unset=True)
    save_tensors(path, {"sums": torch.from_numpy(statistics.vector)}, facts)


def encode_file(statistics: ReleasedStatistics) -> bytes:
    """Return the content that `write_statistics` writes: numbers and header only."""
    with TemporaryDirectory() as folder:
        write_statistics(file := Path(folder) / "letter.safetensors", statistics)
        return file.read_bytes()


def read_statistics(path: Path, label: str, site: str | None = None) -> ReleasedStatistics:
    """Read a released file; WsiFlError where numbers and header do not match, or a site is named and it is another's.

    Messages name the file by its label.
    """
    from wsi_fl.oneshot.column_sums import count_sums  # and with it PyTorch

    try:
        tensors, document = load_tensors(path, "release")
    except WsiFlError as error:
        raise WsiFlError(f"{str(error).replace(str(path), label, 1)}; {_DAMAGED_HINT}") from None
    try:
        header = StatisticsHeader.model_validate(document)
        vector = tensors["sums"].numpy()
        size = count_sums(header.columns, header.dimensions)
        is_valid = (
            header.dimensions <= header.n_features
            and vector.dtype == np.float32
            and vector.shape == (size,)
            and digest_values(vector) == header.digest
            and bool(np.isfinite(vector).all())
            and vector[-header.columns :].max() == np.float32(header.sigma**2)
        )
    except (ValidationError, KeyError, TypeError, OverflowError):
        is_valid = False
    if not is_valid:
        raise WsiFlError(f"{label}: no class statistics that a site released, or edited since; {_DAMAGED_HINT}")
    if site not in (None, header.site):
        owner = _format_value(header.site)
        raise WsiFlError(f"{label}: these are the statistics of site {owner}; call the file {owner}.safetensors")
    return ReleasedStatistics(header, vector)


def load_statistics(study: Study, sites: Iterable[SiteFile]) -> dict[str, ReleasedStatistics]:
    """Read the released statistics of sites with labels and a file here."""
    statistics: dict[str, ReleasedStatistics] = {}
    for site in sites:
        path = study.release_path(site.name)
        if path.exists() and not site.is_receiver:
            statistics[site.name] = read_statistics(path, study.relative_path(path), site.name)
    return statistics


def describe_unknown_sites(study: Study) -> list[str]:
    """Return a line for each released file here whose site has no site file."""
    files = drop_companions(study.root.glob("statistics/*.safetensors"))
    return [
        f"{study.relative_path(file)} is here, but {study.relative_path(site_path)} is not: {file.stem} is left out; "
        "copy its site file"
        for file in files
        if not (site_path := study.site_path(file.stem)).exists()
    ]


def statistics_of(context: RunContext) -> Mapping[str, ReleasedStatistics]:
    """Return the released class statistics of a context by site."""
    return cast("Mapping[str, ReleasedStatistics]", context.statistics)


def describe_missing(study: Study, site: str) -> str:
    """Describe that a site has no file here, and what to do."""
    return (
        f"{study.relative_path(study.release_path(site))}: no statistics of site {site} yet; run `wsi-fl statistics "
        f"--site {site}` {_SAME_SETTINGS} where its store is, and copy the file here"
    )


def require_statistics(context: RunContext) -> None:
    """Require as many released statistics as agreed; WsiFlError names the missing ones."""
    train, n_available = context.pipeline.train, len(context.statistics)
    missing = [site.name for site in context.members if site.name not in context.statistics]
    n, is_late = (n_available + len(missing), bool(train.deadline and date.today().isoformat() > train.deadline))
    needed = train.min_sites or (1 if is_late else max(1, n))
    if needed > n:
        raise UsageError(f"statistics of {needed} sites are needed (train.min_sites), but only {n} sites release any")
    if n_available < needed:
        deadline_note = f" (awaited until {train.deadline})" if train.deadline and not is_late else ""
        first = describe_missing(context.study, missing[0])
        raise WsiFlError(
            f"statistics of {n_available} of {n} sites are here, and {needed} are needed; missing{deadline_note}: "
            f"{', '.join(missing)}; {first}" + (f", or set train.min_sites = {n_available}" if n_available else "")
        )


def build_header(data: SiteData) -> dict[str, Any]:
    """Return the header fields of statistics that match a site's store and pipeline."""
    assert isinstance(data.shape, Bags | Vectors)
    pipeline, projection = data.pipeline, load_projection(data)
    inputs, spec = data.describe_inputs(), data.store.meta.spec
    return {
        "data": pipeline.train.data,
        "example": pipeline.example_level,
        "encoder": inputs["encoder"],
        "n_features": data.shape.n_features,
        "size_px": spec.size_px,
        "mpp": spec.mpp,
        "golden": inputs["golden"],
        "classes": list(data.classes),
        "task": pipeline.target.model_dump_json(exclude_defaults=True) if pipeline.target.is_set else "",
        "dimensions": projection.n_components,
        "projection": projection.digest,
        "unit": pipeline.privacy.unit,
    }


def load_projection(data: SiteData) -> Projection:
    """Return the projection of a site's features: of public reference slides, or random."""
    from wsi_fl.oneshot.projection import random_projection  # and with it PyTorch

    assert isinstance(data.shape, Bags | Vectors)
    choice, encoder = data.pipeline.model.projection, data.describe_inputs()["encoder"]
    if isinstance(choice, int):
        return random_projection(data.shape.n_features, choice)
    projection = open_projection(data.study, choice)
    assert projection.origin is not None
    if any(encoder_differences([projection.origin.encoder, str(encoder)])):
        raise UsageError(
            f"model.projection = {choice!r}: projection for {projection.origin.encoder}, but the features of site "
            f"{data.site} are of {encoder}; make a projection with that encoder (wsi-fl projection)"
        )
    return projection


def has_patient_means(pipeline: Pipeline) -> bool:
    """Return whether statistics are of patients with many rows each, whose means are summed."""
    return pipeline.privacy.unit == "patient" and pipeline.example_level == "patch"


def open_projection(study: Study, path: str) -> Projection:
    """Read the projection in a file of the study; WsiFlError when it is missing or damaged."""
    from wsi_fl.oneshot.projection import read_projection

    file = study.resolve(path)
    if not file.exists():
        raise WsiFlError(
            f"model.projection = {path!r}: no such file; make it with `wsi-fl projection`, or copy it here"
        )
    return read_projection(file, study.relative_path(file))


def refuse_other_features(data: SiteData, headers: Iterable[StatisticsHeader]) -> None:
    """Refuse statistics of other features than those of a site's store, or of each other; UsageError names the odd one.

    As in the preflight, golden vectors are compared where all sides have them; the field of view is compared among
    those that know it.
    """
    store = build_header(data) | {"site": f"the store of {data.site}"}
    documents = [store, *(header.model_dump() for header in headers)]
    measured = [document for document in documents if document["size_px"] and document["mpp"]]
    is_any = data.pipeline.train.any_patch_size
    try:
        for selection, ignores_field in (
            (measured or documents, is_any),
            (documents, is_any or len(measured) < len(documents)),
        ):
            settings = {"settings": {"train.any_patch_size": ignores_field}}
            compare_sites([document | settings for document in selection])
    except NoCommonPlan as error:
        raise UsageError(
            f"released statistics: {error}; extract the features of the odd one anew; another release spends ε again"
        ) from None


def refuse_mismatch(header: StatisticsHeader, expected: Mapping[str, Any], label: str) -> None:
    """Refuse statistics that do not match this plan, naming the first difference."""
    for key, value in expected.items():
        file_value = getattr(header, key)
        is_equal = file_value == value or key in _FEATURE_KEYS
        if key == "encoder":
            is_equal = not any(encoder_differences([str(file_value), str(value)]))
        if not is_equal:
            raise UsageError(
                f"{label}: statistics with {key} = {_format_value(file_value)}, but here it is "
                f"{_format_value(value)}; put the settings back, or release again (wsi-fl statistics --site "
                f"{header.site} --again) {_SAME_SETTINGS}, which spends the same ε again"
            )


def _format_value(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return shorten_text("".join(c if c.isprintable() else "?" for c in text[:61]))
