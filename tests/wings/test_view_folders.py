"""`view` shows a slide that is a folder of DICOM files as `tile` reads it."""

import io

import numpy as np
from building import halves
from dicom_files import write_dicom
from PIL import Image

from wsi_fl.stages.prepare.init import init
from wsi_fl.study.folder import Study
from wsi_fl.viewer.viewing import gallery


def test_the_slides_of_a_site_are_shown_by_the_names_of_their_folders(tmp_path):
    names, picture = ("1.2.840.1", "1.2.840.2"), np.full((256, 256, 3), 240, np.uint8)
    picture[64:192, 64:192] = (190, 110, 170)
    for name in names:
        for k, level in enumerate(halves(picture, 2)):
            path = tmp_path / "archive" / "slides" / name / f"{k}.dcm"
            write_dicom(path, level, mpp=0.5 * 2**k, series=f"1.2.3.{name[-1]}")
    rows = [f"{name},p{name[-1]},A,negative" for name in names]
    (tmp_path / "archive" / "slides.csv").write_text("\n".join(["slide,patient,site,label", *rows]))
    init(tmp_path / "study", archive=tmp_path / "archive")
    shown = gallery(Study(tmp_path / "study"), site="A")
    assert [one.name for one in shown.exhibits] == list(names)
    with shown.lent(1) as slide:
        assert slide.size_l0 == (256, 256)
    tile = shown.tile(0, 8, 0, 0, lambda: True)
    pixels = np.asarray(Image.open(io.BytesIO(tile))).astype(int)
    assert pixels.shape[:2] == (256, 256) and np.abs(pixels - picture).mean() < 4
    shown.close()
