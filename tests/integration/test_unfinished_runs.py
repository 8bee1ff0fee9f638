"""Tests of `train` started again: it goes on with the unfinished run of its settings, and no round is charged twice."""

import json
import os
import random
import signal
from functools import partial
from multiprocessing import get_context

import pytest
from conftest import interrupted_after, metrics, model, nightly, pair, refused, same, write_store
from file_changes import edit
from training_runs import of_site, run_of, trained

from wsi_fl.privacy.accounting import epsilon, plan_mechanism
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.training import train as stage
from wsi_fl.stages.training import unfinished_runs
from wsi_fl.types import WsiFlError

study = pair

SITES = ("S0", "S1")
SEEDED = ("train.eval_every=10", "privacy.insecure_seed=3")


def again(study, *overrides, **options):
    """Train once more; return the number of the run and of its rounds."""
    summary = stage.train(study, method="proxyfl", overrides=overrides, backend="local", **options)
    return int(summary["run"].split("/")[1][:5]), summary["sites"][0]["rounds"]


def charged_rounds(study, site):
    """The rounds with a charge on a site's ledger, by the run's name, as the file has them."""
    rounds = {}
    for line in map(json.loads, study.ledger_path(site).read_text().splitlines()):
        if line.get("mechanism"):
            rounds.setdefault(line["run"].split()[0], set()).add(line["round"])
    return rounds


def killed(study, moment, *overrides):
    """Kill a training at the moment-th file that it writes; return whether it lived so long."""

    def work():
        written = []

        def sync(_):
            written.append(1)
            if len(written) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = sync
        trained(study, "proxyfl", *overrides)

    job = get_context("fork").Process(target=work)
    job.start()
    job.join(60)
    assert job.exitcode in (0, -signal.SIGKILL)
    return job.exitcode != 0


@pytest.mark.parametrize(("rounds", "kills", "most"), [(3, 2, 20), *nightly((10, 20, 22))])
def test_a_training_killed_at_drawn_moments_and_started_again_is_one_run_with_one_charge_a_round(
    study, rounds, kills, most
):
    chance, overrides, numbers = random.Random(kills), (f"train.rounds={rounds}", *SEEDED), [*range(1, rounds + 1)]
    for _ in range(kills):
        assert killed(study, chance.randint(1, most), *overrides)
    run = run_of(study, "proxyfl", *overrides)
    whole = run_of(study, "proxyfl", *overrides)  # a finished one is trained anew
    cost = pytest.approx(epsilon([plan_mechanism(36, 18, rounds, 1.4, 0.7)], 1e-5))
    for site in SITES:
        assert charged_rounds(study, site) == {run.name: {*numbers}, whole.name: {*numbers}}
        assert [line["round"] for line in metrics(run, site)] == numbers
        assert [of_site(one, site, "ledger")["epsilon"] for one in (run, whole)] == [cost, cost]
        for role in ("private", "proxy"):
            assert same(model(run, site, role), model(whole, site, role))


@pytest.fixture
def interrupted(study):
    """A study with a run of three rounds that was interrupted in its second."""
    with interrupted_after(3):
        trained(study, "proxyfl", "train.rounds=3")
    return study


def test_train_goes_on_with_an_unfinished_run_and_says_so(interrupted, capsys):
    assert again(interrupted, "train.rounds=3") == (1, 3)
    told = capsys.readouterr().err
    assert "goes on with 00001-proxyfl-small, round 2 of 3; --new starts another run, which is charged" in told
    assert again(interrupted, "train.rounds=3") == (2, 3)  # a finished one is trained anew
    assert "00001" not in capsys.readouterr().err


def test_a_new_run_beside_an_unfinished_one_is_told_to_be_charged_in_addition(interrupted, capsys):
    assert again(interrupted, "train.rounds=3", resume=False) == (2, 3)
    assert (
        "00001-proxyfl-small of these settings stays unfinished, round 2 of 3; its 2 rounds" in capsys.readouterr().err
    )
    assert again(interrupted, "train.rounds=3") == (1, 3)
    assert [*charged_rounds(interrupted, "S0").values()] == [{1, 2, 3}] * 2


CHANGES = {
    "settings": lambda study: ("train.seed=7",),
    "site file": lambda study: edit(study.site_path("S1"), more="max_epsilon = 40.0\n"),
    "store": lambda study: write_store(study, "S1", seed=9),
    "sites": lambda study: ("sites=['S1', 'S0']",),
    "edited run": lambda study: edit(next(study.runs_path.glob("0*/config.toml")), "rounds = 3", "rounds = 4"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=[*CHANGES])
def test_a_run_of_other_settings_or_data_is_left_alone_and_named_with_its_charge(interrupted, change, capsys):
    more = change(interrupted) or ()
    assert again(interrupted, "train.rounds=3", *more) == (2, 3)
    told = capsys.readouterr().err
    assert "unfinished, with other settings, stores or versions: 00001-proxyfl-small (charged for 2 rounds)" in told
    assert "`wsi-fl train --resume 00001-proxyfl-small` would go on" in told
    assert max(charged_rounds(interrupted, "S0")["00001-proxyfl-small"]) == 2


def test_a_run_that_another_version_began_is_not_gone_on_with(interrupted, monkeypatch, capsys):
    monkeypatch.setattr(unfinished_runs, "collect_versions", lambda: {"torch": "9.9"})
    assert again(interrupted, "train.rounds=3") == (2, 3)
    assert "stores or versions: 00001-proxyfl-small (charged for 2 rounds)" in capsys.readouterr().err


def test_a_run_along_a_graph_that_was_edited_since_is_not_gone_on_with(study):
    graph, settings = study.root / "graph.json", ("train.rounds=3", "topology.graph=graph.json")
    there_and_back = [["S0", "S1"], ["S1", "S0"]]
    graph.write_text(json.dumps({"rounds": [there_and_back]}))
    with interrupted_after(3):
        trained(study, "proxyfl", *settings)
    graph.write_text(json.dumps({"rounds": [there_and_back, []]}))
    assert again(study, *settings)[0] == 2


def test_a_damaged_unfinished_run_does_not_keep_others_from_training(interrupted):
    edit(next(interrupted.runs_path.glob("0*/sites/S1/store.json")), "{", "torn")
    assert again(interrupted, "train.rounds=3") == (2, 3)
    edit(next(interrupted.runs_path.glob("00001*/manifest.json")), "{", "torn")
    with interrupted_after(3):
        again(interrupted, "train.rounds=3")
    assert stage.resume_series(interrupted, "00003") is None  # as for any run without a series


def test_of_several_unfinished_runs_the_newest_goes_on(interrupted):
    with interrupted_after(3):
        again(interrupted, "train.rounds=3", resume=False)
    assert again(interrupted, "train.rounds=3") == (2, 3)


def test_a_second_command_neither_goes_on_with_a_run_at_work_nor_begins_another(study, monkeypatch):
    def begin_again(*_):
        refused(
            partial(again, study), "00001-proxyfl-small", "at work", "start another run with --new", error=WsiFlError
        )

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_start_run", begin_again)
        stage.train(study, method="proxyfl", backend="local")
    assert again(study) == (1, 2)
    assert not RunFolder(study.runs_path / "00001-proxyfl-small").is_at_work()


def test_an_interrupted_series_started_again_trains_the_rest(study, capsys):
    options = {"seeds": 3, "method": "regular", "overrides": ["train.rounds=1"], "backend": "local"}
    with interrupted_after(4):  # in the second run
        stage.train_series(study, **options)
    runs = [run["run"] for run in stage.train_series(study, **options)["runs"]]
    assert runs == [f"runs/0000{k}-regular-small" for k in (1, 2, 3)]
    assert "goes on with the series of 00001-regular-small, 1 of 3 runs done" in capsys.readouterr().err
