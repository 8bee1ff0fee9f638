"""Losses of deep mutual learning as ProxyFL uses them (eqs. 2–5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def kl_divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL[student ‖ teacher] = Σ_c p_c (log p_c − log q_c), mean over the batch (eq. 3); the teacher is fixed.

    Example:
        >>> a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
        >>> round(float(kl_divergence(a, b)), 4)  # ½ log(½ / ¼) + ½ log(½ / ¾)
        0.1438
    """
    log_p = functional.log_softmax(student_logits, dim=1)
    log_q = functional.log_softmax(teacher_logits.detach(), dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()


def mutual(
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None,
    weight: float,
    class_weights: Tensor | None = None,
) -> Tensor:
    """(1 − weight) · CE + weight · KL[student ‖ teacher] (eqs. 4 and 5); plain CE without a teacher.

    Args:
        logits: float32[b, classes] of the model that learns.
        labels: int64[b].
        teacher_logits: float32[b, classes], or None.
        weight: α for the private model, β for the proxy.
        class_weights: float32[classes], how much a row of each class counts; None for all alike.
    """
    cross_entropy = functional.cross_entropy(logits, labels, class_weights)
    if teacher_logits is None or weight == 0:
        return cross_entropy
    return torch.lerp(cross_entropy, kl_divergence(logits, teacher_logits), weight)
