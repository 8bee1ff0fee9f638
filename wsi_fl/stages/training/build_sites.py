"""Participants and recipe of a run, from configuration and stores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from sys import maxsize
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from wsi_fl.data.augmentation import build_augmentation
from wsi_fl.data.cohort import Cohort, concatenate_examples, read_names, sample_patches
from wsi_fl.data.privacy_units import Canaries, PrivacyUnits, build_canaries, toss_coins
from wsi_fl.data.validation import draw_held_out, require_patient_names
from wsi_fl.federation.methods import Method
from wsi_fl.federation.participant import join
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_state import Participant, Site
from wsi_fl.learning.ensemble import COMMON, ENSEMBLE
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.slides.patching.scan_copies import describe_copies
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.privacy_account import build_units, loss_weights, open_account
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import SiteData
from wsi_fl.stages.training.checks import build_graph
from wsi_fl.stages.training.initial_models import build_model, find_architecture
from wsi_fl.types import UNLABELLED, Bags, Images, Shape, UsageError, WsiFlError


def build_recipe(context: RunContext) -> Recipe:
    """Return what all sites of a run agree on, from its pipeline.

    Raises:
        UsageError: for settings that the method does not have.
    """
    pipeline, keys, method = context.pipeline, context.pipeline.train, context.method
    if "shared" in method.learners and pipeline.predict.model == "proxy":
        raise UsageError(f"{context.name}: the model that all sites share is called so: predict.model = 'shared'")
    is_masked = pipeline.privacy.noise == "shared" and method.mixing_role is not None
    return Recipe(
        method,
        rounds=keys.rounds,
        epochs_per_round=keys.epochs_per_round,
        batch_size=maxsize if method.payload.is_single_release else keys.batch_size,
        lr=keys.lr,
        local_lr=keys.private_lr,
        weight_decay=keys.weight_decay,
        balance=keys.balance,
        bfloat16=pipeline.gpu.train == "bfloat16",
        eval_every=keys.eval_every,
        seed=keys.seed,
        weights=loss_weights(pipeline),
        self_weight=pipeline.topology.self_weight,
        counts_units=pipeline.topology.weights == "rows",
        make_augment=partial(build_augmentation, keys.augment) if context.kind.is_images else lambda _: None,
        draws_patches=bool(keys.max_patches),
        graph=build_graph(context.study, pipeline, context.names),
        prediction_model=pipeline.predict.model,
        local_baseline=keys.local_baseline,
        tune=keys.tune,
        tuning_folds=1 if context.kind.is_images else 5,
        reset_optimizer=keys.optimizer_after_exchange == "reset",
        insecure_seed=pipeline.privacy.insecure_seed,
        colluding=pipeline.privacy.colluding if is_masked else None,
        dropouts=pipeline.privacy.dropouts,
    )


def build_site(context: RunContext, index: int) -> Site:
    """Return a site with its examples, its account and its models.

    It opens the site's store, and others' test patches only where all allow it.
    """
    site_file, pipeline, method, run = context.sites[index], context.pipeline, context.method, context.run
    name, data, folder = site_file.name, context.open_data(site_file.name), run.site_folder(site_file.name)
    recipe = build_recipe(context)
    _log_store(context, data, folder)
    train, validation, units = load_training(context, name)
    if not len(train) and not data.receives:
        raise WsiFlError(f"site {name}: its store has no training {context.kind.plural}")
    tests = {} if data.receives else {"own": data.test_examples}
    if tests and len(context.members) > 1 and context.may_merge:
        tests["merged"] = context.join_tests()
    canaries = load_canaries(data, folder)
    account = open_account(context, index, units, canaries.included if canaries else None)
    find_name = partial(find_architecture, site_file, pipeline)
    participant = Participant(
        name=name,
        train=train,
        n_classes=len(data.classes),
        units=account.units,
        ledger=account.ledger,
        plan=account.plan,
        folder=folder,
        make_model=partial(build_model, context, index),
        choose_engine=partial(_choose_engine, find_name, data.shape, len(data.classes)),
        validation=validation,
        tests={part: examples for part, examples in tests.items() if len(examples)},
        canaries=canaries,
        buffer=context.hooks.load_buffer(data, folder, index) if method.find_disclosure("buffer") else None,
        receives=data.receives,
        returning=name in run.list_returning_sites(),
        batch_size=site_file.batch_size,
    )
    site = join(participant, recipe, index, select_device())
    if context.statistics:
        (context.starter or context.hooks).use_releases(method, data, site, context.statistics)
    return site


def _log_store(context: RunContext, data: SiteData, folder: SiteFolder) -> None:
    """Log remarks on a store, which must be current where the run begins; a run resumes with the features it has."""
    if folder.store_digest() is None:
        data.require_current()
    for line in filter(None, (data.remark, *describe_copies(context.list_scans(data)))):
        folder.log(line)


def _choose_engine(
    find_name: Callable[..., str], shape: Shape, n_classes: int, role: str, model: nn.Module, *, common: bool
) -> str | None:
    """Return how per-example gradients of networks of timm and MONAI are summed, as measured; None for other models.

    `find_name` returns the architecture of a role.
    """
    if not (isinstance(shape, Images) and find_name(role, common=common).startswith(("timm:", "monai:"))):
        return None
    return check_per_example_gradients(model, (shape.channels, shape.size_px, shape.size_px), n_classes)


class TrainingPart(NamedTuple):
    """Training and validation examples of a site.

    Attributes:
        train: the training examples.
        validation: examples for the choice of the prediction model; None for none.
        units: privacy units of `SiteData.list_eligible`, for the rows of `train`.
    """

    train: Cohort
    validation: Cohort | None
    units: PrivacyUnits


def load_training(context: RunContext, name: str) -> TrainingPart:
    """Return the training and validation examples of a site."""
    if context.method.learns_from != "everybody":
        return _split_validation(context.open_data(name), context.method)
    parts: list[Cohort] = []
    patients: list[NDArray[np.str_]] = []
    places: list[NDArray[np.int64]] = []
    for site in context.names:  # patients of different sites are distinct, even with equal names
        data, n = context.open_data(site), sum(map(len, patients))
        part, eligible = _load_examples(data), data.list_eligible()
        parts.append(part.assign_columns(patient=_prefix_patients(site, part.patient)))
        patients.append(_prefix_patients(site, read_names(eligible.patient)))
        places.append(n + eligible.training)
    units = build_units(context.pipeline, pd.Series(np.concatenate(patients)), name)
    return TrainingPart(concatenate_examples(parts), None, units.select_rows(np.concatenate(places)))


def _prefix_patients(site: str, patient: NDArray[np.str_]) -> NDArray[np.str_]:
    return np.array([f"{site}/{name}" if name else "" for name in patient.tolist()], np.str_)


def _load_examples(data: SiteData) -> Cohort:
    """Return a site's training examples; with `train.max_patches` patches of bags are drawn again in each epoch."""
    if not data.receives and data.classes == UNLABELLED:
        raise UsageError(
            f"site {data.site}: its store was made without labels; make it again with them, or write role = 'receiver' "
            f"in sites/{data.site}.toml"
        )
    train, max_patches = data.load_examples("train"), data.pipeline.train.max_patches
    if max_patches is not None and isinstance(data.shape, Bags):
        return sample_patches(train, max_patches)
    return train


def _split_validation(data: SiteData, method: Method) -> TrainingPart:
    """Return training examples, and validation examples of the store's split or a share of training patients.

    Without an exchange there is no prediction model to choose, and no validation examples are held out.
    """
    pipeline, train = data.pipeline, _load_examples(data)
    eligible = data.list_eligible()
    units = build_units(pipeline, eligible.patient, data.site).select_rows(eligible.training)
    if not {*COMMON} & method.learners.keys() and not method.has_local_baseline:
        return TrainingPart(train, None, units)
    validation = data.load_examples("val")
    if not len(validation) and pipeline.train.val_fraction:
        fraction = pipeline.train.val_fraction
        if pipeline.privacy.has_noise:
            require_patient_names(train.patient, data.site)
        is_held_out = draw_held_out(train.patient, fraction, pipeline.train.seed, data.holdout_draw)
        if len(train) and is_held_out.all():
            raise UsageError(f"train.val_fraction = {fraction:g} holds out all of a site's training patients; lower it")
        validation = train[is_held_out]
        train, units = train[~is_held_out], units.select_rows(np.flatnonzero(~is_held_out))
    has_predictions = (
        pipeline.train.local_baseline
        or (pipeline.train.tune and pipeline.privacy.has_noise)
        or method.payload.is_single_release
    )
    if pipeline.predict.model == ENSEMBLE and not has_predictions and not len(validation):
        raise UsageError(
            "predict.model = 'ensemble' needs a local model, or rows that no model was trained on; "
            "set train.local_baseline=true, or train.val_fraction=0.15, or tile with a validation split"
        )
    return TrainingPart(train, validation if len(validation) else None, units)


def load_canaries(data: SiteData, folder: SiteFolder) -> Canaries | None:
    """Return the canaries stored in a site's folder of the run, or fresh ones; None for none."""
    if not (n := data.pipeline.audit.canaries):
        return None
    if stored := folder.read_document("canaries"):
        seed, included = int(stored["seed"]), np.array([coin == "1" for coin in stored["coins"]])
    else:
        seed, included = toss_coins(n)
    return build_canaries(seed, included, data.shape, len(data.classes))
