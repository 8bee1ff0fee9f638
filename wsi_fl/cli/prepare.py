"""The commands that make a study and prepare what it learns from: slides, data sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from wsi_fl.cli.options import Gpus, Json, Pipeline, Set, asked, find_study, show, show_work, take_gpus
from wsi_fl.types import UsageError


def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="The study to make.")],
    archive: Annotated[
        Path | None, Option("--from", help="Archive of slides to write site files for.")
    ] = None,
    sites: Annotated[
        list[str] | None,
        Option("--site", metavar="NAME", help="A site without an archive, such as of features. Repeatable."),
    ] = None,
    layout: Annotated[
        str | None, Option(help="camelyon17, camelyon16, tcga or generic. Default: recognised.")
    ] = None,
    real: Annotated[
        bool, Option("--real", help="The sites are real hospitals: nobody reads their patches.")
    ] = False,
    pipeline: Annotated[
        str | None,
        Option(help="Shipped pipeline of the study. Default: tcga_subtypes for tcga, or camelyon17."),
    ] = None,
    group_by: Annotated[
        str | None, Option(help="TCGA: a site is an institution (default) or a source site, tss.")
    ] = None,
    clinical: Annotated[
        Path | None, Option(metavar="FILE", help="TCGA: diagnoses. Default: its clinical*.tsv.")
    ] = None,
    codes: Annotated[
        Path | None,
        Option(metavar="FILE", help="TCGA: all source sites. Default: its tissueSourceSite*.tsv, if any."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        Option(
            "--column",
            metavar="KEY=NAME",
            help="TCGA: what patient, diagnosis, tumor_type or project is called in --clinical. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a study: pipelines/ and sites/ to edit."""
    from wsi_fl.stages.prepare.init import Tables, init, init_lines

    tables = Tables(group_by, clinical, codes, tuple(columns or ()))
    document = init(
        folder, archive=archive, names=sites or [], layout=layout, real=real, pipeline=pipeline, tables=tables
    )
    show(document, as_json, init_lines)


def tile(
    site: Annotated[str | None, Option(help="The site to tile.")] = None,
    every: Annotated[bool, Option("--all", help="Tile every site of the pipeline.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Say what it would take, from a few slides of each site.")
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Cut a site's slides into labelled patches: its patch store."""
    which = asked("tile", site, every, pipeline, overrides)
    study = find_study()
    from wsi_fl.slides.reading.probe import start_ahead

    start_ahead()
    from wsi_fl.stages.prepare.tile import estimate, estimate_lines, tile, tile_lines

    work, lines = (estimate, estimate_lines) if dry_run else (tile, tile_lines)
    show_work("tile", partial(work, study, **which), as_json, lines)


def mosaic(
    site: Annotated[str | None, Option(help="The site whose slides to take.")] = None,
    every: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Turn a site's slides into mosaics of a few patches each, stored as deep features."""
    which = asked("mosaic", site, every, pipeline, overrides)
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.prepare.bags import mosaic
    from wsi_fl.stages.prepare.sources import mosaic_lines

    show_work("mosaic", partial(mosaic, study, **which), as_json, mosaic_lines)


def features(
    site: Annotated[str | None, Option(help="The site whose patches to take.")] = None,
    every: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Compute deep features of every patch of a patch store."""
    which = asked("features", site, every, pipeline, overrides)
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.prepare.bags import features, features_lines

    show_work("features", partial(features, study, **which), as_json, features_lines)


def directions(
    sources: Annotated[
        list[Path],
        Option(
            "--from",
            metavar="PATH",
            help="A slide, a picture or a feature store of public tissue, or a folder of such. Repeatable.",
        ),
    ],
    out: Annotated[Path, Option(help="The file to write.")] = Path("projection.safetensors"),
    n: Annotated[
        int | None,
        Option("--dimensions", min=2, max=1024, help="How many. Default: 32, or what --rows asks for."),
    ] = None,
    rows: Annotated[
        int | None,
        Option(min=1, help="Rows of all hospitals together, about: as many directions as suit these."),
    ] = None,
    hospitals: Annotated[int, Option(min=1, help="With --rows: how many hospitals write.")] = 4,
    epsilon: Annotated[float, Option(min=1e-3, max=1e3, help="With --rows: ε of a letter.")] = 1.0,
    shared: Annotated[
        bool, Option("--shared", help="With --rows: hospitals share the noise (privacy.noise).")
    ] = False,
    mpp: Annotated[float | None, Option(help="µm per pixel of pictures that do not say.")] = None,
    public: Annotated[
        bool,
        Option(
            "--public", help="These sources are nobody's secret, though a site or patients are named in them."
        ),
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Make the directions along which `oneshot` sums features, from tissue that is nobody's secret."""
    study = find_study()
    if n is not None and rows is not None:
        raise UsageError("--dimensions and --rows exclude each other")
    from wsi_fl.stages.prepare.directions import Letters, directions, directions_lines

    work = partial(
        directions,
        study,
        sources,
        out=out,
        pipeline_name=pipeline,
        overrides=overrides or [],
        n=n,
        letters=None if rows is None else Letters(rows, hospitals, epsilon, shared),
        mpp=mpp,
        public=public,
    )
    show_work("projection", work, as_json, directions_lines)


def check(
    site: Annotated[str | None, Option(help="The site whose stores to read.")] = None,
    every: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    as_json: Json = False,
) -> None:
    """Read every byte that a site has stored; say what is damaged and which command mends it."""
    which = asked("check", site, every, pipeline)
    study = find_study()
    from wsi_fl.stages.prepare.check import check, check_lines

    document = show_work("check", partial(check, study, **which), as_json, check_lines)
    if not document["ok"]:
        raise typer.Exit(1)


def encoders(pipeline: Pipeline = None, as_json: Json = False) -> None:
    """List the published encoders that can be used by name, and which weights are here."""
    try:
        study = find_study()
    except UsageError:
        if pipeline is not None:
            raise
        study = None
    from wsi_fl.stages.prepare.encoders import encoders, encoders_lines

    show(encoders(study, pipeline), as_json, encoders_lines)


def import_features(
    site: Annotated[str, Option(help="The site whose feature store is written.")],
    source: Annotated[Path, Option("--from", metavar="DIR", help="Where the features are.")],
    labels: Annotated[
        Path,
        Option(metavar="TABLE", help="CSV: slide (slide_id), patient (case_id), label (diagnosis); split."),
    ],
    form: Annotated[str, Option("--format", help="trident, clam, stamp or anndata.")],
    encoder: Annotated[str | None, Option(help="What made the features, where the files do not say.")] = None,
    patch_px: Annotated[
        int | None, Option(min=1, help="Side of a patch in pixels, where the files do not say.")
    ] = None,
    mpp: Annotated[
        float | None, Option(min=1e-3, help="µm per pixel of the patches, where the files do not say.")
    ] = None,
    called: Annotated[
        str | None,
        Option(
            "--encoder-name",
            metavar="NAME",
            help="The encoder's name from now on, whatever the files call it.",
        ),
    ] = None,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Take features that TRIDENT, CLAM, STAMP or LazySlide computed as a site's feature store."""
    study = find_study()
    from wsi_fl.stages.prepare.importing import ImportFacts, import_features
    from wsi_fl.stages.prepare.sources import mosaic_lines

    work = partial(
        import_features,
        study,
        site=site,
        form=form,
        source=source,
        labels=labels,
        said=ImportFacts(encoder, patch_px, mpp, called),
        pipeline_name=pipeline,
        overrides=overrides or [],
    )
    show_work("import", work, as_json, mosaic_lines)


def pack(
    store: Annotated[Path, Argument(help="A linked store, stores/<site>/patches.h5.")],
    out: Annotated[Path, Argument(help="The self-contained file to write.")],
) -> None:
    """Copy a store with all its shards into one self-contained file."""
    if out.exists():
        raise UsageError(f"{out}: exists already; pack writes new files only")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder")
    from wsi_fl.stores.shards import pack

    pack(store, out)
    print(out)


def partition(
    data: Annotated[Path, Argument(metavar="DATA", help="npz, HDF5 or a folder of classes.")],
    sites: Annotated[int, Option(help="Number of sites.")],
    per_site: Annotated[int | None, Option(help="Training images per site. Default: all there are.")] = None,
    skew: Annotated[str, Option(help="iid, major:0.8 or dirichlet:0.5.")] = "iid",
    seed: Annotated[int, Option(help="Of the division.")] = 0,
    test_fraction: Annotated[float, Option(help="Held out where the data bring no test set.")] = 0.2,
    size_px: Annotated[int | None, Option(help="Scale images to squares of this size.")] = None,
    prefix: Annotated[str, Option(help="Sites are called PREFIX1, PREFIX2, …")] = "S",
    as_json: Json = False,
) -> None:
    """Divide an image data set among simulated sites."""
    study = find_study()
    from wsi_fl.stages.prepare.partition import partition, partition_lines

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
    show(document, as_json, partition_lines)
