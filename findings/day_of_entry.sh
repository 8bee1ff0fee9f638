#!/bin/sh
# Who enters a study on the day another dies is at risk for statsmodels' Cox model, and not for its survival curve.
#
# Versions: statsmodels 0.15.0, lifelines 0.30.3.
# Input: 60 patients, times in whole years, each observed for the last one or two of them (late entry); one covariate.
# Expected from: R's "survival", whose intervals (start, stop] leave out their start; lifelines; and statsmodels' own
#   SurvfuncRight, which does the same with its `entry`.
# Guess: lifelines and statsmodels both hold (entry, exit]: who enters on the day another dies is not at risk then. PHReg and
#   CoxPHFitter, both by Efron, agree within 1e-4.
# Seen: without late entry they agree. With it PHReg says 0.0722 and lifelines 0.1766; in other draws the sign differs. PHReg
#   counts who enters at a death as at risk of it: with entries a quarter of a year later it says 0.1766 too. The curve of
#   SurvfuncRight is the same for both.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check lifelines==0.30.3 statsmodels==0.15.0
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import pandas as pd
from lifelines import CoxPHFitter
from statsmodels.api import PHReg, SurvfuncRight

draw = np.random.default_rng(0)
years, died = draw.integers(2, 9, 60).astype(float), draw.random(60) < 0.7
marker, entry = draw.normal(size=60), years - draw.integers(1, 3, 60)
table = pd.DataFrame({"years": years, "died": died, "marker": marker, "entry": entry})


def statsmodels(entry):
    return PHReg(years, marker[:, None], status=died.astype(int), ties="efron", entry=entry).fit().params[0]


lifelines = CoxPHFitter().fit(table, "years", "died", entry_col="entry").params_["marker"]
no_entry = CoxPHFitter().fit(table.drop(columns="entry"), "years", "died").params_["marker"]
print("late entry: lifelines", lifelines, "statsmodels", statsmodels(entry), "entries later", statsmodels(entry + 0.25))
print("no entry: lifelines", no_entry, "statsmodels", statsmodels(None))
curves = [SurvfuncRight(years, died.astype(int), entry=start).surv_prob for start in (entry, entry + 0.25)]
assert abs(lifelines - 0.17659) < 1e-4 and abs(statsmodels(entry + 0.25) - lifelines) < 1e-4
assert abs(statsmodels(entry) - 0.07218) < 1e-4
assert abs(no_entry - statsmodels(None)) < 1e-4
assert np.allclose(*curves)
PYTHON
