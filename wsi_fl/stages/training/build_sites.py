"""Construction of sites from configuration and stores: examples, canaries, account and models.

Models start at random, from weights, or from released class statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, replace
from functools import partial
from sys import maxsize
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from wsi_fl.data.batches import build_augmentation, draw_epoch_rows, load_batches
from wsi_fl.data.cohort import Cohort, concatenate_examples, sample_patches
from wsi_fl.data.metrics import Probabilities
from wsi_fl.data.privacy_units import Canaries, PrivacyUnits, build_canaries, toss_coins
from wsi_fl.data.validation import draw_held_out, require_patient_names
from wsi_fl.federation.methods import MakeLearner, Method
from wsi_fl.federation.preflight import PreflightDocument, Setting
from wsi_fl.federation.site_state import Schedule, Site
from wsi_fl.learning.ensemble import COMMON, ENSEMBLE, LOCAL
from wsi_fl.learning.local_training import (
    DPSettings,
    Learner,
    predict_examples,
    replace_nonfinite,
    take_supervised_step,
)
from wsi_fl.learning.tuning import FittedHead, HyperParameters, fit_linear_head, tune_hyperparameters
from wsi_fl.models import HUB, StartWeights, create_model, parameters_digest, schema_digest, start_digest
from wsi_fl.models.mil import MeanOfBag
from wsi_fl.models.weights import NoWeightsError
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.ledger_file import run_id
from wsi_fl.privacy.privacy_plan import PrivacyPlan, PrivateTrainer
from wsi_fl.slides.patching.scan_copies import describe_copies
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.privacy_account import build_units, count_affordable, loss_weights, open_account
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import SiteData, list_scans
from wsi_fl.stages.training.checks import build_graph, collect_versions
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, TrainSettings
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import Section, read_setting
from wsi_fl.system.files import file_sha256
from wsi_fl.types import UNLABELLED, Bags, Images, NoCommonPlan, UsageError, WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Distance of the private models' seeds from the proxies' common seed."""


def build_schedule(context: RunContext) -> Schedule:
    """Return the training settings of a pipeline."""
    pipeline, train = context.pipeline, context.pipeline.train
    shared = pipeline.privacy.noise == "shared" and context.method.mixing_role is not None
    return Schedule(
        rounds=train.rounds,
        epochs_per_round=train.epochs_per_round,
        batch_size=maxsize if context.method.payload.is_single_release else train.batch_size,
        eval_every=train.eval_every,
        seed=train.seed,
        weights=loss_weights(pipeline),
        self_weight=pipeline.topology.self_weight,
        make_augment=partial(build_augmentation, train.augment) if context.kind.is_images else lambda _: None,
        graph=build_graph(context),
        prediction_model=pipeline.predict.model,
        reset_optimizer=train.optimizer_after_exchange == "reset",
        insecure_seed=pipeline.privacy.insecure_seed,
        colluding=pipeline.privacy.colluding if shared else None,
        dropouts=pipeline.privacy.dropouts,
    )


def build_site(context: RunContext, index: int) -> Site:
    """Return a site with its examples, its account and its models.

    It opens the site's store, and others' test patches only where all allow it. A site without labels has only the
    exchanged model.
    """
    name, pipeline = context.names[index], context.pipeline
    data, folder, device = context.open_data(name), context.run.site_folder(name), select_device()
    if folder.store_digest() is None:  # a run resumes with the features of its start
        data.require_current()
    for line in filter(None, (data.remark, *describe_copies(list_scans(data.store)))):
        folder.log(line)
    train, validation, units = load_training(context, name)
    if not len(train) and not data.receives:
        raise WsiFlError(f"site {name}: its store has no training {context.example_plural}")
    tests = {} if data.receives else {"own": data.test_examples}
    if tests and len(context.members) > 1 and context.may_merge:
        tests["merged"] = context.join_tests()
    canaries = load_canaries(context, name)
    account = open_account(context, index, units, canaries.included if canaries else None)
    make = _learner_factory(context, index, device, account.plan, train)
    roles = {
        role: role_settings
        for role, role_settings in context.method.learners.items()
        if role in COMMON or not data.receives
    }
    learners = {
        role: make(role, dp=role_settings.dp, common=role_settings.common) for role, role_settings in roles.items()
    }
    if context.method.has_local_baseline and pipeline.train.local_baseline:
        learners[LOCAL] = make(LOCAL, dp=False)
    site = Site(
        index=index,
        name=name,
        learners=learners,
        train=train,
        tests={part: examples for part, examples in tests.items() if len(examples)},
        ledger=account.ledger,
        folder=folder,
        device=device,
        plan=account.plan,
        units=account.units,
        n_classes=len(data.classes),
        validation=validation,
        canaries=canaries,
        receives=data.receives,
        returning=name in context.run.list_returning_sites(),
    )
    _tune_site(context, site)
    for role in COMMON:
        if role in site.learners:
            context.method.payload.load_rows(site.learners[role], site.train)
    if context.statistics:
        (context.starter or context.hooks).use_releases(context, site)
    site.buffer = context.hooks.load_buffer(context, index)
    return site


def build_preflight(site: Site, context: RunContext) -> PreflightDocument:
    """Return a site's preflight document: plans and shapes only."""
    data, pipeline, travels = context.open_data(site.name), context.pipeline, context.method.mixing_role
    meta, buffer = data.store.meta, site.buffer
    return {
        "site": site.name,
        "run": run_id(site.ledger.run),
        "method": context.name,
        "settings": _list_settings(pipeline),
        "classes": list(data.classes),
        "size_px": meta.spec.size_px,
        "mpp": meta.spec.mpp,
        **data.describe_inputs(),
        "weights": start_digest(site.learners[travels].model) if travels else "",
        "schema": schema_digest(site.learners[travels].model) if travels else "",
        "sites": context.names,
        "inference_sites": context.receivers,
        "graph": _hash_graph(context),
        "projection": context.hooks.projection_digest(data),
        "buffer": [read_setting(pipeline, "replay.variant"), *astuple(buffer.shape)] if buffer else None,
        "noise": site.plan.sigma if site.plan and pipeline.privacy.noise == "shared" else None,
        "statistics": {name: released.digest for name, released in context.statistics.items()},
        "versions": collect_versions(),
        "affordable": count_affordable(site, pipeline.train.rounds),
        "units": site.units.n,
        "sigma": site.plan.sigma if site.plan else 0.0,
    }


_COMPARED_SECTIONS = ("privacy", "train", "target", "audit", "topology")
"""The sections with settings that must agree at all sites."""
_SITE_KEYS = ("topology.graph", "train.input_px")
"""Settings that may differ between sites, or are compared by effect."""


def _list_settings(pipeline: Pipeline) -> dict[str, Setting]:
    """Return "section.key" → value, of all settings that must agree at all sites."""
    values = pipeline.model_dump(by_alias=True)
    extra_sections = [name for name, section in pipeline if isinstance(section, Section) and section.compared]
    settings = {
        f"{name}.{key}": value for name in (*_COMPARED_SECTIONS, *extra_sections) for key, value in values[name].items()
    }
    return {key: value for key, value in settings.items() if key not in _SITE_KEYS}


def require_signed_model(site: Site, context: RunContext) -> None:
    """Refuse to train where the exchanged model is not the signed one, by its `parameters_digest`."""
    signed, travels = context.run.parameters, context.method.mixing_role
    if signed and travels and parameters_digest(site.learners[travels].model) != signed:
        raise NoCommonPlan(
            f"site {site.name} has another model than the plan's (names and shapes of its parameters differ); "
            "nothing was trained, so compare the versions of timm and torchvision, or agree on a new plan"
        )


def _hash_graph(context: RunContext) -> str | None:
    """Return the name of the graph, or the SHA-256 of its file."""
    graph = context.pipeline.topology.graph
    if graph is None or not graph.endswith(".json"):
        return graph
    return file_sha256(context.study.resolve(graph))


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
        return _split_validation(context, context.open_data(name))
    parts: list[Cohort] = []
    patients: list[NDArray[np.str_]] = []
    places: list[NDArray[np.int64]] = []
    for site in context.names:  # patients of different sites are distinct, even with equal names
        data, n = context.open_data(site), sum(map(len, patients))
        part, eligible = _load_examples(data), data.list_eligible()
        parts.append(part.assign_columns(patient=_prefix_patients(site, part.patient)))
        patients.append(_prefix_patients(site, eligible.patient))
        places.append(n + eligible.training)
    units = build_units(context.pipeline, np.concatenate(patients), name)
    return TrainingPart(concatenate_examples(parts), None, units.select_rows(np.concatenate(places)))


def _prefix_patients(site: str, patient: NDArray[np.str_]) -> NDArray[np.str_]:
    return np.array([f"{site}/{name}" if name else "" for name in patient.tolist()], np.str_)


def load_canaries(context: RunContext, name: str) -> Canaries | None:
    """Return the canaries stored in the run, or fresh ones; None for none."""
    n, data = context.pipeline.audit.canaries, context.open_data(name)
    if not n:
        return None
    if stored := context.run.site_folder(name).read_document("canaries"):
        seed, included = int(stored["seed"]), np.array([coin == "1" for coin in stored["coins"]])
    else:
        seed, included = toss_coins(n)
    return build_canaries(seed, included, data.shape, len(data.classes))


def store_decisions(site: Site) -> None:
    """Store a site's decisions in the run before training, so that a restart uses the same.

    These are the plan (the account changes during the run), the canaries, the tuned settings, and the buffer, of which
    each round sends the same bytes.
    """
    folder, site_canaries = site.folder, site.canaries
    if site.plan is not None and folder.read_document("plan") is None:
        folder.write_document("plan", asdict(site.plan))
    if site_canaries is not None and not folder.read_document("canaries"):
        coins = "".join("1" if coin else "0" for coin in site_canaries.included)
        folder.write_document("canaries", {"n": len(coins), "seed": str(site_canaries.seed), "coins": coins})
    if site.tuned_settings is not None:
        folder.write_document("tuning", site.tuned_settings)
    if site.buffer is not None and folder.read_buffer() is None:
        folder.record_buffer(site.buffer.values, site.buffer.provenance)


_THINGS = {"model": "its model", "buffer": "a buffer of synthetic samples", "generator": "its generator"}


def describe_disclosures(site: Site, method: Method) -> str:
    """Describe disclosures without differential privacy by design; "" for none."""
    if not method.bare_disclosures:
        return ""
    things = " and ".join(_THINGS[disclosure.content] for disclosure in method.bare_disclosures)
    text = f"{site.name} releases {things}, without differential privacy"
    if site.buffer is not None and site.buffer.provenance["check"] != "passed":
        text += f"; the check of its generator: {'; '.join(site.buffer.provenance['reasons'])}"
    return text


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


def _split_validation(context: RunContext, data: SiteData) -> TrainingPart:
    """Return training examples, and validation examples of the store's split or a share of training patients.

    Without an exchange there is no prediction model to choose, and no validation examples are held out.
    """
    pipeline, train = context.pipeline, _load_examples(data)
    eligible = data.list_eligible()
    units = build_units(pipeline, eligible.patient, data.site).select_rows(eligible.training)
    if not {*COMMON} & context.method.learners.keys() and not context.method.has_local_baseline:
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
    if "shared" in context.method.learners and pipeline.predict.model == "proxy":
        raise UsageError(f"{context.name}: the model that all sites share is called so: predict.model = 'shared'")
    has_predictions = (
        pipeline.train.local_baseline
        or (pipeline.train.tune and pipeline.privacy.has_noise)
        or context.method.payload.is_single_release
    )
    if pipeline.predict.model == ENSEMBLE and not has_predictions and not len(validation):
        raise UsageError(
            "predict.model = 'ensemble' needs a local model, or rows that no model was trained on; "
            "set train.local_baseline=true, or train.val_fraction=0.15, or tile with a validation split"
        )
    return TrainingPart(train, validation if len(validation) else None, units)


def build_model(
    context: RunContext, index: int, role: str, *, common: bool = False, state: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Return a model of a site: of common kind and seed for a role in COMMON or if `common`, otherwise the site's."""
    site, pipeline, private = context.sites[index], context.pipeline, role not in COMMON and not common
    data = context.open_data(site.name)
    kind = find_architecture(site, pipeline, role, common=common)
    try:
        model = create_model(
            kind,
            n_classes=len(data.classes),
            shape=data.shape,
            seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
            start=find_start(pipeline, data.study if state is None else None),
        )
    except NoWeightsError as error:
        raise NoWeightsError(f"{error}: model.weights = 'FILE.safetensors'") from None
    if state is not None:
        try:
            model.load_state_dict(state)
        except RuntimeError:
            raise WsiFlError(
                f"{context.run.name}: the {role} model of {site.name} differs from this run's; put its backup back"
            ) from None
    if role in COMMON:
        context.hooks.configure_model(data, model)
    return model


def find_start(pipeline: Pipeline, study: Study | None = None) -> StartWeights | None:
    """Return the start of networks; None for random. Without a study weights are loaded afterwards."""
    settings = pipeline.model
    if not settings.weights:
        return None
    if study is None or settings.weights == HUB:
        return StartWeights(settings.train, HUB if study else None)
    return StartWeights(settings.train, study.resolve(settings.weights))


def find_architecture(site: SiteFile, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """Return the architecture of a role at a site."""
    if role in COMMON:
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)


def _learner_factory(
    context: RunContext, index: int, device: torch.device, plan: PrivacyPlan | None, train: Cohort
) -> MakeLearner:
    """Return a factory of a method's learners, with the noise of the plan where they have DP."""
    site, pipeline, keys = context.sites[index], context.pipeline, context.pipeline.train
    data = context.open_data(site.name)
    n_classes, input_shape = len(data.classes), data.shape

    def make_learner(role: str, *, dp: bool, common: bool = False) -> Learner:
        model, settings = build_model(context, index, role, common=common), None
        if dp and plan is not None:
            settings = DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit)
            is_timm = find_architecture(site, pipeline, role, common=common).startswith("timm:")
            if is_timm and isinstance(input_shape, Images):
                shape = (input_shape.channels, input_shape.size_px, input_shape.size_px)
                settings = replace(settings, engine=check_per_example_gradients(model, shape, n_classes))
        stays = settings is None and role != context.method.mixing_role
        hyper_parameters = (
            _default_parameters(keys) if stays else HyperParameters(keys.lr, keys.weight_decay, keys.balance)
        )
        build_trainer = context.method.payload.build_trainer if role == context.method.mixing_role else None
        return _build_learner(
            model, hyper_parameters, train, n_classes, device, pipeline, dp=settings, build_trainer=build_trainer
        )

    return make_learner


def _default_parameters(keys: TrainSettings) -> HyperParameters:
    """Return the default hyperparameters of local models without noise."""
    return HyperParameters(keys.private_lr or keys.lr, keys.weight_decay, keys.balance)


def _build_learner(
    model: nn.Module,
    hyper_parameters: HyperParameters,
    train: Cohort,
    n_classes: int,
    device: torch.device,
    pipeline: Pipeline,
    *,
    dp: DPSettings | None = None,
    build_trainer: Callable[[Learner, DPSettings], PrivateTrainer] | None = None,
) -> Learner:
    """Return a learner for training examples; with differential privacy classes are not balanced."""
    return Learner(
        model,
        lr=hyper_parameters.lr,
        weight_decay=hyper_parameters.weight_decay,
        device=device,
        dp=dp,
        class_weights=_class_weights(train.label, n_classes) if hyper_parameters.balance and dp is None else None,
        task=train.task,
        bfloat16=pipeline.gpu.train == "bfloat16",
        build_trainer=build_trainer,
    )


def _class_weights(labels: NDArray[np.int64], n_classes: int) -> list[float]:
    """Return the weight of a row by class, so that all classes have equal total weight; 1 for equal frequencies."""
    counts = np.bincount(labels, minlength=n_classes)
    present = counts > 0
    weights = np.where(present, len(labels) / present.sum() / np.maximum(counts, 1), 1.0)
    return [float(weight) for weight in weights]


def _tune_site(context: RunContext, site: Site) -> None:
    """Tune a site's local models by cross-validation, if `train.tune` is set.

    An exchanged or DP model is not tuned. A linear head as local baseline is fitted in any case. Private model and
    local baseline start alike, so the tuned settings are for both.
    """
    pipeline, train = context.pipeline, site.train
    local_learners = {
        role: learner
        for role in (LOCAL, "private")
        if (learner := site.learners.get(role)) and not (learner.is_private or role == context.method.mixing_role)
    }
    if not pipeline.train.tune:
        local_learners = {
            role: candidate
            for role, candidate in local_learners.items()
            if role == LOCAL and _is_linear(candidate.model)
        }
    if not local_learners:
        return
    model = next(iter(local_learners.values())).model
    if _is_linear(model):
        head = _fit_head(model, train, site.n_classes, site.device)
        for learner in local_learners.values():
            set_linear_layer(learner.model, torch.from_numpy(head.weight), torch.from_numpy(head.bias))
            learner.fitted = True
        site.held_out, site.tuned_settings = head.held_out, head.fit_summary
        return
    of_images = isinstance(context.open_data(site.name).shape, Images)
    hyper_parameters, site.held_out = _tune_parameters(pipeline, model, site, of_images=of_images)
    new_learners = {
        role: _build_learner(candidate.model, hyper_parameters, train, site.n_classes, site.device, pipeline)
        for role, candidate in local_learners.items()
    }
    site.learners = {**site.learners, **new_learners}
    site.tuned_settings = {"by": "cross-validation", **asdict(hyper_parameters)}


def _is_linear(model: nn.Module) -> bool:
    """Return whether a model is a linear layer on fixed layers."""
    *below, last = model.children() if isinstance(model, nn.Sequential) else [model]
    return isinstance(last, nn.Linear) and all(isinstance(layer, nn.LayerNorm | MeanOfBag) for layer in below)


@torch.no_grad()
def set_linear_layer(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Overwrite the last layer of a linear head, with weight [classes, d] and bias [classes]."""
    assert isinstance(model, nn.Sequential)
    linear = model[-1]
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _fit_head(model: nn.Module, train: Cohort, n_classes: int, device: torch.device) -> FittedHead:
    """Return the linear layer with the best held-out loss, on outputs of the fixed layers."""
    assert isinstance(model, nn.Sequential)
    fixed_layers = model[:-1].to(device)
    size = train.at_once or 256
    row_blocks = [np.arange(len(train))[k : k + size] for k in range(0, len(train), size)]
    with torch.no_grad():
        x = torch.cat([fixed_layers(x) for x, _ in load_batches(train, iter(row_blocks), augment=None, device=device)])
    return fit_linear_head(x.cpu().numpy(), train.label, train.patient, n_classes, train.task)


def _tune_parameters(
    pipeline: Pipeline, model: nn.Module, site: Site, *, of_images: bool
) -> tuple[HyperParameters, Probabilities | None]:
    """Return the settings with the best held-out loss, and held-out predictions of all patients.

    Models of images, the slowest, use a single fold.
    """
    start = {key: value.clone() for key, value in model.state_dict().items()}
    keys, train = pipeline.train, site.train

    def predict_others(hyper_parameters: HyperParameters, is_training: NDArray[np.bool_]) -> Probabilities:
        model.load_state_dict(start)
        training, others = train[is_training], train[~is_training]
        learner = _build_learner(model, hyper_parameters, training, site.n_classes, site.device, pipeline)
        stream = CipherStream.from_seed(keys.seed, "tuning")
        patch_stream = stream if keys.max_patches else None  # the draws of patches
        augment = build_augmentation(keys.augment, stream) if of_images else None
        rows = draw_epoch_rows(len(training), keys.batch_size, keys.rounds * keys.epochs_per_round, sampler=stream)
        for batch in load_batches(training, rows, augment=augment, device=site.device, draws=patch_stream):
            take_supervised_step(learner, batch, stream)
        return replace_nonfinite(predict_examples(learner.predict_logits, others, site.device), others)

    folds = 1 if of_images else 5
    hyper_parameters, held_out = tune_hyperparameters(
        train.label, train.patient, _default_parameters(keys), predict_others, folds=folds, task=train.task
    )
    model.load_state_dict(start)
    return hyper_parameters, held_out
