"""`wsi-fl federation …`: federated learning between hospitals over NVIDIA FLARE, or over a shared folder."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from wsi_fl.cli.options import ExtraCommand, Json, Pipeline, Set, find_study, print_document, run_work
from wsi_fl.federation.methods import list_names
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.hospitals.trust.kit import Kit
    from wsi_fl.study.folder import Study

app = typer.Typer(no_args_is_help=True, help="Federated learning between hospitals: kits, plans, and their connection.")
FEDERATION = ExtraCommand(app, "Between hospitals")

_KitOption = Annotated[Path, Option(metavar="DIR", help="Your kit, the folder with federation.json.")]
_KitOrRoot = Annotated[
    Path, Option("--kit", metavar="DIR", help="Your kit; for a request, the folder that `provision` made.")
]
_KitFolder = Annotated[Path, Argument(metavar="KIT", help="The folder of the kit.")]
_PlanFile = Annotated[Path | None, Option("--plan", metavar="FILE", help="The plan that all have signed.")]
_SharedFolder = Annotated[
    str | None, Option("--folder", metavar="ADDRESS", help="With a shared folder: another address of it.")
]
_Unchecked = Annotated[bool, Option("--unchecked", help="For trials: compare no fingerprint.")]
_Yes = Annotated[bool, Option("--yes", help="Sign without being asked.")]
_StudyFolder = Annotated[
    Path | None, Option(metavar="DIR", help="The study. Default: the one at or above this folder.")
]


def _load_study(folder: Path | None) -> Study:
    from wsi_fl.study.folder import Study

    return find_study() if folder is None else Study.find(folder)


def _open_kit(folder: Path) -> Kit:
    from wsi_fl.hospitals.trust.kit import Kit

    return Kit.open(folder)


def _require_consent(
    question: str, *, yes: bool, options: str = "--yes", otherwise: str = "nothing was signed"
) -> None:
    """Ask for consent unless `yes`; WsiFlError after a no, UsageError if nobody can be asked."""
    try:
        if yes or typer.confirm(question, err=True):
            return
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        text = f"nothing was signed: nobody can be asked here; read the above, and give {options}"
        raise UsageError(text) from None
    raise WsiFlError(otherwise)


@app.command()
def provision(
    folder: Annotated[Path, Argument(help="A new folder, for the root CA and the first kits.")],
    name: Annotated[str, Option(help="Of the federation.")] = "wsi-fl",
    server: Annotated[
        str | None, Option(metavar="HOST", help="Where hospitals reach the server; HOST:PORT if not on 443.")
    ] = None,
    shared: Annotated[
        str | None, Option("--folder", metavar="ADDRESS", help="Without a server: a folder that all can reach.")
    ] = None,
    sites: Annotated[str, Option(help="A test bed: kits of these hospitals too, as in A,B,C.")] = "",
    as_json: Json = False,
) -> None:
    """Provision a federation: its root CA, and the kits of its server and its coordinator."""
    from wsi_fl.hospitals.trust.provisioning import provision_federation, provision_lines

    site_names = [site.strip() for site in sites.split(",") if site.strip()]
    document = provision_federation(folder, federation=name, server=server, shared_folder=shared, sites=site_names)
    print_document(document, as_json, provision_lines)


@app.command()
def request(
    site: Annotated[str, Argument(help="The hospital's name in the federation, that of its site file.")],
    kit: Annotated[Path, Option(help="A new folder for the kit; the key is made there and stays there.")],
    organization: Annotated[str, Option(help="The hospital's full name.")],
    as_json: Json = False,
) -> None:
    """Make a key at a hospital, and the request that is sent to the coordinator."""
    from wsi_fl.hospitals.trust.provisioning import create_request, request_lines

    print_document(create_request(kit, name=site, organization=organization), as_json, request_lines)


@app.command()
def join(
    file: Annotated[Path, Argument(help="The certificate, or withdrawn.pem, that the coordinator sent.")],
    kit: Annotated[Path, Option(help="The kit that the request was made in.")],
    fingerprint: Annotated[
        str | None,
        Option(help="The root CA's, as the coordinator read it out; another one is refused. A new kit needs it."),
    ] = None,
    unchecked: _Unchecked = False,
    as_json: Json = False,
) -> None:
    """Put the certificate beside the key, which completes the kit; or let a kit take a list of withdrawn ones."""
    from wsi_fl.hospitals.trust.provisioning import install_certificate, kit_lines
    from wsi_fl.hospitals.trust.root_ca import install_revocation_list, revocation_lines

    if file.suffix == ".pem":
        print_document(install_revocation_list(file, kit), as_json, revocation_lines)
        return
    print_document(install_certificate(file, kit, fingerprint, unchecked=unchecked), as_json, kit_lines)


@app.command()
def plan(
    method: Annotated[str, Option(help=f"What the hospitals run: {list_names(lambda row: bool(row.disclosures))}.")],
    pipeline: Pipeline = None,
    overrides: Set = None,
    out: Annotated[Path, Option(help="The file to write.")] = Path("plan.json"),
    kit: Annotated[
        Path | None, Option(metavar="DIR", help="The provisioned folder: the plan pins the keys that it certified.")
    ] = None,
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write the plan that hospitals sign: what runs, what leaves, what it costs, and what never leaves."""
    from wsi_fl.hospitals.plans.build_plan import make_plan, plan_lines
    from wsi_fl.hospitals.plans.signed_plan import check_revoked
    from wsi_fl.hospitals.trust.root_ca import RootCA

    root = None if kit is None else RootCA.open(kit)
    keys = root.load_keys() if root else {}
    new_plan = make_plan(
        _load_study(study), method=method, pipeline_name=pipeline, overrides=overrides or [], out=out, keys=keys
    )
    if root:
        check_revoked(new_plan, root.trust_pem, new_plan.sites)
    facts = {"sha256": new_plan.digest, "sites": new_plan.sites, "most_bytes": new_plan.most_bytes}
    print_document({"plan": str(out), **facts}, as_json, lambda _: plan_lines(new_plan, out))


@app.command()
def approve(
    file: Annotated[Path, Argument(help="A plan, or a certificate request.")],
    kit: _KitOrRoot,
    fingerprint: Annotated[
        str | None,
        Option(help="Of a certificate request: what the hospital read to you by telephone. A new name needs it."),
    ] = None,
    unchecked: _Unchecked = False,
    study: _StudyFolder = None,
    yes: _Yes = False,
    yes_per_row: Annotated[
        bool,
        Option(
            "--yes-per-row",
            help="Accept also an ε per row that is above max_epsilon for the patient with the most rows.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a plan, see its cost for your hospital, and sign it; or approve a hospital's certificate request."""
    from wsi_fl.hospitals.plans.signed_plan import is_request

    if not file.exists():
        raise UsageError(f"{file}: no such file; give a plan, or a hospital's certificate request")
    if is_request(file):
        from wsi_fl.hospitals.trust.provisioning import approval_lines, approve_request

        print_document(approve_request(file, kit, fingerprint, unchecked=unchecked), as_json, approval_lines)
        return
    _sign_plan(file, kit, _load_study(study), yes=yes, yes_per_row=yes_per_row, as_json=as_json)


def _sign_plan(file: Path, kit: Path, study: Study, *, yes: bool, yes_per_row: bool, as_json: bool) -> None:
    from wsi_fl.hospitals.plans.review import describe_excess, review_lines, review_plan, sign_plan, signature_lines
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan
    from wsi_fl.stages.runtime.console import print_lines

    identity = _open_kit(kit).load_identity()
    review = review_plan(study, FederationPlan.load(file), identity.name)
    print_lines(review_lines(review))
    if (excess := describe_excess(review.cost)) and not yes_per_row:
        remedy = "ask for a plan per patient (privacy.unit), or give --yes-per-row too"
        refusal = f"{file}: nothing was signed, for {excess}; {remedy}"
        if yes:
            raise WsiFlError(refusal)
        options = "--yes-per-row and --yes"
        _require_consent(f"Do you accept that {excess}?", yes=False, options=options, otherwise=refusal)
    question = f"Sign this in the name of {identity.name}?"
    _require_consent(question, yes=yes, otherwise=f"{file}: nothing was signed")
    path = sign_plan(study, review, identity)
    costs = ("epsilon", "lifetime_epsilon", "max_tpr_at_fpr_1pct", "most_epsilon", "rounds", "group", "lifetime_group")
    document = {
        "site": identity.name,
        "plan": review.plan.digest,
        "approval": study.relative_path(path),
        **{key: getattr(review.cost, key) if review.cost else None for key in costs},
        "notes": list(review.notes),
    }
    print_document(document, as_json, lambda _: signature_lines(review, study.relative_path(path)))


@app.command()
def start(
    kit: _KitFolder,
    study: _StudyFolder = None,
    shared: _SharedFolder = None,
    without: Annotated[
        list[str] | None, Option(metavar="SITE", help="Over a folder: go on without it. Repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a hospital's client, or the server; over a folder, take part until the run is done."""
    from wsi_fl.hospitals.work.start import start_kit, take_part_by_folder
    from wsi_fl.stages.runtime.console import print_message
    from wsi_fl.stages.training.train import summary_lines

    opened_kit = _open_kit(kit)
    opened_study = _find_hospital_study(opened_kit, study)
    if shared is None and opened_kit.folder is None:
        if without:
            raise UsageError("--without is for a folder; with a server, the coordinator gives it to `submit`")
        start_kit(opened_kit, opened_study, report=print_message)
        return
    if opened_study is None:
        raise UsageError(f"{kit} is the kit of a {opened_kit.role}; over a folder hospitals alone start")
    summary = take_part_by_folder(opened_study, opened_kit, folder=shared, without=without or [])
    print_document(summary, as_json, partial(summary_lines, return_command="wsi-fl federation start"))


def _find_hospital_study(kit: Kit, folder: Path | None) -> Study | None:
    """The hospital's study; none for a kit that starts in no study."""
    if kit.role != "hospital":
        return None
    try:
        return _load_study(folder)
    except UsageError as error:
        raise UsageError(f"which study is {kit.name}'s? {error}, or give --study DIR") from None


@app.command()
def submit(
    kit: _KitOption,
    plan: _PlanFile = None,
    method: Annotated[str | None, Option(help="That of the plan; another one is refused.")] = None,
    resume: Annotated[
        str | None, Option(metavar="RUN", help="Go on with a run of this plan, or with the last.")
    ] = None,
    without: Annotated[
        list[str] | None, Option(metavar="SITE", help="With --resume: go on without it. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="New folder for what comes back. Default: result-RUN beside the plan.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a signed plan at its hospitals."""
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan
    from wsi_fl.hospitals.work.submit import submission_lines, submit_plan

    file = plan or _find_signed_plan()
    signed_plan = FederationPlan.load(file)
    if method is not None and method != signed_plan.method:
        raise UsageError(f"{file} is a plan for {signed_plan.method}, not for {method}")
    if without and resume is None:
        raise UsageError("--without is for going on with a run; give --resume RUN too")
    work = partial(submit_plan, _open_kit(kit), signed_plan, out=out, parent_folder=file.parent, resume=resume)
    run_work("federation", partial(work, without=without or []), as_json, submission_lines)


def _find_signed_plan(study: Study | None = None) -> Path:
    """Return the path of the signed plan of a study, or of the one at or above this folder."""
    from wsi_fl.hospitals.plans.signed_plan import plan_path

    with suppress(UsageError):
        if (path := plan_path(study or find_study())).is_file():
            return path
    raise UsageError("which plan? give --plan FILE, the one that all hospitals have signed")


@app.command()
def status(kit: _KitOption, study: _StudyFolder = None, as_json: Json = False) -> None:
    """Show who takes part, the progress, the jobs, and the next steps with the person for each."""
    from wsi_fl.hospitals.status.collect import collect_state, status_document, status_lines

    opened_kit, opened_study = _open_kit(kit), None
    with nullcontext() if study else suppress(UsageError):  # without a study nothing is known of a plan
        opened_study = _load_study(study)
    state = collect_state(opened_study, opened_kit, study_label=str(study or "."))
    print_document(status_document(state), as_json, lambda _: status_lines(state))
    if state.connected is None and opened_kit.role == "coordinator" and opened_kit.folder is None:
        raise typer.Exit(1)


@app.command()
def abort(
    job: Annotated[str, Argument(help="The job's id, as `status` has it.")], kit: _KitOption, as_json: Json = False
) -> None:
    """End a job at all hospitals; finished rounds are kept."""
    from wsi_fl.hospitals.flare import jobs
    from wsi_fl.stages.runtime.console import TextLine

    jobs.abort_job(_open_kit(kit), job)
    print_document({"aborted": job}, as_json, lambda _: [TextLine(f"job {job} was ended")])


@app.command()
def check(kit: _KitFolder, plan: _PlanFile = None, shared: _SharedFolder = None, as_json: Json = False) -> None:
    """Check the connection of a kit; with the coordinator's and a plan: whether all hospitals reach each other."""
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan
    from wsi_fl.hospitals.work.check import check_kit, check_lines

    document = check_kit(_open_kit(kit), FederationPlan.load(plan) if plan else None, folder=shared)
    print_document(document, as_json, check_lines)
    if not document["ok"]:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, Option(help="A new folder, for everybody's own folders.")] = Path("federation-demo"),
    as_json: Json = False,
) -> None:
    """Run a demo with a server and four hospitals with simulated slides, all as processes of this machine."""
    from wsi_fl.hospitals.demo import federation_demo_lines, run_federation_demo

    print_document(run_federation_demo(out), as_json, federation_demo_lines)


@app.command()
def dossier(
    site: Annotated[str | None, Option(help="Whose dossier. Default: the kit's hospital.")] = None,
    kit: Annotated[
        Path | None, Option(metavar="DIR", help="Your kit; it has signatures and the federation's address.")
    ] = None,
    out: Annotated[Path, Option(help="The page; its JSON lies beside it.")] = Path("dossier.html"),
    for_others: Annotated[
        bool, Option("--for-others", help="For others: without paths, local models, and numbers of patients.")
    ] = False,
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write one page for data protection, security and networks: what leaves, by which route, at what ε so far."""
    from wsi_fl.hospitals.dossier.dossier_page import make_dossier

    document = make_dossier(_load_study(study), site=site, kit=kit, out=out, for_others=for_others)
    print_document(dict(document), as_json, lambda _: [str(out)])


@app.command()
def renew(
    kit: _KitOption,
    new_key: Annotated[
        bool, Option("--new-key", help="Ask for another key, which the present one vouches for.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the request that renews the certificate of a kit; the coordinator approves it, then `join` takes it."""
    from wsi_fl.hospitals.trust.provisioning import create_renewal_request, request_lines

    print_document(create_renewal_request(kit, rotate=new_key), as_json, request_lines)


@app.command()
def revoke(
    site: Annotated[str, Argument(help="Whose certificates are withdrawn.")],
    kit: Annotated[Path, Option(metavar="DIR", help="The folder that `provision` made.")],
    as_json: Json = False,
) -> None:
    """Withdraw the certificates of a hospital, by a list that the root CA signs and every kit takes."""
    from wsi_fl.hospitals.trust.root_ca import revocation_lines, revoke_site

    print_document(revoke_site(site, kit), as_json, revocation_lines)


@app.command()
def leave(
    kit: _KitOption,
    study: _StudyFolder = None,
    delete_approval: Annotated[
        bool, Option("--delete-approval", help="Delete your approval, so that no further run starts.")
    ] = False,
    out: Annotated[Path, Option(help="The file to write, JSON.")] = Path("leaving.json"),
    as_json: Json = False,
) -> None:
    """Write a record of your releases, what of them stays with others, and the remaining steps."""
    from wsi_fl.hospitals.dossier.departure import departure_lines, write_departure

    document = write_departure(_load_study(study), _open_kit(kit), out=out, delete_approval=delete_approval)
    print_document(document, as_json, departure_lines)


@app.command()
def preapprove(
    kit: _KitOption,
    epsilon: Annotated[float | None, Option(help="Of all plans together, by your own ledger.")] = None,
    until: Annotated[str, Option(metavar="DATE", help="The last day, as in 2027-03-31.")] = "",
    method: Annotated[list[str] | None, Option(help="What plans may run. Repeatable. Default: the plan's.")] = None,
    runs: Annotated[int, Option(min=1, help="How many runs at most.")] = 20,
    partner: Annotated[
        list[str] | None, Option(metavar="SITE", help="Who may take part. Repeatable. Default: all.")
    ] = None,
    code: Annotated[list[str] | None, Option(metavar="SHA256", help="Of another wsi-fl to allow. Repeatable.")] = None,
    plan: Annotated[
        Path | None, Option(metavar="FILE", help="What plans are like. Default: the one you signed.")
    ] = None,
    add_code: Annotated[
        bool, Option("--add-code", help="Allow in your frame the wsi-fl that is installed now too.")
    ] = False,
    revoke: Annotated[
        bool, Option("--revoke", help="End your frame at once; a run under way ends at its next round.")
    ] = False,
    study: _StudyFolder = None,
    yes: _Yes = False,
    as_json: Json = False,
) -> None:
    """Sign a standing approval: plans within it run here for weeks without a further signature, others are refused."""
    from wsi_fl.hospitals.plans.preapproval import require_preapproval, revoke_preapproval, write_preapproval
    from wsi_fl.hospitals.plans.preapproval_check import add_codes, make_preapproval, preapproval_lines
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan
    from wsi_fl.stages.runtime.console import TextLine, print_lines

    opened_study, identity, codes = _load_study(study), _open_kit(kit).load_identity(), code or []
    if revoke:
        revoked = revoke_preapproval(opened_study, identity)
        news = TextLine(f"the frame until {revoked['until']} was withdrawn")
        print_document(dict(revoked), as_json, lambda _: [news])
        return
    if add_code:
        approval = add_codes(require_preapproval(opened_study, identity), codes)
    else:
        like = FederationPlan.load(plan or _find_signed_plan(opened_study))
        terms = {"methods": method or [], "partners": partner or [], "codes": codes}
        approval = make_preapproval(opened_study, like, identity.name, epsilon=epsilon, until=until, runs=runs, **terms)
    print_lines(preapproval_lines(approval))
    _require_consent(f"Sign this in the name of {identity.name}?", yes=yes)
    write_preapproval(opened_study, approval, identity)
    print_document(dict(approval), as_json, lambda _: [])
