"""Which run of a signed plan hospitals work on: the unfinished one that all of them have, or a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Round
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.hospitals.plans.signed import Plan, approved_at
from wsi_fl.stages.site.kept import as_begun
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.training.train import agree_on_run, note_who_goes_on
from wsi_fl.study.folder import Study
from wsi_fl.types import KnownToAll, UsageError


class Begun(TypedDict):
    """A run of the plan that a site has on its disk.

    Attributes:
        rounds: the newest that the site has a checkpoint of; 0 before the first.
    """

    identity: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    rounds: Round


class Runs(TypedDict):
    """The runs of the plan that a site has, oldest first."""

    runs: Annotated[list[Begun], Field(max_length=1000)]


def runs_of_plan(study: Study, digest: str) -> list[RunFolder]:
    """Return the runs of a plan that lie in a study, oldest first.

    Args:
        digest: SHA-256 of the plan, which their manifests name.
    """
    found = [RunFolder(path.parent) for path in sorted(study.runs.glob("*/config.toml"))]
    return [run for run in found if run.agreement == digest]


def finished_summary(study: Study, plan: Plan, without: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the summary of a run of a plan that has finished; None where none has.

    Args:
        without: sites whose part nobody waits for.
    """
    wanted = set(plan.sites) - set(without)
    for run in reversed(runs_of_plan(study, plan.digest)):
        summary = run.summary()
        if summary is not None and wanted <= {row["site"] for row in summary["sites"]}:
            return summary
    return None


def choose_run(told: Mapping[str, Runs]) -> str:
    """Return the id of the run that all sites go on with: the last one that all have; "" to begin a new one.

    A run that is not everywhere is left behind where nobody has finished anything in it. Otherwise a site has lost what
    it had, and a new run would be charged beside it, which nobody does without being told to.

    Args:
        told: what each site has.

    Raises:
        KnownToAll: when a site has no run in which another has finished rounds.

    Example:
        >>> run = {"identity": "0" * 32, "rounds": 2}
        >>> choose_run({"C1": {"runs": [run]}, "C2": {"runs": [{**run, "rounds": 1}]}}) == run["identity"]
        True
        >>> choose_run({"C1": {"runs": [{**run, "rounds": 0}]}, "C2": {"runs": []}})
        ''
        >>> choose_run({"C1": {"runs": [run]}, "C2": {"runs": []}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        wsi_fl.types.KnownToAll: C1 has a run of this plan with 2 rounds, and C2 has not; put its folder back ...
    """
    identities = {site: [one["identity"] for one in has["runs"]] for site, has in told.items()}
    first = next(iter(identities.values()))
    everywhere = [one for one in first if all(one in others for others in identities.values())]
    rounds = {
        one: max(run["rounds"] for has in told.values() for run in has["runs"] if run["identity"] == one)
        for one in everywhere
    }
    if everywhere:
        return next((one for one in reversed(everywhere) if rounds[one]), everywhere[-1])
    for site, has in told.items():
        for run in has["runs"]:
            if run["rounds"]:
                lacking = next(other for other, ids in identities.items() if run["identity"] not in ids)
                raise KnownToAll(
                    f"{site} has a run of this plan with {run['rounds']} rounds, and {lacking} has not; put its "
                    f"folder back into runs/ of {lacking}, or go on --without {lacking}; to begin a new run, which "
                    "costs its ε on top, move that folder out of runs/ everywhere"
                )
    return ""


def begin_or_go_on(party: Party, plan: Plan, without: Sequence[str], comm: Comm) -> RunFolder:
    """Return the run of a plan that all sites go on with, or a new one where none has begun.

    Raises:
        KnownToAll: when no run can be chosen without losing or paying something; see `choose_run`.
        UsageError: when the run's settings were changed.
    """
    study, (me,) = party.study, comm.sites
    mine = {run.id: run for run in runs_of_plan(study, plan.digest)}
    has: list[Begun] = [
        {"identity": identity, "rounds": max(run.site(party.names[me]).checkpoints(), default=0)}
        for identity, run in mine.items()
    ]
    told = comm.gather([Runs(runs=has)], Runs)
    chosen = choose_run({party.names[k]: one for k, one in zip(comm.running, told, strict=True)})
    for identity, run in mine.items():
        if identity != chosen:
            run.discard_if_unstarted()
    approved = approved_at(study, party.names[me])
    if chosen:
        return _going_on(study, mine[chosen], plan, without, approved)
    if without:
        raise KnownToAll(
            "a plan begins with all its sites; leave out --without, or sign a plan of fewer sites"
        )
    return agree_on_run(party, plan.name, comm, agreement=plan.digest, approved=approved)


def own_run(study: Study, asked: str) -> str:
    """Return a run that somebody else asks for, once it is known to be one of this study by its plain name.

    Raises:
        UsageError: for anything else, such as a path that leads out of `runs/`.
    """
    name = Path(asked).name
    if asked not in (name, f"runs/{name}") or not (study.runs / name / "config.toml").is_file():
        raise UsageError("the run that is asked for is not in this hospital's runs/")
    return name


def require_agreed(party: Party, plan: Plan) -> None:
    """Refuse a run that is not the plan's, or whose settings are no longer those of the plan.

    Raises:
        UsageError: when method or settings differ from what was signed.
    """
    signed = Party.of(party.study, plan.pipeline(), plan.method)
    if (party.run.agreement, party.name) != (plan.digest, plan.method) or party.pipeline != signed.pipeline:
        raise UsageError(
            f"{party.run.name} is a run of another plan than the one that was signed here, or of other settings; "
            "nothing was begun"
        )


def refuse_once_more(study: Study, plan: Plan, site: str) -> None:
    """Refuse a further run of a plan that was approved for one: each costs its ε, and lets go what the plan says.

    Raises:
        UsageError: which says how to go on, and how to allow another run.
    """
    approved = approved_at(study, site)
    for run in runs_of_plan(study, plan.digest):
        if run.approved == approved and run.site(site).checkpoints():
            raise UsageError(
                f"site {site} approved plan {plan.digest[:8]} for one run, which is {run.name}; go on with it by "
                f"`federation submit --resume last`, or let {site} approve the plan again, which costs its ε on top"
            )


def _going_on(study: Study, run: RunFolder, plan: Plan, without: Sequence[str], approved: str) -> RunFolder:
    """Check that a run can go on, and write down who comes back and who is left out."""
    run.refuse_changed_settings()
    party = Party.of_run(as_begun(study, run, goes_on=True), run)
    require_agreed(party, plan)
    run.go_on_under(approved)
    note_who_goes_on(party, without)
    return run
