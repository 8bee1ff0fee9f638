"""The program `wsi-fl`: every failure is one line on stderr."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import typer

from wsi_fl.cli.main import app
from wsi_fl.study.renamed import new_name
from wsi_fl.system.machine import let_threads_sleep
from wsi_fl.types import UsageError, WsiFlError, make_printable

_WrongUsage: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""Click's UsageError, wherever typer keeps its click."""

_LONG_NUMBER = re.compile(r"\b(?:0\.0{4,}\d+|[1-9]\d{15,})\b")
"""A number with so many digits that it is hard to read."""
_INTERRUPTED_CODE = 130  # typer's exit code for Ctrl-C
_INTERRUPTED_MESSAGE = "interrupted; finished work is kept; start the same command again"


def run_program() -> NoReturn:
    """Run the command, and end the process as Python does, but for its modules: freeing PyTorch's takes a second."""
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has ended, or it is closed
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)


def main() -> None:
    """Run the command; every failure is one line on stderr and exit code 1 (failed) or 2 (wrong usage)."""
    gc.set_threshold(20_000)  # imported modules are no garbage: collecting them takes a tenth of a start
    let_threads_sleep()
    os.umask(os.umask(0o077) | 0o077)  # files may hold patients' data: readable by their owner alone
    try:
        code = app(standalone_mode=False)
    except _WrongUsage as error:
        code = _print_failure(f"{_usage_message(error)} (see --help)", 2)
    except UsageError as error:
        code = _print_failure(str(error), 2)
    except WsiFlError as error:
        code = _print_failure(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = _print_failure(_INTERRUPTED_MESSAGE, 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        code = _print_failure(f"{place}{error.strerror or error}", 1)
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        code = _print_failure(f"there is not enough memory{detail}; free some, or lower what is held at once", 1)
    except Exception as error:
        if os.environ.get("WSI_FL_TRACEBACK"):
            raise
        text = f"{type(error).__name__}: {error}"
        code = _print_failure(f"unexpected {text}; WSI_FL_TRACEBACK=1 shows where", 1)
    if code == _INTERRUPTED_CODE:
        code = _print_failure(_INTERRUPTED_MESSAGE, 1)
    sys.exit(code if isinstance(code, int) else 0)


def _usage_message(error: Any) -> str:
    """Return the message on a wrong option, with readable numbers, and with a reason where the value is NaN."""
    words = error.ctx.command_path.removeprefix(error.ctx.find_root().info_name or "").split() if error.ctx else []
    last = getattr(error, "option_name", "") or error.format_message().partition("'")[2].partition("'")[0]
    if why := new_name(" ".join(("wsi-fl", *words, last))):
        return why
    message = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):g}", error.format_message())
    names = [*getattr(error.param, "opts", ())] if getattr(error, "param", None) else []
    values = (value for name in names for value in _option_values(name))
    if any(value.strip("+-").lower() == "nan" for value in values):
        return f"{message.partition('Input should')[0]}nan is no number"
    return message


def _option_values(name: str) -> Iterator[str]:
    """Yield the values of an option on the command line."""
    words = sys.argv[1:]
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            yield next_word
        elif word.startswith(f"{name}="):
            yield word.removeprefix(f"{name}=")


def _print_failure(message: str, code: int) -> int:
    print(f"wsi-fl: error: {make_printable(' '.join(message.split()))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    run_program()
