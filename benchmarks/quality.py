"""What quality control costs: tiling a big slide with `tile.qc` and without, in turns.

python benchmarks/quality.py [--size-px 16384] [--turns 5]

The slide is made of a painted one and has levels that halve, as most scanners write them. All times are processors'
seconds of `wsi-fl tile` as a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import rmtree
from statistics import median

import h5py
from big_slide import write_big_slide

from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide
from wsi_fl.stages.prepare.init_study import init_study

MPP, _BLOCK_PX = 0.25, 2048
KINDS = {"nothing": "[]", "pen, black, blur": '["pen","black","blur"]'}


def seconds(study: Path, kinds: str) -> float:
    """Tile anew; return the processors' seconds."""
    rmtree(study / "stores", ignore_errors=True)
    settings = ("tile.size_px=512", "tile.mpp=0.5", "tile.balance=false", f"tile.qc={kinds}")
    command = [sys.executable, "-m", "wsi_fl", "tile", "--site", "C1"]
    command += [word for one in settings for word in ("--set", one)]
    process = subprocess.Popen(command, cwd=study, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit("tile failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-px", type=int, default=16384)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "study"
        init_study(study)
        (study / "slides").mkdir()
        picture = simulate_slide(plan_slides(1, 1, _BLOCK_PX, 0)[0])
        write_big_slide(study / "slides" / "a.tif", picture, MPP, size_px=args.size_px)
        (study / "slides.csv").write_text("slide,patient,site,label\na.tif,p,C1,normal\n")
        (study / "sites" / "C1.toml").write_text(
            'name = "C1"\nreal = false\nslides = "slides/*.tif"\nlayout = "generic"\nlabels = "slides.csv"\n'
        )
        took: dict[str, list[float]] = {name: [] for name in KINDS}
        for turn in range(args.turns):
            for name, kinds in KINDS.items():
                took[name].append(seconds(study, kinds))
                print(f"turn {turn + 1}, {name}: {took[name][-1]:.2f} s", file=sys.stderr)
        with h5py.File(study / "stores/C1/patches.h5") as file:
            patches = len(file["label"])
    base = median(took["nothing"])
    more = {name: round(100 * (median(all_) / base - 1), 1) for name, all_ in took.items()}
    print(json.dumps({"patches": patches, "seconds": took, "percent_more": more}, indent=2))


if __name__ == "__main__":
    main()
