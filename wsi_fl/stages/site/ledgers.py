"""The account of a site in a run: its ledger, what privacy counts, and its plan; opened once and handed down.

Here is the one door to the ledger of a site: of a real hospital it must know all that was ever spent.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples
from wsi_fl.learning.units import Units, rows_alone, whole_patients
from wsi_fl.privacy.guarantee import Round, Terms, rounds_of
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import agreed_plan, guarantee_of, require_budget, spends, terms_of
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import RUN
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.tensors import load_document
from wsi_fl.types import UsageError, WsiFlError


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

    @property
    def terms(self) -> Terms:
        """Return what the site promises."""
        return self.ledger.terms


def open_account(
    party: RunContext,
    index: int,
    data: Data,
    train: Examples,
    canaries: NDArray[np.bool_] | None = None,
    *,
    planned: str = "",
) -> Account:
    """Open the account of a site in the run of a party, or in one that is only planned.

    Args:
        index: of the site.
        data: its store.
        train: its training rows.
        canaries: bool[m], which of those that are planted are in; None where none are.
        planned: what the ledger calls a run that has not begun; "" for the party's.

    Raises:
        UsageError: when a real hospital has no budget, its ledger lacks what was spent, or the run began with another
            plan.
        WsiFlError: when the ledger is damaged, or does not know what the site has released.
    """
    site, pipeline, study, run = party.sites[index], party.pipeline, party.study, party.run
    name = site.name
    # every synthetic patch rests on all real ones: what protects one of them protects nobody
    worth = "none" if data.is_synthetic() or site.receives else guarantee_of(party.method, pipeline)
    terms = terms_of(site, pipeline, worth)
    if spends(pipeline) and not site.receives:
        require_budget(site)
    units = units_of(pipeline, train, name)
    if canaries is not None:
        units = units.with_canaries(canaries)
    released = party.releases.get(name)
    includes = (RUN,) if released and pipeline.privacy.enabled else ()
    named = {"promise": study.promise(name), "agreement": run.agreement, "approved": run.approved}
    called = planned or run.identity
    ledger = open_ledger(study, site, called, terms, includes, {} if planned else named)
    if released:
        check_own(ledger, RUN, released.digest, study.relative(study.release(name)))
    if party.by_files:
        return Account(ledger, units, None)
    folder = None if planned else run.site(name)
    plan = agreed_plan(folder, site, pipeline, units.n, ledger, once=party.method.once)
    return Account(ledger, units, plan)


def units_of(pipeline: Pipeline, train: Examples, site: str) -> Units:
    """What privacy counts at a site; without it batches are of rows."""
    privacy = pipeline.privacy
    if not privacy.enabled or privacy.unit == "row":
        return rows_alone(len(train))
    return whole_patients(train, privacy.max_rows, site)


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
        run: the run's id.
        terms: under which the site takes part.
        includes: other entries whose cost is part of the run's.
        named: what each of its lines names; see `PrivacyLedger`.

    Raises:
        UsageError: when the ledger is missing or lacks rounds of a run, or a release, that lie in the study.
        WsiFlError: when the file is damaged, changed or older than what its heads remember.
    """
    path = study.ledger(site.name)
    beside_store = _head_beside_store(study, site.name)
    account = partial(
        PrivacyLedger,
        path,
        site=site.name,
        run=run,
        terms=terms,
        includes=includes,
        named=named,
    )
    if not site.real:
        if beside_store.exists():
            raise WsiFlError(
                f"sites/{site.name}.toml says real = false, but {study.relative(beside_store)} belongs to a real "
                "hospital's ledger; say real = true, or simulate under another name"
            )
        return account()
    rounds = _rounds_here(study, site.name)  # before the ledger, as is the next line: they may grow
    released = _released_here(study, site.name)
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
    """Where the user's account on this machine remembers how far the ledger of a real site was.

    Raises:
        UsageError: when nothing can be written there: copies of a study would not know of one another.
    """
    try:
        told = Path(
            os.environ.get("XDG_STATE_HOME", "")
        )  # one that is relative does not count, as XDG has it
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
    """(folder, run's id, last round that cost ε) of every run of this study that the site took part in."""
    found = []
    for metrics in sorted(study.runs.glob(f"*/sites/{glob.escape(site)}/metrics.jsonl")):
        run = RunFolder(metrics.parents[2])
        paid = [line["round"] for line in run.site(site).metrics() if line["takes_part"] and line["epsilon"]]
        if paid:
            found.append((study.relative(run.path), run.identity, max(paid)))
    return found


def _released_here(study: Study, site: str) -> list[tuple[str, str]]:
    """(file, digest) of all sums that the site has released in this study."""
    files = (study.release_at_home(site), study.release(site))
    return [(study.relative(file), claimed(file)) for file in files if file.exists()]


def claimed(file: Path) -> str:
    """Return the digest that a released file names; whether it is that of its numbers is another question."""
    return str(load_document(file, "release").get("digest"))


def check_own(ledger: PrivacyLedger, run: str, known: str, label: str) -> Round:
    """Return the round of a run in which this site released what has this digest: its ε rests on that noise.

    Raises:
        WsiFlError: when it released none such, or has put another measurement in the place of this one before it left.
    """
    for round_ in rounds_of(ledger.of_run(run)):
        if known in round_.releases.values():
            return round_
    # a real hospital's account has refused before, whatever is asked
    raise WsiFlError(
        f"{label}: {ledger.path.parent.name}/{ledger.path.name} does not know its numbers, or knows newer ones; "
        "restore both from the same backup, or measure anew with --again, which costs as much as a release"
    )
