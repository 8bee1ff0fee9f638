"""Many sites and many slides: seconds and memory of each command, per site and per slide.

python benchmarks/scale.py --sites 8 16 32 64 --slides 750 1500 3000

Slides are 512 px wide and painted once; a slide's cost here is what `tile` does around reading pixels.
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

_PAINTED, _SIZE_PX, _ROWS = 8, 512, 60
_PIPELINE = """
[tile]
size_px = 64
mpp = 0.5
balance = false
max_per_slide = 48
[train]
rounds = 2
batch_size = 8
augment = "none"
[model]
private = "cnn1"
proxy = "mlp"
[evaluate]
bootstrap = 50
"""
_OF_SITES: tuple[tuple[str, ...], ...] = (
    ("train", "--method", "proxyfl", "--backend", "local"),
    ("evaluate", "1"),
    ("report", "1"),
)


def measured(command: tuple[str, ...], study: Path) -> tuple[float, float]:
    """Run a command of wsi-fl; return its seconds, and the most MB that it held."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", "wsi_fl", *command], cwd=study, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            sys.exit(f"{' '.join(command)} failed: {said.read().decode(errors='replace')[-2000:]}")
    return time.monotonic() - began, usage.ru_maxrss / 1024


def of_slides(n: int, folder: Path) -> list[dict[str, Any]]:
    """Tile a site of n slides, and once more with nothing to do."""
    from wsi_fl.demo.simulated_slides.tiff_writer import write_pyramid

    study = _study(folder)
    rng = np.random.default_rng(0)
    for k in range(_PAINTED):
        image = np.clip(np.array([200, 140, 190]) + rng.normal(0, 25, (_SIZE_PX, _SIZE_PX, 3)), 0, 255)
        write_pyramid(folder / f"{k}.tif", image.astype(np.uint8), 0.5)
    (study / "archive").mkdir()
    rows = ["slide,patient,site,label"]
    for k in range(n):
        shutil.copy(folder / f"{k % _PAINTED}.tif", study / "archive" / f"s{k:05}.tif")
        rows.append(f"s{k:05}.tif,p{k // 2},G,{'tumor' if k % 4 == 0 else 'normal'}")
    (study / "slides.csv").write_text("\n".join(rows) + "\n")
    (study / "sites" / "G.toml").write_text(
        'name = "G"\nreal = false\nslides = "archive/*.tif"\nlayout = "generic"\nlabels = "slides.csv"\n'
    )
    command = ("tile", "--site", "G")
    told = [_row("slide", n, name, measured(command, study)) for name in ("tile", "tile again")]
    shutil.rmtree(folder)
    return told


def of_sites(n: int, folder: Path) -> list[dict[str, Any]]:
    """Train, evaluate and report a run of n sites of small images."""
    study = _study(folder)
    rng = np.random.default_rng(0)
    y = np.arange(n * _ROWS) % 2
    x = np.clip(rng.normal(120, 30, (len(y), 16, 16, 3)) + 30 * y[:, None, None, None], 0, 255)
    np.savez(study / "set.npz", x=x.astype(np.uint8), y=y)
    measured(("partition", "set.npz", "--sites", str(n)), study)
    told = [_row("site", n, " ".join(command[:1]), measured(command, study)) for command in _OF_SITES]
    shutil.rmtree(folder)
    return told


def _study(folder: Path) -> Path:
    study = folder / "study"
    for name in ("pipelines", "sites"):
        (study / name).mkdir(parents=True)
    (study / "pipelines" / "p.toml").write_text(_PIPELINE)
    return study


def _row(unit: str, n: int, command: str, cost: tuple[float, float]) -> dict[str, Any]:
    seconds, mb = cost
    row = {"unit": unit, "n": n, "command": command, "seconds": round(seconds, 1), "mb": round(mb)}
    print(f"{command} of {n} {unit}s: {seconds:.1f} s, {1000 * seconds / n:.0f} ms each, {mb:.0f} MB", file=sys.stderr)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--slides", type=int, nargs="*", default=[750, 1500, 3000])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = [row for n in args.sites for row in of_sites(n, Path(folder) / "sites")]
        told += [row for n in args.slides for row in of_slides(n, Path(folder) / "slides")]
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
