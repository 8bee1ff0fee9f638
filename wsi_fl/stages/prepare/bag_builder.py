"""From the patches of slides to a bag store: what `mosaic` and `features` share.

A finished shard with the same fingerprint is reused, so a killed job loses at most the slides in hand. While one slide
is encoded, the next are planned and read, and the last is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import EncodedItem, Encoder, EncoderError, StageSeconds, encode_items
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.slide_lists import BagsRow, Outcome, PartRow
from wsi_fl.stages.runtime.console import Watcher, describe_failure, describe_unread_patches, print_message
from wsi_fl.stages.runtime.rank_job import RankJob
from wsi_fl.stages.runtime.slide_work import join_slide_work
from wsi_fl.stages.site.encoders import describe_transform
from wsi_fl.stores.bag_shards import BagShard, current_shard, write_bag_shard
from wsi_fl.stores.bag_store import Bag
from wsi_fl.system.files import list_strays
from wsi_fl.system.prefetch import map_in_order
from wsi_fl.system.shared_work import SharedWork, WorkEnded
from wsi_fl.types import DiskFull, GridSpec, WsiFlError

_T = TypeVar("_T")


@dataclass(frozen=True)
class SelectedPatches:
    """The n patches of a slide to be encoded; their pixels are read once.

    Attributes:
        xy_l0: int64[n, 2].
        read_pixels: yields uint8[b, h, w, 3]; fills `unread` (reasons of missing rows) and `damage`.
        picture: draws the selected patches, once their pixels were read; None for none.
        damage: notes on damage that other data of the slide make up for.
        cluster, weight, mpp_l0, note: as in `Bag` and `BagShard`.
    """

    xy_l0: NDArray[np.int64]
    read_pixels: Callable[[], Iterator[NDArray[np.uint8]]]
    unread: dict[int, str] = field(default_factory=dict)
    note: str = ""
    damage: set[str] = field(default_factory=set)
    picture: Callable[[], bytes] | None = None
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None
    mpp_l0: float = float("nan")

    def build_bag(self, features: NDArray[np.float32]) -> Bag:
        """Return the bag of the m readable patches: features float32[m, d], places and groups."""
        if not len(features):
            raise WsiFlError(self.unread[min(self.unread)])
        rows = np.setdiff1d(np.arange(len(self.xy_l0)), list(self.unread))
        groups = (None if values is None else values[rows] for values in (self.cluster, self.weight))
        return Bag(features, self.xy_l0[rows], *groups)


@dataclass(frozen=True)
class _StaleSlide:
    """A slide whose bag must be made."""

    slide: str
    fingerprint: str
    patches: SelectedPatches


class BagBuilder:
    """Builds the bag store of a site: selects, reads and encodes patches of its slides.

    Attributes:
        data: the folder of its shards, a value of `train.data`.
        has_pictures: whether each shard has a picture.
        sets_aside: whether unreadable slides are excluded; else they end the work.
        site, path, spec: of the store, and of the patches in it.
        slides: names of the site's slides.
        n_ahead: slides planned while another is encoded; 0 for none.
    """

    data: ClassVar[str]
    has_pictures: ClassVar[bool] = False
    sets_aside: ClassVar[bool] = False
    slides: Sequence[str] = ()
    n_ahead = 0
    _shared: SharedWork

    def __init__(self, site: str, path: Path, spec: GridSpec, encoder: Encoder) -> None:
        self.site, self.path, self.spec, self.encoder = site, path, spec, encoder

    def compute_fingerprint(self, slide: str) -> str:
        """Return the fingerprint of all inputs of a slide's bag."""
        raise NotImplementedError

    def select_patches(self, slide: str) -> SelectedPatches:
        """Return the patches of a slide."""
        raise NotImplementedError

    def list_settings(self) -> list[object]:
        """Return what the store depends on (JSON) beside the encoder."""
        raise NotImplementedError

    def write_store(self, path: Path, outcomes: list[Outcome]) -> BagsRow:
        """Write the store of all shards to a path; return the site's row of the `--json` document."""
        raise NotImplementedError

    def shard_path(self, slide: str) -> Path:
        """Return the path of a slide's shard."""
        return self.path.parent / self.data / f"{slide}.h5"

    def build_store(
        self, job: RankJob, watcher: Watcher, parts: list[PartRow]
    ) -> tuple[BagsRow, dict[str, object]] | None:
        """Make the shards of all slides, beside other jobs, and the store of them.

        Where slides of other parts are missing the store is not made, and the row is appended to `parts`.

        Returns:
            The row of the site, and the speed of this job.
        """
        start = time.perf_counter()
        settings = [self.encoder.label, self.list_settings()]
        with join_slide_work(job, self.path.parent, self.site, self.data, settings) as work:
            self._shared = work.shared
            work.retry_items("bags", self._is_missing)
            outcomes = slide_lists.share_slides(
                work,
                "bags",
                {slide: slide for slide in self.slides},
                self._write_shards,
                lambda n_done, n, slide: watcher.update(self.site, n_done, n, slide),
                in_parts=True,
            )
            if work.n_missing:
                parts.append(slide_lists.build_part_row(self.site, work, len(outcomes)))
                return None
            job_outcomes = [outcome for outcome in outcomes if outcome.slide in work.job_items]
            row = work.close_work(lambda: self._close_store(outcomes))
        seconds = time.perf_counter() - start
        row |= {
            "transform": describe_transform(self.encoder),
            "seconds": seconds,
            "closed": True,
            "done": len(job_outcomes),
        }
        return row, {
            "site": self.site,
            "slides_per_second": sum(outcome.encoded > 0 for outcome in job_outcomes) / seconds,
            "patches_per_second": sum(outcome.encoded for outcome in job_outcomes) / seconds,
            "spent": asdict(sum((StageSeconds(**outcome.spent) for outcome in job_outcomes), StageSeconds())),
        }

    def _is_missing(self, slide: str, outcome: dict[str, object]) -> bool:
        return not outcome["patches"] or not self.shard_path(slide).exists()

    def _close_store(self, outcomes: list[Outcome]) -> BagsRow:
        with self._shared.stage_file(self.path) as staged:
            row = self.write_store(staged, outcomes)
        stored_names = {outcome.slide for outcome in outcomes if outcome.patches}
        for path in list_strays([self.path.parent / self.data], stored_names):
            self._shared.delete_file(path)
        return row

    def _write_shards(self, slides: Iterable[str]) -> Iterator[Outcome]:
        n_ahead = self.n_ahead
        with ExitStack() as stack:
            plans: Iterable[_StaleSlide | Outcome] = map(self._plan_slide, slides)
            if n_ahead:
                plans = stack.enter_context(
                    closing(map_in_order(self._plan_slide, slides, threads=n_ahead, ahead=n_ahead))
                )
            to_read = ((plan, () if isinstance(plan, Outcome) else plan.patches.read_pixels()) for plan in plans)
            encoded = stack.enter_context(closing(encode_items(to_read, self.encoder)))
            yield from stack.enter_context(closing(map_in_order(self._write_shard, encoded, threads=1, ahead=1)))

    def _plan_slide(self, slide: str) -> _StaleSlide | Outcome:
        """Select the patches of a slide, unless its shard is current."""

        def plan_if_stale() -> _StaleSlide | Outcome:
            fingerprint, path = self.compute_fingerprint(slide), self.shard_path(slide)
            current = current_shard(path, fingerprint)
            if isinstance(current, BagShard) and (not self.has_pictures or path.with_suffix(".png").exists()):
                return _shard_outcome(current)
            if isinstance(current, str) and current:
                print_message(f"  {slide}: {current}; made again")
            return _StaleSlide(slide, fingerprint, self.select_patches(slide))

        return self._exclude_on_error(slide, plan_if_stale)

    def _write_shard(self, encoded: EncodedItem[_StaleSlide | Outcome]) -> Outcome:
        """Write picture, then shard: an existing shard means a finished slide."""
        if isinstance(encoded.item, Outcome):
            return encoded.item
        start, stale, patches = time.perf_counter(), encoded.item, encoded.item.patches
        path = self.shard_path(stale.slide)

        def write_selected() -> Outcome:
            if encoded.error is not None:
                raise encoded.error
            unread = tuple((*patches.xy_l0[row].tolist(), patches.unread[row]) for row in sorted(patches.unread))
            bag = patches.build_bag(encoded.features)
            note = "; ".join(filter(None, (patches.note, *sorted(patches.damage))))
            shard = BagShard(
                stale.slide, stale.fingerprint, self.encoder.label, self.spec, bag, patches.mpp_l0, note, unread
            )
            if patches.picture is not None:
                with self._shared.stage_file(path.with_suffix(".png")) as staged:
                    staged.write_bytes(patches.picture())
            with self._shared.stage_file(path) as staged:
                write_bag_shard(staged, shard)
            spent = encoded.spent + StageSeconds(write=time.perf_counter() - start)
            return _shard_outcome(shard, len(encoded.features), asdict(spent))

        return self._exclude_on_error(stale.slide, write_selected)

    def _exclude_on_error(self, slide: str, step: Callable[[], _T]) -> _T | Outcome:
        """Run a step of one slide; its failure must not end the others."""
        try:
            return step()
        except (DiskFull, EncoderError, WorkEnded):
            raise
        except Exception as error:
            if not self.sets_aside:
                raise
            return Outcome(slide, reason=describe_failure(error))


def _shard_outcome(shard: BagShard, encoded: int = 0, spent: dict[str, float] | None = None) -> Outcome:
    n = len(shard.bag.features)
    return Outcome(
        shard.slide, n, describe_unread_patches(shard.unread, n + len(shard.unread)), shard.note, encoded, spent or {}
    )
