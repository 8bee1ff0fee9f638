"""Every method between hospitals, over a shared folder and over NVIDIA FLARE, makes the models of one process."""

import subprocess
import sys
from contextlib import nullcontext

import prototype_package
import pytest
import test_mpcpa
from federation_fixtures import needs_flare
from hospitals import INSECURE, Bed, charged, digests, heads
from safetensors.numpy import load_file
from test_oneshot import HEADS
from test_replay import plant

from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.train import train

pytestmark = pytest.mark.slow
ROADS = ["a folder", pytest.param("FLARE", marks=needs_flare)]
TWO = ("train.rounds=2", "comm.timeout_s=150")


@pytest.fixture
def bed_of(request, tmp_path):
    """Build hospitals that a folder or FLARE connects."""
    folder = None if request.param == "FLARE" else str(tmp_path / "share")
    return lambda n=3, **given: Bed(tmp_path, n, folder=folder, **given)


def planted(study, site, k):
    plant(study, site, seed=k)


@pytest.mark.parametrize("bed_of", ROADS, indirect=True)
@pytest.mark.parametrize(
    ("method", "settings", "given"),
    [
        ("fedavg", TWO, {}),
        ("cwt", TWO, {}),
        ("avgpush", TWO, {}),
        ("replay", (*TWO, "privacy.enabled=false"), {"furnish": planted, "extra": "[replay]\nbuffer = 10\n"}),
        ("mpcpa", (), {}),
        ("prototypes", prototype_package.SETTINGS, {"furnish": prototype_package.furnish}),
    ],
)
def test_a_method_between_hospitals_trains_the_models_of_one_process(bed_of, tmp_path, method, settings, given):
    """Also one whose payload another package brings, and one that sends generators both ways."""
    if method == "mpcpa":
        given = {"whole": test_mpcpa.make_study(tmp_path / "whole")}
    foreign = prototype_package.package_installed(tmp_path / "site-packages")
    with foreign if method == "prototypes" else nullcontext():
        bed = bed_of(**given)
        bed.sign(method, *settings)
        summary = bed.work()
        local = bed.require_the_same(method, *settings)
    assert summary["communication"]["bytes"] == local["communication"]["bytes"]
    assert method != "mpcpa" or summary["communication"]["messages"] == 3 * 3


@pytest.mark.parametrize("bed_of", ROADS, indirect=True)
def test_an_inference_only_site_receives_the_head_and_pays_nothing(bed_of):
    bed = bed_of(4, furnish=heads)
    *givers, listener = bed.sites
    bed.sign("oneshot", *HEADS)
    assert bed.work()["inference_sites"] == [listener]
    bed.require_the_same("oneshot", *HEADS)
    head = load_file(bed.run(listener) / "sites" / listener / "shared.safetensors")
    assert head["n_sites"] == 3 and not head["released"].any()
    assert not bed.study(listener).ledger_path(listener).exists()
    assert all(len(charged(bed.study(site), site)) == 1 for site in givers)


@pytest.mark.parametrize("bed_of", [*ROADS, "MPI"], indirect=True)
def test_released_class_statistics_are_synced_at_no_charge(bed_of, request):
    """An inference-only site gets them too, and all have the heads of the same files; over a folder one is killed."""
    bed, settings = bed_of(4, furnish=heads), [*HEADS, "privacy.sigma=2.0", "train.from_released=true"]
    *members, _ = bed.sites
    for site in members:
        release_statistics(bed.study(site), site=site, pipeline_name=bed.pipeline, overrides=settings)
    if request.node.callspec.params["bed_of"] == "MPI":
        _train_as_ranks(bed, settings)
    else:
        bed.jobs[1]["kill"] = {"where": "_train_sites", "round": 0}  # with the statistics of all, and resumes with them
        bed.sign("oneshot", *settings)
        assert list(bed.work()["statistics"]) == members
    given = {"method": "oneshot", "pipeline_name": bed.pipeline, "backend": "local"}
    for site in bed.sites:
        study, run = bed.study(site), bed.run(site)
        for one in members:
            assert study.release_path(one).read_bytes() == bed.study(one).release_path(one).read_bytes()
        by_files = train(study, overrides=[*INSECURE, *settings], **given)
        assert digests(study.root / by_files["run"], site) == digests(run, site) != {}
        assert len(charged(study, site)) == (site in members)


def _train_as_ranks(bed, settings):
    """Run each site as an MPI rank with its own study."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [launch.find_mpiexec(), "--oversubscribe", "--bind-to", "none"]
    for k, site in enumerate(bed.sites):
        command += [":"] * (k > 0) + ["-n", "1", "--wdir", str(bed.root / site), sys.executable, "-m", "wsi_fl"]
        command += ["train", "--method", "oneshot", "--json", *words]
    given = {"capture_output": True, "text": True, "timeout": 240, "env": launch.rank_environment(4)}
    done = subprocess.run(command, check=False, **given)
    assert done.returncode == 0, done.stderr[-3000:]
