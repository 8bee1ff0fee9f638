"""A hospital's part in a signed plan, over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from typing_extensions import TypedDict

from wsi_fl import __version__
from wsi_fl.federation.documents import SiteName
from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.preapproval import find_end_reason, list_codes
from wsi_fl.hospitals.plans.preapproval_check import admit_plan
from wsi_fl.hospitals.plans.signed_plan import (
    FederationPlan,
    approval_time,
    check_revoked,
    check_site_terms,
    load_approved_plan,
)
from wsi_fl.hospitals.transports.presence import SitePresence
from wsi_fl.hospitals.transports.secure_comm import SecureComm
from wsi_fl.hospitals.transports.transport import Transport
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.certificates import parse_revocation_list as listed
from wsi_fl.hospitals.work.job_replies import ReachabilityReply
from wsi_fl.oneshot.sync_statistics import load_local_statistics
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.checks import check_run
from wsi_fl.stages.training.resume import RunRequest, find_begun_run, note_participants, open_run, require_same
from wsi_fl.stages.training.summary import Summary
from wsi_fl.study.folder import Study
from wsi_fl.types import NoCommonPlan, ReportableError, UsageError

_GREETING_S = 60.0
LAST = "last"
"""In place of a run: the one of the plan that all sites have, or a new one."""


def take_part(
    study: Study,
    identity: Identity,
    transport: Transport,
    *,
    resume: str | None = None,
    without: Sequence[str] = (),
    plan: str | None = None,
    received_plan: FederationPlan | None = None,
    on_wait: Callable[[], None] = lambda: None,
    presence: SitePresence | None = None,
    load_revoked: Callable[[], Mapping[str, datetime]] = dict,
) -> Summary:
    """Do a hospital's part of its signed plan, and return the summary that all sites receive.

    Args:
        study: of this hospital, the only folder that is read or written.
        identity: of its kit.
        resume: a run of this plan to resume, or "last": the sites agree on the one of this plan that all have, or begin
            a new one; default: a new one.
        without: sites that dropped out.
        plan: SHA-256 of the requested plan, if any; another than the signed one is refused.
        received_plan: that plan as received; it is approved now if the hospital's standing approval covers it.
        on_wait: called now and then while this process waits for others.
        presence: the presence known to this process, if it resumes by itself; `without` is empty if its sites go on
            without one that timed out. Default: all others are required.
        load_revoked: returns the certificates revoked so far, see `SecureComm`.

    Raises:
        Interrupted: when a peer's process began again, or timed out, so that all resume, or when a certificate was
            revoked.
        UsageError: when no plan was signed, another one is requested, or wsi-fl differs from the plan's.
    """
    with _disclose_errors():
        signed_plan, approved = _load_agreed_plan(study, identity, plan, received_plan)
        if resume is None:
            _refuse_second_run(study, signed_plan, approved, identity.name)
        run = None if resume is None or resume == LAST else _find_requested_run(study, resume)
    request = _make_request(signed_plan, approved, run, without, resumes_last=resume == LAST)
    context, finished = _open_context(study, signed_plan, request, identity.name)
    if finished is not None:
        print_message(f"{finished['run']} has finished already; nothing is sent again")
        return finished
    running = _list_running(context, request)
    from wsi_fl.stages.training import ranks  # and with it PyTorch

    presence = presence or SitePresence(identity, signed_plan.sites)
    timeout_s = context.pipeline.comm.timeout_s
    comm = _open_comm(
        study,
        identity,
        signed_plan,
        running,
        transport,
        timeout_s,
        approved=approved,
        on_wait=on_wait,
        presence=presence,
        load_revoked=load_revoked,
    )
    if presence.min_sites is not None:  # the session left some out
        dropped_out = [name for k, name in enumerate(presence.names) if k not in comm.running]
        reasons = {name: presence.reasons.get(name, "gone, as other sites say") for name in dropped_out}
        request = replace(request, without=dropped_out, reasons=reasons)
    try:
        return ranks.take_part(context, comm, request)
    finally:
        comm.close()


def _make_request(
    signed_plan: FederationPlan, approved: str, run: RunFolder | None, without: Sequence[str], *, resumes_last: bool
) -> RunRequest:
    return RunRequest(
        signed_plan.name,
        run,
        resumes_last=resumes_last,
        without=without,
        may_begin_without=signed_plan.pipeline().train.min_sites is not None,
        agreement=signed_plan.digest,
        approved=approved,
        parameters=signed_plan.parameters,
    )


def _open_context(
    study: Study, signed_plan: FederationPlan, request: RunRequest, site: str
) -> tuple[RunContext, Summary | None]:
    """Return the context of a plan's run after its checks at a site, and the summary if the run has finished."""
    context = RunContext.create(study, signed_plan.pipeline(), signed_plan.method)
    if request.run is not None:
        resumed_context, finished = open_run(study, request)
        with _disclose_errors():
            require_same(resumed_context, context, signed_plan.digest)
        if finished is not None:
            return resumed_context, finished
        context = resumed_context
    check_run(context, "mpi", stores=False)
    if context.uses_files and not context.find_site(site).is_receiver:
        with _disclose_errors():
            load_local_statistics(context, site)
    return context, None


def _list_running(context: RunContext, request: RunRequest) -> tuple[int, ...]:
    """Return the indices of the sites that take part; ReportableError if they are fewer than the plan needs."""
    min_sites = context.pipeline.train.min_sites
    if request.run is not None:
        note_participants(context, request)
        running = context.running
    else:
        if unknown := sorted(set(request.without) - set(context.names)):
            raise UsageError(f"unknown site {unknown[0]!r}; the plan has {', '.join(context.names)}")
        left_out = request.without if request.resumes_last or min_sites else ()
        running = tuple(k for k, name in enumerate(context.names) if name not in left_out)
    if min_sites is not None and len(running) < min_sites:
        raise ReportableError(f"the plan is for at least {min_sites} hospitals, and this job for {len(running)}")
    return running


def public_summary(study: Study, site: str, summary: Summary) -> Mapping[str, object]:
    """Return the summary of `take_part` with a further key: "scores", the counts that all sites hold, or None."""
    run = RunFolder(study.find_run(str(summary["run"])))
    return {**summary, "scores": run.site_folder(site).read_document("scores")}


@contextmanager
def _disclose_errors() -> Iterator[None]:
    """Let others see what does not fit the plan: it derives from the plan, and from settings that the plan repeats."""
    try:
        yield
    except UsageError as error:
        raise NoCommonPlan(str(error)) from None


class SiteGreeting(TypedDict):
    """A hospital's document in a mere connection check."""

    site: SiteName


def greet_sites(
    study: Study,
    identity: Identity,
    transport: Transport,
    *,
    plan: str | None = None,
    received_plan: FederationPlan | None = None,
) -> ReachabilityReply:
    """Meet every other site of the signed plan without training.

    Raises:
        UsageError: when no plan was signed, or another one is requested.
        ReportableError: when a site does not answer, or has another plan, version, code or time.
    """
    started_s = time.perf_counter()
    with _disclose_errors():
        signed_plan, approved = _load_agreed_plan(study, identity, plan, received_plan)
    site_indices = tuple(range(len(signed_plan.sites)))
    comm = _open_comm(study, identity, signed_plan, site_indices, transport, _GREETING_S, approved=approved)
    try:
        greetings = comm.gather([SiteGreeting(site=identity.name)], SiteGreeting)
    finally:
        comm.close()
    peers = [greeting["site"] for greeting in greetings if greeting["site"] != identity.name]
    return {"site": identity.name, "peers": peers, "seconds": round(time.perf_counter() - started_s, 3)}


def _find_requested_run(study: Study, requested: str) -> RunFolder:
    """Return a run that somebody else requests, once verified as one of this study by its plain name."""
    name = Path(requested).name
    if requested not in (name, f"runs/{name}") or not (study.runs_path / name / "config.toml").is_file():
        raise UsageError("the run that is asked for is not in this hospital's runs/")
    return RunFolder(study.runs_path / name)


def _refuse_second_run(study: Study, plan: FederationPlan, approved: str, site: str) -> None:
    """Refuse a further run of a plan that was approved for one: each run costs its ε and discloses again."""
    if (run := find_begun_run(study, plan.digest, approved, site)) is not None:
        text = (
            f"site {site} approved plan {plan.digest[:8]} for one run, and has it: {run.name}; go on with it by "
            f"`federation submit --resume last`, or let {site} approve the plan again, which spends its ε once more"
        )
        raise mark_fault(UsageError(text), "second_run", site)


def _open_comm(
    study: Study,
    identity: Identity,
    signed_plan: FederationPlan,
    running: tuple[int, ...],
    transport: Transport,
    timeout_s: float,
    *,
    approved: str,
    on_wait: Callable[[], None] = lambda: None,
    presence: SitePresence | None = None,
    load_revoked: Callable[[], Mapping[str, datetime]] = dict,
) -> SecureComm:
    """Return the communication of a plan's sites, once all handshakes have arrived."""
    sites, revoked_keys = [signed_plan.sites[k] for k in running], listed(identity.root).keys
    min_sites = presence.min_sites if presence is not None else None
    if min_sites is None or sum(signed_plan.keys.get(name, "") not in revoked_keys for name in sites) < min_sites:
        with _disclose_errors():
            check_revoked(signed_plan, identity.root, sites)
    site, approval_id = identity.name, approved.partition(" frame ")[2]

    def find_stop_reason() -> str:
        is_current = approval_time(study, site) == approved
        return find_end_reason(study, identity, approval_id) or (
            "" if is_current else "approved another plan by its standing approval"
        )

    return SecureComm(
        identity,
        signed_plan.sites,
        running,
        transport,
        timeout_s,
        version=__version__,
        code=installed_code.code_digest(signed_plan.method),
        plan=signed_plan.digest,
        most_bytes=signed_plan.most_bytes,
        keys=signed_plan.keys,
        on_wait=on_wait,
        presence=presence,
        find_stop_reason=find_stop_reason if approval_id else lambda: "",
        load_revoked=load_revoked,
    )


def _load_agreed_plan(
    study: Study, identity: Identity, requested: str | None, received_plan: FederationPlan | None
) -> tuple[FederationPlan, str]:
    """Return a site's signed plan, verified as the requested one and for this code, and when it was signed."""
    if received_plan is not None and received_plan.digest == requested:
        admit_plan(study, identity, received_plan)
    site = identity.name
    approved, signed_plan = approval_time(study, site), load_approved_plan(study, identity)
    if approved != approval_time(study, site):
        raise UsageError(f"site {site} approved another plan just now; nothing was begun, so ask again")
    if requested is not None and requested != signed_plan.digest:
        text = f"site {site} signed plan {signed_plan.digest[:8]}, but this job is plan {requested[:8]}"
        raise mark_fault(UsageError(f"{text}; nothing was begun"), "unsigned", site)
    local_terms = next(terms for terms in signed_plan.document["sites"] if terms["name"] == site)
    check_site_terms(local_terms, study.load_site(site))
    installed_code.check_code_version(signed_plan, site, list_codes(study, identity))
    return signed_plan, approved
