"""The commands `wsi-fl synthesize train | sample | check`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from wsi_fl.cli.options import Json, Pipeline, announce_start, find_study, print_document, run_work

if TYPE_CHECKING:
    from wsi_fl.study.folder import Study
    from wsi_fl.study.pipeline import Pipeline as PipelineFile
    from wsi_fl.synthesis.stages.kinds import GeneratorType

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Generators of synthetic patches, what they can share, and whether they copy.",
)

_SiteName = Annotated[str, typer.Option(help="The site whose generator it is.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a pipeline key, e.g. gan.iterations=2000. Repeatable."),
]
_Generator = Annotated[
    str | None, typer.Option(help="gan or ddpm. Default: as the pipeline says; of sample: what the site has.")
]


def _resolve_options(
    name: str | None, overrides: list[str] | None, generator: str | None
) -> tuple[Study, PipelineFile, GeneratorType]:
    from wsi_fl.synthesis.keys import Synthesis
    from wsi_fl.synthesis.stages.kinds import kind_of

    study = find_study()
    generator_override = [f"synthesis.generator={generator}"] if generator else []
    pipeline = study.load_pipeline(study.pipeline_name(name), [*(overrides or []), *generator_override])
    return study, pipeline, kind_of(pipeline.find_section(Synthesis).generator)


@app.command()
@partial(announce_start, name="synthesize train")
def train(
    site: _SiteName,
    restart: Annotated[bool, typer.Option("--again", help="Throw away the site's generator and train anew.")] = False,
    generator: _Generator = None,
    pipeline: Pipeline = None,
    overrides: _Set = None,
    as_json: Json = False,
) -> None:
    """Train a class-conditional generator on a site's training patches: StyleGAN2-ADA or a diffusion model."""
    from wsi_fl.synthesis.stages.train import train_generator, trained_lines

    work = partial(train_generator, *_resolve_options(pipeline, overrides, generator), site, again=restart)
    run_work("synthesize train", work, as_json, trained_lines)


@app.command()
@partial(announce_start, name="synthesize sample")
def sample(
    site: _SiteName,
    n_per_class: Annotated[int, typer.Option(min=1, max=10_000_000, help="Synthetic patches of each class.")],
    name: Annotated[str | None, typer.Option(help="Of the new store. Default: SITE-synthetic.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the latents.")] = 0,
    generator: _Generator = None,
    as_site: Annotated[
        bool, typer.Option("--as-site", help="Write a site file too, so that every command takes the store by name.")
    ] = False,
    despite_failed_check: Annotated[
        bool,
        typer.Option(
            "--despite-failed-check", help="Write the set although the check failed or was not run; the store says so."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a synthetic patch store, once the check of this generator was passed."""
    from wsi_fl.synthesis.stages.sample import sample, sampled_lines

    document = sample(
        find_study(),
        site=site,
        n_per_class=n_per_class,
        name=name,
        seed=seed,
        generator=generator,
        as_site=as_site,
        despite_failed_check=despite_failed_check,
    )
    print_document(document, as_json, sampled_lines)


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
    from wsi_fl.synthesis.stages.check import check_generator, check_lines

    work = partial(check_generator, *_resolve_options(pipeline, overrides, generator), site)
    if not run_work("synthesize check", work, as_json, check_lines)["passed"]:
        raise typer.Exit(1)
