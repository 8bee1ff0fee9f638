"""How a participant joins a run: its models made, and local ones fitted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from wsi_fl.data.batches import draw_epoch_rows, load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.federation.methods import Role
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_state import Participant, Site
from wsi_fl.learning.ensemble import COMMON, LOCAL
from wsi_fl.learning.local_models import build_learner, fit_local_models, is_linear_head
from wsi_fl.learning.local_training import DPSettings, Learner, take_supervised_step
from wsi_fl.learning.tuning import HyperParameters
from wsi_fl.privacy.cipher import CipherStream


def join(participant: Participant, recipe: Recipe, index: int, device: torch.device) -> Site:
    """Return the state of a participant before the first round: its models made, and local ones fitted.

    A site without labels has only the models that all sites have alike. An exchanged or DP model is not tuned; a linear
    head as local baseline is fitted in any case.
    """
    method, recipe = recipe.method, replace(recipe, batch_size=participant.batch_size or recipe.batch_size)
    roles = {role: row for role, row in method.learners.items() if role in COMMON or not participant.receives}
    if method.has_local_baseline and recipe.local_baseline and not participant.receives:
        roles[LOCAL] = Role(dp=False)
    learners = {role: _make_learner(participant, recipe, role, row, device) for role, row in roles.items()}
    local_learners = {
        role: learners[role]
        for role in (LOCAL, "private")
        if role in learners
        and not (learners[role].is_private or role == method.mixing_role)
        and (recipe.tune or (role == LOCAL and is_linear_head(learners[role].model)))
    }
    fit = fit_local_models(
        local_learners,
        participant.train,
        _local_hyperparameters(recipe),
        lambda model, settings, train: build_learner(
            model, settings, train, participant.n_classes, device, bfloat16=recipe.bfloat16
        ),
        partial(_train_alone, recipe),
        folds=recipe.tuning_folds,
    )
    site = Site(
        **vars(participant),
        index=index,
        device=device,
        learners={**learners, **fit.learners},
        held_out=fit.held_out,
        tuned_settings=fit.settings,
    )
    for role, learner in site.learners.items():
        if role in (*COMMON, method.mixing_role):
            method.payload.load_rows(learner, site.train)
    return site


def _make_learner(participant: Participant, recipe: Recipe, role: str, row: Role, device: torch.device) -> Learner:
    """Return the learner of a role, with the noise of the plan where it has differential privacy."""
    plan, exchanged = participant.plan, role == recipe.method.mixing_role
    model = participant.make_model(role, common=row.common)
    dp = None
    if row.dp and plan is not None:
        engine = participant.choose_engine(role, model, common=row.common)
        dp = DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit, engine)
    defaults = _local_hyperparameters(recipe)
    return build_learner(
        model,
        replace(defaults, lr=recipe.lr) if dp is not None or exchanged else defaults,
        participant.train,
        participant.n_classes,
        device,
        bfloat16=recipe.bfloat16,
        dp=dp,
        build_trainer=recipe.method.payload.build_trainer if exchanged else None,
    )


def _local_hyperparameters(recipe: Recipe) -> HyperParameters:
    """Return the hyperparameters of models that stay at their site and have no noise."""
    return HyperParameters(recipe.local_lr or recipe.lr, recipe.weight_decay, recipe.balance)


def _train_alone(recipe: Recipe, learner: Learner, examples: Cohort) -> None:
    """Train a model without noise on examples, for all epochs of a run."""
    stream = CipherStream.from_seed(recipe.seed, "tuning")
    augment, epochs = recipe.make_augment(stream), recipe.rounds * recipe.epochs_per_round
    rows = draw_epoch_rows(len(examples), recipe.batch_size, epochs, sampler=stream)
    draws = stream if recipe.draws_patches else None
    for batch in load_batches(examples, rows, augment=augment, device=learner.device, draws=draws):
        take_supervised_step(learner, batch, stream)
