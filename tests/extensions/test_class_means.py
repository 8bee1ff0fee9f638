"""The page of what class statistics say: the nearest public patches, the noise in words, and what is refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from browser import CHROMIUM, browser
from conftest import make_study, refused, write_features, write_store
from file_changes import make_real
from test_oneshot import HEADS, D

from wsi_fl.oneshot import class_means_page as module
from wsi_fl.oneshot.class_means import ClassMean, unpack_class_means
from wsi_fl.oneshot.class_means_page import show_class_means
from wsi_fl.oneshot.projection import random_projection
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.released_statistics import read_statistics
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.types import WsiFlError

ENCODER = "tiny sha256:0"
SMALL = [*HEADS, "privacy.sigma=0.3"]
PLANTED = {"healthy": 2, "tumor": 17}
"""Rows of the public store of which the hospital's patches are near copies."""


def encode(pixels):
    weights = np.random.default_rng(7).normal(size=(16 * 16 * 3, D))
    return ((pixels.reshape(len(pixels), -1) / 255 - 0.5) @ weights).astype(np.float32)


def public_store(study):
    return study.store_path("S1")


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of hospital S0, whose patches resemble two of the public store S1: 12 healthy ones, 48 of tumour."""
    made = make_study(tmp_path / "study", n_sites=2)
    monkeypatch.setattr(module, "load_encoder", lambda *_: SimpleNamespace(label=ENCODER))
    monkeypatch.setattr(module, "encode_batches", lambda batches, _: encode(np.concatenate([*batches])))
    with PatchStore(public_store(made)) as store:
        x = encode(store.read(np.array([*PLANTED.values()])))
    labels = np.repeat([0, 1], (12, 48))
    rows = x[labels] + np.random.default_rng(1).normal(scale=0.1, size=(60, D))
    write_features(made, "S0", rows, labels, [f"p{k}" for k in range(60)], ["train"] * 60)
    return made


def show(study, *overrides, sources=None, **options):
    paths = [public_store(study)] if sources is None else sources
    settings = options.pop("settings", SMALL)
    out = study.root / "page.html"
    return show_class_means(study, paths, site="S0", out=out, overrides=[*settings, *overrides], **options), out


def release(study, *overrides):
    return release_statistics(study, site="S0", overrides=overrides or SMALL)["sites"][0]


def places_of(study):
    with PatchStore(public_store(study)) as store:
        table = store.table
        return {name: (str(table.slide[k]), tuple(table.xy_l0[k].tolist())) for name, k in PLANTED.items()}


def nearest_of(document):
    return {
        row["class"]: (row["nearest"][0]["slide"], tuple(row["nearest"][0]["xy_l0"])) for row in document["classes"]
    }


@pytest.mark.parametrize(("unit", "noun"), [("row", "patch"), ("patient", "patient")])
def test_the_nearest_public_patches_are_the_planted_ones_and_counts_are_those_of_the_classes(study, unit, noun):
    row = release(study, *SMALL, f"privacy.unit={unit}")
    document, page = show(study, n_patches=4)
    assert nearest_of(document) == places_of(study)
    for one, n in zip(document["classes"], (12, 48), strict=True):
        assert abs(one["count"] - n) < 4 * one["count_sd"] < 6 and not one["hidden"]
        assert [len(one["nearest"]), *map(len, one["with_other_noise"])] == [4] * 4
        similarities = [patch["similarity"] for patch in one["nearest"]]
        assert similarities == sorted(similarities, reverse=True) and similarities[0] > 0.9
    assert document["epsilon"] == row["epsilon"] and document["file"] == "statistics/S0.safetensors"
    assert document["sources"] == {"patches.h5": 48}
    text = page.read_text("utf-8")
    assert "Not released" not in text and text.count("<img") == 2 * 4 * 4
    assert f"per {noun} (guaranteed)" in text and ("The unit is a patch" in text) == (unit == "row")
    assert "<code>statistics/S0.safetensors</code>" in text


def test_means_and_noise_are_those_of_the_rows_whatever_the_weights_of_classes(study):
    release(study)
    statistics, projection = read_statistics(study.release_path("S0"), "s"), random_projection(D, 128)
    means = unpack_class_means(statistics, projection, "s")
    assert statistics.vector[-2] < 0.5 * statistics.vector[-1]  # the rare class has a smaller weight
    preview = module.preview_statistics(study, load(study), study.load_site("S0"))
    exact = unpack_class_means(preview, projection, "s", is_exact=True)
    for noisy, mean, n in zip(means, exact, (12, 48), strict=True):
        assert mean.count == pytest.approx(n, abs=1e-3)
        assert mean.noise_sd == pytest.approx(0.3 / n * 1.044, rel=1e-3)  # of sums with a share of the norm
        error = noisy.mean * noisy.count / n - mean.mean
        assert 0.5 < np.linalg.norm(error) / (mean.noise_sd * D**0.5) < 1.7


def load(study):
    return study.load_pipeline(study.pipeline_name(None), SMALL)


def test_before_a_release_the_page_shows_what_would_leave_and_charges_nothing(study):
    before, page = show(study)
    assert nearest_of(before) == places_of(study) and before["file"] is None
    assert not study.ledger_path("S0").exists() and not study.release_path("S0").exists()
    assert not study.local_release_path("S0").exists()
    assert "must not leave the hospital" in page.read_text("utf-8")
    assert before["epsilon"] == pytest.approx(release(study)["epsilon"])
    assert [row["count"] for row in before["classes"]] == [12, 48]
    study.release_path("S0").unlink()  # the copy beside the store remains
    assert show(study)[0]["file"] == "stores/S0/statistics.safetensors"


def test_a_released_file_is_shown_where_nothing_of_its_hospital_is(study, monkeypatch):
    release(study)
    shutil.rmtree(study.store_path("S0").parent)
    (study.root / "sites" / "S0.toml").unlink()
    monkeypatch.setattr(module, "preview_statistics", lambda *_: pytest.fail("rows were read"))
    assert nearest_of(show(study)[0]) == places_of(study)
    study.release_path("S0").unlink()
    refused(lambda: show(study), "no statistics of site S0 yet", error=WsiFlError)


def test_noise_that_hides_a_class_or_its_mean_is_said(study):
    release(study, *HEADS, "privacy.sigma=6")
    document, page = show(study)
    assert document["classes"][0]["hidden"] and not document["classes"][0]["nearest"]
    assert "The noise hides whether S0 has" in page.read_text("utf-8")
    for noise, words in (
        (0.0, "no noise"),
        (0.1, "about 0.20 of"),
        (0.1, "little"),
        (0.3, "noticeable"),
        (0.6, "larger"),
    ):
        assert words in ClassMean("a", np.zeros(4), 1.0, noise, 9.0, 1.0).describe_noise()
    assert "larger" in ClassMean("a", np.zeros(4), 0.0, 0.1, 9.0, 1.0).describe_noise()


def test_public_patches_unlike_the_class_are_said_to_tell_nothing(study, monkeypatch):
    release(study)
    assert "tell nothing" not in show(study)[1].read_text("utf-8")
    other = np.random.default_rng(3).normal(size=D).astype(np.float32)
    monkeypatch.setattr(module, "encode_batches", lambda batches, _: np.tile(other, (len(next(batches)), 1)))
    assert show(study)[1].read_text("utf-8").count("no tissue like this average") == 2
    rows = np.random.default_rng(0).normal(size=(400, 90, 32))
    largest = (rows[..., 0] / np.linalg.norm(rows, axis=2)).max(1)
    assert module.chance_similarity(90, 32) == pytest.approx(np.median(largest), abs=0.01)


def test_the_length_of_a_mean_is_estimated_without_its_noise(study):
    exact = [row["noise_ratio"] for row in show(study)[0]["classes"]]
    noisy = []
    for _ in range(20):
        release_statistics(study, site="S0", overrides=SMALL, repeat=True)
        noisy.append([row["noise_ratio"] for row in show(study, n_patches=1)[0]["classes"]])
    np.testing.assert_allclose(np.mean(noisy, 0), exact, rtol=0.1)


def test_sources_that_are_not_public_and_what_does_not_match_are_refused(study, tmp_path):
    release(study)
    refused(lambda: show(study, "model.projection=5"), "another projection than model.projection")
    write_store(study, "X", seed=3)
    moved = shutil.move(study.store_path("X").parent, tmp_path / "public") / "patches.h5"
    refused(lambda: show(study, sources=[moved]), "a store that names patients", "--public")
    assert show(study, sources=[moved], public=True)[0]["sources"] == {"patches.h5": 48}
    make_real(study, "S1")
    refused(lambda: show(study), "lies in the stores of real site S1")
    (empty := tmp_path / "empty").mkdir()
    (empty / "readme.txt").write_text("nothing")
    refused(lambda: show(study, sources=[empty]), "no slide, picture or patch store", error=WsiFlError)
    refused(lambda: show(study, sources=[study.features_path("S0")]), "features.h5", error=WsiFlError)


def test_another_encoder_is_refused(study, monkeypatch):
    release(study)
    monkeypatch.setattr(module, "load_encoder", lambda *_: SimpleNamespace(label="other sha256:1"))
    refused(lambda: show(study), "features.encoder: other sha256:1", ENCODER)


def test_the_command_prints_one_document(study, wsi_fl):
    settings = [part for text in SMALL for part in ("--set", text)]
    done = wsi_fl("class-means", "--site", "S0", "--from", public_store(study), *settings, "--json", cwd=study.root)
    assert done.returncode in (0, None), done.stderr
    assert json.loads(done.stdout)["page"] == "class-means.html" and (study.root / "class-means.html").exists()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH nor in CHROMIUM: the page is not looked at")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_without_scrolling_sideways_and_asks_for_nothing(study, tmp_path, width):
    release(study)
    path = show(study)[1]
    with browser(tmp_path / "profile") as page:
        page.size(width, 3000)
        page.goto(path.as_uri())
        count = page.until("document.readyState === 'complete' && document.images.length")
        assert count == 48 and page.run("[...document.images].every(one => one.naturalWidth > 0)")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert [url for url in page.asked if not url.startswith("data:")] == [path.as_uri()] and not page.said
