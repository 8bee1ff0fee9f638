"""How a run goes on that was stopped: starting the same command again would train, and charge, a new one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from wsi_fl.runs import RunFolder
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


@contextmanager
def naming_resume(study: Study, run: RunFolder) -> Iterator[None]:
    """Name the command that continues a run where Ctrl-C or a full disk ends it.

    Raises:
        DiskFull, KeyboardInterrupt: with the command, in place of what ended it.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; continue with `{resume_command(study, run)}`") from None
    except Exception as error:
        try:
            raise_if_full(error, run.path)
        except DiskFull:
            raise DiskFull(
                f"{run.path}: the disk is full; free some space and continue with `{resume_command(study, run)}`"
            ) from error
        raise
