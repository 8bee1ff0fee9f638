"""The commands `bench`, `compare`, `clinical` and `audit`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from wsi_fl.cli.options import ExtraCommand, Json, Run, announce_start, find_study, print_document, run_work


@partial(announce_start, name="bench")
def run_bench(
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
        str,
        Option(
            metavar="4x150,…",
            help="How many hospitals, of how many patients each; or site, for those in the columns site and split.",
        ),
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
    target: Annotated[
        str | None, Option(metavar="COLUMN", help="Column of --labels that is predicted, or survival. Default: label.")
    ] = None,
    jobs: Annotated[int, Option(min=1, max=256, help="Processes.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare methods on hospitals sampled from one feature table, with local and pooled baselines."""
    from wsi_fl.evidence.bench import parse_cells, parse_numbers, run_benchmark
    from wsi_fl.evidence.bench_page import render_bench_lines

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
        target=target,
        jobs=jobs,
    )
    run_work("bench", work, as_json, render_bench_lines)


@partial(announce_start, name="compare")
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


@partial(announce_start, name="clinical")
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
    lesions: Annotated[
        bool,
        Option("--lesions", help="Score lesions found in slides of `predict` against outlines: Camelyon16's FROC."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Report clinical performance of a run by patient: sensitivity, predictive values, calibration, benefit."""
    study = find_study()
    from wsi_fl.evidence.clinical import describe_clinically, render_clinical_lines

    document = describe_clinically(study, runs, prevalence=prevalence, by=by, least=least, lesions=lesions)
    print_document(document, as_json, render_clinical_lines)


@partial(announce_start, name="audit")
def attack_models(run: Run, as_json: Json = False) -> None:
    """Attack the releases of a run: membership and source inference, and with canaries a lower bound on ε."""
    study = find_study()
    from wsi_fl.evidence.audit_run import audit_run, render_audit_lines

    work = partial(audit_run, study, run)
    run_work("audit", work, as_json, render_audit_lines)


AUDIT = ExtraCommand(attack_models, "Results", is_hidden=True)
BENCH = ExtraCommand(run_bench, "Start", is_hidden=True)
CLINICAL = ExtraCommand(report_clinical, "Results", is_hidden=True)
COMPARE = ExtraCommand(compare_runs, "Results")
