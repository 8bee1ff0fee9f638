"""The command line: thin, every command one call of a stage. Heavy imports happen inside commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsi_fl import __version__
from wsi_fl.cli import synthesis as cli_synthesize
from wsi_fl.types import UsageError

if TYPE_CHECKING:
    from wsi_fl.study.folder import Study

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Hospitals learn together from whole-slide images they may not share.",
    epilog="Start with: wsi-fl demo",
)
app.add_typer(cli_synthesize.app, name="synthesize")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Pipeline = Annotated[
    str | None, typer.Option(help="Name of a pipeline. Default: the study's only one, or camelyon17.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a pipeline key, e.g. train.rounds=5. Repeatable."
    ),
]
Answering = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="predict.with (auto, private, proxy or mean), predict.threshold or predict.top_k. Repeatable.",
    ),
]
Run = Annotated[str, typer.Argument(help="A run: its folder, name or number.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _study() -> Study:
    from wsi_fl.study.folder import Study

    return Study.find()


def _out(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _one_or_all(command: str, site: str | None, every: bool) -> None:
    if (site is None) == (not every):
        raise UsageError(
            f"{command} needs one of --site NAME and --all"
            if site is None
            else "--site and --all exclude each other"
        )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the study.")] = Path("wsi-fl-demo"),
    as_json: Json = False,
) -> None:
    """Paint four hospitals' slides, tile, train ProxyFL on four MPI ranks, evaluate, report."""
    from wsi_fl.demo.run import demo, print_demo

    document = demo(out)
    _out(document) if as_json else print_demo(document)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check Python, OpenSlide, MPI, GPUs and disk; say how to fix what is missing."""
    from wsi_fl.stages.doctor import doctor, print_doctor

    document = doctor()
    _out(document) if as_json else print_doctor(document)
    if not document["ok"]:
        raise typer.Exit(1)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The study to make.")],
    archive: Annotated[
        Path | None, typer.Option("--from", help="Archive of slides to write site files for.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="camelyon17, camelyon16, tcga or generic. Default: recognised.")
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="The sites are real hospitals: nobody reads their patches.")
    ] = False,
    pipeline: Annotated[
        str | None,
        typer.Option(help="Shipped pipeline of the study. Default: tcga_subtypes for tcga, or camelyon17."),
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(help="TCGA: a site is an institution (default) or a source site, tss.")
    ] = None,
    clinical: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TCGA: diagnoses. Default: its clinical*.tsv.")
    ] = None,
    codes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TCGA: all source sites. Default: its tissueSourceSite*.tsv, if any."
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="KEY=NAME",
            help="TCGA: what patient, diagnosis, tumor_type or project is called in --clinical. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a study: pipelines/ and sites/ to edit."""
    from wsi_fl.stages.prepare.init import Tables, init, print_init

    tables = Tables(group_by, clinical, codes, tuple(columns or ()))
    document = init(folder, archive=archive, layout=layout, real=real, pipeline=pipeline, tables=tables)
    _out(document) if as_json else print_init(document)


@app.command()
def tile(
    site: Annotated[str | None, typer.Option(help="The site to tile.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Tile every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Cut a site's slides into labelled patches: its patch store."""
    _one_or_all("tile", site, every)
    study = _study()
    from wsi_fl.stages.prepare.tables import print_tile
    from wsi_fl.stages.prepare.tile import tile
    from wsi_fl.stages.work.console import Bars

    with Bars("tile") as bars:
        document = tile(study, site=site, pipeline_name=pipeline, overrides=overrides or [], watcher=bars)
    if document:  # ranks other than the first have nothing to say
        _out(document) if as_json else print_tile(document)


@app.command()
def mosaic(
    site: Annotated[str | None, typer.Option(help="The site whose slides to take.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Turn a site's slides into mosaics of a few patches each, stored as deep features."""
    _one_or_all("mosaic", site, every)
    study = _study()
    from wsi_fl.stages.prepare.mosaic import mosaic
    from wsi_fl.stages.prepare.tables import print_mosaic
    from wsi_fl.stages.work.console import Bars

    with Bars("mosaic") as bars:
        document = mosaic(study, site=site, pipeline_name=pipeline, overrides=overrides or [], watcher=bars)
    if document:  # ranks other than the first have nothing to say
        _out(document) if as_json else print_mosaic(document)


@app.command()
def features(
    site: Annotated[str | None, typer.Option(help="The site whose patches to take.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Deep features of every patch of a patch store; with stain.exchange also in the other sites' stains."""
    _one_or_all("features", site, every)
    study = _study()
    from wsi_fl.stages.prepare.features import features, print_features
    from wsi_fl.stages.work.console import Bars

    with Bars("features") as bars:
        document = features(study, site=site, pipeline_name=pipeline, overrides=overrides or [], watcher=bars)
    if document:  # ranks other than the first have nothing to say
        _out(document) if as_json else print_features(document)


@app.command()
def stain(
    site: Annotated[str | None, typer.Option(help="The site whose training patches to measure.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every site of the pipeline.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure and release once more, at the same cost again.")
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Release a site's stain, a few numbers under differential privacy, once."""
    _one_or_all("stain", site, every)
    study = _study()
    from wsi_fl.stages.prepare.stain import print_stains, stain
    from wsi_fl.stages.work.console import Bars

    with Bars("stain") as bars:
        document = stain(
            study,
            site=site,
            pipeline_name=pipeline,
            overrides=overrides or [],
            again=again,
            watcher=bars,
        )
    if document:  # ranks other than the first have nothing to say
        _out(document) if as_json else print_stains(document)


@app.command()
def export(
    site: Annotated[str, typer.Option(help="The site whose mosaics to export.")],
    form: Annotated[str, typer.Option("--format", help="clam: HDF5 files for CLAM and TRIDENT.")] = "clam",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. Default: exports/FORMAT/SITE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a site's mosaics in the format of another tool."""
    study = _study()
    from wsi_fl.stages.prepare.export import export, print_export

    document = export(study, site=site, form=form, out=out)
    _out(document) if as_json else print_export(document)


@app.command()
def pack(
    store: Annotated[Path, typer.Argument(help="A linked store, stores/<site>/patches.h5.")],
    out: Annotated[Path, typer.Argument(help="The self-contained file to write.")],
) -> None:
    """Copy a store with all its shards into one self-contained file."""
    if out.exists():
        raise UsageError(f"{out}: exists already; pack writes new files only")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder")
    from wsi_fl.stores.shards import pack

    pack(store, out)
    print(out)


@app.command()
def partition(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="npz, HDF5 or a folder of classes.")],
    sites: Annotated[int, typer.Option(help="Number of sites.")],
    per_site: Annotated[
        int | None, typer.Option(help="Training images per site. Default: all there are.")
    ] = None,
    skew: Annotated[str, typer.Option(help="iid, major:0.8 or dirichlet:0.5.")] = "iid",
    seed: Annotated[int, typer.Option(help="Of the division.")] = 0,
    test_fraction: Annotated[float, typer.Option(help="Held out where the data bring no test set.")] = 0.2,
    size_px: Annotated[int | None, typer.Option(help="Scale images to squares of this size.")] = None,
    prefix: Annotated[str, typer.Option(help="Sites are called PREFIX1, PREFIX2, …")] = "S",
    as_json: Json = False,
) -> None:
    """Divide an image data set among simulated sites."""
    study = _study()
    from wsi_fl.stages.prepare.partition import partition, print_partition

    document = partition(
        study,
        data,
        n_sites=sites,
        per_site=per_site,
        skew=skew,
        seed=seed,
        test_fraction=test_fraction,
        size_px=size_px,
        prefix=prefix,
    )
    _out(document) if as_json else print_partition(document)


@app.command()
def train(
    method: Annotated[
        str,
        typer.Option(
            help="proxyfl, fml, fedavg, avgpush, cwt, replay, mpcpa; joint: all data pooled; regular: alone; "
            "generated: all sites' generated images."
        ),
    ] = "proxyfl",
    pipeline: Pipeline = None,
    overrides: Set = None,
    backend: Annotated[
        str, typer.Option(help="mpi: one rank per site. local: all sites in this process.")
    ] = "mpi",
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue a run after its last round.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="A series of runs from N seeds, train.seed and on.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="With --resume: go on without this site. Repeatable."),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines", help="mpcpa: own, all original, all generated and FedAvg too, in a table."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Preflight only: ε, memory and time of the plan.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train: one MPI rank per site, started here or by mpiexec or srun."""
    if resume is not None and (overrides or pipeline or seeds):
        raise UsageError("a resumed run keeps its configuration; leave out --set, --pipeline and --seeds")
    if without and resume is None:
        raise UsageError("--without belongs to --resume; a new run takes its sites from the pipeline")
    if baselines and (method != "mpcpa" or resume is not None or seeds is not None or dry_run):
        raise UsageError("--baselines belongs to --method mpcpa, alone")
    study = _study()
    chosen: dict[str, Any] = {"method": method, "pipeline_name": pipeline, "overrides": overrides or []}
    from wsi_fl.stages.training import series
    from wsi_fl.stages.training import train as stage
    from wsi_fl.stages.work.console import Bars

    if dry_run:
        from wsi_fl.stages.training import plan

        cost = plan.dry_run(study, **chosen, backend=backend)
        _out(cost) if as_json else plan.print_plan(cost)
        return
    if baselines:
        from wsi_fl.stages.answers.mpcpa_table import mpcpa_table, print_mpcpa

        chosen.pop("method")
        with Bars("train") as bars:
            table = mpcpa_table(study, **chosen, backend=backend, watcher=bars)
        _out(table) if as_json else print_mpcpa(table)
        return
    with Bars("train") as bars:
        if resume is not None:
            summary = stage.resume(study, resume, without=without or (), backend=backend, watcher=bars)
            summary = series.resume_series(study, resume, backend=backend, watcher=bars) or summary
        elif seeds is not None:
            summary = series.train_series(study, seeds=seeds, **chosen, backend=backend, watcher=bars)
        else:
            summary = stage.train(study, **chosen, backend=backend, watcher=bars)
    if summary:  # ranks other than the first have nothing to say
        people = series.print_series if "runs" in summary else stage.print_summary
        _out(summary) if as_json else people(summary)


@app.command(hidden=True)
def rank(run: Path) -> None:
    """One MPI rank of a run that `train` started."""
    from wsi_fl.stages.training.ranks import rank_main

    rank_main(run)


@app.command()
def evaluate(run: Run, overrides: Answering = None, as_json: Json = False) -> None:
    """What answers for every site, on the merged multi-centric test set and on each site's part."""
    study = _study()
    from wsi_fl.stages.answers.evaluate import evaluate, print_evaluation
    from wsi_fl.stages.work.console import Bars

    with Bars("evaluate") as bars:
        document = evaluate(study, run, overrides=overrides or [], watcher=bars)
    _out(document) if as_json else print_evaluation(document)


@app.command()
def predict(
    run: Run,
    site: Annotated[str, typer.Option(help="The site whose models predict.")],
    slide: Annotated[list[Path], typer.Option(help="A slide to predict. Repeatable.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. Default: RUN/predictions/SITE.")
    ] = None,
    tumor_type: Annotated[
        str | None,
        typer.Option(help="What is known of the slides, for runs on mosaics. Default: what the store says."),
    ] = None,
    overrides: Answering = None,
    as_json: Json = False,
) -> None:
    """A new slide: heatmap, outlines for QuPath, probabilities of its patches, slide score or diagnosis."""
    study = _study()
    from wsi_fl.stages.answers.predict import predict, print_predictions
    from wsi_fl.stages.work.console import Bars

    with Bars("predict") as bars:
        document = predict(
            study,
            run,
            site=site,
            slides=slide,
            out=out,
            tumor_type=tumor_type,
            overrides=overrides or [],
            watcher=bars,
        )
    if not document:  # ranks other than the first have nothing to say
        return
    _out(document) if as_json else print_predictions(document)
    if not document["slides"]:
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders, names, numbers, a range (3-8) or a pattern ('*-proxyfl-*'); the first is the reference.",
        ),
    ],
    baseline: Annotated[
        bool, typer.Option(help="Train the runs that are missing of every hospital alone without DP.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Methods side by side: mean ± sd over sites and seeds, significance, communication."""
    study = _study()
    from wsi_fl.stages.answers.compare import compare, print_compare
    from wsi_fl.stages.work.console import Bars

    with Bars("compare") as bars:
        document = compare(study, runs, baseline=baseline, watcher=bars)
    _out(document) if as_json else print_compare(document)


@app.command()
def audit(run: Run, as_json: Json = False) -> None:
    """Attack what a run trained: membership inference, and with canaries a lower bound on ε."""
    study = _study()
    from wsi_fl.stages.answers.audit import audit, print_audit
    from wsi_fl.stages.work.console import Bars

    with Bars("audit") as bars:
        document = audit(study, run, watcher=bars)
    _out(document) if as_json else print_audit(document)


@app.command()
def report(
    run: Run,
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures",
            help="Show patches, slides and generated images of real sites too; such a page must stay in the hospital.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page with figures; of real sites' patients it shows pictures only when asked to."""
    study = _study()
    from wsi_fl.stages.answers.report import report

    path = report(study, run, pictures=pictures)
    _out({"report": study.relative(path)}) if as_json else print(path)


@app.command()
def privacy(
    n: Annotated[int, typer.Option(help="Training rows (or patients) of the site.")],
    batch_size: Annotated[
        int | None,
        typer.Option(help="Expected batch size B: 32 with --sigma, proposed with --target-epsilon."),
    ] = None,
    epochs: Annotated[
        float, typer.Option("--epochs", "--rounds", help="Passes over the data: rounds × epochs per round.")
    ] = 30,
    sigma: Annotated[float | None, typer.Option(help="Noise multiplier.")] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find batch size and σ that spend this ε best.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ.")] = 1e-5,
    group: Annotated[
        int | None, typer.Option(min=1, help="Rows of one patient: what ε per row is worth to that patient.")
    ] = None,
    as_json: Json = False,
) -> None:
    """ε of a plan, or the σ that a target ε asks for."""
    from wsi_fl.stages.training.privacy import print_privacy, privacy

    document = privacy(
        n=n,
        batch_size=batch_size,
        epochs=epochs,
        delta=delta,
        sigma=sigma,
        target_epsilon=target_epsilon,
        group=group,
    )
    _out(document) if as_json else print_privacy(document)
