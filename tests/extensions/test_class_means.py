"""The page of what class statistics say: the nearest public patches, the noise in words, and what is refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from browser import CHROMIUM, browser
from conftest import make_study, nightly, refused, write_features, write_store
from file_changes import edit, make_real
from test_oneshot import HEADS, D

from wsi_fl.oneshot import class_means as module
from wsi_fl.oneshot.class_means import ClassMean, show_class_means, unpack_class_means
from wsi_fl.oneshot.projection import (
    ProjectionOrigin,
    ProjectionSource,
    fit_projection,
    random_projection,
    write_projection,
)
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.released_statistics import read_statistics
from wsi_fl.stages.site import encoders
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.types import WsiFlError

SETTINGS = [*HEADS, "privacy.sigma=0.3", "features.encoder=tiny"]
SIZES = (12, 48)
PUBLIC = {"size_px": 8, "mpp": 0.5}  # as `write_features` has it
PLANTED = [2, 17]
"""Rows of the public store of which the hospital's healthy patches and those of tumour are near copies."""


def encode(pixels):
    weights = np.random.default_rng(7).normal(size=(8 * 8 * 3, D))
    return ((pixels.reshape(len(pixels), -1) / 255 - 0.5) @ weights).astype(np.float32)


def replace_encoder(monkeypatch, label="tiny sha256:0", encode=encode):
    monkeypatch.setattr(encoders, "load_encoder", lambda *_: SimpleNamespace(label=label))
    monkeypatch.setattr(module, "encode_batches", lambda batches, _: encode(next(batches)))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of hospital S0, whose patches resemble two of the public store S1."""
    made = make_study(tmp_path / "study", n_sites=2, **PUBLIC)
    replace_encoder(monkeypatch)
    with PatchStore(made.store_path("S1")) as store:
        x = encode(store.read(np.array(PLANTED)))
    labels = np.repeat([0, 1], SIZES)
    rows = x[labels] + np.random.default_rng(1).normal(scale=0.1, size=(60, D))
    write_features(made, "S0", rows, labels, [f"p{k}" for k in range(60)], ["train"] * 60)
    return made


def show(study, *overrides, sources=None, **options):
    """Return the document and the text of the page."""
    page = study.root / "page.html"
    settings = {"site": "S0", "out": page, "overrides": [*SETTINGS, *overrides]}
    document = show_class_means(study, sources or [study.store_path("S1")], **settings, **options)
    return document, page.read_text("utf-8")


def release(study, *overrides, **options):
    return release_statistics(study, site="S0", overrides=[*SETTINGS, *overrides], **options)["sites"][0]


def nearest_rows(document):
    return [row["nearest"][0]["row"] for row in document["classes"]]


@pytest.mark.parametrize(("unit", "noun"), [("row", "patch"), ("patient", "patient")])
def test_the_nearest_public_patches_are_the_planted_ones_and_counts_are_those_of_the_classes(study, unit, noun):
    row = release(study, f"privacy.unit={unit}")
    document, text = show(study)
    assert nearest_rows(document) == PLANTED
    for found, n in zip(document["classes"], SIZES, strict=True):
        assert abs(found["count"] - n) < 4 * found["count_sd"] < 6 and not found["hidden"]
        assert [len(found["nearest"]), *map(len, found["with_other_noise"])] == [6] * 4
        similarities = [patch["similarity"] for patch in found["nearest"]]
        assert similarities == sorted(similarities, reverse=True) and similarities[0] > 0.9
    assert (document["epsilon"], document["file"]) == (row["epsilon"], "statistics/S0.safetensors")
    assert document["sources"] == {"stores/S1/patches.h5": 48} and text.count("<img") == 2 * 4 * 6
    assert f"per {noun} (guaranteed)" in text and ("The unit is a patch" in text) == (unit == "row")
    assert "Not released" not in text and "tell nothing" not in text


def test_means_and_noise_are_those_of_the_rows_whatever_the_weights_of_classes(study):
    projection = random_projection(D, 128)
    preview = module.preview_statistics(study, study.load_pipeline("small", SETTINGS), study.load_site("S0"))
    exact, ratios = unpack_class_means(preview, projection, "s", is_exact=True), []
    for _ in range(20):
        release(study, repeat=True)
        statistics = read_statistics(study.release_path("S0"), "s")
        assert statistics.vector[-2] < 0.8 * statistics.vector[-1]  # the rare class has a smaller weight
        means = unpack_class_means(statistics, projection, "s")
        ratios.append([mean.noise_ratio for mean in means])
        for noisy, mean, n in zip(means, exact, SIZES, strict=True):
            error = noisy.mean * noisy.count / n - mean.mean
            assert 0.4 < np.linalg.norm(error) / (mean.noise_sd * D**0.5) < 1.7
    for mean, n in zip(exact, SIZES, strict=True):
        assert mean.count == pytest.approx(n) and mean.noise_sd == pytest.approx(0.3 / n * 1.09**0.5, rel=1e-3)
    np.testing.assert_allclose(np.mean(ratios, 0), [mean.noise_ratio for mean in exact], rtol=0.1)


def test_before_a_release_the_page_shows_what_would_leave_and_charges_nothing(study):
    before, text = show(study)
    assert nearest_rows(before) == PLANTED and before["file"] is None
    assert not any(path("S0").exists() for path in (study.ledger_path, study.release_path, study.local_release_path))
    assert "must not leave the hospital" in text and [row["count"] for row in before["classes"]] == [*SIZES]
    assert before["epsilon"] == pytest.approx(release(study)["epsilon"])
    study.release_path("S0").unlink()
    assert show(study)[0]["file"] == "stores/S0/statistics.safetensors"  # the copy beside the store


def test_what_may_not_be_released_is_not_shown_as_what_would_leave(study):
    make_real(study, "S0", says="real = true\nmax_epsilon = 3\ndelta = 1e-5\n")
    refused(lambda: show(study), "above its 3", error=WsiFlError)  # of ε at σ = 0.3
    exact = "privacy.enabled=false"
    refused(lambda: show(study, exact), "a model without differential privacy may not leave", error=WsiFlError)
    edit(study.site_path("S0"), more='allow = ["model"]\n')
    text = show(study, exact)[1]
    assert "that of a class with one patch is the features of this patch" in text and "feature of a single" not in text
    assert not study.ledger_path("S0").exists()


def test_a_released_file_is_shown_where_nothing_of_its_hospital_is(study):
    release(study)
    shutil.rmtree(study.store_path("S0").parent)
    (study.root / "sites" / "S0.toml").unlink()
    assert nearest_rows(show(study)[0]) == PLANTED
    study.release_path("S0").unlink()
    refused(lambda: show(study), "no statistics of site S0 yet", error=WsiFlError)


def test_noise_that_hides_a_class_or_its_mean_is_said(study):
    document, text = show(study, "privacy.sigma=6")  # counts ± 41
    assert [row["hidden"] for row in document["classes"]] == [True, False]
    assert [len(row["nearest"]) for row in document["classes"]] == [0, 6]
    assert "The noise hides whether S0 has" in text
    cases = ((1.0, 0.0, "no noise"), (1.0, 0.1, "about 0.20 of"), (1.0, 0.1, "little"), (1.0, 0.3, "by chance"))
    for length, noise, words in (*cases, (1.0, 0.6, "larger"), (0.0, 0.1, "larger")):
        assert words in ClassMean("a", np.zeros(4), length, noise, 9.0, 1.0).describe_noise()


def test_noise_is_not_told_as_distance_from_public_tissue_where_directions_begin_at_none(study):
    release(study)
    document, text = show(study)
    assert document["random_directions"] and "from average public tissue" not in text
    assert text.count("hides more of the class than this says") == 2 and "The directions are random" in text
    assert any("random directions" in line.text for line in module.render_class_lines(document))
    with PatchStore(study.store_path("S1")) as store:
        x = encode(store.read(np.arange(len(store))))
    origin = ProjectionOrigin(encoder="tiny", sources=[ProjectionSource(name="a", rows=len(x), sha256="0" * 64)])
    write_projection(study.root / "p.safetensors", fit_projection(x, origin, 8))
    by_file = "model.projection=p.safetensors"
    release(study, by_file, repeat=True)
    document, text = show(study, by_file)
    assert not document["random_directions"] and "The directions are random" not in text
    assert text.count("from average public tissue") == 2


def test_public_patches_unlike_the_class_are_said_to_tell_nothing(study, monkeypatch):
    release(study)
    other = np.random.default_rng(3).normal(size=D).astype(np.float32)
    replace_encoder(monkeypatch, encode=lambda pixels: np.tile(other, (len(pixels), 1)))
    assert show(study)[1].count("no tissue like this average") == 2
    rows = np.random.default_rng(0).normal(size=(400, 90, 32))
    largest = (rows[..., 0] / np.linalg.norm(rows, axis=2)).max(1)
    assert module.chance_similarity(90, 32) == pytest.approx(np.median(largest), abs=0.01)


def test_sources_that_are_not_public_and_what_does_not_match_are_refused(study, tmp_path, monkeypatch):
    release(study)
    refused(lambda: show(study, "model.projection=5"), "another projection than model.projection")
    write_store(study, "S0", **PUBLIC)
    refused(lambda: show(study, sources=[study.store_path("S0")]), "patches of site S0 itself")
    write_store(study, "X", size_px=16, mpp=0.5)
    refused(lambda: show(study, sources=[study.store_path("X")], public=True), "8 µm wide", "set tile.size_px=8")
    write_store(study, "X", **PUBLIC)
    moved = shutil.move(study.store_path("X").parent, tmp_path / "public") / "patches.h5"
    refused(lambda: show(study, sources=[moved]), "a store that names patients", "--public")
    assert show(study, sources=[moved], public=True)[0]["sources"] == {str(moved): 48}
    make_real(study, "S1")
    refused(lambda: show(study), "lies in the stores of real site S1")
    (empty := tmp_path / "empty").mkdir()
    (empty / "readme.txt").write_text("nothing")
    refused(lambda: show(study, sources=[empty]), "no slide, picture or patch store", error=WsiFlError)
    refused(lambda: show(study, sources=[study.features_path("S0")]), "features.h5", error=WsiFlError)
    replace_encoder(monkeypatch, "other sha256:1")
    refused(lambda: show(study), "features.encoder: other sha256:1", "tiny sha256:0")
    monkeypatch.setattr(encoders, "load_encoder", None)  # no weights are sought for another name
    refused(lambda: show(study, "features.encoder=uni"), "features.encoder: uni, but site S0", "tiny sha256:0")


def test_the_command_prints_one_document(study, wsi_fl):
    settings = [part for text in SETTINGS for part in ("--set", text)]
    source = study.store_path("S1")
    done = wsi_fl("class-means", "--site", "S0", "--from", source, *settings, "--json", cwd=study.root)
    assert json.loads(done.stdout)["page"] == "class-means.html" and (study.root / "class-means.html").exists()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH nor in CHROMIUM: the page is not looked at")
@pytest.mark.parametrize("width", [390, *nightly(1280)])
def test_the_page_opens_without_scrolling_sideways_and_asks_for_nothing(study, tmp_path, width):
    url = (study.root / "page.html").as_uri()
    show(study)
    with browser(tmp_path / "profile") as page:
        page.size(width, 3000)
        page.goto(url)
        assert page.until("document.readyState === 'complete' && document.images.length") == 48
        assert page.run("[...document.images].every(one => one.naturalWidth > 0)")
        assert page.run("document.documentElement.scrollWidth") <= width
    assert [asked for asked in page.asked if not asked.startswith("data:")] == [url] and not page.said
