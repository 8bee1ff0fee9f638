"""Training in this process and reading of the written tables, for tests of commands."""

import csv
import json
from contextlib import contextmanager

import pytest
from conftest import metrics, same
from safetensors.torch import load_file

from wsi_fl.stages.training.train import resume_run, train


def trained(study, method, *overrides):
    """Train in this process and return the summary."""
    return train(study, method=method, overrides=overrides, backend="local")


def run_of(study, method, *overrides):
    """Train in this process and return the folder of the run."""
    return study.root / trained(study, method, *overrides)["run"]


def csv_rows(path):
    """Return the rows of a table by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def answers(run, site):
    """Return the predictions of a run for the test examples of a site."""
    return [row for row in csv_rows(run / "sites" / site / "predictions.csv") if row["selected"] == "True"]


def of_site(run, site, name):
    """Return a document of a site from a run."""
    return json.loads((run / "sites" / site / f"{name}.json").read_text())


def assert_resumes(study, method, *overrides, interruption, whole=None):
    """Interrupt a run and resume it: it ends as `whole`, by default another run with these settings; return both."""
    whole = whole or run_of(study, method, *overrides)
    with interruption:
        trained(study, method, *overrides)
    resumed = study.root / resume_run(study, sorted(study.runs_path.glob("0*"))[-1].name, backend="local")["run"]
    names = "sites/*/*.safetensors"
    files, others = (sorted(path.relative_to(run) for path in run.glob(names)) for run in (whole, resumed))
    assert resumed != whole and files == others
    for file in files:
        assert same(load_file(whole / file), load_file(resumed / file)), file
    for site in {file.parts[1] for file in files}:
        assert [line["round"] for line in metrics(resumed, site)] == [line["round"] for line in metrics(whole, site)]
        accounts = [of_site(run, site, "ledger") for run in (whole, resumed)]
        assert accounts[0]["steps"] == accounts[1]["steps"] and accounts[0]["epsilon"] == accounts[1]["epsilon"]
        if (whole / "sites" / site / "prediction_model.json").exists():
            assert of_site(whole, site, "prediction_model") == of_site(resumed, site, "prediction_model")
    return whole, resumed


@contextmanager
def dying(module, name, nth):
    """Let the process die in the nth call of a function."""
    real, calls = getattr(module, name), []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, dies)
        yield
