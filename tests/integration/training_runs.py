"""What tests of commands do again and again: train in this process, and read the tables that were written."""

import csv
import json
from contextlib import contextmanager

import pytest

from wsi_fl.stages.training.train import train


def trained(study, method, *overrides):
    """The summary of a run in this process."""
    return train(study, method=method, overrides=overrides, backend="local")


def run_of(study, method, *overrides):
    """The folder of a run in this process."""
    return study.root / trained(study, method, *overrides)["run"]


def csv_rows(path):
    """The rows of a table, by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def answers(run, site):
    """What a run says of the examples that a site tests: the rows that count."""
    return [row for row in csv_rows(run / "sites" / site / "predictions.csv") if row["selected"] == "True"]


def of_site(run, site, name):
    """A document that a run keeps of a site."""
    return json.loads((run / "sites" / site / f"{name}.json").read_text())


@contextmanager
def dying(module, name, nth):
    """Within it the process dies in the nth call."""
    real, calls = getattr(module, name), []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, dies)
        yield
