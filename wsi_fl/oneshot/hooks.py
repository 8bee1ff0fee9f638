"""What the one-shot method does in a study outside the round of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from wsi_fl.oneshot.released_statistics import (
    STATISTICS_RUN,
    ReleasedStatistics,
    describe_missing,
    describe_unknown_sites,
    has_patient_means,
    load_projection,
    load_statistics,
    open_projection,
    require_statistics,
)
from wsi_fl.oneshot.secagg import require_enough_sites
from wsi_fl.stages.site.example_kind import find_example_kind
from wsi_fl.stages.site.study_hooks import EarlierRelease, StudyHooks
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from torch import nn

    from wsi_fl.federation.comm import Comm
    from wsi_fl.federation.methods import Method
    from wsi_fl.federation.site_state import Site
    from wsi_fl.stages.site.run_context import RunContext
    from wsi_fl.stages.site.site_data import SiteData
    from wsi_fl.study.folder import Study
    from wsi_fl.study.pipeline import Pipeline
    from wsi_fl.study.site_file import SiteFile

_HEAD_NAME = "shared_head"
"""The one-shot global head among the payload models."""


class OneshotHooks(StudyHooks):
    """Settings, checks and released files of the one-shot method."""

    uses_projection = True

    def adapt_settings(self, study: Study, pipeline: Pipeline) -> Pipeline:
        """Return the settings with a single round, and heads that are solved, not trained."""
        linear = find_example_kind(pipeline).linear_head
        if linear is None:
            raise UsageError(
                f"{STATISTICS_RUN} needs features; compute them with `wsi-fl features` (or `wsi-fl mosaic`) and set "
                "train.data = 'features' (or 'mosaics')"
            )
        projection, kind = pipeline.model.projection, pipeline.target.target_kind
        if projection == 0 and kind != "survival":
            raise UsageError("model.projection = 0 is for survival curves: set target.time, event and intervals")
        if projection == 0 and pipeline.privacy.unit != "patient":
            raise UsageError("model.projection = 0 counts patients: set privacy.unit = 'patient', or leave it out")
        n = projection if isinstance(projection, int) else open_projection(study, projection).n_components
        model = {"private": linear, "proxy": f"{_HEAD_NAME}:{n}" + (f":{kind}" if kind != "classes" else "")}
        train_keys: dict[str, Any] = {"rounds": 1, "epochs_per_round": 1, "eval_every": 1, "tune": True}
        if projection == 0:  # no model is chosen by them, and curves need all
            train_keys["val_fraction"] = 0.0
        return pipeline.replace_keys(train=train_keys, model=model, privacy={"clip": 1.0, "mode": "strict"})

    def check(self, context: RunContext, *, is_synced: bool) -> None:
        if not context.method.payload.is_single_release:
            _check_start(context)
            return
        if context.pipeline.model.projection == 0:
            raise UsageError("model.projection = 0 counts without features, for `wsi-fl survival`, and gives no model")
        if context.pipeline.privacy.noise == "shared":
            _check_shared_noise(context, is_synced=is_synced)
        if context.uses_files and not is_synced:
            require_statistics(context)
            if not context.local_names:
                raise WsiFlError("no site of this run has its store here")

    def find_doubts(self, context: RunContext) -> Iterator[str]:
        if isinstance(context.pipeline.model.projection, int):
            yield (
                "features are projected on random directions, which costs a good part of the gain; "
                "wsi-fl projection finds better ones from public reference slides"
            )
        missing = [site.name for site in context.members if site.name not in context.statistics]
        if context.uses_files and missing:
            yield f"not included, as there is no file in statistics/: {', '.join(missing)}"
        if context.uses_files:
            yield from describe_unknown_sites(context.study)

    def load_releases(self, study: Study, sites: Sequence[SiteFile]) -> Mapping[str, ReleasedStatistics]:
        return load_statistics(study, sites)

    def sync_releases(self, context: RunContext, comm: Comm) -> RunContext:
        from wsi_fl.oneshot.sync_statistics import sync_statistics

        return sync_statistics(context, comm)

    def use_releases(self, method: Method, data: SiteData, site: Site, releases: Mapping[str, EarlierRelease]) -> None:
        from wsi_fl.oneshot.use_statistics import use_statistics  # and with it PyTorch

        use_statistics(method, data, site, cast("Mapping[str, ReleasedStatistics]", releases))

    def configure_model(self, data: SiteData, model: nn.Module) -> None:
        from wsi_fl.oneshot.payload import require_head

        require_head(model).set_projection(load_projection(data), patients=has_patient_means(data.pipeline))

    def projection_digest(self, data: SiteData) -> str | None:
        return load_projection(data).digest


def _check_shared_noise(context: RunContext, *, is_synced: bool) -> None:
    """Refuse distributed noise without enough sites, or without the permission of each."""
    privacy = context.pipeline.privacy
    require_enough_sites(len(context.sites), privacy.colluding, privacy.dropouts)
    for site in context.sites:
        if not site.allows("shared"):
            raise UsageError(
                f"sites/{site.name}.toml: with privacy.noise = 'shared' this site's ε rests on noise of other "
                'sites; add allow = ["shared"] there, or set privacy.noise = "own"'
            )
    if context.receivers:
        raise UsageError(
            f"sites/{context.receivers[0]}.toml: a receiver takes no part in distributed noise; set privacy.noise = "
            "'own'"
        )
    if context.uses_files and is_synced:
        raise UsageError("released statistics have noise of each site; set privacy.noise = 'own'")


def _check_start(context: RunContext) -> None:
    """Refuse a trained model that cannot start from the global head (`train.init_from`)."""
    role = "proxy" if context.method.mixing_role == "proxy" else "private"
    linear = context.kind.linear_head
    if linear is None or getattr(context.pipeline.model, role) != linear:
        head_name = repr(linear) if linear else "'linear_head', and train.data = 'features'"
        raise UsageError(f"train.init_from = 'oneshot' is for linear heads: set model.{role} = {head_name}")
    if missing := [name for name in context.names if name not in context.statistics]:
        raise WsiFlError(describe_missing(context.study, missing[0]))


HOOKS = OneshotHooks()
