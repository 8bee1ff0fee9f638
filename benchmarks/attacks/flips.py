"""A bit flipped, 4 kB of zeros or a cut in any file of a finished study; then whatever reads it, and what mends it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from attacks.kills import different
from attacks.result import Result
from attacks.running import run
from attacks.studies import EVERYTHING, LOCAL, OPEN, copied, explained, outcome, prepared

_ZEROS = 4096
_MENDING = ("tile", "features", "mosaic")
"""Commands that make again what a store of theirs lost."""
_TRAIN = ("train", "--method", "fedavg", *LOCAL, *OPEN, "--set", "train.rounds=1")
_BAGS = ("--set", "train.data=mosaics", "--set", "model.private=deepset", "--set", "model.proxy=deepset")
_HEAD = ("--set", "train.data=features", "--set", "model.private=linear_head", "--set", "model.proxy=linear_head")

Command = tuple[str, ...]


def readers(name: str) -> tuple[Command, ...]:
    """Return the commands that read a file of the study, by its name in it."""
    room = name.split("/", maxsplit=1)[0]
    kind = "gan" if room == "generators" else "ddpm"
    generator = ("--site", "C1", "--generator", kind)
    checked = ("check", "--all")
    known: dict[str, tuple[Command, ...]] = {
        "archive": (("tile", "--all"), _TRAIN),
        "pipelines": (("tile", "--all"), _TRAIN),
        "sites": (("tile", "--all"), _TRAIN),
        "weights": (("features", "--all"), ("mosaic", "--all")),
        "generators": (
            checked,
            ("synthesize", "train", *generator),
            ("synthesize", "sample", *generator, "--n-per-class", "2", "--despite-failed-check"),
        ),
        "stores": (checked, _TRAIN, ("tile", "--all")),
    }
    known["denoisers"] = known["generators"][:2]
    if room == "stores" and ("mosaic" in name or "features" in name):
        of_mosaics = "mosaic" in name
        mended = ("mosaic" if of_mosaics else "features", "--all")
        return (checked, (*_TRAIN, *(_BAGS if of_mosaics else _HEAD)), mended)
    goes_on = ("train", "--resume", "1", *LOCAL)
    return known.get(room, (goes_on, ("evaluate", "1"), ("report", "1")))


def untellable(name: str, calm: Path) -> bool:
    """Return whether nothing could tell: people or other tools wrote it, or it is a protocol without a checksum.

    Args:
        calm: the file before it was hurt.
    """
    if name.startswith(("archive/", "pipelines/", "sites/", "weights/")):
        return True
    if name.endswith(".json"):
        return '"digest"' not in calm.read_text()
    return name.endswith((".csv", ".txt", ".log", ".jsonl", ".toml", ".html", ".png"))


def attack(seed: int, folder: Path) -> Result:
    """Hurt one file and give the commands that read it.

    It is well where each refuses in one line or has the result of the calm study, where `check` finds what no longer
    holds the same in a store, and where the command that made a store makes it again what it was.
    """
    rng = random.Random(seed)
    before = prepared(folder, EVERYTHING)
    study = copied(before, folder / f"flip {seed}")
    name = _drawn(study, rng)
    how = hurt(study / name, rng)
    spoilt = name.startswith("stores/") and name.endswith(".h5") and name in different(outcome(before), outcome(study))
    told, ends, seconds, most = "", [], 0.0, 0
    for command in readers(name):
        calm = result_of(folder, command)
        ended = run(command, study)
        seconds, most = max(seconds, ended.seconds), max(most, ended.n_bytes)
        mends = command[0] in _MENDING and name.startswith("stores/")
        changed = [one for one in different(calm, made_by(command, study)) if mends or one != name]
        if wrong := ended.wrong():
            told = wrong
        elif command[0] == "check" and spoilt and not ended.code:
            told = "finds no damage"
        elif mends and ended.code:
            told = f"does not mend it: {explained(ended)}"
        elif ended.code:
            ends.append("refused")
        elif changed:
            ends.append("untold")
            told = "" if untellable(name, before / name) else f"silently different: {', '.join(changed[:4])}"
        else:
            ends.append("harmless")
        if told:
            told = f"{' '.join(command)}: {told}"
            break
    end = "failed" if told else next((one for one in ("refused", "untold") if one in ends), "harmless")
    if not told:
        shutil.rmtree(study)
    return Result("flip", seed, f"{how} in {name}", end, told, seconds=seconds, n_bytes=most)


def _drawn(study: Path, rng: random.Random) -> str:
    """Draw a file; every kind is hurt as often as any other."""
    names = sorted(
        path.relative_to(study).as_posix()
        for path in study.rglob("*")
        if path.is_file() and path.stat().st_size and path.name != ".lock"
    )
    room = rng.choice(sorted({_room(name) for name in names}))
    return rng.choice([name for name in names if _room(name) == room])


def hurt(path: Path, rng: random.Random) -> str:
    """Change some bytes of a file, whose times stay, as they do where a disk forgets; return how, in words."""
    import os

    data, times = bytearray(path.read_bytes()), path.stat()
    at = rng.randrange(len(data))
    how = rng.choices(["bit", "zeros", "cut"], [6, 2, 1])[0]
    if how == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif how == "zeros":
        data[at : at + _ZEROS] = bytes(len(data[at : at + _ZEROS]))
    else:
        del data[at:]
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{how} at {at}"


def result_of(folder: Path, command: Command) -> dict[str, str]:
    """Return what a command makes of the calm study; it is run once per folder."""
    known = _KNOWN.get((folder, command))
    if known is None:
        study = copied(prepared(folder, EVERYTHING), folder / "calm flip")
        ended = run(command, study, limit_s=600)
        if ended.code:
            raise RuntimeError(f"{' '.join(command)} failed undisturbed: {explained(ended)}")
        known = _KNOWN[folder, command] = made_by(command, study)
    return known


_KNOWN: dict[tuple[Path, Command], dict[str, str]] = {}


def made_by(command: Command, study: Path) -> dict[str, str]:
    """Return what a command leaves of which it can be said that it must be the same: stores, new models, scores."""
    made = outcome(study)
    if command[0] == "check":
        return {}
    if command[0] == "train" and "--resume" not in command:
        return {name: digest for name, digest in made.items() if name.startswith("runs/00002")}
    if command[0] in {"train", "evaluate", "report"}:
        return {name: digest for name, digest in made.items() if name.startswith(("runs/", "ledgers/"))}
    return {name: digest for name, digest in made.items() if not name.startswith("runs/")}


def _room(name: str) -> str:
    """Return the kind of a file."""
    parts = name.split("/")
    return "/".join((*(part for part in parts[:-1] if not part.startswith(("C", "0"))), parts[-1].split(".")[-1]))
