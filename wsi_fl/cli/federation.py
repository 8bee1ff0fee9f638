"""`wsi-fl federation …`: hospitals that learn together over NVIDIA FLARE, or over a folder that all can reach."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsi_fl.cli.options import Json, Pipeline, Set, find_study, show

if TYPE_CHECKING:
    from wsi_fl.study.folder import Study

app = typer.Typer(
    no_args_is_help=True, help="Hospitals that learn together: kits, plans, and what joins them."
)

Kit = Annotated[Path, typer.Option(metavar="DIR", help="Your kit, the folder with federation.json.")]
StudyFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The study. Default: the one at or above this folder.")
]


def _study(folder: Path | None) -> Study:
    from wsi_fl.study.folder import Study

    return find_study() if folder is None else Study.find(folder)


@app.command()
def plan(
    method: Annotated[str, typer.Option(help="What the hospitals run: proxyfl, fedavg, oneshot, …")],
    pipeline: Pipeline = None,
    overrides: Set = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("plan.json"),
    study: StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write the plan that hospitals sign: what runs, what leaves, what it costs, and what never leaves."""
    from wsi_fl.stages.hospitals.plan_making import make_plan, print_made

    made = make_plan(_study(study), method=method, pipeline_name=pipeline, overrides=overrides or [], out=out)
    document = {"plan": str(out), "sha256": made.digest, "sites": made.sites, "most_bytes": made.most_bytes}
    show(document, as_json, print_made)


@app.command()
def approve(
    file: Annotated[Path, typer.Argument(help="A plan, or a certificate request.")],
    kit: Kit,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="Of a certificate request: what the hospital read to you by telephone."),
    ] = None,
    study: StudyFolder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without being asked.")] = False,
    as_json: Json = False,
) -> None:
    """Read a plan, see what it costs your hospital, and sign it; or approve a hospital's certificate request."""
    from wsi_fl.stages.hospitals.plan import is_request

    if is_request(file):
        from wsi_fl.stages.hospitals.kits_making import approve_request  # type: ignore[import-not-found,unused-ignore]

        approve_request(file, kit, fingerprint)
        return
    _sign(file, kit, _study(study), yes=yes, as_json=as_json)


def _sign(file: Path, kit: Path, study: Study, *, yes: bool, as_json: bool) -> None:
    from wsi_fl.stages.hospitals.approving import look, sign
    from wsi_fl.stages.hospitals.kits import Kit
    from wsi_fl.stages.hospitals.plan import Plan
    from wsi_fl.stages.hospitals.showing import print_look, print_signed

    identity = Kit.open(kit).identity()
    looked = look(study, Plan.load(file), identity.name)
    print_look(looked)
    if not yes and not typer.confirm(f"Sign this in the name of {identity.name}?", err=True):
        raise typer.Exit(1)
    path = sign(study, looked, identity)
    document: dict[str, Any] = {
        "site": identity.name,
        "plan": looked.plan.digest,
        "approval": study.relative(path),
        "epsilon": looked.cost.epsilon if looked.cost else None,
        "lifetime_epsilon": looked.cost.lifetime_epsilon if looked.cost else None,
        "rounds": looked.cost.rounds if looked.cost else None,
        "notes": list(looked.notes),
    }
    show(document, as_json, print_signed)


@app.command()
def dossier(
    site: Annotated[str | None, typer.Option(help="Whose dossier. Default: the kit's hospital.")] = None,
    kit: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Your kit; it knows who has signed and what joins you.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page; its JSON and sbom.json lie beside it.")] = Path(
        "dossier.html"
    ),
    study: StudyFolder = None,
    as_json: Json = False,
) -> None:
    """Write one page for data protection and network people: what leaves, by which way, and what it cost so far."""
    from wsi_fl.stages.hospitals.dossier import make_dossier

    made = make_dossier(_study(study), site=site, kit=kit, out=out)
    show(dict(made), as_json, lambda _: print(out))
