"""What `federation start` ends: the process, and the jobs that it started in groups of their own."""

import os
import subprocess
import sys
from pathlib import Path

from wsi_fl.stages.hospitals.start import _end

PARENT = """
import subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(job.pid, flush=True)
time.sleep(60)
"""


def test_a_job_ends_with_the_client_that_started_it():
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    job = int(process.stdout.readline())
    assert os.getpgid(job) == job != process.pid
    _end(process)
    process.stdout.close()
    assert process.returncode is not None
    assert _ended(job)


def _ended(pid):
    """Whether a process is gone, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
