"""Console output on stderr: progress bars or lines, messages, tables, failures in one line."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import rich.table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from wsi_fl.system.files import raise_if_full
from wsi_fl.system.machine import count_ranks
from wsi_fl.types import DiskFull, WsiFlError, make_printable, single_line

_LINE_EVERY_S = 5.0
_MAX_SHOWN_PARTS = 12
"""Parts with a note in a line of progress."""
_EVENT_EVERY_S = 0.3

stderr = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


class Watcher(Protocol):
    """Receives the progress of each part of a long job."""

    def update(self, part: str, done: float, total: float, note: str = "") -> None: ...

    def print_message(self, text: str, *, public: bool = False) -> None:
        """Print a message; `public` where it depends only on data shared by all sites."""
        ...


class SilentProgress:
    """No progress; messages go to stderr.

    Args:
        write_log: the local log of a real hospital, for all messages that are not public.
    """

    def __init__(self, write_log: Callable[[str], None] | None = None) -> None:
        self._write_log = write_log

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        pass

    def print_message(self, text: str, *, public: bool = False) -> None:
        if self._write_log is None or public:
            print_message(text, "yellow")
        else:
            self._write_log(text.strip())


class NestedProgress:
    """Progress of one of n equal works as a part of all, so that it never goes back."""

    def __init__(self, watcher: Watcher, n_before: int, n_parts: int) -> None:
        self._watcher, self._n_before, self._n_parts = watcher, n_before, n_parts

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        self._watcher.update(part, self._n_before * total + min(done, total), self._n_parts * total, note)

    def print_message(self, text: str, *, public: bool = False) -> None:
        self._watcher.print_message(text, public=public)


class ProgressBars(SilentProgress):
    """One bar per part on a terminal; elsewhere one line over all parts every five seconds.

    Args:
        preparation: what is done before the first update.
    """

    def __init__(self, title: str, preparation: str = "") -> None:
        super().__init__()
        self.title = title
        self._preparation = f" ({preparation})" if preparation else ""
        self._is_live = stderr.is_terminal
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
        self._starting_points: dict[str, tuple[float, float]] = {}
        """Progress and time of each part at its first update; a resumed job starts above 0."""
        self._start_time = self._printed_time = self._progress_time = time.monotonic()
        self._end_event = threading.Event()

    def __enter__(self) -> ProgressBars:
        if self._is_live:
            self._bars.start()
        elif count_ranks() is None:
            threading.Thread(target=self._print_repeatedly, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_event.set()
        if self._is_live:
            self._bars.stop()

    def _print_repeatedly(self) -> None:
        """Print the progress every few seconds, also without updates."""
        while not self._end_event.wait(_LINE_EVERY_S):
            if time.monotonic() - self._printed_time >= _LINE_EVERY_S / 2:
                self._print_progress()

    def _print_progress(self) -> None:
        self._printed_time = time.monotonic()
        if self._state or count_ranks() is None:
            print_message(self._format_progress())

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        part, note = make_printable(part), make_printable(note)
        seconds = time.monotonic()
        self._starting_points.setdefault(part, (done, seconds))
        if done != self._state.get(part, (None,))[0]:
            self._progress_time = seconds
        self._state[part] = (done, total, note)
        if self._is_live:
            if part not in self._tasks:
                self._tasks[part] = self._bars.add_task(part, total=total, note=note)
            self._bars.update(self._tasks[part], completed=done, total=total, note=note)
        elif time.monotonic() - self._printed_time >= _LINE_EVERY_S:
            self._print_progress()

    def _format_progress(self) -> str:
        state, elapsed = self._state.copy(), time.monotonic() - self._start_time
        if not state:
            return f"{self.title}: preparing{self._preparation}, {elapsed:.0f} s so far"
        done = sum(min(d, t) for d, t, _ in state.values())
        total = sum(t for _, t, _ in state.values())
        share = done / total if total else 0.0
        progress = done - sum(d for d, _ in self._starting_points.values())
        # at the speed up to the last step, less the time since
        duration = self._progress_time - min(t for _, t in self._starting_points.values())
        seconds = (
            (total - done) / progress * duration - (time.monotonic() - self._progress_time) if progress > 0 else 0.0
        )
        remaining = (
            f", about {seconds:.0f} s left" if share > 0.02 and seconds > 0 and duration >= _LINE_EVERY_S else ""
        )
        remaining = ", finishing" if share >= 1 else remaining
        notes = ", ".join(f"{part} {note}" for part, (_, _, note) in [*state.items()][:_MAX_SHOWN_PARTS] if note)
        more = f", and {len(state) - _MAX_SHOWN_PARTS} more" if len(state) > _MAX_SHOWN_PARTS else ""
        return f"{self.title}: {share:.0%}{remaining}" + (f" ({notes}{more})" if notes else "")


class JsonEvents:
    """Progress as JSON lines on stdout for the owner, the parent process with the bars.

    Args:
        owner: its process id.
        write_log: the local log of a real hospital, for all messages that are not public; then the events are its name
            and completed rounds, nothing derived from records.
    """

    def __init__(self, owner: int | None = None, write_log: Callable[[str], None] | None = None) -> None:
        self._emit_times: dict[str, float] = {}
        self._owner, self._write_log = owner, write_log

    def update(self, part: str, done: float, total: float, note: str = "") -> None:
        if self._write_log is not None:
            done, note = int(done), ""
        seconds = time.monotonic()
        if done < total and seconds - self._emit_times.get(part, 0.0) < _EVENT_EVERY_S:
            return
        self._emit_times[part] = seconds
        self.check_owner()
        emit_event({"part": part, "done": done, "total": total, "note": note})

    def print_message(self, text: str, *, public: bool = False) -> None:
        if self._write_log is None or public:
            emit_event({"say": text})
        else:
            self._write_log(text.strip())

    def check_owner(self) -> None:
        """Raise WsiFlError when the owner has ended."""
        if self._owner is None:
            return
        try:
            os.kill(self._owner, 0)
        except ProcessLookupError:
            raise WsiFlError("the process that started this one is gone") from None


def emit_event(document: Mapping[str, object]) -> None:
    """Print an event as a JSON line on stdout."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def print_message(text: str, style: str = "") -> None:
    """Print a line on stderr, with unprintable characters replaced."""
    stderr.print(make_printable(text), style=style or None, markup=False)


class TextLine(NamedTuple):
    """A line of a command's output on stderr."""

    text: str
    style: str = ""


class TextTable(NamedTuple):
    """A table of a command's output on stderr; None draws a line."""

    title: str
    headings: Sequence[str]
    rows: Iterable[Sequence[object] | None]


Lines = Iterable[str | TextLine | TextTable]
"""A command's output in order; plain texts go to stdout, for other programs."""

_MIN_TABLE_WIDTH = 120
"""Characters of a table on a narrower terminal."""
MAX_SITE_COLUMNS = 12
"""Sites shown as columns; more are shown as rows."""


def print_lines(lines: Lines) -> None:
    """Print a command's output."""
    for line in lines:
        if isinstance(line, TextLine):
            print_message(*line)
        elif isinstance(line, TextTable):
            _print_table(line)
        else:
            print(line, flush=True)


def build_site_table(
    title: str, corner: str, sites: Sequence[str], lines: Iterable[Sequence[object] | None]
) -> TextTable:
    """Return a table of numbers by site: sites as columns, or as rows where they are many.

    Each line is a name and a number per site; None draws a line. `corner` is the heading of the names.
    """
    if len(sites) <= MAX_SITE_COLUMNS:
        return TextTable(title, [corner, *sites], lines)
    columns = [line for line in lines if line]
    rows = [[site, *(line[k] for line in columns)] for k, site in enumerate(sites, 1)]
    return TextTable(title, ["site", *(str(line[0]) for line in columns)], rows)


def _print_table(table: TextTable) -> None:
    table_view = rich.table.Table(title=escape(make_printable(table.title)), title_justify="left")
    for k, heading in enumerate(table.headings):
        table_view.add_column(escape(make_printable(heading)), justify="right" if k else "left", no_wrap=k > 0)
    for row in table.rows:
        if row is None:
            table_view.add_section()
        else:
            table_view.add_row(*(escape(make_printable(str(cell))) for cell in row))
    console = Console(stderr=True, highlight=False, emoji=False, width=max(stderr.width, _MIN_TABLE_WIDTH))
    console.print(table_view)  # a narrow terminal cuts no number off


_ERROR_TEXTS: dict[type[BaseException], str] = {
    MemoryError: "it needs more memory than there is",
    RecursionError: "it is nested too deeply",
    OverflowError: "a number in it is too large",
}


def describe_failure(error: BaseException, place: Path | None = None) -> str:
    """Return an error in one line: the message of a WsiFlError, else with its type.

    With a place that was written to, a full disk is reported first.
    """
    if place is not None:
        try:
            raise_if_full(error, place)
        except DiskFull as full:
            error = full
    if isinstance(error, WsiFlError):
        return single_line(error)
    text = next((error_text for kind, error_text in _ERROR_TEXTS.items() if isinstance(error, kind)), None)
    return text or f"{type(error).__name__}: {single_line(error)}"


_MAX_SHOWN_PLACES = 5


def describe_unread_patches(unread: Sequence[tuple[int, int, str]], n: int) -> str | None:
    """Return a line on the unread patches (x, y, reason) of n; None when all were read.

    Example:
        >>> describe_unread_patches([(0, 512, "cut short")], 9)
        '1 of 9 patches excluded, at level-0 pixel (0, 512): cut short'
    """
    if not unread:
        return None
    places = ", ".join(f"({x}, {y})" for x, y, _ in unread[:_MAX_SHOWN_PLACES])
    more = f" and {len(unread) - _MAX_SHOWN_PLACES} more" if len(unread) > _MAX_SHOWN_PLACES else ""
    return f"{len(unread)} of {n} patches excluded, at level-0 pixel {places}{more}: {unread[0][2]}"


def render_speed_lines(rows: Sequence[dict[str, Any]]) -> Lines:
    """Yield the encoding speed of each site with encoded patches."""
    for row in rows:
        if row["patches_per_second"]:
            spent = ", ".join(f"{key} {seconds:.1f} s" for key, seconds in row["spent"].items())
            speed = f"{row['patches_per_second']:.1f} patches/s, {row['slides_per_second']:.2f} slides/s"
            yield TextLine(f"  {row['site']}: {speed} ({spent}, partly at once)")
