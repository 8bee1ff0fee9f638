"""Simulated artifacts of patches are found, sound tissue is kept, and stores report excluded patches."""

import csv
import json
import shutil

import artifacts
import h5py
import numpy as np
import pytest
from conftest import SHARED, nightly, refused
from PIL import Image

from wsi_fl.demo import simulated_slides
from wsi_fl.slides.patching.artifacts import KINDS
from wsi_fl.slides.patching.mask_regions import area_mean
from wsi_fl.slides.patching.outline_placement import SlideGeometry
from wsi_fl.slides.patching.slide_plan import AllPatchesExcluded, PlanParams, plan_slide
from wsi_fl.slides.patching.slide_survey import _read_mask
from wsi_fl.slides.patching.tissue import TissueParams, find_tissue
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import render_quality_lines, tile_slides
from wsi_fl.stages.runtime.console import TextLine
from wsi_fl.stores.fields import read_marked
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import GridSpec, SlideRecord
from wsi_fl.viewer.build_gallery import build_gallery

MPP = 0.5
SPEC = GridSpec(64, 1.0, 64)
PATCH_PX = 128
"""Of level 0."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality") / "archive"
    return simulated_slides.simulate_archive(folder, n_sites=1, patients_per_site=2, size_px=1536)


@pytest.fixture(scope="module")
def simulated_pixels(archive):
    """Return the pixels of simulated slides."""
    pictures = []
    for path in sorted(archive.rglob("*.tif")):
        with Slide(path) as slide:
            pictures.append(slide.thumbnail(1536)[0])
    return pictures


@pytest.fixture(scope="module")
def tissue(simulated_pixels):
    """Return real tissue at about 0.5 µm per pixel on glass, or simulated tissue where there is none."""
    if not (SHARED / "data/centres").exists():
        return simulated_pixels
    with Slide(SHARED / "data/slides/CMU-1-Small-Region.svs") as slide:
        pictures = [slide.thumbnail(3000)[0]]
    path = sorted((SHARED / "data/centres").glob("*.jpeg"))[0]
    glass = np.random.default_rng(0).normal(artifacts.GLASS, 1.5, (1536, 1536, 3))
    glass = np.clip(glass, 0, 255).astype(np.uint8)
    glass[256:1280, 256:1280] = Image.open(path).convert("RGB").reduce(2)
    return [*pictures, glass]


def plan_picture(folder, picture, kinds=(), **params):
    """Return the plan of a slide with this picture."""
    path = folder / "a.tif"
    simulated_slides.write_pyramid(path, np.ascontiguousarray(picture), MPP, quality=92)
    record = SlideRecord(path, "a", "p", "C1", "negative", False)
    return plan_slide(record, SPEC, PlanParams(max_artifacts=Pipeline(tile={"qc": list(kinds)}).tile.qc), **params)


def places(corners):
    return {(int(x), int(y)) for x, y in corners}


_KEPT = {}
"""Patches of the pictures, which live as long as this module: they are cut once."""


def counts(folder, picture, hurt, where, kind, least=0.5):
    """Return (found, artifact patches, wrongly found, sound patches) of the patches of the sound picture.

    Hurt are those that are at least so much fault.
    """
    if id(picture) not in _KEPT:
        _KEPT[id(picture)] = plan_picture(folder, picture).xy_l0
    kept = _KEPT[id(picture)]
    share = area_mean(where, kept.astype(np.float64), PATCH_PX)
    plan = plan_picture(folder, hurt, (kind,))
    gone = places(kept[share >= least]) - places(plan.xy_l0)  # set aside, or no tissue any more
    wrong = places(plan.aside_xy_l0) & places(kept[share == 0])
    return len(gone), int((share >= least).sum()), len(wrong), int((share == 0).sum())


def draw_stroke(seed, width_um=220):
    return lambda picture: artifacts.stroke(picture.shape[:2], MPP, np.random.default_rng(seed), width_um)


def middle(picture):
    height, width = picture.shape[:2]
    return artifacts.disc((height, width), (0.45 * width, 0.5 * height), 0.3 * min(height, width))


def apply_ink(colour, how=artifacts.inked):
    return lambda picture, where: how(picture, where, colour)


FAULTS = {
    "black pen": ("pen", draw_stroke(0), apply_ink("black"), 0.9),
    "blue pen": ("pen", draw_stroke(1), apply_ink("blue"), 0.9),
    "translucent pen": ("pen", draw_stroke(0), apply_ink("green", artifacts.translucent), 0.8),
    "black": ("black", draw_stroke(7), artifacts.blackened, 0.9),
    "blur": ("blur", middle, lambda picture, where: artifacts.blurred(picture, where, 2, MPP), 0.9),
    "thin black": ("pen", draw_stroke(0, 30), apply_ink("black"), 0.95),
    "thin blue": ("pen", draw_stroke(0, 30), apply_ink("blue"), 0.95),
    "thin green": ("pen", draw_stroke(0, 30), apply_ink("green"), 0.95),
    "thin red": ("pen", draw_stroke(0, 30), apply_ink("red"), 0.95),
}
"""Kind, where it is, how it is made, and how much of it is found at least."""

EVERYDAY = ("black pen", "translucent pen", "blur", "thin black")
"""Looked for in one picture or two; the others in all."""


@pytest.mark.end_to_end
@pytest.mark.parametrize("fault", [*EVERYDAY, *nightly(*sorted(FAULTS.keys() - {*EVERYDAY}))])
def test_pen_black_and_blur_artifacts_are_found(tissue, tmp_path, fault):
    kind, place, hurt, least = FAULTS[fault]
    thin = fault.startswith("thin")
    found = np.zeros(4)
    for picture in tissue[: 1 + thin] if fault in EVERYDAY else tissue:
        where = place(picture)
        seen = hurt(picture, where)
        found += counts(tmp_path, picture, seen, where, kind, least=0.08 if thin else 0.5)
        if thin:  # a line of ink does not choose how tissue is found
            small = np.asarray(Image.fromarray(seen).reduce(4))
            assert find_tissue(small, 4 * MPP).method == "saturation"
    assert found[1] >= 20 and found[3] >= 20
    recall, false = found[0] / found[1], found[2] / found[3]
    assert recall >= least and false <= 0.02, (recall, false)


def test_no_artifact_is_found_on_sound_tissue(simulated_pixels, tmp_path):
    plan = plan_picture(tmp_path, simulated_pixels[0], KINDS)
    assert len(plan.aside_xy_l0) <= 0.02 * len(plan.xy_l0)
    assert len(plan_picture(tmp_path, simulated_pixels[0]).aside_xy_l0) == 0


def test_a_slide_of_artifacts_alone_is_excluded_with_their_counts(simulated_pixels, tmp_path, monkeypatch):
    monkeypatch.setattr("wsi_fl.slides.patching.artifacts._LEAST_FINE", 1e9)  # all tissue is out of focus
    with pytest.raises(AllPatchesExcluded, match=r"all \d+ are excluded \(\d+ blur\); see tile\.qc") as failure:
        plan_picture(tmp_path, simulated_pixels[0], ("blur",))
    assert set(failure.value.reasons) == {"blur"}


def pale(picture):
    """Return the picture with its saturation divided by three."""
    hsv = np.asarray(Image.fromarray(picture).convert("HSV")).copy()
    hsv[..., 1] //= 3
    return np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"))


def render_absorption(over):
    return (256 * np.exp(-over) - 1).clip(0, 255).round().astype(np.uint8)


def stain_with_dab(picture):
    """Return the picture with eosin replaced by the brown of DAB."""
    density = -np.log((picture.astype(float) + 1) / 256)
    blue = density[..., :1] / 0.65
    brown = np.clip(density[..., 1:2] - 0.704 * blue, 0, None) / 0.95
    return render_absorption(blue * np.array([0.65, 0.704, 0.286]) + brown * np.array([0.268, 0.570, 0.776]))


def stain_with_hematoxylin(picture):
    """Return the picture stained by hematoxylin alone, bluer than with eosin."""
    density = -0.8 * np.log((picture.astype(float) + 1) / 256).mean(-1, keepdims=True)
    return render_absorption(density * np.array([1.3, 1.15, 0.55]))


@pytest.mark.parametrize("change", [pale, stain_with_dab, stain_with_hematoxylin])
def test_tissue_of_another_stain_is_kept_also_in_a_coarse_thumbnail(tissue, change):
    for picture in tissue:
        small = np.asarray(Image.fromarray(picture).reduce(8))
        before = find_tissue(small, 8 * MPP, TissueParams(method="saturation")).mask
        after = find_tissue(change(small), 8 * MPP).mask
        assert (before & after).sum() >= 0.9 * before.sum()


def test_a_blue_stain_is_no_pen(tissue, tmp_path):
    plan = plan_picture(tmp_path, stain_with_hematoxylin(tissue[0]), ("pen",))
    blamed, kept = len(plan.aside_xy_l0), len(plan.xy_l0)
    assert kept > 25 and blamed <= 0.05 * kept, (blamed, kept)


def test_translucent_ink_is_found_by_density_and_its_gain_is_reported():
    rng = np.random.default_rng(0)
    grey = np.full((300, 400, 3), 240.0)
    grey[60:240, 80:320] = 225 + rng.normal(0, 8, (180, 240, 1))
    picture = np.clip(grey + rng.normal(0, 1, grey.shape), 0, 255).astype(np.uint8)
    found = find_tissue(picture, 8.0)
    assert found.method == "density" and found.gain == float("inf")
    assert found.mask[70:230, 90:310].mean() > 0.97 and found.mask[:50].mean() < 0.01


SETTINGS = ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]
QC = 'tile.qc=["pen","black","blur"]'


@pytest.fixture
def hurt(archive, tmp_path):
    """Return a study whose first slide has a blue stroke across, and its record."""
    copy = tmp_path / "archive"
    shutil.copytree(archive, copy, ignore=shutil.ignore_patterns("patient_001_*"))  # one patient is enough
    path = sorted(copy.rglob("*.tif"))[0]
    with Slide(path) as slide:
        picture = slide.thumbnail(1536)[0]
    simulated_slides.write_pyramid(path, artifacts.inked(picture, draw_stroke(1)(picture), "blue"), MPP)
    init_study(tmp_path / "study", archive=copy)
    return Study(tmp_path / "study"), path.stem


def shard(study, slide):
    return study.root / "stores/C1/slides" / f"{slide}.h5"


def run_tile(study, *overrides):
    return tile_slides(study, site="C1", overrides=[*SETTINGS, *overrides])["sites"][0]


def quality_of(study):
    """Return the lines of quality.csv by slide."""
    with (study.root / "stores/C1/quality.csv").open(newline="") as file:
        return {line["slide"]: line for line in csv.DictReader(file)}


def draw(path, *squares):
    """Write a mask of squares, alternately tissue and no tissue."""
    mask = np.zeros((96, 96), np.uint8)
    for k, (low, high) in enumerate(squares):
        mask[low:high, low:high] = 0 if k % 2 else 255
    Image.fromarray(mask).save(path)


def test_tile_excludes_patches_and_reports_them_everywhere(hurt, monkeypatch):
    study, slide = hurt
    row = run_tile(study, QC)
    with h5py.File(shard(study, slide)) as file:
        aside = read_marked(file, "aside")
        kept = places(file["xy_l0"][:])
    pens = {(x, y) for x, y, why in aside if why == "pen"}
    assert len(pens) >= 5 and not pens & kept and row["excluded"]["pen"] == len(pens)
    assert row["tissue"]["saturation"]["slides"] >= 1
    line = quality_of(study)[slide]
    assert int(line["pen"]) == len(pens) and int(line["good"]) == len(kept)
    with Image.open(study.root / f"stores/C1/overview/{slide}.png") as picture:
        assert (np.abs(np.asarray(picture.convert("RGB"), int) - (213, 94, 0)).sum(-1) < 60).sum() > 50
    first = shard(study, slide).read_bytes()
    with h5py.File(shard(study, slide), "r+") as file:
        file["aside_xy_l0"][0, 0] += 1
    run_tile(study, QC)
    assert shard(study, slide).read_bytes() == first, "the damage is noticed and mended"
    with monkeypatch.context() as at_start:
        at_start.setattr(PatchStore, "open_shard", lambda *_: pytest.fail("opened before it was asked for"))
        shown = build_gallery(study, site="C1")
    layers = [one.name for one in shown.exhibits[0].overlays]
    drawn = json.loads(shown.render_layer(0, layers.index("excluded")))
    assert drawn["first"] == 2, "its colours are not those of the classes"
    assert drawn["groups"] == list(KINDS), "a fault has the same colour on each slide"
    assert [drawn["groups"][k] for k in drawn["group"]] == [why for _, _, why in aside]


@pytest.mark.slow
def test_stores_without_qc_are_unchanged_and_qc_thresholds_count(hurt):
    study, slide = hurt

    def counted(*overrides):
        run_tile(study, *overrides)
        with h5py.File(shard(study, slide)) as file:
            return len(file["label"]), len(file["aside_reason"]) if "aside_reason" in file else None

    n, none = counted()
    plain = shard(study, slide).read_bytes()
    assert none is None and not (study.root / "stores/C1/quality.csv").exists()
    fewer, some = counted(QC)
    assert fewer < n
    counted("tile.qc={pen=1,black=1,blur=1}")
    assert shard(study, slide).read_bytes() == plain  # nothing set aside: the very same shard
    assert 0 < counted("tile.qc={pen=0.6,black=0.05,blur=0.4}")[1] < some


@pytest.mark.slow
def test_artifact_counts_of_an_excluded_slide_are_kept_and_shown_by_the_viewer(hurt):
    study, slide = hurt
    path = next((study.root.parent / "archive").rglob(f"{slide}.tif"))
    with Slide(path) as one:
        picture = one.thumbnail(1536)[0]
    simulated_slides.write_pyramid(path, artifacts.blurred(picture, np.ones(picture.shape[:2], bool), 8.0, MPP), MPP)
    row, line = run_tile(study, 'tile.qc=["blur"]'), quality_of(study)[slide]
    assert line["good"] == "0" and int(line["blur"]) > 10 and row["excluded"]["blur"] >= int(line["blur"])
    noted = {one.name: one.note for one in build_gallery(study, site="C1").exhibits}[slide]
    assert noted == f"no patch kept: all excluded ({line['blur']} blur)"


def write_masks(study, tmp_path, write):
    folder = tmp_path / "masks"
    folder.mkdir()
    for path in sorted((study.root.parent / "archive").rglob("*.tif")):
        write(folder, path.stem)
    return f'tissue.method="{folder}"'


def square(low, high):
    return [[low, low], [high, low], [high, high], [low, high], [low, low]]


def write_outline(folder, slide):
    rings = {"type": "Polygon", "coordinates": [square(256, 1280), square(512, 1024)]}
    (folder / f"{slide}.geojson").write_text(json.dumps({"type": "Feature", "geometry": rings}))


def drawn(folder, slide):
    draw(folder / f"{slide}.png", (16, 80), (32, 64))


@pytest.mark.parametrize("write", [write_outline, drawn])
def test_imported_masks_define_the_tissue(hurt, tmp_path, write):
    study, _ = hurt
    row = run_tile(study, write_masks(study, tmp_path, write))
    assert set(row["tissue"]) == {"masks"} and row["tissue"]["masks"]["gain"] is None
    assert not any("saturation" in line.text for line in render_quality_lines(row) if isinstance(line, TextLine))
    assert {line["tissue_gain"] for line in quality_of(study).values()} == {""}
    with h5py.File(study.root / "stores/C1/patches.h5") as file:
        corners = file["xy_l0"][:] + PATCH_PX / 2
    inside = ((corners > 256 - 64) & (corners < 1280 + 64)).all(1)
    hole = ((corners > 512 + 64) & (corners < 1024 - 64)).all(1)
    assert inside.all() and not hole.any()


def build_square_geometry(side, downsample):
    """Return a square slide, scanned from edge to edge."""
    shape = (round(side / downsample),) * 2
    return SlideGeometry((side, side), (0, 0, side, side), 0.5, downsample, shape)


@pytest.mark.parametrize("order", [1, -1])
def test_an_island_in_a_hole_is_tissue_in_any_order_of_outlines(tmp_path, order):
    rings = [[square(100, 900), square(300, 700)], [square(400, 600)]][::order]
    (tmp_path / "a.geojson").write_text(json.dumps([{"type": "Polygon", "coordinates": one} for one in rings]))
    mask, _ = _read_mask(tmp_path / "a.geojson", build_square_geometry(1000, 10.0))
    assert mask[42:58, 42:58].all() and not mask[32:38, 32:68].any() and mask[12:28, 12:88].all()


def middle_of(value, dtype=np.uint8):
    return np.pad(np.full((60, 60), value, dtype), 20)


ALL = np.full((100, 100), 255, np.uint8)


@pytest.mark.parametrize(
    "pixels",
    [
        middle_of(1),
        middle_of(65535, np.uint16),
        np.dstack([ALL, ALL, ALL, middle_of(255)]),
        np.dstack([*[middle_of(255)] * 3, ALL]),
    ],
    ids=["labels", "16 bits", "overlay", "opaque"],
)
def test_a_mask_defines_tissue_by_labels_brightness_or_opacity(tmp_path, pixels):
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mask, _ = _read_mask(tmp_path / "a.png", build_square_geometry(100, 2.0))
    np.testing.assert_array_equal(mask, np.pad(np.ones((30, 30), bool), 10))


def test_a_changed_mask_is_noticed_and_an_unusable_mask_is_named(hurt, tmp_path):
    study, slide = hurt
    masks, path = write_masks(study, tmp_path, drawn), tmp_path / "masks" / f"{slide}.png"
    run_tile(study, masks)
    first = shard(study, slide).read_bytes()
    draw(path, (16, 48))
    run_tile(study, masks)
    assert shard(study, slide).read_bytes() != first
    for content, words in ((b"no picture", "not a readable PNG"), (None, "no mask of")):
        path.unlink(missing_ok=True)
        if content:
            path.write_bytes(content)
        (reason,) = [one["reason"] for one in run_tile(study, masks)["failed"] if one["slide"] == slide]
        assert words in reason and "\n" not in reason
    refused(lambda: run_tile(study, 'tissue.method="no/where"'), "no such folder")
