"""The command line: every command calls one stage. Heavy imports happen inside commands."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from wsi_fl import __version__
from wsi_fl.cli import prepare, training
from wsi_fl.cli.options import Json, announced, show
from wsi_fl.plugins import Table


class _Program(TyperGroup):
    """The commands below, and those of the entry points `wsi_fl.commands`: a function, or a `typer.Typer` with several.

    A package is imported for --help and for its own commands.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        names = list(self.commands)
        places = {"view": names.index("report") + 0.5, "synthesize": len(names) - 0.5}
        return sorted(self._all(), key=lambda name: places.get(name, [*names, name].index(name)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = self._all().get(cmd_name)
        if not isinstance(found, _ADDED):
            return found
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            alone.add_typer(found, name=cmd_name)
        else:
            alone.command(cmd_name)(found)
        return typer.main.get_group(alone).commands[cmd_name]

    def _all(self) -> Table[Any]:
        return Table("wsi_fl.commands", self.commands, _ADDED)


_ADDED = typer.Typer | FunctionType

app = typer.Typer(
    cls=_Program,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated learning on whole-slide images that hospitals may not share.",
    epilog="Start with: wsi-fl demo",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def demo(
    out: Annotated[Path, Option(help="Folder for the study.")] = Path("wsi-fl-demo"), as_json: Json = False
) -> None:
    """Simulate four hospitals' slides, tile, train local and federated models, and report each hospital's benefit."""
    from wsi_fl.demo.run import demo, demo_lines

    show(demo(out), as_json, demo_lines)


def doctor(as_json: Json = False) -> None:
    """Check Python, OpenSlide, MPI, GPUs and disk; show how to fix problems."""
    from wsi_fl.stages.doctor import doctor, doctor_lines

    document = doctor()
    show(document, as_json, doctor_lines)
    if not document["ok"]:
        raise typer.Exit(1)


def config(
    key: Annotated[
        str, Argument(metavar="[KEY]", help="A key, a section, or site for site files. Default: all keys.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the meaning, allowed values and default of configuration keys."""
    from wsi_fl.study.reference import keys, keys_lines

    show({"keys": keys(key)}, as_json, keys_lines)


_QUICK = (prepare.init, training.plan_size, training.privacy, config)
"""Commands that start at once; all others take longer than a second to import."""

_COMMANDS: list[Any] = [demo, doctor, prepare.init, prepare.tile, prepare.mosaic, prepare.features]
_COMMANDS += [prepare.directions, prepare.check, prepare.encoders, training.export, prepare.pack]
_COMMANDS += [prepare.partition, training.release, training.train, training.evaluate, training.predict]
_COMMANDS += [training.compare, training.clinical, training.audit, training.report, training.plan_size]
_COMMANDS += [training.privacy, training.bench, config]

for command in _COMMANDS:  # in the order of --help
    described = training.Described if command is training.train else None
    app.command(cls=described)(command if command in _QUICK else announced(command))
app.command("import")(announced(prepare.import_features, "import"))
app.command(hidden=True)(training.rank)
