#!/bin/sh
# pyfive reads the flags that h5py wrote as numbers, and a mask then picks the rows 0 and 1.
#
# Versions: h5py 3.16.0, pyfive 1.3.0, NumPy as both install it.
# Input: an HDF5 file with bool[4], as h5py writes it (an enumeration of FALSE and TRUE), and float[4].
# Expected from: pyfive's documentation: a thread-safe reader with h5py's interface, which gives what h5py gives.
# Guess: bool, for h5py's way to write flags is twenty years old.
# Seen: int8 [0, 1, 1, 0]. Numbers compare as equal, but `values[mask]` takes the rows 0, 1, 1, 0 in place of 1 and 2,
#   and `~mask` is -1 and -2. No error anywhere.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check h5py==3.16.0 pyfive==1.3.0
venv/bin/python -W ignore - <<'PYTHON'
import h5py
import numpy as np
import pyfive

mask, values = np.array([False, True, True, False]), np.array([10.0, 11, 12, 13])
with h5py.File("store.h5", "w") as file:
    file["mask"], file["values"] = mask, values
picked = {}
for reader in (h5py, pyfive):
    with reader.File("store.h5") as file:
        flags = file["mask"][:]
        picked[reader.__name__] = str(flags.dtype), file["values"][:][flags].tolist()
print(picked)
assert picked["h5py"] == ("bool", [11, 12])
assert picked["pyfive"] == ("int8", [10, 11, 11, 10])
PYTHON
