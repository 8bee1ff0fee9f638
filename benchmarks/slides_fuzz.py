"""Damaged slides of all formats: what a header or a tile says is changed, and the slide is read as `tile` does.

python benchmarks/slides_fuzz.py --files 200 --seed 1 [--slides FOLDER]

A file is well where it is refused in one line, or gives the pixels of the sound slide, or those that OpenSlide itself,
or the library of its format, gives for the damaged file (then nobody can tell). Each is read in a process of its own.
Other slides may be added.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openslide
from attacks import mutations
from attacks.running import own_bytes
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.demo import simulated_slides
from wsi_fl.slides.patching.slide_plan import PlanParams, plan_slide
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

SECONDS, BYTES = 60.0, 2 << 30
_SPEC = GridSpec(64, 1.0, 64)
_MOST_DIFFERENT = 3.0
"""Grey levels on average; other places of a slide differ by many more."""
_ENDS = ("same", "refused", "untold", "WRONG")


def written(folder: Path) -> list[Path]:
    """Write a sound slide in each way that can be written here."""
    import tifffile

    picture = simulated_slides.simulate_slide(simulated_slides.plan_slides(1, 1, 1024, 0)[0])
    folder.mkdir(parents=True, exist_ok=True)
    simulated_slides.write_pyramid(folder / "jpeg.tif", picture, 0.5)
    for name in ("none", "deflate"):
        with tifffile.TiffWriter(folder / f"{name}.tif", bigtiff=name == "none") as tif:
            how = {"tile": (256, 256), "photometric": "rgb", "compression": name, "resolutionunit": "CENTIMETER"}
            for level in range(3):
                step = 2**level
                small = np.ascontiguousarray(picture[::step, ::step])
                tif.write(small, resolution=(20_000 / step, 20_000 / step), subfiletype=int(level > 0), **how)
    _write_others(folder, np.ascontiguousarray(picture[::2, ::2]))
    return sorted(path for path in folder.iterdir())


def _write_others(folder: Path, picture: NDArray[np.uint8]) -> None:
    """Write what OpenSlide does not read, uint8[h, w, 3] of 1 µm per pixel, without a pyramid."""
    import tifffile
    import zarr
    from pylibCZIrw import czi

    for name in ("a.png", "a.jpg"):
        Image.fromarray(picture).save(folder / name, dpi=(25_400, 25_400), quality=95)
    said = {"axes": "YXS", "PhysicalSizeX": 1.0, "PhysicalSizeY": 1.0}
    how = {"photometric": "rgb", "tile": (256, 256), "compression": "deflate"}
    tifffile.imwrite(folder / "a.ome.tif", picture, ome=True, metadata=said, **how)
    with czi.create_czi(str(folder / "a.czi")) as writer:
        writer.write(np.ascontiguousarray(picture[..., ::-1]))
        writer.write_metadata("a", scale_x=1e-6, scale_y=1e-6)
    group = zarr.open_group(str(folder / "a.zarr"), mode="w", zarr_format=3)
    planes = np.moveaxis(picture, 2, 0)
    group.create_array("0", shape=planes.shape, chunks=(3, 256, 256), dtype="uint8")[...] = planes
    axes: list[Any] = [{"name": "c", "type": "channel"}]
    axes += [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "yx"]
    level: Any = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"version": "0.5", "axes": axes, "datasets": [level]}]}


def decoded(path: Path) -> NDArray[np.uint8]:
    """Return the picture that the library of a format gives, uint8[h, w, 3]."""
    import tifffile
    import zarr
    from pylibCZIrw import czi

    if path.suffix == ".zarr":
        return np.moveaxis(np.asarray(zarr.open_array(str(path / "0"), mode="r")[...]), 0, 2)
    if path.suffix == ".czi":
        with czi.open_czi(str(path)) as document:
            return np.asarray(document.read()[..., ::-1])
    if path.suffix == ".tif":
        with tifffile.TiffFile(path) as tif:  # later pages may be beyond what it reads
            return np.asarray(tif.pages[0].asarray())
    return np.asarray(Image.open(path).convert("RGB"))


def damage(path: Path, rng: random.Random) -> None:
    """Change a field of a slide's header, or a few bytes anywhere; of a folder, in one of its files."""
    if path.is_dir():
        path = rng.choice(sorted(one for one in path.rglob("*") if one.is_file()))
    headed = path.suffix in {".tif", ".tiff", ".svs"} and rng.random() < 0.7
    change: Callable[[bytes, random.Random], bytes] = mutations.tiff if headed else mutations.blob
    path.write_bytes(change(path.read_bytes(), rng))


def pixels_of(path: Path) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """Return the patches that `tile` keeps of a slide, by their corner."""
    record = SlideRecord(path, path.stem, "p", "C1", "negative", False)
    check_opens_safely(path)
    plan = plan_slide(record, _SPEC, PlanParams())
    aside: dict[int, str] = {}
    batches = [batch for _, batch in read_patches(record, plan.xy_l0, _SPEC, threads=2, excluded=aside)]
    rows = [row for row in range(len(plan.xy_l0)) if row not in aside]
    return {
        (int(x), int(y)): patch
        for (x, y), patch in zip(plan.xy_l0[rows], (one for batch in batches for one in batch), strict=True)
    }


def judged(path: Path, sound: dict[tuple[int, int], NDArray[np.uint8]]) -> str:
    """Return how reading a damaged slide ends."""
    try:
        found = pixels_of(path)
    except WsiFlError as error:
        return "WRONG: refused in several lines" if "\n" in str(error) else "refused"
    other = [at for at, patch in found.items() if at not in sound or _differ(patch, sound[at])]
    if not other:
        return "same"
    read = _by_its_library(path)
    return next((f"WRONG: pixels at {at}" for at in other[:40] if _differ(read(at), found[at])), "untold")


def _by_its_library(path: Path) -> Callable[[tuple[int, int]], NDArray[np.uint8]]:
    """Return what gives the patch at a corner as OpenSlide, or else the library of the format, has it."""
    size = _SPEC.size_px
    try:
        openslide.OpenSlide(path).close()
    except openslide.OpenSlideError:
        with Slide(path) as own:
            picture, side = decoded(path), round(size * _SPEC.mpp / own.mpp)
        return lambda at: _scaled(picture[at[1] : at[1] + side, at[0] : at[0] + side], side, size)
    slide = Slide(path, reader="openslide")
    return lambda at: slide.read(at, size, _SPEC.mpp)


def _scaled(found: NDArray[np.uint8], side: int, size_px: int) -> NDArray[np.uint8]:
    """Return a patch at another scale; what is beyond the picture is white."""
    patch = np.full((side, side, 3), 255, np.uint8)
    patch[: found.shape[0], : found.shape[1]] = found
    return np.asarray(Image.fromarray(patch).resize((size_px, size_px), Image.Resampling.BOX))


def _differ(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    return one.shape != other.shape or bool(np.abs(one.astype(int) - other).mean() > _MOST_DIFFERENT)


def attempt(path: Path, sound: dict[tuple[int, int], NDArray[np.uint8]]) -> str:
    """Judge a slide in a process of its own, which may take neither long nor much memory."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        said = "WRONG: crash"
        try:
            said = judged(path, sound)
        except BaseException as error:
            said = f"WRONG: {type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(0)
    os.close(write)
    began, most = time.monotonic(), 0
    while not os.waitpid(pid, os.WNOHANG)[0]:
        most = max(most, own_bytes(pid))
        if time.monotonic() - began > SECONDS or most > BYTES:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(read)
            return f"WRONG: {most / 1e9:.1f} GB, {time.monotonic() - began:.0f} s"
        time.sleep(0.005)
    with os.fdopen(read) as pipe:
        return pipe.read() or "WRONG: crash"


def fuzz(folder: Path, slides: list[Path], files: int, seed: int) -> Counter[str]:
    """Damage slides in turn; print what is wrong, and return how often each end came."""
    sound = {path: pixels_of(path) for path in slides}
    ends: Counter[str] = Counter(dict.fromkeys(_ENDS, 0))
    for number in range(files):
        rng = random.Random(seed * 1_000_000 + number)
        path = slides[number % len(slides)]
        hurt = folder / f"{seed}-{number}-{path.name}"
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, hurt)
        damage(hurt, rng)
        end = attempt(hurt, sound[path])
        ends[end.split(":", maxsplit=1)[0]] += 1
        if end.startswith("WRONG"):
            print(f"{hurt.name}: {end}", file=sys.stderr, flush=True)
        elif hurt.is_dir():
            shutil.rmtree(hurt)
        else:
            hurt.unlink()
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)))
    parser.add_argument("--slides", type=Path, help="a folder of further slides, which are copied")
    parser.add_argument("--out", type=Path, help="keeps what was wrong; default: a folder that is removed")
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as passing:
        folder = args.out or Path(passing)
        slides = written(folder / "sound")
        slides += sorted(args.slides.iterdir()) if args.slides else []
        ends = fuzz(folder, slides, args.files, args.seed)
    print(json.dumps({"seed": args.seed, "files": args.files, "ends": dict(ends)}, indent=2))
    sys.exit(bool(ends["WRONG"]))


if __name__ == "__main__":
    main()
