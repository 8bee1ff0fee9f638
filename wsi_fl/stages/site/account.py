"""The privacy account of a site: terms, ledger, cost of a round, affordable rounds.

All access to a site's ledger is through here: a real hospital's must have all past spending.
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
    """Return α and β; in strict mode β is 0: the proxy is trained on cross-entropy alone."""
    beta = 0.0 if pipeline.privacy.enabled and pipeline.privacy.mode == "strict" else pipeline.train.beta
    return Weights(pipeline.train.alpha, beta)


def guarantee_of(method: Method, pipeline: Pipeline) -> Guarantee:
    """Return the guarantee level of ε; see `Guarantee`."""
    if not spends(pipeline):
        return "none"
    if method.once and pipeline.privacy.noise == "shared":
        return "shared"
    return "nominal" if method.taught and weights_of(pipeline).beta > 0 else "guaranteed"


def terms_of(site: SiteFile, pipeline: Pipeline, guarantee: Guarantee) -> Terms:
    """Return the terms of a site for releases of this guarantee level."""
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
    """Return whether training costs ε: with secret noise."""
    return pipeline.privacy.noisy and pipeline.privacy.insecure_seed is None


def require_budget(site: SiteFile) -> None:
    """Refuse to spend for a real hospital whose file lacks max_epsilon or delta."""
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
    """Return the privacy plan of a round of a site with n privacy units; None without differential privacy.

    With `privacy.target_epsilon` each site chooses batch size and noise: the best plan whose rounds together, added to
    `spent`, reach the target and no more. A smaller `max_epsilon` binds too, at a real site with its whole `past`.

    Args:
        spent: earlier mechanisms on the same units that count for this run.
        past: all mechanisms on the site's account.
        is_oneshot: whether all units are released at once, not trained on in batches.

    Raises:
        UsageError: when no noise suffices, or δ is too large for n.
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
    """Return a factory of the plan of a round, given batch size and noise multiplier."""
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
    """Return batch size and noise within all limits (ε, earlier mechanisms); `epochs` 0 is a single release."""
    rate, steps, batch_size = 1.0, 1, n
    if epochs:
        ways = [best_plan(n, epochs, limit, delta, clip=clip, spent=before) for limit, before in limits]
        way = min(ways, key=lambda way: epsilon([way.mechanism], delta))
        rate, steps, batch_size = way.mechanism.sample_rate, way.mechanism.steps, way.batch_size
    return batch_size, max(sigma_for(limit, rate, steps, delta, spent=before) for limit, before in limits)


@dataclass(frozen=True)
class Account:
    """The privacy account of a site in a run.

    Attributes:
        ledger: of all spending and releases, under the site's terms.
        units: privacy units, rows or patients, canaries included.
        plan: of a round; None without differential privacy, and where class statistics were released before.
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
    """Open the account of a site in the context's run, or in a planned run.

    Args:
        units: privacy units, without canaries.
        canaries: bool[m], which canaries are included; None for none.
        planned_run: ledger name of a run that has not begun; "" for the context's run.

    Raises:
        UsageError: without a budget, with a ledger that lacks past spending, or for another plan than the run's.
        WsiFlError: when the ledger is damaged, or lacks a release of the site.
    """
    site, pipeline, study, run = party.sites[index], party.pipeline, party.study, party.run
    name = site.name
    # each synthetic patch rests on all real ones, so that its protection protects no patient
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
    """Return the privacy units of rows of these patients; without differential privacy each row is one."""
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
    """Open a site's ledger, which for a real hospital must have all past spending of this study.

    Args:
        includes: other entries whose cost is part of the run's.
        named: fields of each of its lines; see `PrivacyLedger`.

    Raises:
        UsageError: when the ledger is missing, or lacks rounds of a run or a release in the study.
        WsiFlError: when the file is damaged, changed or older than its anchor files.
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
    rounds = _rounds_here(study, site.name)  # read before the ledger, as the next line: they may grow
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
    """Return the anchor files of a real site's ledger: beside its store, and of this user."""
    return [_head_beside_store(study, site), head_of_user(site)]


def head_of_user(site: str) -> Path:
    """Return this user's anchor file of a real site's ledger; UsageError where it cannot be written."""
    try:
        told = Path(os.environ.get("XDG_STATE_HOME", ""))  # XDG ignores relative paths
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
    """Return (folder, run's id, last round that cost ε) of each run of this study with the site.

    Heads of class statistics that were released before cost nothing.
    """
    found = []
    for metrics in sorted(study.runs.glob(f"*/sites/{glob.escape(site)}/metrics.jsonl")):
        run = RunFolder(metrics.parents[2])
        paid = [line["round"] for line in run.site(site).metrics() if line["takes_part"] and line["epsilon"]]
        if paid and not (run.site(site).released() and _of_letters(run)):
            found.append((study.relative(run.path), run.identity, max(paid)))
    return found


def _of_letters(run: RunFolder) -> bool:
    """Return whether a run computed its heads from released statistics, not only its initial weights."""
    pipeline = load_pipeline(run.path / "config.toml")
    return pipeline.train.from_released and method_for(str(run.manifest["method"]), pipeline).once


def _claims(study: Study, files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (label, digest in the header) of copies of released statistics; numbers are not checked.

    Damaged copies are skipped; WsiFlError where all are damaged.
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
    """Return the round of a run in which this site made the release with a digest; WsiFlError for none."""
    for round_ in rounds_of(ledger.of_run(run)):
        if known in round_.releases.values():
            return round_
    raise WsiFlError(
        f"{label}: {ledger.path.parent.name}/{ledger.path.name} lacks its release, or has a newer one; "
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
    """Return the plan stored in the run or ledger, or a new one for the site's account.

    UsageError where settings, canaries or the store now lead to another plan. `folder` is None for a planned run.
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
    if privacy.target_epsilon is not None:  # chosen by the site
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
    """Return the mechanisms that count for a run: earlier ones and all its rounds."""
    rest = [replace(site.plan, steps=site.plan.steps * rounds)] if site.plan else []
    return [*site.ledger.mechanisms(), *rest]


def affordable_rounds(site: Site | Account, rounds: int) -> int:
    """Return how many of `rounds` rounds the site's budget allows, those already charged included."""
    limit = site.ledger.terms.max_epsilon
    done = site.ledger.n_rounds()
    if limit is None or site.plan is None:
        return rounds
    past = site.ledger.mechanisms(lifetime=site.ledger.terms.lifetime)
    plan, delta = site.plan, site.ledger.terms.delta

    def crosses(more: int) -> bool:
        return epsilon([*past, replace(plan, steps=plan.steps * more)], delta) > limit

    # ε grows with rounds, so that bisection finds the first round beyond the limit
    return done + bisect_left(range(1, max(0, rounds - done) + 1), True, key=crosses)


class Group(TypedDict):
    """ε of a patient with this many rows (group privacy); None for an ε too large to mean anything."""

    rows: Count
    epsilon: Amount | None
    delta: Amount


def group_of(site: Site, spent: Sequence[Mechanism] | None = None) -> Group | None:
    """Return ε of the patient with the most training rows; None where the unit is the patient, or nothing was spent.

    That number of rows depends on a single patient, so it stays at a real site. `spent` is by default the run so far.
    """
    ledger = site.ledger
    if spent is None and ledger.epsilon() is None:
        return None
    return worth_to_patient(ledger.terms, site.train.patient, ledger.mechanisms() if spent is None else spent)


def worth_to_patient(terms: Terms, patient: NDArray[np.str_], spent: Sequence[Mechanism]) -> Group | None:
    """Return ε of `spent` for the patient with the most rows; None where ε is per patient."""
    names = patient[patient != ""]
    if terms.unit != "row" or not spent or not len(names):
        return None
    k = int(np.unique(names, return_counts=True)[1].max())
    return {"rows": k, "epsilon": group_epsilon(spent, terms.delta, k), "delta": terms.delta}


def above_budget(group: Group | None, max_epsilon: float | None) -> bool:
    """Return whether ε of the patient with the most rows exceeds a budget."""
    if group is None or max_epsilon is None:
        return False
    return group["epsilon"] is None or group["epsilon"] > max_epsilon


def group_words(group: Group) -> str:
    """Describe ε of the patient with the most rows."""
    worth = f"more than {MOST_EPSILON:g}" if group["epsilon"] is None else f"{group['epsilon']:.1f}"
    return f"all {group['rows']} rows of the patient with the most rows together have ε = {worth}"


_WORTH = {"shared": "guaranteed to all who see the sum, and against colluding sites as agreed"}


def spent_words(row: Mapping[str, Any]) -> str:
    """Describe ε, its guarantee and its parameters, from a site's row in a summary or a plan."""
    if row["epsilon"] is None:
        return "no differential privacy"
    worth = _WORTH.get(row["guarantee"], row["guarantee"])
    spent = f"ε = {row['epsilon']:.2f} ({worth}) at δ = {row['delta']:g}, per {row['unit']}"
    if row.get("real") and row["lifetime_epsilon"] is not None:
        worth = row["lifetime_guarantee"]
        spent += f"; ever spent {row['lifetime_epsilon']:.2f} of {row['max_epsilon'] or 0:g} ({worth})"
    if row["sigma"] is None:  # only released statistics were charged
        return spent
    return f"{spent}; B = {row['batch_size']}{' patients' if row['unit'] == 'patient' else ''}, σ = {row['sigma']:g}"
