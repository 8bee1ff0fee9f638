"""What a GPU does with our loops: how fast, and for what share of the time it works.

python benchmarks/gpu.py [--encoders kaiko-vits16,uni] [--patches 4096] [--batch-size 256] [--seconds 3] [--json]

Each loop of the product runs as it is, then the bare network on data that lie on the device already, so that the ratio
says what reading, copying and waiting cost. "works" is the share of the loop's time in which a kernel ran. Weights are
random. Without a GPU it measures the processor, on which nothing works ahead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.learning.local_training import DPSettings, Learner, predict_examples, take_supervised_step
from wsi_fl.models import create_model
from wsi_fl.models.encoder import Encoder, build_preset_model, encode_batches
from wsi_fl.models.presets import PRESETS
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import Images

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PX, TRAIN_PX, TRAIN_BATCH = (256, 512, 32) if DEVICE.type == "cuda" else (256, 64, 32)
"""Patches of encoders, and those of the paper's study with its batch."""


def settled() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    settled()
    began = time.perf_counter()
    work()
    settled()
    return time.perf_counter() - began


def share_at_work(work: Callable[[], object]) -> float | None:
    """Return the share of time in which a kernel ran; None without a GPU."""
    if DEVICE.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        spent = seconds(work)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("Mem")
    )
    busy, last = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy / 1e6 / spent


def random_encoder(name: str, folder: Path, batch_size: int) -> Encoder:
    """Return a preset with random weights."""
    path = folder / f"{name}.safetensors"
    if not path.exists():
        network = build_preset_model(PRESETS[name]).to_empty(device=DEVICE)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.02)
        save_file({key: value.cpu().contiguous() for key, value in network.state_dict().items()}, path)
    return Encoder(name, path, batch_size=batch_size, device=DEVICE)


def of_encoder(name: str, folder: Path, n: int, batch_size: int) -> dict[str, Any]:
    """Measure `encode` on n patches that lie in memory, and its network on those that lie on the device."""
    encoder = random_encoder(name, folder, batch_size)
    generator = np.random.default_rng(0)
    size = encoder.batch_size_for(PX)
    some = generator.integers(0, 256, (size, PX, PX, 3)).astype(np.uint8)
    n_batches = max(3, n // size)
    there = torch.from_numpy(some).to(DEVICE)

    def bare(network: Callable[[torch.Tensor], object] = encoder.network) -> None:
        with torch.inference_mode(), encoder.autocast_context():
            for _ in range(n_batches):
                network(there)

    def loop() -> None:
        encode_batches(repeat(some, n_batches), encoder)

    for work in (bare, loop):
        work()
    alone, whole = (min(seconds(work) for _ in range(3)) for work in (bare, loop))
    n, compiled = n_batches * size, float("inf")
    if DEVICE.type == "cuda":
        faster = torch.compile(encoder.network) if size >= 128 else encoder.network
        bare(faster)
        compiled = min(seconds(lambda: bare(faster)) for _ in range(3))
    return {
        "what": f"encode {name}, batches of {size}",
        "a second": n / whole,
        "bare": n / alone,
        "works": share_at_work(loop),
        "compiled": n / compiled,
    }


def of_training(
    kind: str, limit_s: float, *, dp: bool = False, bfloat16: bool = False, model: str = "resnet18"
) -> dict[str, Any]:
    """Measure training steps on patches that lie in memory, and the same step on a batch that lies on the device."""
    network = create_model(model, n_classes=2, shape=Images(3, TRAIN_PX), seed=0)
    settings = DPSettings(sigma=1.0, clip=0.7, batch_size=TRAIN_BATCH) if dp else None
    learner = Learner(network, lr=1e-4, weight_decay=0.0, device=DEVICE, dp=settings, bfloat16=bfloat16)
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (256, TRAIN_PX, TRAIN_PX, 3)).astype(np.uint8)
    examples = Cohort.from_arrays(pixels, np.arange(256) % 2)
    noise = CipherStream.from_entropy()

    def rows(n: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        for _ in range(n):
            yield generator.choice(256, TRAIN_BATCH, replace=False)

    def loop(n: int) -> None:
        for batch in load_batches(examples, rows(n), augment=None, device=DEVICE):
            take_supervised_step(learner, batch, noise)

    x, y = next(iter(load_batches(examples, rows(1), augment=None, device=DEVICE)))

    def bare(n: int) -> None:
        for _ in range(n):
            take_supervised_step(learner, (x, y), noise)

    loop(3)
    n = max(3, min(100, int(limit_s / max(seconds(lambda: bare(3)) / 3, 1e-4))))
    alone, whole = seconds(lambda: bare(n)), seconds(lambda: loop(n))
    return {
        "what": f"{kind}, {TRAIN_PX} px, batches of {TRAIN_BATCH}",
        "a second": n * TRAIN_BATCH / whole,
        "bare": n * TRAIN_BATCH / alone,
        "works": share_at_work(lambda: loop(n)),
    }


def of_prediction(limit_s: float) -> dict[str, Any]:
    """Measure what `evaluate` does."""
    network = create_model("resnet18", n_classes=2, shape=Images(3, TRAIN_PX), seed=0).to(DEVICE).eval()
    n = 512 if DEVICE.type == "cuda" else 32
    pixels = np.random.default_rng(0).integers(0, 256, (n, TRAIN_PX, TRAIN_PX, 3)).astype(np.uint8)
    examples = Cohort.from_arrays(pixels, np.zeros(n))

    def loop() -> None:
        with torch.no_grad():
            predict_examples(network, examples, DEVICE, TRAIN_BATCH)

    x, _ = next(iter(load_batches(examples, iter([np.arange(TRAIN_BATCH)]), augment=None, device=DEVICE)))

    def bare() -> None:
        with torch.no_grad():
            for _ in range(n // TRAIN_BATCH):
                functional.softmax(network(x), 1)

    for work in (bare, loop):
        work()
    return {
        "what": f"predict resnet18, {TRAIN_PX} px, batches of {TRAIN_BATCH}",
        "a second": n / seconds(loop),
        "bare": n / seconds(bare),
        "works": share_at_work(loop),
    }


def of_noise() -> dict[str, Any]:
    """Measure the cipher's normal numbers on the device."""
    noise, n = CipherStream.from_entropy(), 11_000_000
    there = torch.zeros(n, device=DEVICE)
    noise.add_normal([there], 1.0)
    return {
        "what": "noise for 11 million parameters",
        "a second": 1 / min(seconds(lambda: noise.add_normal([there], 1.0)) for _ in range(3)),
        "bare": None,
        "works": share_at_work(lambda: noise.add_normal([there], 1.0)),
    }


def line(row: dict[str, Any]) -> str:
    said = [f"{row['what']:<48}{row['a second']:>10.1f}"]
    said.append(f"{row['bare']:>10.1f}{row['a second'] / row['bare']:>8.2f}" if row["bare"] else f"{'':18}")
    said.append(f"{row['works']:>8.0%}" if row["works"] is not None else "")
    said.append(f"   compiled {row['compiled']:.1f}" if row.get("compiled") else "")
    return "".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--encoders", default="kaiko-vits16,uni")
    parser.add_argument("--patches", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "processor"
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    print(f"{'a second':>58}{'bare':>10}{'ratio':>8}{'works':>8}", flush=True)

    def told(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for encoder in filter(None, args.encoders.split(",")):
            for size in sorted({32, args.batch_size}):
                told(of_encoder(encoder, Path(folder), args.patches, size))
    told(of_training("train resnet18", args.seconds))
    told(of_training("train resnet18 in bfloat16", args.seconds, bfloat16=True))
    told(of_training("train resnet18 with DP", args.seconds, dp=True))
    told(of_prediction(args.seconds))
    told(of_noise())
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
