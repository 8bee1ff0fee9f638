"""The board: who takes part, how far they are, what came of it, and what is to be done next, by whom."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from wsi_fl import __version__
from wsi_fl.hospitals.board.facts import gather
from wsi_fl.hospitals.board.steps import Facts, Step, next_steps
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.learning.counts import Scores, results
from wsi_fl.report.between import section
from wsi_fl.report.figures import N_COLORS
from wsi_fl.report.fill import fill
from wsi_fl.report.words import known, number
from wsi_fl.stages.answers.between import between_lines
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_text

_Json = dict[str, Any]
_NOBODY_HERE = {
    "until": "the coordinator and its holder",
    "signed": "the coordinator and the hospital",
    "connected": "the coordinator",
    **dict.fromkeys(("version", "since", "round", "heard", "epsilon", "labels"), "the hospital"),
}
"""Who could know what nothing here says, by what is asked."""


def make_board(study: Study, *, kit: Path | None, out: Path | None, named: tuple[str, str]) -> _Json:
    """Return what is known here of a federation and what is to be done next, and write the page where one is asked for.

    Nothing is sent to any hospital. A server is asked who is connected, and a folder is listed.

    Args:
        kit: of whoever looks, a coordinator or a hospital; without it only files of the study are looked at.
        out: the page.
        named: kit and study as the commands of the steps name them.

    Raises:
        UsageError: when the kit is none.
    """
    facts, scores = gather(study, Kit.open(kit) if kit else None, named=named)
    document = document_of(facts, next_steps(facts), scores)
    if out is not None:
        write_text(out, render(document))
    return document


def document_of(facts: Facts, steps: list[Step], scores: Scores | None) -> _Json:
    """Return the board as JSON; None stands for what is not known here, and "unknown" says who could know it."""
    said: _Json = asdict(facts, dict_factory=lambda pairs: {key: _plain(value) for key, value in pairs})
    of_hospitals = [one for one in said["members"] if one["role"] == "hospital"]
    asked = {"epsilon": "spent"}
    unknown = [key for key in _NOBODY_HERE if any(one[asked.get(key, key)] is None for one in of_hospitals)]
    return said | {
        "wsi_fl": __version__,
        "next": [step._asdict() for step in steps],
        "unknown": {key: _NOBODY_HERE[key] for key in unknown},
        "scores": results(scores) if scores else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    return list(value) if isinstance(value, tuple) else value


def render(board: _Json) -> str:
    """Return one HTML document that needs nothing beside it.

    Args:
        board: as `wsi-fl federation board --json` prints it.
    """
    names = [one["name"] for one in board["members"] if one["role"] == "hospital"]
    many = len(names) > N_COLORS
    return fill(
        "board",
        {
            "b": board,
            "rows": _rows(board),
            "headings": _HEADINGS,
            "who_knows": _who_knows(board),
            "slots": {name: 0 if many else k for k, name in enumerate(names)},
            "between": section(board["scores"]),
            "many": many,
        },
        Path(__file__).parent,
    )


_HEADINGS = {
    "name": "who",
    "until": "certificate",
    "version": "version",
    "signed": "signed",
    "connected": "connected",
    "since": "since",
    "round": "round",
    "heard": "last heard",
    "epsilon": "ε spent",
    "labels": "labels",
}


def _rows(board: _Json) -> list[list[str]]:
    """The cells of every member, in the order of `_HEADINGS`; "" where it is nothing that one asks of a server."""
    return [_cells(one, board["plan"]) for one in board["members"]]


def _cells(one: _Json, plan: _Json | None) -> list[str]:
    hospital = one["role"] == "hospital"
    rounds = f" of {plan['rounds']}" if plan and one["round"] is not None else ""
    budget = "" if one["budget"] is None else f" of {one['budget']:g}"
    shown = [
        *(
            _yes(one["signed"]),
            _yes(one["connected"]),
            _when(one["since"]),
            f"{_or_dash(one['round'])}{rounds}",
        ),
        _when(one["heard"]),
        f"{number(one['spent'], 2)}{budget if known(one['spent']) else ''}",
        ", ".join(one["labels"] or ()) or "–",
    ]
    first = [one["name"], (one["until"] or "–")[:10], _or_dash(one["version"])]
    return first + (shown if hospital else [""] * len(shown))


def _who_knows(board: _Json) -> dict[str, list[str]]:
    """What is not known here, by who could know it."""
    found: dict[str, list[str]] = {}
    for key, who in board["unknown"].items():
        found.setdefault(who, []).append(_HEADINGS[key])
    return found


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def _when(text: str | None) -> str:
    return "–" if text is None else text[5:16].replace("T", " ")


def board_lines(board: _Json) -> Lines:
    """Show everybody, what came of the plan, and what is to be done next."""
    plan = board["plan"]
    about = f"plan {plan['sha256'][:8]}, {plan['method']}, {plan['rounds']} rounds" if plan else "no plan yet"
    yield Table(about, list(_HEADINGS.values())[:-1], [row[:-1] for row in _rows(board)])
    for one in board["members"]:
        if one["labels"]:
            yield Line(f"  {one['name']} has {', '.join(one['labels'])}")
    for who, keys in _who_knows(board).items():
        yield Line(f"  – is known by {who}: {', '.join(keys)}")
    if board["scores"]:
        yield from between_lines(board["scores"])
    for line in board["trouble"]:
        yield Line(f"  {line}", "yellow")
    yield Line("next:")
    for step in board["next"]:
        yield Line(
            f"  {step['who'] or 'you'}: {step['what']}{': ' if step['command'] else ''}{step['command']}"
        )
