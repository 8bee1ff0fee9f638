"""Tables of the studies' pages are those of their rows, and no row is of another model than its name says."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "studies"))
import mpcpa
import pages
import synthesis

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
