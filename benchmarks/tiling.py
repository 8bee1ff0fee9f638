"""Tiling against what most scripts do and against the decoder's limit, on big painted slides, in one run.

python benchmarks/tiling.py [--tile-px 256 512 240] [--codecs jpeg jpeg2000 deflate] [--patches 400] [--json]

Four things are timed on the same patches: a plain OpenSlide + PIL loop that writes HDF5, the decoder alone on the
native tiles under them, `read_patches`, and `wsi-fl tile` as a process of its own. The latter's time per further slide
is that of the slides beyond four, as two are read at once and what a start costs is left out. All are patches/s.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import openslide
from big_slide import CODECS, write_big_slide, write_coded_slide
from numpy.typing import NDArray

from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide
from wsi_fl.slides.patching.slide_plan import plan_slide
from wsi_fl.slides.patching.splits import sample_rows
from wsi_fl.slides.reading.native_tiles import read_tiled_images
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.types import GridSpec, SlideRecord

MPP = 0.25
BLOCK_PX = 2048
FEW_SLIDES, MANY_SLIDES = 4, 16


@dataclass(frozen=True)
class Work:
    """One slide and its patches."""

    record: SlideRecord
    xy_l0: NDArray[np.int64]
    spec: GridSpec
    threads: int


def plain_loop(work: Work, out: Path) -> None:
    """What most scripts do: read_region, convert, write."""
    size = work.spec.size_px
    with openslide.OpenSlide(str(work.record.path)) as slide, h5py.File(out, "w") as file:
        shape = (len(work.xy_l0), size, size, 3)
        pixels = file.create_dataset("pixels", shape, np.uint8, chunks=(1, *shape[1:]))
        for row, (x, y) in enumerate(work.xy_l0.tolist()):
            pixels[row] = np.asarray(slide.read_region((x, y), 0, (size, size)).convert("RGB"))


def decoder_limit(work: Work) -> None:
    """Each native tile under the patches decoded once, and nothing else, in as many threads."""
    image = read_tiled_images(work.record.path)[0]
    side, size = image.tile_px[0], work.spec.size_px
    touched = np.zeros((image.n_rows, image.n_columns), bool)
    for x, y in work.xy_l0.tolist():
        touched[y // side : (y + size - 1) // side + 1, x // side : (x + size - 1) // side + 1] = True
    numbers = np.flatnonzero(touched).tolist()
    file = os.open(work.record.path, os.O_RDONLY)

    def decode(some: Sequence[int]) -> None:
        out = np.empty((side, side, 3), np.uint8)
        for number in some:
            image.codec.decode_tile(os.pread(file, int(image.n_bytes[number]), int(image.offset[number])), out)

    with ThreadPoolExecutor(work.threads) as pool:
        list(pool.map(decode, [numbers[k :: work.threads] for k in range(work.threads)]))
    os.close(file)


def reading(work: Work) -> None:
    for _ in read_patches(work.record, work.xy_l0, work.spec, threads=work.threads):
        pass


def seconds(tasks: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """The median of each; they take turns, so that whatever else the machine does meets all."""
    taken: list[list[float]] = [[] for _ in tasks]
    for _ in range(repeats):
        for task, some in zip(tasks, taken, strict=True):
            began = time.perf_counter()
            task()
            some.append(time.perf_counter() - began)
    return [median(some) for some in taken]


def study_of(folder: Path, slide: Path, n_slides: int) -> Path:
    """A study of one site whose slides are one file under several names."""
    (folder / "archive" / "slides").mkdir(parents=True)
    with (folder / "archive" / "slides.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("slide", "patient", "site", "label"))
        for k in range(n_slides):
            (folder / "archive" / "slides" / f"slide_{k}.tif").hardlink_to(slide)
            table.writerow((f"slide_{k}.tif", f"patient_{k}", "A", "normal"))
    init_study(folder / "study", archive=folder / "archive")
    return folder / "study"


def run_tile(study: Path, work: Work, pixels: str) -> tuple[float, float, int]:
    """(seconds, peak resident MB, patches) of a `tile` process."""
    settings = {
        "tile.size_px": work.spec.size_px,
        "tile.mpp": work.spec.mpp,
        "tile.max_per_slide": len(work.xy_l0),  # drawn as in `measure`
        "tile.balance": "false",
        "store.pixels": pixels,
    }
    command = [sys.executable, "-m", "wsi_fl", "tile", "--all", "--json"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=study, stdout=out, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"wsi-fl tile failed: {said.read().decode().strip()}")
        out.seek(0)
        (site,) = json.load(out)["sites"]
    if site["failed"]:
        raise SystemExit(f"wsi-fl tile set slides aside: {site['failed']}")
    return taken, usage.ru_maxrss / 1024, site["patches"]


def end_to_end(folder: Path, work: Work, pixels: str, repeats: int) -> dict[str, float]:
    """Seconds per further slide, those of a process for few slides, and the highest peak."""
    further, started, peaks = [], [], []
    for _ in range(repeats):
        taken = []
        for n_slides in (FEW_SLIDES, MANY_SLIDES):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                study = study_of(Path(place), work.record.path, n_slides)
                seconds_taken, peak, n_patches = run_tile(study, work, pixels)
            if n_patches != n_slides * len(work.xy_l0):
                raise SystemExit(f"unequal slides: {n_patches} patches of {n_slides}")
            taken.append(seconds_taken)
            peaks.append(peak)
        further.append((taken[1] - taken[0]) / (MANY_SLIDES - FEW_SLIDES))
        started.append(taken[0])
    return {"further_s": median(further), "few_slides_s": median(started), "peak_mb": max(peaks)}


def measure(
    folder: Path, block: NDArray[np.uint8], codec: str, tile_px: int, args: argparse.Namespace
) -> dict[str, Any]:
    """All rows for one codec and size of native tiles."""
    path = folder / f"{codec}_{tile_px}.tif"
    if codec == "jpeg":
        write_big_slide(path, block, MPP, size_px=args.slide_px, tile_px=tile_px)
    else:
        write_coded_slide(path, block, MPP, codec, size_px=args.slide_px, tile_px=tile_px)
    record = SlideRecord(path, path.stem, "p", "s", "negative", positive=False)
    spec = GridSpec(args.size_px, args.mpp, args.size_px)
    plan = plan_slide(record, spec)
    drawn = sample_rows(
        plan.label, np.zeros_like(plan.label), [path.stem], balance=False, max_per_slide=args.patches, seed=0
    )
    work = Work(record, plan.xy_l0[drawn], spec, len(os.sched_getaffinity(0)))
    n, hdf5 = len(work.xy_l0), folder / "plain.h5"
    tasks = (lambda: plain_loop(work, hdf5), lambda: decoder_limit(work), lambda: reading(work))
    base, limit, read = seconds(tasks, args.repeats)
    hdf5.unlink()
    row: dict[str, Any] = {"codec": codec, "tile_px": tile_px, "patches": n, "threads": work.threads, "plain": n / base}
    row |= {"decoder": n / limit, "reading": n / read, "reading_of_decoder": limit / read}
    for pixels in args.pixels:
        if pixels == "native" and (codec != "jpeg" or tile_px != args.size_px):
            continue
        outcome = end_to_end(folder, work, pixels, args.repeats)
        row[pixels] = {
            "patches_per_s": n / outcome["further_s"],
            "of_plain": base / outcome["further_s"],
            "few_slides_s": outcome["few_slides_s"],
            "peak_mb": outcome["peak_mb"],
        }
    path.unlink()
    return row


def shown(row: dict[str, Any], pixels: Sequence[str]) -> str:
    """A row as lines of text."""
    lines = [f"{row['codec']}, {row['tile_px']}-px tiles, {row['patches']} patches, {row['threads']} threads"]
    lines.append(f"  openslide + PIL -> HDF5      {row['plain']:8.0f} patches/s")
    lines.append(f"  decoder's limit              {row['decoder']:8.0f} patches/s")
    ratio = row["reading_of_decoder"]
    lines.append(f"  reading alone                {row['reading']:8.0f} patches/s   {ratio:5.2f} of the limit")
    lines += [
        f"  tile, {name:<8} end to end    {row[name]['patches_per_s']:8.0f} patches/s   "
        f"{row[name]['of_plain']:5.2f} x plain   peak {row[name]['peak_mb']:.0f} MB"
        for name in pixels
        if name in row
    ]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile-px", type=int, nargs="+", default=[256, 512, 240], help="native tiles")
    parser.add_argument("--codecs", nargs="+", choices=["jpeg", *CODECS], default=["jpeg"])
    parser.add_argument("--slide-px", type=int, default=20480, help="side of the slides")
    parser.add_argument("--size-px", type=int, default=512, help="side of the patches")
    parser.add_argument("--mpp", type=float, default=MPP, help=f"of the patches; the slides have {MPP}")
    parser.add_argument("--patches", type=int, help="per slide, at most; default: all that hold tissue")
    parser.add_argument("--pixels", nargs="+", choices=["raw", "native"], default=["raw", "native"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for slides and stores, which take gigabytes")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    rows = []
    block = simulate_slide(plan_slides(1, 1, BLOCK_PX, 0)[0])
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for codec, tile_px in product(args.codecs, args.tile_px):
            rows.append(measure(Path(folder), block, codec, tile_px, args))
            print(shown(rows[-1], args.pixels), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({"slide_px": args.slide_px, "size_px": args.size_px, "rows": rows}))


if __name__ == "__main__":
    main()
