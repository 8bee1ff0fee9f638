"""Losses of deep mutual learning as ProxyFL uses them (eqs. 2–5), whatever is asked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wsi_fl.learning.tasks import CLASSES, Task


def kl_divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return KL[student ‖ teacher] = Σ_c p_c (log p_c − log q_c), mean over the batch (eq. 3); the teacher is fixed.

    Example:
        >>> a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
        >>> round(float(kl_divergence(a, b)), 4)  # ½ log(½ / ¼) + ½ log(½ / ¾)
        0.1438
    """
    log_p = functional.log_softmax(student_logits, dim=1)
    log_q = functional.log_softmax(teacher_logits.detach(), dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()


def mutual(
    outputs: Tensor,
    truth: Tensor,
    teacher: Tensor | None,
    weight: float,
    class_weights: Tensor | None = None,
    task: Task = CLASSES,
) -> Tensor:
    """Return (1 − weight) · loss + weight · divergence from the teacher (eqs. 4 and 5); without one, the loss alone.

    Args:
        outputs: float32[b, k] of the model that learns; of classes their logits.
        truth: of the b examples, as the task has it; of classes int64[b].
        teacher: float32[b, k], or None.
        weight: α for the private model, β for the proxy.
        class_weights: float32[classes], how much a row of each class counts; None for all alike.
        task: what is asked.
    """
    losses = task.losses(outputs, truth)
    if class_weights is None:
        own = losses.mean()
    else:
        counts = class_weights[truth]
        own = (losses * counts).sum() / counts.sum()
    if teacher is None or weight == 0:
        return own
    return torch.lerp(own, task.divergence(outputs, teacher), weight)
