#!/bin/sh
# Half of the patients have died, and two libraries name two median survival times.
#
# Versions: lifelines 0.30.3, statsmodels 0.15.0.
# Input: four patients who die at 1, 2, 3 and 4 years; nobody is censored. And ten at 1 to 10.
# Expected from: the documentation of both: the least time at which survival falls to one half.
# Guess: 2 and 5 from both.
# Seen: lifelines 2 and 5; statsmodels 3 and 6, the first time at which survival lies *below* one half. With as many
#   patients as a trial has they agree; in a group of few that is not censored they differ by one death.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check lifelines==0.30.3 statsmodels==0.15.0
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
from lifelines import KaplanMeierFitter
from statsmodels.api import SurvfuncRight

medians = []
for n in (4, 10, 5):
    time, died = np.arange(1.0, n + 1), np.ones(n)
    medians.append((KaplanMeierFitter().fit(time, died).median_survival_time_, SurvfuncRight(time, died).quantile(0.5)))
print(medians)
assert medians == [(2, 3), (5, 6), (3, 3)]
PYTHON
