"""Work on a site's folder that one process does alone."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from wsi_fl.system.files import JOBS_FOLDER, LocksUnavailable, file_lock
from wsi_fl.system.shared_work import SharedWork, WorkKey, join_work

_LOCK = ".lock"
WORK_NAMES = (JOBS_FOLDER, _LOCK)
"""Names in a folder that belong to the work on it; whoever empties the folder during the work leaves them."""


@contextmanager
def site_lock(folder: Path, site: str, *, wait: bool = False) -> Iterator[SharedWork]:
    """Work on a site's folder alone, without leftovers of a killed command in it.

    Where the file system has locks, nobody else works there before this process has ended. Elsewhere it counts as
    dead after two minutes without a heartbeat, and must call `SharedWork.require_presence` before it writes in place.

    With `wait` another command is waited for, else it is a WsiFlError.
    """
    with ExitStack() as stack:
        with suppress(LocksUnavailable):
            busy = f"site {site}: another wsi-fl command is writing {folder}; wait for it, or end it"
            stack.enter_context(file_lock(folder / _LOCK, None if wait else busy))
        key = WorkKey("", secrets.token_hex(6))
        work = stack.enter_context(join_work(folder, key, f"site {site}", wait=wait))
        try:
            yield work
        finally:
            work.finish_work()
