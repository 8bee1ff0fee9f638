"""Clipped sums over patients: one gradient for all rows of a patient, so that ε protects the patient and not a row.

A patient's gradient g_p is the *mean* over its rows in the batch, and min(1, C / |g_p|) · g_p enters the sum. Whatever
a patient's rows are, and however many, the sum changes by at most C when the patient is added or removed; patients
are sampled whole, each with probability q. So a step is the Poisson-subsampled Gaussian mechanism with noise
multiplier σ, its unit being one patient. Which of its rows a patient brings is drawn anew in each step and independent
of all others: given the draw the bound holds, and so it does on average (Rényi divergence is quasi-convex).

The mean, and not the sum, since its length does not grow with the number of rows: the same C suits rows and patients,
and a patient with a thousand patches says no more than one with ten.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wsi_fl.privacy.ghost import squared_norms
from wsi_fl.privacy.gradients import GradientSums, LossOf, Weigh, added, trained

CHUNK = 64
"""Rows that go through the model at a time, however many a patient has."""


def summed_by_patient(
    model: nn.Module, x: Tensor, patient: Tensor, loss_of: LossOf, weigh: Weigh, *, chunk: int = CHUNK
) -> tuple[GradientSums, Tensor]:
    """Return (Σ_p c_p g_p of each trained parameter, mean loss over all rows).

    By plain backward passes, one patient after the other: memory holds two gradients and the activations of one chunk.

    Args:
        x: [b, …], b > 0.
        patient: int64[b], whose each row is.
        loss_of: logits [b, classes] → the mean of per-row losses.
        weigh: norm |g_p|, float64[1] → weight c_p [1]; a patient of weight 0 has no part in the sums.
    """
    sums: GradientSums = [None] * len(trained(model))
    said: Tensor | None = None
    for one in sorted(set(patient.tolist())):
        rows = (patient == one).nonzero().flatten()
        gradient: GradientSums = [None] * len(sums)
        for part, logits in _forward(model, x, rows, chunk):
            if said is None:
                said = logits.new_zeros(len(x), *logits.shape[1:])
            # rows beside this part are constants here, so that only its own losses have a gradient
            whole = torch.zeros_like(said).index_copy(0, part, logits)
            loss = loss_of(whole) * (len(x) / len(rows))
            found = torch.autograd.grad(loss, trained(model), allow_unused=True)
            gradient = [added(total, more) for total, more in zip(gradient, found, strict=True)]
            said[part] = logits.detach()
        squares = x.new_zeros(1, dtype=torch.float64)
        squares = sum((squared_norms(g.reshape(1, -1)) for g in gradient if g is not None), squares)
        c = float(weigh(squares.sqrt()))
        scaled = [None if g is None else g * c if c > 0 else torch.zeros_like(g) for g in gradient]
        sums = [added(total, more) for total, more in zip(sums, scaled, strict=True)]
    assert said is not None
    with torch.no_grad():
        return sums, loss_of(said)


def _forward(model: nn.Module, x: Tensor, rows: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(rows), chunk):
        part = rows[first : first + chunk]
        yield part, model(x[part])
