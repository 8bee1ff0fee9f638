"""The commands `wsi-fl synthesize train | sample | check`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from wsi_fl.cli.options import ExtraCommand, Json, Pipeline, announce_start, find_study, print_document, run_work

if TYPE_CHECKING:
    from wsi_fl.study.folder import Study
    from wsi_fl.study.pipeline import Pipeline as PipelineFile
    from wsi_fl.synthesis.stages.generator_types import GeneratorType

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Generators of synthetic patches: train, sample, check for copying.",
)
SYNTHESIZE = ExtraCommand(app, "Train")

_SiteName = Annotated[str, typer.Option(help="The generator's site.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a pipeline key, e.g. gan.iterations=2000. Repeatable."),
]
_Generator = Annotated[
    str | None,
    typer.Option(help="gan or ddpm. Default: the pipeline's; of sample the site's, where it has one of them."),
]


def _resolve_options(
    name: str | None, overrides: list[str] | None, generator: str | None
) -> tuple[Study, PipelineFile, GeneratorType]:
    from wsi_fl.synthesis.keys import Synthesis
    from wsi_fl.synthesis.stages.generator_types import load_kind

    study = find_study()
    generator_override = [f"synthesis.generator={generator}"] if generator else []
    pipeline = study.load_pipeline(study.pipeline_name(name), [*(overrides or []), *generator_override])
    return study, pipeline, load_kind(pipeline.find_section(Synthesis).generator)


@app.command()
@partial(announce_start, name="synthesize train")
def train(
    site: _SiteName,
    restart: Annotated[bool, typer.Option("--again", help="Delete the site's generator and train a new one.")] = False,
    generator: _Generator = None,
    pipeline: Pipeline = None,
    overrides: _Set = None,
    as_json: Json = False,
) -> None:
    """Train a class-conditional generator on a site's training patches: StyleGAN2-ADA or a diffusion model."""
    from wsi_fl.synthesis.stages.generator_training import build_check_hint, render_training_lines, train_generator

    study, settings, kind = _resolve_options(pipeline, overrides, generator)
    hint = build_check_hint(settings, kind, site, pipeline, overrides or [])
    work = partial(train_generator, study, settings, kind, site, restart=restart)
    run_work("synthesize train", work, as_json, partial(render_training_lines, check_hint=hint))


@app.command()
@partial(announce_start, name="synthesize sample")
def sample(
    site: _SiteName,
    n_per_class: Annotated[int, typer.Option(min=1, max=10_000_000, help="Synthetic patches of each class.")],
    name: Annotated[str | None, typer.Option(help="Of the new store. Default: SITE-synthetic.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the latents.")] = 0,
    generator: _Generator = None,
    as_site: Annotated[
        bool, typer.Option("--as-site", help="Write a site file too, for the store's name in every command.")
    ] = False,
    despite_failed_check: Annotated[
        bool,
        typer.Option(
            "--despite-failed-check", help="Write the set although the check failed or was not run; the store says so."
        ),
    ] = False,
    pipeline: Pipeline = None,
    overrides: _Set = None,
    as_json: Json = False,
) -> None:
    """Write a synthetic patch store, once the check of this generator was passed."""
    from wsi_fl.synthesis.stages.synthetic_stores import render_sample_lines, sample_generator

    settings = _resolve_options(pipeline, overrides, generator) if pipeline or overrides else None
    document = sample_generator(
        find_study() if settings is None else settings[0],
        site=site,
        n_per_class=n_per_class,
        name=name,
        seed=seed,
        generator=generator,
        as_site=as_site,
        despite_failed_check=despite_failed_check,
        pipeline=None if settings is None else settings[1],
    )
    print_document(document, as_json, render_sample_lines)


@app.command()
@partial(announce_start, name="synthesize check")
def check(
    site: _SiteName,
    generator: _Generator = None,
    pipeline: Pipeline = None,
    overrides: _Set = None,
    as_json: Json = False,
) -> None:
    """Check whether a generator copies its training patches: verdict, figures, HTML page. Exit code 1 if it does."""
    from wsi_fl.synthesis.stages.generator_check import check_generator, render_verdict_lines

    work = partial(check_generator, *_resolve_options(pipeline, overrides, generator), site)
    if not run_work("synthesize check", work, as_json, render_verdict_lines)["passed"]:
        raise typer.Exit(1)
