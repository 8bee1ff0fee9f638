"""Simulated slides open like real ones, and their outlines match the simulated tumor."""

import hashlib
import xml.etree.ElementTree as ET

import numpy as np
import openslide
import pytest
from conftest import refused
from skimage.draw import polygon2mask

from wsi_fl.demo import simulated_slides
from wsi_fl.demo.simulated_slides import trace_outlines
from wsi_fl.demo.simulated_slides.tissue_drawing import LABEL_PX, TissueKind

SIZE_PX = 1024
SLIDES = simulated_slides.plan_slides(2, 1, SIZE_PX, seed=3)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    out = tmp_path_factory.mktemp("hospitals")
    return simulated_slides.simulate_archive(out, n_sites=2, patients_per_site=1, size_px=SIZE_PX, seed=3)


def digests(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def rasterize_annotation(xml):
    """Return the annotation as a mask: pixel centers inside islands, then holes."""
    mask = np.zeros((SIZE_PX, SIZE_PX), np.bool_)
    found = ET.parse(xml).getroot().findall("./Annotations/Annotation")
    for group, value in (("metastases", True), ("normal", False)):
        for annotation in (a for a in found if a.get("PartOfGroup") == group):
            yx = [(float(c.attrib["Y"]), float(c.attrib["X"])) for c in annotation.iter("Coordinate")]
            mask[polygon2mask(mask.shape, np.array(yx) - 0.5)] = value
    return mask


@pytest.mark.parametrize("slide", SLIDES[::3], ids=lambda s: s.name)
def test_openslide_reads_the_simulated_colors_at_the_right_scale(archive, slide):
    with openslide.OpenSlide(archive / f"training/center_{slide.site}/{slide.name}.tif") as opened:
        assert opened.level_dimensions == ((1024, 1024), (512, 512))
        assert all(float(opened.properties[f"openslide.mpp-{axis}"]) == pytest.approx(0.5) for axis in "xy")
        error = np.asarray(opened.read_region((0, 0), 0, opened.dimensions).convert("RGB")).astype(int)
    error -= simulated_slides.simulate_slide(slide)
    assert np.abs(error).mean() < 4 and np.abs(error).max() < 90
    assert np.abs(error.mean(axis=(0, 1))).max() < 1  # no shift of colour


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(archive, tmp_path):
    asked = {"n_sites": 2, "patients_per_site": 1, "size_px": SIZE_PX, "only_site": 1}
    again, other = (digests(simulated_slides.simulate_archive(tmp_path / str(k), **asked, seed=k)) for k in (3, 4))
    whole = digests(archive)
    assert len(again) == 4 and all(whole[name] == one for name, one in again.items() if "csv" not in name)
    assert {name for name, one in other.items() if whole[name] == one} <= {"stages.csv"}


@pytest.mark.parametrize("slide", [s for s in SLIDES if s.is_positive], ids=lambda s: s.name)
def test_simulated_outlines_match_the_tumor_pixels_exactly(archive, slide):
    anatomy = slide.build_anatomy()
    truth = simulated_slides.tumor_mask(anatomy)
    border = sum(np.abs(np.diff(truth.astype(int), axis=axis)).sum() for axis in (0, 1))
    assert truth.mean() > 0.05
    assert (rasterize_annotation(archive / f"annotations/{slide.name}.xml") != truth).sum() < 0.5 * border
    painted = np.isin(anatomy.label, [k for k in TissueKind if k >= TissueKind.TUMOUR_SOLID])
    truth = truth[LABEL_PX // 2 :: LABEL_PX, LABEL_PX // 2 :: LABEL_PX]
    assert (painted & ~truth).sum() < 0.01 * truth.sum()  # a label covers 4 × 4 pixels
    assert (painted & truth).sum() > 0.9 * truth.sum()


def test_holes_are_outlined_in_the_group_normal():
    """Over many slides some island has a hole; each hole is healthy inside, each island is tumour inside."""
    groups = []
    for slide in simulated_slides.plan_slides(1, 8, SIZE_PX // 2, seed=0)[1::2]:
        truth = simulated_slides.tumor_mask(slide.build_anatomy())
        drawn = np.zeros_like(truth)
        for group, xy in trace_outlines(slide.build_anatomy()):
            drawn[polygon2mask(truth.shape, xy[:, ::-1] - 0.5)] = group == "metastases"
            groups.append(group)
        assert (drawn != truth).mean() < 0.002
    assert groups.count("normal") > 0 and groups.count("metastases") >= 8


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n_sites": 0}, "n_sites is 0"),
        ({"patients_per_site": 21}, "patients_per_site is 21"),
        ({"size_px": 1000}, "size_px is 1000: choose a multiple of 16"),
    ],
)
def test_impossible_archives_are_refused_before_anything_is_written(tmp_path, wrong, words):
    refused(lambda: simulated_slides.simulate_archive(tmp_path / "out", **wrong), words)
    assert not (tmp_path / "out").exists()
