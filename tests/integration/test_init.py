"""Tests of `init`: studies from archives and without, and refused options."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from conftest import refused
from test_archive_layouts import camelyon17, touch

from wsi_fl.slides.layouts import read_site
from wsi_fl.stages.prepare.init_study import init_study, render_init_lines
from wsi_fl.stages.prepare.slide_lists import resolve_sources
from wsi_fl.study.folder import Study, find_shipped_folder


@pytest.mark.parametrize(("style", "relative"), [("images", False), ("center", True), ("centre", False)])
def test_study_from_camelyon17_finds_every_slide(tmp_path, style, relative, monkeypatch):
    archive = camelyon17(tmp_path / "the archive [v1]", style)
    monkeypatch.chdir(tmp_path)
    document = init_study(tmp_path / "study", archive=Path("the archive [v1]") if relative else archive)
    assert document["layout"] == "camelyon17" and document["pipelines"] == ["camelyon17"]
    monkeypatch.chdir("/")
    study = Study.find(tmp_path / "study")
    sites = study.load_sites(study.load_pipeline(study.pipeline_name(None)))
    assert [site.name for site in sites] == ["C1", "C2", "C5"] == [row["site"] for row in document["sites"]]
    for site, row in zip(sites, document["sites"], strict=True):
        assert not site.real and site.allows("patches") and site.layout == "camelyon17"
        records, aside = read_site(site.layout, resolve_sources(study, site))
        assert len(records) + len(aside) == row["slides"]
        assert all(r.supervision != "weak" for r in records)
        first = (study.root / "sites" / f"{site.name}.toml").read_text().split("\n")[0]
        assert first.startswith(f"# wsi-fl tile --site {site.name} ")


@pytest.mark.parametrize("has_archive", [True, False])
def test_the_next_command_enters_a_folder_with_a_space(tmp_path, has_archive):
    given = {"archive": camelyon17(tmp_path / "a", "images")} if has_archive else {"names": ["A"]}
    *_, line = render_init_lines(init_study(tmp_path / "my study", **given))
    assert shlex.split(line.text.partition("next: ")[2])[:3] == ["cd", str(tmp_path / "my study"), "&&"]


def test_real_sites_allow_no_share_by_default_and_get_their_first_steps(tmp_path):
    document = init_study(tmp_path / "study", archive=camelyon17(tmp_path / "a", "images"), real=True)
    site = Study(tmp_path / "study").load_site("C1")
    assert site.real and site.permissions == ()
    assert any("camelyon17_pretrained" in str(line) for line in render_init_lines(document))
    assert "camelyon17_pretrained" in {path.stem for path in find_shipped_folder("pipelines").glob("*.toml")}


def test_study_without_an_archive_has_all_pipelines_and_no_site(tmp_path):
    document = init_study(tmp_path / "study")
    assert document["sites"] == [] and document["layout"] is None
    assert document["pipelines"] == sorted(p.stem for p in find_shipped_folder("pipelines").glob("*.toml"))
    study = Study.find(tmp_path / "study")
    assert study.site_names() == []
    for name in document["pipelines"]:
        study.load_pipeline(name)


@pytest.mark.parametrize("name", ["pipelines", "sites"])
def test_a_study_is_never_overwritten(tmp_path, name):
    mine = tmp_path / "study" / name / "mine.toml"
    touch(mine)
    refused(lambda: init_study(tmp_path / "study"), str(tmp_path / "study"), f"{name}/ exists")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [mine]


def test_command_prints_one_document_and_refuses_the_second_time(tmp_path, wsi_fl):
    archive = camelyon17(tmp_path / "a", "center")
    first = wsi_fl("init", "study", "--from", archive, "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert [row["site"] for row in json.loads(first.stdout)["sites"]] == ["C1", "C2", "C5"]
    second = wsi_fl("init", "study", "--from", archive, "--json", cwd=tmp_path)
    assert (second.returncode, second.stdout) == (2, "")
    assert len(second.stderr.strip().split("\n")) == 1 and "exists" in second.stderr


def test_sites_without_an_archive_have_files_to_import_into(tmp_path):
    document = init_study(tmp_path / "s", names=["A", "B"], pipeline="features", real=True)
    assert document["pipelines"] == ["features"] and [row["site"] for row in document["sites"]] == ["A", "B"]
    study = Study(tmp_path / "s")
    site = study.load_site("B")
    assert site.real and site.max_epsilon and not site.slides
    assert study.load_pipeline(study.pipeline_name(None)).train.example == "patient"
    assert any("wsi-fl import --site A" in str(line) for line in render_init_lines(document))
    other = init_study(tmp_path / "t", pipeline="mnist")
    assert (other["pipelines"], other["sites"]) == (["mnist"], [])


@pytest.mark.parametrize(
    "asked", [{"real": True}, {"pipeline": "feature"}, {"names": ["A"], "layout": "tcga"}, {"names": ["a b/c"]}]
)
def test_meaningless_options_create_no_study(tmp_path, asked):
    refused(lambda: init_study(tmp_path / "s", **asked))
    assert not (tmp_path / "s" / "sites").exists()
