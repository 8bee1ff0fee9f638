"""Sites that learn together in this process, from arrays: the loop of every study, without a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import maxsize
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from wsi_fl.federation.comm import LocalComm
from wsi_fl.federation.loop import run
from wsi_fl.federation.methods import DEFAULT, METHODS, Method, Weights
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import Examples, joined, tensor_of
from wsi_fl.learning.local import DPSettings, Learner, know_rows
from wsi_fl.learning.units import rows_alone, whole_patients
from wsi_fl.models.directions import N_RANDOM, Directions
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.guarantee import Terms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.plan import Mode, PrivacyPlan, Unit, plan_of_round
from wsi_fl.runs.site import SiteFolder
from wsi_fl.types import UsageError

_MakeModel = Callable[[], nn.Module]
_CPU, _RUN = torch.device("cpu"), "in memory"
_DIMENSIONS_OF_BAGS = 2
_SEED_STEP = 1000  # between the starts of private models, which differ from site to site


@dataclass(frozen=True)
class Learned:
    """What a site has after the last round.

    Attributes:
        models: by role: "private", "proxy", or both, as the method has them.
        epsilon: ε of all rounds at the δ that was asked for; None without differential privacy.
        guarantee: what ε is worth: "guaranteed", "nominal" or "none".
        rounds: of each its losses, the ε until then, scores on "own" and "merged" test examples, messages, bytes.
    """

    models: Mapping[str, nn.Module]
    epsilon: float | None
    guarantee: str
    rounds: list[Mapping[str, Any]] = field(repr=False)


def federate(
    sites: Mapping[str, Examples],
    method: str | Method = DEFAULT,
    *,
    private: _MakeModel,
    proxy: _MakeModel | None = None,
    tests: Mapping[str, Examples] | None = None,
    rounds: int = 10,
    batch_size: int = 32,
    lr: float = 1e-3,
    sigma: float | None = 1.0,
    clip: float = 1.0,
    delta: float = 1e-5,
    unit: Unit = "row",
    alpha: float = 0.3,
    beta: float = 0.0,
    directions: Directions | int = N_RANDOM,
    seed: int = 0,
    folder: str | Path | None = None,
) -> dict[str, Learned]:
    """Let sites learn together by a method, an epoch in every round, as ranks do under MPI.

    It is Algorithm 1 of Kalra et al., Nature Communications 2023.

    Args:
        sites: the training examples of each site, by its name.
        method: a name in METHODS, or a row of your own; not one that needs generated images.
        private, proxy: make a fresh model; without `proxy` both roles have the same. `oneshot` makes its own proxy.
        tests: examples of each site on which models are evaluated after every round.
        sigma, clip, delta, unit: of each site's privacy plan; with sigma None models leave without privacy.
        alpha, beta: how much the private model learns from the proxy, and the proxy from it (eqs. 4 and 5). With β > 0
            the teacher knows no privacy, and the proxy's ε is nominal.
        directions: along which `oneshot` sums features: those of public tissue, or how many random ones.
        seed: of the models' starts. Noise and batches are drawn anew whenever there is privacy.
        folder: where ledgers and checkpoints stay; without it they are gone afterwards.

    Raises:
        UsageError: for a method that needs more than examples, numbers that make no privacy plan, or a model that
            cannot be trained with differential privacy.
    """
    row = METHODS[method] if isinstance(method, str) else method
    if row.without_dp or row.learns_from not in ("own", "everybody"):
        raise UsageError(f"{row.name} needs more than the sites' own examples; train it in a study")
    n_classes = int(max(part.label.max() for part in sites.values())) + 1
    merged = {"merged": joined(list(tests.values()))} if tests and len(tests) > 1 else {}
    if row.once:
        x = next(iter(sites.values())).read(np.zeros(1, np.int64))
        bags = x.ndim == _DIMENSIONS_OF_BAGS + 1
        proxy = partial(
            SharedHead,
            n_classes,
            x.shape[-1] - bags,
            bags=bags,
            directions=directions,
            patients=unit == "patient",
        )
        rounds, batch_size = 1, maxsize
    mode: Mode = "paper" if row.taught and beta else "strict"
    terms = Terms(
        delta,
        allow=() if sigma else ("model",),
        guarantee="nominal" if mode == "paper" else "guaranteed",
        unit=unit,
    )
    schedule = Schedule(
        rounds=rounds,
        epochs_per_round=1,
        batch_size=batch_size,
        eval_every=1,
        seed=seed,
        weights=Weights(alpha, beta),
        self_weight=0.0,
        make_augment=lambda _: None,
        answer="proxy" if row.once else "private",
    )
    lines: dict[str, list[Mapping[str, Any]]] = {name: [] for name in sites}

    def report(told: Mapping[str, Any]) -> None:
        if "done" in told:
            lines[told["site"]].append(told["done"])

    def learner(role: str, index: int, train: Examples, plan: PrivacyPlan | None) -> Learner:
        own = role == "private" and not row.learners[role].common
        make = private if role == "private" else proxy or private
        model = _started(make, seed + (_SEED_STEP * (index + 1) if own else 0))
        dp = _settings(model, train, plan) if row.learners[role].dp and plan is not None else None
        return Learner(model, lr=lr, weight_decay=0.0, device=_CPU, dp=dp)

    with TemporaryDirectory() as temporary:
        acting = []
        for index, name in enumerate(sites):
            train = joined(list(sites.values())) if row.learns_from == "everybody" else sites[name]
            units = rows_alone(len(train)) if unit == "row" else whole_patients(train.patient, None, name)
            plan, place = None, Path(folder or temporary) / name
            if sigma is not None:
                plan = plan_of_round(
                    n=units.n,
                    batch_size=min(batch_size, units.n),
                    epochs=1,
                    sigma=sigma,
                    clip=clip,
                    delta=delta,
                    unit=unit,
                    mode=mode,
                )
            made = Site(
                index=index,
                name=name,
                learners={role: learner(role, index, train, plan) for role in row.learners},
                train=train,
                tests=({"own": tests[name]} if tests and name in tests else {}) | merged,
                ledger=PrivacyLedger(place / "ledger.jsonl", site=name, run=_RUN, terms=terms),
                folder=SiteFolder(place),
                device=_CPU,
                plan=plan,
                units=units,
                n_classes=n_classes,
            )
            if row.once:
                know_rows(made.learners["proxy"], train)
            acting.append(made)
        run(acting, row, schedule, LocalComm(len(acting)), report)
        return {
            site.name: Learned(
                {role: site.learners[role].model for role in (("proxy",) if row.once else row.learners)},
                site.ledger.epsilon() if site.plan else None,
                site.ledger.guarantee(),
                lines[site.name],
            )
            for site in acting
        }


def _started(make: _MakeModel, seed: int) -> nn.Module:
    """Return a fresh model, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _settings(model: nn.Module, train: Examples, plan: PrivacyPlan) -> DPSettings:
    """Return the settings of training by a plan; a model of the caller's own is checked first, unless it takes bags."""
    engine, shape = None, tuple(tensor_of(train.read(np.zeros(1, np.int64))).shape[1:])
    if not isinstance(model, SharedHead) and len(shape) != _DIMENSIONS_OF_BAGS:
        with torch.no_grad():
            n_outputs = int(model(torch.zeros(1, *shape)).shape[1])
        engine = check_per_example_gradients(model, shape, n_outputs)
    return DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit, engine)
