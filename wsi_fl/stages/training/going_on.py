"""How a run goes on that was stopped: starting the same command again would train, and charge, a new one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from wsi_fl.runs.run import RunFolder
from wsi_fl.study.folder import Study
from wsi_fl.system.files import raise_if_full
from wsi_fl.types import DiskFull


def resume_command(study: Study, run: RunFolder) -> str:
    """Return the command that continues a run.

    Example:
        >>> from pathlib import Path
        >>> resume_command(Study(Path("/s")), RunFolder(Path("/s/runs/00001-fml-small")))
        'wsi-fl train --resume runs/00001-fml-small'
    """
    return f"wsi-fl train --resume {shlex.quote(study.relative(run.path))}"


def naming_resume(study: Study, run: RunFolder) -> AbstractContextManager[None]:
    """Name the command that continues a run where Ctrl-C or a full disk ends it."""
    return naming(run.path, f"continue with `{resume_command(study, run)}`")


@contextmanager
def naming(place: Path, way_on: str) -> Iterator[None]:
    """Say how work goes on that Ctrl-C or a full disk ends.

    Args:
        place: where it writes.
        way_on: what to do, in words.

    Raises:
        DiskFull, KeyboardInterrupt: with the way on, in place of what ended it.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {way_on}") from None
    except Exception as error:
        try:
            raise_if_full(error, place)
        except DiskFull:
            raise DiskFull(f"{place}: the disk is full; free some space and {way_on}") from error
        raise
