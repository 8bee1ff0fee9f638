"""`train`: plan, preflight, one rank per site, and the document at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from wsi_fl.federation.comm import LocalComm
from wsi_fl.report.words import absences, detected_of, letters
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import spent_words
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.checks import (
    check,
    running_sites,
    sites_here,
    tell_what_is_lost,
    warn_of_other_patches,
)
from wsi_fl.stages.training.going_on import (
    Asked,
    Series,
    describe_run,
    note_who_goes_on,
    taken_up,
    which_run,
)
from wsi_fl.stages.work.console import Line, Lines, Silent, Watcher, say
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.ranks import launched_ranks
from wsi_fl.types import UsageError, WsiFlError


def train(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
    told: bool = False,
) -> dict[str, Any]:
    """Trains one run and returns its summary.

    Started by mpiexec or srun it joins as one rank; otherwise it starts one rank per site itself, or runs all
    sites in this process with backend "local".

    Args:
        told: whether what is unusual of the stores was said already, of another run with them.
    """
    watcher = watcher or Silent()
    name = study.pipeline_name(pipeline_name)
    pipeline = study.pipeline(name, overrides)
    ranks = launched_ranks()
    if ranks is not None:
        from wsi_fl.stages.training.ranks import (
            join,  # and with it PyTorch, which launchers need not wait for
        )

        party = RunContext.of(study, pipeline, method)
        check(party, backend, stores=False)
        everyone = tuple(range(len(party.sites)))
        return join(party, ranks, partial(which_run, party, Asked(name)), everyone)
    return begin(study, pipeline, method, name, backend=backend, watcher=watcher, told=told)


def begin(
    study: Study,
    pipeline: Pipeline,
    method: str,
    name: str,
    *,
    backend: str,
    watcher: Watcher,
    series: Series | None = None,
    told: bool = False,
) -> dict[str, Any]:
    """Starts the ranks of a new run, or runs it in this process."""
    party = RunContext.of(study, pipeline, method)
    check(party, backend)
    if not told:
        warn_of_other_patches(party)
    tell_what_is_lost(party)
    if backend == "mpi":
        launch.find_mpiexec()
    run = RunFolder.create(study.runs, method, name)
    describe_run(party, run, Asked(name), uuid4().hex, series)
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
    run = RunFolder(study.run(run_name))
    asked = Asked(run.name, run, without=without)
    party, finished = taken_up(study, asked)
    if finished is not None:
        say(f"{finished['run']} has finished already; nothing is sent again")
        return finished
    check(party, backend, stores=ranks is None)
    note_who_goes_on(party, asked)
    if ranks is not None:
        from wsi_fl.stages.training.ranks import join

        return join(party, ranks, partial(which_run, party, asked), running_sites(party))
    return _start(party, backend, watcher or Silent())


def _start(party: RunContext, backend: str, watcher: Watcher) -> dict[str, Any]:
    """Starts the ranks, and those of the other sites once more whenever one is lost."""
    study, run, names = party.study, party.run, party.names
    if backend == "local":
        from wsi_fl.stages.training.ranks import work_as_rank

        comm = LocalComm(len(names), running=sites_here(party))
        with launch.naming_resume(study, run):
            return work_as_rank(study, run, comm, watcher)
    again = launch.resume_command(study, run)
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
            left, least = len(set(running) - set(lost.reasons)), party.pipeline.train.at_least or 1
            if left < least:
                gone = ", ".join(lost.reasons)
                raise WsiFlError(
                    f"{gone} was lost, and {left} of at least {least} sites are left (train.at_least); continue with "
                    f"`{again}`"
                ) from None
            for name, reason in lost.reasons.items():
                loss = run.note_loss(name, reason)
                watcher.say(f"  {name} was lost in round {loss['round']}: {reason}; the others go on")
    summary = run.summary()
    if summary is None:
        raise WsiFlError(f"the ranks ended without a summary; continue with `{again}`")
    return summary


def summary_lines(summary: dict[str, Any], again: str = "") -> Lines:
    """The summary for people.

    Args:
        again: the command by which a site that was lost comes back; default: `train --resume`.
    """
    for row in summary["sites"]:
        yield Line(f"  {row['site']}: {row['rounds']} rounds, {spent_words(row)}")
    if found := detected_of(summary["sites"]):
        yield Line(f"  {found}")
    for name in summary.get("receivers", ()):
        yield Line(f"  {name}: receives; it released nothing and paid nothing")
    if digests := summary.get("letters"):
        yield Line(f"  made of {len(digests)} letters: {letters(digests)}")
    c = summary["communication"]
    yield Line(
        f"  {c['messages']} messages, {c['bytes'] / 1e6:.1f} MB, {c['seconds']:.1f} s of communication"
    )
    for loss in summary["losses"]:
        yield Line(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
        yield Line(f"  it can come back: {again or 'wsi-fl train --resume ' + summary['run']}")
    yield from (Line(f"  {said}", "yellow") for said in absences(summary["sites"]))
    yield Line(f"{summary['run']} done in {summary['seconds']:.0f} s; next: wsi-fl evaluate {summary['run']}")
