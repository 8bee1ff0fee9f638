#!/bin/sh
# Differential privacy for whole hospitals: the largest hospital has a fraction of the noise that the multiplier says.
#
# Versions: flwr 1.42.0, dp-accounting 0.6.0.
# Input: five hospitals with 9000, 250, 250, 250 and 250 slides, whose updates are clipped to norm 1; noise multiplier 1;
#   Flower's FedAvg inside DifferentialPrivacyServerSideFixedClipping, as its guide on differential privacy has it.
# Expected from: the parameter `noise_multiplier`, "for the Gaussian mechanism for model updates", and the cited papers,
#   where the noise is the multiplier times what one participant can move the mean.
# Guess: the wrapper weights hospitals alike, or its noise covers the largest weight.
# Seen: the mean is weighted by slides, and the noise is norm / 5 as if all weighed alike. The largest hospital moves the mean
#   by 0.9 norms beneath noise of 0.2: a multiplier of 0.22, and an ε of 29 instead of 4.4 in one round (δ = 1e-5). Nothing
#   warns. With an `accountant`, which is None by default, the same weights are refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check flwr==1.42.0 dp-accounting==0.6.0
venv/bin/python -W ignore - <<'PYTHON'
import logging

import numpy as np
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # as its server does before it makes messages
logging.getLogger("flwr").setLevel(logging.WARNING)
SLIDES, SIZE = (9000, 250, 250, 250, 250), 4096


def aggregate(moved, multiplier):
    """Return the new model, from a model of zeros, after the first hospital's update of norm 1, or none of it."""
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), multiplier, 1.0, len(SLIDES))
    strategy.current_arrays = ArrayRecord({"weight": Array(np.zeros(SIZE))})
    replies = []
    for k, slides in enumerate(SLIDES):
        update = np.full(SIZE, 1e-12)
        update[0] = moved if k == 0 else 1e-12
        content = RecordDict({
            "arrays": ArrayRecord({"weight": Array(update)}),
            "metrics": MetricRecord({"num-examples": slides}),
        })
        replies.append(Message(content=content, dst_node_id=k + 1, message_type="train"))
    return strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0]


def epsilon(multiplier):
    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(multiplier))
    return accountant.get_epsilon(1e-5)


influence = aggregate(1.0, 0.0)[0] - aggregate(1e-12, 0.0)[0]
noise = aggregate(1e-12, 1.0).std()
assert abs(influence - 0.9) < 1e-6 and abs(noise - 0.2) < 0.01
print(f"the largest hospital moves the mean by {influence:.3f} norms, the noise is {noise:.3f}: "
      f"ε = {epsilon(0.2 / 0.9):.1f}, where multiplier 1 is {epsilon(1.0):.1f}")
PYTHON
