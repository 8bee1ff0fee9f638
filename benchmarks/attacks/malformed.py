"""Malformed input: every file that people or other programs write, and every command line."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attacks import mutations
from attacks.given import given
from attacks.mutations import ODD
from attacks.result import Result
from attacks.running import run
from attacks.studies import LOCAL, copied, explained

Words = tuple[str, ...]
Case = Callable[[Path, random.Random], Words]
"""Hurts something in a study and returns the command that reads it."""
_DRY = ("train", "--method", "proxyfl", *LOCAL, "--dry-run")
_BAGS = ("--set", "train.data=mosaics", "--set", "model.private=abmil", "--set", "model.proxy=mean_head")


def attack(seed: int, folder: Path) -> Result:
    """Give one malformed input. It is well where it is used or refused in one line, soon and in little memory."""
    rng = random.Random(seed)
    name = rng.choices(list(CASES), [weight for _, weight in CASES.values()])[0]
    study = copied(given(folder), folder / f"malformed {seed}")
    command = CASES[name][0](study, rng)
    ended = run(command, study)
    told = ended.wrong()
    shown = " ".join(command)[:300]
    if told:
        (study / "what.json").write_text(json.dumps([command, ended.said[-4000:], ended.told[-4000:]], indent=2))
    else:
        shutil.rmtree(study)
    end = "failed" if told else "refused" if ended.code else "used"
    what = f"{name}: wsi-fl {shown!r}" + (f" ({explained(ended)[:200]})" if told else "")
    return Result("malformed", seed, what, end, told, seconds=ended.seconds, n_bytes=ended.n_bytes)


def _file(pattern: str, change: Callable[[bytes, random.Random], bytes], *commands: Words) -> Case:
    """A case in which one file of a pattern is changed."""

    def case(study: Path, rng: random.Random) -> Words:
        path = rng.choice(sorted(one for one in study.glob(pattern) if one.is_file()))
        path.write_bytes(change(path.read_bytes(), rng))
        return rng.choice(commands)

    return case


def _stored(pattern: str, *commands: Words) -> Case:
    """A case in which an HDF5 file says other things than it should."""

    def case(study: Path, rng: random.Random) -> Words:
        path = rng.choice(sorted(study.glob(pattern)))
        if rng.random() < 0.3:
            path.write_bytes(mutations.blob(path.read_bytes(), rng))
        else:
            mutations.hdf5(path, rng)
        return rng.choice(commands)

    return case


def _setting(_: Path, rng: random.Random) -> Words:
    """One or two settings of the pipeline with odd values."""
    keys = _keys()
    given = [f"{rng.choice(keys)}={_value(rng)}" for _ in range(rng.randint(1, 2))]
    command = rng.choice((_DRY, ("tile", "--site", "C1"), ("features", "--site", "C1")))
    return (*command, *(word for one in given for word in ("--set", one)))


@functools.cache
def _keys() -> list[str]:
    """All keys of a pipeline, with their sections."""
    from wsi_fl.study.reference import find_keys

    return [row["key"] for row in find_keys() if not row["key"].startswith("site.")]


def _value(rng: random.Random) -> str:
    number = rng.choice((0, 1, 2, 3, 10, 0.5, 1e-12, -3, 10**6, 2**63))
    return rng.choice((rng.choice(ODD), str(number), f"[{number}]", f'"{rng.choice(ODD)}"', "true", "{a=1}"))


def _command_line(study: Path, rng: random.Random) -> Words:
    """Any command with any of its options and odd values, but for those that serve or demonstrate."""
    words, parameters = rng.choice(_commands())
    line = list(words)
    for one in parameters:
        wanted = one.required or rng.random() < 0.35
        if not wanted:
            continue
        name = [] if one.param_type_name == "argument" else [one.opts[-1]]
        if getattr(one, "is_flag", False):
            line += name
            continue
        line += [*name, _word(study, one.opts[-1], rng)]
    return tuple(word.replace("\x00", "") for word in line)


def _word(study: Path, option: str, rng: random.Random) -> str:
    """A value that may be right for the option, or odd."""
    files = ("data/set.npz", "generic/slides.csv", "fed/sites/C1", "sites/C1.toml", "new")
    right = {
        "--site": ("C1", "C2", "G"),
        "--set": ("train.rounds=1", "privacy.enabled=false"),
        "--backend": ("local",),
        "run": ("1",),
        "--resume": ("1",),
        "--generator": ("gan", "ddpm"),
        "--method": ("proxyfl", "regular", "oneshot", "fedavg"),
        "--format": ("clam", "trident", "onnx"),
        "--pipeline": ("p",),
        "key": tuple(_keys()),
        "--kit": tuple(path.relative_to(study).as_posix() for path in sorted(study.glob("fed/*/*"))),
    }.get(option, files)
    return rng.choice((rng.choice(right or files), rng.choice(right or files), rng.choice(ODD), _value(rng)))


_NOT = {"demo", "rank", "view", "federation demo", "federation start", "federation submit", "federation status"}
_NOT |= {"federation abort", "federation check", "doctor"}
"""Commands that serve, wait for others, or take minutes."""


@functools.cache
def _commands() -> list[tuple[Words, Sequence[Any]]]:
    """Every command with its parameters."""
    import typer

    from wsi_fl.cli.main import app

    def walk(command: Any, words: Words) -> list[tuple[Words, Sequence[Any]]]:
        if hasattr(command, "commands"):
            return [one for name, sub in command.commands.items() for one in walk(sub, (*words, name))]
        return [] if " ".join(words) in _NOT else [(words, [one for one in command.params if one.name != "help"])]

    return walk(typer.main.get_command(app), ())


def _import(study: Path, rng: random.Random) -> Words:
    form = rng.choice(("clam", "trident", "stamp"))
    folder = study / "foreign" / form
    files = sorted(one for one in folder.rglob("*") if one.suffix in {".h5", ".csv", ".pt"})
    path = rng.choice(files)
    if path.suffix == ".h5" and rng.random() < 0.6:
        mutations.hdf5(path, rng)
    else:
        change = mutations.text if path.suffix == ".csv" else mutations.blob
        path.write_bytes(change(path.read_bytes(), rng))
    said = ("--encoder", "x", "--patch-px", "64", "--mpp", "2.0") if form == "clam" else ()
    return (
        "import",
        "--site",
        "C1",
        "--from",
        f"foreign/{form}",
        "--format",
        form,
        "--labels",
        f"foreign/{form}/C1.csv",
        *said,
    )


def _target(study: Path, rng: random.Random) -> Words:
    path = study / "tables" / "all.csv"
    path.write_bytes(mutations.text(path.read_bytes(), rng))
    asked = rng.choice(
        (
            ("target.time=months", "target.event=dead", "target.intervals=[2,4,6]"),
            ("target.column=grade", 'target.classes=["low","high"]'),
            ("target.column=months", "target.range=[0,20]"),
        )
    )
    return (*_DRY, *_BAGS, "--set", 'sites=["C1","C2"]', *(word for one in asked for word in ("--set", one)))


def _partition(study: Path, rng: random.Random) -> Words:
    path = rng.choice((study / "data/set.npz", study / "data/set.h5", study / "data/images/0/0.png"))
    if path.suffix == ".h5" and rng.random() < 0.6:
        mutations.hdf5(path, rng)
    else:
        path.write_bytes(mutations.blob(path.read_bytes(), rng))
    given = "data/images" if path.suffix == ".png" else path.relative_to(study).as_posix()
    return ("partition", given, "--sites", "2", "--prefix", "Z")


_RESUME = ("train", "--resume", "1", *LOCAL)
_PREDICT = ("predict", "1", "--site", "C1", "--slide", "generic/patient_000_node_0.tif")
_SUMS = ("train", "--method", "oneshot", *LOCAL, "--set", "train.data=features", "--set", "train.from_released=true")
_TILE, _READ = ("tile", "--site", "C1"), ("train", "--method", "regular", *LOCAL, "--set", "train.rounds=1")
_TWO = ("--set", 'sites=["C1","C2"]')
CASES: dict[str, tuple[Case, int]] = {
    "pipeline": (_file("pipelines/p.toml", mutations.text, _TILE, _DRY, ("features", "--site", "C1")), 10),
    "setting": (_setting, 12),
    "site file": (_file("sites/C1.toml", mutations.text, _TILE, _DRY), 8),
    "stages": (_file("archive/stages.csv", mutations.text, _TILE), 6),
    "slides table": (_file("generic/slides.csv", mutations.text, ("tile", "--site", "G")), 8),
    "ASAP outlines": (_file("archive/annotations/*.xml", mutations.text, _TILE), 7),
    "GeoJSON outlines": (_file("generic/*.geojson", mutations.text, ("tile", "--site", "G")), 8),
    "slide": (_file("archive/training/center_0/*.tif", mutations.blob, _TILE, ("mosaic", "--site", "C1")), 8),
    "slide to predict": (
        _file("generic/*.tif", mutations.blob, _PREDICT),
        3,
    ),
    "store": (_stored("stores/C1/patches.h5", ("check", "--site", "C1"), (*_READ, *_TWO), ("report", "1")), 6),
    "shard": (_stored("stores/C1/slides/*.h5", ("check", "--site", "C1"), (*_READ, *_TWO), _TILE), 6),
    "features": (
        _stored("stores/C1/features.h5", ("check", "--site", "C1"), (*_DRY, *_TWO, "--set", "train.data=features")),
        4,
    ),
    "mosaics": (_stored("stores/C1/mosaic*/*.h5", ("check", "--site", "C1"), ("mosaic", "--site", "C1")), 4),
    "mosaic store": (_stored("stores/C1/mosaic.h5", ("check", "--site", "C1"), (*_DRY, *_TWO, *_BAGS)), 4),
    "data set": (_partition, 8),
    "weights": (_file("weights/*", mutations.blob, ("features", "--site", "C1"), ("mosaic", "--site", "C1")), 4),
    "ledger": (_file("ledgers/*.jsonl", mutations.text, (*_READ, *_TWO), ("report", "1"), _RESUME), 7),
    "run": (_file("runs/*/*.json", mutations.text, ("report", "1"), ("evaluate", "1"), _RESUME), 8),
    "site of a run": (
        _file("runs/*/sites/*/*", mutations.text, ("report", "1"), ("evaluate", "1"), ("audit", "1"), _RESUME),
        6,
    ),
    "checkpoint": (_file("runs/*/sites/*/state/*", mutations.blob, _RESUME), 2),
    "generator": (
        _file("generators/C1/*.json*", mutations.text, ("synthesize", "sample", "--site", "C1", "--n-per-class", "1")),
        3,
    ),
    "released sums": (
        _file(
            "statistics/*.safetensors",
            mutations.blob,
            (*_SUMS, *_TWO),
        ),
        3,
    ),
    "import": (_import, 12),
    "target": (_target, 8),
    "kit": (
        _file(
            "fed/**/*.json",
            mutations.text,
            ("federation", "plan", "--method", "fedavg", "--kit", "fed/sites/C1"),
            ("federation", "dossier", "--site", "C1"),
        ),
        5,
    ),
    "command line": (_command_line, 40),
}  # fmt: skip
"""Name → (case, how often)."""
