"""The slide files of a site, and pixels read from them for stores without pixels."""

from __future__ import annotations

import glob
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import cast

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stores.patch_store import SlideSource, SlideUnreadable
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import compose_text, glob_paths
from wsi_fl.system.machine import n_cores
from wsi_fl.types import GridSpec, WsiFlError

_MAX_OPEN_SLIDES = 16
_MAX_THREADS = 8


class SlidePixels:
    """Reader of a site's slides for `PatchStore`; a few stay open."""

    def __init__(self, study: Study, site: str) -> None:
        self._study, self._site = study, site
        self._open: OrderedDict[str, Slide] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _thread_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MAX_THREADS, n_cores()))

    def __call__(self, source: SlideSource, xy_l0: NDArray[np.int64], spec: GridSpec) -> NDArray[np.uint8]:
        """Return the patches uint8[b, size_px, size_px, 3] at corners; SlideUnreadable where they cannot be read."""
        out = np.empty((len(xy_l0), spec.size_px, spec.size_px, 3), np.uint8)
        with self._lock:
            try:
                slide = self._open_slide(source)

                def read_patch(row: int) -> None:
                    x, y = (int(v) for v in xy_l0[row])
                    slide.read((x, y), spec.size_px, spec.mpp, out[row], overlapping=False)

                for _ in self._thread_pool.map(read_patch, range(len(xy_l0))):
                    pass
            except SlideUnreadable:
                raise
            except WsiFlError as error:
                raise SlideUnreadable(str(error)) from None
        return out

    def _open_slide(self, source: SlideSource) -> Slide:
        if source.slide not in self._open:
            path, reader = self._find_slide(source), cast(Reader, source.reader)
            check_opens_safely(path, source.mpp_override, reader)
            slide = Slide(path, source.mpp_override, reader)
            if slide.quickhash != source.quickhash:
                slide.close()
                raise SlideUnreadable(
                    f"{slide.path}: not the slide that was tiled; run `wsi-fl tile --site {self._site}` again"
                )
            if len(self._open) >= _MAX_OPEN_SLIDES:
                self._open.popitem(last=False)[1].close()
            self._open[source.slide] = slide
        self._open.move_to_end(source.slide)
        return self._open[source.slide]

    def _find_slide(self, source: SlideSource) -> Path:
        """Return the slide's path at tiling, or its match among the slides of the site file."""
        path = self._study.root / source.path
        if path.exists():
            return path
        site = self._study.load_site(self._site)
        name = compose_text(path.name)
        candidates = (file for file in list_slides(self._study, site) if compose_text(file.name) == name)
        if (moved_path := next(candidates, None)) is None:
            raise SlideUnreadable(
                f"{path}: the slide is gone, and slides in sites/{self._site}.toml matches no {path.name}"
            )
        return moved_path


def resolve_patterns(study: Study, patterns: str | list[str] | None) -> tuple[str, ...]:
    """Return the glob patterns of a site file's key, resolved; a [ or * in the study's path is escaped."""
    escaped = Study(Path(glob.escape(str(study.root))))
    return tuple(
        str(escaped.resolve(pattern)) for pattern in ([patterns] if isinstance(patterns, str) else patterns or [])
    )


def list_slides(study: Study, site: SiteFile) -> Iterator[Path]:
    """Yield the current matches of the patterns in `slides` of a site file."""
    for pattern in resolve_patterns(study, site.slides):
        yield from glob_paths(pattern)
