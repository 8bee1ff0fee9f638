"""What differential privacy costs: a DP-SGD step of either engine against the plain step, interleaved in one run.

python benchmarks/dp_step.py [--models mlp,resnet18] [--engines ghost] [--repeats 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from wsi_fl.data.tasks import CLASSES, MutualLoss
from wsi_fl.models import create_model
from wsi_fl.models.checkpoint import Adam
from wsi_fl.models.mil import build_deepset
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.types import Images, WsiFlError

N_CLASSES, SIGMA, CLIP = 10, 1.4, 0.7

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SHAPES = {
    "mlp": (250, 1, 28, 28),
    "lenet5": (250, 1, 28, 28),
    "cnn2": (250, 3, 32, 32),
    "deepset": (32, 50, 1025),
    "resnet18": (32, 3, 64, 64),
}
"""Of a batch of each model."""

ENGINES = ("ghost", "hooks")

SLOW_S = 0.5
"""An engine whose step takes longer is measured three times only."""


def make(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and Adam, as a learner has them."""
    shape = SHAPES[name]
    if name == "deepset":
        torch.manual_seed(0)
        model = build_deepset(N_CLASSES, shape[-1] - 1)
    else:
        model = create_model(name, n_classes=N_CLASSES, shape=Images(shape[1], shape[-1]), seed=0)
    model.to(DEVICE)
    return model, Adam(model.parameters(), lr=1e-4, fused=True)


def plain_step(name: str, x: Tensor, y: Tensor) -> Callable[[], object]:
    model, optimizer = make(name)

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return step


def private_step(name: str, engine: str, x: Tensor, y: Tensor) -> Callable[[], object]:
    model, optimizer = make(name)
    trainer = DPTrainer(model, optimizer, sigma=SIGMA, clip=CLIP, batch_size=len(x), engine=engine)
    noise = CipherStream.from_entropy()
    loss = MutualLoss(
        y, None, 0.0, None, CLASSES
    )  # as a learner has it: a function of one's own is checked in each step
    return lambda: trainer.step(x, loss, noise)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def compare(name: str, engines: Sequence[str], repeats: int) -> list[dict[str, object]]:
    """A row for each engine: medians of the plain and the private step, taken in turns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPES[name], generator=generator).to(DEVICE)
    if name == "deepset":
        x[..., -1] = 1  # no padding
    y = (torch.arange(len(x)) % N_CLASSES).to(DEVICE)
    rows: list[dict[str, object]] = []
    for engine in engines:
        try:
            private = private_step(name, engine, x, y)
        except WsiFlError as error:
            rows.append({"model": name, "engine": engine, "refused": str(error)})
            continue
        plain = plain_step(name, x, y)
        for work in (plain, private, plain):
            work()
        times = 3 if seconds(private) > SLOW_S else repeats
        pairs = [(seconds(plain), seconds(private)) for _ in range(times)]
        base, cost = (1e3 * median(column) for column in zip(*pairs, strict=True))
        rows.append({"model": name, "engine": engine, "plain_ms": base, "dp_ms": cost, "ratio": cost / base})
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    lines = [f"{'model':<10}{'engine':<20}{'plain ms':>10}{'DP ms':>10}{'ratio':>8}"]
    for row in rows:
        if "refused" in row:
            lines.append(f"{row['model']:<10}{row['engine']:<20}{row['refused']}")
        else:
            lines.append(
                f"{row['model']:<10}{row['engine']:<20}{row['plain_ms']:>10.2f}{row['dp_ms']:>10.2f}{row['ratio']:>8.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    models, engines = args.models.split(","), args.engines.split(",")
    unknown = [name for name in (*models, *engines) if name not in (*SHAPES, *ENGINES)]
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join((*SHAPES, *ENGINES))}")
    rows = [row for name in models for row in compare(name, engines, args.repeats)]
    where = f"{DEVICE}, {torch.get_num_threads()} threads, Adam, sigma {SIGMA}"
    print(json.dumps({"device": where, "rows": rows}) if args.json else f"{where}\n{table(rows)}")


if __name__ == "__main__":
    main()
