"""Decoders of the tiles of a slide by TIFF's number of their compression; another codec is a row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system import jpeg
from wsi_fl.types import WsiFlError, single_line

if TYPE_CHECKING:
    from tifffile import TiffPage

_RGB, _YCBCR = 2, 6
"""Numbers of the tag PhotometricInterpretation."""
_JPEG, _JPEG2000_YCBCR, _JPEG2000_RGB, _JPEG2000 = 7, 33003, 33005, 34712
"""The last JPEG 2000 is that of libtiff and tifffile, the others are Aperio's."""
_NO_CODEC = 1
_DICOM_CODECS = {
    "1.2.840.10008.1.2.1": _NO_CODEC,
    "1.2.840.10008.1.2.4.50": _JPEG,
    "1.2.840.10008.1.2.4.90": _JPEG2000_RGB,
    "1.2.840.10008.1.2.4.91": _JPEG2000_RGB,
}
"""TIFF's number of the codec by DICOM's transfer syntax; JPEG 2000 itself transforms colours, if they are."""
_BYTE_DECODERS = {
    5: "lzw_decode",
    8: "deflate_decode",
    32946: "deflate_decode",
    32773: "packbits_decode",
    50000: "zstd_decode",
}
"""Functions of imagecodecs that write the bytes of a tile into memory of its size."""
_JPEG2000_CODECS = (_JPEG2000_YCBCR, _JPEG2000_RGB, _JPEG2000)
_PICTURE_CODECS = (_JPEG, *_JPEG2000_CODECS)
_NO_PREDICTOR, _DIFFERENCES = 1, 2
_EXCESS = 4
_CODESTREAM_START, _SIZES, _CHROMA_STEPS = b"\xff\x4f\xff\x51", slice(8, 40), slice(46, 48)
"""Markers at the start of a JPEG 2000 codestream (ISO/IEC 15444-1, A.5.1), and the places of sizes and offsets of the
picture and of its tiles, eight numbers of four bytes, and of the steps between samples of its second component."""
_CHROMA = np.arange(256) - 128
_RED_OF_CR, _BLUE_OF_CB, _GREEN_OF_CB, _GREEN_OF_CR = (
    np.round(factor * 65536 * _CHROMA).astype(np.int32) for factor in (1.402, 1.772, -0.34414, -0.71414)
)
"""Addends to Y times 2¹⁶ (JFIF 1.02), rounded as OpenSlide does."""
_HALF = 1 << 15


@dataclass(frozen=True)
class TileCodec:
    """The codec of all tiles of a directory, which have 8-bit colours."""

    compression: int
    """TIFF's number."""
    is_rgb: bool
    """Whether components of JPEG are red, green and blue instead of YCbCr."""
    jpeg_tables: bytes = b""
    """JPEG tables of all tiles, or b""."""
    has_differences: bool = False
    """Whether the bytes are differences to the pixel on the left."""

    @property
    def is_jpeg(self) -> bool:
        return self.compression == _JPEG

    @property
    def is_uncompressed(self) -> bool:
        return self.compression == _NO_CODEC and not self.has_differences

    @property
    def is_jpeg2000(self) -> bool:
        return self.compression in _JPEG2000_CODECS

    def complete_jpeg(self, stream: jpeg.Stream) -> jpeg.Stream:
        """Return a self-contained JPEG stream from that of a tile."""
        return jpeg.complete_stream(stream, self.jpeg_tables, rgb=self.is_rgb)

    def decode_tile(self, stream: jpeg.Stream, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill `out` uint8[h, w, 3], contiguous, with the pixels of a tile, and return it.

        Raises:
            WsiFlError: for a damaged stream, or a picture of another size.
        """
        if self.is_jpeg:
            return jpeg.decode(self.complete_jpeg(stream), out)
        try:
            if self.is_jpeg2000:
                self._decode_jpeg2000(stream, out)
            else:
                self._decode_bytes(stream, out)
        except (RuntimeError, ValueError) as error:
            raise WsiFlError(f"unusable tile: {single_line(error)}") from None
        return out

    def _decode_bytes(self, stream: jpeg.Stream, out: NDArray[np.uint8]) -> None:
        import imagecodecs

        target = out.reshape(-1)
        if self.compression == _NO_CODEC:
            target[:] = np.frombuffer(stream, np.uint8, target.size)
        else:
            decode_bytes = getattr(imagecodecs, _BYTE_DECODERS[self.compression])
            try:
                decoded = decode_bytes(stream, out=target)
            except RuntimeError:  # perhaps more bytes than the tile's, which count for nothing
                decoded = decode_bytes(stream, out=np.empty(_EXCESS * target.size, np.uint8))[: target.size]
                target[: len(decoded)] = np.frombuffer(decoded, np.uint8)
            if len(decoded) < target.size:
                raise ValueError(f"{len(decoded)} of {target.size} bytes")
        if self.has_differences:
            imagecodecs.delta_decode(out, axis=1, out=out)

    def _decode_jpeg2000(self, stream: jpeg.Stream, out: NDArray[np.uint8]) -> None:
        import imagecodecs

        height, width, _ = out.shape
        sizes = np.frombuffer(bytes(stream[_SIZES]).ljust(32, b"\0"), ">u4").tolist()
        is_one_tile = sizes[:4] == [width, height, 0, 0] and sizes[4] >= width and sizes[5] >= height
        if stream[:4] != _CODESTREAM_START or not is_one_tile:  # before memory is taken for it
            raise ValueError(f"no JPEG 2000 picture of {width} × {height} pixels in one tile")
        imagecodecs.jpeg2k_decode(bytes(stream), out=out)
        is_subsampled = bytes(stream[_CHROMA_STEPS]) != b"\1\1"  # OpenJPEG converts such colours itself
        if self.compression == _JPEG2000_YCBCR and not is_subsampled:
            _convert_ycbcr(out)


def _convert_ycbcr(pixels: NDArray[np.uint8]) -> None:
    """Replace the Y, Cb and Cr of pixels uint8[h, w, 3] by red, green and blue."""
    y, cb, cr = (np.ascontiguousarray(pixels[..., k]) for k in range(3))
    addends = (_RED_OF_CR[cr], _GREEN_OF_CB[cb] + _GREEN_OF_CR[cr], _BLUE_OF_CB[cb])
    for k, addend in enumerate(addends):
        pixels[..., k] = np.clip(y + ((addend + _HALF) >> 16), 0, 255)


def _read_orientation(page: TiffPage) -> int:
    tag = page.tags.get("Orientation")
    return 1 if tag is None else int(tag.value)


def find_codec(page: TiffPage) -> TileCodec | None:
    """Return the codec of a directory's tiles; None without tiles of 8-bit colours that are decoded here."""
    photometrics = {_RGB, _YCBCR} if page.compression in _PICTURE_CODECS else {_RGB}
    is_in_order = page.compression == _JPEG or (page.fillorder == 1 and _read_orientation(page) == 1)
    is_tiled_picture = (
        page.is_tiled
        and is_in_order
        and min(page.imagewidth, page.imagelength, page.tilewidth, page.tilelength) > 0
        and page.compression in {_NO_CODEC, *_BYTE_DECODERS, *_PICTURE_CODECS}
        and page.photometric in photometrics
        and page.samplesperpixel == 3
        and page.bitspersample == 8
        and page.planarconfig == 1
        and page.imagedepth == 1
        and page.predictor in {_NO_PREDICTOR, _DIFFERENCES}
    )
    if not is_tiled_picture:
        return None
    return TileCodec(
        int(page.compression), page.photometric == _RGB, page.jpegtables or b"", page.predictor == _DIFFERENCES
    )


def find_dicom_codec(syntax: str, colors: str) -> TileCodec | None:
    """Return the codec of a DICOM file's frames, given transfer syntax and photometric interpretation, or None."""
    number = _DICOM_CODECS.get(syntax)
    return None if number is None else TileCodec(number, is_rgb=colors == "RGB")
