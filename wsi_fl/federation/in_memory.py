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
from wsi_fl.learning.examples import Examples, joined, problem_of, tensor_of
from wsi_fl.learning.local import DPSettings, Learner, know_rows
from wsi_fl.learning.metrics import one_each
from wsi_fl.learning.units import rows_alone, whole_patients
from wsi_fl.models.directions import N_RANDOM, Directions
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.guarantee import Terms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.measurement import right_way
from wsi_fl.privacy.plan import Mode, PrivacyPlan, Unit, plan_of_round
from wsi_fl.runs.site import SiteFolder
from wsi_fl.types import UsageError, one_line

_MakeModel = Callable[[], nn.Module]
_CPU, _RUN = torch.device("cpu"), "in memory"
_DIMENSIONS_OF_BAGS = 2
_SEED_STEP = 1000  # between the starts of private models, which differ from site to site


@dataclass(frozen=True)
class Learned:
    """What a site has after the last round.

    Attributes:
        models: by role: "private", "proxy" or "shared", or two, as the method has them.
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
        private, proxy: make a fresh model; without `proxy` both roles have the same. `oneshot` makes its own head,
            `shared`.
        tests: examples of each site on which models are evaluated after every round.
        sigma, clip, delta, unit: of each site's privacy plan; with sigma None models leave without privacy.
        alpha, beta: how much the private model learns from the proxy, and the proxy from it (eqs. 4 and 5). With β > 0
            the teacher knows no privacy, and the proxy's ε is nominal.
        directions: along which `oneshot` sums features: those of public tissue, or how many random ones.
        seed: of the models' starts. Noise and batches are drawn anew whenever there is privacy.
        folder: where ledgers and checkpoints stay; without it they are gone afterwards.

    Raises:
        UsageError: before the first round, for a method that needs more than examples, numbers that make no privacy
            plan, rows that are not finite, labels that are no positions in the classes, or a model that cannot be
            trained with differential privacy. Later, for a model that fails while it learns.
    """
    row = METHODS[method] if isinstance(method, str) else method
    if row.without_dp or row.learns_from not in ("own", "everybody"):
        raise UsageError(f"{row.name} needs more than the sites' own examples; train it in a study")
    n_classes = _require_examples(
        sites,
        tests or {},
        row,
        {"private": private, **dict.fromkeys(("proxy", "shared"), proxy or private)},
        seed,
    )
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
            kind=next(iter(sites.values())).task.kind,
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
        answer="shared" if row.once else "private",
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
        return Learner(model, lr=lr, weight_decay=0.0, device=_CPU, dp=dp, task=train.task)

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
                know_rows(made.learners["shared"], train)
            acting.append(made)
        try:
            run(acting, row, schedule, LocalComm(len(acting)), report)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # whatever somebody's model raises
            raise UsageError(f"a model fails while it learns: {one_line(error)[:200]}") from error
        return {
            site.name: Learned(
                {role: site.learners[role].model for role in (("shared",) if row.once else row.learners)},
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
    """Return the settings of training by a plan; a model of the caller's own is measured on rows of the site first."""
    engine = None
    if not isinstance(model, SharedHead) and len(train) > 1:
        rows = np.arange(min(_MEASURED, len(train)))
        patient = None
        if plan.unit == "patient":
            patient = torch.from_numpy(np.unique(one_each(train.patient[rows]), return_inverse=True)[1])
        engine = right_way(model, tensor_of(train.read(rows)), patient)
    return DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit, engine)


_MEASURED = 32


def _require_examples(
    sites: Mapping[str, Examples],
    tests: Mapping[str, Examples],
    method: Method,
    models: Mapping[str, _MakeModel],
    seed: int,
) -> int:
    """Return how many outputs a model needs, or has; refuse examples that none can learn from, or its models cannot.

    Raises:
        UsageError: in one line, with the site and the first row that is wrong.
    """
    if not sites:
        raise UsageError("no site has examples")
    tasks = {part.task.kind: part.task for part in (*sites.values(), *tests.values())}
    if len(tasks) > 1:
        raise UsageError(f"all sites must be asked the same, not {' and '.join(sorted(tasks))}")
    (task,) = tasks.values()
    if method.once:
        numbers = {"survival": len(getattr(task, "ends", ())), "number": 1}
        labels = [part.label for part in sites.values() if part.label.dtype.kind in "iu"]
        largest = max((int(label.max(initial=0)) for label in labels), default=0)
        n_outputs = numbers.get(task.kind, largest + 1)
    else:
        n_outputs = min(_outputs_of(role, models[role], sites, seed) for role in models)
    for name, part in (*sites.items(), *((f"tests of {name}", part) for name, part in tests.items())):
        if problem := problem_of(part, n_outputs):
            raise UsageError(f"{name}: {problem}")
        x = part.read(np.zeros(1, np.int64))
        if method.once and x.ndim not in (2, 3):
            raise UsageError(
                f"{name}: {method.name} sums features, not images; give float32[n, d] or bags of them"
            )
    return n_outputs


@torch.no_grad()
def _outputs_of(role: str, make: _MakeModel, sites: Mapping[str, Examples], seed: int) -> int:
    """Return how many numbers a model says of each row, the same at all sites.

    Raises:
        UsageError: when a site has no row, or the model cannot take it.
    """
    model, n_outputs = _started(make, seed).eval(), 0
    for name, part in sites.items():
        if not len(part):
            raise UsageError(f"{name}: it has no examples")
        try:
            with torch.random.fork_rng(devices=[]):
                outputs = model(tensor_of(part.read(np.arange(min(2, len(part))))))
        except Exception as error:  # whatever somebody's architecture raises
            raise UsageError(
                f"{name}: its {role} model cannot take the rows: {one_line(error)[:200]}"
            ) from None
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or outputs.dtype != torch.float32:
            raise UsageError(f"{name}: its {role} model must return float32[b, classes]")
        n_outputs = outputs.shape[1]
    return n_outputs
