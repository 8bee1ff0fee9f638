"""Which run goes on, whatever joins the sites: starting the same command again would train, and charge, a new one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Name, Round, Words
from wsi_fl.runs.run import RunFolder, pipeline_stem
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.training.checks import versions
from wsi_fl.stages.training.summary import Summary, finished_in
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import write_text
from wsi_fl.types import KnownToAll, UsageError, WsiFlError

_TRIES = 10
"""Numbers that are tried for a run of several hospitals, while other jobs begin runs too."""


@dataclass(frozen=True)
class Asked:
    """What run is asked for.

    Attributes:
        pipeline: the name of the settings of a new one.
        run: the one to go on with, once it is `taken_up`; None for a new one, or the last of a plan.
        last: whether the sites go on with the last run of the plan that all of them have, if there is one.
        without: sites to go on without, as if they had been lost.
        why: each of them is left out; by default people said --without.
        begins_without: whether a new run may begin without them too, and they may come to it later.
        agreement: SHA-256 of the plan that the hospitals signed; "" where nobody signed.
        approved: when this hospital approved it.
        parameters: SHA-256 of the parameters of the model that travels, as that plan says; "" where it does not.
    """

    pipeline: str
    run: RunFolder | None = None
    last: bool = False
    without: Sequence[str] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    begins_without: bool = False
    agreement: str = ""
    approved: str = ""
    parameters: str = ""


def which_run(party: RunContext, asked: Asked, comm: Comm) -> RunFolder:
    """Return the run that all sites work on, whatever joins them: the one asked for, the last of a plan, or a new one.

    KnownToAll where no run can be chosen without losing or paying something; see `choose_run`.
    """
    if asked.run is not None:
        return asked.run
    if not asked.last:
        return _new_run(party, asked, comm)
    me = party.names[comm.sites[0]]
    mine = {run.id: run for run in runs_of_plan(party.study, asked.agreement)}
    has: list[Begun] = [
        {
            "identity": identity,
            "rounds": max(run.site(me).checkpoints(), default=0),
            "lost": [loss["site"] for loss in run.losses()],
        }
        for identity, run in mine.items()
    ]
    gathered = comm.gather([Runs(runs=has)], Runs)
    told = {party.names[k]: one for k, one in zip(comm.running, gathered, strict=True)}
    chosen = choose_run(told)
    for identity, run in mine.items():
        if identity != chosen:
            run.discard_if_unstarted()
    if chosen:
        own = begun_under(party.study, asked.agreement, asked.approved, me)
        if chosen not in mine and own is not None:  # who lies of its runs must not make others spend again
            raise KnownToAll(
                f"{me} has a run of this plan of its own, and the others go on with another; to come to theirs, which "
                f"spends its ε once more, let {me} approve the plan again"
            )
        run = mine.get(chosen) or _own_folder(party, asked, chosen)
        began, _ = taken_up(party.study, replace(asked, run=run))
        require_same(began, party, asked.agreement)
        note_who_goes_on(began, asked)
        lost = _lost_in(chosen, told)
        reached = max((_rounds_in(chosen, has) for site, has in told.items() if site not in lost), default=0)
        if me in lost and _rounds_in(chosen, told[me]) < reached:  # the others finished rounds without it
            run.note_return(me)
        return began.run
    if asked.without and not asked.begins_without:
        raise KnownToAll(
            "a plan begins with all its sites; leave out --without, or sign a plan of fewer sites"
        )
    return _new_run(party, asked, comm)


def taken_up(study: Study, asked: Asked) -> tuple[RunContext, Summary | None]:
    """Return who took part in a run that is to go on, and its summary where nothing is left to do."""
    run, without = asked.run, asked.without
    assert run is not None
    run.refuse_changed_settings()
    party = RunContext.of_run(as_begun(study, run, goes_on=True), run)
    names = party.names
    if unknown := sorted(set(without) - set(names)):
        raise UsageError(f"unknown site {unknown[0]!r}; the run has {', '.join(names)}")
    if not set(names) - set(without):
        raise UsageError("--without leaves no site to train")
    finished = finished_in(run)
    if finished is not None:
        done = {row["site"] for row in finished["sites"]} | set(finished.get("inference_sites", ()))
        awaited = set(names if run.agreement else party.here)  # a hospital has its own store alone
        return party, finished if awaited - set(without) <= done else None
    return party, None


def require_same(began: RunContext, signed: RunContext, agreement: str) -> None:
    """Refuse a run that is not a signed plan's, or whose method or settings are no longer those of the plan."""
    if (began.run.agreement, began.name) != (agreement, signed.name) or began.pipeline != signed.pipeline:
        raise UsageError(
            f"{began.run.name} belongs to another plan than the one signed here, or has other settings; nothing was "
            "begun"
        )


def note_who_goes_on(party: RunContext, asked: Asked) -> None:
    """Write down which sites come back to a run and which are left out, once no other job works on it."""
    run, without = party.run, asked.without
    if asked.agreement:
        run.go_on_under(asked.approved)
    run.refuse_if_busy()
    lost = party.lost
    for name in sorted(lost - set(without)):
        run.note_return(name)
    for name in sorted(set(without) - lost):
        run.note_loss(name, asked.why.get(name, "left out by --without"))


class Begun(TypedDict):
    """A run of the plan that a site has: its newest checkpoint, 0 for none, and whom its others went on without."""

    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    rounds: Round
    lost: list[Name]


class Runs(TypedDict):
    """The runs of the plan that a site has, oldest first."""

    runs: Annotated[list[Begun], Field(max_length=1000)]


def runs_of_plan(study: Study, digest: str) -> list[RunFolder]:
    """Return the runs of a plan, given by its SHA-256, that lie in a study, oldest first."""
    found = [RunFolder(path.parent) for path in sorted(study.runs.glob("*/config.toml"))]
    return [run for run in found if run.agreement == digest]


def begun_under(study: Study, digest: str, approved: str, site: str) -> RunFolder | None:
    """Return the run of a plan (its SHA-256) in which a site finished rounds under an approval, good for one run."""
    runs = runs_of_plan(study, digest)
    return next((run for run in runs if run.approved == approved and run.site(site).checkpoints()), None)


def finished_summary(
    study: Study, agreement: str, sites: Sequence[str], without: Sequence[str] = (), *, goes_on: bool = False
) -> Summary | None:
    """Return the summary of a run of a plan that has finished, `without` sites whose part nobody waits for.

    `agreement` is the plan's SHA-256. With `goes_on` nobody waits for sites that were lost on the way either.
    """
    wanted = set(sites) - set(without)
    for run in reversed(runs_of_plan(study, agreement)):
        summary = finished_in(run)
        if summary is None:
            continue
        there = {row["site"] for row in summary["sites"]}
        if wanted <= there | set(summary["lost"] if goes_on else ()):
            return summary
    return None


def choose_run(told: Mapping[str, Runs]) -> str:
    """Return the id of the run that all sites go on with: the last one that all have; "" to begin a new one.

    A site that the others went on without before it had begun has no part of their run yet, and comes to it. Any other
    run that is not everywhere is left behind where nobody has finished anything in it. Otherwise a site has lost what
    it had (KnownToAll), and a new run would be charged beside it, which nobody does without being told to.

    Example:
        >>> run = {"identity": "0" * 32, "rounds": 2, "lost": []}
        >>> choose_run({"C1": {"runs": [run]}, "C2": {"runs": [{**run, "rounds": 1}]}}) == run["identity"]
        True
        >>> choose_run({"C1": {"runs": [{**run, "rounds": 0}]}, "C2": {"runs": []}})
        ''
        >>> choose_run({"C1": {"runs": [{**run, "lost": ["C2"]}]}, "C2": {"runs": []}}) == run["identity"]
        True
        >>> choose_run({"C1": {"runs": [run]}, "C2": {"runs": []}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        wsi_fl.types.KnownToAll: C1 has a run of this plan with 2 rounds, and C2 has not; put its folder back ...
    """
    identities = {site: [one["identity"] for one in has["runs"]] for site, has in told.items()}
    everywhere = [
        one
        for one in max(identities.values(), key=len)
        if all(one in ids or site in _lost_in(one, told) for site, ids in identities.items())
    ]
    if everywhere:
        began = (one for one in reversed(everywhere) if any(_rounds_in(one, has) for has in told.values()))
        return next(began, everywhere[-1])
    for site, has in told.items():
        for run in has["runs"]:
            if run["rounds"]:
                lacking = next(other for other, ids in identities.items() if run["identity"] not in ids)
                raise KnownToAll(
                    f"{site} has a run of this plan with {run['rounds']} rounds, and {lacking} has not; put its "
                    f"folder back into runs/ of {lacking}, or go on --without {lacking}; to begin a new run, which "
                    "spends its ε once more, move that folder out of runs/ everywhere"
                )
    return ""


def _rounds_in(run: str, has: Runs) -> int:
    return max((one["rounds"] for one in has["runs"] if one["identity"] == run), default=0)


def _lost_in(run: str, told: Mapping[str, Runs]) -> set[str]:
    """The sites that others went on without in a run, as any of them tells."""
    return {
        name
        for site, has in told.items()
        for one in has["runs"]
        if one["identity"] == run
        for name in one["lost"]
        if name != site
    }


def _own_folder(party: RunContext, asked: Asked, identity: str) -> RunFolder:
    """Make the folder of a run that others began without this site, with the next number that is free here."""
    runs, name = party.study.runs, f"{party.name}-{pipeline_stem(asked.pipeline)}"
    describe = partial(describe_run, party, asked, identity)
    tries = (
        RunFolder.claim(runs, number, name, identity, describe)
        for number in count(RunFolder.next_number(runs))
    )
    return next(run for run in tries if run is not None)


class _Proposal(TypedDict):
    """The number that a new run could have on a site's disk, the site's name for it, and its part of the id."""

    number: Annotated[int, Field(ge=1, lt=10**9)]
    name: Words
    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Claimed(TypedDict):
    """Whether a site has the run's folder on its disk."""

    claimed: bool


def _new_run(party: RunContext, asked: Asked, comm: Comm) -> RunFolder:
    """Return the folder of a new run, without those who are left out: its number is free on every disk, its name is
    that of the first site.

    Its id is made of what all sites propose, so that no site can give it the id of an earlier run. Every rank reads its
    own store alone, and describes the run on its own disk.
    """
    runs = party.study.runs
    for _ in range(_TRIES):
        mine = _Proposal(
            number=RunFolder.next_number(runs),
            name=f"{party.name}-{pipeline_stem(asked.pipeline)}",
            identity=uuid4().hex,
        )
        told = comm.gather([mine], _Proposal)
        number = max(one["number"] for one in told)
        proposed = "".join(one["identity"] for one in told)
        identity = hashlib.sha256(proposed.encode()).hexdigest()[:32]
        describe = partial(describe_run, party, asked, identity)
        run = RunFolder.claim(runs, number, told[0]["name"], identity, describe)
        if all(one["claimed"] for one in comm.gather([_Claimed(claimed=run is not None)], _Claimed)):
            assert run is not None
            for name in asked.without if asked.begins_without else ():
                run.note_loss(name, asked.why.get(name, "left out by --without"))
            return run
        if run is not None:  # another job was quicker somewhere
            run.discard_if_unstarted()
    raise WsiFlError("no number for this run is free at all sites; start again")


def describe_run(
    party: RunContext, asked: Asked, identity: str, run: RunFolder, series: Mapping[str, Any] | None = None
) -> None:
    """config.toml and manifest.json: with them alone the run can be repeated."""
    complete = party.pipeline.model_copy(update={"sites": party.names})
    settings = dump_toml(complete, f"# wsi-fl train --method {party.name} --pipeline {asked.pipeline}")
    run.write_manifest(
        {
            "run": run.name,
            "id": identity,
            "method": party.name,
            "pipeline": asked.pipeline,
            "series": series,
            "agreement": asked.agreement or None,
            "approved": asked.approved or None,
            "parameters": asked.parameters or None,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "argv": ["wsi-fl", *sys.argv[1:]],
            "versions": versions() | {"python": sys.version.split()[0]},
            "git": _git_commit(party.study.root),
            "config_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        }
    )
    # last: whoever sees it finds the manifest too
    write_text(run.path / "config.toml", settings)


def _git_commit(folder: Path) -> str | None:
    """The commit of the study's repository, if it is one."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
