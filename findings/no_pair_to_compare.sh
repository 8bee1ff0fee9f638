#!/bin/sh
# No two patients can be compared, and the concordance is nan without an error or a warning.
#
# Versions: scikit-survival 0.28.0, with the scikit-learn and NumPy that it installs.
# Input: two patients who die on the same day, and whom a model ranks alike: no pair says anything of ranking.
# Expected from: scikit-survival's own exceptions, which have NoComparablePairException for just this.
# Guess: NoComparablePairException.
# Seen: (nan, 0, 0, 0, 0); warnings as errors change nothing. scikit-learn's cross_val_score takes the nan into the mean
#   of all folds, so one small fold makes the answer of a study nan. If all are censored there is a ValueError.
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

risk, time = np.array([1.0, 1.0]), np.array([2.0, 2.0])
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        said = concordance_index_censored(np.array([True, True]), time, risk)
    except NoComparablePairException as error:
        raise SystemExit(f"changed: {error}")
try:
    concordance_index_censored(np.array([False, False]), time, risk)
    raise SystemExit("changed: no error where all are censored")
except ValueError as error:
    print(said, "| all censored:", error)
assert np.isnan(said[0]) and tuple(said[1:]) == (0, 0, 0, 0)
PYTHON
