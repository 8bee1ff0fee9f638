"""What lies inside a frame: how one is made of a plan, and how a hospital's process takes the plans that come later.

Nobody trusts whoever sent a plan. A hospital's process looks at it as `approve` does, and the frame says what it may
come to on the hospital's own store and ledger. What fails as it looks stays at home; others learn what lies outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Any, cast, get_args
from uuid import uuid4

from wsi_fl.hospitals.plans.approving import Looked, above_words, cost_words, look, sign
from wsi_fl.hospitals.plans.contents import Learned, Leaving, leaving, of_store
from wsi_fl.hospitals.plans.frames import FORMAT, Frame, frame_path, is_over, open_frame
from wsi_fl.hospitals.plans.making import sites_of
from wsi_fl.hospitals.plans.signed import Plan, approved_plan, code_digest, shown
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import note
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.work.console import Line, Lines, say
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError, one_line

_STRONGEST_FIRST = get_args(Guarantee)


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
    """Return the frame of plans that are like one that a hospital could sign; nothing is written.

    Args:
        plan: says what is trained on, who takes part, and what ε is about and worth.
        epsilon: of all plans together; None where nothing is under differential privacy.
        until: the last day, "2027-03-31".
        methods: default: that of the plan.
        partners: of the plan's sites; default: all.
        codes: further SHA-256 of wsi-fl, beside the one that is installed.

    Raises:
        UsageError: when the hospital could not sign the plan, or the frame would allow more than its site file.
    """
    try:
        last = date.fromisoformat(until)
    except ValueError:
        raise UsageError("until when? say --until DATE, as in --until 2027-03-31") from None
    looked, limit = look(study, plan, site), study.site(site).max_epsilon or 0
    worth, wanted = looked.document["privacy"], {site, *(partners or plan.sites)}
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
    allows["partners"] = [f"{name} {key}" for name, key in plan.keys.items() if name in wanted]
    allows["guarantee"] = list(_STRONGEST_FIRST[: _STRONGEST_FIRST.index(worth["guarantee"]) + 1])
    limits = {"epsilon": epsilon, "runs": runs, "until": last.isoformat()}
    made = {"format": FORMAT, "id": uuid4().hex, "site": site, "allows": allows, **limits}
    return with_code(cast("Frame", made), codes)


def with_code(frame: Frame, codes: Sequence[str] = ()) -> Frame:
    """Return a frame that also allows the wsi-fl that is installed, and others by their SHA-256; its id stays."""
    known = list(dict.fromkeys([*frame["allows"]["code"], *codes, code_digest()]))
    return {**frame, "allows": {**frame["allows"], "code": known}}


def _of_method(study: Study, looked: Looked, method: str) -> dict[str, list[Any]]:
    """What a plan would say if it were of a method."""
    own = study.site(looked.site)
    files = tuple(own if one.name == own.name else one for one in sites_of(looked.document))
    with RunContext(study, looked.plan.pipeline(), method, RunFolder(study.runs / "plan"), files) as party:
        if not party.method.shares:
            raise UsageError(f"{method} shares nothing between hospitals and needs no frame")
        if not party.has_store(own.name):
            raise UsageError(f"the store of {own.name} is not on this machine; sign a frame where it is")
        return _said(looked, method, of_store(party, own.name), leaving(party, None, None))


def _said(
    looked: Looked, method: str, learned: Mapping[str, object], leaves: Sequence[Leaving]
) -> dict[str, list[Any]]:
    """What a plan says of each thing that a frame limits: what its models see in the own store, what would leave."""
    said, privacy = looked.document, looked.plan.pipeline().privacy
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
        "delta": [looked.cost.delta if looked.cost else None],
        "code": [said["code"]],
    }


def _outside(frame: Frame, looked: Looked, today: date) -> str:
    """Return in one line what of a plan that was looked at lies outside a frame today, in UTC; "" for nothing."""
    cost, learned, allows = looked.cost, looked.learned, frame["allows"]
    if is_over(frame, today):
        return f"its last day was {frame['until']}"
    if cost is None or learned is None:
        return "the hospital's store is not on this machine, so what it costs is not known"
    for what, values in _said(looked, looked.document["method"], learned, looked.document["leaves"]).items():
        if more := [value for value in values if value not in allows[what]]:
            return f"{what}: {shown(more[0])}, where the frame has {'; '.join(map(shown, allows[what])) or 'none'}"
    if cost.framed_runs >= frame["runs"]:
        return f"the frame is for {frame['runs']} runs, and it had them"
    if cost.framed is not None and cost.framed > (frame["epsilon"] or 0):
        return f"all plans of the frame would cost ε = {cost.framed:.2f} of {frame['epsilon'] or 0:g}"
    return ""


def admit(study: Study, identity: Identity, plan: Plan) -> None:
    """Approve a plan in the name of the hospital's frame; do nothing without one, or where the plan is approved.

    What became of it is said, and stands in `federation/frame.log`; the plan is kept in `federation/plans/`.

    Raises:
        UsageError: in one line that others may know, when the plan lies outside the frame.
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

    try:
        looked = look(study, plan, identity.name, frame)
        why = _outside(frame, looked, datetime.now(UTC).date())
        if not why and (above := above_words(looked.cost)):
            raise UsageError(above)
    except Exception as error:  # may name what is in the store
        tell(f"{called} was refused: {one_line(error)}")
        own = "its own federation/frame.log says why"
        raise UsageError(f"site {identity.name} cannot approve {called} in its frame; {own}") from None
    if why:
        tell(f"{called} was refused, for it lies outside the frame: {why}")
        raise UsageError(f"{called} lies outside the frame of {identity.name}: {why}")
    assert looked.cost is not None
    write_text(study.root / "federation" / "plans" / f"{plan.digest}.json", plan.text)
    sign(study, looked, identity, frame)
    tell(f"{called} was approved in the frame: {looked.document['does']} {cost_words(looked.cost)}")


def frame_lines(frame: Frame) -> Lines:
    """Show people what a frame allows."""
    limit = "no ε" if frame["epsilon"] is None else f"ε = {frame['epsilon']:g} in all"
    yield Line(
        f"until {frame['until']} up to {frame['runs']} runs begin at {frame['site']} without a further signature, at "
        f"{limit}, of plans with"
    )
    for what, values in frame["allows"].items():
        yield Line(f"  {what}: {'; '.join('nothing' if one is None else str(one) for one in values)}")
