"""Patches lie on a grid, and overlap with outlines decides their labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.slides.patching.grid import grid_positions
from wsi_fl.slides.patching.slide_plan import PlanParams, _label_patches
from wsi_fl.types import CLASSES, GridSpec

HEALTHY, TUMOR = CLASSES.index("healthy"), CLASSES.index("tumor")
sizes = st.integers(1, 3000)
specs = st.builds(
    GridSpec,
    size_px=st.integers(20, 512),
    mpp=st.sampled_from([0.25, 0.5, 0.972, 1.0, 2.0]),
    stride_px=st.integers(20, 700),
)
slide_mpps = st.sampled_from([0.2274, 0.25, 0.499, 0.5, 0.972])


def walk_axis(extent, size, step):
    """The axis walked patch by patch until the edge is reached."""
    starts = [0]
    while (len(starts) - 1) * step + size < extent - 1e-6:
        starts.append(round(len(starts) * step))
    return starts


@given(width=sizes, height=sizes, spec=specs, slide_mpp=slide_mpps)
def test_positions_are_those_of_a_walk_in_row_major_order(width, height, spec, slide_mpp):
    size, step = (n * spec.mpp / slide_mpp for n in (spec.size_px, spec.stride_px))
    expected = [(x, y) for y in walk_axis(height, size, step) for x in walk_axis(width, size, step)]
    got = grid_positions((width, height), spec, slide_mpp)
    assert got.dtype == np.int64 and got.tolist() == [list(p) for p in expected]


@pytest.mark.parametrize("supervision", ["partial", "annotated"])
def test_the_least_overlap_makes_a_patch_neither_healthy_nor_tumour(supervision):
    tumor = np.array([0, 1e-7, 0.49, 0.5, 1], np.float32)
    limits = PlanParams(min_tissue=0.5, min_tumor=0.5)
    keep, label = _label_patches(np.ones(5, np.float32), tumor, supervision, True, limits)
    assert keep.tolist() == [supervision == "annotated", False, False, True, True]
    assert label[keep].tolist() == ([0, 1, 1] if supervision == "annotated" else [1, 1])
