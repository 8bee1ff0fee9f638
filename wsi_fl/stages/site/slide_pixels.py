"""Patches read from slides while a store without pixels (`store.pixels = none`) is in use."""

from __future__ import annotations

import glob
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import cast

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stores.contents import SlideSource, SlideUnreadable
from wsi_fl.study.folder import Study
from wsi_fl.types import GridSpec, WsiFlError

_OPEN_SLIDES = 16
_MOST_THREADS = 8


class SlidePixels:
    """A site's slides, as `PatchStore` reads from them; a few stay open."""

    def __init__(self, study: Study, site: str) -> None:
        self._study, self._site = study, site
        self._open: OrderedDict[str, Slide] = OrderedDict()
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, source: SlideSource, xy_l0: NDArray[np.int64], spec: GridSpec) -> NDArray[np.uint8]:
        """The patches uint8[b, size_px, size_px, 3] at these corners.

        Raises:
            SlideUnreadable: when the slide is missing, was exchanged, or cannot be read there.
        """
        out = np.empty((len(xy_l0), spec.size_px, spec.size_px, 3), np.uint8)
        with self._lock:
            try:
                slide = self._slide(source)

                def read(row: int) -> None:
                    x, y = (int(v) for v in xy_l0[row])
                    slide.read((x, y), spec.size_px, spec.mpp, out[row], overlapping=False)

                for _ in self._threads().map(read, range(len(xy_l0))):
                    pass
            except SlideUnreadable:
                raise
            except WsiFlError as error:
                raise SlideUnreadable(str(error)) from None
        return out

    def _slide(self, source: SlideSource) -> Slide:
        if source.slide not in self._open:
            path, reader = self._find(source), cast(Reader, source.reader)
            check_opens_safely(path, source.mpp_override, reader)
            slide = Slide(path, source.mpp_override, reader)
            if slide.quickhash != source.quickhash:
                slide.close()
                raise SlideUnreadable(
                    f"{slide.path}: not the slide that was tiled; run `wsi-fl tile --site {self._site}` again"
                )
            if len(self._open) >= _OPEN_SLIDES:
                self._open.popitem(last=False)[1].close()
            self._open[source.slide] = slide
        self._open.move_to_end(source.slide)
        return self._open[source.slide]

    def _find(self, source: SlideSource) -> Path:
        """Where the slide was when it was tiled, else where the site file says slides are now."""
        path = self._study.root / source.path
        if path.exists():
            return path
        site = self._study.site(self._site)
        patterns = [site.slides] if isinstance(site.slides, str) else site.slides or []
        for pattern in patterns:
            where = str(Study(Path(glob.escape(str(self._study.root)))).resolve(pattern))
            for found in glob.iglob(where, recursive=True):  # noqa: PTH207 patterns may be absolute
                if Path(found).name == path.name:
                    return Path(found)
        raise SlideUnreadable(
            f"{path}: the slide is gone, and slides in sites/{self._site}.toml matches no {path.name}"
        )

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        return self._pool
