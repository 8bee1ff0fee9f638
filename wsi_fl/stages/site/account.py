"""The privacy account of a site: its terms, what a round costs, and how many rounds it can afford."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Count
from wsi_fl.federation.methods import Method, Weights
from wsi_fl.privacy.accounting import MOST_EPSILON, Mechanism, epsilon, group_epsilon, sigma_for
from wsi_fl.privacy.guarantee import Terms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.privacy.plan import PrivacyPlan, differences, plan_of_round
from wsi_fl.privacy.plan import planned as best_plan
from wsi_fl.runs.site import SiteFolder
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.federation.site import Site


def weights_of(pipeline: Pipeline) -> Weights:
    """α and β; strict mode trains the proxy on cross-entropy alone."""
    beta = 0.0 if pipeline.privacy.enabled and pipeline.privacy.mode == "strict" else pipeline.train.beta
    return Weights(pipeline.train.alpha, beta)


def guarantee_of(method: Method, pipeline: Pipeline) -> Guarantee:
    """What ε is worth: see `Guarantee`."""
    if not spends(pipeline):
        return "none"
    if method.once and pipeline.privacy.noise == "shared":
        return "shared"
    return "nominal" if method.taught and weights_of(pipeline).beta > 0 else "guaranteed"


def terms_of(site: SiteFile, pipeline: Pipeline, guarantee: Guarantee) -> Terms:
    """Under which a site takes part in something whose ε is worth `guarantee`."""
    return Terms(
        delta=site.delta or pipeline.privacy.delta,
        max_epsilon=site.max_epsilon,
        lifetime=site.real,
        allow=site.allowed,
        guarantee=guarantee,
        unit=pipeline.privacy.unit,
        insecure=pipeline.privacy.insecure_seed is not None,
    )


def spends(pipeline: Pipeline) -> bool:
    """Whether training costs ε: there is noise, and nobody else knows it."""
    return pipeline.privacy.noisy and pipeline.privacy.insecure_seed is None


def require_budget(site: SiteFile) -> None:
    """Refuse to spend anything of a real hospital that has not said how much, and at which δ.

    Raises:
        UsageError: when its file names no max_epsilon or no delta.
    """
    missing = [key for key in ("max_epsilon", "delta") if getattr(site, key) is None]
    if site.real and missing:
        raise UsageError(
            f"sites/{site.name}.toml: a real hospital spends only what its own file allows; write "
            f"{' and '.join(missing)} there, for example max_epsilon = 3.0 and delta = 1e-5"
        )


def planned_round(
    site: SiteFile,
    pipeline: Pipeline,
    n: int,
    *,
    spent: Sequence[Mechanism] = (),
    past: Sequence[Mechanism] = (),
    once: bool = False,
) -> PrivacyPlan | None:
    """Return what one round of a site with n units (training rows, or patients) applies; None without privacy.

    With `privacy.target_epsilon` batch size and noise are the site's own: the best plan whose rounds together, on top
    of `spent`, reach the target and no more. `max_epsilon` binds too where it is less, for a real site on top of its
    whole `past`.

    Args:
        spent: what was applied to the same units before and counts for this run.
        past: everything on the site's account.
        once: whether all units are released at once, and not trained on in batches.

    Raises:
        UsageError: when no noise is enough, or δ is too large for n.
    """
    train, privacy = pipeline.train, pipeline.privacy
    if not privacy.enabled:
        return None
    round_of = _rounds(site, pipeline, n)
    try:
        if privacy.target_epsilon is None:
            if site.real and not once and privacy.noisy and train.batch_size > n:
                raise UsageError(
                    f"train.batch_size = {train.batch_size} exceeds this site's {n} training {privacy.unit}s "
                    f"(noisy gradient sums are divided by it); use {n} or less"
                )
            plan = round_of(batch_size=n if once else train.batch_size, sigma=privacy.sigma)
            if site.real and spends(pipeline):
                plan.refuse_large_delta()
            return plan
        budget = site.max_epsilon or privacy.target_epsilon
        ever = [(site.max_epsilon, past)] if site.real and site.max_epsilon is not None else []
        limits = [(min(privacy.target_epsilon, budget), spent), *ever]
        epochs = 0 if once else train.rounds * train.epochs_per_round
        batch_size, sigma = _within(limits, n, epochs, site.delta or privacy.delta, privacy.clip)
        return round_of(batch_size=batch_size, sigma=sigma)
    except UsageError as error:
        raised = "; raise privacy.target_epsilon or its max_epsilon, or leave it out"
        hint = raised if privacy.target_epsilon else ""
        raise UsageError(f"site {site.name}: {error}{hint}") from None


def _rounds(site: SiteFile, pipeline: Pipeline, n: int) -> partial[PrivacyPlan]:
    """Return what makes the plan of a round of a given batch size and noise multiplier."""
    privacy = pipeline.privacy
    return partial(
        plan_of_round,
        n=n,
        epochs=pipeline.train.epochs_per_round,
        clip=privacy.clip,
        delta=site.delta or privacy.delta,
        unit=privacy.unit,
        mode="paper" if weights_of(pipeline).beta else "strict",
    )


def _within(
    limits: Sequence[tuple[float, Sequence[Mechanism]]], n: int, epochs: int, delta: float, clip: float
) -> tuple[int, float]:
    """Return batch size and noise of the tightest of the limits (ε, what counts towards it), which keep them all.

    Args:
        epochs: of all rounds together; 0 where all units are released at once.
    """
    rate, steps, batch_size = 1.0, 1, n
    if epochs:
        ways = [best_plan(n, epochs, limit, delta, clip=clip, spent=before) for limit, before in limits]
        way = min(ways, key=lambda way: epsilon([way.mechanism], delta))
        rate, steps, batch_size = way.mechanism.sample_rate, way.mechanism.steps, way.batch_size
    return batch_size, max(sigma_for(limit, rate, steps, delta, spent=before) for limit, before in limits)


def agreed_plan(
    folder: SiteFolder | None,
    site: SiteFile,
    pipeline: Pipeline,
    n: int,
    ledger: PrivacyLedger,
    *,
    once: bool = False,
) -> PrivacyPlan | None:
    """Return the plan that the run keeps, or one for what is on the site's account as it begins.

    Args:
        folder: of the site in the run; None for a run that is only planned. Where its plan was lost, the ledger knows.

    Raises:
        UsageError: when settings, canaries or the store would now make another plan than the run keeps, or the
            ledger knows the run with another one.
    """
    train, privacy, recorded = pipeline.train, pipeline.privacy, ledger.recorded_plan()
    if not privacy.enabled:
        return None
    round_of, known = _rounds(site, pipeline, n), None
    try:
        if kept := folder.kept("plan") if folder else None:
            known = PrivacyPlan(**kept)
        elif recorded and "batch_size" in recorded:
            known = round_of(batch_size=recorded["batch_size"], sigma=recorded["sigma"])
    except (UsageError, TypeError, KeyError, ValueError) as error:
        raise WsiFlError(
            f"{folder and folder.path}: the privacy plan of this run is damaged ({error})"
        ) from None
    if known is None:
        past = ledger.mechanisms(lifetime=True)
        return planned_round(site, pipeline, n, spent=ledger.mechanisms(), past=past, once=once)
    if privacy.target_epsilon is not None:  # then the site chose its batch size and noise itself
        now = round_of(batch_size=known.batch_size, sigma=known.sigma)
    else:
        now = round_of(batch_size=n if once else train.batch_size, sigma=privacy.sigma)
    told = replace(known, **recorded) if recorded else known
    if changed := differences(told, known) or differences(known, now):
        raise UsageError(
            f"site {site.name}: the privacy plan of this run was changed since it began ({', '.join(changed)}); "
            "put its settings back, or start a new run"
        )
    return known


def remember_plan(site: Site) -> None:
    """Keep in the run what `agreed_plan` found: the account changes while the run goes on, the plan does not."""
    if site.plan is not None and site.folder.kept("plan") is None:
        site.folder.keep("plan", asdict(site.plan))


class Spender(Protocol):
    """What costs are computed of: an account, and what one round applies; None without privacy."""

    @property
    def ledger(self) -> PrivacyLedger: ...

    @property
    def plan(self) -> PrivacyPlan | None: ...


def planned(site: Spender, rounds: int) -> list[Mechanism]:
    """What all rounds cost a site together, and before them what counts for the run; nothing without privacy."""
    rest = [replace(site.plan, steps=site.plan.steps * rounds)] if site.plan else []
    return [*site.ledger.mechanisms(), *rest]


def affordable_rounds(site: Spender, rounds: int) -> int:
    """How many of `rounds` rounds the site's budget allows, those of this run that are on its account included."""
    limit = site.ledger.terms.max_epsilon
    done = site.ledger.n_rounds()
    if limit is None or site.plan is None:
        return rounds
    past = site.ledger.mechanisms(lifetime=site.ledger.terms.lifetime)
    more = 0
    while done + more < rounds:
        if epsilon([*past, *[site.plan] * (more + 1)], site.ledger.terms.delta) > limit:
            break
        more += 1
    return done + more


class Group(TypedDict):
    """What ε per row is worth to a patient with so many rows; None for ε beyond what says anything."""

    rows: Count
    epsilon: Amount | None
    delta: Amount


def group_of(site: Site, spent: Sequence[Mechanism] | None = None) -> Group | None:
    """Return what ε per row is worth to the patient with the most training rows; None where that is not the question.

    How many rows that patient has depends on one patient alone, so it stays with a real site.

    Args:
        spent: what is applied; by default what the run has applied so far.
    """
    ledger = site.ledger
    if spent is None and ledger.epsilon() is None:
        return None
    return worth_to_patient(ledger.terms, site.train.patient, ledger.mechanisms() if spent is None else spent)


def worth_to_patient(terms: Terms, patient: NDArray[np.str_], spent: Sequence[Mechanism]) -> Group | None:
    """Return what ε per row of `spent` is worth to the patient with the most rows; None where ε is per patient.

    Args:
        patient: whose each training row is, "" where nobody knows; None is returned where no row has a patient.
    """
    names = patient[patient != ""]
    if terms.unit != "row" or not spent or not len(names):
        return None
    k = int(np.unique(names, return_counts=True)[1].max())
    return {"rows": k, "epsilon": group_epsilon(spent, terms.delta, k), "delta": terms.delta}


def above_budget(group: Group | None, max_epsilon: float | None) -> bool:
    """Return whether the patient with the most rows is promised less than a budget of ε allows."""
    if group is None or max_epsilon is None:
        return False
    return group["epsilon"] is None or group["epsilon"] > max_epsilon


def group_words(group: Group) -> str:
    """Say of the patient with the most rows what ε per row is worth."""
    worth = f"more than {MOST_EPSILON:g}" if group["epsilon"] is None else f"{group['epsilon']:.1f}"
    return f"all {group['rows']} rows of the patient with the most rows together have ε = {worth}"


_WORTH = {"shared": "guaranteed to all who see the sum, and against colluding sites as agreed"}


def spent_words(row: dict[str, Any]) -> str:
    """ε, what it is worth, and how it was spent, of a site's row in a summary or a plan."""
    if row["epsilon"] is None:
        return "no differential privacy"
    worth = _WORTH.get(row["guarantee"], row["guarantee"])
    spent = f"ε = {row['epsilon']:.2f} ({worth}) at δ = {row['delta']:g}, per {row['unit']}"
    if row.get("real") and row["lifetime_epsilon"] is not None:
        worth = row["lifetime_guarantee"]
        spent += f"; ever spent {row['lifetime_epsilon']:.2f} of {row['max_epsilon'] or 0:g} ({worth})"
    if row["sigma"] is None:  # released sums alone were paid for
        return spent
    return f"{spent}; B = {row['batch_size']}{' patients' if row['unit'] == 'patient' else ''}, σ = {row['sigma']:g}"
