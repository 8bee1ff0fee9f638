"""What was left aside: a part that failed, in one line, while the others go on."""

from __future__ import annotations

from collections.abc import Sequence

from wsi_fl.types import WsiFlError

_WORDS: dict[type[BaseException], str] = {
    MemoryError: "it needs more memory than there is",
    RecursionError: "it is nested too deeply",
    OverflowError: "a number in it is too large",
}


def reason_of(error: BaseException) -> str:
    """Return in one line why something failed: the words of an error of our own, else its type too."""
    if isinstance(error, WsiFlError):
        return str(error)
    for kind, words in _WORDS.items():
        if isinstance(error, kind):
            return words
    return " ".join(f"{type(error).__name__}: {error}".split())


_MOST_PLACES = 5


def partly(unread: Sequence[tuple[int, int, str]], n: int) -> str | None:
    """Say which patches (x, y, reason) of n were set aside, and why; None when all were read.

    Example:
        >>> partly([(0, 512, "cut short")], 9)
        '1 of 9 patches set aside, at level-0 pixel (0, 512): cut short'
    """
    if not unread:
        return None
    places = ", ".join(f"({x}, {y})" for x, y, _ in unread[:_MOST_PLACES])
    more = f" and {len(unread) - _MOST_PLACES} more" if len(unread) > _MOST_PLACES else ""
    return f"{len(unread)} of {n} patches set aside, at level-0 pixel {places}{more}: {unread[0][2]}"
