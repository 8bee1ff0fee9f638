"""The core works without the extensions, without the features of Linux that macOS lacks, and without MONAI's import."""

import json
import os
import subprocess
import sys
from pathlib import Path

from wsi_fl.demo import simulated_slides
from wsi_fl.plugins import load_entries
from wsi_fl.stages.prepare.init_study import init_study

WINGS = ("synthesis", "viewer", "hospitals", "evidence", "oneshot")
ALONE = f"""
import asyncio, json, os, sys

for name in ("sched_getaffinity", "posix_fallocate", "O_DIRECT"):
    delattr(os, name)

class Gone:
    def find_spec(self, name, *_):
        if name.startswith({tuple(f"wsi_fl.{room}" for room in WINGS)}):
            raise ModuleNotFoundError(f"{{name}} is not there")

sys.meta_path.insert(0, Gone())
from wsi_fl.__main__ import main

codes = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["wsi-fl", *arguments]
    try:
        main()
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, "monai" in sys.modules]))
"""
SMALL = [
    *("tile.size_px=32", "tile.mpp=2.0", "model.private=cnn1", "model.proxy=mlp", "train.augment=none"),
    *("train.rounds=1", "train.batch_size=8", "privacy.sigma=1.0", "evaluate.bootstrap=20"),
]


def run_without_extensions(folder: Path, study: Path, *commands):
    """Run command lines one after another without the extensions, neither modules nor entry points."""
    info = folder / "wsi_fl-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wsi-fl\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    how = {"env": {**os.environ, "PYTHONPATH": path}, "cwd": study, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", ALONE, json.dumps(commands)], check=False, **how)


def test_slides_become_a_report_without_extensions_and_as_on_macos(tmp_path):
    """Missing extensions are named in one line; none of these commands waits for the import of MONAI."""
    archive = simulated_slides.simulate_archive(tmp_path / "archive", n_sites=2, patients_per_site=2, size_px=512)
    init_study(tmp_path / "study", archive=archive)
    slide = min((archive / "training" / "center_0").glob("*.tif"))
    settings = [word for one in SMALL for word in ("--set", one)]
    begin = ["train", "--backend", "local", *settings, "--method"]
    work = [
        *(["--help"], ["train", "--help"], ["tile", "--all", *settings], ["check", "--all"]),
        *([*begin, "proxyfl"], [*begin, "regular"], ["evaluate", "1"], ["evaluate", "2"], ["report", "1"]),
        ["predict", "1", "--site", "C1", "--slide", str(slide)],
    ]
    gone = [["synthesize", "train"], ["view"], ["compare", "1"], ["bench", "x.npz"], ["audit", "1"], ["clinical", "1"]]
    done = run_without_extensions(tmp_path / "installed", tmp_path / "study", *work, *gone)
    codes, has_monai = json.loads(done.stdout.splitlines()[-1])
    assert not has_monai and codes == [0] * len(work) + [2] * len(gone), done.stderr
    commands, methods = done.stdout.split("Usage:")[1:3]
    assert "evaluate" in commands and "proxies travel" in " ".join(methods.split())
    for words in ("synthesize", "federation", "view ", "compare", "mpcpa:", "replay:"):
        assert words not in commands + methods
    assert "nothing is damaged" in done.stderr
    assert len(list((tmp_path / "study" / "runs").glob("*/report/index.html"))) == 1
    assert all(f"No such command '{command[0]}'" in done.stderr for command in gone)
    assert "Traceback" not in done.stderr
    assert {*load_entries("wsi_fl.commands")} >= {"synthesize", "view", "federation"}
