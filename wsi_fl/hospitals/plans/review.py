"""A hospital's review of a plan before it signs: whether its text matches what will run, and what it costs here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.hospitals.plans.build_plan import (
    PlanDocument,
    PlannedSite,
    describe_plan,
    parse_plan_document,
    parse_site_files,
    render_plan_text,
    site_disclosures,
)
from wsi_fl.hospitals.plans.disclosures import PLAN_TEXTS, DataDescription, describe_store, fill_plan_text, find_odd_key
from wsi_fl.hospitals.plans.installed_code import check_code_version
from wsi_fl.hospitals.plans.preapproval import StandingApproval, preapproval_entries
from wsi_fl.hospitals.plans.signed_plan import (
    SITE_TERMS,
    FederationPlan,
    approval_path,
    check_pinned_key,
    check_revoked,
    check_site_terms,
    cost_path,
    describe_changes,
    format_value,
    plan_path,
    record_approval,
)
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.provisioning import fingerprint_line
from wsi_fl.oneshot.released_statistics import STATISTICS_RUN
from wsi_fl.oneshot.sync_statistics import load_local_statistics
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import MAX_ATTEMPTS, collect_mechanisms, reportable_max_tpr
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.report.formatting import format_size
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.stages.site.privacy_account import (
    Group,
    compute_patient_epsilon,
    costs_epsilon,
    count_affordable,
    describe_group,
    is_above_budget,
    list_mechanisms,
    open_account,
    require_budget,
)
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.checks import check_run
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import toml_value
from wsi_fl.system.files import write_json, write_text
from wsi_fl.types import UsageError, encoder_differences

_STORE_TERMS = {
    "encoder": "features of the encoder",
    "n_features": "features per patch",
    "weights": "weights (model.weights) with the SHA-256",
    "parameters": "a model whose parameters have the SHA-256",
    "projection": "directions with the SHA-256",
    "data": "data",
    "example": "examples, each a",
    "task": "an answer to",
    "classes": "classes",
    "channels": "channels",
    "size_px": "patches of a size of",
}


@dataclass(frozen=True)
class PlanCost:
    """The cost of a plan for a hospital, from its own store and its own ledger.

    Attributes:
        n_units: number of protected records, rows or patients.
        epsilon: of all rounds of the plan; None without differential privacy.
        max_tpr_at_fpr_1pct: what share of those protected the best test finds in all that the account holds then, with
            1 false alarm in 100; None where nothing is promised.
        lifetime_epsilon: the same on top of everything on the account.
        rounds: the plan's rounds that the budget covers.
        group, lifetime_group: both ε for the patient with the most rows; None if ε is per patient already, or the store
            knows no patients.
        most_epsilon: of all attempts at a sum that one approval allows; None if no sum is made.
        framed: the ε spent under a standing approval and by this plan at most; None without one.
        framed_runs: runs under the standing approval so far.
        letter: the ε of the released class statistics that are sent again, so that the plan spends nothing; None if the
            plan makes new releases.
    """

    n_units: int
    unit: str
    epsilon: float | None
    lifetime_epsilon: float | None
    max_epsilon: float | None
    delta: float
    rounds: int
    max_tpr_at_fpr_1pct: float | None = None
    group: Group | None = None
    lifetime_group: Group | None = None
    most_epsilon: float | None = None
    framed: float | None = None
    framed_runs: int = 0
    letter: float | None = None

    @property
    def group_over_budget(self) -> Group | None:
        """The ε above `max_epsilon` though ε per row is not, of everything on the account; None if nothing is."""
        return self.lifetime_group if is_above_budget(self.lifetime_group, self.max_epsilon) else None


@dataclass(frozen=True)
class PlanReview:
    """A plan that a hospital may sign, the reviewing site, and remarks that refuse nothing.

    `cost` and `learned` are from the hospital's own store; None if that is not on this machine.
    """

    plan: FederationPlan
    document: PlanDocument
    site: str
    cost: PlanCost | None
    notes: tuple[str, ...]
    learned: DataDescription | None = None


def review_plan(study: Study, plan: FederationPlan, site: str, approval: StandingApproval | None = None) -> PlanReview:
    """Check a plan against its own settings, this installation, the hospital's site file and its store.

    Nothing is written except the hospital's holdout secret, if it has none and the plan draws held-out patients. No
    other site's store is opened.

    Args:
        approval: the standing approval that may cover the plan: its spending is counted, and its list of code holds.

    Raises:
        UsageError: in one line, why the plan cannot be signed here.
    """
    document = parse_plan_document(plan)
    rows_by_name = {row["name"]: row for row in document["sites"]}
    if site not in rows_by_name:
        raise UsageError(f"site {site} is not in this plan, which has {', '.join(rows_by_name)}")
    if not (study.root / "sites" / f"{site}.toml").is_file():
        raise UsageError(
            f"sites/{site}.toml is missing in {study.root}; write your hospital's own file, with max_epsilon and delta"
        )
    local_file, sites = study.load_site(site), parse_site_files(document)
    check_site_terms(rows_by_name[site], local_file)
    check_code_version(plan, site, approval["allows"]["code"] if approval else ())
    files = tuple(local_file if site_file.name == site else site_file for site_file in sites)
    pipeline, run = plan.pipeline(), RunFolder(study.runs_path / "plan")
    with RunContext(study, pipeline, plan.method, run, files) as context:
        check_run(context, "mpi", stores=False)
        _require_matching_text(replace(context, sites=sites), plan, document)
        if costs_epsilon(pipeline) and not local_file.is_receiver:
            require_budget(local_file)
        cost, training_data, remark = None, None, ""
        if context.has_store(site):
            training_data = describe_store(context, site)
            _require_matching_store(training_data, document, site)
            cost = _compute_cost(context, plan, local_file, approval["id"] if approval else "")
            remark = context.open_data(site).remark
    notes = [*_collect_notes(study, sites, site, cost, plan), *filter(None, [remark])]
    return PlanReview(plan, document, site, cost, tuple(notes), training_data)


def sign_plan(study: Study, review: PlanReview, identity: Identity, approval: StandingApproval | None = None) -> Path:
    """Sign a plan in the name of the reviewing hospital, or by its standing approval.

    For the plan's other sites a missing file in `sites/` is written with their terms in the plan. Returns the path of
    the approval, which the coordinator needs.
    """
    check_revoked(review.plan, identity.root, review.plan.sites)
    check_pinned_key(review.plan, identity.certificate, review.site)
    if identity.name != review.site:
        raise UsageError(f"this kit belongs to {identity.name}, but the plan was checked for {review.site}")
    for site in parse_site_files(review.document):
        path = study.root / "sites" / f"{site.name}.toml"
        if not path.exists():
            terms = {key: getattr(site, key) for key in ("name", *SITE_TERMS)}
            lines = [f"{key} = {toml_value(value)}" for key, value in terms.items() if value is not None]
            plan = f"plan {review.plan.digest[:8]}"
            head = f"# Another hospital's, as {plan} says; its own file stays there."
            write_text(path, "\n".join([head, *lines]) + "\n")
    record_approval(study, review.plan, identity, approval)
    cost = {"plan": review.plan.digest, "cost": review.cost and asdict(review.cost)}
    write_json(cost_path(study, identity.name), cost)
    return approval_path(study, identity.name)


def _require_matching_text(context: RunContext, plan: FederationPlan, document: PlanDocument) -> None:
    """Refuse a plan whose text differs in any character from what its settings and table of sites generate."""
    expected = describe_plan(context, document["pipeline"], document["learns"], plan.keys)
    if document["code"] != expected["code"]:  # the site's standing approval lists both
        expected |= {"wsi_fl": document["wsi_fl"], "code": document["code"], "packages": document["packages"]}
    odd_key = find_odd_key(document["learns"], context)
    if odd_key or plan.text != render_plan_text(expected, document["created"]):
        wrong = [key for key, value in expected.items() if plan.document.get(key) != value]
        wrong += [f"learns.{odd_key}"] if odd_key else []
        raise UsageError(
            f"the plan's text does not match its settings ({next(iter(wrong), 'it has more than its keys')}); it was "
            "changed by hand, so ask for a new plan by `wsi-fl federation plan`"
        )


def _require_matching_store(store_data: DataDescription, document: PlanDocument, site: str) -> None:
    """Refuse a plan for another task, encoder, weights, projection, classes or shape than the store has."""
    store_values: dict[str, object] = dict(store_data)
    plan_values: dict[str, object] = dict(document["learns"])
    for key, label in _STORE_TERMS.items():
        plan_value, store_value = plan_values[key], store_values[key]
        if None not in (plan_value, store_value) and not is_alike(key, plan_value, store_value):
            section = "mosaic" if plan_values["data"] == "mosaics" else "features"
            made_with = f" (--set {section}.encoder={str(store_value).split()[0]})" if key == "encoder" else ""
            text = (
                f"the plan is for {label} {format_value(plan_value)}, but {site} has {format_value(store_value)}; "
                f"make the store as the plan says, or ask for another plan{made_with}"
            )
            raise mark_fault(UsageError(text), "other_store", site)


def is_alike(key: str, planned: object, actual: object) -> bool:
    """Return whether two values of a term mean the same; of an encoder a plan without a store has the name alone."""
    return not any(encoder_differences([str(planned), str(actual)])) if key == "encoder" else planned == actual


def _compute_cost(context: RunContext, plan: FederationPlan, site: SiteFile, approval_id: str) -> PlanCost | None:
    """Return the plan's cost, beside the runs of a standing approval; UsageError if no round is affordable."""
    from wsi_fl.stages.training.build_sites import load_training  # and with it PyTorch

    pipeline, rounds = context.pipeline, context.pipeline.train.rounds
    sends = context.uses_files and not site.is_receiver
    if sends:
        load_local_statistics(context, site.name)
    train, _, units = load_training(context, site.name)
    planted = np.zeros(pipeline.audit.canaries, bool)
    index = context.names.index(site.name)
    account = open_account(context, index, units, planted, planned_run=f"plan {plan.digest[:32]}")
    ledger, terms, n_units = account.ledger, account.ledger.terms, account.units.n
    approval_entries = preapproval_entries(ledger.entries, site.name, approval_id) if approval_id else []
    cost = PlanCost(n_units, terms.unit, None, None, terms.max_epsilon, terms.delta, rounds)
    cost = replace(cost, framed_runs=len({entry.run_id for entry in approval_entries}))
    if not costs_epsilon(pipeline) or site.is_receiver:
        return cost
    affordable = count_affordable(account, rounds)
    if not affordable:
        text = (
            f"sites/{site.name}.toml: max_epsilon = {terms.max_epsilon:g} is not enough for one round of this plan; "
            "ask for one with more noise or fewer rows in a batch"
        )
        raise mark_fault(UsageError(text), "affordability", site.name)
    run_mechanisms, past_mechanisms = ledger.list_mechanisms(), ledger.list_mechanisms(lifetime=True)
    framed_mechanisms = collect_mechanisms(approval_entries)
    if sends:
        spent, released = epsilon(past_mechanisms, terms.delta), epsilon(run_mechanisms, terms.delta)
        framed = epsilon(framed_mechanisms, terms.delta) if approval_id else None
        return replace(cost, epsilon=0.0, lifetime_epsilon=spent, letter=released, framed=framed)
    plan_mechanisms = list_mechanisms(account, rounds)[len(run_mechanisms) :]
    plan_run, lifetime_mechanisms = [*run_mechanisms, *plan_mechanisms], [*past_mechanisms, *plan_mechanisms]
    is_sum = terms.guarantee == "shared"
    max_mechanisms = plan_mechanisms * (MAX_ATTEMPTS if is_sum else 1)
    return replace(
        cost,
        epsilon=epsilon(plan_run, terms.delta),
        lifetime_epsilon=epsilon(lifetime_mechanisms, terms.delta),
        rounds=affordable,
        max_tpr_at_fpr_1pct=reportable_max_tpr(terms.guarantee, lifetime_mechanisms),
        group=compute_patient_epsilon(terms, train.obs["patient"], plan_run),
        lifetime_group=compute_patient_epsilon(terms, train.obs["patient"], lifetime_mechanisms),
        most_epsilon=epsilon([*run_mechanisms, *max_mechanisms], terms.delta) if is_sum else None,
        framed=epsilon([*framed_mechanisms, *max_mechanisms], terms.delta) if approval_id else None,
    )


def _collect_notes(
    study: Study, sites: Sequence[SiteFile], me: str, cost: PlanCost | None, plan: FederationPlan
) -> list[str]:
    """Return remarks for the people who sign."""
    notes = []
    with suppress(UsageError, KeyError, ValueError):  # the first plan of a study, or no plan of this version
        earlier_plan = FederationPlan.load(plan_path(study))
        differences = "; ".join(describe_changes(earlier_plan, plan)) or "no difference in its terms"
        if earlier_plan.digest != plan.digest:
            notes.append(f"compared with plan {earlier_plan.digest[:8]}, which lies here: {differences}")
    differing: list[tuple[str, str]] = []
    for site in sites:
        if site.name != me and (study.root / "sites" / f"{site.name}.toml").is_file():
            local_file = study.load_site(site.name)
            other_keys = [key for key in SITE_TERMS if getattr(local_file, key) != getattr(site, key)]
            differing += [(site.name, key) for key in other_keys[:1]]
    makes_statistics = plan.method == STATISTICS_RUN and not plan.pipeline().train.from_released
    is_repeated, pins_all = makes_statistics and _has_released_before(study, me), len(plan.keys) >= len(sites)
    facts = {"me": me, "cost": cost, "rounds": plan.document["rounds"], "differing": differing, "pins_all": pins_all}
    return notes + fill_plan_text(PLAN_TEXTS["review"]["notes"], releases_again=is_repeated, **facts)


def _has_released_before(study: Study, site: str) -> bool:
    """Return whether class statistics of a site have left it, by a file or in a run of `oneshot`, by its ledger."""
    lines = [entry for entry in LedgerFile(study.ledger_path(site)).entries if entry.site == site and entry.sending]
    return any(STATISTICS_RUN in entry.run.split()[0].split("-")[:2] for entry in lines)


def review_lines(review: PlanReview) -> Lines:
    """Render a plan for the people who sign it."""
    content, privacy = review.document, review.document["privacy"]
    yield TextLine(
        f"plan {review.plan.digest[:8]}: {content['does']} Pipeline {content['pipeline']}, {content['rounds']} rounds."
    )
    yield TextLine(f"  {content['waits']}")
    rows = [
        (
            row["name"],
            "yes" if row["real"] else "no",
            _describe_permissions(row),
            *("–" if value is None else f"{value:g}" for value in (row["max_epsilon"], row["delta"])),
        )
        for row in content["sites"]
    ]
    yield TextTable("who takes part", ("site", "real", "allows", "max ε", "δ"), rows)
    for site in content["sites"]:
        yield fingerprint_line(site["name"], site["key"] or "not pinned")
    data = content["learns"]
    classes = ", ".join(data["classes"] or ["unknown classes"])
    trained = f"trained on {data['data']} ({data['encoder'] or 'pixels'})"
    yield TextLine(f"  {trained} to answer {data['task']}: {classes}. {data['says']}")
    if data["weights"] is not None:
        yield TextLine(f"  models start from weights with the SHA-256 {data['weights']}")
    if data["parameters"] is not None:
        yield TextLine(f"  the model that travels has parameters with the SHA-256 {data['parameters']}")
    if data["projection"] is not None:
        yield TextLine(f"  features are summed along directions: {data['projection']}")
    yield TextLine(f"  {privacy['says']}", "" if privacy["differential_privacy"] else "yellow")
    yield TextLine("what leaves your hospital:")
    for item in site_disclosures(content, review.site):
        size_text = f", {format_size(item['bytes'])} each" if item["bytes"] is not None else ""
        yield TextLine(
            f"  {item['what']} → {item['to']}; {item['often']}{size_text}. Protection: {item['protected_by']}"
        )
    yield TextLine(f"what never leaves: {'; '.join(content['stays'])}")
    if review.cost is not None:
        yield TextLine(describe_cost(review.cost))
        if review.cost.group is not None:
            yield TextLine(
                f"  {_describe_patient_epsilon(review.cost)}", "red" if review.cost.group_over_budget else ""
            )
    for note in review.notes:
        yield TextLine(f"  {note}", "yellow")


def _describe_permissions(site: PlannedSite) -> str:
    """Return a site's permissions; sums by secure aggregation are under differential privacy, all else is not."""
    if site["role"] == "receiver":
        return "nothing; it receives"
    if not site["real"]:
        return "everything without DP"
    without_privacy = ", ".join(kind for kind in site["allow"] if kind != "shared")
    return f"{without_privacy or 'nothing'} without DP" + ("; shared noise" if "shared" in site["allow"] else "")


def describe_cost(cost: PlanCost) -> str:
    """Describe in one sentence what a plan costs a hospital."""
    limit = "no limit" if cost.max_epsilon is None else f"{cost.max_epsilon:g}"
    return fill_plan_text(PLAN_TEXTS["review"]["cost"], cost=cost, limit=limit, attempts=MAX_ATTEMPTS)[0]


def _describe_patient_epsilon(cost: PlanCost) -> str:
    """Describe ε per row for the patient with the most rows."""
    assert cost.group is not None and cost.lifetime_group is not None
    lifetime_epsilon = cost.lifetime_group["epsilon"]
    suffix = "" if lifetime_epsilon is None else f"; with everything spent before {lifetime_epsilon:.1f}"
    return f"{describe_group(cost.group)}{suffix}"


def describe_excess(cost: PlanCost | None) -> str:
    """Describe the ε above the budget though ε per row is not; "" if none is."""
    if cost is None or cost.group_over_budget is None:
        return ""
    return f"{_describe_patient_epsilon(cost)}, which is above your max_epsilon = {cost.max_epsilon:g}"


def signature_lines(review: PlanReview, approval: str) -> Lines:
    """Report where the approval of a signed plan is, and what to do with it."""
    yield TextLine(
        f"{review.site} signed plan {review.plan.digest[:8]}; send {approval} to the coordinator, then start your kit"
    )
