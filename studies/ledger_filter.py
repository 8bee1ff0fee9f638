"""Accuracy of one federated job with the ledger's filter, and with FLARE's SVTPrivacy at the ε that it has.

    python studies/ledger_filter.py run
    python studies/ledger_filter.py show --page docs/how-to/other-federations.md

Three sites train a softmax regression on scikit-learn's digits (8 × 8 pixels, 1 437 for training) by FedAvg in ten
rounds; every digit is a patient. Each result passes the filter that a job's would pass, called as FLARE calls it. The
learning rate, and the bound of the filter, are the best of a few for each row, on the test digits: so every row is
flattered alike.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pages
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from sklearn.datasets import load_digits

from wsi_fl.hospitals.flare.ledger_filter import UNIT_KEY, LedgerFilter

ROWS = Path(__file__).parent / "rows" / "ledger_filter.csv"
N_SITES, ROUNDS, SEEDS, DELTA = 3, 10, range(5), 1e-5
LOCAL_STEPS = 20  # of gradient descent in a round, where the site is the unit
_RATES, _CLIPS, _GAMMAS = (0.1, 0.5, 2.0), (0.01, 0.1, 1.0), (1e-5, 1e-3, 1e-2, 1e-1)
Weights = dict[str, np.ndarray]
Send = Callable[[int, Weights, DXO], tuple[Weights, float]]
"""A site's number, the weights of a round and its result → what leaves, and ε of the job so far."""


def split_digits(seed: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Return the training digits of each site, and the test digits, as (x, y)."""
    x, y = load_digits(return_X_y=True)
    x, order = x / 16, np.random.default_rng(seed).permutation(len(y))
    test, *parts = np.array_split(order, [360, *(360 + (len(y) - 360) * k // N_SITES for k in range(1, N_SITES))])
    return [(x[part], y[part]) for part in parts], (x[test], y[test])


def score_rows(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Return the probabilities float64[n, 10] of digits float64[n, 64]."""
    z = x @ weights["w"] + weights["b"]
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def train_site(weights: Weights, x: np.ndarray, y: np.ndarray, rate: float) -> DXO:
    """Return the weights after some steps of gradient descent."""
    for _ in range(LOCAL_STEPS):
        error = score_rows(weights, x) - np.eye(10)[y]
        weights = {"w": weights["w"] - rate * x.T @ error / len(y), "b": weights["b"] - rate * error.mean(axis=0)}
    return DXO(DataKind.WEIGHTS, {name: value.astype(np.float32) for name, value in weights.items()})


def list_gradients(weights: Weights, x: np.ndarray, y: np.ndarray, rate: float) -> DXO:
    """Return a step against each digit's own gradient, a row for each."""
    error = score_rows(weights, x) - np.eye(10)[y]
    rows = {"w": -rate * x[:, :, None] * error[:, None, :], "b": -rate * error}
    return DXO(DataKind.WEIGHT_DIFF, rows, {UNIT_KEY: "patient"})


def call_filter(component: object, chain: str, dxo: DXO, context: FLContext) -> DXO:
    component.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    return from_shareable(component.process(dxo.to_shareable(), context))


def make_context(component: object) -> FLContext:
    context, engine = (
        FLContext(),
        SimpleNamespace(
            get_all_components=lambda: {"ledger": component}, fire_event=lambda *_: None, handlers=[component]
        ),
    )
    context.get_engine, context.get_job_id = (lambda: engine), (lambda default=None: "study")
    for key, value in (
        (FLContextKey.TASK_ID, str(uuid4())),
        (FLContextKey.RUNNER, SimpleNamespace(find_executor=lambda name: None)),
        (FLContextKey.SCOPE_OBJECT, SimpleNamespace(task_result_filters={FilterKey.OUT: [component]})),
    ):
        context.set_prop(key, value, private=True, sticky=False)
    return context


def send_openly(site: int, base: Weights, result: DXO) -> tuple[Weights, float]:
    return result.data, np.inf


def open_accounts(folder: Path, unit: str, epsilon: float, clip: float, n: int) -> Send:
    """Return what leaves through the ledger's filter, each site with an account of its own."""
    os.environ["XDG_STATE_HOME"], filters = str(folder), []  # new hospitals each time
    for site in range(N_SITES):
        path = folder / f"S{site}.toml"
        path.write_text(
            f'name = "S{site}"\nledger = "S{site}.jsonl"\nunit = "{unit}"\nn = {n}\nclip = {clip}\ndelta = {DELTA}\n'
            f"max_epsilon = 50.0\ntarget_epsilon = {epsilon}\nrounds = {ROUNDS}\n"
        )
        filters.append(LedgerFilter(str(path)))

    def send(site: int, base: Weights, result: DXO) -> tuple[Weights, float]:
        context = make_context(filters[site])
        call_filter(filters[site], FilterChainType.TASK_DATA_CHAIN, DXO(DataKind.WEIGHTS, base), context)
        answer = call_filter(filters[site], FilterChainType.TASK_RESULT_CHAIN, result, context)
        return answer.data, answer.meta["wsi_fl_privacy"]["epsilon"]

    return send


def open_sparse_vector(options: dict[str, float]) -> Send:
    """Return what leaves through FLARE's SVTPrivacy, and the ε that it counts itself."""
    filters = [SVTPrivacy(**options) for _ in range(N_SITES)]

    def send(site: int, base: Weights, result: DXO) -> tuple[Weights, float]:
        update = DXO(DataKind.WEIGHT_DIFF, {name: value - base[name] for name, value in result.data.items()})
        answer = call_filter(filters[site], FilterChainType.TASK_RESULT_CHAIN, update, make_context(filters[site]))
        return {name: base[name] + value for name, value in answer.data.items()}, filters[site].get_privacy_spent()

    return send


def run_job(seed: int, unit: str, rate: float, send: Send) -> tuple[float, float]:
    """Return the test accuracy of the model after the last round, and the largest ε of a site."""
    sites, (x_test, y_test) = split_digits(seed)
    weights, spent = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}, 0.0
    for _ in range(ROUNDS):
        parts = []
        for site, (x, y) in enumerate(sites):
            result = train_site(weights, x, y, rate) if unit == "site" else list_gradients(weights, x, y, rate)
            part, epsilon = send(site, weights, result)
            if unit == "patient":
                part = {
                    name: weights[name] + (v if v.ndim == weights[name].ndim else v.mean(0)) for name, v in part.items()
                }
            parts.append(part)
            spent = max(spent, epsilon)
        weights = {name: np.mean([part[name] for part in parts], axis=0).astype(np.float32) for name in weights}
    return float((score_rows(weights, x_test).argmax(axis=1) == y_test).mean()), spent


class Setting(NamedTuple):
    """A row of the table: its unit, what opens the filters of a folder and a bound, and the bounds to try."""

    name: str
    unit: str
    open_filters: Callable[[Path, float], Send]
    bounds: Sequence[float]


def list_settings() -> list[Setting]:
    """Return the settings of the table's rows."""
    n = min(len(y) for _, y in split_digits(0)[0])
    openly = [
        Setting(f"none, {text}", unit, lambda folder, bound: send_openly, (0.0,))
        for text, unit in ((f"{LOCAL_STEPS} steps a round", "site"), ("one step a round", "patient"))
    ]
    ours = [
        Setting(
            f"the ledger's, unit {unit}, target_epsilon = {epsilon:g}",
            unit,
            lambda folder, bound, unit=unit, epsilon=epsilon: open_accounts(folder, unit, epsilon, bound, n),
            _CLIPS,
        )
        for unit, epsilon in product(("site", "patient"), (1.0, 3.0, 8.0))
    ]
    theirs = [("SVTPrivacy as it comes", {}, (1e-5,)), ("SVTPrivacy, its best gamma", {}, _GAMMAS)]
    for epsilon in (1.0, 3.0, 8.0):
        half = epsilon / ROUNDS / 2  # of each round, for choosing and for the numbers that leave
        options = {"epsilon": half, "epsilon_release": half}
        theirs.append((f"SVTPrivacy, ε = {epsilon:g} for the job, its best gamma", options, _GAMMAS))
    return (
        openly
        + ours
        + [
            Setting(name, "site", lambda folder, bound, o=options: open_sparse_vector({**o, "gamma": bound}), gammas)
            for name, options, gammas in theirs
        ]
    )


def measure_setting(setting: Setting) -> dict[str, object]:
    """Return the row of a setting, at the rate and bound with the best accuracy."""
    best: dict[str, object] = {"accuracy": -1.0}
    for rate, bound in product(_RATES, setting.bounds):
        scores = []
        for seed in SEEDS:
            np.random.seed(seed)  # noqa: NPY002  of SVTPrivacy
            with tempfile.TemporaryDirectory() as folder:
                # a step's length is in proportion to its rate
                filters = setting.open_filters(Path(folder), bound * (rate if setting.unit == "patient" else 1))
                scores.append(run_job(seed, setting.unit, rate, filters))
        accuracy, epsilon = np.mean([score for score, _ in scores]), max(value for _, value in scores)
        if accuracy > float(str(best["accuracy"])):
            sd = np.std([score for score, _ in scores], ddof=1)
            best = {"setting": setting.name, "accuracy": f"{accuracy:.3f}", "sd": f"{sd:.3f}"}
            best |= {"epsilon": f"{epsilon:.4g}", "rate": rate, "bound": bound}
    return best


def measure(arguments: argparse.Namespace) -> None:
    """Append a row for each setting."""
    os.fsync = lambda descriptor: None  # thousands of accounts that nobody needs
    for setting in list_settings():
        row = measure_setting(setting) | pages.describe_origin(arguments.commit)
        pages.append_rows(arguments.rows, [row], ("setting",))
        print(row, flush=True)


def render_tables(rows: Sequence[pages.Row]) -> dict[str, str]:
    """Return the page's table."""
    lines = [
        (
            row["setting"],
            "none" if row["epsilon"] == "inf" else f"{float(row['epsilon']):.3g}",
            f"{row['accuracy']} ± {row['sd']}",
        )
        for row in rows
    ]
    table = pages.render_table(["filter", "ε of the job", "accuracy"], lines)
    return {"ledger filter": f"{table}\n\n{pages.describe_rows(rows)}"}


def show(arguments: argparse.Namespace) -> None:
    """Put the table into a page."""
    page = arguments.page.read_text("utf-8")
    arguments.page.write_text(pages.fill_page(page, render_tables(pages.read_rows(arguments.rows))), "utf-8")


if __name__ == "__main__":
    parser, _ = pages.build_parser(__doc__, ROWS, measure, show)
    parsed = parser.parse_args()
    parsed.work(parsed)
