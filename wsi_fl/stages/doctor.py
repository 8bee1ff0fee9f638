"""`check_installation`: checks of the installation, with remedies."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.stages.training import launch
from wsi_fl.system.extras import EXTRAS, describe_install, has_extra
from wsi_fl.system.machine import describe_cluster_job, launcher_reason, n_cores
from wsi_fl.types import WsiFlError, single_line

_MIN_FREE_BYTES = 5 << 30
_GPU_DEVICE = Path("/dev/nvidia0")
_MPI_TEST = "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2"


class _CheckRow(TypedDict):
    """A check with its result, or its remedy where it failed (`said`)."""

    name: str
    ok: bool
    said: str


class _DoctorDocument(TypedDict):
    """The `--json` document of `doctor`."""

    ok: bool
    checks: list[_CheckRow]


def check_installation() -> _DoctorDocument:
    """Run all checks."""
    checks: dict[str, Callable[[], str]] = {
        "Python": platform.python_version,
        "OpenSlide": _check_openslide,
        "PyTorch": _check_torch,
        "extras": _check_extras,
        "MPI": _check_mpi,
        "cluster": _check_cluster,
        "GPU": _check_gpu,
        "disk": _check_disk,
    }
    rows: list[_CheckRow] = []
    for name, check in checks.items():
        ok = False
        try:
            result, ok = check(), True
        except WsiFlError as problem:
            result = str(problem)
        except (ImportError, OSError) as problem:
            result = f"{single_line(problem)}; install wsi-fl again, into a new environment"
        rows.append({"name": name, "ok": ok, "said": result})
    return {"ok": all(row["ok"] for row in rows), "checks": rows}


def _check_openslide() -> str:
    """Write a small slide and read it back."""
    import numpy as np
    from tifffile import imwrite

    from wsi_fl.slides.reading.probe import check_opens_safely
    from wsi_fl.slides.reading.reader import Slide

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.tif"
        gray = np.full((600, 600, 3), 200, np.uint8)
        imwrite(path, gray, tile=(256, 256), photometric="rgb", resolution=(2e4, 2e4), resolutionunit="CENTIMETER")
        check_opens_safely(path)
        with Slide(path) as slide:
            pixels = slide.read((100, 100), 64, 0.5)
            if abs(float(pixels.mean()) - 200) > 2 or abs(slide.mpp - 0.5) > 0.01:
                raise WsiFlError("it reads wrong pixels; reinstall with `pip install --force-reinstall openslide-bin`")
    return "reads a slide"


def _check_torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _check_extras() -> str:
    """Name the extras that are installed, and what needs the others."""
    missing = [name for name in EXTRAS if not has_extra(name)]
    text = ", ".join(name for name in EXTRAS if name not in missing) or "none"
    if purposes := [f"{name} ({EXTRAS[name].purpose})" for name in missing if EXTRAS[name].has_wheel]:
        text += f"; without {', '.join(purposes)}: {describe_install('NAME')}"
    if unavailable := [name for name in missing if not EXTRAS[name].has_wheel]:
        text += f"; without {', '.join(unavailable)}, which this Python has no wheel of"
    return text


def _check_mpi() -> str:
    if launch.locate_mpiexec() is None:
        return "none; needed only to train several sites on this machine; --backend local works without"
    command = [launch.find_mpiexec(), "-n", "2", "--oversubscribe", sys.executable, "-c", _MPI_TEST]
    try:
        process = subprocess.run(
            command, env=launch.rank_environment(2), capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        raise WsiFlError("mpiexec started, but two ranks did not find each other within a minute") from None
    if process.returncode:
        is_silent = not process.stderr.strip()
        advice = "" if is_silent else "; mpi4py and mpiexec must be of one MPI"
        raise WsiFlError(f"two ranks do not work together: {launcher_reason(process.stderr)}{advice}")
    return f"two ranks communicate ({command[0]})"


def _check_cluster() -> str:
    if not (job := describe_cluster_job()):
        return "none; no job of a resource manager"
    return (
        f"{job}; wsi-fl starts ranks on this machine alone, without asking it; for ranks on all its machines start "
        "them by `srun --mpi=pmix`, or by `mpiexec` of the cluster's own MPI"
    )


def _check_gpu() -> str:
    import torch

    if torch.version.cuda is None and _GPU_DEVICE.exists():
        raise WsiFlError(
            "there is one, but this PyTorch is for processors alone; in the checkout run "
            "`pip install --force-reinstall -c constraints.txt torch torchvision`"
        )
    if not torch.cuda.is_available():
        return "none; training will use the CPU"
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return f"{len(names)}: {', '.join(names)}"


def _check_disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free
    if free < _MIN_FREE_BYTES:
        raise WsiFlError(f"{free / 1e9:.1f} GB free here; stores of patches need more")
    return f"{free / 1e9:.0f} GB free here, {n_cores()} cores"


def render_doctor_lines(document: _DoctorDocument) -> Lines:
    for row in document["checks"]:
        mark, style = ("ok  ", "green") if row["ok"] else ("FAIL", "bold red")
        yield TextLine(f"{mark} {row['name']}: {row['said']}", style)
