"""`wsi-fl federation …`: federated learning between hospitals over NVIDIA FLARE, or over a shared folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from wsi_fl.cli.options import ExtraCommand, Json, Pipeline, Set, find_study, print_document
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
_StudyFolder = Annotated[
    Path | None, Option(metavar="DIR", help="The study. Default: the one at or above this folder.")
]


def _load_study(folder: Path | None) -> Study:
    from wsi_fl.study.folder import Study

    return find_study() if folder is None else Study.find(folder)


def _open_kit(folder: Path) -> Kit:
    from wsi_fl.hospitals.trust.kit import Kit

    return Kit.open(folder)


def _ask_confirmation(question: str, instead: str) -> bool:
    """Ask for confirmation; UsageError with the options to give instead, if there is no terminal."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UsageError(f"nothing was signed: nobody can be asked here; read the above, and give {instead}") from None


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
    document = {"plan": str(out), "sha256": new_plan.digest, "sites": new_plan.sites, "most_bytes": new_plan.most_bytes}
    print_document(document, as_json, plan_lines)


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
    yes: Annotated[bool, Option("--yes", help="Sign without being asked.")] = False,
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
    if (
        (excess := describe_excess(review.cost))
        and not yes_per_row
        and (yes or not _ask_confirmation(f"Do you accept that {excess}?", "--yes-per-row and --yes"))
    ):
        raise WsiFlError(
            f"{file}: nothing was signed, for {excess}; ask for a plan per patient (privacy.unit), or give "
            "--yes-per-row too"
        )
    if not yes and not _ask_confirmation(f"Sign this in the name of {identity.name}?", "--yes"):
        raise WsiFlError(f"{file}: nothing was signed")
    path = sign_plan(study, review, identity)
    costs = ("epsilon", "lifetime_epsilon", "max_tpr_at_fpr_1pct", "most_epsilon", "rounds", "group", "lifetime_group")
    document = {
        "site": identity.name,
        "plan": review.plan.digest,
        "approval": study.relative_path(path),
        **{key: getattr(review.cost, key) if review.cost else None for key in costs},
        "notes": list(review.notes),
    }
    print_document(document, as_json, signature_lines)


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
    from wsi_fl.stages.runtime.console import ProgressBars

    file = plan or _find_signed_plan()
    signed_plan = FederationPlan.load(file)
    if method is not None and method != signed_plan.method:
        raise UsageError(f"{file} is a plan for {signed_plan.method}, not for {method}")
    if without and resume is None:
        raise UsageError("--without is for going on with a run; give --resume RUN too")
    with ProgressBars("federation") as bars:
        document = submit_plan(
            _open_kit(kit),
            signed_plan,
            out=out,
            parent_folder=file.parent,
            resume=resume,
            without=without or [],
            watcher=bars,
        )
    print_document(document, as_json, submission_lines)


def _find_signed_plan(study: Study | None = None) -> Path:
    """Return the path of the signed plan of a study, or of the one at or above this folder."""
    from wsi_fl.hospitals.plans.signed_plan import plan_path

    with suppress(UsageError):
        if (path := plan_path(study or find_study())).is_file():
            return path
    raise UsageError("which plan? give --plan FILE, the one that all hospitals have signed")


@app.command()
def status(kit: _KitOption, as_json: Json = False) -> None:
    """Show which hospitals are connected, and the outcome of the jobs."""
    from wsi_fl.hospitals.work.submit import load_status, status_lines

    print_document(load_status(_open_kit(kit)), as_json, status_lines)


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
    from wsi_fl.hospitals.work.submit import check_kit, check_lines

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
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write one page for data protection and network administrators: what leaves, by which route, at what ε so far."""
    from wsi_fl.hospitals.dossier.dossier_page import make_dossier

    document = make_dossier(_load_study(study), site=site, kit=kit, out=out)
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
    from wsi_fl.hospitals.dossier.dossier_page import departure_lines, write_departure

    print_document(
        write_departure(_load_study(study), _open_kit(kit), out=out, delete_approval=delete_approval),
        as_json,
        departure_lines,
    )


@app.command()
def backup(
    kit: _KitOption,
    out: Annotated[Path, Option(metavar="FILE", help="The file to write; it holds the key.")],
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Copy key, certificates, approvals, plan and ledger into one file."""
    from wsi_fl.hospitals.work.backup import write_backup

    opened_kit = _open_kit(kit)
    document = write_backup(opened_kit, _find_hospital_study(opened_kit, study), out)
    print_document(
        document, as_json, lambda result: [f"{result['file']} holds the key of {result['name']}: protect it as the kit"]
    )


@app.command()
def restore(
    file: Annotated[Path, Argument(help="What `backup` wrote.")],
    kit: Annotated[Path, Option(metavar="DIR", help="The folder of the kit, new or damaged.")],
    study: Annotated[Path | None, Option(metavar="DIR", help="A hospital's study, new or damaged.")] = None,
    as_json: Json = False,
) -> None:
    """Restore missing files of a kit and a study; no ledger replaces a newer one."""
    from wsi_fl.hospitals.work.backup import restore_backup, restore_lines
    from wsi_fl.study.folder import Study

    print_document(restore_backup(file, kit, Study(study.resolve()) if study else None), as_json, restore_lines)


@app.command("preapprove")
def frame(
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
    yes: Annotated[bool, Option("--yes", help="Sign without being asked.")] = False,
    as_json: Json = False,
) -> None:
    """Sign a standing approval: plans within it run here for weeks without a further signature, others are refused."""
    from wsi_fl.hospitals.plans.preapproval import require_preapproval, write_preapproval
    from wsi_fl.hospitals.plans.preapproval_check import add_codes, make_preapproval, preapproval_lines
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan
    from wsi_fl.stages.runtime.console import print_lines

    if revoke:
        withdraw(kit, study, as_json)
        return
    opened_study, identity, codes = _load_study(study), _open_kit(kit).load_identity(), code or []
    if add_code:
        approval = add_codes(require_preapproval(opened_study, identity), codes)
    else:
        approval = make_preapproval(
            opened_study,
            FederationPlan.load(plan or _find_signed_plan(opened_study)),
            identity.name,
            epsilon=epsilon,
            until=until,
            runs=runs,
            methods=method or [],
            partners=partner or [],
            codes=codes,
        )
    print_lines(preapproval_lines(approval))
    if not yes and not _ask_confirmation(f"Sign this in the name of {identity.name}?", "--yes"):
        raise WsiFlError("nothing was signed")
    write_preapproval(opened_study, approval, identity)
    print_document(dict(approval), as_json, lambda _: [])


def withdraw(kit: Path, study: Path | None, as_json: bool) -> None:
    """End a frame at once, and all approvals made in its name; a run under way ends at its next round."""
    from wsi_fl.hospitals.plans.preapproval import revoke_preapproval
    from wsi_fl.stages.runtime.console import TextLine

    revoked = revoke_preapproval(_load_study(study), _open_kit(kit).load_identity())
    print_document(
        dict(revoked), as_json, lambda approval: [TextLine(f"the frame until {approval['until']} was withdrawn")]
    )


@app.command()
def census(
    kit: _KitOption,
    files: Annotated[list[Path] | None, Argument(help="With --collect: what hospitals sent.")] = None,
    column: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE,…", help="A column of your table, and the values to count. Repeatable."),
    ] = None,
    epsilon: Annotated[
        float | None, Option(min=0.001, help="Per patient: of the census (0.1), or with --collect of the plan (1).")
    ] = None,
    only_enough: Annotated[
        bool, Option("--only-enough", help="Tell only whether there are at least 20 of a value.")
    ] = False,
    out: Annotated[Path | None, Option(help="The file to send. Default: census-SITE.json.")] = None,
    collect: Annotated[
        bool, Option("--collect", help="At the coordinator: say what all hospitals can answer.")
    ] = False,
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Count patients by the values of a column, with noise, before there is a plan; or collect hospitals' responses."""
    from wsi_fl.hospitals.plans import feasibility as censuses
    from wsi_fl.stages.runtime.console import TextLine
    from wsi_fl.system.files import write_json

    identity = _open_kit(kit).load_identity()
    if collect:
        responses = [censuses.read_response(path, identity.root) for path in files or []]
        print_document(censuses.collect_responses(responses, epsilon or 1.0), as_json, censuses.feasibility_lines)
        return
    pairs = [option.partition("=") for option in column or []]
    columns = {name: values.split(",") for name, _, values in pairs}
    if len(columns) < len(pairs):
        duplicate = next(name for name, *_ in pairs if [pair[0] for pair in pairs].count(name) > 1)
        raise UsageError(
            f"--column {duplicate}: is given twice; name all its values at once, as in {duplicate}=low,high"
        )
    if not columns:
        raise UsageError("which column? say --column NAME=VALUE,VALUE, as in --column grade=low,high")
    response = censuses.run_query(
        _load_study(study), identity, columns, epsilon=epsilon or 0.1, only_enough=only_enough
    )
    path = out or Path(f"census-{identity.name}.json")
    write_json(path, response)
    message = f"{path}: {len(columns)} columns at ε = {response['epsilon']:g} per patient; send it to the coordinator"
    print_document(response, as_json, lambda _: [TextLine(message)])


@app.command()
def board(
    kit: Annotated[Path | None, Option(metavar="DIR", help="Your kit, the coordinator's or a hospital's.")] = None,
    out: Annotated[Path | None, Option(help="Write it as a page too.")] = None,
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Show who takes part, the progress, the results, and the next steps with the person for each."""
    from wsi_fl.hospitals.dashboard.dashboard_page import dashboard_lines, make_dashboard

    document = make_dashboard(_load_study(study), kit=kit, out=out, study_label=str(study or "."))
    print_document(document, as_json, dashboard_lines)


@app.command()
def rehearse(
    file: Annotated[Path, Argument(help="A plan, signed or not.")],
    kit: _KitOption,
    study: _StudyFolder = None,
    rounds: Annotated[
        int | None, Option(min=1, help="Fewer than the plan's: all take as long as all sites in turn.")
    ] = None,
    keep: Annotated[Path | None, Option(help="A new folder to keep the run in, private models too.")] = None,
    as_json: Json = False,
) -> None:
    """Run a plan with your own data alone, for its time, memory and ε; nothing leaves and nothing is spent."""
    from wsi_fl.hospitals.plans.dry_run import dry_run_lines, dry_run_plan
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan
    from wsi_fl.stages.runtime.console import ProgressBars

    with ProgressBars("rehearse") as bars:
        document = dry_run_plan(
            _load_study(study), FederationPlan.load(file), _open_kit(kit).name, rounds=rounds, keep=keep, watcher=bars
        )
    print_document(document, as_json, dry_run_lines)


@app.command()
def evidence(
    kit: Annotated[Path | None, Option(metavar="DIR", help="Your kit; with --verify, whose root is trusted.")] = None,
    study: _StudyFolder = None,
    out: Annotated[Path, Option(help="A new folder.")] = Path("evidence"),
    verify: Annotated[Path | None, Option(metavar="DIR", help="Check such a folder instead, whosever it is.")] = None,
    as_json: Json = False,
) -> None:
    """Write the evidence that security, data protection and registers ask for, in one signed folder; or verify one."""
    from wsi_fl.hospitals.dossier.evidence import make_evidence, verification_lines, verify_evidence

    opened_kit = None if kit is None else _open_kit(kit)
    if verify is not None:
        result = verify_evidence(verify, opened_kit.load_identity().root if opened_kit else None)
        print_document(result, as_json, partial(verification_lines, folder=verify, vouched=opened_kit is not None))
        return
    if opened_kit is None:
        raise UsageError("which hospital's evidence? give --kit DIR; or --verify DIR, to check a folder")
    print_document(make_evidence(_load_study(study), opened_kit, out), as_json, lambda _: [str(out / "index.html")])
