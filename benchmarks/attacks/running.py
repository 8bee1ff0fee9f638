"""Running commands of wsi-fl in forked children, watched for time and memory, and killed as whole trees.

The parent imports everything once, so that a command costs what it does and no start of Python.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS, BYTES = 60.0, 2 << 30
"""What no command may exceed on studies as small as these."""
_POLL_S = 0.01
_PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit status, or minus the signal that ended it.
        said, told: what it wrote to stdout and stderr.
        seconds: from start to end.
        n_bytes: the most memory of its own that one of its processes was seen to hold, without what is shared.
        killed: whether it was killed, because it was to be or because it took too long.
        finds: whether an exit status of 1 says what was found, as that of `check` does, and no error.
    """

    code: int
    said: str
    told: str
    seconds: float
    n_bytes: int
    killed: bool
    finds: bool = False

    @property
    def error(self) -> str:
        """Return its line of error; "" where there is none."""
        lines = [line for line in self.told.splitlines() if line.startswith("wsi-fl: error:")]
        return lines[-1] if lines else ""

    def wrong(self) -> str:
        """Return what no command may do, whatever it is given; "" where it behaved."""
        lines = sum(line.startswith("wsi-fl: error:") for line in self.told.splitlines())
        faults = {
            f"hang: more than {SECONDS:.0f} s": self.killed,
            f"memory: {self.n_bytes / 1e9:.1f} GB": self.n_bytes > BYTES,
            f"crash: ended with {self.code}": self.code not in (0, 1, 2) and not self.killed,
            "traceback": "Traceback (most recent call last)" in self.told + self.said,
            f"unexpected: {self.error}": "unexpected" in self.error,
            f"lines: {lines} lines of error with exit status {self.code}": lines != (self.code != 0) and not self.finds,
        }
        return next((said for said, found in faults.items() if found), "")


def import_all() -> None:
    """Import what commands import, so that forked children have it."""
    import importlib
    import pkgutil

    import wsi_fl

    for module in pkgutil.walk_packages(wsi_fl.__path__, "wsi_fl."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module.name)


def run(
    arguments: Sequence[str],
    folder: Path,
    *,
    kill_after: Callable[[float], bool] | None = None,
    limit_s: float = SECONDS,
) -> Ended:
    """Run a command in a study's folder.

    Args:
        kill_after: told the seconds since the start, says when the whole tree is killed; None to let it end.
        limit_s: after which it counts as hung.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become(arguments, folder, out.fileno(), err.fileno())
        most, killed, status = 0, False, 0
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            passed = time.monotonic() - began
            family = tree(pid)
            most = max([most, *map(own_bytes, family)])
            if passed > limit_s or most > 2 * BYTES or (kill_after is not None and kill_after(passed)):
                killed = True
                kill(family)
                _, status = os.waitpid(pid, 0)
                break
            time.sleep(_POLL_S)
        kill(tree(pid))
        out.seek(0)
        err.seek(0)
        said, told = (file.read().decode(errors="replace") for file in (out, err))
    seconds, code = time.monotonic() - began, os.waitstatus_to_exitcode(status)
    return Ended(code, said, told, seconds, most, killed, finds="check" in arguments[:2])


def tree(pid: int) -> list[int]:
    """Return a process and all that it started and that these started, the oldest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents.setdefault(int(stat[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def own_bytes(pid: int) -> int:
    """Return the resident bytes of a process that are its own: neither files nor shared with its parent."""
    with suppress(OSError, ValueError, IndexError):
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * _PAGE
    return 0


def kill(family: Sequence[int]) -> None:
    """Kill processes at once: all are stopped first, so that none starts another meanwhile."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for pid in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sign)


def _become(arguments: Sequence[str], folder: Path, out: int, err: int) -> None:
    """Be the command, in the child; never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")  # as Python's own
        os.chdir(folder)
        sys.argv = ["wsi-fl", *arguments]
        from wsi_fl.__main__ import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
