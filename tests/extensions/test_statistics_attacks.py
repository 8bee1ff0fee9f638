"""Membership attacks on class statistics, and refusal of forged class statistics."""

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

from wsi_fl.evidence.attacks import (
    _FALSE_POSITIVE_RATES,
    _NOISE_DRAWS,
    _empirical_tpr,
    _find_most_exposed,
    best_test_tpr,
    compute_mu,
    measure_exposure,
)
from wsi_fl.oneshot.class_statistics import NoisyStatistics, explain_invalid_statistics, head_excluding_site
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import Mechanism, max_tpr
from wsi_fl.privacy.cipher import CipherStream

D = 24


def build_cohort(n=300, planted=3, seed=0):
    """Return class statistics of n similar rows with a few outliers."""
    rng = np.random.default_rng(seed)
    head = SharedHead(2, D, projection=16)
    z = torch.from_numpy(rng.normal(size=(n, 16)) * np.where(np.arange(16) < 12, 0.1, 0.005))
    z[:planted] = torch.eye(16, dtype=torch.float64)[13 : 13 + planted] * 0.999
    y = torch.from_numpy(rng.integers(0, 2, n))
    return torch.stack([head.pack_statistics(z[k : k + 1], y[k : k + 1]) for k in range(n)]).numpy(), y.numpy()


def draw_noise(sigma, k, n):
    """Return n draws of the noise of k sums."""
    stream, zeros = CipherStream.from_seed(0), torch.zeros(k, dtype=torch.float64)
    return np.stack([NoisyStatistics(sigma, 1.0, 1).add_noise(zeros, stream).numpy() for _ in range(n)])


def group(tail, attacker, name, rate="0.01"):
    (one,) = (one for one in tail["attackers"][attacker]["groups"] if one["group"] == name)
    return one["found"][rate]


def test_outliers_are_found_in_statistics_without_noise_where_the_average_is_safe():
    parts, y = build_cohort()
    tail = measure_exposure(parts, 0.0, {"class 0": y == 0}, None)
    average, exposed = (group(tail, "population", name)["exact"] for name in ("all", "most exposed 1 %"))
    assert average < 0.05 and exposed > 0.9
    assert set(np.flatnonzero(_find_most_exposed(compute_mu(parts, 0.0, others_known=False)))) == {0, 1, 2}
    assert group(tail, "others", "all")["exact"] == 1.0 and tail["guaranteed"] is None and not tail["beyond"]


def test_the_predicted_power_without_auxiliary_data_matches_the_attack():
    """Others are redrawn; the statistic is that of the likelihood ratio."""
    parts, _ = build_cohort()
    rng = np.random.default_rng(1)
    for noise in (0.0, 1.0):
        mu = compute_mu(parts, noise, others_known=False)
        inverse = np.linalg.pinv(parts.T @ parts + noise**2 * np.eye(parts.shape[1]))
        for k in (0, 50):
            others = np.delete(parts, k, axis=0)
            sums = rng.poisson(1.0, (6000, len(others))) @ others
            sums = sums + noise * rng.normal(size=sums.shape) - others.sum(0)
            scores = sums @ inverse @ parts[k]
            threshold = np.quantile(scores[:3000], 0.9)
            share = (scores[3000:] + parts[k] @ inverse @ parts[k] > threshold).mean()
            assert share == pytest.approx(float(best_test_tpr(mu[k], 0.1)), abs=0.06)


@pytest.mark.parametrize("sigma", [0.5, 3.7])
def test_attacks_on_noisy_statistics_stay_within_the_guarantee(sigma, monkeypatch):
    monkeypatch.setattr("wsi_fl.evidence.attacks._NOISE_DRAWS", 600)
    parts, y = build_cohort()
    noise = iter(draw_noise(sigma, parts.shape[1], 600))
    tail = measure_exposure(parts, sigma, {"class 1": y == 1}, lambda: next(noise))
    assert not tail["beyond"]
    for rate in _FALSE_POSITIVE_RATES:
        promised = max_tpr([Mechanism(sigma, 1.0, 1.0, 1)], rate)
        assert tail["guaranteed"][f"{rate:g}"] == pytest.approx(promised)
        for attacker in ("others", "population"):
            for name in ("all", "most exposed 1 %", "class 1"):
                assert group(tail, attacker, name, f"{rate:g}")["exact"] <= promised * (1 + 1e-9)
    exposed = group(tail, "others", "most exposed 1 %")
    assert exposed["exact"] > 0.9 * tail["guaranteed"]["0.01"]
    assert exposed["interval"][0] <= exposed["exact"] <= exposed["interval"][1]
    average = group(tail, "others", "all")["exact"]
    assert exposed["exact"] / average > (2 if sigma < 1 else 1.2)  # which the average does not show


def test_half_the_guaranteed_noise_is_detected():
    parts, _ = build_cohort()
    noise = iter(np.random.default_rng(0).normal(size=(_NOISE_DRAWS, parts.shape[1])))
    assert "most exposed 1 %" in measure_exposure(parts, 2.0, {}, lambda: next(noise))["beyond"]


def test_redraws_agree_with_the_closed_form():
    parts, _ = build_cohort()
    noise = np.random.default_rng(0).normal(size=(_NOISE_DRAWS, parts.shape[1]))
    shares = _empirical_tpr(parts, noise, 1.0, 0.01)
    exact = best_test_tpr(compute_mu(parts, 1.0), 0.01)
    off = np.abs(shares - exact) / np.sqrt(exact * (1 - exact) / (_NOISE_DRAWS // 2))
    assert off.max() < 6 and np.corrcoef(shares, exact)[0, 1] > 0.5


def build_statistics(n=60, sigma=2.0, *, rows=True, seed=0):
    """Return (head, its released statistics, exact sums) of a hospital of n rows of both classes."""
    rng, each = np.random.default_rng(seed), 1 if rows else 3
    head = SharedHead(2, D, projection=16, patients=not rows)
    x = torch.from_numpy(rng.normal(size=(n * each, D)).astype(np.float32))
    y, who = torch.from_numpy(rng.integers(0, 2, n * each)), torch.arange(n * each) // each
    exact = NoisyStatistics(sigma, 1.0, n, "row" if rows else "patient").clip_statistics(
        head, head.embed_rows(x), y, who
    )
    return head, release_statistics(head, exact, sigma, torch.Generator().manual_seed(seed)), exact


def release_statistics(head, exact, sigma, chance):
    noisy = exact + sigma * torch.randn(len(exact), dtype=torch.float64, generator=chance)
    head.set_noisy_statistics(exact, *head.weight_by_precision(noisy, sigma**2) if sigma else (exact, 0.0))
    return head.sums.detach().clone()


@pytest.mark.parametrize(("n", "sigma", "rows"), [(60, 2.0, True), (400, 0.5, True), (40, 2.0, False)])
def test_honest_class_statistics_are_refused_at_the_stated_rate(n, sigma, rows):
    head, _, exact = build_statistics(n, sigma, rows=rows)
    chance = torch.Generator().manual_seed(1)
    letters = [release_statistics(head, exact, sigma, chance) for _ in range(500)]
    refused = sum(bool(explain_invalid_statistics(head.layout, one, n, sigma, rows=rows, rate=0.01)) for one in letters)
    least = binom.ppf(1e-4, 500, 0.008) if rows else 0
    assert least <= refused <= binom.ppf(1 - 1e-4, 500, 0.01)
    assert not any(explain_invalid_statistics(head.layout, one, n, sigma, rows=rows) for one in letters[:100])


@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_forged_class_statistics_are_refused(sigma):
    head, letter, _ = build_statistics(sigma=sigma)
    assert explain_invalid_statistics(head.layout, letter, 60, sigma) == ""
    flipped = torch.cat([letter[:-2].view(2, -1).flip(0).flatten(), letter[-2:].flip(0)])
    # labels may be wrong anywhere, and are bounded by n
    assert explain_invalid_statistics(head.layout, flipped, 60, sigma) == ""
    forged = torch.cat([1000 * flipped[:-2], flipped[-2:]])
    assert explain_invalid_statistics(head.layout, forged, 60, sigma)
    one = letter.clone()
    one[:16] *= 1000  # sums alone, where nobody knows n
    assert "longer than its count" in explain_invalid_statistics(head.layout, one)
    more = letter.clone()
    more.view(-1)[[16, 33]] += 60.0
    reason = explain_invalid_statistics(head.layout, more, 60, sigma)
    assert "announced" in reason or "long" in reason
    louder = letter.clone()
    louder[-2:] = 4 * louder[-2:] + 1
    assert "noise has a deviation" in explain_invalid_statistics(head.layout, louder, 60, sigma)


def test_accepted_statistics_move_the_sum_by_at_most_their_rows_and_noise():
    head, letter, _ = build_statistics()
    worst_case = torch.zeros_like(letter)
    worst_case[0], worst_case[16] = 57.0, 17.0  # all rows of one class, in one direction
    worst_case[-2:] = 4.0
    for scale in (1.0, 1.3, 2.0, 1000.0):
        if not explain_invalid_statistics(head.layout, torch.cat([scale * worst_case[:-2], worst_case[-2:]]), 60, 2.0):
            assert scale * float(worst_case[:-2].norm()) < 60 + 2 * (norm.isf(1e-7) + np.sqrt(34)) * 1.5
    assert not explain_invalid_statistics(head.layout, worst_case, 60, 2.0)


def test_a_head_without_the_statistics_of_one_site_is_that_of_the_other_sites():
    heads = [build_statistics(seed=k)[0] for k in range(3)]
    SharedHead.combine(heads)
    left = head_excluding_site(heads[0], heads[2].released)
    SharedHead.combine(heads[:2])
    heads[0].clear_local_statistics()
    for one, other in zip(left.solve_head(), heads[0].solve_head(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
