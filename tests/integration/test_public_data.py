"""Tests that projections and starting weights use a real hospital's patients only with permission."""

import os
import shutil

import pytest
from conftest import make_study, refused
from file_changes import edit, make_real, site_file
from test_oneshot import make_hospitals

from wsi_fl.oneshot.build_projection import build_projection
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.public_sources import SourceCheck, require_published
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study


@pytest.fixture
def study(tmp_path):
    study = make_hospitals(tmp_path / "study")
    make_real(study, "S0")
    return study


def renamed_copy(study, tmp_path):
    return shutil.copy(study.features_path("S0"), tmp_path / "public.h5")


def link_from_elsewhere(study, tmp_path):
    (tmp_path / "public.h5").symlink_to(study.features_path("S0"))
    return tmp_path / "public.h5"


def of_another_study(study, tmp_path):
    other = Study(shutil.copytree(study.root, tmp_path / "other"))
    edit(site_file(study, "S0"), "real = true", "real = false")
    return other.features_path("S0")


def of_a_site_whose_file_is_damaged(study, tmp_path):
    site_file(study, "S1").write_text("name =")
    return study.features_path("S1")


def of_an_unknown_site(study, tmp_path):
    moved = shutil.copy(study.features_path("S1"), tmp_path / "public.h5")
    site_file(study, "S1").unlink()
    return moved


SOURCES = [
    lambda study, _: study.features_path("S0"),
    renamed_copy,
    link_from_elsewhere,
    of_another_study,
    of_a_site_whose_file_is_damaged,
    of_an_unknown_site,
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_store_of_a_hospitals_patients_is_public_only_when_declared(study, tmp_path, source):
    path = source(study, tmp_path)
    refused(lambda: SourceCheck(study).require_public(path), str(path), "give public reference slides, or --public")
    refused(lambda: build_projection(study, [path.parent], out=tmp_path / "d.safetensors"), "--public")
    assert not (tmp_path / "d.safetensors").exists()


def test_a_simulated_sites_store_is_public(study):
    SourceCheck(study).require_public(study.features_path("S1"))


def test_slides_that_a_real_site_names_belong_to_it_under_any_name(study, tmp_path):
    slides = tmp_path / "archive"
    slides.mkdir()
    for name in ("a.tif", "b.tif"):
        (slides / name).write_bytes(name.encode())
    edit(site_file(study, "S0"), '"none/*.tif"', f'"{slides}/a*.tif"')
    os.link(slides / "a.tif", tmp_path / "hard.tif")
    (tmp_path / "soft.tif").symlink_to(slides / "a.tif")
    for path in (slides / "a.tif", tmp_path / "hard.tif", tmp_path / "soft.tif"):
        refused(lambda path=path: SourceCheck(study).require_public(path), "is a slide of real site S0", "--public")
    SourceCheck(study).require_public(slides / "b.tif")


def test_a_slide_belongs_to_a_real_site_in_any_unicode_form_of_its_name(study, tmp_path):
    slide = tmp_path / f"Dru{chr(0x308)}se.tif"
    slide.write_bytes(b"slide")
    edit(site_file(study, "S0"), '"none/*.tif"', f'"{tmp_path}/Dr\u00fcse*.tif"')
    refused(lambda: SourceCheck(study).require_public(slide), "is a slide of real site S0")


def test_a_slide_that_is_a_folder_belongs_to_the_site_with_all_its_files(study, tmp_path):
    file = tmp_path / "archive" / "a" / "1.dcm"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(128) + b"DICM")
    picture = tmp_path / "archive" / "public" / "b.tif"
    picture.parent.mkdir()
    picture.write_bytes(b"slide")
    edit(site_file(study, "S0"), '"none/*.tif"', f'"{tmp_path}/archive/*"')
    refused(lambda: SourceCheck(study).require_public(file), "is a slide of real site S0")
    SourceCheck(study).require_public(picture)
    edit(site_file(study, "S0"), "archive/*", "archive/*/*.dcm")
    refused(lambda: SourceCheck(study).require_public(file.parent), "is a slide of real site S0")
    SourceCheck(study).require_public(picture)


@pytest.fixture
def run_of(study):
    """Make a folder of a run of a method with models of S0 and S1."""

    def made(method, enabled=True):
        run = study.runs_path / f"00001-{method}"
        for site in ("S0", "S1"):
            (run / "sites" / site).mkdir(parents=True)
            for role in ("private", "proxy"):
                (run / "sites" / site / f"{role}.safetensors").write_bytes(b"x")
        (run / "config.toml").write_text(f"[privacy]\nenabled = {str(enabled).lower()}\n")
        RunFolder(run).write_manifest({"id": "1", "config_sha256": "", "method": method})
        return run / "sites"

    return made


@pytest.mark.parametrize(
    ("method", "enabled", "role", "free"),
    [
        ("proxyfl", True, "private", False),
        ("proxyfl", True, "proxy", True),
        ("proxyfl", False, "proxy", False),
        ("fedavg", True, "private", True),
        ("fedavg", False, "private", False),
        ("regular", True, "private", False),
        ("no such", True, "proxy", False),
    ],
)
def test_training_starts_from_a_real_sites_model_only_where_it_travelled_with_privacy(
    run_of, method, enabled, role, free
):
    sites = run_of(method, enabled)
    require_published(sites / "S1" / f"{role}.safetensors", "model.weights")
    check = lambda: require_published(sites / "S0" / f"{role}.safetensors", "model.weights")  # noqa: E731
    if free:
        check()
    else:
        refused(check, "model.weights", "real site S0", "privacy.enabled = false")


def test_a_run_refuses_such_weights_before_it_begins(run_of, tmp_path):
    path = run_of("proxyfl") / "S0" / "private.safetensors"
    study, sets = (make_study(tmp_path / "patches", 2), [f"model.weights={path}", "model.private=timm:resnet10t"])
    refused(lambda: train(study, method="regular", overrides=sets), "model.weights", "real site S0")
    assert not list(study.runs_path.glob("*"))
