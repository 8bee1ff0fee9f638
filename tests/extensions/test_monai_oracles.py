"""MONAI as a judge: its schedulers of diffusion, its distances of features, its lesion FROC."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import shapely
import torch

from wsi_fl.evidence.lesion_froc import compute_sensitivities, find_lesions, match_detections
from wsi_fl.slides.patching.outline_placement import rasterize_area
from wsi_fl.synthesis import copying_evidence, ddpm
from wsi_fl.synthesis.ddpm import DdpmShape, DdpmState, Sampling, UNet, draw_images
from wsi_fl.synthesis.keys import Ddpm
from wsi_fl.synthesis.training_state import quantize_images


@pytest.fixture(scope="module")
def monai():
    """MONAI's parts by name, imported outside of the tests' time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from monai import metrics
        from monai.apps.pathology import utils
        from monai.networks import schedulers
        from monai.networks.nets.diffusion_model_unet import get_timestep_embedding

        return SimpleNamespace(
            metrics=metrics, pathology=utils, schedulers=schedulers, embed_times=get_timestep_embedding
        )


def scheduler_of(kind, shape):
    """MONAI's scheduler: of a chain of 1000 with its own variances, which are Ho et al.'s."""
    ends = {name: shape.diffusion[name] for name in ("beta_start", "beta_end") if shape.chain != 1000}
    return kind(num_train_timesteps=shape.chain, schedule="linear_beta", **ends)


@pytest.mark.parametrize("chain", [1000, 40])
def test_noise_is_added_as_monai_adds_it(monai, chain):
    shape = DdpmShape(8, 1, 2, (8, 16), chain=chain)
    state = DdpmState(shape, Ddpm(), device=torch.device("cpu"))
    judge = scheduler_of(monai.schedulers.DDPMScheduler, shape)
    torch.testing.assert_close(state.noising.alphas_cumprod, judge.alphas_cumprod)
    x, noise = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0, chain - 1, 16).long()
    torch.testing.assert_close(state.noising.add_noise(x, noise, t), judge.add_noise(x, noise, t))


def test_times_are_embedded_as_in_monais_network(monai):
    t = torch.tensor([0, 7, 500, 999])
    judge = monai.embed_times(t, 8)
    torch.testing.assert_close(UNet(DdpmShape(8, 1, 2, (8, 16))).time_proj(t), judge)


@pytest.mark.parametrize(("sampler", "chain", "steps"), [("ddpm", 20, 20), ("ddim", 1000, 10)])
def test_images_are_those_that_monais_schedulers_draw_with_our_network(monai, sampler, chain, steps):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        denoiser = UNet(DdpmShape(8, 1, 2, (8, 16), chain=chain)).eval()
    labels = np.array([0, 1, 0, 1])
    (found,) = draw_images(denoiser, labels, Sampling(sampler, steps), seed=5)
    kind = {"ddpm": monai.schedulers.DDPMScheduler, "ddim": monai.schedulers.DDIMScheduler}[sampler]
    judge, random = scheduler_of(kind, denoiser.shape), torch.Generator().manual_seed(ddpm._batch_seed(5, 0))
    judge.set_timesteps(steps)
    x = torch.randn((4, 1, 8, 8), generator=random)
    with torch.no_grad():
        for t in range(chain - 1, -1, -chain // steps):
            noise = denoiser(x, torch.tensor(t), torch.from_numpy(labels)).sample
            x, _ = judge.step(noise, t, x, **({"generator": random} if sampler == "ddpm" else {}))
    assert found.float().std() > 20
    assert (found.int() - quantize_images(x).int()).abs().max() <= 1


def test_distances_of_features_are_monais(monai):
    a, b = (np.random.default_rng(k).normal(0.1 * k, 1 + 0.2 * k, (60, 5)) for k in range(2))
    x, y = map(torch.from_numpy, (a, b))
    assert copying_evidence.frechet_distance(a, b) == pytest.approx(float(monai.metrics.FIDMetric()(x, y)), rel=1e-4)

    def features_of_kernel(rows):
        """The features whose products are (u·v/5 + 1)³."""
        rows = torch.cat([rows / 5**0.5, torch.ones(len(rows), 1, dtype=rows.dtype)], dim=1)
        return torch.einsum("ni,nj,nk->nijk", rows, rows, rows).flatten(1)

    squared = float(monai.metrics.MMDMetric(features_of_kernel)(x, y))
    assert copying_evidence.kernel_distance(a, b) == pytest.approx(squared, rel=1e-4)


def test_lesion_froc_is_monais_where_a_lesion_is_missed(monai):
    """And not where all are found: MONAI leaves out the lowest threshold, and a perfect detector scores 0."""
    rng, mpp, downsample = np.random.default_rng(1), 0.25, 8
    ours, theirs = [], []
    for _ in range(6):
        circles = [shapely.Point(*rng.uniform(500, 5500, 2)).buffer(rng.uniform(250, 800)) for _ in range(4)]
        tumor = shapely.union_all(circles)
        points, p = rng.uniform(0, 6000, (30, 2)), rng.integers(1, 64, 30) / 64
        mask = rasterize_area(tumor, (750, 750), downsample).astype(np.uint8)
        labels = monai.pathology.compute_multi_instance_mask(mask, 75 / (2 * mpp * downsample))
        cells = monai.pathology.compute_isolated_tumor_cells(labels, 275 / (mpp * downsample))
        x, y = points.T
        theirs.append(monai.metrics.compute_fp_tp_probs(p, y, x, labels, cells, resolution_level=3))
        lesions = find_lesions(tumor, mpp)
        ours.append(match_detections(points, p, lesions))
        assert (len(lesions.areas), int(lesions.isolated.sum())) == (labels.max(), len(cells))
    false, found, counts = zip(*theirs, strict=True)
    lesions = np.concatenate([slide.lesions for slide in ours])
    assert 0 < (lesions > 0).sum() < len(lesions) == sum(counts)
    judge = monai.metrics.compute_froc_curve_data(np.concatenate(false), np.concatenate(found), len(lesions), 6)
    expected = monai.metrics.compute_froc_score(*judge, (0.25, 0.5, 1, 2, 4, 8))
    sensitivities = compute_sensitivities(lesions, np.concatenate([slide.false_positives for slide in ours]), 6)
    assert 0.1 < expected < 0.9 and sensitivities.mean() == pytest.approx(expected)
    perfect = np.array([0.75, 0.75]), np.array([])
    judge = monai.metrics.compute_froc_curve_data(*perfect[::-1], 2, 1)
    assert compute_sensitivities(*perfect, 1).mean() == 1 and monai.metrics.compute_froc_score(*judge, (1,)) == 0
