"""Before the first step: do all sites bring the same kind of thing?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from wsi_fl.types import UsageError

MUST_AGREE = {
    "method": "the method",
    "data": "what it trains on (train.data)",
    "encoder": "the encoder of its features",
    "n_features": "the number of features per patch",
    "tumor_types": "the classes of each tumour type",
    "classes": "the classes of its store",
    "size_px": "the patch size",
    "mpp": "the resolution (µm/px)",
    "channels": "the number of channels",
    "schema": "the architecture of the model that travels",
    "sites": "the list of sites",
    "input_px": "the size its models see",
    "schedule": "the schedule (rounds, batch size, epochs, seed, self-weight, privacy mode)",
    "buffer": "the buffer (replay.variant, and number, size, channels and classes of its samples)",
    "stains": "the stains in use (stains/*.json)",
    "versions": "the package versions",
}


def compare(brought: Sequence[Mapping[str, Any]]) -> None:
    """Compares the documents of all sites and names the odd one.

    Args:
        brought: per site a JSON document with "site" and those keys of MUST_AGREE that its kind of data has.

    Raises:
        UsageError: one line with every disagreement.

    Example:
        >>> same = {key: 1 for key in MUST_AGREE}
        >>> compare([{"site": "C1", **same}, {"site": "C2", **same}, {"site": "C3", **same, "mpp": 2}])
        Traceback (most recent call last):
        wsi_fl.types.UsageError: sites disagree: C3 brings 2 as the resolution (µm/px), the others 1
    """
    names = [str(document["site"]) for document in brought]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two ranks are site {twice[0]}; give every rank the same list of sites")
    problems = []
    for key, words in MUST_AGREE.items():
        values = {
            str(document["site"]): json.dumps(document.get(key), sort_keys=True) for document in brought
        }
        usual, count = Counter(values.values()).most_common(1)[0]
        odd = {site: value for site, value in values.items() if value != usual}
        if not odd:
            continue
        majority = "the others" if count > 1 else next(s for s, v in values.items() if v == usual)
        said = "; ".join(f"{site} brings {_short(value)}" for site, value in odd.items())
        problems.append(f"{said} as {words}, {majority} {_short(usual)}")
    if problems:
        raise UsageError("sites disagree: " + " | ".join(problems))


def _short(value: str, limit: int = 60) -> str:
    text = value.strip('"')
    return text if len(text) <= limit else text[: limit - 1] + "…"
