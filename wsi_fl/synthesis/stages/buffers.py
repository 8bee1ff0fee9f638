"""The buffer of a site for `replay`: synthetic samples of its generator, drawn once and stored in the run."""

from __future__ import annotations

import numpy as np

from wsi_fl.federation.site import Buffer, BufferShape
from wsi_fl.learning.examples import Examples, resize_images
from wsi_fl.stages.site.data import PatchData, is_source_store
from wsi_fl.stages.site.party import RunContext
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.keys import Replay
from wsi_fl.system.machine import free_bytes
from wsi_fl.types import Images, Shape, UsageError, WsiFlError


def agreed_buffer(party: RunContext, index: int) -> Buffer | None:
    """Return a site's buffer, stored in the run or freshly drawn; None without patches.

    Raises:
        WsiFlError: for a site without a generator that passed its check.
    """
    data = party.open_data(party.names[index])
    if not isinstance(data, PatchData):
        return None
    seen, n_classes = data.shape, len(data.classes)
    shape = BufferShape(party.pipeline.find_section(Replay).buffer, seen.size_px, seen.channels, n_classes)
    _check_room(shape)
    known = party.run.site_folder(data.site).read_buffer()
    if known is not None:
        values, provenance = known
        return Buffer(shape, values, provenance)
    return _drawn(party, data, shape, index)


def _check_room(shape: BufferShape) -> None:
    """Refuse a buffer larger than free memory, as images and packed, before drawing."""
    needed, room = 2 * shape.n_bytes, free_bytes()
    if needed > room:
        raise UsageError(
            f"replay.buffer = {shape.n}: images of {shape.size_px} px that take {needed / 1e9:.3g} GB of memory; "
            f"{room / 1e9:.3g} GB are free; at most {shape.n * room // needed} fit"
        )


def _drawn(party: RunContext, data: PatchData, shape: BufferShape, index: int) -> Buffer:
    """Draw a buffer from the site's generator, classes balanced, at the models' image size."""
    from wsi_fl.synthesis.stages.gan import KIND as GAN  # imports torchvision, matplotlib
    from wsi_fl.synthesis.stages.kinds import outcome
    from wsi_fl.synthesis.stages.sample import as_pixels
    from wsi_fl.synthesis.state import balance_labels

    study, site, settings = party.study, data.site, party.pipeline.find_section(Replay)
    folder, document = GAN.trained(study, site)
    if not is_source_store(data.store, document["store"]):
        raise UsageError(
            f"{study.relative_path(folder.path)}: was trained on another store of site {site}, which may hold "
            f"test patches of today; run `wsi-fl synthesize train --site {site} --again`"
        )
    found = GAN.provenance(folder, document)
    if found["check"] != "passed" and not settings.unchecked:
        raise WsiFlError(
            f"site {site}: no buffer is released, the check of its generator was {outcome(found)}. "
            "replay.unchecked = true shares it all the same"
        )
    seed = int(np.random.SeedSequence((party.pipeline.train.seed, index)).generate_state(1)[0])
    labels = balance_labels(shape.n_classes, -(-shape.n // shape.n_classes))[: shape.n]
    found |= {"seed": seed}
    images = np.concatenate(list(as_pixels(GAN.draw(folder, found, labels))))
    name = np.full(len(labels), "synthetic")
    seen = resize_images(Examples(lambda rows: images[rows], labels, name, name), shape.size_px)
    return Buffer(shape, shape.pack_samples(seen.read(np.arange(len(labels))), labels), found)


def n_bytes(pipeline: Pipeline, shape: Shape, n_classes: int) -> int | None:
    """Return the bytes of a buffer; None for models without images."""
    if not isinstance(shape, Images):
        return None
    return BufferShape(pipeline.find_section(Replay).buffer, shape.size_px, shape.channels, n_classes).n_bytes
