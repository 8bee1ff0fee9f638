"""The orientation tag of a TIFF, which OpenSlide ignores."""

from __future__ import annotations

from pathlib import Path

from PIL.TiffImagePlugin import TiffImageFile

_ORIENTATION_TAG = 274


def read_orientation(path: Path) -> int:
    """Return the orientation of a TIFF's first picture, 1 to 8 (TIFF 6.0, tag 274); 1 for other files."""
    try:
        with TiffImageFile(path) as picture:
            orientation = picture.tag_v2.get(_ORIENTATION_TAG, 1)
    except (OSError, SyntaxError, TypeError, ValueError):  # Pillow's, for other files
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1
