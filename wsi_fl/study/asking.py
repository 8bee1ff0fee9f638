"""The section of a pipeline that says what is asked of slides, where it is not what their stores are labelled with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from wsi_fl.study.toml import Section


class Target(Section):
    """What models of slides learn to answer: a column of a table as classes or as a number, or the time of an event.

    Without it they answer what the stores are labelled with. It is for `train.data = "mosaics"`. The table is the
    site's own, `clinical` in its site file.
    """

    column: str | None = None
    """Name of the column that holds the answer, with `classes` or `range`."""
    classes: list[str] | None = Field(None, min_length=2, max_length=10_000)
    """The values of the column, in order, that models tell apart. All sites agree on them, so that no site's table
    decides."""
    ignore: list[str] = Field([])
    """Values of the column whose slides are left out, like those without a value."""
    range: list[Annotated[float, Field(ge=-1e30, le=1e30)]] | None = Field(None, min_length=2, max_length=2)
    """Smallest and largest number of the column. With it models answer a number within this range."""
    time: str | None = None
    """Name of the column that holds the time until the event, or until the patient was last seen without it."""
    event: str | None = None
    """Name of the column that says whether the event was seen: 1 or 0, yes or no, dead or alive."""
    intervals: list[Annotated[float, Field(ge=0, le=1e9)]] | None = Field(None, min_length=1, max_length=1000)
    """Ends of the intervals in which the event may happen, rising, in the unit of `time`. Times after the last end are
    not told apart. Ten or fewer are usual."""
    per: Literal["slide", "patient"] = "slide"
    """What one example is: a slide, or all slides of a patient as one bag. Survival is always asked per patient."""

    @property
    def of(self) -> str:
        """Return what one example is: survival is asked of patients whatever `per` says."""
        return "patient" if self.intervals else self.per

    @property
    def asked(self) -> bool:
        """Return whether anything is asked beside what stores are labelled with."""
        return any((self.column, self.classes, self.range, self.time, self.event, self.intervals))
