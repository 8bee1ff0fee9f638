"""Shared parts of commands: options, finding a study, printing documents."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from typer import Argument, Option, Typer

from wsi_fl.system.machine import count_ranks, is_first_rank
from wsi_fl.types import UsageError, WsiFlError, make_printable

if TYPE_CHECKING:
    from wsi_fl.stages.prepare.slide_lists import Scope
    from wsi_fl.stages.runtime.console import Lines
    from wsi_fl.study.folder import Study

Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout.")]
Pipeline = Annotated[
    str | None, Option(help="Name of a pipeline. Default: the study's only one; camelyon17 where it has none.")
]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override a pipeline key, e.g. train.rounds=5. Repeatable."),
]
PredictionOverrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="predict.model (auto, private, proxy, shared, mean, local or ensemble), or where weights lie now "
        "(features.weights). Repeatable.",
    ),
]
Gpus = Annotated[
    str | None, Option(metavar="0,1,…", help="GPUs to work on, a process for each. Default: the first one.")
]
SiteGpus = Annotated[
    str | None, Option("--gpus", metavar="0,1,…", help="GPUs that the sites' ranks share in turn. Default: all.")
]
PartOption = Annotated[
    str | None,
    Option(
        "--part",
        metavar="K/N",
        help="Do the K-th of N shares of the slides and leave the others. tile waits until the tissue of all slides is "
        "found. By default jobs share what is free.",
    ),
]
FileEncoder = Annotated[str | None, Option(help="Encoder of the features, where the files lack it.")]
EncoderName = Annotated[
    str | None, Option("--encoder-name", metavar="NAME", help="New name of the encoder, whatever the files call it.")
]
Run = Annotated[str, Argument(help="A run: its folder, name or number.")]


@dataclass(frozen=True)
class ExtraCommand:
    """A command that another package adds (entry point `wsi_fl.commands`), and its place in the help.

    Attributes:
        run: the command, or a `typer.Typer` with several.
        group: its heading in `wsi-fl --help`.
        is_hidden: whether it works and is not shown there.
        is_first: whether it precedes the other commands of its group.
    """

    run: Typer | Callable[..., None]
    group: str = "Other packages"
    is_hidden: bool = False
    is_first: bool = False


def find_study() -> Study:
    """Return the study at or above the current folder; UsageError where there is none."""
    from wsi_fl.study.folder import Study

    return Study.find()


_D = TypeVar("_D", bound=Mapping[str, object])


def print_document(document: _D, as_json: bool, lines: Callable[[_D], Lines]) -> None:
    """Print a command's document on the first rank only, as JSON or as lines."""
    if not document or not is_first_rank():
        return
    if as_json:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        print("\n".join(map(_escape_unprintable, text.split("\n"))), flush=True)
    else:
        from wsi_fl.stages.runtime.console import print_lines

        print_lines(lines(document))


def run_work(
    title: str, work: Callable[..., _D], as_json: bool, lines: Callable[[_D], Lines], preparation: str = ""
) -> _D:
    """Run a command's work with progress bars as its `watcher`; print and return its document."""
    from wsi_fl.stages.runtime.console import ProgressBars

    with ProgressBars(title, preparation) as bars:
        document = work(watcher=bars)
    print_document(document, as_json, lines)
    return document


def _escape_unprintable(line: str) -> str:
    """Return an equivalent line of JSON with unprintable characters escaped."""
    if line.isprintable():
        return line
    return "".join(
        character if make_printable(character) == character else json.dumps(character)[1:-1] for character in line
    )


_C = TypeVar("_C", bound=Callable[..., None])


def announce_start(command: _C, name: str = "") -> _C:
    """Return the command with a start message on stderr, since its imports take seconds.

    A KeyboardInterrupt with a message (how to resume) is reported with that message.
    """

    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        if is_first_rank():
            print(f"wsi-fl {name or command.__name__}: starting …", file=sys.stderr, flush=True)
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:  # typer would drop the message
            if not str(interrupt):
                raise
            raise WsiFlError(str(interrupt)) from None

    return cast(_C, run_command)


_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")
"""A GPU's number or name as in `nvidia-smi -L`, CUDA and Slurm."""


def take_gpus(gpus: str | None, *, ranks: bool = True) -> None:
    """Restrict the process to these GPUs, "0,1"; for several, restart the command with a rank on each.

    They must be among the GPUs that a cluster assigned to this job. Without `ranks` nothing is restarted: `train`
    starts its own ranks.
    """
    if gpus is None:
        return
    numbers = gpus.split(",")
    if not all(map(_GPU_NAME.fullmatch, numbers)) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--gpus {gpus}: write the numbers of GPUs, such as 0,1,2,3, or their names, such as GPU-8932f937"
        )
    assigned = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if assigned and not set(numbers) <= set(assigned.split(",")):
        raise UsageError(
            f"--gpus {gpus}: this process was given the GPUs {assigned} (CUDA_VISIBLE_DEVICES), and others may be "
            "somebody else's; choose of these, as they are written there"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if count_ranks() is not None:
        return
    import torch

    if (n := torch.cuda.device_count()) < len(numbers):
        raise UsageError(f"--gpus {gpus}: of these this machine has {n or 'none'}; `nvidia-smi -L` lists them")
    if ranks and len(numbers) > 1:
        from wsi_fl.stages.training.launch import find_mpiexec, rank_environment

        command = [find_mpiexec(), "-n", str(len(numbers)), "--oversubscribe", "--bind-to", "none"]
        command += [sys.executable, "-m", "wsi_fl", *sys.argv[1:]]
        os.execvpe(command[0], command, rank_environment(len(numbers)))


def parse_sites(
    command: str, site: str | None, all_sites: bool, pipeline: str | None, overrides: list[str] | None = None
) -> Scope:
    """Return the site selection of a command; UsageError unless exactly one of --site and --all was given."""
    if site is None and not all_sites:
        raise UsageError(f"{command} needs one of --site NAME and --all")
    if site is not None and all_sites:
        raise UsageError("--site and --all exclude each other")
    return {"site": site, "pipeline_name": pipeline, "overrides": overrides or []}
