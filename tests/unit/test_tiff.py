"""TIFF of unknown scanners: color pixels are read correctly by every reader, others are refused by name."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from builders import change_tag, halves, needs_formats, refused
from PIL import Image

from wsi_fl.slides.reading.formats import source
from wsi_fl.slides.reading.formats.tiff_pages import list_pages
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system.extras import explain_missing
from wsi_fl.types import UsageError, WsiFlError

MPP = 0.5
HOW = {"tile": (64, 64), "metadata": None, "resolution": (1e4 / MPP, 1e4 / MPP), "resolutionunit": "CENTIMETER"}
PICTURE = np.random.default_rng(0).integers(0, 256, (25, 33, 3), np.uint8).repeat(8, 0).repeat(8, 1)
"""uint8[200, 264, 3]"""
GREY = PICTURE[..., 0]
ONE = np.full((200, 264, 1), 128, np.uint8)


def write_pages(path, *pages):
    """Write pages of (pixels, their tags)."""
    with tifffile.TiffWriter(path) as tif:
        for pixels, how in pages:
            usual = {"photometric": "rgb" if pixels.ndim == 3 else "minisblack", "compression": "deflate"}
            tif.write(pixels, **(HOW | usual | how))
    return path


def write(path, pixels=PICTURE, **how):
    return write_pages(path, (pixels, {"photometric": "rgb"} | how))


def extra(*kinds):
    return {"extrasamples": list(kinds)}


NO_COLOURS = {
    "12 of 16 bits": (PICTURE.astype(np.uint16) << 4, {}, "16-bit RGB"),
    "16 bits of grey": (GREY.astype(np.uint16), {"photometric": "minisblack"}, "16-bit grey"),
    "32 bits": (PICTURE.astype(np.uint32), {}, "32-bit RGB"),
    "signed": ((PICTURE // 2).astype(np.int8), {}, "signed numbers"),
    "float": (PICTURE.astype(np.float32), {}, "floating point"),
    "half": (GREY.astype(np.float16), {"photometric": "minisblack"}, "floating point"),
    "bilevel": (GREY > 99, {"photometric": "minisblack"}, "black and white alone"),
    "a fourth channel": (np.concatenate([PICTURE, ONE], 2), extra("unspecified"), "RGB of 4 channels"),
    "two more channels": (np.concatenate([PICTURE, ONE, ONE], 2), extra("unassalpha", "unspecified"), "of 5 channels"),
    "grey and more": (
        PICTURE,
        {"photometric": "minisblack"} | extra("unspecified", "unspecified"),
        "grey of 3 channels",
    ),
    "grey, transparent": (PICTURE[..., :2], {"photometric": "minisblack"} | extra("unassalpha"), "grey of 2 channels"),
    "planes of grey": (
        np.ascontiguousarray(np.moveaxis(PICTURE, 2, 0)),
        {"photometric": "minisblack", "planarconfig": "separate"},
        "grey of 3 channels",
    ),
    "lab": (PICTURE, {"photometric": "cielab"}, "CIELAB"),
}


@pytest.mark.parametrize("what", NO_COLOURS)
def test_tiles_without_8_bit_colors_are_refused_with_their_format(tmp_path, what):
    pixels, how, words = NO_COLOURS[what]
    path = write(tmp_path / "a.tif", pixels, **how)
    for reader in ("auto", "openslide"):
        refused(partial(Slide, path, MPP, reader), "a.tif", "a slide has 8-bit colours", words, "save it as red")


def test_a_scanners_tiff_of_16_bits_is_refused_too(tmp_path):
    path = write(tmp_path / "a.svs", PICTURE.astype(np.uint16) << 4, description="Aperio Image\r\n264x200|MPP = 0.5")
    refused(partial(Slide, path), "a.svs", "16-bit RGB")


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("n", [2, 4])
def test_several_pictures_of_one_size_are_refused(tmp_path, n, tiled):
    how = {} if tiled else {"tile": None}
    pages = [(np.roll(GREY, 9 * k, 0), how) for k in range(n)]
    refused(partial(Slide, write_pages(tmp_path / "a.tif", *pages)), "a.tif", f"holds {n} of one size")
    colours = [(PICTURE, how), (halves(PICTURE)[1], how), *[(PICTURE, how)] * (n - 1)]
    refused(partial(Slide, write_pages(tmp_path / "b.tif", *colours)), "b.tif", f"holds {n} of one size")


def test_an_imagej_stack_is_no_slide(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.stack([GREY] * 5), imagej=True)
    refused(partial(Slide, tmp_path / "a.tif", MPP), "a.tif", "holds 5 of one size")


def meanings():
    """Return description → (pixels, writer options, the intended colors by Pillow)."""
    alpha, clear = np.full((200, 264, 1), 255, np.uint8), np.zeros((200, 264, 1), np.uint8)
    alpha[:, :100] = 0
    over = np.where(alpha > 0, PICTURE, 255)
    palette = np.random.default_rng(1).integers(0, 256, (3, 256)).astype(np.uint16)
    ycbcr = np.asarray(Image.fromarray(PICTURE, "YCbCr").convert("RGB"))
    cmyk = np.concatenate([255 - PICTURE, clear], 2)
    return {
        "grey": (GREY, {"photometric": "minisblack"}, np.repeat(GREY[..., None], 3, 2)),
        "white is zero": (GREY, {"photometric": "miniswhite"}, 255 - np.repeat(GREY[..., None], 3, 2)),
        "palette": (GREY, {"photometric": "palette", "colormap": palette * 257}, palette.T[GREY]),
        "cmyk": (cmyk, {"photometric": "separated"}, PICTURE),
        "ycbcr": (PICTURE, {"photometric": "ycbcr"}, ycbcr),
        "transparent": (np.concatenate([PICTURE, alpha], 2), extra("unassalpha"), over),
        "premultiplied": (
            np.concatenate([PICTURE * (alpha > 0), alpha], 2).astype(np.uint8),
            extra("assocalpha"),
            over,
        ),
        "planes": (np.ascontiguousarray(np.moveaxis(PICTURE, 2, 0)), {"planarconfig": "separate"}, PICTURE),
    }


@pytest.mark.parametrize("what", meanings())
def test_tiles_in_other_color_spaces_are_converted(tmp_path, what):
    pixels, how, meant = meanings()[what]
    with Slide(write(tmp_path / "a.tif", pixels, **how)) as slide:
        seen = slide.read((0, 0), 200, MPP).astype(int)
    assert np.abs(seen - meant[:200, :200]).max() <= 1


CODECS = {
    "jpegxl": "JPEGXL",
    "webp": "WEBP",
    "jpeg2000": "JPEG 2000",
    "lerc": "LERC",
    "lzma": "LZMA",
    "png": "PNG",
    "jpegxr": "JPEGXR",
}


def write_codec(path, codec, pixels=PICTURE, **more):
    lossless = {"compressionargs": {"lossless": True}} if codec in {"webp", "jpegxl"} else {}
    pages = [
        (level, {"compression": codec, "subfiletype": int(k > 0)} | lossless) for k, level in enumerate(halves(pixels))
    ]
    return write_pages(path, *[(level, how | more) for level, how in pages])


@pytest.mark.parametrize("codec", CODECS)
@needs_formats
def test_codecs_that_openslide_lacks_are_read_as_tifffile_reads_them(tmp_path, codec):
    path = write_codec(tmp_path / "a.tif", codec)
    judges = [page.asarray() for page in tifffile.TiffFile(path).pages]
    with Slide(path) as slide:
        assert (slide.size_l0, slide.mpp, slide.level_downsamples) == ((264, 200), MPP, (1, 2, 4))
        assert slide.vendor == "tiled tiff" and len(slide.quickhash) == 64
        np.testing.assert_array_equal(slide.read((30, 20), 150, MPP), judges[0][20:170, 30:180])
        np.testing.assert_array_equal(slide.read((60, 40), 50, 2 * MPP), judges[1][20:70, 30:80])
    if codec != "jpegxr":
        np.testing.assert_array_equal(judges[0], PICTURE)


@pytest.mark.parametrize("codec", ["jpegxl", "lerc", "webp"])
def test_without_the_extra_the_codec_is_named_with_it(tmp_path, monkeypatch, codec):
    path = write_codec(tmp_path / "a.tif", codec)
    monkeypatch.setattr(source, "import_module", missing)
    refused(partial(Slide, path), "a.tif", CODECS[codec], explain_missing("formats"), error=UsageError)


def missing(name):
    raise ModuleNotFoundError(name=name)


@needs_formats
def test_an_unsupported_codec_is_refused_by_its_number(tmp_path):
    path = write_codec(tmp_path / "a.tif", "lzma")
    change_tag(path, 259, lambda _: 52_479, pages=(0, 1, 2))
    refused(partial(Slide, path), "a.tif", "codec 52479", "no library here reads", "tiles of JPEG")


def test_16_bits_or_several_pages_are_refused_with_any_codec(tmp_path):
    deep = write_pages(tmp_path / "a.tif", (PICTURE.astype(np.uint16), {"compression": "lzma"}))
    refused(partial(Slide, deep), "16-bit RGB")
    stack = write_pages(tmp_path / "b.tif", *[(PICTURE, {"compression": "zstd"})] * 3)
    refused(partial(Slide, stack), "holds 3 of one size")


@pytest.mark.parametrize("tiled", [True, False])
@needs_formats
def test_the_largest_picture_is_the_slide_wherever_it_stands(tmp_path, tiled):
    how = {} if tiled else {"tile": None}
    label = np.zeros((80, 90, 3), np.uint8)
    small = (halves(PICTURE)[1], how | {"subfiletype": 1})
    for name, pages in {
        "first": [(PICTURE, how), small, (label, how)],
        "last": [(label, how), small, (PICTURE, how)],
        "mask": [(PICTURE, how), (np.ones((200, 264), bool), how | {"subfiletype": 4}), small],
    }.items():
        with Slide(write_pages(tmp_path / f"{name}.tif", *pages)) as slide:
            assert slide.size_l0 == (264, 200)
            np.testing.assert_array_equal(slide.read((30, 20), 150, MPP), PICTURE[20:170, 30:180])


@pytest.mark.parametrize("what", ["bit", "byte", "byte of a grey slide", "other channels"])
@needs_formats
def test_masks_of_overviews_are_no_levels(tmp_path, what):
    """As in a Cloud Optimized GeoTIFF with an internal mask. OpenSlide opens none of one bit as tifffile writes it."""
    picture = GREY if "grey" in what else PICTURE
    pages = []
    for k, level in enumerate(halves(picture)):
        mask = np.zeros(level.shape[:2], bool if what == "bit" else np.uint8)
        kind = {"subfiletype": (5 if k else 4) if what == "bit" else 1}
        pages += [(level, {"subfiletype": int(k > 0)}), (mask, kind)]
    path = write_pages(tmp_path / "a.tif", *pages)
    if what.startswith("byte"):
        change_tag(path, 254, lambda _: 5, pages=(1, 3, 5))  # tifffile writes no masks of 8 bits
    with Slide(path) as slide:
        assert slide.level_downsamples == (1, 2, 4)
        assert slide.vendor == ("tiled tiff" if what == "bit" else "generic-tiff")
        half = halves(picture)[1].reshape(100, 132, -1)[20:70, 30:80]
        assert (slide.read((60, 40), 50, 2 * MPP) == half).all()
        quarter = halves(picture)[2].reshape(50, 66, -1)
        assert np.abs(slide.thumbnail(66)[0].astype(int) - quarter).max() <= 1


def test_a_picture_with_differently_reduced_sides_is_no_level(tmp_path):
    other = np.zeros((100, 176, 3), np.uint8)  # 2.0 and 1.5
    path = write_pages(
        tmp_path / "a.tif",
        *[(p, {"subfiletype": int(k > 0)}) for k, p in enumerate((PICTURE, other, halves(PICTURE)[2]))],
    )
    with Slide(path) as slide:
        assert slide.level_downsamples == (1, 4)
        seen = slide.read((0, 0), 66, 1.5 * MPP).astype(int)
    meant = np.asarray(Image.fromarray(PICTURE).resize((176, 133), Image.Resampling.BOX))[:66, :66]
    assert np.abs(seen - meant).mean() < 6


def test_a_damaged_list_of_directories_is_reported(tmp_path):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tif:
        for _ in range(2):
            tif.write(np.zeros((64, 64, 3), np.uint8), photometric="rgb", metadata=None)
    with tifffile.TiffFile(path) as tif:
        pages = list(tif.pages)
        listed = SimpleNamespace(filename="a.tif", pages=pages)
        assert [page.offset for page in list_pages(listed)] == [page.offset for page in pages]
        listed.pages = iter([*pages, pages[0], "never looked at"])
        refused(lambda: list_pages(listed), "a.tif: its list of directories is damaged", error=WsiFlError)
