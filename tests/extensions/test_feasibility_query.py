"""Feasibility queries: noisy counts of patients by declared values, charged once, signed and collected."""

import json

import numpy as np
import pytest
from conftest import make_study, refused
from federation_fixtures import Federation
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.hospitals.plans.feasibility import (
    _MIN_PATIENTS,
    _add_noise,
    _exact_counts,
    collect_responses,
    read_response,
    run_query,
)
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import collect_mechanisms
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.types import WsiFlError

REAL = "real = true\nmax_epsilon = 1.0\ndelta = 1e-5"
ASKED = {"grade": ["low", "high"], "her2": ["pos", "neg"]}


def hospital(folder, patients, name="S0", said=REAL):
    """A study with one site, whose table has the given rows of (patient, grade, her2)."""
    study = make_study(folder, n_sites=0)
    (folder / "sites" / f"{name}.toml").write_text(f'name = "{name}"\nlabels = "slides.csv"\n{said}\n')
    rows = [f"s{k},{','.join(line)}" for k, line in enumerate(patients)]
    (folder / "slides.csv").write_text("\n".join(["slide,patient,grade,her2", *rows]) + "\n")
    return study


def many(low, high):
    """Patients of both grades, all of them HER2 negative."""
    return [(f"p{k}", "low" if k < low else "high", "neg") for k in range(low + high)]


def counted(tmp_path, patients):
    study = hospital(tmp_path / f"{len(list(tmp_path.iterdir()))}", patients)
    return _exact_counts(study, study.load_site("S0"), ASKED)


def test_a_patient_counts_once_per_column_whatever_its_table_rows_hold(tmp_path):
    patients = [("a", "low", "pos"), ("a", "low", "pos"), ("b", "high", "neg"), ("b", "low", "neg")]
    patients += [("c", "secret", ""), ("d", "low", "neg")]
    assert counted(tmp_path, patients).tolist() == [2, 0, 2, 1, 2, 1]
    refused(lambda: counted(tmp_path, [("", "low", "pos")]), "slides.csv line 2", "names no patient")


def test_the_sensitivity_of_the_counts_is_the_root_of_the_number_of_columns(tmp_path):
    rng, furthest = np.random.default_rng(0), 0.0
    words = np.array(["low", "high", "pos", "neg", "", "else"])
    for _ in range(20):
        lines = [(f"p{rng.integers(6)}", *rng.choice(words, 2)) for _ in range(12)]
        one = counted(tmp_path, [*lines, ("x", "low", "pos"), ("x", "low", str(rng.choice(words)))])
        furthest = max(furthest, float(np.linalg.norm(one - counted(tmp_path, lines))))
    assert furthest == pytest.approx(2**0.5)


def test_the_noise_equals_that_of_the_mechanism_on_the_ledger():
    drawn = _add_noise(np.zeros(1000, np.int64), 5.0, 2**0.5)
    assert drawn.std() == pytest.approx(5 * 2**0.5, rel=0.15) and abs(drawn.mean()) < 1.5
    assert (drawn == np.rint(drawn)).all()


def test_a_query_is_answered_once_and_charged_once(tmp_path, federation):
    study, identity = hospital(tmp_path / "S0", many(80, 60)), federation.identity("S0")
    first = run_query(study, identity, ASKED, epsilon=0.3)
    assert run_query(study, identity, ASKED, epsilon=0.3) == first
    entries = LedgerFile(study.ledger_path("S0")).entries
    assert len(collect_mechanisms(entries)) == 1 and [entry.sending for entry in entries] == [False, True]
    assert epsilon(collect_mechanisms(entries), 1e-5) == pytest.approx(0.3, rel=1e-3) and entries[0].unit == "patient"
    assert list(first["counts"]) == ["grade", "her2"]
    assert list(first["counts"]["grade"]) == ["low", "high", "other"] and "secret" not in json.dumps(first)
    asked, found = [ASKED, {"grade": ["low", "high"]}], []
    run_query(study, identity, asked[1], epsilon=0.3)
    spent = epsilon(collect_mechanisms(LedgerFile(study.ledger_path("S0")).entries), 1e-5)
    assert 0.3 < spent < 0.6
    refused(lambda: run_query(study, identity, ASKED, epsilon=0.95), "above its 1", error=WsiFlError)
    assert epsilon(collect_mechanisms(LedgerFile(study.ledger_path("S0")).entries), 1e-5) == spent
    kept = next((study.root / "federation" / "census").glob("*.json"))
    kept.write_text(kept.read_text().replace('"low": ', '"low": 1'))
    for one in asked:
        try:
            found.append(run_query(study, identity, one, epsilon=0.3))
        except WsiFlError as error:
            assert "lacks its release" in str(error)
    assert len(found) == 1  # the one that was not touched


def test_a_hospital_with_a_new_key_signs_its_counts_again_at_no_charge(tmp_path, federation):
    study, other = hospital(tmp_path / "S0", many(80, 60)), federation.identity("S0")
    first = run_query(study, federation.identity("S0"), ASKED, epsilon=0.3)
    again = run_query(study, other, ASKED, epsilon=0.3)
    assert again["counts"] == first["counts"] and again["certificate"] == other.certificate
    (tmp_path / "S0.json").write_text(json.dumps(again))
    assert read_response(tmp_path / "S0.json", federation.root)["counts"] == first["counts"]
    assert len(collect_mechanisms(LedgerFile(study.ledger_path("S0")).entries)) == 1


def test_an_invalid_query_costs_nothing(tmp_path, federation):
    study, identity = hospital(tmp_path / "S0", many(3, 3)), federation.identity("S0")
    refused(lambda: run_query(study, identity, {"grade": ["low", "low"]}, epsilon=0.1), "each value once")
    refused(lambda: run_query(study, identity, {"grade": [""]}, epsilon=0.1), "grade=low,high")
    refused(lambda: run_query(study, identity, {"none": ["a"]}, epsilon=0.1), "column 'none' is missing")
    assert not study.ledger_path("S0").exists()
    poor = hospital(tmp_path / "poor", many(3, 3), said="real = true")
    refused(lambda: run_query(poor, identity, ASKED, epsilon=0.1), "max_epsilon")


def test_the_coordinator_sees_which_sites_have_labels_and_which_are_inference_only(tmp_path, federation):
    taken, made = [], {"S0": many(400, 400), "S1": many(500, 0), "S2": many(1, 1)}
    for name, patients in made.items():
        study, identity = hospital(tmp_path / name, patients, name), federation.identity(name)
        document = run_query(study, identity, ASKED, epsilon=0.5)
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        taken.append(read_response(tmp_path / f"{name}.json", federation.root))
    grade, her2 = collect_responses(taken)["questions"]
    assert grade["lacks"] == {"S0": [], "S1": ["high"], "S2": ["low", "high"]} and not grade["all"]
    assert grade["receivers"] == ["S2"] and list(grade["expected"]) == ["S0", "S1"]
    assert "0 to 0.03 above local" in grade["expected"]["S0"]
    assert grade["pipeline"].splitlines()[2] == 'classes = ["low", "high"]'
    assert her2["lacks"]["S0"] == ["pos"] and collect_responses(taken[:1])["questions"][0]["all"] is True
    assert collect_responses([taken[0], {**taken[1], "counts": {}}])["questions"] == []
    refused(lambda: collect_responses([*taken, taken[1]]), "S1 answered twice")
    other = Federation().root
    refused(lambda: read_response(tmp_path / "S0.json", other), "does not belong to this federation")
    (tmp_path / "S0.json").write_text((tmp_path / "S0.json").read_text().replace('"S0"', '"S1"'))
    refused(lambda: read_response(tmp_path / "S0.json", federation.root), "cannot be used", "not signed")


@pytest.mark.parametrize("second", ["grade=low", "grade=low,high", "her2=pos"])
def test_a_column_that_is_queried_twice_is_kept(tmp_path, federation, second):
    study, kit = hospital(tmp_path / "S0", many(3, 3)), federation.kit(tmp_path / "kit", "S0")
    asked = [word for one in ("grade=low,high", "her2=neg", second) for word in ("--column", one)]
    given = ["federation", "census", "--kit", str(kit), "--study", str(study.root), *asked]
    refused(lambda: CliRunner().invoke(app, given, catch_exceptions=False), "is given twice", second.split("=")[0])
    assert not study.ledger_path("S0").exists()


def test_the_commands_answer_and_collect_queries(tmp_path, wsi_fl, federation):
    files = []
    for name in ("S0", "S1"):
        study = hospital(tmp_path / name, many(300, 300), name)
        kit = federation.kit(tmp_path / "kits" / name, name)
        given = ("federation", "census", "--kit", kit, "--epsilon", "0.5", "--only-enough")
        assert "which column?" in wsi_fl(*given, cwd=study.root).stderr
        done = wsi_fl(*given, "--column", "grade=low,high", "--json", cwd=study.root)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["counts"]["grade"] == {"low": 1.0, "high": 1.0, "other": 0.0}
        files.append(study.root / f"census-{name}.json")
    done = wsi_fl("federation", "census", "--kit", kit, "--collect", *files, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (question,) = json.loads(done.stdout)["questions"]
    assert question["all"] and question["expected"] == {} and _MIN_PATIENTS == 20
    shown = wsi_fl("federation", "census", "--kit", kit, "--collect", *files, cwd=tmp_path).stderr
    assert "all hospitals can answer it" in shown and 'column = "grade"' in shown
