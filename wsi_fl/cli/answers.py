"""The commands that ask a trained run: scores, new slides, comparisons, attacks, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wsi_fl.cli.options import Gpus, Json, PredictionOverrides, Run, find_study, show, take_gpus
from wsi_fl.types import UsageError, WsiFlError


def evaluate(run: Run, overrides: PredictionOverrides = None, as_json: Json = False) -> None:
    """Measure what answers for every site, on the merged multi-centric test set and on each site's part."""
    study = find_study()
    from wsi_fl.stages.answers.evaluate import evaluate, evaluation_lines
    from wsi_fl.stages.work.console import Bars

    with Bars("evaluate") as bars:
        document = evaluate(study, run, overrides=overrides or [], watcher=bars)
    show(document, as_json, evaluation_lines)


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
    mpp: Annotated[
        float | None,
        typer.Option(min=0.01, max=1000, help="µm per pixel of these slides. Default: what they say."),
    ] = None,
    overrides: PredictionOverrides = None,
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Predict a new slide: heatmap, outlines for QuPath, probabilities of its patches, slide score or diagnosis."""
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.answers.predict import predict, predictions_lines
    from wsi_fl.stages.work.console import Bars

    with Bars("predict") as bars:
        document = predict(
            study,
            run,
            site=site,
            slides=slide,
            out=out,
            tumor_type=tumor_type,
            mpp=mpp,
            overrides=overrides or [],
            watcher=bars,
        )
    if not document:  # ranks other than the first have nothing to say
        return
    show(document, as_json, predictions_lines)
    if not document["slides"]:
        raise WsiFlError("no slide could be predicted; see above")


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
    """Set methods side by side: mean ± sd over sites and seeds, significance, communication."""
    study = find_study()
    from wsi_fl.stages.answers.compare import compare, compare_lines
    from wsi_fl.stages.work.console import Bars

    with Bars("compare") as bars:
        document = compare(study, runs, baseline=baseline, watcher=bars)
    show(document, as_json, compare_lines)


def clinical(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="A run: its folder, name or number; or the folds of one (1-5)."
        ),
    ],
    prevalence: Annotated[
        float | None,
        typer.Option(help="Share of cases at which predictive values are told too, as in your clinic: 0.05."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Group patients by part, tumor_type, or a column of the sites' own tables.",
        ),
    ] = None,
    least: Annotated[
        int, typer.Option(min=1, help="Groups of fewer patients, cases or others are not told.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Say what a clinic asks of an evaluated run, by patient: sensitivity, predictive values, calibration, benefit."""
    study = find_study()
    from wsi_fl.stages.answers.clinical import clinical, clinical_lines

    show(clinical(study, runs, prevalence=prevalence, by=by, least=least), as_json, clinical_lines)


def plan_size(
    prevalence: Annotated[float, typer.Option(help="Share of cases among the patients: 0.1.")],
    auroc: Annotated[float, typer.Option(help="The AUROC that you expect.")] = 0.8,
    width: Annotated[
        float | None,
        typer.Option(
            help="Of the intervals of AUROC, sensitivity and specificity, end to end. Default: 0.1."
        ),
    ] = None,
    sensitivity: Annotated[float | None, typer.Option(help="That you expect.")] = None,
    specificity: Annotated[float | None, typer.Option(help="That you expect.")] = None,
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
    from wsi_fl.stages.work.console import Bars

    with Bars("audit") as bars:
        document = audit(study, run, watcher=bars)
    show(document, as_json, audit_lines)


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
    """Write one self-contained HTML page with figures; of real sites' patients it shows pictures only when asked to."""
    study = find_study()
    from wsi_fl.stages.answers.report import report

    path = report(study, run, pictures=pictures)
    show({"report": study.relative(path)}, as_json, lambda _: [str(path)])


def export(
    site: Annotated[
        str | None, typer.Option(help="The site whose mosaics, or whose model. Of shared models any.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Of mosaics clam, trident or stamp; of a model wsinfer or onnx.")
    ] = "clam",
    run: Annotated[
        str | None, typer.Option(help="The run whose model to export. Without it, mosaics.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="proxy, shared or private, as the run's method has them.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="A private model may leave, which may have memorised patients.")
    ] = False,
    tensors: Annotated[
        bool, typer.Option("--pt", help="clam: write the .pt files too that its training reads.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. Default: in the study, or the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a site's mosaics, or a trained model with its card, in the format of another tool."""
    study = find_study()
    if run is not None:
        if model is None or tensors:
            raise UsageError("export --run needs --model (proxy, shared or private), and no --pt")
        from wsi_fl.stages.answers.export_model import export_model, export_model_lines

        how = {"called": model, "form": form, "site": site, "private": private, "out": out}
        show(export_model(study, run, **how), as_json, export_model_lines)  # type: ignore[arg-type]
        return
    if site is None or model is not None or private:
        raise UsageError("export needs --site NAME for mosaics, or --run RUN with --model for a model")
    from wsi_fl.stages.prepare.importing import export, export_lines

    show(export(study, site=site, form=form, out=out, tensors=tensors), as_json, export_lines)
