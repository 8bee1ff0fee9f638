"""`statistics`: a site's sums of features, taken, given noise and released once, without any network.

`statistics/<site>.safetensors` is what may leave, and people may copy it. The order: ledger line, a copy of what was
released beside the store, a second line that it may leave, then the file. After a crash before the copy nothing has
left, and the next release takes the place of the lost one; after it the same numbers are written again. So no crash
makes a site release two noisy versions. Nor do two studies on one ledger: numbers whose place was taken by another
study's do not leave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.local import DPSettings, Learner, sum_up
from wsi_fl.learning.units import Units
from wsi_fl.models import schema
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.guarantee import rounds_of
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Release, digest
from wsi_fl.privacy.plan import PrivacyPlan, require_planned
from wsi_fl.stages.prepare.sources import Which, asked_for
from wsi_fl.stages.site import account
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import RUN, Facts, ReleasedSums, read_sums, refuse_others, wanted_of, write_sums
from wsi_fl.stages.training.workshop import build_model, learned_from
from wsi_fl.stages.work.console import Line, Lines, say
from wsi_fl.stages.work.job import Job, device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import locked
from wsi_fl.types import UsageError, WsiFlError


def release(study: Study, *, again: bool = False, **which: Unpack[Which]) -> dict[str, Any]:
    """Release the sums of one site, or of every site of the pipeline; return the `--json` document.

    A site that has released some keeps them, and only `again` spends as much once more. Started under mpiexec or srun,
    the ranks share the sites, and all but the first return {}.
    """
    job = Job()

    def prepare() -> tuple[Pipeline, list[SiteFile]]:
        pipeline, asked = asked_for(study, **which)
        if not (sites := [one for one in asked if not one.receives]):
            raise UsageError(f"sites/{asked[0].name}.toml: role = 'receiver', which writes no letter")
        for one in job.mine(sites):
            with _party(study, pipeline, one) as party:
                party.data(one.name)
        return pipeline, sites

    pipeline, sites = job.each(prepare)
    rows = job.share(sites, lambda mine: (_release_of(_party(study, pipeline, one), again) for one in mine))
    return {"sites": rows} if job.first else {}


def _party(study: Study, pipeline: Pipeline, site: SiteFile) -> RunContext:
    """Return one site alone as `oneshot` sees it; its noise has no fixed seed."""
    own = pipeline.changed(
        train={"from_released": False, "folds": None, "fold": None},
        privacy={"insecure_seed": None, "noise": "own"},
    )
    return RunContext.of(study, own.model_copy(update={"sites": [site.name]}), RUN)


def _release_of(party: RunContext, again: bool) -> dict[str, Any]:
    """Release a site's sums, unless it has released some that are whole; return its part of the document."""
    study, (site,) = party.study, party.sites
    home, file = study.release_at_home(site.name), study.release(site.name)
    account.require_budget(site)
    with locked(home.parent, site.name), party:
        data = party.data(site.name)
        worth = "none" if data.is_synthetic() else account.guarantee_of(party.method, party.pipeline)
        ledger = account.open_ledger(study, site, RUN, account.terms_of(site, party.pipeline, worth))
        kept = None if again else _letter_of(study, ledger, home, file)
        if kept is None:
            made, sums = _taken(party, ledger)
            write_sums(home, sums)
            ledger.sending(made.round, made.digest)
        else:
            label, sums = kept
            round_ = account.check_own(ledger, RUN, digest(sums.vector), label)
            refuse_others(sums.facts, wanted_of(data), f"site {site.name} has released")
            if not round_.final:
                ledger.reissue(round_.number, sums.vector, schema="sums")
        write_sums(file, sums)
        write_sums(home, sums)
    cost = {"epsilon": ledger.epsilon(), "spent": kept is None, "file": study.relative(file)}
    return sums.facts.model_dump() | cost


def _letter_of(study: Study, ledger: PrivacyLedger, *files: Path) -> tuple[str, ReleasedSums] | None:
    """Return (label, letter) of the first whole copy that the ledger knows, or None where nothing has left yet.

    A whole copy that the ledger does not know is returned where there is no other, to be refused.

    Raises:
        WsiFlError: when no copy is whole, or the ledger knows a letter of which no copy is here: another one would
            be charged a second time.
    """
    letters, errors = [], []
    for file in (one for one in files if one.exists()):
        label = study.relative(file)
        try:
            letters.append((label, read_sums(file, label)))
        except WsiFlError as error:
            errors.append(error)
    charged = {sent for one in ledger.rounds() if one.final for sent in one.releases.values()}
    released = {sent for one in ledger.rounds() for sent in one.releases.values()}
    by_ledger = [one for one in letters if digest(one[1].vector) in released]
    if errors and not letters:
        raise errors[0]
    if charged and not letters:
        raise WsiFlError(
            f"site {ledger.site}: its ledger knows a letter that was released, and no copy is here; put "
            f"{study.relative(files[-1])} back (from a backup, or from a site that has it), or spend as much once more "
            f"with `wsi-fl statistics --site {ledger.site} --again`"
        )
    return next(iter([*by_ledger, *letters]), None)


def _taken(party: RunContext, ledger: PrivacyLedger) -> tuple[Release, ReleasedSums]:
    """Return the sums of a new release, which is on the ledger by now; one that was never sent is taken back by it."""
    (site,) = party.sites
    data = party.data(site.name)
    data.require_current()
    if data.remark:
        say(f"  {data.remark}", "yellow")
    train, _, units = learned_from(party, site.name)
    if not len(train):
        raise WsiFlError(f"site {site.name}: its store has no training {party.examples}")
    mine = (ledger.site, RUN)  # the next release takes the place of one that never left
    counted = [one for one in rounds_of(ledger.entries) if one.final or (one.site, one.run) != mine]
    past = [one.mechanism for one in counted if one.mechanism]
    plan = account.planned_round(site, party.pipeline, units.n, past=past, once=True)
    head = _summed(party, train, units, plan, ledger.terms.delta)
    vector = head.sums.detach().cpu().numpy()
    made = ledger.release(None, vector, schema=schema(head), mechanism=plan, content="model")
    facts = Facts(
        site=site.name,
        n=units.n,
        sigma=plan.sigma if plan else 0.0,
        epsilon=ledger.epsilon(),
        delta=ledger.terms.delta,
        guarantee=ledger.guarantee(),
        digest=made.digest,
        **wanted_of(data),
    )
    return made, ReleasedSums(facts, vector)


def _summed(
    party: RunContext, train: Examples, units: Units, plan: PrivacyPlan | None, delta: float
) -> SharedHead:
    """Return the head that holds the sums of all units, with the noise of the plan."""
    keys, device, model = party.pipeline.train, device_of_rank(), build_model(party, 0, "shared")
    assert isinstance(model, SharedHead)
    noise = DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit) if plan else None
    learner = Learner(
        model, lr=keys.lr, weight_decay=keys.weight_decay, device=device, dp=noise, task=train.task
    )
    if plan is not None and learner.trainer is not None:
        require_planned(plan, learner.trainer, n=units.n, steps=1, delta=delta, mode="strict")
    stream = CipherStream.fresh()
    rows = [units.rows(np.arange(units.n), stream)]
    drawn = batches(train, iter(rows), augment=None, device=device)
    for batch in units.labelled(drawn, rows, device):
        sum_up(learner, batch, stream)
    return model


def releases_lines(document: dict[str, Any]) -> Lines:
    """Yield a line per site."""
    for row in document["sites"]:
        cost = "released" if row["spent"] else "released before, nothing spent"
        worth = "no differential privacy"
        if row["epsilon"] is not None:
            worth = f"ε = {row['epsilon']:.2f} ({row['guarantee']}) at δ = {row['delta']:g}"
        yield Line(f"  {row['site']}: sums over {row['n']} {row['unit']}s; {cost}: {worth} ({row['file']})")
    yield Line(
        "releases may be copied to the other sites' statistics/; next: "
        "wsi-fl train --method oneshot --set train.from_released=true"
    )
