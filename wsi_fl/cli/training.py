"""Commands for training, privacy planning, and work on trained runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option
from typer.core import TyperCommand

from wsi_fl.cli.options import (
    Gpus,
    Json,
    PartOption,
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
from wsi_fl.system.machine import is_first_rank
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.stages.runtime.console import Watcher
    from wsi_fl.stages.training.summary import Summary
    from wsi_fl.stages.training.train import SeriesSummary
    from wsi_fl.study.folder import Study


class MethodHelpCommand(TyperCommand):
    """A command with a line on every method in its help, also on those of extensions."""

    def get_help(self, ctx: Any) -> str:
        method: Any = next(option for option in self.params if option.name == "method_name")
        rows = "; ".join(f"{name}: {row.summary}" for name, row in METHODS.items())
        method.help = f"{rows}. Default: that in the first line of the pipeline's file, or {DEFAULT_METHOD}."
        return super().get_help(ctx)


_PREPARATION = "loads PyTorch, opens stores, builds models, compares sites"
_Backend = Annotated[str, Option(help="mpi: one rank per site. local: all sites in this process.")]
_Resume = Annotated[str | None, Option(metavar="RUN", help="Continue a run after its last round.")]
_New = Annotated[
    bool, Option("--new", help="Start another run where one of these settings is unfinished; ε is charged in addition.")
]
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
_Baselines = Annotated[bool, Option("--baselines", help="Also the baselines of the method's paper, in a table.")]
_DryRun = Annotated[bool, Option("--dry-run", help="Preflight only: ε, memory and time of the plan.")]
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
    method_name: Annotated[str | None, Option("--method", help="Training method; --help describes each.")] = None,
    pipeline: Pipeline = None,
    overrides: Set = None,
    backend: _Backend = "mpi",
    resume: _Resume = None,
    is_new: _New = False,
    seeds: _Seeds = None,
    folds: _Folds = None,
    leave_site_out: _LeaveSiteOut = False,
    without: _Without = None,
    baselines: _Baselines = False,
    dry_run: _DryRun = False,
    plan: _Plan = None,
    site: _PlanSite = None,
    keep: _Keep = None,
    gpus: SiteGpus = None,
    as_json: Json = False,
) -> None:
    """Train: one MPI rank per site, started here or by mpiexec or srun.

    An unfinished run of the same settings and stores goes on, without another charge.
    """
    is_series = seeds is not None or folds is not None or leave_site_out
    study = find_study()
    method = method_name or (_find_method(study, pipeline) if resume is None and plan is None else DEFAULT_METHOD)
    load_baselines = METHODS[method].load_baselines if baselines and method in METHODS else None
    is_new_run = resume is None and not is_series and not dry_run
    _check_options(
        resume is None or not (overrides or pipeline or is_series),
        "a resumed run keeps its configuration; leave out --set, --pipeline, --seeds, --folds and --leave-site-out",
    )
    _check_options(
        not is_new or not (resume or dry_run),
        "--new starts a run; leave out --resume, which continues one, and --dry-run",
    )
    _check_options(
        not dry_run or not (resume or seeds is not None or leave_site_out),
        "--dry-run shows the cost of a single new run; leave out --resume, --seeds and --leave-site-out (and name the "
        "site that is left out by --set train.left_out=NAME)",
    )
    _check_options(not without or resume, "--without belongs to --resume; a new run takes its sites from the pipeline")
    names = list_names(lambda row: row.load_baselines is not None)
    _check_options(not baselines or (load_baselines and is_new_run), f"--baselines belongs to --method {names}, alone")
    _check_options(plan is not None or not (site or keep), "--site and --keep belong to --plan")
    _check_options(
        plan is None or (dry_run and not pipeline and resume is None and not is_series),
        "--plan belongs to --dry-run, and has method and settings; add --set train.rounds=1 at most",
    )
    take_gpus(gpus, ranks=False)
    if plan is not None:
        _try_plan(study, plan, site, overrides or [], keep, as_json)
        return
    overrides = [*(overrides or []), *([] if folds is None else [f"train.folds={folds}"])]
    options: Any = {"pipeline_name": pipeline, "overrides": overrides, "backend": backend}
    if dry_run:
        _show_cost(study, as_json, method=method, is_fold=folds is not None, **options)
    elif load_baselines is not None:
        run_baselines, render_baseline_lines = load_baselines()
        work = partial(run_baselines, study, resume=not is_new, **options)
        run_work("train", work, as_json, render_baseline_lines)
    elif resume is not None:
        _resume_training(study, resume, without or (), backend, as_json)
    else:
        series = {"seeds": seeds, "leave_site_out": leave_site_out} if is_series else None
        _start_training(study, series, as_json, method=method, resume=not is_new, **options)


def _find_method(study: Study, pipeline: str | None) -> str:
    """Return the method in the first line of a pipeline's file, and report it where it is not the usual one."""
    from wsi_fl.stages.runtime.console import print_message
    from wsi_fl.stages.runtime.hints import pipeline_method

    method = pipeline_method(study, pipeline)
    if method != DEFAULT_METHOD and is_first_rank():
        print_message(f"  --method {method}, as in the first line of the pipeline's file")
    return method


def _check_options(condition: object, message: str) -> None:
    """Raise UsageError with the message unless the condition holds."""
    if not condition:
        raise UsageError(message)


def _show_cost(study: Study, as_json: bool, *, is_fold: bool, overrides: list[str], **options: Any) -> None:
    """Print what a run would cost; of a series of folds, one of its runs."""
    from wsi_fl.stages.training import run_cost

    work = partial(run_cost.dry_run, study, overrides=[*overrides, *["train.fold=1"] * is_fold], **options)
    run_work("dry run", work, as_json, run_cost.plan_lines)


def _resume_training(study: Study, run: str, without: Sequence[str], backend: str, as_json: bool) -> None:
    """Continue a run, and the series that it belongs to."""
    from wsi_fl.stages.training import train as stage

    def resume_training(watcher: Watcher) -> Summary | SeriesSummary:
        summary = stage.resume_run(study, run, without=without, backend=backend, watcher=watcher)
        return stage.resume_series(study, run, backend=backend, watcher=watcher) or summary

    run_work("train", resume_training, as_json, stage.train_lines, _PREPARATION)


def _start_training(study: Study, series: Mapping[str, Any] | None, as_json: bool, **options: Any) -> None:
    """Train a run, or a series of runs: one for each fold where the pipeline has folds and names none."""
    from wsi_fl.stages.training import train as stage

    keys = study.load_pipeline(study.pipeline_name(options["pipeline_name"]), options["overrides"]).train
    is_series = series is not None or (keys.folds is not None and keys.fold is None)

    def run_training(watcher: Watcher) -> Summary | SeriesSummary:
        if is_series:
            return stage.train_series(study, **(series or {}), **options, watcher=watcher)
        return stage.train(study, **options, watcher=watcher)

    run_work("train", run_training, as_json, stage.train_lines, _PREPARATION)


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


def evaluate(run: Run, overrides: PredictionOverrides = None, as_json: Json = False) -> None:
    """Evaluate every site's prediction model on the merged multi-centric test set and on each site's part."""
    study = find_study()
    from wsi_fl.stages.evaluation.evaluate import evaluate
    from wsi_fl.stages.evaluation.evaluation_lines import render_evaluation_lines

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
        float | None, Option(min=0.01, max=1000, help="µm per pixel of these slides. Default: as in `tile`.")
    ] = None,
    overrides: PredictionOverrides = None,
    gpus: Gpus = None,
    part: PartOption = None,
    as_json: Json = False,
) -> None:
    """Predict a new slide: heatmap, outlines for QuPath, probabilities of its patches, slide score or diagnosis."""
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.evaluation.predict import predict, render_prediction_lines
    from wsi_fl.stages.runtime.rank_job import parse_part

    work = partial(
        predict,
        study,
        run,
        site=site,
        slides=slide,
        out=out,
        tumor_type=tumor_type,
        mpp=mpp,
        overrides=overrides or [],
        part=parse_part(part),
    )
    document = run_work("predict", work, as_json, render_prediction_lines)
    if document and not document["slides"] and not document["missing"]:
        raise WsiFlError("no slide could be predicted; see above")


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
        str, Option("--format", help="Of mosaics clam, trident or stamp; of a model wsinfer, monai-bundle or onnx.")
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
