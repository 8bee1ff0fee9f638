"""What keeps a kit and a study from growing for ever: older logs and older folders of jobs go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""FLARE calls the folder of a job after its id."""
_LOGS, _JOBS = 5, 20
"""How many older ones are kept."""
_LARGE = 20 << 20


def rotate_logs(kit: Path, own: Path | None) -> None:
    """Set the logs aside that nobody else rotates: `console.txt` each time, others once they have 20 MB.

    Args:
        kit: which nobody uses now.
        own: what a hospital's study says of its failures; None for a server.
    """
    _rotate(kit / "console.txt", 0)
    for log in (kit / "audit.log", own):
        if log is not None:
            _rotate(log, _LARGE)


def _rotate(log: Path, most_bytes: int) -> None:
    """Call a log that is longer `….1`, that one `….2`, and so on to five."""
    if not log.is_file() or log.stat().st_size <= most_bytes:
        return
    names = [log, *(log.with_name(f"{log.name}.{k}") for k in range(1, _LOGS + 1))]
    for older, name in reversed(list(zip(names[1:], names[:-1], strict=True))):
        if name.is_file():
            name.replace(older)


def forget_jobs(kit: Path) -> None:
    """Delete the folders of all but the newest 20 jobs; only call it while no job runs."""
    folders = [path for path in kit.iterdir() if _JOB.fullmatch(path.name) and path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_JOBS]:
        shutil.rmtree(folder, ignore_errors=True)
