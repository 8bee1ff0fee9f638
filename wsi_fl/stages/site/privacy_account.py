"""The privacy account of a site: terms, ledger, cost of a round, affordable rounds.

All access to a site's ledger is through here: a real hospital's must have all past spending.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from typing_extensions import TypedDict

from wsi_fl.data.cohort import read_names
from wsi_fl.data.privacy_units import PrivacyUnits, patient_units, row_units
from wsi_fl.federation.documents import Amount, Count
from wsi_fl.federation.methods import Method, Weights
from wsi_fl.privacy.accounting import MAX_GROUP_EPSILON, Mechanism, epsilon, find_sigma, group_epsilon
from wsi_fl.privacy.guarantee import MAX_PROTECTIVE_EPSILON, PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.privacy.privacy_plan import PrivacyPlan, explain_large_delta, list_differences, plan_of_round
from wsi_fl.privacy.privacy_plan import propose_plan as best_plan
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.site.example_kind import counts_patients
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_ledger import open_ledger, require_release
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.federation.site_state import Site


def loss_weights(pipeline: Pipeline) -> Weights:
    """Return α and β; in strict mode β is 0: the proxy is trained on cross-entropy alone."""
    beta = 0.0 if pipeline.privacy.enabled and pipeline.privacy.mode == "strict" else pipeline.train.beta
    return Weights(pipeline.train.alpha, beta)


def find_guarantee(method: Method, pipeline: Pipeline) -> Guarantee:
    """Return the guarantee level of ε; see `Guarantee`."""
    if not costs_epsilon(pipeline):
        return "none"
    if method.payload.has_secure_sum and pipeline.privacy.noise == "shared":
        return "shared"
    return "nominal" if method.has_bare_teacher and loss_weights(pipeline).beta > 0 else "guaranteed"


def build_terms(site: SiteFile, pipeline: Pipeline, guarantee: Guarantee) -> PrivacyTerms:
    """Return the terms of a site for releases of this guarantee level."""
    return PrivacyTerms(
        delta=site.delta or pipeline.privacy.delta,
        max_epsilon=site.max_epsilon,
        lifetime=site.real,
        allow=site.permissions,
        guarantee=guarantee,
        unit=pipeline.privacy.unit,
        insecure=pipeline.privacy.insecure_seed is not None,
    )


def costs_epsilon(pipeline: Pipeline) -> bool:
    """Return whether training costs ε: with secret noise."""
    return pipeline.privacy.has_noise and pipeline.privacy.insecure_seed is None


def require_budget(site: SiteFile) -> None:
    """Refuse to spend for a real hospital without max_epsilon and delta, or with a budget above any meaningful ε."""
    missing = [key for key in ("max_epsilon", "delta") if getattr(site, key) is None]
    if site.real and missing:
        raise UsageError(
            f"sites/{site.name}.toml: a real hospital spends only what its own file allows; write "
            f"{' and '.join(missing)} there, for example max_epsilon = 3.0 and delta = 1e-5"
        )
    if (site.max_epsilon or 0) > MAX_PROTECTIVE_EPSILON and not site.allows("model"):
        raise UsageError(
            f"sites/{site.name}.toml: max_epsilon = {site.max_epsilon:g}, but no model leaves as private at an ε above "
            f"{MAX_PROTECTIVE_EPSILON:g}; write max_epsilon = {MAX_PROTECTIVE_EPSILON:g} or less there"
        )


def find_batch_size(site: SiteFile, pipeline: Pipeline) -> int:
    """Return the number of privacy units in a batch of a site: that of its file, or else of the pipeline."""
    return site.batch_size or pipeline.train.batch_size


def describe_batch_size(site: SiteFile, pipeline: Pipeline) -> str:
    """Return the batch size of a site with its key, for messages."""
    return f"{'' if site.batch_size else 'train.'}batch_size = {find_batch_size(site, pipeline)}"


def plan_round(
    site: SiteFile,
    pipeline: Pipeline,
    n: int,
    *,
    spent: Sequence[Mechanism] = (),
    past: Sequence[Mechanism] = (),
    is_single_release: bool = False,
) -> PrivacyPlan | None:
    """Return the privacy plan of a round of a site with n privacy units; None without differential privacy.

    With `privacy.target_epsilon` each site chooses batch size and noise: the best plan whose rounds together, added to
    `spent`, reach the target and no more. A smaller `max_epsilon` binds too, at a real site with its whole `past`.

    Args:
        spent: earlier mechanisms on the same units that count for this run.
        past: all mechanisms on the site's account.
        is_single_release: whether all units are released at once, not trained on in batches.

    Raises:
        UsageError: when no noise suffices, or δ is too large for n.
    """
    train, privacy, batch_size = pipeline.train, pipeline.privacy, find_batch_size(site, pipeline)
    if not privacy.enabled:
        return None
    round_of, delta = _round_factory(site, pipeline, n), site.delta or privacy.delta
    if site.real and costs_epsilon(pipeline) and (problem := explain_large_delta(delta, n, privacy.unit)):
        raise UsageError(f"site {site.name}: {problem}")
    try:
        if privacy.target_epsilon is None:
            if site.real and not is_single_release and privacy.has_noise and batch_size > n:
                raise UsageError(
                    f"{describe_batch_size(site, pipeline)} exceeds this site's {n} training {privacy.unit}s "
                    f"(noisy gradient sums are divided by it); use {n} or less"
                )
            return round_of(batch_size=n if is_single_release else batch_size, sigma=privacy.sigma)
        budget = site.max_epsilon or privacy.target_epsilon
        ever = [(site.max_epsilon, past)] if site.real and site.max_epsilon is not None else []
        limits = [(min(privacy.target_epsilon, budget), spent), *ever]
        epochs = 0 if is_single_release else train.rounds * train.epochs_per_round
        batch_size, sigma = _meet_limits(limits, n, epochs, delta, privacy.clip)
        return round_of(batch_size=batch_size, sigma=sigma)
    except UsageError as error:
        raised = "; raise privacy.target_epsilon or its max_epsilon, or leave it out"
        hint = raised if privacy.target_epsilon else ""
        raise UsageError(f"site {site.name}: {error}{hint}") from None


def _round_factory(site: SiteFile, pipeline: Pipeline, n: int) -> partial[PrivacyPlan]:
    """Return a factory of the plan of a round, given batch size and noise multiplier."""
    privacy = pipeline.privacy
    return partial(
        plan_of_round,
        n=n,
        epochs=pipeline.train.epochs_per_round,
        clip=privacy.clip,
        delta=site.delta or privacy.delta,
        unit=privacy.unit,
        mode="paper" if loss_weights(pipeline).beta else "strict",
    )


def _meet_limits(
    limits: Sequence[tuple[float, Sequence[Mechanism]]], n: int, epochs: int, delta: float, clip: float
) -> tuple[int, float]:
    """Return batch size and noise within all limits (ε, earlier mechanisms); `epochs` 0 is a single release."""
    rate, steps, batch_size = 1.0, 1, n
    if epochs:
        plans = [best_plan(n, epochs, limit, delta, clip=clip, spent=earlier) for limit, earlier in limits]
        plan = min(plans, key=lambda plan: epsilon([plan.mechanism], delta))
        rate, steps, batch_size = plan.mechanism.sample_rate, plan.mechanism.steps, plan.batch_size
    return batch_size, max(find_sigma(limit, rate, steps, delta, spent=earlier) for limit, earlier in limits)


@dataclass(frozen=True)
class _Account:
    """A site's account: ledger, units with canaries, plan of a round, None without privacy and of earlier releases."""

    ledger: PrivacyLedger
    units: PrivacyUnits
    plan: PrivacyPlan | None


def open_account(
    context: RunContext,
    index: int,
    units: PrivacyUnits,
    canaries: NDArray[np.bool_] | None = None,
    *,
    planned_run: str = "",
) -> _Account:
    """Open the account of a site in the context's run, or in a planned run.

    Args:
        units: privacy units, without canaries.
        canaries: bool[m], which canaries are included; None for none.
        planned_run: ledger name of a run that has not begun; "" for the context's run.

    Raises:
        UsageError: without a budget, with a ledger that lacks past spending, or for another plan than the run's.
        WsiFlError: when the ledger is damaged, or lacks a release of the site.
    """
    site, pipeline, study, run = context.sites[index], context.pipeline, context.study, context.run
    name = site.name
    # each synthetic patch rests on all real ones, so that its protection protects no patient
    is_bare = site.is_receiver or context.open_data(name).is_synthetic()
    guarantee = "none" if is_bare else find_guarantee(context.method, pipeline)
    terms = build_terms(site, pipeline, guarantee)
    if costs_epsilon(pipeline) and not site.is_receiver:
        require_budget(site)
    if canaries is not None:
        units = units.add_canaries(canaries)
    released = context.statistics.get(name)
    includes = (released.ledger_run,) if released and pipeline.privacy.enabled else ()
    named = {"promise": study.snapshot_digest(name), "agreement": run.agreement_digest, "approved": run.approval_time}
    run_name = planned_run or run.identity
    ledger = open_ledger(study, site, run_name, terms, includes, {} if planned_run else named)
    if released:
        require_release(ledger, released.ledger_run, released.digest, study.relative_path(study.release_path(name)))
    if context.uses_files or site.is_receiver:
        return _Account(ledger, units, None)
    folder = None if planned_run else run.site_folder(name)
    plan = _load_plan(
        folder, site, pipeline, units.n, ledger, is_single_release=context.method.payload.is_single_release
    )
    return _Account(ledger, units, plan)


def build_units(pipeline: Pipeline, patient: pd.Series, site: str) -> PrivacyUnits:
    """Return the privacy units of rows of these patients; without differential privacy each row is one."""
    if not counts_patients(pipeline):
        return row_units(len(patient))
    return patient_units(read_names(patient), pipeline.privacy.max_rows, site)


def _load_plan(
    folder: SiteFolder | None,
    site: SiteFile,
    pipeline: Pipeline,
    n: int,
    ledger: PrivacyLedger,
    *,
    is_single_release: bool = False,
) -> PrivacyPlan | None:
    """Return the plan stored in the run or ledger, or a new one; UsageError where it would be another one now."""
    privacy, recorded = pipeline.privacy, ledger.last_plan()
    if not privacy.enabled:
        return None
    round_of, run_plan = _round_factory(site, pipeline, n), None
    try:
        if stored := folder.read_document("plan") if folder else None:
            run_plan = PrivacyPlan(**stored)
        elif recorded and "batch_size" in recorded:
            run_plan = round_of(batch_size=recorded["batch_size"], sigma=recorded["sigma"])
    except (UsageError, TypeError, KeyError, ValueError) as error:
        raise WsiFlError(f"{folder and folder.path}: the privacy plan of this run is damaged ({error})") from None
    if run_plan is None:
        past = ledger.list_mechanisms(lifetime=True)
        return plan_round(
            site, pipeline, n, spent=ledger.list_mechanisms(), past=past, is_single_release=is_single_release
        )
    if privacy.target_epsilon is not None:  # chosen by the site
        current_plan = round_of(batch_size=run_plan.batch_size, sigma=run_plan.sigma)
    else:
        batch_size = n if is_single_release else find_batch_size(site, pipeline)
        current_plan = round_of(batch_size=batch_size, sigma=privacy.sigma)
    ledger_plan = replace(run_plan, **recorded) if recorded else run_plan
    if changed := list_differences(ledger_plan, run_plan) or list_differences(run_plan, current_plan):
        raise UsageError(
            f"site {site.name}: the privacy plan of this run was changed since it began ({', '.join(changed)}); "
            "put its settings back, or start a new run"
        )
    return run_plan


def list_mechanisms(site: Site | _Account, rounds: int) -> list[Mechanism]:
    """Return the mechanisms that count for a run: earlier ones and all its rounds."""
    remaining = [replace(site.plan, steps=site.plan.steps * rounds)] if site.plan else []
    return [*site.ledger.list_mechanisms(), *remaining]


def count_affordable(site: Site | _Account, rounds: int) -> int:
    """Return how many of `rounds` rounds the site's budget allows, those already charged included."""
    limit = site.ledger.terms.max_epsilon
    done = site.ledger.count_rounds()
    if limit is None or site.plan is None:
        return rounds
    past = site.ledger.list_mechanisms(lifetime=site.ledger.terms.lifetime)
    plan, delta = site.plan, site.ledger.terms.delta

    def exceeds_limit(more: int) -> bool:
        return epsilon([*past, replace(plan, steps=plan.steps * more)], delta) > limit

    # ε grows with rounds, so that bisection finds the first round beyond the limit
    return done + bisect_left(range(1, max(0, rounds - done) + 1), True, key=exceeds_limit)


class Group(TypedDict):
    """ε of a patient with this many rows (group privacy); None for an ε too large to mean anything."""

    rows: Count
    epsilon: Amount | None
    delta: Amount


def compute_group(site: Site, spent: Sequence[Mechanism] | None = None) -> Group | None:
    """Return ε of the patient with the most training rows; None where the unit is the patient, or nothing was spent.

    That number of rows depends on a single patient, so it stays at a real site. `spent` is by default the run so far.
    """
    ledger = site.ledger
    if spent is None and ledger.epsilon() is None:
        return None
    return compute_patient_epsilon(
        ledger.terms, site.train.obs["patient"], ledger.list_mechanisms() if spent is None else spent
    )


def compute_patient_epsilon(terms: PrivacyTerms, patient: pd.Series, spent: Sequence[Mechanism]) -> Group | None:
    """Return ε of `spent` for the patient with the most rows; None where ε is per patient."""
    names = patient[patient != ""]
    if terms.unit != "row" or not spent or not len(names):
        return None
    k = int(names.value_counts().max())
    return {"rows": k, "epsilon": group_epsilon(spent, terms.delta, k), "delta": terms.delta}


def is_above_budget(group: Group | None, max_epsilon: float | None) -> bool:
    """Return whether ε of the patient with the most rows exceeds a budget."""
    if group is None or max_epsilon is None:
        return False
    return group["epsilon"] is None or group["epsilon"] > max_epsilon


def describe_group(group: Group) -> str:
    """Describe ε of the patient with the most rows."""
    value = f"more than {MAX_GROUP_EPSILON:g}" if group["epsilon"] is None else f"{group['epsilon']:.1f}"
    return f"all {group['rows']} rows of the patient with the most rows together have ε = {value}"


_GUARANTEE_TEXTS = {"shared": "guaranteed to all who see the sum, and against colluding sites as agreed"}


def describe_spending(row: Mapping[str, Any]) -> str:
    """Describe ε, its guarantee and its parameters, from a site's row in a summary or a plan."""
    if row["epsilon"] is None:
        return "no differential privacy"
    guarantee = _GUARANTEE_TEXTS.get(row["guarantee"], row["guarantee"])
    spent = f"ε = {row['epsilon']:.2f} ({guarantee}) at δ = {row['delta']:g}, per {row['unit']}"
    if row.get("real") and row["lifetime_epsilon"] is not None:
        guarantee = row["lifetime_guarantee"]
        spent += f"; ever spent {row['lifetime_epsilon']:.2f} of {row['max_epsilon'] or 0:g} ({guarantee})"
    if row["sigma"] is None:  # only released statistics were charged
        return spent
    return f"{spent}; B = {row['batch_size']}{' patients' if row['unit'] == 'patient' else ''}, σ = {row['sigma']:g}"
