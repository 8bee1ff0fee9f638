"""Many sites and many slides: seconds, processor seconds and memory of each command, per site and per slide.

python benchmarks/scale.py --sites 8 16 32 64 --slides 100 1000 10000 [--patch-px 10] [--folder DIR]

Slides are 320 px wide at 4 µm per pixel, as thumbnails of real slides, from eight paintings that are shifted; a slide's
cost here is what `tile` does around reading pixels. With patches of 10 px a slide has up to 1000, so 10 000 slides have
10⁷.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_PAINTED, _SIZE_PX, _UM_PER_PX, _SPOT_PX, _ROWS = 8, 320, 4.0, 8, 60
_PIPELINE = """
[tile]
size_px = {patch_px}
mpp = 4.0
balance = false
max_per_slide = 1000
[train]
rounds = 2
batch_size = {batch_size}
augment = "none"
[model]
private = "cnn1"
proxy = "mlp"
[evaluate]
bootstrap = 50
"""
_ONE_PASS = ("--set", "privacy.enabled=false", "--set", "train.rounds=1", "--set", "train.local_baseline=false")
_OF_SITES: tuple[tuple[str, ...], ...] = (
    ("train", "--method", "proxyfl", "--backend", "local"),
    ("evaluate", "1"),
    ("report", "1"),
)
_OF_SLIDES: tuple[tuple[str, ...], ...] = (
    ("tile", "--site", "G", "--dry-run"),
    ("tile", "--site", "G"),
    ("tile", "--site", "G"),
    ("check", "--site", "G"),
    ("train", "--method", "regular", "--dry-run", *_ONE_PASS),
    ("train", "--method", "regular", *_ONE_PASS),
    ("evaluate", "1"),
    ("report", "1"),
)


def measured(command: tuple[str, ...], study: Path) -> tuple[float, float, float]:
    """Run a command of wsi-fl; return its seconds, those of processors, and the most MB that it held."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", "wsi_fl", *command], cwd=study, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            sys.exit(f"{' '.join(command)} failed: {said.read().decode(errors='replace')[-2000:]}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def of_slides(n: int, patch_px: int, folder: Path) -> list[dict[str, Any]]:
    """Tile a site of n slides, again with nothing to do, check its store, train on it and evaluate."""
    from wsi_fl.demo.simulated_slides.tiff_writer import write_pyramid

    study = _study(folder, patch_px, 1024)
    rng = np.random.default_rng(0)
    spots = rng.normal(0, 25, (_PAINTED, _SIZE_PX // _SPOT_PX, _SIZE_PX // _SPOT_PX, 3))
    noise = rng.normal(0, 2, (_PAINTED, _SIZE_PX, _SIZE_PX, 3))
    paintings = np.array([200, 140, 190]) + noise + spots.repeat(_SPOT_PX, 1).repeat(_SPOT_PX, 2)
    paintings = np.clip(paintings, 0, 255).astype(np.uint8)
    (study / "archive").mkdir()
    rows = ["slide,patient,site,label"]
    for k in range(n):
        shift, painting = divmod(k, _PAINTED)
        shifted = np.roll(paintings[painting], (shift // _SIZE_PX, shift % _SIZE_PX), (0, 1))
        write_pyramid(study / "archive" / f"s{k:05}.tif", shifted, _UM_PER_PX)
        rows.append(f"s{k:05}.tif,p{k // 2},G,{'tumor' if k % 4 == 0 else 'normal'}")
    (study / "slides.csv").write_text("\n".join(rows) + "\n")
    (study / "sites" / "G.toml").write_text(
        'name = "G"\nreal = false\nslides = "archive/*.tif"\nlayout = "generic"\nlabels = "slides.csv"\n'
    )
    told = [_row("slide", n, command, measured(command, study)) for command in _OF_SLIDES]
    shutil.rmtree(folder)
    return told


def of_sites(n: int, folder: Path) -> list[dict[str, Any]]:
    """Train, evaluate and report a run of n sites of small images."""
    study = _study(folder, 64, 8)
    rng = np.random.default_rng(0)
    y = np.arange(n * _ROWS) % 2
    x = np.clip(rng.normal(120, 30, (len(y), 16, 16, 3)) + 30 * y[:, None, None, None], 0, 255)
    np.savez(study / "set.npz", x=x.astype(np.uint8), y=y)
    measured(("partition", "set.npz", "--sites", str(n)), study)
    told = [_row("site", n, command, measured(command, study)) for command in _OF_SITES]
    shutil.rmtree(folder)
    return told


def _study(folder: Path, patch_px: int, batch_size: int) -> Path:
    study = folder / "study"
    for name in ("pipelines", "sites"):
        (study / name).mkdir(parents=True)
    (study / "pipelines" / "p.toml").write_text(_PIPELINE.format(patch_px=patch_px, batch_size=batch_size))
    return study


def _row(unit: str, n: int, command: tuple[str, ...], cost: tuple[float, float, float]) -> dict[str, Any]:
    seconds, cpu_s, mb = cost
    name = " ".join(word for word in command if word in ("--dry-run", command[0]))
    print(f"{name} of {n} {unit}s: {seconds:.1f} s, {cpu_s:.1f} CPU-s, {mb:.0f} MB", file=sys.stderr, flush=True)
    return {
        "unit": unit,
        "n": n,
        "command": name,
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu_s, 1),
        "mb": round(mb),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--slides", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--patch-px", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="for the studies; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        told = [row for n in args.sites for row in of_sites(n, Path(folder) / "sites")]
        told += [row for n in args.slides for row in of_slides(n, args.patch_px, Path(folder) / "slides")]
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
