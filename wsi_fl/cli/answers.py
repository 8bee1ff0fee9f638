"""The commands that ask a trained run: scores, new slides, comparisons, attacks, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wsi_fl.cli.options import Answering, Json, Run, find_study, show


def evaluate(run: Run, overrides: Answering = None, as_json: Json = False) -> None:
    """Measure what answers for every site, on the merged multi-centric test set and on each site's part."""
    study = find_study()
    from wsi_fl.stages.answers.evaluate import evaluate, print_evaluation
    from wsi_fl.stages.work.console import Bars

    with Bars("evaluate") as bars:
        document = evaluate(study, run, overrides=overrides or [], watcher=bars)
    show(document, as_json, print_evaluation)


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
    """Predict a new slide: heatmap, outlines for QuPath, probabilities of its patches, slide score or diagnosis."""
    study = find_study()
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
    show(document, as_json, print_predictions)
    if not document["slides"]:
        raise typer.Exit(1)


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
    from wsi_fl.stages.answers.compare import compare, print_compare
    from wsi_fl.stages.work.console import Bars

    with Bars("compare") as bars:
        document = compare(study, runs, baseline=baseline, watcher=bars)
    show(document, as_json, print_compare)


def audit(run: Run, as_json: Json = False) -> None:
    """Attack what a run trained: membership inference, and with canaries a lower bound on ε."""
    study = find_study()
    from wsi_fl.stages.answers.audit import audit, print_audit
    from wsi_fl.stages.work.console import Bars

    with Bars("audit") as bars:
        document = audit(study, run, watcher=bars)
    show(document, as_json, print_audit)


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
    show({"report": study.relative(path)}, as_json, lambda _: print(path))
