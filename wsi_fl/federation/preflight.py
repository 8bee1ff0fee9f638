"""Before the first step: check that the inputs and settings of all sites fit."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Count, Name, Words
from wsi_fl.types import NoCommonPlan, encoder_differences

_Scalar = Words | Annotated[int, Field(ge=-(1 << 64), le=1 << 64)] | float | bool | None
Setting = _Scalar | Annotated[list[_Scalar], Field(max_length=1000)]
_Key = Annotated[str, Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$", max_length=100)]
_Classes = Annotated[list[Words], Field(max_length=10_000)]


class Inputs(TypedDict, total=False):
    """What models see: of patches the last two, of their features the first two, of mosaics the first three."""

    n_features: Count
    encoder: Words
    tumor_types: Annotated[dict[Words, _Classes], Field(max_length=1000)]
    channels: Count
    input_px: Count


class Brought(Inputs):
    """What a site tells all others before the run: plans and shapes."""

    site: Name
    run: Words
    method: Words
    # "section.key" of the pipeline → value, of the settings that must be the same everywhere
    settings: Annotated[dict[_Key, Setting], Field(max_length=1000)]
    classes: _Classes
    size_px: Count
    mpp: Amount
    weights: Words  # SHA-256 of those that the model that travels starts from; empty for random ones
    schema: Words  # of the model that travels; empty where none does
    sites: Annotated[list[Name], Field(max_length=10_000)]
    inference_sites: Annotated[list[Name], Field(max_length=10_000)]  # those of the sites that give nothing
    graph: Words | None  # the name of the graph, or the digest of its file; None for the method's own
    projection: Words | None  # SHA-256 of those along which features are summed; None where none are
    # the variant, and number, size, channels and classes of the samples; None where no buffers travel
    buffer: Annotated[list[Words | int], Field(max_length=10)] | None
    noise: Amount | None  # σ of the noise that all sites add together; None where each adds its own
    # site → digest of its released sums, where these are used
    statistics: Annotated[dict[Name, Words], Field(max_length=10_000)]
    versions: Annotated[dict[Words, Words], Field(max_length=100)]
    affordable: Count  # rounds that the site's budget is enough for
    # how many rows or patients privacy counts, and the noise multiplier; 0 without privacy
    units: Count
    sigma: Amount


_MUST_AGREE = {
    "method": "the method",
    "encoder": "the encoder of its features",
    "n_features": "the number of features per patch",
    "tumor_types": "the classes of each tumour type",
    "classes": "the classes of its store",
    "size_px": "the patch size",
    "mpp": "the resolution (µm/px)",
    "channels": "the number of channels",
    "weights": "the weights that the model that travels starts from (model.weights)",
    "schema": "the architecture of the model that travels",
    "sites": "the list of sites",
    "inference_sites": "the list of receivers (role, in sites/*.toml)",
    "input_px": "the size its models see",
    "graph": "the graph (topology.graph)",
    "projection": "the directions of its sums (model.projection)",
    "buffer": "the buffer (replay.variant, and number, size, channels and classes of its samples)",
    "noise": "the noise that all add together (σ; sites that have spent before need more of it)",
    "statistics": "the released sums in use (statistics/*.safetensors)",
    "versions": "the package versions",
    "run": "the run's identity",
}
_FIELD = "the field of view of its patches (train.any_patch_size allows it)"
_LONGEST, _LISTED = 480, 3


def compare(brought: Sequence[Mapping[str, Any]]) -> None:
    """Compare the documents of all sites, and name the odd one.

    Each has "site", those keys of _MUST_AGREE that its kind of data has, and "settings", which are compared one by one.

    Raises:
        NoCommonPlan: in one line of at most 500 characters, with as many disagreements as there is room for.
    """
    names = [str(document["site"]) for document in brought]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise NoCommonPlan(f"two ranks are site {twice[0]}; give every rank the same list of sites")
    found = (_odd(words, dict(zip(names, values, strict=True))) for words, values in _compared(brought))
    problems = [problem for problem in found if problem]
    if problems:
        raise NoCommonPlan(_short("sites disagree: " + " | ".join(problems), _LONGEST))


def _compared(brought: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Return what must agree, in words, with the value of each site."""
    settings = [document.get("settings", {}) for document in brought]
    encoders = [one for document in brought if isinstance(one := document.get("encoder"), str)]
    of_features = len(encoders) == len(brought)
    for key, words in _MUST_AGREE.items():
        if not (of_features and key in {"encoder", "size_px", "mpp"}):
            yield words, [document.get(key) for document in brought]
    if of_features:
        yield _MUST_AGREE["encoder"], encoder_differences(encoders)
        if not all(one.get("train.any_patch_size") for one in settings):
            yield (
                _FIELD,
                [
                    f"{size * mpp:.3g} µm ({size} px at {mpp:.3g} µm/px)"  # rounded: files differ in the last digits
                    for size, mpp in (
                        (one.get("size_px") or 0, float(one.get("mpp") or 0)) for one in brought
                    )
                ],
            )
    for key in sorted({key for one in settings for key in one}):
        yield key, [one.get(key) for one in settings]


def _odd(words: str, values: Mapping[str, Any]) -> str:
    """Return the sites whose value differs from the most frequent one."""
    texts = {site: json.dumps(value, sort_keys=True, ensure_ascii=False) for site, value in values.items()}
    usual, count = Counter(texts.values()).most_common(1)[0]
    odd = [f"{_short(site)} brings {_said(text)}" for site, text in texts.items() if text != usual]
    if not odd:
        return ""
    listed = odd[:_LISTED] + (
        [f"{len(odd) - _LISTED} more bring something else"] if len(odd) > _LISTED else []
    )
    majority = "the others" if count > 1 else next(_short(s) for s, text in texts.items() if text == usual)
    return f"{'; '.join(listed)} as {words}, {majority} {_said(usual)}"


def _said(text: str) -> str:
    """Return a JSON value in words for messages; of a digest, which is compared whole, its first digits."""
    return (
        "nothing"
        if text == "null"
        else _short(re.sub(r"\b([0-9a-f]{16})[0-9a-f]{48}\b", r"\1", text.strip('"')))
    )


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
