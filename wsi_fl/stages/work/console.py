"""Console output on stderr: progress bars or lines, messages, tables, failures in one line."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import rich.table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from wsi_fl.system.files import raise_if_full
from wsi_fl.system.machine import launched_ranks
from wsi_fl.types import DiskFull, WsiFlError, one_line, printable

_LINE_EVERY_S = 5.0
_MOST_PARTS = 12
"""Parts with a note in a line of progress."""
_EVENT_EVERY_S = 0.3

stderr = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


class Watcher(Protocol):
    """Receives the progress of each part of a long job."""

    def update(self, part: str, done: float, total: float, note: str = "") -> None: ...

    def say(self, text: str, *, public: bool = False) -> None:
        """Print a message; `public` where it depends only on data shared by all sites."""
        ...


class Silent:
    """No progress; messages still go to stderr."""

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        pass

    def say(self, text: str, *, public: bool = False) -> None:
        say(text, "yellow")


class OneOf(Silent):
    """Progress of one of n equal works as a part of all, so that it never goes back."""

    def __init__(self, watcher: Watcher, before: int, n: int) -> None:
        self._watcher, self._before, self._n = watcher, before, n

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        self._watcher.update(part, self._before * total + min(done, total), self._n * total, note)

    def say(self, text: str, *, public: bool = False) -> None:
        self._watcher.say(text, public=public)


class Quiet(Silent):
    """No progress; messages of a real hospital go to its local log, unless they are public."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def say(self, text: str, *, public: bool = False) -> None:
        (super().say if public else self._log)(text.strip())


class Bars(Silent):
    """One bar per part on a terminal; elsewhere one line over all parts every five seconds."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._live = stderr.is_terminal
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=stderr,
        )
        self._tasks: dict[str, TaskID] = {}
        self._state: dict[str, tuple[float, float, str]] = {}
        self._from: dict[str, tuple[float, float]] = {}
        """Progress and time of each part at its first update; a resumed job starts above 0."""
        self._began = self._said = self._moved = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> Bars:
        if self._live:
            self._bars.start()
        elif launched_ranks() is None:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live:
            self._bars.stop()

    def _tell(self) -> None:
        """Print the progress every few seconds, also without updates."""
        while not self._over.wait(_LINE_EVERY_S):
            if time.monotonic() - self._said >= _LINE_EVERY_S / 2:
                self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        if self._state or launched_ranks() is None:
            say(self._line())

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        part, note = printable(part), printable(note)
        now = time.monotonic()
        self._from.setdefault(part, (done, now))
        if done != self._state.get(part, (None,))[0]:
            self._moved = now
        self._state[part] = (done, total, note)
        if self._live:
            if part not in self._tasks:
                self._tasks[part] = self._bars.add_task(part, total=total, note=note)
            self._bars.update(self._tasks[part], completed=done, total=total, note=note)
        elif time.monotonic() - self._said >= _LINE_EVERY_S:
            self._say()

    def _line(self) -> str:
        state, elapsed = self._state.copy(), time.monotonic() - self._began
        if not state:
            return f"{self.title}: preparing, {elapsed:.0f} s so far"
        done = sum(min(d, t) for d, t, _ in state.values())
        total = sum(t for _, t, _ in state.values())
        share = done / total if total else 0.0
        gained = done - sum(d for d, _ in self._from.values())
        # at the speed up to the last step, less the time since
        took = self._moved - min(t for _, t in self._from.values())
        seconds = (total - done) / gained * took - (time.monotonic() - self._moved) if gained > 0 else 0.0
        left = (
            f", about {seconds:.0f} s left" if share > 0.02 and seconds > 0 and took >= _LINE_EVERY_S else ""
        )
        left = ", finishing" if share >= 1 else left
        notes = ", ".join(f"{part} {note}" for part, (_, _, note) in [*state.items()][:_MOST_PARTS] if note)
        more = f", and {len(state) - _MOST_PARTS} more" if len(state) > _MOST_PARTS else ""
        return f"{self.title}: {share:.0%}{left}" + (f" ({notes}{more})" if notes else "")


class Events:
    """Progress as JSON lines on stdout for the owner, the parent process with the bars."""

    def __init__(self, owner: int | None = None) -> None:
        self._said: dict[str, float] = {}
        self._owner = owner

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        if done < total and now - self._said.get(part, 0.0) < _EVENT_EVERY_S:
            return
        self._said[part] = now
        self.check_owner()
        emit({"part": part, "done": done, "total": total, "note": note})

    def say(self, text: str, *, public: bool = False) -> None:
        emit({"say": text})

    def check_owner(self) -> None:
        """Raise WsiFlError when the owner has ended."""
        if self._owner is None:
            return
        try:
            os.kill(self._owner, 0)
        except ProcessLookupError:
            raise WsiFlError("the process that started this one is gone") from None


class Discreet(Events):
    """Progress of a real hospital as JSON lines: its name and completed rounds, nothing derived from records."""

    def __init__(self, log: Callable[[str], None], owner: int | None = None) -> None:
        super().__init__(owner)
        self._log = log

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        super().update(part, int(done), total)

    def say(self, text: str, *, public: bool = False) -> None:
        if public:
            super().say(text)
        else:
            self._log(text.strip())


def emit(document: dict[str, Any]) -> None:
    """Print an event as a JSON line on stdout."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def say(text: str, style: str = "") -> None:
    """Print a line on stderr, with unprintable characters replaced."""
    stderr.print(printable(text), style=style or None, markup=False)


class Line(NamedTuple):
    """A line of a command's output on stderr."""

    text: str
    style: str = ""


class Table(NamedTuple):
    """A table of a command's output on stderr; None draws a line."""

    title: str
    headings: Sequence[str]
    rows: Iterable[Sequence[object] | None]


Lines = Iterable[str | Line | Table]
"""A command's output in order; plain texts go to stdout, for other programs."""

_WIDEST = 120
"""Characters of a table on a narrower terminal."""
MOST_COLUMNS = 12
"""Sites shown as columns; more are shown as rows."""


def render(lines: Lines) -> None:
    """Print a command's output."""
    for line in lines:
        if isinstance(line, Line):
            say(*line)
        elif isinstance(line, Table):
            _print_table(line)
        else:
            print(line, flush=True)


def by_site(title: str, corner: str, sites: Sequence[str], lines: Iterable[Sequence[object] | None]) -> Table:
    """Return a table of numbers by site: sites as columns, or as rows where they are many.

    Each line is a name and a number per site; None draws a line. `corner` is the heading of the names.
    """
    if len(sites) <= MOST_COLUMNS:
        return Table(title, [corner, *sites], lines)
    told = [line for line in lines if line]
    rows = [[site, *(line[k] for line in told)] for k, site in enumerate(sites, 1)]
    return Table(title, ["site", *(str(line[0]) for line in told)], rows)


def _print_table(table: Table) -> None:
    printed = rich.table.Table(title=escape(printable(table.title)), title_justify="left")
    for k, heading in enumerate(table.headings):
        printed.add_column(escape(printable(heading)), justify="right" if k else "left", no_wrap=k > 0)
    for row in table.rows:
        if row is None:
            printed.add_section()
        else:
            printed.add_row(*(escape(printable(str(cell))) for cell in row))
    wide = Console(stderr=True, highlight=False, emoji=False, width=max(stderr.width, _WIDEST))
    wide.print(printed)  # a narrow terminal cuts no number off


_WORDS: dict[type[BaseException], str] = {
    MemoryError: "it needs more memory than there is",
    RecursionError: "it is nested too deeply",
    OverflowError: "a number in it is too large",
}


def reason_of(error: BaseException, place: Path | None = None) -> str:
    """Return an error in one line: the message of a WsiFlError, else with its type.

    With a place that was written to, a full disk is reported first.
    """
    if place is not None:
        try:
            raise_if_full(error, place)
        except DiskFull as full:
            error = full
    if isinstance(error, WsiFlError):
        return one_line(error)
    known = next((words for kind, words in _WORDS.items() if isinstance(error, kind)), None)
    return known or f"{type(error).__name__}: {one_line(error)}"


_MOST_PLACES = 5


def partly(unread: Sequence[tuple[int, int, str]], n: int) -> str | None:
    """Return a line on the unread patches (x, y, reason) of n; None when all were read.

    Example:
        >>> unread_note([(0, 512, "cut short")], 9)
        '1 of 9 patches excluded, at level-0 pixel (0, 512): cut short'
    """
    if not unread:
        return None
    places = ", ".join(f"({x}, {y})" for x, y, _ in unread[:_MOST_PLACES])
    more = f" and {len(unread) - _MOST_PLACES} more" if len(unread) > _MOST_PLACES else ""
    return f"{len(unread)} of {n} patches excluded, at level-0 pixel {places}{more}: {unread[0][2]}"


def speed_lines(rows: Sequence[dict[str, Any]]) -> Lines:
    """Yield the encoding speed of each site with encoded patches."""
    for row in rows:
        if row["patches_per_second"]:
            spent = ", ".join(f"{key} {seconds:.1f} s" for key, seconds in row["spent"].items())
            speed = f"{row['patches_per_second']:.1f} patches/s, {row['slides_per_second']:.2f} slides/s"
            yield Line(f"  {row['site']}: {speed} ({spent}, partly at once)")
