"""`view` shows a slide in a folder of DICOM files like `tile` reads it."""

import io

import numpy as np
from PIL import Image
from test_dicom import write_pyramid

from wsi_fl.slides.reading.formats.dicom_headers import resolve_slide_path
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.study.folder import Study
from wsi_fl.viewer.build_gallery import _slide_owners, build_gallery


def test_the_slides_of_a_site_are_shown_by_the_names_of_their_folders(tmp_path):
    names, picture = ("1.2.840.1", "1.2.840.2"), np.full((256, 256, 3), 240, np.uint8)
    picture[64:192, 64:192] = (190, 110, 170)
    for name in names:
        write_pyramid(tmp_path / "archive" / "slides" / name, picture=picture, series=f"1.2.3.{name[-1]}")
    rows = [f"{name},p{name[-1]},A,negative" for name in names]
    (tmp_path / "archive" / "slides.csv").write_text("\n".join(["slide,patient,site,label", *rows]))
    init_study(tmp_path / "study", archive=tmp_path / "archive")
    shown = build_gallery(Study(tmp_path / "study"), site="A")
    assert [one.name for one in shown.exhibits] == list(names)
    assert shown.open_slide(1).size_l0 == (256, 256)
    tile = shown.render_tile(0, 8, 0, 0, lambda: True)
    pixels = np.asarray(Image.open(io.BytesIO(tile))).astype(int)
    assert pixels.shape[:2] == (256, 256) and np.abs(pixels - picture).mean() < 4


def test_a_folder_and_its_files_are_slides_of_the_site_that_names_one_of_them(tmp_path):
    for name in ("A", f"Dru{chr(0x308)}se"):
        (tmp_path / name).mkdir()
        for k in range(2):
            (tmp_path / name / f"{k}.dcm").write_bytes(bytes(128) + b"DICM")
    init_study(tmp_path / "study", names=["A", "B"])
    for site, slides in (("A", "A"), ("B", f"Dr{chr(0xFC)}se/0.dcm")):
        file = tmp_path / "study" / "sites" / f"{site}.toml"
        file.write_text(f'name = "{site}"\nslides = "{tmp_path}/{slides}"\nreal = true\n')
    owners = _slide_owners(Study(tmp_path / "study"))
    places = [resolve_slide_path(tmp_path / name / "1.dcm") for name in ("A", f"Dru{chr(0x308)}se")]
    assert [owners[place] for place in places] == [{"A"}, {"B"}]
    assert owners[resolve_slide_path(tmp_path / "A")] == {"A"} and len(owners) == 2
