"""The patches of one slide as its shard wants them: pixels, the slide's own JPEG streams, new ones, or checked only.

A patch that cannot be read does not end the slide: at the end of the pass `Unreadable` names all such rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.patches import read_patches
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.system import jpeg
from wsi_fl.system.ordered import in_order
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

_STREAMS_PER_TASK = 16


class Unreadable(Exception):
    """Some rows cannot be read; what was written without them is not to be kept."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(rows)
        self.rows = rows
        """Position among the corners asked for → one-line reason."""


class NoStream(Exception):
    """Some patch is not one whole native tile."""


def pixel_batches(
    record: SlideRecord, xy_l0: NDArray[np.int64], spec: GridSpec, *, threads: int, reader: Reader
) -> Iterator[NDArray[np.uint8]]:
    """Yield the pixels in batches uint8[b, size_px, size_px, 3], in order.

    Raises:
        Unreadable: after the last batch, when some rows are missing from them.
    """
    aside: dict[int, str] = {}
    for _, batch in read_patches(record, xy_l0, spec, threads=threads, reader=reader, aside=aside):
        yield batch
    if aside:
        raise Unreadable(aside)


def new_streams(
    record: SlideRecord,
    xy_l0: NDArray[np.int64],
    spec: GridSpec,
    quality: int,
    *,
    threads: int,
    reader: Reader,
) -> Iterator[bytes]:
    """Yield the patches encoded anew; raises as `pixel_batches` does."""
    batches = pixel_batches(record, xy_l0, spec, threads=threads, reader=reader)
    patches = (patch for batch in batches for patch in batch)
    with closing(
        in_order(lambda patch: jpeg.encode(patch, quality), patches, threads=threads, ahead=2 * threads)
    ) as streams:
        yield from streams


def native_streams(
    record: SlideRecord, xy_l0: NDArray[np.int64], spec: GridSpec, *, threads: int, reader: Reader
) -> Iterator[bytes]:
    """Yield the slide's own streams, each read to its end once, so that a damaged tile is found now.

    Raises:
        NoStream: when a patch has none.
        Unreadable: after the last, when some rows are missing.
    """
    unread: dict[int, str] = {}
    with Slide(record.path, record.mpp_override, reader) as slide:

        def read(first: int) -> list[bytes | WsiFlError | None]:
            corners = xy_l0[first : first + _STREAMS_PER_TASK].tolist()
            return [_checked(slide, (x, y), spec) for x, y in corners]

        starts = range(0, len(xy_l0), _STREAMS_PER_TASK)
        with closing(in_order(read, starts, threads=threads, ahead=threads)) as parts:
            for row, stream in enumerate(stream for part in parts for stream in part):
                if stream is None:
                    raise NoStream
                if isinstance(stream, WsiFlError):
                    unread[row] = str(stream)
                else:
                    yield stream
    if unread:
        raise Unreadable(unread)


def _checked(slide: Slide, corner: tuple[int, int], spec: GridSpec) -> bytes | WsiFlError | None:
    try:
        return slide.native_stream(corner, spec.size_px, spec.mpp)
    except WsiFlError as error:
        return error
