"""What the transport of a model costs on top of MPI: `MpiComm.exchange` against a bare Sendrecv, in one run.

    python benchmarks/transport.py [--megabytes 44] [--ranks 4] [--repeats 20]

Starts its own ranks. Both send the same bytes around a ring; packing (scaling by a share) is left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np


def _measure(megabytes: float, repeats: int, folder: Path) -> None:
    """One rank: interleaved measurements, the slowest rank of each repeat counts."""
    from mpi4py import MPI

    from wsi_fl.federation.comm import MpiComm
    from wsi_fl.federation.message import Outgoing
    from wsi_fl.privacy.guarantee import PrivacyTerms
    from wsi_fl.privacy.ledger import PrivacyLedger

    comm, world = MpiComm(60.0), MPI.COMM_WORLD
    (me,) = comm.sites
    n, size = comm.n_sites, int(megabytes * 1e6 / 4)
    terms = PrivacyTerms(1e-5, allow=("model",))
    ledger = PrivacyLedger(folder / f"{me}.jsonl", site=str(me), run="r", terms=terms)
    vector = np.random.default_rng(me).standard_normal(size, np.float32)
    right, left = (me + 1) % n, (me - 1) % n
    times: dict[str, list[float]] = {"sendrecv": [], "exchange": []}
    received = np.empty(size, np.float32)
    for round_ in range(1, repeats + 1):
        release = ledger.release(round_, vector, schema="ab" * 32, mechanism=None, content="model")
        world.Barrier()
        began = time.perf_counter()
        world.Sendrecv([release.vector, MPI.FLOAT], right, 0, [received, MPI.FLOAT], left, 0)
        times["sendrecv"].append(world.allreduce(time.perf_counter() - began, MPI.MAX))
        world.Barrier()
        began = time.perf_counter()
        comm.exchange([Outgoing(me, right, 1.0, release)], [(left, me)], round_=round_, hop=0, size=size)
        times["exchange"].append(world.allreduce(time.perf_counter() - began, MPI.MAX))
    if me == 0:
        warm = {name: median(values[2:]) for name, values in times.items()}
        document = {"megabytes": megabytes, "ranks": n, **warm, "ratio": warm["exchange"] / warm["sendrecv"]}
        print(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=44.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        _measure(arguments.megabytes, arguments.repeats, arguments.folder)
        return
    from wsi_fl.stages.training.launch import find_mpiexec, rank_environment

    with tempfile.TemporaryDirectory() as folder:
        command = [find_mpiexec(), "-n", str(arguments.ranks), "--oversubscribe", "--bind-to", "none"]
        command += [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        subprocess.run(command, env=rank_environment(arguments.ranks), check=True)


if __name__ == "__main__":
    main()
