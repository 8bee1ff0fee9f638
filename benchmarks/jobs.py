"""Jobs that share the slides of one site: killed at random and started again, and timed against mpiexec.

python benchmarks/jobs.py kills [--slides 300] [--jobs 8] [--kills 40] [--folder DIR] [--mount DIR]
python benchmarks/jobs.py times [--slides 40] [--commands tile features predict] [--repeats 3]

`kills` compares the store with that of one process. With --mount, another path of --folder (NFS, SSHFS), every other
job works there. `times` gives the seconds, and those of processors, of one process, two ranks of mpiexec and two jobs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save_file

from wsi_fl.demo.simulated_slides import plan_slides, simulate_slide, write_pyramid
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.training.launch import find_mpiexec
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.system.files import JOBS_FOLDER

SIZE_PX, SHIFT_PX, PAINTED_SLIDES = 768, 16, 4
SETTINGS = {
    "tile.size_px": "64",
    "tile.mpp": "1.0",
    "features.encoder": "test_efficientnet",
    "features.weights": "tiny.safetensors",
    "train.rounds": "1",
    "model.private": "cnn1",
    "train.batch_size": "8",
    "train.local_baseline": "false",
}
POLL_S = 0.02
KINDS = ("one process", "mpiexec -n 2", "two jobs")


def paint_study(folder: Path, n_slides: int) -> Path:
    """Write a study of one site with so many small slides, each shifted differently; return its folder."""
    slides = folder / "archive" / "slides"
    slides.mkdir(parents=True)
    images = [simulate_slide(plan) for plan in plan_slides(1, PAINTED_SLIDES // 2, SIZE_PX, 0)]
    with (folder / "archive" / "slides.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("slide", "patient", "site", "label"))
        for k in range(n_slides):
            shift, number = divmod(k, len(images))
            write_pyramid(slides / f"slide_{k:04}.tif", np.roll(images[number], SHIFT_PX * shift, axis=1), 0.5)
            table.writerow((f"slide_{k:04}.tif", f"patient_{k}", "C1", "tumor" if k % 2 else "normal"))
    study = folder / "study"
    init_study(study, archive=folder / "archive")
    torch.manual_seed(0)
    save_file(timm.create_model("test_efficientnet", num_classes=7).state_dict(), study / "tiny.safetensors")
    return study


def command_of(*words: str) -> list[str]:
    """Return the command line of wsi-fl with the settings of the study."""
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "wsi_fl", *words, *(settings if words[0] != "predict" else [])]


def start(command: Sequence[str], study: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=study, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files below a folder but those of jobs at work."""
    paths = (path for path in folder.rglob("*") if path.is_file() and JOBS_FOLDER not in str(path))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def count_done(study: Path) -> int:
    """Return how many slides are planned or written in the present work."""
    return sum(1 for _ in (study / "stores" / "C1" / JOBS_FOLDER).glob("*/*/*.done"))


def kill_jobs(study: Path, folders: Sequence[Path], n_jobs: int, n_kills: int, rng: random.Random) -> dict[str, Any]:
    """Tile by jobs of which one is killed and started again whenever the work has progressed; return what happened.

    Args:
        folders: of the study, as the jobs see it in turn.
    """
    command = command_of("tile", "--site", "C1", "--json")
    jobs = [start(command, folders[k % len(folders)]) for k in range(n_jobs)]
    n_slides = len(list((study.parent / "archive" / "slides").iterdir()))
    thresholds = sorted(rng.sample(range(1, 2 * n_slides), n_kills))
    kills = 0
    while kills < n_kills and any(job.poll() is None for job in jobs):
        time.sleep(POLL_S)
        if count_done(study) >= thresholds[kills]:
            k = rng.randrange(n_jobs)
            jobs[k].kill()
            jobs[k].communicate()
            jobs[k] = start(command, folders[k % len(folders)])
            kills += 1
    ends = [(job.communicate(), job.returncode) for job in jobs]
    return {
        "kills": kills,
        "codes": [code for _, code in ends],
        "done": [json.loads(out)["sites"][0]["done"] for (out, _), code in ends if code == 0],
        "errors": [told.splitlines()[-1] for (_, told), code in ends if code],
    }


def measure_kills(args: argparse.Namespace) -> dict[str, Any]:
    """Return whether the killed jobs' store is that of one process, and how long both took."""
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        study = paint_study(Path(place), args.slides)
        start_time = time.perf_counter()
        subprocess.run(command_of("tile", "--site", "C1"), cwd=study, check=True, capture_output=True)
        calm_s, expected = time.perf_counter() - start_time, digest_files(study / "stores")
        shutil.rmtree(study / "stores")
        folders = [study]
        if args.mount:
            folders.append(args.mount / study.relative_to(args.folder.resolve()))
        start_time = time.perf_counter()
        document = kill_jobs(study, folders, args.jobs, args.kills, random.Random(args.seed))
        seconds, found = time.perf_counter() - start_time, digest_files(study / "stores")
        with PatchStore(study / "stores" / "C1" / "patches.h5") as store:
            rows = [*zip(store.table.slide.tolist(), map(tuple, store.table.xy_l0.tolist()), strict=True)]
        return document | {
            "slides": args.slides,
            "stored_slides": len({slide for slide, _ in rows}),
            "doubled_patches": len(rows) - len(set(rows)),
            "different_files": sorted(name for name in expected | found if expected.get(name) != found.get(name)),
            "leftovers": [str(path) for path in (study / "stores").rglob("*partial*")],
            "one_process_s": calm_s,
            "seconds": seconds,
        }


def run_kind(kind: str, command: list[str], study: Path) -> tuple[float, float]:
    """Return the seconds, and those of processors, of a command run in one way."""
    ranks = [find_mpiexec(), "-n", "2", "--oversubscribe", "--bind-to", "none", *command]
    commands = {"one process": [command], "mpiexec -n 2": [ranks], "two jobs": [command, command]}[kind]
    before, start_time = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    jobs = [start(line, study) for line in commands]
    ends = [job.communicate() for job in jobs]
    seconds, after = time.perf_counter() - start_time, resource.getrusage(resource.RUSAGE_CHILDREN)
    for job, (_, told) in zip(jobs, ends, strict=True):
        if job.returncode:
            raise SystemExit(f"{kind}: {' '.join(command)} failed: {told.strip()}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def prepare_command(name: str, study: Path) -> tuple[list[str], Path]:
    """Return a command, and the folder of its results; what it needs is there already, or made now."""
    if name == "tile":
        return command_of("tile", "--site", "C1"), study / "stores"
    if name == "features":
        return command_of("features", "--site", "C1"), study / "stores" / "C1" / "features"
    train = command_of("train", "--method", "regular", "--backend", "local")
    subprocess.run(train, cwd=study, check=True, capture_output=True)
    slides = sorted((study.parent / "archive" / "slides").iterdir())
    words = [word for path in slides for word in ("--slide", str(path))]
    return command_of("predict", "1", "--site", "C1", "--out", "out", *words), study / "out"


def measure_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the median seconds of each command, run in each way in turn, and whether the results are equal."""
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        study = paint_study(Path(place), args.slides)
        for name in args.commands:
            if name != "tile" and not (study / "stores").exists():
                subprocess.run(command_of("tile", "--site", "C1"), cwd=study, check=True, capture_output=True)
            command, results = prepare_command(name, study)
            taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            digests = set()
            for _ in range(args.repeats):
                for kind in KINDS:
                    shutil.rmtree(results, ignore_errors=True)
                    taken[kind].append(run_kind(kind, command, study))
                    digests.add(json.dumps(digest_files(results), sort_keys=True))
            row: dict[str, Any] = {"command": name, "slides": args.slides, "equal": len(digests) == 1}
            for kind, times in taken.items():
                row[kind] = {"s": median(s for s, _ in times), "cpu_s": median(cpu for _, cpu in times)}
            row["ratio"] = median(two[0] / mpi[0] for two, mpi in zip(taken[KINDS[2]], taken[KINDS[1]], strict=True))
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "times"])
    parser.add_argument("--slides", type=int, help="default: 300 for kills, 40 for times")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for slides and stores")
    parser.add_argument("--mount", type=Path, help="another path of that folder")
    parser.add_argument("--commands", nargs="+", default=["tile", "features", "predict"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.slides = args.slides or (300 if args.what == "kills" else 40)
    print(json.dumps(measure_kills(args) if args.what == "kills" else measure_times(args), indent=2))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
