"""The reader of plans for `train --dry-run --plan FILE`: what a plan proposes to a hospital, before it signs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from wsi_fl.hospitals.plans.review import describe_cost, review_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.stages.training.plan_dry_run import PlannedRun
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError


def read_planned_run(study: Study, file: Path, site: str | None) -> PlannedRun:
    """Return what a plan proposes to a site, by default to the plan's only site with a store here.

    Raises:
        UsageError: when the plan could not be signed here, the store is elsewhere, or the site trains nothing.
    """
    plan = FederationPlan.load(file)
    if site is None:
        local_sites = [name for name in plan.sites if study.store_path(name).parent.is_dir()]
        if len(local_sites) != 1:
            raise UsageError(f"{file}: which site is yours? give --site, one of {', '.join(plan.sites)}")
        site = local_sites[0]
    review = review_plan(study, plan, site)
    cost, roles = review.cost, {row["name"]: row["role"] for row in review.document["sites"]}
    if roles[site] == "receiver":
        raise UsageError(f"{site} receives, and sends nothing that could be tried")
    if cost is None:
        raise UsageError(f"the store of {site} is not on this machine; try the plan where it is")
    if cost.letter is not None:
        raise UsageError(f"{site} sends the class statistics that it released, so there is nothing to try")
    settings = str(plan.document["settings"])
    return PlannedRun(site, plan.digest, plan.method, settings, roles, asdict(cost), describe_cost(cost))
