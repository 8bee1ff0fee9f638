"""Tests of configuration files, overrides and their error messages."""

from __future__ import annotations

import os
import tomllib

import pytest
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.federation.methods import METHODS
from wsi_fl.models import BAG_BUILDERS, IMAGE_BUILDERS, VECTOR_BUILDERS
from wsi_fl.stages.training.checks import list_traits
from wsi_fl.study.folder import Study, find_shipped_folder, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.reference import find_keys, render_reference_page
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import dump_toml, toml_value


@pytest.fixture
def study(tmp_path):
    for name in ("pipelines", "sites"):
        (tmp_path / name).mkdir()
    (tmp_path / "pipelines" / "p.toml").write_text("[train]\nrounds = 3\n")
    for name in ("C1", "C2"):
        (tmp_path / "sites" / f"{name}.toml").write_text(f'name = "{name}"\nslides = "x/*.tif"\n')
    return Study(tmp_path)


MISTAKES = {
    "p": [
        ("[train]\nroundes = 3", ("'train.roundes'", "did you mean 'rounds'", "epochs_per_round")),
        ("[trian]\nrounds = 3", ("'trian'", "did you mean 'train'", "privacy")),
        ("[train]\nrounds = '5'", ("train.rounds", '"5"', "integer")),
        ("[train]\nrounds = true", ("train.rounds", "true", "integer")),
        ("[privacy]\ndelta = 1.5", ("privacy.delta = 1.5", "less than 1")),
        ("[train]\nlr = inf", ("train.lr", "finite")),
        ("[train]\nseed = 2024-01-01", ("train.seed", "integer")),
        ("[privacy]\nmode = 'lax'", ("privacy.mode", '"lax"', "'paper' or 'strict'")),
        ("[predict]\nmodel = 'both'", ("predict.model", "'mean', 'local' or 'ensemble'")),
        ("train = 5", ("train is a section, [train]", "rounds")),
        ("sites = ['C1', 5]", ("sites.1 = 5", "string")),
        ("sites = []", ("sites", "at least 1")),
        ("[train]\nrounds = ", ("not valid TOML", "line 2")),
    ],
    "C1": [
        ("name = 'C1'\nslide = 'x'", ("'slide'", "did you mean 'slides'")),
        ("name = 'C1'\nlayout = 'camelyon'", ("layout", "'camelyon17', 'camelyon16', 'tcga' or 'generic'")),
        ("name = 'C1'\nallow = ['models']", ("allow.0", "'shared', 'scores' or 'private_model'")),
        ("name = 'C1'\nmpp_override = 0", ("mpp_override = 0", "0.01")),
        ("name = 'C1'\nreal = 'false'", ("real", "boolean")),
        *((f'name = "{name}"', ("name",)) for name in ("", "C 1", "../C1", "-C1", "C1\\n")),
    ],
}


@pytest.mark.parametrize(("file", "text", "words"), [(f, *one) for f, rows in MISTAKES.items() for one in rows])
def test_a_mistake_in_a_file_is_one_line(study, file, text, words):
    folder = "pipelines" if file == "p" else "sites"
    (study.root / folder / f"{file}.toml").write_text(text + "\n")
    refused(
        lambda: study.load_pipeline("p") if file == "p" else study.load_site("C1"), f"{folder}/{file}.toml: ", *words
    )


def test_an_unknown_name_is_refused_with_the_known_ones(study):
    refused(lambda: study.load_site("C11"), "unknown site 'C11'", "did you mean 'C1'", "C1, C2")
    refused(lambda: study.load_pipeline("nothing"), "unknown pipeline 'nothing'", "camelyon17", "p")
    refused(lambda: study.load_pipeline("nothing.toml"), "nothing.toml: no such file")
    refused(lambda: study.load_sites(Pipeline(sites=["C1", "C9"])), "unknown site 'C9'")
    refused(lambda: study.load_pipeline("p", ['sites=["C1", "C2", "C1"]']), "listed twice: C1")
    refused(lambda: study.find_run("7"), "no run '7'", "train one first: wsi-fl train")
    (study.root / "sites" / "C1.toml").write_text("name = 'C2'\nslides = 'x'\n")
    refused(lambda: study.load_site("C1"), "sites/C1.toml", "'C2'", "'C1'")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (" train.rounds = 5 ", "train.rounds", 5),
        ("train.lr=1", "train.lr", 1.0),
        ("tile.balance=False", "tile.balance", False),
        ("privacy.mode=paper", "privacy.mode", "paper"),
        ('privacy.mode="paper"', "privacy.mode", "paper"),
        ("train.augment=a=b", "train.augment", "a=b"),
        ('train.augment=["mirror", "quarter_turns"]', "train.augment", ["mirror", "quarter_turns"]),
        ('sites=["C2"]', "sites", ["C2"]),
    ],
)
def test_override_wins_over_the_file(study, override, key, value):
    found = study.load_pipeline("p", ["train.rounds=4", override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_extends_merges_key_by_key(study):
    folder = study.root / "pipelines"
    (folder / "base.toml").write_text("sites = ['C1', 'C2']\n[train]\nrounds = 9\nlr = 0.5\n[tile]\nsize_px = 64\n")
    (folder / "mid.toml").write_text("extends = 'base'\nsites = ['C2']\n[train]\nrounds = 8\n")
    (folder / "top.toml").write_text("extends = 'mid.toml'\n[privacy]\nsigma = 2.0\n")
    top = study.load_pipeline("top", ["train.alpha=0.7"])
    assert (top.sites, top.train.rounds, top.train.lr, top.tile.size_px) == (["C2"], 8, 0.5, 64)
    assert (top.privacy.sigma, top.train.alpha) == (2.0, 0.7)
    assert study.load_pipeline("base").train.rounds == 9


def test_extends_may_name_a_shipped_pipeline_and_the_studys_own_shadows_one(study):
    (study.root / "pipelines" / "own.toml").write_text("extends = 'camelyon17'\n[train]\nrounds = 2\n")
    own, base = study.load_pipeline("own"), study.load_pipeline("camelyon17")
    assert own == base.replace_keys(train={"rounds": 2})
    (study.root / "pipelines" / "camelyon17.toml").write_text("[train]\nrounds = 77\n")
    assert study.load_pipeline("camelyon17").train.rounds == 77


@pytest.mark.parametrize(
    ("base", "words"), [("b", ["extends itself"]), ("a", ["extends itself"]), ("c", ["'c'", "known: "])]
)
def test_a_circular_or_missing_extends_is_refused_in_one_line(study, base, words):
    (study.root / "pipelines" / "a.toml").write_text(f"extends = '{base}'\n")
    (study.root / "pipelines" / "b.toml").write_text("extends = 'a'\n")
    refused(lambda: study.load_pipeline("a"), "pipelines/", "extends", *words)


def test_only_pipeline_is_the_default(study):
    assert study.pipeline_name(None) == "p"
    assert study.pipeline_name("other") == "other"
    (study.root / "pipelines" / "q.toml").write_text("")
    refused(lambda: study.pipeline_name(None), "several pipelines; name one with --pipeline: p, q")
    (study.root / "pipelines" / "camelyon17.toml").write_text("")
    assert study.pipeline_name(None) == "camelyon17"


@pytest.mark.parametrize("path", sorted(find_shipped_folder("pipelines").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_pipeline_is_valid_names_known_models_begins_with_its_command_and_loads_back(study, path, tmp_path):
    pipeline = study.load_pipeline(path.stem)
    assert pipeline == Study(study.root).load_pipeline(str(path))
    of_slides = VECTOR_BUILDERS if pipeline.train.example == "patient" else BAG_BUILDERS
    known = {"patches": IMAGE_BUILDERS, "features": VECTOR_BUILDERS, "mosaics": of_slides}[pipeline.train.data]
    assert {name for name in (pipeline.model.private, pipeline.model.proxy) if "timm:" not in name} <= {*known}
    first = path.read_text(encoding="utf-8").split("\n")[0]
    assert first.startswith("# wsi-fl ") and path.stem in first
    (tmp_path / "config.toml").write_text(dump_toml(pipeline, "# the command"), encoding="utf-8")
    assert load_run_pipeline(tmp_path / "config.toml") == pipeline
    assert (tmp_path / "config.toml").read_text(encoding="utf-8").startswith("# the command\n")


@pytest.mark.parametrize("path", sorted(find_shipped_folder("sites").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_site_file_is_valid_and_loads_back(path):
    site = Study(find_shipped_folder("sites").parent).load_site(path.stem)
    assert site.name == path.stem and SiteFile.model_validate(tomllib.loads(dump_toml(site))) == site


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = st.deferred(lambda: st.booleans() | NUMBERS | TEXT | st.lists(VALUES))


@given(value=VALUES)
def test_toml_values_load_back(value):
    loaded = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert loaded == value and type(loaded) is type(value)


def test_study_is_found_from_a_folder_inside(study, monkeypatch, tmp_path_factory):
    inside = study.root / "runs" / "00001-proxyfl-p" / "sites"
    inside.mkdir(parents=True)
    assert Study.find(inside).root == study.root.resolve()
    monkeypatch.chdir(inside)
    assert Study.find().root == study.root.resolve()
    elsewhere = tmp_path_factory.mktemp("nothing")
    refused(lambda: Study.find(elsewhere), str(elsewhere), "wsi-fl init")


def test_paths_are_relative_to_the_study_and_expand(study, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("ARCHIVE", "/data/c17")
    assert study.resolve("slides/*.tif") == study.root / "slides" / "*.tif"
    assert str(study.resolve("/abs/x")) == "/abs/x"
    assert str(study.resolve("~/x")) == "/home/somebody/x"
    assert str(study.resolve("$ARCHIVE/x")) == str(study.resolve("${ARCHIVE}/x")) == "/data/c17/x"
    assert study.resolve("~nobody-of-that-name/x") == study.root / "~nobody-of-that-name" / "x"
    assert study.relative_path(study.store_path("C1")) == "stores/C1/patches.h5"
    assert study.relative_path(study.root.parent / "x") == os.fspath(study.root.parent / "x")


def test_run_is_found_by_path_name_and_number(study, monkeypatch):
    run = study.runs_path / "00012-proxyfl-p"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    monkeypatch.chdir(study.root)
    for name in ("12", "00012", "00012-proxyfl-p", "runs/00012-proxyfl-p", str(run)):
        assert study.find_run(name) == run, name
    refused(lambda: study.find_run("1"), "no run '1'", "00012-proxyfl-p")
    (study.runs_path / "00013-proxyfl-p").mkdir()
    refused(lambda: study.find_run("13"), "runs/00013-proxyfl-p", "ended before its run began", "delete it")
    refused(lambda: study.find_run("14"), "the last are 00012-proxyfl-p")


def test_a_simulated_site_allows_every_share_and_a_real_one_those_it_lists():
    everything = ("model", "buffer", "generator", "patches", "shared", "scores", "private_model")
    simulated, real = (SiteFile(name="a", **more) for more in ({"real": False}, {"allow": ["model"]}))
    assert [simulated.allows(what) for what in everything] == [True] * 7
    assert [real.allows(what) for what in everything] == [True, *[False] * 6]
    assert simulated.permissions == everything and real.permissions == ("model",)
    said_nothing = SiteFile(name="a")
    assert said_nothing.real and said_nothing.permissions == ()


def test_conditions_of_keys_name_existing_keys_and_are_documented():
    rows = {row["key"]: row for row in find_keys()}
    conditions = {said for row in rows.values() for said in (*row["needs"], *row["excludes"])}
    traits = {trait for method in METHODS.values() for trait in list_traits(method)}
    assert {said.split(" = ")[0] for said in conditions} <= rows.keys() | traits
    assert rows["train.fold"]["needs"] == {"train.folds": "it says how many folds there are"}
    assert "Not with a method without differential privacy: they test the" in render_reference_page()
