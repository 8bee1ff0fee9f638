"""The commands `statistics`, `class-means`, `survival` and `projection` (entry points `wsi_fl.commands`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from wsi_fl.cli.options import (
    EncoderName,
    ExtraCommand,
    FileEncoder,
    Json,
    Pipeline,
    Set,
    announce_start,
    find_study,
    parse_sites,
    print_document,
    run_work,
)
from wsi_fl.types import UsageError

_Mpp = Annotated[float | None, Option(help="µm per pixel of pictures without a resolution.")]
_Public = Annotated[bool, Option("--public", help="These sources are public, though they name a site or patients.")]


@partial(announce_start, name="statistics")
def release_statistics(
    site: Annotated[str | None, Option(help="The site whose class statistics to release.")] = None,
    all_sites: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    repeat: Annotated[
        bool, Option("--again", help="Compute and release them once more, at the same cost in ε.")
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Release noisy class statistics of a site's features for one-shot global heads."""
    scope = parse_sites("statistics", site, all_sites, pipeline, overrides)
    study = find_study()
    from wsi_fl.oneshot.release_statistics import release_lines, release_statistics

    print_document(release_statistics(study, repeat=repeat, **scope), as_json, release_lines)


@partial(announce_start, name="projection")
def compute_projection(
    sources: Annotated[
        list[Path],
        Option(
            "--from",
            metavar="PATH",
            help="A public slide, picture, feature store or table, or a folder of these. Repeatable.",
        ),
    ],
    form: Annotated[str | None, Option("--format", help="Of another tool's features, as in `import`.")] = None,
    encoder: FileEncoder = None,
    called: EncoderName = None,
    out: Annotated[Path, Option(help="The file to write.")] = Path("projection.safetensors"),
    n: Annotated[
        int | None, Option("--dimensions", min=2, max=1024, help="How many. Default: 32, or as suits --rows.")
    ] = None,
    rows: Annotated[
        int | None, Option(min=1, help="Approximate number of rows of all hospitals: choose the dimensions for these.")
    ] = None,
    hospitals: Annotated[int, Option(min=1, help="With --rows: number of releasing hospitals.")] = 4,
    epsilon: Annotated[float, Option(min=1e-3, max=1e3, help="With --rows: ε of each release.")] = 1.0,
    shared: Annotated[bool, Option("--shared", help="With --rows: distributed noise (privacy.noise).")] = False,
    mpp: _Mpp = None,
    public: _Public = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Compute the projection of features for `oneshot` from public reference slides."""
    study = find_study()
    if n is not None and rows is not None:
        raise UsageError("--dimensions and --rows exclude each other")
    from wsi_fl.oneshot.build_projection import ExpectedStatistics, build_projection, render_projection_lines
    from wsi_fl.stages.prepare.import_export import ImportFacts

    work = partial(
        build_projection,
        study,
        sources,
        out=out,
        form=form,
        facts=ImportFacts(encoder=encoder, new_name=called),
        pipeline_name=pipeline,
        overrides=overrides or [],
        n_dimensions=n,
        statistics=None if rows is None else ExpectedStatistics(rows, hospitals, epsilon, shared),
        mpp=mpp,
        public=public,
    )
    run_work("projection", work, as_json, render_projection_lines)


@partial(announce_start, name="class-means")
def show_means(
    site: Annotated[str, Option(help="The site whose statistics to show.")],
    sources: Annotated[
        list[Path],
        Option(
            "--from", metavar="PATH", help="A public slide, picture or patch store, or a folder of these. Repeatable."
        ),
    ],
    out: Annotated[Path, Option(help="The page to write.")] = Path("class-means.html"),
    mpp: _Mpp = None,
    public: _Public = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Show the public patches nearest to the class means that a site has released, or would release."""
    study = find_study()
    from wsi_fl.oneshot.class_means import render_class_lines, show_class_means

    work = partial(
        show_class_means,
        study,
        sources,
        site=site,
        out=out,
        pipeline_name=pipeline,
        overrides=overrides or [],
        mpp=mpp,
        public=public,
    )
    run_work("class-means", work, as_json, render_class_lines)


@partial(announce_start, name="survival")
def draw_survival_curves(
    out: Annotated[Path, Option(help="The picture to write.")] = Path("survival.png"), as_json: Json = False
) -> None:
    """Draw Kaplan–Meier curves of every hospital and of all, from their released class statistics."""
    from wsi_fl.oneshot.survival_curves import draw_survival, render_survival_lines

    print_document(draw_survival(find_study(), out), as_json, render_survival_lines)


STATISTICS = ExtraCommand(release_statistics, "Train", is_hidden=True)
CLASS_MEANS = ExtraCommand(show_means, "Train", is_hidden=True)
PROJECTION = ExtraCommand(compute_projection, "Prepare", is_hidden=True)
SURVIVAL = ExtraCommand(draw_survival_curves, "Results", is_hidden=True)
