"""What the commands share: options, how a study is found, how an answer is shown."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from typer import Argument, Option

from wsi_fl.system.machine import is_first, launched_ranks
from wsi_fl.types import UsageError, WsiFlError, printable

if TYPE_CHECKING:
    from wsi_fl.stages.prepare.sources import Which
    from wsi_fl.stages.work.console import Lines
    from wsi_fl.study.folder import Study

Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout.")]
Pipeline = Annotated[
    str | None,
    Option(help="Name of a pipeline. Default: the study's only one; camelyon17 where it has none."),
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
    str | None,
    Option("--gpus", metavar="0,1,…", help="GPUs that the sites' ranks share in turn. Default: all."),
]
Run = Annotated[str, Argument(help="A run: its folder, name or number.")]


def find_study() -> Study:
    """Return the study at or above the current folder; UsageError where there is none."""
    from wsi_fl.study.folder import Study

    return Study.find()


_D = TypeVar("_D", bound=Mapping[str, object])


def show(document: _D, as_json: bool, lines: Callable[[_D], Lines]) -> None:
    """Print a command's answer once, whatever ranks there are, as one JSON document or as lines."""
    if not document or not is_first():
        return
    if as_json:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        print("\n".join(map(_spelled, text.split("\n"))), flush=True)
    else:
        from wsi_fl.stages.work.console import render

        render(lines(document))


def show_work(title: str, work: Callable[..., _D], as_json: bool, lines: Callable[[_D], Lines]) -> _D:
    """Do the work of a command, which is given bars as its `watcher`, print its answer, and return that."""
    from wsi_fl.stages.work.console import Bars

    with Bars(title) as bars:
        document = work(watcher=bars)
    show(document, as_json, lines)
    return document


def _spelled(line: str) -> str:
    """A line of JSON that means the same, and in which what a terminal would not show as it is stands as an escape."""
    if line.isprintable():
        return line
    return "".join(one if printable(one) == one else json.dumps(one)[1:-1] for one in line)


_C = TypeVar("_C", bound=Callable[..., None])


def announced(command: _C, name: str = "") -> _C:
    """Return the command, which first says on stderr that it starts, since what it imports takes seconds.

    Ctrl-C that knows how the work goes on is told in its own words.
    """

    @functools.wraps(command)
    def told(*args: Any, **kwargs: Any) -> None:
        if is_first():
            print(f"wsi-fl {name or command.__name__}: starting …", file=sys.stderr, flush=True)
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as stopped:  # typer would forget its words
            if not str(stopped):
                raise
            raise WsiFlError(str(stopped)) from None

    return cast(_C, told)


_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")
"""A number of a GPU, or its name, as `nvidia-smi -L` lists both, and as CUDA and Slurm write them."""


def take_gpus(gpus: str | None, *, ranks: bool = True) -> None:
    """Take these GPUs, "0,1", and where they are several, begin the command again with a rank on each.

    Where a cluster gave this job some of the machine's GPUs, they are to be among these.
    Without `ranks` they are only taken: `train` starts its own.
    """
    if gpus is None:
        return
    numbers = gpus.split(",")
    if not all(map(_GPU.fullmatch, numbers)) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--gpus {gpus}: write the numbers of GPUs, such as 0,1,2,3, or their names, such as GPU-8932f937"
        )
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if given and not set(numbers) <= set(given.split(",")):
        raise UsageError(
            f"--gpus {gpus}: this process was given the GPUs {given} (CUDA_VISIBLE_DEVICES), and others may be "
            "somebody else's; choose of these, as they are written there"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if launched_ranks() is not None:
        return
    import torch

    if (n := torch.cuda.device_count()) < len(numbers):
        raise UsageError(
            f"--gpus {gpus}: of these this machine has {n or 'none'}; `nvidia-smi -L` lists them"
        )
    if ranks and len(numbers) > 1:
        from wsi_fl.stages.training.launch import find_mpiexec, rank_environment

        again = [find_mpiexec(), "-n", str(len(numbers)), "--oversubscribe", "--bind-to", "none"]
        again += [sys.executable, "-m", "wsi_fl", *sys.argv[1:]]
        os.execvpe(again[0], again, rank_environment(len(numbers)))


def asked(
    command: str, site: str | None, every: bool, pipeline: str | None, overrides: list[str] | None = None
) -> Which:
    """Return which sites a command works on; UsageError unless exactly one of --site and --all was given."""
    if site is None and not every:
        raise UsageError(f"{command} needs one of --site NAME and --all")
    if site is not None and every:
        raise UsageError("--site and --all exclude each other")
    return {"site": site, "pipeline_name": pipeline, "overrides": overrides or []}
