"""The commands that train, and that plan what training costs in ε."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from wsi_fl.cli.options import Json, Pipeline, Set, SiteGpus, find_study, one_or_all, show, take_gpus
from wsi_fl.federation.methods import DEFAULT, METHODS, names_of
from wsi_fl.types import UsageError


def release(
    site: Annotated[str | None, typer.Option(help="The site whose sums to release.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every site of the pipeline.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Take and release them once more, at the same cost again.")
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Release the sums of a site's features, for heads that sites make together, once."""
    one_or_all("release", site, every)
    study = find_study()
    from wsi_fl.stages.training.release import release, releases_lines

    document = release(study, site=site, pipeline_name=pipeline, overrides=overrides or [], again=again)
    show(document, as_json, releases_lines)


class Described(TyperCommand):
    """A command whose help says what every method does, also those of other packages, which it imports."""

    def get_help(self, ctx: Any) -> str:
        method: Any = next(one for one in self.params if one.name == "method")
        method.help = "; ".join(f"{name}: {row.does}" for name, row in METHODS.items())
        return super().get_help(ctx)


def train(
    method: Annotated[
        str,
        typer.Option(
            help="What is done; --help says it of each.",
        ),
    ] = DEFAULT,
    pipeline: Pipeline = None,
    overrides: Set = None,
    backend: Annotated[
        str, typer.Option(help="mpi: one rank per site. local: all sites in this process.")
    ] = "mpi",
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue a run after its last round.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", max=1000, help="A series of runs from N seeds, train.seed and on."),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="A series of runs, each testing one of N folds of every site's patients."
        ),
    ] = None,
    leave_site_out: Annotated[
        bool,
        typer.Option("--leave-site-out", help="A series of runs, each testing a site that takes no part."),
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="With --resume: go on without this site. Repeatable."),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines", help="Beside mpcpa also own, all original, all generated and FedAvg, in a table."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Preflight only: ε, memory and time of the plan.")
    ] = False,
    gpus: SiteGpus = None,
    as_json: Json = False,
) -> None:
    """Train: one MPI rank per site, started here or by mpiexec or srun."""
    if resume is not None and (overrides or pipeline or seeds or folds or leave_site_out):
        raise UsageError(
            "a resumed run keeps its configuration; leave out --set, --pipeline, --seeds, --folds and --leave-site-out"
        )
    if without and resume is None:
        raise UsageError("--without belongs to --resume; a new run takes its sites from the pipeline")
    several = seeds is not None or folds is not None or leave_site_out
    row = METHODS.get(method) if baselines else None
    if baselines and (row is None or not row.baselines or resume is not None or several or dry_run):
        raise UsageError(
            f"--baselines belongs to --method {names_of(lambda row: bool(row.baselines))}, alone"
        )
    study = find_study()
    take_gpus(gpus, ranks=False)
    divided = [] if folds is None else [f"train.folds={folds}"]
    chosen: dict[str, Any] = {
        "method": method,
        "pipeline_name": pipeline,
        "overrides": [*(overrides or []), *divided],
    }
    from wsi_fl.stages.training import train as stage
    from wsi_fl.stages.work.console import Bars

    if dry_run:
        from wsi_fl.stages.training import plan

        if folds is not None:  # of one of the runs
            chosen["overrides"].append("train.fold=1")
        cost = plan.dry_run(study, **chosen, backend=backend)
        show(cost, as_json, plan.plan_lines)
        return
    if row is not None:
        chosen.pop("method")
        measured = import_module(row.baselines)
        with Bars("train") as bars:
            table = measured.baselines(study, **chosen, backend=backend, watcher=bars)
        show(table, as_json, measured.baselines_lines)
        return
    with Bars("train") as bars:
        if resume is not None:
            summary = stage.resume(study, resume, without=without or (), backend=backend, watcher=bars)
            summary = stage.resume_series(study, resume, backend=backend, watcher=bars) or summary
        elif several or stage.is_series(study.pipeline(study.pipeline_name(pipeline), chosen["overrides"])):
            summary = stage.train_series(
                study, seeds=seeds, leave_site_out=leave_site_out, **chosen, backend=backend, watcher=bars
            )
        else:
            summary = stage.train(study, **chosen, backend=backend, watcher=bars)
    show(summary, as_json, stage.series_lines if "runs" in summary else stage.summary_lines)


def rank(run: Path) -> None:
    """Run one MPI rank of a run that `train` started."""
    from wsi_fl.stages.training.ranks import rank_main

    rank_main(run)


def privacy(
    n: Annotated[int, typer.Option(min=1, max=10**9, help="Training rows (or patients) of the site.")],
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Expected batch size B: 32 with --sigma, proposed with --target-epsilon."),
    ] = None,
    epochs: Annotated[
        float,
        typer.Option(
            "--epochs", "--rounds", max=1e6, help="Passes over the data: rounds × epochs per round."
        ),
    ] = 30,
    sigma: Annotated[float | None, typer.Option(min=0, max=1e6, help="Noise multiplier.")] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Find batch size and σ that spend this ε best.")
    ] = None,
    delta: Annotated[float, typer.Option(min=1e-300, max=1, help="δ.")] = 1e-5,
    group: Annotated[
        int | None, typer.Option(min=1, help="Rows of one patient: what ε per row is worth to that patient.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the ε of a plan, or the σ that a target ε asks for."""
    from wsi_fl.stages.training.privacy import privacy, privacy_lines

    document = privacy(
        n=n,
        batch_size=batch_size,
        epochs=epochs,
        delta=delta,
        sigma=sigma,
        target_epsilon=target_epsilon,
        group=group,
    )
    show(document, as_json, privacy_lines)


def bench(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE",
            help="Features with labels: .npz (x, y, patient), .csv, a store (.h5), or a folder of TRIDENT's.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Results, a line for each seed and hospital.")
    ] = Path("bench.csv"),
    methods: Annotated[
        str, typer.Option("--method", help="Names, with commas between.")
    ] = "oneshot,proxyfl,fedavg",
    epsilon: Annotated[str, typer.Option(help="Of each hospital, at δ = 1e-5.")] = "1",
    hospitals: Annotated[
        str, typer.Option(metavar="4x150,…", help="How many hospitals, of how many patients each.")
    ] = "4x150",
    skew: Annotated[
        str,
        typer.Option(
            help="alike, lacks (one has never seen a class), or shares of one class such as 0.9 and 1."
        ),
    ] = "alike,0.9",
    unit: Annotated[str, typer.Option(help="What ε protects: row or patient.")] = "row",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How often hospitals are drawn.")] = 5,
    along: Annotated[
        Path | None,
        typer.Option("--directions", metavar="FILE", help="Of public tissue, or a table of its features."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV with slide, label and patient, for a folder.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure methods on hospitals drawn from one table of features, beside each alone and all data pooled."""
    from wsi_fl.stages.bench import bench, bench_lines, cells_of, numbers_of
    from wsi_fl.stages.work.console import Bars

    with Bars("bench") as bars:
        document = bench(
            table,
            out=out,
            methods=methods.split(","),
            epsilons=numbers_of(epsilon),
            cells=cells_of(hospitals, skew),
            unit=unit,
            seeds=seeds,
            along=along,
            labels=labels,
            jobs=jobs,
            watcher=bars,
        )
    show(document, as_json, bench_lines)
