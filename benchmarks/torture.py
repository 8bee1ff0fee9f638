"""An hour of torture: processes killed at random moments, bits flipped in all files, malformed input of every kind.

python benchmarks/torture.py --minutes 60 --seed 1 --out torture
python benchmarks/torture.py --only flip:17 --out torture

Attempts of the three kinds take turns. After each the counts are in `OUT/counts.json`; a study that failed is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attacks.flips import attack as flip
from attacks.kills import attack as kill
from attacks.malformed import attack as malform
from attacks.result import Result
from attacks.running import import_all
from attacks.studies import make

Attack = Callable[[int, Path], Result]
ATTACKS: dict[str, Attack] = {"kill": kill, "flip": flip, "malformed": malform}
SHARES = {"kill": 1, "flip": 4, "malformed": 14}
"""Attempts of each kind in a turn."""


def counts(results: list[Result], *, seed: int, seconds: float) -> dict[str, Any]:
    """Return how often each kind ended how, and every failure."""
    return {
        "seed": seed,
        "seconds": round(seconds),
        "attempts": dict(Counter(one.kind for one in results)),
        "kills": sum(one.kills for one in results),
        "ends": {kind: dict(Counter(one.end for one in results if one.kind == kind)) for kind in ATTACKS},
        "longest_s": round(max((one.seconds for one in results), default=0.0), 1),
        "most_bytes": max((one.n_bytes for one in results), default=0),
        "failures": [asdict(one) for one in results if one.end == "failed"],
    }


def torture(
    folder: Path, *, seed: int, seconds: float = float("inf"), turns: int | None = None, shares: dict[str, int] = SHARES
) -> dict[str, Any]:
    """Attack until the time or the turns are over; return the counts.

    Args:
        folder: for studies, and for `counts.json`.
        seed: of the first attempt of each kind; the next ones follow.
    """
    began, results, turn = time.monotonic(), list[Result](), 0
    if not (folder / "bare").exists():
        make(folder)
    number = dict.fromkeys(ATTACKS, 0)
    document = counts(results, seed=seed, seconds=0)
    while (turns is None or turn < turns) and time.monotonic() - began < seconds:
        turn += 1
        for kind, share in shares.items():
            for _ in range(share):
                results.append(ATTACKS[kind](seed * 1_000_000 + number[kind], folder))
                number[kind] += 1
                if results[-1].end == "failed":
                    print(
                        f"{kind}:{results[-1].seed} {results[-1].what}: {results[-1].told}", file=sys.stderr, flush=True
                    )
            document = counts(results, seed=seed, seconds=time.monotonic() - began)
            partial = folder / "counts.json.partial"
            partial.write_text(json.dumps(document, indent=2) + "\n")
            partial.rename(folder / "counts.json")
        if turn % 10 == 0:
            print(f"{document['seconds']} s: {document['attempts']}", file=sys.stderr, flush=True)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=None, help="end after so many turns")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)))
    parser.add_argument("--out", type=Path, default=None, help="default: a folder that is removed")
    parser.add_argument("--only", metavar="KIND:SEED", help="one attempt once more")
    args = parser.parse_args()
    import_all()
    with tempfile.TemporaryDirectory() as passing:
        folder = (args.out or Path(passing)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_STATE_HOME"] = str(folder / "user")
        if args.only:
            if not (folder / "bare").exists():
                make(folder)
            kind, seed = args.only.split(":")
            print(json.dumps(asdict(ATTACKS[kind](int(seed), folder)), indent=2))
            return
        print(f"seed {args.seed}", file=sys.stderr)
        document = torture(folder, seed=args.seed, seconds=60 * args.minutes, turns=args.turns)
        print(json.dumps(document, indent=2))
        sys.exit(bool(document["failures"]))


if __name__ == "__main__":
    main()
