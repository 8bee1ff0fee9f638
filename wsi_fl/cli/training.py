"""Commands for training, privacy planning, and work on trained runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from wsi_fl.cli.options import (
    Gpus,
    Json,
    Pipeline,
    PredictionOverrides,
    Run,
    Set,
    SiteGpus,
    find_study,
    print_document,
    run_work,
    take_gpus,
)
from wsi_fl.federation.methods import DEFAULT_METHOD, METHODS, list_names
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.stages.runtime.console import Watcher
    from wsi_fl.stages.training.summary import Summary
    from wsi_fl.stages.training.train import SeriesSummary
    from wsi_fl.study.folder import Study


class MethodHelpCommand(TyperCommand):
    """A command with a line on every method in its help, also on those of extensions."""

    def get_help(self, ctx: Any) -> str:
        method: Any = next(option for option in self.params if option.name == "method")
        method.help = "; ".join(f"{name}: {row.summary}" for name, row in METHODS.items())
        return super().get_help(ctx)


_Resume = Annotated[str | None, Option(metavar="RUN", help="Continue a run after its last round.")]
_Seeds = Annotated[int | None, Option(metavar="N", max=1000, help="A series of runs from N seeds, train.seed and on.")]
_Folds = Annotated[
    int | None, Option(metavar="N", help="A series of runs, each testing one of N folds of every site's patients.")
]
_LeaveSiteOut = Annotated[
    bool, Option("--leave-site-out", help="A series of runs, each testing a site that takes no part.")
]
_Without = Annotated[
    list[str] | None, Option(metavar="SITE", help="With --resume: go on without this site. Repeatable.")
]
_Baselines = Annotated[
    bool, Option("--baselines", help="Also the baselines of the method's paper, in a table (mpcpa).")
]
_Plan = Annotated[
    Path | None,
    Option(metavar="FILE", help="With --dry-run: a plan, signed or not, run with copies of your own data alone."),
]
_PlanSite = Annotated[
    str | None, Option(metavar="SITE", help="With --plan: your site; by default the only one with a store here.")
]
_Keep = Annotated[
    Path | None, Option(metavar="DIR", help="With --plan: a new folder to keep the run in, private models too.")
]


def train(
    method: Annotated[str, Option(help="Training method; --help describes each.")] = DEFAULT_METHOD,
    pipeline: Pipeline = None,
    overrides: Set = None,
    backend: Annotated[str, Option(help="mpi: one rank per site. local: all sites in this process.")] = "mpi",
    resume: _Resume = None,
    seeds: _Seeds = None,
    folds: _Folds = None,
    leave_site_out: _LeaveSiteOut = False,
    without: _Without = None,
    baselines: _Baselines = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Preflight only: ε, memory and time of the plan.")] = False,
    plan: _Plan = None,
    site: _PlanSite = None,
    keep: _Keep = None,
    gpus: SiteGpus = None,
    as_json: Json = False,
) -> None:
    """Train: one MPI rank per site, started here or by mpiexec or srun."""
    is_series = seeds is not None or folds is not None or leave_site_out
    if resume is not None and (overrides or pipeline or is_series):
        raise UsageError(
            "a resumed run keeps its configuration; leave out --set, --pipeline, --seeds, --folds and --leave-site-out"
        )
    if without and resume is None:
        raise UsageError("--without belongs to --resume; a new run takes its sites from the pipeline")
    if (site or keep) and plan is None:
        raise UsageError("--site and --keep belong to --plan")
    if plan is not None and (not dry_run or pipeline or resume is not None or is_series):
        raise UsageError("--plan belongs to --dry-run, and has method and settings; add --set train.rounds=1 at most")
    is_alone = resume is None and not is_series and not dry_run
    baseline_work = _find_baselines(method, is_alone=is_alone) if baselines else None
    study, settings = find_study(), [*(overrides or []), *([] if folds is None else [f"train.folds={folds}"])]
    take_gpus(gpus, ranks=False)
    if plan is not None:
        _try_plan(study, plan, site, settings, keep, as_json)
    elif dry_run:
        fold = [] if folds is None else ["train.fold=1"]  # one of the runs
        _print_cost(study, method, pipeline, [*settings, *fold], backend, as_json)
    elif baseline_work is not None:
        work, render_lines = baseline_work
        options = {"pipeline_name": pipeline, "overrides": settings, "backend": backend}
        run_work("train", partial(work, study, **options), as_json, render_lines)
    elif resume is not None:
        _resume_run(study, resume, without or [], backend, as_json)
    else:
        series = {"seeds": seeds, "leave_site_out": leave_site_out} if is_series else {}
        options = {"method": method, "pipeline_name": pipeline, "overrides": settings, "backend": backend}
        _start_training(study, series, options, as_json)


def _find_baselines(method: str, *, is_alone: bool) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Return what trains a method's baselines, and what renders their table."""
    row = METHODS.get(method)
    if row is None or row.load_baselines is None or not is_alone:
        raise UsageError(
            f"--baselines belongs to --method {list_names(lambda row: row.load_baselines is not None)}, alone"
        )
    return row.load_baselines()


def _start_training(study: Study, series: dict[str, Any], options: dict[str, Any], as_json: bool) -> None:
    """Train a run, or a series where `series` has options or the pipeline has folds."""
    from wsi_fl.stages.training import train as stage

    keys = study.load_pipeline(study.pipeline_name(options["pipeline_name"]), options["overrides"]).train
    is_series = bool(series) or (keys.folds is not None and keys.fold is None)  # a run per fold
    work = partial(stage.train_series, study, **series) if is_series else partial(stage.train, study)
    run_work("train", partial(work, **options), as_json, stage.train_lines)


def _resume_run(study: Study, run: str, without: list[str], backend: str, as_json: bool) -> None:
    """Continue a run, and the series that it belongs to."""
    from wsi_fl.stages.training import train as stage

    def run_training(watcher: Watcher) -> Summary | SeriesSummary:
        summary = stage.resume_run(study, run, without=without, backend=backend, watcher=watcher)
        return stage.resume_series(study, run, backend=backend, watcher=watcher) or summary

    run_work("train", run_training, as_json, stage.train_lines)


def _print_cost(
    study: Study, method: str, pipeline: str | None, overrides: list[str], backend: str, as_json: bool
) -> None:
    """Print what a run costs."""
    from wsi_fl.stages.training.run_cost import dry_run, plan_lines

    cost = dry_run(study, method=method, pipeline_name=pipeline, overrides=overrides, backend=backend)
    print_document(cost, as_json, plan_lines)


def _try_plan(
    study: Study, plan: Path, site: str | None, overrides: list[str], keep: Path | None, as_json: bool
) -> None:
    """Run a plan with copies of the hospital's own data, and print what it takes and costs."""
    from wsi_fl.stages.training.plan_dry_run import dry_run_plan, plan_dry_run_lines, read_plan

    work = partial(dry_run_plan, study, read_plan(study, plan, site), overrides=overrides, keep=keep)
    run_work("dry run", work, as_json, plan_dry_run_lines)


def start_rank(run: Path) -> None:
    """Run one MPI rank of a run that `train` started."""
    from wsi_fl.stages.training.ranks import run_rank

    run_rank(run)


def plan_privacy(
    n: Annotated[int, Option(min=1, max=10**9, help="Training rows (or patients) of the site.")],
    batch_size: Annotated[
        int | None, Option(min=1, help="Expected batch size B: 32 with --sigma, proposed with --target-epsilon.")
    ] = None,
    epochs: Annotated[
        float, Option("--epochs", "--rounds", max=1e6, help="Passes over the data: rounds × epochs per round.")
    ] = 30,
    sigma: Annotated[float | None, Option(min=0, max=1e6, help="Noise multiplier.")] = None,
    target_epsilon: Annotated[
        float | None, Option(min=1e-6, max=1e6, help="Find batch size and σ that spend this ε best.")
    ] = None,
    delta: Annotated[float, Option(help="δ, above 0 and below 1.")] = 1e-5,
    group: Annotated[int | None, Option(min=1, help="Rows of one patient: also show the ε of that patient.")] = None,
    as_json: Json = False,
) -> None:
    """Compute the ε of a plan, or the noise multiplier σ for a target ε."""
    from wsi_fl.stages.training.privacy_cost import compute_privacy, privacy_lines

    document = compute_privacy(
        n=n, batch_size=batch_size, epochs=epochs, delta=delta, sigma=sigma, target_epsilon=target_epsilon, group=group
    )
    print_document(document, as_json, privacy_lines)


def run_benchmark(
    table: Annotated[
        Path,
        Argument(
            metavar="TABLE",
            help="Features with labels: .npz (x, y, patient), .csv, a store (.h5), or a folder of TRIDENT's.",
        ),
    ],
    out: Annotated[Path, Option(metavar="FILE", help="Results, a line for each seed and hospital.")] = Path(
        "bench.csv"
    ),
    methods: Annotated[str, Option("--method", help="Names, with commas between.")] = "oneshot,proxyfl,fedavg",
    epsilon: Annotated[str, Option(help="Of each hospital, at δ = 1e-5.")] = "1",
    hospitals: Annotated[
        str, Option(metavar="4x150,…", help="How many hospitals, of how many patients each.")
    ] = "4x150",
    skew: Annotated[
        str, Option(help="alike, missing-class (one site has none of it), or shares of one class such as 0.9 and 1.")
    ] = "alike,0.9",
    unit: Annotated[str, Option(help="What ε protects: row or patient.")] = "row",
    seeds: Annotated[int, Option(min=1, max=1000, help="Number of random samples of hospitals.")] = 5,
    along: Annotated[
        Path | None, Option("--projection", metavar="FILE", help="Projection, or features of public slides.")
    ] = None,
    labels: Annotated[
        Path | None, Option(metavar="FILE", help="CSV with slide, label and patient, for a folder.")
    ] = None,
    jobs: Annotated[int, Option(min=1, max=256, help="Processes.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare methods on hospitals sampled from one feature table, with local and pooled baselines."""
    from wsi_fl.evidence.bench import parse_cells, parse_numbers, render_bench_lines, run_benchmark

    work = partial(
        run_benchmark,
        table,
        out=out,
        methods=methods.split(","),
        epsilons=parse_numbers(epsilon),
        cells=parse_cells(hospitals, skew),
        unit=unit,
        seeds=seeds,
        projection=along,
        labels=labels,
        jobs=jobs,
    )
    run_work("bench", work, as_json, render_bench_lines)


def evaluate(run: Run, overrides: PredictionOverrides = None, as_json: Json = False) -> None:
    """Evaluate every site's prediction model on the merged multi-centric test set and on each site's part."""
    study = find_study()
    from wsi_fl.stages.evaluation.evaluate import evaluate, render_evaluation_lines

    work = partial(evaluate, study, run, overrides=overrides or [])
    run_work("evaluate", work, as_json, render_evaluation_lines)


def predict(
    run: Run,
    site: Annotated[str, Option(help="The site whose models predict.")],
    slide: Annotated[list[Path], Option(help="A slide to predict. Repeatable.")],
    out: Annotated[Path | None, Option(metavar="DIR", help="Where to write. Default: RUN/predictions/SITE.")] = None,
    tumor_type: Annotated[
        str | None, Option(help="Tumour type of the slides, for runs on mosaics. Default: from the store.")
    ] = None,
    mpp: Annotated[
        float | None, Option(min=0.01, max=1000, help="µm per pixel of these slides. Default: as in the files.")
    ] = None,
    overrides: PredictionOverrides = None,
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Predict a new slide: heatmap, outlines for QuPath, probabilities of its patches, slide score or diagnosis."""
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.evaluation.predict import predict, render_prediction_lines

    work = partial(
        predict, study, run, site=site, slides=slide, out=out, tumor_type=tumor_type, mpp=mpp, overrides=overrides or []
    )
    document = run_work("predict", work, as_json, render_prediction_lines)
    if not document["slides"]:
        raise WsiFlError("no slide could be predicted; see above")


def compare_runs(
    runs: Annotated[
        list[str],
        Argument(
            metavar="RUN...",
            help="Folders, names, numbers, a range (3-8) or a pattern ('*-proxyfl-*'); the first is the reference.",
        ),
    ],
    baseline: Annotated[bool, Option(help="Train missing local baselines of every hospital, without DP.")] = True,
    as_json: Json = False,
) -> None:
    """Compare methods: mean ± sd over sites and seeds, significance, communication."""
    study = find_study()
    from wsi_fl.evidence.compare import compare_methods, render_comparison_lines

    work = partial(compare_methods, study, runs, baseline=baseline)
    run_work("compare", work, as_json, render_comparison_lines)


def report_clinical(
    runs: Annotated[
        list[str], Argument(metavar="RUN...", help="A run: its folder, name or number; or the folds of one (1-5).")
    ],
    prevalence: Annotated[
        float | None, Option(help="Share of cases in your clinic for predictive values: 0.05.")
    ] = None,
    by: Annotated[
        str | None,
        Option(metavar="COLUMN", help="Group patients by part, tumor_type, or a column of the sites' own tables."),
    ] = None,
    least: Annotated[
        int, Option("--min-patients", min=1, help="Fewest patients, cases and others of a shown group.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Report clinical performance of a run by patient: sensitivity, predictive values, calibration, benefit."""
    study = find_study()
    from wsi_fl.evidence.clinical_measures import describe_clinically, render_clinical_lines

    print_document(
        describe_clinically(study, runs, prevalence=prevalence, by=by, least=least), as_json, render_clinical_lines
    )


def plan_size(
    prevalence: Annotated[float, Option(help="Share of cases among the patients: 0.1.")],
    auroc: Annotated[float, Option(help="The AUROC that you expect.")] = 0.8,
    width: Annotated[
        float | None, Option(help="Width of the intervals of AUROC, sensitivity and specificity. Default: 0.1.")
    ] = None,
    sensitivity: Annotated[float | None, Option(help="That you expect.")] = None,
    specificity: Annotated[float | None, Option(help="That you expect.")] = None,
    as_json: Json = False,
) -> None:
    """Compute the number of test patients for intervals of a given width (Riley et al., 2021)."""
    from wsi_fl.evidence.clinical_measures import plan_size, render_size_lines

    document = plan_size(prevalence, auroc, width=width, sensitivity=sensitivity, specificity=specificity)
    print_document(document, as_json, render_size_lines)


def audit_run(run: Run, as_json: Json = False) -> None:
    """Attack the models of a run: membership inference, and with canaries a lower bound on ε."""
    study = find_study()
    from wsi_fl.evidence.audit_run import audit_run, render_audit_lines

    work = partial(audit_run, study, run)
    run_work("audit", work, as_json, render_audit_lines)


def write_report(
    run: Run,
    pictures: Annotated[
        bool,
        Option(
            "--pictures",
            help="Show patches, slides and generated images of real sites too; such a page must stay in the hospital.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page with figures, without pictures of real sites' patients by default."""
    study = find_study()
    from wsi_fl.stages.evaluation.write_report import write_report

    path = write_report(study, run, pictures=pictures)
    print_document({"report": study.relative_path(path)}, as_json, lambda _: [str(path)])


def export_files(
    site: Annotated[str | None, Option(help="The site of the mosaics or the model. Of shared models any.")] = None,
    form: Annotated[
        str, Option("--format", help="Of mosaics clam, trident or stamp; of a model wsinfer or onnx.")
    ] = "clam",
    run: Annotated[str | None, Option(help="The run whose model to export. Without it, mosaics.")] = None,
    model: Annotated[str | None, Option(help="proxy, shared or private, as the run's method has them.")] = None,
    private: Annotated[
        bool, Option("--private", help="Allow export of a private model, which may have memorised patients.")
    ] = False,
    tensors: Annotated[bool, Option("--pt", help="clam: also write the .pt files for its training.")] = False,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Where to write. Default: in the study, or the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a site's mosaics, or a trained model with its card, in the format of another tool."""
    study = find_study()
    if run is not None:
        if model is None or tensors:
            raise UsageError("export --run needs --model (proxy, shared or private), and no --pt")
        from wsi_fl.stages.evaluation.export_model import export_model, render_model_export

        document = export_model(study, run, model_name=model, form=form, site=site, private=private, out=out)
        print_document(document, as_json, render_model_export)
        return
    if site is None or model is not None or private:
        raise UsageError("export needs --site NAME for mosaics, or --run RUN with --model for a model")
    from wsi_fl.stages.prepare.import_export import export_features, render_feature_export

    print_document(
        export_features(study, site=site, form=form, out=out, tensors=tensors), as_json, render_feature_export
    )
