"""The part of `mosaic` that works: from one slide to its shard and picture, while the next are looked at and read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoded, Encoder, EncoderError, Spent, encode, encode_each
from wsi_fl.slides.choosing.masks import mask_digest
from wsi_fl.slides.choosing.mosaic import MosaicParams, MosaicPlan, plan_mosaic
from wsi_fl.slides.pictures.mosaic import draw_mosaic, small_copy
from wsi_fl.slides.reading.patches import read_patches
from wsi_fl.slides.reading.probe import vouch_for
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stages.work.aside import partly, reason_of
from wsi_fl.stages.work.console import say
from wsi_fl.stores.features import Bag
from wsi_fl.stores.mosaics import MosaicShard, current_mosaic, fingerprint, read_mosaic, write_mosaic
from wsi_fl.system.files import write_bytes
from wsi_fl.system.ordered import in_order
from wsi_fl.types import DiskFull, GridSpec, SlideRecord, WsiFlError

T = TypeVar("T")

_LOOKERS = 4
"""Slides looked at while another is encoded: each needs some hundred megabytes for its tissue mask."""


@dataclass(frozen=True)
class Work:
    """How the mosaics of a site are made.

    Attributes:
        folder: of the site's stores.
        threads: how many decode.
    """

    folder: Path
    spec: GridSpec
    params: MosaicParams
    reader: Reader
    threads: int
    encoder: Encoder


@dataclass(frozen=True)
class Done:
    """What became of one slide; plain enough for JSON.

    Attributes:
        slide: its name.
        whole: whether it has a shard.
        reason: why it, or some of its patches, were set aside.
        note: what people should know of its mosaic.
        made: how many patches were encoded; none where the shard was there already.
        spent: what that took.
    """

    slide: str
    whole: bool = False
    reason: str | None = None
    note: str = ""
    made: int = 0
    spent: Spent = field(default_factory=Spent)


def mosaic_path(folder: Path, slide: str) -> Path:
    return folder / "mosaics" / f"{slide}.h5"


def picture_path(folder: Path, slide: str) -> Path:
    return folder / "mosaics" / f"{slide}.png"


def write_mosaics(records: Sequence[SlideRecord], work: Work) -> Iterator[Done]:
    """Write the shards of these slides and yield in order what became of each.

    The next are looked at and read, and the last one is drawn, while one is encoded.
    """
    n_ahead = min(work.threads, _LOOKERS)
    with (
        closing(in_order(partial(_look, work), records, threads=n_ahead, ahead=n_ahead)) as looked,
        closing(encode_each(_readings(work, looked), work.encoder)) as encoded,
        closing(in_order(partial(_write, work), encoded, threads=1, ahead=1)) as written,
    ):
        yield from written


@dataclass(frozen=True)
class _Looked:
    """What was found in a slide before its pixels are read."""

    fingerprint: str
    quickhash: str
    plan: MosaicPlan


@dataclass(frozen=True)
class _Reading:
    """The patches of a plan, read once.

    Attributes:
        small: (row, uint8[h, w, 3]) small copies of what was read, which the picture is made of.
        unread: why rows are missing.
    """

    plan: MosaicPlan
    small: list[tuple[int, NDArray[np.uint8]]] = field(default_factory=list)
    unread: dict[int, str] = field(default_factory=dict)

    def batches(self, work: Work) -> Iterator[NDArray[np.uint8]]:
        """Yield the patches, uint8[b, h, w, 3], and keep what is to be known of them."""
        plan, how = self.plan, {"threads": work.threads, "reader": work.reader, "aside": self.unread}
        for first, pixels in read_patches(plan.record, plan.kept_l0, work.spec, **how):  # type: ignore[arg-type]
            rows = islice((row for row in count(first) if row not in self.unread), len(pixels))
            self.small.extend((row, small_copy(patch)) for row, patch in zip(rows, pixels, strict=True))
            yield pixels

    def bag(self, features: NDArray[np.float32]) -> Bag:
        """Return the features, float32[n, d], of the n patches that could be read, with their places and groups."""
        if not len(features):
            raise WsiFlError(self.unread[min(self.unread)])
        plan = self.plan
        kept = np.setdiff1d(np.arange(len(plan.kept_l0)), list(self.unread))
        return Bag(features, plan.kept_l0[kept], plan.kept_cluster[kept], plan.mosaic.weight[kept])


def _look(work: Work, record: SlideRecord) -> _Looked | Done:
    """Plan a slide's mosaic, unless its shard is there and current."""

    def look() -> _Looked | Done:
        vouch_for(record.path, record.mpp_override, work.reader)
        with Slide(record.path, record.mpp_override, "openslide") as slide:
            quickhash, mpp = slide.quickhash, slide.mpp
        wanted = _fingerprint(record, quickhash, mpp, work)
        current = current_mosaic(mosaic_path(work.folder, record.slide), wanted)
        if current and picture_path(work.folder, record.slide).exists():
            return _done(record.slide, work)
        if current is False:
            say(
                f"  {record.slide}: parameters, encoder or slide changed, or its shard was damaged; made again"
            )
        return _Looked(wanted, quickhash, plan_mosaic(record, work.spec, work.params, reader=work.reader))

    return _apart(record.slide, look)


def _readings(
    work: Work, looked: Iterable[_Looked | Done]
) -> Iterator[tuple[tuple[_Looked, _Reading] | Done, Iterable[NDArray[np.uint8]]]]:
    """Yield what is read of each slide; nothing of one that is done."""
    for one in looked:
        if isinstance(one, Done):
            yield one, ()
        else:
            reading = _Reading(one.plan)
            yield (one, reading), reading.batches(work)


def _write(work: Work, encoded: Encoded[tuple[_Looked, _Reading] | Done]) -> Done:
    """Write the picture first: a shard that is there says that all of its slide is done."""
    if isinstance(encoded.item, Done):
        return encoded.item
    began = time.perf_counter()
    looked, reading = encoded.item
    slide, plan = looked.plan.record.slide, looked.plan

    def write() -> Done:
        if encoded.error is not None:
            raise encoded.error
        shard = MosaicShard(
            slide=slide,
            quickhash=looked.quickhash,
            fingerprint=looked.fingerprint,
            encoder=work.encoder.label,
            spec=work.spec,
            mpp_l0=plan.mpp,
            n_candidates=len(plan.xy_l0),
            note=plan.note,
            bag=reading.bag(encoded.features),
            unread=tuple(
                (*plan.kept_l0[row].tolist(), reading.unread[row]) for row in sorted(reading.unread)
            ),
        )
        write_bytes(picture_path(work.folder, slide), draw_mosaic(plan, reading.small))
        write_mosaic(mosaic_path(work.folder, slide), shard)
        spent = encoded.spent + Spent(write=time.perf_counter() - began)
        return replace(_done(slide, work), made=len(encoded.features), spent=spent)

    return _apart(slide, write)


def _apart(slide: str, step: Callable[[], T]) -> T | Done:
    """Take a slide a step further: one that a library chokes on must not end the others."""
    try:
        return step()
    except (DiskFull, EncoderError):
        raise
    except Exception as error:
        return Done(slide, reason=reason_of(error))


def _done(slide: str, work: Work) -> Done:
    """Return what the shard of a slide says of it."""
    shard = read_mosaic(mosaic_path(work.folder, slide))
    n = len(shard.bag.features) + len(shard.unread)
    return Done(slide, True, partly(shard.unread, n), shard.note)


def _fingerprint(record: SlideRecord, quickhash: str, mpp: float, work: Work) -> str:
    """Over the slide (its size on disk too, for formats without quickhash), the parameters and the encoder."""
    size = record.path.stat().st_size if record.path.is_file() else 0
    params, masks = work.params, work.params.tissue.masks
    tissue = mask_digest(Path(masks), record.slide) if masks else params.tissue.method
    return fingerprint(
        record.slide,
        quickhash,
        size,
        mpp,
        work.reader,
        work.spec.size_px,
        work.spec.mpp,
        *(params.min_tissue, params.clusters, params.fraction, params.seed, tissue),
        work.encoder.label,
    )


def bag_of_slide(record: SlideRecord, work: Work) -> Bag:
    """Return the mosaic of one slide, which is kept nowhere.

    Raises:
        WsiFlError: when the slide gives none.
    """
    reading = _Reading(plan_mosaic(record, work.spec, work.params, reader=work.reader))
    return reading.bag(encode(reading.batches(work), work.encoder))
