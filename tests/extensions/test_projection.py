"""The projection from public reference slides: its components, its file, and refused inputs."""

import contextlib

import numpy as np
import pytest
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.oneshot import projection
from wsi_fl.oneshot.build_projection import ExpectedStatistics
from wsi_fl.oneshot.projection import (
    choose_n_components,
    fit_projection,
    random_projection,
    read_projection,
    write_projection,
)
from wsi_fl.types import WsiFlError

ORIGIN = projection.ProjectionOrigin(
    encoder="tiny sha256:0", sources=[projection.ProjectionSource(name="a.svs", rows=300, sha256="0" * 64)]
)


def rows(n=300, d=20, seed=0):
    """Return features that vary along few directions."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)) @ rng.normal(size=(4, d)) + 0.1 * rng.normal(size=(n, d))
    return x.astype(np.float32)


def test_a_projection_is_the_principal_components_scaled_to_median_length_one():
    from sklearn.decomposition import PCA

    x = rows()
    found = fit_projection(x, ORIGIN, 6)
    known = PCA(6).fit(projection.normalize_rows(x))
    spans = found.components / np.linalg.norm(found.components, axis=0)
    np.testing.assert_allclose(np.abs((spans * known.components_.T).sum(0)), 1, atol=1e-3)
    lengths = np.linalg.norm((projection.normalize_rows(x) - found.mean) @ found.components, axis=1)
    assert np.median(lengths) == pytest.approx(1, abs=1e-4)


def test_a_projection_file_reads_back_with_its_origin(tmp_path):
    found = fit_projection(rows(), ORIGIN, 6)
    write_projection(tmp_path / "d.safetensors", found)
    again = read_projection(tmp_path / "d.safetensors", "d.safetensors")
    assert again.digest == found.digest and again.origin == ORIGIN
    assert fit_projection(rows(seed=1), ORIGIN, 6).digest != found.digest


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_changed_byte_of_a_projection_file_is_noticed(tmp_path_factory, place, byte):
    path = tmp_path_factory.mktemp("d") / "d.safetensors"
    found = fit_projection(rows(), ORIGIN, 6)
    write_projection(path, found)
    whole = bytearray(path.read_bytes())
    whole[place % len(whole)] = byte
    path.write_bytes(whole)
    with contextlib.suppress(WsiFlError):
        assert read_projection(path, "d").digest == found.digest


def test_few_rows_or_one_slide_are_refused_as_public_reference():
    refused(lambda: fit_projection(rows(10), ORIGIN), "10 public rows", "several slides")
    refused(lambda: fit_projection(np.ones((300, 50), np.float32), ORIGIN), "other slides")


def test_random_projections_are_the_same_on_every_machine():
    assert random_projection(1280).digest == random_projection(1280).digest
    assert random_projection(1280, 64).digest != random_projection(1280).digest


def test_more_rows_and_less_noise_need_more_projection_components():
    x = rows(400, 60)
    found = [choose_n_components(x, n, 3.73**2) for n in (50, 400, 800, 10**6)]
    assert found == sorted(found) and found[0] == 16 < found[2] < found[3] == 96
    assert choose_n_components(x, 800, 16 * 3.73**2) < choose_n_components(x, 800, 3.73**2)
    assert choose_n_components(rows(100, 60), 10**6, 1.0) == 50  # of so few public rows
    v = fit_projection(x).covariance.trace() / 32
    assert choose_n_components(x, 800, 3.73**2) == int(9 * (v * 400**2 / 3.73**2) ** (1 / 3))


def test_distributed_noise_of_class_statistics_is_one_share_of_local_noise():
    own, shared = (ExpectedStatistics(800, 16, 1.0, one).noise_variance() for one in (False, True))
    assert own == pytest.approx(16 * 3.73**2, rel=0.01) and own / shared == pytest.approx(15)
