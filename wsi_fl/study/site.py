"""sites/*.toml: what belongs to one hospital, and what of it a run keeps."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from wsi_fl.study.toml import ModelName, Section, SiteName, TableText
from wsi_fl.types import MPP_BOUNDS

_Layout = Literal["camelyon17", "camelyon16", "tcga", "generic"]

_Allowed = Literal["model", "buffer", "generator", "patches", "shared", "scores", "private_model"]
"""What a site may let go without differential privacy; "patches" lets other sites' evaluation and joint training
read its store, "shared" lets go sums whose noise rests on the other sites, "scores" counts of its test part, and
"private_model" the model that was to stay at home, by `export`."""


class SiteFile(Section):
    """One hospital: where its slides are, and what it allows."""

    name: SiteName
    """Name of the site, the same as that of its file."""
    real: bool = True
    """Whether the site is a real hospital. Nobody else opens the store of a real site, and nothing leaves it without
    differential privacy unless `allow` names it."""
    slides: str | list[str] | None = None
    """Path or pattern of the site's slides, or a list of them. It is left out where `partition` made the store."""
    annotations: str | None = None
    """Folder with the outlines of tumours, as ASAP XML or QuPath GeoJSON."""
    annotations_origin: Literal["bounds", "slide"] | None = None
    """Corner from which outlines and masks count, on slides whose scanned area begins elsewhere than the slide (MRXS,
    SCN). `bounds` is the corner of the scanned area, which QuPath shows alone; `slide` is that of the whole slide, as
    OpenSlide and ASAP count. By default QuPath's files count from `bounds` and all others from `slide`, unless the
    other puts far more of what they outline on tissue; `tile` says so. The outlines that `predict` writes for QuPath
    count from `bounds`, or from here."""
    layout: _Layout = "generic"
    """How the archive is laid out, which decides how slides, labels and annotations are matched."""
    labels: str | None = None
    """Path of the table that says what is on each slide: `stages.csv`, `slides.csv` or a clinical table."""
    clinical: str | None = None
    """Path of the site's table that `[target]` asks for a column of, with a line per slide or per patient. By default
    it is `labels`."""
    split: str | None = None
    """Path of a table that assigns patients or slides to train, val and test. By default `tile` and `mosaic` draw the
    test patients."""
    columns: dict[Literal["patient", "diagnosis", "tumor_type", "project"], TableText] = Field({})
    """Names of the columns of a clinical table (layout tcga) where they are not the GDC's names."""
    manifest: str | list[str] | None = None
    """Path of the GDC's manifest, or a list of them (layout tcga); it says which files the archive should hold."""
    slide_types: list[Literal["DX", "TS", "BS", "MS"]] | None = Field(None, min_length=1)
    """Kinds of slides that are taken (layout tcga). By default diagnostic slides, ["DX"]; TS and BS are frozen
    sections."""
    mpp_override: float | None = Field(None, ge=MPP_BOUNDS[0], le=MPP_BOUNDS[1])
    """Resolution of the slides at their finest level, in µm per pixel, in place of what they say or leave out."""
    role: Literal["member", "receiver"] = "member"
    """What the site does in `oneshot`. A `receiver` has no labels, or does not lend them: it writes no letter and pays
    nothing, and takes the head that the members' letters make. Other methods go on without it."""
    private_model: ModelName | None = None
    """Architecture of this site's private model. By default `model.private` of the pipeline."""
    max_epsilon: float | None = Field(None, gt=0, le=1_000_000)
    """The site's privacy budget: the largest ε of everything it ever releases, over all runs and seeds. A real site
    must set it."""
    delta: float | None = Field(None, gt=0, lt=1)
    """The δ of the site's budget. A real site must set it; a simulated one takes `privacy.delta` by default."""
    ledger: str | None = None
    """Path of the site's privacy account. By default `ledgers/<site>.jsonl`; a hospital with several studies
    on the same patients names one file in all of them, so that they share one budget."""
    allow: list[_Allowed] = Field([])
    """What may leave without differential privacy: models, buffers of synthetic samples, generators. "patches" lets
    the other sites' evaluation and joint training read the store. "shared" is for `privacy.noise = "shared"`, where the
    site's ε rests on noise that other sites add. "scores" lets go how many test examples each model that was released
    gets right and wrong, and in which bin of its score; of no training patient. "private_model" lets `wsi-fl export
    --private` write the site's private model for other programs, which may have memorised patients."""

    @property
    def receives(self) -> bool:
        """Return whether the site lends no label to anything; none of its labels is ever read."""
        return self.role == "receiver"

    def allows(self, what: _Allowed) -> bool:
        """Return whether `what` may leave without differential privacy; a simulated site allows everything."""
        return not self.real or what in self.allow

    @property
    def allowed(self) -> tuple[str, ...]:
        """All that may leave without differential privacy."""
        return tuple(self.allow) if self.real else get_args(_Allowed)


def as_agreed(began: SiteFile, today: SiteFile) -> SiteFile:
    """Return today's site file with the promises that a run began with; nothing is allowed that either file forbids.

    Where things lie (slides, tables, the ledger) is today's; what the site is and promised is the run's.
    """
    limits = [limit for limit in (began.max_epsilon, today.max_epsilon) if limit is not None]
    return today.model_copy(
        update={
            "real": began.real or today.real,
            "allow": [what for what in get_args(_Allowed) if began.allows(what) and today.allows(what)],
            "max_epsilon": min(limits, default=None),
            "delta": began.delta,
            "private_model": began.private_model,
            "role": began.role,
        }
    )


PROMISES = ("real", "role", "allow", "max_epsilon", "delta", "private_model")
"""The keys of a site file that a run keeps as they were when it began."""
