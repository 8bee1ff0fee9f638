"""The command line: thin, every command one call of a stage. Heavy imports happen inside commands."""

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
        order = [name for names in (*GROUPS.values(), *MORE.values()) for name in names]
        return sorted(self._all(), key=lambda name: [*order, name].index(name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups; commands of other packages stand in the last one."""
        listed = self.list_commands(ctx)
        known = {name for names in (*GROUPS.values(), *MORE.values()) for name in names}
        others = [name for name in listed if name not in known and not self.get_command(ctx, name).hidden]
        for title, names in {**GROUPS, "Other packages": others}.items():
            rows = [
                (name, self.get_command(ctx, name).get_short_help_str(200))
                for name in names
                if name in listed
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

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

GROUPS = {
    "Start": ("demo", "doctor", "init", "config"),
    "Prepare": ("tile", "features", "import"),
    "Train": ("train", "privacy", "synthesize"),
    "Results": ("evaluate", "predict", "view", "compare", "report", "export"),
    "Between hospitals": ("federation",),
}
"""The commands that --help shows, by group; docs/commands.md has the same groups."""
MORE = {
    "Start": ("bench",),
    "Prepare": ("mosaic", "projection", "check", "encoders", "partition", "pack"),
    "Train": ("statistics",),
    "Results": ("clinical", "plan-size", "audit"),
}
"""Those that work and are not shown, as docs/commands.md lists them in its groups."""

app = typer.Typer(
    cls=_Program,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Hospitals learn together from whole-slide images they may not share.",
    epilog="Start with: wsi-fl demo. All commands: docs/commands.md",
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
    """Paint four hospitals' slides, tile, let them learn alone and together, and say who should join."""
    from wsi_fl.demo.run import demo, demo_lines

    show(demo(out), as_json, demo_lines)


def doctor(as_json: Json = False) -> None:
    """Check Python, OpenSlide, MPI, GPUs and disk; say how to fix what is missing."""
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
    """Say what a configuration key means, what it may be and what it is by default."""
    from wsi_fl.study.reference import keys, keys_lines

    show({"keys": keys(key)}, as_json, keys_lines)


_QUICK = (prepare.init, training.plan_size, training.privacy, config)
"""Commands that begin at once; all others read, train or import for longer than a second."""

_COMMANDS: list[Any] = [demo, doctor, prepare.init, prepare.tile, prepare.mosaic, prepare.features]
_COMMANDS += [
    prepare.import_features,
    prepare.directions,
    prepare.check,
    prepare.encoders,
    training.export,
    prepare.pack,
]
_COMMANDS += [
    training.export,
    prepare.partition,
    training.release,
    training.train,
    training.evaluate,
    training.predict,
]
_COMMANDS += [training.compare, training.clinical, training.audit, training.report, training.plan_size]
_COMMANDS += [training.privacy, training.bench, config]

_NAMES = {prepare.directions: "projection", training.release: "statistics", prepare.import_features: "import"}
"""Of commands that are not called as their functions."""
_SHOWN = {name for names in GROUPS.values() for name in names}

for command in _COMMANDS:
    described, name = training.Described if command is training.train else None, _NAMES.get(command)
    called = name or command.__name__.replace("_", "-")
    starts = command if command in _QUICK else announced(command, called)
    app.command(called, cls=described, hidden=called not in _SHOWN)(starts)
app.command(hidden=True)(training.rank)
