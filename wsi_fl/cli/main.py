"""The command line: every command calls one stage. Heavy imports happen inside commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from wsi_fl import __version__
from wsi_fl.cli import prepare, training
from wsi_fl.cli.options import ExtraCommand, Json, announce_start, print_document
from wsi_fl.plugins import PluginTable


class _CommandGroup(TyperGroup):
    """The commands below, and those of the entry points `wsi_fl.commands`: a function, a `typer.Typer` with several, or
    an `ExtraCommand`, which says its group in the help.

    A package is imported for --help and for its own commands.
    """

    def list_groups(self) -> dict[str, list[str]]:
        """Return the names of all commands by the groups of the help, the hidden ones included."""
        groups = {title: [*commands] for title, commands in _GROUPS.items()}
        for name in self._load_table():
            if name not in self.commands:
                extra = self._load_extra(name)
                names = groups.setdefault(extra.group, [])
                names.insert(0 if extra.is_first else len(names), name)
        return groups

    def list_commands(self, ctx: Any) -> list[str]:
        names = [name for names in self.list_groups().values() for name in names]
        return [*names, *(name for name in self.commands if name not in names)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups with the commands that are shown, and the names of the others."""
        extra_names: list[str] = []
        for title, names in self.list_groups().items():
            commands = {name: self.get_command(ctx, name) for name in names}
            rows = [(name, command.get_short_help_str(200)) for name, command in commands.items() if not command.hidden]
            extra_names += [name for name, command in commands.items() if command.hidden]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text(f"More commands, each with --help: {', '.join(extra_names)}")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands or cmd_name not in self._load_table():
            return self.commands.get(cmd_name)
        extra = self._load_extra(cmd_name)
        program = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(extra.run, typer.Typer):
            program.add_typer(extra.run, name=cmd_name, hidden=extra.is_hidden)
        else:
            program.command(cmd_name, hidden=extra.is_hidden)(extra.run)
        return typer.main.get_group(program).commands[cmd_name]

    def _load_table(self) -> PluginTable[Any]:
        return PluginTable("wsi_fl.commands", self.commands, typer.Typer | FunctionType | ExtraCommand)

    def _load_extra(self, name: str) -> ExtraCommand:
        command = self._load_table()[name]
        return command if isinstance(command, ExtraCommand) else ExtraCommand(command)


app = typer.Typer(
    cls=_CommandGroup,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated learning on whole-slide images that hospitals may not share.",
    epilog="Start with: wsi-fl demo. All commands: docs/reference/commands.md",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def _print_help(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _check_machine(as_json: Json = False) -> None:
    """Check Python, OpenSlide, MPI, GPUs and disk; show how to fix problems."""
    from wsi_fl.stages.doctor import check_installation, render_doctor_lines

    document = check_installation()
    print_document(document, as_json, render_doctor_lines)
    if not document["ok"]:
        raise typer.Exit(1)


def _show_config(
    key: Annotated[
        str, Argument(metavar="[KEY]", help="A key, a section, or site for site files. Default: all keys.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the meaning, allowed values and default of configuration keys."""
    from wsi_fl.study.reference import find_keys, render_key_lines

    print_document({"keys": find_keys(key)}, as_json, render_key_lines)


_QUICK_COMMANDS = (prepare.create_study, training.plan_privacy, _show_config)
"""Commands that start at once; all others take longer than a second to import."""

_GROUPS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "Start": {"doctor": _check_machine, "init": prepare.create_study, "config": _show_config},
    "Prepare": {
        "tile": prepare.tile_sites,
        "features": prepare.encode_features,
        "import": prepare.import_features,
        "mosaic": prepare.encode_mosaics,
        "check": prepare.verify_stores,
        "encoders": prepare.show_encoders,
        "partition": prepare.divide_images,
        "pack": prepare.pack_file,
    },
    "Train": {"train": training.train, "privacy": training.plan_privacy},
    "Results": {
        "evaluate": training.evaluate,
        "predict": training.predict,
        "report": training.write_report,
        "export": training.export_files,
    },
}
"""The core's commands by group; docs/reference/commands.md has the same groups."""
_HIDDEN_COMMANDS = {"mosaic", "check", "encoders", "partition", "pack"}
"""Commands that work and that --help does not show."""

for name, command in ((name, command) for commands in _GROUPS.values() for name, command in commands.items()):
    described = training.MethodHelpCommand if name == "train" else None
    starts = command if command in _QUICK_COMMANDS else announce_start(command, name)
    app.command(name, cls=described, hidden=name in _HIDDEN_COMMANDS)(starts)
app.command("rank", hidden=True)(training.start_rank)
