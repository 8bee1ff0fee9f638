"""Formats that OpenSlide lacks are read with the writer's size, mpp, levels and pixels, or refused in one line."""

import struct
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from builders import halves, needs_formats, refused, write_ome
from conftest import SHARED
from PIL import Image
from zarr_files import ome_zarr

from wsi_fl.demo import simulated_slides
from wsi_fl.slides.reading.formats import source
from wsi_fl.slides.reading.formats.scanners import wastes_bits
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system.extras import explain_missing
from wsi_fl.types import UsageError

MPP = 0.5
PER_CM = 1e4 / MPP
DICOM = SHARED / "data" / "slides_odd" / "openslide-python_boxes_0.dcm"


@pytest.fixture(scope="module")
def picture():
    """uint8[1100, 1300, 3]"""
    slide = simulated_slides.simulate_slide(simulated_slides.plan_slides(1, 1, 768, 0)[0])
    return np.ascontiguousarray(slide.repeat(2, 0).repeat(2, 1)[:1100, :1300])


def png(folder, picture):
    Image.fromarray(picture).save(folder / "a.png", dpi=(25_400 / MPP, 25_400 / MPP))
    return folder / "a.png"


def jpeg(folder, picture):
    """JPEG holds 65 535 dpi at most, and whole ones."""
    Image.fromarray(picture).save(folder / "a.jpg", quality=95, dpi=(25_400, 25_400))
    return folder / "a.jpg"


def strips(folder, picture):
    how = {"photometric": "rgb", "rowsperstrip": 64, "compression": "lzw", "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(folder / "a.tif", picture, resolution=(PER_CM, PER_CM), **how)
    return folder / "a.tif"


def ome(n_levels=3, **how):
    """A writer of OME-TIFF, if the libraries that read it are here."""

    def write(folder, picture):
        pytest.importorskip("zarr")
        return write_ome(folder / "a.ome.tif", halves(picture, n_levels), **how)

    return write


def czi(folder, picture):
    library = pytest.importorskip("pylibCZIrw.czi")
    path = folder / "a.czi"
    with library.create_czi(str(path)) as writer:
        writer.write(np.ascontiguousarray(picture[..., ::-1]), location=(70, -30))
        writer.write_metadata("a", scale_x=MPP * 1e-6, scale_y=MPP * 1e-6)
    return path


TILES = {"tile": (256, 256), "compression": "deflate"}
WRITERS = {
    "png": png,
    "jpeg": jpeg,
    "tiff": strips,
    "ome-tiff": ome(**TILES),
    "ome-tiff strips": ome(1, rowsperstrip=64),
    "ome-tiff jpeg 2000": ome(1, tile=(256, 256), compression="jpeg2000", compressionargs={"codecformat": "j2k"}),
    "ome-tiff planes": ome(planes=True, **TILES),
    "ome-tiff named planes": ome(planes=True, channel={"Name": ["Red", "Green", "Blue"]}, **TILES),
    "ome-tiff coloured planes": ome(
        planes=True, channel={"Name": ["0", "1", "2"], "Color": [-16776961, 16711935, 65535]}, **TILES
    ),
    "ome-zarr 0.4": ome_zarr("0.4"),
    "ome-zarr 0.5": ome_zarr("0.5"),
    "ome-zarr yxc": ome_zarr("0.5", "yxc"),
    "czi": czi,
}

FLAT = {"czi", "ome-tiff strips", "ome-tiff jpeg 2000"}
"""Formats that are written here without a pyramid."""
NATIVE = {"ome-tiff", "ome-tiff jpeg 2000"}
"""Formats whose tiles are decoded here."""


@pytest.mark.parametrize("form", WRITERS)
def test_size_mpp_levels_and_pixels_are_the_writers(form, picture, tmp_path):
    path, mpp = WRITERS[form](tmp_path, picture), 1.0 if form == "jpeg" else MPP
    error = 6.0 if form == "jpeg" else 0.0  # grey levels on average
    with Slide(path) as slide:
        assert slide.size_l0 == (1300, 1100) and slide.mpp == pytest.approx(mpp, rel=1e-3)
        levels = (1,) if form in FLAT else (1, 2, 4)
        assert slide.level_downsamples == pytest.approx(levels, rel=0.01)
        assert slide.reader == ("native" if form in NATIVE else "openslide") and len(slide.quickhash) == 64
        for x, y in ((0, 0), (513, 255), (1000, 800)):
            seen = slide.read((x, y), 200, mpp).astype(int)
            assert np.abs(seen - picture[y : y + 200, x : x + 200]).mean() <= error
        beyond = slide.read((1250, 1050), 100, mpp)
        assert (beyond[60:, 60:] == 255).all()
        assert np.abs(beyond[:50, :50].astype(int) - picture[1050:1100, 1250:1300]).mean() <= error
        small, step = slide.thumbnail(325)
        mean = np.asarray(Image.fromarray(picture).resize((325, 275), Image.Resampling.BOX)).astype(int)
        assert step == 4.0 and np.abs(small - mean).mean() <= error + 1.5


def test_a_file_is_identified_by_its_content(picture, tmp_path):
    path = png(tmp_path, picture).rename(tmp_path / "a.svs")
    with Slide(path) as slide:
        assert slide.vendor == "plain picture" and slide.size_l0 == (1300, 1100)
    (tmp_path / "b.png").write_text("no picture")
    refused(lambda: Slide(tmp_path / "b.png"), "b.png", "not a slide format that is known here")
    refused(lambda: Slide(path, reader="native"), "cannot read level 0", "use auto")


@pytest.mark.parametrize("form", ["png", "jpeg", "tiff", "ome-tiff", "czi"])
def test_a_truncated_file_is_refused_in_one_line_without_wrong_pixels(form, picture, tmp_path):
    path = WRITERS[form](tmp_path, picture)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def read():
        with Slide(path, MPP) as slide:
            slide.read((1000, 850), 200, MPP)

    refused(read, path.name)


@pytest.mark.parametrize(
    ("form", "module", "extra"),
    [("ome-tiff strips", "zarr", "formats"), ("ome-zarr 0.5", "zarr", "formats"), ("czi", "pylibCZIrw.czi", "czi")],
)
def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, picture, tmp_path, form, module, extra):
    path = WRITERS[form](tmp_path, picture)
    without(monkeypatch, module)
    refused(lambda: Slide(path), path.name, explain_missing(extra), error=UsageError)


def without(monkeypatch, module):
    def importing(name):
        if name == module:
            raise ModuleNotFoundError(name=name)
        return import_module(name)

    monkeypatch.setattr(source, "import_module", importing)


def test_isyntax_is_read_by_its_library(monkeypatch, picture, tmp_path):
    """By a stand-in: there is no writer of iSyntax."""

    class ISyntax:
        level_dimensions = ((1300, 1100), (650, 550), (325, 275))
        mpp_x = mpp_y = MPP

        @staticmethod
        def open(path):
            return ISyntax()

        def read_region(self, x, y, width, height, level):
            alpha = np.full((height, width, 1), 255, np.uint8)
            return np.concatenate([halves(picture)[level][y : y + height, x : x + width], alpha], 2)

        def close(self):
            pass

    path = tmp_path / "a.isyntax"
    path.write_bytes(b'<?xml version="1.0"?>\n<DataObject ObjectType="DPUfsImport">\n')
    without(monkeypatch, "isyntax")
    refused(lambda: Slide(path), "a.isyntax", "wsi-fl[isyntax]", error=UsageError)
    monkeypatch.setattr(source, "import_module", lambda name: SimpleNamespace(ISyntax=ISyntax))
    with Slide(path) as slide:
        assert (slide.size_l0, slide.mpp, slide.vendor) == ((1300, 1100), MPP, "philips isyntax")
        np.testing.assert_array_equal(slide.read((400, 300), 128, MPP), picture[300:428, 400:528])


@pytest.mark.skipif(not DICOM.exists(), reason="the material beside the project is not there")
def test_parts_of_a_dicom_concatenation_are_read_together_and_a_single_part_is_named(tmp_path):
    whole = DICOM.read_bytes()

    def part(number):
        at = whole.find(b"\x28\x00\x02\x00US\x02\x00")
        said = struct.pack("<HH2sH8s", 0x20, 0x9161, b"UI", 8, b"1.2.3.4\0")
        for tag, kind, n_bytes, form, value in (
            (0x9162, b"US", 2, "H", number),
            (0x9163, b"US", 2, "H", 2),
            (0x9228, b"UL", 4, "I", number - 1),
        ):
            said += struct.pack(f"<HH2sH{form}", 0x20, tag, kind, n_bytes, value)
        uid = whole.find(b"\x08\x00\x18\x00UI") + 8
        name = whole[uid : uid + struct.unpack_from("<H", whole, uid - 2)[0]].rstrip(b"\0")
        return (whole[:at] + said + whole[at:]).replace(name, name[:-1] + str(number).encode())

    (tmp_path / "a.dcm").write_bytes(part(1))
    for path in (tmp_path / "a.dcm", tmp_path):
        refused(partial(Slide, path), "a.dcm", "DICOM concatenation", "one folder")
    (tmp_path / "b.dcm").write_bytes(part(2))
    with Slide(tmp_path) as slide:
        assert slide.vendor == "dicom"


@pytest.mark.parametrize("write", [png, strips])
def test_a_plain_picture_too_large_for_memory_is_refused_before_it_is_decoded(monkeypatch, picture, tmp_path, write):
    monkeypatch.setattr("wsi_fl.slides.reading.formats.plain_pictures._MAX_PX", 1 << 20)
    path = write(tmp_path, picture)
    refused(lambda: Slide(path), path.name, "up to 1 million", "tiled pyramid")


def save_picture(picture, name, **how):
    """Saved by Pillow."""
    return lambda folder: picture.save(folder / name, **how) or folder / name


def write_gray_tiff(pixels, **how):
    return lambda folder: tifffile.imwrite(folder / "a.tif", pixels, **how) or folder / "a.tif"


@pytest.fixture(scope="module")
def unlike(picture):
    """Return {description: (writer, the intended picture)}."""
    image, turn = Image.fromarray(picture), Image.Exif()
    palette, cmyk = image.quantize(64), image.convert("CMYK")
    turn[0x112] = 6  # to be turned clockwise
    opaque = (np.arange(1300) >= 600)[None].repeat(1100, 0)[..., None]
    clear = np.concatenate([picture * opaque, opaque * 255], 2).astype(np.uint8)
    return {
        "palette": (save_picture(palette, "a.tif"), np.asarray(palette.convert("RGB"))),
        "cmyk": (save_picture(cmyk, "a.tif"), np.asarray(cmyk.convert("RGB"))),
        "clear tiff": (
            write_gray_tiff(clear, photometric="rgb", extrasamples=["unassalpha"]),
            np.where(opaque, picture, 255),
        ),
        "turned png": (save_picture(image, "a.png", exif=turn), np.rot90(picture, -1)),
    }


@pytest.mark.parametrize("what", ["palette", "cmyk", "clear tiff", "turned png"])
def test_a_plain_picture_is_read_with_its_intended_colors(unlike, tmp_path, what):
    write, meant = unlike[what]
    with Slide(write(tmp_path), MPP) as slide:
        assert slide.size_l0 == (meant.shape[1], meant.shape[0])
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), meant[300:700, 500:900])


def channels_ome(n, dtype=np.uint8, **channel):
    said = {"axes": "CYX", "Channel": channel} if channel else {"axes": "CYX"}
    how = {"ome": True, "metadata": said, "photometric": "minisblack", "tile": (256, 256)}
    return write_gray_tiff(np.zeros((n, 600, 600), dtype), **how)


def channels_zarr(n, **attributes):
    return lambda folder: ome_zarr("0.5", "yxc", **attributes)(folder, np.zeros((600, 600, n), np.uint8))


def channels_czi(dtype, n):
    def write(folder):
        library = pytest.importorskip("pylibCZIrw.czi")
        with library.create_czi(str(folder / "a.czi")) as writer:
            for k in range(n):
                writer.write(np.zeros((600, 600, 1), dtype), plane={"C": k})
        return folder / "a.czi"

    return write


NO_COLOURS = {
    "16-bit grey png": (save_picture(Image.new("I;16", (600, 600)), "a.png"), "more than 8 bits"),
    "16-bit tiff": (write_gray_tiff(np.zeros((600, 600, 3), np.uint16), photometric="rgb"), "16-bit RGB"),
    "16-bit grey tiff": (write_gray_tiff(np.zeros((600, 600), np.uint16)), "more than 8 bits"),
    "bilevel tiff": (save_picture(Image.new("1", (600, 600)), "a.tif"), "black and white alone"),
    "ome-tiff of 2 channels": (channels_ome(2), "MINISBLACK"),
    "ome-tiff of 4 channels": (channels_ome(4), "axes CYX"),
    "ome-tiff of named stains": (channels_ome(3, Name=["DAPI", "FITC", "TRITC"]), "channels DAPI, FITC, TRITC"),
    "ome-tiff of other colours": (
        channels_ome(3, Color=[65535, 16711935, -16776961]),  # blue, green, red
        "axes CYX",
    ),
    "ome-tiff of blue first": (channels_ome(3, Name=["Blue", "Green", "Red"]), "channels Blue, Green, Red"),
    "16-bit ome-tiff of 3 channels": (channels_ome(3, np.uint16), "1 × uint16"),
    "16-bit ome-tiff": (
        write_gray_tiff(np.zeros((600, 600, 3), np.uint16), ome=True, photometric="rgb", tile=(256, 256)),
        "3 × uint16",
    ),
    "ome-zarr of 4 channels": (channels_zarr(4), "three channels"),
    "ome-zarr of other colours": (
        channels_zarr(3, omero={"channels": [{"color": c} for c in ("0000FF", "00ff00", "FF0000")]}),
        "0000FF, 00FF00, FF0000",
    ),
    "ome-zarr of named stains": (
        channels_zarr(3, omero={"channels": [{"label": name} for name in ("DAPI", "FITC", "TRITC")]}),
        "DAPI, FITC, TRITC",
    ),
    "16-bit czi": (channels_czi(np.uint16, 1), "Gray16"),
    "czi of 2 channels": (channels_czi(np.uint8, 2), "2 channel(s) of Gray8"),
}


@pytest.mark.parametrize("what", NO_COLOURS)
def test_pixels_without_colors_are_refused(tmp_path, what):
    write, words = NO_COLOURS[what]
    path = write(tmp_path)
    refused(lambda: Slide(path, MPP), path.name, "a slide has", words)
    assert path.resolve() not in {one.resolve() for one in Path("/proc/self/fd").iterdir()}


@needs_formats
def test_the_slide_of_an_ome_tiff_is_its_largest_picture(picture, tmp_path):
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as tif:
        for pixels, mpp in ((picture[:300, :200], 8.0), (picture, MPP)):
            said = {"axes": "YXS", "PhysicalSizeX": mpp, "PhysicalSizeY": mpp}
            tif.write(np.ascontiguousarray(pixels), metadata=said, photometric="rgb", tile=(128, 128))
    with Slide(path) as slide:
        assert slide.size_l0 == (1300, 1100) and slide.mpp == MPP
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), picture[300:700, 500:900])


@pytest.mark.parametrize("bits", [12, 14, 16, None])
def test_a_czi_of_16_bits_is_read_by_the_bits_that_it_uses(picture, tmp_path, bits):
    library = pytest.importorskip("pylibCZIrw.czi")
    path = tmp_path / "a.czi"
    deep = picture[..., ::-1].astype(np.uint16) << ((bits or 16) - 8)
    with library.create_czi(str(path)) as writer:
        writer.write(np.ascontiguousarray(deep))
        writer.write_metadata("a", scale_x=MPP * 1e-6, scale_y=MPP * 1e-6)
    if bits is None:
        refused(lambda: Slide(path), "a.czi", "Bgr48", "how many of its 16 bits", "8 bits")
        return
    content = path.read_bytes()
    start = content.index(b"<SizeT>")
    end = content.index(b"</SizeM>") + len(b"</SizeM>")
    said = f"<ComponentBitCount>{bits}</ComponentBitCount>".encode().ljust(end - start)
    path.write_bytes(content[:start] + said + content[end:])
    with Slide(path) as slide:
        np.testing.assert_array_equal(slide.read((500, 300), 400, MPP), picture[300:700, 500:900])
        beyond = slide.read((1250, 1050), 100, MPP)
        assert (beyond[60:, 60:] == 255).all()


def test_openslide_reads_no_czi_of_16_bits_that_uses_fewer():
    """The properties are replaced: no library here writes a CZI for OpenSlide."""
    said = {"zeiss.Information.Image.PixelType": "Bgr48", "zeiss.Information.Image.ComponentBitCount": "14"}
    assert wastes_bits(said) and wastes_bits({**said, "zeiss.Information.Image.ComponentBitCount": ""})
    assert not wastes_bits({**said, "zeiss.Information.Image.ComponentBitCount": "16"})
    assert not wastes_bits({**said, "zeiss.Information.Image.PixelType": "Bgr24"}) and not wastes_bits({})
