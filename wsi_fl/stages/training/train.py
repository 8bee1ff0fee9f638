"""`train`: plan, preflight, one rank per site, and the document at the end."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm, LocalComm
from wsi_fl.federation.documents import Words
from wsi_fl.runs.run import RunFolder, pipeline_stem
from wsi_fl.stages.site.account import spent_words
from wsi_fl.stages.site.kept import as_begun
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.checks import (
    check,
    running_sites,
    sites_here,
    tell_who_is_left_out,
    versions,
    warn_of_other_patches,
)
from wsi_fl.stages.training.going_on import naming_resume, resume_command
from wsi_fl.stages.work.console import Line, Lines, Silent, Watcher, say
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import write_text
from wsi_fl.system.ranks import launched_ranks
from wsi_fl.types import UsageError, WsiFlError

_TRIES = 10
"""Numbers that are tried for a run of several hospitals, while other jobs begin runs too."""


def train(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Trains one run and returns its summary.

    Started by mpiexec or srun it joins as one rank; otherwise it starts one rank per site itself, or runs all
    sites in this process with backend "local".
    """
    watcher = watcher or Silent()
    name = study.pipeline_name(pipeline_name)
    pipeline = study.pipeline(name, overrides)
    ranks = launched_ranks()
    if ranks is not None:
        from wsi_fl.stages.training.ranks import (
            join,  # and with it PyTorch, which launchers need not wait for
        )

        party = Party.of(study, pipeline, method)
        check(party, backend, stores=False)
        everyone = tuple(range(len(party.sites)))
        return join(party, ranks, partial(agree_on_run, party, name), everyone)
    return begin(study, pipeline, method, name, backend=backend, watcher=watcher)


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seed, in the fold that they test, or in the site that they leave out.

    Attributes:
        folds: how many folds each seed has; None for no cross-validation.
        sites: each is left out by one run of each seed; empty where none is.
    """

    id: str
    seeds: tuple[int, ...]
    folds: int | None = None
    sites: tuple[str, ...] = ()


def begin(
    study: Study,
    pipeline: Pipeline,
    method: str,
    name: str,
    *,
    backend: str,
    watcher: Watcher,
    series: Series | None = None,
) -> dict[str, Any]:
    """Starts the ranks of a new run, or runs it in this process."""
    party = Party.of(study, pipeline, method)
    check(party, backend)
    warn_of_other_patches(party)
    tell_who_is_left_out(party)
    if backend == "mpi":
        launch.find_mpiexec()
    run = RunFolder.create(study.runs, method, name)
    _describe(party, run, name, uuid4().hex, series=series)
    try:
        return _start(replace(party, run=run), backend, watcher)
    except UsageError:  # refused before the first step
        run.discard_if_unstarted()
        raise


def resume(
    study: Study,
    run_name: str,
    *,
    without: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Continues a run from the last round that all its sites had finished.

    A site that was lost on the way comes back in the round where the others stand, even when they have finished.

    Args:
        without: sites to go on without, as if they had been lost.
    """
    ranks = launched_ranks()
    party, finished = resumed(study, run_name, without=without)
    if finished is not None:
        return finished
    check(party, backend, stores=ranks is None)
    note_who_goes_on(party, without)
    if ranks is not None:
        from wsi_fl.stages.training.ranks import join

        return join(party, ranks, lambda comm: party.run, running_sites(party))
    return _start(party, backend, watcher or Silent())


def resumed(
    study: Study, run_name: str, *, without: Sequence[str] = ()
) -> tuple[Party, dict[str, Any] | None]:
    """Return who took part in a run, and its summary where nothing is left to do.

    Raises:
        UsageError: for an unknown run or site, or settings that were changed.
    """
    run = RunFolder(study.run(run_name))
    run.refuse_changed_settings()
    study = as_begun(study, run, goes_on=True)
    party = Party.of_run(study, run)
    names = party.names
    if unknown := sorted(set(without) - set(names)):
        raise UsageError(f"unknown site {unknown[0]!r}; the run has {', '.join(names)}")
    if not set(names) - set(without):
        raise UsageError("--without leaves no site to train")
    finished = run.summary()
    wanted = set(party.here) - set(without)
    if finished is not None and wanted <= {row["site"] for row in finished["sites"]}:
        say(f"{finished['run']} has finished already; nothing is sent again")
        return party, finished
    return party, None


def note_who_goes_on(party: Party, without: Sequence[str]) -> None:
    """Write down which sites come back to a run and which are left out, once no other job works on it."""
    run = party.run
    run.refuse_if_busy()
    lost = party.lost
    for name in sorted(lost - set(without)):
        run.note_return(name)
    for name in sorted(set(without) - lost):
        run.note_loss(name, "left out by --without")


def _describe(
    party: Party,
    run: RunFolder,
    name: str,
    identity: str,
    *,
    series: Series | None = None,
    agreement: str = "",
    approved: str = "",
) -> None:
    """config.toml and manifest.json: with them alone the run can be repeated."""
    complete = party.pipeline.model_copy(update={"sites": party.names})
    settings = dump_toml(complete, f"# wsi-fl train --method {party.name} --pipeline {name}")
    run.write_manifest(
        {
            "run": run.name,
            "id": identity,
            "method": party.name,
            "pipeline": name,
            "series": asdict(series) if series else None,
            "agreement": agreement or None,
            "approved": approved or None,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "argv": ["wsi-fl", *sys.argv[1:]],
            "versions": versions() | {"python": sys.version.split()[0]},
            "git": _git_commit(party.study.root),
            "config_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        },
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


def _start(party: Party, backend: str, watcher: Watcher) -> dict[str, Any]:
    """Starts the ranks, and those of the other sites once more whenever one is lost."""
    study, run, names = party.study, party.run, party.names
    if backend == "local":
        from wsi_fl.stages.training.ranks import work_as_rank

        comm = LocalComm(len(names), running=sites_here(party))
        with naming_resume(study, run):
            return work_as_rank(study, run, comm, watcher)
    again = resume_command(study, run)
    while True:
        running = [names[k] for k in sites_here(party)]
        try:
            launch.run_ranks(
                running,
                ["rank", str(run.path)],
                log=run.path / "mpi.log",
                timeout_s=party.pipeline.comm.timeout_s,
                watcher=watcher,
                resume=again,
            )
            break
        except launch.SitesLost as lost:
            if not set(running) - set(lost.reasons):
                raise WsiFlError(f"all sites were lost; continue with `{again}`") from None
            for name, reason in lost.reasons.items():
                loss = run.note_loss(name, reason)
                watcher.say(f"  {name} was lost in round {loss['round']}: {reason}; the others go on")
    summary = run.summary()
    if summary is None:
        raise WsiFlError(f"the ranks ended without a summary; continue with `{again}`")
    return summary


class _Proposal(TypedDict):
    """The number that a new run could have on a site's disk, the site's name for it, and its part of the id."""

    number: Annotated[int, Field(ge=1, lt=10**9)]
    name: Words
    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Claimed(TypedDict):
    """Whether a site has the run's folder on its disk."""

    claimed: bool


def agree_on_run(
    party: Party, name: str, comm: Comm, *, agreement: str = "", approved: str = ""
) -> RunFolder:
    """The folder of a new run: its number is free on every disk, its name is that of the first site.

    Its id is made of what all sites propose, so that no site can give it the id of an earlier run. Every rank reads its
    own store alone, and describes the run on its own disk.

    Args:
        agreement: SHA-256 of the plan that the hospitals signed.
        approved: when this hospital did.
    """
    runs = party.study.runs
    for _ in range(_TRIES):
        mine = _Proposal(
            number=RunFolder.next_number(runs),
            name=f"{party.name}-{pipeline_stem(name)}",
            identity=uuid4().hex,
        )
        told = comm.gather([mine], _Proposal)
        number = max(one["number"] for one in told)
        proposed = "".join(one["identity"] for one in told)
        identity = hashlib.sha256(proposed.encode()).hexdigest()[:32]

        def describe(run: RunFolder, identity: str = identity) -> None:
            _describe(party, run, name, identity, agreement=agreement, approved=approved)

        run = RunFolder.claim(runs, number, told[0]["name"], identity, describe)
        if all(one["claimed"] for one in comm.gather([_Claimed(claimed=run is not None)], _Claimed)):
            assert run is not None
            return run
        if run is not None:  # another job was quicker somewhere
            run.discard_if_unstarted()
    raise WsiFlError("the sites found no number for this run that is free everywhere; start again")


def summary_lines(summary: dict[str, Any]) -> Lines:
    """The summary for people."""
    for row in summary["sites"]:
        yield Line(f"  {row['site']}: {row['rounds']} rounds, {spent_words(row)}")
    c = summary["communication"]
    yield Line(
        f"  {c['messages']} messages, {c['bytes'] / 1e6:.1f} MB, {c['seconds']:.1f} s of communication"
    )
    for loss in summary["losses"]:
        yield Line(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
        yield Line(f"  it can come back: wsi-fl train --resume {summary['run']}")
    yield Line(f"{summary['run']} done in {summary['seconds']:.0f} s; next: wsi-fl evaluate {summary['run']}")
