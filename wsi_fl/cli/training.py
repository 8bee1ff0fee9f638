"""The commands that train and plan what training costs in ε, and those that ask a trained run."""

from __future__ import annotations

from functools import partial
from importlib import import_module
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
    asked,
    find_study,
    show,
    show_work,
    take_gpus,
)
from wsi_fl.federation.methods import DEFAULT, METHODS, names_of
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.stages.training.summary import Summary
    from wsi_fl.stages.training.train import Summaries
    from wsi_fl.stages.work.console import Watcher


def release(
    site: Annotated[str | None, Option(help="The site whose sums to release.")] = None,
    every: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    again: Annotated[
        bool, Option("--again", help="Take and release them once more, at the same cost again.")
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Release the sums of a site's features, for heads that sites make together, once."""
    which = asked("statistics", site, every, pipeline, overrides)
    study = find_study()
    from wsi_fl.stages.training.release import release, releases_lines

    show(release(study, again=again, **which), as_json, releases_lines)


class Described(TyperCommand):
    """A command whose help says what every method does, also those of other packages, which it imports."""

    def get_help(self, ctx: Any) -> str:
        method: Any = next(one for one in self.params if one.name == "method")
        method.help = "; ".join(f"{name}: {row.does}" for name, row in METHODS.items())
        return super().get_help(ctx)


def train(
    method: Annotated[str, Option(help="What is done; --help says it of each.")] = DEFAULT,
    pipeline: Pipeline = None,
    overrides: Set = None,
    backend: Annotated[str, Option(help="mpi: one rank per site. local: all sites in this process.")] = "mpi",
    resume: Annotated[str | None, Option(metavar="RUN", help="Continue a run after its last round.")] = None,
    seeds: Annotated[
        int | None, Option(metavar="N", max=1000, help="A series of runs from N seeds, train.seed and on.")
    ] = None,
    folds: Annotated[
        int | None,
        Option(metavar="N", help="A series of runs, each testing one of N folds of every site's patients."),
    ] = None,
    leave_site_out: Annotated[
        bool, Option("--leave-site-out", help="A series of runs, each testing a site that takes no part.")
    ] = False,
    without: Annotated[
        list[str] | None, Option(metavar="SITE", help="With --resume: go on without this site. Repeatable.")
    ] = None,
    baselines: Annotated[
        bool,
        Option(
            "--baselines", help="Beside mpcpa also own, all original, all generated and FedAvg, in a table."
        ),
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Preflight only: ε, memory and time of the plan.")
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
        work = partial(measured.baselines, study, **chosen, backend=backend)
        show_work("train", work, as_json, measured.baselines_lines)
        return

    def trained(watcher: Watcher) -> Summary | Summaries:
        how: dict[str, Any] = {"backend": backend, "watcher": watcher}
        if resume is not None:
            summary = stage.resume(study, resume, without=without or (), **how)
            return stage.resume_series(study, resume, **how) or summary
        keys = study.pipeline(study.pipeline_name(pipeline), chosen["overrides"]).train
        if several or (keys.folds is not None and keys.fold is None):  # a run per fold
            return stage.train_series(study, seeds=seeds, leave_site_out=leave_site_out, **chosen, **how)
        return stage.train(study, **chosen, **how)

    show_work("train", trained, as_json, stage.lines)


def rank(run: Path) -> None:
    """Run one MPI rank of a run that `train` started."""
    from wsi_fl.stages.training.ranks import rank_main

    rank_main(run)


def privacy(
    n: Annotated[int, Option(min=1, max=10**9, help="Training rows (or patients) of the site.")],
    batch_size: Annotated[
        int | None,
        Option(min=1, help="Expected batch size B: 32 with --sigma, proposed with --target-epsilon."),
    ] = None,
    epochs: Annotated[
        float,
        Option("--epochs", "--rounds", max=1e6, help="Passes over the data: rounds × epochs per round."),
    ] = 30,
    sigma: Annotated[float | None, Option(min=0, max=1e6, help="Noise multiplier.")] = None,
    target_epsilon: Annotated[
        float | None, Option(min=1e-6, max=1e6, help="Find batch size and σ that spend this ε best.")
    ] = None,
    delta: Annotated[float, Option(help="δ, above 0 and below 1.")] = 1e-5,
    group: Annotated[
        int | None, Option(min=1, help="Rows of one patient: what ε per row is worth to that patient.")
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
        Argument(
            metavar="TABLE",
            help="Features with labels: .npz (x, y, patient), .csv, a store (.h5), or a folder of TRIDENT's.",
        ),
    ],
    out: Annotated[Path, Option(metavar="FILE", help="Results, a line for each seed and hospital.")] = Path(
        "bench.csv"
    ),
    methods: Annotated[
        str, Option("--method", help="Names, with commas between.")
    ] = "oneshot,proxyfl,fedavg",
    epsilon: Annotated[str, Option(help="Of each hospital, at δ = 1e-5.")] = "1",
    hospitals: Annotated[
        str, Option(metavar="4x150,…", help="How many hospitals, of how many patients each.")
    ] = "4x150",
    skew: Annotated[
        str,
        Option(
            help="alike, missing-class (one site has none of it), or shares of one class such as 0.9 and 1."
        ),
    ] = "alike,0.9",
    unit: Annotated[str, Option(help="What ε protects: row or patient.")] = "row",
    seeds: Annotated[int, Option(min=1, max=1000, help="How often hospitals are drawn.")] = 5,
    along: Annotated[
        Path | None,
        Option("--projection", metavar="FILE", help="Of public tissue, or a table of its features."),
    ] = None,
    labels: Annotated[
        Path | None, Option(metavar="FILE", help="CSV with slide, label and patient, for a folder.")
    ] = None,
    jobs: Annotated[int, Option(min=1, max=256, help="Processes.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure methods on hospitals drawn from one table of features, beside each alone and all data pooled."""
    from wsi_fl.stages.bench import bench, bench_lines, cells_of, numbers_of

    work = partial(
        bench,
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
    )
    show_work("bench", work, as_json, bench_lines)


def evaluate(run: Run, overrides: PredictionOverrides = None, as_json: Json = False) -> None:
    """Measure what answers for every site, on the merged multi-centric test set and on each site's part."""
    study = find_study()
    from wsi_fl.stages.answers.evaluate import evaluate, evaluation_lines

    work = partial(evaluate, study, run, overrides=overrides or [])
    show_work("evaluate", work, as_json, evaluation_lines)


def predict(
    run: Run,
    site: Annotated[str, Option(help="The site whose models predict.")],
    slide: Annotated[list[Path], Option(help="A slide to predict. Repeatable.")],
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Where to write. Default: RUN/predictions/SITE.")
    ] = None,
    tumor_type: Annotated[
        str | None,
        Option(help="What is known of the slides, for runs on mosaics. Default: what the store says."),
    ] = None,
    mpp: Annotated[
        float | None, Option(min=0.01, max=1000, help="µm per pixel of these slides. Default: what they say.")
    ] = None,
    overrides: PredictionOverrides = None,
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Predict a new slide: heatmap, outlines for QuPath, probabilities of its patches, slide score or diagnosis."""
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.answers.predict import predict, predictions_lines

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
    )
    document = show_work("predict", work, as_json, predictions_lines)
    if not document["slides"]:
        raise WsiFlError("no slide could be predicted; see above")


def compare(
    runs: Annotated[
        list[str],
        Argument(
            metavar="RUN...",
            help="Folders, names, numbers, a range (3-8) or a pattern ('*-proxyfl-*'); the first is the reference.",
        ),
    ],
    baseline: Annotated[
        bool, Option(help="Train the runs that are missing of every hospital alone without DP.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Set methods side by side: mean ± sd over sites and seeds, significance, communication."""
    study = find_study()
    from wsi_fl.stages.answers.compare import compare, compare_lines

    work = partial(compare, study, runs, baseline=baseline)
    show_work("compare", work, as_json, compare_lines)


def clinical(
    runs: Annotated[
        list[str],
        Argument(metavar="RUN...", help="A run: its folder, name or number; or the folds of one (1-5)."),
    ],
    prevalence: Annotated[
        float | None,
        Option(help="Share of cases at which predictive values are told too, as in your clinic: 0.05."),
    ] = None,
    by: Annotated[
        str | None,
        Option(
            metavar="COLUMN", help="Group patients by part, tumor_type, or a column of the sites' own tables."
        ),
    ] = None,
    least: Annotated[
        int, Option("--min-patients", min=1, help="Groups of fewer patients, cases or others are not told.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Say what a clinic asks of an evaluated run, by patient: sensitivity, predictive values, calibration, benefit."""
    study = find_study()
    from wsi_fl.stages.answers.clinical import clinical, clinical_lines

    show(clinical(study, runs, prevalence=prevalence, by=by, least=least), as_json, clinical_lines)


def plan_size(
    prevalence: Annotated[float, Option(help="Share of cases among the patients: 0.1.")],
    auroc: Annotated[float, Option(help="The AUROC that you expect.")] = 0.8,
    width: Annotated[
        float | None,
        Option(help="Of the intervals of AUROC, sensitivity and specificity, end to end. Default: 0.1."),
    ] = None,
    sensitivity: Annotated[float | None, Option(help="That you expect.")] = None,
    specificity: Annotated[float | None, Option(help="That you expect.")] = None,
    as_json: Json = False,
) -> None:
    """Say how many test patients a hospital needs for intervals of a given width (Riley et al., 2021)."""
    from wsi_fl.stages.answers.clinical import plan_size, size_lines

    document = plan_size(prevalence, auroc, width=width, sensitivity=sensitivity, specificity=specificity)
    show(document, as_json, size_lines)


def audit(run: Run, as_json: Json = False) -> None:
    """Attack what a run trained: membership inference, and with canaries a lower bound on ε."""
    study = find_study()
    from wsi_fl.stages.answers.audit import audit, audit_lines

    work = partial(audit, study, run)
    show_work("audit", work, as_json, audit_lines)


def report(
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
    """Write one self-contained HTML page with figures; of real sites' patients it shows pictures only when asked to."""
    study = find_study()
    from wsi_fl.stages.answers.report import report

    path = report(study, run, pictures=pictures)
    show({"report": study.relative(path)}, as_json, lambda _: [str(path)])


def export(
    site: Annotated[
        str | None, Option(help="The site whose mosaics, or whose model. Of shared models any.")
    ] = None,
    form: Annotated[
        str, Option("--format", help="Of mosaics clam, trident or stamp; of a model wsinfer or onnx.")
    ] = "clam",
    run: Annotated[str | None, Option(help="The run whose model to export. Without it, mosaics.")] = None,
    model: Annotated[
        str | None, Option(help="proxy, shared or private, as the run's method has them.")
    ] = None,
    private: Annotated[
        bool, Option("--private", help="A private model may leave, which may have memorised patients.")
    ] = False,
    tensors: Annotated[
        bool, Option("--pt", help="clam: write the .pt files too that its training reads.")
    ] = False,
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
        from wsi_fl.stages.answers.export_model import export_model, export_model_lines

        document = export_model(study, run, called=model, form=form, site=site, private=private, out=out)
        show(document, as_json, export_model_lines)
        return
    if site is None or model is not None or private:
        raise UsageError("export needs --site NAME for mosaics, or --run RUN with --model for a model")
    from wsi_fl.stages.prepare.importing import export, export_lines

    show(export(study, site=site, form=form, out=out, tensors=tensors), as_json, export_lines)
