#!/bin/sh
# dcurves makes "risk" of a survival marker, and what it makes is the chance to survive: its decision curve is upside down.
#
# Versions: dcurves 1.1.7, lifelines 0.30.3.
# Input: 400 patients, of whom those with a high marker die early; censored after 4 to 12 years. Net benefit at 3 years, of
#   the marker with `models_to_prob`, and of 1 - S(3) of lifelines' Cox model on the same marker, given as it is.
# Expected from: dcurves's documentation: `models_to_prob` names "columns that need to be converted to risk scores from 0 to
#   1"; and Vickers and Elkin (2006): who is treated is whose risk reaches the threshold.
# Guess: both ways give one curve. (The line of the source that converts was read before the first run, after a search for
#   something else; what it does to a curve was not guessed.)
# Seen: at a threshold of 0.3 the net benefit is 0.218 for 1 - S and -0.026 for the converted marker, which is below treating
#   nobody (0) and everybody (0.118). It is exactly the curve of S: those are "treated" who are likely to live. A good
#   marker is rejected, the better the surer. The second guess, that a binary outcome is converted rightly, held for 0 and 1
#   and not for False and True: of these the model of statsmodels predicts the first, False.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check dcurves==1.1.7 lifelines==0.30.3
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import pandas as pd
from dcurves import dca
from lifelines import CoxPHFitter

THRESHOLDS = [0.1, 0.2, 0.3, 0.4, 0.5]
draw = np.random.default_rng(0)
marker = draw.normal(size=400)
death, end = draw.exponential(8 * np.exp(-1.2 * marker)), draw.uniform(4, 12, 400)
table = pd.DataFrame({"years": np.minimum(death, end), "died": death <= end, "marker": marker})
cox = CoxPHFitter().fit(table, "years", "died")
table["survival"] = cox.predict_survival_function(table[["marker"]], times=[3]).to_numpy()[0]
table["risk"] = 1 - table["survival"]
table["early"] = death <= 3  # nobody is censored by then


def net_benefit(model, outcome="died", convert=(), **survival):
    settings = {"modelnames": [model], "thresholds": THRESHOLDS, "models_to_prob": [*convert]} | survival
    answer = dca(data=table, outcome=outcome, **settings)
    return {name: answer[answer.model == name].net_benefit.to_numpy() for name in (model, "all")}


survival = {"time": 3, "time_to_outcome_col": "years"}
curves = net_benefit("risk", **survival)
curves |= {"survival": net_benefit("survival", **survival)["survival"]}
curves |= {"converted": net_benefit("marker", convert=["marker"], **survival)["marker"]}
table["early_number"] = table["early"].astype(int)
for outcome in ("early", "early_number"):
    curves |= {outcome: net_benefit("marker", outcome, convert=["marker"])["marker"]}
for name, curve in curves.items():
    print(f"{name:18}", curve.round(3))
assert (curves["risk"] > np.maximum(curves["all"], 0)).all()
assert np.allclose(curves["converted"], curves["survival"])
assert (curves["converted"] < curves["all"]).all() and curves["converted"][2] < 0
assert (curves["early_number"] > np.maximum(curves["all"], 0)).all() and (curves["early"] < curves["early_number"]).all()
assert curves["early"][2] < 0
PYTHON
