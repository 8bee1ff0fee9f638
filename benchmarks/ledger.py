"""The ledger of a long run: CPU time of each call of a round, after more and more rounds.

python benchmarks/ledger.py --rounds 100 1000 3000 --folder /dev/shm

A simulated site has no budget; a real hospital's budget is checked in every round. The release is small, so that its
SHA-256 takes no time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from wsi_fl.privacy.accounting import Mechanism
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger

_ROUND = Mechanism(sigma=1.4, clip=0.7, sample_rate=0.25, steps=4)
_REPEATS = 5
_TERMS = {
    "simulated": PrivacyTerms(delta=1e-6, allow=("model",)),
    "real": PrivacyTerms(delta=1e-6, max_epsilon=1e9, lifetime=True, allow=("model",)),
}


def time_round(ledger: PrivacyLedger, round_: int) -> dict[str, float]:
    """Return the CPU milliseconds of the ledger's calls in a round."""
    starts = [time.process_time()]
    ledger.fits_budget(round_, _ROUND)
    starts.append(time.process_time())
    vector = np.full(10, round_, np.float32)
    sent = ledger.release(round_, vector, schema="", mechanism=_ROUND, content="model")
    starts.append(time.process_time())
    ledger.record_transmission(round_, sent.digest)
    starts.append(time.process_time())
    ledger.epsilon()
    starts.append(time.process_time())
    milliseconds = (np.diff(starts) * 1e3).tolist()
    return dict(zip(("fits_budget", "release", "transmission", "epsilon"), milliseconds, strict=True))


def time_rounds(folder: Path, terms: PrivacyTerms, n_rounds: list[int]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each number of rounds, and the median CPU milliseconds of the rounds that follow it."""
    ledger = PrivacyLedger(folder / "S1.jsonl", site="S1", run="benchmark", terms=terms)
    for n in sorted(n_rounds):
        while ledger.last_round() < n:
            time_round(ledger, ledger.last_round() + 1)
        rows = [time_round(ledger, ledger.last_round() + 1) for _ in range(_REPEATS)]
        yield n, {call: median(row[call] for row in rows) for call in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 100, 1000, 3000])
    parser.add_argument("--folder", type=Path, help="where ledgers are written, and deleted afterwards")
    arguments = parser.parse_args()
    for kind, terms in _TERMS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for n, calls in time_rounds(Path(folder), terms, arguments.rounds):
                parts = ", ".join(f"{call} {value:.2f}" for call, value in calls.items())
                print(f"{kind}, after {n} rounds: {sum(calls.values()):.2f} ms CPU ({parts})", flush=True)


if __name__ == "__main__":
    main()
