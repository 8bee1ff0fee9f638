"""Settings of plugins are read, checked, written and documented like built-in ones."""

import pytest
from conftest import refused

from wsi_fl.study import pipeline as pipelines
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.reference import find_keys
from wsi_fl.study.toml import Section, dump_toml, find_clash, read_setting, settings_key


class Halo(Section):
    """The halo of an extension."""

    width_px: int = settings_key(3, ge=1, needs={"train.balance": "it weighs halos"})
    """How wide a halo is."""


def add_sections(monkeypatch, **sections):
    """Add sections as an installed plugin does."""
    real = pipelines.load_entries
    monkeypatch.setattr(pipelines, "load_entries", lambda group: real(group) | sections)
    pipelines.pipeline_model.cache_clear()


@pytest.fixture
def study(tmp_path, monkeypatch):
    add_sections(monkeypatch, halo=Halo)
    for name in ("pipelines", "sites"):
        (tmp_path / name).mkdir()
    (tmp_path / "pipelines/p.toml").write_text("[halo]\nwidth_px = 5\n")
    yield Study(tmp_path)
    pipelines.pipeline_model.cache_clear()


def test_a_plugin_section_is_registered_under_its_name(study, tmp_path):
    pipeline = study.load_pipeline("p")
    assert pipeline.find_section(Halo) == Halo(width_px=5) and read_setting(pipeline, "halo.width_px") == 5
    (tmp_path / "config.toml").write_text(dump_toml(pipeline))
    assert load_run_pipeline(tmp_path / "config.toml") == pipeline
    assert study.load_pipeline("p", ["halo.width_px=7"]).find_section(Halo).width_px == 7
    refused(lambda: study.load_pipeline("p", ["halo.width_px=0"]), "halo.width_px = 0")
    refused(lambda: study.load_pipeline("p", ["halo.wide=2"]), "unknown key 'halo.wide'", "width_px")
    refused(lambda: study.load_pipeline("p", ["hallo.width_px=2"]), "unknown key 'hallo'")
    assert find_keys("halo.width_px")[0]["meaning"] == "How wide a halo is."
    assert find_clash(pipeline, ()) == "halo.width_px = 5 needs train.balance: it weighs halos"


def test_a_pipeline_made_without_a_section_has_its_defaults_and_no_section_is_replaced(study, monkeypatch):
    assert Pipeline().find_section(Halo) == Halo() and read_setting(Pipeline(), "halo.width_px") is None
    add_sections(monkeypatch, train=Halo)
    with pytest.raises(ValueError, match="section of every pipeline"):
        pipeline_model()
