"""The recipes of `deploy/` against the engines: a real Slurm, a real Snakemake, the schemas of Kubernetes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest
from slurm_cluster import missing_command, run_cluster, submit, wait_for_jobs
from small_archives import write_camelyon17

from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.study.folder import Study

DEPLOY = Path(__file__).parents[2] / "deploy"
SITE = "C1"
SNAKEMAKE = os.environ.get("SNAKEMAKE") or shutil.which("snakemake")
"""The program of an environment of its own, since its requirements are not ours."""

pytestmark = pytest.mark.slow


def make_study(folder: Path, archive: Path) -> Study:
    """Return a study of one hospital with twelve slides."""
    init_study(folder, archive=archive, pipeline="camelyon17_small")
    return Study(folder)


def digest_store(study: Study) -> str:
    """Return the SHA-256 of the hospital's patches."""
    return sha256(study.store_path(SITE).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return write_camelyon17(tmp_path_factory.mktemp("slides") / "archive", n_centres=2, patients=6, size_px=1024)


@pytest.fixture(scope="module")
def expected(archive, tmp_path_factory):
    """The SHA-256 of the patches that one process writes."""
    study = make_study(tmp_path_factory.mktemp("alone") / "study", archive)
    tile_slides(study, site=SITE)
    return digest_store(study)


@pytest.fixture(scope="module")
def cluster():
    """The environment of a Slurm with eight CPUs, in which `wsi-fl` is this checkout's."""
    if reason := missing_command():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, run_cluster(Path(folder)) as environment:
        yield with_our_command(environment)


def with_our_command(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def submit_tiling(cluster: Mapping[str, str], study: Study, tasks: str) -> str:
    """Submit the recipe for an array of tasks of one CPU, and return the number of its job."""
    limits = ("--cpus-per-task=1", "--mem=400M", f"--array={tasks}")
    return submit(cluster, *limits, str(DEPLOY / "slurm/slides.sbatch"), "tile", "--site", SITE, folder=study.root)


def test_an_array_of_tasks_tiles_one_site(cluster, archive, expected, tmp_path):
    study = make_study(tmp_path / "study", archive)
    job = submit_tiling(cluster, study, "1-8")
    wait_for_jobs(cluster)
    assert digest_store(study) == expected
    logs = [study.root / f"slides-{job}-{task}.log" for task in range(1, 9)]
    assert all("error" not in log.read_text() for log in logs)


def test_a_cancelled_task_loses_no_slide(cluster, archive, expected, tmp_path):
    study = make_study(tmp_path / "study", archive)
    job = submit_tiling(cluster, study, "1-3")
    while not list(study.store_path(SITE).parent.glob("slides/*.h5")):  # until some task is at work
        time.sleep(0.1)
    for task in (1, 2):
        subprocess.run(["scancel", "--signal=KILL", f"{job}_{task}"], env=cluster, check=True)
    submit_tiling(cluster, study, "7")  # a lone task, as one would start again
    wait_for_jobs(cluster)
    assert digest_store(study) == expected


@pytest.mark.skipif(SNAKEMAKE is None, reason="needs Snakemake: SNAKEMAKE=PROGRAM, of an environment of its own")
def test_snakemake_tiles_in_parts(archive, expected, tmp_path):
    study = make_study(tmp_path / "study", archive)
    command = [SNAKEMAKE, "--snakefile", DEPLOY / "snakemake/Snakefile", "--cores", "4", f"done/tile/{SITE}"]
    subprocess.run(
        [*command, "--config", f"sites={SITE}", "parts=3"], cwd=study.root, env=with_our_command(os.environ), check=True
    )
    assert digest_store(study) == expected


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="needs pip install kubernetes-validate")
def test_kubernetes_accepts_the_job():
    import kubernetes_validate
    import yaml

    document = yaml.safe_load((DEPLOY / "kubernetes/tile.yaml").read_text())
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
