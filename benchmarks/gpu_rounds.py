"""The paper's own command on one card: seconds a round and the share of time the card works, beside one rank alone.

    python benchmarks/gpu_rounds.py                  # a card: ten minutes at most
    python benchmarks/gpu_rounds.py --tiny           # any machine: the same steps on small patches

`wsi-fl train --method proxyfl --pipeline camelyon17` as it is: ResNet-18 with GroupNorm on 512-px patches, batches of
32, Algorithm 1, four ranks. Patches are noise, and fewer than the paper's 2710 a site, to which seconds are scaled: a
round is steps. The first round, which fills caches, does not count. "works" is the mean of what nvidia-smi calls
utilisation, the share of time in which a kernel of any rank ran. Weights and ε mean nothing here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PAPER_ROWS, BATCH = 2710, 32
"""Mean training patches of a site (Table 1), and the batch."""
_POLL_S, _RUN_S = 0.2, 270
"""Seconds between samples of the utilisation, and at most of a run: two runs and the patches take ten minutes."""
TINY = ("train.batch_size=8", "model.private=gn_cnn_small", "model.proxy=gn_cnn_small")


@dataclass(frozen=True)
class Rounds:
    """Rounds of so many ranks: seconds of one here and at the paper's size, and the share of time the card works."""

    ranks: int
    steps: int
    seconds: float
    paper_seconds: float
    works: float | None


def run_wsi_fl(*words: object, cwd: Path) -> None:
    """Run a command of the product; its error ends this script."""
    command = [sys.executable, "-m", "wsi_fl", *map(str, words)]
    done = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def write_patches(path: Path, n: int, size_px: int) -> None:
    """Write n patches of noise with two labels, a twentieth more for the test."""
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (rows, size_px, size_px, 3), np.uint8) for rows in (n, max(2, n // 20)))
    np.savez(path, x_train=train, y_train=np.arange(len(train)) % 2, x_test=test, y_test=np.arange(len(test)) % 2)


def read_utilization() -> float | None:
    """Return the share of time the first card worked just now; None without one."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return float(done.stdout) / 100 if done.stdout.strip().isdigit() else None


def count_rounds(study: Path, earlier: set[Path]) -> int:
    """Return how many rounds every rank of the newest run has finished; 0 before it began."""
    new = sorted(set((study / "runs").glob("0*")) - earlier)
    logs = [*new[-1].glob("sites/*/metrics.jsonl")] if new else []
    return min((len(path.read_text().splitlines()) for path in logs), default=0)


def measure_rounds(study: Path, n_ranks: int, rows: int, n_rounds: int, overrides: Sequence[str]) -> Rounds:
    """Train with so many ranks and return its rounds; utilisation is sampled after the first."""
    names, earlier = [f"S{k + 1}" for k in range(n_ranks)], set((study / "runs").glob("0*"))
    keys = [f"sites={json.dumps(names)}", f"train.rounds={n_rounds}", f"train.eval_every={n_rounds}", *overrides]
    words = ["train", "--method", "proxyfl", "--pipeline", "camelyon17"]
    command = [sys.executable, "-m", "wsi_fl", *words, *(word for key in keys for word in ("--set", key))]
    working = []
    with tempfile.TemporaryFile("w+") as told:
        job = subprocess.Popen(command, cwd=study, stdout=told, stderr=subprocess.STDOUT)
        end = time.monotonic() + _RUN_S
        while job.poll() is None:
            if time.monotonic() > end:
                job.terminate()
                raise SystemExit(f"{n_ranks} ranks took more than {_RUN_S} s; take fewer --rows")
            if 1 <= count_rounds(study, earlier) < n_rounds and (share := read_utilization()) is not None:
                working.append(share)
            time.sleep(_POLL_S)
        if job.returncode:
            told.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{told.read()[-3000:]}")
    (run,) = sorted(set((study / "runs").glob("0*")) - earlier)
    logs = [path.read_text().splitlines() for path in run.glob("sites/*/metrics.jsonl")]
    slowest = np.max([[json.loads(line)["seconds"] for line in log] for log in logs], axis=0)
    batch = next((int(key.split("=")[1]) for key in overrides if key.startswith("train.batch_size=")), BATCH)
    # the last round evaluates
    seconds, steps = float(np.mean(slowest[1:-1])), math.ceil(rows / batch)
    paper_seconds = seconds / steps * math.ceil(PAPER_ROWS / BATCH)
    return Rounds(n_ranks, steps, seconds, paper_seconds, float(np.mean(working)) if working else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small patches and networks, for a processor")
    parser.add_argument("--rows", type=int, help="training patches of a site; by default 320, with --tiny 24")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a run; the first and the last do not count")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be 3 or more")
    rows, size_px = arguments.rows or (24 if arguments.tiny else 320), 32 if arguments.tiny else 512
    overrides = list(TINY) if arguments.tiny else []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_patches(root / "patches.npz", rows * arguments.ranks, size_px)
        run_wsi_fl("init", "study", "--pipeline", "camelyon17", cwd=root)
        split = ["--sites", arguments.ranks, "--per-site", rows]
        run_wsi_fl("partition", root / "patches.npz", *split, cwd=root / "study")
        (root / "patches.npz").unlink()
        measured = [
            measure_rounds(root / "study", n_ranks, rows, arguments.rounds, overrides)
            for n_ranks in (1, arguments.ranks)
        ]
    alone, together = measured
    if arguments.json:
        print(json.dumps([asdict(row) for row in measured]))
        return
    print(f"{'ranks':>6}{'steps':>7}{'s a round':>11}{'at 2710 rows':>14}{'works':>8}")
    for row in measured:
        works = "" if row.works is None else f"{row.works:.0%}"
        print(f"{row.ranks:>6}{row.steps:>7}{row.seconds:>11.2f}{row.paper_seconds:>14.1f}{works:>8}")
    gain = alone.seconds * together.ranks / together.seconds
    print(f"{together.ranks} ranks at once do the work of {together.ranks} one after the other {gain:.2f} × as fast")


if __name__ == "__main__":
    main()
