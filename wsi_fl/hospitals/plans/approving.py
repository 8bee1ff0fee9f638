"""A hospital's own look at a plan before it signs: whether it says what will run, and what it costs here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.hospitals.plans.contents import Learned, odd_in, of_store
from wsi_fl.hospitals.plans.frames import Frame, of_frame
from wsi_fl.hospitals.plans.making import (
    PlanDocument,
    PlannedSite,
    described,
    document_of,
    left_by,
    sites_of,
    text_of,
)
from wsi_fl.hospitals.plans.signed import (
    PROMISES,
    Plan,
    approval_path,
    approve,
    changes,
    check_code,
    check_key,
    check_promises,
    check_withdrawn,
    cost_path,
    plan_path,
    shown,
)
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.making import fingerprint_line
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import MOST_ATTEMPTS, applied, detection_of
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.report.words import count, detected, size
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import (
    Group,
    above_budget,
    affordable_rounds,
    group_words,
    open_account,
    planned,
    require_budget,
    spends,
    worth_to_patient,
)
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import RUN
from wsi_fl.stages.training.carrying import own_letter
from wsi_fl.stages.training.checks import check
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import toml_value
from wsi_fl.system.files import write_json, write_text
from wsi_fl.types import UsageError, encoder_differences

_OF_STORE = {
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
class Cost:
    """What a plan costs a hospital, from its own store and its own ledger.

    Attributes:
        n_units: how many records are protected, rows or patients.
        epsilon: of all rounds of the plan; None where there is no differential privacy.
        max_tpr_at_fpr_1pct: what share of those protected the best test finds in all that the account holds then, with
            1 false alarm in 100; None where nothing is promised.
        lifetime_epsilon: the same on top of everything on the account.
        rounds: how many of the plan's rounds the budget is enough for.
        group, lifetime_group: what both ε are worth to the patient with the most rows; None where ε is per patient
            already, and where the store knows no patients.
        most_epsilon: of all attempts at a sum that one approval allows; None where no sum is made.
        framed: the ε of everything that was spent in a frame and of all that this plan may spend; None without one.
        framed_runs: how many runs the frame has had.
        letter: the ε of the letter that was released before and is sent, so that the plan spends nothing; None where
            the plan makes what it sends.
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
    def above(self) -> Group | None:
        """What is above `max_epsilon` though ε per row is not, of everything on the account; None where nothing is."""
        return self.lifetime_group if above_budget(self.lifetime_group, self.max_epsilon) else None


@dataclass(frozen=True)
class Looked:
    """A plan that a hospital may sign, which site looked, and what it should know that refuses nothing.

    `cost` and `learned` are from the hospital's own store; None where that is not on this machine.
    """

    plan: Plan
    document: PlanDocument
    site: str
    cost: Cost | None
    notes: tuple[str, ...]
    learned: Learned | None = None


def look(study: Study, plan: Plan, site: str, frame: Frame | None = None) -> Looked:
    """Check a plan against its own settings, this installation, the hospital's site file and its store.

    Nothing is written but the secret of the hospital's lots, where it has none and the plan draws who is held out. No
    other site's store is opened.

    Args:
        frame: that the plan might lie in: what was spent in it is counted, and its list of code holds.

    Raises:
        UsageError: in one line that says why the plan cannot be signed here.
    """
    document = document_of(plan)
    there = {one["name"]: one for one in document["sites"]}
    if site not in there:
        raise UsageError(f"site {site} is not in this plan, which has {', '.join(there)}")
    if not (study.root / "sites" / f"{site}.toml").is_file():
        raise UsageError(
            f"sites/{site}.toml is missing in {study.root}; write your hospital's own file, with max_epsilon and delta"
        )
    own, sites = study.site(site), sites_of(document)
    check_promises(there[site], own)
    check_code(plan, site, frame["allows"]["code"] if frame else ())
    files = tuple(own if one.name == site else one for one in sites)
    pipeline, run = plan.pipeline(), RunFolder(study.runs / "plan")
    with RunContext(study, pipeline, plan.method, run, files) as party:
        check(party, "mpi", stores=False)
        _refuse_other_words(replace(party, sites=sites), plan, document)
        if spends(pipeline) and not own.receives:
            require_budget(own)
        cost, learned, remark = None, None, ""
        if party.has_store(site):
            learned = of_store(party, site)
            _refuse_other_store(learned, document, site)
            cost = _cost(party, plan, own, frame["id"] if frame else "")
            remark = party.data(site).remark
    notes = [*_notes(study, sites, site, cost, plan), *filter(None, [remark])]
    return Looked(plan, document, site, cost, tuple(notes), learned)


def sign(study: Study, looked: Looked, identity: Identity, frame: Frame | None = None) -> Path:
    """Sign a plan in the name of the hospital that looked, or of its frame where no person does.

    The plan's other sites get a file in `sites/` that holds what the plan says of them, where there is none. Returns
    where the approval is, which the coordinator needs.
    """
    check_withdrawn(looked.plan, identity.root, looked.plan.sites)
    check_key(looked.plan, identity.certificate, looked.site)
    if identity.name != looked.site:
        raise UsageError(f"this kit belongs to {identity.name}, but the plan was checked for {looked.site}")
    for site in sites_of(looked.document):
        path = study.root / "sites" / f"{site.name}.toml"
        if not path.exists():
            said = {key: getattr(site, key) for key in ("name", *PROMISES)}
            lines = [f"{key} = {toml_value(value)}" for key, value in said.items() if value is not None]
            plan = f"plan {looked.plan.digest[:8]}"
            head = f"# Another hospital's, as {plan} says; its own file stays there."
            write_text(path, "\n".join([head, *lines]) + "\n")
    approve(study, looked.plan, identity, frame)
    cost = {"plan": looked.plan.digest, "cost": looked.cost and asdict(looked.cost)}
    write_json(cost_path(study, identity.name), cost)
    return approval_path(study, identity.name)


def _refuse_other_words(party: RunContext, plan: Plan, document: PlanDocument) -> None:
    """Refuse a plan whose readable part is not, letter by letter, what its settings and table of sites come to."""
    right = described(party, document["pipeline"], document["learns"], plan.keys)
    if document["code"] != right["code"]:  # the site's frame lists both
        right |= {"wsi_fl": document["wsi_fl"], "code": document["code"], "packages": document["packages"]}
    odd = odd_in(document["learns"], party)
    if odd or plan.text != text_of(right, document["created"]):
        wrong = [key for key, value in right.items() if plan.document.get(key) != value]
        wrong += [f"learns.{odd}"] if odd else []
        raise UsageError(
            f"the plan's text does not match its settings ({next(iter(wrong), 'it has more than its keys')}); it was "
            "changed by hand, so ask for a new plan by `wsi-fl federation plan`"
        )


def _refuse_other_store(learned: Learned, document: PlanDocument, site: str) -> None:
    """Refuse a plan for another question, encoder, weights, directions, classes or shape than its store has."""
    own: dict[str, object] = dict(learned)
    said: dict[str, object] = dict(document["learns"])
    for key, what in _OF_STORE.items():
        wanted, found = said[key], own[key]
        if None not in (wanted, found) and not is_alike(key, wanted, found):
            raise UsageError(
                f"the plan is for {what} {shown(wanted)}, but {site} has {shown(found)}; make the store as the plan "
                "says, or ask for another plan"
            )


def is_alike(key: str, wanted: object, found: object) -> bool:
    """Return whether two values of a key of `Learned` mean the same; without a store a plan knows an encoder's name."""
    return not any(encoder_differences([str(wanted), str(found)])) if key == "encoder" else wanted == found


def _cost(party: RunContext, plan: Plan, site: SiteFile, frame: str) -> Cost | None:
    """What the plan costs, beside the runs of a frame with this id; UsageError where no round can be afforded."""
    from wsi_fl.stages.training.workshop import learned_from  # and with it PyTorch

    pipeline, rounds = party.pipeline, party.pipeline.train.rounds
    sends = party.by_files and not site.receives
    if sends:
        own_letter(party, site.name)
    train, _, units = learned_from(party, site.name)
    planted = np.zeros(pipeline.audit.canaries, bool)
    index = party.names.index(site.name)
    account = open_account(party, index, units, planted, planned=f"plan {plan.digest[:32]}")
    ledger, terms, n_units = account.ledger, account.ledger.terms, account.units.n
    past = ledger.mechanisms(lifetime=True)
    framed = of_frame(ledger.entries, site.name, frame) if frame else []
    runs = len({entry.run_id for entry in framed})
    if not spends(pipeline) or site.receives:
        return Cost(n_units, terms.unit, None, None, terms.max_epsilon, terms.delta, rounds, framed_runs=runs)
    affordable = affordable_rounds(account, rounds)
    if not affordable:
        raise UsageError(
            f"sites/{site.name}.toml: max_epsilon = {terms.max_epsilon:g} is not enough for one round of this plan; "
            "ask for one with more noise or fewer rows in a batch"
        )
    alone = ledger.mechanisms()
    if sends:
        return Cost(
            n_units,
            terms.unit,
            0.0,
            epsilon(past, terms.delta),
            terms.max_epsilon,
            terms.delta,
            rounds,
            letter=epsilon(alone, terms.delta),
            framed=epsilon(applied(framed), terms.delta) if frame else None,
            framed_runs=runs,
        )
    of_plan = planned(account, rounds)[len(alone) :]
    run, ever = [*alone, *of_plan], [*past, *of_plan]
    most = of_plan * (MOST_ATTEMPTS if terms.guarantee == "shared" else 1)
    return Cost(
        n_units,
        terms.unit,
        epsilon(run, terms.delta),
        epsilon(ever, terms.delta),
        terms.max_epsilon,
        terms.delta,
        affordable,
        detection_of(terms.guarantee, ever),
        worth_to_patient(terms, train.patient, run),
        worth_to_patient(terms, train.patient, ever),
        epsilon([*alone, *most], terms.delta) if terms.guarantee == "shared" else None,
        epsilon([*applied(framed), *most], terms.delta) if frame else None,
        runs,
    )


def _notes(study: Study, sites: Sequence[SiteFile], me: str, cost: Cost | None, plan: Plan) -> list[str]:
    """What the people who sign should know."""
    found = []
    with suppress(UsageError, KeyError, ValueError):  # the first plan of a study, or no plan of this version
        before = Plan.load(plan_path(study))
        asked = "; ".join(changes(before, plan)) or "it asks the same"
        if before.digest != plan.digest:
            found.append(f"beside plan {before.digest[:8]}, which lies here: {asked}")
    if cost is None:
        found.append(
            f"the store of {me} is not on this machine, so what the plan costs here was not computed; sign where it is"
        )
    elif cost.unit == "row" and cost.epsilon is not None and cost.group is None:
        found.append(
            f"ε is per row, and the store of {me} names no patients, so what it is worth to a patient is not known"
        )
    rounds = plan.document["rounds"]
    if cost is not None and cost.rounds < rounds:
        found.append(
            f"your max_epsilon is enough for {cost.rounds} of {rounds} rounds; then {me} leaves and the others go on"
        )
    if len(plan.keys) < len(sites):
        found.append(
            "the plan pins no keys, so whoever holds the federation's root key can speak for any site; have it made "
            "with `federation plan --kit FOUNDED`"
        )
    if plan.method == RUN and not plan.pipeline().train.from_released and _wrote_before(study, me):
        found.append(
            f"{me} has released a letter before; this plan makes a further one, which costs ε again. Letters that lie "
            "there are sent for nothing by a plan of `federation plan --method oneshot --set train.from_released=true`"
        )
    for site in sites:
        if site.name == me or not (study.root / "sites" / f"{site.name}.toml").is_file():
            continue
        here = study.site(site.name)
        if other := [key for key in PROMISES if getattr(here, key) != getattr(site, key)]:
            found.append(
                f"sites/{site.name}.toml says another {other[0]} than the plan; remove the file to take what the plan "
                "says"
            )
    return found


def _wrote_before(study: Study, site: str) -> bool:
    """Return whether a letter of a site has left it, by a file or in a run of `oneshot`, as its ledger knows."""
    lines = [one for one in LedgerFile(study.ledger(site)).entries if one.site == site and one.sending]
    return any(RUN in one.run.split()[0].split("-")[:2] for one in lines)


def look_lines(looked: Looked) -> Lines:
    """Show people what they are about to sign."""
    said, privacy = looked.document, looked.document["privacy"]
    yield Line(
        f"plan {looked.plan.digest[:8]}: {said['does']} Pipeline {said['pipeline']}, {said['rounds']} rounds."
    )
    yield Line(f"  {said['waits']}")
    rows = [
        (
            one["name"],
            "yes" if one["real"] else "no",
            _allowed(one),
            *("–" if value is None else f"{value:g}" for value in (one["max_epsilon"], one["delta"])),
        )
        for one in said["sites"]
    ]
    yield Table("who takes part", ("site", "real", "allows", "max ε", "δ"), rows)
    for site in said["sites"]:
        yield fingerprint_line(site["name"], site["key"] or "not pinned")
    learned = said["learns"]
    classes = ", ".join(learned["classes"] or ["unknown classes"])
    trained = f"trained on {learned['data']} ({learned['encoder'] or 'pixels'})"
    yield Line(f"  {trained} to answer {learned['task']}: {classes}. {learned['says']}")
    if learned["weights"] is not None:
        yield Line(f"  models start from weights with the SHA-256 {learned['weights']}")
    if learned["parameters"] is not None:
        yield Line(f"  the model that travels has parameters with the SHA-256 {learned['parameters']}")
    if learned["projection"] is not None:
        yield Line(f"  features are summed along directions: {learned['projection']}")
    yield Line(f"  {privacy['says']}", "" if privacy["differential_privacy"] else "yellow")
    yield Line("what leaves your hospital:")
    for one in left_by(said, looked.site):
        each = f", {size(one['bytes'])} each" if one["bytes"] is not None else ""
        yield Line(f"  {one['what']} → {one['to']}; {one['often']}{each}. Protection: {one['protected_by']}")
    yield Line(f"what never leaves: {'; '.join(said['stays'])}")
    if looked.cost is not None:
        yield Line(cost_words(looked.cost))
        if looked.cost.group is not None:
            yield Line(f"  {_patient_words(looked.cost)}", "red" if looked.cost.above else "")
    for note in looked.notes:
        yield Line(f"  {note}", "yellow")


def _allowed(site: PlannedSite) -> str:
    """What a site allows by name; masked sums of shared noise are under differential privacy, all else is not."""
    if site["role"] == "receiver":
        return "nothing; it receives"
    if not site["real"]:
        return "everything without DP"
    kinds = site["allow"]
    bare = ", ".join(kind for kind in kinds if kind != "shared")
    said = [f"{bare} without DP"] if bare else ["nothing without DP"]
    return "; ".join([*said, *(["shared noise"] if "shared" in kinds else [])])


def cost_words(cost: Cost) -> str:
    """Say in one sentence what a plan costs a hospital."""
    of = f"{count(cost.n_units)} {'patients' if cost.unit == 'patient' else 'rows'} at your hospital"
    if cost.epsilon is None or cost.lifetime_epsilon is None:
        why = "there is no differential privacy" if cost.n_units else "nothing of its records leaves it"
        return f"{of}: no ε is spent, for {why}"
    limit = "no limit" if cost.max_epsilon is None else f"{cost.max_epsilon:g}"
    if cost.letter is not None:
        return (
            f"{of}: sends the letter that it released (ε = {cost.letter:.2f} at δ = {cost.delta:g}); nothing more is "
            f"spent, and everything spent before is {cost.lifetime_epsilon:.2f} of {limit}"
        )
    said = (
        f"{of}: all rounds cost ε = {cost.epsilon:.2f} at δ = {cost.delta:g}; with everything spent before "
        f"{cost.lifetime_epsilon:.2f} of {limit}"
    )
    if (most := cost.most_epsilon) is not None:
        said += f"; a sum that a site spoils is tried again, {MOST_ATTEMPTS} times in all at ε = {most:.2f}"
    return (
        said
        if cost.max_tpr_at_fpr_1pct is None
        else f"{said}; {detected(cost.max_tpr_at_fpr_1pct, cost.unit)}"
    )


def _patient_words(cost: Cost) -> str:
    """What ε per row is worth to the patient with the most rows."""
    assert cost.group is not None and cost.lifetime_group is not None
    ever = cost.lifetime_group["epsilon"]
    return f"{group_words(cost.group)}{'' if ever is None else f'; with everything spent before {ever:.1f}'}"


def above_words(cost: Cost | None) -> str:
    """Say what is above the budget though ε per row is not; "" where nothing is."""
    if cost is None or cost.above is None:
        return ""
    return f"{_patient_words(cost)}, which is above your max_epsilon = {cost.max_epsilon:g}"


def signed_lines(document: dict[str, Any]) -> Lines:
    """Say where the approval lies, and what to do with it."""
    yield Line(
        f"{document['site']} signed plan {document['plan'][:8]}; send {document['approval']} to the coordinator, then "
        "start your kit"
    )
