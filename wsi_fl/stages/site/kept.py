"""What a run keeps of its sites: what they promised when it began, and what their models learned from."""

from __future__ import annotations

from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import SITE_FILE, SiteFolder
from wsi_fl.stages.work.console import say
from wsi_fl.stores.bags import BagMeta
from wsi_fl.study.folder import Study
from wsi_fl.system.ranks import launched_ranks
from wsi_fl.types import GridSpec, UsageError


def as_begun(study: Study, run: RunFolder, *, goes_on: bool = False) -> Study:
    """Return the study with the promises that the run began with, and say which site files promise something else now.

    Of `allow` and `max_epsilon` the stricter holds: what a hospital has withdrawn since is withdrawn.

    Args:
        goes_on: whether more is about to be spent.

    Raises:
        UsageError: when the run goes on, and a site has a smaller δ now than the run would spend at.
    """
    seen = study.as_of(run.path)
    for kept in sorted(run.path.glob(f"sites/*/{SITE_FILE}")):
        name = kept.parent.name
        began, changed = seen.site_of_run(name), seen.changed_promises(name)
        if changed and launched_ranks() is None:
            words = "; ".join(changed)
            say(f"  sites/{name}.toml has changed since the run began: {words}; the stricter holds", "yellow")
        now = study.site(name).delta if changed else None
        if (
            goes_on
            and began is not None
            and now is not None
            and began.delta is not None
            and now < began.delta
        ):
            raise UsageError(
                f"sites/{name}.toml: delta = {now:g} is smaller than the {began.delta:g} of this run; start a new run"
            )
    return seen


def remembered_bags(folder: SiteFolder) -> BagMeta:
    """Return what the patches or bags were like that a site's models learned from."""
    facts = folder.store_facts()
    types = {kind: tuple(classes) for kind, classes in facts.get("tumor_types", {}).items()}
    classes, spec = tuple(facts["classes"]), GridSpec(**facts["spec"])
    recipe = facts.get("recipe", {"min_tissue": facts.get("min_tissue")})
    return BagMeta(folder.path.name, classes, facts.get("encoder", ""), spec, "", types, recipe)
