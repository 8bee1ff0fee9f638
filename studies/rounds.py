"""From how many rows on do rounds pay? The tables and the figure of ROUNDS.md, from the lines of `wsi-fl bench`.

    wsi-fl bench digits.npz --method oneshot,proxyfl,fedavg --epsilon 1,3,8 --skew alike,0.9 --seeds 3 \
        --hospitals 4x250,16x250,4x1000,16x1000,4x4000,4x12000 --projection public.npz --out digits.csv
    python studies/rounds.py rows digits.csv studies/rows/digits.csv     # the mean and the worst hospital of each seed
    python studies/rounds.py show studies/rows/digits.csv studies/images/rounds.png
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t

WHAT = ("method", "epsilon", "sites", "n", "skew", "seed")
NAMES = {"oneshot": "one letter", "proxyfl": "ProxyFL", "fedavg": "FedAvg", "joint": "pooled, no noise"}
COLOURS = {"oneshot": "#0072b2", "proxyfl": "#d55e00", "fedavg": "#009e73", "joint": "#999999"}


def rows(source: Path, target: Path) -> None:
    """Write, of each training, the mean over hospitals and the least gain of one."""
    of = defaultdict(list)
    with source.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["seed"] != "-1":
                of[tuple(row[name] for name in WHAT)].append(row)
    with target.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((*WHAT, "score", "least_gain", "own_score", "rounds", "lr"))
        for key, found in sorted(of.items()):
            alone = np.array([float(row["score"]) for row in of["regular", "0", *key[2:]]])
            score = np.array([float(row["score"]) for row in found])
            own = [float(row["own_score"]) for row in found if row["own_score"]]
            said = [f"{np.mean(own):.4f}"] if own else [""]
            in_rounds = [found[0]["rounds"], found[0]["lr"]] if key[0] in ("proxyfl", "fedavg") else ["", ""]
            table.writerow((*key, f"{score.mean():.4f}", f"{(score - alone).min():.4f}", *said, *in_rounds))


def read(path: Path):
    """Return {(sites, n, skew): {(method, ε): {seed: row}}}."""
    found = defaultdict(lambda: defaultdict(dict))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            cell = int(row["sites"]), int(row["n"]), row["skew"]
            found[cell][row["method"], float(row["epsilon"])][row["seed"]] = row
    return found


def gain(of, method: str, epsilon: float) -> tuple[float, float]:
    """Return the mean gain over staying alone, in pairs over seeds, and half of its 95 % interval."""
    alone, joined = of["regular", 0.0], of[method, epsilon]
    gains = np.array([float(joined[seed]["score"]) - float(alone[seed]["score"]) for seed in sorted(alone)])
    half = t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains))
    return float(gains.mean()), float(half)


def table(found) -> None:
    """Print a row for each cell and ε."""
    print("| hospitals × rows | ε | alone | one letter | ProxyFL | FedAvg | pooled |\n|---|---|---|---|---|---|---|")
    for (sites, n, skew), of in sorted(found.items(), key=lambda one: (one[0][2], one[0][1], one[0][0])):
        for epsilon in sorted({epsilon for _, epsilon in of if epsilon}):
            alone = np.mean([float(row["score"]) for row in of["regular", 0.0].values()])
            told = ["{:+.3f} ± {:.3f}".format(*gain(of, name, epsilon)) for name in ("oneshot", "proxyfl", "fedavg")]
            pooled = "{:+.3f}".format(gain(of, "joint", 0.0)[0])
            print(f"| {sites} × {n}, {skew} | {epsilon:g} | {alone:.3f} | {' | '.join(told)} | {pooled} |")


def draw(found, path: Path, epsilon: float = 3.0) -> None:
    """Draw gains against rows of a hospital, a panel for each skew; 4 hospitals, and 16 dashed."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, skew, title in zip(panels, ("0.9", "alike"), ("90 % of one class at each", "alike"), strict=True):
        for method, name in NAMES.items():
            for sites, style in ((4, "-"), (16, "--")):
                cells = sorted(cell for cell in found if cell[0] == sites and cell[2] == skew)
                gains = [gain(found[cell], method, 0.0 if method == "joint" else epsilon) for cell in cells]
                axes.errorbar(
                    [cell[1] for cell in cells],
                    [one[0] for one in gains],
                    [one[1] for one in gains],
                    fmt=style + "o",
                    markersize=3,
                    capsize=2,
                    color=COLOURS[method],
                    label=name if sites == 4 else None,
                )
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set(xscale="log", xlabel="rows of a hospital", title=title)
        axes.set_xticks([250, 1000, 4000, 12000], ["250", "1000", "4000", "12 000"])
        axes.minorticks_off()
    panels[0].set_ylabel(f"gain over staying alone, ε = {epsilon:g}")
    panels[1].legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        rows(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        table(read(Path(sys.argv[2])))
        if len(sys.argv) > 3:
            draw(read(Path(sys.argv[2])), Path(sys.argv[3]))
