"""What others published for hospitals with frozen features, on the draws of `wsi-fl bench`: PUBLISHED.md.

    wsi-fl bench TABLE --hospitals 4x250:0.9,8x200:1,16x50:0.9,4x500:alike --epsilon 1,3 \\
        --projection FILE --out ours.csv
    python studies/published.py run TABLE --directions FILE --out theirs.csv --jobs 2
    python studies/published.py rows ours.csv theirs.csv --out studies/rows/published.csv
    python studies/published.py show studies/rows/published.csv

Each method is written from its paper; what the paper leaves open is tuned at ε = 1 on a draw of its own, as bench
tunes. A hospital answers with a mixture of its lone head and of the method's, as in a study (`score`). What the method
says by itself stands beside it (`own_score`).
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn
from torch.nn import functional

from wsi_fl.data.cohort import Cohort
from wsi_fl.evidence.bench import SamplingCell, parse_cells, sample_sites
from wsi_fl.evidence.feature_table import FeatureTable, read_table
from wsi_fl.federation.federate import federate
from wsi_fl.federation.methods import METHODS
from wsi_fl.learning.ensemble import build_ensemble
from wsi_fl.learning.local_training import Learner
from wsi_fl.learning.tuning import FittedHead, fit_linear_head, softmax
from wsi_fl.models.mil import build_linear_head
from wsi_fl.oneshot.projection import Projection, normalize_rows, read_projection
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.privacy.privacy_plan import list_proposals, plan_of_round, propose_plan
from wsi_fl.report.formatting import format_signed

Floats = NDArray[np.float64]
Answers = Callable[[FeatureTable], Floats]
"""What a hospital's head says of rows: probabilities float64[n, classes]."""
DELTA, TUNING, MIDDLE = 1e-5, -1, 1.0
CELLS = "4x250:0.9,8x200:1,16x50:0.9,4x500:alike"
COLUMNS = ("method", "epsilon", "sites", "n", "skew", "seed", "site", "score", "own_score", "setting")


@dataclass(frozen=True)
class Draw:
    """What a method sees: the hospitals, its ε, public directions, and a source of chance."""

    parts: Sequence[FeatureTable]
    epsilon: float
    along: Projection
    rng: np.random.Generator

    @property
    def k(self) -> int:
        """How many classes there are."""
        return len(self.parts[0].classes)


def seen(draw: Draw, x: NDArray[np.float32], space: str) -> Floats:
    """Return rows of length 1 at most: along public "directions", or "all" features, layer-normalised."""
    if space == "all":
        found: Floats = normalize_rows(x).astype(float) / np.sqrt(x.shape[1])
        return found
    head = SharedHead(draw.k, x.shape[1], projection=draw.along)
    return head.embed_rows(torch.from_numpy(x)).double().numpy()


def noise_of(draw: Draw, n: int) -> float:
    """Return σ of one Gaussian mechanism of sensitivity 1."""
    return list_proposals(n, 1, draw.epsilon, DELTA)[0].mechanism.sigma


def least_squares(draw: Draw, *, space: str, ridge: float) -> list[Answers]:
    """Sums of squares and products with noise, and ridge regression (Mehta et al. 2023, DP-LS; Wang 2018, AdaSSP).

    Half of the squared sensitivity is for either. The ridge is `ridge` times the norm that the noise of the squares
    has, less the least eigenvalue, as AdaSSP adapts it.
    """
    squares: Any = 0.0
    products: Any = 0.0
    sigma = 0.0
    for part in draw.parts:
        z, one = seen(draw, part.x, space), np.eye(draw.k)[part.y] - 1 / draw.k
        d, sigma = z.shape[1], noise_of(draw, len(part.y)) * np.sqrt(2)
        drawn_ = np.triu(draw.rng.normal(size=(d, d)) * sigma)
        squares = squares + z.T @ z + drawn_ + np.triu(drawn_, 1).T
        products = products + z.T @ one + draw.rng.normal(size=(d, draw.k)) * sigma
    moved = sigma * np.sqrt(len(draw.parts) * len(squares))
    least = np.linalg.eigvalsh(squares)[0]
    weight = np.linalg.solve(squares + max(0.0, 2 * ridge * moved - least) * np.eye(len(squares)), products)
    return [lambda rows: softmax(10 * seen(draw, rows.x, space) @ weight)] * len(draw.parts)


def prototypes(draw: Draw, *, space: str, centred: bool) -> list[Answers]:
    """Class means with noise, and the nearest by its cosine (Wahdany et al. 2024, DPPL-Mean)."""
    sums: Any = 0.0
    for part in draw.parts:
        z = seen(draw, part.x, space)
        found = np.stack([z[part.y == one].sum(0) for one in range(draw.k)])
        sums = sums + found + draw.rng.normal(size=found.shape) * noise_of(draw, len(part.y))
    means = sums / np.linalg.norm(sums, axis=1, keepdims=True).clip(min=1e-12)
    if centred:
        means = means - means.mean(0)
    return [lambda rows: softmax(10 * seen(draw, rows.x, space) @ means.T)] * len(draw.parts)


class Prox:
    """FedAvg whose steps are pulled to where the round began (Li et al. 2020, FedProx), after the noise."""

    def __init__(self, mu: float, lr: float) -> None:
        self.pull = min(1.0, mu * lr)
        self.known: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def __call__(
        self, learners: Mapping[str, Learner], batch: Any, weights: Any, noise: CipherStream
    ) -> dict[str, float]:
        """Take one step; where parameters are not those after the last one, a round has begun."""
        (learner,) = learners.values()
        own = list(learner.model.parameters())
        start, after = self.known.get(id(learner), ([], []))
        if not after or any(not torch.equal(a, b) for a, b in zip(own, after, strict=True)):
            start = [one.detach().clone() for one in own]
        losses = METHODS["fedavg"].step(learners, batch, weights, noise)
        with torch.no_grad():
            for one, to in zip(own, start, strict=True):
                one.lerp_(to, self.pull)
        self.known[id(learner)] = start, [one.detach().clone() for one in own]
        return losses


def fedprox(draw: Draw, *, mu: float, rounds: int, lr: float, space: str) -> list[Answers]:
    """Heads by DP-SGD, averaged each round, with a proximal term."""
    from dataclasses import replace

    plan = propose_plan(min(len(part.y) for part in draw.parts), rounds, draw.epsilon, DELTA)
    learned = federate(
        {
            f"S{k}": Cohort.from_arrays(scaled(draw, part.x, space), part.y, part.patient.tolist())
            for k, part in enumerate(draw.parts)
        },
        replace(METHODS["fedavg"], step=Prox(mu, lr)),
        private=lambda: build_linear_head(draw.k, scaled(draw, draw.parts[0].x[:1], space).shape[1]),
        rounds=rounds,
        batch_size=plan.batch_size,
        lr=lr,
        sigma=plan.mechanism.sigma,
        delta=DELTA,
    )
    return [partial(asked, next(iter(site.models.values())), draw, space) for site in learned.values()]


@torch.inference_mode()
def asked(model: nn.Module, draw: Draw, space: str, rows: FeatureTable) -> Floats:
    """Return what a model says."""
    return softmax(model.eval()(torch.from_numpy(scaled(draw, rows.x, space))).double().numpy())


class CVAE(nn.Module):
    """A conditional variational autoencoder of features: three layers each way (Di Salvo et al. 2025).

    What is drawn comes in beside the features, [x | class | normal], so that an example's gradient is its own.
    """

    def __init__(self, d: int, k: int, hidden: int = 128, latent: int = 16) -> None:
        super().__init__()
        self.parts = (d, k, latent)

        def three(first: int, last: int) -> nn.Sequential:
            layers = [nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(hidden, last))

        self.encoder, self.decoder = three(d + k, 2 * latent), three(latent + k, d)

    def forward(self, rows: Tensor) -> Tensor:
        """Return [features again | mean | log variance]."""
        x, one, normal = rows.split(self.parts, 1)
        mean, spread = self.encoder(torch.cat([x, one], 1)).chunk(2, 1)
        z = mean + normal * (spread / 2).exp()
        return torch.cat([self.decoder(torch.cat([z, one], 1)), mean, spread], 1)


def cvae(draw: Draw, *, rounds: int, lr: float, clip: float, space: str) -> list[Answers]:
    """Decoders are averaged, classes are drawn from them, and a head learns from what was drawn."""
    rows = [torch.from_numpy(scaled(draw, part.x, space)) for part in draw.parts]
    d, n = rows[0].shape[1], min(len(one) for one in rows)
    found = propose_plan(n, rounds, draw.epsilon, DELTA, clip=clip)
    torch.manual_seed(int(draw.rng.integers(2**31)))
    models = [CVAE(d, draw.k) for _ in rows]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plans = [
        plan_of_round(
            n=len(one), batch_size=found.batch_size, epochs=1, sigma=found.mechanism.sigma, clip=clip, delta=DELTA
        )
        for one in rows
    ]
    trainers = [DPTrainer.from_plan(plan, model, lr=lr) for plan, model in zip(plans, models, strict=True)]
    for _ in range(rounds):
        for part, x, plan, trainer, model in zip(draw.parts, rows, plans, trainers, models, strict=True):
            stream = CipherStream.from_entropy()
            one = functional.one_hot(torch.from_numpy(part.y), draw.k).float()
            for chosen in plan.draw_batches(stream):
                normal = torch.randn(len(chosen), model.parts[2])
                trainer.step(torch.cat([x[chosen], one[chosen], normal], 1), partial(elbo, x[chosen], d), stream)
        together = {
            name: torch.stack([model.decoder.state_dict()[name] for model in models]).mean(0)
            for name in models[0].decoder.state_dict()
        }
        for model in models:
            model.decoder.load_state_dict(together)
    y = torch.arange(draw.k).repeat_interleave(300)
    with torch.inference_mode():
        z = torch.cat([torch.randn(len(y), models[0].parts[2]), functional.one_hot(y, draw.k).float()], 1)
        made = models[0].decoder(z).double().numpy()
    head = fit_linear_head(made, y.numpy(), np.arange(len(y)).astype(str), draw.k)
    return [lambda some: softmax(scaled(draw, some.x, space) @ head.weight.T + head.bias)] * len(draw.parts)


def scaled(draw: Draw, x: NDArray[np.float32], space: str) -> NDArray[np.float32]:
    """Return rows of about unit variance."""
    z = seen(draw, x, space)
    return (z * np.sqrt(z.shape[1])).astype(np.float32)


def elbo(x: Tensor, d: int, out: Tensor) -> Tensor:
    """Return the mean loss: squared error, and 0.1 times the divergence from a normal one."""
    mean, spread = out[:, d:].chunk(2, 1)
    apart = (mean.square() + spread.exp() - 1 - spread).sum(1) / 2
    return ((out[:, :d] - x).square().mean(1) + 0.1 * apart / d).mean()


def ways(**of: Sequence[Any]) -> list[dict[str, Any]]:
    """Return every combination."""
    return [dict(zip(of, one, strict=True)) for one in itertools.product(*of.values())]


SPACES = ("all", "directions")
METHODS_OF_OTHERS: dict[str, tuple[Callable[..., list[Answers]], list[dict[str, Any]]]] = {
    "least_squares": (least_squares, ways(space=SPACES, ridge=(0.1, 0.3, 1.0))),
    "prototypes": (prototypes, ways(space=SPACES, centred=(False, True))),
    "fedprox": (fedprox, ways(mu=(0.0, 0.1, 1.0), rounds=(20, 60), lr=(0.01, 0.03, 0.1), space=SPACES)),
    "cvae": (cvae, ways(rounds=(20, 50), lr=(1e-3, 3e-3), clip=(0.5, 1.5), space=SPACES)),
}
NAMES = {
    "oneshot": "one letter",
    "prototypes": "prototypes",
    "least_squares": "least squares",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "proxyfl": "ProxyFL",
    "cvae": "DP-CVAE",
}
_shared: dict[str, Any] = {}


def begin(table: Path, directions: Path) -> None:
    """Read what all trainings of a process share."""
    torch.set_num_threads(1)
    _shared.update(table=read_table(table, None), along=read_projection(directions, str(directions)))


@lru_cache(maxsize=4)
def hospitals(cell: SamplingCell, seed: int) -> tuple[list[FeatureTable], FeatureTable, list[FittedHead]]:
    """Return hospitals, the test, and the head that each has alone."""
    parts, test = sample_sites(_shared["table"], cell, seed)
    return (
        parts,
        test,
        [fit_linear_head(normalize_rows(one.x), one.y, one.patient, len(one.classes)) for one in parts],
    )


def tried(
    method: str, cell: SamplingCell, epsilon: float, seed: int, way: Mapping[str, Any]
) -> list[tuple[float, float]]:
    """Return (score, own score) of each hospital."""
    parts, test, lone = hospitals(cell, seed)
    rng = np.random.default_rng([abs(seed), seed < 0, len(parts), len(parts[0].y)])
    answers = METHODS_OF_OTHERS[method][0](Draw(parts, epsilon, _shared["along"], rng), **way)
    found = []
    for says, part, head in zip(answers, parts, lone, strict=True):
        stack = build_ensemble(head.held_out, says(part), part.y, part.patient)
        alone, joined = softmax(normalize_rows(test.x) @ head.weight.T + head.bias), says(test)
        right = (balanced_accuracy_score(test.y, said.argmax(1)) for said in (stack(alone, joined), joined))
        found.append((float(next(right)), float(next(right))))
    return found


def of_cell(
    method: str, cell: SamplingCell, epsilons: Sequence[float], seeds: int
) -> list[tuple[str | float | int, ...]]:
    """Tune a method on a draw of its own, and return its lines."""
    _, choices = METHODS_OF_OTHERS[method]
    best = max(choices, key=lambda way: np.mean(tried(method, cell, MIDDLE, TUNING, way), axis=0).tolist())
    setting = " ".join(f"{key}={value}" for key, value in best.items())
    return [
        (method, epsilon, *cell, seed, f"S{k + 1}", f"{score:.5f}", f"{own:.5f}", setting)
        for epsilon in epsilons
        for seed in range(seeds)
        for k, (score, own) in enumerate(tried(method, cell, epsilon, seed, best))
    ]


def run(given: argparse.Namespace) -> None:
    """Write the lines of all methods."""
    cells = parse_cells(given.hospitals, "alike")
    works = [(method, cell, given.epsilon, given.seeds) for method in given.methods for cell in cells]
    with (
        given.out.open("w", newline="") as file,
        ProcessPoolExecutor(given.jobs, get_context("spawn"), begin, (given.table, given.directions)) as pool,
    ):
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for lines in pool.map(of_cell, *zip(*works, strict=True)):
            table.writerows(lines)
            file.flush()
            print(lines[0][0], *lines[0][2:5], lines[0][-1], flush=True)


def read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the lines of a CSV that are no tuning."""
    with path.open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["seed"] != str(TUNING))


def rows(given: argparse.Namespace) -> None:
    """Write the means over hospitals of each seed."""
    of: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in itertools.chain(*map(read, given.tables)):
        of[tuple(row[name] for name in COLUMNS[:6])].append(row)
    with given.out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((*COLUMNS[:6], *COLUMNS[7:]))
        for key, found in sorted(of.items()):
            means = [np.mean([float(row[name] or "nan") for row in found]) for name in COLUMNS[7:9]]
            setting = found[0].get("setting") or f"rounds={found[0]['rounds']} lr={found[0]['lr']}"
            table.writerow((*key, *(f"{one:.4f}" for one in means), setting))


def show(given: argparse.Namespace) -> None:
    """Print gains over staying alone, in pairs over seeds, with 95 % intervals, and what a method says by itself."""
    score: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    own: dict[Any, list[float]] = defaultdict(list)
    for row in itertools.chain(*map(read, given.tables)):
        key = (row["method"], float(row["epsilon"]), row["sites"], row["n"], row["skew"])
        score[key][row["seed"]].append(float(row["score"]))
        own[key].append(float(row["own_score"] or "nan"))
    methods = sorted({key[0] for key in score} & set(NAMES), key=list(NAMES).index)
    named = " | ".join(NAMES[one] for one in methods)
    print(f"| hospitals × rows | ε | alone | pooled | {named} |\n{'|---' * (4 + len(methods))}|")
    for cell in dict.fromkeys(key[2:] for key in score):
        for epsilon in sorted({key[1] for key in score if key[1] and key[2:] == cell}):
            alone, pooled = (score[name, 0.0, *cell] for name in ("regular", "joint"))
            told = []
            for method in methods:
                ours = score[method, epsilon, *cell]
                gains = [np.mean(ours[seed]) - np.mean(alone[seed]) for seed in sorted(ours)]
                half = t.ppf(0.975, len(gains) - 1) * np.std(gains, ddof=1) / np.sqrt(len(gains))
                by_itself = np.mean(own[method, epsilon, *cell])
                told.append(f"{format_signed(np.mean(gains), 3)} ± {half:.3f} ({by_itself:.3f})")
            both = (f"{np.mean(list(one.values())):.3f}" for one in (alone, pooled))
            where = f"{cell[0]} × {cell[1]}, {cell[2]}"
            print(f"| {where} | {epsilon:g} | {' | '.join(both)} | {' | '.join(told)} |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    does = parser.add_subparsers(required=True)
    runs = does.add_parser("run")
    runs.add_argument("table", type=Path)
    runs.add_argument("--directions", type=Path, required=True)
    runs.add_argument("--hospitals", default=CELLS)
    runs.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 3.0])
    runs.add_argument("--methods", nargs="*", default=list(METHODS_OF_OTHERS))
    runs.add_argument("--seeds", type=int, default=5)
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--out", type=Path, default=Path("theirs.csv"))
    runs.set_defaults(does=run)
    keeps = does.add_parser("rows")
    keeps.add_argument("tables", type=Path, nargs="+")
    keeps.add_argument("--out", type=Path, required=True)
    keeps.set_defaults(does=rows)
    shows = does.add_parser("show")
    shows.add_argument("tables", type=Path, nargs="+")
    shows.set_defaults(does=show)
    given = parser.parse_args()
    given.does(given)


if __name__ == "__main__":
    main()
