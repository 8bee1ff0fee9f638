"""DICOM files are grouped into slides, and unsupported ones are refused by name."""

import struct
from functools import partial
from io import BytesIO

import imagecodecs
import numpy as np
import pytest
from builders import halves, refused
from dicom_files import DEFLATED, element, sequence, write_concatenation, write_dicom
from PIL import Image, ImageCms
from simplejpeg import encode_jpeg

from wsi_fl.slides.reading.formats import is_slide_folder, slide_name
from wsi_fl.slides.reading.formats.dicom_headers import is_dicom, read_header
from wsi_fl.slides.reading.reader import Slide

MPP = 0.5
PICTURE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8).repeat(8, 0).repeat(8, 1)
"""uint8[192, 256, 3]"""


def write_pyramid(folder, n=2, picture=PICTURE, prefix="", **more):
    for k, level in enumerate(halves(picture, n)):
        write_dicom(folder / f"{prefix}{k}.dcm", level, mpp=MPP * 2**k, **more)
    return folder


def test_a_folder_is_the_slide_of_its_files_and_so_is_each_of_them(tmp_path):
    folder = write_pyramid(tmp_path / "1.2.840.7", 3)
    kinds = {"LABEL": PICTURE[:64, :64], "OVERVIEW": PICTURE[:64, :128], "THUMBNAIL": PICTURE[::4, ::4]}
    for kind, picture in kinds.items():  # whose names come first
        write_dicom(folder / f"${kind}.dcm", picture, kind=f"ORIGINAL\\PRIMARY\\{kind}\\NONE")
    (folder / ".DS_Store").write_bytes(b"no slide")
    (folder / "notes.txt").write_text("no slide either")
    for path in (folder, folder / "0.dcm", folder / "2.dcm"):
        with Slide(path) as slide:
            assert (slide.size_l0, slide.level_downsamples, slide.mpp) == ((256, 192), (1, 2, 4), MPP)
            np.testing.assert_array_equal(slide.read((40, 30), 100, MPP), PICTURE[30:130, 40:140])
    assert is_slide_folder(folder) and slide_name(folder) == "1.2.840.7"
    assert not is_slide_folder(tmp_path) and slide_name(folder / "0.dcm") == "0"


def test_several_series_in_a_folder_are_named_and_each_file_is_still_a_slide(tmp_path):
    write_pyramid(tmp_path, prefix="a", series="1.2.3.80")
    write_pyramid(tmp_path, prefix="b", series="1.2.3.81", picture=255 - PICTURE)
    refused(lambda: Slide(tmp_path), "holds 2 DICOM slides", "1.2.3.80 (a0.dcm)", "1.2.3.81 (b0.dcm)")
    for name, meant in (("a1.dcm", PICTURE), ("b0.dcm", 255 - PICTURE)):
        with Slide(tmp_path / name) as slide:  # as the line says
            np.testing.assert_array_equal(slide.read((0, 0), 128, MPP), meant[:128, :128])


NATIVE = {
    "uncompressed": {},
    "JPEG": {
        "syntax": "1.2.840.10008.1.2.4.50",
        "colours": "YBR_FULL_422",
        "pack": partial(encode_jpeg, quality=90, colorspace="RGB", colorsubsampling="422"),
    },
    "JPEG 2000": {
        "syntax": "1.2.840.10008.1.2.4.90",
        "colours": "YBR_RCT",
        "pack": partial(imagecodecs.jpeg2k_encode, level=0, codecformat="j2k", mct=True),
    },
}


@pytest.mark.parametrize("table", ["none", "basic", "extended"])
@pytest.mark.parametrize("codec", NATIVE)
def test_frames_are_decoded_natively_wherever_their_places_stand(tmp_path, codec, table):
    write_pyramid(tmp_path, 3, packing={"table": table}, **NATIVE[codec])
    with Slide(tmp_path, reader="native") as mine, Slide(tmp_path, reader="openslide") as judge:
        assert (mine.reader, judge.reader) == ("native", "openslide")
        for xy, mpp in (((0, 0), MPP), ((40, 30), MPP), ((200, 150), MPP), ((64, 64), 2 * MPP), ((0, 0), 4 * MPP)):
            patches = [slide.read(xy, 64, mpp).astype(int) for slide in (mine, judge)]
            assert np.abs(patches[0] - patches[1]).max() <= (codec == "JPEG"), (xy, mpp)
        stream = mine.read_native_stream((64, 64), 64, MPP)
        assert (stream is not None) == (codec == "JPEG")


@pytest.mark.parametrize("packing", [{"n_fragments": 3}, {"n_fragments": 2, "table": "basic"}])
def test_frames_in_fragments_and_sparse_ones_are_left_to_openslide(tmp_path, packing):
    write_pyramid(tmp_path / "a", packing=packing, **NATIVE["JPEG"])
    write_dicom(tmp_path / "b" / "0.dcm", PICTURE, lacking=(5,))
    write_dicom(tmp_path / "c" / "0.dcm", PICTURE, organization="", lacking=(99,))  # places in any order, none lacks
    for folder in ("a", "b", "c"):
        with Slide(tmp_path / folder) as slide:
            assert slide.reader == "openslide"


@pytest.mark.parametrize("table", ["none", "basic", "extended"])
def test_a_damaged_frame_or_table_spoils_no_other_frame(tmp_path, table):
    path = write_dicom(tmp_path / "0.dcm", PICTURE, packing={"table": table}, **NATIVE["JPEG"])
    content = bytearray(path.read_bytes())
    start = content.rindex(b"\xff\xd8\xff")  # the last frame
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    refused(lambda: Slide(path).read((192, 128), 64, MPP), "0.dcm: cannot be read at level-0 pixel (192, 128)")
    with Slide(path) as slide:
        assert slide.read((0, 0), 64, MPP).std() > 20
    path.write_bytes(content[: start - 100])
    refused(lambda: Slide(path).read((192, 128), 64, MPP), "0.dcm")


OTHER = 255 - PICTURE
PYRAMIDS = {
    "by their UID": (halves(PICTURE)[1], {"pyramid": "1.2.9.2"}),
    "by their shape": (OTHER[:128, :128], {}),
    "of one shape": (OTHER, {}),
}


@pytest.mark.parametrize("how", PYRAMIDS)
def test_two_pyramids_of_one_series_are_distinguished(tmp_path, how):
    picture, more = PYRAMIDS[how]
    write_dicom(tmp_path / "first.dcm", PICTURE, pyramid="1.2.9.1" if more else "")
    write_dicom(tmp_path / "second.dcm", picture, **more)
    for path in (tmp_path, tmp_path / "first.dcm", tmp_path / "second.dcm"):
        refused(lambda path=path: Slide(path), "several pyramids", "first.dcm (256 × 192)", "second.dcm")


REFUSED = {
    "HTJ2K": {"syntax": "1.2.840.10008.1.2.4.201"},
    "JPEG-LS": {"syntax": "1.2.840.10008.1.2.4.80"},
    "RLE": {"syntax": "1.2.840.10008.1.2.5"},
    "JPEG XL": {"syntax": "1.2.840.10008.1.2.4.110"},
    "a deflated file": {"syntax": DEFLATED},
    "2 optical paths": {"paths": 2},
    "3 focal planes": {"planes": 3},
    "16-bit MONOCHROME2": {"samples": 1, "bits": 16, "colours": "MONOCHROME2"},
    "YBR_FULL": {"colours": "YBR_FULL"},
    "RGB in planes": {"planar": 1},
    "8-bit YBR_PARTIAL_420": {"colours": "YBR_PARTIAL_420", "syntax": "1.2.840.10008.1.2.4.50"},
    "8-bit YBR_ICT": {"colours": "YBR_ICT", "syntax": "1.2.840.10008.1.2.4.90"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_dicom_that_openslide_cannot_read_is_refused_by_name(tmp_path, what):
    write_dicom(tmp_path / "a.dcm", PICTURE, **REFUSED[what])
    for path in (tmp_path, tmp_path / "a.dcm"):
        refused(lambda path=path: Slide(path, MPP), "a.dcm", what)


JPEG, JPEG_2000 = "1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.91"


def jpeg(tile):
    """Return a stream of YCbCr by its JFIF segment."""
    return encode_jpeg(np.ascontiguousarray(tile), quality=98, colorsubsampling="444")


def adobe_rgb(tile):
    """Return a stream of RGB by Adobe's segment; only its header is right."""
    return b"\xff\xd8\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\0" + jpeg(tile)[2:]


def rgb_by_name(tile):
    """Return a stream without segments, of RGB by its components' names."""
    stream = jpeg(tile)
    stream = b"\xff\xd8" + stream[4 + int.from_bytes(stream[4:6], "big") :]
    at = stream.index(b"\xff\xc0") + 10
    return stream[:at] + b"R" + stream[at + 1 : at + 3] + b"G" + stream[at + 4 : at + 6] + b"B" + stream[at + 7 :]


def rgb_by_header(tile):
    """Return a stream of RGB that does not say so, as many slides of Aperio have."""
    with BytesIO() as file:
        Image.fromarray(np.ascontiguousarray(tile)).save(file, "JPEG", quality=98, keep_rgb=True)
        stream = file.getvalue()
    at = stream.index(b"Adobe") - 4
    stream = stream[:at] + stream[at + 16 :]
    for marker, first, step in ((b"\xff\xc0", 10, 3), (b"\xff\xda", 5, 2)):
        for k in range(3):
            at = stream.index(marker) + first + step * k
            stream = stream[:at] + bytes([k + 1]) + stream[at + 1 :]
    return stream


def jpeg_2000(tile, mct=False):
    encode = imagecodecs.jpeg2k_encode
    return bytes(encode(np.ascontiguousarray(tile), level=0, reversible=True, codecformat="j2k", mct=mct))


LIES = {
    "RGB of YCbCr": ("RGB", JPEG, jpeg, "first frame holds YCbCr"),
    "YCbCr of RGB": ("YBR_FULL_422", JPEG, adobe_rgb, "first frame holds RGB"),
    "YCbCr of RGB by name": ("YBR_FULL_422", JPEG, rgb_by_name, "first frame holds RGB"),
    "transformed of not": ("YBR_ICT", JPEG_2000, jpeg_2000, "that it did not transform"),
    "reversibly of not": ("YBR_RCT", JPEG_2000, jpeg_2000, "that it did not transform"),
}


@pytest.mark.parametrize("how", LIES)
def test_a_header_that_contradicts_the_colors_of_its_frames_is_refused(tmp_path, how):
    colours, syntax, pack, what = LIES[how]
    write_dicom(tmp_path / "a.dcm", PICTURE, colours=colours, syntax=syntax, pack=pack)
    refused(lambda: Slide(tmp_path, MPP), "a.dcm", f"header states {colours}", what)


TRUTHS = {
    "YCbCr": ("YBR_FULL_422", JPEG, jpeg),
    "RGB by its header alone": ("RGB", JPEG, rgb_by_header),
    "RGB": ("RGB", JPEG_2000, jpeg_2000),
    "transformed": ("YBR_ICT", JPEG_2000, partial(jpeg_2000, mct=True)),
    "RGB that is transformed": ("RGB", JPEG_2000, partial(jpeg_2000, mct=True)),
}


@pytest.mark.parametrize("how", TRUTHS)
def test_packed_frames_have_the_colours_of_their_picture(tmp_path, how):
    colours, syntax, pack = TRUTHS[how]
    write_dicom(tmp_path / "a.dcm", PICTURE, colours=colours, syntax=syntax, pack=pack)
    with Slide(tmp_path, MPP) as slide:
        apart = np.abs(slide.read((0, 0), 192, MPP).astype(int) - PICTURE[:, :192])
    assert apart.mean() < 4


@pytest.mark.parametrize("lacking", [(), (2,)])
def test_a_concatenation_is_read_with_the_levels_and_pictures_beside_it(tmp_path, lacking):
    write_concatenation(tmp_path, PICTURE, (0, 5, 7, 12 - len(lacking)), lacking=lacking)
    (tmp_path / "0.dcm").rename(tmp_path / "z.dcm")  # the order of names is of no account
    write_dicom(tmp_path / "level.dcm", halves(PICTURE)[1], mpp=2 * MPP)
    write_dicom(tmp_path / "label.dcm", PICTURE[:64, :64], kind="ORIGINAL\\PRIMARY\\LABEL\\NONE")
    for path in (tmp_path, tmp_path / "2.dcm"):
        with Slide(path) as slide:
            assert (slide.size_l0, slide.level_downsamples, slide.mpp) == ((256, 192), (1, 2), MPP)
            np.testing.assert_array_equal(slide.read((0, 64), 128, MPP), PICTURE[64:192, :128])
            np.testing.assert_array_equal(slide.read((0, 0), 96, 2 * MPP), halves(PICTURE)[1][:96, :96])


MISSING = {
    "the first": ((0,), {}, "lacks its frames 1 to 4;"),
    "one between": ((1,), {}, "lacks its frames 5 to 8;"),
    "the last": ((2,), {}, "lacks its frames 9 to 12;"),
    "all but one": ((0, 2), {}, "lacks its frames 1 to 4;"),
    "the last of sparse tiles": ((2,), {"lacking": (11,), "parts": 3}, "lacks 1 of its 3 files;"),
    "the last, beside another level": ((2,), {"level": True}, "lacks its frames 9 to 12;"),
}


@pytest.mark.parametrize("which", MISSING)
def test_a_missing_part_of_a_concatenation_is_named(tmp_path, which):
    """Without the last part OpenSlide shows background there."""
    missing, more, what = MISSING[which]
    if more.pop("level", False):
        write_dicom(tmp_path / "level.dcm", halves(PICTURE)[1], mpp=2 * MPP)
    write_concatenation(tmp_path, PICTURE, (0, 4, 8, 12), missing=missing, **more)
    refused(lambda: Slide(tmp_path), "a DICOM concatenation that", what, "download the series again")


@pytest.mark.parametrize(("numbers", "downsamples"), [((0, 2), (1, 4)), ((1, 2), (1, 2))])
def test_levels_that_are_missing_are_done_without(tmp_path, numbers, downsamples):
    for k in numbers:
        write_dicom(tmp_path / f"{k}.dcm", halves(PICTURE, 3)[k], mpp=MPP * 2**k)
    finest = halves(PICTURE, 3)[numbers[0]]
    with Slide(tmp_path) as slide:
        assert (slide.size_l0, slide.level_downsamples) == (finest.shape[1::-1], downsamples)
        assert slide.mpp == MPP * 2 ** numbers[0]
        np.testing.assert_array_equal(slide.read((10, 20), 64, slide.mpp), finest[20:84, 10:74])


def test_a_colour_profile_is_not_applied(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    profile += b"\0" * (len(profile) % 2)
    path = write_dicom(tmp_path / "a.dcm", PICTURE)
    before, paths, after = path.read_bytes().partition(struct.pack("<HH2s", 0x0048, 0x0302, b"UL"))
    path.write_bytes(before + sequence(0x00480105, element(0x00282000, "OB", profile)) + paths + after)
    with Slide(tmp_path) as slide:
        assert read_header(path).paths == 1
        np.testing.assert_array_equal(slide.read((0, 0), 100, MPP), PICTURE[:100, :100])


def test_a_concatenation_of_one_file_is_named(tmp_path):
    write_concatenation(tmp_path, PICTURE, (0, 12))
    refused(lambda: Slide(tmp_path), "0.dcm: the only file of a DICOM concatenation", "ConcatenationUID")


def test_two_copies_of_a_file_are_named(tmp_path):
    """A second download of a series may lay the later version of a file beside the earlier."""
    for name in ("a.dcm", "b.dcm"):
        write_dicom(tmp_path / name, PICTURE, instance="1.2.3.9")
    refused(lambda: Slide(tmp_path), "a.dcm (256 × 192) and b.dcm (256 × 192) are two copies", "delete one")


@pytest.mark.parametrize("frames", ["many", "1e999", "nan", ""])
def test_a_count_of_frames_that_is_no_number_counts_none(tmp_path, frames):
    path = write_dicom(tmp_path / "a.dcm", PICTURE, frames=frames)
    assert read_header(path).frames == 0


@pytest.mark.parametrize("head", [bytes(8), b"II*\0\x08\0\0\0"])
def test_a_dicom_file_that_is_no_slide_is_named(tmp_path, head):
    """Some of the files begin like a TIFF."""
    path = write_dicom(tmp_path / "ct.dcm", PICTURE)
    path.write_bytes(head + path.read_bytes()[8:].replace(b"1.1.77.1.6", b"1.1.77.1.4"))  # a photograph
    refused(lambda: Slide(path), "ct.dcm: a DICOM file, but no whole-slide image")


@pytest.mark.parametrize("n", [132, 200, 400])
def test_a_truncated_header_gives_no_metadata_and_no_error(tmp_path, n):
    whole = write_dicom(tmp_path / "a.dcm", PICTURE)
    assert read_header(whole).series == "1.2.3.2" and is_dicom(whole)
    whole.write_bytes(whole.read_bytes()[:n])
    assert read_header(whole) is None
    refused(lambda: Slide(tmp_path), "without DICOM slide files")
    refused(lambda: Slide(whole), "a.dcm")


NOTE = element(0x00080100, "SH", "P1")
SEQUENCES = {
    "of one item": sequence(0x00400560, NOTE),
    "of several items": sequence(0x00400560, NOTE, NOTE),
    "without items": sequence(0x00400560),
    "in a sequence": sequence(0x00400560, sequence(0x00400612, NOTE, NOTE) + NOTE),
    "of an item of known length": sequence(0x00400560, NOTE).replace(
        bytes.fromhex("feff00e0ffffffff") + NOTE + bytes.fromhex("feff0de000000000"),
        struct.pack("<HHI", 0xFFFE, 0xE000, len(NOTE)) + NOTE,
    ),
}


@pytest.mark.parametrize("how", SEQUENCES)
def test_a_sequence_of_undefined_length_hides_no_attribute_after_it(tmp_path, how):
    """Some files describe the specimen so, before the size of the slide."""
    path = write_dicom(tmp_path / "a.dcm", PICTURE)
    before, width, after = path.read_bytes().partition(struct.pack("<HH2s", 0x0048, 6, b"UL"))
    path.write_bytes(before + SEQUENCES[how] + width + after)
    header = read_header(path)
    assert header is not None and (header.width, header.height, header.spacing) == (256, 192, MPP / 1000)
    with Slide(tmp_path) as slide:
        np.testing.assert_array_equal(slide.read((0, 0), 100, MPP), PICTURE[:100, :100])


def test_a_sparse_slide_has_background_where_nothing_was_scanned(tmp_path):
    write_dicom(tmp_path / "a.dcm", PICTURE, lacking=(5,))
    with Slide(tmp_path) as slide:
        seen = slide.read((0, 0), 192, MPP)
    meant = PICTURE[:, :192].copy()
    meant[64:128, 64:128] = 255
    np.testing.assert_array_equal(seen, meant)


def test_tiles_that_level_0_of_a_sparse_slide_lacks_and_level_1_shows_are_no_background(tmp_path):
    picture = np.full((384, 512, 3), (190, 110, 170), np.uint8)
    write_dicom(tmp_path / "0.dcm", picture, lacking=(10, 11, 12))
    write_dicom(tmp_path / "1.dcm", halves(picture)[1], mpp=2 * MPP)
    with Slide(tmp_path) as slide:
        refused(lambda: slide.read((128, 64), 64, MPP), "(128, 64)", "lacks pixels")
        np.testing.assert_array_equal(slide.read((0, 0), 64, MPP), picture[:64, :64])
        assert (slide.read((128, 64), 64, 2 * MPP) == picture[0, 0]).all()


def test_frames_that_level_1_lacks_come_from_level_0(tmp_path):
    write_dicom(tmp_path / "0.dcm", PICTURE)
    write_dicom(tmp_path / "1.dcm", halves(PICTURE)[1], mpp=2 * MPP, frames="1")
    with Slide(tmp_path) as slide:
        seen = slide.read((0, 0), 90, 2 * MPP)
        assert slide.level_downsamples == (1, 2) and "its level 1 is damaged" in slide.notes[0]
        np.testing.assert_array_equal(seen, halves(PICTURE)[1][:90, :90])


def test_a_folder_of_other_files_is_no_slide(tmp_path):
    for k in range(300):
        (tmp_path / f"{k:03}.png").write_bytes(b"\x89PNG" + bytes(200))
    write_dicom(tmp_path / "zzz.dcm", PICTURE)
    assert not is_slide_folder(tmp_path)
    with Slide(tmp_path / "zzz.dcm") as slide:
        assert slide.size_l0 == (256, 192)
