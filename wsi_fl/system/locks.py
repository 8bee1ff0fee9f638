"""Locks on folders: one process at a time works where two would spoil each other's files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsi_fl.system.files import remove_leftovers
from wsi_fl.types import WsiFlError


@contextmanager
def locked(folder: Path, site: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder for one command at a time per site; remove what a killed one left behind.

    Args:
        wait: until another process of this machine is done, instead of refusing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise WsiFlError(
                f"site {site}: another wsi-fl command is writing {folder}; wait for it"
            ) from None
        for place in (folder, *(folder / name for name in ("slides", "overview", "mosaics", "features"))):
            remove_leftovers(place)
        yield
