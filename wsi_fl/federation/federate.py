"""Federated learning in this process, from arrays: the training loop of a study, without a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import maxsize
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from wsi_fl.data.batches import build_tensor
from wsi_fl.data.cohort import Cohort, concatenate_examples, find_problem
from wsi_fl.data.metrics import fill_patient_names
from wsi_fl.data.privacy_units import patient_units, row_units
from wsi_fl.federation.comm import LocalComm
from wsi_fl.federation.loop import run
from wsi_fl.federation.methods import DEFAULT_METHOD, METHODS, Method, Weights
from wsi_fl.federation.participant import join
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_state import Participant
from wsi_fl.learning.ensemble import COMMON
from wsi_fl.privacy.engine_selection import select_engine
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Guarantee
from wsi_fl.privacy.privacy_plan import PrivacyPlan, Unit, plan_of_round
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.system.denormals import flush_denormals
from wsi_fl.types import UsageError, single_line

_MakeModel = Callable[[], nn.Module]
_CPU, _RUN = torch.device("cpu"), "in memory"
_SEED_STEP = 1000  # between the seeds of private models, which differ between sites


@dataclass(frozen=True)
class SiteResult:
    """A site's models and privacy cost after the last round.

    Attributes:
        models: by role: "private", "proxy", "shared", or two of them.
        epsilon: ε of all rounds at the requested δ; None without differential privacy.
        guarantee: level of ε: "guaranteed", "nominal" or "none".
        rounds: losses, ε so far, scores on "own" and "merged" test examples, messages and bytes of each.
    """

    models: Mapping[str, nn.Module]
    epsilon: float | None
    guarantee: str
    rounds: list[Mapping[str, Any]] = field(repr=False)


def federate(
    sites: Mapping[str, Cohort],
    method: str | Method = DEFAULT_METHOD,
    *,
    private: _MakeModel,
    proxy: _MakeModel | None = None,
    tests: Mapping[str, Cohort] | None = None,
    rounds: int = 10,
    batch_size: int | Mapping[str, int] = 32,
    lr: float = 1e-3,
    sigma: float | None = 1.0,
    clip: float = 1.0,
    delta: float = 1e-5,
    unit: Unit = "row",
    alpha: float = 0.3,
    beta: float = 0.0,
    projection: object = None,
    seed: int = 0,
    folder: str | Path | None = None,
) -> dict[str, SiteResult]:
    """Train sites together by a method, an epoch in each round, as MPI ranks do.

    It is Algorithm 1 of Kalra et al., Nature Communications 2023.

    Args:
        sites: the training examples of each site, by its name.
        method: a name in METHODS, or a `Method`; none that needs generated images.
        private, proxy: make a fresh model; `proxy` is `private` by default. `oneshot` makes its own head, `shared`.
        tests: examples of each site for the evaluation after each round.
        batch_size: expected examples of a training step, of patients with unit "patient"; perhaps by site.
        sigma, clip, delta, unit: of each site's privacy plan; sigma None is no differential privacy.
        alpha, beta: weight of the proxy's predictions for the private model, and the reverse (eqs. 4 and 5). With β > 0
            the teacher has no differential privacy, and the proxy's ε is nominal.
        projection: of features for `oneshot`: of public slides, or a number of random directions; by default 128.
        seed: of the initial models. With differential privacy noise and batches are fresh each time.
        folder: of ledgers and checkpoints; by default a temporary one.

    Raises:
        UsageError: before the first round, for a method that needs more than examples, invalid privacy parameters,
            non-finite rows, labels out of range, or a model that cannot be trained with differential privacy. Later,
            for a model that fails in training.
    """
    row = METHODS[method] if isinstance(method, str) else method
    if row.bare_disclosures or row.learns_from not in ("own", "everybody"):
        raise UsageError(f"{row.name} needs more than the sites' own examples; train it in a study")
    makers = {"private": private, **dict.fromkeys(("proxy", "shared"), proxy or private)}
    tests = tests or {}
    n_classes = _require_examples(sites, tests, row, makers, seed)
    single = row.payload.is_single_release
    if single:
        first, rounds, batch_size = next(iter(sites.values())), 1, maxsize
        makers |= dict.fromkeys(COMMON, partial(row.payload.build_model, first, n_classes, unit, projection))
    sizes = dict.fromkeys(sites, batch_size) if isinstance(batch_size, int) else batch_size
    recipe = Recipe(
        row,
        rounds=rounds,
        batch_size=max(sizes.values()),
        lr=lr,
        weights=Weights(alpha, beta),
        seed=seed,
        prediction_model=(row.mixing_role or "private") if single else "private",
    )
    with TemporaryDirectory() as temporary, flush_denormals():
        place = Path(folder or temporary)
        participants = _build_participants(
            sites, tests, recipe, place, makers, n_classes, sizes=sizes, sigma=sigma, clip=clip, delta=delta, unit=unit
        )
        return _run_in_memory(participants, recipe)


def _build_participants(
    sites: Mapping[str, Cohort],
    tests: Mapping[str, Cohort],
    recipe: Recipe,
    folder: Path,
    makers: Mapping[str, _MakeModel],
    n_classes: int,
    *,
    sizes: Mapping[str, int],
    sigma: float | None,
    clip: float,
    delta: float,
    unit: Unit,
) -> list[Participant]:
    """Return what each site brings, with its account."""
    is_nominal = recipe.method.has_bare_teacher and recipe.weights.beta  # the teacher has no differential privacy
    guarantee: Guarantee = "nominal" if is_nominal else "guaranteed"
    terms = PrivacyTerms(delta, allow=() if sigma else ("model",), guarantee=guarantee, unit=unit)
    if recipe.method.learns_from == "everybody":
        sites = dict.fromkeys(sites, concatenate_examples(list(sites.values())))
    merged = {"merged": concatenate_examples(list(tests.values()))} if len(tests) > 1 else {}
    participants = []
    for index, (name, train) in enumerate(sites.items()):
        site_folder = SiteFolder(folder / name)
        units = row_units(len(train)) if unit == "row" else patient_units(train.patient, None, name)
        plan = None
        if sigma is not None:
            plan = plan_of_round(
                n=units.n,
                batch_size=min(sizes[name], units.n),
                epochs=recipe.epochs_per_round,
                sigma=sigma,
                clip=clip,
                delta=delta,
                unit=unit,
                mode="paper" if is_nominal else "strict",
            )
        participants.append(
            Participant(
                name=name,
                train=train,
                n_classes=n_classes,
                units=units,
                batch_size=sizes[name],
                ledger=PrivacyLedger(site_folder.path / "ledger.jsonl", site=name, run=_RUN, terms=terms),
                plan=plan,
                folder=site_folder,
                make_model=partial(_make_model, makers, recipe.seed, index),
                choose_engine=partial(_measure_engine, train, recipe.method, plan),
                tests=({"own": tests[name]} if name in tests else {}) | merged,
            )
        )
    return participants


def _run_in_memory(participants: Sequence[Participant], recipe: Recipe) -> dict[str, SiteResult]:
    """Run all rounds of all sites in this process.

    Raises:
        UsageError: for a model that fails.
    """
    round_lines: dict[str, list[Mapping[str, Any]]] = {participant.name: [] for participant in participants}

    def collect_line(event: Mapping[str, Any]) -> None:
        if "done" in event:
            round_lines[event["site"]].append(event["done"])

    sites = [join(participant, recipe, index, _CPU) for index, participant in enumerate(participants)]
    try:
        run(sites, recipe, LocalComm(len(sites)), collect_line)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # of a user's model
        raise UsageError(f"a model fails in training: {single_line(error)[:200]}") from error
    single = recipe.method.payload.is_single_release
    return {
        site.name: SiteResult(
            {role: learner.model for role, learner in site.learners.items() if not single or role in COMMON},
            site.ledger.epsilon() if site.plan else None,
            site.ledger.guarantee(),
            round_lines[site.name],
        )
        for site in sites
    }


def _make_model(makers: Mapping[str, _MakeModel], seed: int, index: int, role: str, *, common: bool) -> nn.Module:
    """Return a fresh model of a site: private models start differently, unless `common`."""
    has_own_start = role == "private" and not common
    return _make_seeded(makers[role], seed + (_SEED_STEP * (index + 1) if has_own_start else 0))


def _make_seeded(make: _MakeModel, seed: int) -> nn.Module:
    """Return a fresh model, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _measure_engine(
    train: Cohort, method: Method, plan: PrivacyPlan | None, role: str, model: nn.Module, *, common: bool
) -> str | None:
    """Return how per-example gradients of a caller's model are summed, as measured on rows of the site."""
    del role, common
    if plan is None or method.payload.is_single_release or len(train) < 2:
        return None
    rows = np.arange(min(_MEASURED_ROWS, len(train)))
    patient = None
    if plan.unit == "patient":
        patient = torch.from_numpy(np.unique(fill_patient_names(train.patient[rows]), return_inverse=True)[1])
    return select_engine(model, build_tensor(train.read(rows)), patient)


_MEASURED_ROWS = 32


def _require_examples(
    sites: Mapping[str, Cohort],
    tests: Mapping[str, Cohort],
    method: Method,
    models: Mapping[str, _MakeModel],
    seed: int,
) -> int:
    """Return the number of model outputs; refuse invalid examples, and examples that the models cannot take.

    Raises:
        UsageError: in one line, with the site and the first invalid row.
    """
    if not sites:
        raise UsageError("no site has examples")
    tasks = {part.task.kind: part.task for part in (*sites.values(), *tests.values())}
    if len(tasks) > 1:
        raise UsageError(f"all sites must have the same task, not {' and '.join(sorted(tasks))}")
    (task,) = tasks.values()
    if method.payload.is_single_release:
        numbers = {"survival": len(getattr(task, "ends", ())), "number": 1}
        labels = [part.label for part in sites.values() if part.label.dtype.kind in "iu"]
        largest = max((int(label.max(initial=0)) for label in labels), default=0)
        n_outputs = numbers.get(task.kind, largest + 1)
    else:
        n_outputs = min(_count_outputs(role, models[role], sites, seed) for role in models)
    for name, part in (*sites.items(), *((f"tests of {name}", part) for name, part in tests.items())):
        if problem := find_problem(part, n_outputs):
            raise UsageError(f"{name}: {problem}")
        x = part.read(np.zeros(1, np.int64))
        if problem := method.payload.explain_unfit(x):
            raise UsageError(f"{name}: {problem}")
    return n_outputs


@torch.no_grad()
def _count_outputs(role: str, make: _MakeModel, sites: Mapping[str, Cohort], seed: int) -> int:
    """Return the number of a model's outputs, the same at all sites.

    Raises:
        UsageError: when a site has no rows, or the model cannot take them.
    """
    model, n_outputs = _make_seeded(make, seed).eval(), 0
    for name, part in sites.items():
        if not len(part):
            raise UsageError(f"{name}: it has no examples")
        try:
            with torch.random.fork_rng(devices=[]):
                outputs = model(build_tensor(part.read(np.arange(min(2, len(part))))))
        except Exception as error:  # a user's architecture may raise anything
            raise UsageError(f"{name}: its {role} model cannot take the rows: {single_line(error)[:200]}") from None
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or outputs.dtype != torch.float32:
            raise UsageError(f"{name}: its {role} model must return float32[b, classes]")
        n_outputs = outputs.shape[1]
    return n_outputs
