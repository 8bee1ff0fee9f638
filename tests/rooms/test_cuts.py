"""The plan of a sweep against what its words say."""

from __future__ import annotations

import numpy as np
import pytest

from wsi_fl.slides.reading.native import TiledImage
from wsi_fl.slides.reading.sweep import _cut


def image_of(size_px, tile_px):
    n = -(-size_px[0] // tile_px[0]) * -(-size_px[1] // tile_px[1])
    return TiledImage(size_px, tile_px, np.arange(n), np.ones(n, np.int64), b"", rgb=False)


def carried_out(image, cuts, patches, size_px):
    """What each pixel of each patch is given: the number of the picture's pixel, −1 for none; and who decoded what."""
    (width, height), (tile_width, tile_height) = image.size_px, image.tile_px
    picture = np.full((image.n_rows * tile_height, image.n_columns * tile_width), -1)
    picture[:height, :width] = np.arange(width * height).reshape(height, width)
    out = {patch: np.full((size_px, size_px), -1) for patch in patches}
    decoded = []
    for strip in np.unique(cuts.jobs[:, 0]).tolist():
        jobs, parts = cuts.of(strip)
        for _, tile, first, end in jobs.tolist():
            decoded.append((tile, strip))
            top, left = tile // image.n_columns * tile_height, tile % image.n_columns * tile_width
            pixels = picture[top : top + tile_height, left : left + tile_width]
            for patch, r0, r1, c0, c1, y, x in parts[first:end].tolist():
                there = out[patch][y : y + r1 - r0, x : x + c1 - c0]
                assert (there == -1).all(), "no pixel is given twice"
                there[:] = pixels[r0:r1, c0:c1]
    return out, decoded


@pytest.mark.parametrize("seed", range(40))
def test_every_pixel_is_given_once_and_tiles_are_decoded_once_within_reach(seed):
    draw = np.random.default_rng(seed)
    size_px, tile = int(draw.integers(3, 30)), tuple(draw.integers(2, 20, 2).tolist())
    width, height = draw.integers(20, 120, 2).tolist()
    image = image_of((width, height), tile)
    stride = size_px if seed % 2 else int(draw.integers(1, size_px + 4))
    grid = [(x, y) for y in range(-5, height, stride) for x in range(-3, width, stride)]
    at = np.array(grid)[draw.random(len(grid)) < 0.7][:400]
    if seed % 3 == 0:
        at = draw.permutation(at)
    patch = np.flatnonzero(draw.random(len(at) * 2) < 0.6)[: len(at)]
    at = at[: len(patch)]
    step, reach = (int(draw.integers(1, n)) for n in (9, 30))
    cuts = _cut(image, at, patch, size_px, step=step, reach=reach)
    out, decoded = carried_out(image, cuts, patch.tolist(), size_px)
    for number, (x, y) in zip(patch.tolist(), at.tolist(), strict=True):
        ys, xs = np.mgrid[y : y + size_px, x : x + size_px]
        inside = (xs >= 0) & (ys >= 0) & (xs < width) & (ys < height)
        assert np.array_equal(out[number], np.where(inside, ys * width + xs, -1))
    wanted = {}
    for number, (x, y) in zip(patch.tolist(), at.tolist(), strict=True):
        for row in range(max(0, y) // tile[1], -(-min(height, y + size_px) // tile[1])):
            for column in range(max(0, x) // tile[0], -(-min(width, x + size_px) // tile[0])):
                wanted.setdefault(row * image.n_columns + column, set()).add(number // step)
    for one, by in wanted.items():
        times = len({(strip - min(by)) // (reach + 1) for strip in by})
        assert [tile_number for tile_number, _ in decoded].count(one) == times
    assert {tile_number for tile_number, _ in decoded} == set(wanted)
    for strip in np.unique(cuts.jobs[:, 0]):
        jobs = cuts.jobs[cuts.jobs[:, 0] == strip]
        assert (np.diff(jobs[:, 1]) > 0).all()
        for _, _, first, end in jobs:
            given = cuts.parts[first:end, 0] // step
            assert given[0] == strip and (given >= strip).all() and (given <= strip + reach).all()


def test_no_patch_is_no_plan():
    none = np.zeros((0, 2), np.int64)
    cuts = _cut(image_of((64, 64), (16, 16)), none, none[:, 0], 8, step=4, reach=2)
    assert [len(rows) for rows in (*cuts, *cuts.of(0))] == [0, 0, 0, 0]
