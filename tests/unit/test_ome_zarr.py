"""The slide of an OME-Zarr is found in all supported versions, and others are refused by name."""

import json

import numpy as np
import pytest
import tifffile
from builders import refused
from zarr_files import ome_zarr

from wsi_fl.slides.reading.reader import Slide

MPP = 0.5


@pytest.fixture(scope="module")
def picture():
    """uint8[1100, 1300, 3]"""
    return np.random.default_rng(0).integers(0, 256, (110, 130, 3), np.uint8).repeat(10, 0).repeat(10, 1)


def outer_zarr(folder, version, images, series=None):
    """Write a Zarr in the layout of bioformats2raw: `images` by their groups, and the list of its OME group."""
    zarr = pytest.importorskip("zarr")
    path = folder / "outer.zarr"
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)

    def said(**values):
        return values if version == "0.4" else {"ome": {"version": version, **values}}

    group.attrs.update(said(**{"bioformats2raw.layout": 3}))
    if series is not None:
        group.create_group("OME").attrs.update(said(series=series))
    for name, image in images.items():
        (folder / name).mkdir()
        ome_zarr(version)(folder / name, image).rename(path / name)
    return path


def rewrite(path, change):
    """Replace the NGFF metadata of a Zarr by a function of it."""
    for file in (path / "zarr.json", path / ".zattrs"):
        if file.exists():
            said = json.loads(file.read_text())
            change(said.get("attributes", said).get("ome", said))
            file.write_text(json.dumps(said))
    return path


def test_a_zarr_by_bioformats2raw_is_read_and_scales_multiply(picture, tmp_path):
    outer = outer_zarr(tmp_path, "0.4", {"0": picture})
    scale = [{"type": "scale", "scale": [1.0, 2.0, 2.0]}]
    rewrite(outer / "0", lambda said: said["multiscales"][0].update(coordinateTransformations=scale))
    with Slide(outer) as slide:
        assert slide.mpp == 2 * MPP
        np.testing.assert_array_equal(slide.read((500, 300), 400, 2 * MPP), picture[300:700, 500:900])


def as_0_6(output, *, sequence):
    """Return the 0.6 form of 0.5 metadata: axes in systems, and one transformation of a dataset into such a system."""

    def change(said):
        multiscale = said["multiscales"][0]
        pixels = [{"name": axis["name"], "type": "array"} for axis in multiscale["axes"]]
        said["version"], axes = "0.6", multiscale.pop("axes")
        multiscale["coordinateSystems"] = [{"name": "array", "axes": pixels}, {"name": "physical", "axes": axes}]
        for dataset in multiscale["datasets"]:
            transform = dataset["coordinateTransformations"][0]
            if sequence:
                shift = {"type": "translation", "translation": [0.0, MPP / 2, MPP / 2]}
                transform = {"type": "sequence", "transformations": [transform, shift]}
            ends = {"input": {"path": dataset["path"]}, "output": output}
            dataset["coordinateTransformations"] = [transform | ends]
        outward = {"type": "scale", "scale": [1.0, 7.0, 7.0], "input": output, "output": {"name": "stage"}}
        multiscale["coordinateTransformations"] = [outward]

    return change


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("output", [{"name": "physical"}, "physical"])
def test_ngff_0_6_is_read_by_the_system_of_its_datasets(picture, tmp_path, output, sequence):
    path = rewrite(ome_zarr("0.5")(tmp_path, picture), as_0_6(output, sequence=sequence))
    with Slide(path) as slide:
        assert slide.mpp == MPP and slide.level_downsamples == pytest.approx((1, 2, 4), rel=0.01)
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), picture[300:700, 500:900])


OLD = {
    "0.1": lambda said: said["multiscales"][0].update(version="0.1", axes=None),
    "0.3": lambda said: said["multiscales"][0].update(version="0.3", axes=list("cyx")),
    "0.3 or older": lambda said: [said["multiscales"][0].pop(key) for key in ("version", "axes")],
}


@pytest.mark.parametrize("version", OLD)
def test_older_ngff_is_refused_by_its_version(picture, tmp_path, version):
    path = rewrite(ome_zarr("0.4")(tmp_path, picture), OLD[version])
    refused(lambda: Slide(path), f"a.zarr: this is OME-Zarr {version};", "0.4 to 0.6 are read")


def test_a_bare_zarr_array_and_missing_levels_are_reported(picture, tmp_path):
    path = ome_zarr("0.5")(tmp_path, picture)
    refused(lambda: Slide(path / "0"), "0: a Zarr array alone; OME-Zarr 0.4 to 0.6 are read")
    gone = rewrite(path, lambda said: said["multiscales"][0]["datasets"][2].update(path="7"))
    refused(lambda: Slide(gone), "a.zarr: cannot be opened: it lacks '7'")


SILENT = {
    "no colours": {"omero": None},
    "no channels": {"omero": {"channels": None}},
    "null colours": {"omero": {"channels": [{"color": None, "label": None}] * 3}},
}


@pytest.mark.parametrize("how", SILENT)
def test_optional_metadata_of_a_zarr_may_be_empty(picture, tmp_path, how):
    path = ome_zarr("0.5", **SILENT[how])(tmp_path, picture)
    with Slide(rewrite(path, lambda said: said["multiscales"][0].update(coordinateTransformations=None))) as slide:
        assert slide.mpp == MPP


@pytest.mark.parametrize("name", ["s", "channel"])
def test_channels_are_known_by_the_type_of_their_axis(picture, tmp_path, name):
    # large_image calls them s, names them by number and colours them white
    channels = [{"label": f"Band {k}", "color": "FFFFFF"} for k in (1, 2, 3)]
    path = ome_zarr("0.5", "yxc", omero={"channels": channels})(tmp_path, picture)
    with Slide(rewrite(path, lambda said: said["multiscales"][0]["axes"][2].update(name=name))) as slide:
        assert slide.mpp == MPP
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), picture[300:700, 500:900])


@pytest.mark.parametrize("unit", ["\u00b5m", "\u03bcm", "um", "micron", "Microns", "micrometre"])
def test_a_micrometre_has_many_spellings(picture, tmp_path, unit):
    said = {"axes": "YXS", **{f"PhysicalSize{axis}": MPP for axis in "XY"}}
    said |= {f"PhysicalSize{axis}Unit": unit for axis in "XY"}
    tifffile.imwrite(tmp_path / "a.ome.tif", picture[:64, :64], ome=True, metadata=said, photometric="rgb")
    zarr = ome_zarr("0.4")(tmp_path, picture[:64, :64])
    for path in (
        tmp_path / "a.ome.tif",
        rewrite(zarr, lambda ngff: [axis.update(unit=unit) for axis in ngff["multiscales"][0]["axes"]]),
    ):
        with Slide(path) as slide:
            assert slide.mpp == MPP


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize(
    ("names", "series"),
    [
        (("0", "1"), None),
        (("0", "1"), ["1", "0"]),
        (("0", "1"), ["0", "1"]),
        (("label", "slide"), ["slide", "label"]),
        (("macro image", "9"), ["macro image", "9", "gone"]),
        (("2", "10"), None),
    ],
)
def test_the_slide_of_a_zarr_is_the_largest_of_its_pictures_however_they_are_listed(
    picture, tmp_path, version, names, series
):
    images = dict(zip(names, (np.ascontiguousarray(picture[:200, :300]), picture), strict=True))
    with Slide(outer_zarr(tmp_path, version, images, series)) as slide:
        assert (slide.size_l0, slide.mpp) == ((1300, 1100), MPP)
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), picture[300:700, 500:900])


def test_labels_levels_in_any_order_and_pictures_that_are_not_listed_do_not_matter(picture, tmp_path):
    small = np.ascontiguousarray(picture[:200, :300])
    path = outer_zarr(tmp_path, "0.5", {"0": small, "1": picture}, ["0"])
    with Slide(path) as slide:  # the OME group says what is a picture
        assert slide.size_l0 == (300, 200)
    (tmp_path / "labels").mkdir()
    labels = ome_zarr("0.5", **{"image-label": {}})(tmp_path / "labels", picture)
    labels.rename(tmp_path / "outer.zarr" / "5")
    meta = path / "1" / "zarr.json"
    said = json.loads(meta.read_text())
    said["attributes"]["ome"]["multiscales"][0]["datasets"].reverse()
    meta.write_text(json.dumps(said))
    (path / "OME" / "zarr.json").unlink()
    with Slide(path) as slide:
        assert slide.size_l0 == (1300, 1100) and slide.level_downsamples == pytest.approx((1, 2, 4), rel=0.01)
        assert slide.mpp == MPP
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), picture[300:700, 500:900])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_two_zarrs_with_equal_metadata_are_two_slides(picture, tmp_path, version):
    hashes = []
    for name, pixels in (("a", picture), ("b", picture), ("c", picture[::-1].copy())):
        (tmp_path / name).mkdir()
        with Slide(ome_zarr(version)(tmp_path / name, pixels)) as slide:
            hashes.append(slide.quickhash)
    assert hashes[0] == hashes[1] != hashes[2]
