"""Slides to bags of features: what `mosaic` and `features` have in common, whatever chooses the patches.

A shard per slide, then one store per site. A finished shard whose fingerprint still fits is not made again, so a
killed job loses at most the slides in hand; while one is encoded the next are looked at and read, and the last one is
written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoded, Encoder, EncoderError, Spent, encode_each
from wsi_fl.stages.work.console import Watcher, partly, reason_of, say, speed_of
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.bag_shards import BagShard, current_shard, write_shard
from wsi_fl.stores.bags import Bag
from wsi_fl.system.files import locked, remove_strays, write_bytes
from wsi_fl.system.ordered import in_order
from wsi_fl.types import DiskFull, GridSpec, WsiFlError

Item = TypeVar("Item")
T = TypeVar("T")

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Chosen:
    """The n patches of a slide that are to be encoded; their pixels are read once.

    Attributes:
        xy_l0: int64[n, 2].
        pixels: yields them, uint8[b, h, w, 3], and notes in `unread` why rows are missing.
        picture: what was chosen, to look at, once the pixels were read; None for none.
        cluster, weight, mpp_l0, note: as in `Bag` and `BagShard`.
    """

    slide: str
    xy_l0: NDArray[np.int64]
    pixels: Callable[[], Iterator[Pixels]]
    unread: dict[int, str] = field(default_factory=dict)
    picture: Callable[[], bytes] | None = None
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None
    mpp_l0: float = float("nan")
    note: str = ""

    def bag(self, features: NDArray[np.float32]) -> Bag:
        """Return the features, float32[m, d], of the m patches that could be read, with their places and groups."""
        if not len(features):
            raise WsiFlError(self.unread[min(self.unread)])
        kept = np.setdiff1d(np.arange(len(self.xy_l0)), list(self.unread))
        some = (None if values is None else values[kept] for values in (self.cluster, self.weight))
        return Bag(features, self.xy_l0[kept], *some)


@dataclass(frozen=True)
class Done:
    """What became of one slide; plain enough for JSON.

    Attributes:
        slide: its name.
        patches: how many its shard holds; 0 where it has none.
        reason: why it, or some of its patches, were set aside.
        note: what people should know of its bag.
        made: how many patches were encoded; none where the shard was there already.
        spent: what that took.
    """

    slide: str
    patches: int = 0
    reason: str | None = None
    note: str = ""
    made: int = 0
    spent: Spent = field(default_factory=Spent)

    @staticmethod
    def of(shard: BagShard) -> Done:
        """Return what a shard says of its slide."""
        n = len(shard.bag.features)
        return Done(shard.slide, n, partly(shard.unread, n + len(shard.unread)), shard.note)


class Way(Generic[Item]):
    """Which patches of a site's slides are encoded, and how they are read.

    Attributes:
        data: the name of the folder of its shards, as `train.data` says it.
        sets_aside: whether slides that cannot be read are left out; else they end the work.
        site, path, spec: of the store, and of the patches in it.
        ahead: slides looked at while another is encoded; 0 where each is looked at when its turn comes.
    """

    data: ClassVar[str]
    sets_aside: ClassVar[bool]

    def __init__(self, site: str, path: Path, spec: GridSpec, encoder: Encoder, ahead: int) -> None:
        self.site, self.path, self.spec, self.encoder, self.ahead = site, path, spec, encoder, ahead

    def name(self, item: Item) -> str:
        """Return the name of a slide."""
        raise NotImplementedError

    def wanted(self, item: Item) -> str:
        """Return the fingerprint of what decides the bag of a slide."""
        raise NotImplementedError

    def choose(self, item: Item) -> Chosen:
        """Return the patches of a slide."""
        raise NotImplementedError

    def shard(self, slide: str) -> Path:
        """Return where the shard of a slide is, or would be."""
        return self.path.parent / self.data / f"{slide}.h5"

    def has_picture(self, slide: str) -> bool:
        """Return whether nothing is missing beside the shard of a slide."""
        return True

    def make(
        self, items: Sequence[Item], write: Callable[[list[Done]], T], job: Job, watcher: Watcher
    ) -> tuple[list[Done], T | None]:
        """Make the shards of all slides, each rank its share; the first one holds the lock and writes the store.

        Args:
            write: what became of each slide → what is to be known of the store.

        Returns:
            What became of each slide, and of the store; None on the other ranks.
        """
        folder = self.path.parent
        with job.first_holds(locked(folder, self.site)):
            done = job.share(
                items,
                lambda mine: map(asdict, self._shards(mine)),
                lambda n, one: watcher.update(self.site, n, len(items), self.name(one)),
            )
            made = [Done(**{**one, "spent": Spent(**one["spent"])}) for one in done]

            def finish() -> T:
                written = write(made)
                remove_strays((folder / self.data,), {one.slide for one in made if one.patches})
                return written

            return made, job.first_does(finish)

    def _shards(self, items: Sequence[Item]) -> Iterator[Done]:
        """Write the shards of these slides and yield in order what became of each."""
        n = self.ahead
        with ExitStack() as stack:
            found: Iterable[tuple[str, Chosen] | Done] = map(self._look, items)
            if n:
                found = stack.enter_context(closing(in_order(self._look, items, threads=n, ahead=n)))
            to_read = ((one, () if isinstance(one, Done) else one[1].pixels()) for one in found)
            encoded = stack.enter_context(closing(encode_each(to_read, self.encoder)))
            yield from stack.enter_context(closing(in_order(self._write, encoded, threads=1, ahead=1)))

    def _look(self, item: Item) -> tuple[str, Chosen] | Done:
        """Choose the patches of a slide, unless its shard is there and current."""
        slide = self.name(item)

        def look() -> tuple[str, Chosen] | Done:
            wanted = self.wanted(item)
            current = current_shard(self.shard(slide), wanted)
            if isinstance(current, BagShard) and self.has_picture(slide):
                return Done.of(current)
            if isinstance(current, str) and current:
                say(f"  {slide}: {current}; made again")
            return wanted, self.choose(item)

        return self._apart(slide, look)

    def _write(self, encoded: Encoded[tuple[str, Chosen] | Done]) -> Done:
        """Write the picture first: a shard that is there says that all of its slide is done."""
        if isinstance(encoded.item, Done):
            return encoded.item
        began = time.perf_counter()
        wanted, chosen = encoded.item
        path = self.shard(chosen.slide)

        def write() -> Done:
            if encoded.error is not None:
                raise encoded.error
            unread = tuple((*chosen.xy_l0[row].tolist(), chosen.unread[row]) for row in sorted(chosen.unread))
            bag = chosen.bag(encoded.features)
            shard = BagShard(
                chosen.slide, wanted, self.encoder.label, self.spec, bag, chosen.mpp_l0, chosen.note, unread
            )
            if chosen.picture is not None:
                write_bytes(path.with_suffix(".png"), chosen.picture())
            write_shard(path, shard)
            spent = encoded.spent + Spent(write=time.perf_counter() - began)
            return replace(Done.of(shard), made=len(encoded.features), spent=spent)

        return self._apart(chosen.slide, write)

    def _apart(self, slide: str, step: Callable[[], T]) -> T | Done:
        """Take a slide a step further: one that a library chokes on must not end the others."""
        try:
            return step()
        except (DiskFull, EncoderError):
            raise
        except Exception as error:
            if not self.sets_aside:
                raise
            return Done(slide, reason=reason_of(error))


def quiet(_: str) -> None:
    """Tell nobody: the first rank tells for all."""


def speed_of_all(site: str, made: Sequence[Done], began: float) -> dict[str, Any]:
    """Return for `--json` how fast the patches of a site were encoded since `began`."""
    spent = sum((one.spent for one in made), Spent())
    slides, patches = sum(one.made > 0 for one in made), sum(one.made for one in made)
    return speed_of(site, spent, slides, patches, time.perf_counter() - began)
