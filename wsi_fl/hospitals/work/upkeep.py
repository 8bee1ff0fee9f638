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
_LARGE = 20 << 20


def rotate_logs(each_time: Path, *large: Path) -> None:
    """Call logs that nobody writes now `….1`, those `….2`, and so on to five.

    Args:
        large: what is left alone until it has 20 MB.
    """
    for log in (each_time, *large):
        if log.is_file() and log.stat().st_size > (_LARGE if log in large else 0):
            RotatingFileHandler(log, backupCount=_LOGS, delay=True).doRollover()


def forget_jobs(kit: Path) -> None:
    """Delete the folders of all but the newest 20 jobs; only call it while no job runs."""
    folders = [path for path in kit.iterdir() if _JOB.fullmatch(path.name) and path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_JOBS]:
        shutil.rmtree(folder, ignore_errors=True)
