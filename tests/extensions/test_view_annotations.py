"""`view` draws outlines at their annotated position, also on slides with an offset of the scanned area."""

import json

import numpy as np
import pytest
import scan_areas
from scan_areas import CORNER

from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.study.folder import Study
from wsi_fl.viewer.build_gallery import build_gallery

PLACE = (128, 192, 320, 384)


@pytest.mark.parametrize("write", [scan_areas.scn, scan_areas.sparse])
@pytest.mark.parametrize("corner", [(0, 0), CORNER])
def test_the_layer_of_outlines_lies_on_the_tumour(tmp_path, write, corner):
    """For a usual QuPath file, and for one with coordinates from the corner of the slide."""
    (tmp_path / "slides").mkdir()
    path = write(tmp_path / "slides" / ("a.scn" if write is scan_areas.scn else "a.tif"), scan_areas.picture())
    left, top, right, bottom = (v + corner[k % 2] for k, v in enumerate(PLACE))
    ring = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    shape = {"type": "Polygon", "coordinates": [ring]}
    one = {"type": "Feature", "geometry": shape, "properties": {"objectType": "annotation", "name": "Tumor"}}
    (tmp_path / "a.geojson").write_text(json.dumps(one))
    (tmp_path / "slides.csv").write_text(f"slide,patient,site,label,annotation\n{path.name},p,A,positive,a.geojson\n")
    init_study(tmp_path / "study", archive=tmp_path)
    (exhibit,) = build_gallery(Study(tmp_path / "study"), site="A").exhibits
    layer = next(overlay for overlay in exhibit.overlays if overlay.name == "annotation")
    with Slide(path) as slide:
        (drawn,) = layer.draw(slide)["rings"]
    points = np.reshape(drawn, (-1, 2))
    assert points.min(0).tolist() == [PLACE[0] + CORNER[0], PLACE[1] + CORNER[1]]
    assert points.max(0).tolist() == [PLACE[2] + CORNER[0], PLACE[3] + CORNER[1]]
