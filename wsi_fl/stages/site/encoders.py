"""The encoder of a pipeline's features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wsi_fl.models.encoder import Encoder, encode_golden
from wsi_fl.models.presets import PRESETS
from wsi_fl.models.weights import NoWeightsError, find_cached_weights
from wsi_fl.stages.runtime.rank_job import select_device, take_threads
from wsi_fl.stages.site.public_sources import require_published
from wsi_fl.stores.bag_store import BagMeta, BagStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.machine import n_cores
from wsi_fl.types import MAX_GOLDEN_DISTANCE, UsageError, WsiFlError, encoder_differences, golden_distance

if TYPE_CHECKING:
    import torch


def load_encoder(
    study: Study,
    pipeline: Pipeline,
    section: Literal["features", "mosaic"],
    threads: int,
    report: Callable[[str], None] = lambda _: None,
    *,
    device: torch.device | None = None,
) -> Encoder:
    """Load the encoder of a pipeline's section on a device, by default this rank's, with this rank's share of cores.

    `report` is called with lines for people.
    """
    take_threads(threads)
    settings = pipeline.mosaic if section == "mosaic" else pipeline.encoder_settings
    weights = study.resolve(settings.weights) if settings.weights else None
    if weights is not None and pipeline.privacy.enabled:
        require_published(weights, f"{section}.weights")
    try:
        encoder = Encoder(
            settings.encoder,
            weights,
            input_px=settings.input_px,
            device=device or select_device(),
            half_precision=pipeline.gpu.encode == "half",
            compiled=pipeline.gpu.compile,
            tell=report,
        )
    except NoWeightsError as error:
        raise NoWeightsError(
            f"[{section}] {error}: {section}.weights = 'FILE.safetensors' in the pipeline, or --set "
            f"{section}.weights=FILE.safetensors"
        ) from None
    except WsiFlError as error:
        raise type(error)(f"[{section}] {error}") from None
    note = f"as timm has it, {', '.join(encoder.parts)}"
    if preset := PRESETS.get(settings.encoder):
        gib = preset.memory_bytes / (1 << 30)
        note = f"licence {preset.licence} (its model card counts); takes about {gib:.1f} GiB of memory"
    report(f"{encoder.name}: {note}")
    return encoder


def load_same_encoder(study: Study, pipeline: Pipeline, labels: Mapping[str, str]) -> Encoder:
    """Load the encoder of `[features]`; one of another name than that of features here is refused before it is loaded.

    Args:
        labels: the encoder's label of existing features, by their owner.

    Raises:
        UsageError: for another encoder than that of existing features.
    """

    def refuse_others(label: str) -> None:
        for owner, other in labels.items():
            if any(encoder_differences([other, label])):
                raise UsageError(
                    f"features.encoder: {label}, but {owner} has features of {other}; take the same encoder and weights"
                )

    refuse_others(pipeline.encoder_settings.encoder)
    encoder = load_encoder(study, pipeline, "features", n_cores())
    refuse_others(encoder.label)
    return encoder


def list_study_encoders(study: Study, pipeline: Pipeline) -> dict[str, str]:
    """Return site → the encoder's label of its feature store, for stores on this machine.

    Without any it is the encoder that the pipeline names, if it names one.
    """
    path = study.mosaic_path if pipeline.train.data == "mosaics" else study.features_path
    labels = {}
    for site in pipeline.sites or study.site_names():
        with suppress(WsiFlError), BagStore(path(site)) as store:
            labels[f"site {site}"] = store.meta.encoder
    is_named = pipeline.features.encoder is not None or "encoder" in pipeline.mosaic.model_fields_set
    return labels or ({"the pipeline": pipeline.encoder_settings.encoder} if is_named else {})


def find_local_weights(name: str, study: Study | None, pipeline: Pipeline | None) -> Path | None:
    """Return the file of a preset's weights that the pipeline names, else the downloaded one; None without any."""
    preset = PRESETS[name]
    if study and pipeline:
        for section in (pipeline.mosaic, pipeline.encoder_settings):
            if section.weights and section.encoder == name and (path := study.resolve(section.weights)).is_file():
                return path
    return find_cached_weights(preset.hub_id, preset.hub_files) if preset.hub_id else None


def require_golden_vectors(study: Study, pipeline: Pipeline, meta: BagMeta, source: Path) -> bool:
    """Compare the golden vectors of another tool's features with those of the encoder whose name they bear.

    Returns:
        Whether they could be compared, which needs the encoder's weights on this machine.

    Raises:
        WsiFlError: when they differ.
    """
    name = meta.encoder.split(";")[0]
    weights = find_local_weights(name, study, pipeline) if meta.golden and name in PRESETS else None
    if weights is None:
        return False
    encoder = Encoder(name, weights, device=select_device(), half_precision=False)
    distance = golden_distance(encode_golden(encoder, meta.spec), meta.golden)
    if distance > MAX_GOLDEN_DISTANCE:
        raise WsiFlError(
            f"{source}: its features of the golden patches are {distance:.0%} apart from those of {name} here "
            f"({', '.join(encoder.parts)}); they have other weights or preprocessing: extract them anew, or give them "
            "another --encoder-name"
        )
    return not isnan(distance)


def describe_transform(encoder: Encoder) -> dict[str, object]:
    """Return an encoder's transform of patches and its pooling, for `--json`."""
    transform = encoder.network.transform
    preset = PRESETS.get(encoder.name)
    return {
        "mean": list(transform.mean),
        "sd": list(transform.sd),
        "px": transform.px,
        "interpolation": transform.interpolation,
        "resize_px": transform.resize_px or transform.px,
        "pooling": encoder.network.pooling,
        "trained_mpp": list(preset.mpp) if preset else [],
    }
