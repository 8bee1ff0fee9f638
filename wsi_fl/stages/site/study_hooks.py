"""What a method does in a study outside the rounds of the loop. An extension overrides what its method needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from torch import nn

    from wsi_fl.federation.comm import Comm
    from wsi_fl.federation.methods import Disclosure, Method
    from wsi_fl.federation.site_state import Buffer, Site
    from wsi_fl.runs.site_folder import SiteFolder
    from wsi_fl.stages.runtime.console import Watcher
    from wsi_fl.stages.site.run_context import RunContext
    from wsi_fl.stages.site.site_data import SiteData
    from wsi_fl.study.folder import Study
    from wsi_fl.study.pipeline import Pipeline
    from wsi_fl.study.site_file import SiteFile
    from wsi_fl.types import Shape


class EarlierRelease(Protocol):
    """A payload that a site released before the run, in a file that people may copy.

    Attributes:
        digest: SHA-256 of the released vector, as in the site's ledger.
        ledger_run: name of the release in the site's ledger.
    """

    @property
    def digest(self) -> str: ...
    @property
    def ledger_run(self) -> str: ...


class StudyHooks:
    """The hooks of a method; by default none does anything.

    Attributes:
        uses_projection: whether the payload rests on the projection of features that `model.projection` names.
    """

    uses_projection: ClassVar[bool] = False

    def adapt_settings(self, study: Study, pipeline: Pipeline) -> Pipeline:
        """Return the settings as the method has them."""
        return pipeline

    def check(self, context: RunContext, *, is_synced: bool) -> None:
        """Refuse a run that cannot succeed; `is_synced`: earlier releases are exchanged when it begins."""

    def find_doubts(self, context: RunContext) -> Iterator[str]:
        """Yield what makes little sense, though it is no error."""
        return iter(())

    def load_releases(self, study: Study, sites: Sequence[SiteFile]) -> Mapping[str, EarlierRelease]:
        """Return the earlier releases of sites, from files here."""
        return {}

    def sync_releases(self, context: RunContext, comm: Comm) -> RunContext:
        """Send earlier releases to the sites that lack them; return the context of those that all sites have."""
        return context

    def use_releases(self, method: Method, data: SiteData, site: Site, releases: Mapping[str, EarlierRelease]) -> None:
        """Load the earlier releases that all sites have into a site's models."""

    def configure_model(self, data: SiteData, model: nn.Module) -> None:
        """Fit a fresh or loaded model of the payload to a site's data."""

    def projection_digest(self, data: SiteData) -> str | None:
        """Return the SHA-256 of the projection of a site's features, which all sites must share; None for none."""
        return None

    def load_buffer(self, data: SiteData, folder: SiteFolder, index: int) -> Buffer | None:
        """Return the buffer that a site of a method with buffers releases; None for none."""
        return None

    def prepare_rounds(self, context: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher) -> None:
        """Do what precedes the first round, such as the exchange of generators."""

    def finish_rounds(self, context: RunContext, sites: Sequence[Site], comm: Comm) -> None:
        """Do what follows the last round."""

    def distinguishing_settings(self, pipeline: Pipeline) -> tuple[object, ...]:
        """Return the values by which runs of the method on the same examples are no repetitions in a report."""
        return ()

    def voting_rule(self, pipeline: Pipeline) -> str:
        """Return the rule by which the sites' predictions are aggregated: "mean" or another of `score_voting_rules`."""
        return "mean"

    def count_bytes(self, pipeline: Pipeline, disclosure: Disclosure, shape: Shape, n_classes: int) -> int | None:
        """Return the bytes of a disclosure that is no model; None where they are not known."""
        return None


def find_hooks(method: Method) -> StudyHooks:
    """Return the hooks of a method.

    Raises:
        WsiFlError: for a method of another package whose hooks are none.
    """
    hooks = method.load_hooks() if method.load_hooks is not None else StudyHooks()
    if not isinstance(hooks, StudyHooks):
        raise WsiFlError(f"{method.name}: its load_hooks returns no StudyHooks; update or uninstall its package")
    return hooks
