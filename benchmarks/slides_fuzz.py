"""Damaged slides: what a header or a tile says is changed, and the slide is looked at and read as `tile` does.

python benchmarks/slides_fuzz.py --files 200 --seed 1 [--slides FOLDER]

A file is well where it is refused in one line, or gives the pixels of the sound slide, or those that OpenSlide itself
gives for the damaged file (then nobody can tell). Each is read in a process of its own. Other slides may be added.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attacks import mutations
from attacks.running import own_bytes
from numpy.typing import NDArray

from wsi_fl.demo import phantom
from wsi_fl.slides.choosing.patches import PlanParams, plan_slide, read_patches
from wsi_fl.slides.reading.probe import vouch_for
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

    picture = phantom.paint_slide(phantom.plan_slides(1, 1, 1024, 0)[0])
    folder.mkdir(parents=True, exist_ok=True)
    phantom.write_pyramid(folder / "jpeg.tif", picture, 0.5)
    for name in ("none", "deflate"):
        with tifffile.TiffWriter(folder / f"{name}.tif", bigtiff=name == "none") as tif:
            how = {
                "tile": (256, 256),
                "photometric": "rgb",
                "compression": name,
                "resolutionunit": "CENTIMETER",
            }
            for level in range(3):
                step = 2**level
                small = np.ascontiguousarray(picture[::step, ::step])
                tif.write(small, resolution=(20_000 / step, 20_000 / step), subfiletype=int(level > 0), **how)
    return sorted(folder.glob("*.tif"))


def damaged(path: Path, rng: random.Random) -> bytes:
    """Return a slide's bytes with a field of its header, or a few bytes anywhere, changed."""
    data = path.read_bytes()
    change: Callable[[bytes, random.Random], bytes] = mutations.tiff if rng.random() < 0.7 else mutations.blob
    return change(data, rng)


def pixels_of(path: Path) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """Return the patches that `tile` keeps of a slide, by their corner."""
    record = SlideRecord(path, path.stem, "p", "C1", "negative", False)
    vouch_for(path)
    plan = plan_slide(record, _SPEC, PlanParams())
    aside: dict[int, str] = {}
    batches = [batch for _, batch in read_patches(record, plan.xy_l0, _SPEC, threads=2, aside=aside)]
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
    with Slide(path, reader="openslide") as slide:
        for at in other[:40]:
            if _differ(slide.read(at, _SPEC.size_px, _SPEC.mpp), found[at]):
                return f"WRONG: pixels at {at}"
    return "untold"


def _differ(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    return bool(np.abs(one.astype(int) - other).mean() > _MOST_DIFFERENT)


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
        hurt.write_bytes(damaged(path, rng))
        end = attempt(hurt, sound[path])
        ends[end.split(":", maxsplit=1)[0]] += 1
        if end.startswith("WRONG"):
            print(f"{hurt.name}: {end}", file=sys.stderr, flush=True)
        else:
            hurt.unlink()
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
