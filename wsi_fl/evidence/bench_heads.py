"""The linear heads of a benchmark's hospitals, their predictions and scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from wsi_fl.data.cohort import Cohort, Inputs
from wsi_fl.data.metrics import Probabilities, choose_classes
from wsi_fl.federation.federate import SiteResult
from wsi_fl.learning.ensemble import build_ensemble
from wsi_fl.learning.tuning import FittedHead, fit_linear_head
from wsi_fl.oneshot.projection import normalize_rows
from wsi_fl.oneshot.shared_head import SharedHead


def read_features(rows: Cohort) -> Inputs:
    return rows.read(np.arange(len(rows)))


def fit_local_head(part: Cohort, n_outputs: int) -> FittedHead:
    """Fit the head of a hospital alone, as `regular` with `train.tune`."""
    return fit_linear_head(normalize_rows(read_features(part)), part.label, part.patient, n_outputs, part.task)


def predict_at_site(
    result: SiteResult, part: Cohort, head: FittedHead, *, test: Cohort
) -> tuple[Probabilities, dict[str, object]]:
    """Return the predictions of a hospital's ensemble of local and federated head, as in a study, and its ε.

    For survival after rounds it is the federated model by itself.
    """
    models = result.models
    model = models.get("proxy") or models.get("shared") or next(iter(models.values()))
    sample_sizes = model.effective_sample_sizes() if isinstance(model, SharedHead) else None
    predictions = _predict_with_network(model, test)
    if part.task.kind == "classes" or sample_sizes:
        federated = _predict_with_network(model, part)
        ensemble = build_ensemble(head.held_out, federated, part.label, part.patient, sample_sizes, part.task)
        predictions = ensemble(predict_with_head(head, test), predictions)
    private_predictions = _predict_with_network(models.get("private") or next(iter(models.values())), test)
    return predictions, {
        "own_score": score_predictions(private_predictions, test)["score"],
        "spent": None if result.epsilon is None else round(result.epsilon, 4),
        "guarantee": result.guarantee,
    }


def score_predictions(predictions: Probabilities, test: Cohort) -> dict[str, object]:
    """Return balanced accuracy, and AUROC averaged over classes; of survival the concordance."""
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    y = test.label
    if test.task.kind != "classes":
        return {"score": test.task.compute_scores(predictions, y)[test.task.scores[0]], "guarantee": "none"}
    areas = [roc_auc_score(y == label, predictions[:, label]) for label in np.unique(y)]
    accuracy = balanced_accuracy_score(y, choose_classes(predictions))
    return {"score": round(float(accuracy), 5), "auroc": round(float(np.mean(areas)), 5), "guarantee": "none"}


def predict_with_head(head: FittedHead, rows: Cohort) -> Probabilities:
    outputs = normalize_rows(read_features(rows)) @ head.weight.T + head.bias
    predictions: Probabilities = rows.task.predict(torch.from_numpy(outputs)).numpy()
    return predictions


def _predict_with_network(model: nn.Module, rows: Cohort) -> Probabilities:
    with torch.inference_mode():
        outputs = model.eval()(torch.from_numpy(read_features(rows))).double()
        predictions: Probabilities = rows.task.predict(outputs).numpy()
    return predictions
