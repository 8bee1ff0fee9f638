"""The imaginary hospitals: slides open like real ones, and their outlines tell the truth about what was painted."""

from __future__ import annotations

import csv
import hashlib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray
from skimage.draw import polygon2mask

from wsi_fl.demo import phantom
from wsi_fl.demo.phantom import outlines
from wsi_fl.demo.phantom.painting import LABEL_PX, Tissue
from wsi_fl.types import UsageError

SIZE_PX = 1024
SLIDES = phantom.plan_slides(2, 1, SIZE_PX, seed=3)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hospitals")
    return phantom.paint_archive(out, n_sites=2, patients_per_site=1, size_px=SIZE_PX, seed=3)


def slide_path(archive: Path, slide: phantom.PhantomSlide) -> Path:
    return archive / "training" / f"center_{slide.site}" / f"{slide.name}.tif"


def level0(archive: Path, slide: phantom.PhantomSlide) -> NDArray[np.uint8]:
    with openslide.OpenSlide(slide_path(archive, slide)) as opened:
        return np.asarray(opened.read_region((0, 0), 0, opened.dimensions).convert("RGB"))


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def rasterized(xml: Path, size_px: int) -> NDArray[np.bool_]:
    """The annotation as a reader would paint it: pixel centres inside islands, holes last."""
    mask = np.zeros((size_px, size_px), np.bool_)
    found = ET.parse(xml).getroot().findall("./Annotations/Annotation")
    for group, value in (("metastases", True), ("normal", False)):
        for annotation in (a for a in found if a.get("PartOfGroup") == group):
            yx = [(float(c.attrib["Y"]), float(c.attrib["X"])) for c in annotation.iter("Coordinate")]
            mask[polygon2mask(mask.shape, np.array(yx) - 0.5)] = value
    return mask


def test_the_archive_has_the_layout_of_camelyon17(archive: Path) -> None:
    assert sorted(digests(archive)) == [
        "annotations/patient_000_node_1.xml",
        "annotations/patient_020_node_1.xml",
        "stages.csv",
        "training/center_0/patient_000_node_0.tif",
        "training/center_0/patient_000_node_1.tif",
        "training/center_1/patient_020_node_0.tif",
        "training/center_1/patient_020_node_1.tif",
    ]
    rows = list(csv.DictReader((archive / "stages.csv").open()))
    assert {r["patient"]: r["stage"] for r in rows} == {
        "patient_000.zip": "pN1",
        "patient_000_node_0.tif": "negative",
        "patient_000_node_1.tif": "macro",
        "patient_020.zip": "pN1",
        "patient_020_node_0.tif": "negative",
        "patient_020_node_1.tif": "macro",
    }


def test_openslide_sees_a_generic_pyramid_with_the_right_scale(archive: Path) -> None:
    path = slide_path(archive, SLIDES[0])
    assert openslide.OpenSlide.detect_format(path) == "generic-tiff"
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((1024, 1024), (512, 512))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.5)
        assert slide.properties["openslide.level[0].tile-width"] == "512"
        assert "openslide.objective-power" not in slide.properties


@pytest.mark.parametrize("slide", SLIDES[::3], ids=lambda s: s.name)
def test_openslide_reads_the_painted_colours(archive: Path, slide: phantom.PhantomSlide) -> None:
    error = level0(archive, slide).astype(int) - phantom.paint_slide(slide)
    assert np.abs(error).mean() < 4
    assert np.abs(error).max() < 90
    assert np.abs(error.mean(axis=(0, 1))).max() < 1  # no shift of colour


@pytest.mark.parametrize(("height", "width"), [(700, 1300), (512, 512), (40, 1025)])
def test_a_pyramid_of_any_shape_keeps_its_pixels_at_the_edges(
    tmp_path: Path, height: int, width: int
) -> None:
    y, x = np.mgrid[:height, :width]
    image = np.stack([y % 256 // 2 + 60, x % 256 // 2 + 60, (x + y) % 256 // 2 + 60], -1).astype(np.uint8)
    phantom.write_pyramid(tmp_path / "odd.tif", image, mpp=0.37)
    with openslide.OpenSlide(tmp_path / "odd.tif") as slide:
        assert slide.dimensions == (width, height)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.37, rel=1e-5)
        assert max(slide.level_dimensions[-1]) <= 512
        read = np.asarray(slide.read_region((0, 0), 0, slide.dimensions))
    assert (read[..., 3] == 255).all()
    assert np.abs(read[..., :3].astype(int) - image).mean() < 6


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(archive: Path, tmp_path: Path) -> None:
    asked = {"n_sites": 2, "patients_per_site": 1, "size_px": SIZE_PX, "only": 1}
    again, other = (digests(phantom.paint_archive(tmp_path / str(k), **asked, seed=k)) for k in (3, 4))
    whole = digests(archive)
    assert len(again) == 4 and all(
        whole[name] == digest for name, digest in again.items() if "csv" not in name
    )
    assert {name for name, digest in other.items() if whole[name] == digest} <= {"stages.csv"}


@pytest.mark.parametrize("slide", [s for s in SLIDES if s.positive], ids=lambda s: s.name)
def test_outlines_are_the_truth_to_a_pixel(archive: Path, slide: phantom.PhantomSlide) -> None:
    truth = phantom.tumour_mask(slide.anatomy())
    drawn = rasterized(archive / "annotations" / f"{slide.name}.xml", SIZE_PX)
    border = (
        np.abs(np.diff(truth.astype(int), axis=0)).sum() + np.abs(np.diff(truth.astype(int), axis=1)).sum()
    )
    assert truth.mean() > 0.05
    assert (drawn != truth).sum() < 0.5 * border


def test_holes_are_outlined_in_the_group_normal() -> None:
    """Over many slides some island has a hole; each hole is healthy inside, each island is tumour inside."""
    groups = []
    for slide in phantom.plan_slides(1, 8, SIZE_PX // 2, seed=0)[1::2]:
        truth = phantom.tumour_mask(slide.anatomy())
        drawn = np.zeros_like(truth)
        for group, xy in outlines(slide.anatomy()):
            drawn[polygon2mask(truth.shape, xy[:, ::-1] - 0.5)] = group == "metastases"
            groups.append(group)
        assert (drawn != truth).mean() < 0.002
    assert groups.count("normal") > 0
    assert groups.count("metastases") >= 8


@pytest.mark.parametrize("slide", [s for s in SLIDES if s.positive], ids=lambda s: s.name)
def test_tumour_is_painted_where_the_truth_says(slide: phantom.PhantomSlide) -> None:
    anatomy = slide.anatomy()
    painted = np.isin(anatomy.label, [k for k in Tissue if k >= Tissue.TUMOUR_SOLID])
    truth = phantom.tumour_mask(slide.anatomy())[LABEL_PX // 2 :: LABEL_PX, LABEL_PX // 2 :: LABEL_PX]
    assert (painted & ~truth).sum() < 0.01 * truth.sum()  # a label covers 4 × 4 pixels
    assert (painted & truth).sum() > 0.9 * truth.sum()


def test_a_negative_slide_holds_no_tumour_and_loses_a_stale_outline(tmp_path: Path) -> None:
    stale = tmp_path / "annotations" / "patient_000_node_0.xml"
    stale.parent.mkdir()
    stale.write_text("old")
    phantom.paint_archive(tmp_path, n_sites=1, patients_per_site=1, size_px=512)
    negative = phantom.plan_slides(1, 1, 512, seed=0)[0]
    assert not negative.positive
    assert not phantom.tumour_mask(negative.anatomy()).any()
    assert not stale.exists()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"n_sites": 0}, "n_sites is 0"),
        ({"patients_per_site": 21}, "patients_per_site is 21"),
        ({"size_px": 1000}, "size_px is 1000: choose a multiple of 16"),
    ],
)
def test_impossible_archives_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        phantom.paint_archive(tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()
