"""SIGKILL of a command and all its processes at a random moment; afterwards its result must be that of a calm run."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

from attacks.result import Result
from attacks.running import Ended, run
from attacks.studies import ORDER, STAGES, copied, explained, outcome, prepared

_MOST_IN_A_ROW = 3
_SECONDS = 600.0
_NUMBER = re.compile(r"^runs/\d+-")


def attack(seed: int, folder: Path) -> Result:
    """Kill one stage up to three times in a row and start the same command again each time.

    Args:
        folder: of the prepared studies, and of the one that is hurt.
    """
    rng = random.Random(seed)
    stage = rng.choice(list(STAGES))
    before = prepared(folder, ORDER[stage])
    study = copied(before, folder / f"kill {seed}")
    calm, seconds = reference(folder, stage)
    command, kills, told = STAGES[stage], 0, ""
    for _ in range(rng.randint(1, _MOST_IN_A_ROW)):
        ended = _killed(command, study, rng.uniform(0, seconds))
        if not ended.killed:
            break
        kills += 1
    else:
        ended = run(command, study, limit_s=_SECONDS)
    what = f"{stage}, killed {kills} times"
    if ended.code or ended.wrong():
        told = ended.wrong() or f"does not go on: {explained(ended)}"
    elif differences := different(*(comparable(stage, one) for one in (calm, outcome(study)))):
        told = f"different: {', '.join(differences[:5])}"
    if not told:
        shutil.rmtree(study)
    return Result("kill", seed, what, "failed" if told else "same", told, kills=kills)


def reference(folder: Path, stage: str) -> tuple[dict[str, str], float]:
    """Return what a calm run of a stage makes, and its seconds; it is run once per folder."""
    known = _KNOWN.get((folder, stage))
    if known is None:
        study = copied(prepared(folder, ORDER[stage]), folder / f"calm {stage}")
        ended = run(STAGES[stage], study, limit_s=_SECONDS)
        if ended.code:
            raise RuntimeError(f"{stage} failed undisturbed: {ended.told}")
        known = _KNOWN[folder, stage] = outcome(study), ended.seconds
    return known


def comparable(stage: str, made: dict[str, str]) -> dict[str, str]:
    """Return what must be the same: under noise the rounds, what they cost and which files there are.

    A run that was killed before it was known what it is leaves its number behind, and nothing else.
    """
    made = {_NUMBER.sub("runs/", name): digest for name, digest in made.items()}
    if stage != "train":
        return made
    return {name: _cost(digest) if name.startswith("runs/") else digest for name, digest in made.items()}


def _cost(digest: str) -> str:
    """The rounds and what they cost in the end: one that is redone is told what later ones have paid already."""
    if not digest.startswith("["):
        return "there"
    lines = json.loads(digest)
    return json.dumps([[[line["round"], line["bytes"]] for line in lines], lines[-1]["epsilon"] if lines else None])


_KNOWN: dict[tuple[Path, str], tuple[dict[str, str], float]] = {}


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the names of what differs, is missing, or is there beside it."""
    return sorted(name for name in one | other if one.get(name) != other.get(name))


def _killed(command: tuple[str, ...], study: Path, after: float) -> Ended:
    return run(command, study, kill_after=lambda passed: passed > after, limit_s=_SECONDS)
