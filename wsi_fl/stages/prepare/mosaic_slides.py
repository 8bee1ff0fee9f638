"""The part of `mosaic` that works: from one slide to its shard and picture, while the next is looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoder, EncoderError, encode
from wsi_fl.slides.choosing.mosaic import MosaicParams, MosaicPlan, plan_mosaic
from wsi_fl.slides.choosing.patches import read_patches
from wsi_fl.slides.pictures.mosaic import draw_mosaic, small_copy
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stages.work.aside import one_line, partly
from wsi_fl.stages.work.console import say
from wsi_fl.stores.features import Bag
from wsi_fl.stores.mosaics import MosaicShard, current_mosaic, fingerprint, read_mosaic, write_mosaic
from wsi_fl.system.files import write_bytes
from wsi_fl.types import DiskFull, GridSpec, SlideRecord, WsiFlError

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
    """

    slide: str
    whole: bool = False
    reason: str | None = None
    note: str = ""


def mosaic_path(folder: Path, slide: str) -> Path:
    return folder / "mosaics" / f"{slide}.h5"


def picture_path(folder: Path, slide: str) -> Path:
    return folder / "mosaics" / f"{slide}.png"


def write_mosaics(records: Sequence[SlideRecord], work: Work) -> Iterator[Done]:
    """Writes the shards of these slides; the next are looked at, and the last one drawn, while one is encoded."""
    n_ahead = min(work.threads, _LOOKERS)
    with ThreadPoolExecutor(n_ahead) as looking, ThreadPoolExecutor(1) as writing:
        ahead: deque[tuple[SlideRecord, Future[_Looked]]] = deque()
        before: tuple[SlideRecord, Future[None]] | None = None
        waiting = iter(records)
        try:
            while True:
                for record in islice(waiting, n_ahead + 1 - len(ahead)):
                    ahead.append((record, looking.submit(_look, record, work)))
                if not ahead:
                    break
                record, looked = ahead.popleft()
                begun = _encoded(record, looked, work, writing)
                if before is not None:
                    yield _finished(*before, work)
                    before = None
                if isinstance(begun, Done):
                    yield begun
                else:
                    before = record, begun
            if before is not None:
                yield _finished(*before, work)
        finally:
            looking.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Looked:
    """What was found in a slide before its pixels are read; no plan where its shard is current."""

    fingerprint: str
    quickhash: str
    plan: MosaicPlan | None


def _look(record: SlideRecord, work: Work) -> _Looked:
    with Slide(record.path, record.mpp_override, "openslide") as slide:
        quickhash, mpp = slide.quickhash, slide.mpp
    wanted = _fingerprint(record, quickhash, mpp, work)
    current = current_mosaic(mosaic_path(work.folder, record.slide), wanted)
    if current and picture_path(work.folder, record.slide).exists():
        return _Looked(wanted, quickhash, None)
    if current is False:
        say(f"  {record.slide}: parameters, encoder or slide changed, made again")
    return _Looked(wanted, quickhash, plan_mosaic(record, work.spec, work.params, reader=work.reader))


def _fingerprint(record: SlideRecord, quickhash: str, mpp: float, work: Work) -> str:
    """Over the slide (its size on disk too, for formats without quickhash), the parameters and the encoder."""
    size = record.path.stat().st_size if record.path.is_file() else 0
    reader = "" if work.reader == "auto" else work.reader
    params = work.params
    how = [params.min_tissue, params.clusters, params.fraction, params.seed]
    return fingerprint(
        record.slide, quickhash, size, mpp, reader, work.spec.size_px, work.spec.mpp, *how, work.encoder.label
    )


def _encoded(
    record: SlideRecord, looked: Future[_Looked], work: Work, writing: ThreadPoolExecutor
) -> Done | Future[None]:
    """What became of a slide, or its shard being written."""
    try:
        found = looked.result()
        if found.plan is None:
            return _done(record, work)
        return _read_and_encoded(found, found.plan, work, writing)
    except (DiskFull, EncoderError):
        raise
    except Exception as error:  # one slide that a library chokes on must not end the others
        return Done(record.slide, reason=_reason(error))


def bag_of_slide(record: SlideRecord, work: Work) -> Bag:
    """The mosaic of one slide, kept nowhere.

    Raises:
        WsiFlError: when the slide gives none.
    """
    return _bag(plan_mosaic(record, work.spec, work.params, reader=work.reader), work).bag


@dataclass(frozen=True)
class _Read:
    """What was made of a plan's patches: features, small copies (row, uint8[h, w, 3]), and why some are missing."""

    bag: Bag
    small: list[tuple[int, NDArray[np.uint8]]]
    unread: dict[int, str]


def _bag(plan: MosaicPlan, work: Work) -> _Read:
    """Reads and encodes the patches of a plan."""
    unread: dict[int, str] = {}
    small: list[tuple[int, NDArray[np.uint8]]] = []

    def batches() -> Iterator[NDArray[np.uint8]]:
        how = {"threads": work.threads, "reader": work.reader, "aside": unread}
        for first, pixels in read_patches(plan.record, plan.kept_l0, work.spec, **how):  # type: ignore[arg-type]
            rows = islice((row for row in count(first) if row not in unread), len(pixels))
            small.extend((row, small_copy(patch)) for row, patch in zip(rows, pixels, strict=True))
            yield pixels

    features = encode(batches(), work.encoder)
    if not len(features):
        raise WsiFlError(unread[min(unread)])
    kept = np.setdiff1d(np.arange(len(plan.kept_l0)), list(unread))
    bag = Bag(features, plan.kept_l0[kept], plan.kept_cluster[kept], plan.mosaic.weight[kept])
    return _Read(bag, small, unread)


def _read_and_encoded(
    found: _Looked, plan: MosaicPlan, work: Work, writing: ThreadPoolExecutor
) -> Future[None]:
    """The patches of a plan as a shard that is on its way."""
    read = _bag(plan, work)
    lost = tuple((*plan.kept_l0[row].tolist(), read.unread[row]) for row in sorted(read.unread))
    shard = MosaicShard(
        slide=plan.record.slide,
        quickhash=found.quickhash,
        fingerprint=found.fingerprint,
        encoder=work.encoder.label,
        spec=work.spec,
        mpp_l0=plan.mpp,
        n_candidates=len(plan.xy_l0),
        note=plan.note,
        bag=read.bag,
        unread=lost,
    )
    return writing.submit(_write, plan, shard, read.small, work.folder)


def _write(
    plan: MosaicPlan, shard: MosaicShard, small: Sequence[tuple[int, NDArray[np.uint8]]], folder: Path
) -> None:
    """The picture first: a shard that is there says that all of its slide is done."""
    write_bytes(picture_path(folder, shard.slide), draw_mosaic(plan, small))
    write_mosaic(mosaic_path(folder, shard.slide), shard)


def _finished(record: SlideRecord, writing: Future[None], work: Work) -> Done:
    try:
        writing.result()
    except DiskFull:
        raise
    except Exception as error:  # likewise
        return Done(record.slide, reason=_reason(error))
    return _done(record, work)


def _done(record: SlideRecord, work: Work) -> Done:
    """What the shard says."""
    shard = read_mosaic(mosaic_path(work.folder, record.slide))
    n = len(shard.bag.features) + len(shard.unread)
    return Done(record.slide, True, partly(shard.unread, n), shard.note)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, WsiFlError) else one_line(error)
