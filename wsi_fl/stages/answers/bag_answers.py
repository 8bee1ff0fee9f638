"""What a model says of one whole slide, for people: in words, as numbers, and as heat over its patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.survival import risk
from wsi_fl.learning.tasks import Number, Survival, Task
from wsi_fl.stages.answers.predictions import COLUMNS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SlidePrediction:
    """What a model says of one slide with m patches.

    Attributes:
        task: what was asked.
        names: what each of the k outputs is called.
        whole: float64[k], what is said of the slide; of classes probabilities, 0 for what its tumour type cannot be.
        alone: float64[m, k], the same of each patch by itself.
        attention: float64[m], adding up to 1; None for models that do not weigh their patches.
    """

    task: Task
    names: tuple[str, ...]
    whole: Floats
    alone: Floats
    attention: Floats | None

    @property
    def best(self) -> int:
        """The position of the most probable class."""
        return int(self.whole.argmax())

    @property
    def facts(self) -> dict[str, Any]:
        """What the document says of it."""
        if self.task.kind == "number":
            return {"target": self.names[0], "value": float(self.whole[0])}
        if isinstance(self.task, Survival):
            said = dict(zip(self.names, self.whole.tolist(), strict=True))
            return {"without_event": said, "risk": float(risk(self.whole[None], self.task.ends)[0])}
        return {
            "class": self.names[self.best],
            "probability": float(self.whole[self.best]),
            "probabilities": dict(zip(self.names, self.whole.tolist(), strict=True)),
        }

    @property
    def words(self) -> tuple[str, str]:
        """(the answer, what else is to be said), each in a few words."""
        if self.task.kind == "number":
            return f"{self.names[0]} {self.whole[0]:.3g}", ""
        if self.task.kind == "survival":
            *before, (end, last) = zip(self.names, self.whole.tolist(), strict=True)
            return f"{last:.2f} without the event at {end}", "; ".join(
                f"{p:.2f} at {name}" for name, p in before
            )
        ranked = sorted(zip(self.whole.tolist(), self.names, strict=True), reverse=True)[1:3]
        others = "; ".join(f"{other} {p:.2f}" for p, other in ranked if p > 0)
        return f"{self.names[self.best]} {self.whole[self.best]:.2f}", others

    @property
    def legend(self) -> tuple[str, str]:
        """(short, long) name of what the heatmap shows."""
        if self.attention is not None:
            return "attention", "attention, share of the highest"
        if self.task.kind == "number":
            return self.names[0], f"{self.names[0]}, patch alone, share of its range"
        if self.task.kind == "survival":
            return "event", f"event by {self.names[-1]}, patch alone"
        return self.names[self.best], f"{self.names[self.best]} probability, patch alone"

    @property
    def heat(self) -> Floats:
        """float64[m] in [0, 1]: attention as a share of the highest, else what is said of the patch alone."""
        if self.attention is not None:
            return self.attention / max(float(self.attention.max()), np.finfo(np.float64).tiny)
        if isinstance(self.task, Number):
            return (self.alone[:, 0] - self.task.low) / (self.task.high - self.task.low)
        return 1 - self.alone[:, -1] if self.task.kind == "survival" else self.alone[:, self.best]

    @property
    def columns(self) -> dict[str, Floats]:
        """What a table of patches says of each: heading → float64[m]."""
        attention = {} if self.attention is None else {"attention": self.attention}
        heading = COLUMNS[self.task.kind][1]
        return attention | {heading.format(name): self.alone[:, k] for k, name in enumerate(self.names)}
