#!/bin/sh
# No two patients can be compared: an error if one is censored too early, and nan if both die on one day.
#
# Versions: scikit-survival 0.28.0, with the scikit-learn and NumPy that it installs.
# Input: two patients whom a model ranks alike. They die on the same day; or one dies after the other left the study.
#   In neither case does a pair say anything of ranking.
# Expected from: scikit-survival's exceptions, which have NoComparablePairException for just this.
# Guess: NoComparablePairException.
# Seen: the exception in the second case alone. Deaths on one day give (nan, 0, 0, 0, 0), with NumPy's warning of an
#   invalid division: the pair is counted as comparable when the library looks whether there is one, and as none when it
#   divides. In a cross-validation of few patients the mean over folds is nan then.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check scikit-survival==0.28.0
venv/bin/python -W ignore - <<'PYTHON'
import warnings

import numpy as np
from sksurv.exceptions import NoComparablePairException
from sksurv.metrics import concordance_index_censored

risk = np.array([1.0, 1.0])
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    try:
        said = concordance_index_censored(np.array([True, True]), np.array([2.0, 2.0]), risk)
    except NoComparablePairException as error:
        raise SystemExit(f"changed: {error}")
print(said, [str(one.message) for one in heard])
assert np.isnan(said[0]) and tuple(said[1:]) == (0, 0, 0, 0)
try:
    concordance_index_censored(np.array([True, False]), np.array([5.0, 2.0]), risk)
    raise SystemExit("changed: no exception where one is censored before the other dies")
except NoComparablePairException as error:
    print("one censored:", error)
PYTHON
