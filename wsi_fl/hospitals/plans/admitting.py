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

from wsi_fl.hospitals.plans.approving import Looked, above_words, cost_words, is_alike, look, sign
from wsi_fl.hospitals.plans.contents import Learned, Leaving, leaving, of_store
from wsi_fl.hospitals.plans.frames import (
    FORMAT,
    Frame,
    admitted_plans,
    frame_path,
    is_over,
    note_admitted,
    open_frame,
)
from wsi_fl.hospitals.plans.making import PlanDocument, document_of, settings_text, sites_of
from wsi_fl.hospitals.plans.signed import Plan, approved_plan, by_key, code_digest, shown
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import note
from wsi_fl.stages.site.party import RunContext, settings_for
from wsi_fl.stages.work.console import Line, Lines, say
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError, one_line

_STRONGEST_FIRST = get_args(Guarantee)
_Varies = Callable[[Any, Any], bool]
_MAY_VARY: dict[str, tuple[str, _Varies]] = {
    "train.rounds": ("or fewer", lambda said, agreed: said <= agreed),
    "train.lr": ("or any other", lambda said, agreed: True),
    "privacy.sigma": ("or more", lambda said, agreed: said >= agreed),
    "privacy.target_epsilon": (
        "or less",
        lambda said, agreed: said == agreed or (None not in (said, agreed) and said <= agreed),
    ),
}
"""The settings that plans of a standing approval may vary: the limit in words, and as a test (plan's value, limit).

None of them changes n, the training rows, or the task of any site.
"""


def make_frame(
    study: Study,
    plan: Plan,
    site: str,
    *,
    epsilon: float | None,
    until: str,
    runs: int,
    methods: Sequence[str] = (),
    partners: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> Frame:
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
    looked, limit = look(study, plan, site), study.site(site).max_epsilon or 0
    worth, wanted = looked.document["privacy"], {site, *(partners or plan.sites)}
    if above := above_words(looked.cost):
        raise UsageError(
            f"{above}; no standing approval is for such plans: sign each, or ask for one per patient (privacy.unit)"
        )
    if worth["differential_privacy"] and (epsilon is None or not 0 < epsilon <= limit):
        raise UsageError(f"sites/{site}.toml: max_epsilon = {limit:g}; say --epsilon up to that")
    if unknown := sorted(wanted - set(plan.keys)):
        raise UsageError(
            f"the plan has no site {unknown[0]} whose key it pins (`federation plan --kit FOUNDED`)"
        )
    allows: dict[str, list[Any]] = {}
    for method in methods or [plan.method]:
        for what, values in _of_method(study, looked, method).items():
            allows[what] = [*(known := allows.get(what, [])), *(one for one in values if one not in known)]
    allows["pipeline"] = [plan.name]
    allows["partners"] = [f"{name} {key}" for name, key in plan.keys.items() if name in wanted]
    allows["guarantee"] = list(_STRONGEST_FIRST[: _STRONGEST_FIRST.index(worth["guarantee"]) + 1])
    settings = {
        method: str(plan.document["settings"])
        if method == plan.method
        else settings_text(settings_for(method, study, plan.pipeline()))
        for method in allows["method"]
    }
    made = {"format": FORMAT, "id": uuid4().hex, "site": site, "allows": allows, "settings": settings}
    limits = {"epsilon": epsilon, "runs": runs, "until": last.isoformat()}
    return with_code(cast("Frame", made | limits), codes)


def with_code(frame: Frame, codes: Sequence[str] = ()) -> Frame:
    """Return a standing approval, its id unchanged, that also allows the installed wsi-fl and others by SHA-256."""
    known = list(dict.fromkeys([*frame["allows"]["code"], *codes, code_digest()]))
    return {**frame, "allows": {**frame["allows"], "code": known}}


def _of_method(study: Study, looked: Looked, method: str) -> dict[str, list[Any]]:
    """Return the terms of a plan with another method."""
    own = study.site(looked.site)
    files = tuple(own if one.name == own.name else one for one in sites_of(looked.document))
    pipeline = settings_for(method, study, looked.plan.pipeline())
    with RunContext(study, pipeline, method, RunFolder(study.runs / "plan"), files) as party:
        if not party.method.shares:
            raise UsageError(f"{method} shares nothing between hospitals and needs no standing approval")
        if not party.has_store(own.name):
            raise UsageError(
                f"the store of {own.name} is not on this machine; sign a standing approval where it is"
            )
        learned, leaves = of_store(party, own.name), leaving(party, None, None)
        return _said(looked.document, looked.plan, own.name, method, learned, leaves)


def _said(
    said: PlanDocument,
    plan: Plan,
    site: str,
    method: str,
    learned: Mapping[str, object],
    leaves: Sequence[Leaving],
) -> dict[str, list[Any]]:
    """Return a plan's terms that a standing approval limits: what its models see, and what would leave a site."""
    privacy, own = plan.pipeline().privacy, next(one for one in said["sites"] if one["name"] == site)
    worth, bare = said["privacy"]["guarantee"], ", without differential privacy"
    kinds = {
        row["what"].partition(" (")[0] + (bare if row["protected_by"].startswith("no diff") else "")
        for row in leaves
        if row["of_records"]
    }
    return {
        "method": [method],
        "partners": [f"{site['name']} {site['key']}" for site in said["sites"]],
        "leaves": sorted(kinds),
        **{key: [learned[key]] for key in Learned.__annotations__ if key != "says"},
        "unit": [privacy.unit],
        "guarantee": [worth],
        "colluding": [privacy.colluding] if worth == "shared" else [],
        "delta": [own["delta"] or privacy.delta],
        "code": [said["code"]],
        "pipeline": [plan.name],
    }


def outside_by_text(frame: Frame, plan: Plan, today: date, n_admitted: int) -> str:
    """Return in one line how a plan's own text exceeds a standing approval today, in UTC; "" if it does not.

    Nothing else is read, built or fetched, so the line may be disclosed.

    Args:
        n_admitted: number of plans approved before.

    Raises:
        UsageError: when the text is no plan's.
    """
    if is_over(frame, today):
        return f"its last day was {frame['until']}"
    if n_admitted >= frame["runs"]:
        return f"the standing approval is for {frame['runs']} runs, and it had them"
    said, site = document_of(plan), frame["site"]
    if site not in plan.sites:
        return f"it is a plan without {site}"
    beyond = _beyond(frame, said, plan, said["learns"], unknown=True)
    return beyond or _other_order(frame, plan) or _other_setting(frame, plan)


def _other_order(frame: Frame, plan: Plan) -> str:
    """Return in one line that a plan's sites are ordered otherwise than approved (the first sees most), or ""."""
    agreed = [
        name for name in (one.split(" ")[0] for one in frame["allows"]["partners"]) if name in plan.sites
    ]
    return (
        ""
        if plan.sites == agreed
        else f"order: {', '.join(plan.sites)}, where the standing approval has {', '.join(agreed)}"
    )


def _other_setting(frame: Frame, plan: Plan) -> str:
    """Return in one line the first setting of a plan that differs more than it may; "" for none."""
    agreed, said = by_key(frame["settings"][plan.method]), by_key(str(plan.document["settings"]))
    for key in dict.fromkeys([*agreed, *said]):
        was, now = agreed.get(key), said.get(key)
        also, fits = _MAY_VARY.get(key, ("", lambda one, other: one == other))
        if not fits(now, was):
            limit = f"{_in_words(was)}{f' {also}' if also else ''}"
            return f"{key}: {_in_words(now)}, where the standing approval has {limit}"
    return ""


def _in_words(value: object) -> str:
    return "a table" if isinstance(value, dict) else shown(value)


def _beyond(
    frame: Frame, said: PlanDocument, plan: Plan, learned: Mapping[str, object], *, unknown: bool = False
) -> str:
    """Return in one line the first term of a plan that a standing approval does not allow; "" for none.

    Args:
        data: what the plan's models see, by the plan or a store.
        unknown: whether the plan may leave open what only stores determine.
    """
    allows = frame["allows"]
    for what, values in _said(said, plan, frame["site"], said["method"], learned, said["leaves"]).items():
        known = [
            value for value in values if not (unknown and value is None and what in Learned.__annotations__)
        ]
        if more := [value for value in known if not any(is_alike(what, value, one) for one in allows[what])]:
            return (
                f"{what}: {shown(more[0])}, where the standing approval has "
                f"{'; '.join(map(shown, allows[what])) or 'none'}"
            )
    return ""


def _outside(frame: Frame, looked: Looked) -> str:
    """Return in one line how a reviewed plan exceeds a standing approval; "" if it does not. It stays local."""
    cost, learned = looked.cost, looked.learned
    if cost is None or learned is None:
        return "the hospital's store is not on this machine, so what it costs is not known"
    if beyond := _beyond(frame, looked.document, looked.plan, learned):
        return beyond
    if cost.framed_runs >= frame["runs"]:
        return f"the standing approval is for {frame['runs']} runs, and it had them"
    if cost.framed is not None and cost.framed > (frame["epsilon"] or 0):
        return f"all plans of the standing approval would cost ε = {cost.framed:.2f} of {frame['epsilon'] or 0:g}"
    return ""


def admit(study: Study, identity: Identity, plan: Plan) -> None:
    """Approve a plan by the hospital's standing approval; do nothing without one, or if the plan is approved already.

    The outcome is printed, and logged in `federation/frame.log`; the plan is kept in `federation/plans/`.

    Raises:
        UsageError: in one line that may be disclosed: how the plan's own text exceeds the limits, and otherwise nothing
            but that the hospital does not approve.
    """
    if (frame := open_frame(study, identity)) is None:
        return
    with suppress(UsageError):
        if approved_plan(study, identity).digest == plan.digest:
            return
    called = f"plan {plan.digest[:8]}"

    def tell(text: str) -> None:
        say(f"  {text}")
        note(frame_path(study).with_suffix(".log"), text)

    before = len(admitted_plans(study, frame["id"]))
    try:
        why = outside_by_text(frame, plan, datetime.now(UTC).date(), before)
    except Exception as error:  # of a text that is no plan
        tell(f"{called} was refused: {one_line(error)}")
        raise UsageError(f"{called} is damaged; ask for it again") from None
    if why:
        tell(f"{called} was refused, for it exceeds the standing approval: {why}")
        raise UsageError(f"{called} exceeds the standing approval of {identity.name}: {why}")
    try:
        looked = look(study, plan, identity.name, frame)
        if why := _outside(frame, looked):
            raise UsageError(why)
        assert looked.cost is not None
        if not note_admitted(study, frame, plan.digest):
            raise UsageError(f"the standing approval is for {frame['runs']} runs, and it had them")
        write_text(study.root / "federation" / "plans" / f"{plan.digest}.json", plan.text)
        sign(study, looked, identity, frame)
    except Exception as error:  # may name and depend on the store's content
        tell(f"{called} was refused: {one_line(error)}")
        own = "its own federation/frame.log says why"
        raise UsageError(
            f"site {identity.name} cannot approve {called} by its standing approval; {own}"
        ) from None
    tell(
        f"{called} was approved by the standing approval: {looked.document['does']} {cost_words(looked.cost)}"
    )
    # a refusal would disclose, by plans of more and more noise, the largest number of rows of a patient
    for said in filter(None, [above_words(looked.cost), *looked.notes]):
        tell(f"  {said}")


def frame_lines(frame: Frame) -> Lines:
    """Render what a standing approval allows."""
    limit = "no ε" if frame["epsilon"] is None else f"ε = {frame['epsilon']:g} in all"
    yield Line(
        f"until {frame['until']} up to {frame['runs']} runs begin at {frame['site']} without a further signature, "
        f"at {limit}, of plans with"
    )
    for what, values in frame["allows"].items():
        yield Line(f"  {what}: {'; '.join('nothing' if one is None else str(one) for one in values)}")
    varies = ", ".join(f"{key} {also}" for key, (also, _) in _MAY_VARY.items())
    yield Line(f"  all other settings as in this plan, but for {varies}")
