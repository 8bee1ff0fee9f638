"""Rows of studies, and the tables of their pages: what stands between `<!-- rows: NAME -->` and `<!-- end -->`.

A study appends its rows to a CSV, with their date and commit; `fill_page` puts the tables of these rows into a page. A
test renders the rows again and compares.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

Row = Mapping[str, str]
NO_ROWS = "No rows yet."
"""In place of a table."""


Work = Callable[[argparse.Namespace], None]


def build_parser(
    description: str | None, rows: Path, run: Work, show: Work
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of a study's commands `run` and `show`, and that of `run` for more options.

    The function of the command given is `work` of its arguments.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    parsers = {work: commands.add_parser(name) for name, work in (("run", run), ("show", show))}
    for work, command in parsers.items():
        command.set_defaults(work=work)
        command.add_argument("--rows", type=Path, default=rows)
    parsers[run].add_argument("--commit", help="of the code, where this is no checkout")
    parsers[show].add_argument("--page", type=Path)
    return parser, parsers[run]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV; none without the file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: Sequence[Mapping[str, object]], key: Sequence[str]) -> None:
    """Append rows to a CSV in place of those with the same key; the file is replaced as a whole, or stays."""
    keys = {tuple(str(row[name]) for name in key) for row in rows}
    others = [row for row in read_rows(path) if tuple(row[name] for name in key) not in keys]
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows([*others, *rows])
    partial.replace(path)


def describe_origin(commit: str | None = None) -> dict[str, str]:
    """Return the date and the commit of a row; without one given, that of this checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = commit or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": found}


def describe_rows(rows: Sequence[Row]) -> str:
    """Return a sentence on the dates and commits of rows."""
    dates, commits = (sorted({row[key] for row in rows}) for key in ("date", "commit"))
    period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Rows of {period}, commit {', '.join(commits)}."


def render_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows])


def fill_page(text: str, tables: Mapping[str, str]) -> str:
    """Return a page's text with the tables between their markers; ValueError for a table without one."""
    for name, table in tables.items():
        start, end = re.escape(f"<!-- rows: {name} -->"), re.escape("<!-- end -->")
        body = f"<!-- rows: {name} -->\n\n{table}\n\n<!-- end -->"
        text, n_found = re.subn(rf"{start}.*?{end}", lambda _, body=body: body, text, count=1, flags=re.S)
        if not n_found:
            raise ValueError(f"the page has no <!-- rows: {name} -->")
    return text
