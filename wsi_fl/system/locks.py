"""Locks on folders: one process at a time works where two would spoil each other's files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsi_fl.system.files import remove_leftovers
from wsi_fl.types import WsiFlError


@contextmanager
def locked(folder: Path, site: str) -> Iterator[None]:
    """One `tile`, `mosaic`, `features` or `stain` at a time per site; what a killed one left behind is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WsiFlError(
                f"site {site}: another wsi-fl command is writing {folder}; wait for it"
            ) from None
        for place in (folder, *(folder / name for name in ("slides", "overview", "mosaics", "features"))):
            remove_leftovers(place)
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is at work in a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Hold a site's part of a run for this process, or say that another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WsiFlError(f"{folder}: another job still works on this run; end it") from None
        yield
