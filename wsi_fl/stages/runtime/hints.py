"""The next command, as commands propose it in their last line: with the pipeline and the settings that were given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from wsi_fl.federation.methods import DEFAULT_METHOD
from wsi_fl.stages.runtime.console import TextLine
from wsi_fl.study.folder import Study

_METHOD = re.compile(r"\bwsi-fl train --method ([\w-]+)")
_PIPELINE_OPTION = re.compile(r"--pipeline \S+")
_PARTITION = re.compile(r"\bwsi-fl partition (\S+)")
_MAX_NAMED_PIPELINES = 3
_SPENDING_COMMAND = "wsi-fl statistics "
_SPENDING_NOTE = "`statistics` spends ε of the budget, once; `wsi-fl train --method oneshot --dry-run` says how much"


def next_command(
    command: str, pipeline_name: str | None = None, overrides: Sequence[str] = (), required_settings: Sequence[str] = ()
) -> str:
    """Return a command for a shell, with a pipeline and settings.

    Args:
        command: its words without "wsi-fl".
        pipeline_name: as given by the user; None for the default.
        overrides: of the user, "key=value".
        required_settings: of the command itself, in place of the user's of the same keys.

    Example:
        >>> next_command("train", "kidney", ["train.rounds=5", "train.data=patches"], ["train.data=mosaics"])
        'wsi-fl train --pipeline kidney --set train.rounds=5 --set train.data=mosaics'
    """
    keys = {_key_of(setting) for setting in required_settings}
    settings = [*(override for override in overrides if _key_of(override) not in keys), *required_settings]
    words = ["--pipeline", pipeline_name] if pipeline_name else []
    words += [word for setting in settings for word in ("--set", setting)]
    return " ".join(["wsi-fl", command, *map(shlex.quote, words)])


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def pipeline_method(study: Study, pipeline_name: str | None) -> str:
    """Return the method in the first line of a pipeline's file, or the default one."""
    match = _METHOD.search(study.read_header(study.pipeline_name(pipeline_name)))
    return match[1] if match else DEFAULT_METHOD


def list_release_commands(
    sites_option: str, pipeline_name: str | None, overrides: Sequence[str], *, form: str = "", needs_projection: bool
) -> list[str]:
    """Return the commands of a real hospital that releases class statistics: a projection, then `statistics`.

    Args:
        form: another tool's features, as of `import --format`; "" for slides.
        needs_projection: whether the settings name no file yet.
    """
    if not needs_projection:
        return [next_command(f"statistics {sites_option}", pipeline_name, overrides)]
    projection = next_command(f"projection{f' --format {form}' if form else ''} --from PUBLIC", pipeline_name)
    file = ["model.projection=projection.safetensors"]
    return [projection, next_command(f"statistics {sites_option}", pipeline_name, overrides, file)]


def join_commands(commands: Sequence[str]) -> str:
    """Return the next commands as one for a shell, with a note where the last one spends ε.

    Example:
        >>> join_commands(["wsi-fl features --all", "wsi-fl train --method regular"])
        'wsi-fl features --all && wsi-fl train --method regular'
    """
    note = f" ({_SPENDING_NOTE})" if commands and commands[-1].startswith(_SPENDING_COMMAND) else ""
    return " && ".join(commands) + note


def partition_hint(study: Study, source: Path) -> TextLine:
    """Return the line that follows a partition: the commands of a pipeline, as its file begins.

    Args:
        source: the images' file or folder. Of several pipelines it selects the first whose own images have its name.
    """
    headers = {name: study.read_header(name).removeprefix("#").strip() for name in study.pipeline_names()}
    made_for = [name for name, header in headers.items() if _find_image_name(header) == source.absolute().name]
    if len(headers) != 1 and not made_for:
        candidates = [name for name, header in headers.items() if _find_image_name(header)] or list(headers)
        note = f" ({', '.join(candidates[:_MAX_NAMED_PIPELINES])}, …)" if candidates else ""
        return TextLine(f"stores ready; next: {next_command(f'train --method {DEFAULT_METHOD}', 'NAME')}{note}")
    name = (made_for or list(headers))[0]
    commands = [
        _PIPELINE_OPTION.sub(f"--pipeline {shlex.quote(name)}", command)
        for command in headers[name].split(" && ")
        if command.startswith("wsi-fl ") and _PIPELINE_OPTION.search(command)
    ]
    return TextLine(f"stores ready; next: {' && '.join(commands) or next_command(f'train --method {DEFAULT_METHOD}')}")


def _find_image_name(header: str) -> str:
    """Return the name of the images that a pipeline's first line divides; "" for none."""
    match = _PARTITION.search(header)
    return PurePosixPath(match[1]).name if match else ""
