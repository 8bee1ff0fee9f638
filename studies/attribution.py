"""Which hospital is a patch from, by its class statistics; and what lowers that. PRIVACY-AUDIT.md has the tables.

    python studies/attribution.py run PATCHES.npz CENTRES ENCODER.safetensors FEATURES.npz
    python studies/attribution.py show --page studies/PRIVACY-AUDIT.md

The npz holds `x` uint8[n, 96, 96, 3] and `y` 0/1[n], tissue of one source. CENTRES is a folder with a tile of a slide
of each of five hospitals, `centre_K_*.jpeg`. Three hospitals get patches in the colours of centres 0 to 2 (Reinhard et
al., "Color transfer between images", 2001), so they differ by stain and scanner alone. Public tissue is 300 patches
that no hospital has. The tiles themselves are a second setting: five hospitals with a slide each, of one class.
FEATURES.npz keeps the features, which take seven minutes of one core; the rest takes one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pages
import torch
from PIL import Image
from scipy.stats import t as student
from skimage.color import lab2rgb, rgb2lab
from sklearn.linear_model import LogisticRegression

from wsi_fl.evidence.source_inference import (
    bound_accuracy,
    calibrate_losses,
    measure_accuracy,
    read_class_means,
    score_class_means,
)
from wsi_fl.models.encoder import Encoder
from wsi_fl.oneshot.class_statistics import NoisyStatistics
from wsi_fl.oneshot.projection import Projection, fit_projection, normalize_rows
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.privacy.cipher import CipherStream

ROWS = Path(__file__).parent / "rows" / "attribution.csv"
SEEDS, EPSILONS, DELTA = range(5), (None, 8.0, 1.0), 1e-5
N_POOL, N_PUBLIC, N_TRAIN = 1800, 300, 400
OWN_CENTRES, OTHER_CENTRES = (0, 1, 2), (3, 4)
Array = np.ndarray


# ---- pictures and features


def measure_colors(images: Array) -> tuple[Array, Array]:
    """Return the mean and standard deviation of tissue in CIELAB, float64[3] each; light pixels are no tissue."""
    lab = rgb2lab(images).reshape(-1, 3)
    tissue = lab[lab[:, 0] < 90] if (lab[:, 0] < 90).any() else lab
    return tissue.mean(0), tissue.std(0) + 1e-6


def change_colors(images: Array, source: tuple[Array, Array], target: tuple[Array, Array]) -> Array:
    """Return images uint8[n, h, w, 3] with the tissue's mean and deviation of the target; the background stays."""
    lab = rgb2lab(images)
    changed = np.where(lab[..., :1] < 90, (lab - source[0]) / source[1] * target[1] + target[0], lab)
    return (lab2rgb(changed).clip(0, 1) * 255).round().astype(np.uint8)


def normalize_colors(images: Array, target: tuple[Array, Array]) -> Array:
    """Return images with the colours of a public reference, each by its own mean and deviation."""
    return np.concatenate([change_colors(image, measure_colors(image), target) for image in images[:, None]])


def cut_tile(path: Path) -> Array:
    """Return uint8[100, 96, 96, 3], a square of patches of a tile at half its resolution, in columns."""
    pixels = np.asarray(Image.open(path).convert("RGB").resize((1024, 1024), Image.Resampling.BOX))
    return np.stack([pixels[96 * r : 96 * r + 96, 96 * c : 96 * c + 96] for c in range(10) for r in range(10)])


def compute_features(arguments: argparse.Namespace) -> dict[str, Array]:
    """Return the features of all pictures by name, and the labels of the pool."""
    table, tiles = np.load(arguments.patches), sorted(arguments.centres.glob("centre_*.jpeg"))
    order = np.random.default_rng(0).permutation(len(table["x"]))[: N_POOL + N_PUBLIC]
    x, cut = table["x"][order], [cut_tile(path) for path in tiles]
    source, targets = measure_colors(x), [measure_colors(patches) for patches in cut]
    encoder, found = Encoder("tf_efficientnet_lite0", arguments.weights, input_px=128), {"y": table["y"][order]}

    def encode(name: str, images: Array) -> None:
        for suffix, pictures in (("", images), (" normalized", normalize_colors(images, source))):
            print(name, suffix, len(pictures), flush=True)
            found[name + suffix] = np.concatenate([encoder(part) for part in np.array_split(pictures, 20)])

    encode("public", x[N_POOL:])
    for centre, target in enumerate(targets):
        encode(f"tile {centre}", cut[centre])
        encode(f"public {centre}", change_colors(x[N_POOL:], source, target))
        if centre in OWN_CENTRES:
            encode(f"pool {centre}", change_colors(x[:N_POOL], source, target))
    return found


# ---- what the hospitals do before they release


def find_scanner_directions(renderings: Sequence[Array], n: int) -> Array:
    """Return the n directions float64[d, n] in which the same public patches differ most between scanners."""
    rows = np.stack([normalize_rows(x) for x in renderings])
    deviations = (rows - rows.mean(0)).reshape(-1, rows.shape[-1])
    return np.linalg.svd(deviations, full_matrices=False)[2][:n].T


def remove_directions(x: Array, directions: Array) -> Projection:
    """Return the projection of public features x float32[m, d] that is blind to some directions."""
    rows = normalize_rows(x)
    projection = fit_projection((rows - rows @ directions @ directions.T).astype(np.float32))
    components = projection.components - directions @ (directions.T @ projection.components)
    return replace(projection, components=components.astype(np.float32))


def list_measures(features: Mapping[str, Array]) -> Iterator[tuple[str, Projection, str, tuple[Array, Array]]]:
    """Yield what may lower the attack: its name, the projection, the suffix of features, and their shift and scale."""
    public = features["public"]
    plain = (np.zeros(public.shape[1], np.float32), np.ones(public.shape[1], np.float32))
    yield "nothing", fit_projection(public), "", plain
    whitening = (public.mean(0), public.std(0) + 1e-6)
    yield "features standardised by public ones", fit_projection((public - whitening[0]) / whitening[1]), "", whitening
    yield "stain normalised to a public one", fit_projection(features["public normalized"]), " normalized", plain
    for whose, centres in (("the scanners", OWN_CENTRES), ("other scanners", OTHER_CENTRES)):
        renderings = [public, *(features[f"public {centre}"] for centre in centres)]
        for n in (0, 8, 32):
            directions = find_scanner_directions(renderings, n)
            name = f"without {n} directions between {whose}"
            yield name, remove_directions(np.concatenate(renderings), directions), "", plain
    both = [features[f"public {centre} normalized"] for centre in OWN_CENTRES]
    blind = remove_directions(np.concatenate(both), find_scanner_directions(both, 8))
    yield "stain normalised, then without 8 directions", blind, " normalized", plain


# ---- a draw of hospitals, and the attack

Site = tuple[Array, Array, Array, Array]
"""Features and labels for training, and of unseen patches."""


def draw_sites(features: Mapping[str, Array], setting: str, suffix: str, seed: int) -> list[Site]:
    """Return hospitals of different patches of the pool, or of the right halves of tiles."""
    rng, sites = np.random.default_rng(seed), []
    if setting == "tiles":
        for centre in (*OWN_CENTRES, *OTHER_CENTRES):
            x = features[f"tile {centre}{suffix}"][rng.permutation(100)]
            sites.append((x[:70], np.zeros(70, np.int64), x[70:], np.zeros(30, np.int64)))
        return sites
    for centre, rows in zip(OWN_CENTRES, np.array_split(rng.permutation(N_POOL), len(OWN_CENTRES)), strict=True):
        x, y = features[f"pool {centre}{suffix}"][rows], features["y"][rows].astype(np.int64)
        sites.append((x[:N_TRAIN], y[:N_TRAIN], x[N_TRAIN:], y[N_TRAIN:]))
    return sites


def release_heads(sites: Sequence[Site], projection: Projection, epsilon: float | None) -> list[SharedHead]:
    """Return the class statistics of each hospital as one-shot releases them, ε per patch."""
    heads, n_classes = [], 1 + max(int(y.max()) for _, y, *_ in sites)
    sigma = find_sigma(epsilon, 1.0, 1, DELTA) if epsilon else 0.0
    for x, y, *_ in sites:
        head = SharedHead(n_classes, x.shape[1], projection=projection)
        mechanism = NoisyStatistics(sigma, 1.0, len(x))
        mechanism.fill(head, torch.from_numpy(x), torch.from_numpy(y), CipherStream.from_entropy())
        heads.append(head)
    return heads


def guess_by_statistics(heads: Sequence[SharedHead], sites: Sequence[Site]) -> list[float]:
    """Return the accuracy of guesses at the hospital of training patches and of unseen ones."""
    released, found = [read_class_means(heads[0], head.sums.detach()) for head in heads], []
    for part in (0, 2):
        z = [heads[0].embed_rows(torch.from_numpy(site[part])).numpy() for site in sites]
        scores = score_class_means(z, [site[part + 1] for site in sites], released, heads[0].covariance.numpy())
        found.append(measure_accuracy(scores, [np.full(len(rows), "") for rows in z], by_patient=False, repeats=0))
    return [row["accuracy"] for row in found]


def guess_by_models(head: SharedHead, sites: Sequence[Site]) -> tuple[list[float], float]:
    """Return the accuracies of guesses by a logistic regression of each hospital, without noise, and of its answers."""
    z = [[head.embed_rows(torch.from_numpy(site[part])).numpy() for part in (0, 2)] for site in sites]
    models = [LogisticRegression(C=100.0).fit(rows[0], site[1]) for rows, site in zip(z, sites, strict=True)]
    found = []
    for part in range(2):
        losses = [
            -np.stack(
                [
                    model.predict_log_proba(rows[part])[np.arange(len(rows[part])), site[2 * part + 1]]
                    for model in models
                ],
                1,
            )
            for rows, site in zip(z, sites, strict=True)
        ]
        names = [np.full(len(rows), "") for rows in losses]
        found.append(measure_accuracy(calibrate_losses(losses), names, by_patient=False, repeats=0)["accuracy"])
    right = [model.score(rows[1], site[3]) for model, rows, site in zip(models, z, sites, strict=True)]
    return found, float(np.mean(right))


def score_task(heads: Sequence[SharedHead], sites: Sequence[Site]) -> float:
    """Return the accuracy at all unseen patches of the head solved from all releases, which all hospitals get."""
    heads[0].clear_local_statistics()
    heads[0].sums.data.copy_(torch.stack([head.sums for head in heads]).mean(0))
    heads[0].n_sites.fill_(len(heads))
    solved = heads[0].solve_released_head()
    return float(np.mean([(solved(torch.from_numpy(x)).argmax(1).numpy() == y).mean() for *_, x, y in sites]))


def measure_draw(features: Mapping[str, Array], seed: int) -> Iterator[dict[str, object]]:
    """Yield the rows of a draw, of each setting, measure and release."""
    for setting in ("stains", "tiles"):
        for measure, projection, suffix, (shift, scale) in list_measures(features):
            drawn = draw_sites(features, setting, suffix, seed)
            sites = [((x - shift) / scale, y, (u - shift) / scale, v) for x, y, u, v in drawn]

            def build_row(release: str, accuracies: Sequence[float], task: float | str, how=(setting, measure)):
                told = {"training": f"{accuracies[0]:.4f}", "unseen": f"{accuracies[1]:.4f}"}
                row = {"setting": how[0], "measure": how[1], "release": release, "seed": seed, **told}
                return {**row, "task": f"{task:.4f}" if how[0] == "stains" else ""}

            for epsilon in EPSILONS:
                heads = release_heads(sites, projection, epsilon)
                accuracies = guess_by_statistics(heads, sites)
                name = f"statistics, ε = {epsilon:g}" if epsilon else "statistics, no noise"
                yield build_row(name, accuracies, score_task(heads, sites) if setting == "stains" else "")
            if setting == "stains":
                yield build_row("models, no noise", *guess_by_models(heads[0], sites))


def run(arguments: argparse.Namespace) -> None:
    """Write a row for each draw."""
    torch.set_num_threads(1)
    if not arguments.features.exists():
        np.savez(arguments.features, **compute_features(arguments))
    with np.load(arguments.features) as file:
        features = dict(file)
    origin = pages.describe_origin(arguments.commit)
    rows = [row | origin for seed in SEEDS for row in measure_draw(features, seed)]
    pages.append_rows(arguments.rows, rows, ("setting", "measure", "release", "seed"))


# ---- the page


def format_interval(values: Sequence[str]) -> str:
    """Return the mean over draws in percent, and half of its 95 % interval (Student's t)."""
    numbers = 100 * np.array([float(value) for value in values if value])
    if not len(numbers):
        return "–"
    half = student.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / len(numbers) ** 0.5
    return f"{numbers.mean():.1f} ± {half:.1f}"


def render_tables(rows: Sequence[pages.Row]) -> dict[str, str]:
    """Return the table of each setting, with the bounds."""
    tables = {}
    for setting, columns in COLUMNS.items():
        chosen = [row for row in rows if row["setting"] == setting]
        lines = [
            [measure]
            + [
                format_interval([row[key] for row in chosen if (row["measure"], row["release"]) == (measure, release)])
                for release, key in columns
            ]
            for measure in dict.fromkeys(row["measure"] for row in chosen)
        ]
        heads = [f"{key}, {release.removeprefix('statistics, ')}" for release, key in columns]
        note = pages.describe_rows(chosen) if chosen else pages.NO_ROWS
        tables[f"attribution, {setting}"] = f"{pages.render_table(['%', *heads], lines)}\n\n{note}"
    bounds = [
        [f"{e:g}", *(f"{100 * bound_accuracy(e, DELTA, k):.1f}" for k in (2, 3, 5))] for e in (0.5, 1.0, 3.0, 8.0)
    ]
    return {**tables, "attribution, bounds": pages.render_table(["ε", "2 sites", "3 sites", "5 sites"], bounds)}


_RELEASES = ("statistics, no noise", "statistics, ε = 1")
COLUMNS = {
    "stains": [
        *product(_RELEASES, ("training", "unseen", "task")),
        ("models, no noise", "training"),
        ("models, no noise", "unseen"),
    ],
    "tiles": [*product((_RELEASES[0], "statistics, ε = 8", _RELEASES[1]), ("training", "unseen"))],
}
"""The columns of each table: a release, and what is measured with it."""


def show(arguments: argparse.Namespace) -> None:
    """Put the tables into a page."""
    page = arguments.page.read_text("utf-8")
    arguments.page.write_text(pages.fill_page(page, render_tables(pages.read_rows(arguments.rows))), "utf-8")


if __name__ == "__main__":
    parser, more = pages.build_parser(__doc__, ROWS, run, show)
    for name in ("patches", "centres", "weights", "features"):
        more.add_argument(name, type=Path)
    parsed = parser.parse_args()
    parsed.work(parsed)
