"""Locks on files: one process at a time works where two would spoil each other's files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsi_fl.system.files import remove_leftovers
from wsi_fl.system.machine import Lock
from wsi_fl.types import WsiFlError

_RETRY_S = 0.05


@contextmanager
def alone(path: Path, busy: str | None = None, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock on a file, which is made where there is none.

    Args:
        path: the file; what is in it stays.
        busy: what to say when another process holds the lock; None to wait for it.
        patience_s: how long to try before saying so: a process that was killed lets go a moment later.

    Raises:
        WsiFlError: with `busy`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    with Lock(path) as lock:
        while not lock.taken(wait=not busy):
            if time.monotonic() > deadline:
                raise WsiFlError(busy or "")
            time.sleep(_RETRY_S)
        yield


@contextmanager
def locked(folder: Path, site: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a site's folder for one command at a time, and remove what a killed one left in it.

    Args:
        folder: made where there is none.
        site: the site's name, for the error.
        wait: wait until another command is done with the folder, instead of refusing.

    Raises:
        WsiFlError: when another command has the folder.
    """
    busy = f"site {site}: another wsi-fl command is writing {folder}; wait for it"
    with alone(folder / ".lock", None if wait else busy):
        remove_leftovers(folder)
        yield
