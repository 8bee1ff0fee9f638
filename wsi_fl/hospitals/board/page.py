"""The board: who takes part, how far they are, what came of it, and what is to be done next, by whom."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from wsi_fl import __version__
from wsi_fl.hospitals.board.facts import gather
from wsi_fl.hospitals.board.steps import Facts, next_steps
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.learning.counts import results
from wsi_fl.report.between import section
from wsi_fl.report.figures import N_COLORS
from wsi_fl.report.fill import fill
from wsi_fl.report.words import number
from wsi_fl.stages.answers.evaluate import between_lines
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_text

_COORDINATOR, _BOTH, _HOSPITAL = "the coordinator", "the coordinator and the hospital", "the hospital"
_COLUMNS = {
    "until": ("certificate", _BOTH),
    "version": ("version", _HOSPITAL),
    "signed": ("signed", _BOTH),
    "connected": ("connected", _COORDINATOR),
    "since": ("since", _HOSPITAL),
    "round": ("round", _HOSPITAL),
    "heard": ("last heard", _HOSPITAL),
    "spent": ("ε spent", _HOSPITAL),
    "labels": ("labels", _HOSPITAL),
}
"""What is shown of each member: its heading, and who could know it where nothing here says it."""


def make_board(
    study: Study, *, kit: Path | None, out: Path | None = None, named: str = "."
) -> dict[str, Any]:
    """Return what is known here of a federation and what is to be done next, and write the page where one is asked for.

    Nothing is sent to any hospital. A server is asked who is connected, and a folder is listed.

    Args:
        kit: of whoever looks, a coordinator or a hospital; without it only files of the study are looked at.
        out: the page.
        named: the study, as the commands of the steps name it.

    Raises:
        UsageError: when the kit is none.
    """
    facts = gather(study, Kit.open(kit) if kit else None)
    facts.kit, facts.study = str(kit or facts.kit), named
    board = document_of(facts)
    if out is not None:
        write_text(out, render(board))
    return board


def document_of(facts: Facts) -> dict[str, Any]:
    """Return the board as JSON; None stands for what is not known here, and "unknown" says who could know it."""
    members = [_plain(asdict(one)) for one in facts.members.values()]
    unknown: dict[str, list[str]] = {}
    for key, (heading, who) in _COLUMNS.items():
        if any(one[key] is None for one in members if one["role"] == "hospital"):
            unknown.setdefault(who, []).append(heading)
    return _plain(vars(facts)) | {
        "wsi_fl": __version__,
        "members": members,
        "next": [step._asdict() for step in next_steps(facts)],
        "unknown": unknown,
        "scores": results(facts.scores) if facts.scores else None,
    }


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    times = {k: v.isoformat(timespec="seconds") for k, v in said.items() if isinstance(v, datetime)}
    return said | times | {k: list(v) for k, v in said.items() if isinstance(v, tuple)}


def render(board: dict[str, Any]) -> str:
    """Return one HTML document that needs nothing beside it.

    Args:
        board: as `wsi-fl federation board --json` prints it.
    """
    names = [one["name"] for one in board["members"] if one["role"] == "hospital"]
    many = len(names) > N_COLORS
    context = {
        "b": board,
        "headings": _headings(),
        "rows": [_cells(one, board["rounds"]) for one in board["members"]],
        "slots": {name: 0 if many else k for k, name in enumerate(names)},
        "between": section(board["scores"]),
        "many": many,
    }
    return fill("board", context, Path(__file__).parent)


def _headings() -> list[str]:
    return ["who", *(heading for heading, _ in _COLUMNS.values())]


def _cells(one: dict[str, Any], rounds: int) -> list[str]:
    """The row of a member: "–" for what is not known, "" for what nobody asks of a server or a coordinator."""
    shown = {key: "–" if one[key] is None else str(one[key]) for key in _COLUMNS}
    shown |= {key: ("no", "yes")[one[key]] for key in ("signed", "connected") if one[key] is not None}
    shown |= {key: one[key][5:16].replace("T", " ") for key in ("since", "heard") if one[key]}
    shown |= {"until": shown["until"][:10], "labels": ", ".join(one["labels"] or "–")}
    shown |= {"round": f"{one['round']} of {rounds}"} if one["round"] is not None else {}
    of = f" of {one['budget']:g}" if one["budget"] is not None else ""
    shown |= {"spent": f"{number(one['spent'], 2)}{of}"} if one["spent"] is not None else {}
    if one["role"] != "hospital":
        shown |= dict.fromkeys(list(_COLUMNS)[2:], "")
    return [one["name"], *shown.values()]


def board_lines(board: dict[str, Any]) -> Lines:
    """Show everybody, what came of the plan, and what is to be done next."""
    about = f"plan {board['sha256'][:8]}, {board['method']}, {board['rounds']} rounds"
    rows = [_cells(one, board["rounds"]) for one in board["members"]]
    yield Table(about if board["plan"] else "no plan yet", _headings()[:-1], [row[:-1] for row in rows])
    for row in rows:
        if row[-1] not in ("", "–"):
            yield Line(f"  {row[0]} has {row[-1]}")
    for who, what in board["unknown"].items():
        yield Line(f"  – is known by {who}: {', '.join(what)}")
    if board["scores"]:
        yield from between_lines(board["scores"])
    for line in board["trouble"]:
        yield Line(f"  {line}", "yellow")
    yield Line("next:")
    for step in board["next"]:
        yield Line(
            f"  {step['who'] or 'you'}: {step['what']}{': ' if step['command'] else ''}{step['command']}"
        )
