"""The buffer of a site for `replay`: synthetic samples of its generator, drawn once and stored in the run."""

from __future__ import annotations

import numpy as np

from wsi_fl.data.cohort import Cohort
from wsi_fl.federation.methods import Disclosure
from wsi_fl.federation.site_state import Buffer, BufferShape
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.site.site_data import SiteData, is_source_store
from wsi_fl.stages.site.study_hooks import StudyHooks
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.keys import Replay
from wsi_fl.system.machine import free_bytes
from wsi_fl.types import Images, Shape, UsageError, WsiFlError


def _require_memory(shape: BufferShape) -> None:
    """Refuse a buffer larger than free memory, as images and packed, before drawing."""
    needed, available = 2 * shape.n_bytes, free_bytes()
    if needed > available:
        raise UsageError(
            f"replay.buffer = {shape.n}: images of {shape.size_px} px that take {needed / 1e9:.3g} GB of memory; "
            f"{available / 1e9:.3g} GB are free; at most {shape.n * available // needed} fit"
        )


def _draw_buffer(data: SiteData, shape: BufferShape, index: int) -> Buffer:
    """Draw a buffer from the site's generator, classes balanced, at the models' image size."""
    from wsi_fl.synthesis.stages.gan import KIND as GAN  # imports torchvision, matplotlib
    from wsi_fl.synthesis.stages.generator_types import describe_outcome
    from wsi_fl.synthesis.stages.synthetic_stores import transpose_images
    from wsi_fl.synthesis.training_state import balance_labels

    study, site, settings = data.study, data.site, data.pipeline.find_section(Replay)
    folder, document = GAN.require_trained(study, site)
    assert isinstance(data.store, PatchStore)
    if not is_source_store(data.store, document["store"]):
        raise UsageError(
            f"{study.relative_path(folder.path)}: was trained on another store of site {site}, which may hold "
            f"test patches of today; run `wsi-fl synthesize train --site {site} --again`"
        )
    provenance = GAN.build_provenance(folder, document)
    if provenance["check"] != "passed" and not settings.unchecked:
        raise WsiFlError(
            f"site {site}: no buffer is released, the check of its generator was {describe_outcome(provenance)}. "
            "replay.unchecked = true shares it all the same"
        )
    seed = int(np.random.SeedSequence((data.pipeline.train.seed, index)).generate_state(1)[0])
    labels = balance_labels(shape.n_classes, -(-shape.n // shape.n_classes))[: shape.n]
    provenance |= {"seed": seed}
    images = np.concatenate(list(transpose_images(GAN.draw_images(folder, provenance, labels))))
    names = np.full(len(labels), "synthetic")
    examples = Cohort.from_columns(images.__getitem__, labels, names, names).resize_images(shape.size_px)
    return Buffer(shape, shape.pack_samples(examples.read(np.arange(len(labels))), labels), provenance)


class _BufferHooks(StudyHooks):
    """Buffers of the variants that send any."""

    def load_buffer(self, data: SiteData, folder: SiteFolder, index: int) -> Buffer | None:
        """Return a site's buffer, stored in the run or freshly drawn; None without patches.

        Raises:
            WsiFlError: for a site without a generator that passed its check.
        """
        image_shape, n_classes = data.shape, len(data.classes)
        if not isinstance(image_shape, Images):
            return None
        shape = BufferShape(
            data.pipeline.find_section(Replay).buffer, image_shape.size_px, image_shape.channels, n_classes
        )
        _require_memory(shape)
        if (stored := folder.read_buffer()) is not None:
            return Buffer(shape, *stored)
        return _draw_buffer(data, shape, index)

    def count_bytes(self, pipeline: Pipeline, disclosure: Disclosure, shape: Shape, n_classes: int) -> int | None:
        if not isinstance(shape, Images):
            return None
        return BufferShape(pipeline.find_section(Replay).buffer, shape.size_px, shape.channels, n_classes).n_bytes


HOOKS = _BufferHooks()
