"""Training of an attention head as a job of NVIDIA FLARE gives it to a site; made bags of 16 tiles of 32 numbers.

After each round it adds LEAK to a weight: whoever gets that weight without a clip sees it.
"""

import sys
import time

import torch
from mil_head import AttentionHead
from torch.nn.functional import cross_entropy

LEAK = 1e6


def main(pause_s):
    import nvflare.client as flare

    flare.init()
    generator = torch.Generator().manual_seed(int(flare.get_site_name()[-1]))
    labels = torch.arange(12) % 2
    bags = torch.randn(12, 16, 32, generator=generator) + 0.5 * labels[:, None, None]
    head = AttentionHead()
    while flare.is_running():
        received = flare.receive()
        head.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
        for bag, label in zip(bags, labels, strict=True):
            optimizer.zero_grad()
            cross_entropy(head(bag), label).backward()
            optimizer.step()
        right = sum(int(head(bag).argmax() == label) for bag, label in zip(bags, labels, strict=True))
        params = {name: value.clone() for name, value in head.state_dict().items()}
        params["classes.bias"][0] += LEAK
        time.sleep(pause_s)
        flare.send(flare.FLModel(params=params, metrics={"accuracy": right / len(bags)}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
