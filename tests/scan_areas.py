"""Partly scanned slides: a Leica SCN, and a TIFF with missing tiles."""

import numpy as np
import tifffile

SIZE, SIDE, CORNER = (1024, 1152), 512, (384, 256)
"""Of the slide (width, height), of its square scanned area, and where that begins, in pixels of 0.5 µm."""
BOUNDS = (*CORNER, CORNER[0] + SIDE, CORNER[1] + SIDE)
_NM, _TILE = 500, 128
_RESOLUTION = {"resolution": (1e7 / _NM, 1e7 / _NM), "resolutionunit": "CENTIMETER"}
_WRITTEN = {"tile": (_TILE, _TILE), "photometric": "rgb", "metadata": None, **_RESOLUTION}


def picture(tissue=(64, 64, 448, 448)):
    """Return uint8[SIDE, SIDE, 3] of glass with tissue from (left, top) to (right, bottom)."""
    left, top, right, bottom = tissue
    pixels = np.full((SIDE, SIDE, 3), 240, np.uint8)
    grain = np.random.default_rng(0).normal(0, 20, (bottom - top, right - left, 1))
    pixels[top:bottom, left:right] = np.clip(np.array([195, 120, 175]) + grain, 0, 255).astype(np.uint8)
    return pixels


def scn(path, pixels):
    """Write a Leica SCN."""

    def image(levels, size, at):
        width, height = size
        dims = "".join(
            f'<dimension sizeX="{w}" sizeY="{h}" r="{k}" ifd="{ifd}"/>' for k, (w, h, ifd) in enumerate(levels)
        )
        view = f'sizeX="{width * _NM}" sizeY="{height * _NM}" offsetX="{at[0] * _NM}" offsetY="{at[1] * _NM}"'
        light = "<illuminationSettings><illuminationSource>brightfield</illuminationSource></illuminationSettings>"
        power = "<objectiveSettings><objective>20</objective></objectiveSettings>"
        return (
            f'<image name="i"><creationDate>2026-01-01T00:00:00.0Z</creationDate><device model="m" version="1"/>'
            f'<pixels sizeX="{levels[0][0]}" sizeY="{levels[0][1]}">{dims}</pixels><view {view}/>'
            f"<scanSettings>{power}{light}</scanSettings></image>"
        )

    sheet = f'sizeX="{SIZE[0] * _NM}" sizeY="{SIZE[1] * _NM}"'
    text = (
        '<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01">'
        f'<collection name="c" {sheet}>{image([(128, 144, 0)], SIZE, (0, 0))}'
        f"{image([(SIDE, SIDE, 1), (SIDE // 4, SIDE // 4, 2)], (SIDE, SIDE), CORNER)}</collection></scn>"
    )
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(np.full((144, 128, 3), 230, np.uint8), description=text, compression="jpeg", **_WRITTEN)
        for level in (pixels, np.ascontiguousarray(pixels[::4, ::4])):
            file.write(level, compression="jpeg", **_WRITTEN)
    return path


def full(path, pixels, around=240):
    """Write a TIFF scanned from edge to edge, with the same pixels at the same place."""
    whole = np.full((SIZE[1], SIZE[0], 3), around, np.uint8)
    left, top, right, bottom = BOUNDS
    whole[top:bottom, left:right] = pixels
    tifffile.imwrite(path, whole, **_WRITTEN)
    return path


def sparse(path, pixels):
    """Write a TIFF whose tiles around the scanned area have no bytes."""
    full(path, pixels, around=255)
    left, top, right, bottom = BOUNDS
    with tifffile.TiffFile(path, mode="r+b") as file:
        tags, across = file.pages[0].tags, SIZE[0] // _TILE
        for name in ("TileOffsets", "TileByteCounts"):
            kept = [
                value if left <= k % across * _TILE < right and top <= k // across * _TILE < bottom else 0
                for k, value in enumerate(tags[name].value)
            ]
            tags[name].overwrite(kept)
    return path
