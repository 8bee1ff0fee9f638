#!/bin/sh
# Cox's loss of the same patients is 41 times as large where their follow-up is given in years and not in days.
#
# Versions: torchsurv 0.2.0, PyTorch 2.13.0, statsmodels 0.15.0.
# Input: 400 patients with a marker, followed for up to five years; in days all who died did so on days of their own, in
#   months and years several share one.
# Expected from: torchsurv's documentation of `neg_partial_log_likelihood`: "default, mean of log likelihoods across
#   patients"; and statsmodels' likelihood.
# Guess: the sum is statsmodels', and the default is the sum over the number of patients, whatever the calendar.
# Seen: the sum is statsmodels'. The default divides it by the number of different times at which somebody dies: by deaths
#   where all days differ, and by 5 where years are given. It is never the mean across patients. So the gradient's scale
#   (learning rate, clipping) and the validation loss follow the rounding of dates, without a word, and of two hospitals,
#   one with days and one with years, the second outweighs the first in a federation.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check torchsurv==0.2.0 torch==2.13.0 statsmodels==0.15.0
venv/bin/python -W ignore - <<'PYTHON'
import numpy as np
import torch
from statsmodels.api import PHReg
from torchsurv.loss.cox import neg_partial_log_likelihood

rng = np.random.default_rng(0)
n = 400
marker = rng.normal(size=n)
days = rng.permutation(np.linspace(1, 5 * 365, n)).round()
died = rng.random(n) < 0.5
means = []
for unit, length in (("days", 1.0), ("months", 365 / 12), ("years", 365.0)):
    time = np.ceil(days / length)
    inputs = [torch.tensor(values) for values in (0.5 * marker, died, time)]
    total, mean = (float(neg_partial_log_likelihood(*inputs, reduction=kind)) for kind in ("sum", "mean"))
    reference = -PHReg(time, marker[:, None], status=died, ties="efron").loglike(np.array([0.5]))
    times = len(np.unique(time[died]))
    print(f"{unit}: {n} patients, {died.sum()} died at {times} times; sum {total:.2f} (statsmodels "
          f"{reference:.2f}), mean {mean:.3f} = sum / {total / mean:.1f}")
    assert np.isclose(total, reference, rtol=1e-4) and np.isclose(total / mean, times, rtol=1e-4)
    means.append(mean)
assert 40 < means[-1] / means[0] < 42
PYTHON
