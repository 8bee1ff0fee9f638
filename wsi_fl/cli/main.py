"""The command line: every command calls one stage. Heavy imports happen inside commands."""

from __future__ import annotations

from types import FunctionType
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from wsi_fl import __version__
from wsi_fl.cli import prepare, training
from wsi_fl.cli.options import Json, announce_start, print_document
from wsi_fl.plugins import PluginTable


class _CommandGroup(TyperGroup):
    """The commands below, and those of the entry points `wsi_fl.commands`: a function, or a `typer.Typer` with several.

    A package is imported for --help and for its own commands.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        order = [name for names in (*GROUPS.values(), *MORE.values()) for name in names]
        return sorted(self._load_table(), key=lambda name: [*order, name].index(name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups; commands of other packages stand in the last one."""
        listed = self.list_commands(ctx)
        grouped_names = {name for names in (*GROUPS.values(), *MORE.values()) for name in names}
        others = [name for name in listed if name not in grouped_names and not self.get_command(ctx, name).hidden]
        for title, names in {**GROUPS, "Other packages": others}.items():
            rows = [(name, self.get_command(ctx, name).get_short_help_str(200)) for name in names if name in listed]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        plugin = self._load_table().get(cmd_name)
        if not isinstance(plugin, _PLUGIN_TYPES):
            return plugin
        program = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(plugin, typer.Typer):
            program.add_typer(plugin, name=cmd_name)
        else:
            program.command(cmd_name)(plugin)
        return typer.main.get_group(program).commands[cmd_name]

    def _load_table(self) -> PluginTable[Any]:
        return PluginTable("wsi_fl.commands", self.commands, _PLUGIN_TYPES)


_PLUGIN_TYPES = typer.Typer | FunctionType

GROUPS = {
    "Start": ("demo", "doctor", "init", "config"),
    "Prepare": ("tile", "features", "import"),
    "Train": ("train", "privacy", "synthesize"),
    "Results": ("evaluate", "predict", "view", "compare", "report", "export"),
    "Between hospitals": ("federation",),
}
"""The commands that --help shows, by group; docs/reference/commands.md has the same groups."""
MORE = {
    "Start": ("bench",),
    "Prepare": ("mosaic", "projection", "check", "encoders", "partition", "pack"),
    "Train": ("statistics",),
    "Results": ("clinical", "audit"),
}
"""Those that work and are not shown, as docs/reference/commands.md lists them in its groups."""

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


def check_machine(as_json: Json = False) -> None:
    """Check Python, OpenSlide, MPI, GPUs and disk; show how to fix problems."""
    from wsi_fl.stages.doctor import check_installation, render_doctor_lines

    document = check_installation()
    print_document(document, as_json, render_doctor_lines)
    if not document["ok"]:
        raise typer.Exit(1)


def show_config(
    key: Annotated[
        str, Argument(metavar="[KEY]", help="A key, a section, or site for site files. Default: all keys.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the meaning, allowed values and default of configuration keys."""
    from wsi_fl.study.reference import find_keys, render_key_lines

    print_document({"keys": find_keys(key)}, as_json, render_key_lines)


_QUICK_COMMANDS = (prepare.create_study, training.plan_privacy, show_config)
"""Commands that start at once; all others take longer than a second to import."""

_COMMANDS: dict[str, Any] = {
    "doctor": check_machine,
    "init": prepare.create_study,
    "config": show_config,
    "tile": prepare.tile_sites,
    "features": prepare.encode_features,
    "import": prepare.import_features,
    "mosaic": prepare.encode_mosaics,
    "projection": prepare.compute_projection,
    "check": prepare.verify_stores,
    "encoders": prepare.show_encoders,
    "partition": prepare.divide_images,
    "pack": prepare.pack_file,
    "export": training.export_files,
    "train": training.train,
    "privacy": training.plan_privacy,
    "statistics": training.release_statistics,
    "evaluate": training.evaluate,
    "predict": training.predict,
    "report": training.write_report,
}
_VISIBLE_COMMANDS = {name for names in GROUPS.values() for name in names}

for name, command in _COMMANDS.items():
    described = training.MethodHelpCommand if name == "train" else None
    starts = command if command in _QUICK_COMMANDS else announce_start(command, name)
    app.command(name, cls=described, hidden=name not in _VISIBLE_COMMANDS)(starts)
app.command("rank", hidden=True)(training.start_rank)
