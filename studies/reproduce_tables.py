"""The tables and the claims of REPRODUCE.md, from the rows of `reproduce.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pages import describe_rows, render_table
from reproduce import (
    ALPHAS,
    ARCHITECTURES,
    BATCHES,
    FEDERATED,
    METHODS,
    MIXED,
    MLP,
    NAMES,
    NO_DP,
    SKEWS,
    SLIDES,
    STUDIES,
    Row,
    Trial,
    batched,
    weighted,
)
from scipy.stats import t

from wsi_fl.privacy.guarantee import MAX_PROTECTIVE_EPSILON

MIN_SEEDS = 3
"""Fewer pairs of seeds show nothing."""
HEADS = ("private model", "95 % interval", "macro", "proxy", "ε", "seeds")

PAPER_TABLE_2 = {
    "regular": ("0.734 ± 0.105", "0.703 ± 0.132"),
    "joint": ("0.905 ± 0.030", "0.913 ± 0.026"),
    "fedavg": ("0.786 ± 0.086", "0.767 ± 0.109"),
    "avgpush": ("0.776 ± 0.080", "0.790 ± 0.076"),
    "cwt": ("0.769 ± 0.087", "0.783 ± 0.087"),
    "fml": ("0.774 ± 0.085", "0.770 ± 0.010"),
    "proxyfl": ("0.808 ± 0.075", "0.811 ± 0.081"),
}
"""Accuracy and macro-accuracy of the paper's Table 2, mean ± standard deviation over 4 clients and 15 runs."""

Values = dict[int, float]
"""The mean over sites of each seed."""


@dataclass(frozen=True)
class Difference:
    """A mean over seeds with its 95 % interval by Student's t."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean."""
        return float(np.mean(self.values)) if self.values else float("nan")

    @property
    def half(self) -> float:
        """Return half of the interval's width; infinite for a single seed."""
        n = len(self.values)
        return float(t.ppf(0.975, n - 1) * np.std(self.values, ddof=1) / np.sqrt(n)) if n > 1 else float("inf")

    def __str__(self) -> str:
        """Return the mean and its interval, in three digits."""
        interval = f" ({self.mean - self.half:+.3f} to {self.mean + self.half:+.3f})" if len(self.values) > 1 else ""
        return f"{self.mean:+.3f}{interval}"

    @property
    def verdict(self) -> str:
        """Return whether it is above 0: holds, does not hold, or not shown."""
        if len(self.values) < MIN_SEEDS or abs(self.mean) <= self.half:
            return "not shown"
        return "holds" if self.mean > 0 else "does not hold"


def select(rows: Sequence[Row], trial: Trial) -> list[Row]:
    """Return the runs of a trial by seed."""
    return sorted((row for row in rows if row.shows(trial)), key=lambda row: row.seed)


def average(rows: Sequence[Row], trial: Trial, column: str = "accuracy") -> Values:
    """Return the mean over sites of each seed."""
    return {row.seed: float(np.mean(row.values(column))) for row in select(rows, trial) if row.values(column)}


def subtract(ours: Values, theirs: Values) -> Difference:
    """Return the difference in pairs of seeds."""
    return Difference(tuple(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())))


def exceed_best(ours: Values, others: Sequence[Values]) -> Difference:
    """Return the difference to the best of others by its mean over seeds; none where one was not measured."""
    if not all(others):
        return Difference(())
    return subtract(ours, max(others, key=lambda values: np.mean(list(values.values()))))


def spread(rows: Sequence[Row], column: str) -> str:
    """Return mean ± standard deviation over sites and seeds."""
    values = [value for row in rows for value in row.values(column)]
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}" if values else "–"


def render_line(rows: Sequence[Row], trial: Trial, label: str) -> list[str]:
    """Return the cells of a trial."""
    mine = select(rows, trial)
    if not mine:
        return [label, *("–" for _ in HEADS[:-1]), "0"]
    mean = Difference(tuple(average(rows, trial).values()))
    low, high = max(mean.mean - mean.half, 0.0), min(mean.mean + mean.half, 1.0)
    interval = f"{low:.3f} to {high:.3f}" if len(mine) > 1 else "–"
    epsilon = max(float(row.epsilon) for row in mine)
    no_cost = "–" if NO_DP in trial.settings else f"over {MAX_PROTECTIVE_EPSILON:.0f}"
    cost = f"{epsilon:.1f} ({mine[0].guarantee})" if epsilon else no_cost
    cells = [spread(mine, column) for column in ("accuracy", "macro_accuracy", "proxy_accuracy")]
    return [label, cells[0], interval, *cells[1:], cost, str(len(mine))]


def render_study(rows: Sequence[Row], name: str) -> str:
    """Return a table with a line for each method."""
    return render_table(["", *HEADS], [render_line(rows, trial, trial.label) for trial in STUDIES[name]])


def render_slides(rows: Sequence[Row]) -> str:
    """Return the table of slides, with the paper's accuracies beside ours."""
    lines = []
    for trial in STUDIES[SLIDES]:
        paper = ("–", "–") if NO_DP in trial.settings else PAPER_TABLE_2[trial.method]
        lines.append([*render_line(rows, trial, trial.label), *paper])
    return render_table(["", *HEADS, "paper: accuracy", "macro"], lines)


def render_settings(rows: Sequence[Row], lines: Mapping[str, Trial]) -> str:
    """Return a table with a line for each setting."""
    return render_table(["", *HEADS], [render_line(rows, trial, label) for label, trial in lines.items()])


def render_skew(rows: Sequence[Row]) -> str:
    """Return the table of private models' accuracy, method × share of the majority class."""
    lines = []
    for method in METHODS:
        trials = [Trial(method, (MLP,), skew=f"random-major:{share}") for share in SKEWS]
        lines.append([NAMES[method], *(spread(select(rows, trial), "accuracy") for trial in trials)])
    return render_table(["", *(f"{share}" for share in SKEWS)], lines)


def of_architecture(rows: Sequence[Row], method: str, name: str) -> Values:
    """Return the mean over the sites with an architecture, by seed."""
    mine = [k for k, found in enumerate(ARCHITECTURES) if found == name]
    runs = select(rows, Trial(method, pipeline=MIXED))
    return {row.seed: float(np.mean([row.values()[k] for k in mine])) for row in runs}


def render_architectures(rows: Sequence[Row]) -> str:
    """Return the table of private models' accuracy, method × architecture."""
    names = list(dict.fromkeys(ARCHITECTURES))
    lines = []
    for method in ("regular", "fml", "proxyfl"):
        means = [list(of_architecture(rows, method, name).values()) for name in names]
        lines.append([NAMES[method], *(f"{np.mean(m):.3f} ± {np.std(m):.3f}" if m else "–" for m in means)])
    return render_table(["", *names], lines)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper with the difference that is above 0 where it holds."""

    figure: str
    text: str
    difference: Difference
    tolerance: float = 0.0

    @property
    def cells(self) -> list[str]:
        """Return its line of the table."""
        if not self.difference.values:
            return [self.figure, self.text, "–", "0", "not measured"]
        shifted = replace(self.difference, values=tuple(value + self.tolerance for value in self.difference.values))
        return [self.figure, self.text, str(self.difference), str(len(self.difference.values)), shifted.verdict]


def list_order_claims(rows: Sequence[Row], figure: str, name: str, make: Callable[[str], Trial]) -> list[Claim]:
    """Return the claims on the order of the methods under DP, on one data set."""
    by = {method: average(rows, make(method)) for method in METHODS}
    others = [by[method] for method in METHODS if method not in ("proxyfl", "joint")]
    return [
        Claim(
            figure, f"{name}: ProxyFL is ahead of the best other method but Joint", exceed_best(by["proxyfl"], others)
        ),
        Claim(figure, f"{name}: Joint is ahead of ProxyFL", subtract(by["joint"], by["proxyfl"])),
        Claim(figure, f"{name}: ProxyFL is ahead of FML", subtract(by["proxyfl"], by["fml"])),
        Claim(figure, f"{name}: AvgPush is ahead of FedAvg", subtract(by["avgpush"], by["fedavg"])),
        Claim(figure, f"{name}: ProxyFL is ahead of Regular", subtract(by["proxyfl"], by["regular"])),
    ]


def list_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the paper's claims."""

    def mlp(method: str, *settings: str, share: float = 0.8) -> Values:
        return average(rows, Trial(method, (MLP, *settings), skew=f"random-major:{share}"))

    def lose(before: Values, after: Values) -> Values:
        return {seed: before[seed] - after[seed] for seed in before.keys() & after.keys()}

    fashion = "fashion_mnist"
    claims = list_order_claims(rows, "3", "MNIST", Trial)
    claims += list_order_claims(rows, "3", "Fashion-MNIST", lambda method: Trial(method, (), fashion, pipeline=fashion))
    slides = {trial.method: trial for trial in STUDIES[SLIDES] if NO_DP not in trial.settings}
    claims += list_order_claims(rows, "8", "slides", slides.__getitem__)
    for method in ("regular", *FEDERATED[:-1]):
        lost = [lose(mlp(m, share=SKEWS[0]), mlp(m, share=SKEWS[-1])) for m in (method, "proxyfl")]
        text = f"from a share of {SKEWS[0]} to {SKEWS[-1]} ProxyFL loses less than {NAMES[method]}"
        claims.append(Claim("5a", text, subtract(*lost)))
    for name in dict.fromkeys(ARCHITECTURES):
        pair = (of_architecture(rows, method, name) for method in ("proxyfl", "regular"))
        claims.append(Claim("5b", f"ProxyFL improves on Regular: {name}", subtract(*pair)))
    for method in FEDERATED:
        text = f"without DP {NAMES[method]} is ahead of Regular"
        claims.append(Claim("5c", text, subtract(mlp(method, NO_DP), mlp("regular", NO_DP))))
    claims.append(Claim("5c", "with DP FedAvg is behind Regular", subtract(mlp("regular"), mlp("fedavg"))))
    for method in ("regular", *FEDERATED[:-1]):
        lost = [lose(mlp(m, NO_DP), mlp(m)) for m in (method, "proxyfl")]
        claims.append(Claim("5c", f"ProxyFL loses less by DP than {NAMES[method]}", subtract(*lost)))
    others = [mlp(method) for method in METHODS if method not in ("proxyfl", "joint")]
    claims.append(
        Claim("10", "MLPs everywhere: ProxyFL is ahead of all but Joint", exceed_best(mlp("proxyfl"), others))
    )
    sizes = [average(rows, Trial("proxyfl", batched(size))) for size in (BATCHES[0], 250)]
    text = f"batches of {BATCHES[0]} in place of 250 cost no more than 0.02"
    claims.append(Claim("11", text, subtract(*sizes), tolerance=0.02))
    for alpha in ALPHAS:
        pair = (average(rows, Trial(method, weighted(alpha))) for method in ("proxyfl", "fml"))
        claims.append(Claim("12", f"α = β = {alpha}: ProxyFL is ahead of FML", subtract(*pair)))
    gaps = []
    for alpha in (ALPHAS[0], ALPHAS[-1]):
        trial = Trial("proxyfl", weighted(alpha))
        gap = lose(average(rows, trial), average(rows, trial, "proxy_accuracy"))
        gaps.append({seed: abs(value) for seed, value in gap.items()})
    claims.append(Claim("12", "a larger α brings private model and proxy together", subtract(*gaps)))
    return claims


def render_claims(rows: Sequence[Row]) -> str:
    """Return the table of claims."""
    heads = ("figure", "claim", "difference (95 % interval)", "seeds", "here")
    return render_table(heads, [claim.cells for claim in list_claims(rows)])


def describe_state(rows: Sequence[Row]) -> str:
    """Return how many of the runs have been made, when and of which code."""
    trials = dict.fromkeys(trial for study in STUDIES.values() for trial in study)
    done = [row for trial in trials for row in select(rows, trial)]
    hours = sum(float(row.cpu_minutes) for row in done) / 60
    n_all = len(trials) * 5
    left = f" The other {n_all - len(done)} are left, and their cells are empty." if len(done) < n_all else ""
    if not done:
        return f"No run of {n_all} has been made yet."
    origin = describe_rows([{"date": row.date, "commit": row.commit} for row in done])
    return f"{len(done)} of {n_all} runs, {hours:.1f} CPU hours.{left} {origin}"


def render_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the page by the name of their marker."""
    alphas = {
        f"{NAMES[method]}, α = β = {alpha}": Trial(method, weighted(alpha))
        for method in ("fml", "proxyfl")
        for alpha in ALPHAS
    }
    return {
        "state": describe_state(rows),
        "claims": render_claims(rows),
        **{name: render_study(rows, name) for name in ("mnist", "fashion_mnist", "mlp", "without_dp")},
        SLIDES: render_slides(rows),
        "skew": render_skew(rows),
        "architectures": render_architectures(rows),
        "batch": render_settings(rows, {f"B = {size}": Trial("proxyfl", batched(size)) for size in BATCHES}),
        "alpha": render_settings(rows, alphas),
    }
