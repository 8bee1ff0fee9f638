"""The choice of the run to resume, by any transport: a repeated command would train, and charge, a new one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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
from wsi_fl.federation.documents import PrintableText, RoundNumber, SiteName
from wsi_fl.runs.run_folder import RunFolder, pipeline_stem
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.stages.training.checks import collect_versions
from wsi_fl.stages.training.summary import Summary, load_summary
from wsi_fl.study.folder import Study
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import file_sha256, write_text
from wsi_fl.types import ReportableError, UsageError, WsiFlError

_MAX_TRIES = 10
"""Most numbers tried for a run of several hospitals, while other jobs begin runs too."""


@dataclass(frozen=True)
class RunRequest:
    """A request for a run.

    Attributes:
        pipeline: name of the settings of a new run.
        run: the run to resume; None for a new one, or the last of a plan.
        resumes_last: whether to resume the last run of the plan common to all sites, if there is one.
        is_new: whether `train` begins another run where one of these settings is unfinished.
        without: sites to exclude, as if they had dropped out.
        reasons: reasons by excluded site; by default --without.
        may_begin_without: whether a new run may begin without them, and they may participate later.
        agreement: SHA-256 of the signed plan; "" for none.
        approved: time of this hospital's approval.
        parameters: SHA-256 of the parameters of the exchanged model, as in the plan; "" for none.
    """

    pipeline: str
    run: RunFolder | None = None
    resumes_last: bool = False
    is_new: bool = False
    without: Sequence[str] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    may_begin_without: bool = False
    agreement: str = ""
    approved: str = ""
    parameters: str = ""


def select_run(context: RunContext, request: RunRequest, comm: Comm) -> RunFolder:
    """Return the run of all sites: the requested one, the last of a plan, or a new one.

    ReportableError where each choice would lose or charge something; see `choose_run`.
    """
    if request.run is not None:
        return request.run
    if not request.resumes_last:
        return _claim_run(context, request, comm)
    local_site = context.names[comm.sites[0]]
    local_runs = {run.id: run for run in list_plan_runs(context.study, request.agreement)}
    run_states: list[RunState] = [
        {
            "identity": identity,
            "rounds": max(run.site_folder(local_site).list_checkpoints(), default=0),
            "lost": [loss["site"] for loss in run.list_dropouts()],
        }
        for identity, run in local_runs.items()
    ]
    gathered = comm.gather([RunStates(runs=run_states)], RunStates)
    states_by_site = {context.names[k]: states for k, states in zip(comm.running, gathered, strict=True)}
    chosen = choose_run(states_by_site)
    for identity, run in local_runs.items():
        if identity != chosen:
            run.discard_if_unstarted()
    if chosen:
        local_run = find_begun_run(context.study, request.agreement, request.approved, local_site)
        if (
            chosen not in local_runs and local_run is not None
        ):  # a false announcement of runs must not make others spend again
            raise ReportableError(
                f"{local_site} has another run of this plan than the others; to take part in theirs, which spends its "
                f"ε once more, let {local_site} approve the plan again"
            )
        run = local_runs.get(chosen) or _make_local_folder(context, request, chosen)
        begun_context, _ = open_run(context.study, replace(request, run=run))
        require_same(begun_context, context, request.agreement)
        note_participants(begun_context, request)
        lost = _find_lost(chosen, states_by_site)
        reached = max(
            (_count_rounds(chosen, run_states) for site, run_states in states_by_site.items() if site not in lost),
            default=0,
        )
        if (
            local_site in lost and _count_rounds(chosen, states_by_site[local_site]) < reached
        ):  # the others finished rounds without it
            run.record_return(local_site)
        return begun_context.run
    if request.without and not request.may_begin_without:
        raise ReportableError("a plan begins with all its sites; leave out --without, or sign a plan of fewer sites")
    return _claim_run(context, request, comm)


def open_run(study: Study, request: RunRequest) -> tuple[RunContext, Summary | None]:
    """Return the context of a run to resume, and its summary where it has finished."""
    run, without = request.run, request.without
    assert run is not None
    run.refuse_changed_settings()
    context = RunContext.restore(restore_study(study, run, is_resumed=True), run)
    names = context.names
    if unknown := sorted(set(without) - set(names)):
        raise UsageError(f"unknown site {unknown[0]!r}; the run has {', '.join(names)}")
    if not set(names) - set(without):
        raise UsageError("--without leaves no site to train")
    finished = load_summary(run)
    if finished is not None:
        sites_done = {row["site"] for row in finished["sites"]} | set(finished.get("inference_sites", ()))
        sites_awaited = set(names if run.agreement_digest else context.local_names)  # a hospital has its own store only
        return context, finished if sites_awaited - set(without) <= sites_done else None
    return context, None


def require_same(begun: RunContext, signed: RunContext, agreement: str) -> None:
    """Refuse a run that differs from a signed plan, in agreement, method or settings."""
    if (begun.run.agreement_digest, begun.name) != (agreement, signed.name) or begun.pipeline != signed.pipeline:
        raise UsageError(
            f"{begun.run.name} belongs to another plan than the one signed here, or has other settings; nothing was "
            "begun"
        )


def note_participants(context: RunContext, request: RunRequest) -> None:
    """Record returning and excluded sites of a run, once no other job works on it."""
    run, without = context.run, request.without
    if request.agreement:
        run.adopt_approval(request.approved)
    run.refuse_if_busy()
    lost = context.sites_lost
    for name in sorted(lost - set(without)):
        run.record_return(name)
    for name in sorted(set(without) - lost):
        run.record_dropout(name, request.reasons.get(name, "left out by --without"))


class RunState(TypedDict):
    """A run of the plan at a site: its newest checkpoint, 0 for none, and the sites that dropped out of it."""

    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    rounds: RoundNumber
    lost: list[SiteName]


class RunStates(TypedDict):
    """The runs of the plan at a site, oldest first."""

    runs: Annotated[list[RunState], Field(max_length=1000)]


def list_plan_runs(study: Study, digest: str) -> list[RunFolder]:
    """Return the runs of a plan, given by its SHA-256, in a study, oldest first."""
    folders = [RunFolder(path.parent) for path in sorted(study.runs_path.glob("*/config.toml"))]
    return [run for run in folders if run.agreement_digest == digest]


def find_begun_run(study: Study, digest: str, approved: str, site: str) -> RunFolder | None:
    """Return the run of a plan (its SHA-256) in which a site finished rounds under an approval, valid for one run."""
    runs = list_plan_runs(study, digest)
    return next(
        (run for run in runs if run.approval_time == approved and run.site_folder(site).list_checkpoints()), None
    )


def find_summary(
    study: Study, agreement: str, sites: Sequence[str], without: Sequence[str] = (), *, skip_lost: bool = False
) -> Summary | None:
    """Return the summary of a finished run of a plan, except the part of sites in `without`.

    `agreement` is the plan's SHA-256. With `skip_lost` sites that dropped out are not waited for either.
    """
    sites_needed = set(sites) - set(without)
    for run in reversed(list_plan_runs(study, agreement)):
        summary = load_summary(run)
        if summary is None:
            continue
        sites_done = {row["site"] for row in summary["sites"]}
        if sites_needed <= sites_done | set(summary["lost"] if skip_lost else ()):
            return summary
    return None


def choose_run(states_by_site: Mapping[str, RunStates]) -> str:
    """Return the id of the run to resume: the last one common to all sites; "" to begin a new one.

    A site excluded before it had begun lacks the others' run, and participates in it from now on. Any other run that is
    not at all sites is dropped if no site finished a round in it. Otherwise a site has lost its part (ReportableError),
    and a new run would be charged in addition, which needs a decision of people.

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
        wsi_fl.types.ReportableError: C1 has a run of this plan with 2 rounds, and C2 has not; put its folder back ...
    """
    identities = {site: [state["identity"] for state in states["runs"]] for site, states in states_by_site.items()}
    common_runs = [
        identity
        for identity in max(identities.values(), key=len)
        if all(identity in ids or site in _find_lost(identity, states_by_site) for site, ids in identities.items())
    ]
    if common_runs:
        begun_runs = (
            identity
            for identity in reversed(common_runs)
            if any(_count_rounds(identity, states) for states in states_by_site.values())
        )
        return next(begun_runs, common_runs[-1])
    for site, states in states_by_site.items():
        for run in states["runs"]:
            if run["rounds"]:
                lacking = next(other for other, ids in identities.items() if run["identity"] not in ids)
                raise ReportableError(
                    f"{site} has a run of this plan with {run['rounds']} rounds, and {lacking} has not; put its "
                    f"folder back into runs/ of {lacking}, or go on --without {lacking}; to begin a new run, which "
                    "spends its ε once more, move that folder out of runs/ everywhere"
                )
    return ""


def _count_rounds(run: str, states: RunStates) -> int:
    return max((state["rounds"] for state in states["runs"] if state["identity"] == run), default=0)


def _find_lost(run: str, states_by_site: Mapping[str, RunStates]) -> set[str]:
    """Return the sites that dropped out of a run, as announced by any other."""
    return {
        name
        for site, states in states_by_site.items()
        for state in states["runs"]
        if state["identity"] == run
        for name in state["lost"]
        if name != site
    }


def _make_local_folder(context: RunContext, request: RunRequest, identity: str) -> RunFolder:
    """Make the folder of a run that others began without this site, with the next free number."""
    runs, name = context.study.runs_path, f"{context.name}-{pipeline_stem(request.pipeline)}"
    describe = partial(describe_run, context, request, identity)
    tries = (
        RunFolder.claim_folder(runs, number, name, identity, describe) for number in count(RunFolder.next_number(runs))
    )
    return next(run for run in tries if run is not None)


class _RunProposal(TypedDict):
    """A site's proposal for a new run: its free number, a name, and a part of the id."""

    number: Annotated[int, Field(ge=1, lt=10**9)]
    name: PrintableText
    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _FolderClaim(TypedDict):
    """Whether a site has made the run's folder."""

    claimed: bool


def _claim_run(context: RunContext, request: RunRequest, comm: Comm) -> RunFolder:
    """Return the folder of a new run, whose number is free on all disks, and whose name is the first site's.

    Its id is a hash of all sites' proposals, so that no site can give it the id of an earlier run. Each rank reads its
    own store only, and describes the run on its disk.
    """
    runs = context.study.runs_path
    for _ in range(_MAX_TRIES):
        local_proposal = _RunProposal(
            number=RunFolder.next_number(runs),
            name=f"{context.name}-{pipeline_stem(request.pipeline)}",
            identity=uuid4().hex,
        )
        proposals = comm.gather([local_proposal], _RunProposal)
        number = max(proposal["number"] for proposal in proposals)
        identities = "".join(proposal["identity"] for proposal in proposals)
        identity = hashlib.sha256(identities.encode()).hexdigest()[:32]
        describe = partial(describe_run, context, request, identity)
        run = RunFolder.claim_folder(runs, number, proposals[0]["name"], identity, describe)
        if all(claim["claimed"] for claim in comm.gather([_FolderClaim(claimed=run is not None)], _FolderClaim)):
            assert run is not None
            for name in request.without if request.may_begin_without else ():
                run.record_dropout(name, request.reasons.get(name, "left out by --without"))
            return run
        if run is not None:  # another job took the number at some site
            run.discard_if_unstarted()
    raise WsiFlError("no number for this run is free at all sites; start again")


def describe_run(
    context: RunContext, request: RunRequest, identity: str, run: RunFolder, series: Mapping[str, Any] | None = None
) -> None:
    """Write config.toml and manifest.json, with which the run can be repeated."""
    complete = context.pipeline.model_copy(update={"sites": context.names})
    settings = dump_toml(complete, f"# wsi-fl train --method {context.name} --pipeline {request.pipeline}")
    run.write_manifest(
        {
            "run": run.name,
            "id": identity,
            "method": context.name,
            "pipeline": request.pipeline,
            "series": series,
            "agreement": request.agreement or None,
            "approved": request.approved or None,
            "parameters": request.parameters or None,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "argv": ["wsi-fl", *sys.argv[1:]],
            "versions": collect_versions() | {"python": sys.version.split()[0]},
            "git": _read_git_commit(context.study.root),
            "graph": find_graph_digest(context),
            "config_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        }
    )
    # last, so that the manifest is there by then
    write_text(run.path / "config.toml", settings)


def find_graph_digest(context: RunContext) -> str | None:
    """Return the SHA-256 of the file of the pipeline's graph; None where it is in no file."""
    graph = context.pipeline.topology.graph or ""
    return file_sha256(context.study.resolve(graph)) if graph.endswith(".json") else None


def record_site_files(study: Study, run: RunFolder, names: Iterable[str]) -> None:
    """Store the files of these sites in a run as they are when it begins."""
    for name in names:
        run.site_folder(name).record_site_file(dump_toml(study.load_site(name)))


def _read_git_commit(folder: Path) -> str | None:
    """Return the commit of the study's repository; None where it is none."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
