#!/bin/sh
# A tumour with a hole in it, as QuPath exports it, is filled on its way into DICOM annotations.
#
# Versions: wsidicom 0.36.1, shapely 2.2.0, pydicom 3.0.2.
# Input: a GeoJSON polygon of 400 x 400 px with a hole of 200 x 200 px, and the same polygon of shapely.
# Expected from: RFC 7946 (rings after the first one are holes), and wsidicom's own `Geometry.from_shapely_like`, which
#   refuses a polygon with a hole, since DICOM's have none.
# Guess: `Geometry.from_geojson` refuses it in the same way.
# Seen: it takes the outer ring and drops the hole without a word; the saved annotation covers 160 000 square pixels where
#   120 000 were drawn. Lumen, necrosis and whatever else a pathologist has left out are tumour to every reader of the file.
#   The same polygon from shapely raises NotImplementedError.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check wsidicom==0.36.1 shapely==2.2.0 pydicom==3.0.2
venv/bin/python -W ignore - <<'PYTHON'
import json

import shapely
from pydicom.uid import generate_uid
from wsidicom.conceptcode import AnnotationCategoryCode, AnnotationTypeCode
from wsidicom.graphical_annotations import Annotation, AnnotationInstance, Geometry, PolygonAnnotationGroup
from wsidicom.uid import SlideUids

drawn = shapely.box(100, 100, 500, 500) - shapely.box(200, 200, 400, 400)
shapes = Geometry.from_geojson(json.loads(shapely.to_geojson(drawn)))
group = PolygonAnnotationGroup(
    [Annotation(shape) for shape in shapes], "tumour",
    AnnotationCategoryCode("Morphologically abnormal structure"), AnnotationTypeCode("Neoplasm", "108369006", "SCT"),
)
AnnotationInstance([group], "image", SlideUids(generate_uid(), generate_uid(), generate_uid())).save("tumour.dcm")
(saved,) = AnnotationInstance.open(["tumour.dcm"])
areas = [shapely.Polygon(annotation.geometry.to_coords()).area for annotation in saved[0].annotations]
print("drawn", drawn.area, "saved", areas)
assert drawn.area == 120000 and areas == [160000]
try:
    Geometry.from_shapely_like(drawn)
    raise SystemExit("changed: a polygon of shapely with a hole is taken")
except NotImplementedError as error:
    print("from shapely:", error)
PYTHON
