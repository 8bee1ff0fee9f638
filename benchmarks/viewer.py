"""How fast `view` shows a large slide: the first view, tiles, and frames while the slide moves; JSON on stdout.

CHROMIUM=/usr/bin/chromium python benchmarks/viewer.py [--slide-px 100000]

Chromium runs without a screen and draws in software. Equal tiles of the slide share their bytes, which lie in memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from big_slide import write_big_slide

from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.study.folder import Study
from wsi_fl.viewer.build_gallery import build_gallery
from wsi_fl.viewer.gallery import Gallery, Layer, Overlay
from wsi_fl.viewer.server import ADDRESS, ViewServer
from wsi_fl.viewer.site_layers import patch_layer
from wsi_fl.viewer.tiles import TILE_PX, Pyramid

PATCH_PX = 448
N_TILES = 40
MARKS = """window.marks = {};
(function wait() {
  const viewer = window.OpenSeadragon && document.querySelector("#slide") && OpenSeadragon.getViewer("slide");
  if (!viewer) return requestAnimationFrame(wait);
  viewer.addHandler("tile-drawn", () => { marks.first_tile_s ??= performance.now() / 1000; });
  (function look() {
    const item = viewer.world.getItemAt(0), now = performance.now() / 1000;
    if (marks.first_tile_s && item?.getFullyLoaded()) marks.all_tiles_s ??= now;
    if (document.body.dataset.ready) marks.layers_s ??= now;
    if (!(marks.all_tiles_s && marks.layers_s)) requestAnimationFrame(look);
  })();
})();"""
FRAMES = """new Promise(done => {
  const spent = [], viewport = OpenSeadragon.getViewer("slide").viewport;
  let last = performance.now(), n = 0;
  (function frame() {
    const now = performance.now();
    if (n) spent.push(now - last);
    last = now;
    if (n % 10 === 0) { const by = n % 20 ? -1 : 1; MOVE; }
    if (++n < 121) requestAnimationFrame(frame); else done(spent);
  })();
})"""
MOVES = {
    "zooming": "viewport.zoomBy(by > 0 ? 1.6 : 1 / 1.5)",
    "panning": "viewport.panBy(new OpenSeadragon.Point(by * 0.3 * viewport.getBounds().width, 0))",
}
REDRAW = """(() => { const began = performance.now();
  for (let k = 0; k < 10; k++) dispatchEvent(new Event("resize"));
  document.querySelector("#over").getContext("2d").getImageData(0, 0, 1, 1);
  return (performance.now() - began) / 10; })()"""


def make_gallery(root: Path, slide_px: int) -> Gallery:
    """One slide with its tissue and a square grid of patches."""
    (root / "slides").mkdir(parents=True)
    block = simulate_slide(plan_slides(1, 1, 2048, 0)[1])
    write_big_slide(root / "slides" / "slide.tif", block, 0.25, size_px=slide_px, shared=True)
    (root / "slides.csv").write_text("slide,patient,site,label,split\nslide.tif,p,A,normal,train\n")
    init_study(root / "study", archive=root)
    shown = build_gallery(Study(root / "study"), site="A")
    n = slide_px // PATCH_PX
    corners = np.stack(np.meshgrid(np.arange(n), np.arange(n)), -1).reshape(-1, 2).astype(np.int64) * PATCH_PX

    def draw(slide: Slide) -> Layer:
        return patch_layer(corners, PATCH_PX, corners.sum(1) // PATCH_PX % 2, ["healthy", "tumor"])

    (exhibit,) = shown.exhibits
    overlays = [Overlay("patches", "patches", draw), *exhibit.overlays]
    return Gallery(shown.title, [replace(exhibit, overlays=overlays)])


@contextmanager
def served(shown: Gallery) -> Any:
    """A viewer that answers until the end."""
    with ViewServer(shown, 0) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def spread(spent_ms: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum of milliseconds."""
    found = np.percentile(spent_ms, [50, 95, 100])
    return dict(zip(("median", "p95", "max"), np.round(found, 1).tolist(), strict=True))


def tile_times(server: ViewServer, slide_px: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a request for tiles that were not asked for before, by level."""
    pyramid, rng, found = Pyramid((slide_px, slide_px)), np.random.default_rng(0), {}
    connection = http.client.HTTPConnection(ADDRESS, server.port)
    for level in (pyramid.last_level, pyramid.last_level - 1, pyramid.last_level - 2):
        n, spent = pyramid.level_size(level)[0] // TILE_PX, []
        for column, row in rng.integers(0, n, (N_TILES, 2)).tolist():
            began = time.perf_counter()
            connection.request("GET", f"{urlsplit(server.url).path}slides/0/tiles/{level}/{column}_{row}.jpg")
            assert len(connection.getresponse().read()) > 500
            spent.append(1000 * (time.perf_counter() - began))
        found[f"level {level}"] = spread(spent)
    connection.close()
    return found


def look(page: Any, server: ViewServer) -> dict[str, Any]:
    """Seconds from navigation to a first view, milliseconds of frames and of drawing the layers."""
    page.size(1400, 900)
    page.call("Page.addScriptToEvaluateOnNewDocument", source=MARKS)
    page.goto(server.url)
    page.until("window.marks?.all_tiles_s && marks.layers_s")
    found = {name: round(at, 2) for name, at in page.run("marks").items()}
    redraw, frames = {"whole slide": page.run(REDRAW)}, {}
    for layers, key in (("patches and outlines", None), ("patches", "2")):
        if key:
            page.key(key)
        for name, move in MOVES.items():
            frames[f"{name}, {layers}"] = spread(page.run(FRAMES.replace("MOVE", move)))
    page.key("2")
    page.run("void OpenSeadragon.getViewer('slide').viewport.zoomTo(4, null, true)")
    time.sleep(1)
    redraw["at 4 × the whole slide"] = page.run(REDRAW)
    return {**found, "frame_ms": frames, "redraw_ms": {name: round(ms, 1) for name, ms in redraw.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide-px", type=int, default=100_000)
    slide_px = parser.parse_args().slide_px
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from browser import browser  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        shown = make_gallery(Path(folder) / "archive", slide_px)
        document: dict[str, Any] = {"slide_px": slide_px, "patches": (slide_px // PATCH_PX) ** 2}
        document |= {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
        with browser(Path(folder) / "profile") as page, served(shown) as server:
            document |= look(page, server)
            document["tile_ms"] = tile_times(server, slide_px)
    print(json.dumps(document, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
