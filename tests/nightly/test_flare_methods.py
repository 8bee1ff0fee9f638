"""Every method over NVIDIA FLARE makes the models that it makes in one process."""

import json

import numpy as np
import prototype_package
import pytest
import test_mpcpa
from conftest import write_features
from federation_fixtures import needs_flare
from hospitals import INSECURE, Bed, digests
from test_oneshot import HEADS, rows_of
from test_replay import plant

from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.stages.training.train import train
from wsi_fl.system.files import read_lines
from wsi_fl.types import UNLABELLED

pytestmark = [pytest.mark.slow, needs_flare]
NO_DP = ("privacy.enabled=false",)


def heads(study, site, k):
    """Features of three hospitals, and of a fourth inference-only site."""
    x, labels = rows_of(40, k, (0.0, 1.0, 0.5, 0.5)[k])
    patients = [f"p{i // 3}" for i in range(40)]
    if k < 3:
        write_features(study, site, x, labels, patients, ["train"] * 30 + ["test"] * 10)
        return
    with (study.root / "sites" / f"{site}.toml").open("a") as file:
        file.write('role = "receiver"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conftest.CLASSES", UNLABELLED)
        write_features(study, site, x, np.zeros(40, int), patients, ["train"] * 40)


def planted(study, site, k):
    plant(study, site, seed=k)


@pytest.mark.parametrize(
    ("method", "settings", "given"),
    [
        ("fedavg", ("train.rounds=2",), {}),
        ("cwt", ("train.rounds=2",), {}),
        ("avgpush", ("train.rounds=2",), {}),
        ("replay", ("train.rounds=2", *NO_DP), {"furnish": planted, "extra": "[replay]\nbuffer = 10\n"}),
        ("oneshot", tuple(HEADS), {"n": 4, "furnish": heads}),
        ("mpcpa", (), {}),
    ],
)
def test_a_method_over_flare_trains_the_models_of_one_process(tmp_path, method, settings, given):
    if method == "mpcpa":
        given = {"whole": test_mpcpa.make_study(tmp_path / "whole")}
    bed = Bed(tmp_path, **{"n": 3} | given)
    bed.sign(method, *settings)
    with bed.running():
        said = bed.submit("--plan", bed.plan_file())
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    expected = bed.locally(method, *settings)
    for site in bed.sites:
        assert expected[site] and digests(bed.root / site / summary["run"], site) == expected[site]


def test_released_class_statistics_are_synced_over_flare_at_no_charge(tmp_path):
    """An inference-only site gets them too, and all sites have the heads of the same files."""
    bed = Bed(tmp_path, n=4, furnish=heads)
    *members, _ = bed.sites
    settings = [*HEADS, "privacy.sigma=2.0", "train.from_released=true"]
    for site in members:
        release_statistics(bed.study(site), site=site, pipeline_name=bed.pipeline, overrides=settings)
    bed.sign("oneshot", *settings)
    with bed.running():
        said = bed.submit("--plan", bed.plan_file())
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    assert list(summary["statistics"]) == members
    given = {"method": "oneshot", "pipeline_name": bed.pipeline, "backend": "local"}
    for site in bed.sites:
        study = bed.study(site)
        for one in members:
            assert study.release_path(one).read_bytes() == bed.study(one).release_path(one).read_bytes()
        by_files = train(study, overrides=[*INSECURE, *settings], **given)
        assert digests(study.root / by_files["run"], site) == digests(study.root / summary["run"], site) != {}
        ledger = study.ledger_path(site)
        spent = [line for line in (read_lines(ledger) if ledger.exists() else []) if "mechanism" in line]
        assert len(spent) == (site in members)


def test_a_payload_of_another_package_over_flare_gives_the_models_of_one_process(tmp_path):
    with prototype_package.package_installed(tmp_path / "site-packages"):
        bed = Bed(tmp_path, n=3, furnish=prototype_package.furnish)
        bed.sign("prototypes", *prototype_package.SETTINGS)
        with bed.running():
            said = bed.submit("--plan", bed.plan_file())
        assert said.returncode == 0, said.stderr
        summary = json.loads(said.stdout)
        expected = bed.locally("prototypes", *prototype_package.SETTINGS)
    for site in bed.sites:
        assert expected[site] and digests(bed.root / site / summary["run"], site) == expected[site]
