"""What keeps a kit and a study from growing for ever: older logs and older folders of jobs go."""

from __future__ import annotations

import re
import shutil
from logging.handlers import RotatingFileHandler
from pathlib import Path

_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""FLARE calls the folder of a job after its id."""
_LOGS, _JOBS = 5, 20
"""How many older ones are kept."""


def rotate(log: Path, most_bytes: int = 20 << 20) -> None:
    """Call a log that is longer, and that nobody writes now, `….1`, that one `….2`, and so on to five."""
    if log.is_file() and log.stat().st_size > most_bytes:
        RotatingFileHandler(log, backupCount=_LOGS, delay=True).doRollover()


def forget_jobs(kit: Path) -> None:
    """Delete the folders of all but the newest 20 jobs; only call it while no job runs."""
    folders = [path for path in kit.iterdir() if _JOB.fullmatch(path.name) and path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_JOBS]:
        shutil.rmtree(folder, ignore_errors=True)
