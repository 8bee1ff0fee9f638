"""Tests of a hospital without MPI, GPU and partner: what commands propose to it, refuse, and do without ranks."""

import sys

import pytest
from conftest import REAL, make_study, refused
from file_changes import site_file
from test_error_advice import parse_stated_command

from wsi_fl.cli import training
from wsi_fl.stages import doctor
from wsi_fl.stages.prepare.slide_lists import next_commands
from wsi_fl.stages.runtime.hints import join_commands
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training import checks, launch
from wsi_fl.stages.training import train as stage
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import find_shipped_folder
from wsi_fl.types import WsiFlError

SCOPE = {"site": "S0", "pipeline_name": None, "overrides": []}
RELEASE = "wsi-fl statistics --site S0 --set model.projection=projection.safetensors"


@pytest.fixture
def hospital(tmp_path):
    return make_study(tmp_path / "study", n_sites=1, site_extra=REAL)


@pytest.fixture
def no_mpi(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


def use_pipeline(study, name):
    """Replace the pipelines of a study by a shipped one."""
    (study.root / "pipelines" / "small.toml").unlink()
    text = (find_shipped_folder("pipelines") / f"{name}.toml").read_text()
    (study.root / "pipelines" / f"{name}.toml").write_text(text)


def test_a_real_hospital_with_features_is_told_to_release_statistics_and_what_that_costs(hospital):
    use_pipeline(hospital, "features")
    steps = next_commands(hospital, "mosaics", form="trident", **SCOPE)
    assert steps == ["wsi-fl projection --format trident --from PUBLIC", RELEASE]
    for step in steps:
        parse_stated_command(step)
    text = join_commands(steps)
    assert text.startswith(" && ".join(steps)) and "spends ε" in text and "--dry-run" in text
    given = SCOPE | {"overrides": ["model.projection=p.safetensors"]}
    assert next_commands(hospital, "mosaics", **given) == [RELEASE.replace("projection.safe", "p.safe")]
    site = site_file(hospital, "S0")
    site.write_text(site.read_text().replace("real = true", "real = false"))
    assert next_commands(hospital, "mosaics", **SCOPE) == ["wsi-fl train --method regular"]
    (hospital.root / "sites" / "S1.toml").write_text('name = "S1"\nreal = false\n')
    assert next_commands(hospital, "mosaics", **SCOPE) == ["wsi-fl train --method oneshot"]


@pytest.mark.parametrize("data", ["patches", "features"])
def test_a_real_hospital_with_another_pipeline_is_told_to_approve_a_plan(hospital, data):
    assert next_commands(hospital, data, **SCOPE) == ["wsi-fl federation approve PLAN --kit KIT"]


def test_a_lone_real_hospital_is_not_charged_for_an_exchange_with_nobody(hospital):
    words = ("wsi-fl statistics --site S0", "--method regular", "wsi-fl federation approve")
    refused(lambda: train(hospital, method="proxyfl"), "takes part alone", *words)
    refused(lambda: train(hospital, method="fedavg", backend="local"), *words)
    assert not hospital.ledger_path("S0").exists() and not hospital.runs_path.exists()
    pipeline = hospital.load_pipeline("small")
    for method, is_preview in (("regular", False), ("proxyfl", True)):
        with RunContext.create(hospital, pipeline, method) as context:
            checks.check_run(context, "local", is_preview=is_preview)
    (hospital.root / "sites" / "S1.toml").write_text(f'name = "S1"\n{REAL}\n')
    with RunContext.create(hospital, pipeline, "proxyfl") as context:
        checks.check_run(context, "mpi", stores=False)


def test_train_takes_the_method_in_the_first_line_of_the_pipeline(hospital, wsi_fl, monkeypatch):
    asked = []
    monkeypatch.setattr(stage, "train", lambda study, method, **options: asked.append(method))
    assert wsi_fl("train", cwd=hospital.root).returncode in (0, None)
    use_pipeline(hospital, "features")
    done = wsi_fl("train", cwd=hospital.root)
    assert "--method oneshot, as in the first line of the pipeline's file" in done.stderr
    wsi_fl("train", "--method", "fedavg", cwd=hospital.root)
    assert asked == ["proxyfl", "oneshot", "fedavg"] and training.DEFAULT_METHOD == "proxyfl"


def test_one_site_trains_in_this_process_without_mpi(tmp_path, no_mpi):
    study = make_study(tmp_path / "study", n_sites=1)
    summary = train(study, method="regular", overrides=["train.rounds=1"])
    assert summary["sites"][0]["rounds"] == 1 and not (study.root / summary["run"] / "mpi.log").exists()
    study = make_study(tmp_path / "two", n_sites=2)
    refused(lambda: train(study, method="proxyfl"), "mpiexec was not found", error=WsiFlError)


def test_doctor_calls_a_missing_mpi_no_failure_and_a_broken_one_a_failure(no_mpi, monkeypatch, tmp_path):
    assert doctor._check_mpi().startswith("none; needed only to train several sites on this machine")
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nexit 3\n")
    launcher.chmod(0o755)
    assert launch.locate_mpiexec() == str(launcher)
    refused(doctor._check_mpi, "two ranks do not work together", error=WsiFlError)
