"""The settings of a site, sites/*.toml, and their snapshot in a run."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from wsi_fl.study.toml import ModelName, Section, SiteName, TableText
from wsi_fl.types import MPP_BOUNDS

_Layout = Literal["camelyon17", "camelyon16", "tcga", "generic"]

_Allowed = Literal["model", "buffer", "generator", "patches", "shared", "scores", "private_model"]
"""Permissions of a site to release without differential privacy; SiteFile.allow explains each."""


class SiteFile(Section):
    """The settings of one hospital: its slides, its privacy budget and its permissions."""

    name: SiteName
    """Name of the site, equal to the name of its file."""
    real: bool = True
    """Whether the site is a real hospital. Other sites never open the store of a real site, and nothing leaves it
    without differential privacy unless `allow` names it."""
    slides: str | list[str] | None = None
    """Path or pattern of the site's slides, or a list of them. It is omitted where `partition` made the store."""
    annotations: str | None = None
    """Folder with the outlines of tumours, as ASAP XML or QuPath GeoJSON."""
    annotations_origin: Literal["bounds", "slide"] | None = None
    """Origin of the coordinates of outlines and masks, on slides whose scanned area begins elsewhere than the slide
    (MRXS, SCN). `bounds` is the corner of the scanned area, as in QuPath; `slide` is the corner of the whole slide, as
    in OpenSlide and ASAP. By default `bounds` for QuPath's files and `slide` for all others, unless the other origin
    puts far more of the outlined area on tissue; `tile` prints that. `predict` writes outlines for QuPath with this
    origin, by default `bounds`."""
    layout: _Layout = "generic"
    """Layout of the archive, by which slides, labels and annotations are matched."""
    labels: str | None = None
    """Path of the table of slide labels: `stages.csv`, `slides.csv` or a clinical table."""
    clinical: str | None = None
    """Path of the table with the columns of `[target]`, with a line per slide or per patient. By default `labels`."""
    split: str | None = None
    """Path of a table that assigns patients or slides to train, val and test. By default `tile` and `mosaic` draw the
    test patients."""
    columns: dict[Literal["patient", "diagnosis", "tumor_type", "project"], TableText] = Field({})
    """Names of the columns of a clinical table (layout tcga) that differ from the GDC's names."""
    manifest: str | list[str] | None = None
    """Path of the GDC's manifest, or a list of them (layout tcga): the files that the archive should hold."""
    slide_types: list[Literal["DX", "TS", "BS", "MS"]] | None = Field(None, min_length=1)
    """Kinds of slides to use (layout tcga). By default diagnostic slides, ["DX"]; TS and BS are frozen sections."""
    mpp_override: float | None = Field(None, ge=MPP_BOUNDS[0], le=MPP_BOUNDS[1])
    """Resolution of the slides at level 0, in µm per pixel, in place of their metadata."""
    role: Literal["member", "receiver"] = "member"
    """Role of the site in `oneshot`. A `receiver` is an inference-only site: it releases no class statistics, spends no
    privacy budget, and receives the one-shot global head. Other methods run without it."""
    private_model: ModelName | None = None
    """Architecture of this site's private model. By default `model.private` of the pipeline."""
    batch_size: int | None = Field(None, ge=1, le=1_000_000)
    """Expected number of examples in a training step at this site, of patients with `privacy.unit = "patient"`. Its ε
    follows from it. By default `train.batch_size` of the pipeline; `privacy.target_epsilon` replaces both."""
    max_epsilon: float | None = Field(None, gt=0, le=1_000_000)
    """Privacy budget of the site: the largest ε of all its releases, over all runs and seeds. Required for a real
    site."""
    delta: float | None = Field(None, gt=0, lt=1)
    """The δ of the budget. Required for a real site; by default `privacy.delta` for a simulated one."""
    ledger: str | None = None
    """Path of the site's privacy account. By default `ledgers/<site>.jsonl`; a hospital with several studies on the
    same patients sets the same file in all of them, so that they share one budget."""
    allow: list[_Allowed] = Field([])
    """What may leave without differential privacy: models, buffers of synthetic samples, generators. "patches": the
    evaluation of other sites and pooled training may read the store. "shared": `privacy.noise = "shared"`, where the
    site's ε depends on noise that other sites add. "scores": counts of right and wrong test examples of each released
    model, by bin of its score; none of training patients. "private_model": `wsi-fl export --private` may write the
    site's private model, which may have memorised patients."""

    @property
    def is_receiver(self) -> bool:
        """Return whether the site is inference-only; its labels are never read."""
        return self.role == "receiver"

    def allows(self, permission: _Allowed) -> bool:
        """Return whether something may leave without differential privacy; a simulated site allows everything."""
        return not self.real or permission in self.allow

    @property
    def permissions(self) -> tuple[str, ...]:
        """The permissions to release without differential privacy; all of a simulated site."""
        return tuple(self.allow) if self.real else get_args(_Allowed)


def merge_site_snapshot(snapshot: SiteFile, current: SiteFile) -> SiteFile:
    """Return the current site file with the settings snapshot of a run; allowed is only what both files allow.

    Paths (slides, tables, the ledger) are the current ones; role, budget, architecture and batch size are the run's.
    """
    limits = [limit for limit in (snapshot.max_epsilon, current.max_epsilon) if limit is not None]
    return current.model_copy(
        update={
            "real": snapshot.real or current.real,
            "allow": [name for name in get_args(_Allowed) if snapshot.allows(name) and current.allows(name)],
            "max_epsilon": min(limits, default=None),
            "delta": snapshot.delta,
            "private_model": snapshot.private_model,
            "batch_size": snapshot.batch_size,
            "role": snapshot.role,
        }
    )


SNAPSHOT_KEYS = ("real", "role", "allow", "max_epsilon", "delta", "private_model", "batch_size")
"""The keys of a site file in the settings snapshot of a run."""
