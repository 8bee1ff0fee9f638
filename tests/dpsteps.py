"""What steps with differential privacy are tested by, wherever they are computed."""

import torch
from torch.nn import functional

from wsi_fl.privacy.gradients import ENGINES


def norms_are_those_of_what_is_summed(model, x, engine, how):
    """Assert that the norm which is told of each example is that of what it would add to the sum."""
    y = torch.arange(len(x), device=x.device) % 3
    for k in range(len(x)):
        told = []

        def weigh(norms, k=k, told=told):
            told.append(norms)
            return functional.one_hot(torch.tensor(k), len(norms)).to(norms)

        sums, _ = ENGINES[engine](
            model.train(), x, lambda logits: functional.cross_entropy(logits, y), weigh, how
        )
        found = torch.cat([one.flatten() for one in sums]).double().norm()
        assert 0.99 * told[0][k] <= found <= (1 + 1e-5) * told[0][k]  # never too short
