"""Training in this process and reading of the written tables, for tests of commands."""

import csv
import json
from contextlib import contextmanager

import pytest

from wsi_fl.stages.training.train import train


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
