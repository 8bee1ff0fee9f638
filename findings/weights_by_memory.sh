#!/bin/sh
# mpi4py sends and fills a transposed matrix as it lies in memory: the shape is right, and the numbers are in other places.
#
# Versions: mpi4py 4.1.2, mpich 5.0.2 (wheel), NumPy 2.4.6.
# Input: weights of 2 x 3 on two ranks; those of rank 0 lie in Fortran's order, as `weights.T` of a stored matrix does.
# Expected from: mpi4py's tutorial, where NumPy arrays go to the calls in capitals; and bcast, the same call for objects.
# Guess, for Allgather into such a matrix: refused or right.
# Seen: two rows 0, 1, 2 and 10, 11, 12 are gathered as [[0, 2, 11], [1, 10, 12]]. Likewise Bcast gives rank 1 [[0, 3, 1],
#   [4, 2, 5]] for [[0, 1, 2], [3, 4, 5]], and Allreduce adds weights that do not belong together. bcast is right. An array
#   that is contiguous in neither order is refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check mpich==5.0.2 mpi4py==4.1.2 numpy==2.4.6
cat >weights.py <<'PYTHON'
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
matrix = np.arange(6.0).reshape(2, 3)
weights = np.array(matrix, order="F" if world.rank == 0 else "C")
assert np.array_equal(weights, matrix)
total, table = np.empty((2, 3)), np.empty((2, 3), order="F")
world.Allgather(np.arange(3.0) + 10 * world.rank, table)
world.Allreduce(weights, total)
array = weights if world.rank == 0 else np.empty((2, 3))
world.Bcast(array)
message = world.bcast(weights if world.rank == 0 else None)
try:
    world.Allreduce(np.zeros((4, 6))[::2, ::2], np.empty((2, 3)))
    refusal = False
except (BufferError, ValueError):
    refusal = True
answers = world.gather((table.tolist(), array.tolist(), message.tolist(), total.tolist(), refusal))
if world.rank == 0:
    for answer in answers:
        print(answer)
    permutation = [[0, 3, 1], [4, 2, 5]]
    rows, sums, table = matrix.tolist(), (matrix + permutation).tolist(), [[0, 2, 11], [1, 10, 12]]
    if answers != [(table, rows, rows, sums, True), (table, permutation, rows, sums, True)]:
        world.Abort(1)
PYTHON
venv/bin/mpiexec -n 2 venv/bin/python weights.py
