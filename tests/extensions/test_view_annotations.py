"""`view` draws outlines at their annotated position, also on slides with an offset of the scanned area."""

import numpy as np
import pytest
import scan_areas
from scan_areas import CORNER
from test_annotations import box, make_outlined_study

from wsi_fl.slides.reading.reader import Slide
from wsi_fl.viewer.build_gallery import build_gallery

PLACE = (128, 192, 320, 384)


@pytest.mark.parametrize("write", [scan_areas.scn, scan_areas.sparse])
@pytest.mark.parametrize("corner", [(0, 0), CORNER])
def test_the_layer_of_outlines_lies_on_the_tumour(tmp_path, write, corner):
    """For a usual QuPath file, and for one with coordinates from the corner of the slide."""
    left, top, right, bottom = (v + corner[k % 2] for k, v in enumerate(PLACE))
    study = make_outlined_study(tmp_path, write, {"a": [box(left, top, right, bottom)]})
    (exhibit,) = build_gallery(study, site="A").exhibits
    layer = next(overlay for overlay in exhibit.overlays if overlay.name == "annotation")
    with Slide(exhibit.path) as slide:
        (drawn,) = layer.draw(slide)["rings"]
    points = np.reshape(drawn, (-1, 2))
    assert points.min(0).tolist() == [PLACE[0] + CORNER[0], PLACE[1] + CORNER[1]]
    assert points.max(0).tolist() == [PLACE[2] + CORNER[0], PLACE[3] + CORNER[1]]
