"""`statistics`: class statistics of a site, computed, noised and released once, without a network.

`statistics/<site>.safetensors` may leave the site, and people may copy it. The order: a ledger line, a copy of the
release beside the store, a second line that it is final, then the file. After a crash before the copy nothing has left,
and the next release replaces the lost one; after the copy the same numbers are written again. So no crash makes a site
release two noisy versions. Nor do two studies on one ledger: a release that another study's replaced does not leave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.data.privacy_units import PrivacyUnits
from wsi_fl.data.tasks import target_columns
from wsi_fl.models import schema_digest
from wsi_fl.oneshot.class_statistics import NoisyStatistics
from wsi_fl.oneshot.payload import require_head
from wsi_fl.oneshot.released_statistics import (
    STATISTICS_RUN,
    ReleasedStatistics,
    StatisticsHeader,
    build_header,
    read_statistics,
    refuse_mismatch,
    refuse_other_features,
    write_statistics,
)
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.guarantee import collect_rounds
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Release, digest_values
from wsi_fl.privacy.privacy_plan import PrivacyPlan, require_plan
from wsi_fl.stages.prepare.slide_lists import Scope, select_sites
from wsi_fl.stages.runtime.console import Lines, TextLine, print_message
from wsi_fl.stages.runtime.hints import next_command
from wsi_fl.stages.runtime.rank_job import RankJob, select_device
from wsi_fl.stages.site import privacy_account, site_ledger
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.build_sites import load_training
from wsi_fl.stages.training.initial_models import build_model
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.join_work import site_lock
from wsi_fl.system.shared_work import SharedWork
from wsi_fl.types import UsageError, WsiFlError


def release_statistics(study: Study, *, repeat: bool = False, **selection: Unpack[Scope]) -> dict[str, Any]:
    """Release the class statistics of a site, or of all sites of the pipeline; return the `--json` document.

    A site with a release keeps it; only `repeat` spends as much once more. Under mpiexec or srun the ranks divide the
    sites, and all but the first return {}.
    """
    job, study = RankJob(), study.freeze_sites()

    def prepare_sites() -> tuple[Pipeline, list[SiteFile]]:
        pipeline, selected = select_sites(study, **selection)
        if not (sites := [site for site in selected if not site.is_receiver]):
            raise UsageError(f"sites/{selected[0].name}.toml: role = 'receiver', which releases no statistics")
        for site in job.local_share(sites):
            with _build_context(study, pipeline, site) as context:
                context.open_data(site.name)
        return pipeline, sites

    pipeline, sites = job.run_on_ranks(prepare_sites)
    rows = job.share_items(
        sites, lambda job_sites: (_release_site(_build_context(study, pipeline, site), repeat) for site in job_sites)
    )
    if not job.is_first:
        return {}
    options = selection.get("pipeline_name"), selection.get("overrides", ())
    train_command = next_command("train --method oneshot", *options, ["train.from_released=true"])
    return {"sites": rows, "next": ["wsi-fl survival" if pipeline.model.projection == 0 else train_command]}


def _build_context(study: Study, pipeline: Pipeline, site: SiteFile) -> RunContext:
    """Return the context of a single site for `oneshot`, with fresh noise."""
    site_pipeline = pipeline.replace_keys(
        train={"from_released": False, "folds": None, "fold": None}, privacy={"insecure_seed": None, "noise": "own"}
    )
    return RunContext.create(study, site_pipeline.model_copy(update={"sites": [site.name]}), STATISTICS_RUN)


def _release_site(context: RunContext, repeat: bool) -> dict[str, Any]:
    """Release a site's class statistics, unless a valid release exists; return its part of the document."""
    study, (site,) = context.study, context.sites
    home, file = study.local_release_path(site.name), study.release_path(site.name)
    privacy_account.require_budget(site)
    with site_lock(home.parent, site.name) as work, context:
        data, ledger = context.open_data(site.name), _open_ledger(context)
        known_copy = None if repeat else _find_copy(study, ledger, home, file)
        if known_copy is None:
            new_release, statistics = _compute_release(context, ledger, work)
            work.require_presence()
            write_statistics(home, statistics)
            ledger.record_transmission(new_release.round, new_release.digest)
        else:
            label, statistics = known_copy
            round_ = site_ledger.require_release(ledger, STATISTICS_RUN, digest_values(statistics.vector), label)
            refuse_mismatch(statistics.header, build_header(data), f"site {site.name} has released")
            refuse_other_features(data, [statistics.header])
            work.require_presence()
            if not round_.final:
                ledger.release_again(round_.number, statistics.vector, schema="sums")
        work.require_presence()
        write_statistics(file, statistics)
        write_statistics(home, statistics)
    cost = {
        "epsilon": ledger.epsilon(),
        "lifetime_epsilon": ledger.epsilon(lifetime=True),
        "max_epsilon": site.max_epsilon,
        "spent": known_copy is None,
        "file": study.relative_path(file),
    }
    return statistics.header.model_dump() | cost


def _find_copy(study: Study, ledger: PrivacyLedger, *files: Path) -> tuple[str, ReleasedStatistics] | None:
    """Return (label, statistics) of the first valid copy in the ledger, or None where nothing has left yet.

    A valid copy that is not in the ledger is returned where there is no other, to be refused. WsiFlError where all are
    damaged, or the ledger has a release without a copy here: another one would be charged a second time.
    """
    copies, errors = [], []
    for file in (path for path in files if path.exists()):
        label = study.relative_path(file)
        try:
            copies.append((label, read_statistics(file, label)))
        except WsiFlError as error:
            errors.append(error)
    rounds = ledger.list_rounds()
    released = {sent for ledger_round in rounds for sent in ledger_round.releases.values()}
    by_ledger = [copy for copy in copies if digest_values(copy[1].vector) in released]
    if errors and not copies:
        raise errors[0]
    if not copies and any(ledger_round.final and ledger_round.releases for ledger_round in rounds):
        raise WsiFlError(
            f"site {ledger.site}: its ledger has a release of statistics, and no copy is here; put "
            f"{study.relative_path(files[-1])} back (from a backup, or from a site that has it), or spend as much once "
            f"more with `wsi-fl statistics --site {ledger.site} --again`"
        )
    return next(iter([*by_ledger, *copies]), None)


def preview_statistics(study: Study, pipeline: Pipeline, site: SiteFile) -> ReleasedStatistics:
    """Return a site's exact statistics, with the noise variance and the ε that their release would have.

    Nothing is written or charged. The result must not leave the site. What may not be released is refused here too.
    """
    privacy_account.require_budget(site)
    with _build_context(study.freeze_sites(), pipeline, site) as context:
        ledger = _open_ledger(context)
        head, plan, n = _compute_statistics(context, ledger)
        ledger.check_release(plan, "model")
        variance = np.full(head.shape[0], plan.sigma**2 if plan else 0.0)
        vector = np.append(head.noiseless_statistics.cpu().numpy(), variance).astype(np.float32)
        header = _build_full_header(context, ledger, plan, n, digest_values(vector))
    is_private = header.guarantee != "none"
    cost = epsilon([*ledger.list_mechanisms(), plan], header.delta) if plan and is_private else None
    return ReleasedStatistics(header.model_copy(update={"epsilon": cost}), vector)


def _open_ledger(context: RunContext) -> PrivacyLedger:
    (site,) = context.sites
    is_synthetic = context.open_data(site.name).is_synthetic()
    guarantee = "none" if is_synthetic else privacy_account.find_guarantee(context.method, context.pipeline)
    terms = privacy_account.build_terms(site, context.pipeline, guarantee)
    return site_ledger.open_ledger(context.study, site, STATISTICS_RUN, terms)


def _compute_release(
    context: RunContext, ledger: PrivacyLedger, work: SharedWork
) -> tuple[Release, ReleasedStatistics]:
    """Return a new release, recorded in the ledger, where it replaces one that never left."""
    head, plan, n = _compute_statistics(context, ledger)
    vector = head.sums.detach().cpu().numpy()
    work.require_presence()
    new_release = ledger.release(None, vector, schema=schema_digest(head), mechanism=plan, content="model")
    return new_release, ReleasedStatistics(_build_full_header(context, ledger, plan, n, new_release.digest), vector)


def _compute_statistics(context: RunContext, ledger: PrivacyLedger) -> tuple[SharedHead, PrivacyPlan | None, int]:
    """Return the head with the statistics of a new release, exact and noisy, its plan and the number of units."""
    (site,) = context.sites
    data = context.open_data(site.name)
    data.require_current()
    if data.remark:
        print_message(f"  {data.remark}", "yellow")
    train, _, units = load_training(context, site.name)
    if not len(train):
        raise WsiFlError(f"site {site.name}: its store has no training {context.kind.plural}")
    local_run = (ledger.site, STATISTICS_RUN)  # a release that never left is replaced
    counted_rounds = [
        ledger_round
        for ledger_round in collect_rounds(ledger.entries)
        if ledger_round.final or (ledger_round.site, ledger_round.run) != local_run
    ]
    past = [ledger_round.mechanism for ledger_round in counted_rounds if ledger_round.mechanism]
    plan = privacy_account.plan_round(site, context.pipeline, units.n, past=past, is_single_release=True)
    head = _sum_examples(context, train, units, plan, ledger.terms.delta)
    return head, plan, units.n


def _build_full_header(
    context: RunContext, ledger: PrivacyLedger, plan: PrivacyPlan | None, n: int, digest: str
) -> StatisticsHeader:
    (site,) = context.sites
    return StatisticsHeader(
        site=site.name,
        n=n,
        sigma=plan.sigma if plan else 0.0,
        epsilon=ledger.epsilon(),
        delta=ledger.terms.delta,
        guarantee=ledger.guarantee(),
        digest=digest,
        **build_header(context.open_data(site.name)),
    )


def _sum_examples(
    context: RunContext, train: Cohort, units: PrivacyUnits, plan: PrivacyPlan | None, delta: float
) -> SharedHead:
    """Return the head with the sums of all units, with the noise of the plan."""
    device, mechanism = select_device(), NoisyStatistics(0.0, 1.0, units.n)
    head, stream = require_head(build_model(context, 0, "shared")).to(device), CipherStream.from_entropy()
    if plan is not None:
        mechanism = NoisyStatistics.from_plan(plan)
        require_plan(plan, mechanism, n=units.n, steps=1, delta=delta, mode="strict")
    rows = [units.draw_rows(np.arange(units.n), stream)]
    image_batches = load_batches(train, iter(rows), augment=None, device=device)
    for x, y, *patients in units.attach_units(image_batches, rows, device):
        mechanism.fill(head, x, target_columns(train.task, y), stream, *patients)
    return head


def release_lines(document: dict[str, Any]) -> Lines:
    """Yield a line per site."""
    for row in document["sites"]:
        cost = "released" if row["spent"] else "released before, nothing spent"
        guarantee = "no differential privacy"
        if row["epsilon"] is not None:
            guarantee = f"ε = {row['epsilon']:.2f} ({row['guarantee']}) at δ = {row['delta']:g}"
        if row["max_epsilon"] is not None and row["lifetime_epsilon"] is not None:
            guarantee += f"; ever spent {row['lifetime_epsilon']:.2f} of {row['max_epsilon']:g}"
        file = f"{row['file']}, digest {row['digest'][:8]}"  # as `train` shows it
        yield TextLine(f"  {row['site']}: statistics of {row['n']} {row['unit']}s; {cost}: {guarantee} ({file})")
    yield TextLine(f"the files may be copied to the other sites' statistics/; next: {document['next'][0]}")
