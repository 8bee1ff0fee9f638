"""The privacy account of a site: its terms, what a round costs, and how many rounds it can afford."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wsi_fl import config
from wsi_fl.config import Pipeline
from wsi_fl.federation.methods import Method, Weights
from wsi_fl.federation.site import Site
from wsi_fl.privacy.accounting import Mechanism, epsilon, plan, sigma_for
from wsi_fl.privacy.groups import group_epsilon
from wsi_fl.privacy.ledger import Guarantee, PrivacyLedger, Terms
from wsi_fl.privacy.planner import planned as best_plan
from wsi_fl.runs import SiteFolder
from wsi_fl.study import Study
from wsi_fl.types import UsageError


def weights_of(pipeline: Pipeline) -> Weights:
    """α and β; strict mode trains the proxy on cross-entropy alone."""
    beta = 0.0 if pipeline.privacy.enabled and pipeline.privacy.mode == "strict" else pipeline.train.beta
    return Weights(pipeline.train.alpha, beta)


def guarantee_of(method: Method, pipeline: Pipeline) -> Guarantee:
    """What ε is worth: see `Guarantee`."""
    if not pipeline.privacy.noisy or pipeline.privacy.insecure_seed is not None:
        return "none"
    return "nominal" if method.learns_from_private and weights_of(pipeline).beta > 0 else "guaranteed"


def terms_of(site: config.Site, pipeline: Pipeline, guarantee: Guarantee) -> Terms:
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


def require_ledger(study: Study, site: config.Site) -> None:
    """Refuses a real site whose account is gone though it has taken part in some run."""
    took_part = any(study.runs.glob(f"*/sites/{site.name}/state/*.safetensors"))
    if site.real and not study.ledger(site.name).exists() and took_part:
        raise UsageError(
            f"ledgers/{site.name}.jsonl is missing, though runs of this site exist; restore it: it is the site's budget"
        )


@dataclass(frozen=True)
class Spending:
    """How a site spends its budget.

    Attributes:
        batch_size: units (rows or patients) of a batch, of a Poisson batch on average; the divisor of its gradient.
        round: what one round costs, or None without differential privacy.
    """

    batch_size: int
    round: Mechanism | None


def spending_of(
    site: config.Site,
    pipeline: Pipeline,
    n: int,
    *,
    spent: Sequence[Mechanism] = (),
    past: Sequence[Mechanism] = (),
) -> Spending:
    """The batch size and noise of a site with n units: training rows, or patients.

    With `privacy.target_epsilon` they are its own: the best plan whose rounds together, on top of `spent`, reach the
    target and no more. `max_epsilon` binds too where it is less, for a real site on top of its whole `past`.

    Args:
        spent: what was applied to the same units before and counts for this run.
        past: everything on the site's account.

    Raises:
        UsageError: when no noise is enough.
    """
    train, privacy = pipeline.train, pipeline.privacy
    if not privacy.enabled:
        return Spending(train.batch_size, None)
    if privacy.target_epsilon is None:
        return Spending(
            train.batch_size, plan(n, train.batch_size, train.epochs_per_round, privacy.sigma, privacy.clip)
        )
    budget = site.max_epsilon or privacy.target_epsilon
    limits = [(min(privacy.target_epsilon, budget), spent)]
    if site.real and site.max_epsilon is not None:
        limits.append((site.max_epsilon, past))
    try:
        return _within(limits, n, pipeline, site.delta or privacy.delta)
    except UsageError as error:
        raise UsageError(
            f"site {site.name}: {error}; raise privacy.target_epsilon or its max_epsilon, or leave it out"
        ) from None


def _within(
    limits: Sequence[tuple[float, Sequence[Mechanism]]], n: int, pipeline: Pipeline, delta: float
) -> Spending:
    """The plan for the tightest of the limits (ε, what counts towards it), with noise that keeps them all."""
    rounds, clip = pipeline.train.rounds, pipeline.privacy.clip
    epochs = rounds * pipeline.train.epochs_per_round
    ways = [best_plan(n, epochs, limit, delta, clip=clip, spent=before) for limit, before in limits]
    way = min(ways, key=lambda way: epsilon([way.mechanism], delta))
    whole = way.mechanism
    sigmas = [
        sigma_for(limit, whole.sample_rate, whole.steps, delta, spent=before) for limit, before in limits
    ]
    return Spending(way.batch_size, replace(whole, sigma=max(sigmas), steps=whole.steps // rounds))


def agreed_spending(
    folder: SiteFolder, site: config.Site, pipeline: Pipeline, n: int, ledger: PrivacyLedger
) -> Spending:
    """What the run remembers, or a plan for what is on the site's account as it begins."""
    known = folder.spending()
    if known is not None:
        return Spending(known["batch_size"], Mechanism(**known["round"]))
    return spending_of(site, pipeline, n, spent=ledger.mechanisms(), past=ledger.mechanisms(lifetime=True))


def remember_spending(site: Site, pipeline: Pipeline) -> None:
    """Notes in the run what `agreed_spending` found for a target ε: the account changes while it goes on."""
    if pipeline.privacy.target_epsilon is None or site.mechanism is None or site.folder.spending():
        return
    site.folder.remember_spending(
        {
            "target_epsilon": pipeline.privacy.target_epsilon,
            "batch_size": site.batch_size,
            "round": asdict(site.mechanism),
        }
    )


def planned(site: Site, rounds: int) -> list[Mechanism]:
    """What all rounds cost a site together, and before them what counts for the run; nothing without privacy."""
    if site.mechanism is None:
        return []
    return [*site.ledger.mechanisms(), replace(site.mechanism, steps=site.mechanism.steps * rounds)]


def affordable_rounds(site: Site, rounds: int) -> int:
    """How many of `rounds` rounds the site's budget allows, those of this run that are on its account included."""
    limit = site.ledger.terms.max_epsilon
    done = site.ledger.n_rounds()
    if limit is None or site.mechanism is None:
        return rounds
    past = site.ledger.mechanisms(lifetime=site.ledger.terms.lifetime)
    more = 0
    while done + more < rounds:
        if epsilon([*past, *[site.mechanism] * (more + 1)], site.ledger.terms.delta) > limit:
            break
        more += 1
    return done + more


def group_of(site: Site) -> dict[str, Any] | None:
    """What ε per row is worth to the patient with the most training rows; None where that is not the question.

    How many rows that patient has depends on one patient alone, so it stays with a real site.
    """
    terms, names = site.ledger.terms, site.train.patient[site.train.patient != ""]
    if terms.unit != "row" or site.ledger.epsilon() is None or not len(names):
        return None
    k = int(np.unique(names, return_counts=True)[1].max())
    value = group_epsilon(site.ledger.mechanisms(), terms.delta, k)
    return {"rows": k, "epsilon": value, "delta": terms.delta}


def spent_words(row: dict[str, Any]) -> str:
    """ε, what it is worth, and how it was spent, of a site's row in a summary or a plan."""
    if row["epsilon"] is None:
        return "no differential privacy"
    return (
        f"ε = {row['epsilon']:.2f} ({row['guarantee']}) at δ = {row['delta']:g}, per {row['unit']}; "
        f"B = {row['batch_size']}{' patients' if row['unit'] == 'patient' else ''}, σ = {row['sigma']:g}"
    )
