"""Forty kills of eight jobs at work on one site (`benchmarks/jobs.py`)."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "jobs.py"


def test_eight_jobs_killed_forty_times_lose_and_double_no_slide(tmp_path):
    command = [sys.executable, str(BENCHMARK), "kills", "--slides", "120", "--folder", str(tmp_path)]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert document["kills"] == 40 and document["codes"] == [0] * 8, document
    assert document["different_files"] == document["leftovers"] == document["errors"] == []
    assert document["stored_slides"] == 120 and document["doubled_patches"] == 0
