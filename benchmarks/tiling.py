"""Tiling against what most scripts do and against the decoder's limit, on big painted slides, in one run.

python benchmarks/tiling.py [--tile-px 256 512 240] [--codecs jpeg jpeg2000 deflate] [--patches 400] [--peers] \
    [--before TREE] [--json]

Four things are timed on the same patches: a plain OpenSlide + PIL loop that writes HDF5, the decoder alone on the
native tiles under them, `read_patches`, and `wsi-fl tile` as a process of its own. The latter's time per further slide
is that of the slides beyond four, as two are read at once and what a start costs is left out. With --peers, other
readers that are installed (pyvips, fastslide, slideio, cucim) read the patches in as many threads, each with a handle
of its own, and write nothing. All are patches/s. With --before TREE, `tile` of another checkout takes turns with this
one.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import openslide
from big_slide import CODECS, write_big_slide, write_coded_slide, write_dicom_slide
from numpy.typing import NDArray

from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide
from wsi_fl.slides.patching.slide_plan import plan_slide
from wsi_fl.slides.patching.splits import sample_rows
from wsi_fl.slides.reading.native_tiles import read_tiled_images
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.types import GridSpec, SlideRecord

MPP, POLL_S = 0.25, 0.02
BLOCK_PX = 2048
FEW_SLIDES, MANY_SLIDES = 4, 16
HERE = Path(__file__).resolve().parents[1]
DICOM_LEVELS = {"dicom": None, "dicom-one-level": 1}
"""Slides of DICOM files with JPEG frames, and how many levels they have; None for all."""


@dataclass(frozen=True)
class Work:
    """One slide and its patches."""

    record: SlideRecord
    xy_l0: NDArray[np.int64]
    spec: GridSpec
    threads: int


def finest_file(path: Path) -> Path:
    """A slide's file; of a folder of DICOM files that of the finest level."""
    return path / "0.dcm" if path.is_dir() else path


def plain_loop(work: Work, out: Path) -> None:
    """What most scripts do: read_region, convert, write."""
    size = work.spec.size_px
    with openslide.OpenSlide(str(finest_file(work.record.path))) as slide, h5py.File(out, "w") as file:
        shape = (len(work.xy_l0), size, size, 3)
        pixels = file.create_dataset("pixels", shape, np.uint8, chunks=(1, *shape[1:]))
        for row, (x, y) in enumerate(work.xy_l0.tolist()):
            pixels[row] = np.asarray(slide.read_region((x, y), 0, (size, size)).convert("RGB"))


def decoder_limit(work: Work) -> None:
    """Each native tile under the patches decoded once, and nothing else, in as many threads."""
    image = max(read_tiled_images(finest_file(work.record.path)), key=lambda image: image.size_px)
    side, size = image.tile_px[0], work.spec.size_px
    touched = np.zeros((image.n_rows, image.n_columns), bool)
    for x, y in work.xy_l0.tolist():
        touched[y // side : (y + size - 1) // side + 1, x // side : (x + size - 1) // side + 1] = True
    numbers = np.flatnonzero(touched).tolist()
    file = os.open(image.path, os.O_RDONLY)

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


_OpenPeer = Callable[[Path, int], Callable[[int, int], NDArray[np.uint8]]]
"""(slide, side of patches) → (x, y) → pixels [side, side, bands]."""


def _open_pyvips(path: Path, size: int) -> Callable[[int, int], NDArray[np.uint8]]:
    pyvips = import_module("pyvips")
    region = pyvips.Region.new(pyvips.Image.tiffload(str(path)))
    return lambda x, y: np.frombuffer(region.fetch(x, y, size, size), np.uint8).reshape(size, size, -1)


def _open_fastslide(path: Path, size: int) -> Callable[[int, int], NDArray[np.uint8]]:
    fastslide = import_module("fastslide")
    slide = fastslide.FastSlide.from_file_path(str(path))
    return lambda x, y: np.asarray(slide.read_region((x, y), 0, (size, size)).numpy())


def _open_slideio(path: Path, size: int) -> Callable[[int, int], NDArray[np.uint8]]:
    slideio = import_module("slideio")
    scene = slideio.open_slide(str(path), "SVS").get_scene(0)
    return lambda x, y: np.asarray(scene.read_block((x, y, size, size)))


def _open_cucim(path: Path, size: int) -> Callable[[int, int], NDArray[np.uint8]]:
    cucim = import_module("cucim")
    slide = cucim.CuImage(str(path))
    return lambda x, y: np.asarray(slide.read_region((x, y), (size, size), 0))


def _open_openslide(path: Path, size: int) -> Callable[[int, int], NDArray[np.uint8]]:
    slide = openslide.OpenSlide(str(finest_file(path)))
    return lambda x, y: np.asarray(slide.read_region((x, y), 0, (size, size)).convert("RGB"))


_PEERS: dict[str, _OpenPeer] = {
    "openslide": _open_openslide,
    "pyvips": _open_pyvips,
    "fastslide": _open_fastslide,
    "slideio": _open_slideio,
    "cucim": _open_cucim,
}


def peer_reading(work: Work, open_peer: _OpenPeer) -> None:
    """Another reader: each thread reads its share of the patches with a handle of its own."""

    def read(corners: NDArray[np.int64]) -> None:
        read_patch = open_peer(work.record.path, work.spec.size_px)
        for x, y in corners.tolist():
            read_patch(x, y)

    with ThreadPoolExecutor(work.threads) as pool:
        list(pool.map(read, np.array_split(work.xy_l0, work.threads)))


def readable_peers(work: Work) -> dict[str, Callable[[], None]]:
    """The peers that are installed and read this slide; of another picture than OpenSlide's it says how far off."""
    (x, y), size = work.xy_l0[0].tolist(), work.spec.size_px
    expected = _open_openslide(work.record.path, size)(x, y).astype(int)
    tasks: dict[str, Callable[[], None]] = {}
    for name, open_peer in _PEERS.items():
        try:
            pixels = open_peer(work.record.path, size)(x, y)
        except Exception as error:  # not installed, or no such codec: each has errors of its own
            print(f"  {name}: {str(error).strip().splitlines()[:1]}", file=sys.stderr)
            continue
        if far := int(abs(pixels[..., :3] - expected).max()):
            print(f"  {name}: up to {far} of 255 off OpenSlide's pixels", file=sys.stderr)
        tasks[name] = partial(peer_reading, work, open_peer)
    return tasks


def seconds(tasks: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """The median of each; they take turns, so that whatever else the machine does meets all."""
    taken: list[list[float]] = [[] for _ in tasks]
    for _ in range(repeats):
        for task, some in zip(tasks, taken, strict=True):
            began = time.perf_counter()
            task()
            some.append(time.perf_counter() - began)
    return [median(some) for some in taken]


def run_command(tree: Path, folder: Path, *words: str) -> tuple[str, float, float]:
    """(standard output, seconds, peak resident MB) of a command of the `wsi_fl` in `tree`."""
    command = [sys.executable, "-m", "wsi_fl", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(tree)}
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=said, env=environment)
        peak_mb = follow_memory(process)
        taken = time.perf_counter() - began
        for file in (out, said):
            file.seek(0)
        if process.returncode:
            raise SystemExit(f"wsi-fl {words[0]} failed: {said.read().decode().strip()}")
        return out.read().decode(), taken, peak_mb


def study_of(tree: Path, folder: Path, slide: Path, n_slides: int) -> Path:
    """A study of one site whose slides are one file under several names, made by the `wsi_fl` in `tree`."""
    (folder / "archive" / "slides").mkdir(parents=True)
    with (folder / "archive" / "slides.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("slide", "patient", "site", "label"))
        for k in range(n_slides):
            copy = folder / "archive" / "slides" / f"slide_{k}{slide.suffix}"
            if slide.is_dir():
                shutil.copytree(slide, copy, copy_function=os.link)
            else:
                copy.hardlink_to(slide)
            table.writerow((copy.name, f"patient_{k}", "A", "normal"))
    run_command(tree, folder, "init", "study", "--from", "archive")
    return folder / "study"


def follow_memory(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process; return its peak resident MB, which `wait4` would mix with that of this process."""
    peak_kb, status = 0, Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        with suppress(OSError):
            lines = status.read_text().splitlines()
            peak_kb = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), peak_kb)
        time.sleep(POLL_S)
    return peak_kb / 1024


def run_tile(tree: Path, study: Path, work: Work, pixels: str) -> tuple[float, float, int]:
    """(seconds, peak resident MB, patches) of a `tile` process."""
    settings = {
        "tile.size_px": work.spec.size_px,
        "tile.mpp": work.spec.mpp,
        "tile.max_per_slide": len(work.xy_l0),  # drawn as in `measure`
        "tile.max_per_site": MANY_SLIDES * len(work.xy_l0),
        "tile.balance": "false",
        "store.pixels": pixels,
    }
    pipelines = "".join(path.read_text() for path in study.glob("pipelines/*.toml"))
    known = [key for key in settings if key.partition(".")[2] in pipelines]  # other checkouts have fewer settings
    words = [part for key in known for part in ("--set", f"{key}={settings[key]}")]
    out, taken, peak_mb = run_command(tree, study, "tile", "--all", "--json", *words)
    (site,) = json.loads(out)["sites"]
    if site["failed"]:
        raise SystemExit(f"wsi-fl tile set slides aside: {site['failed']}")
    return taken, peak_mb, site["patches"]


def end_to_end(tree: Path, folder: Path, work: Work, pixels: str) -> dict[str, float]:
    """Seconds per further slide, those of a process for few slides, and the higher peak."""
    taken, peaks = [], []
    for n_slides in (FEW_SLIDES, MANY_SLIDES):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            study = study_of(tree, Path(place), work.record.path, n_slides)
            seconds_taken, peak_mb, n_patches = run_tile(tree, study, work, pixels)
        if n_patches != n_slides * len(work.xy_l0):
            raise SystemExit(f"unequal slides: {n_patches} patches of {n_slides}")
        taken.append(seconds_taken)
        peaks.append(peak_mb)
    return {
        "further_s": (taken[1] - taken[0]) / (MANY_SLIDES - FEW_SLIDES),
        "few_slides_s": taken[0],
        "peak_mb": max(peaks),
    }


def measure(
    folder: Path, block: NDArray[np.uint8], codec: str, tile_px: int, args: argparse.Namespace
) -> dict[str, Any]:
    """All rows for one codec and size of native tiles."""
    path = folder / f"{codec}_{tile_px}{'' if codec in DICOM_LEVELS else '.tif'}"
    if codec in DICOM_LEVELS:
        sizes = {"size_px": args.slide_px, "tile_px": tile_px}
        write_dicom_slide(path, block, MPP, n_levels=DICOM_LEVELS[codec], **sizes)
    elif codec == "jpeg":
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
    peers = readable_peers(work) if args.peers else {}
    tasks = (lambda: plain_loop(work, hdf5), lambda: decoder_limit(work), lambda: reading(work), *peers.values())
    base, limit, read, *others = seconds(tasks, args.repeats)
    hdf5.unlink()
    row: dict[str, Any] = {"codec": codec, "tile_px": tile_px, "patches": n, "threads": work.threads, "plain": n / base}
    row |= {"decoder": n / limit, "reading": n / read, "reading_of_decoder": limit / read}
    row |= {"peers": {name: n / taken for name, taken in zip(peers, others, strict=True)}, "tile": {}}
    for pixels in args.pixels:
        if pixels == "native" and (codec not in ("jpeg", *DICOM_LEVELS) or tile_px != args.size_px):
            continue
        trees = {pixels: HERE} | ({f"{pixels} before": args.before} if args.before else {})
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(args.repeats):
            for name, tree in trees.items():
                turns[name].append(end_to_end(tree, folder, work, pixels))
        for name, outcomes in turns.items():
            further = [outcome["further_s"] for outcome in outcomes]
            row["tile"][name] = {
                "patches_per_s": n / median(further),
                "of_plain": base / median(further),
                "of_plain_spread": (base / max(further), base / min(further)),
                "few_slides_s": median(outcome["few_slides_s"] for outcome in outcomes),
                "peak_mb": max(outcome["peak_mb"] for outcome in outcomes),
            }
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return row


def shown(row: dict[str, Any]) -> str:
    """A row as lines of text."""
    lines = [f"{row['codec']}, {row['tile_px']}-px tiles, {row['patches']} patches, {row['threads']} threads"]
    lines.append(f"  openslide + PIL -> HDF5      {row['plain']:8.0f} patches/s")
    lines.append(f"  decoder's limit              {row['decoder']:8.0f} patches/s")
    lines += [f"  {name:<12} reading alone   {rate:8.0f} patches/s" for name, rate in row["peers"].items()]
    ratio = row["reading_of_decoder"]
    lines.append(f"  reading alone                {row['reading']:8.0f} patches/s   {ratio:5.2f} of the limit")
    lines += [
        f"  tile, {name:<13} further slide {tile['patches_per_s']:5.0f} patches/s   {tile['of_plain']:5.2f} x plain"
        f" ({tile['of_plain_spread'][0]:.2f} to {tile['of_plain_spread'][1]:.2f})   peak {tile['peak_mb']:.0f} MB"
        for name, tile in row["tile"].items()
    ]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile-px", type=int, nargs="+", default=[256, 512, 240], help="native tiles")
    parser.add_argument("--codecs", nargs="+", choices=["jpeg", *CODECS, *DICOM_LEVELS], default=["jpeg"])
    parser.add_argument("--slide-px", type=int, default=20480, help="side of the slides")
    parser.add_argument("--size-px", type=int, default=512, help="side of the patches")
    parser.add_argument("--mpp", type=float, default=MPP, help=f"of the patches; the slides have {MPP}")
    parser.add_argument("--patches", type=int, help="per slide, at most; default: all that hold tissue")
    parser.add_argument("--pixels", nargs="+", choices=["raw", "native"], default=["raw", "native"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for slides and stores, which take gigabytes")
    parser.add_argument("--peers", action="store_true", help="time other readers that are installed, too")
    parser.add_argument("--before", type=Path, metavar="TREE", help="time `tile` of this checkout, too")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    rows = []
    block = simulate_slide(plan_slides(1, 1, BLOCK_PX, 0)[0])
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for codec, tile_px in product(args.codecs, args.tile_px):
            rows.append(measure(Path(folder), block, codec, tile_px, args))
            print(shown(rows[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({"slide_px": args.slide_px, "size_px": args.size_px, "rows": rows}))


if __name__ == "__main__":
    main()
