"""The preflight: check before training that inputs and settings of all sites agree."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Count, PrintableText, SiteName
from wsi_fl.types import (
    MAX_GOLDEN_DISTANCE,
    NoCommonPlan,
    encoder_differences,
    golden_distance,
    select_common,
    shorten_text,
)

_Scalar = PrintableText | Annotated[int, Field(ge=-(1 << 64), le=1 << 64)] | float | bool | None
Setting = _Scalar | Annotated[list[_Scalar], Field(max_length=1000)]
_Key = Annotated[str, Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$", max_length=100)]
_Classes = Annotated[list[PrintableText], Field(max_length=10_000)]


class ModelInputs(TypedDict, total=False):
    """Inputs of models: the last two fields of patches, the first two of features, the first three of mosaics."""

    n_features: Count
    encoder: PrintableText
    golden: Annotated[list[float | None], Field(max_length=1000)]  # the encoder's vectors of the golden patches
    tumor_types: Annotated[dict[PrintableText, _Classes], Field(max_length=1000)]
    channels: Count
    input_px: Count


class PreflightDocument(ModelInputs):
    """The document that a site sends to all others before a run: plans and shapes."""

    site: SiteName
    run: PrintableText
    method: PrintableText
    # "section.key" of the pipeline → value, of the settings that must be the same everywhere
    settings: Annotated[dict[_Key, Setting], Field(max_length=1000)]
    classes: _Classes
    size_px: Count
    mpp: Amount
    weights: PrintableText  # SHA-256 of the initial weights of the exchanged model; empty for random ones
    schema: PrintableText  # of the exchanged model; empty for none
    sites: Annotated[list[SiteName], Field(max_length=10_000)]
    inference_sites: Annotated[list[SiteName], Field(max_length=10_000)]  # sites without labels
    graph: PrintableText | None  # name of the graph, or digest of its file; None for the method's graph
    projection: PrintableText | None  # SHA-256 of the projection of features; None for none
    # the variant, and number, size, channels and classes of the samples; None without buffers
    buffer: Annotated[list[PrintableText | int], Field(max_length=10)] | None
    noise: Amount | None  # σ of distributed noise; None where each site adds its own
    # site → digest of its released class statistics, where used
    statistics: Annotated[dict[SiteName, PrintableText], Field(max_length=10_000)]
    versions: Annotated[dict[PrintableText, PrintableText], Field(max_length=100)]
    affordable: Count  # rounds within the site's budget
    # number of privacy units, and the noise multiplier; 0 without differential privacy
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
    "weights": "the initial weights of the exchanged model (model.weights)",
    "schema": "the architecture of the exchanged model",
    "sites": "the list of sites",
    "inference_sites": "the list of receivers (role, in sites/*.toml)",
    "input_px": "the input size of its models",
    "graph": "the graph (topology.graph)",
    "projection": "the projection of its class statistics (model.projection)",
    "buffer": "the buffer (replay.variant, and number, size, channels and classes of its samples)",
    "noise": "the distributed noise (σ; sites that have spent before need more of it)",
    "statistics": "the released class statistics in use (statistics/*.safetensors)",
    "versions": "the package versions",
    "run": "the run's identity",
}
_FIELD_OF_VIEW = "the field of view of its patches (train.any_patch_size allows it)"
_SAME = "the same"
_MIN_COMMON_PATCHES = 8
"""Fewest golden patches in common by which two encoders are known to be the same, whatever their names."""
_MAX_MESSAGE_CHARS, _MAX_SITES_LISTED = 480, 3


def compare_sites(documents: Sequence[Mapping[str, Any]]) -> None:
    """Compare the documents of all sites, and name the odd one.

    Each has "site", the keys of _MUST_AGREE for its kind of data, and "settings", compared one by one.

    Raises:
        NoCommonPlan: in one line of at most 500 characters, with the first disagreements.
    """
    names = [str(document["site"]) for document in documents]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise NoCommonPlan(f"two ranks are site {duplicates[0]}; give every rank the same list of sites")
    disagreements = (
        _find_odd(label, dict(zip(names, values, strict=True))) for label, values in _list_values(documents)
    )
    problems = [problem for problem in disagreements if problem]
    if problems:
        raise NoCommonPlan(shorten_text("sites disagree: " + " | ".join(problems), _MAX_MESSAGE_CHARS))


def _list_values(documents: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each value that must agree, by its label, with the values of all sites."""
    settings = [document.get("settings", {}) for document in documents]
    encoders = [encoder for document in documents if isinstance(encoder := document.get("encoder"), str)]
    has_features = len(encoders) == len(documents)
    for key, label in _MUST_AGREE.items():
        if not (has_features and key in {"encoder", "size_px", "mpp"}):
            yield label, [document.get(key) for document in documents]
    if has_features:
        differences, is_complete = _compare_vectors(documents)
        yield "those of the golden patches (other weights or preprocessing)", differences
        if set(differences) != {_SAME} or not is_complete:
            yield _MUST_AGREE["encoder"], encoder_differences(encoders)
        if not all(values.get("train.any_patch_size") for values in settings):
            yield (
                _FIELD_OF_VIEW,
                [
                    f"{size * mpp:.3g} µm ({size} px at {mpp:.3g} µm/px)"  # rounded: files differ in the last digits
                    for size, mpp in (
                        (document.get("size_px") or 0, float(document.get("mpp") or 0)) for document in documents
                    )
                ],
            )
    for key in sorted({key for values in settings for key in values}):
        yield key, [values.get(key) for values in settings]


def _compare_vectors(documents: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
    """Return how far each site's vectors of the golden patches are from most sites', in words.

    And whether all could be compared, which needs the same patch size and several patches that differ: then names of
    encoders do not matter. The order of sites is of no influence.
    """
    differences, names = [_SAME] * len(documents), [str(document["site"]) for document in documents]
    by_spec: dict[Any, list[int]] = {}
    for site, document in enumerate(documents):
        spec = (document.get("size_px"), f"{document.get('mpp') or 0:.3g}") if document.get("golden") else None
        by_spec.setdefault(spec, []).append(site)
    is_complete = len(by_spec) == 1 and None not in by_spec
    by_spec.pop(None, None)
    for sites in by_spec.values():
        vectors = {site: documents[site]["golden"] for site in sites}
        groups: list[list[int]] = []
        # sites with the most patches first, as few sites can be compared with one of few
        for site in sorted(sites, key=lambda site: (vectors[site].count(None) - len(vectors[site]), names[site])):
            distances = [golden_distance(vectors[site], vectors[group[0]]) for group in groups]
            same = next((k for k, distance in enumerate(distances) if distance <= MAX_GOLDEN_DISTANCE), len(groups))
            if same == len(groups):
                groups.append([])
            groups[same].append(site)
        usual = max(groups, key=len)[0]
        for site in sites:
            distance = golden_distance(vectors[site], vectors[usual])
            n_common = select_common(vectors[site], vectors[usual]).shape[1]
            is_complete = is_complete and n_common >= _MIN_COMMON_PATCHES and not isnan(distance)
            differences[site] = f"features {distance:.0%} apart" if distance > MAX_GOLDEN_DISTANCE else _SAME
    return differences, is_complete


def _find_odd(label: str, values: Mapping[str, Any]) -> str:
    """Describe the sites whose value differs from the most frequent one; "" for none."""
    texts = {site: json.dumps(value, sort_keys=True, ensure_ascii=False) for site, value in values.items()}
    counts = Counter(texts.values())
    usual = max(counts, key=lambda text: (counts[text], text == json.dumps(_SAME)))
    odd = [f"{shorten_text(site)} has {_format_value(text)}" for site, text in texts.items() if text != usual]
    if not odd:
        return ""
    listed = odd[:_MAX_SITES_LISTED] + (
        [f"{len(odd) - _MAX_SITES_LISTED} more have something else"] if len(odd) > _MAX_SITES_LISTED else []
    )
    the_rest = [shorten_text(site) for site, text in texts.items() if text == usual]
    majority = "the others" if len(the_rest) > 1 else the_rest[0]
    return f"{'; '.join(listed)} as {label}, {majority} {_format_value(usual)}"


def _format_value(text: str) -> str:
    """Return a JSON value for messages, digests shortened to their first digits."""
    return (
        "nothing" if text == "null" else shorten_text(re.sub(r"\b([0-9a-f]{16})[0-9a-f]{48}\b", r"\1", text.strip('"')))
    )
