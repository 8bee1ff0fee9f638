"""`wsi-fl federation …`: hospitals that learn together over NVIDIA FLARE, or over a folder that all can reach."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from wsi_fl.cli.options import Json, Pipeline, Set, find_study, show
from wsi_fl.federation.methods import names_of
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.hospitals.trust.kit import Kit
    from wsi_fl.study.folder import Study

app = typer.Typer(
    no_args_is_help=True, help="Hospitals that learn together: kits, plans, and what joins them."
)

_KitOption = Annotated[Path, Option(metavar="DIR", help="Your kit, the folder with federation.json.")]
_KitOrRoot = Annotated[
    Path, Option("--kit", metavar="DIR", help="Your kit; for a request, the folder that `provision` made.")
]
_KitFolder = Annotated[Path, Argument(metavar="KIT", help="The folder of the kit.")]
_PlanFile = Annotated[Path | None, Option("--plan", metavar="FILE", help="The plan that all have signed.")]
_SharedFolder = Annotated[
    str | None, Option("--folder", metavar="ADDRESS", help="Where a folder joins all: another address of it.")
]
_Unchecked = Annotated[bool, Option("--unchecked", help="On a trial: compare no fingerprint.")]
_StudyFolder = Annotated[
    Path | None, Option(metavar="DIR", help="The study. Default: the one at or above this folder.")
]


def _study(folder: Path | None) -> Study:
    from wsi_fl.study.folder import Study

    return find_study() if folder is None else Study.find(folder)


def _kit(folder: Path) -> Kit:
    from wsi_fl.hospitals.trust.kit import Kit

    return Kit.open(folder)


def _says_yes(question: str, instead: str) -> bool:
    """Ask whoever sits here; UsageError, which names the options to give instead, where nobody does."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UsageError(
            f"nothing was signed: nobody can be asked here; read the above, and say {instead}"
        ) from None


@app.command()
def provision(
    folder: Annotated[Path, Argument(help="A new folder, for the root and the first kits.")],
    name: Annotated[str, Option(help="Of the federation.")] = "wsi-fl",
    server: Annotated[
        str | None, Option(metavar="HOST", help="Where hospitals reach the server; HOST:PORT if not on 443.")
    ] = None,
    shared: Annotated[
        str | None,
        Option("--folder", metavar="ADDRESS", help="Without a server: a folder that all can reach."),
    ] = None,
    sites: Annotated[str, Option(help="A test bed: kits of these hospitals too, as in A,B,C.")] = "",
    as_json: Json = False,
) -> None:
    """Found a federation: its root, and the kits of its server and its coordinator."""
    from wsi_fl.hospitals.trust.making import provision, provisioned_lines

    named = [site.strip() for site in sites.split(",") if site.strip()]
    document = provision(folder, federation=name, server=server, shared_folder=shared, sites=named)
    show(document, as_json, provisioned_lines)


@app.command()
def request(
    site: Annotated[str, Argument(help="The hospital's name in the federation, that of its site file.")],
    kit: Annotated[Path, Option(help="A new folder for the kit; the key is made there and stays there.")],
    organization: Annotated[str, Option(help="The hospital's full name.")],
    as_json: Json = False,
) -> None:
    """Make a key at a hospital, and the request that is sent to the coordinator."""
    from wsi_fl.hospitals.trust.making import request, requested_lines

    show(request(kit, name=site, organization=organization), as_json, requested_lines)


@app.command()
def join(
    file: Annotated[Path, Argument(help="The certificate, or withdrawn.pem, that the coordinator sent.")],
    kit: Annotated[Path, Option(help="The kit that the request was made in.")],
    fingerprint: Annotated[
        str | None,
        Option(
            help="The root's, as the coordinator read it out; another one is refused. A new kit needs it."
        ),
    ] = None,
    unchecked: _Unchecked = False,
    as_json: Json = False,
) -> None:
    """Put the certificate beside the key; the kit is complete then. Or let a kit take a list of withdrawn ones."""
    from wsi_fl.hospitals.trust.making import join, joined_lines
    from wsi_fl.hospitals.trust.root import list_lines, take_list

    if file.suffix == ".pem":
        show(take_list(file, kit), as_json, list_lines)
        return
    show(join(file, kit, fingerprint, unchecked=unchecked), as_json, joined_lines)


@app.command()
def plan(
    method: Annotated[str, Option(help=f"What the hospitals run: {names_of(lambda row: bool(row.shares))}.")],
    pipeline: Pipeline = None,
    overrides: Set = None,
    out: Annotated[Path, Option(help="The file to write.")] = Path("plan.json"),
    kit: Annotated[
        Path | None,
        Option(metavar="DIR", help="The founded folder: the plan pins the keys that it gave certificates."),
    ] = None,
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write the plan that hospitals sign: what runs, what leaves, what it costs, and what never leaves."""
    from wsi_fl.hospitals.plans.making import made_lines, make_plan
    from wsi_fl.hospitals.plans.signed import check_withdrawn
    from wsi_fl.hospitals.trust.root import Root

    root = None if kit is None else Root.open(kit)
    keys = root.keys() if root else {}
    made = make_plan(
        _study(study), method=method, pipeline_name=pipeline, overrides=overrides or [], out=out, keys=keys
    )
    if root:
        check_withdrawn(made, root.trusted, made.sites)
    document = {"plan": str(out), "sha256": made.digest, "sites": made.sites, "most_bytes": made.most_bytes}
    show(document, as_json, made_lines)


@app.command()
def approve(
    file: Annotated[Path, Argument(help="A plan, or a certificate request.")],
    kit: _KitOrRoot,
    fingerprint: Annotated[
        str | None,
        Option(
            help="Of a certificate request: what the hospital read to you by telephone. A new name needs it."
        ),
    ] = None,
    unchecked: _Unchecked = False,
    study: _StudyFolder = None,
    yes: Annotated[bool, Option("--yes", help="Sign without being asked.")] = False,
    yes_per_row: Annotated[
        bool,
        Option(
            "--yes-per-row",
            help="Say yes also to an ε per row that is above max_epsilon for the patient with the most rows.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a plan, see what it costs your hospital, and sign it; or approve a hospital's certificate request."""
    from wsi_fl.hospitals.plans.signed import is_request

    if not file.exists():
        raise UsageError(f"{file}: no such file; give a plan, or a hospital's certificate request")
    if is_request(file):
        from wsi_fl.hospitals.trust.making import approve_request, approved_lines

        show(approve_request(file, kit, fingerprint, unchecked=unchecked), as_json, approved_lines)
        return
    _sign(file, kit, _study(study), yes=yes, yes_per_row=yes_per_row, as_json=as_json)


def _sign(file: Path, kit: Path, study: Study, *, yes: bool, yes_per_row: bool, as_json: bool) -> None:
    from wsi_fl.hospitals.plans.approving import above_words, look, look_lines, sign, signed_lines
    from wsi_fl.hospitals.plans.signed import Plan
    from wsi_fl.stages.work.console import render

    identity = _kit(kit).identity()
    looked = look(study, Plan.load(file), identity.name)
    render(look_lines(looked))
    if (
        (said := above_words(looked.cost))
        and not yes_per_row
        and (yes or not _says_yes(f"Do you accept that {said}?", "--yes-per-row and --yes"))
    ):
        raise WsiFlError(
            f"{file}: nothing was signed, for {said}; ask for a plan per patient (privacy.unit), or say "
            "--yes-per-row too"
        )
    if not yes and not _says_yes(f"Sign this in the name of {identity.name}?", "--yes"):
        raise WsiFlError(f"{file}: nothing was signed")
    path = sign(study, looked, identity)
    costs = (
        "epsilon",
        "lifetime_epsilon",
        "max_tpr_at_fpr_1pct",
        "most_epsilon",
        "rounds",
        "group",
        "lifetime_group",
    )
    document = {
        "site": identity.name,
        "plan": looked.plan.digest,
        "approval": study.relative(path),
        **{key: getattr(looked.cost, key) if looked.cost else None for key in costs},
        "notes": list(looked.notes),
    }
    show(document, as_json, signed_lines)


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
    from wsi_fl.hospitals.work.start import start, take_part_by_folder
    from wsi_fl.stages.training.train import summary_lines
    from wsi_fl.stages.work.console import say

    opened = _kit(kit)
    found = _study_to_start(opened, study)
    if shared is None and opened.folder is None:
        if without:
            raise UsageError("--without is for a folder; with a server, the coordinator gives it to `submit`")
        start(opened, found, told=say)
        return
    if found is None:
        raise UsageError(f"{kit} is the kit of a {opened.role}; over a folder hospitals alone start")
    summary = take_part_by_folder(found, opened, folder=shared, without=without or [])
    show(summary, as_json, partial(summary_lines, again="wsi-fl federation start"))


def _study_to_start(kit: Kit, folder: Path | None) -> Study | None:
    """The hospital's study; none for a kit that starts in no study."""
    if kit.role != "hospital":
        return None
    try:
        return _study(folder)
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
    """Let the hospitals of a signed plan do it together."""
    from wsi_fl.hospitals.plans.signed import Plan
    from wsi_fl.hospitals.work.submit import submit, submitted_lines
    from wsi_fl.stages.work.console import Bars

    file = plan or _plan_here()
    agreed = Plan.load(file)
    if method is not None and method != agreed.method:
        raise UsageError(f"{file} is a plan for {agreed.method}, not for {method}")
    if without and resume is None:
        raise UsageError("--without is for going on with a run; give --resume RUN too")
    with Bars("federation") as bars:
        document = submit(
            _kit(kit),
            agreed,
            out=out,
            beside=file.parent,
            resume=resume,
            without=without or [],
            watcher=bars,
        )
    show(document, as_json, submitted_lines)


def _plan_here(study: Study | None = None) -> Path:
    """The signed plan of a study, or of the one at or above this folder."""
    from wsi_fl.hospitals.plans.signed import plan_path

    with suppress(UsageError):
        if (path := plan_path(study or find_study())).is_file():
            return path
    raise UsageError("which plan? give --plan FILE, the one that all hospitals have signed")


@app.command()
def status(kit: _KitOption, as_json: Json = False) -> None:
    """Say which hospitals are connected, and what became of the jobs."""
    from wsi_fl.hospitals.work.submit import status, status_lines

    show(status(_kit(kit)), as_json, status_lines)


@app.command()
def abort(
    job: Annotated[str, Argument(help="The job's id, as `status` has it.")],
    kit: _KitOption,
    as_json: Json = False,
) -> None:
    """End a job at all hospitals; what was finished stays."""
    from wsi_fl.hospitals.flare import jobs
    from wsi_fl.stages.work.console import Line

    jobs.abort(_kit(kit), job)
    show({"aborted": job}, as_json, lambda _: [Line(f"job {job} was ended")])


@app.command()
def check(
    kit: _KitFolder, plan: _PlanFile = None, shared: _SharedFolder = None, as_json: Json = False
) -> None:
    """Look whether a kit gets through; the coordinator's and a plan: whether all hospitals reach each other."""
    from wsi_fl.hospitals.plans.signed import Plan
    from wsi_fl.hospitals.work.submit import check, check_lines

    document = check(_kit(kit), Plan.load(plan) if plan else None, folder=shared)
    show(document, as_json, check_lines)
    if not document["ok"]:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, Option(help="A new folder, for everybody's own folders.")] = Path("federation-demo"),
    as_json: Json = False,
) -> None:
    """Let a server and four hospitals of painted slides, all processes of this machine, learn together."""
    from wsi_fl.hospitals.demo import federation_demo, federation_demo_lines

    show(federation_demo(out), as_json, federation_demo_lines)


@app.command()
def dossier(
    site: Annotated[str | None, Option(help="Whose dossier. Default: the kit's hospital.")] = None,
    kit: Annotated[
        Path | None, Option(metavar="DIR", help="Your kit; it knows who has signed and what joins you.")
    ] = None,
    out: Annotated[Path, Option(help="The page; its JSON lies beside it.")] = Path("dossier.html"),
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write one page for data protection and network people: what leaves, by which way, and what it cost so far."""
    from wsi_fl.hospitals.dossier.page import make_dossier

    made = make_dossier(_study(study), site=site, kit=kit, out=out)
    show(dict(made), as_json, lambda _: [str(out)])


@app.command()
def renew(
    kit: _KitOption,
    new_key: Annotated[
        bool, Option("--new-key", help="Ask for another key, which the present one vouches for.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the request that renews the certificate of a kit; the coordinator approves it, and the kit joins again."""
    from wsi_fl.hospitals.trust.making import renew, requested_lines

    show(renew(kit, rotate=new_key), as_json, requested_lines)


@app.command()
def revoke(
    site: Annotated[str, Argument(help="Whose certificates are withdrawn.")],
    kit: Annotated[Path, Option(metavar="DIR", help="The folder that `provision` made.")],
    as_json: Json = False,
) -> None:
    """Withdraw the certificates of a hospital; the list of them is signed by the root, and everybody's kit takes it."""
    from wsi_fl.hospitals.trust.root import list_lines, revoke

    show(revoke(site, kit), as_json, list_lines)


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
    """Write down for your records what you released to whom, what of it stays with others, and what is left to do."""
    from wsi_fl.hospitals.dossier.page import leave, leaving_lines

    show(leave(_study(study), _kit(kit), out=out, delete_approval=delete_approval), as_json, leaving_lines)


@app.command()
def backup(
    kit: _KitOption,
    out: Annotated[Path, Option(metavar="FILE", help="The file to write; it holds the key.")],
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Copy key, certificates, approvals, plan and ledger into one file."""
    from wsi_fl.hospitals.work.backup import backup

    opened = _kit(kit)
    made = backup(opened, _study_to_start(opened, study), out)
    show(made, as_json, lambda one: [f"{one['file']} holds the key of {one['name']}: protect it as the kit"])


@app.command()
def restore(
    file: Annotated[Path, Argument(help="What `backup` wrote.")],
    kit: Annotated[Path, Option(metavar="DIR", help="The folder of the kit, new or damaged.")],
    study: Annotated[Path | None, Option(metavar="DIR", help="A hospital's study, new or damaged.")] = None,
    as_json: Json = False,
) -> None:
    """Put back what is missing of a kit and a study, and no ledger in the place of a newer one."""
    from wsi_fl.hospitals.work.backup import restore, restored_lines
    from wsi_fl.study.folder import Study

    show(restore(file, kit, Study(study.resolve()) if study else None), as_json, restored_lines)


@app.command("preapprove")
def frame(
    kit: _KitOption,
    epsilon: Annotated[float | None, Option(help="Of all plans together, by your own ledger.")] = None,
    until: Annotated[str, Option(metavar="DATE", help="The last day, as in 2027-03-31.")] = "",
    method: Annotated[
        list[str] | None, Option(help="What plans may run. Repeatable. Default: the plan's.")
    ] = None,
    runs: Annotated[int, Option(min=1, help="How many runs at most.")] = 20,
    partner: Annotated[
        list[str] | None, Option(metavar="SITE", help="Who may take part. Repeatable. Default: all.")
    ] = None,
    code: Annotated[
        list[str] | None, Option(metavar="SHA256", help="Of another wsi-fl to allow. Repeatable.")
    ] = None,
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
    """Sign a frame: plans within it run here for weeks without a further signature, all others are refused."""
    from wsi_fl.hospitals.plans.admitting import frame_lines, make_frame, with_code
    from wsi_fl.hospitals.plans.frames import require_frame, write_frame
    from wsi_fl.hospitals.plans.signed import Plan
    from wsi_fl.stages.work.console import render

    if revoke:
        withdraw(kit, study, as_json)
        return
    found, identity, codes = _study(study), _kit(kit).identity(), code or []
    if add_code:
        made = with_code(require_frame(found, identity), codes)
    else:
        made = make_frame(
            found,
            Plan.load(plan or _plan_here(found)),
            identity.name,
            epsilon=epsilon,
            until=until,
            runs=runs,
            methods=method or [],
            partners=partner or [],
            codes=codes,
        )
    render(frame_lines(made))
    if not yes and not _says_yes(f"Sign this in the name of {identity.name}?", "--yes"):
        raise WsiFlError("nothing was signed")
    write_frame(found, made, identity)
    show(dict(made), as_json, lambda _: [])


def withdraw(kit: Path, study: Path | None, as_json: bool) -> None:
    """End a frame at once, and all approvals made in its name; a run under way ends at its next round."""
    from wsi_fl.hospitals.plans.frames import withdraw
    from wsi_fl.stages.work.console import Line

    ended = withdraw(_study(study), _kit(kit).identity())
    show(dict(ended), as_json, lambda one: [Line(f"the frame until {one['until']} was withdrawn")])


@app.command()
def census(
    kit: _KitOption,
    files: Annotated[list[Path] | None, Argument(help="With --collect: what hospitals sent.")] = None,
    column: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE,…", help="A column of your table, and the values to count. Repeatable."),
    ] = None,
    epsilon: Annotated[
        float | None,
        Option(min=0.001, help="Per patient: of the census (0.1), or with --collect of the plan (1)."),
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
    """Count patients by the values of a column, with noise, before there is a plan; or collect what hospitals sent."""
    from wsi_fl.hospitals.plans import census as censuses
    from wsi_fl.stages.work.console import Line
    from wsi_fl.system.files import write_json

    identity = _kit(kit).identity()
    if collect:
        found = [censuses.read_census(path, identity.root) for path in files or []]
        show(censuses.collect(found, epsilon or 1.0), as_json, censuses.census_lines)
        return
    pairs = [one.partition("=") for one in column or []]
    asked = {name: values.split(",") for name, _, values in pairs}
    if len(asked) < len(pairs):
        twice = next(name for name, *_ in pairs if [one[0] for one in pairs].count(name) > 1)
        raise UsageError(
            f"--column {twice}: is given twice; name all its values at once, as in {twice}=low,high"
        )
    if not asked:
        raise UsageError("which column? say --column NAME=VALUE,VALUE, as in --column grade=low,high")
    made = censuses.take_census(
        _study(study), identity, asked, epsilon=epsilon or 0.1, only_enough=only_enough
    )
    path = out or Path(f"census-{identity.name}.json")
    write_json(path, made)
    said = f"{path}: {len(asked)} columns at ε = {made['epsilon']:g} per patient; send it to the coordinator"
    show(made, as_json, lambda _: [Line(said)])


@app.command()
def board(
    kit: Annotated[
        Path | None, Option(metavar="DIR", help="Your kit, the coordinator's or a hospital's.")
    ] = None,
    out: Annotated[Path | None, Option(help="Write it as a page too.")] = None,
    study: _StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Say who takes part, how far everybody is, what came of it, and what is to be done next, by whom."""
    from wsi_fl.hospitals.board.page import board_lines, make_board

    made = make_board(_study(study), kit=kit, out=out, named=str(study or "."))
    show(made, as_json, board_lines)


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
    """Do a plan with your own data alone: how long, how much memory, what ε; nothing leaves and nothing is spent."""
    from wsi_fl.hospitals.plans.rehearsing import rehearse, rehearsed_lines
    from wsi_fl.hospitals.plans.signed import Plan
    from wsi_fl.stages.work.console import Bars

    with Bars("rehearse") as bars:
        document = rehearse(
            _study(study), Plan.load(file), _kit(kit).name, rounds=rounds, keep=keep, watcher=bars
        )
    show(document, as_json, rehearsed_lines)


@app.command()
def evidence(
    kit: Annotated[
        Path | None, Option(metavar="DIR", help="Your kit; with --verify, whose root is trusted.")
    ] = None,
    study: _StudyFolder = None,
    out: Annotated[Path, Option(help="A new folder.")] = Path("evidence"),
    verify: Annotated[
        Path | None, Option(metavar="DIR", help="Check such a folder instead, whosever it is.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write what security, data protection and registers ask of a hospital, in one signed folder; or check one."""
    from wsi_fl.hospitals.dossier.evidence import make_evidence, verified_lines, verify_evidence

    opened = None if kit is None else _kit(kit)
    if verify is not None:
        found = verify_evidence(verify, opened.identity().root if opened else None)
        show(found, as_json, partial(verified_lines, folder=verify, vouched=opened is not None))
        return
    if opened is None:
        raise UsageError("which hospital's evidence? give --kit DIR; or --verify DIR, to check a folder")
    show(make_evidence(_study(study), opened, out), as_json, lambda _: [str(out / "index.html")])
