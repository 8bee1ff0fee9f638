"""Commands for a study and its data: slides, features, image data sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from wsi_fl.cli.options import (
    EncoderName,
    FileEncoder,
    Gpus,
    Json,
    PartOption,
    Pipeline,
    Set,
    find_study,
    parse_sites,
    print_document,
    run_work,
    take_gpus,
)
from wsi_fl.types import UsageError


def create_study(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of the new study.")],
    archive: Annotated[
        Path | None, Option("--from", "--features", help="Archive of slides, or of TCGA's features by TRIDENT.")
    ] = None,
    sites: Annotated[
        list[str] | None,
        Option("--site", metavar="NAME", help="A site without an archive, such as of features. Repeatable."),
    ] = None,
    layout: Annotated[str | None, Option(help="camelyon17, camelyon16, tcga or generic. Default: recognised.")] = None,
    real: Annotated[
        bool, Option("--real", help="The sites are real hospitals: no other site reads their patches.")
    ] = False,
    pipeline: Annotated[
        str | None, Option(help="Shipped pipeline of the study. Default: tcga_subtypes for tcga, or camelyon17.")
    ] = None,
    group_by: Annotated[
        str | None, Option(help="TCGA: a site is an institution (default) or a source site, tss.")
    ] = None,
    clinical: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help="TCGA: diagnoses. Default: its clinical*.tsv. Of features: tables with the targets. Repeatable.",
        ),
    ] = None,
    targets: Annotated[
        list[str] | None,
        Option(
            "--target",
            metavar="COLUMN",
            help="TCGA's features: a column of classes, COLUMN:LOW:HIGH of a number, or survival. Repeatable.",
        ),
    ] = None,
    min_patients: Annotated[
        int | None, Option(min=2, help="TCGA's features: patients of the smallest institution. Default: 25.")
    ] = None,
    codes: Annotated[
        Path | None, Option(metavar="FILE", help="TCGA: all source sites. Default: its tissueSourceSite*.tsv, if any.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        Option(
            "--column",
            metavar="KEY=NAME",
            help="TCGA: column of patient, diagnosis, tumor_type or project in --clinical. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a study: pipelines/ and sites/ to edit."""
    from wsi_fl.stages.prepare.init_features import ArchiveTables
    from wsi_fl.stages.prepare.init_study import init_study, render_init_lines

    tables = ArchiveTables(group_by, clinical or (), codes, tuple(columns or ()), tuple(targets or ()), min_patients)
    document = init_study(
        folder, archive=archive, names=sites or [], layout=layout, real=real, pipeline=pipeline, tables=tables
    )
    print_document(document, as_json, render_init_lines)


def tile_sites(
    site: Annotated[str | None, Option(help="The site to tile.")] = None,
    all_sites: Annotated[bool, Option("--all", help="Tile every site of the pipeline.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Estimate patches, bytes and time from a few slides of each site.")
    ] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    part: PartOption = None,
    as_json: Json = False,
) -> None:
    """Cut a site's slides into labelled patches: its patch store."""
    scope = parse_sites("tile", site, all_sites, pipeline, overrides)
    study = find_study()
    from wsi_fl.slides.reading.probe import start_ahead

    start_ahead()
    from wsi_fl.stages.prepare.estimate_tiling import estimate_tiling, render_estimate_lines
    from wsi_fl.stages.prepare.tile import render_tile_lines, tile_slides
    from wsi_fl.stages.runtime.rank_job import parse_part

    if dry_run:
        run_work("tile", partial(estimate_tiling, study, **scope), as_json, render_estimate_lines)
    else:
        run_work("tile", partial(tile_slides, study, part=parse_part(part), **scope), as_json, render_tile_lines)


def encode_mosaics(
    site: Annotated[str | None, Option(help="The site of the slides.")] = None,
    all_sites: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    gpus: Gpus = None,
    part: PartOption = None,
    as_json: Json = False,
) -> None:
    """Compute mosaics of a site's slides: deep features of a few patches each."""
    scope = parse_sites("mosaic", site, all_sites, pipeline, overrides)
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.prepare.build_bags import make_mosaics
    from wsi_fl.stages.prepare.slide_lists import render_mosaic_lines
    from wsi_fl.stages.runtime.rank_job import parse_part

    run_work("mosaic", partial(make_mosaics, study, part=parse_part(part), **scope), as_json, render_mosaic_lines)


def encode_features(
    site: Annotated[str | None, Option(help="The site of the patches.")] = None,
    all_sites: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    overrides: Set = None,
    gpus: Gpus = None,
    part: PartOption = None,
    as_json: Json = False,
) -> None:
    """Compute deep features of every patch of a patch store."""
    scope = parse_sites("features", site, all_sites, pipeline, overrides)
    study = find_study()
    take_gpus(gpus)
    from wsi_fl.stages.prepare.build_bags import make_features, render_feature_lines
    from wsi_fl.stages.runtime.rank_job import parse_part

    run_work("features", partial(make_features, study, part=parse_part(part), **scope), as_json, render_feature_lines)


def verify_stores(
    site: Annotated[str | None, Option(help="The site of the stores.")] = None,
    all_sites: Annotated[bool, Option("--all", help="Every site of the pipeline.")] = False,
    pipeline: Pipeline = None,
    as_json: Json = False,
) -> None:
    """Read every byte of a site's stores; report damage and its repair."""
    scope = parse_sites("check", site, all_sites, pipeline)
    study = find_study()
    from wsi_fl.stages.prepare.check_stores import check_sites, render_check_lines

    document = run_work("check", partial(check_sites, study, **scope), as_json, render_check_lines)
    if not document["ok"]:
        raise typer.Exit(1)


def show_encoders(
    golden: Annotated[
        Path | None, Option(metavar="PNG", help="Write the picture of the golden patches there, for other tools.")
    ] = None,
    pipeline: Pipeline = None,
    as_json: Json = False,
) -> None:
    """List the published encoders with their properties and local weights."""
    if golden is not None:
        from wsi_fl.models.golden import write_picture

        write_picture(golden)
        print(golden)
        return
    try:
        study = find_study()
    except UsageError:
        if pipeline is not None:
            raise
        study = None
    from wsi_fl.stages.prepare.list_encoders import list_encoders, render_encoder_lines

    print_document(list_encoders(study, pipeline), as_json, render_encoder_lines)


def import_features(
    site: Annotated[str, Option(help="The site of the feature store.")],
    source: Annotated[Path, Option("--from", metavar="DIR", help="Where the features are.")],
    form: Annotated[
        str, Option("--format", help="trident, clam, stamp, anndata, atlaspatch, slide2vec, slideflow, eva or patches.")
    ],
    labels: Annotated[
        Path | None, Option(metavar="TABLE", help="CSV: slide (slide_id), patient (case_id), label (diagnosis); split.")
    ] = None,
    encoder: FileEncoder = None,
    patch_px: Annotated[
        int | None, Option(min=1, help="Side of a patch in pixels, where the files lack it; images are scaled to it.")
    ] = None,
    mpp: Annotated[float | None, Option(min=1e-3, help="µm per pixel of the patches, where the files lack it.")] = None,
    called: EncoderName = None,
    pipeline: Pipeline = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Import features of TRIDENT, CLAM, STAMP, slide2vec and others, or patches cut elsewhere, as a site's store."""
    study = find_study()
    from wsi_fl.stages.prepare.import_export import ImportFacts, import_features
    from wsi_fl.stages.prepare.import_patches import import_patches, render_patches_lines
    from wsi_fl.stages.prepare.slide_lists import Scope, render_mosaic_lines

    scope: Scope = {"site": site, "pipeline_name": pipeline, "overrides": overrides or []}
    if form == "patches":
        images = import_patches(study, source, labels=labels, size_px=patch_px, mpp=mpp, **scope)
        print_document(images, as_json, render_patches_lines)
        return
    if labels is None:
        raise UsageError("--labels names a table of slides, patients and labels")
    facts = ImportFacts(encoder, patch_px, mpp, called)
    work = partial(import_features, study, form=form, source=source, labels=labels, facts=facts, **scope)
    run_work("import", work, as_json, render_mosaic_lines)


def pack_file(
    store: Annotated[Path, Argument(help="A linked store, stores/<site>/patches.h5.")],
    out: Annotated[Path, Argument(help="The self-contained file to write.")],
) -> None:
    """Copy a store with all its shards into one self-contained file."""
    if out.exists():
        raise UsageError(f"{out}: exists already; pack writes new files only")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder")
    from wsi_fl.stores.patch_shards import pack_store

    pack_store(store, out)
    print(out)


def divide_images(
    data: Annotated[Path, Argument(metavar="DATA", help="npz, HDF5 or a folder of classes.")],
    sites: Annotated[int, Option(help="Number of sites.")],
    per_site: Annotated[int | None, Option(help="Training images per site. Default: all, divided.")] = None,
    skew: Annotated[str, Option(help="iid, major:0.8 (by turns), random-major:0.8 or dirichlet:0.5.")] = "iid",
    seed: Annotated[int, Option(help="Seed of the division.")] = 0,
    test_fraction: Annotated[float, Option(help="Share held out where the data have no test set.")] = 0.2,
    size_px: Annotated[int | None, Option(help="Scale images to squares of this size.")] = None,
    prefix: Annotated[str, Option(help="Sites are called PREFIX1, PREFIX2, …")] = "S",
    balance_test: Annotated[bool, Option("--balance-test", help="As many test images of each class.")] = False,
    as_json: Json = False,
) -> None:
    """Divide an image data set among simulated sites."""
    study = find_study()
    from wsi_fl.stages.prepare.partition import partition_images, render_partition_lines
    from wsi_fl.stages.runtime.hints import partition_hint

    document = partition_images(
        study,
        data,
        n_sites=sites,
        per_site=per_site,
        skew=skew,
        seed=seed,
        test_fraction=test_fraction,
        size_px=size_px,
        prefix=prefix,
        balance_test=balance_test,
    )
    print_document(document, as_json, lambda document: [*render_partition_lines(document), partition_hint(study, data)])
