"""Which files processes open, traced by strace where installed, else by Python's audit hook in each process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import wsi_fl

_STRACE = ["strace", "-D", "-f", "-y", "-qq", "--seccomp-bpf", "-e", "trace=open,openat"]
_OPENED = re.compile(r'open(?:at)?\((?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"([^"]+)"')
_HOOK = """
import os, sys

_log = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

def _note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        os.write(_log, (os.path.abspath(os.fsdecode(arguments[0])) + "\\n").encode())

sys.addaudithook(_note)
"""


@cache
def by_strace() -> bool:
    """Return whether strace is installed and permitted; it also traces C libraries."""
    command = shutil.which("strace") and [*_STRACE, "-o", "/dev/null", "true"]
    return bool(command) and subprocess.run(command, check=False, capture_output=True).returncode == 0


class Opened:
    """A record of the files opened by processes and all their children.

    Args:
        folder: a new one, for the notes.
        strace: whether strace looks.
    """

    def __init__(self, folder: Path, *, strace: bool | None = None) -> None:
        self.folder, self._n = folder, 0
        self.strace = by_strace() if strace is None else strace
        (folder / "hook").mkdir(parents=True)
        (folder / "hook" / "sitecustomize.py").write_text(_HOOK)

    def watched(self, name: str, command: list[str]) -> list[str]:
        """Return the command, traced under a name."""
        self._n += 1
        file = self.folder / f"{name}.{self._n}.txt"
        if self.strace:
            return [*_STRACE, "-o", str(file), *command]
        places = f"{self.folder / 'hook'}:{Path(wsi_fl.__file__).parents[1]}"
        return ["env", f"PYTHONPATH={places}", f"OPENED={file}", *command]

    def below(self, root: Path, name: str, *, but: list[Path]) -> list[Path]:
        """Return the files opened under a name below a folder, except in some folders."""
        found = set()
        for file in self.folder.glob(f"{name}.*.txt"):
            _wait_for_the_end(file)
            found |= {path for path in map(self._path, file.read_text(errors="replace").splitlines()) if path}
        return sorted(p for p in found if root in p.parents and not any(p.is_relative_to(own) for own in but))

    def _path(self, line: str) -> Path | None:
        """Return the path that a line of the trace opened or tried to open."""
        if not self.strace:
            return Path(line)
        match = _OPENED.search(line)
        return Path(os.path.normpath(Path(match[1] or "/", match[2]))) if match else None


def _wait_for_the_end(file: Path) -> None:
    """Wait for strace's last lines, written once all traced processes have ended."""
    deadline = time.monotonic() + 30
    while any(_mentions(entry, str(file)) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        assert time.monotonic() < deadline, "what was watched has not ended"
        time.sleep(0.1)


def _mentions(entry: Path, file: str) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return words[0].endswith("strace") and file in words


def opening(path: Path) -> list[str]:
    """Return a command that opens a file."""
    return [sys.executable, "-c", f"open({str(path)!r}, 'rb').close()"]
