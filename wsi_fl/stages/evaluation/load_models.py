"""The trained models of a site: settings, roles, and the ensemble that predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.metrics import Probabilities
from wsi_fl.federation.methods import METHODS, Method
from wsi_fl.learning.ensemble import COMMON, ENSEMBLE, LOCAL, Ensemble, combine_predictions, roles_of_choice
from wsi_fl.learning.local_training import predict_examples
from wsi_fl.models import create_model
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.run_context import RunContext, find_method
from wsi_fl.stages.training.initial_models import find_architecture, find_start
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import Shape, UsageError, WsiFlError

_CHANGEABLE_SETTINGS = ("predict.", "features.weights=", "mosaic.weights=")
"""Prefixes of settings that may be changed after training."""


def load_run_settings(study: Study, run: RunFolder, overrides: Sequence[str]) -> Pipeline:
    """Return the configuration of a run with `predict.KEY=VALUE` and paths of encoder weights overridden."""
    if refused := [override for override in overrides if not override.strip().startswith(_CHANGEABLE_SETTINGS)]:
        raise UsageError(
            f"--set {refused[0]}: the configuration of a run is fixed; only predict.*, features.weights and "
            "mosaic.weights can be changed"
        )
    return study.load_pipeline(str(run.path / "config.toml"), overrides)


@dataclass(frozen=True)
class TrainedModels:
    """A site's models on a device, and their ensemble.

    Attributes:
        models: the loaded models by role.
        ensemble: "local", "private", "proxy" or "shared", "mean" of the last two, or "ensemble".
        stack: weights of the ensemble, if the run has them.
    """

    models: Mapping[str, torch.nn.Module]
    ensemble: str
    device: torch.device
    stack: Ensemble | None = None

    @property
    def ensemble_models(self) -> list[torch.nn.Module]:
        """The models of the ensemble."""
        return [self.models[role] for role in roles_of_choice(self.ensemble, self.stack, self.models)]

    def predict(self, examples: Cohort, batch_size: int = 256) -> Probabilities:
        """Return the predictions of every example, float64[n, classes]."""
        outputs = {
            role: predict_examples(self.models[role], examples, self.device, batch_size)
            for role in roles_of_choice(self.ensemble, self.stack, self.models)
        }
        return combine_predictions(outputs, self.ensemble, self.stack)


def available_models(method: Method) -> dict[str, str]:
    """Return the models of a site by their public name: name → role in the run.

    A model is `private` if it stays at its site, `proxy` or `shared` if it is exchanged or equal at all sites.
    """
    for role in COMMON:
        if role in method.learners:
            return {"private": "private", role: role}
    return {"shared" if method.learns_from == "everybody" or method.mixing_role == "private" else "private": "private"}


def is_trained_with_dp(context: RunContext, role: str) -> bool:
    """Return whether the models of a role are trained with differential privacy."""
    return context.pipeline.privacy.enabled and (role in COMMON or not {*COMMON} & context.method.learners.keys())


def _find_roles(run: RunFolder, site: str) -> Set[str]:
    """Return the roles of a site's models; an inference-only site has the exchanged model only."""
    method = METHODS[run.manifest["method"]]
    if method.payload.is_single_release and not run.site_folder(site).has_model("private"):
        return {"shared"}
    learner_roles = method.learners.keys()
    return learner_roles | {LOCAL} if run.site_folder(site).has_model(LOCAL) else learner_roles


def choose_ensemble(run: RunFolder, pipeline: Pipeline, site: str) -> str:
    """Return the prediction model of a site: `predict.model`, or the run's choice for `auto`."""
    choice, available = pipeline.predict.model, _find_roles(run, site)
    if "shared" in METHODS[run.manifest["method"]].learners and choice == "proxy":
        raise UsageError(f"{run.name}: the model that all sites share is called so: predict.model = 'shared'")
    if len(available) == 1:
        return next(iter(available))
    if choice == "auto":
        return str((run.site_folder(site).read_document("prediction_model") or {"model": "private"})["model"])
    if choice == LOCAL not in available and not METHODS[run.manifest["method"]].payload.is_single_release:
        raise UsageError(f"{run.name}: trained with train.local_baseline = false, so it has no local model of {site}")
    if choice == ENSEMBLE and _load_stack(run, site) is None:
        raise UsageError(
            f"{run.name}: trained without predict.model = 'ensemble' and train.local_baseline = true, so it has no "
            "ensemble weights; train with one of them, or use private, proxy or mean"
        )
    return choice if choice == ENSEMBLE or set(roles_of_choice(choice, available=available)) <= available else "private"


def _load_stack(run: RunFolder, site: str) -> Ensemble | None:
    """Return the ensemble weights of a site; None if its run has none."""
    record = run.site_folder(site).read_document("prediction_model")
    return Ensemble.parse_document(record["ensemble"]) if record and "ensemble" in record else None


def load_prediction_models(
    run: RunFolder,
    pipeline: Pipeline,
    site: SiteFile,
    classes: Sequence[str],
    shape: Shape,
    device: torch.device,
    *,
    all_roles: bool = False,
) -> TrainedModels:
    """Load the models of a site's ensemble; with `all_roles`, all its models."""
    ensemble, stack = choose_ensemble(run, pipeline, site.name), _load_stack(run, site.name)
    models, travels = {}, find_method(run.manifest["method"], pipeline).mixing_role
    available = _find_roles(run, site.name)
    for role in available if all_roles else roles_of_choice(ensemble, stack, available):
        name = find_architecture(site, pipeline, role, common=role == "private" == travels)
        # all initial weights are overwritten
        model = create_model(name, n_classes=len(classes), shape=shape, seed=0, start=find_start(pipeline))
        try:
            model.load_state_dict(run.site_folder(site.name).load_model(role))
        except RuntimeError:
            raise WsiFlError(
                f"{run.name}: the {role} model of {site.name} does not fit {name} for {shape} and {len(classes)} "
                f"classes; was private_model in sites/{site.name}.toml changed since the run?"
            ) from None
        models[role] = model.to(device).eval()
    return TrainedModels(models, ensemble, device, stack)
