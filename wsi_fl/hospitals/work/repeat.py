"""A plan's work, attempted until it is done: by a hospital over a folder, and by the coordinator over a server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import TypeVar

from wsi_fl.types import ReportableError, WsiFlError

_T = TypeVar("_T")


def repeat_until_done(attempt: Callable[[], _T | None], recover: Callable[[WsiFlError], None]) -> _T:
    """Attempt a plan's work until it has a result, and return that.

    Args:
        attempt: does the work once; returns None if it could not begin yet.
        recover: called after a failure of the work, which it raises if no further attempt can succeed.
    """
    while True:
        try:
            if (result := attempt()) is not None:
                return result
        except WsiFlError as error:
            recover(error)


def refuse_after(deadline: str | None) -> None:
    """Refuse to go on (ReportableError) after a plan's last day, such as 2027-03-31, if it has one."""
    if deadline and date.today().isoformat() > deadline:
        raise ReportableError(f"this plan was good until {deadline} (train.deadline); nothing more is sent")
