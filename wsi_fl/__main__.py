"""The program: runs a command; every failure is one line on stderr."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import typer

from wsi_fl.cli.main import app
from wsi_fl.study.renamed import new_name
from wsi_fl.types import UsageError, WsiFlError, printable

_WrongUsage: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""Click's UsageError, wherever typer keeps its click."""

_LONG = re.compile(r"\b(?:0\.0{4,}\d+|[1-9]\d{15,})\b")
"""A number as nobody writes it."""
_INTERRUPTED = 130  # what typer makes of Ctrl-C
_GO_ON = "interrupted; what was finished is kept, start the same command again to go on"


def main() -> None:
    """Runs the command; every failure is one line on stderr and exit code 1 (failed) or 2 (wrong usage)."""
    gc.set_threshold(20_000)  # what is imported is no garbage: looking through it takes a tenth of a start
    os.umask(os.umask(0o077) | 0o077)  # what is written holds patients' data: for its owner's eyes alone
    try:
        code = app(standalone_mode=False)
    except _WrongUsage as error:
        code = _fail(f"{_said_of(error)} (see --help)", 2)
    except UsageError as error:
        code = _fail(str(error), 2)
    except WsiFlError as error:
        code = _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(_GO_ON, 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        code = _fail(f"{place}{error.strerror or error}", 1)
    except MemoryError as error:
        said = f" ({error})" if str(error) else ""
        code = _fail(f"there is not enough memory{said}; free some, or lower what is held at once", 1)
    except Exception as error:
        if os.environ.get("WSI_FL_TRACEBACK"):
            raise
        text = f"{type(error).__name__}: {error}"
        code = _fail(f"unexpected {text}; WSI_FL_TRACEBACK=1 shows where", 1)
    if code == _INTERRUPTED:
        code = _fail(_GO_ON, 1)
    sys.exit(code if isinstance(code, int) else 0)


def _said_of(error: Any) -> str:
    """Return what a wrong option is told, in numbers that can be read, and with a reason also where it is no number."""
    words = error.ctx.command_path.split()[1:] if error.ctx else []
    last = getattr(error, "option_name", "") or error.format_message().partition("'")[2].partition("'")[0]
    if why := new_name(" ".join(("wsi-fl", *words, last))):
        return why
    said = _LONG.sub(lambda number: f"{float(number[0]):g}", error.format_message())
    names = [*getattr(error.param, "opts", ())] if getattr(error, "param", None) else []
    given = (value for name in names for value in _values_of(name))
    if any(value.strip("+-").lower() == "nan" for value in given):
        return f"{said.partition('Input should')[0]}nan is no number"
    return said


def _values_of(name: str) -> Iterator[str]:
    """Yield what an option is given on the command line."""
    words = sys.argv[1:]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            yield after
        elif word.startswith(f"{name}="):
            yield word.removeprefix(f"{name}=")


def _fail(message: str, code: int) -> int:
    print(f"wsi-fl: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
