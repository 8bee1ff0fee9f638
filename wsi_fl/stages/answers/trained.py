"""A trained site of a run: its settings, and the models that answer for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from wsi_fl.federation.methods import METHODS, Method
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import probabilities
from wsi_fl.learning.metrics import Probabilities
from wsi_fl.learning.stacking import Stack
from wsi_fl.learning.validation import COMMON, LONE, STACK, answered, roles
from wsi_fl.models import build
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.party import RunContext, method_for
from wsi_fl.stages.training.workshop import architecture, start_of
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import Shape, UsageError, WsiFlError

_MAY_CHANGE = ("predict.", "features.weights=", "mosaic.weights=")
"""Settings that change nothing of what was learned: features of other weights are refused."""


def settings_of(study: Study, run: RunFolder, overrides: Sequence[str]) -> Pipeline:
    """The configuration of a run under `predict.KEY=VALUE`, and where its encoder's weights lie today."""
    if strange := [one for one in overrides if not one.strip().startswith(_MAY_CHANGE)]:
        raise UsageError(
            f"--set {strange[0]}: a run keeps its configuration; only predict.* can be changed, and where weights "
            "lie (features.weights, mosaic.weights)"
        )
    return study.pipeline(str(run.path / "config.toml"), overrides)


@dataclass(frozen=True)
class TrainedModels:
    """A site's models, on `device`, ready to predict.

    Attributes:
        models: by role, those that are needed.
        answer: "local", "private", "proxy" or "shared", "mean" of these two, or "ensemble".
        stack: what is mixed and how, where the run found that out.
    """

    models: Mapping[str, torch.nn.Module]
    answer: str
    device: torch.device
    stack: Stack | None = None

    @property
    def asked(self) -> list[torch.nn.Module]:
        """The models that the answer rests on."""
        return [self.models[role] for role in roles(self.answer, self.stack, self.models)]

    def probabilities(self, examples: Examples, batch_size: int = 256) -> Probabilities:
        """float64[n, classes]: the answer for every example, in order."""
        said = {
            role: probabilities(self.models[role], examples, self.device, batch_size)
            for role in roles(self.answer, self.stack, self.models)
        }
        return answered(said, self.answer, self.stack)


def offered(method: Method) -> dict[str, str]:
    """Return the models that sites of a method have by the name they are asked for: name → role in the run.

    A model is `private` where it stays at home. One that travels, or that all sites have alike, is `proxy` or `shared`.
    """
    if method.once:
        return {"private": "private", "shared": "shared"}
    if "proxy" in method.learners:
        return {"private": "private", "proxy": "proxy"}
    return {
        "shared" if method.learns_from == "everybody" or method.travels == "private" else "private": "private"
    }


def with_dp(party: RunContext, role: str) -> bool:
    """Return whether the models of a role are trained with differential privacy."""
    return party.pipeline.privacy.enabled and (role in COMMON or not {*COMMON} & party.method.learners.keys())


def _roles_of(run: RunFolder, site: str) -> Set[str]:
    """The roles of the models that a site has of a run; one that only receives has none of its own."""
    method = METHODS[run.manifest["method"]]
    if method.once and not run.site(site).has_model("private"):
        return {"shared"}
    there = method.learners.keys()
    return there | {LONE} if run.site(site).has_model(LONE) else there


def answers_with(run: RunFolder, pipeline: Pipeline, site: str) -> str:
    """What answers for a site: as `predict.model` says, `auto` being what the run itself found."""
    wanted, there = pipeline.predict.model, _roles_of(run, site)
    if METHODS[run.manifest["method"]].once and wanted == "proxy":
        raise UsageError(f"{run.name}: the head that all sites share is called so: predict.model = 'shared'")
    if len(there) == 1:
        return next(iter(there))
    if wanted == "auto":
        return run.site(site).choice() or "private"
    if wanted == LONE not in there and not METHODS[run.manifest["method"]].once:
        raise UsageError(
            f"{run.name}: trained with train.local_baseline = false, so it has no model of {site} alone"
        )
    if wanted == STACK and _stack_of(run, site) is None:
        raise UsageError(
            f"{run.name}: trained without predict.model = 'ensemble' and train.local_baseline = true, so it has no "
            "weights for mixing the models; train with one of them, or ask for private, proxy or mean"
        )
    return wanted if wanted == STACK or set(roles(wanted, there=there)) <= there else "private"


def _stack_of(run: RunFolder, site: str) -> Stack | None:
    """How a site mixes its models; None where its run did not find that out."""
    noted = run.site(site).kept("prediction_model")
    return Stack.of(noted["ensemble"]) if noted and "ensemble" in noted else None


def answering(
    run: RunFolder,
    pipeline: Pipeline,
    site: SiteFile,
    classes: Sequence[str],
    shape: Shape,
    device: torch.device,
    *,
    every: bool = False,
) -> TrainedModels:
    """The models that answer for a site; with `every`, the others too."""
    answer, stack = answers_with(run, pipeline, site.name), _stack_of(run, site.name)
    wanted = _roles_of(run, site.name) if every else roles(answer, stack, _roles_of(run, site.name))
    models, travels = {}, method_for(run.manifest["method"], pipeline).travels
    for role in wanted:
        name = architecture(site, pipeline, role, common=role == "private" == travels)
        # its initial weights are all overwritten
        model = build(name, n_classes=len(classes), shape=shape, seed=0, start=start_of(pipeline))
        try:
            model.load_state_dict(run.site(site.name).load_model(role))
        except RuntimeError:
            raise WsiFlError(
                f"{run.name}: the {role} model of {site.name} does not fit {name} for {shape} and {len(classes)} "
                f"classes; was private_model in sites/{site.name}.toml changed since the run?"
            ) from None
        models[role] = model.to(device).eval()
    return TrainedModels(models, answer, device, stack)
