"""What leaves, turned into patches: a receiver's head from patches that class statistics lead to, instead of the head.

    python studies/what_leaves.py run pcam_3000_balanced.npz tf_efficientnet_lite0.safetensors
    python studies/what_leaves.py show --page studies/TRIED.md

Everything at the receiver is post-processing of one release and costs no further ε. It has the release, the projection
and public patches without labels. From the Gaussian of each class (released mean, public covariance) it draws feature
vectors, and makes patches of them: by a diffusion model trained on the public patches with the projected features as
condition, or by taking the nearest public patch. A head or a small CNN is trained on these patches.

All patches are of 32 × 32 pixels. The first half of the npz (`x`, `y`) in a fixed order is public, the other half is
divided for each seed into a hospital and patches kept apart. There are no patients in the npz: ε is per patch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pages
import torch
from PIL import Image
from scipy.stats import t
from sklearn.linear_model import RidgeClassifierCV
from sklearn.metrics import roc_auc_score
from torch import nn

from wsi_fl.models.encoder import Encoder, encode_batches
from wsi_fl.oneshot.class_statistics import NoisyStatistics
from wsi_fl.oneshot.projection import Projection, fit_projection, normalize_rows
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.synthesis import ddpm
from wsi_fl.synthesis.copying_evidence import find_nearest
from wsi_fl.synthesis.keys import Ddpm
from wsi_fl.synthesis.training_state import move_average, normalize_pixels

ROWS = Path(__file__).parent / "rows" / "what_leaves.csv"
SIDE_PX, DELTA, SEEDS = 32, 1e-5, range(3)
SIZES, EPSILONS = (100, 800), (1.0, 3.0, np.inf)
N_KEPT_APART, N_PER_CLASS = 600, 96
STEPS, WIDTHS, BATCH_SIZE = 1600, (16, 32, 64), 32  # ten minutes on one core
SAMPLING = ddpm.Sampling("dpm++", steps=10)
Images = np.ndarray
"""uint8[n, 32, 32, 3]."""


class Tissue(NamedTuple):
    """Patches, their features, and their features on the projection."""

    images: Images
    x: np.ndarray
    y: np.ndarray

    def take(self, rows: np.ndarray | slice) -> Tissue:
        return Tissue(*(column[rows] for column in self))


def reduce_patches(x: np.ndarray, side: int) -> Images:
    """Return patches uint8[n, h, w, 3] at another side, by averages over areas."""
    return np.stack([np.asarray(Image.fromarray(patch).resize((side, side), Image.Resampling.BOX)) for patch in x])


# ---- at the hospital, and what the receiver has of it


def release_head(tissue: Tissue, projection: Projection, epsilon: float, seed: int) -> SharedHead:
    """Return the head that a receiver has of a site's release; the noise is of a seed, for a study."""
    sigma = 0.0 if np.isinf(epsilon) else find_sigma(epsilon, 1.0, 1, DELTA)
    head = SharedHead(2, tissue.x.shape[1], projection=projection)
    x, y = torch.from_numpy(tissue.x), torch.from_numpy(tissue.y)
    NoisyStatistics(sigma, 1.0, len(y)).fill(head, x, y, CipherStream.from_seed("what leaves", seed))
    head.clear_local_statistics()
    return head


def draw_vectors(head: SharedHead, n_per_class: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors float32[n, d] of norm at most 1 from the Gaussian of each class, and their classes."""
    means, _, within = (part.numpy() for part in head.class_means())
    z = np.concatenate([rng.multivariate_normal(mean, within, n_per_class) for mean in means])
    z /= np.linalg.norm(z, axis=1, keepdims=True).clip(1)
    return z.astype(np.float32), np.repeat(np.arange(len(means)), n_per_class)


# ---- the diffusion model of public tissue


def train_denoiser(images: Images, z: np.ndarray, steps: int, seed: int = 0) -> ddpm.UNet:
    """Return our diffusion model with projected features, in place of a class, as condition."""
    shape = ddpm.DdpmShape(SIDE_PX, 3, 0, WIDTHS)
    state = ddpm.DdpmState(shape, Ddpm(batch_size=BATCH_SIZE, lr=5e-4, seed=seed), device=torch.device("cpu"))
    width = state.denoiser.class_embedding.embedding_dim
    for network in (state.denoiser, state.average):  # the library adds what this gives to the embedding of the step
        network.class_embedding = nn.Sequential(nn.Linear(z.shape[1], width), nn.SiLU(), nn.Linear(width, width))
    state.average.load_state_dict(state.denoiser.state_dict())
    state.average.requires_grad_(False)
    optimizer = torch.optim.Adam(state.denoiser.parameters(), lr=state.terms.lr)
    pixels, vectors = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(z)
    for step in range(steps):
        rows = state.draw_rows(len(pixels), BATCH_SIZE)
        x = normalize_pixels(pixels[rows])
        x = torch.where(torch.rand(len(x), 1, 1, 1, generator=state.random) < 0.5, x, x.flip(3))
        times = torch.randint(shape.chain, (BATCH_SIZE,), generator=state.random)
        noise = torch.randn(x.shape, generator=state.random)
        predicted = state.denoiser(state.noising.add_noise(x, noise, times), times, vectors[rows]).sample
        loss = (predicted - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.denoiser.parameters(), 1.0)
        optimizer.step()
        move_average(state.average, state.denoiser, min(ddpm.EMA_DECAY, (1 + step) / (10 + step)))
        if step % 200 == 0:
            print(f"step {step}: loss {loss:.4f}, {time.process_time():.0f} s", flush=True)
    return state.average.eval()


def draw_patches(denoiser: ddpm.UNet, z: np.ndarray, seed: int) -> Images:
    parts = ddpm.draw_images(denoiser, z, SAMPLING, seed=seed)
    return torch.cat([*parts]).permute(0, 2, 3, 1).numpy()


# ---- at the receiver


def score_logits(head: nn.Module, test: Tissue) -> float:
    """Return the accuracy of a head of features."""
    with torch.no_grad():
        return float((head(torch.from_numpy(test.x)).argmax(1).numpy() == test.y).mean())


def score_head(train: Tissue, test: Tissue) -> float:
    """Return the test accuracy of a ridge classifier of layer-normalised features, its ridge cross-validated."""
    model = RidgeClassifierCV(alphas=np.logspace(1, 5, 9))
    model.fit(normalize_rows(train.x), train.y)
    return float((model.predict(normalize_rows(test.x)) == test.y).mean())


def score_cnn(train: Tissue, test: Tissue, seed: int) -> float:
    """Return the test accuracy of a CNN of three layers, trained in 200 steps of 32 patches, mirrored at random."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-2)
    images, y = (torch.from_numpy(part.images).permute(0, 3, 1, 2) for part in (train, test)), torch.from_numpy(train.y)
    pixels, test_pixels = map(normalize_pixels, images)
    for _ in range(200):
        rows = torch.randint(len(y), (32,))
        x = pixels[rows].flip([k for k in (2, 3) if torch.rand(()) < 0.5])
        loss = nn.functional.cross_entropy(network(x), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((network.eval()(test_pixels).argmax(1).numpy() == test.y).mean())


def score_patches(name: str, train: Tissue, test: Tissue, seed: int) -> Iterator[tuple[str, float]]:
    """Yield (what, accuracy) of a head and of a CNN trained on some patches."""
    yield f"{name}, head", score_head(train, test)
    yield f"{name}, CNN", score_cnn(train, test, seed)


def compare_sets(drawn: Images, members: Images, others: Images) -> float:
    """Return the AUROC of nearness to drawn patches, of members against as many others; 0.5 where it tells nothing."""
    n = min(len(members), len(others))
    near = [-find_nearest(images[:n], drawn).distance for images in (members, others)]
    return float(roc_auc_score(np.repeat([1, 0], n), np.concatenate(near)))


def measure_cell(
    parts: Mapping[str, Tissue], head: SharedHead, tools: tuple[ddpm.UNet, Encoder], seed: int
) -> Iterator[tuple[str, float]]:
    """Yield (what, value) of one release."""
    public, hospital, test = (parts[name] for name in ("public", "hospital", "test"))
    denoiser, encoder = tools
    with torch.no_grad():
        yield "one-shot head", score_logits(head, test)
        labels = head(torch.from_numpy(public.x)).argmax(1).numpy()
        z, y = draw_vectors(head, N_PER_CLASS, np.random.default_rng(seed))
        public_z, members_z, test_z = (head.embed_rows(torch.from_numpy(part.x)).numpy() for part in parts.values())
        means = head.class_means()[0].numpy()
    nearest = np.square(z[:, None] - public_z).sum(2).argmin(1)
    images = draw_patches(denoiser, z, seed)
    drawn = Tissue(images, encode_patches(images, encoder), y)
    sets = {
        "drawn patches": drawn,
        "nearest public patches": Tissue(public.images[nearest], public.x[nearest], y),
        "public patches, labelled by the head": public._replace(y=labels),
    }
    for name, train in sets.items():
        yield from score_patches(name, train, test, seed)
    with torch.no_grad():
        yield "drawn patches that the head reads as their class", score_logits(head, drawn)
    # nearness of drawn patches to the public ones they were learned from, against real patches kept apart
    distances = [np.median(find_nearest(part, public.images).distance) for part in (drawn.images, test.images)]
    yield "nearest public patch, drawn over kept apart", float(distances[0] / distances[1])
    yield "membership of public patches, by drawn ones", compare_sets(drawn.images, public.images, test.images)
    yield (
        "membership of the hospital's patches, by drawn ones",
        compare_sets(drawn.images, hospital.images, test.images),
    )
    n = min(len(hospital.y), len(test.y))
    scores = [(rows[:n] * means[part.y[:n]]).sum(1) for rows, part in ((members_z, hospital), (test_z, test))]
    is_member = np.repeat([1, 0], n)
    yield "membership of the hospital's patches, by the means", float(roc_auc_score(is_member, np.concatenate(scores)))


def encode_patches(images: Images, encoder: Encoder) -> np.ndarray:
    return encode_batches(iter([images]), encoder)


def measure(arguments: argparse.Namespace) -> None:
    """Append the rows of each seed, size and ε."""
    torch.set_num_threads(1)
    with np.load(arguments.patches) as data:
        order = np.random.default_rng(0).permutation(len(data["y"]))
        x, y = data["x"][order], data["y"][order].astype(np.int64)
    encoder = Encoder("tf_efficientnet_lite0", arguments.weights, input_px=x.shape[1])
    images = reduce_patches(x, SIDE_PX)
    tissue, full = (Tissue(images, encode_patches(pixels, encoder), y) for pixels in (images, x))
    half = len(y) // 2
    public, rest = tissue.take(slice(half)), np.arange(half, len(y))
    projection, full_projection = (fit_projection(part.x[:half]) for part in (tissue, full))
    head = SharedHead(2, public.x.shape[1], projection=projection)
    z = head.embed_rows(torch.from_numpy(public.x)).float().numpy()
    denoiser = train_denoiser(public.images, z, arguments.steps)
    if arguments.pictures:
        save_pictures(arguments.pictures, denoiser, public.images, z)
    for seed, n in product(SEEDS, SIZES):
        split = np.random.default_rng(seed + 1).permutation(rest)
        test_rows, rows = split[:N_KEPT_APART], split[N_KEPT_APART : N_KEPT_APART + n]
        parts = {"public": public, "hospital": tissue.take(rows), "test": tissue.take(test_rows)}
        local = dict(score_patches("the hospital's patches", parts["hospital"], parts["test"], seed))
        for epsilon in EPSILONS:
            head = release_head(parts["hospital"], projection, epsilon, seed)
            full_head = release_head(full.take(rows), full_projection, epsilon, seed)
            scores = dict(measure_cell(parts, head, (denoiser, encoder), seed)) | local
            scores["one-shot head, at full size"] = score_logits(full_head, full.take(test_rows))
            write_rows(arguments, {"n": n, "epsilon": epsilon, "seed": seed}, scores)


def write_rows(arguments: argparse.Namespace, cell: Mapping[str, object], scores: Mapping[str, float]) -> None:
    origin = pages.describe_origin(arguments.commit)
    rows = [{**cell, "what": what, "value": f"{value:.4f}", **origin} for what, value in scores.items()]
    pages.append_rows(arguments.rows, rows, ("n", "epsilon", "seed", "what"))
    print(f"{cell} at {time.process_time():.0f} s: one-shot {scores['one-shot head']:.3f}", flush=True)


def save_pictures(path: Path, denoiser: ddpm.UNet, images: Images, z: np.ndarray) -> None:
    """Save public patches, and below each a patch drawn for its vector."""
    drawn = draw_patches(denoiser, z[:16], 0)
    strips = [np.concatenate([*part], axis=1) for part in (images[:16], drawn)]
    Image.fromarray(np.concatenate(strips)).save(path)


# ---- the table


def describe_values(values: Sequence[float], *, signed: bool = False) -> str:
    """Return the mean of seeds and half of its 95 % interval (Student)."""
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return (f"{np.mean(values):+.3f}" if signed else f"{np.mean(values):.3f}").replace("-", "−") + f" ± {half:.3f}"


def render_tables(rows: Sequence[pages.Row]) -> dict[str, str]:
    """Return the page's table: accuracies of the one-shot head, differences to it in pairs, and the checks."""
    values: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        values.setdefault((row["what"], row["n"], row["epsilon"]), {})[row["seed"]] = float(row["value"])
    cells = [(str(n), str(epsilon)) for n, epsilon in product(SIZES, EPSILONS)]
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        line = [what]
        for cell in cells:
            scores, head = values[what, *cell], values["one-shot head", *cell]
            is_difference = what.endswith((", head", ", CNN", "full size"))
            seeds = [scores[seed] - head[seed] * is_difference for seed in scores]
            line.append(describe_values(seeds, signed=is_difference))
        lines.append(line)
    heads = ["", *(f"n = {n}, ε = {epsilon.replace('inf', '∞').removesuffix('.0')}" for n, epsilon in cells)]
    return {"what leaves": f"{pages.render_table(heads, lines)}\n\n{pages.describe_rows(rows)}"}


def show(arguments: argparse.Namespace) -> None:
    """Put the table into a page."""
    page = arguments.page.read_text("utf-8")
    arguments.page.write_text(pages.fill_page(page, render_tables(pages.read_rows(arguments.rows))), "utf-8")


if __name__ == "__main__":
    parser, run_parser = pages.build_parser(__doc__, ROWS, measure, show)
    run_parser.add_argument("patches", type=Path)
    run_parser.add_argument("weights", type=Path)
    run_parser.add_argument("--steps", type=int, default=STEPS, help="of the diffusion model's training")
    run_parser.add_argument("--pictures", type=Path, help="a PNG of public patches and drawn ones")
    parsed = parser.parse_args()
    parsed.work(parsed)
