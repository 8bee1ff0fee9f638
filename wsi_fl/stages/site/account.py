"""The privacy account of a site: its terms, its ledger, what a round costs, and how many rounds it can afford.

Here is the one door to the ledger of a site: of a real hospital it must know all that was ever spent.
"""

from __future__ import annotations

import glob
import os
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Count
from wsi_fl.federation.methods import Method, Weights
from wsi_fl.learning.units import Units, rows_alone, whole_patients
from wsi_fl.privacy.accounting import MOST_EPSILON, Mechanism, epsilon, group_epsilon, sigma_for
from wsi_fl.privacy.guarantee import Round, Terms, rounds_of
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.privacy.plan import PrivacyPlan, differences, plan_of_round
from wsi_fl.privacy.plan import planned as best_plan
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import SiteFolder
from wsi_fl.stages.site.data import counts_patients
from wsi_fl.stages.site.party import RunContext, method_for
from wsi_fl.stages.site.sums import DAMAGED_LETTER, RUN
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.tensors import load_document
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
    """Refuse to spend anything of a real hospital whose file does not say how much, and at which δ."""
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
    """Return batch size and noise that keep all limits (ε, what counts towards it); `epochs` 0 is one release."""
    rate, steps, batch_size = 1.0, 1, n
    if epochs:
        ways = [best_plan(n, epochs, limit, delta, clip=clip, spent=before) for limit, before in limits]
        way = min(ways, key=lambda way: epsilon([way.mechanism], delta))
        rate, steps, batch_size = way.mechanism.sample_rate, way.mechanism.steps, way.batch_size
    return batch_size, max(sigma_for(limit, rate, steps, delta, spent=before) for limit, before in limits)


@dataclass(frozen=True)
class Account:
    """The account of a site in a run.

    Attributes:
        ledger: what was spent, and the door through which things leave, under the site's terms.
        units: what privacy counts, rows or patients, canaries among them.
        plan: what one round applies; None without privacy, and where sums were released before.
    """

    ledger: PrivacyLedger
    units: Units
    plan: PrivacyPlan | None


def open_account(
    party: RunContext,
    index: int,
    units: Units,
    canaries: NDArray[np.bool_] | None = None,
    *,
    planned: str = "",
) -> Account:
    """Open the account of a site in the run of a party, or in one that is only planned.

    Args:
        units: what privacy counts, without canaries.
        canaries: bool[m], which of those that are planted are in; None where none are.
        planned: what the ledger calls a run that has not begun; "" for the party's.

    Raises:
        UsageError: without a budget, with a ledger that lacks what was spent, or for another plan than the run's.
        WsiFlError: when the ledger is damaged, or does not know what the site has released.
    """
    site, pipeline, study, run = party.sites[index], party.pipeline, party.study, party.run
    name = site.name
    # every synthetic patch rests on all real ones: what protects one of them protects nobody
    bare = site.receives or party.data(name).is_synthetic()
    worth = "none" if bare else guarantee_of(party.method, pipeline)
    terms = terms_of(site, pipeline, worth)
    if spends(pipeline) and not site.receives:
        require_budget(site)
    if canaries is not None:
        units = units.with_canaries(canaries)
    released = party.releases.get(name)
    includes = (RUN,) if released and pipeline.privacy.enabled else ()
    named = {"promise": study.promise(name), "agreement": run.agreement, "approved": run.approved}
    called = planned or run.identity
    ledger = open_ledger(study, site, called, terms, includes, {} if planned else named)
    if released:
        check_own(ledger, RUN, released.digest, study.relative(study.release(name)))
    if party.by_files or site.receives:
        return Account(ledger, units, None)
    folder = None if planned else run.site(name)
    plan = _agreed_plan(folder, site, pipeline, units.n, ledger, once=party.method.once)
    return Account(ledger, units, plan)


def units_of(pipeline: Pipeline, patient: NDArray[np.str_], site: str) -> Units:
    """Return what privacy counts at a site whose rows are of these patients; without privacy batches are of rows."""
    if not counts_patients(pipeline):
        return rows_alone(len(patient))
    return whole_patients(patient, pipeline.privacy.max_rows, site)


def open_ledger(
    study: Study,
    site: SiteFile,
    run: str,
    terms: Terms,
    includes: Collection[str] = (),
    named: Mapping[str, str] = MappingProxyType({}),
) -> PrivacyLedger:
    """Return a site's privacy account, which for a real hospital must know all that was ever spent here.

    Args:
        includes: other entries whose cost is part of the run's.
        named: what each of its lines names; see `PrivacyLedger`.

    Raises:
        UsageError: when the ledger is missing or lacks rounds of a run, or a release, that lie in the study.
        WsiFlError: when the file is damaged, changed or older than what its heads remember.
    """
    path = study.ledger(site.name)
    beside_store = _head_beside_store(study, site.name)
    account = partial(
        PrivacyLedger, path, site=site.name, run=run, terms=terms, includes=includes, named=named
    )
    if not site.real:
        if beside_store.exists():
            raise WsiFlError(
                f"sites/{site.name}.toml says real = false, but {study.relative(beside_store)} belongs to a real "
                "hospital's ledger; say real = true, or simulate under another name"
            )
        return account()
    rounds = _rounds_here(study, site.name)  # before the ledger, as is the next line: they may grow
    sums = (study.release_at_home(site.name), study.release(site.name))
    released = _claims(study, [file for file in sums if file.exists()])
    if not path.exists() and (rounds or released):
        raise UsageError(
            f"{study.relative(path)} is missing, though site {site.name} has released before; restore it: it is the "
            "site's budget"
        )
    ledger = account(heads=heads_of(study, site.name))
    for folder, identity, last in rounds:
        if max((entry.round for entry in ledger.of_run(identity)), default=0) < last:
            raise UsageError(
                f"{study.relative(path)}: lacks rounds of {folder}, which reached round {last}; put the newest backup "
                "of the ledger back: it is the site's budget (or take the folder away, if that run is another "
                "hospital's)"
            )
    known = {entry.released.split()[-1] for entry in ledger.entries if entry.released}
    for file, digest in released:
        if digest not in known:
            raise UsageError(
                f"{study.relative(path)}: lacks the release of {file}; restore both from the same backup: the ledger "
                "is the site's budget"
            )
    return ledger


def _head_beside_store(study: Study, site: str) -> Path:
    return study.store(site).parent / "ledger.head.json"


def heads_of(study: Study, site: str) -> list[Path]:
    """Return the files that remember how far the ledger of a real site was: beside its store, and of this user."""
    return [_head_beside_store(study, site), head_of_user(site)]


def head_of_user(site: str) -> Path:
    """Where this user remembers how far the ledger of a real site was; UsageError for no place to write."""
    try:
        told = Path(os.environ.get("XDG_STATE_HOME", ""))  # a relative one does not count, as XDG has it
        state = (told if told.is_absolute() else Path.home() / ".local" / "state") / "wsi-fl" / "ledgers"
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(state, os.W_OK)
    except (OSError, RuntimeError):  # no such folder, or no home
        writable = False
    if not writable:
        raise UsageError(
            f"the budget of real site {site} is remembered in ~/.local/state, which cannot be written; set "
            "XDG_STATE_HOME to a writable folder of yours"
        )
    return state / f"{site}.head.json"


def _rounds_here(study: Study, site: str) -> list[tuple[str, str, int]]:
    """(folder, run's id, last round that cost ε) of every run of this study that the site took part in.

    Heads of letters that were released before cost nothing.
    """
    found = []
    for metrics in sorted(study.runs.glob(f"*/sites/{glob.escape(site)}/metrics.jsonl")):
        run = RunFolder(metrics.parents[2])
        paid = [line["round"] for line in run.site(site).metrics() if line["takes_part"] and line["epsilon"]]
        if paid and not (run.site(site).released() and _of_letters(run)):
            found.append((study.relative(run.path), run.identity, max(paid)))
    return found


def _of_letters(run: RunFolder) -> bool:
    """Return whether a run that used letters made its heads of them, and did not only start from one."""
    pipeline = load_pipeline(run.path / "config.toml")
    return pipeline.train.from_released and method_for(str(run.manifest["method"]), pipeline).once


def _claims(study: Study, files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (label, digest that it names) of copies of a letter; whether the numbers fit is another question.

    A damaged copy is passed over where another one is whole; WsiFlError where none is.
    """
    claims, errors = [], []
    for file in files:
        try:
            document = load_document(file, "release")
            claims.append((study.relative(file), str(document.get("digest"))))
        except WsiFlError as error:
            errors.append(error)
    if errors and not claims:
        raise WsiFlError(f"{errors[0]}; {DAMAGED_LETTER}")
    return claims


def check_own(ledger: PrivacyLedger, run: str, known: str, label: str) -> Round:
    """Return the round of a run in which this site released what has this digest, or raise WsiFlError."""
    for round_ in rounds_of(ledger.of_run(run)):
        if known in round_.releases.values():
            return round_
    # a real hospital's account has refused before, whatever is asked
    raise WsiFlError(
        f"{label}: {ledger.path.parent.name}/{ledger.path.name} does not know its numbers, or knows newer ones; "
        "restore both from the same backup, or measure anew with --again, which costs as much as a release"
    )


def _agreed_plan(
    folder: SiteFolder | None,
    site: SiteFile,
    pipeline: Pipeline,
    n: int,
    ledger: PrivacyLedger,
    *,
    once: bool = False,
) -> PrivacyPlan | None:
    """Return the plan that the run keeps, or the ledger knows, or one for what is on the site's account as it begins.

    UsageError where settings, canaries or the store would now make another one. `folder` is None for a planned run.
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


def planned(site: Site | Account, rounds: int) -> list[Mechanism]:
    """What all rounds cost a site together, and before them what counts for the run; nothing without privacy."""
    rest = [replace(site.plan, steps=site.plan.steps * rounds)] if site.plan else []
    return [*site.ledger.mechanisms(), *rest]


def affordable_rounds(site: Site | Account, rounds: int) -> int:
    """How many of `rounds` rounds the site's budget allows, those of this run that are on its account included."""
    limit = site.ledger.terms.max_epsilon
    done = site.ledger.n_rounds()
    if limit is None or site.plan is None:
        return rounds
    past = site.ledger.mechanisms(lifetime=site.ledger.terms.lifetime)
    plan, delta = site.plan, site.ledger.terms.delta

    def crosses(more: int) -> bool:
        return epsilon([*past, replace(plan, steps=plan.steps * more)], delta) > limit

    # ε grows with rounds, so that few prices find the first round that is too much
    return done + bisect_left(range(1, max(0, rounds - done) + 1), True, key=crosses)


class Group(TypedDict):
    """What ε per row is worth to a patient with so many rows; None for ε beyond what says anything."""

    rows: Count
    epsilon: Amount | None
    delta: Amount


def group_of(site: Site, spent: Sequence[Mechanism] | None = None) -> Group | None:
    """Return what ε per row is worth to the patient with the most training rows; None where that is not the question.

    How many rows that patient has depends on one patient alone, so it stays with a real site. Without `spent` it is of
    what the run has applied so far.
    """
    ledger = site.ledger
    if spent is None and ledger.epsilon() is None:
        return None
    return worth_to_patient(ledger.terms, site.train.patient, ledger.mechanisms() if spent is None else spent)


def worth_to_patient(terms: Terms, patient: NDArray[np.str_], spent: Sequence[Mechanism]) -> Group | None:
    """Return what ε per row of `spent` is worth to the patient with the most rows; None where ε is per patient."""
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


def spent_words(row: Mapping[str, Any]) -> str:
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
