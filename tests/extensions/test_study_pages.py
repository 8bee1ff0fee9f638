"""Tables of the studies' pages are those of their rows, and no row is of another model than its name says."""

import sys
from dataclasses import fields
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.stores.patch_store import PatchStore

sys.path.append(str(Path(__file__).parents[2] / "studies"))
import mpcpa
import pages
import reproduce
import reproduce_tables
import synthesis
import what_leaves

STUDIES = Path(pages.__file__).parent
KEY = ("setting", "seed")


def test_the_tables_of_mpcpa_are_those_of_its_rows():
    page = (STUDIES / "MPCPA.md").read_text("utf-8")
    tables = mpcpa.render_tables(pages.read_rows(mpcpa.ROWS), pages.read_rows(mpcpa.denoisers_path(mpcpa.ROWS)))
    assert pages.fill_page(page, tables) == page, "python studies/mpcpa.py show --page studies/MPCPA.md"


def test_the_tables_of_replay_are_those_of_its_rows():
    page = (STUDIES / "SYNTHESIS.md").read_text("utf-8")
    tables = synthesis.render_tables(pages.read_rows(synthesis.ROWS))
    assert pages.fill_page(page, tables) == page, "python studies/synthesis.py show --page studies/SYNTHESIS.md"


def test_the_table_of_the_ledgers_filter_is_that_of_its_rows():
    pytest.importorskip("nvflare")
    import ledger_filter

    page = (STUDIES.parent / "docs" / "how-to" / "other-federations.md").read_text("utf-8")
    tables = ledger_filter.render_tables(pages.read_rows(ledger_filter.ROWS))
    assert pages.fill_page(page, tables) == page, (
        "python studies/ledger_filter.py show --page docs/how-to/other-federations.md"
    )


def test_the_table_of_what_leaves_is_that_of_its_rows():
    page = (STUDIES / "TRIED.md").read_text("utf-8")
    tables = what_leaves.render_tables(pages.read_rows(what_leaves.ROWS))
    assert pages.fill_page(page, tables) == page, "python studies/what_leaves.py show --page studies/TRIED.md"


def test_the_tables_of_attribution_are_those_of_its_rows():
    import attribution

    page = (STUDIES / "PRIVACY-AUDIT.md").read_text("utf-8")
    tables = attribution.render_tables(pages.read_rows(attribution.ROWS))
    assert pages.fill_page(page, tables) == page, "python studies/attribution.py show --page studies/PRIVACY-AUDIT.md"


def test_the_tables_of_proxyfl_are_those_of_its_rows():
    page = (STUDIES / "REPRODUCE.md").read_text("utf-8")
    tables = reproduce_tables.render_tables(reproduce.read_rows())
    assert pages.fill_page(page, tables) == page, "python studies/reproduce.py page"


def make_row(method, seed, accuracy, settings="", **columns):
    known = dict.fromkeys((field.name for field in fields(reproduce.Row)), "")
    known |= {"data": "mnist", "skew": "random-major:0.8", "pipeline": "mnist", "method": method, "seed": seed}
    known |= {"rounds": 300, "accuracy": accuracy, "settings": settings, "epsilon": "0", "cpu_minutes": "6"}
    return reproduce.Row(**known | columns)


def test_claims_compare_pairs_of_seeds_and_say_what_was_not_shown():
    ours, theirs = (0.7, 0.8, 0.9), (0.6, 0.75, 0.7)
    rows = [make_row("proxyfl", seed, f"{a - 0.1} {a + 0.1}") for seed, a in enumerate(ours)]
    rows += [make_row("fml", seed, str(a)) for seed, a in enumerate(theirs)]
    for settings, seed in product(("", reproduce.NO_DP), (0, 1)):
        rows.append(make_row("regular", seed, "0.3 0.3", settings, macro_accuracy="0.2 0.4"))
    rows.append(make_row("joint", 0, "0.99", rounds=10))  # of another size
    claims = {claim.text: claim.cells[2:] for claim in reproduce_tables.list_claims(rows)}
    interval = ttest_rel(ours, theirs).confidence_interval(0.95)
    assert claims["MNIST: ProxyFL is ahead of FML"] == [
        f"+0.117 ({interval.low:+.3f} to {interval.high:+.3f})",
        "3",
        "not shown",
    ]
    assert claims["MNIST: ProxyFL is ahead of Regular"][1:] == ["2", "not shown"]
    assert claims["MNIST: Joint is ahead of ProxyFL"] == ["–", "0", "not measured"]
    for values, verdict in (((0.1, 0.11, 0.12), "holds"), ((-0.1, -0.11, -0.12), "does not hold")):
        assert reproduce_tables.Difference(values).verdict == verdict
    for settings, cost in (((), "over 100"), ((reproduce.NO_DP,), "–")):
        line = reproduce_tables.render_line(rows, reproduce.Trial("regular", settings), "Regular")
        assert line == ["Regular", "0.300 ± 0.000", "0.300 to 0.300", "0.300 ± 0.100", "–", cost, "2"]


def test_what_has_a_line_is_not_trained_again():
    study = reproduce.STUDIES["mnist"]
    rows = [make_row("proxyfl", 3, "0.5"), make_row("regular", 0, "0.5", settings=reproduce.NO_DP)]
    left = reproduce.list_left(["mnist", "mnist"], rows)
    assert len(left) == len(study) * 5 - 2
    assert (reproduce.Trial("proxyfl"), 3) not in left and (reproduce.Trial("regular"), 0) in left


def test_a_score_of_another_model_than_the_private_one_is_no_row():
    line = {
        "round": 1,
        "own": {"accuracy": 0.5, "macro_accuracy": 0.4},
        "merged": {"accuracy": 0.25, "macro_accuracy": 0.2},
    }
    found = reproduce.read_scores([[line | {"model": "private", "proxy": {"accuracy": 0.1}}], [line]])
    assert found == {
        "accuracy": "0.2500 0.2500",
        "macro_accuracy": "0.2000 0.2000",
        "proxy_accuracy": "0.1000",
        "curve": "1:0.2500",
    }
    with pytest.raises(SystemExit, match="the model scored is local"):
        reproduce.read_scores([[line | {"model": "local"}]])


@pytest.mark.parametrize("method", ["proxyfl", "joint"])
def test_a_run_is_of_its_division_and_joint_has_all_its_images(tmp_path, monkeypatch, method):
    monkeypatch.setattr(reproduce, "N_SITES", 2)
    monkeypatch.setattr(reproduce, "PER_SITE", 30)
    y = np.arange(600) % 10
    x = np.random.default_rng(0).integers(0, 256, (600, 28, 28), np.uint8)
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    trial = reproduce.Trial(method, (reproduce.MLP, "train.batch_size=10"))
    study = reproduce.make_study(tmp_path / "study", tmp_path / "images.npz", trial, 1)
    if method == "joint":
        rows = {name: PatchStore(study.store_path(name)).table for name in ("S1", "S2", "J1")}
        assert len(rows["J1"]) == len(rows["S1"]) + len(rows["S2"]) == 80
    row = reproduce.run_trial(tmp_path / "study", tmp_path / "images.npz", trial, 1, rounds=1)
    assert len(row.values()) == (1 if method == "joint" else 2)
    again = reproduce.run_trial(tmp_path / "study", tmp_path / "images.npz", trial, 1, rounds=1)
    assert (again.accuracy, again.epsilon) == (row.accuracy, row.epsilon)  # its line was lost, its training was not
    n, sites = (60, 1) if method == "joint" else (30, 2)
    mechanism = Mechanism(1.0, 1.0, 10 / n, n // 10)
    assert float(row.epsilon) == pytest.approx(epsilon([mechanism], 1e-3), rel=1e-3)
    assert len(row.accuracy.split()) == sites


def test_rows_are_appended_once_and_replace_those_of_their_key(tmp_path):
    path = tmp_path / "rows" / "some.csv"
    for value in (1, 2):
        pages.append_rows(
            path, [{"setting": "a", "seed": seed, "value": value} for seed in (0, 1)], ("setting", "seed")
        )
    pages.append_rows(path, [{"setting": "b", "seed": 0, "value": 3}], KEY)
    assert [tuple(row.values()) for row in pages.read_rows(path)] == [("a", "0", "2"), ("a", "1", "2"), ("b", "0", "3")]
    with pytest.raises(ValueError, match="has no <!-- rows: t -->"):
        pages.fill_page("a page", {"t": "a table"})


def test_rows_give_accuracies_by_seed_and_differences_paired_by_seed_and_film():
    origin = {"setting": "alike", "date": "2026-01-02", "commit": "abc", "membership": "", "minutes": "1"}
    hits = {"mean A": ("0121", "0120", 2), "aggregated B": ("1011", "1111", 1), "FedAvg": ("1111", "1011", 1)}
    rows = [
        {
            "setting": "alike",
            "seed": str(seed),
            "row": row,
            "models": "2",
            "hits": "2200",
            **origin,
            "accuracy": "0.5000",
        }
        for row in mpcpa.TABLE
        for seed in (0, 1)
        if row not in hits
    ]
    for row, (*seeds, models) in hits.items():
        for seed, digits in enumerate(seeds):
            accuracy = f"{sum(map(int, digits)) / (4 * models):.4f}"
            values = {"seed": str(seed), "row": row, "models": str(models), "hits": digits}
            rows.append({**values, **origin, "accuracy": accuracy, "membership": f"0.{4 + seed}"})
    table, denoisers = mpcpa.render_tables(rows, []).values()
    assert "| A: own images | 0.500, 0.375 | 0.438 | 0.866, 0.814, 0.843 (three clients) | 0.45 |" in table
    assert "| aggregated B − mean A | +0.438 (" in table and "| aggregated B − FedAvg | +0.000 (−" in table
    assert "accuracy on 4 real films | alike: seeds 0, 1 | mean |" in table
    assert "Rows of 2026-01-02, commit abc." in table and "check passed" in denoisers


def test_replay_is_not_scored_by_local_models_that_answer_in_place_of_its_own():
    scores = {name: {"mean": 0.5, "sd": 0.1} for name in ("accuracy", "auroc")}
    document = {"run": "1", "models": {"private": {"merged": scores}}, "parts": {"S1": scores}}
    chosen = synthesis.select_scores(document | {"sites": [{"model": "private"}] * 2})
    assert chosen == {"accuracy": "0.5000", "auroc": "0.5000", "S1": "0.5000", "S1_sd": "0.1000"}
    with pytest.raises(SystemExit, match="other models answer"):
        synthesis.select_scores(document | {"sites": [{"model": "private"}, {"model": "local"}]})


def test_every_test_film_has_one_hospital_and_a_random_class():
    """Films are sorted by class: were the test not shuffled, a hospital's scanner would tell the class."""
    labels = np.repeat([0, 1], 300)
    tests, rest = mpcpa.divide_test(len(labels))
    assert sorted(np.concatenate([*tests, rest]).tolist()) == list(range(600))
    assert all(0.3 < labels[part].mean() < 0.7 for part in tests)
