"""Evaluation of a site's models on its test sets, and the choice of its prediction model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.metrics import Probabilities, aggregate_slides, find_operating_point
from wsi_fl.data.tasks import fold_strata, score_predictions
from wsi_fl.federation.methods import Method
from wsi_fl.federation.recipe import Recipe
from wsi_fl.federation.site_state import Site
from wsi_fl.learning.ensemble import (
    COMMON,
    ENSEMBLE,
    LOCAL,
    MIN_PATIENTS,
    Ensemble,
    combine_predictions,
    gate_ensemble,
    is_worse_than_local,
    roles_of_choice,
    score_candidates,
    select_model,
    single_federated_ensemble,
    single_local_ensemble,
    weight_by_sample_size,
)
from wsi_fl.learning.local_training import predict_examples, replace_nonfinite


def evaluate_site(site: Site, recipe: Recipe, alive: Callable[[], None]) -> dict[str, Any]:
    """Return the scores of a site's prediction model by test set; "model" names it where a site has several.

    Scores of the model that all sites have alike on the last set are added. `alive` is called with each batch.
    """
    line: dict[str, Any] = {}
    model_choice, ensemble = recipe.prediction_model, None
    if model_choice in ("auto", ENSEMBLE):
        chosen = choose_prediction_model(site, recipe, alive) or {"model": "private"}
        model_choice, ensemble = (
            chosen["model"],
            Ensemble.parse_document(chosen["ensemble"]) if "ensemble" in chosen else None,
        )
    if not site.learners.keys() >= set(roles_of_choice(model_choice, ensemble, site.learners)):
        model_choice = "private"
    if len(site.learners) > 1:
        line["model"] = model_choice
    sets, common = list(site.tests.items()), _common(site)
    for name, examples in sets:
        role_names = dict.fromkeys(roles_of_choice(model_choice, ensemble, site.learners))
        if common and name == sets[-1][0]:
            role_names[common] = None
        predictions = _predict_roles(site, role_names, examples, alive)
        line[name] = score_predictions(
            combine_predictions(predictions, model_choice, ensemble), examples.label, examples.task
        )
        if common and name == sets[-1][0]:
            line[common] = {"on": name, **score_predictions(predictions[common], examples.label, examples.task)}
    return line


def _common(site: Site) -> str:
    """Return the role of the model that all sites have alike beside their own; "" where there is none."""
    return next((role for role in COMMON if role in site.learners), "")


def choose_prediction_model(site: Site, recipe: Recipe, alive: Callable[[], None]) -> dict[str, Any] | None:
    """Return the choice of a site's prediction model, as its run stores it; None where there is no choice.

    For classes, and with a payload of a single release, it is the ensemble of local and federated model. Otherwise it
    is the best model on the site's validation split, and without one the local model.
    """
    task, examples, has_local_baseline = site.train.task, site.validation, LOCAL in site.learners
    if len(site.learners) == 1:
        if site.held_out is None:
            return None
        point = _find_slide_threshold(site.held_out, site.train)
        return {"model": "private", "by": "cross-validation", "n": len(site.train), "slide_threshold": point}
    predictions = _predict_roles(site, site.learners, examples, alive) if examples is not None else {}
    scores = {}
    if examples is not None:
        name = "macro_accuracy" if task.kind == "classes" else task.scores[0]
        scores[name] = score_candidates(predictions, examples.label, task)
    has_single_release = _common(site) != "" and recipe.method.payload.is_single_release
    if recipe.prediction_model == ENSEMBLE or has_single_release or (has_local_baseline and task.kind == "classes"):
        choice = _choose_ensemble(site, recipe.method, predictions, alive) | scores
        is_local = has_local_baseline and recipe.prediction_model != ENSEMBLE and not choice["ensemble"]["weight"]
        return choice | {"model": LOCAL} if is_local else choice
    if examples is None:
        return {"model": LOCAL, "by": "validation", "n": 0} if has_local_baseline else None
    return {"model": select_model(predictions, examples.label, task), "by": "validation", "n": len(examples)} | scores


def _choose_ensemble(
    site: Site, method: Method, validation_predictions: Mapping[str, Probabilities], alive: Callable[[], None]
) -> dict[str, Any]:
    """Return a site's ensemble, as its run stores it, given predictions on its validation split by role.

    A site that lacks a class, or has a single number or no event, uses the federated model; so does a site with a
    single row of a class, except where the effective sample size of the federated model is known and weights that row.
    Any other site uses its local model, unless held-out rows favour the ensemble.
    """
    local_role = LOCAL if LOCAL in site.learners else "private"
    federated_role = _common(site) or "private"
    task, effective_rows = site.train.task, method.payload.count_effective_rows(site.learners[federated_role].model)
    n_strata = site.n_classes if task.kind == "classes" else 2
    counts = np.bincount(fold_strata(site.train.label, task), minlength=n_strata)
    if counts.min() < (1 if effective_rows or task.kind != "classes" else MIN_PATIENTS):
        ensemble, held_out = single_federated_ensemble(site.n_classes), None
    else:
        if site.validation is not None and local_role == LOCAL:
            candidates = {role: predictions for role, predictions in validation_predictions.items() if role != LOCAL}
            federated_role = select_model(candidates, site.validation.label)
        held_out = _find_held_out(site, method, local_role, federated_role, validation_predictions, alive)
        if effective_rows:
            predictions = {} if held_out else _predict_roles(site, (local_role, federated_role), site.train, alive)
            rows, local_predictions, federated_predictions = held_out or (
                site.train,
                predictions[local_role],
                predictions[federated_role],
            )
            ensemble = weight_by_sample_size(
                local_predictions, federated_predictions, rows.label, effective_rows, task, rows.patient
            )
            if (
                held_out
                and ensemble.weight
                and is_worse_than_local(ensemble, local_predictions, federated_predictions, rows.label, task)
            ):
                ensemble = single_local_ensemble(site.n_classes)
        elif held_out is None:
            ensemble = single_local_ensemble(site.n_classes)
        else:
            rows, local_predictions, federated_predictions = held_out
            ensemble = gate_ensemble(local_predictions, federated_predictions, rows.label, rows.patient)
    return {
        "model": ENSEMBLE,
        "by": ENSEMBLE,
        "n": 0 if held_out is None else len(held_out[0]),
        "ensemble": asdict(replace(ensemble, own=local_role, shared=federated_role, of_logits=task.kind == "classes")),
        "slide_threshold": None if held_out is None else _find_slide_threshold(ensemble(*held_out[1:]), held_out[0]),
    }


_HeldOutPredictions = tuple[Cohort, Probabilities, Probabilities]
"""Rows, and predictions of the local and the federated model."""


def _find_held_out(
    site: Site,
    method: Method,
    local_role: str,
    federated_role: str,
    validation_predictions: Mapping[str, Probabilities],
    alive: Callable[[], None],
) -> _HeldOutPredictions | None:
    """Return rows held out of both models, with their predictions; None where there are none.

    Training rows count as held out of a DP proxy, and of a payload of a single release. Cross-validation has the local
    model's predictions of them.
    """
    epsilon = site.ledger.epsilon()
    is_noisy = epsilon is not None and epsilon <= _MAX_HELD_OUT_EPSILON
    roles = roles_of_choice(federated_role, available=site.learners)
    if site.held_out is not None and all(
        (method.payload.is_single_release and role in COMMON) or (is_noisy and site.learners[role].is_private)
        for role in roles
    ):
        federated_predictions = combine_predictions(_predict_roles(site, roles, site.train, alive), federated_role)
        return site.train, site.held_out, federated_predictions
    rows = site.validation
    if rows is None or len(np.unique(fold_strata(rows.label, rows.task))) < 2:
        return None
    return (rows, validation_predictions[local_role], combine_predictions(validation_predictions, federated_role))


_MAX_HELD_OUT_EPSILON = 10.0  # the largest ε with which training rows count as held out


def _find_slide_threshold(predictions: Probabilities, rows: Cohort) -> float | None:
    """Return the operating point on the site's slides, a score threshold; None where it is unknown."""
    if rows.task.kind != "classes":
        return None
    slides = aggregate_slides(predictions, rows.label, rows.slide)
    return None if slides is None else find_operating_point(slides[0][:, 1], slides[1])


def _predict_roles(
    site: Site, role_names: Iterable[str], examples: Cohort, alive: Callable[[], None]
) -> dict[str, Probabilities]:
    """Return the predictions float64[n, classes] of a site's models by role."""
    predictions = {
        role: predict_examples(site.learners[role].predict_logits, examples, site.device, alive=alive)
        for role in role_names
    }
    return {role: replace_nonfinite(values, examples) for role, values in predictions.items()}
