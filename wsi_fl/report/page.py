"""The page of a run: plain values in, one self-contained HTML document out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Json = Mapping[str, Any]
"""A JSON object as the run's files hold it."""


@dataclass(frozen=True)
class Page:
    """Everything the page shows. Any number may be None; what has not been done yet is None or empty."""

    run: str
    """Name of the run's folder, ``00001-proxyfl-camelyon17``."""
    method: str
    pipeline: str
    classes: tuple[str, ...]
    config_toml: str
    manifest: Json
    """``created`` (ISO time), ``argv``, ``versions`` by package, ``git``, ``inputs`` (hash by site)."""
    summary: Json
    """The document of ``train --json``; each site may carry ``max_epsilon``, its budget."""
    evaluation: Json | None = None
    """The document of ``evaluate --json``. ``confusion`` rows are true classes, columns predicted ones."""
    metrics: Mapping[str, Sequence[Json]] = field(default_factory=dict)
    """Lines of ``metrics.jsonl`` by site; ``messages``, ``bytes`` and seconds are those of the round."""
    baselines: Sequence[Json] = ()
    """Other evaluated runs of the study."""
    stores: Sequence[Json] = ()
    patches: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Sample patches by site: (label, uint8[h, w, 3])."""
    overviews: Mapping[str, Sequence[tuple[str, bytes]]] = field(default_factory=dict)
    """Overview pictures by site: (slide, PNG bytes)."""
    groups: Mapping[str, Json] = field(default_factory=dict)
    """What ε per row is worth to each site's largest patient: ``rows``, ``epsilon`` (None beyond 1000), ``delta``."""
    clinical: Json | None = None
    """The document of ``clinical --json``."""
    audit: Json | None = None
    """The document of ``audit --json``."""
    between: Json | None = None
    """What hospitals that keep their test parts told of what travelled, as ``evaluate --json`` has it."""
    mpcpa: Json | None = None
    """The document of ``train --method mpcpa --baselines``."""
    generated: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Images that were generated for this run, by the site whose denoiser they come from."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sites of real patients whose ``patches``, ``overviews`` or ``generated`` images are not shown."""
    patients_of: Sequence[str] = ()
    """Sites of real patients of whom the page holds pictures."""
    scores: tuple[str, ...] = ("accuracy", "macro_accuracy", "auroc")
    """Names of the scores, the most telling first, which is better when it is higher."""
    task: str = "classes"
    """What models answer: "classes", a "number", or "survival"."""
    outputs: tuple[str, ...] = ()
    """What each output of a model is called; of survival the ends of the intervals."""
    said: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=dict)
    """(truth, what the model says) of test examples by site, for numbers and survival."""
    examples: str = "patches"
    """What a model is asked about: patches, or whole slides, of which there are no pixels."""
