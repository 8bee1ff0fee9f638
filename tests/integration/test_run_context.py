"""Tests that a stage reads each site file once, opens each store once and closes it at its end."""

from collections import Counter

import pytest
from conftest import make_study

from wsi_fl.federation.comm import LocalComm
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.stages.site import site_data
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.ranks import work_as_rank
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study

ROUND = ["train.rounds=1"]


@pytest.fixture
def stores(monkeypatch):
    """The patch stores that were opened."""
    found, open_store = [], site_data.open_store
    monkeypatch.setattr(site_data, "open_store", lambda *given: found.append(open_store(*given)) or found[-1])
    return found


@pytest.mark.parametrize("method", ["proxyfl", "joint"])
def test_a_rank_and_evaluate_open_each_store_that_they_may_read_once_and_close_it(pair, stores, method):
    summary = train(pair, method=method, overrides=["train.rounds=1"], backend="local")
    run = RunFolder(pair.root / summary["run"])
    for work in (lambda: work_as_rank(pair, run, LocalComm(2), SilentProgress()), lambda: evaluate(pair, run.name)):
        stores.clear()
        work()
        assert Counter(store.meta.site for store in stores) == Counter(["S0", "S1"])
        assert not any(store._file for store in stores)


def test_a_process_opens_no_store_of_another_site_where_all_keep_their_patches(tmp_path, stores):
    study = make_study(tmp_path / "study", site_extra="real = true\nmax_epsilon = 9.0\ndelta = 1e-5")
    party = RunContext.create(study, study.load_pipeline("small"), "proxyfl")
    with party:
        assert not party.may_merge and not stores
        party.open_data("S2")
        assert [store.meta.site for store in stores] == ["S2"]
    assert not stores[0]._file


def test_site_files_are_read_once_and_later_changes_are_ignored(study, monkeypatch):
    read, site = [], Study.load_site
    monkeypatch.setattr(Study, "load_site", lambda self, name: read.append(name) or site(self, name))
    party = RunContext.create(study, study.load_pipeline("small"), "proxyfl")
    (study.root / "sites" / "S1.toml").write_text("no longer TOML")
    assert party.names == ["S0", "S1", "S2"] == read
    assert party.find_site("S1").name == "S1" and party.may_merge
    assert len(read) == 3
