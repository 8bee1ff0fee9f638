"""The buffer of a site for `replay`: synthetic samples of its own generator, drawn once and kept in the run."""

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
    """Return the buffer that the run remembers of a site, or one freshly drawn; None where it has no patches.

    Raises:
        WsiFlError: when the site has no generator, or one whose check was not passed.
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
    """Refuse a buffer that memory cannot hold, as images and packed, before any is drawn."""
    needed, room = 2 * shape.n_bytes, free_bytes()
    if needed > room:
        raise UsageError(
            f"replay.buffer = {shape.n}: images of {shape.size_px} px that take {needed / 1e9:.3g} GB of memory; "
            f"{room / 1e9:.3g} GB are free; at most {shape.n * room // needed} fit"
        )


def _drawn(party: RunContext, data: PatchData, shape: BufferShape, index: int) -> Buffer:
    """So many samples of the site's generator, classes balanced, at the size that models see."""
    from wsi_fl.synthesis.stages.gan import KIND as GAN  # and with it torchvision and matplotlib
    from wsi_fl.synthesis.stages.kinds import outcome
    from wsi_fl.synthesis.stages.sample import as_pixels
    from wsi_fl.synthesis.state import balance_labels

    study, site, settings = party.study, data.site, party.pipeline.find_section(Replay)
    folder, document = GAN.trained(study, site)
    if not is_source_store(data.store, document["store"]):
        raise UsageError(
            f"{study.relative_path(folder.path)}: was trained on another store of site {site}, which may hold "
            "what is for "
            f"testing now; run `wsi-fl synthesize train --site {site} --again`"
        )
    found = GAN.provenance(folder, document)
    if found["check"] != "passed" and not settings.unchecked:
        raise WsiFlError(
            f"site {site}: no buffer leaves it, the check of its generator was {outcome(found)}. "
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
    """Return the bytes of a buffer; None where models see no images."""
    if not isinstance(shape, Images):
        return None
    return BufferShape(pipeline.find_section(Replay).buffer, shape.size_px, shape.channels, n_classes).n_bytes
