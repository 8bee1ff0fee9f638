"""Released class statistics tell whose features differ from whose, by the golden vectors of their headers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import refused, write_features
from test_oneshot import make_hospitals, rows_of
from test_released_statistics import joined, released, sums_at

from wsi_fl.models.golden import project_features
from wsi_fl.system.tensors import load_tensors, save_tensors

ONE, TWO = (project_features(np.random.default_rng(seed).normal(size=(32, 24))) for seed in (1, 2))
ROUNDED = tuple(round(number, 1) for number in ONE)
NEW = {"size_px", "mpp", "golden"}
"""Keys that earlier versions did not write."""


@pytest.fixture
def study(tmp_path):
    return make_hospitals(tmp_path / "study")


def extract(study, site, golden, size_px=8):
    patients = [f"p{k // 3}" for k in range(100)]
    splits = ["train"] * 60 + ["test"] * 40
    write_features(study, site, *rows_of(100, 3), patients, splits, golden=golden, size_px=size_px)


def release(study, **golden):
    """Release the statistics of sites with golden vectors, and keep the stores of S0 and S2 alone."""
    for site, vectors in golden.items():
        extract(study, site, vectors)
        released(study, site)
    shutil.rmtree(study.store_path("S1").parent)


def as_earlier(study, site):
    """Write the file of a release as earlier versions did; return its bytes."""
    for path in filter(Path.exists, (study.local_release_path(site), study.release_path(site))):
        tensors, document = load_tensors(path, "release")
        save_tensors(path, tensors, {key: document[key] for key in document if key not in NEW})
    return study.release_path(site).read_bytes()


def test_a_release_has_the_golden_vectors_of_its_features(study):
    extract(study, "S0", ONE)
    released(study)
    header = sums_at(study.release_path("S0")).header
    assert tuple(header.golden) == ONE and (header.size_px, header.mpp) == (8, 0.5)


def test_statistics_of_the_same_features_are_used_and_those_of_another_preprocessing_refused(study):
    release(study, S0=ONE, S1=ROUNDED)
    assert [row["site"] for row in joined(study)["sites"]] == ["S0", "S2"]
    extract(study, "S0", TWO)
    refused(lambda: joined(study), "sites disagree: the store of S0 has features 1", "% apart as those of the golden")
    study.release_path("S1").unlink()
    refused(
        lambda: joined(study), "the store of S0 has features 1", "patches (other weights or preprocessing), S0 the same"
    )
    refused(lambda: released(study), "the store of S0", "S0 the same", "another release spends ε again")


def test_two_hospitals_whose_features_differ_are_told_where_the_reader_has_no_vectors(study):
    release(study, S0=ONE, S1=TWO)
    extract(study, "S0", ())
    refused(lambda: joined(study), "sites disagree: S1 has features", "% apart", "the others the same")


def test_another_field_of_view_is_refused_unless_the_settings_allow_it(study):
    release(study, S1=ONE)
    extract(study, "S0", ONE, size_px=16)
    extract(study, "S2", ONE, size_px=16)
    refused(lambda: joined(study), "S1 has 4 µm (8 px at 0.5 µm/px) as the field of view of its patches")
    joined(study, "train.any_patch_size=true")


def test_a_file_of_an_earlier_version_hides_no_other_field_of_view(study):
    for site in ("S0", "S1"):
        extract(study, site, ONE)
        released(study, site)
    shutil.rmtree(study.store_path("S1").parent)
    as_earlier(study, "S0")
    joined(study)
    extract(study, "S2", ONE, size_px=16)
    refused(lambda: joined(study), "(8 px at 0.5 µm/px) as the field of view of its patches")


def test_files_of_earlier_versions_stay_valid_and_are_written_again_byte_for_byte(study):
    extract(study, "S0", ONE)
    released(study)
    release(study, S1=TWO)
    before = as_earlier(study, "S0")
    study.release_path("S0").unlink()
    assert not released(study)["spent"] and study.release_path("S0").read_bytes() == before
    as_earlier(study, "S1")
    joined(study)
