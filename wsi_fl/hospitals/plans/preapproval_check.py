"""Standing approvals: how one is made from a plan, and how a hospital's process admits the plans that come later.

The sender of a plan is not trusted. The plan's own text is compared with the standing approval first, before anything
is built, fetched or opened, so that a plan outside its limits makes no connection, and neither text nor time of the
refusal depends on the store. Only then is the plan reviewed as by `approve`. A fault found then stays local: others
learn that the hospital does not approve, and not why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Any, cast, get_args
from uuid import uuid4

from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.build_plan import PlanDocument, parse_plan_document, parse_site_files, settings_text
from wsi_fl.hospitals.plans.disclosures import DataDescription, PlannedDisclosure, describe_store, list_disclosures
from wsi_fl.hospitals.plans.preapproval import (
    FORMAT,
    StandingApproval,
    has_expired,
    list_admitted_plans,
    load_preapproval,
    preapproval_path,
    record_admission,
)
from wsi_fl.hospitals.plans.review import PlanReview, describe_cost, describe_excess, is_alike, review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, format_value, load_approved_plan, settings_by_key
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import append_note
from wsi_fl.stages.runtime.console import Lines, TextLine, print_message
from wsi_fl.stages.site.run_context import RunContext, adapt_settings
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError, single_line

_GUARANTEE_LEVELS = get_args(Guarantee)
_Varies = Callable[[Any, Any], bool]
_VARIABLE_SETTINGS: dict[str, tuple[str, _Varies]] = {
    "train.rounds": ("or fewer", lambda value, agreed: value <= agreed),
    "train.lr": ("or any other", lambda value, agreed: True),
    "privacy.sigma": ("or more", lambda value, agreed: value >= agreed),
    "privacy.target_epsilon": (
        "or less",
        lambda value, agreed: value == agreed or (None not in (value, agreed) and value <= agreed),
    ),
}
"""The settings that plans of a standing approval may vary: the limit in words, and as a test (plan's value, limit).

None of them changes n, the training rows, or the task of any site.
"""


def make_preapproval(
    study: Study,
    plan: FederationPlan,
    site: str,
    *,
    epsilon: float | None,
    until: str,
    runs: int,
    methods: Sequence[str] = (),
    partners: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> StandingApproval:
    """Return the standing approval of plans like one that a hospital could sign, without writing it.

    Args:
        plan: has the training data, the participants, and the unit and guarantee of ε.
        epsilon: of all plans together; None if nothing is under differential privacy.
        until: the last day, "2027-03-31".
        methods: default: that of the plan.
        partners: of the plan's sites; default: all.
        codes: further SHA-256 of wsi-fl, beside the installed one.

    Raises:
        UsageError: when the hospital could not sign the plan, or its site file permits less.
    """
    try:
        last = date.fromisoformat(until)
    except ValueError:
        raise UsageError("until when? say --until DATE, as in --until 2027-03-31") from None
    review, limit = review_plan(study, plan, site), study.load_site(site).max_epsilon or 0
    privacy, partner_names = review.document["privacy"], {site, *(partners or plan.sites)}
    if excess := describe_excess(review.cost):
        raise UsageError(
            f"{excess}; no standing approval is for such plans: sign each, or ask for one per patient (privacy.unit)"
        )
    if privacy["differential_privacy"] and (epsilon is None or not 0 < epsilon <= limit):
        raise UsageError(f"sites/{site}.toml: max_epsilon = {limit:g}; say --epsilon up to that")
    if unknown := sorted(partner_names - set(plan.keys)):
        raise UsageError(f"the plan has no site {unknown[0]} whose key it pins (`federation plan --kit FOUNDED`)")
    allows: dict[str, list[Any]] = {}
    for method in methods or [plan.method]:
        for key, values in _method_terms(study, review, method).items():
            allows[key] = [*(earlier := allows.get(key, [])), *(value for value in values if value not in earlier)]
    allows["pipeline"] = [plan.name]
    allows["partners"] = [f"{name} {key}" for name, key in plan.keys.items() if name in partner_names]
    allows["guarantee"] = list(_GUARANTEE_LEVELS[: _GUARANTEE_LEVELS.index(privacy["guarantee"]) + 1])
    settings = {
        method: str(plan.document["settings"])
        if method == plan.method
        else settings_text(adapt_settings(method, study, plan.pipeline()))
        for method in allows["method"]
    }
    document = {"format": FORMAT, "id": uuid4().hex, "site": site, "allows": allows, "settings": settings}
    limits = {"epsilon": epsilon, "runs": runs, "until": last.isoformat()}
    return add_codes(cast("StandingApproval", document | limits), codes)


def add_codes(approval: StandingApproval, codes: Sequence[str] = ()) -> StandingApproval:
    """Return a standing approval, its id unchanged, that also allows the installed wsi-fl and others by SHA-256."""
    installed_codes = [installed_code.code_digest(method) for method in approval["allows"]["method"]]
    accepted_codes = list(dict.fromkeys([*approval["allows"]["code"], *codes, *installed_codes]))
    return {**approval, "allows": {**approval["allows"], "code": accepted_codes}}


def _method_terms(study: Study, review: PlanReview, method: str) -> dict[str, list[Any]]:
    """Return the terms of a plan with another method."""
    local_file, site = study.load_site(review.site), review.site
    files = tuple(local_file if file.name == site else file for file in parse_site_files(review.document))
    pipeline = adapt_settings(method, study, review.plan.pipeline())
    with RunContext(study, pipeline, method, RunFolder(study.runs_path / "plan"), files) as context:
        if not context.method.disclosures:
            raise UsageError(f"{method} shares nothing between hospitals and needs no standing approval")
        if not context.has_store(site):
            raise UsageError(f"the store of {site} is not on this machine; sign a standing approval where it is")
        data, leaves = describe_store(context, site), list_disclosures(context, None, None)
        return _plan_terms(review.document, review.plan, site, method, data, leaves)


def _plan_terms(
    document: PlanDocument,
    plan: FederationPlan,
    site: str,
    method: str,
    data: Mapping[str, object],
    leaves: Sequence[PlannedDisclosure],
) -> dict[str, list[Any]]:
    """Return a plan's terms that a standing approval limits: what its models see, and what would leave a site."""
    privacy = plan.pipeline().privacy
    local_row = next(site_row for site_row in document["sites"] if site_row["name"] == site)
    guarantee, suffix = document["privacy"]["guarantee"], ", without differential privacy"
    kinds = {
        row["what"].partition(" (")[0] + (suffix if row["protected_by"].startswith("no diff") else "")
        for row in leaves
        if row["of_records"]
    }
    return {
        "method": [method],
        "partners": [f"{site['name']} {site['key']}" for site in document["sites"]],
        "leaves": sorted(kinds),
        **{key: [data[key]] for key in DataDescription.__annotations__ if key != "says"},
        "unit": [privacy.unit],
        "guarantee": [guarantee],
        "colluding": [privacy.colluding] if guarantee == "shared" else [],
        "delta": [local_row["delta"] or privacy.delta],
        "code": [document["code"]],
        "pipeline": [plan.name],
    }


def _explain_text_rejection(approval: StandingApproval, plan: FederationPlan, today: date, n_admitted: int) -> str:
    """Return in one line how a plan's own text exceeds a standing approval today, in UTC; "" if it does not.

    Nothing else is read, built or fetched, so the line may be disclosed.

    Args:
        n_admitted: number of plans approved before.

    Raises:
        UsageError: when the text is no plan's.
    """
    if has_expired(approval, today):
        return f"its last day was {approval['until']}"
    if n_admitted >= approval["runs"]:
        return f"the standing approval is for {approval['runs']} runs, and it had them"
    document, site = parse_plan_document(plan), approval["site"]
    if site not in plan.sites:
        return f"it is a plan without {site}"
    excess = _explain_excess(approval, document, plan, document["learns"], unknown=True)
    return excess or _explain_order(approval, plan) or _explain_setting(approval, plan)


def _explain_order(approval: StandingApproval, plan: FederationPlan) -> str:
    """Return in one line that a plan's sites are ordered otherwise than approved (the first sees most), or ""."""
    approved = [partner.split(" ")[0] for partner in approval["allows"]["partners"]]
    if plan.sites == (agreed := [name for name in approved if name in plan.sites]):
        return ""
    return f"order: {', '.join(plan.sites)}, where the standing approval has {', '.join(agreed)}"


def _explain_setting(approval: StandingApproval, plan: FederationPlan) -> str:
    """Return in one line the first setting of a plan that differs more than it may; "" for none."""
    approved_settings = settings_by_key(approval["settings"][plan.method])
    plan_settings = settings_by_key(str(plan.document["settings"]))
    for key in dict.fromkeys([*approved_settings, *plan_settings]):
        approved_value, plan_value = approved_settings.get(key), plan_settings.get(key)
        also, fits = _VARIABLE_SETTINGS.get(key, ("", lambda first, second: first == second))
        if not fits(plan_value, approved_value):
            planned, limit = (
                "a table" if isinstance(value, dict) else format_value(value) for value in (plan_value, approved_value)
            )
            return f"{key}: {planned}, where the standing approval has {limit}{also and f' {also}'}"
    return ""


def _explain_excess(
    approval: StandingApproval,
    document: PlanDocument,
    plan: FederationPlan,
    data: Mapping[str, object],
    *,
    unknown: bool = False,
) -> str:
    """Return in one line the first term of a plan that is not allowed; `unknown` ones may be left to the stores."""
    terms = _plan_terms(document, plan, approval["site"], document["method"], data, document["leaves"])
    for key, values in terms.items():
        approved_values = approval["allows"][key]
        for value in values:
            if unknown and value is None and key in DataDescription.__annotations__:
                continue
            if not any(is_alike(key, value, approved_value) for approved_value in approved_values):
                limit = "; ".join(map(format_value, approved_values)) or "none"
                return f"{key}: {format_value(value)}, where the standing approval has {limit}"
    return ""


def _explain_rejection(approval: StandingApproval, review: PlanReview) -> str:
    """Return in one line how a reviewed plan exceeds a standing approval; "" if it does not. It stays local."""
    cost, data = review.cost, review.learned
    if cost is None or data is None:
        return "the hospital's store is not on this machine, so what it costs is not known"
    if excess := _explain_excess(approval, review.document, review.plan, data):
        return excess
    if cost.framed_runs >= approval["runs"]:
        return f"the standing approval is for {approval['runs']} runs, and it had them"
    if cost.framed is not None and cost.framed > (approval["epsilon"] or 0):
        return f"all plans of the standing approval would cost ε = {cost.framed:.2f} of {approval['epsilon'] or 0:g}"
    return ""


def admit_plan(study: Study, identity: Identity, plan: FederationPlan) -> None:
    """Approve a plan by the hospital's standing approval; do nothing without one, or if the plan is approved already.

    The outcome is printed, and logged in `federation/preapproval.log`; the plan is kept in `federation/plans/`.

    Raises:
        UsageError: in one line that may be disclosed: how the plan's own text exceeds the limits, and otherwise nothing
            but that the hospital does not approve.
    """
    if (approval := load_preapproval(study, identity)) is None:
        return
    with suppress(UsageError):
        if load_approved_plan(study, identity).digest == plan.digest:
            return
    plan_label = f"plan {plan.digest[:8]}"

    def report(text: str) -> None:
        print_message(f"  {text}")
        append_note(preapproval_path(study).with_suffix(".log"), text)

    n_admitted = len(list_admitted_plans(study, approval["id"]))
    try:
        reason = _explain_text_rejection(approval, plan, datetime.now(UTC).date(), n_admitted)
    except Exception as error:  # of a text that is no plan
        report(f"{plan_label} was refused: {single_line(error)}")
        raise UsageError(f"{plan_label} is damaged; ask for it again") from None
    if reason:
        report(f"{plan_label} was refused, for it exceeds the standing approval: {reason}")
        raise UsageError(f"{plan_label} exceeds the standing approval of {identity.name}: {reason}")
    try:
        review = review_plan(study, plan, identity.name, approval)
        if reason := _explain_rejection(approval, review):
            raise UsageError(reason)
        assert review.cost is not None
        if not record_admission(study, approval, plan.digest):
            raise UsageError(f"the standing approval is for {approval['runs']} runs, and it had them")
        write_text(study.root / "federation" / "plans" / f"{plan.digest}.json", plan.text)
        sign_plan(study, review, identity, approval)
    except Exception as error:  # may name and depend on the store's content
        report(f"{plan_label} was refused: {single_line(error)}")
        log_hint = "its own federation/preapproval.log says why"
        raise UsageError(
            f"site {identity.name} cannot approve {plan_label} by its standing approval; {log_hint}"
        ) from None
    report(
        f"{plan_label} was approved by the standing approval: {review.document['does']} {describe_cost(review.cost)}"
    )
    # a refusal would disclose, by plans of more and more noise, the largest number of rows of a patient
    for remark in filter(None, [describe_excess(review.cost), *review.notes]):
        report(f"  {remark}")


def preapproval_lines(terms: StandingApproval) -> Lines:
    """Render what a standing approval allows."""
    limit = "no ε" if terms["epsilon"] is None else f"ε = {terms['epsilon']:g} in all"
    yield TextLine(
        f"until {terms['until']} up to {terms['runs']} runs begin at {terms['site']} without a further signature, "
        f"at {limit}, of plans with"
    )
    for key, values in terms["allows"].items():
        yield TextLine(f"  {key}: {'; '.join('nothing' if value is None else str(value) for value in values)}")
    varies = ", ".join(f"{key} {also}" for key, (also, _) in _VARIABLE_SETTINGS.items())
    yield TextLine(f"  all other settings as in this plan, but for {varies}")
