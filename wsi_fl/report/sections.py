"""What other packages add to a run's page and to a model card, by entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wsi_fl.plugins import PluginTable
from wsi_fl.report import templates
from wsi_fl.report.formatting import Finding, Json

if TYPE_CHECKING:
    from wsi_fl.report.run_sections import Page


@dataclass(frozen=True)
class SectionContext:
    """What a section is built from.

    Attributes:
        run_context: the run's `RunContext`.
        colors, slots: colour of each site in charts, and number of its variable on the page.
        many: whether there are more sites than colours.
    """

    run_context: Any
    page: Page
    colors: Mapping[str, str]
    slots: Mapping[str, int]
    many: bool

    def fill_template(self, kind: str, folder: Path, values: Mapping[str, object]) -> str:
        """Return a template of another package, filled with values and those of the page."""
        shared = {"page": self.page, "slots": self.slots, "many": self.many}
        return templates.fill_template(kind, shared | dict(values), folder)


@dataclass(frozen=True)
class PageSection:
    """A section of a run's page.

    Attributes:
        name: its anchor.
        predecessor: name of the section that it follows.
        html: its HTML, `<section id="NAME">…</section>`.
        checklist: answers to items of TRIPOD+AI by number.
    """

    name: str
    title: str
    predecessor: str
    html: str
    checklist: Mapping[int, str] = field(default_factory=dict)


class BenefitMeasure(Protocol):
    """An entry of `wsi_fl.benefit`."""

    def measure_benefit(self, runs: Mapping[str, Sequence[Any]], test_set: str, /) -> Json:
        """Return the benefit of federation over all sites.

        Args:
            runs: "local", "federated", and perhaps "pooled" → finished runs.
            test_set: "merged" or "own".
        """

    def describe_benefit(self, gain: Json, score_text: str, baseline: str, /) -> Finding:
        """Return a sentence with the gain and its verdict.

        Args:
            score_text, baseline: the score of the method and the baseline, in words.
        """


def build_sections(context: SectionContext) -> list[PageSection]:
    """Return the sections of other packages."""
    builders = PluginTable[Any]("wsi_fl.report_sections", {}, object)
    sections = [builder.build_section(context) for builder in builders.values()]
    return [section for section in sections if section is not None]


def find_benefit_measure() -> BenefitMeasure | None:
    """Return the measure of the benefit of federation; None where no package has one."""
    return next(iter(PluginTable[Any]("wsi_fl.benefit", {}, object).values()), None)
